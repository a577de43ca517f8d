// Attention of a few new tokens to a cache, on tensor cores, split over the keys.
//
//   x = scale q k^T (+ alibi, soft cap), p = 2^(x log2 e - m), acc = sum p v, l = sum p
//
// All query rows that share a key/value head (its group of query heads times the new tokens) are
// one tile, so every key and value is read once for 8 or 16 rows. Each warp works alone: it owns
// every so-many-th chunk of 16 tokens and a ring of stages in shared memory that it fills itself,
// by TMA or by cp.async, waits for itself, and computes on. There is no barrier of the block in the
// loop; the warps merge at the end of each item.
//
// Operands are swapped: tokens are M (16) and query rows N (8 a tile), so one row of queries wastes
// seven eighths of a product instead of fifteen sixteenths, and the softmax's sums run over the
// registers of eight lanes. S^T becomes P^T by a transposition in registers (movmatrix).
//
// Constraints: head dims up to kDK and kDV in multiples of 8 (16 for an 8-bit cache), 16-byte
// aligned strides. See schedule.cuh for the two ways to split, launch.cuh for who takes which.
#pragma once
#include "consumer.cuh"
#include "producer.cuh"

namespace jax_flash {

// Four accumulators of a row of a stored state.
template <class C>
JF_DEVICE State4 load_state(const float* state, int row, int first) {
  const float* source = state + row * C::kPitch;
  const float2 sums = *(const float2*)(source + C::kDV);
  return {sums.x, sums.y, *(const float4*)(source + first)};
}

template <class C>
JF_DEVICE void decode_block(const DecodeParams& p, const Grid& grid, const CUtensorMap& key_map,
                            const CUtensorMap& value_map) {
  constexpr int kLog2DV = C::kDV == 64 ? 6 : C::kDV == 128 ? 7 : 8;
  extern __shared__ uint8_t raw[];
  // An offset, since an address made from a number could be of any memory to the compiler.
  uint8_t* smem = raw + (-smem_address(raw) & 1023u);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t ring = smem_address(smem) + warp * C::kStages * C::kStageBytes;
  const uint32_t barriers = smem_address(smem) + C::kRingBytes + warp * C::kStages * 8;
  const int state_stride =
      C::kReuseRing ? C::kStages * C::kStageBytes / 4 : C::state_bytes(grid.rows) / 4;
  float* states = (float*)(smem + (C::kReuseRing ? 0 : C::states_at()));
  uint8_t* tail = smem + C::tail_at(grid.rows);

  // Balanced: grid (row tile, range), else (part, head, b). Small loads must be on their way before
  // the ring fills the queues: the length, page numbers and queries, none behind another.
  int part = 0, row_tile = blockIdx.x, early_length = 0, early_entry = 0;
  if constexpr (!C::kBalanced) {
    row_tile = blockIdx.x >> grid.parts_shift;
    part = blockIdx.x & (grid.parts - 1);
  }
  // If there are fewer chunks than warps, all blocks have some.
  const int first = warp * grid.parts + part;
  const int step = C::kBalanced ? C::kWarps : C::kWarps * grid.parts;
  Consumer<C> consumer(p, lane);
  if constexpr (!C::kBalanced) {
    early_length = load_first(p.kv_lens + blockIdx.z);
    early_entry = Producer<C>::early_entry(p, blockIdx.z, lane, first, step);
  }
  const uint64_t policy = l2_policy(grid.evict_first);
  if (C::kTma && elect()) {
    prefetch_map(&key_map);
    prefetch_map(&value_map);
    for (int i = 0; i < C::kStages; ++i) barrier_init(barriers + i * 8);
    barrier_init_fence();
  }
  if constexpr (!C::kBalanced) consumer.load_query(blockIdx.z, blockIdx.y, row_tile);
  __syncwarp();
  const Ranges ranges{(int*)tail, p.kv_heads};
  if constexpr (C::kBalanced) Ranges::fill(p, (int*)tail);

  auto walk = [&] {
    if constexpr (C::kBalanced) {
      return Walk<true>(p, ranges, blockIdx.y, row_tile, gridDim.y);
    } else {
      return Walk<false>(p, blockIdx.z, blockIdx.y, row_tile, clipped(p, early_length));
    }
  }();
  Producer<C> producer(p, &key_map, &value_map, walk, lane, first, step, early_entry, ring,
                       barriers, policy);
  if (C::kBalanced && walk.valid) consumer.load_query(walk.segment.b, walk.segment.head, row_tile);
  constexpr typename C::Lost kLostMask = (1u << C::kLostBits) - 1;
  typename C::Lost lost = 0;
#pragma unroll 1
  for (int i = 0; i < C::kStages; ++i) {
    lost |= (typename C::Lost)producer.produce(i) << (C::kLostBits * i);
  }

  // While the first keys are on their way, the blocks of a cluster see to it that all have begun.
  const bool is_shared = !C::kBalanced && grid.parts > 1;
  const uint32_t inbox_barrier = smem_address(smem) + C::kInboxBarrierAt;
  if (is_shared) {
    if (threadIdx.x == 0) {
      barrier_init(inbox_barrier);
      barrier_init_fence();
      const int floats = (C::kDV >> grid.parts_shift) + 2;  // columns and (m, l)
      barrier_expect(inbox_barrier, grid.parts * consumer.rows * floats * 4);
    }
    __syncwarp();
    cluster_arrive_relaxed();
  }

  int stage = 0, phase = 0;
  while (walk.valid) {
    const Segment segment = walk.segment;
    consumer.begin(segment);
    if (is_shared) {
      __syncwarp();  // all lanes of a warp have to wait together
      cluster_wait();
    }
    for (int chunk = segment.first + first; chunk < segment.last; chunk += step) {
      if constexpr (C::kTma) {
        barrier_wait(barriers + stage * 8, phase);
      } else {
        copy_async_wait<C::kStages - 1>();
        __syncwarp();
      }
      consumer.consume(ring + stage * C::kStageBytes, segment.span.begin + chunk * kChunk,
                       (uint32_t)(lost >> (C::kLostBits * stage) & kLostMask));
      __syncwarp();
      lost &= ~(kLostMask << (C::kLostBits * stage));
      lost |= (typename C::Lost)producer.produce(stage) << (C::kLostBits * stage);
      if (++stage == C::kStages) stage = 0, phase ^= 1;
    }
    consumer.store(states + warp * state_stride);
    const int rows = consumer.rows, first_row = consumer.first_row;
    const float early_scale = consumer.v_scale;
    const auto v_scale = [&] {  // late where registers are short
      return C::kTiles == 1 ? early_scale : v_scale_of(p, segment.head);
    };
    walk.next(p);
    if (walk.valid) consumer.load_query(walk.segment.b, walk.segment.head, row_tile);
    __syncthreads();

    // Of a cluster, block n finishes columns [n * width, (n + 1) * width) of every row.
    const int width_shift = kLog2DV - grid.parts_shift, width = 1 << width_shift;
    float* inbox = (float*)tail;  // [row][part][width], and [row][part] of (m, l)
    float2* sums = (float2*)(inbox + grid.rows * C::kDV);
    constexpr int kLanes = C::kDV / 4;  // of a row
    for (unsigned i = threadIdx.x; i < (unsigned)rows * kLanes; i += C::kThreads) {
      const int row = i / kLanes, d = i % kLanes * 4;
      const State4 x = merge<C::kWarps>(
          [&](int w) { return load_state<C>(states + w * state_stride, row, d); });
      if constexpr (C::kBalanced) {
        if (segment.is_whole()) {
          if (d < p.value_dim) {
            write_row<typename C::T>(p, segment.b, segment.head, first_row + row, d, v_scale(), x);
          }
        } else {
          const int slot = 2 * (blockIdx.y * gridDim.x + blockIdx.x) + (segment.first == 0);
          float* target = p.partials + ((int64_t)slot * grid.rows + row) * C::kPitch;
          __stcg((float4*)(target + d), x.acc);
          if (d == 0) __stcg((float2*)(target + C::kDV), float2{x.m, x.l});
        }
      } else if (grid.parts == 1) {
        if (d < p.value_dim) {
          write_row<typename C::T>(p, segment.b, segment.head, first_row + row, d, v_scale(), x);
        }
      } else {  // to the block that finishes these columns, and (m, l) to all
        const int target = d >> width_shift;
        const uint32_t place = smem_address(inbox + row * C::kDV + (part << width_shift) +
                                            (d & (width - 1)));
        send(peer_address(place, target), peer_address(inbox_barrier, target), x.acc);
        if (const int peer = d / 4; peer < grid.parts) {
          send(peer_address(smem_address(sums + row * kMostParts + part), peer),
               peer_address(inbox_barrier, peer), float2{x.m, x.l});
        }
      }
    }
    if (is_shared) {
      const auto finish = [&](int i, int parts, int shift) {
        const int row = i >> shift, column = i & ((1 << shift) - 1), d = (part << shift) + column;
        const RowTarget<typename C::T> target(p, segment.b, segment.head, first_row + row, d);
        const float scale = v_scale();
        const float2* row_sums = sums + row * kMostParts;
        const float* columns = inbox + row * C::kDV + column;
        wait_for_peers(inbox_barrier);  // so does thread 0, before which no block ends
        // Of fewer parts than there may be each counts several times, at a fraction: no branch.
        const auto get = [&](int j) {
          const int from = j & (parts - 1);
          const float2 s = row_sums[from];
          return State4{s.x, s.y, *(const float4*)(columns + (from << shift))};
        };
        const int halvings = shift - (kLog2DV - kLog2MostParts);
        const State4 x = merge<kMostParts>(get, (float)halvings);
        if (d < p.value_dim) target.write(scale, x);
      };
      for (int i = threadIdx.x * 4; i < rows << width_shift; i += C::kThreads * 4) {
        if (grid.parts == kMostParts) {  // with offsets that are known when it is compiled
          finish(i, kMostParts, kLog2DV - kLog2MostParts);
        } else {
          finish(i, grid.parts, width_shift);
        }
      }
    }
    if (walk.valid) __syncthreads();  // before the states are written again
  }

  if constexpr (C::kBalanced) {  // sequences that see nothing have no chunks
    for (int b = blockIdx.y; b < p.batch && row_tile == 0; b += gridDim.y) {
      if (ranges.prefix[b + 1] != ranges.prefix[b]) continue;
      for (int head = 0; head < p.kv_heads; ++head) {
        for (int i = threadIdx.x; i < p.rows() * (p.value_dim / 4); i += C::kThreads) {
          const int row = i / (p.value_dim / 4), d = i % (p.value_dim / 4) * 4;
          write_row<typename C::T>(p, b, head, row, d, 1.f, State4{});
        }
      }
    }
  }
}

template <class C>
__global__ __launch_bounds__(C::kThreads, C::kBlocks) void decode_kernel(
    const __grid_constant__ DecodeParams p, const __grid_constant__ Grid grid,
    const __grid_constant__ CUtensorMap key_map, const __grid_constant__ CUtensorMap value_map) {
  if constexpr (kIsHopper || !C::kNeedsHopper) {
    decode_block<C>(p, grid, key_map, value_map);
  } else {
    __trap();  // never launched there
  }
}

}  // namespace jax_flash
