// The state of an online softmax, in the base-2 domain, and its merge.
//
//   m = max of the logits * log2(e), l = sum of 2^(x - m), acc = sum of 2^(x - m) v
//   merge: M = max(m1, m2), l = l1 2^(m1 - M) + l2 2^(m2 - M), acc likewise
//
// A state that has seen nothing has m = kEmpty, l = 0, acc = 0: finite, so that it merges without
// inf - inf.
#pragma once
#include "params.h"
#include "ptx.cuh"

namespace jax_flash {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr float kEmpty = -3.4028234e38f;

struct State4 {  // four of a row's accumulators
  float m = kEmpty, l = 0.f;
  float4 acc = {0.f, 0.f, 0.f, 0.f};
};

JF_DEVICE void add_scaled(float4& x, float weight, const float4& y) {
  x.x += weight * y.x, x.y += weight * y.y, x.z += weight * y.z, x.w += weight * y.w;
}

JF_DEVICE float4 operator*(float weight, const float4& y) {
  return {weight * y.x, weight * y.y, weight * y.z, weight * y.w};
}

// Folds a group of states, read by `get(i) -> State4`, into x.
template <int kCount, class Get>
JF_DEVICE void merge_into(State4& x, Get get) {
  State4 part[kCount];
  float m = x.m;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    part[i] = get(i);
    m = fmaxf(m, part[i].m);
  }
  const float keep = exp2_fast(x.m - m);
  x.m = m, x.l *= keep, x.acc = keep * x.acc;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float weight = exp2_fast(part[i].m - m);
    x.l += weight * part[i].l;
    add_scaled(x.acc, weight, part[i].acc);
  }
}

// A group of states alone, which saves an exponential and five products. The sums are divided by
// 2^halvings.
template <int kCount, class Get>
JF_DEVICE State4 merge(Get get, float halvings = 0.f) {
  State4 part[kCount], x;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    part[i] = get(i);
    x.m = fmaxf(x.m, part[i].m);
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float weight = exp2_fast(part[i].m - x.m - halvings);
    x.l += weight * part[i].l;
    add_scaled(x.acc, weight, part[i].acc);
  }
  return x;
}

// Of a head; 1 where each token has its own.
JF_DEVICE float v_scale_of(const DecodeParams& p, int head) {
  const bool has_one = p.v.scale != nullptr && !p.v.has_token_scales();
  return has_one ? p.v.scale[head * p.v.scale_head_stride] : 1.f;
}

// Where four columns of a row go, and what is known of them before they are.
template <class T>
struct RowTarget {
  T* out;
  float* lse;  // of the first columns of a row, else null
  float sink;
  bool has_sink;

  // `first` is the index of the first of the four accumulators in the value head.
  JF_DEVICE RowTarget(const DecodeParams& p, int b, int head, int row, int first) {
    const int index = p.row_index(b, head, row);
    out = (T*)p.out + ((int64_t)index * p.value_dim + first);
    lse = first == 0 ? p.lse + index : nullptr;
    has_sink = p.sinks != nullptr;
    if (has_sink) {
      const int q_head = head * p.group + row - p.token_of_row(row) * p.group;
      sink = p.sinks[b * p.sinks_stride + q_head] * kLog2E;
    }
  }

  // The sink joins the denominator, v's scale the numerator.
  JF_DEVICE void write(float v_scale, State4 x) const {
    if (has_sink && x.l != 0.f) {  // a sink makes no key
      const float m = fmaxf(x.m, sink), keep = exp2_fast(x.m - m);
      x.l = x.l * keep + exp2_fast(sink - m);
      x.acc = keep * x.acc;
      x.m = m;
    }
    const float factor = x.l == 0.f ? 0.f : __fdividef(v_scale, x.l);  // if l is NaN, so is out
    const float4 y = x.l == 0.f ? float4{0.f, 0.f, 0.f, 0.f} : factor * x.acc;
    *(uint2*)out = {pack<T>(y.x, y.y), pack<T>(y.z, y.w)};
    if (lse != nullptr) *lse = x.l == 0.f ? -INFINITY : (x.m + log2_fast(x.l)) * kLn2;
  }
};

template <class T>
JF_DEVICE void write_row(const DecodeParams& p, int b, int head, int row, int first, float v_scale,
                         const State4& x) {
  RowTarget<T>(p, b, head, row, first).write(v_scale, x);
}

}  // namespace jax_flash
