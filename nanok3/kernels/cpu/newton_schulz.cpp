// Newton-Schulz on a CPU: every matrix of a stack with its singular values moved to about 1, one matrix after the other
// in the second-level cache.
//
//     Y = N / (|N| + 1e-7), turned so that it has no fewer rows than columns          each step:  Y <- Y P(Y^T Y)
//     P(A) = a + b A + c A A
//
// A step multiplies Y from the right by a polynomial in A = Y^T Y, so the next A is P A P and needs no Y: steps are done
// AT_ONCE on square matrices of the smaller side, their product is Q, and then Y <- Y Q. All these squares are
// polynomials in the first of them. They are symmetric and commute, so of every product half is computed and the rest
// mirrored. Against steps on Y alone that is half the work for a square matrix and a third for one four times as tall.
//
// Rounding makes eigenvalues of A about 1e-7 wrong, negative ones included, and a step multiplies the smallest by
// a^2 = 12: after AT_ONCE steps A is computed afresh, and the factor of a small singular value is exact to 1e-4.
#include <algorithm>
#include <cmath>
#include <utility>

#include "strided.h"

namespace {

constexpr int AT_ONCE = 3;

struct Coefficients {
  float a, b, c;
};

// An m x m matrix within `size` x `size`, whole tiles; zero outside of m x m, but for what is said otherwise.
struct Square {
  int64_t size, ld;
};

// out = left right, a symmetric matrix: the product of two symmetric ones that commute, or left^T left of `terms` rows.
// Then finish(row, column, vector) on the upper half, and a mirror.
template <class Finish>
void symmetric_product(const Square& s, int64_t terms, const float* left, const float* right, float* out, Finish finish) {
  for (int64_t strip = 0; strip < s.size; strip += MR) {
    const int64_t r = strip + MR <= s.size ? strip : s.size - MR;  // the last strip overlaps the one before
    for (int64_t c = r / NR * NR; c < s.size; c += NR)
      strided_tile<true>(terms, left + r, s.ld, right + c, s.ld, out + r * s.ld + c, s.ld, false);
  }
  for (int64_t i = 0; i < s.size; i += W)
    for (int64_t j = i; j < s.size; j += W) {
      for (int64_t r = i; r < i + W; ++r) {
        float* p = out + r * s.ld + j;
        store(p, finish(r, j, load(p)));
      }
      if (j > i) turn_square(out + i * s.ld + j, s.ld, out + j * s.ld + i, s.ld);
    }
}

// Q, the product of the steps' P, from A. Four squares: A first, the result is returned.
float* product_of_steps(const Square& s, int steps, Coefficients k, float* (&squares)[4]) {
  auto &[A, P, Q, T] = squares;
  const auto as_it_is = [](int64_t, int64_t, vf x) { return x; };
  for (int step = 0; step < steps; ++step) {
    symmetric_product(s, s.size, A, A, P, [&](int64_t r, int64_t c, vf x) {
      x = k.b * load(A + r * s.ld + c) + k.c * x;
      if (r >= c && r < c + W) x[r - c] += k.a;
      return x;
    });
    if (step) {
      symmetric_product(s, s.size, Q, P, T, as_it_is);
      std::swap(Q, T);
    } else {
      memcpy(Q, P, s.size * s.ld * sizeof(float));
    }
    if (step + 1 == steps) break;
    symmetric_product(s, s.size, P, P, T, as_it_is);
    symmetric_product(s, s.size, A, T, P, as_it_is);
    std::swap(A, P);
  }
  return Q;
}

double sum_of_squares(const float* x, int64_t n) {
  double all = 0;
  for (int64_t i = 0; i < n; i += 1024) {
    float sums[1];
    sum_columns(std::min<int64_t>(1024, n - i), sums, [=](int64_t j, auto part, auto& acc) {
      vf v = read(x + i + j, part);
      acc[0] += v * v;
    });
    all += sums[0];
  }
  return all;
}

// dst (columns x rows) = scale src^T (rows x columns).
void turn(const float* src, int64_t src_ld, int64_t rows, int64_t columns, float scale, float* dst, int64_t dst_ld) {
  int64_t i = 0;
  for (; i + W <= rows; i += W) {
    int64_t j = 0;
    for (; j + W <= columns; j += W) {
      turn_square(src + i * src_ld + j, src_ld, dst + j * dst_ld + i, dst_ld);
      for (int r = 0; r < W; ++r) store(dst + (j + r) * dst_ld + i, scale * load(dst + (j + r) * dst_ld + i));
    }
    for (; j < columns; ++j)
      for (int r = 0; r < W; ++r) dst[j * dst_ld + i + r] = scale * src[(i + r) * src_ld + j];
  }
  for (; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j) dst[j * dst_ld + i] = scale * src[i * src_ld + j];
}

void copy(const float* src, int64_t src_ld, int64_t rows, int64_t columns, float scale, float* dst, int64_t dst_ld) {
  for (int64_t r = 0; r < rows; ++r, src += src_ld, dst += dst_ld)
    for_columns(columns, [=](int64_t i, auto part) { write(dst + i, scale * read(src + i, part), part); });
}

void one_matrix(const float* G, int64_t rows, int64_t columns, int steps, Coefficients k, float* out, Arena& arena) {
  const bool wide = columns > rows;
  const int64_t n = wide ? columns : rows, m = wide ? rows : columns, tall = (n + MR - 1) / MR * MR;
  const Square s{(m + NR - 1) / NR * NR, row_step(m)};
  arena.reserve(tall * s.ld + 4 * s.size * s.ld + MR * s.ld + 128);
  float *Y = arena.take(tall * s.ld), *squares[4], *strip = arena.take(MR * s.ld);
  for (float*& x : squares) x = arena.take(s.size * s.ld);
  memset(Y, 0, tall * s.ld * sizeof(float));
  const float scale = 1.0f / (float(std::sqrt(sum_of_squares(G, rows * columns))) + 1e-7f);
  (wide ? turn : copy)(G, columns, rows, columns, scale, Y, s.ld);
  for (int done = 0; done < steps; done += AT_ONCE) {
    symmetric_product(s, n, Y, Y, squares[0], [](int64_t, int64_t, vf x) { return x; });
    const float* Q = product_of_steps(s, std::min(AT_ONCE, steps - done), k, squares);
    for (int64_t r = 0; r < n; r += MR) {
      float* rows_of_Y = Y + r * s.ld;
      for (int64_t c = 0; c < s.size; c += NR)
        strided_tile<false>(s.size, rows_of_Y, s.ld, Q + c, s.ld, strip + c, s.ld, false);
      copy(strip, s.ld, MR, s.size, 1.0f, rows_of_Y, s.ld);
    }
  }
  if (wide) turn(Y, s.ld, n, m, 1.0f, out, columns);
  else copy(Y, s.ld, n, m, 1.0f, out, columns);
}

}  // namespace

extern "C" {

// out and G are (n, rows, columns), float32. steps >= 1.
void newton_schulz(const float* G, int64_t n, int64_t rows, int64_t columns, int64_t steps, float a, float b, float c,
                   float* out, int64_t threads) {
  if (threads > n) threads = n;
#pragma omp parallel for schedule(dynamic) num_threads(int(threads)) if (threads > 1)
  for (int64_t i = 0; i < n; ++i) {
    static thread_local Arena arena;
    const int64_t at = i * rows * columns;
    one_matrix(G + at, rows, columns, int(steps), {a, b, c}, out + at, arena);
  }
}

}  // extern "C"
