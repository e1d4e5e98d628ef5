// Sums of outer products over many rows, out[n, m] = Σ_r left[r, m] right[r, n], by Hopper's warpgroup products.
//
// The left side is several matrices side by side (previous states, layers below, inputs, a column of ones), the right
// side one matrix. `split_columns` cuts 64 rows of a column at a time into two fp16 parts, scaled by a power of two that
// is the column's own for these rows, and lays them out as the tensor cores want to find them in shared memory: 128
// bytes a column, so that any tile of columns is one piece. In `outer` a block takes a tile of 128 x TN sums over a part
// of the rows: one thread fetches, two warpgroups multiply high·low + low·high + high·high. Tensor cores cut off where
// fp32 sums round, so what they summed over 64 rows is added to the sums so far by ordinary additions, which undo the
// scales too. `collect` adds up the parts of the rows.
// Macros: TN (columns of the right side in a tile, a multiple of 8, at most 200) and MULTIPLY(d, a, b, add).
#include "hopper.cuh"
#include "parts.cuh"
#include "operands.cuh"

constexpr int ROWS = 64, STAGES = TN > 160 ? 2 : 3, TM = 128, SUMS = TN / 2;
constexpr u32 LEFT_BYTES = TM * 128, RIGHT_BYTES = TN * 128, STAGE_BYTES = 2 * (LEFT_BYTES + RIGHT_BYTES);
constexpr u32 SCALES = STAGES * STAGE_BYTES, SCALE_BYTES = (TM + TN) * 4, BARRIERS = SCALES + 2 * STAGES * SCALE_BYTES;   // scales are read longer than parts

struct Matrix {
  const float* x;       // (members, rows, width), or null: ones
  const float* first;   // where rows are previous states: h0 (members, batch, width), else null
  i64 width, start;     // start: its first column among all, those of the right side last
};
struct Target {
  float* at;            // (members, right columns, left columns), by strides: from row to row, and from member to member
  i64 left, left_end, right, right_end, row, member;
};
struct Job {
  Matrix matrices[9];
  const u8* reset;      // (rows) or (members, rows), or null: marks where a previous state is zero
  u8* parts;            // (members, blocks, columns, 64) in fp16: high, and after all of them low
  float* scales;        // (members, blocks, columns): what undoes them
  float* partial;       // (members, tiles, splits, TN, TM)
  i64 reset_member, rows, batch, blocks, each, tiles, splits, low, matrix_count;   // blocks: of 64 rows; low: bytes
  i64 columns, left_columns, offset;   // of both sides; of the left side; where the right side begins, in 128s
  i64 first_group, groups;             // of 128 columns, for `split_columns`
  Target outs[24];
  i64 out_count, add;   // add: to what is there already
  unsigned short tile[400][2]; // first column of the left and of the right side, among all, in eights
};

struct Column {
  const float *x, *first;   // as in its matrix, from this column on
  i64 width;                // 0: none there
  bool ones;
};
INLINE Column column_of(const Job& job, i64 member, i64 column) {
  Column found = {nullptr, nullptr, 0, false};
  for (int i = 0; i < job.matrix_count; i++) {
    const Matrix& m = job.matrices[i];
    if (column < m.start || column >= m.start + m.width) continue;
    found.ones = !m.x;
    found.width = m.width;
    found.x = m.x + member * job.rows * m.width + column - m.start;
    found.first = m.first ? m.first + member * job.batch * m.width + column - m.start : nullptr;
  }
  return found;
}
// 64 rows from row `begin` on; zeros beyond the last, and where a previous state was reset.
INLINE void read_rows(const Job& job, i64 member, const Column& from, i64 begin, float (&v)[ROWS]) {
  i64 width = from.width;
  if (width && !from.ones && begin >= (from.first ? job.batch : 0) && begin + ROWS <= job.rows) {
    const float* p = from.x + (begin - (from.first ? job.batch : 0)) * width;
#pragma unroll
    for (int i = 0; i < ROWS; i++) v[i] = __ldg(p + i * width);
  } else {
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
      i64 r = begin + i;
      v[i] = 0.0f;
      if (!width || r >= job.rows) continue;
      if (from.ones)
        v[i] = 1.0f;
      else if (from.first)
        v[i] = r < job.batch ? from.first[r * width] : from.x[(r - job.batch) * width];
      else
        v[i] = from.x[r * width];
    }
  }
  if (!job.reset) return;
  const u8* marks = job.reset + member * job.reset_member;
  i64 r = begin + threadIdx.x % 32;
  u32 low = lanes_where(r < job.rows && marks[r]), high = lanes_where(r + 32 < job.rows && marks[r + 32]);
  if (from.first && (low | high)) {
#pragma unroll
    for (int i = 0; i < ROWS; i++) v[i] = (i < 32 ? low : high) >> i % 32 & 1 ? 0.0f : v[i];
  }
}

extern "C" __global__ void __launch_bounds__(128) split_columns(const __grid_constant__ Job job) {
  __shared__ __align__(128) unsigned char image[2 * 128 * 128];
  u32 groups = (u32)job.groups, group = blockIdx.x % groups + (u32)job.first_group, block = blockIdx.x / groups, c = threadIdx.x;
  i64 end = group * 128 < job.offset ? job.left_columns : job.columns;
  i64 column = group * 128 + c, member = blockIdx.y;
  Column from = {nullptr, nullptr, 0, false};
  if (column < end) from = column_of(job, member, column);
  float v[ROWS], most = 0.0f;
  read_rows(job, member, from, (i64)block * ROWS, v);
#pragma unroll
  for (int i = 0; i < ROWS; i++) most = fmaxf(most, fabsf(v[i]));
  float scale = power(shift_of(__float_as_uint(most)));
  u32 base = shared_address(image) + c * 128;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    u32 at = base + ((i ^ (c & 7)) << 4);
    store_parts(v + 8 * i, scale, at, at + 128 * 128);
  }
  i64 place = (member * job.blocks + block) * job.columns + group * 128;
  if (column < end) job.scales[place + c] = inverse(scale);
  copy_fence();
  __syncthreads();
  if (c < 2) {
    u32 bytes = (u32)min(end - group * 128, (i64)128) * 128;
    bulk_store(job.parts + c * job.low + place * 128, shared_address(image) + c * 128 * 128, bytes);
    bulk_stored();
  }
}

INLINE void fetch(const Job& job, u32 base) {
  u32 splits = (u32)job.splits, split = blockIdx.x % splits, tile = blockIdx.x / splits;
  i64 begin = split * job.each, end = min(job.blocks, begin + job.each);
  int s = 0;
  for (i64 block = begin; block < end; block++, s++) {
    int slot = s % STAGES;
    u32 stage = base + slot * STAGE_BYTES, scales = base + SCALES + s % (2 * STAGES) * SCALE_BYTES, bar = base + BARRIERS + slot * 16;
    i64 place = ((i64)blockIdx.y * job.blocks + block) * job.columns;
    barrier_wait_alone(bar + 8, (s / STAGES & 1) ^ 1);
    barrier_expect(bar, STAGE_BYTES + SCALE_BYTES);
#pragma unroll
    for (int side = 0; side < 2; side++) {
      i64 column = place + 8 * job.tile[tile][side];
      u32 bytes = side ? RIGHT_BYTES : LEFT_BYTES, to = stage + (side ? 2 * LEFT_BYTES : 0);
      bulk_load(to, job.parts + column * 128, bytes, bar);
      bulk_load(to + bytes, job.parts + job.low + column * 128, bytes, bar);
      bulk_load(scales + (side ? TM * 4 : 0), job.scales + column, bytes / 32, bar);
    }
  }
}
INLINE void consume(const Job& job, u32 base) {
  u32 splits = (u32)job.splits, split = blockIdx.x % splits, tile = blockIdx.x / splits;
  i64 begin = split * job.each;
  int stages = (int)(min(job.blocks, begin + job.each) - begin);
  int half = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  int row = half * 64 + warp * 16 + lane / 4;
  float sum[SUMS], part[SUMS];
#pragma unroll
  for (int i = 0; i < SUMS; i++) sum[i] = 0.0f;
#pragma unroll 1
  for (int s = 0; s < stages; s++) {
    int slot = s % STAGES;
    u32 stage = base + slot * STAGE_BYTES, bar = base + BARRIERS + slot * 16;
    u32 scales = base + SCALES + s % (2 * STAGES) * SCALE_BYTES, columns = scales + (TM + lane % 4 * 2) * 4;
    barrier_wait(bar, s / STAGES & 1);
    if (s + half > 0) group_sync<256>(2 + half);   // in turns: one multiplies while the other adds up
    u64 left = operand(stage + half * 8192), right = operand(stage + 2 * LEFT_BYTES);
    products_begin();
#pragma unroll
    for (int k = 0; k < 4; k++) {
      MULTIPLY(part, left + 2 * k, right + (RIGHT_BYTES >> 4) + 2 * k, k > 0);
      MULTIPLY(part, left + (LEFT_BYTES >> 4) + 2 * k, right + 2 * k, true);
      MULTIPLY(part, left + 2 * k, right + 2 * k, true);
    }
    products_commit();
    if (half == 0 || s + 1 < stages) group_arrive<256>(3 - half);
    float upper = load_float(scales + row * 4), lower = load_float(scales + row * 4 + 32);
    products_wait<0>();
    if (lane == 0) barrier_arrive(bar + 8);
#pragma unroll
    for (int i = 0; i < SUMS; i += 4) {
      float a, b;
      load_two(a, b, columns + i * 8);
      sum[i] = fmaf(part[i], upper * a, sum[i]);
      sum[i + 1] = fmaf(part[i + 1], upper * b, sum[i + 1]);
      sum[i + 2] = fmaf(part[i + 2], lower * a, sum[i + 2]);
      sum[i + 3] = fmaf(part[i + 3], lower * b, sum[i + 3]);
    }
  }
  float* out = job.partial + (((i64)blockIdx.y * job.tiles + tile) * splits + split) * TN * TM + row;
#pragma unroll
  for (int i = 0; i < SUMS; i++) out[(i / 4 * 8 + lane % 4 * 2 + i % 2) * TM + i / 2 % 2 * 8] = sum[i];
}

extern "C" __global__ void __launch_bounds__(384, 1) outer(const __grid_constant__ Job job) {
  extern __shared__ __align__(128) unsigned char memory[];
  u32 base = (shared_address(memory) + 1023) & ~1023u;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(base + BARRIERS + i * 16, 1);
      barrier_init(base + BARRIERS + i * 16 + 8, 8);
    }
    barrier_fence();
  }
  __syncthreads();
  if (threadIdx.x >= 256) {
    fewer_registers<24>();
    if (threadIdx.x == 256) fetch(job, base);
  } else {
    more_registers<240>();
    consume(job, base);
  }
}

// The parts of the rows added up in order, and each sum put where it belongs.
extern "C" __global__ void __launch_bounds__(256) collect(const __grid_constant__ Job job) {
  u32 at = (blockIdx.x * 256 + threadIdx.x) * 4, tile = at / (TN * TM);
  i64 member = blockIdx.y;
  if (tile >= job.tiles) return;
  u32 inside = at % (TN * TM);
  i64 n = 8 * job.tile[tile][1] + inside / TM, m = 8 * job.tile[tile][0] + inside % TM;
  const float* from = job.partial + (member * job.tiles + tile) * job.splits * TN * TM + inside;
  float4 sum = *(const float4*)from;
#pragma unroll 4
  for (i64 s = 1; s < job.splits; s++) {
    float4 x = *(const float4*)(from + s * TN * TM);
    sum = make_float4(sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w);
  }
  float value[4] = {sum.x, sum.y, sum.z, sum.w};
  for (int o = 0; o < job.out_count; o++) {
    const Target& out = job.outs[o];
    if (n < out.right || n >= out.right_end) continue;
    float* to = out.at + member * out.member + (n - out.right) * out.row - out.left;
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (m + i >= out.left && m + i < out.left_end) to[m + i] = job.add ? to[m + i] + value[i] : value[i];
  }
}
