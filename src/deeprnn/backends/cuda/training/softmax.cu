// Cross-entropy over many classes: logits become their own gradient in place, one read and one write.
// Macros: CLASSES ITEMS (classes a thread holds in registers)
#include "common.cuh"

constexpr int THREADS = 512;

template <bool MAX> INLINE float combine(float a, float b) { return MAX ? fmaxf(a, b) : a + b; }
template <bool MAX> INLINE float over_block(float x) {
  __shared__ float part[THREADS / 32];
#pragma unroll
  for (int m = 16; m > 0; m >>= 1) x = combine<MAX>(x, __shfl_xor_sync(0xffffffffu, x, m));
  __syncthreads();  // the array may still be read from the last time
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = x;
  __syncthreads();
  x = part[0];
#pragma unroll
  for (int i = 1; i < THREADS / 32; i++) x = combine<MAX>(x, part[i]);
  return x;
}

// Row r of `logits`: nats[r] = -log softmax at the target, and the row itself softmax - 1[target]; zeros where the
// mask does not hold. A NaN or infinity anywhere in a row that counts gives NaN, as the plain formula does; so does a
// target that is no class.
extern "C" __global__ void __launch_bounds__(THREADS)
    softmax_gradient(float* logits, const i64* targets, const u8* mask, float* nats) {
  i64 row = blockIdx.x;
  float* at = logits + row * CLASSES;
  if (!mask[row]) {
    for (int i = threadIdx.x; i < CLASSES; i += THREADS) at[i] = 0.0f;
    if (threadIdx.x == 0) nats[row] = 0.0f;
    return;
  }
  i64 target = targets[row];  // the logit is read before anybody writes: the sums below stand between
  float wanted = target >= 0 && target < CLASSES ? at[target] : __uint_as_float(0x7fffffffu);
  float x[ITEMS], most = -3.4e38f, sum = 0.0f;
#pragma unroll
  for (int j = 0; j < ITEMS; j++) {
    int i = j * THREADS + threadIdx.x;
    x[j] = i < CLASSES ? at[i] : -3.4e38f;
    most = fmaxf(most, x[j]);
  }
  most = over_block<true>(most);
#pragma unroll
  for (int j = 0; j < ITEMS; j++) {
    x[j] = j * THREADS + threadIdx.x < CLASSES ? expf(x[j] - most) : 0.0f;
    sum += x[j];
  }
  sum = over_block<false>(sum);
  float scale = 1.0f / sum;
#pragma unroll
  for (int j = 0; j < ITEMS; j++) {
    int i = j * THREADS + threadIdx.x;
    if (i < CLASSES) at[i] = fmaf(x[j], scale, i == target ? -1.0f : 0.0f);
  }
  if (threadIdx.x == 0) nats[row] = logf(sum) + most - wanted;
}
