// Stands in for the header of the same name.
#pragma once
INLINE u32 halves(float x, float y) { _Float16 h[2] = {(_Float16)x, (_Float16)y}; u32 r; memcpy(&r, h, 4); return r; }
INLINE void widen(u32 pair, float& x, float& y) { _Float16 h[2]; memcpy(h, &pair, 4); x = h[0]; y = h[1]; }
