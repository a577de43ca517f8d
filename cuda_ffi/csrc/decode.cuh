// Attention of a few new tokens to a cache, on tensor cores, split over the keys.
//
//   x = scale q k^T (+ alibi, soft cap), p = 2^(x log2 e - m), acc = sum p v, l = sum p
//
// All query rows that share a key/value head (its group of query heads times the new tokens) are one
// tile, so every key and value is read once for 8 or 16 rows. Each warp works alone: it owns every
// so-many-th chunk of 16 tokens and a ring of stages in shared memory that it fills itself, by TMA or
// by cp.async, waits for itself, and computes on. There is no barrier of the block in the loop; the
// warps merge at the end of each item.
//
// Operands are swapped: tokens are M (16) and query rows N (8 a tile), so one row of queries wastes
// seven eighths of a product instead of fifteen sixteenths, and the softmax's sums run over the
// registers of eight lanes. S^T becomes P^T by a transposition in registers (movmatrix).
//
// Constraints: head dims up to kDK and kDV in multiples of 8 (16 for an 8-bit cache), 16-byte aligned
// strides. See schedule.cuh for the two ways to split, launch.cuh for who takes which.
#pragma once
#include "fragments.cuh"
#include "schedule.cuh"
#include "state.cuh"

namespace jax_flash {

template <class T_, class KV_, int DK, int DV, int TILES, int WARPS, int STAGES, int BLOCKS,
          bool TMA, bool BALANCED>
struct Config {
  using T = T_;                                                       // query and output
  using KV = KV_;                                                     // cache
  using Math = std::conditional_t<sizeof(KV_) == 1, Half16, T_>;      // products
  static constexpr int kDK = DK, kDV = DV, kTiles = TILES, kWarps = WARPS, kStages = STAGES,
                       kBlocks = BLOCKS, kRows = 8 * TILES, kThreads = WARPS * 32;
  static constexpr bool kTma = TMA, kBalanced = BALANCED;
  static constexpr int kKeyBytes = (DK * (int)sizeof(KV_) + 127) / 128 * kGroupBytes;
  static constexpr int kValueBytes = (DV * (int)sizeof(KV_) + 127) / 128 * kGroupBytes;
  static constexpr int kStageBytes = kKeyBytes + kValueBytes;
  static constexpr int kRingBytes = WARPS * STAGES * kStageBytes;
  static constexpr int kPitch = DV + 4;  // floats of a row of accumulators and its (m, l)
  // Where nothing is loaded behind the last item, a warp leaves its result in its own ring.
  static constexpr bool kReuseRing = !BALANCED && STAGES * kStageBytes >= kRows * kPitch * 4;

  static __host__ __device__ int round_up(int x) { return (x + 15) / 16 * 16; }
  static __host__ __device__ int state_bytes(int rows) { return rows * kPitch * 4; }
  static __host__ __device__ int inbox_slice(int rows, int parts) {  // floats from each block
    return (rows * DV / 4 + parts - 1) / parts * 4;
  }
  // Ring, barriers, one state a warp, then the tables or the inbox; 1024 to align the ring.
  static __host__ __device__ int states_at() { return kRingBytes + round_up(WARPS * STAGES * 8); }
  static __host__ __device__ int tail_at(int rows) {
    return states_at() + (kReuseRing ? 0 : WARPS * state_bytes(rows));
  }
  static __host__ int smem_bytes(const DecodeParams& p, int rows, int parts) {
    const int tail = BALANCED      ? Ranges::bytes(p.batch)
                     : parts > 1   ? parts * inbox_slice(rows, parts) * 4 + parts * rows * 8
                                   : 0;
    return tail_at(rows) + round_up(tail) + 1024;
  }
};

// How one launch is cut up.
struct Grid {
  int row_tiles;    // of one key/value head
  int parts;        // blocks of a cluster
  int rows;         // of a tile: the most that any has
  bool evict_first;
};

// Fills the stages of one warp.
template <class C>
struct Producer {
  const DecodeParams& p;
  const CUtensorMap *key_map, *value_map;
  Walk<C::kBalanced> walk;
  const int lane, first, step;
  const uint32_t ring, barriers;
  const uint64_t policy;
  int chunk, count, ids, next_ids;

  JF_DEVICE Producer(const DecodeParams& p, const CUtensorMap* key_map,
                     const CUtensorMap* value_map, const Walk<C::kBalanced>& walk, int lane,
                     int first, int step, uint32_t ring, uint32_t barriers, uint64_t policy)
      : p(p), key_map(key_map), value_map(value_map), walk(walk), lane(lane), first(first),
        step(step), ring(ring), barriers(barriers), policy(policy) {
    begin_segment();
  }

  JF_DEVICE int token_of(int chunk) const { return walk.segment.span.begin + chunk * kChunk; }

  JF_DEVICE void begin_segment() {
    chunk = walk.segment.first + first, count = 0;
    if (!walk.valid) return;
    if constexpr (C::kTma) {
      ids = load_ids(chunk + lane * step);
      next_ids = -1;
    } else {
      next_ids = load_ids(chunk);
    }
  }

  // TMA: the page of each lane's chunk. Else: the page of each lane's token of one chunk.
  JF_DEVICE int load_ids(int chunk) const {
    const int token = token_of(chunk) + (C::kTma ? 0 : lane & (kChunk - 1));
    const bool is_used = chunk < walk.segment.last && token < walk.segment.span.end;
    return is_used ? page_id(p, walk.segment.b, token) : -1;
  }

  // Starts the copy of the next chunk into a stage; returns which of its tokens lie in no page.
  JF_DEVICE uint32_t produce(int stage) {
    while (walk.valid && chunk >= walk.segment.last) {
      walk.next(p);
      begin_segment();
    }
    uint32_t lost = 0;
    if (walk.valid) {
      lost = C::kTma ? produce_by_tma(stage) : produce_by_gather(stage);
      chunk += step, ++count;
    }
    if constexpr (!C::kTma) copy_async_commit();
    return lost;
  }

  JF_DEVICE uint32_t produce_by_tma(int stage) {
    // Page numbers come 32 chunks at a time, one batch ahead of their use.
    const int turn = count & 31;
    if (turn == 0) {
      if (count != 0) ids = next_ids;
      next_ids = load_ids(chunk + (32 + lane) * step);
    }
    const int page = __shfl_sync(~0u, ids, turn);
    if (lane == 0) {
      const uint32_t target = ring + stage * C::kStageBytes, barrier = barriers + stage * 8;
      const int token = token_of(chunk), slot = token - page_of(p, token) * p.page_size;
      barrier_expect(barrier, C::kStageBytes);  // a page of -1 is outside the map: zeros
      copy_tensor(target, key_map, slot, walk.segment.head, page, barrier, policy);
      copy_tensor(target + C::kKeyBytes, value_map, slot, walk.segment.head, page, barrier, policy);
    }
    return page < 0 ? 0xffffu : 0u;
  }

  JF_DEVICE uint32_t produce_by_gather(int stage) {
    ids = next_ids;
    next_ids = load_ids(chunk + step);
    const uint32_t target = ring + stage * C::kStageBytes;
    gather<C::kDK>(target, p.k, p.head_dim);
    gather<C::kDV>(target + C::kKeyBytes, p.v, p.value_dim);
    return __ballot_sync(~0u, ids < 0) & 0xffffu;
  }

  template <int kDim>
  JF_DEVICE void gather(uint32_t target, const KvView& view, int dim) const {
    using KV = typename C::KV;
    constexpr int kElements = 16 / (int)sizeof(KV), kPieces = kDim / kElements;
    constexpr int kLanes = kPieces < 32 ? kPieces : 32, kRows = 32 / kLanes;
    const int token = token_of(chunk);
#pragma unroll
    for (int i = 0; i < kChunk / kRows; ++i) {
      const int row = i * kRows + lane / kLanes, page = __shfl_sync(~0u, ids, row);
#pragma unroll
      for (int piece = lane % kLanes; piece < kPieces; piece += kLanes) {
        const bool exists = page >= 0 && piece * kElements < dim;
        const int64_t offset =
            exists ? element_offset(p, view, page, token + row, walk.segment.head) +
                         piece * kElements
                   : 0;
        copy_async(target + piece_offset(row, piece), (const KV*)view.data + offset,
                   exists ? 16 : 0, policy);
      }
    }
  }
};

// The query rows of one warp's tile and their running softmax.
template <class C>
struct Consumer {
  using F = Fragments<typename C::Math, typename C::KV>;
  using Math = typename C::Math;
  static constexpr int kQTiles = C::kTiles;

  const DecodeParams& p;
  const int lane, group_lane, quad_lane;
  Segment segment;
  int length, rows, first_row;
  float factor;  // of q k^T, in the base-2 domain, the same for all rows
  bool has_terms;
  Span common;  // tokens that every row sees
  uint32_t q[kQTiles][C::kDK / 16][2];
  float m[kQTiles][2], l[kQTiles][2], acc[kQTiles][C::kDV / 16][4];
  float row_factor[kQTiles][2];  // 8-bit caches: undoes the scaling of q into fp16

  JF_DEVICE Consumer(const DecodeParams& p, int lane)
      : p(p), lane(lane), group_lane(lane >> 2), quad_lane(lane & 3) {}

  JF_DEVICE int token_of_row(int row) const {
    return p.q_len == 1 ? 0 : (unsigned)row / (unsigned)p.group;
  }

  JF_DEVICE void load_query(const Segment& s) {
    segment = s;
    first_row = s.row_tile * C::kRows;
    rows = min(C::kRows, p.rows() - first_row);
#pragma unroll
    for (int n = 0; n < kQTiles; ++n) {
      const int row = first_row + n * 8 + group_lane;
      const bool exists = row < p.rows();
      const int token = token_of_row(exists ? row : 0), g = row - token * p.group;
      const int64_t offset =
          (((int64_t)s.b * p.q_len + token) * p.kv_heads + s.head) * p.group + g;
      const typename C::T* source = (const typename C::T*)p.q + offset * p.head_dim;
#pragma unroll
      for (int i = 0; i < C::kDK / 16; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int d = i * 16 + F::query_at(quad_lane, h);
          q[n][i][h] = exists && d < p.head_dim ? __ldg((const uint32_t*)(source + d)) : 0u;
        }
      }
    }
    if constexpr (!std::is_same_v<Math, typename C::T>) query_to_half();
    factor = p.scale * kLog2E;
    if (p.k.scale != nullptr && !p.k.has_token_scales()) {
      factor *= p.k.scale[s.head * p.k.scale_head_stride];
    }
    // Without terms the largest logit is that of the largest product, which needs a factor > 0.
    has_terms = p.soft_cap != 0.f || p.alibi_slopes != nullptr || p.k.has_token_scales() ||
                p.v.has_token_scales() || !(factor > 0.f);
  }

  // bf16 to fp16: each row is scaled by a power of two into [1, 2), so that nothing overflows.
  JF_DEVICE void query_to_half() {
#pragma unroll
    for (int n = 0; n < kQTiles; ++n) {
      float largest = 0.f;
#pragma unroll
      for (int i = 0; i < C::kDK / 16; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          largest = fmaxf(largest, fabsf(__uint_as_float(q[n][i][h] << 16)));
          largest = fmaxf(largest, fabsf(__uint_as_float(q[n][i][h] & 0xffff0000u)));
        }
      }
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
      // The exponent alone; 2^-126 .. 2^126 so that its inverse is a normal number too.
      uint32_t exponent = __float_as_uint(largest) >> 23;
      exponent = exponent == 255u ? 127u : min(max(exponent, 1u), 253u);
      const float inverse = __uint_as_float((254u - exponent) << 23);
      const float power = __uint_as_float(exponent << 23);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        row_factor[n][j] = __shfl_sync(~0u, power, (quad_lane * 2 + j) * 4);
      }
#pragma unroll
      for (int i = 0; i < C::kDK / 16; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float low = __uint_as_float(q[n][i][h] << 16);
          const float high = __uint_as_float(q[n][i][h] & 0xffff0000u);
          q[n][i][h] = pack<Half16>(low * inverse, high * inverse);
        }
      }
    }
  }

  JF_DEVICE void begin() {
    length = length_of(p, segment.b);
    // Later tokens see more of the end and less of the beginning.
    const Span low = visible_to(p, length, token_of_row(first_row));
    const Span high = visible_to(p, length, token_of_row(first_row + rows - 1));
    common = {high.begin, low.end};
#pragma unroll
    for (int n = 0; n < kQTiles; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        m[n][j] = kEmpty, l[n][j] = 0.f;
      }
#pragma unroll
      for (int d = 0; d < C::kDV / 16; ++d) {
#pragma unroll
        for (int j = 0; j < 4; ++j) acc[n][d][j] = 0.f;
      }
    }
  }

  JF_DEVICE void consume(uint32_t stage, int token, uint32_t lost) {
    const bool is_plain =
        token >= common.begin && token + kChunk <= common.end && !has_terms && lost == 0;
    if (is_plain) {
      step<true>(stage, token, 0u);
    } else {
      step<false>(stage, token, lost);
    }
  }

  JF_DEVICE float factor_of(int n, int j) const {
    if constexpr (std::is_same_v<Math, typename C::T>) {
      return factor;
    } else {
      return factor * row_factor[n][j];
    }
  }

  // One chunk. The general form knows all terms and masks; the plain one is the same without them.
  template <bool kPlain>
  JF_DEVICE void step(uint32_t stage, int token, uint32_t lost) {
    float x[kQTiles][4] = {};
#pragma unroll
    for (int pair = 0; pair < C::kDK / 32; ++pair) {
      uint32_t a[2][4];
      F::keys(stage, lane, pair, a);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int n = 0; n < kQTiles; ++n) {
          mma<Math>(x[n], a[h], q[n][2 * pair + h][0], q[n][2 * pair + h][1]);
        }
      }
    }
    float v_scale[2] = {1.f, 1.f};
    if constexpr (!kPlain) apply_terms(x, token, v_scale);

    // Rescale only where a logit exceeds the running maximum by 2^8: rarely, and for all lanes.
    bool needs_rescale = false;
    float largest[kQTiles][2];
#pragma unroll
    for (int n = 0; n < kQTiles; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float larger = fmaxf(x[n][j], x[n][2 + j]);
        largest[n][j] = kPlain ? larger * factor_of(n, j) : larger;
        needs_rescale |= largest[n][j] > m[n][j] + 8.f;
      }
    }
    if (__any_sync(~0u, needs_rescale)) rescale(largest);

    uint32_t prob[kQTiles][2];
#pragma unroll
    for (int n = 0; n < kQTiles; ++n) {
      float e[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int j = i & 1;
        e[i] = exp2_fast(kPlain ? fmaf(x[n][i], factor_of(n, j), -m[n][j]) : x[n][i] - m[n][j]);
      }
      l[n][0] += e[0] + e[2], l[n][1] += e[1] + e[3];
      if constexpr (!kPlain) {
        e[0] *= v_scale[0], e[1] *= v_scale[0], e[2] *= v_scale[1], e[3] *= v_scale[1];
      }
      prob[n][0] = transpose_8x8(pack<Math>(e[0], e[1]));
      prob[n][1] = transpose_8x8(pack<Math>(e[2], e[3]));
    }

    uint32_t bad = lost;  // tokens that lie in no page, or with a value that is not finite
#pragma unroll
    for (int pair = 0; pair < C::kDV / 32; ++pair) {
      uint32_t a[2][4];
      F::values(stage + C::kKeyBytes, lane, pair, a);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if constexpr (!kPlain) bad |= clear_bad_values(a[h]);
#pragma unroll
        for (int n = 0; n < kQTiles; ++n) {
          mma<Math>(acc[n][2 * pair + h], a[h], prob[n][0], prob[n][1]);
        }
      }
    }
    if constexpr (!kPlain) taint(__reduce_or_sync(~0u, bad), token);
  }

  JF_DEVICE void rescale(const float (&largest)[kQTiles][2]) {
#pragma unroll
    for (int n = 0; n < kQTiles; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float next = largest[n][j];
        next = fmaxf(next, __shfl_xor_sync(~0u, next, 4));
        next = fmaxf(next, __shfl_xor_sync(~0u, next, 8));
        next = fmaxf(next, __shfl_xor_sync(~0u, next, 16));
        next = fmaxf(next, m[n][j]);
        const float keep = exp2_fast(m[n][j] - next);
        m[n][j] = next;
        l[n][j] *= keep;
#pragma unroll
        for (int d = 0; d < C::kDV / 16; ++d) {
          acc[n][d][j] *= keep, acc[n][d][2 + j] *= keep;
        }
      }
    }
  }

  // Products become logits in the base-2 domain: scale, ALiBi, soft cap, then the mask selects.
  JF_DEVICE void apply_terms(float (&x)[kQTiles][4], int token, float (&v_scale)[2]) const {
    float k_scale[2] = {1.f, 1.f};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int t = token + group_lane + 8 * i;
      if (t < length) {
        k_scale[i] = token_scale(p.k, t);
        v_scale[i] = token_scale(p.v, t);
      } else {
        v_scale[i] = 0.f;
      }
    }
#pragma unroll
    for (int n = 0; n < kQTiles; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int row = first_row + n * 8 + quad_lane * 2 + j, t_row = token_of_row(row);
        const Span seen = visible_to(p, length, t_row);
        float slope = 0.f;
        if (p.alibi_slopes != nullptr && row < p.rows()) {
          slope = p.alibi_slopes[segment.b * p.alibi_slopes_stride + segment.head * p.group + row -
                                 t_row * p.group];
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int t = token + group_lane + 8 * i;
          float y = x[n][2 * i + j] * factor_of(n, j) * k_scale[i];
          y += slope * (float)(t - (length - p.q_len + t_row)) * kLog2E;
          if (p.soft_cap != 0.f) {  // c tanh(y / c) = c - 2 c / (1 + e^(2 y / c))
            const float e = exp2_fast(y * (2.f / p.soft_cap));
            y = p.soft_cap * kLog2E * (1.f - 2.f / (1.f + e));
          }
          x[n][2 * i + j] = t >= seen.begin && t < seen.end ? y : -INFINITY;
        }
      }
    }
  }

  JF_DEVICE float token_scale(const KvView& view, int token) const {
    if (!view.has_token_scales()) return 1.f;
    const int page = page_id(p, segment.b, token);
    if (page < 0) return 1.f;  // such tokens taint their rows anyway
    return view.scale[scale_offset(p, view, page, token, segment.head)];
  }

  // Zeroes values that are not finite, which would make 0 * NaN in rows that do not see them. The
  // registers hold tokens 2i, 2i+1 (0 and 1) and 2i+8, 2i+9 (2 and 3) for quad lane i.
  JF_DEVICE uint32_t clear_bad_values(uint32_t (&a)[4]) const {
    uint32_t bad = 0;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const uint32_t halves = not_finite<Math>(a[r]);
      a[r] &= ~(halves * 0xffffu);
      bad |= ((halves & 1u) | (halves >> 15)) << (quad_lane * 2 + (r >> 1) * 8);
    }
    return bad;
  }

  // Rows that see one of these tokens become NaN.
  JF_DEVICE void taint(uint32_t bad, int token) {
    if (bad == 0) return;
#pragma unroll
    for (int n = 0; n < kQTiles; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const Span seen =
            visible_to(p, length, token_of_row(first_row + n * 8 + quad_lane * 2 + j));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int at = group_lane + 8 * i, t = token + at;
          if ((bad >> at & 1u) && t >= seen.begin && t < seen.end) {
            l[n][j] = __uint_as_float(0x7fc00000u);
          }
        }
      }
    }
  }

  // Leaves the state in shared memory: [rows][kPitch], accumulators then m and l.
  JF_DEVICE void store(float* state) {
#pragma unroll
    for (int n = 0; n < kQTiles; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int row = n * 8 + quad_lane * 2 + j;
        float sum = l[n][j];
        sum += __shfl_xor_sync(~0u, sum, 4);
        sum += __shfl_xor_sync(~0u, sum, 8);
        sum += __shfl_xor_sync(~0u, sum, 16);
        if (row >= rows) continue;
        float* target = state + row * C::kPitch;
        if (group_lane == 0) target[C::kDV] = m[n][j], target[C::kDV + 1] = sum;
#pragma unroll
        for (int d = 0; d < C::kDV / 16; ++d) {
          target[d * 16 + F::value_element(group_lane, 0)] = acc[n][d][j];
          target[d * 16 + F::value_element(group_lane, 1)] = acc[n][d][2 + j];
        }
      }
    }
  }
};

// Four accumulators of a row of a stored state.
template <class C>
JF_DEVICE State4 load_state(const float* state, int row, int first) {
  const float* source = state + row * C::kPitch;
  return {source[C::kDV], source[C::kDV + 1], *(const float4*)(source + first)};
}

template <class C>
__global__ __launch_bounds__(C::kThreads, C::kBlocks) void decode_kernel(
    const __grid_constant__ DecodeParams p, const __grid_constant__ Grid grid,
    const __grid_constant__ CUtensorMap key_map, const __grid_constant__ CUtensorMap value_map) {
  extern __shared__ uint8_t raw[];
  uint8_t* smem = (uint8_t*)(((uintptr_t)raw + 1023) & ~(uintptr_t)1023);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t ring = smem_address(smem) + warp * C::kStages * C::kStageBytes;
  const uint32_t barriers = smem_address(smem) + C::kRingBytes + warp * C::kStages * 8;
  const int state_stride =
      C::kReuseRing ? C::kStages * C::kStageBytes / 4 : C::state_bytes(grid.rows) / 4;
  float* states = (float*)(smem + (C::kReuseRing ? 0 : C::states_at()));
  uint8_t* tail = smem + C::tail_at(grid.rows);

  if (C::kTma && lane == 0) {
    prefetch_map(&key_map);
    prefetch_map(&value_map);
    for (int i = 0; i < C::kStages; ++i) barrier_init(barriers + i * 8);
    barrier_init_fence();
  }
  Ranges ranges{};
  int part = 0, index = blockIdx.x;
  if constexpr (C::kBalanced) {
    launch_dependents();
    ranges = {(int*)tail, (int*)tail + p.batch + 1, p.kv_heads * grid.row_tiles};
    if (warp == 0) Ranges::fill(p, (int*)tail, lane);
    __syncthreads();
  } else {
    if (grid.parts > 1) cluster_arrive_relaxed();
    index = blockIdx.x / grid.parts, part = blockIdx.x - index * grid.parts;
  }
  __syncwarp();

  Walk<C::kBalanced> walk(p, ranges, index, grid.row_tiles, gridDim.x);
  const int first = part * C::kWarps + warp, step = grid.parts * C::kWarps;
  // Small loads must be on their way before the ring fills the queues: page numbers (in the
  // producer's constructor) and queries.
  Producer<C> producer(p, &key_map, &value_map, walk, lane, first, step, ring, barriers,
                       l2_policy(grid.evict_first));
  Consumer<C> consumer(p, lane);
  if (walk.valid) consumer.load_query(walk.segment);
  uint64_t lost = 0;  // 16 bits a stage
  for (int i = 0; i < C::kStages; ++i) lost |= (uint64_t)producer.produce(i) << (16 * i);

  int stage = 0, phase = 0;
  while (walk.valid) {
    const Segment segment = walk.segment;
    consumer.begin();
    for (int chunk = segment.first + first; chunk < segment.last; chunk += step) {
      if constexpr (C::kTma) {
        barrier_wait(barriers + stage * 8, phase);
      } else {
        copy_async_wait<C::kStages - 1>();
        __syncwarp();
      }
      consumer.consume(ring + stage * C::kStageBytes, segment.span.begin + chunk * kChunk,
                       (uint32_t)(lost >> (16 * stage)) & 0xffffu);
      __syncwarp();
      lost &= ~(0xffffull << (16 * stage));
      lost |= (uint64_t)producer.produce(stage) << (16 * stage);
      if (++stage == C::kStages) stage = 0, phase ^= 1;
    }
    consumer.store(states + warp * state_stride);
    const int rows = consumer.rows, first_row = consumer.first_row;
    walk.next(p);
    if (walk.valid) consumer.load_query(walk.segment);
    __syncthreads();
    if (!C::kBalanced && grid.parts > 1) cluster_wait();  // the peers have begun

    const int slice = C::inbox_slice(grid.rows, grid.parts);
    for (int i = threadIdx.x; i < rows * (C::kDV / 4); i += C::kThreads) {
      const int row = i / (C::kDV / 4), d = i % (C::kDV / 4) * 4;
      State4 x;
      merge_into<C::kWarps>(
          x, [&](int w) { return load_state<C>(states + w * state_stride, row, d); });
      if constexpr (C::kBalanced) {
        if (segment.is_whole()) {
          if (d < p.value_dim) {
            write_row<typename C::T>(p, segment.b, segment.head, first_row + row, d, x);
          }
        } else {
          const int slot = 2 * blockIdx.x + (segment.first == 0);
          float* target = p.partials + ((int64_t)slot * grid.rows + row) * C::kPitch;
          __stcg((float4*)(target + d), x.acc);
          if (d == 0) __stcg((float2*)(target + C::kDV), float2{x.m, x.l});
        }
      } else if (grid.parts == 1) {
        if (d < p.value_dim) {
          write_row<typename C::T>(p, segment.b, segment.head, first_row + row, d, x);
        }
      } else {  // to the block that finishes this slice, and (m, l) to all
        const int at = i * 4, target = at / slice;
        const uint32_t inbox = smem_address(tail);
        store_peer(peer_address(inbox + (part * slice + at - target * slice) * 4, target), x.acc);
        const uint32_t sums = inbox + grid.parts * slice * 4 + (part * grid.rows + row) * 8;
        for (int peer = d / 4; peer < grid.parts; peer += C::kDV / 4) {
          store_peer(peer_address(sums, peer), float2{x.m, x.l});
        }
      }
    }
    if (!C::kBalanced && grid.parts > 1) {
      cluster_arrive();
      cluster_wait();
      const float* inbox = (const float*)tail;
      const float2* sums = (const float2*)(inbox + grid.parts * slice);
      for (int i = threadIdx.x * 4; i < slice; i += C::kThreads * 4) {
        const int at = part * slice + i, row = at / C::kDV, d = at % C::kDV;
        if (row >= rows || d >= p.value_dim) continue;
        State4 x;
        for (int peer = 0; peer < grid.parts; ++peer) {
          merge_into<1>(x, [&](int) {
            const float2 s = sums[peer * grid.rows + row];
            return State4{s.x, s.y, *(const float4*)(inbox + peer * slice + i)};
          });
        }
        write_row<typename C::T>(p, segment.b, segment.head, first_row + row, d, x);
      }
    }
    if (walk.valid) __syncthreads();  // before the states are written again
  }

  if constexpr (C::kBalanced) {  // sequences that see nothing have no chunks
    for (int b = blockIdx.x; b < p.batch; b += gridDim.x) {
      if (ranges.prefix[b + 1] != ranges.prefix[b]) continue;
      for (int head = 0; head < p.kv_heads; ++head) {
        for (int i = threadIdx.x; i < p.rows() * (p.value_dim / 4); i += C::kThreads) {
          const int row = i / (p.value_dim / 4), d = i % (p.value_dim / 4) * 4;
          write_row<typename C::T>(p, b, head, row, d, State4{});
        }
      }
    }
  }
}

}  // namespace jax_flash
