// Rows of float32 or bf16 numbers, one vector at a time: reading and writing, e^x and what follows from it, sums
// along a row and sums over rows. Arithmetic is float32 throughout; what is stored as bf16 is rounded once.
//
// A NaN goes through everything here. Sums over rows are taken in blocks whose size depends on the shape alone, so
// that a result is the same bits for any number of threads.
#pragma once
#include <type_traits>
#include <vector>

#include "simd.h"

struct bf16 {
  uint16_t bits;
};

typedef uint32_t vu __attribute__((vector_size(W * 4)));
typedef uint16_t vh __attribute__((vector_size(W * 2)));
typedef uint16_t vh_any __attribute__((vector_size(W * 2), aligned(2), may_alias));

INLINE vf load(const bf16* p) {
  vh bits = *reinterpret_cast<const vh_any*>(p);
  return (vf)(__builtin_convertvector(bits, vu) << 16);
}

// To nearest even; a NaN stays one. The processor's own instruction also makes zeros of numbers below 2^-126.
INLINE vh rounded(vf x) {
#if defined(__AVX512BF16__)
  return (vh)_mm512_cvtneps_pbh((__m512)x);
#else
  vu bits = (vu)x, nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return __builtin_convertvector(x == x ? nearest : ((bits >> 16) | 0x40), vh);
#endif
}

INLINE void store(bf16* p, vf x) { *reinterpret_cast<vh_any*>(p) = rounded(x); }

// x as it would come back from memory of type T.
INLINE vf rounded_to(const float*, vf x) { return x; }
INLINE vf rounded_to(const bf16*, vf x) { return (vf)(__builtin_convertvector(rounded(x), vu) << 16); }

INLINE float read_one(const float* p) { return *p; }
INLINE float read_one(const bf16* p) { return widen(p->bits); }
INLINE void write_one(float* p, float x) { *p = x; }
INLINE void write_one(bf16* p, float x) { p->bits = narrow(x); }

// How much of a vector a row still has: all of it, or its first n numbers. What is missing reads as zero and is not
// written.
struct Whole {};
struct Part {
  int n;
};

template <class T>
INLINE vf read(const T* p, Whole) {
  return load(p);
}
template <class T>
INLINE vf read(const T* p, Part part) {
  float numbers[W] = {};
  for (int i = 0; i < part.n; ++i) numbers[i] = read_one(p + i);
  return load(numbers);
}
template <class T>
INLINE void write(T* p, vf x, Whole) {
  store(p, x);
}
template <class T>
INLINE void write(T* p, vf x, Part part) {
  float numbers[W];
  store(numbers, x);
  for (int i = 0; i < part.n; ++i) write_one(p + i, numbers[i]);
}

// x, with zeros for what is missing.
INLINE vf within(vf x, Whole) { return x; }
INLINE vf within(vf x, Part part) {
  float numbers[W] = {};
  write(numbers, x, part);
  return load(numbers);
}

#if defined(__AVX512BW__) && defined(__AVX512VL__)
// The same without a loop: what a mask leaves out is not touched.
INLINE __mmask16 mask_of(Part part) { return __mmask16((1u << part.n) - 1); }
INLINE vf read(const float* p, Part part) { return (vf)_mm512_maskz_loadu_ps(mask_of(part), p); }
INLINE vf read(const bf16* p, Part part) {
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask_of(part), p)), 16);
}
INLINE void write(float* p, vf x, Part part) { _mm512_mask_storeu_ps(p, mask_of(part), (__m512)x); }
INLINE void write(bf16* p, vf x, Part part) { _mm256_mask_storeu_epi16(p, mask_of(part), (__m256i)rounded(x)); }
#endif

// body(i, part) for every vector of n numbers.
template <class Body>
INLINE void for_columns(int64_t n, Body body) {
  int64_t i = 0;
  for (; i + W <= n; i += W) body(i, Whole{});
  if (i < n) body(i, Part{int(n - i)});
}

INLINE float total(vf x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)x);
#else
  float numbers[W];
  store(numbers, x);
  for (int half = W / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) numbers[i] += numbers[i + half];
  return numbers[0];
#endif
}

// N sums along a row: body(i, part, sums) adds its vector's terms. Two sets of sums hide the latency of addition.
template <int N, class Body>
INLINE void sum_columns(int64_t n, float (&out)[N], Body body) {
  vf even[N] = {}, odd[N] = {};
  int64_t i = 0;
  for (; i + 2 * W <= n; i += 2 * W) body(i, Whole{}, even), body(i + W, Whole{}, odd);
  if (i + W <= n) body(i, Whole{}, even), i += W;
  if (i < n) body(i, Part{int(n - i)}, odd);
  for (int k = 0; k < N; ++k) out[k] = total(even[k] + odd[k]);
}

// e^x = power (1 + p) with p = e^r - 1 exact to rounding, |r| <= ln 2 / 2 (Cephes); -87 <= x <= 88.
struct Exponential {
  vf power, p;
  vf exp() const { return power * p + power; }
  vf minus_one() const { return power * p + (power - 1.0f); }
};

INLINE Exponential exponential(vf x) {
  const float magic = 12582912.0f;  // 1.5 * 2^23 rounds to an integer in the low bits
  vf shifted = x * 1.44269504088896341f + magic;
  vf n = shifted - magic;
  vf r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  vf y = splat(1.9875691500e-4f);
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  vu power = (((vu)shifted) << 23) + 0x3f800000u;
  return {(vf)power, y * (r * r) + r};
}

// e^x for x <= 0; zero below e^-87, where float32 loses its digits.
INLINE vf exp_or_zero(vf x) {
  vf low = splat(-87.0f);
  vf y = exponential(x < low ? low : x).exp();
  return x < low ? vf{} : y;
}

// sigmoid(x) and its complement 1 - sigmoid(x), each to its own last digits.
struct Sigmoid {
  vf value, complement;
};

INLINE Sigmoid sigmoid(vf x) {
  vf e = exp_or_zero((vf)((vu)x | 0x80000000u));
  vf large = 1.0f / (1.0f + e), small = e * large;
  return {x < 0.0f ? small : large, x < 0.0f ? large : small};
}

// tanh(x) and its derivative 1 - tanh(x)^2, each to its own last digits.
struct Tanh {
  vf value, slope;
};

INLINE Tanh tanh(vf x) {
  vf high = splat(87.0f), twice = x + x;
  twice = twice > high ? high : twice < -high ? -high : twice;
  Exponential e = exponential(twice);
  vf m = e.minus_one(), inverse = 1.0f / (m + 2.0f);
  return {m * inverse, 4.0f * e.exp() * inverse * inverse};
}

// Rows in blocks: the unit of work for a thread and of sums over rows. At most 256 of them.
struct Blocks {
  int64_t rows, size, count;
  Blocks(int64_t rows_, int64_t at_least) : rows(rows_) {
    size = (rows + 255) / 256 > at_least ? (rows + 255) / 256 : at_least;
    count = (rows + size - 1) / size;
  }
};

// run(block, first row, one past the last row).
template <class Run>
void for_blocks(const Blocks& blocks, int64_t threads, Run run) {
  if (threads > blocks.count) threads = blocks.count;
  if (!threads) return;
#pragma omp parallel for schedule(static) num_threads(int(threads)) if (threads > 1)
  for (int64_t b = 0; b < blocks.count; ++b) {
    int64_t end = (b + 1) * blocks.size;
    run(b, b * blocks.size, end < blocks.rows ? end : blocks.rows);
  }
}

// Sums over rows of `width` numbers: each block adds into its own line, and lines are added in their order.
class SumOverRows {
 public:
  SumOverRows(const Blocks& blocks, int64_t width) : count_(blocks.count), width_(width), lines_(count_ * width) {}
  float* line(int64_t block) { return lines_.data() + block * width_; }
  void write(float* out) const {
    for (int64_t i = 0; i < width_; ++i) out[i] = 0.0f;
    for (int64_t b = 0; b < count_; ++b)
      for (int64_t i = 0; i < width_; ++i) out[i] += lines_[b * width_ + i];
  }

 private:
  int64_t count_, width_;
  std::vector<float> lines_;
};

// Calls run(T{}) with T the storage type.
template <class Run>
void with_type(Type type, Run run) {
  if (type == kFloat32) run(float{});
  else run(bf16{});
}

// Calls run(std::true_type) or run(std::false_type): a flag known to the compiler.
template <class Run>
void with_flag(bool flag, Run run) {
  if (flag) run(std::true_type{});
  else run(std::false_type{});
}
