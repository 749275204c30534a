// Weight matrices in the types they are stored in: float32, bf16, or MXFP4 (nibbles and a power of two per 32 columns).
//
// A kernel reads 32 consecutive columns of a row at a time and gets them as float32 vectors in their natural order;
// widening and decoding happen in registers and round nothing. A row that does not end at a multiple of 32 is read
// through `last`, which fills up with zeros and touches no byte behind the row.
//
//     with_format(m.format, [&](auto f) {          // f is Float32Rows, Bfloat16Rows or Mxfp4Rows
//       decltype(f) rows(m, expert);               // rows of one matrix of a stack; 0 for a single one
//       vf w[kGroupVectors];
//       rows.at(r).group(c, w);                    // columns c ... c + 31, c a multiple of 32, all of them there
//       rows.at(r).last(c, n, w);                  // columns c ... c + n - 1, then zeros; n < 32
//     });
#pragma once
#include "rows.h"

// a * b + c, rounded once where the machine can. Written out because a compiler may leave a chain of such unfused, here
// and not there (GCC does for Zen, in loops with a single sum), and one and the same product then has two results.
INLINE vf multiply_add(vf a, vf b, vf c) {
#if defined(__AVX512F__)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX__) && defined(__FMA__)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

constexpr int kGroup = 32, kGroupVectors = kGroup / W;

enum Format : int32_t { kAbsent = -1, kFloat32Rows = 0, kBfloat16Rows = 1, kMxfp4Rows = 2 };

// A matrix (rows, columns), row after row, or a stack of such (experts). MXFP4: columns / 2 bytes a row, the even
// column in the low nibble, and columns / 32 scale bytes a row in `scale`. `struct Matrix` of kernels/decode_cpu.py.
struct Matrix {
  const void* data;
  const uint8_t* scale;
  int64_t rows, columns;
  int32_t format;
  explicit operator bool() const { return data != nullptr; }
};

template <class T>
struct PlainRow {
  const T* p;
  INLINE void group(int64_t c, vf (&w)[kGroupVectors]) const {
    UNROLL
    for (int v = 0; v < kGroupVectors; ++v) w[v] = load(p + c + v * W);
  }
  INLINE void last(int64_t c, int n, vf (&w)[kGroupVectors]) const {
    T buffer[kGroup] = {};
    memcpy(buffer, p + c, size_t(n) * sizeof(T));
    PlainRow{buffer}.group(0, w);
  }
  // Asks for the memory line that holds column c; with 32 columns a step this is every line of a row.
  INLINE void prefetch(int64_t c) const {
    __builtin_prefetch(p + c);
    if (sizeof(T) == 4) __builtin_prefetch(p + c + 16);
  }
};

template <class T>
struct PlainRows {
  static constexpr bool kPacked = false;
  const T* data;
  int64_t columns;
  PlainRows() = default;
  PlainRows(const Matrix& m, int64_t i) : data(static_cast<const T*>(m.data) + i * m.rows * m.columns), columns(m.columns) {}
  INLINE PlainRow<T> at(int64_t r) const { return {data + r * columns}; }
};

using Float32Rows = PlainRows<float>;
using Bfloat16Rows = PlainRows<bf16>;

// 2^(s - 127); 255 gives infinity, as everywhere that scale bytes become float32.
INLINE float mxfp4_scale(uint8_t s) {
  uint32_t bits = s ? uint32_t(s) << 23 : 0x00400000u;
  float y;
  memcpy(&y, &bits, 4);
  return y;
}

struct Mxfp4Row {
  const uint8_t *nibbles, *scale;

  INLINE void group(int64_t c, vf (&w)[kGroupVectors]) const { decode(nibbles + c / 2, mxfp4_scale(scale[c / kGroup]), w); }
  // Widths are whole blocks, so there is no part of one to read.
  INLINE void last(int64_t, int, vf (&w)[kGroupVectors]) const {
    UNROLL
    for (int v = 0; v < kGroupVectors; ++v) w[v] = vf{};
  }
  INLINE void prefetch(int64_t c) const { __builtin_prefetch(nibbles + c / 2); }

 private:
  static INLINE void decode(const uint8_t* p, float scale, vf (&w)[kGroupVectors]) {
#if defined(__AVX512F__)
    // One table of the sixteen values, already scaled; the permutation looks at the low four bits of a lane only.
    const __m512 table = _mm512_mul_ps(
        _mm512_setr_ps(0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6), _mm512_set1_ps(scale));
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const __m512 even = _mm512_permutexvar_ps(bytes, table), odd = _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), table);
    const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i second = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    w[0] = (vf)_mm512_permutex2var_ps(even, first, odd);
    w[1] = (vf)_mm512_permutex2var_ps(even, second, odd);
#elif defined(__AVX2__)
    // Twice the value of a nibble fits a signed byte; bytes become integers, integers become floats.
    const __m128i table = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
    const __m128i low = _mm_set1_epi8(15), bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    const __m128i even = _mm_shuffle_epi8(table, _mm_and_si128(bytes, low));
    const __m128i odd = _mm_shuffle_epi8(table, _mm_and_si128(_mm_srli_epi16(bytes, 4), low));
    const __m128i first = _mm_unpacklo_epi8(even, odd), second = _mm_unpackhi_epi8(even, odd);
    const __m256 half = _mm256_set1_ps(scale * .5f);  // exact down to the smallest scale
    const __m128i parts[4] = {first, _mm_srli_si128(first, 8), second, _mm_srli_si128(second, 8)};
    UNROLL
    for (int v = 0; v < 4; ++v) w[v] = (vf)_mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(parts[v])), half);
#else
    static const float table[16] = {0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6};
    float values[kGroup];
    for (int i = 0; i < kGroup / 2; ++i) {
      values[2 * i] = table[p[i] & 15] * scale;
      values[2 * i + 1] = table[p[i] >> 4] * scale;
    }
    UNROLL
    for (int v = 0; v < kGroupVectors; ++v) w[v] = load(values + v * W);
#endif
  }
};

struct Mxfp4Rows {
  static constexpr bool kPacked = true;
  const uint8_t *data, *scale;
  int64_t columns;
  Mxfp4Rows() = default;
  Mxfp4Rows(const Matrix& m, int64_t i)
      : data(static_cast<const uint8_t*>(m.data) + i * m.rows * (m.columns / 2)),
        scale(m.scale + i * m.rows * (m.columns / kGroup)),
        columns(m.columns) {}
  INLINE Mxfp4Row at(int64_t r) const { return {data + r * (columns / 2), scale + r * (columns / kGroup)}; }
};

// Calls run(F{}) with F the reader of a storage format.
template <class Run>
INLINE void with_format(int32_t format, Run run) {
  if (format == kFloat32Rows) run(Float32Rows{});
  else if (format == kBfloat16Rows) run(Bfloat16Rows{});
  else run(Mxfp4Rows{});
}
