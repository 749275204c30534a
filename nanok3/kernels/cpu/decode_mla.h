// One MLA layer's tokens in the absorbed form: queries moved into the latent space, an online softmax over the latent
// rows in pages, values moved out behind the sum.
//
//     q_h' = [W_k,h^T q_h,nope | q_h,rope] / sqrt(nope + rope)     s_t = q_h' . row_t     o_h = W_v,h sum_t softmax(s)_t c_t
//
// Keys are taken 64 at a time, counted from the sequence's first token, so that a result depends on neither the size of
// the pages nor what else is in the call.
#pragma once
#include "decode_rows.h"

namespace mla {

constexpr int64_t kKeys = 64;
constexpr int64_t kHeads = 4;  // that read the same keys together

// f(address of a row, its number in [first, first + count), rows that follow it in the same page).
template <class T, class Run>
INLINE void for_pages(const Sequence& s, int64_t layer, int64_t width, int64_t first, int64_t count, Run run) {
  for (int64_t t = first; t < first + count;) {
    const int64_t at = t % s.page_rows, left = first + count - t, here = s.page_rows - at < left ? s.page_rows - at : left;
    T* page = static_cast<T*>(s.latents[layer]) + s.pages[t / s.page_rows] * s.page_stride;
    run(page + at * width, t - first, here);
    t += here;
  }
}

// Norms of the query bottleneck and of the latent; the latter, with the shared key part, is written into its page.
inline void keep_row(const Model& m, const Layer& l, const Buffers& b, const Sequence& s, int64_t row, int64_t r, int64_t layer) {
  const int64_t width = m.rank + m.rope;
  float* space = scratch(size_t(m.rank + m.q_rank));
  if (m.q_rank) {
    float* q_a = b.q_a + (row + r) * b.q_rank;
    rms_norm(q_a, m.q_rank, l.q_norm.floats(0, m.q_rank, space), m.qk_eps, q_a);
  }
  float* kv = b.kv + (row + r) * width;
  rms_norm(kv, m.rank, l.kv_norm.floats(0, m.rank, space), m.qk_eps, kv);
  with_type(Type(s.latent_type), [&](auto type) {
    using T = decltype(type);
    for_pages<T>(s, layer, width, s.tokens + r, 1, [&](T* to, int64_t, int64_t) {
      for_columns(width, [&](int64_t i, auto part) { write(to + i, read(kv + i, part), part); });
    });
  });
}

// Queries of one head for all rows.
inline void absorb(const Model& m, const Layer& l, const Buffers& b, int64_t rows, int64_t h) {
  const int64_t wide = m.nope + m.rope, q_stride = m.mla_heads * wide, to_stride = m.mla_heads * b.query;
  const float* q = b.q + h * wide;
  float* to = b.queries + h * b.query;
  combine_rows(l.kv_b, h * (m.nope + m.v_dim), m.nope, rows, [&](int64_t r) { return q + r * q_stride; },
               [&](int64_t r) { return to + r * to_stride; });
  const float scale = 1.0f / sqrtf(float(wide));
  for (int64_t r = 0; r < rows; ++r) {
    float* y = to + r * to_stride;
    memcpy(y + m.rank, q + r * q_stride + m.nope, size_t(m.rope) * 4);
    for (int64_t i = 0; i < m.rank + m.rope; ++i) y[i] *= scale;
  }
}

// acc_h = factor_h acc_h + sum_j p_h[j] row_j over the latent columns, for R heads.
template <int R, class T>
INLINE void add_rows(const Sequence& s, int64_t layer, int64_t width, int64_t rank, int64_t first, int64_t count,
                     const float* p, const float* factor, float* acc, int64_t acc_stride) {
  for (int64_t c = 0; c < rank; c += kGroup) {
    const int part = int(rank - c < kGroup ? rank - c : kGroup);
    vf sums[R][kGroupVectors];
    UNROLL
    for (int r = 0; r < R; ++r)
      UNROLL
      for (int v = 0; v < kGroupVectors; ++v) sums[r][v] = load(acc + r * acc_stride + c + v * W) * factor[r];
    for_pages<T>(s, layer, width, first, count, [&](const T* rows, int64_t j, int64_t here) {
      for (int64_t i = 0; i < here; ++i) {
        const PlainRow<T> row{rows + i * width};
        vf x[kGroupVectors];
        if (part == kGroup) row.group(c, x);
        else row.last(c, part, x);
        UNROLL
        for (int r = 0; r < R; ++r) {
          vf weight = splat(p[r * kKeys + j + i]);
          UNROLL
          for (int v = 0; v < kGroupVectors; ++v) sums[r][v] += weight * x[v];
        }
      }
    });
    UNROLL
    for (int r = 0; r < R; ++r)
      UNROLL
      for (int v = 0; v < kGroupVectors; ++v) store(acc + r * acc_stride + c + v * W, sums[r][v]);
  }
}

// Scores of one block become weights; the running maximum and sum of a head move on. Returns what its sums so far are
// to be multiplied with.
INLINE float soften(float* p, int64_t count, float& most, float& sum) {
  const float before = most;
  for (int64_t j = 0; j < count; ++j) most = p[j] > most ? p[j] : most;
  float sums[1];
  const vf high = splat(most);
  sum_columns<1>(count, sums, [&](int64_t j, auto part, vf(&s)[1]) {
    vf e = exp_or_zero(read(p + j, part) - high);
    write(p + j, e, part);
    s[0] += read(p + j, part);
  });
  const float factor = before == most ? 1.0f : expf(before - most);
  sum = sum * factor + sums[0];
  return factor;
}

// What up to kHeads heads from h on read for one row: the weighted sum of latents.
template <class T>
void attend(const Model& m, const Buffers& b, const Sequence& s, int64_t row, int64_t r, int64_t layer, int64_t h) {
  const int64_t width = m.rank + m.rope, heads = m.mla_heads - h < kHeads ? m.mla_heads - h : kHeads;
  const int64_t at = (row + r) * m.mla_heads + h, keys = s.tokens + r + 1;
  const float* q = b.queries + at * b.query;
  float* read_out = b.read + at * b.rank;
  float p[kHeads * kKeys], most[kHeads], sum[kHeads] = {}, factor[kHeads];
  for (int64_t i = 0; i < heads; ++i) most[i] = -__builtin_inff();
  memset(read_out, 0, size_t(heads * b.rank) * 4);
  for (int64_t first = 0; first < keys; first += kKeys) {
    const int64_t count = keys - first < kKeys ? keys - first : kKeys;
    for_pages<T>(s, layer, width, first, count, [&](const T* rows, int64_t j, int64_t here) {
      const Matrix latents{rows, nullptr, here, width, s.latent_type};
      dot_rows(latents, 0, 0, here, heads, [&](int64_t i) { return q + i * b.query; },
               [&](int64_t i) { return p + i * kKeys + j; });
    });
    for (int64_t i = 0; i < heads; ++i) factor[i] = soften(p + i * kKeys, count, most[i], sum[i]);
    int64_t i = 0;
    for (; i + 2 <= heads; i += 2)
      add_rows<2, T>(s, layer, width, m.rank, first, count, p + i * kKeys, factor + i, read_out + i * b.rank, b.rank);
    if (i < heads)
      add_rows<1, T>(s, layer, width, m.rank, first, count, p + i * kKeys, factor + i, read_out + i * b.rank, b.rank);
  }
  for (int64_t i = 0; i < heads; ++i)
    for (int64_t c = 0; c < m.rank; ++c) read_out[i * b.rank + c] /= sum[i];
}

// Outputs of one head for all rows: W_v times what was read, then the gate.
inline void values(const Model& m, const Layer& l, const Buffers& b, int64_t rows, int64_t h) {
  const int64_t first = h * (m.nope + m.v_dim) + m.nope, to = h * m.v_dim;  // a row of kv_b, and where its output goes
  dot_rows(l.kv_b, 0, first, first + m.v_dim, rows, [&](int64_t r) { return b.read + (r * m.mla_heads + h) * b.rank; },
           [&](int64_t r) { return b.mla_out + r * b.mla_width + to - first; });
  if (l.g_b)
    for (int64_t r = 0; r < rows; ++r)
      apply_gate(b.mla_out + r * b.mla_width + to, b.mla_gate + r * m.mla_heads * m.v_dim + to, m.v_dim);
}

}  // namespace mla
