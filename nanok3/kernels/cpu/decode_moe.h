// The feed-forward half of a layer: one gated MLP, or the latent mixture of experts with its shared MLP.
//
// (row, expert) pairs are sorted by expert, so that a chosen expert's weights are read once however many rows want it;
// what each pair gives is added up per row in the order in which the row chose its experts.
#pragma once
#include "decode_rows.h"

namespace moe {

// Outputs [begin, end) of gate and up for some rows, and the activation into gate.
template <class X>
INLINE void gated(const Model& m, const Matrix& gate, const Matrix& up, int64_t expert, int64_t begin, int64_t end,
                  int64_t rows, X x, float* gate_out, float* up_out, int64_t stride) {
  for (const Matrix* part : {&gate, &up}) {
    float* y = part == &gate ? gate_out : up_out;
    dot_rows(*part, expert, begin, end, rows, x, [&](int64_t r) { return y + r * stride; });
  }
  for (int64_t r = 0; r < rows; ++r)
    activate(m, gate_out + r * stride + begin, up_out + r * stride + begin, end - begin);
}

// The best top_k experts of a row by score plus correction, best first, the lower number on a tie; their weights come
// from the scores alone. A row of NaN gets some experts, too.
inline void choose(const Model& m, const Layer& l, const Buffers& b, int64_t r) {
  float* score = b.scores + r * m.experts;
  int32_t* chosen = b.chosen + r * m.top_k;
  float *weight = b.weights + r * m.top_k, sum = 0;
  float* biased = scratch(size_t(2 * m.experts));
  const float* correction = l.correction.floats(0, m.experts, biased + m.experts);
  for_columns(m.experts, [&](int64_t i, auto part) {
    vf s = sigmoid(read(score + i, part)).value;
    write(score + i, s, part);
    write(biased + i, s + read(correction + i, part), part);
  });
  for (int64_t k = 0; k < m.top_k; ++k) {
    int32_t best = -1;
    for (int32_t e = 0; e < m.experts; ++e) {
      bool taken = false;
      for (int64_t i = 0; i < k; ++i) taken |= chosen[i] == e;
      if (!taken && (best < 0 || biased[e] > biased[best])) best = e;
    }
    chosen[k] = best, weight[k] = score[best], sum += weight[k];
  }
  for (int64_t k = 0; k < m.top_k; ++k)
    weight[k] = (m.renormalize ? weight[k] / (sum + 1e-20f) : weight[k]) * m.routed_scale;
}

// Pairs sorted by expert: active[i] is the i-th expert that anyone chose, its pairs are pairs[bounds[i] : bounds[i + 1]].
// A pair is row * top_k + place.
inline void sort_pairs(const Model& m, const Buffers& b, int64_t rows) {
  const int64_t count = rows * m.top_k;
  std::vector<int32_t> next(size_t(m.experts) + 1);
  for (int64_t p = 0; p < count; ++p) ++next[b.chosen[p] + 1];
  int64_t active = 0;
  for (int64_t e = 0; e < m.experts; ++e) {
    if (next[e + 1]) b.active[active] = int32_t(e), b.bounds[active++] = next[e];
    next[e + 1] += next[e];
  }
  b.bounds[active] = int32_t(count);
  for (int64_t p = 0; p < count; ++p) b.pairs[next[b.chosen[p]]++] = int32_t(p);
  __atomic_store_n(b.active_count, int32_t(active), __ATOMIC_RELAXED);  // a late thread may be reading it, in vain
}

// run(number of the active expert, its expert, begin, end) over `width` weight rows of every active expert.
template <class Run>
INLINE void for_experts(Member& team, const Buffers& b, int64_t active, int64_t width, Run run) {
  const int64_t pieces = (width + kPiece - 1) / kPiece;
  team.share(active * pieces, 1, [&](int64_t first, int64_t last) {
    while (first < last) {  // neighbouring pieces of an expert at once
      const int64_t i = first / pieces, stop = (i + 1) * pieces < last ? (i + 1) * pieces : last;
      const int64_t begin = (first - i * pieces) * kPiece, end = (stop - i * pieces) * kPiece;
      run(i, b.active[i], begin, end < width ? end : width);
      first = stop;
    }
  });
}

// The routed sum of every row into b.y, from z (rows of `z_stride`).
inline void routed(Member& team, const Model& m, const Layer& l, const Buffers& b, int64_t rows, const float* z,
                   int64_t z_stride) {
  team.share(rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) choose(m, l, b, r);
  });
  team.share(1, 1, [&](int64_t, int64_t) { sort_pairs(m, b, rows); });
  const int64_t active = __atomic_load_n(b.active_count, __ATOMIC_RELAXED);
  for_experts(team, b, active, m.inner, [&](int64_t i, int64_t e, int64_t begin, int64_t end) {
    const int32_t first = b.bounds[i], count = b.bounds[i + 1] - first;
    gated(m, l.w1, l.w3, e, begin, end, count, [&](int64_t j) { return z + b.pairs[first + j] / m.top_k * z_stride; },
          b.pair_gate + first * b.pair, b.pair_up + first * b.pair, b.pair);
  });
  for_experts(team, b, active, m.latent, [&](int64_t i, int64_t e, int64_t begin, int64_t end) {
    const int32_t first = b.bounds[i], count = b.bounds[i + 1] - first;
    dot_rows(l.w2, e, begin, end, count, [&](int64_t j) { return b.pair_gate + (first + j) * b.pair; },
             [&](int64_t j) { return b.pair_out + b.pairs[first + j] * m.latent; });
  });
  team.share(rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      float* y = b.y + r * b.latent;
      for_columns(m.latent, [&](int64_t i, auto part) {
        vf sum = {};
        for (int64_t p = r * m.top_k; p < (r + 1) * m.top_k; ++p) sum += splat(b.weights[p]) * read(b.pair_out + p * m.latent + i, part);
        write(y + i, sum, part);
      });
      if (l.latent_norm.data) rms_norm(y, m.latent, l.latent_norm.floats(0, m.latent, scratch(size_t(m.latent))), m.eps, y);
    }
  });
}

}  // namespace moe
