// The transition without clusters: one block unrolls ROWS batch rows and reads the weights through L2.
//
// For GPUs before Hopper, and for models whose weights do not fit a cluster. The same ring of stages as
// cluster.cu. Matrices come with unit row stride (transposed forward), so that a warp's 32 lanes, which own
// 32 outputs, read 128 consecutive bytes; SPLIT warps share the inner dimension of one group of outputs.
//
// Macros: DEPTH SIZES UNITS MATRICES MAT_STAGE MAT_SOURCE THREADS ROWS BACKWARD HAS_RESET HAS_GRAD_MID
#include "common.cuh"
#include "params.cuh"
CONST int split(int s) { int n = (THREADS / 32) / up(size(s), 32); return n < 1 ? 1 : n; }
CONST int vector_offset(int s) { int n = 0; for (int i = 0; i < s; i++) n += ROWS * size(i); return n; }  // floats

struct Block { i64 member; int row0, rows; float* vectors; float* partial; };

template <int J> INLINE void product(const Params& p, const Block& b, int column, int part, int parts, float (&acc)[ROWS],
                                     u32 resets) {
  constexpr int Q = source_of(J), K = size(Q);
  const float* w = p.matrix[J].data + b.member * p.matrix[J].member + column;
  i64 stride = p.matrix[J].column;
  const float* x = b.vectors + vector_offset(Q);
  bool state = !BACKWARD && Q == DEPTH - 1;   // forward, h(t-1) is dropped where a sequence starts anew
  int from = K * part / parts, to = K * (part + 1) / parts;
#pragma unroll 8
  for (int k = from; k < to; k++) {
    float weight = __ldg(w + k * stride);
#pragma unroll
    for (int n = 0; n < ROWS; n++) {
      float v = x[k * ROWS + n];
      if (HAS_RESET && state && ((resets >> n) & 1)) v = 0.0f;
      acc[n] = fmaf(weight, v, acc[n]);
    }
  }
}
template <int S, int J> INLINE void products(const Params& p, const Block& b, int column, int part, int parts,
                                             float (&acc)[ROWS], u32 resets) {
  if constexpr (J < MATRICES) {
    if constexpr (stage_of(J) == S) product<J>(p, b, column, part, parts, acc, resets);
    products<S, J + 1>(p, b, column, part, parts, acc, resets);
  }
}
// Leaves SPLIT partial sums of every output of stage S in shared memory.
template <int S> INLINE void sum_stage(const Params& p, const Block& b, u32 resets) {
  constexpr int GROUPS = up(size(S), 32), SPLIT = split(S);
  for (int task = threadIdx.x / 32; task < GROUPS * SPLIT; task += THREADS / 32) {
    int column = task % GROUPS * 32 + threadIdx.x % 32, part = task / GROUPS;
    float acc[ROWS];
#pragma unroll
    for (int n = 0; n < ROWS; n++) acc[n] = 0.0f;
    if (column < size(S)) products<S, 0>(p, b, column, part, SPLIT, acc, resets);
#pragma unroll
    for (int n = 0; n < ROWS; n++)
      if (column < size(S)) b.partial[(part * size(S) + column) * ROWS + n] = acc[n];
  }
  __syncthreads();
}
template <int S> INLINE float total(const Block& b, int i) {
  float s = 0.0f;
#pragma unroll
  for (int part = 0; part < split(S); part++) s += b.partial[part * size(S) * ROWS + i];
  return s;
}
INLINE u32 load_resets(const Params& p, const Block& b, i64 t) {
  u32 bits = 0;
  for (int n = 0; n < b.rows; n++)
    if (p.reset[b.member * p.reset_member + t * p.batch + b.row0 + n]) bits |= 1u << n;
  return bits;
}

template <int S> INLINE void stages(const Params& p, const Block& b, i64 t, u32 resets) {
  if constexpr (S < DEPTH) {
    constexpr int l = layer(S);
    sum_stage<S>(p, b, resets);
    for (int i = threadIdx.x; i < size(S) * ROWS; i += THREADS) {
      int e = i / ROWS, n = i % ROWS;
      float y = 0.0f;
      if (n < b.rows) {
        i64 at = (b.member * p.steps + t) * p.batch + b.row0 + n;
        float s = total<S>(b, i);
        if (!BACKWARD) {
          y = activate<unit(S)>(s + p.input[b.member * p.input_member + (t * p.batch + b.row0 + n) * TOTAL +
                                            layer_offset(l) + e]);
          if (l == DEPTH - 1) p.top[at * HIDDEN + e] = y;
          else p.mid[at * MID + layer_offset(l) + e] = y;
        } else {
          if (HAS_RESET && S == 0 && ((resets >> n) & 1)) s = 0.0f;
          float g = 0.0f, out;
          if (l == DEPTH - 1) { g = p.input[at * HIDDEN + e]; out = p.top[at * HIDDEN + e]; }
          else {
            if (HAS_GRAD_MID) g = p.input_mid[at * MID + layer_offset(l) + e];
            out = p.mid[at * MID + layer_offset(l) + e];
          }
          y = (s + g) * slope<unit(S)>(out);
          p.output[at * TOTAL + layer_offset(l) + e] = y;
        }
      }
      b.vectors[vector_offset(S) + i] = y;
    }
    __syncthreads();
    stages<S + 1>(p, b, t, resets);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) transition(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) float memory[];
  Block b;
  b.member = blockIdx.x / p.groups;
  b.row0 = (int)(blockIdx.x % p.groups) * ROWS;
  b.rows = min(ROWS, (int)p.batch - b.row0);
  b.vectors = memory;
  b.partial = memory + vector_offset(DEPTH);
  for (int i = threadIdx.x; i < vector_offset(DEPTH); i += THREADS) {
    int j = i - vector_offset(DEPTH - 1), n = j % ROWS;
    bool h0 = !BACKWARD && j >= 0 && n < b.rows;
    memory[i] = h0 ? p.initial[b.member * p.initial_member + (i64)(b.row0 + n) * HIDDEN + j / ROWS] : 0.0f;
  }
  __syncthreads();
  for (i64 step = 0; step < p.steps; step++) {
    i64 t = BACKWARD ? p.steps - 1 - step : step;
    u32 resets = 0;
    if (HAS_RESET && (!BACKWARD || step > 0)) resets = load_resets(p, b, BACKWARD ? t + 1 : t);
    stages<0>(p, b, t, resets);
  }
  if (BACKWARD) {
    u32 resets = HAS_RESET ? load_resets(p, b, 0) : 0;
    sum_stage<0>(p, b, 0);
    for (int i = threadIdx.x; i < HIDDEN * ROWS; i += THREADS) {
      int e = i / ROWS, n = i % ROWS;
      if (n < b.rows)
        p.output_initial[(b.member * p.batch + b.row0 + n) * HIDDEN + e] = ((resets >> n) & 1) ? 0.0f : total<0>(b, i);
    }
  }
}
