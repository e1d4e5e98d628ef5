// The transition on the tensor cores, for batches: the same ring of stages as cluster.cu, products by mma.sync.
//
// fp32 numbers are held as two bf16 parts (16 bits of mantissa) and a product is three: high·high, high·low and
// low·high, summed in fp32; with BF16 the weights have only their high part, the state keeps both. Vectors are
// cut into tiles of 16 elements, dealt to the blocks of the cluster. A block has two kinds of warps:
// - MGROUPS x KGROUPS warps multiply: a warp owns output tiles mg, mg + MGROUPS, ... and multiplies the inner tiles
//   kg, kg + KGROUPS, ...; it leaves its sums in shared memory and goes on to the next task.
// - FINISHERS warps add the sums of a tile (16 outputs x 8 batch rows) up, apply the unit and send the result to
//   every block. They have few registers; the multiplying warps, which hold the weights, have theirs. A finisher has
//   the same tile of every GAP-th task and reads what stands beside its next sums while this tile is on its way.
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
CONST int kept(int j) { constexpr int list[] = {MAT_REGS}; return list[j]; }   // inner rounds held in registers

constexpr int WARPS = MGROUPS * KGROUPS, THREADS = 32 * (WARPS + FINISHERS);
// Registers are lent between warpgroups (of four warps) where a block has more than two.
constexpr bool LEND = THREADS > 256 && WARPS % 4 == 0;
constexpr int EACH = 65536 / THREADS / 8 * 8, FINISHER_REGS = FINISHERS > 4 ? 48 : 56;
constexpr int MULTIPLIER_REGS = (EACH * (THREADS / 128) - FINISHER_REGS * (FINISHERS / 4)) / up(WARPS, 4) / 8 * 8;
static_assert(FINISHERS % 4 == 0, "a whole warpgroup");
constexpr int PARTS = BF16 ? 1 : 2;                                // of a weight
constexpr int ENTRY = 16;                                          // bytes of a lane in a state tile: two parts
constexpr int TAIL = ROWS - 8 * (NTILES - 1);                      // batch rows of the last tile
CONST int tiles(int s) { return up(size(s), 16); }
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
CONST int vector_offset(int s) {
  int n = up((16 * DEPTH + 8) * STREAMS, 128) * 128;
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

// Tiles of matrix J in a row, KGROUPS apart: the lane's eight places in the next one are moved on by one addition each.
// Computed anew for every number, they took most of the time in which a launch begins.
struct Walk {
  const float* at[8];   // element i and the one beside it: 2i, 2i + 1
  i64 ahead;
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
    if constexpr (PARTS == 2) split(x, y, out[0][i], out[PARTS - 1][i]);
    else out[0][i] = pack(x, y);
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

template <int J, int S> INLINE void product(const Thread& th, const u32 (&reg)[NREG], Sums<S>& acc, int q, int step) {
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
template <int S, int J = 0> INLINE void early(const Thread& th, const u32 (&reg)[NREG], Sums<S>& acc, int q, int step) {
  if constexpr (J < MATRICES) {
    if constexpr (stage_of(J) == S && source_of(J) != before(S)) {
      // No need to wait: the stage after the source's, in which it was critical, has done so.
      product<J>(th, reg, acc, q, source_of(J) >= S ? step - 1 : step);
    }
    early<S, J + 1>(th, reg, acc, q, step);
  }
}
template <int S, int J = 0> INLINE void critical(const Thread& th, const u32 (&reg)[NREG], Sums<S>& acc, int q, int step) {
  if constexpr (J < MATRICES) {
    if constexpr (stage_of(J) == S && source_of(J) == before(S)) {
      int from = S == 0 ? step - 1 : step;
      await<source_of(J)>(th, q, from);
      product<J>(th, reg, acc, q, from);
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
// Unit and exchange of one tile; a and g are what was read beside it, and g becomes its values.
template <int S>
INLINE void finish(const Params& p, const Thread& th, const Task& it, int j, const float* a, float* g, int q, int step) {
  int tile = first_tile<S>(th) + it.local, n = it.nt * 8 + column_of(th), e = tile * 16 + even_row(th);
  float v[4], y[4];
  total<S>(th, it, q, v);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float x = v[i] + a[i];
    y[i] = BACKWARD ? x * slope<unit(S)>(g[i]) : activate<unit(S)>(x);
    if (!inside<S>(e + within(i))) y[i] = 0.0f;
  }
  u32 words[4];
  split(y[0], y[1], words[0], words[2]);
  split(y[2], y[3], words[1], words[3]);
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
  barrier_wait(ready_of(th.base, q), (step * DEPTH + S) & 1);
#pragma unroll
  for (int j = 0; j < N; j++) {
    Task it = task<S>(th, j);
    if (it.real) finish<S>(p, th, it, j, beside.a + 4 * j, beside.g + 4 * j, q, step);
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
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (it.part == 0 && n < rows_of(th, q) && inside<0>(e + within(i)))
        p.output_initial[(th.member * p.batch + th.row0 + q * ROWS + n) * HIDDEN + e + within(i)] = v[i];
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

template <int S> INLINE void set_up(const Params& p, const Thread& th) {
  if constexpr (S < DEPTH) {
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
      u32 at = vector_of<S>(th, q, -1) + within * ENTRY, w[4];
      split(y[0], y[1], w[0], w[2]);
      split(y[2], y[3], w[1], w[3]);
      store_words(at, w[0], w[1], w[2], w[3]);
    }
    if (threadIdx.x == 0) {
      if (S == 0)
        for (int q = 0; q < STREAMS; q++) barrier_init(ready_of(th.base, q), WARPS);
      for (int i = 0; i < 2 * STREAMS; i++) {
        u32 bar = barrier_of<S>(th.base, i / 2, i % 2);
        barrier_init(bar, 1 + AT_ONCE);
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
  barrier_fence();
  copy_fence();
  cluster_sync();
  if (warp < WARPS) {
    if constexpr (LEND) more_registers<MULTIPLIER_REGS>();
    multiply_all(p, th);
  } else {
    if constexpr (LEND) fewer_registers<FINISHER_REGS>();
    finish_all(p, th);
  }
  cluster_sync();
#endif
}
