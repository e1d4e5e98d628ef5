// Many rows times a matrix, out[r, n] = Σ_k x[r, k] matrix[n, k] + bias[n], by Hopper's warpgroup products: the input's
// product and, with the matrix turned round, the gradient of the input.
//
// `split_matrix` cuts the matrix into two fp16 parts once, each of its rows scaled by a power of two, laid out as the
// tensor cores want to find it in shared memory. A block of `rows_times` keeps TN columns n and takes 128 rows at a
// time: eight warps read x, cut it into parts (a scale for each row) and leave them in shared memory, 64 columns k at a
// time, where two warpgroups multiply high·low + low·high + high·high. Sums of 64 columns are added up by ordinary
// additions, because tensor cores cut off. A row's scale is found on the way and may become smaller, as in outer_products.cu.
// Macros: TN (a multiple of 8), INNER (columns k, a multiple of 4), and MULTIPLY(d, a, b, add).
#include "hopper.cuh"
#include "parts.cuh"
#include "operands.cuh"

constexpr int FEW_REGISTERS = 88, STAGES = 3, TM = 128, SUMS = TN / 2, SLICES = (INNER + DEPTH - 1) / DEPTH;
constexpr u32 LEFT_BYTES = TM * DEPTH * 2, RIGHT_BYTES = TN * DEPTH * 2, STAGE_BYTES = 2 * (LEFT_BYTES + RIGHT_BYTES);
constexpr u32 RATIOS = STAGES * STAGE_BYTES, SHIFTS = RATIOS + STAGES * TM * 4, FLAGS = SHIFTS + STAGES * TM * 4,
              COLUMN_SHIFTS = FLAGS + 16, BIAS = COLUMN_SHIFTS + TN * 4, BARRIERS = BIAS + TN * 4;

struct Job {
  const float* x;        // (members, rows, INNER)
  const float* matrix;   // (members, columns, INNER) by strides
  const float* bias;     // (members, columns), or null
  float* out;            // (members, rows, columns)
  u8* parts;             // (members, tiles, SLICES, 2, TN, 64) in fp16, swizzled
  int* shifts;           // (members, tiles, TN): the power of two of each row of the matrix
  i64 rows, columns, tiles, matrix_member, matrix_row, matrix_column, bias_member;
};

extern "C" __global__ void __launch_bounds__(256) split_matrix(const __grid_constant__ Job job) {
  i64 n = (i64)blockIdx.x * 8 + threadIdx.x / 32;
  if (n >= job.tiles * TN) return;
  const float* from = job.matrix + blockIdx.y * job.matrix_member + n * job.matrix_row;
  float scale = split_row<TN, INNER>(job, n, from, job.matrix_column);
  if (threadIdx.x % 32 == 0) job.shifts[blockIdx.y * job.tiles * TN + n] = exponent_of(scale);
}

struct Some { float4 a, b; };   // eight numbers of a row
INLINE Some read_eight(const float* x, i64 row, i64 rows, int k) {
  Some v = {make_float4(0.0f, 0.0f, 0.0f, 0.0f), make_float4(0.0f, 0.0f, 0.0f, 0.0f)};
  if (row < rows && k + 4 <= INNER) v.a = load_four(x + row * INNER + k);
  if (row < rows && k + 8 <= INNER) v.b = load_four(x + row * INNER + k + 4);
  return v;
}
// Eight numbers of row r to their place of stage s; where one reaches the limit, the row's scale becomes smaller.
INLINE void cut_eight(const Some& v, u32 base, int s, int r, int chunk, float& scale, float& limit) {
  int slot = s % STAGES;
  float w[8] = {v.a.x, v.a.y, v.a.z, v.a.w, v.b.x, v.b.y, v.b.z, v.b.w}, most = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; i++) most = fmaxf(most, fabsf(w[i]));
#pragma unroll
  for (int i = 1; i < 8; i *= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, i));
  float ratio = 1.0f;
  if (most >= limit) {
    float before = scale;
    scale = scale_for(most, before);
    limit = limit_of(scale);
    ratio = ratio_of(scale, before);
    if (ratio != 1.0f && chunk == 0) store_shared(base + FLAGS + slot * 4, __uint_as_float((u32)s));
  }
  if (chunk == 0) {
    store_shared(base + RATIOS + (slot * TM + r) * 4, ratio);
    store_shared(base + SHIFTS + (slot * TM + r) * 4, __uint_as_float((u32)exponent_of(scale)));
  }
  u32 at = base + slot * STAGE_BYTES + r * 128 + ((chunk ^ (r & 7)) << 4);
  store_parts(w, scale, at, at + LEFT_BYTES);
}
INLINE void produce(const Job& job, u32 base) {
  u32 tiles = (u32)job.tiles, tile = blockIdx.x % tiles, step = gridDim.x / tiles;
  int t = threadIdx.x - 256, lane = threadIdx.x % 32, chunk = lane % 8, row = t / 8;   // of 32 rows at a time
  const float* x = job.x + blockIdx.y * job.rows * INNER;
  const u8* parts = job.parts + ((i64)blockIdx.y * tiles + tile) * SLICES * 2 * RIGHT_BYTES;
  i64 blocks = (job.rows + TM - 1) / TM, block = blockIdx.x / tiles;
  Some v[4];
  float scale[4], limit[4];
#pragma unroll
  for (int p = 0; p < 4; p++) v[p] = read_eight(x, block * TM + p * 32 + row, job.rows, chunk * 8);
  int s = 0;
  for (; block < blocks; block += step) {
#pragma unroll
    for (int p = 0; p < 4; p++) {
      scale[p] = 0.0f;
      limit[p] = limit_of(0.0f);
    }
#pragma unroll 1
    for (int slice = 0; slice < SLICES; slice++, s++) {
      int slot = s % STAGES;
      u32 stage = base + slot * STAGE_BYTES, bar = base + BARRIERS + slot * 16;
      barrier_wait(bar + 8, (s / STAGES & 1) ^ 1);
      if (t == 0) {
        barrier_expect(bar, 2 * RIGHT_BYTES);
        bulk_load(stage + 2 * LEFT_BYTES, parts + (i64)slice * 2 * RIGHT_BYTES, 2 * RIGHT_BYTES, bar);
      }
      i64 next_block = slice + 1 < SLICES ? block : block + step;
      int next = slice + 1 < SLICES ? (slice + 1) * DEPTH : 0;
#pragma unroll
      for (int p = 0; p < 4; p++) {
        int r = p * 32 + row;
        cut_eight(v[p], base, s, r, chunk, scale[p], limit[p]);
        v[p] = read_eight(x, next_block * TM + r, job.rows, next + chunk * 8);
      }
      copy_fence();
      __syncwarp();
      if (lane == 0) barrier_arrive(bar);
    }
  }
}

INLINE void put_out(const Job& job, u32 base, const float (&sum)[SUMS], i64 row, int first, int upper, int lower, bool plain) {
  int lane = threadIdx.x % 32;
  float* out = job.out + (blockIdx.y * job.rows + row) * job.columns + first;
#pragma unroll
  for (int i = 0; i < SUMS; i += 2) {
    int n = i / 4 * 8 + lane % 4 * 2;
    bool below = i / 2 % 2;
    float y[2];
#pragma unroll
    for (int k = 0; k < 2; k++) {
      int shift = -(int)load_word(base + COLUMN_SHIFTS + (n + k) * 4) - (below ? lower : upper);
      float scaled = plain ? sum[i + k] * power(shift) : ldexpf(sum[i + k], shift);
      y[k] = scaled + load_float(base + BIAS + (n + k) * 4);
    }
    if (first + n + 2 <= job.columns && row + below * 8 < job.rows) store_two(out + below * 8 * job.columns + n, y[0], y[1]);
  }
}
INLINE void consume(const Job& job, u32 base) {
  u32 tiles = (u32)job.tiles, tile = blockIdx.x % tiles, step = gridDim.x / tiles;
  int half = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, row = half * 64 + warp * 16 + lane / 4;
  i64 blocks = (job.rows + TM - 1) / TM;
  bool near = load_word(base + FLAGS + 12) == 0;   // no column's scale is extreme
  int s = 0;
  for (i64 block = blockIdx.x / tiles; block < blocks; block += step) {
    float sum[SUMS], part[SUMS];
    int upper = 0, lower = 0;
#pragma unroll
    for (int i = 0; i < SUMS; i++) sum[i] = 0.0f;
#pragma unroll 1
    for (int slice = 0; slice < SLICES; slice++, s++) {
      int slot = s % STAGES;
      u32 stage = base + slot * STAGE_BYTES, bar = base + BARRIERS + slot * 16;
      barrier_wait(bar, s / STAGES & 1);
      if (SLICES > 1 && load_word(base + FLAGS + slot * 4) == (u32)s) {
        float a = load_float(base + RATIOS + (slot * TM + row) * 4), b = load_float(base + RATIOS + (slot * TM + row + 8) * 4);
#pragma unroll
        for (int i = 0; i < SUMS; i++) sum[i] *= i / 2 % 2 ? b : a;
      }
      upper = (int)load_word(base + SHIFTS + (slot * TM + row) * 4);
      lower = (int)load_word(base + SHIFTS + (slot * TM + row + 8) * 4);
      u64 left = operand(stage + half * 8192), right = operand(stage + 2 * LEFT_BYTES);
      products_begin();
#pragma unroll
      for (int k = 0; k < 4; k++) {
        if (INNER % DEPTH && slice == SLICES - 1 && k * 16 >= INNER % DEPTH) break;
        MULTIPLY(part, left + 2 * k, right + (RIGHT_BYTES >> 4) + 2 * k, k > 0);
        MULTIPLY(part, left + (LEFT_BYTES >> 4) + 2 * k, right + 2 * k, true);
      }
#pragma unroll
      for (int k = 0; k < 4; k++) {
        if (INNER % DEPTH && slice == SLICES - 1 && k * 16 >= INNER % DEPTH) break;
        MULTIPLY(part, left + 2 * k, right + 2 * k, true);
      }
      products_commit();
      products_wait<0>();
      if (lane == 0) barrier_arrive(bar + 8);
#pragma unroll
      for (int i = 0; i < SUMS; i++) sum[i] += part[i];
    }
    bool plain = near && abs(upper) < 60 && abs(lower) < 60;
    put_out(job, base, sum, block * TM + row, (int)(tile * TN), upper, lower, plain);
  }
}

extern "C" __global__ void __launch_bounds__(512, 1) rows_times(const __grid_constant__ Job job) {
  extern __shared__ __align__(128) unsigned char memory[];
  u32 base = (shared_address(memory) + 1023) & ~1023u, tile = blockIdx.x % (u32)job.tiles;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      store_shared(base + FLAGS + i * 4, __uint_as_float(0xffffffffu));
      barrier_init(base + BARRIERS + i * 16, 9);   // eight warps, and the matrix
      barrier_init(base + BARRIERS + i * 16 + 8, 8);
    }
    store_shared(base + FLAGS + 12, 0.0f);
    barrier_fence();
  }
  __syncthreads();
  for (int n = threadIdx.x; n < TN; n += 512) {
    int shift = job.shifts[(blockIdx.y * job.tiles + tile) * TN + n];
    i64 column = tile * TN + n;
    store_shared(base + COLUMN_SHIFTS + n * 4, __uint_as_float((u32)shift));
    if (abs(shift) >= 60) store_shared(base + FLAGS + 12, 1.0f);
    store_shared(base + BIAS + n * 4, job.bias && column < job.columns ? job.bias[blockIdx.y * job.bias_member + column] : 0.0f);
  }
  __syncthreads();
  if (threadIdx.x >= 256) {
    fewer_registers<FEW_REGISTERS>();
    produce(job, base);
  } else {
    more_registers<256 - FEW_REGISTERS>();
    consume(job, base);
  }
}
