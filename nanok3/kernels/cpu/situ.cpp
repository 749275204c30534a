// SiTU-GLU on a CPU, forward and backward, one reading of each input.
//
//   out = A(g) B(u),   A(g) = b1 tanh(g / b1) sigmoid(g),   B(u) = b2 tanh(u / b2)
//
// An infinite b1 or b2 stands for the limit: A(g) = g sigmoid(g), B(u) = u.
#include "rows.h"

namespace {

constexpr int64_t BLOCK = 8192;  // numbers a thread takes at once

struct Factor {
  vf value, slope;
};

template <bool kCapped>
INLINE Factor gate_factor(vf g, float beta) {
  Sigmoid s = sigmoid(g);
  if (!kCapped) return {g * s.value, s.value * (1.0f + g * s.complement)};
  Tanh t = tanh(g * (1.0f / beta));
  vf capped = beta * t.value;
  return {capped * s.value, s.value * (t.slope + capped * s.complement)};
}

template <bool kCapped>
INLINE Factor up_factor(vf u, float beta) {
  if (!kCapped) return {u, splat(1.0f)};
  Tanh t = tanh(u * (1.0f / beta));
  return {beta * t.value, t.slope};
}

// run(T{}, gate is capped, up is capped, first, one past the last) for every block of n numbers.
template <class Run>
void for_each_block(int64_t n, Type type, float beta, float linear_beta, int64_t threads, Run run) {
  with_type(type, [&](auto t) {
    with_flag(__builtin_isfinite(beta), [&](auto cap_gate) {
      with_flag(__builtin_isfinite(linear_beta), [&](auto cap_up) {
        for_blocks(Blocks(n, BLOCK), threads,
                   [&](int64_t, int64_t begin, int64_t end) { run(t, cap_gate, cap_up, begin, end); });
      });
    });
  });
}

}  // namespace

extern "C" {

// n numbers, all of one type.
void situ_forward(const void* gate, const void* up, void* out, int64_t n, Type type, float beta, float linear_beta,
                  int64_t threads) {
  auto block = [=](auto t, auto cap_gate, auto cap_up, int64_t begin, int64_t end) {
    typedef decltype(t) T;
    const T *g = static_cast<const T*>(gate) + begin, *u = static_cast<const T*>(up) + begin;
    T* y = static_cast<T*>(out) + begin;
    for_columns(end - begin, [=](int64_t i, auto part) {
      Factor a = gate_factor<decltype(cap_gate)::value>(read(g + i, part), beta);
      Factor b = up_factor<decltype(cap_up)::value>(read(u + i, part), linear_beta);
      write(y + i, a.value * b.value, part);
    });
  };
  for_each_block(n, type, beta, linear_beta, threads, block);
}

void situ_backward(const void* d_out, const void* gate, const void* up, void* d_gate, void* d_up, int64_t n, Type type,
                   float beta, float linear_beta, int64_t threads) {
  auto block = [=](auto t, auto cap_gate, auto cap_up, int64_t begin, int64_t end) {
    typedef decltype(t) T;
    const T *g = static_cast<const T*>(gate) + begin, *u = static_cast<const T*>(up) + begin;
    const T* d = static_cast<const T*>(d_out) + begin;
    T *dg = static_cast<T*>(d_gate) + begin, *du = static_cast<T*>(d_up) + begin;
    for_columns(end - begin, [=](int64_t i, auto part) {
      Factor a = gate_factor<decltype(cap_gate)::value>(read(g + i, part), beta);
      Factor b = up_factor<decltype(cap_up)::value>(read(u + i, part), linear_beta);
      vf out = read(d + i, part);
      write(dg + i, out * b.value * a.slope, part);
      write(du + i, out * a.value * b.slope, part);
    });
  };
  for_each_block(n, type, beta, linear_beta, threads, block);
}

}  // extern "C"
