// How large the rows of several matrices are: what mma.cu must know to keep numbers within fp16.
#include "common.cuh"
struct Rows {
  const float* data;
  i64 member, row, column;   // strides in elements
  i64 rows, length;
  float* out;
  i64 out_member, out_row;   // out_row 0: not of each row, but of eight at once, and of their sums
  i64 first;                 // block
};
constexpr float END = 3.402823466e38f;   // the largest number of fp32
struct Jobs { Rows list[JOBS]; };

// A warp has a row; blockIdx.y is the member. Infinities and NaN are not the largest of anything: they find
// their own way, or none (-inf before a relu). A sum beyond fp32's end is of numbers that are not.
extern "C" __global__ void __launch_bounds__(256) largest(const __grid_constant__ Jobs jobs) {
  __shared__ float all[8];
  int j = 0, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  while (j + 1 < JOBS && blockIdx.x >= jobs.list[j + 1].first) j++;
  const Rows& job = jobs.list[j];
  i64 piece = blockIdx.x - job.first, n = piece * 8 + warp;
  bool summed = job.out_row == 0;
  float most = 0.0f, sum = 0.0f;
  if (n < job.rows) {
    const float* from = job.data + blockIdx.y * job.member + n * job.row;
#pragma unroll 8
    for (int k = lane; k < (int)job.length; k += 32) {
      float x = fabsf(from[k * job.column]);
      x = x <= END ? x : 0.0f;
      most = fmaxf(most, x);
      sum += x;
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
