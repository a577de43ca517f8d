// From a stage in shared memory to the A operands of mma.m16n8k16, for 16-bit and 8-bit caches.
//
// A stage holds 16 tokens in groups of 128 bytes of a row: group, token, then eight 16-byte pieces
// whose order is XORed with the token (what TMA calls the 128-byte swizzle), so that ldmatrix meets
// no bank twice. Keys are read as rows (tokens are M, head elements K), values transposed (head
// elements are M, tokens K).
//
// 8-bit numbers become fp16, exactly, on the way. A register of ldmatrix then holds two 16-bit
// operands, which permutes elements inside each block of 16:
//   keys:   k-slots 2i, 2i+1, 2i+8, 2i+9 are elements 4i .. 4i+3 (so are the query's, see query_at)
//   values: rows r and r+8 of the product are elements 2r and 2r+1 (see value_element)
#pragma once
#include "ptx.cuh"

namespace jax_flash {

struct E4M3 {
  uint8_t bits;
};
struct E5M2 {
  uint8_t bits;
};
struct Int8 {
  int8_t bits;
};

constexpr int kGroupBytes = 16 * 128;

JF_DEVICE uint32_t piece_offset(int token, int piece) {
  return (piece >> 3) * kGroupBytes + token * 128 + (((piece & 7) ^ (token & 7)) << 4);
}

// Four numbers as halves: those of the low half of x, and those of the high half.
template <class KV>
JF_DEVICE void widen(uint32_t x, uint32_t& low, uint32_t& high);

template <>
JF_DEVICE void widen<E5M2>(uint32_t x, uint32_t& low, uint32_t& high) {
  // fp16 with a short mantissa
  low = __byte_perm(x, 0, 0x1404), high = __byte_perm(x, 0, 0x3424);
}

template <>
JF_DEVICE void widen<Int8>(uint32_t x, uint32_t& low, uint32_t& high) {
  const auto less = [](uint32_t y) {  // 1024 + 128 + x
    const __half2 z = __hsub2(*(const __half2*)&y, __half2half2(__ushort_as_half(0x6480)));
    return *(const uint32_t*)&z;
  };
  const uint32_t biased = x ^ 0x80808080u;
  low = less(__byte_perm(biased, 0x64646464u, 0x4140));
  high = less(__byte_perm(biased, 0x64646464u, 0x4342));
}

template <>
JF_DEVICE void widen<E4M3>(uint32_t x, uint32_t& low, uint32_t& high) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
  // The instruction can read either half; to shift one down is not free.
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h;}"
      : "=r"(low), "=r"(high)
      : "r"(x));
#else
  const auto half_of = [](uint32_t y) {
    // Seven bits of exponent and mantissa, one place lower than in fp16, whose bias is 8 larger.
    uint32_t d = (y & 0x80008000u) | ((y & 0x7f007f00u) >> 1);
    const __half2 z = __hmul2(*(const __half2*)&d, __half2half2(__ushort_as_half(0x5c00)));
    d = *(const uint32_t*)&z;
    if ((y & 0x7f00u) == 0x7f00u) d |= 0x7fffu;  // all ones is NaN
    if ((y & 0x7f000000u) == 0x7f000000u) d |= 0x7fff0000u;
    return d;
  };
  low = half_of(__byte_perm(x, 0, 0x1404)), high = half_of(__byte_perm(x, 0, 0x3424));
#endif
}

// KV is the cache's type; T that of the products: KV itself, or fp16 for an 8-bit cache.
template <class T, class KV>
struct Fragments {
  static constexpr bool kWiden = sizeof(KV) == 1;

  // Element of the head of k-slot pair `half` (0: 2i, 2i+1; 1: 2i+8, 2i+9) in a block of 16.
  static JF_DEVICE int query_at(int quad_lane, int half) {
    return kWiden ? quad_lane * 4 + half * 2 : quad_lane * 2 + half * 8;
  }

  // Element of the head of accumulator row `group_lane` (+ 8 where `upper`) in a block of 16.
  static JF_DEVICE int value_element(int group_lane, int upper) {
    return kWiden ? group_lane * 2 + upper : group_lane + upper * 8;
  }

  // A operands of blocks 2 * pair and 2 * pair + 1 of 16 head elements.
  static JF_DEVICE void keys(uint32_t stage, int lane, int pair, uint32_t (&a)[2][4]) {
    if constexpr (!kWiden) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        ldmatrix(a[h], stage + piece_offset(lane & 15, 2 * (2 * pair + h) + (lane >> 4)));
      }
    } else {
      uint32_t r[4];
      ldmatrix(r, stage + piece_offset(lane & 15, 2 * pair + (lane >> 4)));
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        widen<KV>(r[2 * h], a[h][0], a[h][2]);
        widen<KV>(r[2 * h + 1], a[h][1], a[h][3]);
      }
    }
  }

  static JF_DEVICE void values(uint32_t stage, int lane, int pair, uint32_t (&a)[2][4]) {
    if constexpr (!kWiden) {
      const int token = (lane & 7) + ((lane >> 4) << 3);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        ldmatrix_transposed(
            a[h], stage + piece_offset(token, 2 * (2 * pair + h) + ((lane >> 3) & 1)));
      }
    } else {
      uint32_t r[4];
      ldmatrix_transposed(r, stage + piece_offset(lane & 15, 2 * pair + (lane >> 4)));
#pragma unroll
      for (int h = 0; h < 2; ++h) {  // bytes: token 0 element 0, 1; token 1 element 0, 1
        widen<KV>(__byte_perm(r[2 * h], 0, 0x3120), a[h][0], a[h][1]);
        widen<KV>(__byte_perm(r[2 * h + 1], 0, 0x3120), a[h][2], a[h][3]);
      }
    }
  }
};

}  // namespace jax_flash
