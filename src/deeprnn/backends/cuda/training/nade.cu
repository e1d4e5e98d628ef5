// A NADE's nats and gradients, its hidden layers computed where they are used and never stored.
// Macros: NOTES HIDDEN
// Frames lie one after another, members of a population in blockIdx.y. The hidden layer of a note changes only where a
// note below it sounds, so sigmoids are taken there alone.
#include "common.cuh"

constexpr int WARPS = 4, SUMMING = 8;                  // of a block by frames, and of one by notes
constexpr int ITEMS = (HIDDEN + 31) / 32;              // hidden units a lane holds
constexpr int WORDS = (NOTES + 31) / 32;               // of 32 marks, which notes of a frame sound

INLINE float logistic(float a) { return 1.0f / (1.0f + expf(-a)); }

INLINE float over_warp(float x) {
#pragma unroll
  for (int m = 16; m > 0; m >>= 1) x += __shfl_xor_sync(0xffffffffu, x, m);
  return x;
}

// One block a frame: nats, and their derivative by the logits. Each warp takes every fourth note and has hidden units
// of its own, so that no warp waits for another.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    nade_forward(const float* y, const float* b, const float* c, const float* W, const float* V, float* nats,
                 float* delta) {
  i64 frame = (i64)blockIdx.y * gridDim.x + blockIdx.x, member = blockIdx.y;
  y += frame * NOTES, b += frame * NOTES, c += frame * HIDDEN, delta += frame * NOTES;
  W += member * NOTES * HIDDEN, V += member * NOTES * HIDDEN;
  __shared__ float part[WARPS];
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, heard = 0;
  float a[ITEMS], s[ITEMS], total = 0.0f;
#pragma unroll
  for (int k = 0; k < ITEMS; k++) {
    int d = 32 * k + lane;
    a[k] = d < HIDDEN ? c[d] : 0.0f;
    s[k] = d < HIDDEN ? logistic(a[k]) : 0.0f;
  }
  for (int first = 0; first < NOTES; first += WARPS) {  // all warps come here equally often, with a note or without
    int i = first + warp < NOTES ? first + warp : NOTES - 1;
    bool changed = false;
    for (; heard < i; heard++) {
      float value = y[heard];
      if (value == 0.0f) continue;
      changed = true;
#pragma unroll
      for (int k = 0; k < ITEMS; k++) {
        int d = 32 * k + lane;
        if (d < HIDDEN) a[k] = fmaf(value, W[heard * HIDDEN + d], a[k]);
      }
    }
    if (changed)
#pragma unroll
      for (int k = 0; k < ITEMS; k++) s[k] = 32 * k + lane < HIDDEN ? logistic(a[k]) : 0.0f;
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < ITEMS; k++) {
      int d = 32 * k + lane;
      if (d < HIDDEN) sum = fmaf(V[i * HIDDEN + d], s[k], sum);
    }
    float logit = over_warp(sum) + b[i], wanted = y[i];
    if (first + warp >= NOTES) continue;
    total += fmaxf(logit, 0.0f) + log1pf(expf(-fabsf(logit))) - wanted * logit;
    if (lane == 0) delta[i] = logistic(logit) - wanted;
  }
  if (lane == 0) part[warp] = total;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < WARPS; w++) total += part[w];
    nats[frame] = total;
  }
}

// One block a frame: the gradient of c, and the marks that the next kernel reads.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    nade_frames_backward(const float* y, const float* c, const float* W, const float* V, const float* db, float* dc,
                         u32* marks) {
  i64 frame = (i64)blockIdx.y * gridDim.x + blockIdx.x, member = blockIdx.y;
  y += frame * NOTES, db += frame * NOTES, c += frame * HIDDEN, dc += frame * HIDDEN;
  W += member * NOTES * HIDDEN, V += member * NOTES * HIDDEN;
  for (int word = threadIdx.x; word < WORDS; word += 32 * WARPS) {
    u32 bits = 0;
    for (int i = 0; i < 32 && 32 * word + i < NOTES; i++) bits |= (u32)(y[32 * word + i] != 0.0f) << i;
    marks[frame * WORDS + word] = bits;
  }
  for (int d = threadIdx.x; d < HIDDEN; d += 32 * WARPS) {
    float a = c[d], sum = 0.0f, total = 0.0f;
    for (int i = 0; i < NOTES; i++) {
      float value = y[i];
      sum = fmaf(db[i], V[i * HIDDEN + d], sum);
      if (value == 0.0f) continue;
      float s = logistic(a);
      total = fmaf(sum, s * (1.0f - s), total);
      sum = 0.0f;
      a = fmaf(value, W[i * HIDDEN + d], a);
    }
    float s = logistic(a);
    dc[d] = fmaf(sum, s * (1.0f - s), total);
  }
}

// One block for 32 hidden units of one note: that note's gradients, summed over all frames in a fixed order. A warp
// takes every eighth frame. What a sounding note does to those above it is computed anew: few sound.
extern "C" __global__ void __launch_bounds__(32 * SUMMING)
    nade_notes_backward(const float* y, const float* c, const float* W, const float* V, const float* db,
                        const u32* marks, float* dW, float* dV, i64 frames) {
  i64 member = blockIdx.y;
  y += member * frames * NOTES, db += member * frames * NOTES, c += member * frames * HIDDEN;
  marks += member * frames * WORDS;
  W += member * NOTES * HIDDEN, V += member * NOTES * HIDDEN;
  __shared__ float part[2][SUMMING][32];
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int note = blockIdx.x / ITEMS, d = blockIdx.x % ITEMS * 32 + lane;
  float into = 0.0f, from = 0.0f;  // of W and of V
  if (d < HIDDEN)
    for (i64 n = warp; n < frames; n += SUMMING) {
      const float *values = y + n * NOTES, *g = db + n * NOTES;
      const u32* sounding = marks + n * WORDS;
      float a = c[n * HIDDEN + d];
      for (int word = 0; 32 * word < note; word++) {
        u32 bits = sounding[word];
        if (note - 32 * word < 32) bits &= (1u << (note - 32 * word)) - 1u;
        for (; bits; bits &= bits - 1u) {
          int j = 32 * word + __ffs((int)bits) - 1;
          a = fmaf(values[j], W[j * HIDDEN + d], a);
        }
      }
      from = fmaf(g[note], logistic(a), from);
      float of_note = values[note];
      if (of_note == 0.0f) continue;
      a = fmaf(of_note, W[note * HIDDEN + d], a);
      float sum = 0.0f, total = 0.0f;
      for (int i = note + 1; i < NOTES; i++) {
        float value = values[i];
        sum = fmaf(g[i], V[i * HIDDEN + d], sum);
        if (value == 0.0f) continue;
        float s = logistic(a);
        total = fmaf(sum, s * (1.0f - s), total);
        sum = 0.0f;
        a = fmaf(value, W[i * HIDDEN + d], a);
      }
      float s = logistic(a);
      into = fmaf(of_note, fmaf(sum, s * (1.0f - s), total), into);
    }
  part[0][warp][lane] = into;
  part[1][warp][lane] = from;
  __syncthreads();
  if (warp < 2 && d < HIDDEN) {
    float total = 0.0f;
    for (int w = 0; w < SUMMING; w++) total += part[warp][w][lane];
    (warp ? dV : dW)[(member * NOTES + note) * HIDDEN + d] = total;
  }
}
