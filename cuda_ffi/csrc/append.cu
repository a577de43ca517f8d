// Scatters new tokens into their slots, in place: pure data movement, one block a token.
#include <cuda_runtime.h>

#include "device.h"
#include "params.h"

namespace jax_flash {

template <class Piece>
__device__ void copy_heads(uint8_t* target, int64_t head_stride, const uint8_t* source, int heads,
                           int bytes) {
  const int pieces = bytes / (int)sizeof(Piece);
  for (int i = threadIdx.x; i < heads * pieces; i += blockDim.x) {
    const int head = i / pieces, piece = i - head * pieces;
    const Piece* from = (const Piece*)(source + (int64_t)head * bytes);
    ((Piece*)(target + head * head_stride))[piece] = from[piece];
  }
}

template <class Piece>
__global__ void append_kernel(const __grid_constant__ AppendParams p) {
  const int token = blockIdx.x, slot = p.slots[token];
  if (slot < 0 || slot >= p.num_slots) return;
  const int page = slot / p.page_size, at = slot - page * p.page_size;
  copy_heads<Piece>(
      (uint8_t*)p.key_pages + page * p.page_stride + at * p.token_stride, p.head_stride,
      (const uint8_t*)p.new_key + (int64_t)token * p.kv_heads * p.key_bytes, p.kv_heads,
      p.key_bytes);
  copy_heads<Piece>(
      (uint8_t*)p.value_pages + page * p.v_page_stride + at * p.v_token_stride, p.v_head_stride,
      (const uint8_t*)p.new_value + (int64_t)token * p.kv_heads * p.value_bytes, p.kv_heads,
      p.value_bytes);
}

Status append_cuda(const AppendParams& p, void* stream) {
  if (p.tokens == 0 || p.num_slots == 0 || p.kv_heads == 0) return {};
  const auto launch = [&](auto piece) -> Status {
    append_kernel<decltype(piece)><<<p.tokens, 256, 0, (cudaStream_t)stream>>>(p);
    JF_CHECK(cudaGetLastError());
    return {};
  };
  // Rows begin at multiples of their own length, and XLA aligns arrays to more than 16 bytes.
  const int alignment = p.key_bytes | p.value_bytes;
  if (alignment % 16 == 0) return launch(uint4{});
  if (alignment % 4 == 0) return launch(uint32_t{});
  return launch(uint8_t{});
}

}  // namespace jax_flash
