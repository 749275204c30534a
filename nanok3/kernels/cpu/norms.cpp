// Normalised rows and the decay gate on a CPU, forward and backward.
//
//   rms     y = round(x r) w              r = 1 / sqrt(mean(x^2) + eps), w rounded to x's type first
//   gated   y = x r w sigmoid(gate)       rounded once
//   l2      y = x r                       r = 1 / sqrt(sum(x^2) + eps)
//   decay   y = bound sigmoid(e^A (z + bias))
//
// With g the gradient of x r, the gradient of x is r g - x r^3 / n sum(g x), n = D for a mean and 1 for a sum.
#include <cmath>

#include "rows.h"

namespace {

constexpr int64_t BLOCK = 32;  // rows a thread takes at once

template <class T>
float inverse_root(const T* x, int64_t D, float count, float eps) {
  float squares[1];
  sum_columns(D, squares, [=](int64_t i, auto part, vf* sum) {
    vf v = read(x + i, part);
    sum[0] += v * v;
  });
  return 1.0f / std::sqrt(squares[0] / count + eps);
}

// r^3 / n sum(g x): what of x goes into its own gradient.
float along_row(float inverse, float count, float g_x) { return inverse * inverse * inverse * g_x / count; }

}  // namespace

extern "C" {

// x: rows of D numbers, `stride` apart; weight (D) already rounded to their type.
void rms_norm_forward(const void* x_, int64_t stride, const float* weight, void* out, int64_t rows, int64_t D,
                      Type type, float eps, int64_t threads) {
  with_type(type, [=](auto t) {
    typedef decltype(t) T;
    for_blocks(Blocks(rows, BLOCK), threads, [=](int64_t, int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const T* x = static_cast<const T*>(x_) + row * stride;
        T* y = static_cast<T*>(out) + row * D;
        float inverse = inverse_root(x, D, D, eps);
        for_columns(D, [=](int64_t i, auto part) {
          vf normed = rounded_to(x, read(x + i, part) * inverse);
          write(y + i, normed * read(weight + i, part), part);
        });
      }
    });
  });
}

void rms_norm_backward(const void* d_out, const void* x_, int64_t stride, const float* weight, void* d_x,
                       float* d_weight, int64_t rows, int64_t D, Type type, float eps, int64_t threads) {
  Blocks blocks(rows, BLOCK);
  SumOverRows sums(blocks, D);
  with_type(type, [&](auto t) {
    typedef decltype(t) T;
    for_blocks(blocks, threads, [&](int64_t block, int64_t begin, int64_t end) {
      float* dw = sums.line(block);
      for (int64_t row = begin; row < end; ++row) {
        const T *x = static_cast<const T*>(x_) + row * stride, *d = static_cast<const T*>(d_out) + row * D;
        T* dx = static_cast<T*>(d_x) + row * D;
        float totals[2];
        sum_columns(D, totals, [=](int64_t i, auto part, vf* sum) {
          vf v = read(x + i, part);
          sum[0] += v * v;
          sum[1] += v * (read(d + i, part) * read(weight + i, part));
        });
        float inverse = 1.0f / std::sqrt(totals[0] / D + eps), along = along_row(inverse, D, totals[1]);
        for_columns(D, [=](int64_t i, auto part) {
          vf v = read(x + i, part), dy = read(d + i, part);
          write(dx + i, dy * read(weight + i, part) * inverse - v * along, part);
          write(dw + i, read(dw + i, part) + dy * (v * inverse), part);
        });
      }
    });
  });
  sums.write(d_weight);
}

// x, gate, out: (rows, D) contiguous.
void gated_norm_forward(const void* x_, const void* gate, const float* weight, void* out, int64_t rows, int64_t D,
                        Type type, float eps, int64_t threads) {
  with_type(type, [=](auto t) {
    typedef decltype(t) T;
    for_blocks(Blocks(rows, BLOCK), threads, [=](int64_t, int64_t begin, int64_t end) {
      for (int64_t at = begin * D; at < end * D; at += D) {
        const T *x = static_cast<const T*>(x_) + at, *z = static_cast<const T*>(gate) + at;
        T* y = static_cast<T*>(out) + at;
        float inverse = inverse_root(x, D, D, eps);
        for_columns(D, [=](int64_t i, auto part) {
          vf normed = read(x + i, part) * inverse * read(weight + i, part);
          write(y + i, normed * sigmoid(read(z + i, part)).value, part);
        });
      }
    });
  });
}

void gated_norm_backward(const void* d_out, const void* x_, const void* gate, const float* weight, void* d_x,
                         void* d_gate, float* d_weight, int64_t rows, int64_t D, Type type, float eps,
                         int64_t threads) {
  Blocks blocks(rows, BLOCK);
  SumOverRows sums(blocks, D);
  with_type(type, [&](auto t) {
    typedef decltype(t) T;
    for_blocks(blocks, threads, [&](int64_t block, int64_t begin, int64_t end) {
      std::vector<float> scratch(D);
      float *dw = sums.line(block), *d_normed = scratch.data();  // d_normed: gradient of x r w
      for (int64_t at = begin * D; at < end * D; at += D) {
        const T *x = static_cast<const T*>(x_) + at, *z = static_cast<const T*>(gate) + at;
        const T* d = static_cast<const T*>(d_out) + at;
        T *dx = static_cast<T*>(d_x) + at, *dz = static_cast<T*>(d_gate) + at;
        float inverse = inverse_root(x, D, D, eps), g_x[1];
        sum_columns(D, g_x, [=](int64_t i, auto part, vf* sum) {
          Sigmoid s = sigmoid(read(z + i, part));
          vf v = read(x + i, part), w = read(weight + i, part), passed = read(d + i, part) * s.value;
          write(d_normed + i, passed, part);
          write(dz + i, passed * s.complement * (v * inverse * w), part);
          sum[0] += v * (passed * w);
        });
        float along = along_row(inverse, D, g_x[0]);
        for_columns(D, [=](int64_t i, auto part) {
          vf v = read(x + i, part), passed = read(d_normed + i, part);
          write(dx + i, passed * read(weight + i, part) * inverse - v * along, part);
          write(dw + i, read(dw + i, part) + passed * (v * inverse), part);
        });
      }
    });
  });
  sums.write(d_weight);
}

void l2_norm_forward(const void* x_, void* out, int64_t rows, int64_t D, Type type, float eps, int64_t threads) {
  with_type(type, [=](auto t) {
    typedef decltype(t) T;
    for_blocks(Blocks(rows, BLOCK), threads, [=](int64_t, int64_t begin, int64_t end) {
      for (int64_t at = begin * D; at < end * D; at += D) {
        const T* x = static_cast<const T*>(x_) + at;
        T* y = static_cast<T*>(out) + at;
        float inverse = inverse_root(x, D, 1.0f, eps);
        for_columns(D, [=](int64_t i, auto part) { write(y + i, read(x + i, part) * inverse, part); });
      }
    });
  });
}

void l2_norm_backward(const void* d_out, const void* x_, void* d_x, int64_t rows, int64_t D, Type type, float eps,
                      int64_t threads) {
  with_type(type, [=](auto t) {
    typedef decltype(t) T;
    for_blocks(Blocks(rows, BLOCK), threads, [=](int64_t, int64_t begin, int64_t end) {
      for (int64_t at = begin * D; at < end * D; at += D) {
        const T *x = static_cast<const T*>(x_) + at, *d = static_cast<const T*>(d_out) + at;
        T* dx = static_cast<T*>(d_x) + at;
        float totals[2];
        sum_columns(D, totals, [=](int64_t i, auto part, vf* sum) {
          vf v = read(x + i, part);
          sum[0] += v * v;
          sum[1] += v * read(d + i, part);
        });
        float inverse = 1.0f / std::sqrt(totals[0] + eps), along = along_row(inverse, 1.0f, totals[1]);
        for_columns(D, [=](int64_t i, auto part) {
          write(dx + i, read(d + i, part) * inverse - read(x + i, part) * along, part);
        });
      }
    });
  });
}

// z (rows, D) with D = heads * K; rate (D) is e^A of each column's head; out (rows, D) float32.
void decay_forward(const void* z_, const float* rate, const float* bias, float* out, int64_t rows, int64_t D, Type type,
                   float bound, int64_t threads) {
  with_type(type, [=](auto t) {
    typedef decltype(t) T;
    for_blocks(Blocks(rows, BLOCK), threads, [=](int64_t, int64_t begin, int64_t end) {
      for (int64_t at = begin * D; at < end * D; at += D) {
        const T* z = static_cast<const T*>(z_) + at;
        for_columns(D, [=](int64_t i, auto part) {
          vf shifted = read(z + i, part) + read(bias + i, part);
          write(out + at + i, bound * sigmoid(read(rate + i, part) * shifted).value, part);
        });
      }
    });
  });
}

// d_bias (D), and d_log_rate (D): the gradient of A before it is summed over each head's columns.
void decay_backward(const float* d_out, const void* z_, const float* rate, const float* bias, void* d_z, float* d_bias,
                    float* d_log_rate, int64_t rows, int64_t D, Type type, float bound, int64_t threads) {
  Blocks blocks(rows, BLOCK);
  SumOverRows bias_sums(blocks, D), rate_sums(blocks, D);
  with_type(type, [&](auto t) {
    typedef decltype(t) T;
    for_blocks(blocks, threads, [&](int64_t block, int64_t begin, int64_t end) {
      float *db = bias_sums.line(block), *da = rate_sums.line(block);
      for (int64_t at = begin * D; at < end * D; at += D) {
        const T* z = static_cast<const T*>(z_) + at;
        T* dz = static_cast<T*>(d_z) + at;
        for_columns(D, [=](int64_t i, auto part) {
          vf shifted = read(z + i, part) + read(bias + i, part), r = read(rate + i, part);
          Sigmoid s = sigmoid(r * shifted);
          // In this order a saturated gate gives 0, however large its rate.
          vf d = bound * read(d_out + at + i, part) * (s.value * s.complement) * r;
          write(dz + i, d, part);
          write(db + i, read(db + i, part) + d, part);
          write(da + i, read(da + i, part) + d * shifted, part);
        });
      }
    });
  });
  bias_sums.write(d_bias);
  rate_sums.write(d_log_rate);
}

}  // extern "C"
