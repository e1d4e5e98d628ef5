// Pairs of fp16 in a word. Comes after common.cuh.
#pragma once
INLINE u32 halves(float x, float y) {
  u32 r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(y), "f"(x));
  return r;
}
INLINE void widen(u32 pair, float& x, float& y) {
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}" : "=f"(x), "=f"(y) : "r"(pair));
}
