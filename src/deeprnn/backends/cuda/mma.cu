// The transition on the tensor cores, for batches: the same ring of stages as cluster.cu, products by mma.sync.
//
// fp32 numbers are held as two bf16 parts (16 bits of mantissa) and a product is three: high·high, high·low and
// low·high, summed in fp32; with BF16 the weights have only their high part, the state keeps both. Vectors are
// cut into tiles of 16 elements, dealt to the blocks of the cluster; a block's warps are MGROUPS x KGROUPS: a
// warp owns output tiles mg, mg + MGROUPS, ... and multiplies the inner tiles kg, kg + KGROUPS, ...; its group of
// KGROUPS warps adds up through shared memory, and the group's tiles (16 outputs x 8 batch rows) are dealt to its
// warps to be finished. A state vector lies in shared memory in the order in which mma.sync wants its second
// operand, so that a lane reads 16 bytes per tile, and a lane of the epilogue sends 16 bytes of one batch row.
// Batch rows that do not exist are never sent: lanes that would read them read the last one that does.
// A cluster may serve several STREAMS of ROWS rows each, one after the other in every stage. Then the warps of a
// group take turns: one finishes a tile, after its products of the next stream, and the others go on meanwhile.
//
// Macros: DEPTH SIZES UNITS MATRICES MAT_STAGE MAT_SOURCE MAT_REGS CLUSTER MGROUPS KGROUPS NTILES ROWS STREAMS
//         BACKWARD HAS_RESET HAS_GRAD_MID BF16 BUFFERS
#include "common.cuh"
#include "params.cuh"
CONST int kept(int j) { constexpr int list[] = {MAT_REGS}; return list[j]; }   // inner rounds held in registers

constexpr int WARPS = MGROUPS * KGROUPS, THREADS = 32 * WARPS;
constexpr int PARTS = BF16 ? 1 : 2;                                // of a weight
constexpr int KINDS = NTILES > 2 ? 1 : 3;                 // sums kept apart, so that few tiles still overlap
constexpr int ENTRY = 16;                                          // bytes of a lane in a state tile: two parts
constexpr int TAIL = ROWS - 8 * (NTILES - 1);                      // batch rows of the last tile
CONST int tiles(int s) { return up(size(s), 16); }
CONST int most(int s) { return up(tiles(s), CLUSTER); }            // output tiles of a block
CONST int mine(int s) { return up(most(s), MGROUPS); }             // output tiles of a warp
CONST int work(int s) { return mine(s) * NTILES; }                 // tiles that a group finishes
constexpr bool TURNS = STREAMS > 1;
CONST int per_warp(int s) { return TURNS ? 1 : up(work(s), KGROUPS); }   // tiles that a warp finishes
CONST int full(int s) { return TURNS ? 0 : work(s) / KGROUPS; }    // rounds in which every warp finishes one by itself
CONST int rest(int s) { return TURNS ? work(s) : work(s) % KGROUPS; }    // tiles of the last round, and the warps of each
CONST int share(int s, int j) { return TURNS || j < full(s) ? 1 : KGROUPS / rest(s); }
CONST int rounds(int j) { return up(tiles(source_of(j)), KGROUPS); }
// A vector that is read as a shortcut may still be read when its successor arrives: it needs two copies.
CONST int copies(int s) {
  for (int j = 0; j < MATRICES; j++)
    if (source_of(j) == s && before(stage_of(j)) != s) return 2;
  return DEPTH == 1 ? 2 : 1;
}
CONST int vector_bytes(int s) { return tiles(s) * NTILES * 32 * ENTRY; }
CONST int vector_offset(int s) {
  int n = up(16 * DEPTH * STREAMS, 128) * 128;
  for (int i = 0; i < s; i++) n += STREAMS * copies(i) * vector_bytes(i);
  return n;
}
CONST int widest() { int n = 0; for (int s = 0; s < DEPTH; s++) n = mine(s) > n ? mine(s) : n; return n; }
constexpr int PARTIAL = vector_offset(DEPTH), PARTIAL_BYTES = widest() * WARPS * NTILES * 512;
CONST int weight_offset(int j) {
  int n = PARTIAL + BUFFERS * PARTIAL_BYTES;
  for (int i = 0; i < j; i++) n += (rounds(i) - kept(i)) * mine(stage_of(i)) * WARPS * PARTS * 512;
  return n;
}
CONST int reg_offset(int j) {
  int n = 0;
  for (int i = 0; i < j; i++) n += mine(stage_of(i)) * kept(i) * PARTS * 4;
  return n;
}
CONST int fetched(int s) { return per_warp(s) * 4; }
// One stream: what is read beside the sums lies in registers a whole step ahead, each stage in its own. Several:
// it is read when the task begins, and what the next step needs is asked into L2.
CONST int fetched_offset(int s) { int n = 0; for (int i = 0; i < s; i++) n += TURNS ? 0 : fetched(i); return n; }
constexpr int NREG = reg_offset(MATRICES) > 0 ? reg_offset(MATRICES) : 1;
constexpr int NFETCH = TURNS ? 4 : fetched_offset(DEPTH);

struct Thread {
  u32 base, rank;
  int lane, mg, kg;
  i64 member;
  int row0, left;   // first batch row of this cluster, and how many there are from it on
  int buffer, due;  // of the next task: where its partial sums go, and the first warp to finish a tile (in turns)
  int held;         // in turns: the tile of the task before that this warp has to finish,
  u32 held_sums;    // and where its sums lie
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

// One 16 x 16 tile of matrix J as the lane's four registers, in PARTS parts.
template <int J> INLINE void fragment(const Params& p, const Thread& th, int m, int k, u32 (&out)[PARTS][4]) {
  constexpr int S = stage_of(J), Q = source_of(J);
  const float* data = p.matrix[J].data + th.member * p.matrix[J].member;
  i64 rs = p.matrix[J].row, cs = p.matrix[J].column;
  bool real = m < tile_count<S>(th) && k < tiles(Q);
  int row = (first_tile<S>(th) + m) * 16 + th.lane / 4, column = k * 16 + th.lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    int r = row + i % 2 * 8, c = column + i / 2 * 8;
    float x = real && r < size(S) && c < size(Q) ? data[r * rs + c * cs] : 0.0f;
    float y = real && r < size(S) && c + 1 < size(Q) ? data[r * rs + (c + 1) * cs] : 0.0f;
    if constexpr (PARTS == 2) split(x, y, out[0][i], out[PARTS - 1][i]);
    else out[0][i] = pack(x, y);
  }
}
template <int J> INLINE void load_matrices(const Params& p, const Thread& th, u32 (&reg)[NREG]) {
  if constexpr (J < MATRICES) {
    constexpr int M = mine(stage_of(J)), KEPT = kept(J), ALL = rounds(J), REG = reg_offset(J), SHARED = weight_offset(J);
    u32 part[PARTS][4];
#pragma unroll
    for (int i = 0; i < KEPT; i++)
#pragma unroll
      for (int m = 0; m < M; m++) {
        fragment<J>(p, th, m * MGROUPS + th.mg, i * KGROUPS + th.kg, part);
#pragma unroll
        for (int q = 0; q < PARTS; q++)
#pragma unroll
          for (int w = 0; w < 4; w++) reg[REG + ((i * M + m) * PARTS + q) * 4 + w] = part[q][w];
      }
#pragma unroll 1
    for (int i = KEPT; i < ALL; i++)
#pragma unroll
      for (int m = 0; m < M; m++) {
        fragment<J>(p, th, m * MGROUPS + th.mg, i * KGROUPS + th.kg, part);
#pragma unroll
        for (int q = 0; q < PARTS; q++)
          store_words(th.base + SHARED + ((((i - KEPT) * M + m) * PARTS + q) * THREADS + threadIdx.x) * 16,
                      part[q][0], part[q][1], part[q][2], part[q][3]);
      }
    load_matrices<J + 1>(p, th, reg);
  }
}

template <int J, int S> INLINE void product(const Thread& th, const u32 (&reg)[NREG], Sums<S>& acc, int q, int step) {
  constexpr int Q = source_of(J), M = mine(S), KEPT = kept(J), ALL = rounds(J);
  constexpr int REG = reg_offset(J), SHARED = weight_offset(J);
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
            load_words(a[m][q], th.base + SHARED + ((((i - KEPT) * M + m) * PARTS + q) * THREADS + threadIdx.x) * 16);
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
// Bytes of vector S that arrive in a step: every block of the cluster serves the same batch rows.
template <int S> INLINE u32 arriving(const Thread& th, int q) { return tiles(S) * 4 * ENTRY * sent_of(th, q); }
template <int S> INLINE void rearm(const Thread& th, int q, int step) {
  int from = S == 0 ? step - 1 : step;
  if (threadIdx.x == 0 && from >= 0)
    barrier_expect(barrier_of<before(S)>(th.base, q, from), arriving<before(S)>(th, q));
}
template <int S, int J = 0> INLINE void early(const Thread& th, const u32 (&reg)[NREG], Sums<S>& acc, int q, int step) {
  if constexpr (J < MATRICES) {
    if constexpr (stage_of(J) == S && source_of(J) != before(S)) {
      int from = source_of(J) >= S ? step - 1 : step;
      await<source_of(J)>(th, q, from);
      product<J>(th, reg, acc, q, from);
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

// What lane (g, c) finishes: rows r0, r0+1, r0+8, r0+9 of the tile, r0 = g rounded down to even; column 2c + g % 2.
INLINE int even_row(const Thread& th) { return th.lane / 4 & ~1; }
INLINE int column_of(const Thread& th) { return th.lane % 4 * 2 + (th.lane / 4 & 1); }
// The j-th tile that this warp finishes: output tile `local` of the block, batch tile nt. Where there are fewer
// tiles than warps, several finish the same one and `part` says which blocks each of them sends to.
struct Task { int local, nt, part; bool real; };
template <int S> INLINE Task task(const Thread& th, int j) {
  Task it;
  int i = TURNS ? th.held : th.kg + j * KGROUPS;
  it.part = 0;
  if (!TURNS && j >= full(S)) {
    i = full(S) * KGROUPS + th.kg % max(rest(S), 1);
    it.part = th.kg / max(rest(S), 1);
  }
  it.local = i / NTILES * MGROUPS + th.mg;
  it.nt = i % NTILES;
  it.real = i < work(S) && it.part < share(S, j) && it.local < tile_count<S>(th);
  return it;
}
INLINE constexpr int within(int i) { return i % 2 + i / 2 * 8; }   // element i of a lane, from its first
template <int S> INLINE bool inside(int e) { return size(S) % 16 == 0 || e < size(S); }

// What is added to the lane's four sums, and backward the units' outputs. The base is one for the warp and the
// lane's own part fits 32 bits: address arithmetic of 64 bits in each lane took longer than the products.
template <int S, bool ASK>
INLINE void read(const Params& p, const Thread& th, const Task& it, int q, i64 t, float* a, float* g) {
  constexpr int l = layer(S), WIDE = !BACKWARD ? TOTAL : l == DEPTH - 1 ? HIDDEN : MID;
  constexpr int START = BACKWARD && l == DEPTH - 1 ? 0 : layer_offset(l);
  int n = it.nt * 8 + column_of(th), e = (first_tile<S>(th) + it.local) * 16 + even_row(th);
  i64 b = t * p.batch + th.row0 + q * ROWS;
  i64 base = (BACKWARD ? (th.member * p.steps * p.batch + b) * WIDE : th.member * p.input_member + b * WIDE) + START;
  const float* x = (BACKWARD && l < DEPTH - 1 ? p.input_mid : p.input) + base;
  const float* y = (l == DEPTH - 1 ? p.top : p.mid) + base;
  int at = n * WIDE + e;
  bool real = it.real && n < rows_of(th, q);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    bool here = real && inside<S>(e + within(i));
    constexpr bool HAS_X = !BACKWARD || l == DEPTH - 1 || HAS_GRAD_MID;
    if (ASK) {
      if (HAS_X && here && i % 2 == 0) touch(x + at + within(i));
      if (BACKWARD && here && i % 2 == 0) touch(y + at + within(i));
    } else {
      a[i] = HAS_X && here ? x[at + within(i)] : 0.0f;
      g[i] = BACKWARD && here ? y[at + within(i)] : 0.0f;
    }
  }
}
template <int S> INLINE void prefetch(const Params& p, const Thread& th, float (&a)[NFETCH], float (&g)[NFETCH], int q, i64 t) {
#pragma unroll
  for (int j = 0; j < per_warp(S); j++)
    read<S, false>(p, th, task<S>(th, j), q, t, a + fetched_offset(S) + j * 4, g + fetched_offset(S) + j * 4);
}
template <int S> INLINE void prefetch_all(const Params& p, const Thread& th, float (&a)[NFETCH], float (&g)[NFETCH], i64 t) {
  if constexpr (S < DEPTH && !TURNS) {
    prefetch<S>(p, th, a, g, 0, t);
    prefetch_all<S + 1>(p, th, a, g, t);
  }
}

// In turns: the tile of the task just left that falls to this warp, none where it is work(S) or more.
INLINE int turn_of(const Thread& th) { return th.kg - th.due + (th.kg < th.due ? KGROUPS : 0); }
// Leave the warp's sums in shared memory and wait for the group's other warps. In turns only the warp that will
// finish a tile waits, and that later (collect). It does so once in KGROUPS tasks, one task late, so that a warp is
// never more than KGROUPS + 1 tasks ahead: KGROUPS + 3 buffers and barriers suffice.
template <int S> INLINE u32 leave_sums(Thread& th, Sums<S>& acc) {
  u32 at = th.base + PARTIAL + th.buffer * PARTIAL_BYTES;
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
  if (!TURNS) group_sync<KGROUPS * 32>(1 + th.mg);
  else if (turn_of(th) >= work(S)) group_arrive<KGROUPS * 32>(1 + th.mg * BUFFERS + th.buffer);
  return at;
}
INLINE void hold(Thread& th, u32 sums) {
  th.held = turn_of(th);
  th.held_sums = sums;
  th.buffer = th.buffer + 1 == BUFFERS ? 0 : th.buffer + 1;
  th.due = th.due + 1 == KGROUPS ? 0 : th.due + 1;
}
INLINE void collect(const Thread& th) {   // the other warps' sums of the task held
  group_sync<KGROUPS * 32>(1 + th.mg * BUFFERS + (int)(th.held_sums - th.base - PARTIAL) / PARTIAL_BYTES);
}
// Total of the lane's four elements of a tile, rearranged so that rows lie in pairs.
template <int S> INLINE void total(const Thread& th, u32 at, const Task& it, float (&v)[4]) {
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
template <int S> INLINE void release_sums(const Thread& th) {
  if (BUFFERS == 1) group_sync<KGROUPS * 32>(th.mg + 1);   // never in turns
}

// Unit, exchange and output of one tile; a and g are what was read beside it.
template <int S>
INLINE void finish(const Params& p, const Thread& th, const Task& it, int share, u32 sums, const float* a, const float* g, int q,
                   int step, i64 t) {
  constexpr int l = layer(S), WIDE = BACKWARD ? TOTAL : l == DEPTH - 1 ? HIDDEN : MID;
  constexpr int START = !BACKWARD && l == DEPTH - 1 ? 0 : layer_offset(l);
  int tile = first_tile<S>(th) + it.local, n = it.nt * 8 + column_of(th), e = tile * 16 + even_row(th);
  int rows = rows_of(th, q);
  float v[4], y[4];
  total<S>(th, sums, it, v);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float x = v[i] + a[i];
    y[i] = BACKWARD ? x * slope<unit(S)>(g[i]) : activate<unit(S)>(x);
    if (!inside<S>(e + within(i))) y[i] = 0.0f;
  }
  if (n < max(rows, 1) && (BACKWARD || S < DEPTH - 1 || step < (int)p.steps - 1)) {
    u32 words[4];
    split(y[0], y[1], words[0], words[2]);
    split(y[2], y[3], words[1], words[3]);
    u32 at = vector_of<S>(th, q, step) + ((tile * NTILES + it.nt) * 32 + column_of(th) * 4 + th.lane / 8) * ENTRY;
    u32 bar = barrier_of<S>(th.base, q, step);
    int each = up(CLUSTER, share);
#pragma unroll
    for (int d = 0; d < CLUSTER; d++) {
      int to = it.part * each + d;
      if (d < each && (each * share == CLUSTER || to < CLUSTER)) send4(map_rank(at, to), words, map_rank(bar, to));
    }
  }
  if (it.part == 0 && n < rows) {
    float* out = BACKWARD ? p.output : l == DEPTH - 1 ? p.top : p.mid;
    out += ((th.member * p.steps + t) * p.batch + th.row0 + q * ROWS) * WIDE + START;
    int at = n * WIDE + e;
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (inside<S>(e + within(i))) out[at + within(i)] = y[i];
  }
}
template <int S>
INLINE u32 multiply(const Params& p, Thread& th, const u32 (&reg)[NREG], int q, int step, u32 resets) {
  Sums<S> acc;
  zero(acc);
  early<S>(th, reg, acc, q, step);
  resets >>= 2 * NTILES * q;
  if (HAS_RESET && !BACKWARD && S > 0) drop<S>(acc, resets);
  critical<S>(th, reg, acc, q, step);
  if (HAS_RESET && S == 0) drop<S>(acc, resets);
  u32 sums = leave_sums<S>(th, acc);
  rearm<S>(th, q, step);
  return sums;
}
INLINE i64 time_of(const Params& p, int step) { return BACKWARD ? p.steps - 1 - step : step; }

template <int S>
INLINE void stage(const Params& p, Thread& th, const u32 (&reg)[NREG], float (&a)[NFETCH], float (&g)[NFETCH], int step, u32 resets) {
  if (idle<S>(th)) return;
  u32 sums = multiply<S>(p, th, reg, 0, step, resets);
  if (BUFFERS == 2) th.buffer ^= 1;
#pragma unroll
  for (int j = 0; j < per_warp(S); j++) {
    Task it = task<S>(th, j);
    int at = fetched_offset(S) + j * 4;
    if (it.real) finish<S>(p, th, it, share(S, j), sums, a + at, g + at, 0, step, time_of(p, step));
  }
  release_sums<S>(th);
  if (step < (int)p.steps - 1) prefetch<S>(p, th, a, g, 0, time_of(p, step + 1));
}
// In turns: what the task held needs is read before the products of the next one and used after them.
template <int S> INLINE void read_held(const Params& p, const Thread& th, float (&a)[NFETCH], float (&g)[NFETCH], int q, int step) {
  if (th.held >= work(S)) return;
  read<S, false>(p, th, task<S>(th, 0), q, time_of(p, step), a, g);
  if (step < (int)p.steps - 1) read<S, true>(p, th, task<S>(th, 0), q, time_of(p, step + 1), a, g);
}
template <int S> INLINE void finish_held(const Params& p, const Thread& th, const float (&a)[NFETCH], const float (&g)[NFETCH], int q, int step) {
  if (th.held >= work(S)) return;
  collect(th);
  Task it = task<S>(th, 0);
  if (it.real) finish<S>(p, th, it, 1, th.held_sums, a, g, q, step, time_of(p, step));
}
template <int S>
INLINE void turns(const Params& p, Thread& th, const u32 (&reg)[NREG], float (&a)[NFETCH], float (&g)[NFETCH], int step, u32 resets) {
  constexpr int LAST = before(S);   // stage of the task before stream 0; all stages have tiles for the same warps
  int from = S == 0 ? step - 1 : step;
  if (idle<S>(th)) return;
#pragma unroll 1
  for (int q = 0; q < STREAMS; q++) {
    if (q > 0) read_held<S>(p, th, a, g, q - 1, step);
    else if (from >= 0) read_held<LAST>(p, th, a, g, STREAMS - 1, from);
    u32 sums = multiply<S>(p, th, reg, q, step, resets);
    if (q > 0) finish_held<S>(p, th, a, g, q - 1, step);
    else if (from >= 0) finish_held<LAST>(p, th, a, g, STREAMS - 1, from);
    hold(th, sums);
  }
}
template <int S>
INLINE void stages(const Params& p, Thread& th, const u32 (&reg)[NREG], float (&a)[NFETCH], float (&g)[NFETCH], int step, u32 resets) {
  if constexpr (S < DEPTH) {
    if constexpr (TURNS) turns<S>(p, th, reg, a, g, step, resets);
    else stage<S>(p, th, reg, a, g, step, resets);
    stages<S + 1>(p, th, reg, a, g, step, resets);
  }
}

template <int S> INLINE void set_up(const Params& p, const Thread& th) {
  if constexpr (S < DEPTH) {
    for (int i = threadIdx.x; i < STREAMS * copies(S) * tiles(S) * NTILES * 32; i += THREADS) {
      int lane = i % 32, nt = i / 32 % NTILES, tile = i / 32 / NTILES % tiles(S), copy = i / 32 / NTILES / tiles(S) % copies(S);
      int q = i / 32 / NTILES / tiles(S) / copies(S), n = nt * 8 + lane / 4, e = tile * 16 + lane % 4 * 2;
      float y[4];
#pragma unroll
      for (int w = 0; w < 4; w++) {
        int k = e + w % 2 + w / 2 * 8;
        bool h0 = !BACKWARD && S == DEPTH - 1 && copy == copies(S) - 1 && n < rows_of(th, q) && k < HIDDEN;
        y[w] = h0 ? p.initial[th.member * p.initial_member + (i64)(th.row0 + q * ROWS + n) * HIDDEN + k] : 0.0f;
      }
      u32 at = th.base + vector_offset(S) + i * ENTRY, w[4];
      split(y[0], y[1], w[0], w[2]);
      split(y[2], y[3], w[1], w[3]);
      store_words(at, w[0], w[1], w[2], w[3]);
    }
    if (threadIdx.x == 0)
      for (int i = 0; i < 2 * STREAMS; i++) {
        u32 bar = barrier_of<S>(th.base, i / 2, i % 2);
        barrier_init(bar);
        barrier_expect(bar, arriving<S>(th, i / 2));
      }
    set_up<S + 1>(p, th);
  }
}
// dh0 of stream q: the sums that would enter the step before the first.
INLINE void finish_backward(const Params& p, Thread& th, const u32 (&reg)[NREG], int q) {
  if (idle<0>(th)) return;
  Sums<0> acc;
  zero(acc);
  early<0>(th, reg, acc, q, (int)p.steps);
  critical<0>(th, reg, acc, q, (int)p.steps);
  if (HAS_RESET) drop<0>(acc, load_resets(p, th, 0) >> 2 * NTILES * q);
  u32 sums = leave_sums<0>(th, acc);
  if (TURNS) {
    hold(th, sums);
    if (th.held < work(0)) collect(th);
  }
#pragma unroll
  for (int j = 0; j < per_warp(0); j++) {
    Task it = task<0>(th, j);
    if (!it.real) continue;
    int n = it.nt * 8 + column_of(th), e = (first_tile<0>(th) + it.local) * 16 + even_row(th);
    float v[4];
    total<0>(th, sums, it, v);
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (it.part == 0 && n < rows_of(th, q) && inside<0>(e + within(i)))
        p.output_initial[(th.member * p.batch + th.row0 + q * ROWS + n) * HIDDEN + e + within(i)] = v[i];
  }
  release_sums<0>(th);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) transition(const __grid_constant__ Params p) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) unsigned char memory[];
  Thread th;
  th.base = shared_address(memory);
  th.rank = cluster_rank();
  int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);   // so that the compiler knows it is one per warp
  th.lane = threadIdx.x % 32;
  th.mg = warp / KGROUPS;
  th.kg = warp % KGROUPS;
  i64 cluster = blockIdx.x / CLUSTER;
  th.member = cluster / p.groups;
  th.row0 = (int)(cluster % p.groups) * (ROWS * STREAMS);
  th.left = (int)p.batch - th.row0;
  th.buffer = th.due = th.held = 0;
  u32 reg[NREG];
  load_matrices<0>(p, th, reg);
  set_up<0>(p, th);
  barrier_fence();
  cluster_sync();
  float a[NFETCH], g[NFETCH];
  prefetch_all<0>(p, th, a, g, BACKWARD ? p.steps - 1 : 0);
  u32 resets = 0, coming = 0;
  if (HAS_RESET && !BACKWARD) coming = load_resets(p, th, 0);
  for (int step = 0; step < (int)p.steps; step++) {
    if (HAS_RESET) {
      resets = coming;
      i64 t = BACKWARD ? p.steps - 1 - step : step + 1;   // backward: step s+1 drops what reset[t] cut
      if (BACKWARD || t < p.steps) coming = load_resets(p, th, t);
    }
    stages<0>(p, th, reg, a, g, step, resets);
  }
  if (TURNS && !idle<DEPTH - 1>(th)) {
    read_held<DEPTH - 1>(p, th, a, g, STREAMS - 1, (int)p.steps - 1);
    finish_held<DEPTH - 1>(p, th, a, g, STREAMS - 1, (int)p.steps - 1);
  }
  if (BACKWARD)
#pragma unroll 1
    for (int q = 0; q < STREAMS; q++) finish_backward(p, th, reg, q);
  cluster_sync();
#endif
}
