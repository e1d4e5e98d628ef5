// The transition on the tensor cores, for batches: the same ring of stages as cluster.cu, products by mma.sync.
//
// fp32 numbers are scaled by a power of two and held as two fp16 parts (22 bits of mantissa), and a product is three:
// high·high, high·low and low·high, summed in fp32; with BF16 the weights have only their high part, the state keeps
// both. How a vector is scaled is said at `Range` in mma_products.cuh. Vectors are cut into tiles of 16 elements, dealt to
// the blocks of the cluster. A block has several kinds of warps:
// - MGROUPS x KGROUPS warps multiply: a warp owns output tiles mg, mg + MGROUPS, ... and multiplies the inner tiles
//   kg, kg + KGROUPS, ...; it leaves its sums in shared memory and goes on to the next task.
// - FINISHERS warps add the sums of a tile (16 outputs x 8 batch rows) up, apply the unit and send the result to
//   every block. They have few registers; the multiplying warps, which hold the weights, have theirs. A finisher has
//   the same tile of every GAP-th task and reads what stands beside its next sums while this tile is on its way.
// - SCALERS warps compute scales, where they change.
// A cluster may serve several STREAMS of ROWS rows each, one after the other in every stage: a task is a stage of
// one stream, so that one stream multiplies while another is finished and travels.
// A state vector lies in shared memory in the order in which mma.sync wants its second operand, so that a lane
// reads 16 bytes per tile, and a lane of a finisher has 16 bytes of one batch row.
// Batch rows that do not exist are never sent: lanes that would read them read the last one that does.
//
// Nothing but the vectors' barriers bounds how far a warp gets ahead. They count the bytes that come from other
// blocks, and an arrival of each finisher that had a tile of it: so whoever has a vector knows that the sums it was made
// of have been read, and one place for sums a stream suffices.
//
// Macros: DEPTH SIZES UNITS MATRICES MAT_STAGE MAT_SOURCE MAT_REGS CLUSTER MGROUPS KGROUPS FINISHERS NTILES ROWS
//         STREAMS THROUGH_L2 BACKWARD HAS_RESET HAS_GRAD_MID BF16
#include "common.cuh"
#include "params.cuh"
#include "halves.cuh"
#include "parts.cuh"
#include "mma_layout.cuh"
#include "mma_products.cuh"
#include "mma_tiles.cuh"

// ---- multiplying warps

template <int S> INLINE void multiply(const Thread& th, const u32 (&reg)[NREG], int q, int step, u32 resets) {
  if (idle<S>(th)) {   // it waits all the same, so that it cannot arrive twice at one place
    await<before(S)>(th, q, S == 0 ? step - 1 : step);
  } else {
    Sums<S> acc;
    zero(acc);
    early<S>(th, reg, acc, q, step);
    resets >>= 2 * NTILES * q;
    if (HAS_RESET && !BACKWARD && S > 0) drop<S>(acc, resets);
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
    for (int q = 0; q < STREAMS; q++) multiply<S>(th, reg, q, step, resets);
    multiply_stages<S + 1>(p, th, reg, step, resets);
  }
}
INLINE void multiply_all(const Params& p, const Thread& th) {
  u32 reg[NREG];
  load_matrices<0>(p, th, reg);
  u32 resets = 0, coming = 0;
  if (HAS_RESET && (!BACKWARD || p.initial)) coming = load_resets(p, th, BACKWARD ? p.steps : 0);
#pragma unroll 1
  for (int step = 0; step < (int)p.steps; step++) {
    if (HAS_RESET) {
      resets = coming;
      i64 t = BACKWARD ? p.steps - 1 - step : step + 1;   // backward: step s+1 drops what reset[t] cut
      if (BACKWARD || t < p.steps) coming = load_resets(p, th, t);
    }
    multiply_stages<0>(p, th, reg, step, resets);
  }
  if (BACKWARD && p.output_initial)   // the sums that would enter the step before the first
#pragma unroll 1
    for (int q = 0; q < STREAMS; q++) multiply<0>(th, reg, q, (int)p.steps, coming);
}

// ---- finishers

// A task that a finisher has a part in, and what stands beside its sums.
struct Visit { int q, stage, step; };
struct Beside { float a[4 * busiest()], g[4 * busiest()]; };
INLINE Visit after(Visit v) {
  v.q += GAP;
  if (v.q >= STREAMS) {
    v.q -= STREAMS;
    v.stage++;
    if (v.stage == DEPTH) {
      v.stage = 0;
      v.step++;
    }
  }
  return v;
}
template <int S> INLINE void look(const Params& p, const Thread& th, const Visit& v, Beside& beside) {
  if constexpr (S < DEPTH) {
    if (S < DEPTH - 1 && v.stage != S) look<S + 1>(p, th, v, beside);
    else if (v.step < (int)p.steps)
#pragma unroll
      for (int j = 0; j < per_warp(S); j++) read<S>(p, th, task<S>(th, j), v.q, v.step, beside.a + 4 * j, beside.g + 4 * j);
  }
}
// What stands beside the sums of the next visit is read while this one's tiles are on their way.
template <int S> INLINE void finish_task(const Params& p, const Thread& th, const Visit& v, const Visit& next, Beside& beside) {
  constexpr int N = per_warp(S);
  int q = v.q, step = v.step;
  Way way[N];
  if (THROUGH_L2)
#pragma unroll
    for (int j = 0; j < N; j++) way[j] = way_of<S>(th, task<S>(th, j), q, step);
  u32 bar = barrier_of<S>(th.base, q, step);
  Scales by[N];
#pragma unroll
  for (int j = 0; j < N; j++) by[j] = steady_scales<S>(th, task<S>(th, j), q, step);
  barrier_wait(ready_of(th.base, q), (step * DEPTH + S) & 1);
#pragma unroll
  for (int j = 0; j < N; j++) {
    Task it = task<S>(th, j);
    if (it.real) finish<S>(p, th, it, j, by[j], beside.a + 4 * j, beside.g + 4 * j, q, step);
  }
  bool sent = is_sent<S>(p, step);
  if (sent) {
    if (THROUGH_L2) copy_fence();
    __syncwarp();
    if (th.lane == 0) {
      if (THROUGH_L2)
#pragma unroll
        for (int j = 0; j < N; j++)
          if (way[j].bytes > 0) copy_out(way[j].between, leaving<S>(th, j), way[j].bytes);
      barrier_arrive(bar);
    }
  }
#pragma unroll
  for (int j = 0; j < N; j++) {
    Task it = task<S>(th, j);
    if (it.real) put_out<S>(p, th, it, beside.g + 4 * j, q, time_of(p, step));
  }
  if (STREAMS > 1) look<0>(p, th, next, beside);   // one stream is a chain: what is sent goes first
  if (THROUGH_L2 && sent && th.lane == 0) {
    copies_out_wait();
#pragma unroll
    for (int j = 0; j < N; j++)
      if (way[j].bytes > 0) copy_round<CLUSTER>(way[j].to, way[j].between, way[j].bytes, bar);
  }
  __syncwarp();
  rearm<S>(th, q, step);
  if (STREAMS == 1) look<0>(p, th, next, beside);
}
template <int S> INLINE void finish_stage(const Params& p, const Thread& th, const Visit& v, const Visit& next, Beside& beside) {
  if constexpr (S < DEPTH) {
    if (S == DEPTH - 1 || v.stage == S) finish_task<S>(p, th, v, next, beside);
    else finish_stage<S + 1>(p, th, v, next, beside);
  }
}
template <int S> INLINE void finish_step(const Params& p, const Thread& th, int step, Beside& beside) {   // of one stream
  if constexpr (S < DEPTH) {
    Visit now = {0, S, step};
    finish_task<S>(p, th, now, after(now), beside);
    finish_step<S + 1>(p, th, step, beside);
  }
}
// dh0 of stream q: sums that pass no unit.
INLINE void finish_initial(const Params& p, const Thread& th, int q) {
  barrier_wait(ready_of(th.base, q), ((int)p.steps * DEPTH) & 1);
#pragma unroll
  for (int j = 0; j < per_warp(0); j++) {
    Task it = task<0>(th, j);
    if (!it.real) continue;
    int n = it.nt * 8 + column_of(th), e = (first_tile<0>(th) + it.local) * 16 + even_row(th);
    float v[4];
    total<0>(th, it, q, v);
    float back = inverse(factor<0>(th)), scale = inverse(scale_of<DEPTH - 1>(th, q, (int)p.steps - 1, n));
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (it.part == 0 && n < rows_of(th, q) && inside<0>(e + within(i)))
        p.output_initial[(th.member * p.batch + th.row0 + q * ROWS + n) * HIDDEN + e + within(i)] = v[i] * back * scale;
  }
}
INLINE void finish_all(const Params& p, const Thread& th) {
  Visit now = {th.number / AT_ONCE, 0, 0};
  if (now.q >= GAP) return;
  Beside beside;
  look<0>(p, th, now, beside);
#pragma unroll 1
  while (now.step < (int)p.steps) {
    if (STREAMS == 1) {
      finish_step<0>(p, th, now.step++, beside);
    } else {
      Visit next = after(now);
      finish_stage<0>(p, th, now, next, beside);
      now = next;
    }
  }
  if (BACKWARD && p.output_initial)
#pragma unroll 1
    for (; now.step == (int)p.steps && now.stage == 0; now = after(now)) finish_initial(p, th, now.q);
}

// ---- warps that compute scales

// No scale of vectors that one stage multiplies is out of reach of the one before it: sums of one are brought to the other.
template <int S> INLINE constexpr bool within_reach() { return MIXED && (BACKWARD ? S > 0 : S < DEPTH - 1); }
INLINE float least_after(float scale) { return inverse(scale) * power(15 - 84 / max(DEPTH - 1, 1)); }
// What was dropped where a sequence starts anew counts for nothing, be it infinite or NaN.
INLINE float times(float growth, float most) { return HAS_RESET && growth == 0.0f ? 0.0f : growth * most; }
// How large the vector was that stage S multiplied, and from that the scale of the vector after S's own. All that can be
// is read before that is known.
template <int S> INLINE void scale_stage(const Params& p, const Thread& th, int step) {
  if constexpr (S < DEPTH) {
    constexpr int N = S == DEPTH - 1 ? 0 : S + 1;
    int from = S == 0 ? step - 1 : step, then = S == DEPTH - 1 ? step + 1 : step;
#pragma unroll 1
    for (int i = th.number - FINISHERS; i < STREAMS * NTILES; i += SCALERS) {
      int q = i / NTILES, nt = i % NTILES, n = nt * 8 + th.lane % 8;
      constexpr int LATE = S == DEPTH - 1 || S == 0 ? before(S) : -1;   // what is looked at here may be a shortcut's
      bool anew = starts<N>(p, th, q, then, n);
      Bound own = bound<S>(th, most_beside<S>(p, th, q, step, n), starts<S>(p, th, q, step, n), q, step, n);
      Bound next = bound<N, LATE>(th, most_beside<N>(p, th, q, then, n), anew, q, then, n);
      float back = inverse(scale_of<before(S)>(th, q, from, n)), own_scale = scale_of<S>(th, q, step, n), scale = own_scale;
      barrier_wait(ready_of(th.base, q), (step * DEPTH + S) & 1);
      if (!is_sent<S>(p, step)) continue;
      float seen = seen_of(th, q, nt) * back;
      if (MIXED) store_shared(in_mosts(th, before(S), q, from, n), seen);
      float most = next.constant + times(next.late, seen) + times(next.growth, own.constant + times(own.growth, seen));
      if (within_reach<N>() && !(N == 0 && anew)) most = fmaxf(most, least_after(scale));
      float reach = most * scale;   // the scale that is there serves where it can
      if (!(reach >= 32.0f && reach < 32768 >> margin())) scale = scale_by(most);
      set_scale<N>(th, q, then, n, own_scale, bounded(N) ? STEADY : scale);
      __syncwarp();
      if (th.lane == 0) barrier_arrive(barrier_of<S>(th.base, q, step));
    }
    scale_stage<S + 1>(p, th, step);
  }
}
INLINE void scale_all(const Params& p, const Thread& th) {
#pragma unroll 1
  for (int step = 0; step < (int)p.steps; step++) scale_stage<0>(p, th, step);
}

// Vectors before the first step, those that it multiplies: what is given, or zeros. A warp has a tile of a stream at a time, as
// `mma_products.cuh` wants it: a lane four numbers of batch row n. Few instructions for each: they count, before a short sequence.
template <int S> INLINE constexpr int initial_tiles() { return BACKWARD || S == DEPTH - 1 ? STREAMS * NTILES * tiles(S) : 0; }
struct First { int q, n, tile; float y[4]; };
template <int S> INLINE First first_values(const Params& p, const Thread& th, int i) {
  First f;
  int part = i / tiles(S), k = i % tiles(S) * 16 + th.lane % 4 * 2;
  f.q = part / NTILES, f.n = part % NTILES * 8 + th.lane / 4, f.tile = i % tiles(S) * NTILES + part % NTILES;
  constexpr int WIDE = BACKWARD ? TOTAL : HIDDEN, START = BACKWARD ? layer_offset(layer(S)) : 0;
  const float* at = p.initial + th.member * p.initial_member + (i64)(th.row0 + f.q * ROWS) * WIDE + START + (f.n * WIDE + k);
  bool given = (!BACKWARD || p.initial) && f.n < rows_of(th, f.q);
#pragma unroll
  for (int w = 0; w < 4; w++) f.y[w] = given && inside<S>(k + within(w)) ? at[within(w)] : 0.0f;
  return f;
}
// The largest of each of their rows is found here: `mosts` of a step that nobody has asked for yet. As in largest.cu,
// infinities and NaN are not the largest of anything.
constexpr int LOOKED_AT = 0;
template <int S> INLINE void look_initial(const Params& p, const Thread& th, int warp) {
  if constexpr (S < DEPTH) {
#pragma unroll 4
    for (int i = warp; i < initial_tiles<S>(); i += THREADS / 32) {
      First f = first_values<S>(p, th, i);
      float most = 0.0f;
#pragma unroll
      for (int w = 0; w < 4; w++) most = fmaxf(most, fabsf(f.y[w]) <= END ? fabsf(f.y[w]) : 0.0f);
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
      if (th.lane % 4 == 0) raise_shared(in_mosts(th, S, f.q, LOOKED_AT, f.n), most);
    }
    look_initial<S + 1>(p, th, warp);
  }
}
INLINE void clear_looked_at(const Thread& th) {
  for (int i = threadIdx.x; i < STREAMS * DEPTH * COLUMNS; i += THREADS)
    store_shared(in_mosts(th, i / COLUMNS % DEPTH, i / COLUMNS / DEPTH, LOOKED_AT, i % COLUMNS), 0.0f);
}
INLINE float looked_at(const Thread& th, int s, int q, int n) {
  float x[1];
  load_shared<1>(x, in_mosts(th, s, q, LOOKED_AT, n));
  return x[0];
}
// The largest number of row n of vector S before the first step.
template <int S> INLINE float most_initial(const Thread& th, int q, int n) {
  float most = looked_at(th, S, q, n);
  if (BACKWARD && MIXED)   // scales within reach of each other, as later ones are
#pragma unroll
    for (int s = 0; s < DEPTH; s++) most = fmaxf(most, looked_at(th, s, q, n) * power(-60));
  return most;
}
// The weights' scale of stage S, and how much larger than its source a sum of each of its matrices can become.
template <int S> INLINE void set_up_factors(const Params& p, const Thread& th) {
  float most = 0.0f;
#pragma unroll
  for (int j = 0; j < MATRICES; j++) {
    if (stage_of(j) != S) continue;
    float own = 0.0f;
#pragma unroll
    for (int i = th.lane; i < PIECES; i += 32) own = fmaxf(own, p.most_weights[(th.member * MATRICES + j) * PIECES + i]);
#pragma unroll
    for (int i = 16; i; i /= 2) own = fmaxf(own, __shfl_xor_sync(0xffffffffu, own, i));
    most = fmaxf(most, own);
    if (th.lane == 0) store_shared(th.base + FACTORS + 4 * (DEPTH + j), own);
  }
  if (th.lane == 0) store_shared(th.base + FACTORS + 4 * S, scale_by(most));
}
// The scale of the first vector that is made: what comes before it is known.
INLINE void set_up_first_scale(const Params& p, const Thread& th) {
#pragma unroll 1
  for (int i = threadIdx.x; i < STREAMS * COLUMNS; i += THREADS) {
    int q = i / COLUMNS, n = i % COLUMNS;
    bool anew = starts<0>(p, th, q, 0, n);
    Bound b = bound<0>(th, most_beside<0>(p, th, q, 0, n), anew, q, 0, n);
    float first = most_initial<DEPTH - 1>(th, q, n), of_first = scale_of<DEPTH - 1>(th, q, -1, n);
    float most = b.constant + times(b.growth, first);
    if (within_reach<0>() && !anew && first > 0.0f) most = fmaxf(most, least_after(of_first));
    set_scale<0>(th, q, 0, n, of_first, bounded(0) ? STEADY : scale_by(most));
  }
}
template <int S> INLINE void set_up(const Params& p, const Thread& th, int warp) {
  if constexpr (S < DEPTH) {
    if (warp == S % (THREADS / 32)) set_up_factors<S>(p, th);
#pragma unroll 1
    for (int i = threadIdx.x; i < STREAMS * COLUMNS; i += THREADS) {
      float most = most_initial<S>(th, i / COLUMNS, i % COLUMNS);
      set_scale<S>(th, i / COLUMNS, -1, i % COLUMNS, 1.0f, scale_by(most));
      store_shared(in_mosts(th, S, i / COLUMNS, -1, i % COLUMNS), most);
    }
#pragma unroll 4
    for (int i = warp; i < initial_tiles<S>(); i += THREADS / 32) {
      First f = first_values<S>(p, th, i);
      float scale = scale_by(most_initial<S>(th, f.q, f.n));
      u32 w[4];
      two_parts(f.y[0] * scale, f.y[1] * scale, w[0], w[2]);
      two_parts(f.y[2] * scale, f.y[3] * scale, w[1], w[3]);
      store_words(vector_of<S>(th, f.q, -1) + (f.tile * 32 + th.lane) * ENTRY, w[0], w[1], w[2], w[3]);
    }
    if (threadIdx.x == 0) {
      if (S == 0)
        for (int q = 0; q < STREAMS; q++) barrier_init(ready_of(th.base, q), WARPS);
      for (int i = 0; i < 2 * STREAMS; i++) {
        u32 bar = barrier_of<S>(th.base, i / 2, i % 2);
        barrier_init(bar, 1 + AT_ONCE + (SCALED ? NTILES : 0));
        barrier_expect(bar, arriving<S>(th, i / 2));
      }
    }
    set_up<S + 1>(p, th, warp);
  }
}
extern "C" __global__ void __launch_bounds__(THREADS, 1) transition(const __grid_constant__ Params p) {
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
  th.member = cluster / p.groups;
  th.row0 = (int)(cluster % p.groups) * (ROWS * STREAMS);
  th.left = (int)p.batch - th.row0;
  th.number = warp - WARPS;
  th.exchange = (u8*)p.exchange + cluster * exchange_offset(DEPTH);
  clear_looked_at(th);
  __syncthreads();
  if (!BACKWARD || p.initial) look_initial<0>(p, th, warp);
  __syncthreads();
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
