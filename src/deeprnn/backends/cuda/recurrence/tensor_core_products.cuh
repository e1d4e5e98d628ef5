// tensor_core.cu: a thread, ranges of numbers, weights on their way in, products and the barriers they wait for. Comes after
// tensor_core_layout.cuh.
#pragma once
struct Thread {
  u32 base, rank;
  int lane;
  int mg, kg;       // of a multiplying warp
  int number;       // of a finisher; those that compute scales follow
  i64 member;
  u8* exchange;     // the cluster's part of the buffer in global memory
  int row0, left;   // first batch row of this cluster, and how many there are from it on
};
// Batch rows of row group q that exist (perhaps none), and those that are sent: at least one, so that a vector
// always has bytes to wait for.
INLINE int rows_of(const Thread& th, int q) { return min(ROWS, th.left - q * ROWS); }
INLINE int sent_of(const Thread& th, int q) { return max(rows_of(th, q), 1); }
template <int S> INLINE u32 vector_of(const Thread& th, int q, int step) {
  return th.base + fixed<vector_offset(S)> + (q * copies(S) + (copies(S) == 2 ? step & 1 : 0)) * fixed<vector_bytes(S)>;
}
template <int S> struct Sums { float d[rows(S)][NTILES][KINDS][4]; };   // of unit tile m, gate g: m * gates + g

template <int S> INLINE int first_tile(const Thread& th) {
  constexpr int base = tiles(S) / CLUSTER, extra = tiles(S) % CLUSTER;
  return (int)th.rank * base + min((int)th.rank, extra);
}
template <int S> INLINE int tile_count(const Thread& th) {
  constexpr int base = tiles(S) / CLUSTER, extra = tiles(S) % CLUSTER;
  return base + ((int)th.rank < extra ? 1 : 0);
}
template <int S> INLINE bool idle(const Thread& th) { return th.mg >= tile_count<S>(th); }

// Range of batch rows with one scale. fp16 ends at 2^16 and tells numbers below 2^-14 apart by 2^-24 only, so that a number of two parts has 22 bits of
// mantissa while its vector's largest lies between, say, 2^-2 and 2^15. Weights are scaled by the largest sum of a row.
// Outputs of bounded units need no more than a constant. Gradients and unbounded outputs can be anything: each batch row
// of a vector has a scale of its own, by a bound that every block computes alike: how large the vectors were that it
// comes from (the multiplying warps look, every block has all of them), by how much products can be larger than those,
// and what is added (`max_abs_scan.cu` has looked at it beforehand). A scale is wanted with the sums: warps that do nothing
// else compute it a stage ahead, so that the last product counts with a bound too. Together such bounds are some 2^10 too
// large, and there is room for it.
template <int S> INLINE float factor(const Thread& th) {
  float x[1];
  load_shared<1>(x, th.base + FACTORS + 4 * S);
  return x[0];
}
// What a warp adds up of a vector must stay within fp16 too: by so many powers of two numbers stay below its end.
constexpr bool ADDED = ROW_GROUPS <= 2;
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
INLINE u32 in_mosts(const Thread& th, int s, int q, int step, int n) {
  return th.base + LARGEST + (((q * DEPTH + s) * 2 + (step & 1)) * COLUMNS + n) * 4;
}
// The scale of batch row n of vector S. Before the first step it depends on what is given.
template <int S> INLINE float scale_of(const Thread& th, int q, int step, int n) {
  if (!SCALED && !BY_FIRST_STATE && step >= 0) return STEADY;
  if (BY_FIRST_STATE) step = -1;   // one scale a row, for good
  float x[1];
  load_shared<1>(x, in_scales<S>(th, q, step, n) + 4);
  return x[0];
}
template <int S> INLINE void set_scale(const Thread& th, int q, int step, int n, float of_source, float of_sent) {
  u32 at = in_scales<S>(th, q, step, n);
  store_shared(at, inverse(of_source));
  store_shared(at + 4, of_sent);
}
// Of the two batch rows of tile n that a lane of a multiplying warp has sums of.
template <int S> INLINE void load_pair(const Thread& th, float (&x)[2], int q, int step, int n) {
  x[0] = x[1] = STEADY;
  if (!SCALED && !BY_FIRST_STATE && step >= 0) return;
  if (BY_FIRST_STATE) step = -1;
  float w[4];
  load_shared<4>(w, in_scales<S>(th, q, step, n * 8 + th.lane % 4 * 2));
  x[0] = w[1], x[1] = w[3];
}
// A bound may lie beyond fp32's end where the numbers do not: they are at most its largest.
INLINE float scale_by(float most) { return power(shift_of(min(__float_as_uint(most), 0x7f7fffffu)) - margin()); }

// Tiles of matrix J in a row, KGROUPS apart: the lane's eight places in the next one are moved on by one addition each.
// Computed anew for every number, they took most of the time in which a launch begins. Backward a vector has a part for
// each number a unit, and each part a matrix of its own.
struct Walk {
  const float* at[8];   // element i and the one beside it: 2i, 2i + 1
  i64 ahead;
  float scale;
  int row, k, part;     // k: tile of the part
  bool real;
};
template <int J> INLINE void enter_part(const Params& p, const Thread& th, Walk& w, int gate) {
  const MatrixSlice& piece = p.matrix[J][BACKWARD ? min(w.part, PIECES - 1) : gate];
  i64 rs = piece.row, cs = piece.column;
  const float* first = piece.data + (th.member * piece.member + w.row * rs + (w.k * 16 + th.lane % 4 * 2) * cs);
#pragma unroll
  for (int i = 0; i < 8; i++) w.at[i] = first + (i / 2 % 2 * 8) * rs + (i / 4 * 8 + i % 2) * cs;
  w.ahead = KGROUPS * 16 * cs;
  w.real = w.real && piece.data;
}
template <int J> INLINE Walk walk(const Params& p, const Thread& th, int m, int gate) {
  constexpr int S = stage_of(J), Q = source_of(J);
  Walk w;
  w.row = (first_tile<S>(th) + m) * 16 + th.lane / 4;
  w.part = th.kg / tiles(Q);
  w.k = th.kg % tiles(Q);
  w.real = m < tile_count<S>(th);
  w.scale = factor<S>(th);
  enter_part<J>(p, th, w, gate);
  return w;
}
// The next 16 x 16 tile as the lane's registers: two fp16 parts of four words. The order of inner elements is that of a
// vector's tile.
template <int J> INLINE void fragment(const Params& p, const Thread& th, Walk& w, int gate, u32 (&out)[PARTS][4]) {
  constexpr int S = stage_of(J), Q = source_of(J);
  constexpr bool WHOLE = size(S) % 16 == 0 && size(Q) % 16 == 0;
  int column = w.k * 16 + th.lane % 4 * 2;
  bool real = w.real && (sent(Q) > 1 ? w.part < sent(Q) : w.k < tiles(Q));   // in the last round not every warp has a tile
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
  if constexpr (sent(Q) > 1)
    if (w.k >= tiles(Q)) {
      w.part += w.k / tiles(Q);
      w.k %= tiles(Q);
      w.real = first_tile<S>(th) * 16 + th.lane / 4 <= w.row && w.row / 16 - first_tile<S>(th) < tile_count<S>(th);
      enter_part<J>(p, th, w, gate);
    }
}
template <int J> INLINE u32 weight_at(const Thread& th, int i, int m, int part) {
  int n = sharers(J, i);
  return th.base + fixed<weight_offset(J)> + round_offset(J, i) + (((m * PARTS + part) * MGROUPS + th.mg) * n + th.kg) * 512 + th.lane * 16;
}
template <int J> INLINE void load_matrices(const Params& p, const Thread& th, u32 (&reg)[NREG]) {
  if constexpr (J < MATRICES) {
    constexpr int G = gates(stage_of(J)), M = rows(stage_of(J)), RESIDENT = in_registers(J), ALL = rounds(J), REG = reg_offset(J);
    u32 part[PARTS][4];
#pragma unroll
    for (int m = 0; m < M; m++) {
      Walk w = walk<J>(p, th, m / G * MGROUPS + th.mg, m % G);
#pragma unroll
      for (int i = 0; i < RESIDENT; i++) {
        fragment<J>(p, th, w, m % G, part);
#pragma unroll
        for (int q = 0; q < PARTS; q++)
#pragma unroll
          for (int n = 0; n < 4; n++) reg[REG + ((i * M + m) * PARTS + q) * 4 + n] = part[q][n];
      }
#pragma unroll 2
      for (int i = RESIDENT; i < ALL; i++) {
        fragment<J>(p, th, w, m % G, part);
#pragma unroll
        for (int q = 0; q < PARTS; q++)
          if (th.kg < sharers(J, i))
            store_words(weight_at<J>(th, i, m, q), part[q][0], part[q][1], part[q][2], part[q][3]);
      }
    }
    load_matrices<J + 1>(p, th, reg);
  }
}

template <int J, int S> INLINE void load_weights(const Thread& th, const u32 (&reg)[NREG], int i, int m, u32 (&a)[PARTS][4]) {
#pragma unroll
  for (int q = 0; q < PARTS; q++) {
    if (i < in_registers(J)) {
#pragma unroll
      for (int w = 0; w < 4; w++) a[q][w] = reg[fixed<reg_offset(J)> + ((i * rows(S) + m) * PARTS + q) * 4 + w];
    } else {
      load_words(a[q], weight_at<J>(th, i, m, q));
    }
  }
}
// The products of TURNS inner tiles, from round i on, with a scale for each: sums of a tile of their own go to the others in
// fp32. A few sums at a time, one part after the other, so that those which wait for each other are apart.
template <int J, int S, int TURNS>
INLINE void multiply_tiles(const Thread& th, const u32 (&reg)[NREG], Sums<S>& acc, int i, u32 vec, u32 tail, u32 scales) {
  constexpr int M = rows(S), GROUP = ceil_div(4, M * TURNS) < NTILES ? ceil_div(4, M * TURNS) : NTILES;
  u32 a[TURNS][M][PARTS][4];
#pragma unroll
  for (int t = 0; t < TURNS; t++)
#pragma unroll
    for (int m = 0; m < M; m++) load_weights<J, S>(th, reg, i + t, m, a[t][m]);
#pragma unroll
  for (int first = 0; first < NTILES; first += GROUP) {
    u32 b[TURNS][GROUP][4];
    float back[TURNS][GROUP][2], sum[TURNS][M][GROUP][4];
#pragma unroll
    for (int t = 0; t < TURNS; t++)
#pragma unroll
      for (int n = 0; n < GROUP; n++) {
        int at = (t * KGROUPS * NTILES + first + n) * TILE_BYTES;
        if (first + n >= NTILES) continue;
        load_words(b[t][n], (first + n == NTILES - 1 ? tail : vec) + at);
        load_shared<2>(back[t][n], scales + at);
      }
#pragma unroll
    for (int part = PARTS - 1; part >= -1; part--)   // low parts of weights; those of the vector; neither
#pragma unroll
      for (int t = 0; t < TURNS; t++)
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
          for (int n = 0; n < GROUP; n++) {
            u32(&w)[4] = a[t][m][part > 0 ? part : 0];
            u32(&x)[4] = b[t][n];
            if (first + n >= NTILES) continue;
            if (part == PARTS - 1) multiply_first(sum[t][m][n], w, x[part == 0 ? 2 : 0], x[part == 0 ? 3 : 1]);
            else multiply_add(sum[t][m][n], w, x[part == 0 ? 2 : 0], x[part == 0 ? 3 : 1]);
          }
#pragma unroll
    for (int t = 0; t < TURNS; t++)
#pragma unroll
      for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < GROUP; n++)
#pragma unroll
          for (int c = 0; c < 4; c++)
            if (first + n < NTILES) {
              float& total = acc.d[m][first + n][0][c];
              total = fmaf(sum[t][m][n][c], back[t][n][c % 2], total);
            }
  }
}
// All rounds of a matrix so, as many at once as leave enough sums apart.
template <int J, int S, int I = 0>
INLINE void multiply_rounds(const Thread& th, const u32 (&reg)[NREG], Sums<S>& acc, u32 vec, u32 tail, u32 scales) {
  constexpr int Q = source_of(J), ALL = rounds(J), WANTED = ceil_div(4, rows(S) * NTILES);
  constexpr bool EVEN = ALL * KGROUPS == vector_tiles(Q);
  constexpr int LEFT = (EVEN ? ALL : ALL - 1) - I, TURNS = LEFT < 1 ? 1 : LEFT < WANTED ? LEFT : WANTED;
  if constexpr (I < ALL) {
    constexpr int AT = I * KGROUPS * NTILES * TILE_BYTES;
    if (LEFT > 0 || I * KGROUPS + th.kg < vector_tiles(Q))
      multiply_tiles<J, S, TURNS>(th, reg, acc, I, vec + AT, tail + AT, scales + AT);
    multiply_rounds<J, S, I + TURNS>(th, reg, acc, vec, tail, scales);
  }
}

// `seen` becomes something that none of the magnitudes which the lane reads exceeds, where it is wanted: the largest of
// them, or their sum. That is twice as many instructions, but none that others wait for: better where one row group or two
// are a chain, worse where the multiplying warps are always busy.
template <int J, bool LOOK, int S>
INLINE void product(const Thread& th, const u32 (&reg)[NREG], Sums<S>& acc, int q, int step, u32 (&seen)[NTILES]) {
  constexpr int Q = source_of(J), M = rows(S), ALL = rounds(J);
  u32 vec = vector_of<Q>(th, q, step) + SCALE_BYTES + th.lane * LANE_BYTES;
  u32 tail = vec - max(th.lane / 4 - (TAIL - 1), 0) * (4 * LANE_BYTES);   // the same for the last tile
  if constexpr (TILE_SCALES) {
    u32 mine = th.kg * NTILES * TILE_BYTES;
    multiply_rounds<J, S>(th, reg, acc, vec + mine, tail + mine, vec - SCALE_BYTES - th.lane * LANE_BYTES + th.lane % 4 * 8 + mine);
    return;
  }
#pragma unroll
  for (int i = 0; i < ALL; i++) {
    int k = i * KGROUPS + th.kg;
    if (i < ALL - 1 || ALL * KGROUPS == vector_tiles(Q) || k < vector_tiles(Q)) {
      u32 a[M][PARTS][4];
#pragma unroll
      for (int m = 0; m < M; m++) load_weights<J, S>(th, reg, i, m, a[m]);
#pragma unroll
      for (int n = 0; n < NTILES; n++) {
        u32 b[4];
        load_words(b, (n == NTILES - 1 ? tail : vec) + (k * NTILES + n) * TILE_BYTES);
        if constexpr (LOOK && ADDED) seen[n] = plus_magnitudes(seen[n], b[0], b[1]);
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
// The sums of row group q are in their place: every multiplying warp arrives.
INLINE u32 ready_of(u32 base, int q) { return base + (ROW_GROUPS * DEPTH * 2 + q) * 8; }
// Bytes of so many batch rows of tiles, with all eight scales of each, and of a vector that arrive in a step: every block of
// the cluster serves the same batch rows.
INLINE u32 bytes_of(int rows) { return rows * (4 * LANE_BYTES) + ceil_div(rows, 8) * SCALE_BYTES; }
template <int S> INLINE u32 arriving(const Thread& th, int q) { return vector_tiles(S) * bytes_of(sent_of(th, q)); }
// By a finisher, when all warps have the vector: long before any block can send the one of two steps on.
template <int S> INLINE void rearm(const Thread& th, int q, int step) {
  int from = S == 0 ? step - 1 : step;
  if (th.number % AT_ONCE == 0 && th.lane == 0 && from >= 0)
    barrier_expect(barrier_of<before(S)>(th.base, q, from), arriving<before(S)>(th, q));
}
CONST bool is_early(int j, int s) { return stage_of(j) == s && !is_critical(j); }
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
      for (int m = 0; m < rows(S); m++)
#pragma unroll
        for (int k = 0; k < KINDS; k++) {
          acc.d[m][n][k][c] *= ratio;
          acc.d[m][n][k][2 + c] *= ratio;
        }
    }
  }
}
// Products of stage S with vectors that are here before the one it waits for: of the step before (DELAYED), or of this one.
// No need to wait: the stage after the source's has done so.
template <int S, bool DELAYED, int TURN = 0> INLINE void early(const Thread& th, const u32 (&reg)[NREG], Sums<S>& acc, int q, int step) {
  constexpr int I = early_before(TURN, S);
  if constexpr (TURN < MATRICES) {
    constexpr int J = turn(TURN);
    if constexpr (is_early(J, S) && (bool)delayed(J) == DELAYED) {
      static_assert(TILE_SCALES || DELAYED, "of the step before");
      if constexpr (!TILE_SCALES && I >= 0)
        if (SCALED || step == 0) rescale<source_of(I), source_of(J)>(th, acc, q, step - 1, step - 1);
      u32 none[NTILES];
      product<J, false>(th, reg, acc, q, DELAYED ? step - 1 : step, none);
    }
    early<S, DELAYED, TURN + 1>(th, reg, acc, q, step);
  } else if constexpr (!TILE_SCALES && I >= 0) {   // scales are known a stage ahead: while the vector travels
    if (SCALED || step == 0) rescale<source_of(I), before(S)>(th, acc, q, step - 1, S == 0 ? step - 1 : step);
  }
}
template <int S, int J = 0> INLINE void critical(const Thread& th, const u32 (&reg)[NREG], Sums<S>& acc, int q, int step) {
  if constexpr (J == 0) await<before(S)>(th, q, S == 0 ? step - 1 : step);
  if constexpr (J < MATRICES) {
    if constexpr (stage_of(J) == S && is_critical(J)) {
      u32 seen[NTILES] = {};
      product<J, SCALED>(th, reg, acc, q, S == 0 ? step - 1 : step, seen);
      if constexpr (SCALED) leave_seen(th, seen, q);
    }
    critical<S, J + 1>(th, reg, acc, q, step);
  }
}
template <int S> INLINE void zero(Sums<S>& acc) {
#pragma unroll
  for (int i = 0; i < rows(S) * NTILES * KINDS * 4; i++) (&acc.d[0][0][0][0])[i] = 0.0f;
}
// Where a sequence starts anew the sums so far are dropped: bit 2n + i stands for the lane's column i of tile n.
template <int S> INLINE void drop(Sums<S>& acc, u32 resets) {
#pragma unroll
  for (int m = 0; m < rows(S); m++)
#pragma unroll
    for (int n = 0; n < NTILES; n++)
#pragma unroll
      for (int k = 0; k < KINDS; k++)
#pragma unroll
        for (int i = 0; i < 4; i++)
          acc.d[m][n][k][i] = select((resets >> (2 * n + i % 2)) & 1, 0.0f, acc.d[m][n][k][i]);
}
INLINE u32 load_resets(const Params& p, const Thread& th, i64 t) {   // 2 NTILES bits for each row group
  u32 bits = 0;
#pragma unroll
  for (int i = 0; i < 2 * NTILES * ROW_GROUPS; i++) {
    int q = i / (2 * NTILES), n = i / 2 % NTILES * 8 + th.lane % 4 * 2 + i % 2;
    if (n < rows_of(th, q) && p.reset[th.member * p.reset_member + t * p.batch + th.row0 + q * ROWS + n]) bits |= 1u << i;
  }
  return bits;
}
static_assert(2 * NTILES * ROW_GROUPS <= 32, "the marks of a lane's columns fill one word");
