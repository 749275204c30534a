// Linear maps and routed experts on a CPU, float32 sums over weights in float32, bf16 or MXFP4 as they are stored.
//
//   linear_forward    y = x W_e^T                     rows sorted by expert, weights (E, O, I); E = 1 is a plain layer
//   linear_inputs     dx = dy W_e
//   linear_weights    dW_e = dy_e^T x_e
//   routed_experts    y_t = sum over the chosen e of p_te W2_e SiTU(W1_e z_t, W3_e z_t); or in two steps
//   expert_answers    W2_e SiTU(W1_e z_t, W3_e z_t) of some experts
//   weigh_answers     and the sum over all
//
// An expert with more than FEW rows is computed in blocks (product.h). With fewer, its weights are what has to be
// read: they are decoded in registers, once for all rows, and multiplied along their own rows. Which of the two it is
// depends on the number of rows alone, and no sum is shared between threads.
#include <algorithm>

#include "product.h"

namespace {

constexpr int FEW = 8, AT_ONCE = 4;  // AT_ONCE rows share one reading of the weights

struct Range {
  int64_t expert, begin, end;  // rows
};

// The rows of each expert, from counts, in blocks of at most MC; experts without rows do not appear.
std::vector<Range> row_blocks(const int64_t* counts, int64_t experts) {
  std::vector<Range> blocks;
  int64_t start = 0;
  for (int64_t e = 0; e < experts; start += counts[e++])
    for (int64_t r = 0; r < counts[e]; r += MC) blocks.push_back({e, start + r, start + std::min(r + MC, counts[e])});
  return blocks;
}

template <class Run>
void in_parallel(int64_t n, int64_t threads, Run run) {
  if (!n) return;
  if (threads > n) threads = n;
#pragma omp parallel for schedule(dynamic) num_threads(int(threads)) if (threads > 1)
  for (int64_t i = 0; i < n; ++i) run(i);
}

float* scratch(size_t floats) {
  static thread_local Arena arena;
  arena.reserve(floats + 16);
  return arena.take(floats);
}

// sums[j][i] = w_(row+j) . x_i for M rows x of `terms` numbers, padded with zeros to whole groups, and B weight rows.
template <int M, int B, class F>
INLINE void dot_rows(const F& weights, int64_t row, int64_t terms, const float* x, int64_t ld, float (&sums)[B][M]) {
  vf acc[B][M][2] = {};
  int64_t c = 0;
  auto step = [&](auto read_group) {
    UNROLL
    for (int j = 0; j < B; ++j) {
      vf w[kGroupVectors];
      read_group(weights.at(row + j), w);
      UNROLL
      for (int i = 0; i < M; ++i)
        UNROLL
        for (int v = 0; v < kGroupVectors; ++v) acc[j][i][v % 2] += w[v] * load(x + i * ld + c + v * W);
    }
  };
  for (; c + kGroup <= terms; c += kGroup) step([c](auto r, vf (&w)[kGroupVectors]) { r.group(c, w); });
  if (c < terms) step([=](auto r, vf (&w)[kGroupVectors]) { r.last(c, int(terms - c), w); });
  UNROLL
  for (int j = 0; j < B; ++j)
    UNROLL
    for (int i = 0; i < M; ++i) sums[j][i] = total(acc[j][i][0] + acc[j][i][1]);
}

// out[i * out_ld + row - begin] for weight rows begin ... end - 1 and M rows of x.
template <int M, class F>
OUTLINE void few_rows(const F& weights, int64_t begin, int64_t end, int64_t terms, const float* x, int64_t ld,
                      float* out, int64_t out_ld) {
  constexpr int B = AT_ONCE / M;
  int64_t row = begin;
  for (; row + B <= end; row += B) {
    float sums[B][M];
    dot_rows<M, B>(weights, row, terms, x, ld, sums);
    for (int j = 0; j < B; ++j)
      for (int i = 0; i < M; ++i) out[i * out_ld + row - begin + j] = sums[j][i];
  }
  for (; row < end; ++row) {
    float sums[1][M];
    dot_rows<M, 1>(weights, row, terms, x, ld, sums);
    for (int i = 0; i < M; ++i) out[i * out_ld + row - begin] = sums[0][i];
  }
}

template <class F>
void few_rows(int m, const F& weights, int64_t begin, int64_t end, int64_t terms, const float* x, int64_t ld, float* out,
              int64_t out_ld) {
  for (; m > 0; m -= AT_ONCE, x += AT_ONCE * ld, out += AT_ONCE * out_ld) {
    if (m == 1) few_rows<1>(weights, begin, end, terms, x, ld, out, out_ld);
    else if (m == 2) few_rows<2>(weights, begin, end, terms, x, ld, out, out_ld);
    else if (m == 3) few_rows<3>(weights, begin, end, terms, x, ld, out, out_ld);
    else few_rows<AT_ONCE>(weights, begin, end, terms, x, ld, out, out_ld);
  }
}

int64_t whole_groups(int64_t n) { return (n + kGroup - 1) / kGroup * kGroup; }

// Few rows of a left factor as float32, each filled up with zeros to whole groups.
template <class Left>
void widen_rows(const Left& left, int64_t first, int count, int64_t n, float* dst) {
  for (int i = 0; i < count; ++i, dst += whole_groups(n)) {
    widen_row(left.row(first + i), int(n), dst);
    std::fill(dst + n, dst + whole_groups(n), 0.0f);
  }
}

INLINE vf situ(vf g, vf u, float beta, float linear_beta) {
  vf gate = __builtin_isfinite(beta) ? beta * tanh(g * (1.0f / beta)).value : g;
  vf up = __builtin_isfinite(linear_beta) ? linear_beta * tanh(u * (1.0f / linear_beta)).value : u;
  return gate * sigmoid(g).value * up;
}

// gate = SiTU(gate, up)
void activate(float* gate, const float* up, int64_t n, float beta, float linear_beta) {
  for_columns(n, [=](int64_t i, auto part) {
    write(gate + i, situ(read(gate + i, part), read(up + i, part), beta, linear_beta), part);
  });
}

// All columns of a block of rows, one piece of NC columns after the other.
template <class Left, class Right, class Out>
void multiply_rows(const Left& left, const Right& right, const Out& out, int64_t terms, int64_t columns, int64_t row,
                   int rows, float* block) {
  for (int64_t c = 0; c < columns; c += NC)
    multiply_block(left, right, out, terms, row, rows, c, int(std::min<int64_t>(NC, columns - c)), block);
}

struct Expert {
  const Matrix &w1, &w2, &w3;
  float beta, linear_beta;
};

// numbers = what memory of type T keeps of them; returns where that is: in `kept`, or where they are.
INLINE const float* kept_as(const float* numbers, int64_t, float*) { return numbers; }
INLINE const bf16* kept_as(const float* numbers, int64_t n, bf16* kept) {
  for_columns(n, [=](int64_t i, auto part) { write(kept + i, read(numbers + i, part), part); });
  return kept;
}

// out[0 : rows] = W2_e SiTU(W1_e z, W3_e z). What W2 reads is of the type of z, as it is where these are three layers.
template <class T, class F>
void expert_rows(const Expert& x, int64_t e, const LeftRows<T>& z, int rows, bool few, float* out) {
  const int64_t latent = x.w1.columns, inner = x.w1.rows;
  const F w1(x.w1, e), w2(x.w2, e), w3(x.w3, e);
  if (few) {
    const int64_t ldz = whole_groups(latent), ldh = whole_groups(inner);
    float *wide = scratch(FEW * (ldz + 2 * ldh)), *gate = wide + FEW * ldz, *up = gate + FEW * ldh;
    widen_rows(z, 0, rows, latent, wide);
    std::fill(gate, up, 0.0f);
    few_rows(rows, w1, 0, inner, latent, wide, ldz, gate, ldh);
    few_rows(rows, w3, 0, inner, latent, wide, ldz, up, ldh);
    for (int i = 0; i < rows; ++i) activate(gate + i * ldh, up + i * ldh, inner, x.beta, x.linear_beta);
    if (std::is_same_v<T, bf16>)
      widen_row(kept_as(gate, rows * ldh, reinterpret_cast<T*>(up)), int(rows * ldh), gate);
    few_rows(rows, w2, 0, latent, inner, gate, ldh, out, latent);
    return;
  }
  float *block = scratch(kBlockFloats + 2 * size_t(rows) * inner), *gate = block + kBlockFloats, *up = gate + rows * inner;
  multiply_rows(z, RightTurned<F>{w1}, Rows<float>{gate, inner}, latent, inner, 0, rows, block);
  multiply_rows(z, RightTurned<F>{w3}, Rows<float>{up, inner}, latent, inner, 0, rows, block);
  activate(gate, up, rows * inner, x.beta, x.linear_beta);
  const LeftRows<T> hidden{kept_as(gate, rows * inner, reinterpret_cast<T*>(up)), inner, nullptr};
  multiply_rows(hidden, RightTurned<F>{w2}, Rows<float>{out, latent}, inner, latent, 0, rows, block);
}

}  // namespace

extern "C" {

// y (m, O) = x (m, I) W_e^T, x and y of one type; the weights are (E, O, I) in `format`, the first counts[0] rows belong
// to expert 0, ...
void linear_forward(const void* x, Type type, const void* weight, const uint8_t* scale, int32_t format, int64_t O,
                    int64_t I, const int64_t* counts, int64_t E, void* y, int64_t threads) {
  const Matrix matrix{weight, scale, O, I, format};
  const auto blocks = row_blocks(counts, E);
  with_type(type, [&](auto t) {
    with_format(format, [&](auto f) {
      typedef decltype(t) T;
      typedef decltype(f) F;
      const LeftRows<T> left{static_cast<const T*>(x), I, nullptr};
      const Rows<T> out{static_cast<T*>(y), O};
      const int64_t pieces = (O + NC - 1) / NC, padded = whole_groups(I);
      in_parallel(int64_t(blocks.size()) * pieces, threads, [&](int64_t i) {
        const Range& b = blocks[i / pieces];
        const int64_t c = i % pieces * NC;
        const int rows = int(b.end - b.begin), columns = int(std::min<int64_t>(NC, O - c));
        const F weights(matrix, b.expert);
        if (counts[b.expert] > FEW) {
          multiply_block(left, RightTurned<F>{weights}, out, I, b.begin, rows, c, columns, scratch(kBlockFloats));
          return;
        }
        float *wide = scratch(FEW * (padded + NC)), *sums = wide + FEW * padded;
        widen_rows(left, b.begin, rows, I, wide);
        few_rows(rows, weights, c, c + columns, I, wide, padded, sums, NC);
        for (int r = 0; r < rows; ++r) out.write_row(b.begin + r, c, columns, sums + r * NC);
      });
    });
  });
}

// dx (m, I) = dy (m, O) W_e; all of one type.
void linear_inputs(const void* dy, const void* weight, Type type, int64_t O, int64_t I, const int64_t* counts, int64_t E,
                   void* dx, int64_t threads) {
  const auto blocks = row_blocks(counts, E);
  with_type(type, [&](auto t) {
    typedef decltype(t) T;
    const LeftRows<T> left{static_cast<const T*>(dy), O, nullptr};
    const Rows<T> out{static_cast<T*>(dx), I};
    const int64_t pieces = (I + NC - 1) / NC;
    in_parallel(int64_t(blocks.size()) * pieces, threads, [&](int64_t i) {
      const Range& b = blocks[i / pieces];
      const RightRows<T> right{static_cast<const T*>(weight) + b.expert * O * I, I};
      const int64_t c = i % pieces * NC;
      multiply_block(left, right, out, O, b.begin, int(b.end - b.begin), c, int(std::min<int64_t>(NC, I - c)),
                     scratch(kBlockFloats));
    });
  });
}

// dW (E, O, I) = dy_e^T x_e; all of one type.
void linear_weights(const void* dy, const void* x, Type type, int64_t O, int64_t I, const int64_t* counts, int64_t E,
                    void* dw, int64_t threads) {
  std::vector<int64_t> starts(E);
  for (int64_t e = 1; e < E; ++e) starts[e] = starts[e - 1] + counts[e - 1];
  with_type(type, [&](auto t) {
    typedef decltype(t) T;
    const int64_t across = (I + NC - 1) / NC, down = (O + MC - 1) / MC;
    in_parallel(E * down * across, threads, [&](int64_t i) {
      const int64_t e = i / (down * across), r = i / across % down * MC, c = i % across * NC;
      const LeftColumns<T> left{static_cast<const T*>(dy) + starts[e] * O, O};
      const RightRows<T> right{static_cast<const T*>(x) + starts[e] * I, I};
      const Rows<T> out{static_cast<T*>(dw) + e * O * I, I};
      multiply_block(left, right, out, counts[e], r, int(std::min(MC, O - r)), c, int(std::min<int64_t>(NC, I - c)),
                     scratch(kBlockFloats));
    });
  });
}

// The answers of experts, (m, L) float32: of E experts, counts[e] rows for expert e, row i being row tokens[i] of z. W1
// and W3 are (E, F, L), W2 (E, L, F), all in `format`; matrices without rows are not read.
void expert_answers(const void* z, Type type, const int64_t* tokens, const int64_t* counts, int64_t E, int32_t format,
                    const void* w1, const uint8_t* scale1, const void* w2, const uint8_t* scale2, const void* w3,
                    const uint8_t* scale3, int64_t F, int64_t L, float beta, float linear_beta, float* answers,
                    int64_t threads) {
  const Matrix m1{w1, scale1, F, L, format}, m2{w2, scale2, L, F, format}, m3{w3, scale3, F, L, format};
  const Expert experts{m1, m2, m3, beta, linear_beta};
  const auto blocks = row_blocks(counts, E);
  with_type(type, [&](auto t) {
    typedef decltype(t) T;
    with_format(format, [&](auto f) {
      in_parallel(int64_t(blocks.size()), threads, [&](int64_t i) {
        const Range& b = blocks[i];
        const LeftRows<T> left{static_cast<const T*>(z), L, tokens + b.begin};
        expert_rows<T, decltype(f)>(experts, b.expert, left, int(b.end - b.begin), counts[b.expert] <= FEW,
                                    answers + b.begin * L);
      });
    });
  });
}

// y (n, L): y_t = sum over k of p_tk answers[place_tk], rounded once.
void weigh_answers(const float* answers, const int64_t* place, const float* p, int64_t n, int64_t N, int64_t L, void* y,
                   Type type, int64_t threads) {
  with_type(type, [&](auto t) {
    typedef decltype(t) T;
    T* out = static_cast<T*>(y);
    for_blocks(Blocks(n, 16), threads, [&](int64_t, int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token)
        for_columns(L, [&](int64_t c, auto part) {
          vf sum = {};
          for (int64_t k = 0; k < N; ++k) sum += p[token * N + k] * read(answers + place[token * N + k] * L + c, part);
          write(out + token * L + c, sum, part);
        });
    });
  });
}

// y (n, L) from z (n, L), both of one type, for N chosen experts a token with weights p (n, N): both of the above.
// `parts` holds n N L numbers: the experts' answers before they are weighed.
void routed_experts(const void* z, Type type, int64_t n, const int64_t* chosen, const float* p, int64_t N, int64_t E,
                    int32_t format, const void* w1, const uint8_t* scale1, const void* w2, const uint8_t* scale2,
                    const void* w3, const uint8_t* scale3, int64_t F, int64_t L, float beta, float linear_beta,
                    float* parts, void* y, int64_t threads) {
  std::vector<int64_t> counts(E), next(E), tokens(n * N), place(n * N);
  for (int64_t i = 0; i < n * N; ++i) ++counts[chosen[i]];
  for (int64_t e = 1; e < E; ++e) next[e] = next[e - 1] + counts[e - 1];
  for (int64_t i = 0; i < n * N; ++i) {
    place[i] = next[chosen[i]]++;
    tokens[place[i]] = i / N;
  }
  expert_answers(z, type, tokens.data(), counts.data(), E, format, w1, scale1, w2, scale2, w3, scale3, F, L, beta,
                 linear_beta, parts, threads);
  weigh_answers(parts, place.data(), p, n, N, L, y, type, threads);
}

}  // extern "C"
