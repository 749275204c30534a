// The vision tower between its products, forward and backward: attention within each item, and the GELU by tanh.
//
//     q, k turned by the patch's place, each pair of channels as a complex number
//     o = softmax(scale q k^T) v over all patches of the item        lse = log sum e^(scale q . k)
//     gelu(x) = x (1 + tanh u) / 2 = x sigmoid(2 u),  u = sqrt(2 / pi) (x + 0.044715 x^3)
//
// Attention reads its factors where they lie, in the rows of qkv, turns them block by block, and needs memory for BLOCK x
// BLOCK weights. Queries meet a block of keys in a product (product.h) whose rows go straight through the softmax:
//
//     m' = max(m, s)      p = e^(s - m')      l = l e^(m - m') + sum p      o = o e^(m - m') + p v      at last o / l
//
// Backward, a thread owns a head of an item. lse makes the weights again:
//
//     p = e^(s - lse)      ds = scale p (do . v - do . o)      dv += p do      dk += ds q      dq += ds k
//
// In bf16 the turned q and k, the weights and ds are rounded to bf16, as factors of products are. A sum is taken in one
// order, whatever the number of threads.
#include "attention.h"

namespace {

constexpr int BLOCK = 192;  // patches: whole strips of 4, 6 and 8

// ---------------------------------------------------------------------- turning pairs of channels

// (a, b) -> (b, a), (a, a) and (b, b) for each pair.
INLINE vf swapped(vf x) {
#if defined(__AVX512F__)
  return (vf)_mm512_permute_ps((__m512)x, 0xb1);
#else
  vf y;
  UNROLL
  for (int i = 0; i < W; ++i) y[i] = x[i ^ 1];
  return y;
#endif
}

INLINE vf firsts(vf x) {
#if defined(__AVX512F__)
  return (vf)_mm512_moveldup_ps((__m512)x);
#else
  vf y;
  UNROLL
  for (int i = 0; i < W; ++i) y[i] = x[i & ~1];
  return y;
#endif
}

INLINE vf seconds(vf x) {
#if defined(__AVX512F__)
  return (vf)_mm512_movehdup_ps((__m512)x);
#else
  vf y;
  UNROLL
  for (int i = 0; i < W; ++i) y[i] = x[i | 1];
  return y;
#endif
}

INLINE vf minus_plus(float x) {
  vf y;
  UNROLL
  for (int i = 0; i < W; ++i) y[i] = i % 2 ? x : -x;
  return y;
}

// dst = rows of n numbers of src, turned by (cos, sin) of each pair, or back.
template <class From, class To>
void turn_rows(const From* src, int64_t src_ld, const float* turn, int rows, int K, bool back, To* dst, int64_t dst_ld) {
  const vf sign = minus_plus(back ? -1.0f : 1.0f);
  for (int r = 0; r < rows; ++r, src += src_ld, turn += K, dst += dst_ld)
    for_columns(K, [=](int64_t i, auto part) {
      vf x = read(src + i, part), t = read(turn + i, part);
      write(dst + i, x * firsts(t) + swapped(x) * (seconds(t) * sign), part);
    });
}

// ---------------------------------------------------------------------- attention

// One head of one item. Row r of q, k and v is `ld` numbers behind the row before it, of `turn` K numbers.
template <class T>
struct Head {
  const T *q, *k, *v;
  const float* turn;
  int64_t ld, patches;
  int K;
  float scale;
};

// What becomes of a row of a product, one struct each (`multiply_block` calls write_row).

template <class T>
struct Softmax {  // scores -> weights, relative to the largest score so far
  T* weights;
  float scale, *largest, *total, *factor;
  void write_row(int64_t r, int64_t, int n, const float* scores) const {
    const float most = std::max(largest[r], scale * largest_of(scores, n));
    factor[r] = std::exp(largest[r] - most);
    total[r] = total[r] * factor[r] + exponentials(scores, n, scale, most, weights + r * BLOCK);
    largest[r] = most;
  }
};

struct Mixed {  // weighted values, added to those of the blocks before
  float* sums;
  int64_t ld;
  const float* factor;
  bool first;
  void write_row(int64_t r, int64_t c, int n, const float* part_sums) const {
    float* dst = sums + r * ld + c;
    const float before = first ? 0.0f : factor[r];
    for_columns(n, [=](int64_t i, auto part) {
      vf x = read(part_sums + i, part);
      write(dst + i, first ? x : x + before * read(dst + i, part), part);
    });
  }
};

template <class T>
LeftRows<T> left_rows(const T* data, int64_t ld) {
  return {data, ld, nullptr};
}

template <class T>
RightTurned<PlainRows<T>> right_turned(const T* data, int64_t ld) {
  PlainRows<T> rows;
  rows.data = data, rows.columns = ld;
  return {rows};
}

// Queries begin ... begin + rows - 1, at most BLOCK, to out[t * out_ld + c] and lse[t * lse_ld].
template <class T>
void attend_rows(const Head<T>& h, int64_t begin, int rows, T* out, int64_t out_ld, float* lse, int64_t lse_ld,
                 Arena& arena) {
  const int K = h.K;
  arena.reserve(kBlockFloats + 3 * size_t(BLOCK) * (K + 16) + size_t(BLOCK) * (BLOCK + 3) + 256);
  float *scratch = arena.take(kBlockFloats), *sums = arena.take(size_t(BLOCK) * K);
  float *largest = arena.take(BLOCK), *total = arena.take(BLOCK), *factor = arena.take(BLOCK);
  T *Q = reinterpret_cast<T*>(arena.take(size_t(BLOCK) * K)), *Ks = reinterpret_cast<T*>(arena.take(size_t(BLOCK) * K));
  T* P = reinterpret_cast<T*>(arena.take(size_t(BLOCK) * BLOCK));
  std::fill(largest, largest + rows, -INFINITY);
  std::fill(total, total + rows, 0.0f);
  turn_rows(h.q + begin * h.ld, h.ld, h.turn + begin * K, rows, K, false, Q, K);
  for (int64_t first = 0; first < h.patches; first += BLOCK) {
    const int n = int(std::min<int64_t>(BLOCK, h.patches - first));
    turn_rows(h.k + first * h.ld, h.ld, h.turn + first * K, n, K, false, Ks, K);
    const Softmax<T> softmax{P, h.scale, largest, total, factor};
    multiply_block(left_rows(Q, K), right_turned(Ks, K), softmax, K, 0, rows, 0, n, scratch);
    const RightRows<T> values{h.v + first * h.ld, h.ld};
    multiply_block(left_rows(P, BLOCK), values, Mixed{sums, K, factor, first == 0}, n, 0, rows, 0, K, scratch);
  }
  for (int r = 0; r < rows; ++r) {
    const float inverse = 1.0f / total[r];
    const float* o = sums + size_t(r) * K;
    T* dst = out + (begin + r) * out_ld;
    if (lse) lse[(begin + r) * lse_ld] = largest[r] + std::log(total[r]);
    for_columns(K, [=](int64_t i, auto part) { write(dst + i, read(o + i, part) * inverse, part); });
  }
}

// ---------------------------------------------------------------------- backward

// What the backward pass reads besides the factors, and where the gradients go, which lie like the factors.
template <class T>
struct Gradients {
  const T *o, *d_o;
  const float* lse;
  int64_t o_ld, lse_ld;
  T *dq, *dk, *dv;
};

template <class T>
struct Weights {  // scores -> e^(s - lse)
  T* weights;
  float scale;
  const float* lse;
  int64_t lse_ld;
  void write_row(int64_t r, int64_t, int n, const float* scores) const {
    exponentials(scores, n, scale, lse[r * lse_ld], weights + r * BLOCK);
  }
};

template <class T>
struct Slopes {  // do . v -> ds
  const T* weights;
  T* slopes;
  float scale;
  const float* delta;  // do . o
  void write_row(int64_t r, int64_t, int n, const float* d_weights) const {
    const T* p = weights + r * BLOCK;
    T* ds = slopes + r * BLOCK;
    const float mean = delta[r], s = scale;
    for_columns(n, [=](int64_t i, auto part) {
      write(ds + i, s * read(p + i, part) * (read(d_weights + i, part) - mean), part);
    });
  }
};

struct Added {  // to what is there, or in its place
  float* sums;
  int64_t ld;
  bool first;
  void write_row(int64_t r, int64_t c, int n, const float* part_sums) const {
    float* dst = sums + r * ld + c;
    for_columns(n, [=](int64_t i, auto part) {
      vf x = read(part_sums + i, part);
      write(dst + i, first ? x : x + read(dst + i, part), part);
    });
  }
};

template <class T>
void differentiate_head(const Head<T>& h, const Gradients<T>& g, Arena& arena) {
  const int K = h.K;
  const size_t side = size_t(BLOCK) * K, square = size_t(BLOCK) * BLOCK;
  arena.reserve(kBlockFloats + size_t(h.patches) * (K + 1) + 4 * side + 2 * square + 256);
  float *scratch = arena.take(kBlockFloats), *dQ = arena.take(size_t(h.patches) * K), *delta = arena.take(h.patches);
  float *dK = arena.take(side), *dV = arena.take(side);
  T *Q = reinterpret_cast<T*>(arena.take(side)), *Ks = reinterpret_cast<T*>(arena.take(side));
  T *P = reinterpret_cast<T*>(arena.take(square)), *dS = reinterpret_cast<T*>(arena.take(square));
  for (int64_t t = 0; t < h.patches; ++t) delta[t] = dot(g.o + t * g.o_ld, g.d_o + t * g.o_ld, K);
  for (int64_t first = 0; first < h.patches; first += BLOCK) {
    const int n = int(std::min<int64_t>(BLOCK, h.patches - first));
    turn_rows(h.k + first * h.ld, h.ld, h.turn + first * K, n, K, false, Ks, K);
    for (int64_t begin = 0; begin < h.patches; begin += BLOCK) {
      const int rows = int(std::min<int64_t>(BLOCK, h.patches - begin));
      const T* d_o = g.d_o + begin * g.o_ld;
      turn_rows(h.q + begin * h.ld, h.ld, h.turn + begin * K, rows, K, false, Q, K);
      const Weights<T> weights{P, h.scale, g.lse + begin * g.lse_ld, g.lse_ld};
      multiply_block(left_rows(Q, K), right_turned(Ks, K), weights, K, 0, rows, 0, n, scratch);
      const Slopes<T> slopes{P, dS, h.scale, delta + begin};
      const auto values = right_turned(h.v + first * h.ld, h.ld);
      multiply_block(left_rows(d_o, g.o_ld), values, slopes, K, 0, rows, 0, n, scratch);
      const RightRows<T> d_out{d_o, g.o_ld}, queries{Q, K}, keys{Ks, K};
      const LeftColumns<T> p{P, BLOCK}, ds{dS, BLOCK};
      multiply_block(p, d_out, Added{dV, K, begin == 0}, rows, 0, n, 0, K, scratch);
      multiply_block(ds, queries, Added{dK, K, begin == 0}, rows, 0, n, 0, K, scratch);
      multiply_block(left_rows(dS, BLOCK), keys, Added{dQ + begin * K, K, first == 0}, n, 0, rows, 0, K, scratch);
    }
    turn_rows(dK, K, h.turn + first * K, n, K, true, g.dk + first * h.ld, h.ld);
    for (int r = 0; r < n; ++r) {
      T* dv = g.dv + (first + r) * h.ld;
      for_columns(K, [=](int64_t i, auto part) { write(dv + i, read(dV + r * K + i, part), part); });
    }
  }
  turn_rows(dQ, K, h.turn, int(h.patches), K, true, g.dq, h.ld);
}

// ---------------------------------------------------------------------- all heads of all items

// qkv (N, 3, H, K), turn (N, K) the cos and sin of each pair; item i is the patches bounds[i] ... bounds[i + 1] - 1.
struct Factors {
  const void* qkv;
  const float* turn;
  Type type;
  const int64_t* bounds;
  int64_t items, H, K;
  float scale;
  int64_t threads;

  int64_t ld() const { return 3 * H * K; }
  int64_t patches(int64_t item) const { return bounds[item + 1] - bounds[item]; }
  template <class T>
  Head<T> head(int64_t item, int64_t h) const {
    const int64_t first = bounds[item];
    const T* q = static_cast<const T*>(qkv) + first * ld() + h * K;
    return {q, q + H * K, q + 2 * H * K, turn + first * K, ld(), patches(item), int(K), scale};
  }
};

}  // namespace

extern "C" {

// out (N, H, K) of the type of qkv; lse (N, H), which may be null. K is even and at most NC.
void vision_attention(const Factors* f, void* out, float* lse) {
  std::vector<Unit> units;
  for (int64_t i = 0; i < f->items; ++i)
    for (int64_t begin = 0; begin < f->patches(i); begin += BLOCK)
      for (int64_t h = 0; h < f->H; ++h) units.push_back({i, h, begin, f->patches(i)});
  with_type(f->type, [&](auto t) {
    typedef decltype(t) T;
    run_units(units, f->threads, [&](const Unit& u, Arena& arena) {
      const auto head = f->head<T>(u.sequence, u.head);
      const int64_t at = f->bounds[u.sequence] * f->H + u.head;
      attend_rows(head, u.begin, int(std::min<int64_t>(BLOCK, head.patches - u.begin)), static_cast<T*>(out) + at * f->K,
                  f->H * f->K, lse ? lse + at : nullptr, f->H, arena);
    });
  });
}

// d_qkv (N, 3, H, K); o and d_o (N, H, K); all of the type of qkv.
void vision_attention_backward(const Factors* f, const void* o, const void* d_o, const float* lse, void* d_qkv) {
  std::vector<Unit> units;
  for (int64_t i = 0; i < f->items; ++i)
    for (int64_t h = 0; h < f->H && f->patches(i); ++h) units.push_back({i, h, 0, f->patches(i)});
  with_type(f->type, [&](auto t) {
    typedef decltype(t) T;
    run_units(units, f->threads, [&](const Unit& u, Arena& arena) {
      const int64_t at = f->bounds[u.sequence] * f->H + u.head;
      T* dq = static_cast<T*>(d_qkv) + f->bounds[u.sequence] * f->ld() + u.head * f->K;
      const Gradients<T> g{static_cast<const T*>(o) + at * f->K, static_cast<const T*>(d_o) + at * f->K, lse + at,
                           f->H * f->K, f->H, dq, dq + f->H * f->K, dq + 2 * f->H * f->K};
      differentiate_head(f->head<T>(u.sequence, u.head), g, arena);
    });
  });
}

}  // extern "C"

// ---------------------------------------------------------------------- GELU

namespace {

constexpr int64_t NUMBERS = 8192;  // a thread takes at once
constexpr float TWICE_ROOT = 1.5957691216057308f, CUBIC = 0.044715f;  // 2 sqrt(2 / pi)

INLINE vf twice_u(vf x) { return TWICE_ROOT * x * (1.0f + CUBIC * x * x); }

}  // namespace

extern "C" {

// n numbers, all of one type.
void gelu_forward(const void* x_, void* out, int64_t n, Type type, int64_t threads) {
  with_type(type, [=](auto t) {
    typedef decltype(t) T;
    for_blocks(Blocks(n, NUMBERS), threads, [=](int64_t, int64_t begin, int64_t end) {
      const T* x = static_cast<const T*>(x_) + begin;
      T* y = static_cast<T*>(out) + begin;
      for_columns(end - begin, [=](int64_t i, auto part) {
        vf v = read(x + i, part);
        write(y + i, v * sigmoid(twice_u(v)).value, part);
      });
    });
  });
}

void gelu_backward(const void* d_out, const void* x_, void* d_x, int64_t n, Type type, int64_t threads) {
  with_type(type, [=](auto t) {
    typedef decltype(t) T;
    for_blocks(Blocks(n, NUMBERS), threads, [=](int64_t, int64_t begin, int64_t end) {
      const T *x = static_cast<const T*>(x_) + begin, *d = static_cast<const T*>(d_out) + begin;
      T* dx = static_cast<T*>(d_x) + begin;
      for_columns(end - begin, [=](int64_t i, auto part) {
        vf v = read(x + i, part);
        Sigmoid s = sigmoid(twice_u(v));
        vf slope = TWICE_ROOT * (1.0f + 3.0f * CUBIC * v * v);
        write(dx + i, read(d + i, part) * (s.value + v * s.value * s.complement * slope), part);
      });
    });
  });
}

}  // extern "C"
