// One layer's unit at one step: pooling, dropout masks and, at the last layer, the state that comes next.
// UNIT, POOL: the unit; MASK, STATE_MASK, RESET: which of these there are; LAST: the layer that gives the state;
// KEEP: leave dz/dpre where the pre-activations were, and dz/drho beside. One thread serves one unit.
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
  i64 steps, rows, size, members;
};

INLINE float* at(const View& v, i64 member, i64 step, i64 row) {
  return v.at + member * v.member + step * v.step + row * v.row;
}
INLINE bool marked(const Marks& m, i64 member, i64 step, i64 row) {
  return m.at[member * m.member + step * m.step + row * m.row] != 0;
}

struct Place { i64 member, row, unit; bool inside; };
INLINE Place place(const Params& p) {
  u32 index = blockIdx.x * THREADS + threadIdx.x, size = (u32)p.size, rows = (u32)p.rows;
  u32 whole = index / size, member = whole / rows;
  return {member, whole - member * rows, index - whole * size, member < (u32)p.members};
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

extern "C" __global__ void __launch_bounds__(THREADS) forward(const Params p, const int t) {
  Place w = place(p);
  if (!w.inside) return;
  float* pre = at(p.pre, w.member, t, w.row) + w.unit * POOL;
  float a[POOL], power = 0.0f, exponent = 1.0f;
#pragma unroll
  for (int i = 0; i < POOL; i++) a[i] = pre[i];
  if (UNIT == LP) exponent = p.exponent.at[w.member * p.exponent.member + w.unit];
  float z = apply(a, exponent, power), mask = 1.0f;
  if (MASK) mask = at(p.mask, w.member, t, w.row)[w.unit];
  z *= mask;
  at(p.out, w.member, t, w.row)[w.unit] = z;
  if (KEEP) {
#pragma unroll
    for (int i = 0; i < POOL; i++) pre[i] = a[i] * mask;
    if (UNIT == LP) {
      float growth = p.growth.at[w.member * p.growth.member + w.unit];
      at(p.power, w.member, t, w.row)[w.unit] = power * growth * mask;
    }
  }
  if (LAST && t + 1 < p.steps) {
    if (RESET && marked(p.reset, w.member, t + 1, w.row)) z = 0.0f;
    if (STATE_MASK) z *= at(p.state_mask, w.member, t + 1, w.row)[w.unit];
    at(p.before, w.member, t + 1, w.row)[w.unit] = z;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) backward(const Params p, const int t) {
  Place w = place(p);
  if (!w.inside) return;
  float* gradient = at(p.gradient, w.member, t, w.row) + w.unit;
  float g = *gradient;
  if (LAST && t + 1 < p.steps) {
    float back = at(p.before, w.member, 0, w.row)[w.unit];
    if (RESET && marked(p.reset, w.member, t + 1, w.row)) back = 0.0f;
    if (STATE_MASK) back *= at(p.state_mask, w.member, t + 1, w.row)[w.unit];
    g += back;
    if (UNIT == LP) *gradient = g;  // the gradient of its exponents is taken from here
  }
  const float* slope = at(p.pre, w.member, t, w.row) + w.unit * POOL;
  float* out = at(p.out, w.member, t, w.row) + w.unit * POOL;
#pragma unroll
  for (int i = 0; i < POOL; i++) out[i] = g * slope[i];
}
