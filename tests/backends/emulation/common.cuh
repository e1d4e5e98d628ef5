// A stand-in for the CUDA helpers of the same name, so that the kernels' own sources run on a CPU under test.
// Every thread of a cluster is a fibre; which one goes on at a barrier is drawn at random, so that an order
// on which a kernel wrongly relies has a chance to fail. Not a simulator of time or of memory ordering.
#pragma once
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <vector>
#include "fibres.h"
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
typedef unsigned char u8;
#define INLINE static inline
#define METHOD inline
#define CONST constexpr
#define __host__
#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
using std::max;
using std::min;

struct Index { u32 x; };
struct Gate { int waiting = 0; u64 turn = 0; };                     // a barrier
struct Bytes { int count = 1, arrivals = 1; i64 expected = 0; u32 phase = 0; };  // an mbarrier
struct Fibre { Stack stack; Index thread, block; int rank, warp, lane; bool done = false; std::unique_ptr<char[]> memory; };
struct Warp { Gate gate; u32 words[2][32][8]; };
struct Machine {
  std::vector<std::unique_ptr<Fibre>> fibres;
  std::vector<std::vector<unsigned char>> memory;
  std::vector<Warp> warps;
  std::map<u32, Bytes> bytes;
  std::map<std::pair<int, int>, Gate> gates;
  Stack home;
  Fibre* now = nullptr;
  std::mt19937 random;
  i64 idle = 0;
  const char* error = nullptr;
};
static Machine machine;
#define threadIdx (machine.now->thread)
#define blockIdx (machine.now->block)

INLINE void fail(const char* why) {   // never comes back
  machine.error = why;
  go(machine.now->stack, machine.home);
}
INLINE void yield() {
  if (++machine.idle > 5000000) fail("the kernel hangs");
  go(machine.now->stack, machine.home);
}
INLINE void pass(Gate& gate, int count) {
  u64 turn = gate.turn;
  if (++gate.waiting == count) { gate.waiting = 0; gate.turn++; machine.idle = 0; }
  else while (gate.turn == turn) yield();
}
INLINE Warp& my_warp() { return machine.warps[machine.now->warp]; }
INLINE void __syncwarp() { pass(my_warp().gate, 32); }
template <class T> INLINE T exchange(T value, int from) {
  Warp& w = my_warp();
  int side = w.gate.turn & 1;
  memcpy(w.words[side][machine.now->lane], &value, 4);
  pass(w.gate, 32);
  memcpy(&value, w.words[side][from], 4);
  return value;
}
template <class T> INLINE T __shfl_xor_sync(u32, T value, int mask) { return exchange(value, machine.now->lane ^ mask); }
template <class T> INLINE T __shfl_sync(u32, T value, int lane) { return exchange(value, lane); }
INLINE bool any_lane(bool x) {
  u32 any = x;
  for (int i = 1; i < 32; i *= 2) any |= __shfl_xor_sync(0, any, i);
  return any;
}
INLINE void cluster_sync() { pass(machine.gates[{-1, 0}], (int)machine.fibres.size()); }
INLINE void __syncthreads() { pass(machine.gates[{machine.now->rank, 0}], (int)(machine.fibres.size() / machine.memory.size())); }

INLINE float __uint_as_float(u32 x) { float r; memcpy(&r, &x, 4); return r; }
INLINE u32 __float_as_uint(float x) { u32 r; memcpy(&r, &x, 4); return r; }
INLINE float __ldg(const float* p) { return *p; }
INLINE u32 bf16_bits(float x) { u32 b = __float_as_uint(x); return (b + 0x7fffu + ((b >> 16) & 1u)) >> 16; }
INLINE float bf16_low(u32 pair) { return __uint_as_float(pair << 16); }
INLINE float bf16_high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
INLINE float select(u32 condition, float yes, float no) { return condition ? yes : no; }

// An address is the block's rank and an offset; a block may read only its own memory.
INLINE u32 shared_address(const void*) { return (u32)machine.now->rank << 20; }
INLINE u32 cluster_rank() { return machine.now->rank; }
INLINE u32 map_rank(u32 address, u32 rank) { return (address & 0xfffff) | rank << 20; }
INLINE unsigned char* at(u32 address, int size, bool own = true) {
  u32 rank = address >> 20, offset = address & 0xfffff;
  if (rank >= machine.memory.size() || offset + size > machine.memory[rank].size() || offset % size ||
      (own && (int)rank != machine.now->rank))
    fail("an address outside the shared memory, misaligned, or of another block");
  return &machine.memory[rank][offset];
}
template <int N> INLINE void load_shared(float (&x)[N], u32 address) { memcpy(x, at(address, 4 * N), 4 * N); }
INLINE void store_shared(u32 address, float x) { memcpy(at(address, 4), &x, 4); }
INLINE void raise_shared(u32 address, float x) { u32 y, &now = *(u32*)at(address, 4); memcpy(&y, &x, 4); now = now < y ? y : now; }
constexpr float END = 3.402823466e38f;
INLINE void load_words(u32 (&x)[4], u32 address) { memcpy(x, at(address, 16), 16); }
INLINE void touch(const float* p) { volatile float read = *p; (void)read; }
INLINE void store_words(u32 address, u32 a, u32 b, u32 c, u32 d) { u32 w[4] = {a, b, c, d}; memcpy(at(address, 16), w, 16); }
INLINE void barrier_init(u32 bar, int count = 1) { machine.bytes[bar] = {count, count}; at(bar, 8); }
INLINE void barrier_fence() {}
// Copies to the blocks of a cluster read their source late, and arrive in any order; those out of a block are done
// when they are waited for.
struct Copy { u32 to; const u8* from; u32 bytes, bar; };
struct Out { Fibre* by; u8* to; u32 from, bytes; };
static std::vector<Copy> under_way;
static std::vector<Out> leaving_copies;
INLINE void carry();
INLINE void settle(Bytes& b) {
  if (b.arrivals == 0 && b.expected == 0) { b.phase ^= 1; b.arrivals = b.count; machine.idle = 0; }
}
INLINE void barrier_expect(u32 bar, u32 n) {
  Bytes& b = machine.bytes.at(bar);
  b.expected += n;
  if (--b.arrivals < 0) fail("one arrival too many in one phase of a barrier");
  settle(b);
}
INLINE void barrier_arrive(u32 bar) { barrier_expect(bar, 0); }
INLINE void barrier_wait_alone(u32 bar, u32 phase) {
  while (machine.bytes.at(bar).phase == phase) { carry(); yield(); }
}
INLINE void barrier_wait(u32 bar, u32 phase) {
  barrier_wait_alone(bar, phase);
  __syncwarp();
}
INLINE void arrive(u32 bar, int n) { Bytes& b = machine.bytes.at(bar); b.expected -= n; settle(b); }
INLINE void send(u32 address, float value, u32 bar) { memcpy(at(address, 4, false), &value, 4); arrive(bar, 4); }
INLINE void send4(u32 address, const u32 (&v)[4], u32 bar) { memcpy(at(address, 16, false), v, 16); arrive(bar, 16); }

INLINE void copy_out(void* to, u32 from, u32 bytes) {
  for (u32 i = 0; i < bytes; i += 16) at(from + i, 16);
  if (bytes == 0 || bytes % 16 || (size_t)to % 16) fail("a copy is of no bytes, not of 16, or misaligned");
  leaving_copies.push_back({machine.now, (u8*)to, from, bytes});
}
INLINE void copies_out_wait() {
  std::vector<Out> others;
  for (Out& c : leaving_copies)
    if (c.by == machine.now) memcpy(c.to, at(c.from, 16), c.bytes);
    else others.push_back(c);
  leaving_copies = others;
}
template <int BLOCKS> INLINE void copy_round(u32 to, const void* from, u32 bytes, u32 bar) {
  if (BLOCKS != (int)machine.memory.size()) fail("a copy to other blocks than those of the cluster");
  for (int d = 0; d < BLOCKS; d++) {
    for (u32 i = 0; i < bytes; i += 16) at(map_rank(to, d) + i, 16, false);
    under_way.push_back({map_rank(to, d), (const u8*)from, bytes, map_rank(bar, d)});
  }
}
INLINE void carry() {
  if (under_way.empty() || machine.random() % 4) return;
  size_t chosen = machine.random() % under_way.size();
  Copy c = under_way[chosen];
  under_way.erase(under_way.begin() + chosen);
  memcpy(at(c.to, 16, false), c.from, c.bytes);
  arrive(c.bar, c.bytes);
  machine.idle = 0;
}
INLINE void copy_fence() {}
INLINE void pin(u8*&, u32&, u32&) {}
template <int N> INLINE void more_registers() {}
template <int N> INLINE void fewer_registers() {}

INLINE float half_of(u32 pair, int i) { _Float16 h[2]; memcpy(h, &pair, 4); return h[i]; }
INLINE u32 larger(u32 most, u32 pair) {
  _Float16 h[2];
  for (int i = 0; i < 2; i++) h[i] = (_Float16)fmaxf(half_of(most, i), fabsf(half_of(pair, i)));
  u32 r;
  memcpy(&r, h, 4);
  return r;
}
INLINE u32 plus_magnitudes(u32 sum, u32 x, u32 y) {
  _Float16 h[2];
  for (int i = 0; i < 2; i++) h[i] = (_Float16)(half_of(sum, i) + (_Float16)(fabsf(half_of(x, i)) + fabsf(half_of(y, i))));
  u32 r;
  memcpy(&r, h, 4);
  return r;
}
// mma.m16n8k16, with the operands' places as PTX defines them.
INLINE void multiply_add(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  Warp& w = my_warp();
  int side = w.gate.turn & 1, lane = machine.now->lane;
  u32 mine[6] = {a[0], a[1], a[2], a[3], b0, b1};
  memcpy(w.words[side][lane], mine, 24);
  pass(w.gate, 32);
  for (int i = 0; i < 4; i++) {
    int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    double sum = d[i];
    for (int k = 0; k < 16; k++) {
      u32 x = w.words[side][row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], y = w.words[side][column * 4 + k % 8 / 2][4 + k / 8];
      sum += (double)half_of(x, k % 2) * half_of(y, k % 2);
    }
    d[i] = (float)sum;
  }
  pass(w.gate, 32);  // so that nobody's operands are replaced while they are read
}
INLINE void multiply_first(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  for (int i = 0; i < 4; i++) d[i] = 0.0f;
  multiply_add(d, a, b0, b1);
}

// Words that blocks exchange through global memory (whole_card.cu). A store is seen by others some time later, and
// stores to different places in any order; only those to one place keep theirs.
static std::vector<std::pair<u32*, u32>> posted;
INLINE void deliver() {
  if (posted.empty()) return;
  size_t chosen = machine.random() % posted.size();
  for (size_t i = 0; i < chosen; i++)
    if (posted[i].first == posted[chosen].first) chosen = i;
  *posted[chosen].first = posted[chosen].second;
  posted.erase(posted.begin() + chosen);
  machine.idle = 0;
}
INLINE void store_relaxed(u32* at, u32 word) { posted.push_back({at, word}); }
INLINE void load_relaxed(u32 (&w)[4], const u32* at) {
  if ((size_t)at % 16) fail("a load of 16 bytes is misaligned");
  for (int i = 0; i < 4; i++) {
    w[i] = at[i];
    if (machine.random() % 4 == 0) deliver();   // the four words are not read at once
  }
}
INLINE void relax() {   // now and then a thread sleeps while the others go as far as they can
  for (int i = machine.random() % 8; i > 0; i--) deliver();
  for (int i = machine.random() % 32 ? 1 : machine.random() % 250; i > 0; i--) yield();
}

// A counter in global memory, and copies from there into a block's own shared memory (whole_card_tensor_core.cu).
INLINE void publish(u32* counter) { ++*counter; machine.idle = 0; }
INLINE u32 counted(const u32* counter) { return *counter; }
INLINE void engine_fence() {}
INLINE void copy_in(u32 to, const void* from, u32 bytes, u32 bar) {
  if (bytes == 0 || bytes % 16 || (size_t)from % 16) fail("a copy is of no bytes, not of 16, or misaligned");
  for (u32 i = 0; i < bytes; i += 16) at(to + i, 16);
  under_way.push_back({to, (const u8*)from, bytes, bar});
}
template <int N> INLINE void sync_some() { pass(machine.gates[{machine.now->rank, 1}], N); }
