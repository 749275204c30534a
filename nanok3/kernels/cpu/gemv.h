// A few rows of activations times a weight matrix of any storage type: the work that decoding is made of.
//
// Every product x_r . w_o is one vector of partial sums, taken over the columns in order and added up at the end: its
// bits depend on neither the number of rows, nor the tile it is computed in, nor the thread. A tile of O weight rows
// and R activation rows stays in registers; for one activation row O is large (a stream from memory), for more it is
// what fits. Activation rows are padded with zeros to a multiple of 32.
#pragma once
#include "formats.h"

INLINE int64_t padded(int64_t n) { return (n + kGroup - 1) / kGroup * kGroup; }

constexpr int kRowsAtOnce = 4;

// Weight rows of a tile with R activation rows.
constexpr int tile_height(int R) { return W == 16 ? (R <= 2 ? 8 : 6) : (R == 1 ? 8 : R == 2 ? 4 : 3); }
constexpr int64_t kBlockRows = 24;  // a multiple of all of them
constexpr int64_t kPiece = 48;      // the same, and of every vector's width: what a thread takes at a time

template <int R, int O, class Row>
INLINE void add_group(const Row (&rows)[O], int64_t c, const float* const (&x)[R], vf (&acc)[O][R]) {
  UNROLL
  for (int o = 0; o < O; ++o) {
    vf w[kGroupVectors];
    rows[o].turned(c, w);
    UNROLL
    for (int v = 0; v < kGroupVectors; ++v)
      UNROLL
      for (int r = 0; r < R; ++r) acc[o][r] = multiply_add(w[v], load(x[r] + v * W), acc[o][r]);
  }
}

// y_r[o] = x_r . w_o, or more by that, for R rows and the O weight rows from `first` on.
template <int R, int O, class Rows>
INLINE void dot_tile(const Rows& weights, int64_t first, const float* const (&x)[R], float* const (&y)[R], bool add, int64_t ahead) {
  using Row = decltype(weights.at(0));
  vf acc[O][R];
  Row rows[O];
  const float* at[R];
  UNROLL
  for (int o = 0; o < O; ++o) {
    rows[o] = weights.at(first + o);
    UNROLL
    for (int r = 0; r < R; ++r) acc[o][r] = vf{};
  }
  UNROLL
  for (int r = 0; r < R; ++r) at[r] = x[r];
  const int64_t n = weights.columns;
  int64_t c = 0;
  for (; c + kGroup <= n; c += kGroup) {
    if (ahead)  // the next tile's memory, from its beginning to its end: a stream, whatever the rows' length
      UNROLL
      for (int o = 0; o < O; ++o) rows[0].prefetch(ahead + c * O + o * kGroup);
    add_group<R, O>(rows, c, at, acc);
    UNROLL
    for (int r = 0; r < R; ++r) at[r] += kGroup;
  }
  if (c < n)
    for (int o = 0; o < O; ++o) {
      vf w[kGroupVectors];
      rows[o].last_turned(c, int(n - c), w);
      for (int v = 0; v < kGroupVectors; ++v)
        for (int r = 0; r < R; ++r) acc[o][r] = multiply_add(w[v], load(at[r] + v * W), acc[o][r]);
    }
  for (int o = 0; o < O; ++o)
    for (int r = 0; r < R; ++r) {
      float* to = y[r] + first + o;
      const float sum = total(acc[o][r]);
      *to = add ? *to + sum : sum;
    }
}

template <int R, class Rows>
__attribute__((noinline)) void dot_block(const Rows& weights, int64_t begin, int64_t end, const float* const (&x)[R],
                                         float* const (&y)[R], bool add, bool ahead) {
  constexpr int O = tile_height(R);
  const int64_t next = ahead * O * weights.columns;
  int64_t o = begin;
  for (; o + O <= end; o += O) dot_tile<R, O>(weights, o, x, y, add, next);
  for (; o < end; ++o) dot_tile<R, 1>(weights, o, x, y, add, 0);
}

// Addresses of `count` rows of activations in the order of the format; turned copies live until the next call.
template <class Rows, class X>
const float* const* turn_rows(int64_t n, int64_t count, X x) {
  static thread_local std::vector<const float*> at;
  static thread_local Arena arena;
  at.resize(size_t(count));
  if (Rows::kTurned) arena.reserve(size_t(count * padded(n)) + 16);
  float* turned = Rows::kTurned ? arena.take(size_t(count * padded(n))) : nullptr;
  for (int64_t r = 0; r < count; ++r) {
    at[size_t(r)] = x(r);
    if constexpr (Rows::kTurned) {
      float* to = turned + r * padded(n);
      Rows::turn(x(r), padded(n), to);
      at[size_t(r)] = to;
    }
  }
  return at.data();
}

// y(r)[o] = x(r) . w_o for r < count and begin <= o < end, or more by that with `add`; x(r) and y(r) are addresses of
// rows, `index` the matrix of a stack. For many rows the weights are taken in blocks that stay in the cache while all
// rows pass.
template <class X, class Y>
void dot_rows(const Matrix& m, int64_t index, int64_t begin, int64_t end, int64_t count, X x, Y y, bool add = false) {
  const int64_t block = count > kRowsAtOnce ? kBlockRows : end - begin;
  with_format(m.format, [&](auto f) {
    using Rows = decltype(f);
    const Rows weights(m, index);
    const float* const* turned = turn_rows<Rows>(m.columns, count, x);
    for (int64_t first = begin; first < end; first += block) {
      const int64_t last = first + block < end ? first + block : end;
      for (int64_t r = 0; r < count; r += kRowsAtOnce) {
        if (count - r >= 4) {
          const float* const from[4] = {turned[r], turned[r + 1], turned[r + 2], turned[r + 3]};
          float* const to[4] = {y(r), y(r + 1), y(r + 2), y(r + 3)};
          dot_block<4>(weights, first, last, from, to, add, r == 0);
        } else if (count - r == 3) {
          const float* const from[3] = {turned[r], turned[r + 1], turned[r + 2]};
          float* const to[3] = {y(r), y(r + 1), y(r + 2)};
          dot_block<3>(weights, first, last, from, to, add, r == 0);
        } else if (count - r == 2) {
          const float* const from[2] = {turned[r], turned[r + 1]};
          float* const to[2] = {y(r), y(r + 1)};
          dot_block<2>(weights, first, last, from, to, add, r == 0);
        } else {
          const float* const from[1] = {turned[r]};
          float* const to[1] = {y(r)};
          dot_block<1>(weights, first, last, from, to, add, r == 0);
        }
      }
    }
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
