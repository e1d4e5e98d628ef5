// How large the rows of several matrices are: what tensor_core.cu must know to keep numbers within fp16.
#include "common.cuh"
struct Rows {
  const float* data;
  i64 member, row, column;   // strides in elements
  i64 rows, length;
  float* out;
  i64 out_member, out_row;   // out_row 0: not of each row, but of eight at once, and of their sums
  i64 first;                 // block
};
struct Jobs { Rows list[JOBS]; };

// Infinities and NaN are not the largest of anything: they find their own way, or none (-inf before a relu).
INLINE void take(float x, float& most, float& sum) {
  x = fabsf(x) <= END ? fabsf(x) : 0.0f;
  most = fmaxf(most, x);
  sum += x;
}
// A warp has a row, and asks for up to 512 numbers of it at once; blockIdx.y is the member. A sum beyond fp32's end is of
// numbers that are not.
extern "C" __global__ void __launch_bounds__(256) max_abs_scan(const __grid_constant__ Jobs jobs) {
  __shared__ float all[8];
  int j = 0, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  while (j + 1 < JOBS && blockIdx.x >= jobs.list[j + 1].first) j++;
  const Rows& job = jobs.list[j];
  i64 piece = blockIdx.x - job.first, n = piece * 8 + warp;
  bool summed = job.out_row == 0;
  float most = 0.0f, sum = 0.0f;
  if (n < job.rows) {
    const float* from = job.data + blockIdx.y * job.member + n * job.row;
    int length = (int)job.length;
    if (job.column == 1 && length % 4 == 0 && (u64)from % 16 == 0) {
      const float4* fours = (const float4*)from;
      for (int k = lane; k < length / 4; k += 128) {
        float4 x[4];
#pragma unroll
        for (int i = 0; i < 4; i++) x[i] = k + 32 * i < length / 4 ? fours[k + 32 * i] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int i = 0; i < 4; i++) {
          take(x[i].x, most, sum);
          take(x[i].y, most, sum);
          take(x[i].z, most, sum);
          take(x[i].w, most, sum);
        }
      }
    } else {
      for (int k = lane; k < length; k += 512) {
        float x[16];
#pragma unroll
        for (int i = 0; i < 16; i++) x[i] = k + 32 * i < length ? from[(k + 32 * i) * job.column] : 0.0f;
#pragma unroll
        for (int i = 0; i < 16; i++) take(x[i], most, sum);
      }
    }
  }
#pragma unroll
  for (int i = 16; i; i /= 2) {
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, i));
    sum += __shfl_xor_sync(0xffffffffu, sum, i);
  }
  if (lane == 0) all[warp] = sum;
  __syncthreads();
  float* out = job.out + blockIdx.y * job.out_member;
  if (!summed && n < job.rows && lane == 0) out[n * job.out_row] = most;
  if (summed && threadIdx.x == 0) {
#pragma unroll
    for (int i = 1; i < 8; i++) sum = fmaxf(sum, all[i]);
    out[piece] = fminf(sum, END);
  }
}
