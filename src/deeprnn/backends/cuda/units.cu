// One layer's unit at one step: pooling, dropout masks and, at the last layer, the state that comes next.
// UNIT, POOL: the unit; MASK, STATE_MASK, RESET: which of these there are; LAST: the layer that gives the state;
// KEEP: leave dz/dpre where the pre-activations were, and dz/drho beside. One thread serves one unit.
// PRODUCT: the matrix product in front comes with it; ROWS of the batch a block, OUTSIDE: dL/dz has a part from
// outside the loop.
#include "common.cuh"

#define LP 4
#define MAXOUT 5

struct View { float* at; i64 member, step, row; };  // strides; columns lie side by side
struct Marks { const u8* at; i64 member, step, row; };
struct Params {
  View pre;         // forward: pre-activations, then slopes; backward: slopes
  View out;         // forward: z or h; backward: dL/dpre
  View mask;        // forward: of this layer
  View power;       // forward: dz/drho
  View before;      // forward: what each step sees of the state; backward: the gradient of that, of the next step
  View state_mask;
  View gradient;    // backward: dL/dz, completed here
  View exponent;    // p of each unit; only `member` counts
  View growth;      // dp/drho
  Marks reset;
  View input;       // product: what the matrix multiplies
  View matrix;      // (inner, columns), padded with zeros; `row` is the pitch
  View rest;        // forward: pre-activations of later layers, to which the columns after this layer's are added
  i64 steps, rows, size, members, inner, tiles, rest_size, ahead;
};

INLINE float* at(const View& v, i64 member, i64 step, i64 row) {
  return v.at + member * v.member + step * v.step + row * v.row;
}
INLINE bool marked(const Marks& m, i64 member, i64 step, i64 row) {
  return m.at[member * m.member + step * m.step + row * m.row] != 0;
}

// z = φ(a), and a becomes dz/da; `power` becomes dz/dp. A pool at its centres gives zeros, as in units.py.
INLINE float apply(float (&a)[POOL], float p, float& power) {
#if UNIT == LP
  float d[POOL], m = 0.0f, sum = 0.0f;
#pragma unroll
  for (int i = 0; i < POOL; i++) { d[i] = fabsf(a[i]); m = fmaxf(m, d[i]); sum += d[i]; }
  power = 0.0f;
  if (sum == 0.0f) {  // not m: fmaxf passes over NaN, which must come out again
#pragma unroll
    for (int i = 0; i < POOL; i++) a[i] = 0.0f;
    return 0.0f;
  }
  float mean = 0.0f, weighted = 0.0f;
#pragma unroll
  for (int i = 0; i < POOL; i++) {
    float r = d[i] / m, raised = powf(r, p - 1.0f), s = raised * r;
    mean += s;
    if (s > 0.0f) weighted += s * logf(r);
    d[i] = raised;
  }
  mean *= 1.0f / POOL;
  weighted *= 1.0f / POOL;
  float root = powf(mean, 1.0f / p), z = m * root, scale = root / (mean * POOL);
  power = z * (weighted / mean - logf(mean) / p) / p;
#pragma unroll
  for (int i = 0; i < POOL; i++) a[i] = a[i] == 0.0f ? 0.0f : copysignf(d[i] * scale, a[i]);
  return z;
#elif UNIT == MAXOUT
  float z = a[0], count = 0.0f;
#pragma unroll
  for (int i = 1; i < POOL; i++) z = a[i] > z || a[i] != a[i] ? a[i] : z;
#pragma unroll
  for (int i = 0; i < POOL; i++) count += a[i] == z ? 1.0f : 0.0f;
#pragma unroll
  for (int i = 0; i < POOL; i++) a[i] = a[i] == z ? 1.0f / count : 0.0f;  // equals share the gradient, as in torch
  return z;
#elif UNIT == 0
  float z = 1.0f / (1.0f + expf(-a[0]));
  a[0] = z * (1.0f - z);
  return z;
#elif UNIT == 1
  float z = tanhf(a[0]);
  a[0] = 1.0f - z * z;
  return z;
#elif UNIT == 2
  float z = a[0] > 0.0f || a[0] != a[0] ? a[0] : 0.0f;
  a[0] = a[0] > 0.0f ? 1.0f : 0.0f;
  return z;
#else
  float z = a[0];
  a[0] = 1.0f;
  return z;
#endif
}

// From the pre-activations of one unit to its output, and to the state that the next step sees.
INLINE void finish_forward(const Params& p, i64 member, i64 row, i64 unit, int t, float (&a)[POOL], float* pre) {
  float power = 0.0f, exponent = 1.0f, mask = 1.0f;
  if (UNIT == LP) exponent = p.exponent.at[member * p.exponent.member + unit];
  float z = apply(a, exponent, power);
  if (MASK) mask = at(p.mask, member, t, row)[unit];
  z *= mask;
  at(p.out, member, t, row)[unit] = z;
  if (KEEP) {
#pragma unroll
    for (int i = 0; i < POOL; i++) pre[i] = a[i] * mask;
    if (UNIT == LP) {
      float growth = p.growth.at[member * p.growth.member + unit];
      at(p.power, member, t, row)[unit] = power * growth * mask;
    }
  }
  if (LAST && t + 1 < p.steps) {
    if (RESET && marked(p.reset, member, t + 1, row)) z = 0.0f;
    if (STATE_MASK) z *= at(p.state_mask, member, t + 1, row)[unit];
    at(p.before, member, t + 1, row)[unit] = z;
  }
}

// From dL/dz, `back` being the part that comes back from the next step, to dL/dpre.
INLINE void finish_backward(const Params& p, i64 member, i64 row, i64 unit, int t, float g, float back) {
  if (LAST && t + 1 < p.steps) {
    if (RESET && marked(p.reset, member, t + 1, row)) back = 0.0f;
    if (STATE_MASK) back *= at(p.state_mask, member, t + 1, row)[unit];
    g += back;
  }
  if (UNIT == LP) at(p.gradient, member, t, row)[unit] = g;  // the gradient of the exponents is taken from here
  const float* slope = at(p.pre, member, t, row) + unit * POOL;
  float* out = at(p.out, member, t, row) + unit * POOL;
#pragma unroll
  for (int i = 0; i < POOL; i++) out[i] = g * slope[i];
}

#if !PRODUCT
struct Place { i64 member, row, unit; bool inside; };
INLINE Place place(const Params& p) {
  u32 index = blockIdx.x * THREADS + threadIdx.x, size = (u32)p.size, rows = (u32)p.rows;
  u32 whole = index / size, member = whole / rows;
  return {member, whole - member * rows, index - whole * size, member < (u32)p.members};
}

extern "C" __global__ void __launch_bounds__(THREADS) forward(const Params p, const int t) {
  Place w = place(p);
  if (!w.inside) return;
  float* pre = at(p.pre, w.member, t, w.row) + w.unit * POOL;
  float a[POOL];
#pragma unroll
  for (int i = 0; i < POOL; i++) a[i] = pre[i];
  finish_forward(p, w.member, w.row, w.unit, t, a, pre);
}

extern "C" __global__ void __launch_bounds__(THREADS) backward(const Params p, const int t) {
  Place w = place(p);
  if (!w.inside) return;
  float back = 0.0f;
  if (LAST && t + 1 < p.steps) back = at(p.before, w.member, 0, w.row)[w.unit];
  finish_backward(p, w.member, w.row, w.unit, t, at(p.gradient, w.member, t, w.row)[w.unit], back);
}

#else
#define WARPS (THREADS / 32)
#define COLUMNS 32
#define STAGE 32            // inner indices whose inputs lie in shared memory at once
#define BATCH 8             // rows of the matrix under way together
#define PER (ROWS / 4)      // batch rows of a thread, times 4 columns

INLINE void load_batch(float4 (&w)[BATCH], const float* matrix, i64 pitch) {
#pragma unroll
  for (int i = 0; i < BATCH; i++) w[i] = *(const float4*)(matrix + i * pitch);
}

// The warps share the inner dimension. Each leaves its sums (row, column) where its inputs were, and the caller
// adds those of all warps in order.
#define SHARED __shared__ __align__(16) float x[WARPS][STAGE][ROWS + 4]
INLINE void multiply(const Params& p, i64 member, i64 row0, int t, float (*x)[STAGE][ROWS + 4]) {
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = lane % 8 * 4, row = lane / 8 * PER;
  int inner = (int)p.inner, chunk = ((inner + WARPS - 1) / WARPS + BATCH - 1) / BATCH * BATCH;
  int begin = warp * chunk, end = begin + chunk < inner ? begin + chunk : inner;
  i64 pitch = p.matrix.row;
  const float* matrix = p.matrix.at + member * p.matrix.member + (i64)blockIdx.x * COLUMNS + column;
  const float* input = at(p.input, member, t + p.ahead, row0);
  float total[PER][4] = {};
  for (int k0 = begin; k0 < begin + chunk; k0 += STAGE) {
    int count = end - k0 < STAGE ? end - k0 : STAGE, batches = count > 0 ? (count + BATCH - 1) / BATCH : 0;
    float4 w[BATCH], next[BATCH];
    if (batches) load_batch(w, matrix + k0 * pitch, pitch);
#pragma unroll
    for (int r = 0; r < ROWS; r++)
      x[warp][lane][r] = lane < count && row0 + r < p.rows ? input[r * p.input.row + k0 + lane] : 0.0f;
    __syncwarp();
    for (int b = 0; b < batches; b++) {
      if (b + 1 < batches) load_batch(next, matrix + (k0 + (b + 1) * BATCH) * pitch, pitch);
#pragma unroll
      for (int i = 0; i < BATCH; i++) {
        const float* v = &x[warp][b * BATCH + i][row];
#pragma unroll
        for (int r = 0; r < PER; r++) {
          total[r][0] = fmaf(v[r], w[i].x, total[r][0]);
          total[r][1] = fmaf(v[r], w[i].y, total[r][1]);
          total[r][2] = fmaf(v[r], w[i].z, total[r][2]);
          total[r][3] = fmaf(v[r], w[i].w, total[r][3]);
        }
      }
#pragma unroll
      for (int i = 0; i < BATCH; i++) w[i] = next[i];
    }
    __syncwarp();
  }
#pragma unroll
  for (int r = 0; r < PER; r++)
#pragma unroll
    for (int c = 0; c < 4; c++) (&x[warp][0][0])[(row + r) * COLUMNS + column + c] = total[r][c];
  __syncthreads();
}
INLINE float gather(const float (*x)[STAGE][ROWS + 4], int row, int column) {
  float s = 0.0f;
#pragma unroll
  for (int w = 0; w < WARPS; w++) s += (&x[w][0][0])[row * COLUMNS + column];
  return s;
}

extern "C" __global__ void __launch_bounds__(THREADS) forward(const Params p, const int t) {
  SHARED;
  i64 member = blockIdx.y % p.members, row0 = blockIdx.y / p.members * ROWS;
  multiply(p, member, row0, t, x);
  if (blockIdx.x < p.tiles) {
    constexpr int UNITS = COLUMNS / POOL;
    for (int e = threadIdx.x; e < ROWS * UNITS; e += THREADS) {
      int r = e / UNITS, u = e % UNITS;
      i64 row = row0 + r, unit = (i64)blockIdx.x * UNITS + u;
      if (row >= p.rows || unit >= p.size) continue;
      float* pre = at(p.pre, member, t, row) + unit * POOL;
      float a[POOL];
#pragma unroll
      for (int i = 0; i < POOL; i++) a[i] = pre[i] + gather(x, r, u * POOL + i);
      finish_forward(p, member, row, unit, t, a, pre);
    }
  } else {
    for (int e = threadIdx.x; e < ROWS * COLUMNS; e += THREADS) {
      i64 row = row0 + e / COLUMNS, column = (blockIdx.x - p.tiles) * COLUMNS + e % COLUMNS;
      if (row < p.rows && column < p.rest_size) at(p.rest, member, t, row)[column] += gather(x, e / COLUMNS, e % COLUMNS);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) backward(const Params p, const int t) {
  SHARED;
  i64 member = blockIdx.y % p.members, row0 = blockIdx.y / p.members * ROWS;
  multiply(p, member, row0, t, x);
  for (int e = threadIdx.x; e < ROWS * COLUMNS; e += THREADS) {
    int r = e / COLUMNS, c = e % COLUMNS;
    i64 row = row0 + r, unit = (i64)blockIdx.x * COLUMNS + c;
    if (row >= p.rows || unit >= p.size) continue;
    float s = gather(x, r, c), g = OUTSIDE ? at(p.gradient, member, t, row)[unit] : 0.0f;
    finish_backward(p, member, row, unit, t, LAST ? g : g + s, s);
  }
}
#endif
