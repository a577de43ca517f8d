// What one launch needs, as plain structs: the same for the CUDA kernels and for their twin on the
// CPU. No framework, no templates. Strides and offsets are 64-bit and in elements.
#pragma once
#include <cstdint>

#ifdef __CUDACC__
#define JF_BOTH __host__ __device__
#else
#define JF_BOTH
#endif

namespace jax_flash {

enum class DType : int { kF32, kF16, kBF16, kE4M3, kE5M2, kI8 };

inline int size_of(DType type) {
  return type == DType::kF32 ? 4 : type == DType::kF16 || type == DType::kBF16 ? 2 : 1;
}

// A cache seen as blocks of `page_size` tokens: pages of a pool, in either layout, or the rows of a
// contiguous cache (one block a sequence, found without a table).
struct KvView {
  const void* data;
  int64_t page_stride, token_stride, head_stride;
  // What the elements are multiplied by, fp32; null is 1. A stride is 0 where one number serves
  // all.
  const float* scale;
  int64_t scale_page_stride, scale_token_stride, scale_head_stride;

  JF_BOTH bool has_token_scales() const { return (scale_page_stride | scale_token_stride) != 0; }
};

// x / divisor for 0 <= x < 2^31 by a multiplication, made on the host: at runtime a division is
// some twenty instructions wherever one stands, and a call of one sequence is as long as its code.
struct Divisor {
  uint32_t factor, shift;  // ceil(2^(31 + shift) / divisor), which 31 bits of x cannot tell from it

  static Divisor of(int divisor) {
    uint32_t shift = 0;
    while ((int64_t)1 << shift < divisor) ++shift;
    return {(uint32_t)((((uint64_t)1 << (31 + shift)) + divisor - 1) / divisor), shift};
  }
  static Divisor none() { return {0, 0}; }  // x / infinity

  JF_BOTH int quotient(int x) const {
    return (uint32_t)(((uint64_t)(2 * (uint32_t)x) * factor) >> 32) >> shift;
  }
};

// out[b, t, h] = softmax(scale * q k^T + terms) v over the visible keys; lse likewise. Rows of one
// key/value head are numbered r = t * group + g: new token t, query head h = head * group + g.
struct DecodeParams {
  // What a block wants first stands together, in few lines of the cache that serves parameters.
  const int32_t* block_tables;  // [B, max_pages]; null for a contiguous cache
  const int32_t* kv_lens;       // [B], on the device; clipped to [0, capacity] where they are read
  const void* q;                // [B, q_len, Hq, D]
  int max_pages, num_pages, page_size, capacity;  // capacity: tokens that a sequence may have
  Divisor by_page, by_group;                      // page_size; group, or none of one new token
  int batch, q_len, kv_heads, group, head_dim, value_dim;
  int reach;  // tokens before the length that any new token sees
  float scale, soft_cap;                     // soft_cap 0: none
  int is_causal, window_left, window_right;  // window sides < 0: none
  void* out;  // [B, q_len, Hq, Dv], the query's type
  float* lse;  // [B, q_len, Hq], natural log
  KvView k, v;
  const int32_t* chunk_ends;  // [B], a plan of the split (schedule.cuh), or null
  const float *sinks, *alibi_slopes;          // [B, Hq] or null
  int64_t sinks_stride, alibi_slopes_stride;  // of the batch: Hq, or 0 where all share one row
  float* partials;              // room for parts of cut rows, see schedule.cuh
  int64_t num_partials;         // floats there
  DType q_type, kv_type;
  int num_splits;  // blocks that share a sequence and head: 1, 2, 4, 8, or 0 for whatever is fastest

  JF_BOTH int rows() const { return q_len * group; }

  JF_BOTH int token_of_row(int row) const { return by_group.quotient(row); }

  // Where a row stands in [B, q_len, Hq].
  JF_BOTH int row_index(int b, int head, int row) const {
    const int token = token_of_row(row), g = row - token * group;
    return (b * q_len + token) * (kv_heads * group) + head * group + g;
  }
};

// What is stored of the keys, or of the values: pool[page, slot] = new[token] / scale.
struct AppendSide {
  void* pages;          // updated in place
  const void* tokens;   // [tokens, Hk, dim]
  const float* scale;   // [Hk] or [1]; null is 1
  int64_t page_stride, token_stride, head_stride;  // of pages, in elements
  int64_t scale_stride;                            // 0 where one number serves all heads
  int dim;
};

// For slot_mapping[token] = page * page_size + slot. Keys may be rotated: channel c < pairs with
// channel c + pairs, by the angle of which cos and sin are given.
struct AppendParams {
  AppendSide k, v;
  const int32_t* slots;    // [tokens]; outside the pool: skipped
  const float *cos, *sin;  // [tokens, pairs]
  DType token_type, pool_type;
  int64_t num_slots;
  int num_tokens, kv_heads, page_size, pairs;

  // Whether what is stored is what is given.
  JF_BOTH bool is_copy() const {
    return token_type == pool_type && !k.scale && !v.scale && pairs == 0;
  }
};

// An outcome: null `what` is success.
struct Status {
  const char* what = nullptr;   // the step that failed
  const char* cause = nullptr;  // the runtime's own words
};

Status decode_cuda(const DecodeParams& params, void* stream);
Status append_cuda(const AppendParams& params, void* stream);
Status decode_cpu(const DecodeParams& params);
Status append_cpu(const AppendParams& params);

}  // namespace jax_flash
