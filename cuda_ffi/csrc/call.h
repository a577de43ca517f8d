// From the buffers and attributes of an XLA custom call to parameters: shared by the two platforms.
//
// Names and order of what a target takes are a contract with exported programs: they change only
// together with the version in its name.
#pragma once
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

inline ffi::Error outcome(const char* kernel, const std::string& shape, Status status) {
  if (status.what == nullptr) return ffi::Error::Success();
  return ffi::Error::Internal("jax_flash: the kernel " + std::string(kernel) + " on " + shape +
                              " was not launched: " + status.what + ": " + status.cause);
}

// log2 of a power of two, else -1.
inline int shift_of(int x) {
  int shift = 0;
  while ((1 << shift) < x && shift < 30) ++shift;
  return 1 << shift == x ? shift : -1;
}

enum Layout : int64_t { kContiguous = 0, kNHD = 1, kHND = 2 };

// Axes [page, token, head, element], or [page, head, token, element] where heads come first.
inline KvView view_of(ffi::AnyBuffer x, ffi::AnyBuffer scale, bool heads_first) {
  const auto d = x.dimensions();
  KvView view{};
  view.data = x.untyped_data();
  view.page_stride = d[1] * d[2] * d[3];
  view.token_stride = heads_first ? d[3] : d[2] * d[3];
  view.head_stride = heads_first ? d[2] * d[3] : d[3];
  const auto s = scale.dimensions();
  if (s.size() != 3) return view;  // no scale
  view.scale = scale.typed_data<float>();
  const int64_t strides[3] = {s[0] > 1 ? s[1] * s[2] : 0, s[1] > 1 ? s[2] : 0, s[2] > 1 ? 1 : 0};
  view.scale_page_stride = strides[0];
  view.scale_token_stride = strides[heads_first ? 2 : 1];
  view.scale_head_stride = strides[heads_first ? 1 : 2];
  return view;
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
                              int64_t window_right, bool batch_invariant) {
  const auto qd = q.dimensions(), kd = k.dimensions(), vd = v.dimensions();
  if (qd.size() != 4 || kd.size() != 4 || vd.size() != 4 ||
      kv_lens.element_count() != (size_t)qd[0]) {
    return invalid("decode takes query, key and value with four axes and one length a sequence");
  }
  DecodeParams p{};
  if (!read_type(q.element_type(), &p.q_type) || !read_type(k.element_type(), &p.kv_type)) {
    return invalid("decode does not know these types");
  }
  const bool heads_first = layout == kHND, is_paged = layout != kContiguous;
  p.q = q.untyped_data(), p.out = out->untyped_data(), p.lse = lse->typed_data<float>();
  p.k = view_of(k, k_scale, heads_first), p.v = view_of(v, v_scale, heads_first);
  p.block_tables = is_paged ? block_tables.typed_data<int32_t>() : nullptr;
  p.kv_lens = kv_lens.typed_data<int32_t>();
  const bool has_plan = chunk_ends.element_count() == (size_t)qd[0];
  p.chunk_ends = has_plan ? chunk_ends.typed_data<int32_t>() : nullptr;
  p.sinks = sinks.element_count() ? sinks.typed_data<float>() : nullptr;
  p.sinks_stride = (int64_t)sinks.element_count() > qd[2] ? qd[2] : 0;
  p.alibi_slopes = alibi_slopes.element_count() ? alibi_slopes.typed_data<float>() : nullptr;
  p.alibi_slopes_stride = (int64_t)alibi_slopes.element_count() > qd[2] ? qd[2] : 0;
  p.partials = partials->typed_data<float>(), p.num_partials = partials->element_count();
  p.batch = qd[0], p.q_len = qd[1], p.head_dim = qd[3], p.value_dim = vd[3];
  p.kv_heads = heads_first ? kd[1] : kd[2];
  p.group = p.kv_heads ? qd[2] / p.kv_heads : 0;
  p.num_pages = kd[0], p.page_size = heads_first ? kd[2] : kd[1];
  p.max_pages = is_paged ? block_tables.dimensions()[1] : 1;
  p.capacity = p.max_pages * p.page_size;
  p.page_shift = shift_of(p.page_size);
  p.scale = scale, p.soft_cap = soft_cap, p.is_causal = is_causal;
  p.window_left = window_left, p.window_right = window_right;
  p.batch_invariant = batch_invariant;
  const std::string shape = "query " + words(q) + ", key " + words(k) + ", value " + words(v);
  return outcome("decode", shape, run(p, stream));
}

inline ffi::Error append_call(RunAppend run, void* stream, ffi::AnyBuffer key_pages,
                              ffi::AnyBuffer value_pages, ffi::AnyBuffer new_key,
                              ffi::AnyBuffer new_value, ffi::AnyBuffer slots,
                              ffi::Result<ffi::AnyBuffer> key_out,
                              ffi::Result<ffi::AnyBuffer> value_out, int64_t layout) {
  if (key_out->untyped_data() != key_pages.untyped_data() ||
      value_out->untyped_data() != value_pages.untyped_data()) {
    return invalid("append must be called with its pools aliased to its results");
  }
  DType type;
  if (!read_type(key_pages.element_type(), &type)) return invalid("append does not know this type");
  const bool heads_first = layout == kHND;
  const auto kd = key_pages.dimensions();
  const int64_t size = size_of(type);
  const KvView k = view_of(key_pages, slots, heads_first);
  const KvView v = view_of(value_pages, slots, heads_first);
  AppendParams p{};
  p.key_pages = key_out->untyped_data(), p.value_pages = value_out->untyped_data();
  p.new_key = new_key.untyped_data(), p.new_value = new_value.untyped_data();
  p.slots = slots.typed_data<int32_t>(), p.tokens = slots.element_count();
  p.page_stride = k.page_stride * size, p.token_stride = k.token_stride * size;
  p.head_stride = k.head_stride * size, p.v_page_stride = v.page_stride * size;
  p.v_token_stride = v.token_stride * size, p.v_head_stride = v.head_stride * size;
  p.kv_heads = heads_first ? kd[1] : kd[2], p.page_size = heads_first ? kd[2] : kd[1];
  p.num_slots = kd[0] * p.page_size;
  p.key_bytes = kd[3] * size, p.value_bytes = value_pages.dimensions()[3] * size;
  return outcome("append", "pools " + words(key_pages) + " and " + words(value_pages),
                 run(p, stream));
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
      .Attr<bool>("batch_invariant")

#define JF_BIND_APPEND(BINDING)  \
  BINDING.Arg<ffi::AnyBuffer>()  \
      .Arg<ffi::AnyBuffer>()     \
      .Arg<ffi::AnyBuffer>()     \
      .Arg<ffi::AnyBuffer>()     \
      .Arg<ffi::AnyBuffer>()     \
      .Ret<ffi::AnyBuffer>()     \
      .Ret<ffi::AnyBuffer>()     \
      .Attr<int64_t>("layout")

}  // namespace jax_flash
