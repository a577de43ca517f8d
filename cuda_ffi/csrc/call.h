// From the buffers and attributes of an XLA custom call to parameters: shared by the two platforms.
//
// Names and order of what a target takes are a contract with exported programs: they change only
// together with the version in its name.
#pragma once
#include <algorithm>
#include <string>

#include "params.h"
#include "xla/ffi/api/ffi.h"

namespace jax_flash {

namespace ffi = xla::ffi;

using Run = Status (*)(const DecodeParams&, void* stream);
using RunAppend = Status (*)(const AppendParams&, void* stream);

inline bool read_type(ffi::DataType type, DType* result) {
  switch (type) {
    case ffi::F32: *result = DType::kF32; return true;
    case ffi::F16: *result = DType::kF16; return true;
    case ffi::BF16: *result = DType::kBF16; return true;
    case ffi::F8E4M3FN: *result = DType::kE4M3; return true;
    case ffi::F8E5M2: *result = DType::kE5M2; return true;
    case ffi::S8: *result = DType::kI8; return true;
    default: return false;
  }
}

inline std::string words(ffi::AnyBuffer x) {
  std::string text = "[";
  for (size_t i = 0; i < x.dimensions().size(); ++i) {
    text += (i ? "," : "") + std::to_string(x.dimensions()[i]);
  }
  return text + "]";
}

inline ffi::Error invalid(const std::string& message) {
  return ffi::Error::InvalidArgument("jax_flash: " + message);
}

// `shape()` is asked of failures only.
template <class Shape>
ffi::Error outcome(const char* kernel, Shape shape, Status status) {
  if (status.what == nullptr) return ffi::Error::Success();
  return ffi::Error::Internal("jax_flash: the kernel " + std::string(kernel) + " on " + shape() +
                              " was not launched: " + status.what + ": " + status.cause);
}

// Fused pools hold keys and values of a page one after another: [P, 2, ...].
enum Layout : int64_t { kContiguous = 0, kNHD = 1, kHND = 2, kFusedNHD = 3, kFusedHND = 4 };

inline bool is_fused(int64_t layout) { return layout >= kFusedNHD; }
inline bool has_heads_first(int64_t layout) { return layout == kHND || layout == kFusedHND; }

// Axes of a pool without that of keys and values: [page, token, head, element], or
// [page, head, token, element] where heads come first.
struct PoolAxes {
  int64_t pages, tokens, heads, dim;

  PoolAxes(ffi::AnyBuffer x, int64_t layout) {
    const auto d = x.dimensions();
    const int i = is_fused(layout) ? 2 : 1;
    pages = d[0], dim = d[i + 2];
    tokens = d[has_heads_first(layout) ? i + 1 : i], heads = d[has_heads_first(layout) ? i : i + 1];
  }
};

inline bool is_pool(ffi::AnyBuffer x, int64_t layout) {
  return x.dimensions().size() == (is_fused(layout) ? 5 : 4);
}

// `half` 0 for keys, 1 for values, of a fused pool.
inline KvView view_of(ffi::AnyBuffer x, int64_t layout, int half) {
  const PoolAxes axes(x, layout);
  const int64_t page = axes.tokens * axes.heads * axes.dim;
  KvView view{};
  view.page_stride = is_fused(layout) ? 2 * page : page;
  view.token_stride = has_heads_first(layout) ? axes.dim : axes.heads * axes.dim;
  view.head_stride = has_heads_first(layout) ? axes.tokens * axes.dim : axes.dim;
  const int64_t size = ffi::ByteWidth(x.element_type());
  view.data = (const char*)x.untyped_data() + (is_fused(layout) ? half * page * size : 0);
  return view;
}

inline void add_scale(KvView* view, ffi::AnyBuffer scale, int64_t layout) {
  const auto s = scale.dimensions();
  if (s.size() != 3) return;  // no scale
  view->scale = scale.typed_data<float>();
  const int64_t strides[3] = {s[0] > 1 ? s[1] * s[2] : 0, s[1] > 1 ? s[2] : 0, s[2] > 1 ? 1 : 0};
  view->scale_page_stride = strides[0];
  view->scale_token_stride = strides[has_heads_first(layout) ? 2 : 1];
  view->scale_head_stride = strides[has_heads_first(layout) ? 1 : 2];
}

// Arrays of size 0 stand for absent ones.
inline ffi::Error decode_call(Run run, void* stream, ffi::AnyBuffer q, ffi::AnyBuffer k,
                              ffi::AnyBuffer v, ffi::AnyBuffer block_tables,
                              ffi::AnyBuffer kv_lens, ffi::AnyBuffer sinks,
                              ffi::AnyBuffer alibi_slopes, ffi::AnyBuffer k_scale,
                              ffi::AnyBuffer v_scale, ffi::AnyBuffer chunk_ends,
                              ffi::Result<ffi::AnyBuffer> out,
                              ffi::Result<ffi::AnyBuffer> lse,
                              ffi::Result<ffi::AnyBuffer> partials, int64_t layout, float scale,
                              float soft_cap, bool is_causal, int64_t window_left,
                              int64_t window_right, int64_t num_splits) {
  const auto qd = q.dimensions();
  if (qd.size() != 4 || !is_pool(k, layout) || !is_pool(v, layout) ||
      kv_lens.element_count() != (size_t)qd[0]) {
    return invalid("decode takes query, key and value with four axes (a pool of both has five) and "
                   "one length a sequence");
  }
  if (num_splits < 0 || num_splits > 8 || (num_splits & (num_splits - 1)) != 0) {
    return invalid("decode shares a sequence among 1, 2, 4 or 8 blocks, or 0 for its own choice");
  }
  const PoolAxes axes(k, layout);
  DecodeParams p{};
  if (!read_type(q.element_type(), &p.q_type) || !read_type(k.element_type(), &p.kv_type)) {
    return invalid("decode does not know these types");
  }
  const bool is_paged = layout != kContiguous;
  p.q = q.untyped_data(), p.out = out->untyped_data(), p.lse = lse->typed_data<float>();
  p.k = view_of(k, layout, 0), p.v = view_of(v, layout, 1);
  add_scale(&p.k, k_scale, layout), add_scale(&p.v, v_scale, layout);
  p.block_tables = is_paged ? block_tables.typed_data<int32_t>() : nullptr;
  p.kv_lens = kv_lens.typed_data<int32_t>();
  const bool has_plan = chunk_ends.element_count() == (size_t)qd[0];
  p.chunk_ends = has_plan ? chunk_ends.typed_data<int32_t>() : nullptr;
  p.sinks = sinks.element_count() ? sinks.typed_data<float>() : nullptr;
  p.sinks_stride = (int64_t)sinks.element_count() > qd[2] ? qd[2] : 0;
  p.alibi_slopes = alibi_slopes.element_count() ? alibi_slopes.typed_data<float>() : nullptr;
  p.alibi_slopes_stride = (int64_t)alibi_slopes.element_count() > qd[2] ? qd[2] : 0;
  p.partials = partials->typed_data<float>(), p.num_partials = partials->element_count();
  p.batch = qd[0], p.q_len = qd[1], p.head_dim = qd[3];
  p.value_dim = PoolAxes(v, layout).dim;
  p.kv_heads = axes.heads;
  p.group = p.kv_heads ? qd[2] / p.kv_heads : 0;
  p.num_pages = axes.pages, p.page_size = axes.tokens;
  p.max_pages = is_paged ? block_tables.dimensions()[1] : 1;
  p.capacity = p.max_pages * p.page_size;
  p.by_page = Divisor::of(std::max(p.page_size, 1));
  p.by_group = p.q_len == 1 ? Divisor::none() : Divisor::of(std::max(p.group, 1));
  p.scale = scale, p.soft_cap = soft_cap, p.is_causal = is_causal;
  p.window_left = window_left, p.window_right = window_right;
  p.reach = window_left < 0 ? p.capacity : std::min<int64_t>(window_left + p.q_len, p.capacity);
  p.num_splits = num_splits;
  const auto shape = [&] {
    return "query " + words(q) + ", key " + words(k) + ", value " + words(v);
  };
  return outcome("decode", shape, run(p, stream));
}

inline AppendSide side_of(ffi::Result<ffi::AnyBuffer> pages, ffi::AnyBuffer tokens,
                          ffi::AnyBuffer scale, int64_t layout, int half) {
  const KvView view = view_of(*pages, layout, half);
  AppendSide side{};
  side.pages = (void*)view.data, side.tokens = tokens.untyped_data();
  side.page_stride = view.page_stride, side.token_stride = view.token_stride;
  side.head_stride = view.head_stride, side.dim = PoolAxes(*pages, layout).dim;
  if (scale.element_count()) side.scale = scale.typed_data<float>();
  side.scale_stride = scale.element_count() > 1 ? 1 : 0;
  return side;
}

// Of a fused pool, the first one is both, and the second one of size 0.
inline ffi::Error append_call(RunAppend run, void* stream, ffi::AnyBuffer key_pages,
                              ffi::AnyBuffer value_pages, ffi::AnyBuffer new_key,
                              ffi::AnyBuffer new_value, ffi::AnyBuffer slots,
                              ffi::AnyBuffer k_scale, ffi::AnyBuffer v_scale, ffi::AnyBuffer cos,
                              ffi::AnyBuffer sin, ffi::Result<ffi::AnyBuffer> key_out,
                              ffi::Result<ffi::AnyBuffer> value_out, int64_t layout) {
  const bool has_values = !is_fused(layout);
  if (key_out->untyped_data() != key_pages.untyped_data() ||
      (has_values && value_out->untyped_data() != value_pages.untyped_data())) {
    return invalid("append must be called with its pools aliased to its results");
  }
  AppendParams p{};
  if (!is_pool(key_pages, layout) || !read_type(key_pages.element_type(), &p.pool_type) ||
      !read_type(new_key.element_type(), &p.token_type)) {
    return invalid("append does not know these pools or types");
  }
  const PoolAxes axes(key_pages, layout);
  p.k = side_of(key_out, new_key, k_scale, layout, 0);
  p.v = side_of(has_values ? value_out : key_out, new_value, v_scale, layout, 1);
  p.slots = slots.typed_data<int32_t>(), p.num_tokens = slots.element_count();
  p.kv_heads = axes.heads, p.page_size = axes.tokens, p.num_slots = axes.pages * axes.tokens;
  p.pairs = p.num_tokens ? cos.element_count() / p.num_tokens : 0;
  p.cos = cos.typed_data<float>(), p.sin = sin.typed_data<float>();
  const auto shape = [&] { return "pools " + words(key_pages) + " and " + words(value_pages); };
  return outcome("append", shape, run(p, stream));
}

#define JF_EXPORT extern "C" __attribute__((visibility("default")))

// The arguments and attributes of the targets, after those of the platform.
#define JF_BIND_DECODE(BINDING)  \
  BINDING.Arg<ffi::AnyBuffer>()  \
      .Arg<ffi::AnyBuffer>()     \
      .Arg<ffi::AnyBuffer>()     \
      .Arg<ffi::AnyBuffer>()     \
      .Arg<ffi::AnyBuffer>()     \
      .Arg<ffi::AnyBuffer>()     \
      .Arg<ffi::AnyBuffer>()     \
      .Arg<ffi::AnyBuffer>()     \
      .Arg<ffi::AnyBuffer>()     \
      .Arg<ffi::AnyBuffer>()     \
      .Ret<ffi::AnyBuffer>()     \
      .Ret<ffi::AnyBuffer>()     \
      .Ret<ffi::AnyBuffer>()     \
      .Attr<int64_t>("layout")   \
      .Attr<float>("scale")      \
      .Attr<float>("soft_cap")   \
      .Attr<bool>("is_causal")   \
      .Attr<int64_t>("window_left")  \
      .Attr<int64_t>("window_right") \
      .Attr<int64_t>("num_splits")

#define JF_BIND_APPEND(BINDING)  \
  BINDING.Arg<ffi::AnyBuffer>()  \
      .Arg<ffi::AnyBuffer>()     \
      .Arg<ffi::AnyBuffer>()     \
      .Arg<ffi::AnyBuffer>()     \
      .Arg<ffi::AnyBuffer>()     \
      .Arg<ffi::AnyBuffer>()     \
      .Arg<ffi::AnyBuffer>()     \
      .Arg<ffi::AnyBuffer>()     \
      .Arg<ffi::AnyBuffer>()     \
      .Ret<ffi::AnyBuffer>()     \
      .Ret<ffi::AnyBuffer>()     \
      .Attr<int64_t>("layout")

}  // namespace jax_flash
