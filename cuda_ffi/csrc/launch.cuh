// Which kernel runs a call: from shapes and the device alone, never from the lengths, which stay on
// the device.
//
// Measured on an H200 (docs/log.md): a cluster of blocks an item is the fastest while all clusters
// are resident at once and no sequence can be long; one block an item where items are many
// and short; equal ranges for everything else, of small blocks where items are many. What counts is
// bytes in flight: about 128 KB on each multiprocessor, of as many blocks as there is work for,
// since one that begins or ends waits.
#pragma once
#include <algorithm>
#include <atomic>

#include "combine.cuh"
#include "device.h"

namespace jax_flash {

constexpr int kMaxClusterTokens = 16384;  // longer items are cut finer than clusters can
constexpr int kMaxSoloTokens = 4096;      // one block reads these in 20 us, or 70 with two warps
constexpr int kShortTokens = 1024;        // here to begin a block takes as long as to end late

// Lets a kernel use all the shared memory there is; once for each kernel and device.
template <class C>
Status allow_shared_memory(const DeviceFacts& device) {
  static std::atomic<uint64_t> done{0};
  const uint64_t bit = uint64_t(1) << (device.device & 63);
  if (done.load() & bit) return {};
  JF_CHECK(cudaFuncSetAttribute(decode_kernel<C>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                device.smem_bytes));
  done |= bit;
  return {};
}

template <class C>
Status make_maps(const DecodeParams& p, CUtensorMap* key_map, CUtensorMap* value_map) {
  *key_map = *value_map = {};
  if constexpr (C::kTma) {
    JF_RETURN_IF_FAILED(encode_map(p, p.k, p.head_dim, key_map));
    JF_RETURN_IF_FAILED(encode_map(p, p.v, p.value_dim, value_map));
  }
  return {};
}

// The greatest number of clusters of this size that run at once; asked once for each kernel, device
// and size, since the driver takes longer to answer than to launch.
template <class C>
int resident_clusters(const DeviceFacts& device, int parts, int rows, int smem) {
  static std::atomic<int> known[16][kMostParts + 1][C::kRows + 1];  // the answer + 1
  std::atomic<int>& answer = known[device.device & 15][parts][rows];
  int count = answer.load() - 1;
  if (count >= 0) return count;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {(unsigned)parts, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(parts), config.blockDim = dim3(C::kThreads);
  config.dynamicSmemBytes = smem, config.attrs = &attribute, config.numAttrs = 1;
  if (cudaOccupancyMaxActiveClusters(&count, decode_kernel<C>, &config) != cudaSuccess) {
    cudaGetLastError();  // this GPU has none of this size; a launch will say what else is wrong
    count = 0;
  }
  answer = count + 1;
  return count;
}

template <class C>
Status launch_fixed(const DecodeParams& p, Grid grid, int parts, cudaStream_t stream) {
  CUtensorMap key_map, value_map;
  JF_RETURN_IF_FAILED(make_maps<C>(p, &key_map, &value_map));
  grid.parts = parts;
  while (1 << grid.parts_shift < parts) ++grid.parts_shift;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {(unsigned)parts, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(grid.row_tiles * parts, p.kv_heads, p.batch);
  config.blockDim = dim3(C::kThreads);
  config.dynamicSmemBytes = C::smem_bytes(p, grid.rows, parts), config.stream = stream;
  config.attrs = &attribute, config.numAttrs = parts > 1 ? 1 : 0;
  JF_CHECK(cudaLaunchKernelEx(&config, decode_kernel<C>, p, grid, key_map, value_map));
  return {};
}

template <class C>
Status launch_balanced(const DecodeParams& p, Grid grid, int max_chunks,
                       const DeviceFacts& device, cudaStream_t stream) {
  CUtensorMap key_map, value_map;
  JF_RETURN_IF_FAILED(make_maps<C>(p, &key_map, &value_map));
  grid.parts = 1;
  const int smem = C::smem_bytes(p, grid.rows, 1);
  int resident;
  JF_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, decode_kernel<C>, C::kThreads,
                                                         smem));
  if (resident == 0) return {"decode", "the batch's tables do not fit into shared memory"};
  const int items = p.batch * p.kv_heads;
  const int64_t at_once = (int64_t)resident * device.multiprocessors / grid.row_tiles;
  const int64_t useful = ((int64_t)items * max_chunks + C::kWarps - 1) / C::kWarps;
  const int64_t room = p.num_partials / ((int64_t)2 * grid.row_tiles * grid.rows * C::kPitch);
  int blocks = (int)std::max<int64_t>(1, std::min<int64_t>({at_once, useful, room}));
  // Cuts at the ends of items are free: equal lengths have no others if one number is a multiple of
  // the other.
  for (int fewer = blocks; fewer >= blocks * 9 / 10 && fewer > 0; --fewer) {
    if (fewer % items == 0 || items % fewer == 0) {
      blocks = fewer;
      break;
    }
  }
  decode_kernel<C><<<dim3(grid.row_tiles, blocks), C::kThreads, smem, stream>>>(p, grid, key_map,
                                                                              value_map);
  JF_CHECK(cudaGetLastError());
  if (blocks == 1) return {};
  // An early start (programmatic launch) gained nothing where these run: behind the long ones.
  combine_kernel<C><<<dim3(blocks - 1, grid.row_tiles), 128, Ranges::bytes(p.batch), stream>>>(
      p, grid, blocks);
  JF_CHECK(cudaGetLastError());
  return {};
}

// Tokens that a query can see at most.
inline int visible_capacity(const DecodeParams& p) {
  const bool is_bounded = p.window_left >= 0 && (p.is_causal || p.window_right >= 0);
  const int64_t right = p.is_causal ? 0 : std::max(p.window_right, 0);
  const int64_t window = (int64_t)p.window_left + right + p.q_len + kChunk;
  return is_bounded ? (int)std::min<int64_t>(p.capacity, window) : p.capacity;
}

// Solo: one small block an item, several on a multiprocessor. Cluster: 1, 2, 4 or 8 large ones.
// Ranges: equal ranges, and those of small blocks.
template <class Solo, class Cluster, class Ranges_, class SmallRanges>
Status dispatch(const DecodeParams& p, const DeviceFacts& device, cudaStream_t stream) {
  Grid grid{};
  grid.row_tiles = (p.rows() + Ranges_::kRows - 1) / Ranges_::kRows;
  grid.rows = std::min(p.rows(), Ranges_::kRows);
  const int items = p.batch * p.kv_heads * grid.row_tiles;
  const int tokens = visible_capacity(p), max_chunks = (tokens + kChunk - 1) / kChunk;
  const int64_t cache_bytes = (int64_t)p.batch * tokens * p.kv_heads *
                              (p.head_dim + p.value_dim) * size_of(p.kv_type);
  grid.evict_first = cache_bytes > device.l2_bytes;
  JF_RETURN_IF_FAILED(allow_shared_memory<Solo>(device));
  JF_RETURN_IF_FAILED(allow_shared_memory<Cluster>(device));
  JF_RETURN_IF_FAILED(allow_shared_memory<Ranges_>(device));
  JF_RETURN_IF_FAILED(allow_shared_memory<SmallRanges>(device));
  const bool has_clusters = device.capability >= 90;
  if (p.num_splits > 0) {
    return launch_fixed<Cluster>(p, grid, has_clusters ? p.num_splits : 1, stream);
  }
  const int sms = device.multiprocessors;
  // A single sequence may be long: there is no other whose blocks would wait for it.
  if (has_clusters && (tokens <= kMaxClusterTokens || p.batch == 1)) {
    for (int parts = kMostParts; parts > 1; parts /= 2) {
      if (parts / 2 * Cluster::kWarps >= max_chunks) continue;  // half as many have enough warps
      if (tokens > kMaxClusterTokens && 5 * items * parts < 2 * sms) break;
      const int smem = Cluster::smem_bytes(p, grid.rows, parts);
      if (items <= resident_clusters<Cluster>(device, parts, grid.rows, smem)) {
        return launch_fixed<Cluster>(p, grid, parts, stream);
      }
    }
  }
  if (tokens <= kMaxSoloTokens) {
    // The larger a block, the sooner a long item ends; small ones begin and end behind each other.
    // Items are mostly shorter than their tables: then small blocks are up to 1.7 times faster, and
    // up to 1.1 times slower if all are as long as can be and the last of them run alone.
    const bool is_short = tokens <= kShortTokens, is_one_tile = grid.row_tiles == 1;
    if (items > sms && (is_short || is_one_tile)) return launch_fixed<Solo>(p, grid, 1, stream);
    const bool fills = 2 * items > sms || max_chunks <= Cluster::kWarps;
    if (items <= sms && fills) return launch_fixed<Cluster>(p, grid, 1, stream);
  }
  // While one block merges an item's parts, others on its multiprocessor go on loading.
  if (grid.row_tiles == 1 && items >= SmallRanges::kBlocks * sms) {
    return launch_balanced<SmallRanges>(p, grid, max_chunks, device, stream);
  }
  return launch_balanced<Ranges_>(p, grid, max_chunks, device, stream);
}

constexpr int stage_bytes(int key_dim, int value_dim, int size) {
  return ((key_dim * size + 127) / 128 + (value_dim * size + 127) / 128) * kGroupBytes;
}

constexpr int stages_for(int stage_bytes, int warps, int budget, int most = 4) {
  const int stages = budget / (stage_bytes * warps);
  return stages < 1 ? 1 : stages > most ? most : stages;
}

// One type and one class of head dims; TILES tiles of 8 query rows.
template <class T, class KV, int DK, int DV, int TILES, bool TMA>
Status decode_hopper(const DecodeParams& p, const DeviceFacts& device, cudaStream_t stream) {
  constexpr int kStage = stage_bytes(DK, DV, sizeof(KV)), kWarps = DK > 128 ? 4 : 8;
  constexpr int kMost = TMA ? 6 : 4;  // a gather keeps a flag for every token of every stage
  constexpr int kBlocks = DK > 128 ? 2 : 4, kSoloWarps = DK > 128 ? 4 : 2;
  constexpr int kSoloStages = stages_for(kStage, kSoloWarps, 196608 / kBlocks, kMost);
  using Solo = Config<T, KV, DK, DV, TILES, kSoloWarps, kSoloStages, kBlocks, TMA, false>;
  // A chunk of 8-bit numbers is half the bytes and more instructions: where eight blocks of a
  // cluster have half of the multiprocessors, eight warps on each would be slower than memory.
  constexpr int kMany = sizeof(KV) == 1 && DK <= 128 ? 12 : kWarps;
  using Cluster = Config<T, KV, DK, DV, TILES, kMany, stages_for(kStage, kMany, 196608, kMost), 1,
                         TMA, false>;
  using Balanced =
      Config<T, KV, DK, DV, TILES, kWarps, stages_for(kStage, kWarps, 131072, TMA ? 4 : 2), 1, TMA,
             true>;
  // Two tiles of rows need more of everything: there large blocks are faster.
  constexpr bool kHasSmall = TILES == 1 && DK <= 128;
  using Small = std::conditional_t<
      kHasSmall, Config<T, KV, DK, DV, TILES, kSoloWarps, kSoloStages, kBlocks, TMA, true>,
      Balanced>;
  return dispatch<Solo, Cluster, Balanced, Small>(p, device, stream);
}

template <class T, class KV, int DK, int DV, int TILES>
Status decode_tiles(const DecodeParams& p, const DeviceFacts& device, cudaStream_t stream) {
  constexpr int kStage = stage_bytes(DK, DV, sizeof(KV));
#ifdef JAX_FLASH_HOPPER
  if (device.capability >= 90 && device.smem_bytes >= 220 * 1024) {
    // Boxes of 16 tokens must lie in one page, and groups of 128 bytes make up a head.
    const bool has_boxes = p.block_tables != nullptr ? p.page_size % kChunk == 0
                                                     : p.page_size >= kChunk;
    if constexpr (DK * sizeof(KV) % 128 == 0 && DV * sizeof(KV) % 128 == 0) {
      if (has_boxes && p.head_dim == DK && p.value_dim == DV) {
        return decode_hopper<T, KV, DK, DV, TILES, true>(p, device, stream);
      }
    }
    return decode_hopper<T, KV, DK, DV, TILES, false>(p, device, stream);
  }
#endif
  constexpr int kBlocks = DK > 128 ? 1 : 2, kWarps = DK > 128 ? 2 : 4;
  constexpr int kStages = stages_for(kStage, kWarps, 65536, 2);
  using Fixed = Config<T, KV, DK, DV, TILES, kWarps, kStages, kBlocks, false, false, false>;
  using Balanced = Config<T, KV, DK, DV, TILES, kWarps, kStages, kBlocks, false, true, false>;
  return dispatch<Fixed, Fixed, Balanced, Balanced>(p, device, stream);
}

template <class T, class KV, int DK, int DV>
Status decode_class(const DecodeParams& p, const DeviceFacts& device, cudaStream_t stream) {
  // Two tiles where their accumulators fit into registers, and into shared memory beside the ring.
  if constexpr (DK < 192 || (DK == 192 && sizeof(KV) == 2)) {
    if (p.rows() > 8 && device.smem_bytes > 128 * 1024) {
      return decode_tiles<T, KV, DK, DV, 2>(p, device, stream);
    }
  }
  return decode_tiles<T, KV, DK, DV, 1>(p, device, stream);
}

}  // namespace jax_flash
