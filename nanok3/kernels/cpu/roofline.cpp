// What this machine can do at most: float32 multiply-adds on registers alone, and reading memory with nothing done to it.
#include "simd.h"
#include "team.h"

// Independent multiply-adds in flight: at least latency times units (8 to 16), and with two constants no more than
// there are registers, or the loop would measure how fast they are spilled.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int N = 16;
#else
constexpr int N = 12;
#endif

namespace {

constexpr int64_t kPiece = 1 << 14;

template <int S>
INLINE vi read_streams(const float* p) {
  vi seen[S][8 / S] = {};
  for (int64_t i = 0; i < kPiece; i += 8 / S * W)
    UNROLL
    for (int s = 0; s < S; ++s)
      UNROLL
      for (int j = 0; j < 8 / S; ++j) seen[s][j] |= (vi)load(p + s * kPiece + i + j * W);
  vi all = {};
  for (int s = 0; s < S; ++s)
    for (int j = 0; j < 8 / S; ++j) all |= seen[s][j];
  return all;
}

}  // namespace

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

// Reads n floats once and writes a number that depends on all of them. n is a multiple of 1 << 14. Eight streams are
// read side by side, as decoding reads the rows of a matrix: a processor fetches ahead in each of them, and memory gives
// more than to one reader that goes from the first number to the last.
void roofline_read(const float* p, int64_t n, int64_t threads, float* out) {
  std::atomic<int> any{0};
  Team::run(int(threads), [&](Member team) {
    team.share(n / kPiece, 8, [&](int64_t begin, int64_t end) {
      vi all = {};
      for (; begin + 8 <= end; begin += 8) all |= read_streams<8>(p + begin * kPiece);
      for (; begin < end; ++begin) all |= read_streams<1>(p + begin * kPiece);
      for (int i = 0; i < W; ++i) any.fetch_or(all[i], std::memory_order_relaxed);
    });
  });
  *out = float(any.load());
}

}  // extern "C"
