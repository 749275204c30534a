// Matrix products on one thread, float32 throughout: whatever the factors are stored as, they are widened or decoded
// block by block into a panel that stays in the second-level cache, and a tile of MR x NR sums stays in registers.
//
//     for each block of KC terms        panel = right factor, KC x up to NC columns, NR of them side by side
//       for each strip of MR rows       strip = left factor, MR x KC
//         for each NR columns           sums(MR x NR) += strip panel
//
// A sum adds its terms in their order, one multiply-add after the other, however the matrix was cut into blocks: a
// row comes out as the same bits alone, in a large batch and on any number of threads.
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
      if (count == MR) {
        UNROLL
        for (int r = 0; r < MR; ++r) dst[p * MR + r] = read_one(src + r);
      } else {
        for (int r = 0; r < count; ++r) dst[p * MR + r] = read_one(src + r);
      }
    }
  }
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

// out[row : row+rows, column : column+columns] = left right over `terms` terms; at most MC rows and NC columns.
// Scratch holds kBlockFloats. No terms at all give zeros.
template <class Left, class Right, class Out>
void multiply_block(const Left& left, const Right& right, const Out& out, int64_t terms, int64_t row, int rows,
                    int64_t column, int columns, float* scratch) {
  float *panel = scratch, *strip = panel + kPanelFloats, *sums = strip + kStripFloats;
  const bool one_block = terms <= KC;
  for (int64_t k = 0; k == 0 || k < terms; k += KC) {
    const int n = int(terms - k < KC ? terms - k : KC);
    const bool last = k + KC >= terms;
    for (int c = 0; c < columns; c += NR) {
      right.panel(k, n, column + c, columns - c < NR ? columns - c : NR, panel + size_t(c) * KC);
    }
    for (int r = 0; r < rows; r += MR) {
      const int count = rows - r < MR ? rows - r : MR;
      float* result = one_block ? sums : sums + size_t(r) * NC;
      left.strip(row + r, count, k, n, strip);
      for (int c = 0; c < columns; c += NR)
        tile<Left::kByColumn>(n, strip, panel + size_t(c) * KC, result + c, NC, k > 0);
      for (int i = 0; last && i < count; ++i) out.write_row(row + r + i, column, columns, result + size_t(i) * NC);
    }
  }
}
