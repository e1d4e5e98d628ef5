// What the kernels of the loop share: the ring's lists, the layers behind its stages, and the parameter block
// that launch.py fills. Comes after common.cuh. Macros: DEPTH SIZES UNITS MATRICES MAT_STAGE MAT_SOURCE
// BACKWARD HAS_GRAD_MID.
#pragma once
#define CONST constexpr __host__ __device__
// The lists live inside functions: device code may not refer to arrays of the host's namespace.
CONST int size(int s) { constexpr int list[] = {SIZES}; return list[s]; }
CONST int unit(int s) { constexpr int list[] = {UNITS}; return list[s]; }
CONST int stage_of(int j) { constexpr int list[] = {MAT_STAGE}; return list[j]; }
CONST int source_of(int j) { constexpr int list[] = {MAT_SOURCE}; return list[j]; }
CONST int up(int a, int b) { return (a + b - 1) / b; }
CONST int before(int s) { return s == 0 ? DEPTH - 1 : s - 1; }
CONST int layer(int s) { return BACKWARD ? DEPTH - 1 - s : s; }      // which layer a stage belongs to
CONST int layer_size(int l) { return size(BACKWARD ? DEPTH - 1 - l : l); }
CONST int layer_offset(int l) { int n = 0; for (int i = 0; i < l; i++) n += layer_size(i); return n; }
constexpr int TOTAL = layer_offset(DEPTH), HIDDEN = layer_size(DEPTH - 1), MID = TOTAL - HIDDEN;

struct Matrix { const float* data; i64 member, row, column; };   // strides in elements
struct Params {
  Matrix matrix[MATRICES];
  const float* input;      // forward: A (T,B,TOTAL).             backward: gradient of h (T,B,HIDDEN)
  const float* input_mid;  //                                     backward: gradient of z (T,B,MID) or null
  float* top;              // h (T,B,HIDDEN): written forward, read backward
  float* mid;              // z (T,B,MID): likewise
  const float* initial;    // forward: h0 (B,HIDDEN).             backward, mma.cu: dA of the step that follows (B,TOTAL), or null
  float* output;           // backward: dA (T,B,TOTAL)
  float* output_initial;   // backward: dh0 (B,HIDDEN); mma.cu: or null
  const u8* reset;         // (T,B)
  i64 input_member, initial_member, reset_member;
  i64 steps, batch, groups;
  u32* exchange;           // wide.cu, where it is zeroed before the launch, and mma.cu
  i64 items, share;        // wide.cu alone: row groups of all members; how many of them a team serves
  // mma.cu alone, from largest.cu: the largest sum of magnitudes of eight rows of each matrix (MATRICES, pieces), and the
  // largest magnitude of each row of `input` and `input_mid` (T,B,DEPTH layers).
  const float *most_weights, *most_input;
};

// What stands beside the sum of element e of stage S, batch row b: x is added to it, y (backward) is the unit's output.
template <int S> INLINE void read_beside(const Params& p, i64 member, i64 t, int b, int e, float& x, float& y) {
  constexpr int l = layer(S);
  i64 at = (member * p.steps + t) * p.batch + b;   // (p, t, b) flattened
  if (!BACKWARD) {
    x = p.input[member * p.input_member + (t * p.batch + b) * TOTAL + layer_offset(l) + e];
  } else if (l == DEPTH - 1) {
    x = p.input[at * HIDDEN + e];
    y = p.top[at * HIDDEN + e];
  } else {
    if (HAS_GRAD_MID) x = p.input_mid[at * MID + layer_offset(l) + e];
    y = p.mid[at * MID + layer_offset(l) + e];
  }
}
