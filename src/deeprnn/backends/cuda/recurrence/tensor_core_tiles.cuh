// tensor_core.cu: a tile from its sums to the other blocks and out, and the bounds from which scales come. Comes after
// tensor_core_products.cuh.
#pragma once
INLINE i64 time_of(const Params& p, int step) { return BACKWARD ? p.steps - 1 - step : step; }

// What lane (g, c) finishes: rows r0, r0+1, r0+8, r0+9 of the tile, r0 = g rounded down to even; column 2c + g % 2.
INLINE int even_row(const Thread& th) { return th.lane / 4 & ~1; }
INLINE int column_of(const Thread& th) { return th.lane % 4 * 2 + (th.lane / 4 & 1); }
// The j-th tile that this finisher has: output tile `local` of the block, batch tile nt. Where there are fewer
// tiles than warps, several finish the same one and `part` says which blocks each of them sends to.
struct Task { int local, nt, part; bool real; };
template <int S> INLINE Task task(const Thread& th, int j) {
  Task it;
  int i = j * AT_ONCE + th.number % AT_ONCE;
  it.part = 0;
  if (j >= full(S)) {
    i = full(S) * FINISHERS + th.number % max(rest(S), 1);
    it.part = th.number / max(rest(S), 1);
  }
  it.local = i / NTILES;
  it.nt = i % NTILES;
  it.real = i < work(S) && it.part < share(S, j) && it.local < tile_count<S>(th);
  return it;
}
INLINE constexpr int within(int i) { return i % 2 + i / 2 * 8; }   // element i of a lane, from its first
template <int S> INLINE bool inside(int e) { return size(S) % 16 == 0 || e < size(S); }

// What the epilogue of the lane's four units wants beside their sums: x[4][loaded(S)], memory first, then local values;
// the next step's is asked into L2. The
// base of addresses is one for the warp and the lane's own part fits 32 bits: address arithmetic of 64 bits in each lane
// took longer than the products.
INLINE RowAddress row_address_at(const Params& p, const Thread& th, int q, int step) { return row_address(p, th.member, time_of(p, step), th.row0 + q * ROWS); }
template <int S> INLINE float* local_of(const Params& p, const RowAddress& w, int k, int n, int e) {
  return p.local[k] + (w.member * p.batch + w.b) * size(S) + (n * size(S) + e);
}
template <int S> INLINE void read_carried(const Params& p, const RowAddress& w, int n, int unit, float* to) {
#pragma unroll
  for (int k = 0; k < SLOTS; k++)
    if (reads_local(S, k)) to[loads(S) + k] = *(const volatile float*)local_of<S>(p, w, k, n, unit);
}
template <int S> INLINE void read(const Params& p, const Thread& th, const Task& it, int q, int step, float* x) {
  int n = it.nt * 8 + column_of(th), e = (first_tile<S>(th) + it.local) * 16 + even_row(th), rows = rows_of(th, q);
#pragma unroll
  for (int k = 0; k < 4 * loaded(S); k++) x[k] = 0.0f;
  if (!it.real || rows <= 0) return;   // the same for the whole warp
  // A lane beyond the batch or the units reads what another one reads, and nobody reads what it makes of it: a branch
  // around its loads would part the warp, and choosing zero instead would wait for them here, a visit too early.
  int more = step + 1 < (int)p.steps, near = min(n, rows - 1);
  RowAddress w = row_address_at(p, th, q, step), next = row_address_at(p, th, q, step + more);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float* to = x + i * loaded(S);
    int unit = inside<S>(e + within(i)) ? e + within(i) : size(S) - 1;
    epilogue_load<S>(p, w, near, unit, to);
    if (i % 2 == 0) epilogue_touch<S>(p, next, near, unit);
    if (OWN_ROW_GROUPS) read_carried<S>(p, w, near, unit, to);
  }
}
// The same for what the units carry alone, where it could not be read before the sums were there: see OWN_ROW_GROUPS.
template <int S> INLINE void read_late(const Params& p, const Thread& th, const Task& it, int q, int step, float* x) {
  int n = it.nt * 8 + column_of(th), e = (first_tile<S>(th) + it.local) * 16 + even_row(th), rows = rows_of(th, q);
  if (!it.real || rows <= 0) return;
  RowAddress w = row_address_at(p, th, q, step);
#pragma unroll
  for (int i = 0; i < 4; i++)
    read_carried<S>(p, w, min(n, rows - 1), inside<S>(e + within(i)) ? e + within(i) : size(S) - 1, x + i * loaded(S));
}
// Leave the warp's sums in shared memory for the finishers.
template <int S> INLINE void leave_sums(const Thread& th, const Sums<S>& acc, int q) {
  u32 at = th.base + PARTIAL + q * PARTIAL_BYTES;
#pragma unroll
  for (int m = 0; m < rows(S); m++)
#pragma unroll
    for (int n = 0; n < NTILES; n++) {
      float v[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        v[i] = acc.d[m][n][0][i];
#pragma unroll
        for (int k = 1; k < KINDS; k++) v[i] += acc.d[m][n][k][i];
      }
      int tile = (m / gates(S) * MGROUPS + th.mg) * gates(S) + m % gates(S);
      store_words(at + (((tile * NTILES + n) * KGROUPS + th.kg) * 32 + th.lane) * 16, __float_as_uint(v[0]),
                  __float_as_uint(v[1]), __float_as_uint(v[2]), __float_as_uint(v[3]));
    }
}
// Sum g of the lane's four units of a tile, rearranged so that units lie in pairs.
template <int S> INLINE void total(const Thread& th, const Task& it, int q, int g, float (&v)[4]) {
  u32 at = th.base + PARTIAL + q * PARTIAL_BYTES;
  float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
  for (int k = 0; k < KGROUPS; k++) {
    float x[4];
    load_shared<4>(x, at + ((((it.local * gates(S) + g) * NTILES + it.nt) * KGROUPS + k) * 32 + th.lane) * 16);
#pragma unroll
    for (int i = 0; i < 4; i++) d[i] += x[i];
  }
  u32 odd = th.lane / 4 & 1;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    float got = __shfl_xor_sync(0xffffffffu, select(odd, d[i], d[i + 1]), 4);
    v[i] = select(odd, got, d[i]);
    v[i + 1] = select(odd, d[i + 1], got);
  }
}

// Pass a finished tile on to every block, this one too. Either each lane stores its 16 bytes into all of them, or the tile
// goes to L2 and from there by one copy to the whole cluster: that takes two trips, but a block's tiles leave it
// once and not once for each other block.
template <int S> INLINE void send_tile(const Thread& th, const Task& it, int share, int tile, const u32 (&words)[4], int q, int step) {
  u32 at = vector_of<S>(th, q, step) + (tile * NTILES + it.nt) * TILE_BYTES + (column_of(th) * 4 + th.lane / 8) * LANE_BYTES;
  u32 bar = barrier_of<S>(th.base, q, step);
  int each = ceil_div(CLUSTER, share);
#pragma unroll
  for (int d = 0; d < CLUSTER; d++) {
    int to = it.part * each + d;
    if (d < each && (each * share == CLUSTER || to < CLUSTER)) send4(map_rank(at, to), words, map_rank(bar, to));
  }
}
template <int S> INLINE u32 leaving(const Thread& th, int j) { return th.base + LEAVING + (th.number * most_leaving() + j) * TILE_BYTES; }
// Where a tile goes. All of it is known before the sums are, and pinned then: computed when the tile is ready, it
// would add to the time of every stage.
struct Way { u8* between; u32 to, bytes; };
template <int S> INLINE Way way_of(const Thread& th, const Task& it, int part, int q, int step) {
  int place = (part * tiles(S) + first_tile<S>(th) + it.local) * NTILES + it.nt;
  Way w;
  w.between = th.exchange + (fixed<exchange_offset(S)> + (q * vector_tiles(S) * NTILES + place) * TILE_BYTES);
  w.to = vector_of<S>(th, q, step) + place * TILE_BYTES;
  w.bytes = it.real ? bytes_of(max(min(sent_of(th, q) - it.nt * 8, 8), 0)) : 0;
  pin(w.between, w.to, w.bytes);
  return w;
}
// What the last step ends with goes nowhere, but backward into dh0 where it is wanted.
template <int S> INLINE bool is_sent(const Params& p, int step) {
  return S < DEPTH - 1 || step < (int)p.steps - 1 || (BACKWARD && p.grad_initial_vector[0]);
}
// The largest number that is added to the sums of row n in stage S.
template <int S> INLINE float largest_addend(const Params& p, const Thread& th, int q, int step, int n) {
  if constexpr (bounded(S) || !scanned(S)) return 0.0f;
  if (n >= rows_of(th, q) || step >= (int)p.steps) return 0.0f;
  const float* first = p.most_input + ((th.member * p.steps + time_of(p, step)) * p.batch + th.row0 + q * ROWS) * DEPTH;
  return first[n * DEPTH + S];
}
// Whether a sequence starts anew in row n, so that what stage S makes of vectors of the step before is dropped.
template <int S> INLINE bool starts(const Params& p, const Thread& th, int q, int step, int n) {
  if constexpr (!HAS_RESET || bounded(S) || (BACKWARD && S > 0)) return false;
  i64 t = BACKWARD ? p.steps - step : step;   // as in `multiply_all`
  if (n >= rows_of(th, q) || (BACKWARD ? step == 0 && !p.next_delta : step >= (int)p.steps)) return false;
  return p.reset[th.member * p.reset_member + t * p.batch + th.row0 + q * ROWS + n];
}
// The largest number of batch row lane % 8 of tile nt of the vector that a row group is at, scaled: by four lanes together.
INLINE float seen_of(const Thread& th, int q, int nt) {
  u32 at = th.base + SEEN + (q * NTILES + nt) * KGROUPS * 128 + th.lane % 8 * 16, most = 0;
#pragma unroll
  for (int i = 0; i < KGROUPS; i += 4) {
    u32 w[4];
    int k = i + th.lane / 8;
    if (i + 3 >= KGROUPS && k >= KGROUPS) continue;
    load_words(w, at + k * 128);
    most = larger(larger(most, w[0]), w[1]);
    most = larger(larger(most, w[2]), w[3]);
  }
  most = larger(most, __shfl_xor_sync(0xffffffffu, most, 8));
  most = larger(most, __shfl_xor_sync(0xffffffffu, most, 16));
  float x, y;
  widen(most, x, y);
  return fmaxf(x, y);
}
// No number of row n of vector S exceeds constant + growth times the largest of the vector before it + late times that of
// vector LATE, which is among its shortcuts' and not yet known. `anew`: a sequence starts, see `starts`.
struct Bound { float constant, growth, late; };
template <int S, int LATE = -1, int J = 0> INLINE Bound bound(const Thread& th, float addend, bool anew, int q, int step, int n) {
  if constexpr (bounded(S)) return {1.0f, 0.0f, 0.0f};
  if constexpr (J == MATRICES) {
    return {addend, 0.0f, 0.0f};
  } else {
    Bound b = bound<S, LATE, J + 1>(th, addend, anew, q, step, n);
    if (stage_of(J) == S && !(anew && (S == 0 || is_early(J, S)))) {
      float g[1], most[1];
      load_shared<1>(g, th.base + FACTORS + 4 * (DEPTH + J));
      if constexpr (is_early(J, S) && source_of(J) == LATE) {
        b.late = g[0];
      } else if constexpr (is_early(J, S)) {
        load_shared<1>(most, in_mosts(th, source_of(J), q, step - 1, n));
        b.constant += g[0] * most[0];
      } else {
        b.growth = g[0];
      }
    }
    if (J == 0 && BACKWARD) b.constant *= slope_bound(S), b.growth *= slope_bound(S), b.late *= slope_bound(S);
    return b;
  }
}
// What brings sums of a tile back, and its values out of reach of fp16's ends. Scales that change are known with the sums.
struct Scales { float weights, vector, sent; };
template <int S> INLINE Scales steady_scales(const Thread& th, const Task& it, int q, int step) {
  Scales s = {inverse(factor<S>(th)), 1.0f / STEADY, STEADY};
  if (TILE_SCALES) s.vector = s.weights;
  if (SCALED || TILE_SCALES) return s;
  if (BY_FIRST_STATE) {
    s.sent = scale_of<S>(th, q, -1, it.nt * 8 + column_of(th));
    s.vector = inverse(s.sent);
  }
  if (S == 0 && step == 0) s.vector = inverse(scale_of<DEPTH - 1>(th, q, -1, it.nt * 8 + column_of(th)));
  s.vector *= s.weights;   // they are of like size
  return s;
}
// Four values of a tile as a vector's tile has them.
INLINE void tile_words(const float* y, float scale, u32 (&words)[4]) {
  two_parts(y[0] * scale, y[1] * scale, words[0], words[2]);
  two_parts(y[2] * scale, y[3] * scale, words[1], words[3]);
}
// The scale of a batch row of a tile, from its 16 numbers: four lanes, ONE and TWO apart, have four each.
template <int ONE, int TWO> INLINE float scale_of_tile(const float* y) {
  u32 most = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) most = max(most, __float_as_uint(y[i]) & 0x7fffffffu);
  most = max(most, __shfl_xor_sync(0xffffffffu, most, ONE));
  most = max(most, __shfl_xor_sync(0xffffffffu, most, TWO));
  return power(shift_of(most));
}
// Whether what the units of row n carry from the step before counts for nothing.
INLINE bool is_fresh(const Params& p, const Thread& th, int q, int step, int n) {
  if (!HAS_RESET || SLOTS == 0 || n >= rows_of(th, q) || (BACKWARD && step == 0 && !p.next_delta)) return false;
  i64 t = BACKWARD ? p.steps - step : step;   // backward the mark of the step that follows
  return p.reset[th.member * p.reset_member + t * p.batch + th.row0 + q * ROWS + n];
}
// Epilogue and exchange of one tile, the j-th of this finisher; x is what was read beside its sums. What is stored is
// left in `out`, [4][stores(S)].
template <int S>
INLINE void finish(const Params& p, const Thread& th, const Task& it, int j, Scales by, const float* x, float* out, int q, int step) {
  constexpr int G = gates(S), K = sent(S);
  int tile = first_tile<S>(th) + it.local, n = it.nt * 8 + column_of(th), e = tile * 16 + even_row(th);
  if (SCALED) {
    float of[2];
    load_shared<2>(of, in_scales<S>(th, q, step, n));
    by.vector = of[0], by.sent = of[1];
  }
  float v[G][4], y[K][4];
#pragma unroll
  for (int g = 0; g < G; g++) {
    total<S>(th, it, q, g, v[g]);
#pragma unroll
    for (int i = 0; i < 4; i++) v[g][i] = (SCALED ? v[g][i] * by.weights : v[g][i]) * by.vector;
  }
  bool fresh = is_fresh(p, th, q, step, n);
  RowAddress w = row_address_at(p, th, q, step);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float sum[G], local[LOCALS], sends[K];
#pragma unroll
    for (int g = 0; g < G; g++) sum[g] = v[g][i];
#pragma unroll
    for (int k = 0; k < SLOTS; k++) local[k] = x[i * loaded(S) + loads(S) + k];
    epilogue<S>(sum, x + i * loaded(S), fresh, local, sends, out + i * stores(S));
    bool here = inside<S>(e + within(i));
#pragma unroll
    for (int k = 0; k < K; k++) y[k][i] = here ? sends[k] : 0.0f;
    if (SLOTS > 0 && here && n < rows_of(th, q))
#pragma unroll
      for (int k = 0; k < SLOTS; k++)
        if (sets_local(S, k)) *local_of<S>(p, w, k, n, e + within(i)) = local[k];
  }
  bool leaves = is_sent<S>(p, step) && n < sent_of(th, q);
#pragma unroll
  for (int k = 0; k < K; k++) {
    u32 words[4];
    float scale = TILE_SCALES ? scale_of_tile<8, 16>(y[k]) : by.sent;
    tile_words(y[k], scale, words);   // by all lanes: the branch is around a store alone
    u32 at = leaving<S>(th, j * K + k);
    if (TILE_SCALES && th.lane / 8 == 0) store_shared(at + column_of(th) * 4, inverse(scale));   // also where no row is
    if (!leaves) continue;
    if (THROUGH_L2) store_words(at + SCALE_BYTES + (column_of(th) * 4 + th.lane / 8) * LANE_BYTES, words[0], words[1], words[2], words[3]);
    else send_tile<S>(th, it, share(S, j), k * tiles(S) + tile, words, q, step);
  }
}
// Write what the tile's units store.
template <int S> INLINE void put_out(const Params& p, const Thread& th, const Task& it, const float* out, int q, int step) {
  int n = it.nt * 8 + column_of(th), e = (first_tile<S>(th) + it.local) * 16 + even_row(th);
  if (it.part != 0 || n >= rows_of(th, q)) return;
  RowAddress w = row_address_at(p, th, q, step);
#pragma unroll
  for (int i = 0; i < 4; i++)
    if (inside<S>(e + within(i))) epilogue_store<S>(p, w, n, e + within(i), out + i * stores(S));
}
