// One deep transition unrolled over time by a thread-block cluster, forward or backward.
//
// A step is a ring of DEPTH stages. Stage s computes one vector (a layer's output forward, a layer's
// pre-activation gradient backward) from the vector of the stage before it (critical: it has just been
// exchanged) and, through shortcuts, from vectors that arrived earlier. Every block of the cluster owns a
// slice of each vector's elements and the matching rows of every matrix, on chip for the whole sequence.
// Thread = (slot, klane): a slot owns RPT rows, its KLANES lanes split the inner dimension.
//
// Macros: DEPTH SIZES UNITS MATRICES MAT_STAGE MAT_SOURCE MAT_REGS CLUSTER THREADS KLANES VEC ROWS
//         BACKWARD HAS_RESET HAS_GRAD_MID BF16       (all lists in stage order)
#include "common.cuh"
#include "params.cuh"

CONST int kept(int j) { constexpr int list[] = {MAT_REGS}; return list[j]; }     // chunks held in registers

constexpr int SLOTS = THREADS / KLANES, SLOTS_WARP = 32 / KLANES;
constexpr int CHUNK = KLANES * VEC;                 // inner elements that one round of the lanes covers
constexpr int WORDS = BF16 ? VEC / 2 : VEC;         // 32-bit words that hold VEC weights

CONST int pow2(int n) { int p = 1; while (p < n) p *= 2; return p; }
CONST int padded(int s) { return up(size(s), CHUNK) * CHUNK; }       // length of a vector in shared memory
CONST int rpt(int s) { return up(up(size(s), CLUSTER), SLOTS); }     // rows of a slot
CONST int values(int s) { return pow2(rpt(s) * ROWS); }              // sums a slot reduces together
CONST int owned(int s) { return values(s) > KLANES ? values(s) / KLANES : 1; }
CONST int copies(int s) { return values(s) > KLANES ? 1 : KLANES / values(s); }   // lanes that end with one sum
CONST int chunks(int j) { return padded(source_of(j)) / CHUNK; }

CONST int owned_offset(int s) { int n = 0; for (int i = 0; i < s; i++) n += owned(i); return n; }
CONST int reg_offset(int j) {
  int n = 0;
  for (int i = 0; i < j; i++) n += rpt(stage_of(i)) * kept(i) * WORDS;
  return n;
}
// Shared memory, in bytes: barriers, then two copies of each vector, then the weights that registers cannot hold.
CONST int vector_offset(int s) {
  int n = up(16 * DEPTH, 128) * 128;
  for (int i = 0; i < s; i++) n += 8 * ROWS * padded(i);
  return n;
}
CONST int weight_offset(int j) {
  int n = up(vector_offset(DEPTH), 128) * 128;
  for (int i = 0; i < j; i++) n += (chunks(i) - kept(i)) * rpt(stage_of(i)) * THREADS * WORDS * 4;
  return n;
}
constexpr int NREG = reg_offset(MATRICES) > 0 ? reg_offset(MATRICES) : 1;
constexpr int NOWN = owned_offset(DEPTH);


#if BF16
typedef u32 Word;
#else
typedef float Word;
#endif

CONST int peers(int s) { return up(CLUSTER, copies(s)); }   // destinations that one lane serves
CONST int peer_offset(int s) { int n = 0; for (int i = 0; i < s; i++) n += copies(i) == copies(0) ? 0 : peers(i); return copies(s) == copies(0) ? 0 : peers(0) + n; }
CONST int peer_count() { int n = peers(0); for (int i = 0; i < DEPTH; i++) n += copies(i) == copies(0) ? 0 : peers(i); return n; }

struct Thread {
  u32 base;           // shared-memory address of this block
  u32 rank;
  int warp, klane, slot;
  i64 member;
  int row0;           // first batch row of this cluster
  int rows;           // how many of ROWS are real
  u32 remote[peer_count()];   // the same address in the blocks that this lane sends to, per stage
};

INLINE void slice(int n, u32 rank, int& first, int& count) {
  int base = n / CLUSTER, extra = n % CLUSTER;
  first = (int)rank * base + min((int)rank, extra);
  count = base + ((int)rank < extra ? 1 : 0);
}

template <int J> INLINE void load_matrix(const Params& p, const Thread& th, Word (&reg)[NREG]) {
  constexpr int S = stage_of(J), Q = source_of(J), R = rpt(S), KEPT = kept(J), ALL = chunks(J);
  constexpr int REG = reg_offset(J), SHARED = weight_offset(J);
  int first, count;
  slice(size(S), th.rank, first, count);
  const float* data = p.matrix[J].data + th.member * p.matrix[J].member;
  i64 rs = p.matrix[J].row, cs = p.matrix[J].column;
  auto fetch = [&](int r, int c, int v) {
    int row = th.slot * R + r, k = (c * KLANES + th.klane) * VEC + v;
    return row < count && k < size(Q) ? data[(i64)(first + row) * rs + (i64)k * cs] : 0.0f;
  };
  auto word = [&](int r, int c, int w) -> Word {
#if BF16
    return bf16_bits(fetch(r, c, 2 * w)) | (bf16_bits(fetch(r, c, 2 * w + 1)) << 16);
#else
    return fetch(r, c, w);
#endif
  };
#pragma unroll
  for (int c = 0; c < KEPT; c++)
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
      for (int w = 0; w < WORDS; w++) reg[REG + (r * KEPT + c) * WORDS + w] = word(r, c, w);
#pragma unroll 4
  for (int c = KEPT; c < ALL; c++)
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
      for (int w = 0; w < WORDS; w++) {
        u32 at = th.base + SHARED + ((((c - KEPT) * R + r) * THREADS + threadIdx.x) * WORDS + w) * 4;
#if BF16
        store_shared(at, __uint_as_float(word(r, c, w)));
#else
        store_shared(at, word(r, c, w));
#endif
      }
}
template <int J> INLINE void load_matrices(const Params& p, const Thread& th, Word (&reg)[NREG]) {
  if constexpr (J < MATRICES) {
    load_matrix<J>(p, th, reg);
    load_matrices<J + 1>(p, th, reg);
  }
}

// acc += matrix J times its source vector, the copy of step parity `copy`.
template <int J, int N> INLINE void product(const Thread& th, const Word (&reg)[NREG], float (&acc)[N], int copy) {
  constexpr int S = stage_of(J), Q = source_of(J), R = rpt(S), KEPT = kept(J), ALL = chunks(J), PAD = padded(Q);
  constexpr int REG = reg_offset(J), SHARED = weight_offset(J), VECTOR = vector_offset(Q);
  u32 vec = th.base + VECTOR + copy * (4 * ROWS * PAD) + th.klane * (VEC * 4);
  u32 sm = th.base + SHARED + threadIdx.x * (WORDS * 4);
#pragma unroll
  for (int c = 0; c < ALL; c++) {
    float w[R][VEC];
#pragma unroll
    for (int r = 0; r < R; r++) {
      float word[WORDS];
      if (c < KEPT) {
#pragma unroll
        for (int i = 0; i < WORDS; i++) {
#if BF16
          word[i] = __uint_as_float(reg[REG + (r * KEPT + c) * WORDS + i]);
#else
          word[i] = reg[REG + (r * KEPT + c) * WORDS + i];
#endif
        }
      } else {
        load_shared<WORDS>(word, sm + ((c - KEPT) * R + r) * (THREADS * WORDS * 4));
      }
#pragma unroll
      for (int v = 0; v < VEC; v++) {
#if BF16
        w[r][v] = v & 1 ? bf16_high(__float_as_uint(word[v / 2])) : bf16_low(__float_as_uint(word[v / 2]));
#else
        w[r][v] = word[v];
#endif
      }
    }
#pragma unroll
    for (int n = 0; n < ROWS; n++) {
      float x[VEC];
      load_shared<VEC>(x, vec + (n * PAD + c * CHUNK) * 4);
#pragma unroll
      for (int r = 0; r < R; r++)
#pragma unroll
        for (int v = 0; v < VEC; v++)
          acc[(r * ROWS + n) * VEC + v] = fmaf(w[r][v], x[v], acc[(r * ROWS + n) * VEC + v]);
    }
  }
}

template <int Q> INLINE u32 barrier_of(u32 base, int step) { return base + (Q * 2 + (step & 1)) * 8; }

// Wait until vector Q of `step` is here; step -1 is the initial content.
template <int Q> INLINE void await(const Thread& th, int step) {
  if (step >= 0) barrier_wait(barrier_of<Q>(th.base, step), (step >> 1) & 1);
}
// The barrier of the vector that stage S has consumed expects its next bytes, those of two steps on. They may
// even arrive first: the phase cannot end before this arrival.
template <int S> INLINE void rearm(const Thread& th, int step) {
  int from = S == 0 ? step - 1 : step;
  if (threadIdx.x == 0 && from >= 0) barrier_expect(barrier_of<before(S)>(th.base, from), 4 * ROWS * size(before(S)));
}

template <int S> INLINE bool idle(const Thread& th) {
  return th.warp * SLOTS_WARP * rpt(S) >= size(S) / CLUSTER + ((int)th.rank < size(S) % CLUSTER ? 1 : 0);
}
template <int S, int N, int J = 0> INLINE void early(const Thread& th, const Word (&reg)[NREG], float (&acc)[N], int step) {
  if constexpr (J < MATRICES) {
    if constexpr (stage_of(J) == S && source_of(J) != before(S)) {
      int from = source_of(J) >= S ? step - 1 : step;
      if (!idle<S>(th)) {
        await<source_of(J)>(th, from);
        product<J>(th, reg, acc, from & 1);
      }
    }
    early<S, N, J + 1>(th, reg, acc, step);
  }
}
template <int S, int N, int J = 0> INLINE void critical(const Thread& th, const Word (&reg)[NREG], float (&acc)[N], int step) {
  if constexpr (J < MATRICES) {
    if constexpr (stage_of(J) == S && source_of(J) == before(S)) {
      int from = S == 0 ? step - 1 : step;
      await<source_of(J)>(th, from);
      product<J>(th, reg, acc, from & 1);
    }
    critical<S, N, J + 1>(th, reg, acc, step);
  }
}

// Sum V values over KLANES lanes, exchanging halves first: value (klane's high bits) ends on each lane.
template <int V> INLINE void reduce(float (&v)[V], int klane) {
  int count = V;
#pragma unroll
  for (int m = KLANES / 2; m > 0; m >>= 1) {
    if (count > 1) {
      int half = count / 2;
      u32 high = klane & m;
#pragma unroll
      for (int i = 0; i < V / 2; i++)
        if (i < half) {
          float give = select(high, v[i], v[i + half]), keep = select(high, v[i + half], v[i]);
          v[i] = keep + __shfl_xor_sync(0xffffffffu, give, m);
        }
      count = half;
    } else {
      v[0] += __shfl_xor_sync(0xffffffffu, v[0], m);
    }
  }
}

// Row of the slot's block slice and batch row of owned value o; row is -1 where there is none.
template <int S> INLINE void place(const Thread& th, int o, int count, int& row, int& n) {
  int v = values(S) > KLANES ? th.klane * owned(S) + o : th.klane / copies(S);
  int r = v / ROWS;
  n = v % ROWS;
  row = th.slot * rpt(S) + r;
  if (r >= rpt(S) || row >= count || n >= th.rows) row = -1;
}

template <int S> INLINE void prefetch(const Params& p, const Thread& th, float (&a)[NOWN], float (&g)[NOWN], i64 t) {
  int first, count;
  slice(size(S), th.rank, first, count);
#pragma unroll
  for (int o = 0; o < owned(S); o++) {
    int row, n;
    place<S>(th, o, count, row, n);
    float x = 0.0f, y = 0.0f;
    if (row >= 0) read_beside<S>(p, th.member, t, th.row0 + n, first + row, x, y);
    a[owned_offset(S) + o] = x;
    g[owned_offset(S) + o] = y;
  }
}
template <int S> INLINE void prefetch_all(const Params& p, const Thread& th, float (&a)[NOWN], float (&g)[NOWN], i64 t) {
  if constexpr (S < DEPTH) {
    prefetch<S>(p, th, a, g, t);
    prefetch_all<S + 1>(p, th, a, g, t);
  }
}

template <int N> INLINE void zero(float (&acc)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) acc[i] = 0.0f;
}
CONST int sums(int s) { return rpt(s) * ROWS * VEC; }

// The state of a batch row that starts anew is dropped: its sums are replaced by zero (never multiplied).
template <int S, int N> INLINE void drop(float (&acc)[N], u32 resets) {
#pragma unroll
  for (int n = 0; n < ROWS; n++)
#pragma unroll
    for (int r = 0; r < rpt(S); r++)
#pragma unroll
      for (int v = 0; v < VEC; v++)
        if ((resets >> n) & 1) acc[(r * ROWS + n) * VEC + v] = 0.0f;
}
INLINE u32 load_resets(const Params& p, const Thread& th, i64 t) {
  u32 bits = 0;
#pragma unroll
  for (int n = 0; n < ROWS; n++)
    if (n < th.rows && p.reset[th.member * p.reset_member + t * p.batch + th.row0 + n]) bits |= 1u << n;
  return bits;
}

template <int S> INLINE void fold(float (&acc)[sums(S)], float (&v)[values(S)], int klane) {
#pragma unroll
  for (int i = 0; i < values(S); i++) {
    v[i] = 0.0f;
    if (i < rpt(S) * ROWS) {
      v[i] = acc[i * VEC];
#pragma unroll
      for (int j = 1; j < VEC; j++) v[i] += acc[i * VEC + j];
    }
  }
  reduce<values(S)>(v, klane);
}

template <int S>
INLINE void stage(const Params& p, const Thread& th, const Word (&reg)[NREG], float (&a)[NOWN], float (&g)[NOWN],
                  float (&acc)[sums(S)], int step, u32 resets) {
  constexpr int l = layer(S);
  int first, count;
  slice(size(S), th.rank, first, count);
  if (idle<S>(th)) return;
  if (HAS_RESET && !BACKWARD && S > 0) drop<S>(acc, resets);   // so far only shortcuts from h(t-1)
  critical<S>(th, reg, acc, step);
  if (HAS_RESET && S == 0) drop<S>(acc, resets);
  float v[values(S)];
  fold<S>(acc, v, th.klane);
  i64 t = BACKWARD ? p.steps - 1 - step : step;
  bool last = step == p.steps - 1;
#pragma unroll
  for (int o = 0; o < owned(S); o++) {
    int row, n;
    place<S>(th, o, count, row, n);
    float x = v[o] + a[owned_offset(S) + o];
    float y = BACKWARD ? x * slope<unit(S)>(g[owned_offset(S) + o]) : activate<unit(S)>(x);
    // Rows beyond the batch are sent too (as zeros), so that every exchange has the same size.
    int v_ = values(S) > KLANES ? th.klane * owned(S) + o : th.klane / copies(S);
    int r_ = v_ / ROWS, n_ = v_ % ROWS, row_ = th.slot * rpt(S) + r_;
    if (r_ < rpt(S) && row_ < count && (BACKWARD || S < DEPTH - 1 || !last)) {
      u32 at = vector_offset(S) + (step & 1) * (4 * ROWS * padded(S)) + (n_ * padded(S) + first + row_) * 4;
      u32 bar = (S * 2 + (step & 1)) * 8;
      float out = n_ < th.rows ? y : 0.0f;
#pragma unroll
      for (int d = 0; d < peers(S); d++)
        if (d * copies(S) + th.klane % copies(S) < CLUSTER) {
          u32 remote = th.remote[peer_offset(S) + d];
          send(remote + at, out, remote + bar);
        }
    }
    if (row >= 0 && th.klane % copies(S) == 0) {
      i64 b = (th.member * p.steps + t) * p.batch + th.row0 + n;
      int e = first + row;
      if (BACKWARD) p.output[b * TOTAL + layer_offset(l) + e] = y;
      else if (l == DEPTH - 1) p.top[b * HIDDEN + e] = y;
      else p.mid[b * MID + layer_offset(l) + e] = y;
    }
  }
  rearm<S>(th, step);
  if (!last) prefetch<S>(p, th, a, g, BACKWARD ? t - 1 : t + 1);
}

template <int S>
INLINE void stages(const Params& p, const Thread& th, const Word (&reg)[NREG], float (&a)[NOWN], float (&g)[NOWN],
                   float (&acc)[sums(S)], float (&next)[sums(0)], int step, u32 resets) {
  stage<S>(p, th, reg, a, g, acc, step, resets);
  if constexpr (S + 1 < DEPTH) {
    float following[sums(S + 1)];
    zero(following);
    early<S + 1>(th, reg, following, step);
    stages<S + 1>(p, th, reg, a, g, following, next, step, resets);
  } else {
    zero(next);
    early<0>(th, reg, next, step + 1);
  }
}

template <int S> INLINE void address_peers(Thread& th) {
  if constexpr (S < DEPTH) {
    if (S == 0 || copies(S) != copies(0)) {
#pragma unroll
      for (int d = 0; d < peers(S); d++)
        th.remote[peer_offset(S) + d] = map_rank(th.base, min(d * copies(S) + th.klane % copies(S), CLUSTER - 1));
    }
    address_peers<S + 1>(th);
  }
}

template <int S> INLINE void set_up(const Params& p, const Thread& th) {
  if constexpr (S < DEPTH) {
    for (int i = threadIdx.x; i < 2 * ROWS * padded(S); i += THREADS) {
      float x = 0.0f;
      int k = i % padded(S), n = i / padded(S) % ROWS, copy = i / padded(S) / ROWS;
      if (!BACKWARD && S == DEPTH - 1 && copy == 1 && k < HIDDEN && n < th.rows)   // step -1 has parity 1
        x = p.initial[th.member * p.initial_member + (i64)(th.row0 + n) * HIDDEN + k];
      store_shared(th.base + vector_offset(S) + i * 4, x);
    }
    if (threadIdx.x == 0)
      for (int i = 0; i < 2; i++) {
        barrier_init(th.base + (S * 2 + i) * 8);
        barrier_expect(th.base + (S * 2 + i) * 8, 4 * ROWS * size(S));
      }
    set_up<S + 1>(p, th);
  }
}

// dh0 = the sums that would enter the step before the first.
INLINE void finish_backward(const Params& p, const Thread& th, const Word (&reg)[NREG], float (&acc)[sums(0)]) {
  int first, count;
  slice(size(0), th.rank, first, count);
  if (idle<0>(th)) return;
  critical<0>(th, reg, acc, (int)p.steps);
  if (HAS_RESET) drop<0>(acc, load_resets(p, th, 0));
  float v[values(0)];
  fold<0>(acc, v, th.klane);
#pragma unroll
  for (int o = 0; o < owned(0); o++) {
    int row, n;
    place<0>(th, o, count, row, n);
    if (row >= 0 && th.klane % copies(0) == 0)
      p.output_initial[(th.member * p.batch + th.row0 + n) * HIDDEN + first + row] = v[o];
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) transition(const __grid_constant__ Params p) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) unsigned char memory[];
  Thread th;
  th.base = shared_address(memory);
  th.rank = cluster_rank();
  th.warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);   // so that the compiler knows it is one per warp
  th.klane = threadIdx.x % KLANES;
  th.slot = threadIdx.x / KLANES;
  i64 cluster = blockIdx.x / CLUSTER;
  th.member = cluster / p.groups;
  th.row0 = (int)(cluster % p.groups) * ROWS;
  th.rows = min(ROWS, (int)p.batch - th.row0);
  Word reg[NREG];
  load_matrices<0>(p, th, reg);
  set_up<0>(p, th);
  barrier_fence();
  cluster_sync();
  address_peers<0>(th);
  float a[NOWN], g[NOWN], acc[sums(0)], next[sums(0)];
  prefetch_all<0>(p, th, a, g, BACKWARD ? p.steps - 1 : 0);
  zero(acc);
  early<0>(th, reg, acc, 0);
  u32 resets = 0, coming = 0;
  if (HAS_RESET && !BACKWARD) coming = load_resets(p, th, 0);
  for (int step = 0; step < (int)p.steps; step++) {
    if (HAS_RESET) {
      resets = coming;
      i64 t = BACKWARD ? p.steps - 1 - step : step + 1;   // backward: step s+1 drops what reset[t] cut
      if (BACKWARD || t < p.steps) coming = load_resets(p, th, t);
    }
    stages<0>(p, th, reg, a, g, acc, next, step, resets);
#pragma unroll
    for (int i = 0; i < sums(0); i++) acc[i] = next[i];
  }
  if (BACKWARD) finish_backward(p, th, reg, acc);
  cluster_sync();
#endif
}
