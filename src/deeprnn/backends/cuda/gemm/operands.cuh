// Operands of Hopper's warpgroup products: two fp16 parts, swizzled (see `operand`). After hopper.cuh and parts.cuh.
#pragma once
constexpr int DEPTH = 64;   // columns of a slice: 128 bytes of each row

// Eight numbers in a row to 16 bytes of each part.
INLINE void store_parts(const float* v, float scale, u32 high_at, u32 low_at) {
  u32 high[4], low[4];
#pragma unroll
  for (int i = 0; i < 4; i++) two_parts(v[2 * i] * scale, v[2 * i + 1] * scale, high[i], low[i]);
  store_words(high_at, high[0], high[1], high[2], high[3]);
  store_words(low_at, low[0], low[1], low[2], low[3]);
}

// By a warp: row n of the matrix (columns, LENGTH), whose numbers begin at `from` and are `step` apart, to its place in
// job.parts (tiles, slices, 2, WIDTH, 64). Rows beyond the last are zeros. Returns the row's scale.
template <int WIDTH, int LENGTH, class Job> INLINE float split_row(const Job& job, i64 n, const float* from, i64 step) {
  constexpr int SLICES = (LENGTH + DEPTH - 1) / DEPTH;
  constexpr u32 BYTES = WIDTH * DEPTH * 2;   // of one part of one slice
  i64 member = blockIdx.y, tile = n / WIDTH, row = n % WIDTH;
  int lane = threadIdx.x % 32;
  float most = 0.0f;
  if (n < job.columns)
    for (int k = lane; k < LENGTH; k += 32) most = fmaxf(most, fabsf(from[k * step]));
#pragma unroll
  for (int i = 16; i; i /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, i));
  float scale = row_scale(most);
  u8* to = job.parts + (member * job.tiles + tile) * SLICES * 2 * BYTES + row * 128;
  for (int k = lane * 2; k < SLICES * DEPTH; k += 64) {
    float a = n < job.columns && k < LENGTH ? from[k * step] : 0.0f;
    float b = n < job.columns && k + 1 < LENGTH ? from[(k + 1) * step] : 0.0f;
    u32 high, low;
    two_parts(a * scale, b * scale, high, low);
    i64 at = (i64)(k / DEPTH) * 2 * BYTES + ((k % DEPTH / 8 ^ (row & 7)) << 4) + k % 8 * 2;
    *(u32*)(to + at) = high;
    *(u32*)(to + at + BYTES) = low;
  }
  return scale;
}
