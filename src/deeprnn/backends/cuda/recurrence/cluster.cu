// One cell unrolled over time by a thread-block cluster, forward or backward.
//
// A step is a ring of DEPTH stages (see schedule.py). Stage s adds up `gates` sums for each of its units from the vector
// of the stage before it (critical: it has just been exchanged) and from vectors that arrived earlier; its epilogue turns
// them into the `sent` numbers a unit of its own vector. Every block of the cluster owns a slice of each stage's units and
// the matching rows of every matrix, on chip for the whole sequence.
// Thread = (group, klane): a group of KLANES lanes owns `units_per_group(s)` units of each stage s, its lanes split the inner dimension.
//
// Macros: KERNEL MAT_REGS CLUSTER THREADS KLANES VEC ROWS BF16; the rest is in the generated cell.cuh.
#include "common.cuh"
#include "cell.cuh"

CONST int in_registers(int j) { constexpr int list[] = {MAT_REGS}; return list[j]; }     // chunks held in registers

constexpr int GROUPS = THREADS / KLANES, GROUPS_WARP = 32 / KLANES;
constexpr int CHUNK = KLANES * VEC;                 // inner elements that one round of the lanes covers
constexpr int WORDS = BF16 ? VEC / 2 : VEC;         // 32-bit words that hold VEC weights

CONST int pow2(int n) { int p = 1; while (p < n) p *= 2; return p; }
CONST int padded(int s) { return ceil_div(length(s), CHUNK) * CHUNK; }   // length of a vector in shared memory
CONST int units_per_group(int s) { return ceil_div(ceil_div(size(s), CLUSTER), GROUPS); }
CONST int sums_per_row(int s) { return units_per_group(s) * gates(s); }   // of a group
CONST int reduced_values(int s) { return pow2(units_per_group(s) * ROWS); }   // units times batch rows that a group reduces together
CONST int values_per_lane(int s) { return reduced_values(s) > KLANES ? reduced_values(s) / KLANES : 1; }
CONST int replicas(int s) { return reduced_values(s) > KLANES ? 1 : KLANES / reduced_values(s); }   // lanes that end with one unit's sums
CONST int chunks(int j) { return padded(source_of(j)) / CHUNK; }

CONST int load_offset(int s) { int n = 0; for (int i = 0; i < s; i++) n += values_per_lane(i) * loads(i); return n; }
CONST int local_offset(int k) { int n = 0; for (int i = 0; i < k; i++) n += values_per_lane(slot_stage(i)); return n; }
CONST int reg_offset(int j) {
  int n = 0;
  for (int i = 0; i < j; i++) n += sums_per_row(stage_of(i)) * in_registers(i) * WORDS;
  return n;
}
// Shared memory, in bytes: barriers, then two copies of each vector, then the weights that registers cannot hold.
CONST int vector_offset(int s) {
  int n = ceil_div(16 * DEPTH, 128) * 128;
  for (int i = 0; i < s; i++) n += 8 * ROWS * padded(i);
  return n;
}
CONST int weight_offset(int j) {
  int n = ceil_div(vector_offset(DEPTH), 128) * 128;
  for (int i = 0; i < j; i++) n += (chunks(i) - in_registers(i)) * sums_per_row(stage_of(i)) * THREADS * WORDS * 4;
  return n;
}
constexpr int NREG = reg_offset(MATRICES) > 0 ? reg_offset(MATRICES) : 1;
constexpr int NLOAD = load_offset(DEPTH) > 0 ? load_offset(DEPTH) : 1;
constexpr int NLOCAL = SLOTS > 0 ? local_offset(SLOTS) : 1;
#include "locals.cuh"

#if BF16
typedef u32 Word;
#else
typedef float Word;
#endif

// Stages with as many replicas as stage 0 share its list of destinations; each other stage has a list of its own behind it.
CONST int dests_per_lane(int s) { return ceil_div(CLUSTER, replicas(s)); }   // destinations that one lane serves
CONST int peer_offset(int s) { int n = 0; for (int i = 0; i < s; i++) n += replicas(i) == replicas(0) ? 0 : dests_per_lane(i); return replicas(s) == replicas(0) ? 0 : dests_per_lane(0) + n; }
CONST int peer_count() { int n = dests_per_lane(0); for (int i = 0; i < DEPTH; i++) n += replicas(i) == replicas(0) ? 0 : dests_per_lane(i); return n; }

struct Thread {
  u32 base;           // shared-memory address of this block
  u32 rank;
  int warp, klane, group;
  i64 member;
  int row0;           // first batch row of this cluster
  int rows;           // how many of ROWS are real
  u32 remote[peer_count()];   // the same address in the blocks that this lane sends to, per stage
};

INLINE void block_units(int n, u32 rank, int& first, int& count) {
  int base = n / CLUSTER, extra = n % CLUSTER;
  first = (int)rank * base + min((int)rank, extra);
  count = base + ((int)rank < extra ? 1 : 0);
}

template <int J> INLINE void load_matrix(const Params& p, const Thread& th, Word (&reg)[NREG]) {
  constexpr int S = stage_of(J), Q = source_of(J), R = sums_per_row(S), G = gates(S), N = size(Q), RESIDENT = in_registers(J), ALL = chunks(J);
  constexpr int REG = reg_offset(J), SHARED = weight_offset(J);
  int first, count;
  block_units(size(S), th.rank, first, count);
  // Row r of the group is gate r % G of unit r / G. Backward the inner dimension runs over the parts of the vector.
  auto fetch = [&](int r, int c, int v) {
    int unit = th.group * units_per_group(S) + r / G, k = (c * KLANES + th.klane) * VEC + v;
    const MatrixSlice& piece = p.matrix[J][BACKWARD ? min(k / N, sent(Q) - 1) : r % G];
    if (unit >= count || k >= length(Q) || !piece.data) return 0.0f;
    return piece.data[th.member * piece.member + (i64)(first + unit) * piece.row + (i64)(k % N) * piece.column];
  };
  auto word = [&](int r, int c, int w) -> Word {
#if BF16
    return bf16_bits(fetch(r, c, 2 * w)) | (bf16_bits(fetch(r, c, 2 * w + 1)) << 16);
#else
    return fetch(r, c, w);
#endif
  };
#pragma unroll
  for (int c = 0; c < RESIDENT; c++)
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
      for (int w = 0; w < WORDS; w++) reg[REG + (r * RESIDENT + c) * WORDS + w] = word(r, c, w);
#pragma unroll 4
  for (int c = RESIDENT; c < ALL; c++)
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
      for (int w = 0; w < WORDS; w++) {
        u32 at = th.base + SHARED + ((((c - RESIDENT) * R + r) * THREADS + threadIdx.x) * WORDS + w) * 4;
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
  constexpr int S = stage_of(J), Q = source_of(J), R = sums_per_row(S), RESIDENT = in_registers(J), ALL = chunks(J), PAD = padded(Q);
  constexpr int REG = reg_offset(J), SHARED = weight_offset(J), VECTOR = vector_offset(Q);
  u32 vec = th.base + VECTOR + copy * (4 * ROWS * PAD) + th.klane * (VEC * 4);
  u32 sm = th.base + SHARED + threadIdx.x * (WORDS * 4);
#pragma unroll
  for (int c = 0; c < ALL; c++) {
    float w[R][VEC];
#pragma unroll
    for (int r = 0; r < R; r++) {
      float word[WORDS];
      if (c < RESIDENT) {
#pragma unroll
        for (int i = 0; i < WORDS; i++) {
#if BF16
          word[i] = __uint_as_float(reg[REG + (r * RESIDENT + c) * WORDS + i]);
#else
          word[i] = reg[REG + (r * RESIDENT + c) * WORDS + i];
#endif
        }
      } else {
        load_shared<WORDS>(word, sm + ((c - RESIDENT) * R + r) * (THREADS * WORDS * 4));
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
template <int Q> INLINE void wait_vector(const Thread& th, int step) {
  if (step >= 0) barrier_wait(barrier_of<Q>(th.base, step), (step >> 1) & 1);
}
// The barrier of the vector that stage S has consumed expects its next bytes, those of two steps on. They may
// even arrive first: the phase cannot end before this arrival.
template <int S> INLINE void rearm(const Thread& th, int step) {
  int from = S == 0 ? step - 1 : step;
  if (threadIdx.x == 0 && from >= 0) barrier_expect(barrier_of<before(S)>(th.base, from), 4 * ROWS * length(before(S)));
}

template <int S> INLINE bool warp_is_idle(const Thread& th) {
  return th.warp * GROUPS_WARP * units_per_group(S) >= size(S) / CLUSTER + ((int)th.rank < size(S) % CLUSTER ? 1 : 0);
}
// Products of stage S with vectors of the step before (DELAYED) or of this one, the critical one aside.
template <int S, bool DELAYED, int N, int J = 0> INLINE void early(const Thread& th, const Word (&reg)[NREG], float (&acc)[N], int step) {
  if constexpr (J < MATRICES) {
    if constexpr (stage_of(J) == S && !is_critical(J) && (bool)delayed(J) == DELAYED) {
      int from = DELAYED ? step - 1 : step;
      if (!warp_is_idle<S>(th)) {
        wait_vector<source_of(J)>(th, from);
        product<J>(th, reg, acc, from & 1);
      }
    }
    early<S, DELAYED, N, J + 1>(th, reg, acc, step);
  }
}
template <int S, int N, int J = 0> INLINE void critical(const Thread& th, const Word (&reg)[NREG], float (&acc)[N], int step) {
  if constexpr (J == 0) wait_vector<before(S)>(th, S == 0 ? step - 1 : step);
  if constexpr (J < MATRICES) {
    if constexpr (stage_of(J) == S && is_critical(J)) product<J>(th, reg, acc, (S == 0 ? step - 1 : step) & 1);
    critical<S, N, J + 1>(th, reg, acc, step);
  }
}

// Sum V values of G numbers each over KLANES lanes, exchanging halves first: each round halves the values a lane
// still holds. Lane k ends with values k·values_per_lane and on or, where lanes are more than values, with one of the replicas of a value.
template <int V, int G> INLINE void reduce(float (&v)[V * G], int klane) {
  int count = V;
#pragma unroll
  for (int m = KLANES / 2; m > 0; m >>= 1) {
    if (count > 1) {
      int half = count / 2;
      u32 high = klane & m;
#pragma unroll
      for (int i = 0; i < V / 2; i++)
        if (i < half)
#pragma unroll
          for (int g = 0; g < G; g++) {
            float low = v[i * G + g], other = v[(i + half) * G + g];
            float give = select(high, low, other), keep = select(high, other, low);
            v[i * G + g] = keep + __shfl_xor_sync(0xffffffffu, give, m);
          }
      count = half;
    } else {
#pragma unroll
      for (int g = 0; g < G; g++) v[g] += __shfl_xor_sync(0xffffffffu, v[g], m);
    }
  }
}

// Which unit of the block's slice and which batch row owned value o is; both may lie beyond the last.
struct ReducedValue { int unit, n; bool mine; };
template <int S> INLINE ReducedValue reduced_value(const Thread& th, int o) {
  int v = reduced_values(S) > KLANES ? th.klane * values_per_lane(S) + o : th.klane / replicas(S);
  return {th.group * units_per_group(S) + v / ROWS, v % ROWS, v / ROWS < units_per_group(S)};
}

template <int S> INLINE void prefetch(const Params& p, const Thread& th, float (&x)[NLOAD], i64 t) {
  int first, count;
  block_units(size(S), th.rank, first, count);
  RowAddress w = row_address(p, th.member, t, th.row0);
#pragma unroll
  for (int o = 0; o < values_per_lane(S); o++) {
    ReducedValue it = reduced_value<S>(th, o);
    float* to = x + fixed<load_offset(S)> + o * loads(S);
#pragma unroll
    for (int i = 0; i < loads(S); i++) to[i] = 0.0f;
    if (it.mine && it.unit < count && it.n < th.rows) epilogue_load<S>(p, w, it.n, first + it.unit, to);
  }
}
template <int S> INLINE void prefetch_all(const Params& p, const Thread& th, float (&x)[NLOAD], i64 t) {
  if constexpr (S < DEPTH) {
    prefetch<S>(p, th, x, t);
    prefetch_all<S + 1>(p, th, x, t);
  }
}

template <int N> INLINE void zero(float (&acc)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) acc[i] = 0.0f;
}
CONST int sums(int s) { return sums_per_row(s) * ROWS * VEC; }

// The state of a batch row that starts anew is dropped: its sums are replaced by zero (never multiplied).
template <int S, int N> INLINE void zero_reset_rows(float (&acc)[N], u32 resets) {
#pragma unroll
  for (int n = 0; n < ROWS; n++)
#pragma unroll
    for (int r = 0; r < sums_per_row(S); r++)
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

// From the lanes' partial sums to each unit's: value (unit, batch row) has its gates side by side.
template <int S> INLINE void reduce_lanes(float (&acc)[sums(S)], float (&v)[reduced_values(S) * gates(S)], int klane) {
  constexpr int G = gates(S);
#pragma unroll
  for (int i = 0; i < reduced_values(S); i++)
#pragma unroll
    for (int g = 0; g < G; g++) {
      float total = 0.0f;
      if (i < units_per_group(S) * ROWS) {
        int at = (((i / ROWS) * G + g) * ROWS + i % ROWS) * VEC;
        total = acc[at];
#pragma unroll
        for (int j = 1; j < VEC; j++) total += acc[at + j];
      }
      v[i * G + g] = total;
    }
  reduce<reduced_values(S), G>(v, klane);
}

template <int S>
INLINE void stage(const Params& p, const Thread& th, const Word (&reg)[NREG], float (&x)[NLOAD], float (&local)[NLOCAL],
                  float (&acc)[sums(S)], int step, u32 resets) {
  int first, count;
  block_units(size(S), th.rank, first, count);
  if (warp_is_idle<S>(th)) return;
  if (HAS_RESET && S > 0 && fixed<has_delayed(S)>) zero_reset_rows<S>(acc, resets);   // so far only what comes from the step before
  early<S, false>(th, reg, acc, step);
  critical<S>(th, reg, acc, step);
  if (HAS_RESET && S == 0) zero_reset_rows<S>(acc, resets);
  float v[reduced_values(S) * gates(S)];
  reduce_lanes<S>(acc, v, th.klane);
  i64 t = BACKWARD ? p.steps - 1 - step : step;
  RowAddress w = row_address(p, th.member, t, th.row0);
  bool last = step == p.steps - 1;
#pragma unroll
  for (int o = 0; o < values_per_lane(S); o++) {
    ReducedValue it = reduced_value<S>(th, o);
    float unit_locals[LOCALS], outgoing[sent(S)], out[stores(S)];
    take_locals<S>(unit_locals, local, o);
    epilogue<S>(v + o * gates(S), x + fixed<load_offset(S)> + o * loads(S), (resets >> it.n) & 1, unit_locals, outgoing, out);
    keep_locals<S>(unit_locals, local, o);
    bool real = it.mine && it.unit < count;
    // Rows beyond the batch are sent too (as zeros), so that every exchange has the same size.
    if (real && (BACKWARD || S < DEPTH - 1 || !last)) {
      u32 at = fixed<vector_offset(S)> + (step & 1) * (4 * ROWS * padded(S)) + (it.n * padded(S) + first + it.unit) * 4;
      u32 bar = (S * 2 + (step & 1)) * 8;
#pragma unroll
      for (int d = 0; d < dests_per_lane(S); d++)
        if (d * replicas(S) + th.klane % replicas(S) < CLUSTER) {
          u32 remote = th.remote[fixed<peer_offset(S)> + d];
#pragma unroll
          for (int k = 0; k < sent(S); k++) send(remote + at + k * (size(S) * 4), it.n < th.rows ? outgoing[k] : 0.0f, remote + bar);
        }
    }
    if (real && it.n < th.rows && th.klane % replicas(S) == 0) epilogue_store<S>(p, w, it.n, first + it.unit, out);
  }
  rearm<S>(th, step);
  if (!last) prefetch<S>(p, th, x, BACKWARD ? t - 1 : t + 1);
}

template <int S>
INLINE void stages(const Params& p, const Thread& th, const Word (&reg)[NREG], float (&x)[NLOAD], float (&local)[NLOCAL],
                   float (&acc)[sums(S)], float (&next)[sums(0)], int step, u32 resets) {
  stage<S>(p, th, reg, x, local, acc, step, resets);
  if constexpr (S + 1 < DEPTH) {
    float following[sums(S + 1)];
    zero(following);
    early<S + 1, true>(th, reg, following, step);
    stages<S + 1>(p, th, reg, x, local, following, next, step, resets);
  } else {
    zero(next);
    early<0, true>(th, reg, next, step + 1);
  }
}

template <int S> INLINE void address_peers(Thread& th) {
  if constexpr (S < DEPTH) {
    if (S == 0 || replicas(S) != replicas(0)) {
#pragma unroll
      for (int d = 0; d < dests_per_lane(S); d++)
        th.remote[fixed<peer_offset(S)> + d] = map_rank(th.base, min(d * replicas(S) + th.klane % replicas(S), CLUSTER - 1));
    }
    address_peers<S + 1>(th);
  }
}

template <int S> INLINE void set_up(const Params& p, const Thread& th) {
  if constexpr (S < DEPTH) {
    for (int i = threadIdx.x; i < 2 * ROWS * padded(S); i += THREADS) {
      float x = 0.0f;
      int k = i % padded(S), n = i / padded(S) % ROWS, copy = i / padded(S) / ROWS;
      if (!BACKWARD && p.initial_vector[S] && copy == 1 && k < size(S) && n < th.rows)   // step -1 has parity 1
        x = p.initial_vector[S][th.member * p.initial_vector_member[S] + (i64)(th.row0 + n) * size(S) + k];
      store_shared(th.base + fixed<vector_offset(S)> + i * 4, x);
    }
    if (threadIdx.x == 0)
      for (int i = 0; i < 2; i++) {
        barrier_init(th.base + (S * 2 + i) * 8);
        barrier_expect(th.base + (S * 2 + i) * 8, 4 * ROWS * length(S));
      }
    set_up<S + 1>(p, th);
  }
}
// Local values before the first step: forward the states that pointwise code reads, backward zeros.
template <int K> INLINE void set_up_locals(const Params& p, const Thread& th, float (&local)[NLOCAL]) {
  if constexpr (K < SLOTS) {
    constexpr int S = slot_stage(K), STATE = slot_state(K);
    int first, count;
    block_units(size(S), th.rank, first, count);
#pragma unroll
    for (int o = 0; o < values_per_lane(S); o++) {
      ReducedValue it = reduced_value<S>(th, o);
      float value = 0.0f;
      if constexpr (!BACKWARD && STATE >= 0)
        if (it.mine && it.unit < count && it.n < th.rows)
          value = p.initial[STATE][th.member * p.initial_member[STATE] + (i64)(th.row0 + it.n) * size(S) + first + it.unit];
      local[fixed<local_offset(K)> + o] = value;
    }
    set_up_locals<K + 1>(p, th, local);
  }
}

// What comes back to the vectors before the first step: the sums that would enter the step before it.
template <int S> INLINE void finish_sums(const Params& p, const Thread& th, const Word (&reg)[NREG], float (&ahead)[sums(0)], u32 resets) {
  if constexpr (S < DEPTH) {
    if constexpr (has_delayed(S)) {
      int first, count;
      block_units(size(S), th.rank, first, count);
      if (!warp_is_idle<S>(th)) {
        float acc[sums(S)];
        zero(acc);
        if constexpr (S == 0) {
#pragma unroll
          for (int i = 0; i < sums(0); i++) acc[i] = ahead[i];   // the early ones are there already
          critical<0>(th, reg, acc, (int)p.steps);
        } else {
          early<S, true>(th, reg, acc, (int)p.steps);
        }
        if (HAS_RESET) zero_reset_rows<S>(acc, resets);
        float v[reduced_values(S) * gates(S)];
        reduce_lanes<S>(acc, v, th.klane);
#pragma unroll
        for (int o = 0; o < values_per_lane(S); o++) {
          ReducedValue it = reduced_value<S>(th, o);
          if (p.grad_initial_vector[S] && it.mine && it.unit < count && it.n < th.rows && th.klane % replicas(S) == 0)
            p.grad_initial_vector[S][(th.member * p.batch + th.row0 + it.n) * size(S) + first + it.unit] = v[o * gates(S)];
        }
      }
    }
    finish_sums<S + 1>(p, th, reg, ahead, resets);
  }
}
template <int K> INLINE void finish_locals(const Params& p, const Thread& th, const float (&local)[NLOCAL], u32 resets) {
  if constexpr (K < SLOTS) {
    constexpr int S = slot_stage(K);
    int first, count;
    block_units(size(S), th.rank, first, count);
#pragma unroll
    for (int o = 0; o < values_per_lane(S); o++) {
      ReducedValue it = reduced_value<S>(th, o);
      if (p.grad_initial_local[K] && it.mine && it.unit < count && it.n < th.rows && th.klane % replicas(S) == 0)
        p.grad_initial_local[K][(th.member * p.batch + th.row0 + it.n) * size(S) + first + it.unit] =
            (resets >> it.n) & 1 ? 0.0f : local[fixed<local_offset(K)> + o];
    }
    finish_locals<K + 1>(p, th, local, resets);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) KERNEL(const __grid_constant__ Params p) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) unsigned char memory[];
  Thread th;
  th.base = shared_address(memory);
  th.rank = cluster_rank();
  th.warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);   // so that the compiler knows it is one per warp
  th.klane = threadIdx.x % KLANES;
  th.group = threadIdx.x / KLANES;
  i64 cluster = blockIdx.x / CLUSTER;
  th.member = cluster / p.row_blocks;
  th.row0 = (int)(cluster % p.row_blocks) * ROWS;
  th.rows = min(ROWS, (int)p.batch - th.row0);
  Word reg[NREG];
  load_matrices<0>(p, th, reg);
  set_up<0>(p, th);
  barrier_fence();
  cluster_sync();
  address_peers<0>(th);
  float x[NLOAD], local[NLOCAL], acc[sums(0)], next[sums(0)];
  prefetch_all<0>(p, th, x, BACKWARD ? p.steps - 1 : 0);
  set_up_locals<0>(p, th, local);
  zero(acc);
  early<0, true>(th, reg, acc, 0);
  u32 resets = 0, coming = 0;
  if (HAS_RESET && !BACKWARD) coming = load_resets(p, th, 0);
  for (int step = 0; step < (int)p.steps; step++) {
    if (HAS_RESET) {
      resets = coming;
      i64 t = BACKWARD ? p.steps - 1 - step : step + 1;   // backward: step s+1 drops what reset[t] cut
      if (BACKWARD || t < p.steps) coming = load_resets(p, th, t);
    }
    stages<0>(p, th, reg, x, local, acc, next, step, resets);
#pragma unroll
    for (int i = 0; i < sums(0); i++) acc[i] = next[i];
  }
  if (BACKWARD) {
    finish_sums<0>(p, th, reg, acc, coming);
    finish_locals<0>(p, th, local, coming);
  }
  cluster_sync();
#endif
}
