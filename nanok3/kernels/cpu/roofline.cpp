// What one core can do at most: float32 multiply-adds on registers alone.
#include "simd.h"

// Independent multiply-adds in flight: at least latency times units (8 to 16), and with two constants no more than
// there are registers, or the loop would measure how fast they are spilled.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int N = 16;
#else
constexpr int N = 12;
#endif

extern "C" {

// Runs `rounds` times N independent multiply-adds of whole vectors and returns a number that depends on all of them.
// Operations done: see roofline_operations.
float roofline_multiply_adds(int64_t rounds) {
  vf x[N], shrink = splat(0.999f), add = splat(1e-3f), total = {};
  UNROLL
  for (int i = 0; i < N; ++i) x[i] = splat(float(i));
  for (int64_t k = 0; k < rounds; ++k) {
    UNROLL
    for (int i = 0; i < N; ++i) x[i] = x[i] * shrink + add;
  }
  UNROLL
  for (int i = 0; i < N; ++i) total += x[i];
  return sum(total);
}

int64_t roofline_operations(int64_t rounds) { return rounds * N * W * 2; }

}  // extern "C"
