// One cell unrolled over time by a team of blocks on the tensor cores, forward or backward; weights may be of any size.
//
// For batches whose models fit no cluster. A team serves ROWS batch rows of one model; teams never talk to each other. Every
// block owns groups of 16 units of each stage. Vectors travel through L2, in the order in which the tensor cores want them,
// and are read by the copy engine, chunk by chunk, into a ring of buffers in shared memory; a counter of the team in L2 says
// how many blocks have sent. Weights are split into two fp16 parts once, before the first step, and stay in shared memory as
// far as there is room; the others come through the ring too, at every step, before the vectors they wait for.
//
// Products are 16 batch rows x 8 units x 16 inner units. A vector is scaled by a power of two for each batch row and 16
// units, found from its own numbers; the sums over 16 inner units are scaled back before they are added up in fp32. So
// vectors may be of any size and need no bound.
//
// Eight warps multiply: MWARPS over tiles of 16 batch rows, KWARPS over the inner dimension. Then each takes its share of
// the sums through the epilogue, two batch rows of 16 units at a time. One thread of a ninth warp waits for vectors and
// starts copies.
//
// Macros: ROWS TEAM GROUPS (most groups of units of a block) MWARPS KWARPS CHUNK (inner tiles of a buffer) BUFFERS
//         RESIDENT (for each matrix: whether a block's part lies in shared memory); the rest is in the generated cell.cuh.
#include "common.cuh"
#include "cell.cuh"
#include "halves.cuh"
#include "parts.cuh"

CONST bool resident(int j) { constexpr int list[] = {RESIDENT}; return list[j]; }

constexpr int WARPS = 8, WORKERS = 32 * WARPS, THREADS = WORKERS + 32;
constexpr int TILES = ROWS / 16, MINE = TILES / MWARPS;     // tiles of batch rows: of the team, of a warp
constexpr int TILE_BYTES = 1088;                            // of 16 rows x 16 units: high parts, low parts, a scale for each row
CONST int groups(int s) { return ceil_div(size(s), 16); }
CONST int groups_of_block(int s) { return ceil_div(groups(s), TEAM); }        // groups of a block
CONST int inner(int s) { return groups(s) * sent(s); }      // inner tiles of a stage's vector
CONST int columns(int s) { return 2 * gates(s) * groups_of_block(s); }  // tiles of 8 sums
CONST int tasks(int s) { return TILES * groups_of_block(s); }           // of a warp: two rows x 16 units, a number for each lane
CONST int local_offset(int k) { int n = 0; for (int i = 0; i < k; i++) n += tasks(slot_stage(i)); return n; }
CONST int widest() { int n = 0; for (int s = 0; s < DEPTH; s++) n = columns(s) > n ? columns(s) : n; return n; }
CONST int widest_copied() {
  int n = 0;
  for (int j = 0; j < MATRICES; j++)
    if (!resident(j) && columns(stage_of(j)) > n) n = columns(stage_of(j));
  return n;
}
constexpr int NLOCAL = SLOTS > 0 ? local_offset(SLOTS) : 1;
#include "locals.cuh"
constexpr int VECTORS_OF_BUFFER = CHUNK * TILES * TILE_BYTES, BUFFER = VECTORS_OF_BUFFER + CHUNK * widest_copied() * 512;

// Shared memory, in bytes: barriers, the ring, sums, scales of the weights' rows, weights.
constexpr int RING = 256, SUMS = RING + BUFFERS * BUFFER, SCALES = SUMS + KWARPS * TILES * widest() * 512;
CONST int scale_offset(int s) { int n = SCALES; for (int i = 0; i < s; i++) n += groups_of_block(i) * gates(i) * 64; return n; }
CONST int weight_bytes(int j) { return inner(source_of(j)) * columns(stage_of(j)) * 512; }
CONST int weight_offset(int j) {
  int n = ceil_div(scale_offset(DEPTH), 128) * 128;
  for (int i = 0; i < j; i++) n += resident(i) ? weight_bytes(i) : 0;
  return n;
}
// Global memory, in bytes: weights of all ranks that do not stay in shared memory; then each team's counter and its vectors,
// two of each stage by the parity of the step.
CONST i64 spill_offset(int j) {
  i64 n = 0;
  for (int i = 0; i < j; i++) n += resident(i) ? 0 : (i64)weight_bytes(i) * TEAM;
  return n;
}
CONST i64 vector_bytes(int s) { return (i64)inner(s) * TILES * TILE_BYTES; }
CONST i64 vector_offset(int s) { i64 n = 128; for (int i = 0; i < s; i++) n += 2 * vector_bytes(i); return n; }

#ifdef __CUDACC__
INLINE void publish(u32* counter) { asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory"); }
INLINE u32 counted(const u32* counter) {
  u32 n;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(n) : "l"(counter) : "memory");
  return n;
}
INLINE void relax() {}
// What ordinary stores wrote to global memory, and this thread sees, the copy engine sees too.
INLINE void engine_fence() { asm volatile("fence.proxy.async;" ::: "memory"); }
INLINE void copy_in(u32 to, const void* from, u32 bytes, u32 bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(to), "l"(from), "r"(bytes), "r"(bar) : "memory");
}
template <int N> INLINE void sync_some() { asm volatile("bar.sync 1, %0;" ::"n"(N) : "memory"); }   // N threads of the block
#endif

struct Thread {
  u32 base;             // shared-memory address
  int rank, lane, warp;
  int wm, wk;           // which tiles of batch rows, which inner tiles
  u8 *spill, *team;     // global memory: weights of all, the team's own
  i64 member;
  int row0, rows;       // first batch row, how many of ROWS are real
  u32 turn;             // buffers of the ring used so far
  u32 epoch;            // vectors published so far by every block
};
INLINE u32 full(const Thread& th, u32 buffer) { return th.base + buffer * 8; }
INLINE u32 empty(const Thread& th, u32 buffer) { return th.base + 128 + buffer * 8; }
INLINE u32* counter(const Thread& th) { return (u32*)th.team; }
INLINE void wait_for(const Thread& th, u32 epoch) {
  while ((int)(counted(counter(th)) - epoch * TEAM) < 0) relax();
}
template <int S> INLINE u8* vector_at(const Thread& th, i64 step) {
  return th.team + fixed<vector_offset(S)> + (step & 1) * fixed<vector_bytes(S)>;
}

// ---- weights

template <int J> INLINE float weight(const Params& p, const Thread& th, int unit, int gate, int tile, int k) {
  constexpr int S = stage_of(J), Q = source_of(J);
  int part = tile / groups(Q), e = tile % groups(Q) * 16 + k;
  const MatrixSlice& piece = p.matrix[J][BACKWARD ? part : gate];
  if (unit >= size(S) || e >= size(Q) || !piece.data) return 0.0f;
  return piece.data[th.member * piece.member + (i64)unit * piece.row + (i64)e * piece.column];
}
template <int S, int J = 0> INLINE float largest_weight(const Params& p, const Thread& th, int unit, int gate) {
  if constexpr (J >= MATRICES) {
    return 0.0f;
  } else {
    float most = 0.0f;
    if constexpr (stage_of(J) == S)
      for (int i = th.lane; i < inner(source_of(J)) * 16; i += 32) {
        float w = fabsf(weight<J>(p, th, unit, gate, i / 16, i % 16));
        most = w > most || w != w ? w : most;
      }
    float rest = largest_weight<S, J + 1>(p, th, unit, gate);
    return rest > most || rest != rest ? rest : most;
  }
}
INLINE float scale_of(u32 largest) { return power(shift_of(largest)); }   // brings the largest number near fp16's end

// The power of two of each row of weights, over all matrices of its stage: a warp for each row.
template <int S> INLINE void scale_rows(const Params& p, const Thread& th) {
  if constexpr (S < DEPTH) {
    constexpr int G = gates(S);
    for (int r = th.warp; r < groups_of_block(S) * G * 16; r += WARPS + 1) {
      int unit = (th.rank * groups_of_block(S) + r / (16 * G)) * 16 + r % 16, gate = r / 16 % G;
      u32 most = __float_as_uint(largest_weight<S>(p, th, unit, gate));
#pragma unroll
      for (int m = 16; m > 0; m >>= 1) {
        u32 other = __shfl_xor_sync(0xffffffffu, most, m);
        most = other > most ? other : most;
      }
      if (th.lane == 0) store_shared(th.base + fixed<scale_offset(S)> + r * 4, scale_of(most));
    }
    scale_rows<S + 1>(p, th);
  }
}
template <int J> INLINE void split_weights(const Params& p, const Thread& th) {
  if constexpr (J < MATRICES) {
    constexpr int S = stage_of(J), N = columns(S), G = gates(S);
    for (int i = threadIdx.x; i < inner(source_of(J)) * N * 32; i += THREADS) {
      int lane = i % 32, n = i / 32 % N, tile = i / (32 * N);
      int group = n / (2 * G), gate = n / 2 % G, u = n % 2 * 8 + lane / 4, k = lane % 4 * 2;
      int unit = (th.rank * groups_of_block(S) + group) * 16 + u;
      float scale[1];
      load_shared<1>(scale, th.base + fixed<scale_offset(S)> + ((group * G + gate) * 16 + u) * 4);
      auto part = [&](int at) { return scale[0] * weight<J>(p, th, unit, gate, tile, at); };
      u32 high[2], low[2];
      two_parts(part(k), part(k + 1), high[0], low[0]);
      two_parts(part(k + 8), part(k + 9), high[1], low[1]);
      if constexpr (resident(J)) {
        store_words(th.base + fixed<weight_offset(J)> + i * 16, high[0], high[1], low[0], low[1]);
      } else {   // blocks of other teams write the same there
        u8* to = th.spill + fixed<spill_offset(J)> + (i64)th.rank * weight_bytes(J) + (i64)i * 16;
        u32 parts[4] = {high[0], high[1], low[0], low[1]};
#pragma unroll
        for (int part = 0; part < 4; part++) ((u32*)to)[part] = parts[part];
      }
    }
    split_weights<J + 1>(p, th);
  }
}

// ---- products

CONST bool wanted(int j, int s, bool critical, bool only_delayed) {
  return stage_of(j) == s && is_critical(j) == critical && (!only_delayed || delayed(j));
}
// Every product of stage S in order, those with vectors that came earlier first.
template <int S, bool ONLY_DELAYED, bool CRITICAL = false, int J = 0, class F> INLINE void for_each_matrix(F&& f) {
  if constexpr (J < MATRICES) {
    if constexpr (wanted(J, S, CRITICAL, ONLY_DELAYED)) f.template operator()<J>();
    for_each_matrix<S, ONLY_DELAYED, CRITICAL, J + 1>(f);
  } else if constexpr (!CRITICAL) {
    for_each_matrix<S, ONLY_DELAYED, true>(f);
  }
}
struct Copier {   // by one thread
  const Params& p;
  Thread& th;
  i64 step;
  template <int J> METHOD void operator()() {
    constexpr int Q = source_of(J), TILE = TILES * TILE_BYTES, CHUNKS = ceil_div(inner(Q), CHUNK);
    constexpr int WEIGHTS = resident(J) ? 0 : columns(stage_of(J)) * 512;   // of an inner tile
    const u8* vector = vector_at<Q>(th, delayed(J) ? step - 1 : step);
    const u8* weights = th.spill + fixed<spill_offset(J)> + (i64)th.rank * weight_bytes(J);
    auto count = [&](int chunk) { return min(CHUNK, inner(Q) - chunk * CHUNK); };
    auto place = [&](int chunk) { return th.base + RING + (th.turn + chunk) % BUFFERS * BUFFER; };
    auto begin = [&](int chunk) {   // once the buffer is empty; weights wait for nothing
      u32 turn = th.turn + chunk, buffer = turn % BUFFERS;
      barrier_wait_alone(empty(th, buffer), (turn / BUFFERS & 1) ^ 1);
      barrier_expect(full(th, buffer), count(chunk) * (TILE + WEIGHTS));
      if constexpr (WEIGHTS > 0)
        copy_in(place(chunk) + VECTORS_OF_BUFFER, weights + (i64)chunk * CHUNK * WEIGHTS, count(chunk) * WEIGHTS, full(th, buffer));
    };
    constexpr int AHEAD = CHUNKS < BUFFERS ? CHUNKS : BUFFERS;
#pragma unroll 1
    for (int chunk = 0; chunk < AHEAD; chunk++) begin(chunk);
    // Before the first step all vectors are published at once.
    wait_for(th, delayed(J) ? (step == 0 ? th.epoch : th.epoch - (DEPTH - 1 - Q)) : th.epoch + 1 + Q);
    engine_fence();
#pragma unroll 1
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
      if (chunk >= AHEAD) begin(chunk);
      copy_in(place(chunk), vector + (i64)chunk * CHUNK * TILE, count(chunk) * TILE, full(th, (th.turn + chunk) % BUFFERS));
    }
    th.turn += CHUNKS;
  }
};

template <int S> struct Multiplier {   // by eight warps
  static constexpr int N = columns(S);
  Thread& th;
  float (&acc)[MINE][N][4];
  const bool (&dropped)[MINE][2];   // rows whose sequence starts anew: nothing comes from the step before

  template <int J> METHOD void operator()() {
    constexpr int Q = source_of(J), UNROLL = N * MINE <= 4 && DEPTH <= 2 ? 2 : 1;
    for (int first = 0; first < inner(Q); first += CHUNK, th.turn++) {
      u32 buffer = th.turn % BUFFERS;
      int count = min(CHUNK, inner(Q) - first);
      u32 vectors = th.base + RING + buffer * BUFFER;
      u32 weights = th.lane * 16 + (resident(J) ? th.base + fixed<weight_offset(J)> + first * N * 512 : vectors + VECTORS_OF_BUFFER);
      barrier_wait(full(th, buffer), th.turn / BUFFERS & 1);
#pragma unroll UNROLL
      for (int i = th.wk; i < count; i += KWARPS) {
        u32 w[N][4];
#pragma unroll
        for (int n = 0; n < N; n++) load_words(w[n], weights + (i * N + n) * 512);
#pragma unroll
        for (int m = 0; m < MINE; m++) {
          u32 tile = vectors + (i * TILES + th.wm * MINE + m) * TILE_BYTES, high[4], low[4];
          load_words(high, tile + th.lane * 16);
          load_words(low, tile + 512 + th.lane * 16);
          float scale[2][1];
          load_shared<1>(scale[0], tile + 1024 + th.lane / 4 * 4);
          load_shared<1>(scale[1], tile + 1024 + (8 + th.lane / 4) * 4);
          u32 a[4] = {high[0], high[2], high[1], high[3]}, b[4] = {low[0], low[2], low[1], low[3]};
          bool drop[2] = {HAS_RESET && delayed(J) && dropped[m][0], HAS_RESET && delayed(J) && dropped[m][1]};
          // One product of all columns after the other: three in a row into the same sums would wait for each other.
          float sum[N][4];
#pragma unroll
          for (int n = 0; n < N; n++) {
#pragma unroll
            for (int c = 0; c < 4; c++) sum[n][c] = 0.0f;
            multiply_add(sum[n], a, w[n][0], w[n][1]);
          }
#pragma unroll
          for (int n = 0; n < N; n++) multiply_add(sum[n], a, w[n][2], w[n][3]);
#pragma unroll
          for (int n = 0; n < N; n++) multiply_add(sum[n], b, w[n][0], w[n][1]);
#pragma unroll
          for (int n = 0; n < N; n++)
#pragma unroll
            for (int c = 0; c < 4; c++)
              if (!drop[c / 2]) acc[m][n][c] = fmaf(sum[n][c], scale[c / 2][0], acc[m][n][c]);
        }
      }
      __syncwarp();
      if (th.lane == 0) barrier_arrive(empty(th, buffer));
    }
  }
};

// ---- a stage

INLINE bool mark_at(const Params& p, const Thread& th, i64 t, int row) {
  return HAS_RESET && t >= 0 && t < p.steps && row < th.rows && p.reset[th.member * p.reset_member + t * p.batch + th.row0 + row];
}
// The sums of stage S into shared memory, KWARPS parts each. `mark`: the step whose marks cut what is delayed.
template <int S, bool ONLY_DELAYED = false> INLINE void multiply(const Params& p, Thread& th, i64 mark) {
  constexpr int N = columns(S);
  float acc[MINE][N][4];
  bool dropped[MINE][2];
#pragma unroll
  for (int m = 0; m < MINE; m++) {
#pragma unroll
    for (int h = 0; h < 2; h++)
      dropped[m][h] = fixed<has_delayed(S)> && mark_at(p, th, mark, (th.wm * MINE + m) * 16 + h * 8 + th.lane / 4);
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int c = 0; c < 4; c++) acc[m][n][c] = 0.0f;
  }
  Multiplier<S> multiplier{th, acc, dropped};
  for_each_matrix<S, ONLY_DELAYED>(multiplier);
#pragma unroll
  for (int m = 0; m < MINE; m++)
#pragma unroll
    for (int n = 0; n < N; n++)
      store_words(th.base + SUMS + (((th.wk * TILES + th.wm * MINE + m) * N + n) * 32 + th.lane) * 16,
                  __float_as_uint(acc[m][n][0]), __float_as_uint(acc[m][n][1]), __float_as_uint(acc[m][n][2]),
                  __float_as_uint(acc[m][n][3]));
}

struct Task { int tile, group, row, unit; };   // tile of batch rows, group of units of the block; the lane's row and unit
template <int S> INLINE Task task_of(const Thread& th, int o) {
  int i = o * WARPS + th.warp, tile = i / 8 % TILES, group = i / (8 * TILES);
  return {tile, group, tile * 16 + i % 8 * 2 + th.lane / 16, (th.rank * groups_of_block(S) + group) * 16 + th.lane % 16};
}
template <int S> INLINE bool real(const Thread& th, const Task& task) { return task.row < th.rows && task.unit < size(S); }
// Where a tile of a product has row r and unit u of 16: the lane, and which of its four numbers.
INLINE int lane_of(int r, int u) { return r % 8 * 4 + u % 8 / 2; }
template <int S> INLINE float sum_of(const Thread& th, const Task& task, int gate) {
  constexpr int N = columns(S), G = gates(S);
  int u = th.lane % 16, r = task.row % 16, n = (task.group * G + gate) * 2 + u / 8;
  u32 at = th.base + SUMS + ((task.tile * N + n) * 32 + lane_of(r, u)) * 16 + (r / 8 * 2 + u % 2) * 4;
  float total = 0.0f, part[1];
#pragma unroll
  for (int k = 0; k < KWARPS; k++) {
    load_shared<1>(part, at + k * (TILES * N * 512));
    total += part[0];
  }
  load_shared<1>(part, th.base + fixed<scale_offset(S)> + ((task.group * G + gate) * 16 + u) * 4);
  return total * inverse(part[0]);
}

// Two batch rows of 16 units, scaled and split, to the place where the team reads the stage's vector.
template <int S> INLINE void send_units(const Thread& th, const Task& task, int part, float v, i64 step) {
  u32 most = __float_as_uint(v) & 0x7fffffffu;
#pragma unroll
  for (int m = 1; m < 16; m *= 2) {
    u32 other = __shfl_xor_sync(0xffffffffu, most, m);
    most = other > most ? other : most;
  }
  float scale = scale_of(most), mine = v * scale, neighbour = __shfl_xor_sync(0xffffffffu, mine, 1);
  int u = th.lane % 16, r = task.row % 16, group = th.rank * groups_of_block(S) + task.group;
  if (u % 2 || group >= groups(S)) return;
  u32 high, low;
  two_parts(mine, neighbour, high, low);
  u32* tile = (u32*)(vector_at<S>(th, step) + (i64)((part * groups(S) + group) * TILES + task.tile) * TILE_BYTES);
  int word = lane_of(r, u) * 4 + r / 8 * 2 + u / 8;
  tile[word] = high;
  tile[128 + word] = low;
  if (u == 0) ((float*)tile)[256 + r] = inverse(scale);
}
INLINE void all_sent(const Thread& th) {
  sync_some<WORKERS>();
  if (threadIdx.x == 0) publish(counter(th));
}

template <int S> INLINE void prefetch(const Params& p, const Thread& th, float* x, i64 t) {
  RowAddress w = row_address(p, th.member, t, th.row0);
#pragma unroll
  for (int o = 0; o < tasks(S); o++) {
    Task task = task_of<S>(th, o);
#pragma unroll
    for (int k = 0; k < loads(S); k++) x[o * loads(S) + k] = 0.0f;
    if (real<S>(th, task)) epilogue_load<S>(p, w, task.row, task.unit, x + o * loads(S));
  }
}

// What the stage stores is written after its vector was published, which would wait for it; where that takes too many
// registers, before.
CONST bool late(int s) { return tasks(s) * stores(s) <= 24; }
template <int S> INLINE void store_late(const Params& p, const Thread& th, const float* out, i64 t) {
  RowAddress w = row_address(p, th.member, t, th.row0);
#pragma unroll
  for (int o = 0; o < tasks(S); o++) {
    Task task = task_of<S>(th, o);
    if (real<S>(th, task)) epilogue_store<S>(p, w, task.row, task.unit, out + o * stores(S));
  }
}
template <int S>
INLINE void finish(const Params& p, const Thread& th, const float* x, float (&local)[NLOCAL], float* kept, i64 step, i64 t) {
  RowAddress w = row_address(p, th.member, t, th.row0);
#pragma unroll
  for (int o = 0; o < tasks(S); o++) {
    Task task = task_of<S>(th, o);
    bool valid = real<S>(th, task), fresh = mark_at(p, th, BACKWARD ? t + 1 : t, task.row);
    float sum[gates(S)], mine[LOCALS], send[sent(S)], now[stores(S)], *out = late(S) ? kept + o * stores(S) : now;
#pragma unroll
    for (int g = 0; g < gates(S); g++) sum[g] = sum_of<S>(th, task, g);
    take_locals<S>(mine, local, o);
    epilogue<S>(sum, x + o * loads(S), fresh, mine, send, out);
    keep_locals<S>(mine, local, o);
#pragma unroll
    for (int k = 0; k < sent(S); k++) send_units<S>(th, task, k, valid ? send[k] : 0.0f, step);
    if (!late(S) && valid) epilogue_store<S>(p, w, task.row, task.unit, out);
  }
}

template <int S> INLINE void stages(const Params& p, Thread& th, float (&local)[NLOCAL], i64 step) {
  if constexpr (S < DEPTH) {
    i64 t = BACKWARD ? p.steps - 1 - step : step;
    float x[tasks(S) * loads(S) + 1], out[late(S) ? tasks(S) * stores(S) : 1];
    prefetch<S>(p, th, x, t);
    multiply<S>(p, th, BACKWARD ? t + 1 : t);
    sync_some<WORKERS>();
    finish<S>(p, th, x, local, out, step, t);
    all_sent(th);
    if (late(S)) store_late<S>(p, th, out, t);
    stages<S + 1>(p, th, local, step);
  }
}
template <int S> INLINE void copies(const Params& p, Thread& th, i64 step) {
  if constexpr (S < DEPTH) {
    Copier copier{p, th, step};
    for_each_matrix<S, false>(copier);
    copies<S + 1>(p, th, step);
  }
}

// ---- before the first step, and after the last

template <int S> INLINE void send_first(const Params& p, const Thread& th) {
  if constexpr (S < DEPTH) {
#pragma unroll
    for (int o = 0; o < tasks(S); o++) {
      Task task = task_of<S>(th, o);
      float v = 0.0f;
      if (!BACKWARD && p.initial_vector[S] && real<S>(th, task))
        v = p.initial_vector[S][th.member * p.initial_vector_member[S] + (i64)(th.row0 + task.row) * size(S) + task.unit];
#pragma unroll
      for (int k = 0; k < sent(S); k++) send_units<S>(th, task, k, v, -1);
    }
    send_first<S + 1>(p, th);
  }
}
template <int K> INLINE void set_up_locals(const Params& p, const Thread& th, float (&local)[NLOCAL]) {
  if constexpr (K < SLOTS) {
    constexpr int S = slot_stage(K), STATE = slot_state(K);
#pragma unroll
    for (int o = 0; o < tasks(S); o++) {
      Task task = task_of<S>(th, o);
      float value = 0.0f;
      if constexpr (!BACKWARD && STATE >= 0)
        if (real<S>(th, task))
          value = p.initial[STATE][th.member * p.initial_member[STATE] + (i64)(th.row0 + task.row) * size(S) + task.unit];
      local[fixed<local_offset(K)> + o] = value;
    }
    set_up_locals<K + 1>(p, th, local);
  }
}
template <int K> INLINE void finish_locals(const Params& p, const Thread& th, const float (&local)[NLOCAL]) {
  if constexpr (K < SLOTS) {
    constexpr int S = slot_stage(K);
#pragma unroll
    for (int o = 0; o < tasks(S); o++) {
      Task task = task_of<S>(th, o);
      if (p.grad_initial_local[K] && real<S>(th, task))
        p.grad_initial_local[K][(th.member * p.batch + th.row0 + task.row) * size(S) + task.unit] =
            mark_at(p, th, 0, task.row) ? 0.0f : local[fixed<local_offset(K)> + o];
    }
    finish_locals<K + 1>(p, th, local);
  }
}
// What comes back to the vectors before the first step: the sums that would enter the step before it.
template <int S> INLINE void finish_sums(const Params& p, Thread& th) {
  if constexpr (S < DEPTH) {
    if constexpr (has_delayed(S)) {
      multiply<S, true>(p, th, 0);
      sync_some<WORKERS>();
#pragma unroll
      for (int o = 0; o < tasks(S); o++) {
        Task task = task_of<S>(th, o);
        if (p.grad_initial_vector[S] && real<S>(th, task))
          p.grad_initial_vector[S][(th.member * p.batch + th.row0 + task.row) * size(S) + task.unit] = sum_of<S>(th, task, 0);
      }
      sync_some<WORKERS>();
    }
    finish_sums<S + 1>(p, th);
  }
}
template <int S> INLINE void last_copies(const Params& p, Thread& th) {
  if constexpr (S < DEPTH) {
    Copier copier{p, th, p.steps};
    if constexpr (has_delayed(S)) for_each_matrix<S, true>(copier);
    last_copies<S + 1>(p, th);
  }
}

INLINE void work(const Params& p, Thread& th) {
  float local[NLOCAL];
  set_up_locals<0>(p, th, local);
  send_first<0>(p, th);
  all_sent(th);
  for (i64 step = 0; step < p.steps; step++) stages<0>(p, th, local, step);
  if (BACKWARD) {
    finish_sums<0>(p, th);
    finish_locals<0>(p, th, local);
  }
  all_sent(th);   // nobody reads this group's vectors any more
}
INLINE void copy(const Params& p, Thread& th) {
  th.epoch++;     // the first vectors
  for (i64 step = 0; step < p.steps; step++, th.epoch += DEPTH) copies<0>(p, th, step);
  if (BACKWARD) last_copies<0>(p, th);
  th.epoch++;
  wait_for(th, th.epoch);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) KERNEL(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) unsigned char memory[];
  Thread th;
  th.base = shared_address(memory);
  th.lane = threadIdx.x % 32;
  th.warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0);
  th.wm = th.warp % MWARPS;
  th.wk = th.warp / MWARPS;
  int team = blockIdx.x / TEAM;
  th.rank = blockIdx.x % TEAM;
  th.spill = (u8*)p.exchange;
  th.team = th.spill + spill_offset(MATRICES) + team * vector_offset(DEPTH);
  th.turn = th.epoch = 0;
  if (threadIdx.x < BUFFERS) {
    barrier_init(full(th, threadIdx.x), 1);
    barrier_init(empty(th, threadIdx.x), WARPS);
    barrier_fence();
  }
  i64 loaded = -1, end = (team + 1) * p.share < p.items ? (team + 1) * p.share : p.items;
  for (i64 item = team * p.share; item < end; item++) {
    th.member = item / p.row_blocks;
    th.row0 = (int)(item % p.row_blocks) * ROWS;
    th.rows = min(ROWS, (int)p.batch - th.row0);
    if (th.member != loaded) {
      scale_rows<0>(p, th);
      __syncthreads();
      split_weights<0>(p, th);
      engine_fence();   // weights that come through the ring
    }
    loaded = th.member;
    __syncthreads();
    if (th.warp < WARPS) work(p, th);
    else if (th.lane == 0) copy(p, th);
    __syncthreads();
  }
}
