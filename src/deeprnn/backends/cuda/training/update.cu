// The parts of a training update around the gradient, for a population in flat buffers (members, size).
#include "common.cuh"

struct Four { u32 x[4]; };

// Philox4x32-10 (Salmon et al. 2011): four random words from a counter and a key, no state anywhere.
INLINE Four philox(u32 c0, u32 c1, u32 c2, u32 c3, u32 k0, u32 k1) {
#pragma unroll
  for (int round = 0; round < 10; round++) {
    u32 high0 = __umulhi(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
    u32 high1 = __umulhi(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
    c0 = high1 ^ c1 ^ k0;
    c1 = low1;
    c2 = high0 ^ c3 ^ k1;
    c3 = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}
// Two normal numbers from two words (Box and Muller); u is never 0.
INLINE void normals(u32 a, u32 b, float& x, float& y) {
  float u = ((float)(a >> 8) + 0.5f) * (1.0f / 16777216.0f), angle = (float)(b >> 8) * (2.0f / 16777216.0f);
  float radius = sqrtf(-2.0f * logf(u)), s, c;
  sincospif(angle, &s, &c);
  x = radius * c;
  y = radius * s;
}

// out = parameters + the member's std * normal(seed, step, element) for the first `count` elements, else parameters.
extern "C" __global__ void __launch_bounds__(256) add_noise(const float* parameters, float* out, const i64* seeds,
                                                             const i64* step, const float* stds, i64 size,
                                                             i64 count) {
  i64 member = blockIdx.y, element = 4 * ((i64)blockIdx.x * blockDim.x + threadIdx.x);
  if (element >= size) return;
  u64 seed = (u64)seeds[member], when = (u64)*step, index = (u64)element / 4;
  Four r = philox((u32)index, (u32)(index >> 32), (u32)when, (u32)(when >> 32), (u32)seed, (u32)(seed >> 32));
  float n[4], std = stds[member];
  normals(r.x[0], r.x[1], n[0], n[1]);
  normals(r.x[2], r.x[3], n[2], n[3]);
#pragma unroll
  for (int i = 0; i < 4; i++)
    if (element + i < size) {
      float p = parameters[member * size + element + i];
      out[member * size + element + i] = element + i < count ? fmaf(std, n[i], p) : p;
    }
}

// One step of every member in a single pass over memory. `factor` is what clipping leaves of the gradient, 0 where
// the update must not see it (it may hold NaN then); `correction` is Adam's; `average` follows the new parameters.
enum Rule { SGD = 0, MOMENTUM = 1, ADAM = 2 };
extern "C" __global__ void __launch_bounds__(256)
    take_step(float* parameters, const float* gradient, float* first, float* second, float* average,
              const float* factor, const float* rate, const float* correction, const float* multipliers,
              const float* weight, int rule, float a, float b, float epsilon, float decay, i64 size) {
  i64 member = blockIdx.y;
  float kept = factor[member], speed = rate[member], adam = correction ? correction[member] : 1.0f;
  float share = average ? *weight : 0.0f;
  for (i64 i = (i64)blockIdx.x * 256 + threadIdx.x; i < size; i += (i64)gridDim.x * 256) {
    i64 at = member * size + i;
    float g = kept != 0.0f ? gradient[at] * kept : 0.0f, p = parameters[at];
    float r = multipliers ? multipliers[i] * speed : speed;
    if (rule == SGD) {
      p = fmaf(-r, g, p);
    } else if (rule == MOMENTUM) {
      float v = fmaf(-r, g, a * first[at]);
      first[at] = v;
      p += v;
    } else {
      float m = fmaf(1.0f - a, g - first[at], first[at]), v = fmaf((1.0f - b) * g, g, b * second[at]);
      first[at] = m;
      second[at] = v;
      p -= p * (r * decay);
      p -= m * (r * adam) / (sqrtf(v) + epsilon);
    }
    parameters[at] = p;
    if (average) average[at] = fmaf(share, p - average[at], average[at]);
  }
}

// One thread a member: whether its update may be applied, what clipping leaves of the gradient, and the epoch's sums.
// `count` has one number for all members, or each its own (`counts` is 1 then); `bad` keeps the first lost update.
enum Row { NATS = 0, COUNT = 1, NORM = 2, CLIPPED = 3, UPDATES = 4 };
extern "C" __global__ void __launch_bounds__(256)
    account(const float* norm, const float* nats, const i64* count, const float* clip, const i64* update, float* factor,
            u8* good, double* sums, i64* bad, i64 members, i64 stride, i64 counts) {
  i64 member = (i64)blockIdx.x * 256 + threadIdx.x;
  if (member >= members) return;
  float length = norm[member], cost = nats[member], limit = clip[member];
  bool fine = fabsf(length) <= END && fabsf(cost) <= END;  // false for NaN, too
  float scale = limit <= END ? fminf(1.0f / length * limit, 1.0f) : 1.0f;
  good[member] = fine;
  factor[member] = fine ? scale : 0.0f;
  if (fine) {
    double* totals = sums + member;
    totals[NATS * stride] += cost;
    totals[COUNT * stride] += (double)count[member * counts];
    totals[NORM * stride] += length;
    totals[CLIPPED * stride] += scale < 1.0f;
    totals[UPDATES * stride] += 1.0;
  } else if (bad[member] < 0) {
    bad[member] = *update;
  }
}
