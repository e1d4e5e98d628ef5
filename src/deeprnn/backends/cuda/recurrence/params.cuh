// The parameter block that parameters.py fills, and where a batch row lies. Included by the generated cell.cuh, whose lists
// come before it.
#pragma once
// A number that the compiler has worked out: a function that adds up over stages becomes a loop in ordinary code, and its
// lists go to memory.
template <auto N> constexpr auto fixed = N;
CONST int ceil_div(int a, int b) { return (a + b - 1) / b; }
CONST int before(int s) { return s == 0 ? DEPTH - 1 : s - 1; }
CONST int length(int s) { return size(s) * sent(s); }   // numbers in the vector of stage s: all first ones, all second ones, ...
// Whether a matrix multiplies the vector that its stage waits for, that of the stage before it.
CONST bool is_critical(int j) { return source_of(j) == before(stage_of(j)) && (bool)delayed(j) == (stage_of(j) == 0); }
CONST bool has_delayed(int s) {
  for (int j = 0; j < MATRICES; j++)
    if (stage_of(j) == s && delayed(j)) return true;
  return false;
}
// Local value k belongs to the owners of a stage with as many units; who owns a unit depends on its stage's size alone, in
// every kernel, so any such stage will do.
CONST int slot_stage(int k) {
  for (int s = 0; s < DEPTH; s++)
    if (size(s) == slot_size(k)) return s;
  return 0;
}
constexpr int LOCALS = SLOTS > 0 ? SLOTS : 1;

struct MatrixSlice { const float* data; i64 member, row, column; };   // strides in elements: of an output unit, of an inner one
struct Params {
  MatrixSlice matrix[MATRICES][PIECES];
  const float* entry;                  // forward: A (T,B,ENTRY_WIDTH)
  float* stored[STORED];               // outputs and saved values (T,B,size): written forward, read backward
  const float* gradient[OUTPUTS];      // backward: of each output (T,B,size), or null
  float* delta;                        // backward: (T,B,DELTA_WIDTH)
  const float* initial[STATES];        // states before the first step (B,size)
  const float* initial_vector[DEPTH];  // forward: what of them travels, by the stage that sends it (B,size), or null
  float* grad_initial_vector[DEPTH];           // backward: what comes back to those (B,size), or null
  float* grad_initial_local[LOCALS];        // backward: local values that a state's gradient ends with (B,size), or null
  const float* vector[VECTORS];        // parameters with one number a unit
  const float* mask[MASKS];             // inputs without gradient
  const u8* reset;                     // (T,B)
  i64 entry_member, initial_member[STATES], initial_vector_member[DEPTH], vector_member[VECTORS];
  i64 mask_member[MASKS], mask_step[MASKS], reset_member;
  i64 steps, batch, row_blocks;
  u32* exchange;           // whole_card*.cu, where it is zeroed before the launch, and tensor_core.cu
  i64 items, share;        // whole_card*.cu: row groups of all members; how many of them a team serves
  float* local[LOCALS];    // tensor_core.cu and stepwise.cu, others have registers: the units' local values, (members, B, size) each
  const float* next_delta;   // tensor_core.cu, backward: delta of the step that follows this chunk of the sequence (B,DELTA_WIDTH), or null
  // tensor_core.cu, from max_abs_scan.cu: the largest sum of magnitudes of eight rows of each matrix
  // (MATRICES, pieces), and the largest magnitude of each row of `entry` or `gradient` (T,B,DEPTH stages).
  const float *most_weights, *most_input;
};

// A batch row at one step: the first of those that an address is counted from.
struct RowAddress {
  i64 member, b;    // batch row
  i64 t, at;        // step; (member, t, b) flattened
  i64 entry, mark;  // where its row of A and its reset mark lie
};
INLINE RowAddress row_address(const Params& p, i64 member, i64 t, i64 b) {
  i64 row = t * p.batch + b;
  return {member, b, t, member * p.steps * p.batch + row, member * p.entry_member + row * ENTRY_WIDTH, member * p.reset_member + row};
}
