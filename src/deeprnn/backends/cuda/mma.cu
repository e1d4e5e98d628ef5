// The transition on the tensor cores, for batches: the same ring of stages as cluster.cu, products by mma.sync.
//
// fp32 numbers are held as two bf16 parts (16 bits of mantissa) and a product is three: high·high, high·low and
// low·high, summed in fp32; with BF16 the weights have only their high part, the state keeps both. Vectors are cut into tiles of 16 elements, dealt to the
// blocks of the cluster; a block's warps are MGROUPS x KGROUPS: a warp owns output tiles mg, mg + MGROUPS, ...
// and multiplies the inner tiles kg, kg + KGROUPS, ...; its group of KGROUPS warps adds up through shared memory.
// A state vector lies in shared memory in the order in which mma.sync wants its second operand, so that a lane
// reads 16 bytes per tile, and a lane of the epilogue sends 16 bytes per tile.
//
// Macros: DEPTH SIZES UNITS MATRICES MAT_STAGE MAT_SOURCE MAT_REGS CLUSTER MGROUPS KGROUPS NTILES ROWS
//         BACKWARD HAS_RESET HAS_GRAD_MID BF16 BUFFERS
#include "common.cuh"
#define CONST constexpr __host__ __device__
CONST int size(int s) { constexpr int list[] = {SIZES}; return list[s]; }
CONST int unit(int s) { constexpr int list[] = {UNITS}; return list[s]; }
CONST int stage_of(int j) { constexpr int list[] = {MAT_STAGE}; return list[j]; }
CONST int source_of(int j) { constexpr int list[] = {MAT_SOURCE}; return list[j]; }
CONST int kept(int j) { constexpr int list[] = {MAT_REGS}; return list[j]; }   // inner rounds held in registers

constexpr int WARPS = MGROUPS * KGROUPS, THREADS = 32 * WARPS;
constexpr int PARTS = BF16 ? 1 : 2;                                // of a weight
constexpr int SHARE = NTILES == 1 ? KGROUPS : (NTILES == 2 && KGROUPS > 1 ? KGROUPS / 2 : 1);  // warps that send one tile
CONST int up(int a, int b) { return (a + b - 1) / b; }
constexpr int PER_WARP = SHARE > 1 ? 1 : up(NTILES, KGROUPS);      // batch tiles that a warp finishes
constexpr int KINDS = NTILES > 2 ? 1 : 3;                 // sums kept apart, so that few tiles still overlap
constexpr int ENTRY = 16;                                          // bytes of a lane in a state tile: two parts
CONST int tiles(int s) { return up(size(s), 16); }
CONST int most(int s) { return up(tiles(s), CLUSTER); }            // output tiles of a block
CONST int mine(int s) { return up(most(s), MGROUPS); }             // output tiles of a warp
CONST int rounds(int j) { return up(tiles(source_of(j)), KGROUPS); }
CONST int before(int s) { return s == 0 ? DEPTH - 1 : s - 1; }
// A vector that is read as a shortcut may still be read when its successor arrives: it needs two copies.
CONST int copies(int s) {
  for (int j = 0; j < MATRICES; j++)
    if (source_of(j) == s && before(stage_of(j)) != s) return 2;
  return DEPTH == 1 ? 2 : 1;
}
CONST int vector_bytes(int s) { return tiles(s) * NTILES * 32 * ENTRY; }
CONST int vector_offset(int s) {
  int n = up(16 * DEPTH, 128) * 128;
  for (int i = 0; i < s; i++) n += copies(i) * vector_bytes(i);
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
CONST int fetched(int s) { return mine(s) * PER_WARP * 4; }
CONST int fetched_offset(int s) { int n = 0; for (int i = 0; i < s; i++) n += fetched(i); return n; }
CONST int layer(int s) { return BACKWARD ? DEPTH - 1 - s : s; }
CONST int layer_size(int l) { return size(BACKWARD ? DEPTH - 1 - l : l); }
CONST int layer_offset(int l) { int n = 0; for (int i = 0; i < l; i++) n += layer_size(i); return n; }
constexpr int TOTAL = layer_offset(DEPTH), HIDDEN = layer_size(DEPTH - 1), MID = TOTAL - HIDDEN;
constexpr int NREG = reg_offset(MATRICES) > 0 ? reg_offset(MATRICES) : 1;
constexpr int NFETCH = fetched_offset(DEPTH);

struct Matrix { const float* data; i64 member, row, column; };
struct Params {  // the same layout as in cluster.cu
  Matrix matrix[MATRICES];
  const float* input;
  const float* input_mid;
  float* top;
  float* mid;
  const float* initial;
  float* output;
  float* output_initial;
  const u8* reset;
  i64 input_member, initial_member, reset_member;
  i64 steps, batch, groups;
};
struct Thread {
  u32 base, rank;
  int lane, mg, kg;
  i64 member;
  int row0, rows;
};
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

template <int J, int S> INLINE void product(const Thread& th, const u32 (&reg)[NREG], Sums<S>& acc, int step) {
  constexpr int Q = source_of(J), M = mine(S), KEPT = kept(J), ALL = rounds(J);
  constexpr int REG = reg_offset(J), SHARED = weight_offset(J), VECTOR = vector_offset(Q), COPIES = copies(Q);
  u32 vec = th.base + VECTOR + (COPIES == 2 ? step & 1 : 0) * vector_bytes(Q) + th.lane * ENTRY;
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
        load_words(b, vec + (k * NTILES + n) * (32 * ENTRY));
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

template <int Q> INLINE u32 barrier_of(u32 base, int step) { return base + (Q * 2 + (step & 1)) * 8; }
template <int Q> INLINE void await(const Thread& th, int step) {
  if (step >= 0) barrier_wait(barrier_of<Q>(th.base, step), (step >> 1) & 1);
}
template <int S> INLINE void rearm(const Thread& th, int step) {
  int from = S == 0 ? step - 1 : step;
  if (threadIdx.x == 0 && from >= 0) barrier_expect(barrier_of<before(S)>(th.base, from), vector_bytes(before(S)));
}
template <int S, int J = 0> INLINE void early(const Thread& th, const u32 (&reg)[NREG], Sums<S>& acc, int step) {
  if constexpr (J < MATRICES) {
    if constexpr (stage_of(J) == S && source_of(J) != before(S)) {
      int from = source_of(J) >= S ? step - 1 : step;
      if (!idle<S>(th)) {
        await<source_of(J)>(th, from);
        product<J>(th, reg, acc, from);
      }
    }
    early<S, J + 1>(th, reg, acc, step);
  }
}
template <int S, int J = 0> INLINE void critical(const Thread& th, const u32 (&reg)[NREG], Sums<S>& acc, int step) {
  if constexpr (J < MATRICES) {
    if constexpr (stage_of(J) == S && source_of(J) == before(S)) {
      int from = S == 0 ? step - 1 : step;
      await<source_of(J)>(th, from);
      product<J>(th, reg, acc, from);
    }
    critical<S, J + 1>(th, reg, acc, step);
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
INLINE u32 load_resets(const Params& p, const Thread& th, i64 t) {
  u32 bits = 0;
#pragma unroll
  for (int i = 0; i < 2 * NTILES; i++) {
    int n = i / 2 * 8 + th.lane % 4 * 2 + i % 2;
    if (n < th.rows && p.reset[th.member * p.reset_member + t * p.batch + th.row0 + n]) bits |= 1u << i;
  }
  return bits;
}

// What lane (g, c) finishes: rows r0, r0+1, r0+8, r0+9 of the tile, r0 = g rounded down to even; column 2c + g % 2.
INLINE int even_row(const Thread& th) { return th.lane / 4 & ~1; }
INLINE int column_of(const Thread& th) { return th.lane % 4 * 2 + (th.lane / 4 & 1); }
template <int S> INLINE int tile_n(const Thread& th, int j) { return SHARE > 1 ? th.kg % NTILES : th.kg + j * KGROUPS; }

template <int S> INLINE void prefetch(const Params& p, const Thread& th, float (&a)[NFETCH], float (&g)[NFETCH], i64 t) {
  constexpr int l = layer(S);
#pragma unroll
  for (int m = 0; m < mine(S); m++)
#pragma unroll
    for (int j = 0; j < PER_WARP; j++) {
      int tile = m * MGROUPS + th.mg, n = tile_n<S>(th, j) * 8 + column_of(th);
      bool real = tile < tile_count<S>(th) && n < th.rows;
      i64 b = t * p.batch + th.row0 + n, at = th.member * p.steps * p.batch + b;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        int e = (first_tile<S>(th) + tile) * 16 + even_row(th) + i % 2 + i / 2 * 8;
        float x = 0.0f, y = 0.0f;
        if (real && e < size(S)) {
          if (!BACKWARD) {
            x = p.input[th.member * p.input_member + b * TOTAL + layer_offset(l) + e];
          } else if (l == DEPTH - 1) {
            x = p.input[at * HIDDEN + e];
            y = p.top[at * HIDDEN + e];
          } else {
            if (HAS_GRAD_MID) x = p.input_mid[at * MID + layer_offset(l) + e];
            y = p.mid[at * MID + layer_offset(l) + e];
          }
        }
        a[fetched_offset(S) + (m * PER_WARP + j) * 4 + i] = x;
        g[fetched_offset(S) + (m * PER_WARP + j) * 4 + i] = y;
      }
    }
}
template <int S> INLINE void prefetch_all(const Params& p, const Thread& th, float (&a)[NFETCH], float (&g)[NFETCH], i64 t) {
  if constexpr (S < DEPTH) {
    prefetch<S>(p, th, a, g, t);
    prefetch_all<S + 1>(p, th, a, g, t);
  }
}

// Leave the warp's sums in shared memory and wait for the group's other warps.
template <int S> INLINE u32 leave_sums(const Thread& th, Sums<S>& acc, int turn) {
  u32 at = th.base + PARTIAL + (BUFFERS == 2 ? turn & 1 : 0) * PARTIAL_BYTES;
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
  group_sync<KGROUPS * 32>(th.mg + 1);
  return at;
}
// Total of the lane's four elements of (tile m, batch tile n), rearranged so that rows lie in pairs.
template <int S> INLINE void total(const Thread& th, u32 at, int m, int n, float (&v)[4]) {
  float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
  for (int k = 0; k < KGROUPS; k++) {
    float x[4];
    load_shared<4>(x, at + ((((m * MGROUPS + th.mg) * NTILES + n) * KGROUPS + k) * 32 + th.lane) * 16);
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
  if (BUFFERS == 1) group_sync<KGROUPS * 32>(th.mg + 1);
}

template <int S>
INLINE void stage(const Params& p, const Thread& th, const u32 (&reg)[NREG], float (&a)[NFETCH], float (&g)[NFETCH],
                  Sums<S>& acc, int step, u32 resets) {
  constexpr int l = layer(S), VECTOR = vector_offset(S), COPIES = copies(S);
  if (idle<S>(th)) return;
  if (HAS_RESET && !BACKWARD && S > 0) drop<S>(acc, resets);
  critical<S>(th, reg, acc, step);
  if (HAS_RESET && S == 0) drop<S>(acc, resets);
  u32 sums = leave_sums<S>(th, acc, step * DEPTH + S);
  i64 t = BACKWARD ? p.steps - 1 - step : step;
  bool last = step == p.steps - 1;
#pragma unroll
  for (int m = 0; m < mine(S); m++)
#pragma unroll
    for (int j = 0; j < PER_WARP; j++) {
      int local = m * MGROUPS + th.mg, nt = tile_n<S>(th, j);
      if (local >= tile_count<S>(th) || nt >= NTILES) continue;
      int tile = first_tile<S>(th) + local, n = nt * 8 + column_of(th), row = tile * 16 + even_row(th);
      float v[4], y[4];
      total<S>(th, sums, m, nt, v);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        int f = fetched_offset(S) + (m * PER_WARP + j) * 4 + i;
        float x = v[i] + a[f];
        y[i] = BACKWARD ? x * slope<unit(S)>(g[f]) : activate<unit(S)>(x);
        if (n >= th.rows || row + i % 2 + i / 2 * 8 >= size(S)) y[i] = 0.0f;
      }
      if (BACKWARD || S < DEPTH - 1 || !last) {
        u32 words[4];
        split(y[0], y[1], words[0], words[2]);
        split(y[2], y[3], words[1], words[3]);
        u32 at = th.base + VECTOR + (COPIES == 2 ? step & 1 : 0) * vector_bytes(S) +
                 ((tile * NTILES + nt) * 32 + column_of(th) * 4 + th.lane / 8) * ENTRY;
        u32 bar = barrier_of<S>(th.base, step);
        constexpr int EACH = up(CLUSTER, SHARE);
        int share = SHARE > 1 ? th.kg / NTILES : 0;
#pragma unroll
        for (int d = 0; d < EACH; d++) {
          int to = share * EACH + d;
          if (EACH * SHARE == CLUSTER || to < CLUSTER) send4(map_rank(at, to), words, map_rank(bar, to));
        }
      }
      bool first = SHARE == 1 || th.kg / NTILES == 0;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        int e = row + i % 2 + i / 2 * 8;
        if (first && n < th.rows && e < size(S)) {
          i64 b = (th.member * p.steps + t) * p.batch + th.row0 + n;
          if (BACKWARD) p.output[b * TOTAL + layer_offset(l) + e] = y[i];
          else if (l == DEPTH - 1) p.top[b * HIDDEN + e] = y[i];
          else p.mid[b * MID + layer_offset(l) + e] = y[i];
        }
      }
    }
  release_sums<S>(th);
  rearm<S>(th, step);
  if (!last) prefetch<S>(p, th, a, g, BACKWARD ? t - 1 : t + 1);
}
template <int S>
INLINE void stages(const Params& p, const Thread& th, const u32 (&reg)[NREG], float (&a)[NFETCH], float (&g)[NFETCH],
                   Sums<S>& acc, Sums<0>& next, int step, u32 resets) {
  stage<S>(p, th, reg, a, g, acc, step, resets);
  if constexpr (S + 1 < DEPTH) {
    Sums<S + 1> following;
    zero(following);
    early<S + 1>(th, reg, following, step);
    stages<S + 1>(p, th, reg, a, g, following, next, step, resets);
  } else {
    zero(next);
    early<0>(th, reg, next, step + 1);
  }
}

template <int S> INLINE void set_up(const Params& p, const Thread& th) {
  if constexpr (S < DEPTH) {
    for (int i = threadIdx.x; i < copies(S) * tiles(S) * NTILES * 32; i += THREADS) {
      int lane = i % 32, nt = i / 32 % NTILES, tile = i / 32 / NTILES % tiles(S), copy = i / 32 / NTILES / tiles(S);
      int n = nt * 8 + lane / 4, e = tile * 16 + lane % 4 * 2;
      float y[4];
#pragma unroll
      for (int q = 0; q < 4; q++) {
        int k = e + q % 2 + q / 2 * 8;
        bool h0 = !BACKWARD && S == DEPTH - 1 && copy == copies(S) - 1 && n < th.rows && k < HIDDEN;
        y[q] = h0 ? p.initial[th.member * p.initial_member + (i64)(th.row0 + n) * HIDDEN + k] : 0.0f;
      }
      u32 at = th.base + vector_offset(S) + i * ENTRY, w[4];
      split(y[0], y[1], w[0], w[2]);
      split(y[2], y[3], w[1], w[3]);
      store_words(at, w[0], w[1], w[2], w[3]);
    }
    if (threadIdx.x == 0)
      for (int i = 0; i < 2; i++) {
        barrier_init(th.base + (S * 2 + i) * 8);
        barrier_expect(th.base + (S * 2 + i) * 8, vector_bytes(S));
      }
    set_up<S + 1>(p, th);
  }
}
INLINE void finish_backward(const Params& p, const Thread& th, const u32 (&reg)[NREG], Sums<0>& acc) {
  if (idle<0>(th)) return;
  critical<0>(th, reg, acc, (int)p.steps);
  if (HAS_RESET) drop<0>(acc, load_resets(p, th, 0));
  u32 sums = leave_sums<0>(th, acc, (int)p.steps * DEPTH);
#pragma unroll
  for (int m = 0; m < mine(0); m++)
#pragma unroll
    for (int j = 0; j < PER_WARP; j++) {
      int local = m * MGROUPS + th.mg, nt = tile_n<0>(th, j);
      if (local >= tile_count<0>(th) || nt >= NTILES) continue;
      int n = nt * 8 + column_of(th);
      float v[4];
      total<0>(th, sums, m, nt, v);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        int e = (first_tile<0>(th) + local) * 16 + even_row(th) + i % 2 + i / 2 * 8;
        if (n < th.rows && e < HIDDEN) p.output_initial[(th.member * p.batch + th.row0 + n) * HIDDEN + e] = v[i];
      }
    }
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
  th.row0 = (int)(cluster % p.groups) * ROWS;
  th.rows = min(ROWS, (int)p.batch - th.row0);
  u32 reg[NREG];
  load_matrices<0>(p, th, reg);
  set_up<0>(p, th);
  barrier_fence();
  cluster_sync();
  float a[NFETCH], g[NFETCH];
  prefetch_all<0>(p, th, a, g, BACKWARD ? p.steps - 1 : 0);
  Sums<0> acc, next;
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
    acc = next;
  }
  if (BACKWARD) finish_backward(p, th, reg, acc);
  cluster_sync();
#endif
}
