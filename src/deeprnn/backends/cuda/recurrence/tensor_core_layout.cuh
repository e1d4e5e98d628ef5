// tensor_core.cu: who does what and where everything lies, from the macros alone. Comes after cell.cuh and parts.cuh.
#pragma once
CONST int in_registers(int j) { constexpr int list[] = {MAT_REGS}; return list[j]; }   // inner rounds held in registers

// Numbers are multiplied as two fp16 parts, scaled by powers of two. A vector has one scale for each batch row where its
// range is known beforehand; else (TILE_SCALES) one for each tile of a batch row, 16 units, found from their numbers.
CONST bool bounded(int s) { constexpr int list[] = {BOUNDED}; return !BACKWARD && list[s] != 0; }   // outputs within ±1
CONST bool all_bounded() { for (int s = 0; s < DEPTH; s++) if (!bounded(s)) return false; return true; }
constexpr bool SCALED = !TILE_SCALES && !all_bounded();   // whether batch rows need scales that change
constexpr bool MIXED = MATRICES > DEPTH;            // whether a stage multiplies vectors of different scales
constexpr int SCALERS = SCALED ? 4 : 0;             // warps that compute them, each for some row groups
constexpr int WARPS = MGROUPS * KGROUPS, THREADS = 32 * (WARPS + FINISHERS + SCALERS);
// Registers are lent between warpgroups (of four warps) where a block has more than two.
constexpr bool LEND = THREADS > 256 && WARPS % 4 == 0;
constexpr int EVEN_REGS = 65536 / THREADS / 8 * 8, SCALER_REGS = 32;
constexpr int OTHER_REGS = FINISHER_REGS * (FINISHERS / 4) + SCALER_REGS * (SCALERS / 4);
constexpr int MOST_REGS = (EVEN_REGS * (THREADS / 128) - OTHER_REGS) / ceil_div(WARPS, 4) / 8 * 8, MULTIPLIER_REGS = MOST_REGS < 248 ? MOST_REGS : 248;
static_assert(FINISHERS % 4 == 0, "a whole warpgroup");
constexpr int PARTS = BF16 ? 1 : 2;                                // of a weight
constexpr int LANE_BYTES = 16;                                          // bytes of a lane in a tile of a vector
constexpr int SCALE_BYTES = TILE_SCALES ? 32 : 0;                         // what undoes the scales of a tile's batch rows, before it
constexpr int TILE_BYTES = SCALE_BYTES + 32 * LANE_BYTES;
static_assert(THROUGH_L2 || !TILE_SCALES, "scales travel with their tile, in one copy");
constexpr int TAIL = ROWS - 8 * (NTILES - 1);                      // batch rows of the last tile
CONST int tiles(int s) { return ceil_div(size(s), 16); }                 // of units; a vector has as many for each number a unit
CONST int vector_tiles(int s) { return tiles(s) * sent(s); }
CONST int widest_vector() { int n = 0; for (int s = 0; s < DEPTH; s++) n = size(s) > n ? size(s) : n; return n; }
constexpr int SCAN_PIECES = PIECES * ceil_div(widest_vector(), 8);   // of a matrix that max_abs_scan.cu goes through
CONST int most(int s) { return ceil_div(tiles(s), CLUSTER); }            // unit tiles of a block
CONST int mine(int s) { return ceil_div(most(s), MGROUPS); }             // unit tiles of a warp
CONST int rows(int s) { return mine(s) * gates(s); }               // tiles of sums of a warp
CONST int widest() { int n = 0; for (int s = 0; s < DEPTH; s++) n = rows(s) > n ? rows(s) : n; return n; }
CONST int most_gates() { int n = 0; for (int s = 0; s < DEPTH; s++) n = gates(s) > n ? gates(s) : n; return n; }
constexpr int KINDS = TILE_SCALES || NTILES > 2 || most_gates() > 1 ? 1 : 3;      // sums kept apart, so that few tiles still overlap
CONST int work(int s) { return most(s) * NTILES; }                 // tiles that a block finishes in a task
CONST int most_work() { int n = 0; for (int s = 0; s < DEPTH; s++) n = work(s) > n ? work(s) : n; return n; }
// One row group, stores by every lane: tiles of the last round are finished by several warps, each for some blocks.
constexpr bool SHARED_OUT = ROW_GROUPS == 1 && !THROUGH_L2 && SLOTS == 0;
// Finishers that a task has, the same ones every GAP tasks. A barrier tells its phases apart by parity, so who waits for
// a row group's sums must know that those before them came; tasks are multiplied in order: GAP is at most ROW_GROUPS.
constexpr int AT_ONCE = SHARED_OUT || most_work() > FINISHERS ? FINISHERS : most_work();
constexpr int GAP = FINISHERS / AT_ONCE < ROW_GROUPS ? FINISHERS / AT_ONCE : ROW_GROUPS;
// Whether every row group stays with its finishers, so that what its units carry may be read a visit ahead. Else another
// warp writes it, and only with the next step's sums is it known to be there.
constexpr bool OWN_ROW_GROUPS = ROW_GROUPS % GAP == 0;
CONST int per_warp(int s) { return ceil_div(work(s), AT_ONCE); }         // tiles that a finisher has, at most
CONST int full(int s) { return SHARED_OUT ? work(s) / FINISHERS : per_warp(s); }
CONST int rest(int s) { return SHARED_OUT ? work(s) % FINISHERS : 0; }
CONST int share(int s, int j) { return j < full(s) ? 1 : FINISHERS / rest(s); }
CONST int rounds(int j) { return ceil_div(vector_tiles(source_of(j)), KGROUPS); }
// A vector that is read again after the stage that waits for it may still be read when its successor arrives: it needs two
// copies.
CONST int copies(int s) {
  for (int j = 0; j < MATRICES; j++)
    if (source_of(j) == s && !is_critical(j)) return 2;
  return DEPTH == 1 ? 2 : 1;
}
CONST int vector_bytes(int s) { return vector_tiles(s) * NTILES * TILE_BYTES; }
// Tables after the barriers: of each stage the weights' scale, of each matrix how much larger than its source a sum can
// become; of each vector and batch row what undoes its source's scale and its own scale (of up to four steps), and its
// largest number (of two); and what the multiplying warps saw of the vector that a row group is at.
constexpr int COLUMNS = NTILES * 8, EACH_TABLE = TILE_SCALES ? 0 : ROW_GROUPS * DEPTH * COLUMNS * 4;
constexpr int FACTORS = ceil_div((16 * DEPTH + 8) * ROW_GROUPS, 128) * 128, SCALES = FACTORS + ceil_div(DEPTH + MATRICES, 4) * 16;
constexpr int LARGEST = SCALES + 8 * EACH_TABLE, SEEN = LARGEST + 2 * EACH_TABLE;
constexpr int TABLES_END = SEEN + (TILE_SCALES ? 0 : ROW_GROUPS * NTILES * KGROUPS * 128);
CONST int vector_offset(int s) {
  int n = ceil_div(TABLES_END, 128) * 128;
  for (int i = 0; i < s; i++) n += ROW_GROUPS * copies(i) * vector_bytes(i);
  return n;
}
constexpr int PARTIAL = vector_offset(DEPTH), PARTIAL_BYTES = widest() * WARPS * NTILES * 512;
// Finished tiles on their way out: one place for each tile that a finisher has in a task.
CONST int leaving_tiles(int s) { return per_warp(s) * sent(s); }
CONST int most_leaving() { int n = 0; for (int s = 0; s < DEPTH; s++) n = leaving_tiles(s) > n ? leaving_tiles(s) : n; return n; }
constexpr int LEAVING = PARTIAL + ROW_GROUPS * PARTIAL_BYTES, LEAVING_BYTES = THROUGH_L2 ? FINISHERS * most_leaving() * TILE_BYTES : 0;
// The cluster's part of the exchange buffer: a place for each tile of each vector and row group.
CONST int exchange_offset(int s) { int n = 0; for (int i = 0; i < s; i++) n += ROW_GROUPS * vector_bytes(i); return n; }
// Weights that registers cannot hold, round by round; in the last one perhaps only some warps have a tile.
CONST int sharers(int j, int i) { return i < rounds(j) - 1 ? KGROUPS : vector_tiles(source_of(j)) - i * KGROUPS; }   // of a group
CONST int round_offset(int j, int i) { return (i - in_registers(j)) * rows(stage_of(j)) * WARPS * PARTS * 512; }
CONST int weight_bytes(int j) {
  return in_registers(j) == rounds(j) ? 0
                              : round_offset(j, rounds(j) - 1) + rows(stage_of(j)) * MGROUPS * sharers(j, rounds(j) - 1) * PARTS * 512;
}
CONST int weight_offset(int j) {
  int n = LEAVING + LEAVING_BYTES;
  for (int i = 0; i < j; i++) n += weight_bytes(i);
  return n;
}
CONST int reg_offset(int j) {
  int n = 0;
  for (int i = 0; i < j; i++) n += rows(stage_of(i)) * in_registers(i) * PARTS * 4;
  return n;
}
constexpr int NREG = reg_offset(MATRICES) > 0 ? reg_offset(MATRICES) : 1;
// What a finisher reads beside the sums of a unit: memory, then local values.
CONST int loaded(int s) { return loads(s) + SLOTS; }
CONST int most_loaded() { int n = 1; for (int s = 0; s < DEPTH; s++) n = per_warp(s) * loaded(s) > n ? per_warp(s) * loaded(s) : n; return n; }
constexpr int LOADED = 4 * most_loaded();
