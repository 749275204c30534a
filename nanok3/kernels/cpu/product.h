// Matrix products on one thread, float32 throughout: whatever the factors are stored as, they are widened or decoded
// block by block into a panel that stays in the second-level cache, and a tile of MR x NR sums stays in registers.
//
//     for each block of KC terms        panel = right factor, KC x up to NC columns, NR of them side by side
//       for each strip of MR rows       strip = left factor, MR x KC
//         for each NR columns           sums(MR x NR) += strip panel
//
// A sum adds its terms in their order, one multiply-add after the other, however the matrix was cut into blocks: a
// row comes out as the same bits alone, in a large batch and on any number of threads.
//
// Where both factors are exact in bf16 (bf16 itself, MXFP4) and the processor multiplies pairs of them (AVX512_BF16), the
// panel and the strip hold pairs of terms instead: twice as fast, the sums float32 all the same. That instruction takes
// numbers below 2^-126 for zero.
#pragma once
#include "formats.h"

// Called a few hundred times in a product and worth thousands of instructions each: compiled once, not at every use.
#define OUTLINE __attribute__((noinline))

constexpr int MR = W == 16 ? 8 : W == 8 ? 6 : 4, NV = W == 4 ? 4 : 2, NR = NV * W;
constexpr int KC = 256, NC = 256, STRIDE = KC + 16;  // the strip's rows shall not fall on the same cache sets
constexpr int64_t MC = 192;                          // rows of a block: whole strips of 4, 6 and 8

// sums[r][0:NR] = or += sum_p left(r, p) * right[p][0:NR], p < n. The strip lies row after row, or column after column.
template <bool kByColumn>
OUTLINE void tile(int n, const float* left, const float* right, float* sums, ptrdiff_t ld, bool add) {
  vf acc[MR][NV];
  UNROLL
  for (int r = 0; r < MR; ++r)
    UNROLL
    for (int v = 0; v < NV; ++v) acc[r][v] = add ? load(sums + r * ld + v * W) : vf{};
  for (int p = 0; p < n; ++p, right += NR) {
    vf b[NV];
    UNROLL
    for (int v = 0; v < NV; ++v) b[v] = load(right + v * W);
    UNROLL
    for (int r = 0; r < MR; ++r) {
      vf a = splat(kByColumn ? left[p * MR + r] : left[r * STRIDE + p]);
      UNROLL
      for (int v = 0; v < NV; ++v) acc[r][v] += a * b[v];
    }
  }
  UNROLL
  for (int r = 0; r < MR; ++r)
    UNROLL
    for (int v = 0; v < NV; ++v) store(sums + r * ld + v * W, acc[r][v]);
}

#if defined(__AVX512BF16__)
constexpr bool kPairs = true;

// As `tile`, over n pairs: left and right hold two terms in each 32 bits.
template <bool kByColumn>
OUTLINE void tile_of_pairs(int n, const float* left, const float* right, float* sums, ptrdiff_t ld, bool add) {
  vf acc[MR][NV];
  UNROLL
  for (int r = 0; r < MR; ++r)
    UNROLL
    for (int v = 0; v < NV; ++v) acc[r][v] = add ? load(sums + r * ld + v * W) : vf{};
  for (int p = 0; p < n; ++p, right += NR) {
    vf b[NV];
    UNROLL
    for (int v = 0; v < NV; ++v) b[v] = load(right + v * W);
    UNROLL
    for (int r = 0; r < MR; ++r) {
      const __m512bh a = (__m512bh)_mm512_set1_ps(kByColumn ? left[p * MR + r] : left[r * STRIDE + p]);
      UNROLL
      for (int v = 0; v < NV; ++v) acc[r][v] = (vf)_mm512_dpbf16_ps((__m512)acc[r][v], a, (__m512bh)b[v]);
    }
  }
  UNROLL
  for (int r = 0; r < MR; ++r)
    UNROLL
    for (int v = 0; v < NV; ++v) store(sums + r * ld + v * W, acc[r][v]);
}

// dst[i] = (low[i], high[i]) for 8 numbers of 16 bits, and for W.
INLINE void store_pairs(float* dst, const uint16_t* low, const uint16_t* high) {
  const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(low));
  const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(high));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(dst), _mm_unpacklo_epi16(a, b));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + 4), _mm_unpackhi_epi16(a, b));
}

INLINE void store_pairs(float* dst, __m256i low, __m256i high) {
  const __m512i upper = _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16);
  _mm512_storeu_si512(dst, _mm512_or_si512(_mm512_cvtepu16_epi32(low), upper));
}
#else
constexpr bool kPairs = false;
template <bool kByColumn>
void tile_of_pairs(int, const float*, const float*, float*, ptrdiff_t, bool);  // never called
#endif

// dst[c][r] = src[r][c] for a square of W.
INLINE void turn_square(const float* src, ptrdiff_t lds, float* dst, ptrdiff_t ldd) {
#if defined(__AVX512F__)
  transpose16(src, lds, dst, ldd);
#else
  transpose_square(src, lds, dst, ldd);
#endif
}

template <class T>
OUTLINE void widen_row(const T* src, int n, float* dst) {
  for_columns(n, [=](int64_t i, auto part) { write(dst + i, read(src + i, part), part); });
}

// Left factor, row r = row `index[r]` of a matrix (row r itself without an index).
template <class T>
struct LeftRows {
  static constexpr bool kByColumn = false;
  const T* data;
  int64_t ld;
  const int64_t* index;
  const T* row(int64_t r) const { return data + (index ? index[r] : r) * ld; }
  void strip(int64_t first, int count, int64_t k, int n, float* dst) const {
    for (int r = 0; r < count; ++r) widen_row(row(first + r) + k, n, dst + r * STRIDE);
  }
  void strip_of_pairs(int64_t first, int count, int64_t k, int n, float* dst) const {
    for (int r = 0; r < count; ++r) {
      if (n % 2) dst[r * STRIDE + n / 2] = 0;
      memcpy(dst + r * STRIDE, row(first + r) + k, size_t(n) * sizeof(T));
    }
  }
};

// Left factor, row r = column r of a matrix.
template <class T>
struct LeftColumns {
  static constexpr bool kByColumn = true;
  const T* data;
  int64_t ld;
  OUTLINE void strip(int64_t first, int count, int64_t k, int n, float* dst) const {
    for (int p = 0; p < n; ++p) {
      const T* src = data + (k + p) * ld + first;
      if (std::is_same_v<T, float> && count == MR) {
        memcpy(dst + p * MR, src, MR * sizeof(float));
      } else if (count == MR) {
        UNROLL
        for (int r = 0; r < MR; ++r) dst[p * MR + r] = read_one(src + r);
      } else {
        for (int r = 0; r < count; ++r) dst[p * MR + r] = read_one(src + r);
      }
    }
  }
#if defined(__AVX512BF16__)
  OUTLINE void strip_of_pairs(int64_t first, int count, int64_t k, int n, float* dst) const {
    for (int p = 0; p < n; p += 2, dst += MR) {
      const T *low = data + (k + p) * ld + first, *high = low + ld;
      if (MR == 8 && count == MR && p + 1 < n) {
        store_pairs(dst, reinterpret_cast<const uint16_t*>(low), reinterpret_cast<const uint16_t*>(high));
        continue;
      }
      T pairs[MR][2] = {};
      for (int r = 0; r < count; ++r) pairs[r][0] = low[r];
      for (int r = 0; p + 1 < n && r < count; ++r) pairs[r][1] = high[r];
      memcpy(dst, pairs, sizeof pairs);
    }
  }
#endif
};

// Right factor, column c = row c of a weight matrix in any storage format: decoded in groups of 32 and turned.
template <class F>
struct RightTurned {
  F rows;
  OUTLINE void panel(int64_t k, int n, int64_t first, int count, float* dst) const {
    float square[W * kGroup];
    for (int c = 0; c < NR; c += W) {
      const int there = count - c < W ? (count - c < 0 ? 0 : count - c) : W;
      if (there < W) memset(square, 0, sizeof square);
      for (int p = 0; p < n; p += kGroup) {
        const int width = n - p < kGroup ? n - p : kGroup;
        for (int r = 0; r < there; ++r) {
          vf w[kGroupVectors];
          if (width == kGroup) rows.at(first + c + r).group(k + p, w);
          else rows.at(first + c + r).last(k + p, width, w);
          UNROLL
          for (int v = 0; v < kGroupVectors; ++v) store(square + r * kGroup + v * W, w[v]);
        }
        UNROLL
        for (int v = 0; v < kGroup; v += W) turn_square(square + v, kGroup, dst + (p + v) * NR + c, NR);
      }
    }
  }
#if defined(__AVX512BF16__)
  OUTLINE void panel_of_pairs(int64_t k, int n, int64_t first, int count, float* dst) const {
    float square[W * W];
    for (int c = 0; c < NR; c += W) {
      const int there = count - c < W ? (count - c < 0 ? 0 : count - c) : W;
      if (there < W) memset(square, 0, sizeof square);
      for (int p = 0; p < n; p += kGroup) {
        const int width = n - p < kGroup ? n - p : kGroup;
        for (int r = 0; r < there; ++r) {
          vf w[kGroupVectors];
          if (width == kGroup) rows.at(first + c + r).group(k + p, w);
          else rows.at(first + c + r).last(k + p, width, w);
          store(square + r * W, (vf)_mm512_cvtne2ps_pbh((__m512)w[1], (__m512)w[0]));
        }
        turn_square(square, W, dst + p / 2 * NR + c, NR);
      }
    }
  }
#endif
};

// Right factor as it lies: row k of it is a row of the matrix.
template <class T>
struct RightRows {
  const T* data;
  int64_t ld;
  OUTLINE void panel(int64_t k, int n, int64_t first, int count, float* dst) const {
    for (int p = 0; p < n; ++p) {
      const T* src = data + (k + p) * ld + first;
      if (count == NR) {
        UNROLL
        for (int v = 0; v < NV; ++v) store(dst + p * NR + v * W, load(src + v * W));
      } else {
        memset(dst + p * NR, 0, NR * sizeof(float));
        widen_row(src, count, dst + p * NR);
      }
    }
  }
#if defined(__AVX512BF16__)
  OUTLINE void panel_of_pairs(int64_t k, int n, int64_t first, int count, float* dst) const {
    for (int p = 0; p < n; p += 2, dst += NR) {
      const T *low = data + (k + p) * ld + first, *high = low + ld;
      alignas(32) T pair[2][NR] = {};
      memcpy(pair[0], low, count * sizeof(T));
      if (p + 1 < n) memcpy(pair[1], high, count * sizeof(T));
      UNROLL
      for (int v = 0; v < NR; v += W) {
        const auto half = [&](int i) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(pair[i] + v)); };
        store_pairs(dst + v, half(0), half(1));
      }
    }
  }
#endif
};

// Where sums go: row r of the result is row r of `data`.
template <class T>
struct Rows {
  T* data;
  int64_t ld;
  OUTLINE void write_row(int64_t r, int64_t first, int count, const float* sums) const {
    T* dst = data + r * ld + first;
    for_columns(count, [=](int64_t i, auto part) { write(dst + i, read(sums + i, part), part); });
  }
};

constexpr size_t kPanelFloats = size_t(KC) * NC, kStripFloats = size_t(MR) * STRIDE, kSumFloats = size_t(MC) * NC;
constexpr size_t kBlockFloats = kPanelFloats + kStripFloats + kSumFloats;

// Whether a factor's numbers are exact in bf16.
template <class T>
constexpr bool kNarrow = false;
template <>
constexpr bool kNarrow<LeftRows<bf16>> = true;
template <>
constexpr bool kNarrow<LeftColumns<bf16>> = true;
template <>
constexpr bool kNarrow<RightRows<bf16>> = true;
template <class F>
constexpr bool kNarrow<RightTurned<F>> = !std::is_same_v<F, Float32Rows>;

// Whether tiles that lie in the result as a whole are added up there, without sums of their own.
template <class Out>
constexpr bool kDirect = false;
template <>
constexpr bool kDirect<Rows<float>> = true;

// out[row : row+rows, column : column+columns] = left right over `terms` terms; at most MC rows and NC columns.
// Scratch holds kBlockFloats. No terms at all give zeros.
template <class Left, class Right, class Out>
void multiply_block(const Left& left, const Right& right, const Out& out, int64_t terms, int64_t row, int rows,
                    int64_t column, int columns, float* scratch) {
  float *panel = scratch, *strip = panel + kPanelFloats, *sums = strip + kStripFloats;
  constexpr bool pairs = kPairs && kNarrow<Left> && kNarrow<Right>;
  const bool one_block = terms <= KC;
  for (int64_t k = 0; k == 0 || k < terms; k += KC) {
    const int n = int(terms - k < KC ? terms - k : KC);
    const bool last = k + KC >= terms;
    for (int c = 0; c < columns; c += NR) {
      const int there = columns - c < NR ? columns - c : NR;
      if constexpr (pairs) right.panel_of_pairs(k, n, column + c, there, panel + size_t(c) * KC);
      else right.panel(k, n, column + c, there, panel + size_t(c) * KC);
    }
    for (int r = 0; r < rows; r += MR) {
      const int count = rows - r < MR ? rows - r : MR;
      const int direct = kDirect<Out> && count == MR ? columns / NR * NR : 0;
      float* result = one_block ? sums : sums + size_t(r) * NC;
      if constexpr (pairs) left.strip_of_pairs(row + r, count, k, n, strip);
      else left.strip(row + r, count, k, n, strip);
      for (int c = 0; c < columns; c += NR) {
        const float* part = panel + size_t(c) * KC;
        float* at = result + c;
        int64_t ld = NC;
        if constexpr (kDirect<Out>)
          if (c < direct) at = out.data + (row + r) * out.ld + column + c, ld = out.ld;
        if constexpr (pairs) tile_of_pairs<Left::kByColumn>((n + 1) / 2, strip, part, at, ld, k > 0);
        else tile<Left::kByColumn>(n, strip, part, at, ld, k > 0);
      }
      for (int i = 0; last && direct < columns && i < count; ++i)
        out.write_row(row + r + i, column + direct, columns - direct, result + size_t(i) * NC + direct);
    }
  }
}
