// A few rows of activations times a weight matrix of any storage type: the work that decoding is made of.
//
// Every product x_r . w_o is one vector of partial sums, taken over the columns in order and added up at the end: its
// bits depend on neither the number of rows, nor the tile it is computed in, nor the thread. (MXFP4: 32 columns are added
// up before their power of two is applied, which rounds nothing.) A tile of O weight rows and R activation rows stays in
// registers. Activation rows are padded with zeros to a multiple of 32.
//
// How the weights come from memory decides the time. The O rows of a tile lie far apart, each at the head of its own
// stretch of the matrix, so that the processor sees O streams, in as many pages, and fetches ahead in all of them: eight
// streams of bf16 are read at 25 GB/s where eight neighbouring rows come at 11 and with our own prefetches at 15.
#pragma once
#include "formats.h"

INLINE int64_t padded(int64_t n) { return (n + kGroup - 1) / kGroup * kGroup; }

constexpr int kRowsAtOnce = 4;
constexpr int kTallest = 8;
constexpr int64_t kPiece = 48;       // weight rows a thread takes at least: a multiple of every height and vector's width
constexpr int64_t kSharedTiles = 4;  // read from memory by the first of several sets of rows, by the others from a cache

// Weight rows of a tile with R activation rows: many where each is a stream, else what fits into the registers.
template <class Rows>
constexpr int tile_height(int R) {
  if (Rows::kScaled) return W == 16 ? kTallest : 4;
  if (W == 16) return R <= 2 ? kTallest : 6;
  return R == 1 ? kTallest : R == 2 ? 4 : R == 3 ? 3 : 2;
}

// The smaller side of the tile is kept in registers for a whole column of it, the other one passes.
template <int R, int O, class Row>
INLINE void add_group(const Row (&rows)[O], int64_t c, const float* const (&x)[R], vf (&acc)[O][R]) {
  UNROLL
  for (int v = 0; v < kGroupVectors; ++v) {
    auto weight = [&](int o) { return rows[o].turned(c, v); };
    auto input = [&](int r) { return in_register(load(x[r] + c + v * W)); };
    vf kept[O <= R ? O : R];
    UNROLL
    for (int i = 0; i < (O <= R ? O : R); ++i) kept[i] = O <= R ? in_register(weight(i)) : input(i);
    UNROLL
    for (int j = 0; j < (O <= R ? R : O); ++j) {
      const vf passing = O <= R ? input(j) : weight(j);
      UNROLL
      for (int i = 0; i < (O <= R ? O : R); ++i) {
        vf& sum = O <= R ? acc[i][j] : acc[j][i];
        sum = multiply_add(kept[i], passing, sum);
      }
    }
  }
}

// The same where 32 columns have a factor of their own.
template <int R, int O, class Row>
INLINE void add_scaled_group(const Row (&rows)[O], const float* factors, int64_t stride, int64_t c,
                             const float* const (&x)[R], vf (&acc)[O][R]) {
  UNROLL
  for (int o = 0; o < O; ++o) {
    vf w[kGroupVectors];
    rows[o].values_turned(c, w);
    const vf factor = splat(factors[o * stride + c / kGroup]);
    UNROLL
    for (int r = 0; r < R; ++r) {
      vf sum = {};
      UNROLL
      for (int v = 0; v < kGroupVectors; ++v) sum = multiply_add(w[v], load(x[r] + c + v * W), sum);
      acc[o][r] = multiply_add(sum, factor, acc[o][r]);
    }
  }
}

INLINE int64_t factor_stride(int64_t columns) { return (columns / kGroup + W - 1) / W * W; }

// y_r[o] = x_r . w_o, or more by that, for R rows and the O weight rows first, first + step, ...
template <int R, int O, class Rows>
INLINE void dot_tile(const Rows& weights, int64_t first, int64_t step, const float* const (&x)[R], float* const (&y)[R],
                     bool add, float* factors) {
  using Row = decltype(weights.at(0));
  const int64_t n = weights.columns, stride = factor_stride(n);
  vf acc[O][R];
  Row rows[O];
  UNROLL
  for (int o = 0; o < O; ++o) {
    rows[o] = weights.at(first + o * step);
    if constexpr (Rows::kScaled) rows[o].write_factors(n / kGroup, factors + o * stride);
    UNROLL
    for (int r = 0; r < R; ++r) acc[o][r] = vf{};
  }
  int64_t c = 0;
  for (; c + kGroup <= n; c += kGroup) {
    if constexpr (Rows::kScaled) add_scaled_group<R, O>(rows, factors, stride, c, x, acc);
    else add_group<R, O>(rows, c, x, acc);
  }
  if constexpr (!Rows::kScaled)  // whose widths are whole groups
    if (c < n)
      for (int o = 0; o < O; ++o) {
        vf w[kGroupVectors];
        rows[o].last_turned(c, int(n - c), w);
        for (int v = 0; v < kGroupVectors; ++v)
          for (int r = 0; r < R; ++r) acc[o][r] = multiply_add(w[v], load(x[r] + c + v * W), acc[o][r]);
      }
  for (int o = 0; o < O; ++o)
    for (int r = 0; r < R; ++r) {
      float* to = y[r] + first + o * step;
      const float all = sum(acc[o][r]);
      *to = add ? *to + all : all;
    }
}

// Rows of a product: where activations are read in the order of the format, where results go, and room for the factors
// of a tile. Addresses, not functions: the code of a tile is then one for all callers.
struct Ends {
  const float* const* x;
  float* const* y;
  float* factors;
};

// They live until the next call.
template <class Rows, class X, class Y>
Ends ends_of(int64_t n, int64_t count, X x, Y y) {
  static thread_local std::vector<const float*> from;
  static thread_local std::vector<float*> to;
  static thread_local Arena arena;
  const size_t copy = Rows::kTurned ? size_t(count * padded(n)) : 0;
  const size_t factors = Rows::kScaled ? size_t(kTallest * factor_stride(n)) : 0;
  if (copy + factors) arena.reserve(copy + factors + 32);
  float* turned = Rows::kTurned ? arena.take(copy) : nullptr;
  from.resize(size_t(count)), to.resize(size_t(count));
  for (int64_t r = 0; r < count; ++r) {
    from[size_t(r)] = x(r), to[size_t(r)] = y(r);
    if constexpr (Rows::kTurned) {
      float* row = turned + r * padded(n);
      Rows::turn(x(r), padded(n), row);
      from[size_t(r)] = row;
    }
  }
  return {from.data(), to.data(), Rows::kScaled ? arena.take(factors) : nullptr};
}

// run(std::integral_constant<int, n>) for 1 <= n <= kRowsAtOnce.
template <class Run>
INLINE void with_count(int64_t n, Run run) {
  if (n == 1) run(std::integral_constant<int, 1>{});
  else if (n == 2) run(std::integral_constant<int, 2>{});
  else if (n == 3) run(std::integral_constant<int, 3>{});
  else run(std::integral_constant<int, 4>{});
}

// dot_rows for one format.
template <class Rows>
class Dots {
 public:
  Dots(const Rows& weights, const Ends& ends, bool add) : weights_(weights), ends_(ends), add_(add) {}

  // The weight rows [begin, end) as streams, all of the R rows at once.
  template <int R>
  void once(int64_t begin, int64_t end) const {
    constexpr int O = tile_height<Rows>(R);
    const int64_t step = (end - begin) / O, rest = begin + O * step;
    tiles<R, O>(begin, step, step, 0);
    tiles<R, 1>(rest, 0, end - rest, 0);
  }

  // The same for more rows than fit: a few tiles at a time, for one set of rows after the other.
  void in_sets(int64_t begin, int64_t end, int64_t count) const {
    constexpr int O = tile_height<Rows>(kRowsAtOnce);
    const int64_t step = (end - begin) / O, rest = begin + O * step;
    for (int64_t i = 0; i < step; i += kSharedTiles)
      for_sets(count, [&](int64_t row, auto R) {
        tiles<R.value, O>(begin + i, step, step - i < kSharedTiles ? step - i : kSharedTiles, row);
      });
    for_sets(count, [&](int64_t row, auto R) { tiles<R.value, 1>(rest, 0, end - rest, row); });
  }

 private:
  // Tiles whose first rows are first, first + 1, ...; the others follow each `step` rows further on.
  template <int R, int O>
  __attribute__((noinline)) void tiles(int64_t first, int64_t step, int64_t count, int64_t row) const {
    const float* from[R];
    float* to[R];
    for (int r = 0; r < R; ++r) from[r] = ends_.x[row + r], to[r] = ends_.y[row + r];
    for (int64_t i = 0; i < count; ++i) dot_tile<R, O>(weights_, first + i, step, from, to, add_, ends_.factors);
  }

  // run(first row, std::integral_constant of their number) for sets of rows, as equal as can be.
  template <class Run>
  static void for_sets(int64_t count, Run run) {
    for (int64_t row = 0, sets = (count + kRowsAtOnce - 1) / kRowsAtOnce; sets; --sets) {
      const int64_t rows = (count - row + sets - 1) / sets;
      with_count(rows, [&](auto R) { run(row, R); });
      row += rows;
    }
  }

  const Rows& weights_;
  const Ends ends_;
  const bool add_;
};

// y(r)[o] = x(r) . w_o for r < count and begin <= o < end, or more by that with `add`; x(r) and y(r) are addresses of
// rows, `index` the matrix of a stack.
template <class X, class Y>
void dot_rows(const Matrix& m, int64_t index, int64_t begin, int64_t end, int64_t count, X x, Y y, bool add = false) {
  with_format(m.format, [&](auto f) {
    using Rows = decltype(f);
    const Rows weights(m, index);
    const Dots<Rows> dots(weights, ends_of<Rows>(m.columns, count, x, y), add);
    if (count > kRowsAtOnce) dots.in_sets(begin, end, count);
    else if (count) with_count(count, [&](auto R) { dots.template once<R.value>(begin, end); });
  });
}

// y_r[0 : columns) = sum over i < n of x_r[i] * w_{first + i}, for R rows; y rows have room for whole groups.
template <int R, class Rows>
__attribute__((noinline)) void combine_tile(const Rows& weights, int64_t first, int64_t n, const float* const (&x)[R], float* const (&y)[R]) {
  for (int64_t c = 0; c < weights.columns; c += kGroup) {
    vf acc[R][kGroupVectors] = {};
    const int part = int(weights.columns - c < kGroup ? weights.columns - c : kGroup);
    for (int64_t i = 0; i < n; ++i) {
      vf w[kGroupVectors];
      if (part == kGroup) weights.at(first + i).group(c, w);
      else weights.at(first + i).last(c, part, w);
      UNROLL
      for (int r = 0; r < R; ++r) {
        vf factor = splat(x[r][i]);
        UNROLL
        for (int v = 0; v < kGroupVectors; ++v) acc[r][v] = multiply_add(factor, w[v], acc[r][v]);
      }
    }
    for (int r = 0; r < R; ++r) {
      float numbers[kGroup];
      for (int v = 0; v < kGroupVectors; ++v) store(numbers + v * W, acc[r][v]);
      memcpy(y[r] + c, numbers, size_t(part) * 4);
    }
  }
}

// The same for any number of rows: x(r) and y(r) are addresses.
template <class X, class Y>
void combine_rows(const Matrix& m, int64_t first, int64_t n, int64_t count, X x, Y y) {
  with_format(m.format, [&](auto f) {
    const decltype(f) weights(m, 0);
    int64_t r = 0;
    for (; r + 2 <= count; r += 2) {
      const float* const from[2] = {x(r), x(r + 1)};
      float* const to[2] = {y(r), y(r + 1)};
      combine_tile<2>(weights, first, n, from, to);
    }
    if (r < count) {
      const float* const from[1] = {x(r)};
      float* const to[1] = {y(r)};
      combine_tile<1>(weights, first, n, from, to);
    }
  });
}
