// Shared device helpers: 16-byte moves, thread-block clusters and mbarriers in PTX.
// No host header is included, so NVRTC needs nothing but this folder.
#pragma once
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
typedef unsigned char u8;
#define INLINE static __device__ __forceinline__
#define METHOD __device__ __forceinline__
#define CONST constexpr __host__ __device__

INLINE u32 bf16_bits(float x) {  // round to nearest even; NaN stays NaN
  u32 b = __float_as_uint(x);
  if ((b & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;
  return (b + 0x7fffu + ((b >> 16) & 1u)) >> 16;
}
INLINE float bf16_low(u32 pair) { return __uint_as_float(pair << 16); }
INLINE float bf16_high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

// A select that the compiler cannot turn into a branch: shuffles inside divided branches are very slow.
INLINE float select(u32 condition, float yes, float no) {
  float r;
  asm("{.reg .pred p; setp.ne.u32 p, %3, 0; selp.f32 %0, %1, %2, p;}" : "=f"(r) : "f"(yes), "f"(no), "r"(condition));
  return r;
}

INLINE bool any_lane(bool x) { return __any_sync(0xffffffffu, x); }
INLINE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

template <int N> INLINE void load_shared(float (&x)[N], u32 at) {
  if constexpr (N == 1) asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x[0]) : "r"(at));
  if constexpr (N == 2) asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(x[0]), "=f"(x[1]) : "r"(at));
  if constexpr (N == 4)
    asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3]) : "r"(at));
}
INLINE void store_shared(u32 at, float x) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(x) : "memory"); }

#if __CUDA_ARCH__ >= 900
INLINE u32 cluster_rank() {
  u32 r;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
INLINE u32 map_rank(u32 address, u32 rank) {
  u32 r;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(address), "r"(rank));
  return r;
}
INLINE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
INLINE void barrier_init(u32 bar, u32 arrivals = 1) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}
INLINE void barrier_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
INLINE void barrier_expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
INLINE void barrier_arrive(u32 bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory"); }
// The bytes are counted by complete_tx, as a bulk copy's are, so the default scope (cta) orders what follows;
// .cluster would add an invalidation of L1 to every wait. By one thread: the others of its warp do not wait with it.
INLINE void barrier_wait_alone(u32 bar, u32 phase) {
  asm volatile(
      "{\n.reg .pred p;\nWAIT:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\nbra WAIT;\nDONE:\n}"
      ::"r"(bar), "r"(phase) : "memory");
}
// All lanes leave together: a warp that stays divided after the loop would run its products twice.
INLINE void barrier_wait(u32 bar, u32 phase) {
  barrier_wait_alone(bar, phase);
  __syncwarp();
}
// Store into another block's shared memory; the arrival of the bytes is counted on that block's barrier.
INLINE void send(u32 address, float value, u32 bar) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];"
               ::"r"(address), "r"(__float_as_uint(value)), "r"(bar) : "memory");
}
// Four words at once, the same way.
INLINE void send4(u32 address, const u32 (&v)[4], u32 bar) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1,%2,%3,%4}, [%5];"
               ::"r"(address), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]), "r"(bar) : "memory");
}
// Have these computed here, and not where they are used.
INLINE void pin(u8*& a, u32& b, u32& c) { asm volatile("" : "+l"(a), "+r"(b), "+r"(c)); }
// Copies by the copy engine: a run of shared memory into global memory; from there to the same place of every block of
// the cluster, where the bytes are counted. What was stored before is seen by it (and by Hopper's warpgroup products)
// after the fence, which every thread that stored must pass.
INLINE void copy_out(void* to, u32 from, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\ncp.async.bulk.commit_group;"
               ::"l"(to), "r"(from), "r"(bytes) : "memory");
}
INLINE void copies_out_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
template <int BLOCKS> INLINE void copy_round(u32 to, const void* from, u32 bytes, u32 bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;"
               ::"r"(to), "l"(from), "r"(bytes), "r"(bar), "h"((unsigned short)((1u << BLOCKS) - 1)) : "memory");
}
INLINE void copy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Registers of each thread of this warpgroup from here on (sm_90a).
template <int N> INLINE void more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> INLINE void fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }
#endif

constexpr float END = 3.402823466e38f;   // the largest number of fp32
INLINE void load_words(u32 (&x)[4], u32 at) {
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at));
}
INLINE void touch(const float* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
INLINE void store_words(u32 at, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
INLINE void raise_shared(u32 at, float x) {   // to x, where it is less; of numbers that are not negative
  asm volatile("red.shared.max.u32 [%0], %1;" ::"r"(at), "r"(__float_as_uint(x)) : "memory");
}
// d += a b: 16 x 16 times 16 x 8 in fp16, sums in fp32, on the tensor cores.
INLINE void multiply_add(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// The same where there is no sum yet.
INLINE void multiply_first(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
               : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
}
// A pair of fp16 and the magnitudes of two others; and of two pairs the larger magnitudes, the first without signs.
INLINE u32 plus_magnitudes(u32 sum, u32 x, u32 y) {
  u32 r;
  asm("{.reg .b32 a, b; abs.f16x2 a, %2; abs.f16x2 b, %3; add.rn.f16x2 a, a, b; add.rn.f16x2 %0, %1, a;}"
      : "=r"(r) : "r"(sum), "r"(x), "r"(y));
  return r;
}
INLINE u32 larger(u32 most, u32 pair) {
  u32 r;
  asm("{.reg .b32 a; abs.f16x2 a, %2; max.f16x2 %0, %1, a;}" : "=r"(r) : "r"(most), "r"(pair));
  return r;
}
