// Local values in registers, for kernels whose threads own their units: comes after `local_offset(k)`, where those of
// value k begin.
#pragma once
// What the units of stage S keep from step to step: a thread's o-th unit of those. By templates, because with an index that
// the compiler does not work out all of `local` would lie in memory.
template <int S, int N, int K = 0> INLINE void take_locals(float (&unit_locals)[LOCALS], const float (&local)[N], int o) {
  if constexpr (K < SLOTS) {
    if constexpr (reads_local(S, K)) unit_locals[K] = local[fixed<local_offset(K)> + o];
    take_locals<S, N, K + 1>(unit_locals, local, o);
  }
}
template <int S, int N, int K = 0> INLINE void keep_locals(const float (&unit_locals)[LOCALS], float (&local)[N], int o) {
  if constexpr (K < SLOTS) {
    if constexpr (sets_local(S, K)) local[fixed<local_offset(K)> + o] = unit_locals[K];
    keep_locals<S, N, K + 1>(unit_locals, local, o);
  }
}
