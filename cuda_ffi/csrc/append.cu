// Scatters new tokens into their slots, in place, one block a token: as they are where the pools
// hold what is given, else rotated, scaled and rounded on the way.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include "device.h"
#include "params.h"

namespace jax_flash {

// Where a token's first head lies, in elements; negative where it is to be skipped.
__device__ int64_t place_of(const AppendParams& p, const AppendSide& side, int token) {
  const int slot = p.slots[token];
  if (slot < 0 || slot >= p.num_slots) return -1;
  const int page = slot / p.page_size;
  return page * side.page_stride + (slot - page * p.page_size) * side.token_stride;
}

template <class Piece>
__device__ void copy_heads(const AppendParams& p, const AppendSide& side, int element_bytes) {
  const int token = blockIdx.x, pieces = side.dim * element_bytes / (int)sizeof(Piece);
  const int64_t place = place_of(p, side, token);
  if (place < 0) return;
  const Piece* source = (const Piece*)side.tokens + (int64_t)token * p.kv_heads * pieces;
  for (int i = threadIdx.x; i < p.kv_heads * pieces; i += blockDim.x) {
    const int head = i / pieces;
    uint8_t* target = (uint8_t*)side.pages + (place + head * side.head_stride) * element_bytes;
    ((Piece*)target)[i - head * pieces] = source[i];
  }
}

template <class Piece>
__global__ void copy_kernel(const __grid_constant__ AppendParams p, int element_bytes) {
  copy_heads<Piece>(p, p.k, element_bytes);
  copy_heads<Piece>(p, p.v, element_bytes);
}

__device__ float load(const void* data, int64_t i, DType type) {
  if (type == DType::kF32) return ((const float*)data)[i];
  if (type == DType::kF16) return __half2float(((const __half*)data)[i]);
  return __bfloat162float(((const __nv_bfloat16*)data)[i]);
}

// Rounded to the nearest, ties to even; 8-bit types saturate, and int8 stores 0 for NaN.
__device__ void store(void* data, int64_t i, DType type, float x) {
  switch (type) {
    case DType::kF32: ((float*)data)[i] = x; break;
    case DType::kF16: ((__half*)data)[i] = __float2half_rn(x); break;
    case DType::kBF16: ((__nv_bfloat16*)data)[i] = __float2bfloat16_rn(x); break;
    case DType::kE4M3:
      ((uint8_t*)data)[i] = __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
      break;
    case DType::kE5M2:
      ((uint8_t*)data)[i] = __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E5M2);
      break;
    case DType::kI8: ((int8_t*)data)[i] = (int8_t)min(max(__float2int_rn(x), -128), 127); break;
  }
}

// `pairs` channels of the head's first half of 2 * pairs are rotated with those of its second half.
__device__ void convert_heads(const AppendParams& p, const AppendSide& side, int pairs) {
  const int token = blockIdx.x;
  const int64_t place = place_of(p, side, token);
  if (place < 0) return;
  for (int i = threadIdx.x; i < p.kv_heads * side.dim; i += blockDim.x) {
    const int head = i / side.dim, d = i - head * side.dim;
    const int64_t from = (int64_t)token * p.kv_heads * side.dim + i;
    float x = load(side.tokens, from, p.token_type);
    if (d < 2 * pairs) {
      const bool is_low = d < pairs;
      const float other = load(side.tokens, is_low ? from + pairs : from - pairs, p.token_type);
      const int64_t angle = (int64_t)token * pairs + (is_low ? d : d - pairs);
      x = x * p.cos[angle] + (is_low ? -other : other) * p.sin[angle];
    }
    if (side.scale != nullptr) x = __fdiv_rn(x, side.scale[head * side.scale_stride]);
    store(side.pages, place + head * side.head_stride + d, p.pool_type, x);
  }
}

__global__ void convert_kernel(const __grid_constant__ AppendParams p) {
  convert_heads(p, p.k, p.pairs);
  convert_heads(p, p.v, 0);
}

Status append_cuda(const AppendParams& p, void* stream) {
  if (p.num_tokens == 0 || p.num_slots == 0 || p.kv_heads == 0) return {};
  constexpr int kThreads = 256;
  const cudaStream_t s = (cudaStream_t)stream;
  if (!p.is_copy()) {
    convert_kernel<<<p.num_tokens, kThreads, 0, s>>>(p);
    JF_CHECK(cudaGetLastError());
    return {};
  }
  const auto copy = [&](auto piece) -> Status {
    copy_kernel<decltype(piece)><<<p.num_tokens, kThreads, 0, s>>>(p, size_of(p.pool_type));
    JF_CHECK(cudaGetLastError());
    return {};
  };
  // Rows begin at multiples of their own length, and XLA aligns arrays to more than 16 bytes.
  const int alignment = (p.k.dim | p.v.dim) * size_of(p.pool_type);
  if (alignment % 16 == 0) return copy(uint4{});
  if (alignment % 4 == 0) return copy(uint32_t{});
  return copy(uint8_t{});
}

}  // namespace jax_flash
