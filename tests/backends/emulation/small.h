// Stands in for common.cuh where a kernel needs no clusters: every thread of a block is a fibre, all of them meet at
// every barrier, and their order changes from one to the next. Ends in `run`, which takes arguments as the driver does.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>
#include "fibres.h"
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
typedef unsigned char u8;
#define INLINE static inline
#define CONST constexpr
#define __global__
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))
#define __grid_constant__
#define __launch_bounds__(...)
using std::max;
using std::min;
struct float4 { float x, y, z, w; };
struct uint2 { u32 x, y; };
struct Index { u32 x, y; };
static Index blockIdx, threadIdx, blockDim, gridDim;
static std::vector<Stack> fibres;
static std::vector<char> finished;
static Stack home;
static float lanes[1024];

INLINE void __syncthreads() { u32 i = threadIdx.x; go(fibres[i], home); threadIdx.x = i; }
INLINE void __syncwarp() { __syncthreads(); }
INLINE float __shfl_xor_sync(u32, float value, int mask) {   // by all threads of the block at once
  lanes[threadIdx.x] = value;
  __syncthreads();
  value = lanes[threadIdx.x ^ mask];
  __syncthreads();
  return value;
}
INLINE float __uint_as_float(u32 x) { float r; memcpy(&r, &x, 4); return r; }
INLINE u32 __float_as_uint(float x) { u32 r; memcpy(&r, &x, 4); return r; }
INLINE float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
constexpr float END = 3.402823466e38f;
INLINE void touch(const float*) {}
INLINE void atomicMax(u32* at, u32 x) { *at = max(*at, x); }
INLINE int __ffs(int x) { return __builtin_ffs(x); }
INLINE u32 __umulhi(u32 a, u32 b) { return (u32)((u64)a * b >> 32); }
INLINE void sincospif(float x, float* s, float* c) { *s = (float)sin(M_PI * x); *c = (float)cos(M_PI * x); }

static void** given;
template <class... A, size_t... I> void call(void (*kernel)(A...), std::index_sequence<I...>) { kernel(*(A*)given[I]...); }
template <class... A> void call(void (*kernel)(A...)) { call(kernel, std::index_sequence_for<A...>()); }

#define RUN(KERNEL) \
  static void body() { u32 i = threadIdx.x; call(KERNEL); finished[i] = 1; go(fibres[i], home); } \
  extern "C" void run(void** arguments, u32 grid, u32 rows, u32 threads) { run_blocks(body, arguments, grid, rows, threads); }
static void run_blocks(void (*body)(), void** arguments, u32 grid, u32 rows, u32 threads) {
  static std::vector<std::vector<char>> stacks;   // kept: some kernels are launched a thousand times
  stacks.resize(threads, std::vector<char>(1 << 15));
  given = arguments;
  gridDim = {grid, rows};
  blockDim = {threads, 1};
  fibres.resize(threads);
  for (u32 b = 0; b < grid * rows; b++) {
    blockIdx = {b % grid, b / grid};
    finished.assign(threads, 0);
    for (u32 i = 0; i < threads; i++) fibres[i].begin(body, stacks[i].data(), stacks[i].size());
    for (u32 turn = 0, left = threads; left; turn++) {
      left = 0;
      for (u32 n = 0; n < threads; n++) {
        u32 i = turn % 2 ? threads - 1 - n : n;
        if (finished[i]) continue;
        threadIdx = {i, 0};
        go(home, fibres[i]);
        left += !finished[i];
      }
    }
  }
}
