// How one warp computes on a chunk: two matrix products with an online softmax between them.
#pragma once
#include "config.cuh"
#include "state.cuh"

namespace jax_flash {

// The query rows of one warp's tile and their running softmax.
template <class C>
struct Consumer {
  using F = Fragments<typename C::Math, typename C::KV>;
  using Math = typename C::Math;
  static constexpr int kQTiles = C::kTiles;

  const DecodeParams& p;
  const int lane, group_lane, quad_lane;
  Segment segment;
  int rows, first_row;
  float factor;   // of q k^T, in the base-2 domain, the same for all rows
  float k_scale;
  float v_scale;  // of one tile, loaded with the query: at the end it would be waited for
  bool has_terms;
  Span common;  // tokens that every row sees
  uint32_t q[kQTiles][C::kDK / 16][2];
  float m[kQTiles][2], l[kQTiles][2], acc[kQTiles][C::kDV / 16][4];
  float row_factor[kQTiles][2];  // 8-bit caches: undoes the scaling of q into fp16

  JF_DEVICE Consumer(const DecodeParams& p, int lane)
      : p(p), lane(lane), group_lane(lane >> 2), quad_lane(lane & 3) {}

  JF_DEVICE void load_query(int b, int head, int row_tile) {
    first_row = row_tile * C::kRows;
    rows = min(C::kRows, p.rows() - first_row);
#pragma unroll
    for (int n = 0; n < kQTiles; ++n) {
      // Rows beyond the last are it once more, and never stored.
      const int row = min(first_row + n * 8 + group_lane, p.rows() - 1);
      const int lane_at = F::query_at(quad_lane, 0);
      const typename C::T* source =
          (const typename C::T*)p.q + (int64_t)p.row_index(b, head, row) * p.head_dim + lane_at;
      asm("" : "+l"(source));  // so that what follows is this address and a constant
#pragma unroll
      for (int i = 0; i < C::kDK / 16; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int d = i * 16 + F::query_at(0, h);
          // By TMA all of a head is there: with fewer elements this kernel is not launched.
          const bool exists = C::kTma || d + lane_at < p.head_dim;
          q[n][i][h] = exists ? __ldg((const uint32_t*)(source + d)) : 0u;
        }
      }
    }
    if constexpr (kQTiles == 1) v_scale = v_scale_of(p, head);
    const bool has_scale = p.k.scale != nullptr && !p.k.has_token_scales();
    k_scale = has_scale ? p.k.scale[head * p.k.scale_head_stride] : 1.f;
  }

  // What waits for the loads of load_query(): to be called when the first copies are on their way.
  JF_DEVICE void prepare_query() {
    if constexpr (!std::is_same_v<Math, typename C::T>) query_to_half();
    factor = p.scale * kLog2E * k_scale;
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

  JF_DEVICE void begin(const Segment& s) {
    segment = s;
    prepare_query();
    // Later tokens see more of the end and less of the beginning.
    const Span low = visible_to(p, segment.length, p.token_of_row(first_row));
    const Span high = visible_to(p, segment.length, p.token_of_row(first_row + rows - 1));
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
    // Products of one sum wait for each other: of one tile there are two sums.
    constexpr int kSums = kQTiles == 1 ? 2 : 1;
    float x[kQTiles][4], sums[kSums][kQTiles][4] = {};
#pragma unroll
    for (int pair = 0; pair < C::kDK / 32; ++pair) {
      uint32_t a[2][4];
      F::keys(stage, lane, pair, a);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int n = 0; n < kQTiles; ++n) {
          mma<Math>(sums[h % kSums][n], a[h], q[n][2 * pair + h][0], q[n][2 * pair + h][1]);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < kQTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x[n][i] = kSums == 1 ? sums[0][n][i] : sums[0][n][i] + sums[kSums - 1][n][i];
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

    // Tokens that lie in no page, or with a value that is not finite.
    uint32_t bad = C::kTma && lost ? 0xffffu : lost;
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
      if (t < segment.length) {
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
        const int row = first_row + n * 8 + quad_lane * 2 + j, t_row = p.token_of_row(row);
        const Span seen = visible_to(p, segment.length, t_row);
        float slope = 0.f;
        if (p.alibi_slopes != nullptr && row < p.rows()) {
          slope = p.alibi_slopes[segment.b * p.alibi_slopes_stride + segment.head * p.group + row -
                                 t_row * p.group];
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int t = token + group_lane + 8 * i;
          float y = x[n][2 * i + j] * factor_of(n, j) * k_scale[i];
          y += slope * (float)(t - (segment.length - p.q_len + t_row)) * kLog2E;
          if (p.soft_cap != 0.f) {  // c tanh(y / c) = c - 2 c / (1 + e^(2 y / c))
            const float e = exp2_fast(y * __fdividef(2.f, p.soft_cap));
            y = p.soft_cap * kLog2E * (1.f - __fdividef(2.f, 1.f + e));
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
            visible_to(p, segment.length, p.token_of_row(first_row + n * 8 + quad_lane * 2 + j));
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
    for (int lanes = 4; lanes <= 16; lanes *= 2) {
#pragma unroll
      for (int n = 0; n < kQTiles; ++n) {
        l[n][0] += __shfl_xor_sync(~0u, l[n][0], lanes);
        l[n][1] += __shfl_xor_sync(~0u, l[n][1], lanes);
      }
    }
#pragma unroll
    for (int n = 0; n < kQTiles; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int row = n * 8 + quad_lane * 2 + j;
        if (row >= rows) continue;
        float* target = state + row * C::kPitch;
        if (group_lane == 0) *(float2*)(target + C::kDV) = {m[n][j], l[n][j]};
#pragma unroll
        for (int d = 0; d < C::kDV / 16; ++d) {
          target[d * 16 + F::value_element(group_lane, 0)] = acc[n][d][j];
          target[d * 16 + F::value_element(group_lane, 1)] = acc[n][d][2 + j];
        }
      }
    }
  }
};

}  // namespace jax_flash
