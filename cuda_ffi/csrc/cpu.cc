// The same targets on platform "Host", in plain loops: so that everything above the kernels runs,
// and is held to the contract, on machines without a GPU. Right, not fast.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "call.h"

namespace jax_flash {
namespace {

// Numbers of 16 and 8 bits by their fields; `finite_only` types (e4m3fn) have NaN at all ones only.
float from_bits(uint32_t bits, int exponent_bits, int mantissa_bits, bool finite_only) {
  const int sign = bits >> (exponent_bits + mantissa_bits) & 1;
  const int largest = (1 << exponent_bits) - 1, bias = largest / 2;
  const int exponent = bits >> mantissa_bits & largest;
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  const float fraction = mantissa / float(1 << mantissa_bits);
  float x = exponent ? std::ldexp(1.f + fraction, exponent - bias) : std::ldexp(fraction, 1 - bias);
  if (exponent == largest && !finite_only) {
    x = mantissa ? NAN : INFINITY;
  } else if (finite_only && exponent == largest && mantissa == (1 << mantissa_bits) - 1) {
    x = NAN;
  }
  return sign ? -x : x;
}

float load(const void* data, int64_t index, DType type) {
  if (type == DType::kF32) return ((const float*)data)[index];
  if (type == DType::kI8) return ((const int8_t*)data)[index];
  if (size_of(type) == 1) {
    const uint8_t bits = ((const uint8_t*)data)[index];
    return type == DType::kE4M3 ? from_bits(bits, 4, 3, true) : from_bits(bits, 5, 2, false);
  }
  const uint16_t bits = ((const uint16_t*)data)[index];
  if (type == DType::kF16) return from_bits(bits, 5, 10, false);
  const uint32_t wide = (uint32_t)bits << 16;
  float x;
  std::memcpy(&x, &wide, 4);
  return x;
}

// The bits of |x| in a type of less than 16 bits of mantissa, in units of the last place; a carry
// into the exponent comes out right by itself.
uint32_t bits_of(float x, int bias, int mantissa_bits) {
  const int exponent = std::max(std::ilogb(std::max(std::fabs(x), 1e-30f)), 1 - bias);
  const float places = std::nearbyint(std::ldexp(std::fabs(x), mantissa_bits - exponent));
  return ((exponent + bias - 1) << mantissa_bits) + (uint32_t)places;
}

// Rounded to nearest, ties to even; 8-bit types saturate, and int8 stores 0 for NaN.
void store(void* data, int64_t index, DType type, float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t sign = bits >> 31;
  if (type == DType::kF32) {
    ((float*)data)[index] = x;
  } else if (type == DType::kI8) {
    const float clipped = std::clamp(std::nearbyint(x), -128.f, 127.f);
    ((int8_t*)data)[index] = std::isnan(x) ? 0 : (int8_t)clipped;
  } else if (size_of(type) == 1) {
    const bool is_e4m3 = type == DType::kE4M3;
    const float magnitude = std::min(std::fabs(x), is_e4m3 ? 448.f : 57344.f);
    const uint32_t finite = is_e4m3 ? bits_of(magnitude, 7, 3) : bits_of(magnitude, 15, 2);
    ((uint8_t*)data)[index] = sign << 7 | (std::isnan(x) ? (is_e4m3 ? 0x7fu : 0x7eu) : finite);
  } else if (std::isnan(x)) {
    ((uint16_t*)data)[index] = type == DType::kF16 ? 0x7e00u : 0x7fc0u;
  } else if (type == DType::kBF16) {
    ((uint16_t*)data)[index] = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  } else {
    const bool overflows = std::fabs(x) >= 65520.f;
    ((uint16_t*)data)[index] = sign << 15 | (overflows ? 0x7c00u : bits_of(x, 15, 10));
  }
}

struct Span {
  int begin, end;
};

Span visible_to(const DecodeParams& p, int length, int token) {
  const int64_t position = (int64_t)length - p.q_len + token;
  int64_t begin = 0, end = length;
  if (p.is_causal) end = std::min(end, position + 1);
  if (p.window_left >= 0) begin = std::max(begin, position - p.window_left);
  if (p.window_right >= 0) end = std::min(end, position + p.window_right + 1);
  return {(int)begin, (int)std::max(end, begin)};
}

// A number of a head of one token, times its scale.
struct Row {
  const KvView* view;
  DType type;
  int64_t at;
  float scale;

  float operator[](int d) const { return load(view->data, at + d, type) * scale; }
};

Row row_of(const DecodeParams& p, const KvView& view, int64_t page, int token, int head) {
  const int slot = token % p.page_size;
  const float scale = view.scale ? view.scale[page * view.scale_page_stride +
                                              slot * view.scale_token_stride +
                                              head * view.scale_head_stride]
                                 : 1.f;
  return {&view, p.kv_type,
          page * view.page_stride + slot * view.token_stride + head * view.head_stride, scale};
}

void attend(const DecodeParams& p, int b, int token, int q_head) {
  const int head = q_head / p.group;
  const int64_t index = ((int64_t)b * p.q_len + token) * (p.kv_heads * p.group) + q_head;
  const int length = std::clamp(p.kv_lens[b], 0, p.capacity);
  const int position = length - p.q_len + token;
  const Span span = visible_to(p, length, token);
  std::vector<double> x, acc(p.value_dim, 0.0);
  std::vector<Row> values;
  double m = -INFINITY, l = 0.0;
  bool is_tainted = false;
  for (int t = span.begin; t < span.end; ++t) {
    int64_t page = b;
    if (p.block_tables) page = p.block_tables[(int64_t)b * p.max_pages + t / p.page_size];
    if (page < 0 || page >= p.num_pages) {
      is_tainted = true;
      continue;
    }
    const Row key = row_of(p, p.k, page, t, head);
    double y = 0.0;
    for (int d = 0; d < p.head_dim; ++d) {
      y += (double)load(p.q, index * p.head_dim + d, p.q_type) * key[d];
    }
    y *= p.scale;
    if (p.alibi_slopes) {
      y += (double)p.alibi_slopes[b * p.alibi_slopes_stride + q_head] * (t - position);
    }
    if (p.soft_cap != 0.f) y = p.soft_cap * std::tanh(y / p.soft_cap);
    x.push_back(y), values.push_back(row_of(p, p.v, page, t, head));
    m = std::max(m, y);
    is_tainted |= !std::isfinite(y);
  }
  const bool is_empty = span.end <= span.begin;
  if (p.sinks && !is_empty) {
    const double sink = p.sinks[b * p.sinks_stride + q_head];
    m = std::max(m, sink);
    l = std::exp(sink - m);
  }
  for (size_t i = 0; i < x.size(); ++i) {
    const double e = std::exp(x[i] - m);
    l += e;
    for (int d = 0; d < p.value_dim; ++d) {
      const float v = values[i][d];
      is_tainted |= !std::isfinite(v);
      acc[d] += e * v;
    }
  }
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (int d = 0; d < p.value_dim; ++d) {
    const float out = is_tainted ? nan : is_empty ? 0.f : (float)(acc[d] / l);
    store(p.out, index * p.value_dim + d, p.q_type, out);
  }
  p.lse[index] = is_tainted ? nan : is_empty ? -INFINITY : (float)(m + std::log(l));
}

}  // namespace

Status decode_cpu(const DecodeParams& p) {
  for (int b = 0; b < p.batch; ++b) {
    for (int token = 0; token < p.q_len; ++token) {
      for (int head = 0; head < p.kv_heads * p.group; ++head) attend(p, b, token, head);
    }
  }
  return {};
}

namespace {

void append_token(const AppendParams& p, const AppendSide& side, int token, int pairs) {
  const int slot = p.slots[token];
  if (slot < 0 || slot >= p.num_slots) return;
  const int64_t place =
      slot / p.page_size * side.page_stride + slot % p.page_size * side.token_stride;
  for (int64_t head = 0; head < p.kv_heads; ++head) {
    const int64_t from = ((int64_t)token * p.kv_heads + head) * side.dim;
    const float scale = side.scale ? side.scale[head * side.scale_stride] : 1.f;
    for (int d = 0; d < side.dim; ++d) {
      float x = load(side.tokens, from + d, p.token_type);
      if (d < 2 * pairs) {
        const int c = d % pairs, other = d < pairs ? d + pairs : d - pairs;
        const float y = load(side.tokens, from + other, p.token_type);
        const int64_t angle = (int64_t)token * pairs + c;
        x = x * p.cos[angle] + (d < pairs ? -y : y) * p.sin[angle];
      }
      store(side.pages, place + head * side.head_stride + d, p.pool_type, x / scale);
    }
  }
}

void copy_token(const AppendParams& p, const AppendSide& side, int token) {
  const int slot = p.slots[token];
  if (slot < 0 || slot >= p.num_slots) return;
  const int64_t place =
      slot / p.page_size * side.page_stride + slot % p.page_size * side.token_stride;
  const size_t bytes = side.dim * size_of(p.pool_type);
  for (int64_t head = 0; head < p.kv_heads; ++head) {
    std::memcpy((char*)side.pages + (place + head * side.head_stride) * size_of(p.pool_type),
                (const char*)side.tokens + ((int64_t)token * p.kv_heads + head) * bytes, bytes);
  }
}

}  // namespace

Status append_cpu(const AppendParams& p) {
  for (int token = 0; token < p.num_tokens; ++token) {
    if (p.is_copy()) {
      copy_token(p, p.k, token);
      copy_token(p, p.v, token);
    } else {
      append_token(p, p.k, token, p.pairs);
      append_token(p, p.v, token, 0);
    }
  }
  return {};
}

namespace {

template <class... Args>
ffi::Error decode_on_host(Args... args) {
  return decode_call([](const DecodeParams& p, void*) { return decode_cpu(p); }, nullptr, args...);
}

template <class... Args>
ffi::Error append_on_host(Args... args) {
  return append_call([](const AppendParams& p, void*) { return append_cpu(p); }, nullptr, args...);
}

}  // namespace
}  // namespace jax_flash

using namespace jax_flash;

JF_EXPORT XLA_FFI_Error* jax_flash_decode(XLA_FFI_CallFrame*);
JF_EXPORT XLA_FFI_Error* jax_flash_append(XLA_FFI_CallFrame*);

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_flash_decode,
                              [](auto... args) { return decode_on_host(args...); },
                              JF_BIND_DECODE(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_flash_append,
                              [](auto... args) { return append_on_host(args...); },
                              JF_BIND_APPEND(ffi::Ffi::Bind()));
