// Products of small matrices that lie in the cache row after row: a tile of MR x NR sums in registers, its factors read
// where they are, without packing them first.
#pragma once
#include "product.h"

// Numbers from row to row of a matrix with so many columns: whole tiles, and off the cache sets of the row before.
constexpr int64_t row_step(int64_t columns) { return (columns + NR - 1) / NR * NR + 16; }

// sums[r][0:NR] = or += sum_p left(r, p) right[p][0:NR], p < n, where left(r, p) is left[r][p] or, turned, left[p][r].
template <bool kTurned>
OUTLINE void strided_tile(int64_t n, const float* left, ptrdiff_t left_ld, const float* right, ptrdiff_t right_ld,
                          float* sums, ptrdiff_t ld, bool add) {
  vf acc[MR][NV];
  UNROLL
  for (int r = 0; r < MR; ++r)
    UNROLL
    for (int v = 0; v < NV; ++v) acc[r][v] = add ? load(sums + r * ld + v * W) : vf{};
  for (int64_t p = 0; p < n; ++p, right += right_ld, left += kTurned ? left_ld : 1) {
    vf b[NV];
    UNROLL
    for (int v = 0; v < NV; ++v) b[v] = in_register(load(right + v * W));
    UNROLL
    for (int r = 0; r < MR; ++r) {
      vf a = splat(kTurned ? left[r] : left[r * left_ld]);
      UNROLL
      for (int v = 0; v < NV; ++v) acc[r][v] += a * b[v];
    }
  }
  UNROLL
  for (int r = 0; r < MR; ++r)
    UNROLL
    for (int v = 0; v < NV; ++v) store(sums + r * ld + v * W, acc[r][v]);
}
