// mma.cu: a tile from its sums to the other blocks and out, and the bounds from which scales come. Comes after
// mma_products.cuh.
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

// What is added to the lane's four sums, and backward the units' outputs; the next step's is asked into L2. The base
// is one for the warp and the lane's own part fits 32 bits: address arithmetic of 64 bits in each lane took longer
// than the products.
template <int S> INLINE void read(const Params& p, const Thread& th, const Task& it, int q, int step, float* a, float* g) {
  constexpr int l = layer(S), WIDE = !BACKWARD ? TOTAL : l == DEPTH - 1 ? HIDDEN : MID;
  constexpr int START = BACKWARD && l == DEPTH - 1 ? 0 : layer_offset(l);
  constexpr bool HAS_X = !BACKWARD || l == DEPTH - 1 || HAS_GRAD_MID;
  int n = it.nt * 8 + column_of(th), e = (first_tile<S>(th) + it.local) * 16 + even_row(th);
  i64 b = time_of(p, step) * p.batch + th.row0 + q * ROWS;
  i64 base = (BACKWARD ? (th.member * p.steps * p.batch + b) * WIDE : th.member * p.input_member + b * WIDE) + START;
  i64 next = p.batch * (BACKWARD ? -WIDE : WIDE);
  int at = n * WIDE + e;
  const float* x = (BACKWARD && l < DEPTH - 1 ? p.input_mid : p.input) + base + at;
  const float* y = (l == DEPTH - 1 ? p.top : p.mid) + base + at;
  bool real = it.real && n < rows_of(th, q), more = step + 1 < (int)p.steps;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    bool here = real && inside<S>(e + within(i));
    a[i] = HAS_X && here ? x[within(i)] : 0.0f;
    g[i] = BACKWARD && here ? y[within(i)] : 0.0f;
    if (HAS_X && here && more && i % 2 == 0) touch(x + next + within(i));
    if (BACKWARD && here && more && i % 2 == 0) touch(y + next + within(i));
  }
}
// Leave the warp's sums in shared memory for the finishers.
template <int S> INLINE void leave_sums(const Thread& th, const Sums<S>& acc, int q) {
  u32 at = th.base + PARTIAL + q * PARTIAL_BYTES;
#pragma unroll
  for (int m = 0; m < mine(S); m++)
#pragma unroll
    for (int n = 0; n < NTILES; n++) {
      float v[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        v[i] = acc.d[m][n][0][i];
#pragma unroll
        for (int k = 1; k < KINDS; k++) v[i] += acc.d[m][n][k][i];
      }
      store_words(at + ((((m * MGROUPS + th.mg) * NTILES + n) * KGROUPS + th.kg) * 32 + th.lane) * 16, __float_as_uint(v[0]),
                  __float_as_uint(v[1]), __float_as_uint(v[2]), __float_as_uint(v[3]));
    }
}
// Total of the lane's four elements of a tile, rearranged so that rows lie in pairs.
template <int S> INLINE void total(const Thread& th, const Task& it, int q, float (&v)[4]) {
  u32 at = th.base + PARTIAL + q * PARTIAL_BYTES;
  float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
  for (int k = 0; k < KGROUPS; k++) {
    float x[4];
    load_shared<4>(x, at + (((it.local * NTILES + it.nt) * KGROUPS + k) * 32 + th.lane) * 16);
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
  u32 at = vector_of<S>(th, q, step) + ((tile * NTILES + it.nt) * 32 + column_of(th) * 4 + th.lane / 8) * ENTRY;
  u32 bar = barrier_of<S>(th.base, q, step);
  int each = up(CLUSTER, share);
#pragma unroll
  for (int d = 0; d < CLUSTER; d++) {
    int to = it.part * each + d;
    if (d < each && (each * share == CLUSTER || to < CLUSTER)) send4(map_rank(at, to), words, map_rank(bar, to));
  }
}
template <int S> INLINE u32 leaving(const Thread& th, int j) { return th.base + LEAVING + (th.number * busiest() + j) * 512; }
// Where a tile goes. All of it is known before the sums are, and pinned then: computed when the tile is ready, it
// would add to the time of every stage.
struct Way { u8* between; u32 to, bytes; };
template <int S> INLINE Way way_of(const Thread& th, const Task& it, int q, int step) {
  int place = (first_tile<S>(th) + it.local) * NTILES + it.nt;
  Way w;
  w.between = th.exchange + (exchange_offset(S) + (q * tiles(S) * NTILES + place) * 512);
  w.to = vector_of<S>(th, q, step) + place * (32 * ENTRY);
  w.bytes = it.real ? max(min(sent_of(th, q) - it.nt * 8, 8), 0) * (4 * ENTRY) : 0;
  pin(w.between, w.to, w.bytes);
  return w;
}
// What the last step ends with goes nowhere, but backward into dh0 where it is wanted.
template <int S> INLINE bool is_sent(const Params& p, int step) {
  return S < DEPTH - 1 || step < (int)p.steps - 1 || (BACKWARD && p.output_initial);
}
// The largest number that is added to the sums of row n in stage S.
template <int S> INLINE float most_beside(const Params& p, const Thread& th, int q, int step, int n) {
  constexpr int l = layer(S);
  if constexpr (bounded(S) || (BACKWARD && l < DEPTH - 1 && !HAS_GRAD_MID)) return 0.0f;
  if (n >= rows_of(th, q) || step >= (int)p.steps) return 0.0f;
  const float* first = p.most_input + ((th.member * p.steps + time_of(p, step)) * p.batch + th.row0 + q * ROWS) * DEPTH;
  return first[n * DEPTH + l];
}
// Whether a sequence starts anew in row n, so that what stage S makes of vectors of the step before is dropped.
template <int S> INLINE bool starts(const Params& p, const Thread& th, int q, int step, int n) {
  if constexpr (!HAS_RESET || bounded(S) || (BACKWARD && S > 0)) return false;
  i64 t = BACKWARD ? p.steps - step : step;   // as in `multiply_all`
  if (n >= rows_of(th, q) || (BACKWARD ? step == 0 && !p.initial : step >= (int)p.steps)) return false;
  return p.reset[th.member * p.reset_member + t * p.batch + th.row0 + q * ROWS + n];
}
// The largest number of batch row lane % 8 of tile nt of the vector that a stream is at, scaled: by four lanes together.
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
template <int S, int LATE = -1, int J = 0> INLINE Bound bound(const Thread& th, float beside, bool anew, int q, int step, int n) {
  if constexpr (bounded(S)) return {1.0f, 0.0f, 0.0f};
  if constexpr (J == MATRICES) {
    return {beside, 0.0f, 0.0f};
  } else {
    Bound b = bound<S, LATE, J + 1>(th, beside, anew, q, step, n);
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
    if (J == 0 && BACKWARD && unit(S) == SIGMOID) b.constant *= 0.25f, b.growth *= 0.25f, b.late *= 0.25f;
    return b;
  }
}
// What brings sums of a tile back, and its values out of reach of fp16's ends. Scales that change are known with the sums.
struct Scales { float weights, vector, own; };
template <int S> INLINE Scales steady_scales(const Thread& th, const Task& it, int q, int step) {
  Scales s = {inverse(factor<S>(th)), 1.0f / STEADY, STEADY};
  if (SCALED) return s;
  if (S == 0 && step == 0) s.vector = inverse(scale_of<DEPTH - 1>(th, q, -1, it.nt * 8 + column_of(th)));
  s.vector *= s.weights;   // they are of like size
  return s;
}
// Unit and exchange of one tile; a and g are what was read beside it, and g becomes its values.
template <int S>
INLINE void finish(const Params& p, const Thread& th, const Task& it, int j, Scales by, const float* a, float* g, int q, int step) {
  int tile = first_tile<S>(th) + it.local, n = it.nt * 8 + column_of(th), e = tile * 16 + even_row(th);
  float v[4], y[4];
  if (SCALED) {
    float x[2];
    load_shared<2>(x, in_scales<S>(th, q, step, n));
    by.vector = x[0], by.own = x[1];
  }
  total<S>(th, it, q, v);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float x = (SCALED ? v[i] * by.weights : v[i]) * by.vector + a[i];
    y[i] = BACKWARD ? x * slope<unit(S)>(g[i]) : activate<unit(S)>(x);
    if (!inside<S>(e + within(i))) y[i] = 0.0f;
  }
  u32 words[4];
  two_parts(y[0] * by.own, y[1] * by.own, words[0], words[2]);
  two_parts(y[2] * by.own, y[3] * by.own, words[1], words[3]);
  if (is_sent<S>(p, step) && n < sent_of(th, q)) {
    if (THROUGH_L2) store_words(leaving<S>(th, j) + (column_of(th) * 4 + th.lane / 8) * ENTRY, words[0], words[1], words[2], words[3]);
    else send_tile<S>(th, it, share(S, j), tile, words, q, step);
  }
#pragma unroll
  for (int i = 0; i < 4; i++) g[i] = y[i];
}
// Write the finished tile out; y are its values.
template <int S> INLINE void put_out(const Params& p, const Thread& th, const Task& it, const float* y, int q, i64 t) {
  constexpr int l = layer(S), WIDE = BACKWARD ? TOTAL : l == DEPTH - 1 ? HIDDEN : MID;
  constexpr int START = !BACKWARD && l == DEPTH - 1 ? 0 : layer_offset(l);
  int tile = first_tile<S>(th) + it.local, n = it.nt * 8 + column_of(th), e = tile * 16 + even_row(th);
  if (it.part != 0 || n >= rows_of(th, q)) return;
  float* out = BACKWARD ? p.output : l == DEPTH - 1 ? p.top : p.mid;
  out += ((th.member * p.steps + t) * p.batch + th.row0 + q * ROWS) * WIDE + START;
  int at = n * WIDE + e;
#pragma unroll
  for (int i = 0; i < 4; i++)
    if (inside<S>(e + within(i))) out[at + within(i)] = y[i];
}
