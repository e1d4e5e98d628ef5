// A number as two fp16 parts of 11 bits, and the power of two that keeps a column (or row) within fp16.
// Comes after halves.cuh.
#pragma once

// x = high + low to 22 bits.
INLINE void two_parts(float x, float y, u32& high, u32& low) {
  high = halves(x, y);
  float a, b;
  widen(high, a, b);
  low = halves(x - a, y - b);
}
INLINE float power(int e) { return __uint_as_float((u32)(e + 127) << 23); }
INLINE float inverse(float scale) { return __uint_as_float((254u << 23) - __float_as_uint(scale)); }   // of a power of two
// The exponent that brings the largest number of many (its bits) into [2^14, 2^15): fp16 ends at 65504.
// Where it is not finite, all are left as they are: fp16 has infinities and NaN too. Numbers below 2^-112 stay smaller.
INLINE int shift_of(u32 largest) {
  int e = (int)(largest >> 23);
  return e == 255 || largest == 0 ? 0 : min(141 - e, 126);
}
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
  return power(min(135 - e, 126));
}
INLINE float row_scale(float most) { return most > 0.0f ? scale_for(most, 0.0f) : 1.0f; }   // of a row known as a whole
INLINE int exponent_of(float scale) { return scale == 0.0f ? 0 : (int)(__float_as_uint(scale) >> 23) - 127; }
// What sums must be multiplied by when a scale changes.
INLINE float ratio_of(float now, float before) {
  int e = before == 0.0f ? 0 : exponent_of(now) - exponent_of(before);
  return e < -126 ? 0.0f : power(min(e, 126));
}
