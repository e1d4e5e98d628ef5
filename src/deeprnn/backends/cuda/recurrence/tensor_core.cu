// One cell unrolled over time on the tensor cores, for batches: the same ring of stages as cluster.cu, products by mma.sync.
//
// fp32 numbers are multiplied as two fp16 parts of 11 bits each, scaled by powers of two, and a product is three: high·high,
// high·low and low·high, summed in fp32. Where ranges are known a batch row of a vector has one scale (how it is found is
// said at `Range` in tensor_core_products.cuh), else every tile of it has its own (TILE_SCALES). With BF16 the weights have
// only their high part, the state keeps both. Vectors are cut into tiles of 16 units, dealt to the blocks of the cluster. A block has
// several kinds of warps:
// - MGROUPS x KGROUPS warps multiply: a warp owns unit tiles mg, mg + MGROUPS, ... with all their gates and multiplies the
//   inner tiles kg, kg + KGROUPS, ...; it leaves its sums in shared memory and goes on to the next task.
// - FINISHERS warps add the sums of a tile (16 units x 8 batch rows) up, apply the epilogue and send the result to
//   every block. They have few registers; the multiplying warps, which hold the weights, have theirs. A finisher has
//   the same tile of every GAP-th task and reads what the epilogue of its next one wants while this tile is on its way.
//   What a unit carries from step to step lies in memory that no other block touches.
// - SCALERS warps compute scales, where they change.
// A cluster may serve several ROW_GROUPS of ROWS rows each, one after the other in every stage: a task is a stage of
// one row group, so that one row group multiplies while another is finished and travels.
// A vector lies in shared memory in the order in which mma.sync wants its second operand, so that a lane reads 16 bytes
// per tile, and a lane of a finisher has 16 bytes of one batch row.
// Batch rows that do not exist are never sent: lanes that would read them read the last one that does.
//
// Nothing but the vectors' barriers bounds how far a warp gets ahead. They count the bytes that come from other
// blocks, and an arrival of each finisher that had a tile of it: so whoever has a vector knows that the sums it was made
// of have been read, and one place for sums a row group suffices.
//
// Macros: MAT_REGS CLUSTER MGROUPS KGROUPS FINISHERS FINISHER_REGS NTILES ROWS ROW_GROUPS THROUGH_L2 TILE_SCALES BY_FIRST_STATE
//         BOUNDED SLOPES SCANNED BF16; the rest is in the generated cell.cuh.
#include "common.cuh"
#include "cell.cuh"
#include "halves.cuh"
#include "parts.cuh"
CONST float slope_bound(int s) { constexpr float list[] = {SLOPES}; return list[s]; }   // backward: of a stage's gradient
CONST bool scanned(int s) { constexpr int list[] = {SCANNED}; return list[s] != 0; }    // whether something is added to its sums
#include "tensor_core_layout.cuh"
#include "tensor_core_products.cuh"
#include "tensor_core_tiles.cuh"
#include "tensor_core_scales.cuh"

// ---- multiplying warps

template <int S> INLINE void multiply(const Thread& th, const u32 (&reg)[NREG], int q, int step, u32 resets) {
  if (idle<S>(th)) {   // it waits all the same, so that it cannot arrive twice at one place
    await<before(S)>(th, q, S == 0 ? step - 1 : step);
  } else {
    Sums<S> acc;
    zero(acc);
    early<S, true>(th, reg, acc, q, step);
    resets >>= 2 * NTILES * q;
    if (HAS_RESET && S > 0 && fixed<has_delayed(S)>) drop<S>(acc, resets);
    if constexpr (TILE_SCALES) early<S, false>(th, reg, acc, q, step);
    critical<S>(th, reg, acc, q, step);
    if (HAS_RESET && S == 0) drop<S>(acc, resets);
    leave_sums<S>(th, acc, q);
  }
  __syncwarp();
  if (th.lane == 0) barrier_arrive(ready_of(th.base, q));
}
template <int S> INLINE void multiply_stages(const Params& p, const Thread& th, const u32 (&reg)[NREG], int step, u32 resets) {
  if constexpr (S < DEPTH) {
#pragma unroll 1
    for (int q = 0; q < ROW_GROUPS; q++) multiply<S>(th, reg, q, step, resets);
    multiply_stages<S + 1>(p, th, reg, step, resets);
  }
}
INLINE void multiply_all(const Params& p, const Thread& th) {
  u32 reg[NREG];
  load_matrices<0>(p, th, reg);
  u32 resets = 0, coming = 0;
  if (HAS_RESET && (!BACKWARD || p.next_delta)) coming = load_resets(p, th, BACKWARD ? p.steps : 0);
#pragma unroll 1
  for (int step = 0; step < (int)p.steps; step++) {
    if (HAS_RESET) {
      resets = coming;
      i64 t = BACKWARD ? p.steps - 1 - step : step + 1;   // backward: step s+1 drops what reset[t] cut
      if (BACKWARD || t < p.steps) coming = load_resets(p, th, t);
    }
    multiply_stages<0>(p, th, reg, step, resets);
  }
  if (BACKWARD && p.grad_initial_vector[0])   // the sums that would enter the step before the first
#pragma unroll 1
    for (int q = 0; q < ROW_GROUPS; q++) multiply<0>(th, reg, q, (int)p.steps, coming);
}

// ---- finishers

// A task that a finisher has a part in.
struct Visit { int q, stage, step; };
INLINE Visit after(Visit v) {
  v.q += GAP;
  if (v.q >= ROW_GROUPS) {
    v.q -= ROW_GROUPS;
    v.stage++;
    if (v.stage == DEPTH) {
      v.stage = 0;
      v.step++;
    }
  }
  return v;
}
// Read what the epilogue of a visit wants.
template <int S> INLINE void read_ahead(const Params& p, const Thread& th, const Visit& v, float (&x)[LOADED]) {
  if constexpr (S < DEPTH) {
    if (S < DEPTH - 1 && v.stage != S) read_ahead<S + 1>(p, th, v, x);
    else if (v.step < (int)p.steps)
#pragma unroll
      for (int j = 0; j < per_warp(S); j++) read<S>(p, th, task<S>(th, j), v.q, v.step, x + 4 * j * loaded(S));
  }
}
// What the epilogue of the next visit wants is read while this one's tiles are on their way.
template <int S> INLINE void finish_task(const Params& p, const Thread& th, const Visit& v, const Visit& next, float (&x)[LOADED]) {
  constexpr int N = per_warp(S), K = sent(S);
  int q = v.q, step = v.step;
  Way way[N * K];
  if (THROUGH_L2)
#pragma unroll
    for (int j = 0; j < N * K; j++) way[j] = way_of<S>(th, task<S>(th, j / K), j % K, q, step);
  u32 bar = barrier_of<S>(th.base, q, step);
  Scales by[N];
#pragma unroll
  for (int j = 0; j < N; j++) by[j] = steady_scales<S>(th, task<S>(th, j), q, step);
  barrier_wait(ready_of(th.base, q), (step * DEPTH + S) & 1);
  if (SLOTS > 0 && !OWN_ROW_GROUPS)
#pragma unroll
    for (int j = 0; j < N; j++) read_late<S>(p, th, task<S>(th, j), q, step, x + 4 * j * loaded(S));
  float out[N][4 * stores(S)];
#pragma unroll
  for (int j = 0; j < N; j++) {
    Task it = task<S>(th, j);
    if (it.real) finish<S>(p, th, it, j, by[j], x + 4 * j * loaded(S), out[j], q, step);
  }
  bool leaves = is_sent<S>(p, step);
  if (leaves) {
    if (THROUGH_L2) copy_fence();
    __syncwarp();
    if (th.lane == 0) {
      if (THROUGH_L2)
#pragma unroll
        for (int j = 0; j < N * K; j++)
          if (way[j].bytes > 0) copy_out(way[j].between, leaving<S>(th, j), way[j].bytes);
      barrier_arrive(bar);
    }
  }
#pragma unroll
  for (int j = 0; j < N; j++) {
    Task it = task<S>(th, j);
    if (it.real) put_out<S>(p, th, it, out[j], q, step);
  }
  if (ROW_GROUPS > 1) read_ahead<0>(p, th, next, x);   // one row group is a chain: what is sent goes first
  if (THROUGH_L2 && leaves && th.lane == 0) {
    copies_out_wait();
#pragma unroll
    for (int j = 0; j < N * K; j++)
      if (way[j].bytes > 0) copy_round<CLUSTER>(way[j].to, way[j].between, way[j].bytes, bar);
  }
  __syncwarp();
  rearm<S>(th, q, step);
  if (ROW_GROUPS == 1) read_ahead<0>(p, th, next, x);
}
template <int S> INLINE void finish_stage(const Params& p, const Thread& th, const Visit& v, const Visit& next, float (&x)[LOADED]) {
  if constexpr (S < DEPTH) {
    if (S == DEPTH - 1 || v.stage == S) finish_task<S>(p, th, v, next, x);
    else finish_stage<S + 1>(p, th, v, next, x);
  }
}
template <int S> INLINE void finish_step(const Params& p, const Thread& th, int step, float (&x)[LOADED]) {   // of one row group
  if constexpr (S < DEPTH) {
    Visit now = {0, S, step};
    finish_task<S>(p, th, now, after(now), x);
    finish_step<S + 1>(p, th, step, x);
  }
}
// What comes back to the vector before the first step, of row group q: sums that pass no epilogue.
INLINE void finish_initial(const Params& p, const Thread& th, int q) {
  barrier_wait(ready_of(th.base, q), ((int)p.steps * DEPTH) & 1);
#pragma unroll
  for (int j = 0; j < per_warp(0); j++) {
    Task it = task<0>(th, j);
    if (!it.real) continue;
    int n = it.nt * 8 + column_of(th), e = (first_tile<0>(th) + it.local) * 16 + even_row(th);
    float v[4];
    total<0>(th, it, q, 0, v);
    float back = inverse(factor<0>(th)), scale = 1.0f;
    if (!TILE_SCALES) scale = inverse(scale_of<DEPTH - 1>(th, q, (int)p.steps - 1, n));
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (it.part == 0 && n < rows_of(th, q) && inside<0>(e + within(i)))
        p.grad_initial_vector[0][(th.member * p.batch + th.row0 + q * ROWS + n) * size(0) + e + within(i)] = v[i] * back * scale;
  }
}
INLINE void finish_all(const Params& p, const Thread& th) {
  Visit now = {th.number / AT_ONCE, 0, 0};
  if (now.q >= GAP) return;
  float x[LOADED];
  read_ahead<0>(p, th, now, x);
#pragma unroll 1
  while (now.step < (int)p.steps) {
    if (ROW_GROUPS == 1) {
      finish_step<0>(p, th, now.step++, x);
    } else {
      Visit next = after(now);
      finish_stage<0>(p, th, now, next, x);
      now = next;
    }
  }
  if (BACKWARD && p.grad_initial_vector[0])
#pragma unroll 1
    for (; now.step == (int)p.steps && now.stage == 0; now = after(now)) finish_initial(p, th, now.q);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) KERNEL(const __grid_constant__ Params p) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) unsigned char memory[];
  Thread th;
  // What every task needs goes through a shuffle, or the compiler would ask special registers for it each time.
  th.base = __shfl_sync(0xffffffffu, shared_address(memory), 0);
  th.rank = cluster_rank();
  int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);   // so that the compiler knows it is one per warp
  th.lane = __shfl_sync(0xffffffffu, threadIdx.x % 32, threadIdx.x % 32);
  th.mg = warp / KGROUPS;
  th.kg = (warp + warp / KGROUPS) % KGROUPS;   // the first groups may have a tile more: not all on one quarter of the SM
  i64 cluster = blockIdx.x / CLUSTER;
  th.member = cluster / p.row_blocks;
  th.row0 = (int)(cluster % p.row_blocks) * (ROWS * ROW_GROUPS);
  th.left = (int)p.batch - th.row0;
  th.number = warp - WARPS;
  th.exchange = (u8*)p.exchange + cluster * exchange_offset(DEPTH);
  if (!TILE_SCALES) {
    clear_initial_maxima(th);
    __syncthreads();
    if (!BACKWARD || p.next_delta) scan_initial<0>(p, th, warp);
    __syncthreads();
  }
  set_up<0>(p, th, warp);
  if (SCALED) {
    __syncthreads();
    set_up_first_scale(p, th);
  }
  barrier_fence();
  copy_fence();
  cluster_sync();
  if (warp < WARPS) {
    if constexpr (LEND) more_registers<MULTIPLIER_REGS>();
    multiply_all(p, th);
  } else if (warp < WARPS + FINISHERS) {
    if constexpr (LEND) fewer_registers<FINISHER_REGS>();
    finish_all(p, th);
  } else if constexpr (SCALED) {
    if constexpr (LEND) fewer_registers<SCALER_REGS>();
    scale_all(p, th);
  }
  cluster_sync();
#endif
}
