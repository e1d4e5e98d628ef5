// tensor_core.cu: warps that compute scales as they change, and what is set up before the first step. Comes after
// tensor_core_tiles.cuh.
#pragma once
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
    for (int i = th.number - FINISHERS; i < ROW_GROUPS * NTILES; i += SCALERS) {
      int q = i / NTILES, nt = i % NTILES, n = nt * 8 + th.lane % 8;
      constexpr int LATE = S == DEPTH - 1 || S == 0 ? before(S) : -1;   // what is looked at here may be a shortcut's
      bool anew = starts<N>(p, th, q, then, n);
      Bound here = bound<S>(th, largest_addend<S>(p, th, q, step, n), starts<S>(p, th, q, step, n), q, step, n);
      Bound next = bound<N, LATE>(th, largest_addend<N>(p, th, q, then, n), anew, q, then, n);
      float back = inverse(scale_of<before(S)>(th, q, from, n)), own_scale = scale_of<S>(th, q, step, n), scale = own_scale;
      barrier_wait(ready_of(th.base, q), (step * DEPTH + S) & 1);
      if (!is_sent<S>(p, step)) continue;
      float seen = seen_of(th, q, nt) * back;
      if (MIXED) store_shared(in_mosts(th, before(S), q, from, n), seen);
      float most = next.constant + times(next.late, seen) + times(next.growth, here.constant + times(here.growth, seen));
      float reach = most * scale;   // the scale that is there serves where it can
      if (within_reach<N>() && !(N == 0 && anew)) most = fmaxf(most, least_after(scale));
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

// ---- before the first step

// Vectors before the first step, those that it multiplies: what is given, or zeros. A warp has a tile of a row group at a time, as
// `tensor_core_products.cuh` wants it: a lane four numbers of batch row n. Few instructions for each: they count, before a short sequence.
template <int S> INLINE int initial_tiles(const Params& p) { return BACKWARD || p.initial_vector[S] ? ROW_GROUPS * NTILES * vector_tiles(S) : 0; }
struct First { int q, n, tile; float y[4]; };
template <int S> INLINE First first_values(const Params& p, const Thread& th, int i) {
  First f;
  int tile = i % vector_tiles(S), part = i / vector_tiles(S), k = tile % tiles(S) * 16 + th.lane % 4 * 2;
  f.q = part / NTILES, f.n = part % NTILES * 8 + th.lane / 4, f.tile = tile * NTILES + part % NTILES;
  bool given = (BACKWARD ? p.next_delta != nullptr : p.initial_vector[S] != nullptr) && f.n < rows_of(th, f.q);
  i64 b = th.row0 + f.q * ROWS + f.n;
#pragma unroll
  for (int w = 0; w < 4; w++) {
    f.y[w] = 0.0f;
    if (given && inside<S>(k + within(w)))
      f.y[w] = BACKWARD ? next_delta_value<S>(p, b, tile / tiles(S), k + within(w))
                        : p.initial_vector[S][th.member * p.initial_vector_member[S] + b * size(S) + k + within(w)];
  }
  return f;
}
// The largest of each of their rows is found here: `mosts` of a step that nobody has asked for yet. As in max_abs_scan.cu,
// infinities and NaN are not the largest of anything.
constexpr int INITIAL_MAXIMA = 0;
template <int S> INLINE void scan_initial(const Params& p, const Thread& th, int warp) {
  if constexpr (S < DEPTH) {
#pragma unroll 4
    for (int i = warp; i < initial_tiles<S>(p); i += THREADS / 32) {
      First f = first_values<S>(p, th, i);
      float most = 0.0f;
#pragma unroll
      for (int w = 0; w < 4; w++) most = fmaxf(most, fabsf(f.y[w]) <= END ? fabsf(f.y[w]) : 0.0f);
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
      if (th.lane % 4 == 0) raise_shared(in_mosts(th, S, f.q, INITIAL_MAXIMA, f.n), most);
    }
    scan_initial<S + 1>(p, th, warp);
  }
}
INLINE void clear_initial_maxima(const Thread& th) {
  for (int i = threadIdx.x; i < ROW_GROUPS * DEPTH * COLUMNS; i += THREADS)
    store_shared(in_mosts(th, i / COLUMNS % DEPTH, i / COLUMNS / DEPTH, INITIAL_MAXIMA, i % COLUMNS), 0.0f);
}
INLINE float initial_maximum(const Thread& th, int s, int q, int n) {
  float x[1];
  load_shared<1>(x, in_mosts(th, s, q, INITIAL_MAXIMA, n));
  return x[0];
}
// The largest number of row n of vector S before the first step.
template <int S> INLINE float most_initial(const Thread& th, int q, int n) {
  float most = initial_maximum(th, S, q, n);
  if (BY_FIRST_STATE) {   // states stay below it, or below 1
    most = fmaxf(most, 1.0f);
#pragma unroll
    for (int s = 0; s < DEPTH; s++) most = fmaxf(most, initial_maximum(th, s, q, n));
  }
  if (BACKWARD && MIXED)   // scales within reach of each other, as later ones are
#pragma unroll
    for (int s = 0; s < DEPTH; s++) most = fmaxf(most, initial_maximum(th, s, q, n) * power(-60));
  return most;
}
// The weights' scale of stage S, and how much larger than its source a sum of each of its matrices can become.
template <int S> INLINE void set_up_factors(const Params& p, const Thread& th) {
  float most = 0.0f;
#pragma unroll
  for (int j = 0; j < MATRICES; j++) {
    if (stage_of(j) != S) continue;
    float largest = 0.0f;
#pragma unroll
    for (int i = th.lane; i < SCAN_PIECES; i += 32) largest = fmaxf(largest, p.most_weights[(th.member * MATRICES + j) * SCAN_PIECES + i]);
#pragma unroll
    for (int i = 16; i; i /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, i));
    most = fmaxf(most, largest);
    if (th.lane == 0) store_shared(th.base + FACTORS + 4 * (DEPTH + j), largest);
  }
  if (th.lane == 0) store_shared(th.base + FACTORS + 4 * S, scale_by(most));
}
// The scale of the first vector that is made: what comes before it is known.
INLINE void set_up_first_scale(const Params& p, const Thread& th) {
#pragma unroll 1
  for (int i = threadIdx.x; i < ROW_GROUPS * COLUMNS; i += THREADS) {
    int q = i / COLUMNS, n = i % COLUMNS;
    bool anew = starts<0>(p, th, q, 0, n);
    Bound b = bound<0>(th, largest_addend<0>(p, th, q, 0, n), anew, q, 0, n);
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
    for (int i = threadIdx.x; !TILE_SCALES && i < ROW_GROUPS * COLUMNS; i += THREADS) {
      float most = most_initial<S>(th, i / COLUMNS, i % COLUMNS);
      set_scale<S>(th, i / COLUMNS, -1, i % COLUMNS, 1.0f, scale_by(most));
      store_shared(in_mosts(th, S, i / COLUMNS, -1, i % COLUMNS), most);
    }
#pragma unroll 4
    for (int i = warp; i < initial_tiles<S>(p); i += THREADS / 32) {
      First f = first_values<S>(p, th, i);
      u32 w[4];
      float scale = TILE_SCALES ? scale_of_tile<1, 2>(f.y) : scale_by(most_initial<S>(th, f.q, f.n));
      u32 to = vector_of<S>(th, f.q, -1) + f.tile * TILE_BYTES;
      tile_words(f.y, scale, w);
      store_words(to + SCALE_BYTES + th.lane * LANE_BYTES, w[0], w[1], w[2], w[3]);
      if (TILE_SCALES && th.lane % 4 == 0) store_shared(to + th.lane / 4 * 4, inverse(scale));
    }
    if (threadIdx.x == 0) {
      if (S == 0)
        for (int q = 0; q < ROW_GROUPS; q++) barrier_init(ready_of(th.base, q), WARPS);
      for (int i = 0; i < 2 * ROW_GROUPS; i++) {
        u32 bar = barrier_of<S>(th.base, i / 2, i % 2);
        barrier_init(bar, 1 + AT_ONCE + (SCALED ? NTILES : 0));
        barrier_expect(bar, arriving<S>(th, i / 2));
      }
    }
    set_up<S + 1>(p, th, warp);
  }
}
