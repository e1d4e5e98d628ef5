// Around the fp16 products of products.py: the largest number of each column, its two fp16 parts, and the sum of
// the partial products. A source is a matrix (N rows, width) read as it lies, or as "previous states": row (t, b)
// is then h(t-1, b), h0 where t = 0, and zero where a reset mark stands.
#include "common.cuh"
#include "halves.cuh"
#include "parts.cuh"

struct Source {
  const float* x;       // (members, rows, width)
  const float* first;   // h0 (members, batch, width) where the rows are previous states, else null
  const u8* reset;      // (rows) or (members, rows), or null
  u32* largest;         // (members, width): bits of the largest |x|; zero at the start
  u8* parts;            // (members, chunks, 2, rows of a chunk, width) in fp16
  i64 reset_member;     // 0 where all members share the marks
  i64 width;
  i64 low_first;        // 1: the part that rounding left comes first
};
struct Sources { Source of[4]; };
constexpr int STRIP = 128, WARPS = 8, BLOCK_ROWS = 64;   // columns and rows of a block

INLINE const float* row_of(const Source& s, i64 member, i64 r, i64 rows, i64 batch) {
  if (r >= rows || (s.reset && s.reset[member * s.reset_member + r])) return nullptr;
  if (!s.first) return s.x + (member * rows + r) * s.width;
  return r < batch ? s.first + (member * batch + r) * s.width : s.x + (member * rows + r - batch) * s.width;
}
INLINE float4 load4(const float* row, i64 column) {
  return row ? *(const float4*)(row + column) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
}
INLINE u32 larger(u32 most, float x) { return max(most, __float_as_uint(x) & 0x7fffffffu); }   // NaN is above infinity

extern "C" __global__ void __launch_bounds__(256) column_largest(const __grid_constant__ Sources all, i64 members, i64 rows, i64 batch) {
  const Source& s = all.of[blockIdx.y / members];
  i64 member = blockIdx.y % members, strips = (s.width + STRIP - 1) / STRIP;
  i64 strip = blockIdx.x % strips, block = blockIdx.x / strips, blocks = gridDim.x / strips;
  i64 column = strip * STRIP + threadIdx.x % 32 * 4;
  if (block >= blocks) return;
  u32 most[4] = {0, 0, 0, 0};
  if (column < s.width)
    for (i64 r = block * WARPS + threadIdx.x / 32; r < rows; r += blocks * WARPS * 4) {
      float4 x[4];
#pragma unroll
      for (int i = 0; i < 4; i++) x[i] = load4(row_of(s, member, r + i * blocks * WARPS, rows, batch), column);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        most[0] = larger(most[0], x[i].x);
        most[1] = larger(most[1], x[i].y);
        most[2] = larger(most[2], x[i].z);
        most[3] = larger(most[3], x[i].w);
      }
    }
  __shared__ u32 part[WARPS][STRIP];
#pragma unroll
  for (int i = 0; i < 4; i++) part[threadIdx.x / 32][threadIdx.x % 32 * 4 + i] = most[i];
  __syncthreads();
  if (threadIdx.x < STRIP && strip * STRIP + threadIdx.x < s.width) {
    u32 found = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) found = max(found, part[w][threadIdx.x]);
    atomicMax(s.largest + member * s.width + strip * STRIP + threadIdx.x, found);
  }
}

extern "C" __global__ void __launch_bounds__(256)
    two_halves(const __grid_constant__ Sources all, i64 members, i64 rows, i64 batch, i64 count, i64 each) {
  const Source& s = all.of[blockIdx.y / members];
  i64 member = blockIdx.y % members, strips = (s.width + STRIP - 1) / STRIP;
  i64 strip = blockIdx.x % strips, block = blockIdx.x / strips;
  i64 column = strip * STRIP + threadIdx.x % 32 * 4;
  if (column >= s.width) return;
  float scale[4];
#pragma unroll
  for (int i = 0; i < 4; i++) scale[i] = power(shift_of(s.largest[member * s.width + column + i]));
  u8* out = s.parts + (member * count * 2 * each * s.width + column) * 2;
#pragma unroll 4
  for (int i = 0; i < BLOCK_ROWS / WARPS; i++) {
    i64 r = block * BLOCK_ROWS + i * WARPS + threadIdx.x / 32;
    if (r >= count * each) return;   // rows beyond the last are zeros, so that all chunks are of one size
    float4 x = load4(row_of(s, member, r, rows, batch), column);
    uint2 high, low;
    two_parts(x.x * scale[0], x.y * scale[1], high.x, low.x);
    two_parts(x.z * scale[2], x.w * scale[3], high.y, low.y);
    i64 at = r + r / each * each;
    *(uint2*)(out + (at + (s.low_first ? each : 0)) * s.width * 2) = high;
    *(uint2*)(out + (at + (s.low_first ? 0 : each)) * s.width * 2) = low;
  }
}

// out (members, m, k) = the sum of `count` partial products and of the mixed ones, each column's scale undone.
extern "C" __global__ void __launch_bounds__(256)
    gather(const float* partial, const float* mixed, const u32* left, const u32* right, float* out, i64 count, i64 m, i64 k,
           i64 left_width, i64 right_width) {
  i64 member = blockIdx.y, at = 4 * ((i64)blockIdx.x * 256 + threadIdx.x), size = m * k;
  if (at >= size) return;
  float4 sum[2] = {*(const float4*)(mixed + member * size + at), make_float4(0.0f, 0.0f, 0.0f, 0.0f)};
#pragma unroll 8
  for (i64 i = 0; i < count; i++) {
    float4 x = *(const float4*)(partial + (member * count + i) * size + at);
    float4& to = sum[1];
    to = make_float4(to.x + x.x, to.y + x.y, to.z + x.z, to.w + x.w);
  }
  int row = -shift_of(left[member * left_width + at / k]);
  const u32* column = right + member * right_width + at % k;
  float4 r;
  r.x = ldexpf(sum[0].x + sum[1].x, row - shift_of(column[0]));
  r.y = ldexpf(sum[0].y + sum[1].y, row - shift_of(column[1]));
  r.z = ldexpf(sum[0].z + sum[1].z, row - shift_of(column[2]));
  r.w = ldexpf(sum[0].w + sum[1].w, row - shift_of(column[3]));
  *(float4*)(out + member * size + at) = r;
}
