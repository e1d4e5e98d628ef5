// Stands in for the header of the same name: fibres as in common.cuh here, and products of warpgroups whose operands
// are read from shared memory as their descriptors say, swizzled.
#pragma once
#include "common.cuh"
#include "halves.cuh"
struct BlockIndex { u32 x, y; };
static u32 block_row;
static BlockIndex gridDim;
#undef blockIdx
#define blockIdx (BlockIndex{machine.now->block.x, block_row})
struct float4 { float x, y, z, w; };
INLINE float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
template <int N> INLINE void group_sync(int id) { pass(machine.gates[{machine.now->rank, id}], N); }
template <int N> INLINE void group_arrive(int id) {   // counted, without waiting
  Gate& gate = machine.gates[{machine.now->rank, id}];
  if (++gate.waiting == N) { gate.waiting = 0; gate.turn++; machine.idle = 0; }
}
INLINE void products_begin() {}
INLINE void products_commit() {}
template <int N> INLINE void products_wait() { __syncwarp(); }   // by all lanes together
INLINE u64 operand(u32 address) { return (u64)((address & 0x3ffff) >> 4) | (u64)64 << 32 | (u64)1 << 62; }
INLINE void bulk_load(u32 to, const void* from, u32 bytes, u32 bar) {
  for (u32 i = 0; i < bytes; i += 16) memcpy(at(to + i, 16), (const char*)from + i, 16);
  arrive(bar, bytes);
}
INLINE void bulk_store(void* to, u32 from, u32 bytes) { memcpy(to, at(from, 1), bytes); }
INLINE void bulk_stored() {}
INLINE void load_two(float& x, float& y, u32 a) { memcpy(&x, at(a, 4), 4); memcpy(&y, at(a + 4, 4), 4); }
INLINE u32 lanes_where(bool x) {
  u32 found = 0;
  for (int i = 0; i < 32; i++) found |= exchange((u32)x, i) << i;
  return found;
}
INLINE float load_float(u32 a) { float r; memcpy(&r, at(a, 4), 4); return r; }
INLINE u32 load_word(u32 a) { u32 r; memcpy(&r, at(a, 4), 4); return r; }
INLINE float4 load_four(const float* p) { return {p[0], p[1], p[2], p[3]}; }
INLINE void put_four(u8* p, const u32 (&v)[4]) { memcpy(p, v, 16); }
INLINE void store_two(float* p, float x, float y) { p[0] = x; p[1] = y; }
INLINE double element(u64 descriptor, int row, int k) {
  u32 a = (u32)(descriptor & 0x3fff) * 16 + row / 8 * ((u32)(descriptor >> 32 & 0x3fff) * 16) + row % 8 * 128 + k * 2;
  a ^= (a >> 7 & 7) << 4;
  _Float16 h;
  memcpy(&h, at(a, 2), 2);
  return h;
}
template <int N> INLINE void multiply(float (&d)[N], u64 a, u64 b, bool add) {
  int lane = machine.now->lane, warp = machine.now->warp % 4;
  for (int i = 0; i < N; i++) {
    int row = warp * 16 + lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    double sum = add ? d[i] : 0.0f;
    for (int k = 0; k < 16; k++) sum += element(a, row, k) * element(b, column, k);
    d[i] = (float)sum;
  }
}
