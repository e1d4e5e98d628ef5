// A number as two fp16 parts of 11 bits, and the running power of two that keeps a column (or row) within fp16.
// After hopper.cuh.
#pragma once

// x = high + low to 22 bits.
INLINE void two_parts(float x, float y, u32& high, u32& low) {
  high = halves(x, y);
  float a, b;
  widen(high, a, b);
  low = halves(x - a, y - b);
}
constexpr float MOST = 32768.0f;   // numbers of a scaled column stay below it; fp16 ends at 65504
// What no number may reach before the scale is made smaller; with no scale yet, any but zero.
INLINE float limit_of(float scale) {
  int e = 142 - ((int)(__float_as_uint(scale) >> 23) - 127);
  return scale == 0.0f ? __uint_as_float(1) : __uint_as_float((u32)min(e, 255) << 23);
}
// The power of two that brings `most` into [2^8, 2^9): room for numbers 2^7 times larger, and 2^-33 of it is still
// told apart. Zero: nothing but zeros so far. Infinities leave it as it is: fp16 has them too.
INLINE float scale_for(float most, float scale) {
  int e = (int)(__float_as_uint(most) >> 23);
  if (e == 255) return scale == 0.0f ? 1.0f : scale;
  return __uint_as_float((u32)(min(135 - e, 126) + 127) << 23);
}
INLINE int exponent_of(float scale) { return scale == 0.0f ? 0 : (int)(__float_as_uint(scale) >> 23) - 127; }
// What sums must be multiplied by when a scale changes.
INLINE float ratio_of(float now, float before) {
  int e = before == 0.0f ? 0 : exponent_of(now) - exponent_of(before);
  return e < -126 ? 0.0f : __uint_as_float((u32)(e + 127) << 23);
}
// Eight numbers in a row to 16 bytes of each part.
INLINE void store_parts(const float* v, float scale, u32 high_at, u32 low_at) {
  u32 high[4], low[4];
#pragma unroll
  for (int i = 0; i < 4; i++) two_parts(v[2 * i] * scale, v[2 * i + 1] * scale, high[i], low[i]);
  store_words(high_at, high[0], high[1], high[2], high[3]);
  store_words(low_at, low[0], low[1], low[2], low[3]);
}
