// The short causal convolution of each channel with SiLU behind it, on a CPU, forward and backward.
//
//   y_t = silu(x_t),   x_t = sum_{back = 0 .. reach(t)} w[taps - 1 - back] u_{t - back}
//
// reach(t) is how many earlier tokens t may see: at most taps - 1, at most its place in its document, and none before
// the first token unless there is history. What a token may not see is not read, so a NaN in it goes nowhere.
#include "rows.h"

namespace {

constexpr int64_t BLOCK = 64;  // tokens a thread takes at once; the backward pass looks taps - 1 further

}  // namespace

// u (B, T, C) and history (B, taps - 1, C) or null of one type; weight (taps, C); position (T) or null.
struct Problem {
  const void *u, *history;
  const float* weight;
  const int64_t* position;
  int64_t B, T, C, taps, threads;
  Type type;
};

namespace {

template <class T>
class Sequence {  // one row of the batch
 public:
  Sequence(const Problem& p, int64_t row) : p_(p), row_(row) {}

  int64_t reach(int64_t t) const {
    int64_t n = p_.taps - 1;
    if (p_.position && p_.position[t] < n) n = p_.position[t] > 0 ? p_.position[t] : 0;
    return p_.history || n < t ? n : t;
  }

  const T* input(int64_t t) const {
    return t >= 0 ? static_cast<const T*>(p_.u) + (row_ * p_.T + t) * p_.C
                  : static_cast<const T*>(p_.history) + (row_ * (p_.taps - 1) + p_.taps - 1 + t) * p_.C;
  }

  const float* weight(int64_t back) const { return p_.weight + (p_.taps - 1 - back) * p_.C; }

  template <class Reach, class Width>
  INLINE vf sum(int64_t t, Reach reach, int64_t i, Width part) const {
    vf x = read(input(t) + i, part) * read(weight(0) + i, part);
    UNROLL
    for (int64_t back = 1; back <= reach; ++back) x += read(input(t - back) + i, part) * read(weight(back) + i, part);
    return x;
  }

 private:
  const Problem& p_;
  int64_t row_;
};

struct Reader {  // a token that reads another one, and by which weight
  const float *dx, *weight;
};

// run(n), with K3's four taps known to the compiler wherever a token sees them all.
template <class Run>
void with_reach(int64_t n, Run run) {
  if (n == 3) run(std::integral_constant<int64_t, 3>{});
  else run(n);
}

// run(row of the batch, first token, one past the last) over the tokens of the flattened rows [begin, end).
template <class Run>
void for_each_row(int64_t T, int64_t begin, int64_t end, Run run) {
  while (begin < end) {
    int64_t row = begin / T, stop = (row + 1) * T < end ? (row + 1) * T : end;
    run(row, begin - row * T, stop - row * T);
    begin = stop;
  }
}

}  // namespace

extern "C" {

void short_conv_forward(const Problem* p, void* out) {
  with_type(p->type, [=](auto t) {
    typedef decltype(t) T;
    for_blocks(Blocks(p->B * p->T, BLOCK), p->threads, [=](int64_t, int64_t begin, int64_t end) {
      for_each_row(p->T, begin, end, [=](int64_t row, int64_t first, int64_t last) {
        Sequence<T> s(*p, row);
        for (int64_t t = first; t < last; ++t) {
          T* y = static_cast<T*>(out) + (row * p->T + t) * p->C;
          with_reach(s.reach(t), [=](auto reach) {
            for_columns(p->C, [=](int64_t i, auto part) {
              vf x = s.sum(t, reach, i, part);
              write(y + i, x * sigmoid(x).value, part);
            });
          });
        }
      });
    });
  });
}

// d_u like u, d_weight (taps, C). History is taken as a constant.
void short_conv_backward(const Problem* p, const void* d_out, void* d_u, float* d_weight) {
  const int64_t taps = p->taps, C = p->C;
  Blocks blocks(p->B * p->T, BLOCK);
  SumOverRows sums(blocks, taps * C);
  with_type(p->type, [&](auto t) {
    typedef decltype(t) T;
    for_blocks(blocks, p->threads, [&](int64_t block, int64_t begin, int64_t end) {
      std::vector<float> ring(taps * C);  // the gradient of x of the last `taps` tokens
      std::vector<Reader> found(taps);
      float *dx_of = ring.data(), *dw = sums.line(block);
      Reader* readers = found.data();
      for_each_row(p->T, begin, end, [=](int64_t row, int64_t first, int64_t last) {
        Sequence<T> s(*p, row);
        for (int64_t t = first; t < last + taps - 1; ++t) {
          if (t < p->T) {
            const T* d = static_cast<const T*>(d_out) + (row * p->T + t) * C;
            float* dx = dx_of + t % taps * C;
            with_reach(s.reach(t), [=](auto reach) {
              for_columns(C, [=](int64_t i, auto part) {
                vf x = s.sum(t, reach, i, part);
                Sigmoid gate = sigmoid(x);
                vf slope = read(d + i, part) * gate.value * (1.0f + x * gate.complement);
                write(dx + i, slope, part);
                if (t >= last) return;  // its weights' gradients belong to the next block
                UNROLL
                for (int64_t back = 0; back <= reach; ++back) {
                  float* w = dw + (taps - 1 - back) * C + i;
                  write(w, read(w, part) + slope * read(s.input(t - back) + i, part), part);
                }
              });
            });
          }
          const int64_t done = t - taps + 1;  // nothing later reads this token
          if (done < first) continue;
          int64_t count = 0;
          for (int64_t back = 0; back < taps && done + back < p->T; ++back)
            if (s.reach(done + back) >= back) readers[count++] = {dx_of + (done + back) % taps * C, s.weight(back)};
          T* du = static_cast<T*>(d_u) + (row * p->T + done) * C;
          with_reach(count - 1, [=](auto others) {
            for_columns(C, [=](int64_t i, auto part) {
              vf sum = read(readers[0].dx + i, part) * read(readers[0].weight + i, part);
              UNROLL
              for (int64_t k = 1; k <= others; ++k)
                sum += read(readers[k].dx + i, part) * read(readers[k].weight + i, part);
              write(du + i, sum, part);
            });
          });
        }
      });
    });
  });
  sums.write(d_weight);
}

}  // extern "C"
