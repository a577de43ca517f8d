// Where the tokens of a sequence lie, and which of them its queries see.
#pragma once
#include "params.h"
#include "ptx.cuh"

namespace jax_flash {

constexpr int kChunk = 16;  // tokens that one warp works on at a time, and the unit of scheduling

JF_DEVICE int clipped(const DecodeParams& p, int length) {
  return min(max(length, 0), p.capacity);
}

JF_DEVICE int page_of(const DecodeParams& p, int token) { return p.by_page.quotient(token); }

// Tokens [begin, end) of the cache, visible to one or to any new token of a sequence.
struct Span {
  int begin, end;

  JF_DEVICE int chunks() const { return (unsigned)(end - begin + kChunk - 1) / kChunk; }
};

// Of the new token `token`; it stands at length - q_len + token.
JF_DEVICE Span visible_to(const DecodeParams& p, int length, int token) {
  const int position = length - p.q_len + token;
  Span s{0, length};
  if (p.is_causal) s.end = min(s.end, position + 1);
  if (p.window_left >= 0) s.begin = max(s.begin, position - p.window_left);
  if (p.window_right >= 0 && position < p.capacity - p.window_right) {
    s.end = min(s.end, position + p.window_right + 1);
  }
  return s;
}

// What any new token sees, from a multiple of kChunk on: the last one all of the end, the first one
// most of the beginning.
JF_DEVICE Span visible_to_any(const DecodeParams& p, int length) {
  return {max(length - p.reach, 0) / kChunk * kChunk, length};
}

// The entry of the table for a token, whatever it holds.
JF_DEVICE int table_entry(const DecodeParams& p, int b, int token) {
  if (p.block_tables == nullptr) return b;
  const int column = page_of(p, token);
  return column < p.max_pages ? load_now(p.block_tables + (int64_t)b * p.max_pages + column) : -1;
}

// The page that an entry names, or -1 for none. To be followed only for tokens below the length:
// entries beyond it may hold anything.
JF_DEVICE int page_named(const DecodeParams& p, int entry) {
  return (unsigned)entry < (unsigned)p.num_pages ? entry : -1;
}

JF_DEVICE int page_id(const DecodeParams& p, int b, int token) {
  return page_named(p, table_entry(p, b, token));
}

// Of the scale of a token in a page that exists.
JF_DEVICE int64_t scale_offset(const DecodeParams& p, const KvView& view, int page, int token,
                               int head) {
  const int slot = token - page_of(p, token) * p.page_size;
  return page * view.scale_page_stride + slot * view.scale_token_stride +
         head * view.scale_head_stride;
}

}  // namespace jax_flash
