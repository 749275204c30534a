// One float vector of the width this machine has (16, 8 or 4), and what the kernels need on it.
//
// GCC and Clang vector extensions carry the arithmetic, so one source serves AVX-512, AVX2, NEON and
// plain SSE; intrinsics appear only where the extensions give bad code (broadcast, transpose).
// Numbers are stored as float32 or bf16 and always computed as float32.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#if defined(__AVX__)
#include <immintrin.h>
#endif

#define INLINE inline __attribute__((always_inline))
#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));
typedef float vf_any __attribute__((vector_size(W * 4), aligned(4), may_alias));

INLINE vf load(const float* p) { return *reinterpret_cast<const vf_any*>(p); }
INLINE void store(float* p, vf x) { *reinterpret_cast<vf_any*>(p) = x; }

INLINE vf splat(float x) {
#if defined(__AVX512F__)
  return (vf)_mm512_set1_ps(x);
#elif defined(__AVX__)
  return (vf)_mm256_set1_ps(x);
#else
  return vf{x, x, x, x};
#endif
}

INLINE float sum(vf x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)x);
#elif defined(__AVX__)
  __m128 four = _mm_add_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return four[0] + four[1];
#else
  return (x[0] + x[2]) + (x[1] + x[3]);
#endif
}

// x, but in a register: a compiler may take it for free to read a vector from memory again at every use, though
// the reads of a product are as scarce as its multiply-adds.
INLINE vf in_register(vf x) {
#if defined(__x86_64__)
  __asm__("" : "+x"(x));
#elif defined(__aarch64__)
  __asm__("" : "+w"(x));
#endif
  return x;
}

// e^x for x <= 0 to about one unit in the last place (Cephes: x = n ln 2 + r, polynomial in r); e^0 is 1.
INLINE vf exp_nonpositive(vf x) {
  const float lowest = -87.0f, magic = 12582912.0f;  // 1.5 * 2^23 rounds to an integer in the low bits
  vf low = splat(lowest);
  x = x < low ? low : x;
  vf shifted = x * 1.44269504088896341f + magic;
  vf n = shifted - magic;
  vf r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  vf y = splat(1.9875691500e-4f);
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * (r * r) + r + 1.0f;
  vi power = (((vi)shifted) << 23) + 0x3f800000;
  return y * (vf)power;
}

enum Type : int32_t { kFloat32 = 0, kBfloat16 = 1 };

INLINE float widen(uint16_t x) {
  uint32_t bits = uint32_t(x) << 16;
  float y;
  memcpy(&y, &bits, 4);
  return y;
}

INLINE uint16_t narrow(float x) {  // round to nearest even; a NaN stays one
  uint32_t bits;
  memcpy(&bits, &x, 4);
  uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return uint16_t((bits & 0x7fffffff) > 0x7f800000 ? (bits >> 16) | 0x40 : rounded);
}

INLINE float read_one(const void* base, int64_t i, Type type) {
  return type == kFloat32 ? static_cast<const float*>(base)[i] : widen(static_cast<const uint16_t*>(base)[i]);
}

INLINE void write_one(void* base, int64_t i, Type type, float x) {
  if (type == kFloat32) static_cast<float*>(base)[i] = x;
  else static_cast<uint16_t*>(base)[i] = narrow(x);
}

// dst[0:n] = base[at : at+n] as float32, dst[n:padded] = 0.
INLINE void read_row(const void* base, int64_t at, Type type, int n, int padded, float* dst) {
  if (type == kFloat32) {
    const float* src = static_cast<const float*>(base) + at;
    int i = 0;
    for (; i + W <= n; i += W) store(dst + i, load(src + i));
    for (; i < n; ++i) dst[i] = src[i];
  } else {
    const uint16_t* src = static_cast<const uint16_t*>(base) + at;
    for (int i = 0; i < n; ++i) dst[i] = widen(src[i]);
  }
  for (int i = n; i < padded; ++i) dst[i] = 0;
}

INLINE void write_row(void* base, int64_t at, Type type, int n, const float* src) {
  if (type == kFloat32) {
    float* dst = static_cast<float*>(base) + at;
    int i = 0;
    for (; i + W <= n; i += W) store(dst + i, load(src + i));
    for (; i < n; ++i) dst[i] = src[i];
  } else {
    uint16_t* dst = static_cast<uint16_t*>(base) + at;
    for (int i = 0; i < n; ++i) dst[i] = narrow(src[i]);
  }
}

#if defined(__AVX__) && !defined(__AVX512F__)
// W x W numbers.
INLINE void transpose_square(const float* src, ptrdiff_t lds, float* dst, ptrdiff_t ldd) {
  __m256 r[8], t[8];
  UNROLL
  for (int i = 0; i < 4; ++i) {  // halves of 4 columns, so that the lanes need no exchange afterwards
    const float *upper = src + i * lds, *lower = src + (i + 4) * lds;
    r[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(upper)), _mm_loadu_ps(lower), 1);
    r[4 + i] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(upper + 4)), _mm_loadu_ps(lower + 4), 1);
  }
  UNROLL
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  UNROLL
  for (int i = 0; i < 8; i += 4) {
    _mm256_storeu_ps(dst + i * ldd, _mm256_shuffle_ps(t[i], t[i + 2], 0x44));
    _mm256_storeu_ps(dst + (i + 1) * ldd, _mm256_shuffle_ps(t[i], t[i + 2], 0xee));
    _mm256_storeu_ps(dst + (i + 2) * ldd, _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44));
    _mm256_storeu_ps(dst + (i + 3) * ldd, _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee));
  }
}
#elif !defined(__AVX512F__)
INLINE void transpose_square(const float* src, ptrdiff_t lds, float* dst, ptrdiff_t ldd) {
  for (int j = 0; j < W; ++j)
    for (int i = 0; i < W; ++i) dst[j * ldd + i] = src[i * lds + j];
}
#endif

// dst (16 columns x 16 rows, row stride ldd) = transpose of src (16 rows x 16 columns, row stride lds).
INLINE void transpose16(const float* src, ptrdiff_t lds, float* dst, ptrdiff_t ldd) {
#if defined(__AVX512F__)
  __m512 r[16], t[16];
  UNROLL
  for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_ps(src + i * lds);
  UNROLL
  for (int i = 0; i < 4; ++i) {  // 4x4 blocks inside each 128-bit lane
    __m512 a = _mm512_unpacklo_ps(r[4 * i], r[4 * i + 1]), b = _mm512_unpackhi_ps(r[4 * i], r[4 * i + 1]);
    __m512 c = _mm512_unpacklo_ps(r[4 * i + 2], r[4 * i + 3]), d = _mm512_unpackhi_ps(r[4 * i + 2], r[4 * i + 3]);
    t[4 * i] = _mm512_shuffle_ps(a, c, 0x44);
    t[4 * i + 1] = _mm512_shuffle_ps(a, c, 0xee);
    t[4 * i + 2] = _mm512_shuffle_ps(b, d, 0x44);
    t[4 * i + 3] = _mm512_shuffle_ps(b, d, 0xee);
  }
  UNROLL
  for (int i = 0; i < 4; ++i) {  // then the 4x4 arrangement of lanes
    __m512 a = _mm512_shuffle_f32x4(t[i], t[4 + i], 0x44), b = _mm512_shuffle_f32x4(t[i], t[4 + i], 0xee);
    __m512 c = _mm512_shuffle_f32x4(t[8 + i], t[12 + i], 0x44), d = _mm512_shuffle_f32x4(t[8 + i], t[12 + i], 0xee);
    _mm512_storeu_ps(dst + i * ldd, _mm512_shuffle_f32x4(a, c, 0x88));
    _mm512_storeu_ps(dst + (4 + i) * ldd, _mm512_shuffle_f32x4(a, c, 0xdd));
    _mm512_storeu_ps(dst + (8 + i) * ldd, _mm512_shuffle_f32x4(b, d, 0x88));
    _mm512_storeu_ps(dst + (12 + i) * ldd, _mm512_shuffle_f32x4(b, d, 0xdd));
  }
#else
  for (int i = 0; i < 16; i += W)
    for (int j = 0; j < 16; j += W) transpose_square(src + i * lds + j, lds, dst + j * ldd + i, ldd);
#endif
}

// rows x cols (both multiples of 16) -> cols x rows.
INLINE void transpose(const float* src, ptrdiff_t lds, int rows, int cols, float* dst, ptrdiff_t ldd) {
  for (int i = 0; i < rows; i += 16)
    for (int j = 0; j < cols; j += 16) transpose16(src + i * lds + j, lds, dst + j * ldd + i, ldd);
}

// Rows that will be used soon, asked for a few cache lines at a time between the tiles of a product: they lie
// too far apart for the processor to guess them, and asked for at once they would wait for each other.
class Ahead {
 public:
  void clear() { rows_ = row_ = byte_ = lines_ = 0; }
  void add(const void* base, int64_t at, Type type, int n) {
    int size = type == kFloat32 ? 4 : 2;
    start_[rows_] = static_cast<const char*>(base) + at * size;
    bytes_[rows_++] = n * size;
    lines_ += (n * size + 63) / 64;
  }
  // The products in between have `depth` steps in all.
  void spread_over(int depth) { per_16_steps_ = (lines_ * 16 + depth - 1) / depth; }
  INLINE void during(int depth) {
    for (int n = depth * per_16_steps_ / 16; n > 0 && row_ < rows_; --n) {
      __builtin_prefetch(start_[row_] + byte_, 0, 3);
      byte_ += 64;
      if (byte_ >= bytes_[row_]) byte_ = 0, ++row_;
    }
  }

 private:
  static constexpr int kMost = 80;
  const char* start_[kMost];
  int bytes_[kMost], rows_ = 0, row_ = 0, byte_ = 0, lines_ = 0, per_16_steps_ = 0;
};

struct NothingAhead {
  void during(int) {}
};

// Rows and columns of the tile of a product that stays in registers, for a result N columns wide.
constexpr int kTileRows = W == 16 ? 8 : 4;
constexpr int tile_columns(int N) { return N < (W == 4 ? 4 : 2) * W ? N : (W == 4 ? 4 : 2) * W; }

// The product every kernel is made of: for r < m, s < N:  acc[r][s] = sum_{p<n} a[r*ar + p*ap] * b[p*bp + s],
// handed to done(r, s, acc) one vector at a time. A tile of kTileRows x tile_columns(N) stays in registers.
// m is a multiple of 8, N of 16.
template <int N, class Done, class Fetch>
INLINE void product(int m, int n, const float* a, ptrdiff_t ar, ptrdiff_t ap, const float* b, ptrdiff_t bp, Done done,
                    Fetch& ahead) {
  constexpr int MR = kTileRows, NV = tile_columns(N) / W;
  for (int row = 0; row < m; row += MR)
    for (int col = 0; col < N; col += NV * W) {
      vf acc[MR][NV];
      UNROLL
      for (int r = 0; r < MR; ++r)
        UNROLL
        for (int s = 0; s < NV; ++s) acc[r][s] = vf{};
      const float *x = a + row * ar, *y = b + col;
      for (int p = 0; p < n; ++p, x += ap, y += bp) {
        vf right[NV];
        UNROLL
        for (int s = 0; s < NV; ++s) right[s] = in_register(load(y + s * W));
        UNROLL
        for (int r = 0; r < MR; ++r) {
          vf left = splat(x[r * ar]);
          UNROLL
          for (int s = 0; s < NV; ++s) acc[r][s] += left * right[s];
        }
      }
      UNROLL
      for (int r = 0; r < MR; ++r)
        UNROLL
        for (int s = 0; s < NV; ++s) done(row + r, col + s * W, acc[r][s]);
      ahead.during(n);
    }
}

template <int N, class Done>
INLINE void product(int m, int n, const float* a, ptrdiff_t ar, ptrdiff_t ap, const float* b, ptrdiff_t bp, Done done) {
  NothingAhead nothing;
  product<N>(m, n, a, ar, ap, b, bp, done, nothing);
}

// Scratch memory of one thread, kept between calls: fresh pages cost more than the arithmetic on them.
class Arena {
 public:
  ~Arena() { free(base_); }
  void reserve(size_t floats) {
    used_ = 0;
    if (floats <= size_) return;
    free(base_);
    size_ = floats;
    base_ = static_cast<float*>(aligned_alloc(64, (floats * 4 + 63) / 64 * 64));
    if (!base_) abort();
  }
  float* take(size_t floats) {  // floats is rounded up to whole cache lines
    float* p = base_ + used_;
    used_ += (floats + 15) / 16 * 16;
    if (used_ > size_) abort();
    return p;
  }

 private:
  float* base_ = nullptr;
  size_t size_ = 0, used_ = 0;
};
