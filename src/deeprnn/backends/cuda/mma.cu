// The transition on the tensor cores, for batches: the same ring of stages as cluster.cu, products by mma.sync.
//
// fp32 numbers are scaled by a power of two and held as two fp16 parts (22 bits of mantissa), and a product is three:
// high·high, high·low and low·high, summed in fp32; with BF16 the weights have only their high part, the state keeps
// both. How a vector is scaled is said at `Range` below. Vectors are cut into tiles of 16 elements, dealt to the blocks
// of the cluster. A block has several kinds of warps:
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
CONST int kept(int j) { constexpr int list[] = {MAT_REGS}; return list[j]; }   // inner rounds held in registers

CONST bool bounded(int s) { return !BACKWARD && unit(s) != RELU && unit(s) != IDENTITY; }
CONST bool all_bounded() { for (int s = 0; s < DEPTH; s++) if (!bounded(s)) return false; return true; }
constexpr bool SCALED = !all_bounded();       // whether vectors need scales that change
constexpr bool MIXED = MATRICES > DEPTH;      // whether a stage multiplies vectors of different scales
constexpr int SCALERS = SCALED ? 4 : 0;       // warps that compute them, each for some streams
constexpr int WARPS = MGROUPS * KGROUPS, THREADS = 32 * (WARPS + FINISHERS + SCALERS);
// Registers are lent between warpgroups (of four warps) where a block has more than two.
constexpr bool LEND = THREADS > 256 && WARPS % 4 == 0;
constexpr int EACH = 65536 / THREADS / 8 * 8, FINISHER_REGS = FINISHERS > 4 || SCALED ? 48 : 56, SCALER_REGS = 32;
constexpr int OTHERS = FINISHER_REGS * (FINISHERS / 4) + SCALER_REGS * (SCALERS / 4);
constexpr int MOST_REGS = (EACH * (THREADS / 128) - OTHERS) / up(WARPS, 4) / 8 * 8, MULTIPLIER_REGS = MOST_REGS < 248 ? MOST_REGS : 248;
static_assert(FINISHERS % 4 == 0, "a whole warpgroup");
constexpr int PARTS = BF16 ? 1 : 2;                                // of a weight
constexpr int ENTRY = 16;                                          // bytes of a lane in a state tile: two parts
constexpr int TAIL = ROWS - 8 * (NTILES - 1);                      // batch rows of the last tile
CONST int tiles(int s) { return up(size(s), 16); }
CONST int widest_vector() { int n = 0; for (int s = 0; s < DEPTH; s++) n = size(s) > n ? size(s) : n; return n; }
constexpr int PIECES = up(widest_vector(), 8);   // of a matrix that largest.cu looks at
CONST int most(int s) { return up(tiles(s), CLUSTER); }            // output tiles of a block
CONST int mine(int s) { return up(most(s), MGROUPS); }             // output tiles of a warp
CONST int widest() { int n = 0; for (int s = 0; s < DEPTH; s++) n = mine(s) > n ? mine(s) : n; return n; }
constexpr int KINDS = NTILES > 2 ? 1 : 3;                 // sums kept apart, so that few tiles still overlap
CONST int work(int s) { return most(s) * NTILES; }                 // tiles that a block finishes in a task
CONST int most_work() { int n = 0; for (int s = 0; s < DEPTH; s++) n = work(s) > n ? work(s) : n; return n; }
// One stream, stores by every lane: tiles of the last round are finished by several warps, each for some blocks.
constexpr bool SHARED_OUT = STREAMS == 1 && !THROUGH_L2;
// Finishers that a task has, the same ones every GAP tasks. A barrier tells its phases apart by parity, so who waits for
// a stream's sums must know that those before them came; tasks are multiplied in order: GAP is at most STREAMS.
constexpr int AT_ONCE = SHARED_OUT || most_work() > FINISHERS ? FINISHERS : most_work();
constexpr int GAP = FINISHERS / AT_ONCE < STREAMS ? FINISHERS / AT_ONCE : STREAMS;
CONST int per_warp(int s) { return up(work(s), AT_ONCE); }         // tiles that a finisher has, at most
CONST int full(int s) { return SHARED_OUT ? work(s) / FINISHERS : per_warp(s); }
CONST int rest(int s) { return SHARED_OUT ? work(s) % FINISHERS : 0; }
CONST int share(int s, int j) { return j < full(s) ? 1 : FINISHERS / rest(s); }
CONST int rounds(int j) { return up(tiles(source_of(j)), KGROUPS); }
// A vector that is read as a shortcut may still be read when its successor arrives: it needs two copies.
CONST int copies(int s) {
  for (int j = 0; j < MATRICES; j++)
    if (source_of(j) == s && before(stage_of(j)) != s) return 2;
  return DEPTH == 1 ? 2 : 1;
}
CONST int vector_bytes(int s) { return tiles(s) * NTILES * 32 * ENTRY; }
// Tables after the barriers: of each stage the weights' scale, of each matrix how much larger than its source a sum can
// become; of each vector and batch row what undoes its source's scale and its own scale (of up to four steps), and its
// largest number (of two); and what the multiplying warps saw of the vector that a stream is at.
constexpr int COLUMNS = NTILES * 8, EACH_TABLE = STREAMS * DEPTH * COLUMNS * 4;
constexpr int FACTORS = up((16 * DEPTH + 8) * STREAMS, 128) * 128, SCALES = FACTORS + up(DEPTH + MATRICES, 4) * 16;
constexpr int MOSTS = SCALES + 8 * EACH_TABLE, SEEN = MOSTS + 2 * EACH_TABLE, TABLES_END = SEEN + STREAMS * NTILES * KGROUPS * 128;
CONST int vector_offset(int s) {
  int n = up(TABLES_END, 128) * 128;
  for (int i = 0; i < s; i++) n += STREAMS * copies(i) * vector_bytes(i);
  return n;
}
constexpr int PARTIAL = vector_offset(DEPTH), PARTIAL_BYTES = widest() * WARPS * NTILES * 512;
// Finished tiles on their way out: one place for each tile that a finisher has in a task.
CONST int busiest() { int n = 0; for (int s = 0; s < DEPTH; s++) n = per_warp(s) > n ? per_warp(s) : n; return n; }
constexpr int LEAVING = PARTIAL + STREAMS * PARTIAL_BYTES, LEAVING_BYTES = THROUGH_L2 ? FINISHERS * busiest() * 512 : 0;
// The cluster's part of the exchange buffer: a place for each tile of each vector and stream.
CONST int exchange_offset(int s) { int n = 0; for (int i = 0; i < s; i++) n += STREAMS * vector_bytes(i); return n; }
// Weights that registers cannot hold, round by round; in the last one perhaps only some warps have a tile.
CONST int sharers(int j, int i) { return i < rounds(j) - 1 ? KGROUPS : tiles(source_of(j)) - i * KGROUPS; }   // of a group
CONST int round_offset(int j, int i) { return (i - kept(j)) * mine(stage_of(j)) * WARPS * PARTS * 512; }
CONST int weight_bytes(int j) {
  return kept(j) == rounds(j) ? 0
                              : round_offset(j, rounds(j) - 1) + mine(stage_of(j)) * MGROUPS * sharers(j, rounds(j) - 1) * PARTS * 512;
}
CONST int weight_offset(int j) {
  int n = LEAVING + LEAVING_BYTES;
  for (int i = 0; i < j; i++) n += weight_bytes(i);
  return n;
}
CONST int reg_offset(int j) {
  int n = 0;
  for (int i = 0; i < j; i++) n += mine(stage_of(i)) * kept(i) * PARTS * 4;
  return n;
}
constexpr int NREG = reg_offset(MATRICES) > 0 ? reg_offset(MATRICES) : 1;

struct Thread {
  u32 base, rank;
  int lane;
  int mg, kg;       // of a multiplying warp
  int number;       // of a finisher
  i64 member;
  u8* exchange;     // the cluster's part of the buffer in global memory
  int row0, left;   // first batch row of this cluster, and how many there are from it on
};
// Batch rows of stream q that exist (perhaps none), and those that are sent: at least one, so that a vector
// always has bytes to wait for.
INLINE int rows_of(const Thread& th, int q) { return min(ROWS, th.left - q * ROWS); }
INLINE int sent_of(const Thread& th, int q) { return max(rows_of(th, q), 1); }
template <int S> INLINE u32 vector_of(const Thread& th, int q, int step) {
  return th.base + vector_offset(S) + (q * copies(S) + (copies(S) == 2 ? step & 1 : 0)) * vector_bytes(S);
}
template <int S> struct Sums { float d[mine(S)][NTILES][KINDS][4]; };

template <int S> INLINE int first_tile(const Thread& th) {
  constexpr int base = tiles(S) / CLUSTER, extra = tiles(S) % CLUSTER;
  return (int)th.rank * base + min((int)th.rank, extra);
}
template <int S> INLINE int tile_count(const Thread& th) {
  constexpr int base = tiles(S) / CLUSTER, extra = tiles(S) % CLUSTER;
  return base + ((int)th.rank < extra ? 1 : 0);
}
template <int S> INLINE bool idle(const Thread& th) { return th.mg >= tile_count<S>(th); }

// Range. fp16 ends at 2^16 and tells numbers below 2^-14 apart by 2^-24 only, so that a number of two parts has 22 bits of
// mantissa while its vector's largest lies between, say, 2^-2 and 2^15. Weights are scaled by the largest sum of a row.
// Outputs of bounded units need no more than a constant. Gradients and unbounded outputs can be anything: each batch row
// of a vector has a scale of its own, by a bound that every block computes alike: how large the vectors were that it
// comes from (the multiplying warps look, every block has all of them), by how much products can be larger than those,
// and what is added (`largest.cu` has looked at it beforehand). A scale is wanted with the sums: warps that do nothing
// else compute it a stage ahead, so that the last product counts with a bound too. Together such bounds are some 2^10 too
// large, and there is room for it.
template <int S> INLINE float factor(const Thread& th) {
  float x[1];
  load_shared<1>(x, th.base + FACTORS + 4 * S);
  return x[0];
}
// What a warp adds up of a vector must stay within fp16 too: by so many powers of two numbers stay below its end.
constexpr bool ADDED = STREAMS <= 2;
CONST int margin() {
  int most = 1, n = 0;
  for (int j = 0; j < MATRICES; j++) most = 2 * rounds(j) > most ? 2 * rounds(j) : most;
  while (1 << n < most) n++;
  return SCALED && ADDED ? n : 0;
}
constexpr float STEADY = (float)(16384 >> margin());   // the scale of outputs of bounded units
template <int S> INLINE u32 in_scales(const Thread& th, int q, int step, int n) {
  return th.base + SCALES + (((q * DEPTH + S) * 4 + (step & 3)) * COLUMNS + n) * 8;
}
template <int S> INLINE u32 in_mosts(const Thread& th, int q, int step, int n) {
  return th.base + MOSTS + (((q * DEPTH + S) * 2 + (step & 1)) * COLUMNS + n) * 4;
}
// The scale of batch row n of vector S. Before the first step it depends on what is given.
template <int S> INLINE float scale_of(const Thread& th, int q, int step, int n) {
  if (!SCALED && step >= 0) return STEADY;
  float x[1];
  load_shared<1>(x, in_scales<S>(th, q, step, n) + 4);
  return x[0];
}
template <int S> INLINE void set_scale(const Thread& th, int q, int step, int n, float of_source, float own) {
  u32 at = in_scales<S>(th, q, step, n);
  store_shared(at, inverse(of_source));
  store_shared(at + 4, own);
}
// Of the two batch rows of tile n that a lane of a multiplying warp has sums of.
template <int S> INLINE void load_pair(const Thread& th, float (&x)[2], int q, int step, int n) {
  x[0] = x[1] = STEADY;
  if (!SCALED && step >= 0) return;
  float w[4];
  load_shared<4>(w, in_scales<S>(th, q, step, n * 8 + th.lane % 4 * 2));
  x[0] = w[1], x[1] = w[3];
}
// A bound may lie beyond fp32's end where the numbers do not: they are at most its largest.
INLINE float scale_by(float most) { return power(shift_of(min(__float_as_uint(most), 0x7f7fffffu)) - margin()); }

// Tiles of matrix J in a row, KGROUPS apart: the lane's eight places in the next one are moved on by one addition each.
// Computed anew for every number, they took most of the time in which a launch begins.
struct Walk {
  const float* at[8];   // element i and the one beside it: 2i, 2i + 1
  i64 ahead;
  float scale;
  int row, k;
  bool real;
};
template <int J> INLINE Walk walk(const Params& p, const Thread& th, int m) {
  constexpr int S = stage_of(J);
  i64 rs = p.matrix[J].row, cs = p.matrix[J].column;
  Walk w;
  w.row = (first_tile<S>(th) + m) * 16 + th.lane / 4;
  w.k = th.kg;
  w.real = m < tile_count<S>(th);
  const float* first = p.matrix[J].data + th.member * p.matrix[J].member + w.row * rs + (w.k * 16 + th.lane % 4 * 2) * cs;
#pragma unroll
  for (int i = 0; i < 8; i++) w.at[i] = first + (i / 2 % 2 * 8) * rs + (i / 4 * 8 + i % 2) * cs;
  w.ahead = KGROUPS * 16 * cs;
  w.scale = factor<S>(th);
  return w;
}
// The next 16 x 16 tile as the lane's four registers, in PARTS parts.
template <int J> INLINE void fragment(const Thread& th, Walk& w, u32 (&out)[PARTS][4]) {
  constexpr int S = stage_of(J), Q = source_of(J);
  constexpr bool WHOLE = size(S) % 16 == 0 && size(Q) % 16 == 0;
  int column = w.k * 16 + th.lane % 4 * 2;
  bool real = w.real && w.k < tiles(Q);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    bool here = real && (WHOLE || w.row + i % 2 * 8 < size(S));
    float x = here && (WHOLE || column + i / 2 * 8 < size(Q)) ? *w.at[2 * i] : 0.0f;
    float y = here && (WHOLE || column + i / 2 * 8 + 1 < size(Q)) ? *w.at[2 * i + 1] : 0.0f;
    if constexpr (PARTS == 2) two_parts(x * w.scale, y * w.scale, out[0][i], out[PARTS - 1][i]);
    else out[0][i] = halves(bf16_low(bf16_bits(x)) * w.scale, bf16_low(bf16_bits(y)) * w.scale);
    w.at[2 * i] += w.ahead;
    w.at[2 * i + 1] += w.ahead;
  }
  w.k += KGROUPS;
}
template <int J> INLINE u32 weight_at(const Thread& th, int i, int m, int part) {
  int n = sharers(J, i);
  return th.base + weight_offset(J) + round_offset(J, i) + (((m * PARTS + part) * MGROUPS + th.mg) * n + th.kg) * 512 + th.lane * 16;
}
template <int J> INLINE void load_matrices(const Params& p, const Thread& th, u32 (&reg)[NREG]) {
  if constexpr (J < MATRICES) {
    constexpr int M = mine(stage_of(J)), KEPT = kept(J), ALL = rounds(J), REG = reg_offset(J);
    u32 part[PARTS][4];
#pragma unroll
    for (int m = 0; m < M; m++) {
      Walk w = walk<J>(p, th, m * MGROUPS + th.mg);
#pragma unroll
      for (int i = 0; i < KEPT; i++) {
        fragment<J>(th, w, part);
#pragma unroll
        for (int q = 0; q < PARTS; q++)
#pragma unroll
          for (int n = 0; n < 4; n++) reg[REG + ((i * M + m) * PARTS + q) * 4 + n] = part[q][n];
      }
#pragma unroll 2
      for (int i = KEPT; i < ALL; i++) {
        fragment<J>(th, w, part);
#pragma unroll
        for (int q = 0; q < PARTS; q++)
          if (th.kg < sharers(J, i))
            store_words(weight_at<J>(th, i, m, q), part[q][0], part[q][1], part[q][2], part[q][3]);
      }
    }
    load_matrices<J + 1>(p, th, reg);
  }
}

// `seen` becomes something that none of the magnitudes which the lane reads exceeds, where it is wanted: the largest of
// them, or their sum. That is twice as many instructions, but none that others wait for: better where one stream or two
// are a chain, worse where the multiplying warps are always busy.
template <int J, bool LOOK, int S>
INLINE void product(const Thread& th, const u32 (&reg)[NREG], Sums<S>& acc, int q, int step, u32 (&seen)[NTILES]) {
  constexpr int Q = source_of(J), M = mine(S), KEPT = kept(J), ALL = rounds(J);
  constexpr int REG = reg_offset(J);
  u32 vec = vector_of<Q>(th, q, step) + th.lane * ENTRY;
  u32 tail = vec - max(th.lane / 4 - (TAIL - 1), 0) * (4 * ENTRY);   // the same for the last tile
#pragma unroll
  for (int i = 0; i < ALL; i++) {
    int k = i * KGROUPS + th.kg;
    if (i < ALL - 1 || ALL * KGROUPS == tiles(Q) || k < tiles(Q)) {
      u32 a[M][PARTS][4];
#pragma unroll
      for (int m = 0; m < M; m++)
#pragma unroll
        for (int q = 0; q < PARTS; q++) {
          if (i < KEPT) {
#pragma unroll
            for (int w = 0; w < 4; w++) a[m][q][w] = reg[REG + ((i * M + m) * PARTS + q) * 4 + w];
          } else {
            load_words(a[m][q], weight_at<J>(th, i, m, q));
          }
        }
#pragma unroll
      for (int n = 0; n < NTILES; n++) {
        u32 b[4];
        load_words(b, (n == NTILES - 1 ? tail : vec) + (k * NTILES + n) * (32 * ENTRY));
        if constexpr (LOOK && ADDED) seen[n] = plus_magnitudes(plus_magnitudes(seen[n], b[0]), b[1]);
        if constexpr (LOOK && !ADDED) seen[n] = larger(larger(seen[n], b[0]), b[1]);
#pragma unroll
        for (int m = 0; m < M; m++) {
          if constexpr (PARTS == 2) multiply_add(acc.d[m][n][KINDS - 1], a[m][PARTS - 1], b[0], b[1]);
          multiply_add(acc.d[m][n][KINDS / 2], a[m][0], b[2], b[3]);
          multiply_add(acc.d[m][n][0], a[m][0], b[0], b[1]);
        }
      }
    }
  }
}

// What the warp's lanes saw of a vector: lanes 4c to 4c + 3 of batch row c.
INLINE void leave_seen(const Thread& th, const u32 (&seen)[NTILES], int q) {
#pragma unroll
  for (int n = 0; n < NTILES; n++)
    if (th.mg == 0) store_shared(th.base + SEEN + (((q * NTILES + n) * KGROUPS + th.kg) * 32 + th.lane) * 4, __uint_as_float(seen[n]));
}
template <int Q> INLINE u32 barrier_of(u32 base, int q, int step) { return base + ((q * DEPTH + Q) * 2 + (step & 1)) * 8; }
template <int Q> INLINE void await(const Thread& th, int q, int step) {
  if (step >= 0) barrier_wait(barrier_of<Q>(th.base, q, step), (step >> 1) & 1);
}
// The sums of stream q are in their place: every multiplying warp arrives.
INLINE u32 ready_of(u32 base, int q) { return base + (STREAMS * DEPTH * 2 + q) * 8; }
// Bytes of vector S that arrive in a step: every block of the cluster serves the same batch rows.
template <int S> INLINE u32 arriving(const Thread& th, int q) { return tiles(S) * 4 * ENTRY * sent_of(th, q); }
// By a finisher, when all warps have the vector: long before any block can send the one of two steps on.
template <int S> INLINE void rearm(const Thread& th, int q, int step) {
  int from = S == 0 ? step - 1 : step;
  if (th.number % AT_ONCE == 0 && th.lane == 0 && from >= 0)
    barrier_expect(barrier_of<before(S)>(th.base, q, from), arriving<before(S)>(th, q));
}
CONST bool is_early(int j, int s) { return stage_of(j) == s && source_of(j) != before(s); }
// Matrices in the order of their vectors: from one to the next a scale may fall by any amount, but not rise so.
CONST int turn(int i) { return BACKWARD ? MATRICES - 1 - i : i; }
CONST int early_before(int i, int s) { int found = -1; for (int k = 0; k < i; k++) if (is_early(turn(k), s)) found = turn(k); return found; }
// Sums of vector FROM's product to the scale of vector TO, whose product follows. Mostly they are the same.
template <int FROM, int TO, int S> INLINE void rescale(const Thread& th, Sums<S>& acc, int q, int step_from, int step_to) {
#pragma unroll
  for (int n = 0; n < NTILES; n++) {
    float now[2], was[2];
    load_pair<TO>(th, now, q, step_to, n);
    load_pair<FROM>(th, was, q, step_from, n);
    if (!any_lane(now[0] != was[0] || now[1] != was[1])) continue;
#pragma unroll
    for (int c = 0; c < 2; c++) {
      float ratio = ratio_of(now[c], was[c]);
      if (bounded(S)) ratio = fminf(ratio, power(84));   // sums of a state beyond all measure: finite, and far enough
#pragma unroll
      for (int m = 0; m < mine(S); m++)
#pragma unroll
        for (int k = 0; k < KINDS; k++) {
          acc.d[m][n][k][c] *= ratio;
          acc.d[m][n][k][2 + c] *= ratio;
        }
    }
  }
}
// Vectors of this step, or of the one before, that stage S multiplies. Shortcuts begin with the step before.
template <int S, int TURN = 0> INLINE void early(const Thread& th, const u32 (&reg)[NREG], Sums<S>& acc, int q, int step) {
  constexpr int I = early_before(TURN, S);
  if constexpr (TURN < MATRICES) {
    constexpr int J = turn(TURN);
    if constexpr (is_early(J, S)) {
      static_assert(source_of(J) >= S, "of the step before");
      // No need to wait: the stage after the source's, in which it was critical, has done so.
      if constexpr (I >= 0)
        if (SCALED || step == 0) rescale<source_of(I), source_of(J)>(th, acc, q, step - 1, step - 1);
      u32 none[NTILES];
      product<J, false>(th, reg, acc, q, step - 1, none);
    }
    early<S, TURN + 1>(th, reg, acc, q, step);
  } else {   // scales are known a stage ahead: while the vector travels
    if constexpr (I >= 0)
      if (SCALED || step == 0) rescale<source_of(I), before(S)>(th, acc, q, step - 1, S == 0 ? step - 1 : step);
  }
}
template <int S, int J = 0> INLINE void critical(const Thread& th, const u32 (&reg)[NREG], Sums<S>& acc, int q, int step) {
  if constexpr (J < MATRICES) {
    if constexpr (stage_of(J) == S && source_of(J) == before(S)) {
      int from = S == 0 ? step - 1 : step;
      await<source_of(J)>(th, q, from);
      u32 seen[NTILES] = {};
      product<J, SCALED>(th, reg, acc, q, from, seen);
      if constexpr (SCALED) leave_seen(th, seen, q);
    }
    critical<S, J + 1>(th, reg, acc, q, step);
  }
}
template <int S> INLINE void zero(Sums<S>& acc) {
#pragma unroll
  for (int i = 0; i < mine(S) * NTILES * KINDS * 4; i++) (&acc.d[0][0][0][0])[i] = 0.0f;
}
// Where a sequence starts anew the sums so far are dropped: bit 2n + i stands for the lane's column i of tile n.
template <int S> INLINE void drop(Sums<S>& acc, u32 resets) {
#pragma unroll
  for (int m = 0; m < mine(S); m++)
#pragma unroll
    for (int n = 0; n < NTILES; n++)
#pragma unroll
      for (int k = 0; k < KINDS; k++)
#pragma unroll
        for (int i = 0; i < 4; i++)
          acc.d[m][n][k][i] = select((resets >> (2 * n + i % 2)) & 1, 0.0f, acc.d[m][n][k][i]);
}
INLINE u32 load_resets(const Params& p, const Thread& th, i64 t) {   // 2 NTILES bits for each stream
  u32 bits = 0;
#pragma unroll
  for (int i = 0; i < 2 * NTILES * STREAMS; i++) {
    int q = i / (2 * NTILES), n = i / 2 % NTILES * 8 + th.lane % 4 * 2 + i % 2;
    if (n < rows_of(th, q) && p.reset[th.member * p.reset_member + t * p.batch + th.row0 + q * ROWS + n]) bits |= 1u << i;
  }
  return bits;
}
static_assert(2 * NTILES * STREAMS <= 32, "the marks of a lane's columns fill one word");

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
        load_shared<1>(most, in_mosts<source_of(J)>(th, q, step - 1, n));
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
      if (MIXED) store_shared(in_mosts<before(S)>(th, q, from, n), seen);
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

// The largest number of row n of vector S before the first step.
template <int S> INLINE float most_initial(const Params& p, const Thread& th, int q, int n) {
  bool given = BACKWARD ? p.initial != nullptr : S == DEPTH - 1;
  i64 row = th.member * p.batch + th.row0 + q * ROWS + n;
  if (!given || n >= rows_of(th, q)) return 0.0f;
  float most = p.most_initial[row * DEPTH + layer(S)];
  if (BACKWARD && MIXED)   // scales within reach of each other, as later ones are
#pragma unroll
    for (int l = 0; l < DEPTH; l++) most = fmaxf(most, p.most_initial[row * DEPTH + l] * power(-60));
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
    float first = most_initial<DEPTH - 1>(p, th, q, n), of_first = scale_of<DEPTH - 1>(th, q, -1, n);
    float most = b.constant + times(b.growth, first);
    if (within_reach<0>() && !anew && first > 0.0f) most = fmaxf(most, least_after(of_first));
    set_scale<0>(th, q, 0, n, of_first, bounded(0) ? STEADY : scale_by(most));
  }
}
template <int S> INLINE void set_up(const Params& p, const Thread& th) {
  if constexpr (S < DEPTH) {
    if ((int)threadIdx.x / 32 == S % (THREADS / 32)) set_up_factors<S>(p, th);
#pragma unroll 1
    for (int i = threadIdx.x; i < STREAMS * COLUMNS; i += THREADS) {
      float most = most_initial<S>(p, th, i / COLUMNS, i % COLUMNS);
      set_scale<S>(th, i / COLUMNS, -1, i % COLUMNS, 1.0f, scale_by(most));
      store_shared(in_mosts<S>(th, i / COLUMNS, -1, i % COLUMNS), most);
    }
    // Only what the first step finds of the step before it: elsewhere nothing is read before it arrives.
    constexpr int EACH_STREAM = tiles(S) * NTILES * 32, ALL = BACKWARD || S == DEPTH - 1 ? STREAMS * EACH_STREAM : 0;
#pragma unroll 4
    for (int i = threadIdx.x; i < ALL; i += THREADS) {
      int q = i / EACH_STREAM, within = i % EACH_STREAM, lane = i % 32, nt = i / 32 % NTILES, tile = within / 32 / NTILES;
      int n = nt * 8 + lane / 4, e = tile * 16 + lane % 4 * 2;
      float y[4];
#pragma unroll
      for (int w = 0; w < 4; w++) {
        int k = e + w % 2 + w / 2 * 8;
        bool given = !BACKWARD || p.initial;
        i64 row = th.row0 + q * ROWS + n, at = BACKWARD ? row * TOTAL + layer_offset(layer(S)) : row * HIDDEN;
        y[w] = given && n < rows_of(th, q) && k < size(S) ? p.initial[th.member * p.initial_member + at + k] : 0.0f;
      }
      float scale = scale_by(most_initial<S>(p, th, q, n));
      u32 at = vector_of<S>(th, q, -1) + within * ENTRY, w[4];
      two_parts(y[0] * scale, y[1] * scale, w[0], w[2]);
      two_parts(y[2] * scale, y[3] * scale, w[1], w[3]);
      store_words(at, w[0], w[1], w[2], w[3]);
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
    set_up<S + 1>(p, th);
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
  set_up<0>(p, th);
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
