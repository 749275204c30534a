// One KDA layer's tokens: short convolutions, gates, the delta rule on the state in place, and the gated output norm.
//
//     S <- Diag(e^g) S;   e = v - S^T k;   S <- S + beta k e^T;   o = K^-1/2 S^T q
//
// One pass over S takes both products, with the decayed S and k and with it and q; the output then is
// S^T q + (q . k) beta e. The second pass finds S in the nearest cache.
//
// Rows that may turn out wrong, as those of a draft do, leave the memory as it is: they work on a copy of S, and a tape
// keeps of each what moves the memory on, the convolutions' inputs, k, e^g and u = beta e. `replay` does the rest for as
// many of them as were right, with the same arithmetic, so that the result is that of reading them one by one.
#pragma once
#include "decode_rows.h"

namespace kda {

// Channels [first, first + n) of rows of the convolution of one of q, k, v, then SiLU; y is (rows, n). `u` holds the
// rows' inputs, `history` the ones before, oldest first.
inline void convolve(const Model& m, const Vector& weight, const float* history, const float* u, int64_t u_stride,
                     int64_t width, int64_t first, int64_t n, int64_t rows, float* y, float* space) {
  const int64_t taps = m.taps;
  const float* w = weight.floats(first * taps, n * taps, space);
  for (int64_t r = 0; r < rows; ++r) {
    float* out = y + r * n;
    auto input = [&](int64_t tap) {
      const int64_t t = r - (taps - 1) + tap;
      return (t >= 0 ? u + t * u_stride : history + (t + taps - 1) * width) + first;
    };
    if (taps == 4) {
      const float *a = input(0), *b = input(1), *c = input(2), *d = input(3);
      for (int64_t i = 0; i < n; ++i) out[i] = w[4 * i] * a[i] + w[4 * i + 1] * b[i] + w[4 * i + 2] * c[i] + w[4 * i + 3] * d[i];
    } else {
      for (int64_t i = 0; i < n; ++i) out[i] = 0;
      for (int64_t tap = 0; tap < taps; ++tap) {
        const float* in = input(tap);
        for (int64_t i = 0; i < n; ++i) out[i] += w[taps * i + tap] * in[i];
      }
    }
    for_columns(n, [&](int64_t i, auto part) {
      vf x = read(out + i, part);
      write(out + i, x * sigmoid(x).value, part);
    });
  }
}

// The last inputs of the rows become the history.
inline void keep_inputs(const Model& m, float* history, const float* u, int64_t u_stride, int64_t width, int64_t first,
                        int64_t n, int64_t rows) {
  const int64_t kept = m.taps - 1;
  for (int64_t i = 0; i < kept; ++i) {
    const int64_t t = rows - kept + i;
    const float* from = (t >= 0 ? u + t * u_stride : history + (t + kept) * width) + first;
    memmove(history + i * width + first, from, size_t(n) * 4);
  }
}

INLINE void l2_normalize(float* x, int64_t n, float scale) {
  const vf inverse = splat(scale / sqrtf(sum_of_squares(x, n) + 1e-6f));
  for_columns(n, [&](int64_t i, auto part) { write(x + i, read(x + i, part) * inverse, part); });
}

// e^g for one head, from z: the bounded gate, or the older form without a bound.
inline void decay(const Model& m, float rate, const float* z, const float* dt_bias, int64_t n, float* a) {
  if (m.gate_bound) {
    for_columns(n, [&](int64_t i, auto part) {
      vf g = m.gate_bound * sigmoid(rate * (read(z + i, part) + read(dt_bias + i, part))).value;
      write(a + i, exp_or_zero(g), part);
    });
    return;
  }
  for (int64_t i = 0; i < n; ++i) {
    const float x = z[i] + dt_bias[i];
    a[i] = expf(-rate * ((x < 0 ? 0 : x) + log1pf(expf(-fabsf(x)))));
  }
}

// S <- Diag(a) S + k u^T in NV vectors of columns.
template <int NV>
INLINE void write_columns(int64_t K, int64_t V, float* S, const float* a, const float* k, const vf (&u)[NV]) {
  for (int64_t i = 0; i < K; ++i) {
    vf keep = splat(a[i]), along = splat(k[i]);
    UNROLL
    for (int j = 0; j < NV; ++j) {
      float* s = S + i * V + j * W;
      store(s, load(s) * keep + along * u[j]);
    }
  }
}

INLINE void write_column(int64_t K, int64_t V, float* S, const float* a, const float* k, float u) {
  for (int64_t i = 0; i < K; ++i) S[i * V] = S[i * V] * a[i] + k[i] * u;
}

// NV vectors of columns of the state: what the head's comment says. ak = a * k, aq = a * q; v becomes u.
template <int NV>
INLINE void step_columns(int64_t K, int64_t V, float* S, const float* a, const float* ak, const float* aq, const float* k,
                         float* v, float beta, float qk, float* o) {
  vf p[NV] = {}, r[NV] = {};
  for (int64_t i = 0; i < K; ++i) {
    vf with_k = splat(ak[i]), with_q = splat(aq[i]);
    UNROLL
    for (int j = 0; j < NV; ++j) {
      vf s = load(S + i * V + j * W);
      p[j] += s * with_k;
      r[j] += s * with_q;
    }
  }
  vf e[NV];
  UNROLL
  for (int j = 0; j < NV; ++j) {
    e[j] = beta * (load(v + j * W) - p[j]);
    store(o + j * W, r[j] + qk * e[j]);
    store(v + j * W, e[j]);
  }
  write_columns<NV>(K, V, S, a, k, e);
}

INLINE void step_column(int64_t K, int64_t V, float* S, const float* a, const float* ak, const float* aq, const float* k,
                        float* v, float beta, float qk, float* o) {
  float p = 0, r = 0;
  for (int64_t i = 0; i < K; ++i) p += S[i * V] * ak[i], r += S[i * V] * aq[i];
  const float e = beta * (*v - p);
  *o = r + qk * e;
  *v = e;
  write_column(K, V, S, a, k, e);
}

// v becomes u = beta e.
INLINE void step(int64_t n, float* S, const float* a, float* ak, float* aq, const float* q, const float* k, float* v,
                 float beta, float* o) {
  float sums[1];
  sum_columns<1>(n, sums, [&](int64_t i, auto part, vf(&s)[1]) {
    vf keep = read(a + i, part), x = read(k + i, part), y = read(q + i, part);
    s[0] += x * y;
    write(ak + i, keep * x, part);
    write(aq + i, keep * y, part);
  });
  int64_t c = 0;
  for (; c + 4 * W <= n; c += 4 * W) step_columns<4>(n, n, S + c, a, ak, aq, k, v + c, beta, sums[0], o + c);
  for (; c + W <= n; c += W) step_columns<1>(n, n, S + c, a, ak, aq, k, v + c, beta, sums[0], o + c);
  for (; c < n; ++c) step_column(n, n, S + c, a, ak, aq, k, v + c, beta, sums[0], o + c);
}

// One head of one sequence: `row` is its first row in the call, `layer` its number among the KDA layers.
inline void head(const Model& m, const Layer& l, const Buffers& b, const Sequence& s, int64_t row, int64_t layer, int64_t h) {
  const int64_t n = m.kda_dim, width = b.inner, first = h * n, rows = s.rows, stride = 3 * width;
  float* tape = s.tape ? s.tape[layer] : nullptr;
  float* space = scratch(size_t(3 * rows * n + 3 * n + (m.taps + 2) * n + (tape ? n * n : 0)));
  float *q = space, *k = q + rows * n, *v = k + rows * n, *a = v + rows * n, *ak = a + n, *aq = ak + n, *spare = aq + n;
  const Vector* conv[3] = {&l.q_conv, &l.k_conv, &l.v_conv};
  float* convolved[3] = {q, k, v};
  for (int i = 0; i < 3; ++i) {
    float* history = s.conv[layer] + i * (m.taps - 1) * width;
    const float* u = b.qkv + row * stride + i * width;
    convolve(m, *conv[i], history, u, stride, width, first, n, rows, convolved[i], spare);
    if (!tape) keep_inputs(m, history, u, stride, width, first, n, rows);
    else
      for (int64_t r = 0; r < rows; ++r) memcpy(tape + r * kTape * width + i * width + first, u + r * stride + first, size_t(n) * 4);
  }
  float* S = s.recurrent[layer] + h * n * n;
  if (tape) S = static_cast<float*>(memcpy(spare + (m.taps + 2) * n, S, size_t(n * n) * 4));
  const float *dt_bias = l.dt_bias.floats(first, n, spare), *norm = l.o_norm.floats(0, n, spare + n);
  const float A = read_one(l.A_log.data, h, Type(l.A_log.type)), rate = expf(A > 80.0f ? 80.0f : A);
  for (int64_t r = 0; r < rows; ++r) {
    float* o = b.kda_out + (row + r) * b.kda_width + first;
    l2_normalize(q + r * n, n, 1.0f / sqrtf(float(n)));
    l2_normalize(k + r * n, n, 1.0f);
    decay(m, rate, b.decay + (row + r) * width + first, dt_bias, n, a);
    const float beta = sigmoid(splat(b.beta[(row + r) * m.kda_heads + h])).value[0];
    step(n, S, a, ak, aq, q + r * n, k + r * n, v + r * n, beta, o);
    if (tape) {
      const float* kept[3] = {k + r * n, a, v + r * n};
      for (int i = 0; i < 3; ++i) memcpy(tape + (r * kTape + 3 + i) * width + first, kept[i], size_t(n) * 4);
    }
    rms_norm(o, n, norm, m.eps, o);
    apply_gate(o, b.kda_gate + (row + r) * width + first, n);
  }
}

// Moves one head's memory on by the sequence's rows, which its tape holds.
inline void replay(const Model& m, const Sequence& s, int64_t layer, int64_t h) {
  const int64_t n = m.kda_dim, width = m.kda_heads * n, first = h * n, stride = kTape * width;
  const float* tape = s.tape[layer];
  for (int i = 0; i < 3; ++i)
    keep_inputs(m, s.conv[layer] + i * (m.taps - 1) * width, tape + i * width, stride, width, first, n, s.rows);
  float* S = s.recurrent[layer] + h * n * n;
  for (int64_t r = 0; r < s.rows; ++r) {
    const float *k = tape + r * stride + 3 * width + first, *a = k + width, *u = a + width;
    int64_t c = 0;
    for (; c + W <= n; c += W) write_columns<1>(n, n, S + c, a, k, {load(u + c)});
    for (; c < n; ++c) write_column(n, n, S + c, a, k, u[c]);
  }
}

}  // namespace kda
