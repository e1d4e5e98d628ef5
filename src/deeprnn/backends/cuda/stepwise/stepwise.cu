// The epilogue of one stage at one step, a thread for each unit of each batch row: products are a library's.
// Macros: STAGE; the rest is in the generated cell.cuh.
#include "common.cuh"
#include "cell.cuh"

struct Step {
  const float* sums;    // (members, B, gates, size), or null
  float* now;           // (members, B, sent, size): the vector, for later stages of this step, or null
  float* next;          // the same for the step that follows, zero in rows whose sequence ends here, or null
  i64 members, t;
};

extern "C" __global__ void __launch_bounds__(128) epilogue_step(const __grid_constant__ Params p, const __grid_constant__ Step step) {
  constexpr int S = STAGE, N = size(S), G = gates(S), K = sent(S);
  i64 i = (i64)blockIdx.x * 128 + threadIdx.x, rows = step.members * p.batch;
  if (i >= rows * N) return;
  int e = (int)(i % N);
  i64 row = i / N, member = row / p.batch, b = row % p.batch;
  RowAddress w = row_address(p, member, step.t, b);
  float sum[G > 0 ? G : 1], x[loads(S) > 0 ? loads(S) : 1], local[LOCALS], send[K > 0 ? K : 1], out[stores(S)];
#pragma unroll
  for (int g = 0; g < G; g++) sum[g] = step.sums[(row * G + g) * N + e];
  epilogue_load<S>(p, w, 0, e, x);
#pragma unroll
  for (int k = 0; k < SLOTS; k++)
    if (reads_local(S, k)) local[k] = p.local[k][row * N + e];
  // Backward what comes from the step that follows is dropped where a sequence starts there.
  bool fresh = HAS_RESET && (!BACKWARD || step.t + 1 < p.steps) && p.reset[w.mark + (BACKWARD ? p.batch : 0)];
  epilogue<S>(sum, x, fresh, local, send, out);
#pragma unroll
  for (int k = 0; k < SLOTS; k++)
    if (sets_local(S, k)) p.local[k][row * N + e] = local[k];
  epilogue_store<S>(p, w, 0, e, out);
  bool ends = HAS_RESET && (BACKWARD || step.t + 1 < p.steps) && p.reset[w.mark + (BACKWARD ? 0 : p.batch)];
#pragma unroll
  for (int k = 0; k < K; k++) {
    i64 at = (row * K + k) * N + e;
    if (step.now) step.now[at] = send[k];
    if (step.next) step.next[at] = ends ? 0.0f : send[k];
  }
}
