// One cell unrolled over time by a team of blocks, up to the whole card, forward or backward.
//
// For models that fit no cluster, and for GPUs without clusters. The same ring of stages as cluster.cu: every block owns a
// slice of each stage's units and the matching rows of every matrix, in shared memory for the whole sequence. Vectors
// travel through L2. A word carries its own flag, in the last bit of its mantissa: the flag of a place changes each time it
// is written, so a reader that knows the step knows whether the word is new, and neither atomics nor fences nor any order
// among the stores is needed. There are two copies of each vector in L2, by step parity; who overwrites one has received
// what every block sent after reading it.
//
// Warp = (mg, ng, kg): a tile of units, a tile of batch rows, a part of the inner dimension, which its lanes split
// further. A team serves `share` row groups one after the other. Blocks of a team wait for each other, so the launch must
// be cooperative.
//
// Macros: THREADS ROWS TEAM MGROUPS NGROUPS KGROUPS BF16 PLACES STRIDES (of the vectors in shared memory; two may share a
//         place); the rest is in the generated cell.cuh.
#include "common.cuh"
#include "cell.cuh"

CONST int place(int s) { constexpr int list[] = {PLACES}; return list[s]; }
CONST int stride(int s) { constexpr int list[] = {STRIDES}; return list[s]; }

constexpr int TILE_N = ceil_div(ROWS, NGROUPS), SPAN_N = TILE_N * NGROUPS;   // batch rows of a warp; in shared memory
constexpr int TAIL_VEC = BF16 ? 2 : 1, TAIL_CHUNK = 32 * TAIL_VEC;
CONST int mine(int s) { return ceil_div(size(s), TEAM); }                    // units of a block
CONST int tile(int s) { return ceil_div(mine(s), MGROUPS); }                 // units of a warp
CONST int rows(int s) { return tile(s) * gates(s); }                   // sums of a warp and batch row
CONST int sums(int s) { return rows(s) * TILE_N; }
// The lanes take four elements each while 128 are left, or nearly; then one each (two in bf16).
CONST int rest(int s) { return length(s) % 128; }
CONST int rounds(int s) { return length(s) / 128 + (rest(s) > 128 - TAIL_CHUNK ? 1 : 0); }
CONST int tails(int s) { return rest(s) > 128 - TAIL_CHUNK ? 0 : ceil_div(rest(s), TAIL_CHUNK); }
CONST int padded(int s) { return rounds(s) * 128 + tails(s) * TAIL_CHUNK; }
CONST int owned(int s) { return ceil_div(mine(s) * ROWS, THREADS); }         // units, batch rows that a thread finishes
CONST int load_offset(int s) { int n = 0; for (int i = 0; i < s; i++) n += owned(i) * loads(i); return n; }
CONST int local_offset(int k) { int n = 0; for (int i = 0; i < k; i++) n += owned(slot_stage(i)); return n; }
CONST int widest() { int n = 0; for (int s = 0; s < DEPTH; s++) n = mine(s) * gates(s) > n ? mine(s) * gates(s) : n; return n; }

// Shared memory, in bytes: the vectors, partial sums, reset marks of two steps, weights.
CONST int vector_offset(int s) { return 4 * SPAN_N * place(s); }
CONST int places() { int n = 0; for (int s = 0; s < DEPTH; s++) n = place(s) + stride(s) > n ? place(s) + stride(s) : n; return n; }
CONST bool shares(int s) { for (int i = 0; i < DEPTH; i++) if (i != s && place(i) == place(s)) return true; return false; }
// Whether the vector that stage s receives replaces one that the products just before it read.
CONST bool crowded(int s) {
  for (int j = 0; j < MATRICES; j++)
    if (stage_of(j) == s && !is_critical(j) && place(source_of(j)) == place(before(s))) return true;
  return false;
}
constexpr int PARTIAL = 4 * SPAN_N * places(), MARKS = PARTIAL + 4 * KGROUPS * ROWS * widest();
constexpr int WEIGHT_BYTES = BF16 ? 2 : 4;
CONST int weight_offset(int j) {
  int n = ceil_div(MARKS + 8 * ROWS, 128) * 128;
  for (int i = 0; i < j; i++) n += rows(stage_of(i)) * MGROUPS * padded(source_of(i)) * WEIGHT_BYTES;
  return n;
}
// The exchange buffer of a team, in words: per stage two copies of (ROWS, quads of words).
CONST int quads(int s) { return ceil_div(length(s), 4); }
CONST int slot_offset(int s) { int n = 0; for (int i = 0; i < s; i++) n += 8 * ROWS * quads(i); return n; }

constexpr int NLOAD = load_offset(DEPTH) > 0 ? load_offset(DEPTH) : 1, NLOCAL = SLOTS > 0 ? local_offset(SLOTS) : 1;
#include "locals.cuh"

struct Thread {
  u32 base;                // shared-memory address
  int rank, lane, mg, ng, kg;
  u32* exchange;           // the team's part
  i64 member;
  int row0, rows;          // first batch row of the group, how many of ROWS are real
};

#ifdef __CUDACC__
INLINE void load_relaxed(u32 (&w)[4], const u32* at) {
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "l"(at) : "memory");
}
INLINE void store_relaxed(u32* at, u32 w) { asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(w) : "memory"); }
INLINE void relax() {}
#endif

INLINE u32 flag_of(u32 seq) { return ~(seq >> 1) & 1; }   // the first use of a zeroed place is flagged 1
// x rounded to 23 bits of mantissa (ties to even), the last bit free for the flag.
INLINE u32 flagged(float x, u32 flag) {
  u32 b = __float_as_uint(x);
  if ((b & 0x7fffffffu) < 0x7f800000u) b += b & (b >> 1) & 1;
  return (b & ~1u) | flag;
}
template <int S> INLINE int count_of(const Thread& th) {   // outputs of this block; the last ones may have fewer, or none
  int left = size(S) - th.rank * mine(S);
  return left < 0 ? 0 : min(mine(S), left);
}
template <int S> INLINE bool idle(const Thread& th) { return th.mg * tile(S) >= count_of<S>(th); }

template <int J> INLINE void load_matrix(const Params& p, const Thread& th) {
  constexpr int S = stage_of(J), Q = source_of(J), PAD = padded(Q), G = gates(S), M = rows(S) * MGROUPS, PER = BF16 ? 2 : 1;
  int count = count_of<S>(th), first = th.rank * mine(S);
  // Row r is gate r % G of unit r / G. Backward the inner dimension runs over the parts of the vector.
  auto fetch = [&](int r, int k) {
    const MatrixSlice& piece = p.matrix[J][BACKWARD ? min(k / size(Q), sent(Q) - 1) : r % G];
    if (r / G >= count || k >= length(Q) || !piece.data) return 0.0f;
    return piece.data[th.member * piece.member + (i64)(first + r / G) * piece.row + (i64)(k % size(Q)) * piece.column];
  };
#pragma unroll 4
  for (int i = threadIdx.x; i < M * PAD / PER; i += THREADS) {   // neighbours in memory first
    int row = BACKWARD ? i % M : i / (PAD / PER), word = BACKWARD ? i / M : i % (PAD / PER);
#if BF16
    float x = __uint_as_float(bf16_bits(fetch(row, 2 * word)) | bf16_bits(fetch(row, 2 * word + 1)) << 16);
#else
    float x = fetch(row, word);
#endif
    store_shared(th.base + fixed<weight_offset(J)> + (row * (PAD / PER) + word) * 4, x);
  }
}
template <int J> INLINE void load_matrices(const Params& p, const Thread& th) {
  if constexpr (J < MATRICES) {
    load_matrix<J>(p, th);
    load_matrices<J + 1>(p, th);
  }
}

// One round of the lanes, VEC elements each: acc += R rows of weights times TILE_N batch rows.
template <int VEC, int R, int PAD, int STRIDE, int N> INLINE void multiply(float (&acc)[N], u32 w_at, u32 x_at) {
  float w[R][VEC];
#pragma unroll
  for (int r = 0; r < R; r++) {
#if BF16
    float words[VEC / 2];
    load_shared<VEC / 2>(words, w_at + r * PAD * 2);
#pragma unroll
    for (int v = 0; v < VEC; v++)
      w[r][v] = v & 1 ? bf16_high(__float_as_uint(words[v / 2])) : bf16_low(__float_as_uint(words[v / 2]));
#else
    load_shared<VEC>(w[r], w_at + r * PAD * 4);
#endif
  }
#pragma unroll
  for (int n = 0; n < TILE_N; n++) {
    float x[VEC];
    load_shared<VEC>(x, x_at + n * STRIDE * 4);
#pragma unroll
    for (int v = 0; v < VEC; v++)
#pragma unroll
      for (int r = 0; r < R; r++) acc[r * TILE_N + n] = fmaf(w[r][v], x[v], acc[r * TILE_N + n]);
  }
}
template <int J, int N> INLINE void product(const Thread& th, float (&acc)[N]) {
  constexpr int S = stage_of(J), Q = source_of(J), R = rows(S), PAD = padded(Q), STRIDE = stride(Q);
  constexpr int ROUNDS = rounds(Q), TAILS = tails(Q);
  constexpr int UNROLL = N <= 4 ? 8 : N <= 12 ? 2 : 1;
  u32 w = th.base + fixed<weight_offset(J)> + th.mg * (R * PAD * WEIGHT_BYTES);
  u32 x = th.base + fixed<vector_offset(Q)> + th.ng * (TILE_N * STRIDE * 4);
#pragma unroll UNROLL
  for (int c = th.kg; c < ROUNDS; c += KGROUPS)
    multiply<4, R, PAD, STRIDE>(acc, w + (c * 32 + th.lane) * 4 * WEIGHT_BYTES, x + (c * 32 + th.lane) * 16);
#pragma unroll
  for (int c = 0; c < TAILS; c++)
    if (KGROUPS == 1 || (ROUNDS + c) % KGROUPS == th.kg) {
      int k = ROUNDS * 128 + (c * 32 + th.lane) * TAIL_VEC;
      multiply<TAIL_VEC, R, PAD, STRIDE>(acc, w + k * WEIGHT_BYTES, x + k * 4);
    }
}
// Products of stage S: with the vector that has just come, or with those that were here before, of the step before or of
// this one.
enum Kind { DELAYED, EARLY, CRITICAL };
CONST Kind kind_of(int j) { return is_critical(j) ? CRITICAL : delayed(j) ? DELAYED : EARLY; }
template <int S, Kind KIND, int N, int J = 0> INLINE void products(const Thread& th, float (&acc)[N]) {
  if constexpr (J < MATRICES) {
    if constexpr (stage_of(J) == S && kind_of(J) == KIND) product<J>(th, acc);
    products<S, KIND, N, J + 1>(th, acc);
  }
}

// Sum V values over the lanes, halves exchanged first. `index_of` says which value a lane's v[o] then is.
template <int V> INLINE void reduce(float (&v)[V], int lane) {
  int count = V;
#pragma unroll
  for (int m = 16; m > 0; m >>= 1) {
    int half = (count + 1) / 2;
    u32 high = lane & m;
#pragma unroll
    for (int i = 0; i < (V + 1) / 2; i++) {
      if (i < half && i + half < count) {
        float give = select(high, v[i], v[i + half]), keep = select(high, v[i + half], v[i]);
        v[i] = keep + __shfl_xor_sync(0xffffffffu, give, m);
      } else if (i < half) {
        v[i] += __shfl_xor_sync(0xffffffffu, v[i], m);
      }
    }
    count = half;
  }
}
template <int V> INLINE int index_of(int o, int lane) {   // -1: another lane has it
  int index = o;
#pragma unroll
  for (int m = 1; m < 32; m *= 2) {
    int count = ceil_div(V, 16 / m), half = (count + 1) / 2;
    if (lane & m) index += half;
    if (index >= count) return -1;
  }
  return index;
}

INLINE bool here(const u32 (&w)[4], u32 flag, int count) {
  u32 wrong = 0;
#pragma unroll
  for (int j = 0; j < 4; j++)
    if (j < count) wrong |= w[j] ^ flag;
  return !(wrong & 1);
}
// Take the team's vector Q of step `seq` into shared memory, every word as soon as it carries the step's flag.
template <int Q> INLINE void receive(const Thread& th, u32 seq) {
  constexpr int QUADS = quads(Q), ALL = ROWS * QUADS, NEED = ceil_div(ALL, THREADS), BATCH = NEED < 8 ? NEED : 8;
  constexpr int TAIL = length(Q) % 4;
  const u32* from = th.exchange + fixed<slot_offset(Q)> + (seq & 1) * (ALL * 4);
  u32 flag = flag_of(seq);
  if constexpr (crowded(Q + 1 < DEPTH ? Q + 1 : 0)) __syncthreads();
  constexpr int SPARE = padded(Q) / 4 - QUADS;   // beyond the vector: zeros, not the rest of another
  if constexpr (shares(Q) && SPARE > 0)
    for (int i = threadIdx.x; i < ROWS * SPARE; i += THREADS)
      store_words(th.base + fixed<vector_offset(Q)> + (i / SPARE * stride(Q) + (QUADS + i % SPARE) * 4) * 4, 0, 0, 0, 0);
  auto valid = [&](int i) { return TAIL && i % QUADS == QUADS - 1 ? TAIL : 4; };
#pragma unroll 1
  for (int base = 0; base < NEED; base += BATCH) {
    u32 w[BATCH][4], missing = 0;
    auto at = [&](int b) { return (base + b) * THREADS + (int)threadIdx.x; };
#pragma unroll
    for (int b = 0; b < BATCH; b++)
      if (at(b) < ALL) missing |= 1u << b;
    while (missing) {
#pragma unroll
      for (int b = 0; b < BATCH; b++)
        if ((missing >> b) & 1) load_relaxed(w[b], from + at(b) * 4);
#pragma unroll
      for (int b = 0; b < BATCH; b++)
        if (((missing >> b) & 1) && here(w[b], flag, valid(at(b)))) missing &= ~(1u << b);
      if (missing) relax();
    }
#pragma unroll
    for (int b = 0; b < BATCH; b++) {
      int n = at(b) / QUADS, q = at(b) % QUADS;
      if (at(b) < ALL) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
          w[b][j] = j >= valid(at(b)) ? 0u : w[b][j] & ~1u;
        }
        store_words(th.base + fixed<vector_offset(Q)> + (n * stride(Q) + q * 4) * 4, w[b][0], w[b][1], w[b][2], w[b][3]);
      }
    }
  }
}

template <int S> INLINE void prefetch(const Params& p, const Thread& th, float (&x)[NLOAD], i64 t) {
  constexpr int M = mine(S);
  int first = th.rank * M, count = count_of<S>(th);
  RowAddress w = row_address(p, th.member, t, th.row0);
#pragma unroll
  for (int o = 0; o < owned(S); o++) {
    int i = o * THREADS + (int)threadIdx.x, n = i / M, e = i % M;
    float* to = x + fixed<load_offset(S)> + o * loads(S);
#pragma unroll
    for (int k = 0; k < loads(S); k++) to[k] = 0.0f;
    if (n < th.rows && e < count) epilogue_load<S>(p, w, n, first + e, to);
  }
}
template <int S> INLINE void prefetch_all(const Params& p, const Thread& th, float (&x)[NLOAD], i64 t) {
  if constexpr (S < DEPTH) {
    prefetch<S>(p, th, x, t);
    prefetch_all<S + 1>(p, th, x, t);
  }
}

INLINE bool marked(const Thread& th, int n, int parity) {
  if (!HAS_RESET) return false;
  float mark[1];
  load_shared<1>(mark, th.base + MARKS + (parity * ROWS + n) * 4);
  return mark[0] != 0.0f;
}
// What comes from the step before is dropped where a sequence starts anew.
template <int S> INLINE void drop(const Thread& th, float (&acc)[sums(S)], int parity) {
#pragma unroll
  for (int n = 0; n < TILE_N; n++)
    if (th.ng * TILE_N + n < ROWS && marked(th, th.ng * TILE_N + n, parity))
#pragma unroll
      for (int r = 0; r < rows(S); r++) acc[r * TILE_N + n] = 0.0f;
}
// Products with vectors that are here before the one that stage S waits for. Those of the first stage are all dropped or
// kept together, in `gather`: the marks of its step may not be here yet.
template <int S> INLINE void ahead(const Thread& th, float (&acc)[sums(S)], int parity) {
#pragma unroll
  for (int i = 0; i < sums(S); i++) acc[i] = 0.0f;
  if (idle<S>(th)) return;
  products<S, DELAYED>(th, acc);
  if (HAS_RESET && S > 0 && fixed<has_delayed(S)>) drop<S>(th, acc, parity);
  products<S, EARLY>(th, acc);
}
// The block's sums of stage S, as KGROUPS parts in shared memory, from what `ahead` left and, unless it is not there
// (LAST), the vector that has just come.
template <int S, bool LAST = false> INLINE void gather(const Thread& th, float (&acc)[sums(S)], int parity) {
  if (!idle<S>(th)) {
    if constexpr (!LAST || S == 0) products<S, CRITICAL>(th, acc);
    if (HAS_RESET && S == 0) drop<S>(th, acc, parity);
    reduce<sums(S)>(acc, th.lane);
    constexpr int G = gates(S), M = mine(S) * G;
#pragma unroll
    for (int o = 0; o < ceil_div(sums(S), 32); o++) {
      int i = index_of<sums(S)>(o, th.lane), e = th.mg * rows(S) + i / TILE_N, n = th.ng * TILE_N + i % TILE_N;
      if (i >= 0 && e < M && n < ROWS) store_shared(th.base + PARTIAL + ((th.kg * ROWS + n) * M + e) * 4, acc[o]);
    }
  }
  __syncthreads();
}
// Sum g of the unit e of the block's slice, batch row n.
template <int S> INLINE float total(const Thread& th, int n, int e, int g) {
  constexpr int G = gates(S), M = mine(S) * G;
  float s = 0.0f;
#pragma unroll
  for (int k = 0; k < KGROUPS; k++) {
    float part[1];
    load_shared<1>(part, th.base + PARTIAL + ((k * ROWS + n) * M + e * G + g) * 4);
    s += part[0];
  }
  return s;
}
// Epilogue, sending and storing of this block's slice.
template <int S> INLINE void finish(const Params& p, const Thread& th, float (&x)[NLOAD], float (&local)[NLOCAL], u32 seq, int step) {
  constexpr int M = mine(S);
  int first = th.rank * M, count = count_of<S>(th);
  i64 t = BACKWARD ? p.steps - 1 - step : step;
  RowAddress w = row_address(p, th.member, t, th.row0);
  u32* to = th.exchange + fixed<slot_offset(S)> + (seq & 1) * (ROWS * quads(S) * 4);
#pragma unroll
  for (int o = 0; o < owned(S); o++) {
    int i = o * THREADS + (int)threadIdx.x, n = i / M, e = i % M;
    if (n < ROWS && e < count) {
      float v[gates(S)], unit_locals[LOCALS], outgoing[sent(S)], out[stores(S)];
#pragma unroll
      for (int g = 0; g < gates(S); g++) v[g] = total<S>(th, n, e, g);
      take_locals<S>(unit_locals, local, o);
      epilogue<S>(v, x + fixed<load_offset(S)> + o * loads(S), marked(th, n, step & 1), unit_locals, outgoing, out);
      keep_locals<S>(unit_locals, local, o);
      e += first;
      // Rows beyond the batch are sent too, so that every place is written in every step.
#pragma unroll
      for (int k = 0; k < sent(S); k++)
        store_relaxed(to + n * quads(S) * 4 + k * size(S) + e, flagged(n < th.rows ? outgoing[k] : 0.0f, flag_of(seq)));
      if (n < th.rows) epilogue_store<S>(p, w, n, e, out);
    }
  }
  if (step + 1 < (int)p.steps) prefetch<S>(p, th, x, BACKWARD ? t - 1 : t + 1);
}

template <int N> INLINE void zero(float (&acc)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) acc[i] = 0.0f;
}
INLINE float load_mark(const Params& p, const Thread& th, i64 t) {
  int n = threadIdx.x;
  return n < th.rows && t < p.steps && p.reset[th.member * p.reset_member + t * p.batch + th.row0 + n] ? 1.0f : 0.0f;
}

template <int S>
INLINE void stages(const Params& p, const Thread& th, float (&x)[NLOAD], float (&local)[NLOCAL], float (&acc)[sums(S)],
                   float (&next)[sums(0)], u32 seq, int step, float mark) {
  if (S > 0 || step > 0) receive<before(S)>(th, S == 0 ? seq - 1 : seq);
  __syncthreads();
  if (HAS_RESET && S == 0 && threadIdx.x < ROWS)
    store_shared(th.base + MARKS + (((step + 1) & 1) * ROWS + threadIdx.x) * 4, mark);
  gather<S>(th, acc, step & 1);
  finish<S>(p, th, x, local, seq, step);
  if constexpr (S + 1 < DEPTH) {   // while this stage's vector travels
    float following[sums(S + 1)];
    ahead<S + 1>(th, following, step & 1);
    stages<S + 1>(p, th, x, local, following, next, seq, step, mark);
  } else {
    ahead<0>(th, next, 0);
  }
}

// Vectors before the first step: zeros, and what of the first states travels.
template <int S> INLINE void set_up_vectors(const Params& p, const Thread& th) {
  if constexpr (S < DEPTH) {
    if (!BACKWARD && p.initial_vector[S])
      for (int i = threadIdx.x; i < th.rows * size(S); i += THREADS) {
        int k = i % size(S), n = i / size(S);
        store_shared(th.base + fixed<vector_offset(S)> + (n * stride(S) + k) * 4,
                     p.initial_vector[S][th.member * p.initial_vector_member[S] + (i64)(th.row0 + n) * size(S) + k]);
      }
    set_up_vectors<S + 1>(p, th);
  }
}
INLINE void set_up(const Params& p, const Thread& th) {
  for (int i = threadIdx.x; i < SPAN_N * places(); i += THREADS) store_shared(th.base + i * 4, 0.0f);
  if (HAS_RESET && threadIdx.x < ROWS) store_shared(th.base + MARKS + threadIdx.x * 4, BACKWARD ? 0.0f : load_mark(p, th, 0));
  __syncthreads();
  set_up_vectors<0>(p, th);
}
// Local values before the first step: forward the states that pointwise code reads, backward zeros.
template <int K> INLINE void set_up_locals(const Params& p, const Thread& th, float (&local)[NLOCAL]) {
  if constexpr (K < SLOTS) {
    constexpr int S = slot_stage(K), STATE = slot_state(K), M = mine(S);
#pragma unroll
    for (int o = 0; o < owned(S); o++) {
      int i = o * THREADS + (int)threadIdx.x, n = i / M, e = i % M;
      float value = 0.0f;
      if constexpr (!BACKWARD && STATE >= 0)
        if (n < th.rows && e < count_of<S>(th))
          value = p.initial[STATE][th.member * p.initial_member[STATE] + (i64)(th.row0 + n) * size(S) + th.rank * M + e];
      local[fixed<local_offset(K)> + o] = value;
    }
    set_up_locals<K + 1>(p, th, local);
  }
}
// What comes back to the vectors before the first step: the sums that would enter the step before it.
template <int S> INLINE void finish_sums(const Params& p, const Thread& th, float (&first)[sums(0)]) {
  if constexpr (S < DEPTH) {
    if constexpr (has_delayed(S)) {
      constexpr int M = mine(S);
      float acc[sums(S)];
      if constexpr (S == 0) {
#pragma unroll
        for (int i = 0; i < sums(0); i++) acc[i] = first[i];   // those with vectors that were there before
      } else {
        zero(acc);
        if (!idle<S>(th)) products<S, DELAYED>(th, acc);
        if (HAS_RESET && !idle<S>(th)) drop<S>(th, acc, (int)p.steps & 1);
      }
      __syncthreads();
      gather<S, true>(th, acc, (int)p.steps & 1);
      for (int i = threadIdx.x; i < M * ROWS; i += THREADS) {
        int n = i / M, e = i % M;
        if (p.grad_initial_vector[S] && n < th.rows && e < count_of<S>(th))
          p.grad_initial_vector[S][(th.member * p.batch + th.row0 + n) * size(S) + th.rank * M + e] = total<S>(th, n, e, 0);
      }
    }
    finish_sums<S + 1>(p, th, first);
  }
}
template <int K> INLINE void finish_locals(const Params& p, const Thread& th, const float (&local)[NLOCAL]) {
  if constexpr (K < SLOTS) {
    constexpr int S = slot_stage(K), M = mine(S);
#pragma unroll
    for (int o = 0; o < owned(S); o++) {
      int i = o * THREADS + (int)threadIdx.x, n = i / M, e = i % M;
      if (p.grad_initial_local[K] && n < th.rows && e < count_of<S>(th))
        p.grad_initial_local[K][(th.member * p.batch + th.row0 + n) * size(S) + th.rank * M + e] =
            marked(th, n, (int)p.steps & 1) ? 0.0f : local[fixed<local_offset(K)> + o];
    }
    finish_locals<K + 1>(p, th, local);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) KERNEL(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) unsigned char memory[];
  Thread th;
  th.base = shared_address(memory);
  th.lane = threadIdx.x % 32;
  int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), team = blockIdx.x / TEAM;
  th.rank = blockIdx.x % TEAM;
  th.mg = warp % MGROUPS;
  th.ng = warp / MGROUPS % NGROUPS;
  th.kg = warp / (MGROUPS * NGROUPS);
  th.exchange = p.exchange + (i64)team * slot_offset(DEPTH);
  u32 seq = 0;
  i64 loaded = -1, end = (team + 1) * p.share < p.items ? (team + 1) * p.share : p.items;
  for (i64 item = team * p.share; item < end; item++) {
    th.member = item / p.row_blocks;
    th.row0 = (int)(item % p.row_blocks) * ROWS;
    th.rows = min(ROWS, (int)p.batch - th.row0);
    __syncthreads();
    if (th.member != loaded) load_matrices<0>(p, th);
    loaded = th.member;
    set_up(p, th);
    float x[NLOAD], local[NLOCAL], acc[sums(0)], next[sums(0)];
    prefetch_all<0>(p, th, x, BACKWARD ? p.steps - 1 : 0);
    set_up_locals<0>(p, th, local);
    __syncthreads();
    ahead<0>(th, acc, 0);
    for (int step = 0; step < (int)p.steps; step++, seq++) {
      // Backward the step after this one drops what the mark of this step cut.
      float mark = HAS_RESET ? load_mark(p, th, BACKWARD ? p.steps - 1 - step : step + 1) : 0.0f;
      stages<0>(p, th, x, local, acc, next, seq, step, mark);
#pragma unroll
      for (int i = 0; i < sums(0); i++) acc[i] = next[i];
    }
    // What was sent last is taken even if nobody needs it: then all have read what the next group overwrites.
    if (BACKWARD || item + 1 < end) receive<DEPTH - 1>(th, seq - 1);
    if (BACKWARD) {
      __syncthreads();
      finish_sums<0>(p, th, acc);
      finish_locals<0>(p, th, local);
    }
  }
}
