// Many rows times a matrix, out[r, n] = Σ_k x[r, k] matrix[n, k] + bias[n], where a row is short (at most 128 numbers): the
// product of the input. By Hopper's warpgroup products, bound by writing the result.
//
// Both operands are first cut into two fp16 parts by `split`, each row scaled by a power of two, and laid out as the
// tensor cores want to find them in shared memory. A block of `rows_times` keeps TN rows of the matrix; each of its two
// warpgroups takes 64 rows of x at a time, for which a thread of its own fetches, and multiplies high·low + low·high +
// high·high; so one may write while the other multiplies. Sums of 64 columns are added up by ordinary additions,
// because tensor cores cut off.
// Macros: TN (a multiple of 8), INNER (columns k, a multiple of 4, at most 128), and MULTIPLY(d, a, b, add).
#include "hopper.cuh"
#include "parts.cuh"
#include "operands.cuh"

constexpr int STAGES = 3, TM = 64, SUMS = TN / 2, SLICES = (INNER + DEPTH - 1) / DEPTH;
constexpr u32 LEFT_BYTES = TM * 128, RIGHT_BYTES = TN * 128;   // of one part of one slice
constexpr u32 RING = STAGES * 2 * LEFT_BYTES, MATRIX = 2 * RING, FACTORS = MATRIX + SLICES * 2 * RIGHT_BYTES, BIAS = FACTORS + TN * 4,
              BARRIERS = BIAS + TN * 4;

// Matrices one above the other are one matrix; biases are added up, each to its own columns of the result.
struct MatrixPiece {
  const float* at;       // (members, end - start, INNER) by strides
  i64 start, end, member, row, column;
};
struct BiasPiece {
  const float* at;       // (members, end - start)
  i64 start, end, member;
};
struct Job {
  const float* x;        // (members, rows, INNER)
  float* out;            // (members, rows, columns)
  u8* x_parts;           // (members, blocks of 64 rows, SLICES, 2, 64, 64) in fp16, swizzled
  u8* parts;             // (members, tiles, SLICES, 2, TN, 64) in fp16, swizzled
  float* x_factors;      // (members, blocks, 64): what undoes the scales
  float* factors;        // (members, tiles, TN)
  i64 rows, columns, blocks, tiles, matrix_count, bias_count;
  MatrixPiece matrices[8];
  BiasPiece biases[16];
};

// Eight lanes a row, eight columns of each slice a lane.
INLINE void split_rows(const Job& job, u32 at) {
  i64 row = (i64)at * 32 + threadIdx.x / 8, member = blockIdx.y, block = row / TM, r = row % TM;
  int chunk = threadIdx.x % 8;
  const float* from = job.x + (member * job.rows + row) * INNER;
  float v[SLICES][8], most = 0.0f;
#pragma unroll
  for (int s = 0; s < SLICES; s++) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      int k = s * DEPTH + chunk * 8 + i * 4;
      float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (row < job.rows && k + 4 <= INNER) x = load_four(from + k);
      v[s][4 * i] = x.x;
      v[s][4 * i + 1] = x.y;
      v[s][4 * i + 2] = x.z;
      v[s][4 * i + 3] = x.w;
    }
#pragma unroll
    for (int i = 0; i < 8; i++) most = fmaxf(most, fabsf(v[s][i]));
  }
#pragma unroll
  for (int i = 1; i < 8; i *= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, i));
  if (block >= job.blocks) return;
  float scale = row_scale(most);
  u8* to = job.x_parts + (member * job.blocks + block) * SLICES * 2 * LEFT_BYTES + r * 128 + ((chunk ^ (r & 7)) << 4);
#pragma unroll
  for (int s = 0; s < SLICES; s++) {
    u32 high[4], low[4];
#pragma unroll
    for (int i = 0; i < 4; i++) two_parts(v[s][2 * i] * scale, v[s][2 * i + 1] * scale, high[i], low[i]);
    put_four(to + s * 2 * LEFT_BYTES, high);
    put_four(to + s * 2 * LEFT_BYTES + LEFT_BYTES, low);
  }
  if (chunk == 0) job.x_factors[(member * job.blocks + block) * TM + r] = inverse(scale);
}

extern "C" __global__ void __launch_bounds__(256) split(const __grid_constant__ Job job) {
  u32 first = (u32)(job.tiles * TN / 8);   // TN is a multiple of 8
  if (blockIdx.x < first) {
    i64 n = (i64)blockIdx.x * 8 + threadIdx.x / 32;
    const float* from = nullptr;
    i64 step = 0;
    for (int i = 0; i < job.matrix_count; i++) {
      const MatrixPiece& m = job.matrices[i];
      if (n < m.start || n >= m.end) continue;
      from = m.at + blockIdx.y * m.member + (n - m.start) * m.row;
      step = m.column;
    }
    float scale = split_row<TN, INNER>(job, n, from, step);
    if (threadIdx.x % 32 == 0) job.factors[blockIdx.y * job.tiles * TN + n] = inverse(scale);
  } else {
    split_rows(job, blockIdx.x - first);
  }
}

// Where one of the two warpgroups begins, and by how many blocks it goes on.
struct Walk { i64 block, step; };
INLINE Walk walk_of(const Job& job, int half) {
  u32 tiles = (u32)job.tiles;
  return {(i64)(blockIdx.x / tiles * 2 + half), (i64)(gridDim.x / tiles * 2)};
}
INLINE u32 barrier_of(u32 base, int half, int slot) { return base + BARRIERS + (half * STAGES + slot) * 16; }

INLINE void fetch(const Job& job, u32 base, int half) {
  u32 tiles = (u32)job.tiles, tile = blockIdx.x % tiles, whole = barrier_of(base, 2, 0);
  if (half == 0) {
    const u8* parts = job.parts + ((i64)blockIdx.y * tiles + tile) * SLICES * 2 * RIGHT_BYTES;
    barrier_expect(whole, SLICES * 2 * RIGHT_BYTES);
    bulk_load(base + MATRIX, parts, SLICES * 2 * RIGHT_BYTES, whole);
  }
  Walk walk = walk_of(job, half);
  int s = 0;
  for (i64 block = walk.block; block < job.blocks; block += walk.step)
    for (int slice = 0; slice < SLICES; slice++, s++) {
      int slot = s % STAGES;
      u32 bar = barrier_of(base, half, slot);
      barrier_wait_alone(bar + 8, (s / STAGES & 1) ^ 1);
      barrier_expect(bar, 2 * LEFT_BYTES);
      i64 piece = ((i64)blockIdx.y * job.blocks + block) * SLICES + slice;
      bulk_load(base + half * RING + slot * 2 * LEFT_BYTES, job.x_parts + piece * 2 * LEFT_BYTES, 2 * LEFT_BYTES, bar);
    }
}
INLINE void put_out(const Job& job, u32 base, const float (&sum)[SUMS], i64 row, int first, float upper, float lower) {
  int lane = threadIdx.x % 32;
  float* out = job.out + ((i64)blockIdx.y * job.rows + row) * job.columns + first + lane % 4 * 2;
  bool above = row < job.rows, below = row + 8 < job.rows;
#pragma unroll
  for (int i = 0; i < SUMS; i += 4) {
    int n = i * 2 + lane % 4 * 2;
    float a, b, c, d;
    load_two(a, b, base + FACTORS + n * 4);
    load_two(c, d, base + BIAS + n * 4);
    if (first + n + 2 > job.columns) continue;
    if (above) store_two(out + i * 2, fmaf(sum[i], upper * a, c), fmaf(sum[i + 1], upper * b, d));
    if (below) store_two(out + 8 * job.columns + i * 2, fmaf(sum[i + 2], lower * a, c), fmaf(sum[i + 3], lower * b, d));
  }
}
INLINE void consume(const Job& job, u32 base) {
  u32 tile = blockIdx.x % (u32)job.tiles;
  int half = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, row = warp * 16 + lane / 4;
  barrier_wait(barrier_of(base, 2, 0), 0);
  Walk walk = walk_of(job, half);
  int s = 0;
  for (i64 block = walk.block; block < job.blocks; block += walk.step) {
    const float* factors = job.x_factors + ((i64)blockIdx.y * job.blocks + block) * TM + row;
    float sum[SUMS], part[SUMS], upper = factors[0], lower = factors[8];
#pragma unroll
    for (int slice = 0; slice < SLICES; slice++, s++) {
      int slot = s % STAGES;
      u32 bar = barrier_of(base, half, slot);
      u64 left = operand(base + half * RING + slot * 2 * LEFT_BYTES), right = operand(base + MATRIX + slice * 2 * RIGHT_BYTES);
      constexpr int REST = INNER % DEPTH ? (INNER % DEPTH + 15) / 16 : 4;
      int steps = slice == SLICES - 1 ? REST : 4;
      barrier_wait(bar, s / STAGES & 1);
      products_begin();
#pragma unroll
      for (int k = 0; k < steps; k++) {
        MULTIPLY(part, left + 2 * k, right + (RIGHT_BYTES >> 4) + 2 * k, k > 0);
        MULTIPLY(part, left + (LEFT_BYTES >> 4) + 2 * k, right + 2 * k, true);
      }
#pragma unroll
      for (int k = 0; k < steps; k++) MULTIPLY(part, left + 2 * k, right + 2 * k, true);
      products_commit();
      products_wait<0>();
      if (lane == 0) barrier_arrive(bar + 8);
#pragma unroll
      for (int i = 0; i < SUMS; i++) sum[i] = slice ? sum[i] + part[i] : part[i];
    }
    put_out(job, base, sum, block * TM + row, (int)(tile * TN), upper, lower);
  }
}

extern "C" __global__ void __launch_bounds__(384, 1) rows_times(const __grid_constant__ Job job) {
  extern __shared__ __align__(128) unsigned char memory[];
  u32 base = (shared_address(memory) + 1023) & ~1023u, tile = blockIdx.x % (u32)job.tiles;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2 * STAGES; i++) {
      barrier_init(base + BARRIERS + i * 16, 1);
      barrier_init(base + BARRIERS + i * 16 + 8, 4);
    }
    barrier_init(barrier_of(base, 2, 0), 1);
    barrier_fence();
  }
  for (int n = threadIdx.x; n < TN; n += 384) {
    i64 column = tile * TN + n;
    store_shared(base + FACTORS + n * 4, job.factors[(blockIdx.y * job.tiles + tile) * TN + n]);
    float bias = 0.0f;
    for (int i = 0; i < job.bias_count; i++) {
      const BiasPiece& b = job.biases[i];
      if (column >= b.start && column < b.end) bias += b.at[blockIdx.y * b.member + column - b.start];
    }
    store_shared(base + BIAS + n * 4, bias);
  }
  __syncthreads();
  if (threadIdx.x >= 256) {
    fewer_registers<24>();
    if (threadIdx.x == 256 || threadIdx.x == 288) fetch(job, base, threadIdx.x == 288);
  } else {
    more_registers<240>();
    consume(job, base);
  }
}
