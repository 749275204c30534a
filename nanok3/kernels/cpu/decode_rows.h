// What happens to a row between two products: norms, reading over depth, the gated activation.
#pragma once
#include "decode_plan.h"

INLINE float sum_of_squares(const float* x, int64_t n) {
  float sums[1];
  sum_columns<1>(n, sums, [&](int64_t i, auto part, vf(&s)[1]) {
    vf v = read(x + i, part);
    s[0] += v * v;
  });
  return sums[0];
}

// y = w * x / sqrt(mean(x^2) + eps); y may be x.
INLINE void rms_norm(const float* x, int64_t n, const float* w, float eps, float* y) {
  const vf inverse = splat(1.0f / sqrtf(sum_of_squares(x, n) / float(n) + eps));
  for_columns(n, [&](int64_t i, auto part) { write(y + i, read(x + i, part) * inverse * read(w + i, part), part); });
}

// act(gate, up) into gate: SiTU-GLU, or SwiGLU where beta is 0.
INLINE void activate(const Model& m, float* gate, const float* up, int64_t n) {
  for_columns(n, [&](int64_t i, auto part) {
    vf g = read(gate + i, part), u = read(up + i, part);
    vf capped = m.beta ? m.beta * tanh(g / m.beta).value : g;
    if (m.linear_beta) u = m.linear_beta * tanh(u / m.linear_beta).value;
    write(gate + i, capped * sigmoid(g).value * u, part);
  });
}

// y *= sigmoid(gate).
INLINE void apply_gate(float* y, const float* gate, int64_t n) {
  for_columns(n, [&](int64_t i, auto part) {
    write(y + i, read(y + i, part) * sigmoid(read(gate + i, part)).value, part);
  });
}

// The attention residuals of a call: sources in the order of depth, of which the last one is still growing.
class Depth {
 public:
  Depth(const Model& m, const Buffers& b, int64_t capacity)
      : m_(m), base_(b.sources), width_(b.hidden), stride_(capacity * b.hidden) {}

  float* running(int64_t r) const { return source(closed_, r); }
  // Whether the next output begins the running sum instead of adding to it.
  bool fresh() const { return fresh_; }
  void close() { ++closed_, fresh_ = true; }
  void added() { fresh_ = false; }

  // Row r of softmax_i((w * u) . v_i / |v_i|) v_i over all sources, or the running sum itself where there is nothing
  // to choose from. `h` has room for a row.
  const float* read(int64_t r, const Vector& norm, const Vector& query, bool always, float* h) const {
    const int64_t count = closed_ + (fresh_ ? 0 : 1), n = m_.hidden;
    if (!m_.block || (count == 1 && !always)) return source(count - 1, r);
    float* a = scratch(size_t(count + 3 * n));
    float* combined = a + count;
    const float *w = norm.floats(0, n, combined + n), *u = query.floats(0, n, combined + 2 * n);
    for_columns(n, [&](int64_t i, auto part) { write(combined + i, ::read(w + i, part) * ::read(u + i, part), part); });
    for (int64_t k = 0; k < count; ++k) a[k] = score(source(k, r), combined);
    softmax(a, count);
    for_columns(n, [&](int64_t i, auto part) {
      vf sum = {};
      for (int64_t k = 0; k < count; ++k) sum += splat(a[k]) * ::read(source(k, r) + i, part);
      write(h + i, sum, part);
    });
    return h;
  }

 private:
  float* source(int64_t k, int64_t r) const { return base_ + k * stride_ + r * width_; }

  float score(const float* v, const float* combined) const {
    float sums[2];
    sum_columns<2>(m_.hidden, sums, [&](int64_t i, auto part, vf(&s)[2]) {
      vf x = ::read(v + i, part);
      s[0] += x * ::read(combined + i, part);
      s[1] += x * x;
    });
    return sums[0] / sqrtf(sums[1] / float(m_.hidden) + m_.eps);
  }

  static void softmax(float* a, int64_t n) {
    float most = a[0], sum = 0;
    for (int64_t k = 1; k < n; ++k) most = a[k] > most ? a[k] : most;
    for (int64_t k = 0; k < n; ++k) sum += a[k] = expf(a[k] - most);
    for (int64_t k = 0; k < n; ++k) a[k] /= sum;
  }

  const Model& m_;
  float* base_;
  int64_t width_, stride_, closed_ = 0;
  bool fresh_ = false;
};
