// The parts of a training update around the gradient, for a population in flat buffers (members, size).
#include "common.cuh"

struct Four { u32 x[4]; };

// Philox4x32-10 (Salmon et al. 2011): four random words from a counter and a key, no state anywhere.
INLINE Four philox(u32 c0, u32 c1, u32 c2, u32 c3, u32 k0, u32 k1) {
#pragma unroll
  for (int round = 0; round < 10; round++) {
    u32 high0 = __umulhi(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
    u32 high1 = __umulhi(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
    c0 = high1 ^ c1 ^ k0;
    c1 = low1;
    c2 = high0 ^ c3 ^ k1;
    c3 = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}
// Two normal numbers from two words (Box and Muller); u is never 0.
INLINE void normals(u32 a, u32 b, float& x, float& y) {
  float u = ((float)(a >> 8) + 0.5f) * (1.0f / 16777216.0f), angle = (float)(b >> 8) * (2.0f / 16777216.0f);
  float radius = sqrtf(-2.0f * logf(u)), s, c;
  sincospif(angle, &s, &c);
  x = radius * c;
  y = radius * s;
}

// out = parameters + std * normal(seed, step, element) for the first `count` elements, else parameters.
extern "C" __global__ void __launch_bounds__(256) add_noise(const float* parameters, float* out, const i64* seeds,
                                                             const i64* step, float std, i64 size, i64 count) {
  i64 member = blockIdx.y, element = 4 * ((i64)blockIdx.x * blockDim.x + threadIdx.x);
  if (element >= size) return;
  u64 seed = (u64)seeds[member], when = (u64)*step, index = (u64)element / 4;
  Four r = philox((u32)index, (u32)(index >> 32), (u32)when, (u32)(when >> 32), (u32)seed, (u32)(seed >> 32));
  float n[4];
  normals(r.x[0], r.x[1], n[0], n[1]);
  normals(r.x[2], r.x[3], n[2], n[3]);
#pragma unroll
  for (int i = 0; i < 4; i++)
    if (element + i < size) {
      float p = parameters[member * size + element + i];
      out[member * size + element + i] = element + i < count ? fmaf(std, n[i], p) : p;
    }
}

INLINE float block_sum(float x) {
  __shared__ float part[8];
#pragma unroll
  for (int m = 16; m > 0; m >>= 1) x += __shfl_xor_sync(0xffffffffu, x, m);
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = x;
  __syncthreads();
  x = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; i++) x += part[i];
  return x;
}

// partial[member, block] = sum of squares of the block's share; always the same order, so the same bits.
extern "C" __global__ void __launch_bounds__(256) squares(const float* gradient, float* partial, i64 size) {
  const float* g = gradient + (i64)blockIdx.y * size;
  float sum = 0.0f;
  for (i64 i = (i64)blockIdx.x * 256 + threadIdx.x; i < size; i += (i64)gridDim.x * 256) sum = fmaf(g[i], g[i], sum);
  sum = block_sum(sum);
  if (threadIdx.x == 0) partial[blockIdx.y * gridDim.x + blockIdx.x] = sum;
}

// parameters -= rate * min(1, threshold / norm) * multiplier * gradient.
extern "C" __global__ void __launch_bounds__(256)
    clipped_step(float* parameters, const float* gradient, const float* partial, const float* rate,
                 const float* multipliers, float* norm, float threshold, i64 size) {
  i64 member = blockIdx.y;
  float sum = 0.0f;
  for (u32 i = threadIdx.x; i < gridDim.x; i += 256) sum += partial[member * gridDim.x + i];
  float length = sqrtf(block_sum(sum));
  if (blockIdx.x == 0 && threadIdx.x == 0) norm[member] = length;
  float scale = threshold > 0.0f && length > threshold ? threshold / length : 1.0f;
  scale *= rate[member];
  for (i64 i = (i64)blockIdx.x * 256 + threadIdx.x; i < size; i += (i64)gridDim.x * 256) {
    float m = multipliers ? multipliers[i] * scale : scale;
    parameters[member * size + i] = fmaf(-m, gradient[member * size + i], parameters[member * size + i]);
  }
}
