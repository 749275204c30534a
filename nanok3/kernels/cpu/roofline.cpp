// What one core can do at most: float32 multiply-adds on registers alone.
#include "simd.h"

extern "C" {

// Runs `rounds` times sixteen independent multiply-adds of whole vectors, more than any processor's latency times
// width asks for, and returns a number that depends on all of them. Operations done: see roofline_operations.
float roofline_multiply_adds(int64_t rounds) {
  vf x[16], shrink = splat(0.999f), add = splat(1e-3f), total = {};
  UNROLL
  for (int i = 0; i < 16; ++i) x[i] = splat(float(i));
  for (int64_t k = 0; k < rounds; ++k) {
    UNROLL
    for (int i = 0; i < 16; ++i) x[i] = x[i] * shrink + add;
  }
  UNROLL
  for (int i = 0; i < 16; ++i) total += x[i];
  return sum(total);
}

int64_t roofline_operations(int64_t rounds) { return rounds * 16 * W * 2; }

}  // extern "C"
