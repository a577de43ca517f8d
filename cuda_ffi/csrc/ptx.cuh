// One function for each instruction that CUDA C++ has no name for.
#pragma once
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#define JF_DEVICE __device__ __forceinline__
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define JF_HOPPER 1
#endif

namespace jax_flash {

#ifdef JF_HOPPER
constexpr bool kIsHopper = true;
#else
constexpr bool kIsHopper = false;
#endif

using Half16 = __half;
using Bf16 = __nv_bfloat16;

JF_DEVICE uint32_t smem_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

JF_DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Of a number that is not tiny: within 2^-22, absolute from 0.5 to 2 and relative elsewhere.
JF_DEVICE float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Loads in the order of the source: the compiler moves none of them behind a use of another.
JF_DEVICE int load_now(const int32_t* source) {
  int x;
  asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(x) : "l"(source));
  return x;
}

// The same, and not behind barriers that follow, either.
JF_DEVICE int load_first(const int32_t* source) {
  int x;
  asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(x) : "l"(source) : "memory");
  return x;
}

// Three at once.
JF_DEVICE void load_now(const int32_t* a, const int32_t* b, const int32_t* c, int& x, int& y,
                        int& z) {
  asm volatile(
      "ld.global.nc.b32 %0, [%3];\nld.global.nc.b32 %1, [%4];\nld.global.nc.b32 %2, [%5];"
      : "=&r"(x), "=&r"(y), "=&r"(z)
      : "l"(a), "l"(b), "l"(c));
}

// ---- tensor cores

JF_DEVICE void ldmatrix(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

JF_DEVICE void ldmatrix_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

JF_DEVICE uint32_t transpose_8x8(uint32_t a) {
  uint32_t d;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a));
  return d;
}

// c += a b for a 16x16, b 16x8.
template <class T>
JF_DEVICE void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

template <>
JF_DEVICE void mma<Bf16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
      "{%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
JF_DEVICE void mma<Half16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
      "{%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <class T>
JF_DEVICE uint32_t pack(float low, float high);

template <>
JF_DEVICE uint32_t pack<Bf16>(float low, float high) {
  uint32_t d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}

template <>
JF_DEVICE uint32_t pack<Half16>(float low, float high) {
  uint32_t d;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}

// Bits 0 and 16 of the result say which half of the register is not finite.
template <class T>
JF_DEVICE uint32_t not_finite(uint32_t pair) {
  constexpr uint32_t kExponent = sizeof(T) == 2 && std::is_same_v<T, Bf16> ? 0x7f80u : 0x7c00u;
  return ((pair & kExponent) == kExponent) |
         (((pair >> 16) & kExponent) == kExponent ? 0x10000u : 0u);
}

// ---- copies into shared memory

// 16 bytes; zeros when size is 0.
JF_DEVICE void copy_async(uint32_t target, const void* source, int size, uint64_t policy) {
  asm volatile(
      "cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(target),
      "l"(source), "r"(size), "l"(policy)
      : "memory");
}

JF_DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int kPending>
JF_DEVICE void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// A cache that exceeds L2 should not push everything else out of it.
JF_DEVICE uint64_t l2_policy(bool evict_first) {
  uint64_t policy;
  if (evict_first) {
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  } else {
    asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  }
  return policy;
}

// ---- Hopper: TMA, its barriers, clusters, dependent launches

#ifdef JF_HOPPER

// One lane of a warp that is here as a whole.
JF_DEVICE bool elect() {
  uint32_t chosen;
  asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p;}" : "=r"(chosen));
  return chosen != 0;
}

JF_DEVICE void barrier_init(uint32_t barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
}

JF_DEVICE void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

JF_DEVICE void barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

JF_DEVICE void barrier_wait(uint32_t barrier, uint32_t phase) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again_%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again_%=;\n}" ::"r"(barrier),
      "r"(phase)
      : "memory");
}

// The box of a map [elements, token, part of the head, head, page] at one token, head and page.
JF_DEVICE void copy_tensor(uint32_t target, const CUtensorMap* map, int token, int head, int page,
                           uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %2, %4, %5}], [%6], %7;" ::"r"(target),
      "l"(map), "r"(0), "r"(token), "r"(head), "r"(page), "r"(barrier), "l"(policy)
      : "memory");
}

JF_DEVICE void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Without order of memory but for barriers that are initialised and fenced.
JF_DEVICE void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

JF_DEVICE void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The same place in the shared memory of another block of the cluster.
JF_DEVICE uint32_t peer_address(uint32_t address, int rank) {
  uint32_t d;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(d) : "r"(address), "r"(rank));
  return d;
}

// To a peer's shared memory; a barrier there counts the bytes when they have arrived. No fence is
// needed, which would wait for all that this block has on its way.
JF_DEVICE void send(uint32_t address, uint32_t barrier, float4 x) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, "
      "[%5];" ::"r"(address),
      "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(barrier)
      : "memory");
}

JF_DEVICE void send(uint32_t address, uint32_t barrier, float2 x) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1,%2}, "
      "[%3];" ::"r"(address),
      "f"(x.x), "f"(x.y), "r"(barrier)
      : "memory");
}

// Until all that was sent has arrived; of a barrier's first phase. It arrives in shared memory, for
// which the order inside a block is enough: that of a cluster would empty L1.
JF_DEVICE void wait_for_peers(uint32_t barrier) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again_%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0;\n"
      "@!done bra again_%=;\n}" ::"r"(barrier)
      : "memory");
}

#else  // so that the names exist; the host launches nothing that would get here

JF_DEVICE bool elect() { __trap(); return false; }
JF_DEVICE void barrier_init(uint32_t) { __trap(); }
JF_DEVICE void barrier_init_fence() { __trap(); }
JF_DEVICE void barrier_expect(uint32_t, uint32_t) { __trap(); }
JF_DEVICE void barrier_wait(uint32_t, uint32_t) { __trap(); }
JF_DEVICE void copy_tensor(uint32_t, const CUtensorMap*, int, int, int, uint32_t, uint64_t) {
  __trap();
}
JF_DEVICE void prefetch_map(const CUtensorMap*) { __trap(); }
// Without order of memory but for barriers that are initialised and fenced.
JF_DEVICE void cluster_arrive_relaxed() { __trap(); }
JF_DEVICE void cluster_wait() { __trap(); }
JF_DEVICE uint32_t peer_address(uint32_t, int) { __trap(); return 0; }
JF_DEVICE void send(uint32_t, uint32_t, float4) { __trap(); }
JF_DEVICE void send(uint32_t, uint32_t, float2) { __trap(); }
JF_DEVICE void wait_for_peers(uint32_t) { __trap(); }

#endif

}  // namespace jax_flash
