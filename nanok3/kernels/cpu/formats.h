// Weight matrices in the types they are stored in: float32, bf16, or MXFP4 (nibbles and a power of two per 32 columns).
//
// A kernel reads 32 consecutive columns of a row at a time and gets them as float32 vectors; widening and decoding happen
// in registers and round nothing. A row that does not end at a multiple of 32 is read through `last`, which fills up
// with zeros and touches no byte behind the row.
//
// `group` gives the columns in their natural order. `turned` gives them in the order that costs the fewest instructions,
// and `turn` brings activations into the same order: a sum over columns does not mind. MXFP4 rows give values and their
// powers of two apart there (`values_turned`, `write_factors`), so that a sum of 32 columns is scaled once.
//
//     with_format(m.format, [&](auto f) {          // f is Float32Rows, Bfloat16Rows or Mxfp4Rows
//       decltype(f) rows(m, expert);               // rows of one matrix of a stack; 0 for a single one
//       vf w[kGroupVectors];
//       rows.at(r).group(c, w);                    // columns c ... c + 31, c a multiple of 32, all of them there
//       rows.at(r).last(c, n, w);                  // columns c ... c + n - 1, then zeros; n < 32
//       w[0] = rows.at(r).turned(c, 0);            // vector 0 of them in the order of rows.turn(x, n, y)
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

INLINE vf widened(const float* p) { return load(p); }
INLINE vf widened(const bf16* p) {  // in so many words: from vector extensions GCC makes four instructions of the first
#if defined(__AVX512F__)
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16);
#elif defined(__AVX2__)
  return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16);
#else
  return load(p);
#endif
}

// The even and the odd ones of 2 W numbers.
INLINE void part_pairs(vf a, vf b, vf& even, vf& odd) {
#if defined(__AVX512F__)
  const __m512i low = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  even = (vf)_mm512_permutex2var_ps((__m512)a, low, (__m512)b);
  odd = (vf)_mm512_permutex2var_ps((__m512)a, _mm512_add_epi32(low, _mm512_set1_epi32(1)), (__m512)b);
#elif defined(__AVX2__)
  const __m256 x = _mm256_shuffle_ps((__m256)a, (__m256)b, 0x88), y = _mm256_shuffle_ps((__m256)a, (__m256)b, 0xdd);
  even = (vf)_mm256_permute4x64_pd((__m256d)x, 0xd8);
  odd = (vf)_mm256_permute4x64_pd((__m256d)y, 0xd8);
#else
  for (int i = 0; i < W / 2; ++i) {
    vf x = a, y = b;
    even[i] = x[2 * i], even[W / 2 + i] = y[2 * i], odd[i] = x[2 * i + 1], odd[W / 2 + i] = y[2 * i + 1];
  }
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

typedef uint32_t vu_any __attribute__((vector_size(W * 4), aligned(2), may_alias));

template <class T>
struct PlainRow {
  const T* p;
  INLINE void group(int64_t c, vf (&w)[kGroupVectors]) const {
    UNROLL
    for (int v = 0; v < kGroupVectors; ++v) w[v] = widened(p + c + v * W);
  }
  INLINE void last(int64_t c, int n, vf (&w)[kGroupVectors]) const {
    T buffer[kGroup] = {};
    memcpy(buffer, p + c, size_t(n) * sizeof(T));
    PlainRow{buffer}.group(0, w);
  }
  // Vector v of a group in turned order. bf16: of each pair in 32 bits, the low one moved up or the high one as it stands.
  INLINE vf turned(int64_t c, int v) const {
    if constexpr (std::is_same_v<T, float>) {
      return load(p + c + v * W);
    } else {
      const vu pairs = *reinterpret_cast<const vu_any*>(p + c + v / 2 * 2 * W);
      return (vf)(v % 2 ? pairs & 0xffff0000u : pairs << 16);
    }
  }
  INLINE void last_turned(int64_t c, int n, vf (&w)[kGroupVectors]) const {
    T buffer[kGroup] = {};
    memcpy(buffer, p + c, size_t(n) * sizeof(T));
    UNROLL
    for (int v = 0; v < kGroupVectors; ++v) w[v] = PlainRow{buffer}.turned(0, v);
  }
};

template <class T>
struct PlainRows {
  static constexpr bool kTurned = !std::is_same_v<T, float>, kScaled = false;
  const T* data;
  int64_t columns;
  PlainRows() = default;
  PlainRows(const Matrix& m, int64_t i) : data(static_cast<const T*>(m.data) + i * m.rows * m.columns), columns(m.columns) {}
  INLINE PlainRow<T> at(int64_t r) const { return {data + r * columns}; }
  // n numbers, a multiple of 32.
  static INLINE void turn(const float* x, int64_t n, float* y) {
    for (int64_t i = 0; i < n; i += 2 * W) {
      vf even, odd;
      part_pairs(load(x + i), load(x + i + W), even, odd);
      store(y + i, even), store(y + i + W, odd);
    }
  }
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

// The same for W bytes.
INLINE vf mxfp4_scales(const uint8_t* s) {
#if defined(__AVX512F__)
  const __m512i power = _mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(s))), 23);
  return (vf)_mm512_max_epu32(power, _mm512_set1_epi32(0x00400000));
#elif defined(__AVX2__)
  const __m256i power = _mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(s))), 23);
  return (vf)_mm256_max_epu32(power, _mm256_set1_epi32(0x00400000));
#else
  vf y = {};
  for (int i = 0; i < W; ++i) y[i] = mxfp4_scale(s[i]);
  return y;
#endif
}

struct Mxfp4Row {
  const uint8_t *nibbles, *scale;

  INLINE void group(int64_t c, vf (&w)[kGroupVectors]) const { decode(nibbles + c / 2, mxfp4_scale(scale[c / kGroup]), w); }
  // Widths are whole blocks, so there is no part of one to read.
  INLINE void last(int64_t, int, vf (&w)[kGroupVectors]) const {
    UNROLL
    for (int v = 0; v < kGroupVectors; ++v) w[v] = vf{};
  }
  // The powers of two of n groups; y has room for whole vectors.
  INLINE void write_factors(int64_t n, float* y) const {
    int64_t i = 0;
    for (; i + W <= n; i += W) store(y + i, mxfp4_scales(scale + i));
    if (i == n) return;
    uint8_t rest[W] = {};
    memcpy(rest, scale + i, size_t(n - i));
    store(y + i, mxfp4_scales(rest));
  }

  // A group in turned order, before it is scaled.
  INLINE void values_turned(int64_t c, vf (&w)[kGroupVectors]) const {
    const uint8_t* p = nibbles + c / 2;
#if defined(__AVX512F__)
    const __m512 table = scaled_values(1);
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    w[0] = (vf)_mm512_permutexvar_ps(bytes, table);
    w[1] = (vf)_mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), table);
#elif defined(__AVX2__)
    // The values are bf16 numbers. Two tables give their bytes: the even columns in the low half of a register, the odd
    // ones in the high half; put together, pairs lie in 32 bits as in a row of bf16.
    const __m256i high = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40, -0x80, -0x41, -0x41, -0x41, -0x40, -0x40, -0x40, -0x40));
    const __m256i low = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 0, -0x80, -0x40, 0, 0x40, -0x80, -0x40, 0, 0, -0x80, -0x40, 0, 0x40, -0x80, -0x40));
    const __m256i both = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const __m256i shifted = _mm256_srlv_epi32(both, _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4));
    const __m256i nibble = _mm256_and_si256(shifted, _mm256_set1_epi8(15));
    const __m256i upper = _mm256_shuffle_epi8(high, nibble), lower = _mm256_shuffle_epi8(low, nibble);
    const __m256i pairs[2] = {_mm256_unpacklo_epi8(lower, upper), _mm256_unpackhi_epi8(lower, upper)};
    UNROLL
    for (int v = 0; v < 2; ++v) {
      w[2 * v] = (vf)((vu)pairs[v] << 16);
      w[2 * v + 1] = (vf)((vu)pairs[v] & 0xffff0000u);
    }
#else
    decode(p, 1, w);
#endif
  }

 private:
#if defined(__AVX512F__)
  // A table of the sixteen values; a permutation of it looks at the low four bits of a lane only.
  static INLINE __m512 scaled_values(float scale) {
    return _mm512_mul_ps(_mm512_setr_ps(0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6),
                         _mm512_set1_ps(scale));
  }
#endif
  static INLINE void decode(const uint8_t* p, float scale, vf (&w)[kGroupVectors]) {
#if defined(__AVX512F__)
    const __m512 table = scaled_values(scale);
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
#if defined(__AVX2__)
  static constexpr bool kTurned = true, kScaled = true;
#else
  static constexpr bool kTurned = false, kScaled = true;
#endif
  const uint8_t *data, *scale;
  int64_t columns;
  Mxfp4Rows() = default;
  Mxfp4Rows(const Matrix& m, int64_t i)
      : data(static_cast<const uint8_t*>(m.data) + i * m.rows * (m.columns / 2)),
        scale(m.scale + i * m.rows * (m.columns / kGroup)),
        columns(m.columns) {}
  INLINE Mxfp4Row at(int64_t r) const { return {data + r * (columns / 2), scale + r * (columns / kGroup)}; }
  static INLINE void turn(const float* x, int64_t n, float* y) {
    for (int64_t i = 0; i < n; i += 2 * W) {
      vf even, odd;
      part_pairs(load(x + i), load(x + i + W), even, odd);
      if (W == 8) part_pairs(even, odd, even, odd);  // a lane of 32 bits then holds the columns of two nibbles, 2 apart
      store(y + i, even), store(y + i + W, odd);
    }
  }
};

// Calls run(F{}) with F the reader of a storage format.
template <class Run>
INLINE void with_format(int32_t format, Run run) {
  if (format == kFloat32Rows) run(Float32Rows{});
  else if (format == kBfloat16Rows) run(Bfloat16Rows{});
  else run(Mxfp4Rows{});
}
