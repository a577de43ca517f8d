// What a kernel is compiled for, and how its shared memory is laid out.
#pragma once
#include "fragments.cuh"
#include "schedule.cuh"

namespace jax_flash {

// Blocks of a cluster: what every GPU that has clusters allows.
constexpr int kLog2MostParts = 3;
constexpr int kMostParts = 1 << kLog2MostParts;

template <class T_, class KV_, int DK, int DV, int TILES, int WARPS, int STAGES, int BLOCKS,
          bool TMA, bool BALANCED, bool HOPPER = true>
struct Config {
  using T = T_;                                                       // query and output
  using KV = KV_;                                                     // cache
  using Math = std::conditional_t<sizeof(KV_) == 1, Half16, T_>;      // products
  static constexpr int kDK = DK, kDV = DV, kTiles = TILES, kWarps = WARPS, kStages = STAGES,
                       kBlocks = BLOCKS, kRows = 8 * TILES, kThreads = WARPS * 32;
  static constexpr bool kTma = TMA, kBalanced = BALANCED, kNeedsHopper = HOPPER;
  static constexpr int kKeyBytes = (DK * (int)sizeof(KV_) + 127) / 128 * kGroupBytes;
  static constexpr int kValueBytes = (DV * (int)sizeof(KV_) + 127) / 128 * kGroupBytes;
  static constexpr int kStageBytes = kKeyBytes + kValueBytes;
  static constexpr int kRingBytes = WARPS * STAGES * kStageBytes;
  static_assert((DV & (DV - 1)) == 0 && DV / kMostParts >= 4, "blocks share columns");
  static constexpr int kPitch = DV + 4;  // floats of a row of accumulators and its (m, l)
  // Of each stage: which of its tokens lie in no page. With TMA they all lie in one.
  static constexpr int kLostBits = TMA ? 1 : kChunk;
  using Lost = std::conditional_t<kLostBits * STAGES <= 32, uint32_t, uint64_t>;
  // Where nothing is loaded behind the last item, a warp leaves its result in its own ring.
  static constexpr bool kReuseRing = !BALANCED && STAGES * kStageBytes >= kRows * kPitch * 4;

  static __host__ __device__ int round_up(int x) { return (x + 15) / 16 * 16; }
  static __host__ __device__ int state_bytes(int rows) { return rows * kPitch * 4; }
  // Ring, its barriers and the inbox's, one state a warp, then the tables or the inbox; 1024 more
  // to align the ring.
  static constexpr int kInboxBarrierAt = kRingBytes + WARPS * STAGES * 8;
  static __host__ __device__ int states_at() { return round_up(kInboxBarrierAt + 8); }
  static __host__ __device__ int tail_at(int rows) {
    return states_at() + (kReuseRing ? 0 : WARPS * state_bytes(rows));
  }
  static __host__ int smem_bytes(const DecodeParams& p, int rows, int parts) {
    const int tail = BALANCED    ? Ranges::bytes(p.batch)
                     : parts > 1 ? rows * (DV * 4 + kMostParts * 8)
                                 : 0;
    return tail_at(rows) + round_up(tail) + 1024;
  }
};

// How one launch is cut up.
struct Grid {
  int row_tiles;    // of one key/value head
  int parts;        // blocks of a cluster, a power of two
  int parts_shift;  // its log2
  int rows;         // of a tile: the most that any has
  bool evict_first;
};

}  // namespace jax_flash
