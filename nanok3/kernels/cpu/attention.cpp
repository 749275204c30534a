// Causal softmax attention on a CPU without a matrix of scores: blocks of ROWS queries against blocks of KC keys.
//
//     s = scale q . k        m = largest s so far        p = e^(s - m)        l = sum p        o = sum p v / l
//
// When a new block brings a larger m, what was summed before is scaled by e^(m_old - m_new). Blocks are cut from the
// first token on and a row adds its terms in their order, so a token's output is the same bits whatever follows it,
// and on any number of threads. Keys that a strip of MR queries cannot see are not multiplied at all.
#include <algorithm>
#include <cmath>

#include "product.h"

namespace {

constexpr int ROWS = 96;  // whole strips of 4, 6 and 8

// One head: element (t, c) of each factor is data[t * ld + c].
template <class T>
struct Head {
  const T *q, *k, *v;
  int64_t q_ld, k_ld, v_ld, queries, keys;  // the last query sees all keys, the one before it all but one
  int K, V;
  float scale;
};

// scores[0:n] become e^(scale s - largest), numbers behind them up to `padded` zero. Returns the sum.
INLINE float exponentials(float* scores, int n, int padded, float scale, float largest) {
  float sums[1];
  sum_columns(n, sums, [=](int64_t i, auto part, auto& acc) {
    vf p = exp_or_zero(read(scores + i, part) * scale - largest);
    write(scores + i, p, part);
    acc[0] += read(scores + i, part);  // what a part lacks counts as zero
  });
  for (int i = n; i < padded; ++i) scores[i] = 0.0f;
  return sums[0];
}

INLINE float largest_of(const float* scores, int n) {
  float largest = scores[0];
  vf most = splat(largest);
  int i = 0;
  for (; i + W <= n; i += W) {
    vf s = load(scores + i);
    most = s > most ? s : most;
  }
  float lanes[W];
  store(lanes, most);
  for (int j = 0; j < W; ++j) largest = std::max(largest, lanes[j]);
  for (; i < n; ++i) largest = std::max(largest, scores[i]);
  return largest;
}

// Queries begin ... end - 1, at most ROWS of them, to out[t * ld + c].
template <class T>
void attend_rows(const Head<T>& h, int64_t begin, int64_t end, float* out, int64_t out_ld, Arena& arena) {
  const int V = (h.V + NR - 1) / NR * NR, rows = int(end - begin);
  arena.reserve(size_t(KC) * KC + size_t(KC) * V + 2 * kStripFloats + size_t(ROWS) * (V + 2) + 256);
  float *keys = arena.take(size_t(KC) * KC), *values = arena.take(size_t(KC) * V);
  float *strip = arena.take(kStripFloats), *scores = arena.take(kStripFloats);
  float *sums = arena.take(size_t(ROWS) * V), *largest = arena.take(ROWS), *total = arena.take(ROWS);
  std::fill(sums, sums + size_t(ROWS) * V, 0.0f);
  std::fill(largest, largest + ROWS, -INFINITY);
  std::fill(total, total + ROWS, 0.0f);
  PlainRows<T> key_rows;
  key_rows.data = h.k, key_rows.columns = h.k_ld;
  const RightTurned<PlainRows<T>> turned{key_rows};
  const RightRows<T> value_rows{h.v, h.v_ld};
  const LeftRows<T> query_rows{h.q, h.q_ld, nullptr};
  const int64_t before = h.keys - h.queries, visible_to_all = before + end;
  for (int64_t first = 0; first < visible_to_all; first += KC) {
    const int n = int(std::min<int64_t>(KC, visible_to_all - first));
    for (int c = 0; c < n; c += NR)
      turned.panel(0, h.K, first + c, std::min(NR, n - c), keys + size_t(c) * KC);
    for (int c = 0; c < h.V; c += NR) value_rows.panel(first, n, c, std::min(NR, h.V - c), values + size_t(c) * KC);
    for (int r = 0; r < rows; r += MR) {
      const int count = std::min(MR, rows - r);
      const int64_t sees = before + begin + r + 1 - first;  // of this block, the strip's first row
      const int seen = int(std::min<int64_t>(n, sees + count - 1));
      if (seen <= 0) continue;
      query_rows.strip(begin + r, count, 0, h.K, strip);
      for (int c = 0; c < seen; c += NR) tile<false>(h.K, strip, keys + size_t(c) * KC, scores + c, STRIDE, false);
      for (int i = 0; i < count; ++i) {
        float *s = scores + i * STRIDE, *o = sums + size_t(r + i) * V;
        const int mine = int(std::min<int64_t>(n, sees + i));
        if (mine <= 0) {
          std::fill(s, s + seen, 0.0f);
          continue;
        }
        const float most = std::max(largest[r + i], h.scale * largest_of(s, mine));
        const float factor = first ? std::exp(largest[r + i] - most) : 0.0f;
        total[r + i] = total[r + i] * factor + exponentials(s, mine, seen, h.scale, most);
        if (first && factor != 1.0f)
          for (int c = 0; c < V; c += W) store(o + c, load(o + c) * factor);
        largest[r + i] = most;
      }
      for (int c = 0; c < h.V; c += NR) tile<false>(seen, scores, values + size_t(c) * KC, sums + size_t(r) * V + c, V, true);
    }
  }
  for (int r = 0; r < rows; ++r) {
    const float inverse = 1.0f / total[r];
    const float* o = sums + size_t(r) * V;
    float* dst = out + (begin + r) * out_ld;
    for_columns(h.V, [=](int64_t i, auto part) { write(dst + i, read(o + i, part) * inverse, part); });
  }
}

}  // namespace

extern "C" {

// out (T, H, V) float32 of one sequence from q (T, H, K), k (S, H, K), v (S, H, V), S >= T, all of one type. Strides
// count numbers, from token to token and from head to head; channels lie side by side. K is at most 256.
void attention_causal(const void* q, const void* k, const void* v, Type type, int64_t T, int64_t S, int64_t H, int64_t K,
                      int64_t V, int64_t q_token, int64_t q_head, int64_t k_token, int64_t k_head, int64_t v_token,
                      int64_t v_head, float scale, float* out, int64_t threads) {
  const int64_t blocks = (T + ROWS - 1) / ROWS, units = blocks * H;
  if (threads > units) threads = units;
  if (!units) return;
  with_type(type, [&](auto t) {
    typedef decltype(t) E;
    const E *qs = static_cast<const E*>(q), *ks = static_cast<const E*>(k), *vs = static_cast<const E*>(v);
#pragma omp parallel for schedule(dynamic) num_threads(int(threads)) if (threads > 1)
    for (int64_t i = 0; i < units; ++i) {
      static thread_local Arena arena;
      const int64_t h = i % H, begin = (blocks - 1 - i / H) * ROWS;  // the longest first
      const Head<E> head{qs + h * q_head, ks + h * k_head, vs + h * v_head, q_token, k_token, v_token, T, S,
                         int(K), int(V), scale};
      attend_rows(head, begin, std::min(begin + ROWS, T), out + h * V, H * V, arena);
    }
  });
}

}  // extern "C"
