// Causal softmax attention on a CPU without a matrix of scores: blocks of ROWS queries against blocks of KC keys.
//
//     s = scale q . k        m = largest s so far        p = e^(s - m)        l = sum p        o = sum p v / l
//
// When a new block brings a larger m, what was summed before is scaled by e^(m_old - m_new). Blocks are cut from the
// first token on and a row adds its terms in their order, so a token's output is the same bits whatever follows it,
// and on any number of threads. Keys that a strip of MR queries cannot see are not multiplied at all.
//
// Backward: lse = m + log l is all that the forward pass keeps of the scores. With it each block of them is made again,
//
//     p = e^(s - lse)      dp = do . v      ds = scale p (dp - do . o)      dv += p do      dk += ds q      dq += ds k
//
// A thread owns a head of a sequence and goes over its keys in blocks of BLOCK, and for each over the queries that see
// it: sums are taken in one order, whatever the number of threads.
#include "attention.h"
#include "strided.h"

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

// Queries begin ... end - 1, at most ROWS of them, to out[t * out_ld + c] and, where it is wanted, lse[t * lse_ld].
template <class T>
void attend_rows(const Head<T>& h, int64_t begin, int64_t end, float* out, int64_t out_ld, float* lse, int64_t lse_ld,
                 Arena& arena) {
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
        total[r + i] = total[r + i] * factor + exponentials(s, mine, h.scale, most, s);
        std::fill(s + mine, s + seen, 0.0f);
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
    if (lse) lse[(begin + r) * lse_ld] = largest[r] + std::log(total[r]);
    for_columns(h.V, [=](int64_t i, auto part) { write(dst + i, read(o + i, part) * inverse, part); });
  }
}

// ---------------------------------------------------------------------- backward

constexpr int BLOCK = 96;  // queries and keys: whole strips and whole tiles
constexpr int64_t BLOCK_STEP = row_step(BLOCK);

// What the backward pass reads besides the factors, and where the gradients go; element (t, c) is data[t * ld + c].
template <class T>
struct Gradients {
  const float *o, *d_o, *lse;  // o and d_o lie alike
  T *dq, *dk, *dv;
  int64_t o_ld, lse_ld, q_ld, v_ld;  // dk lies like dq, o like dv
};

// Rows as float32, filled up with zeros to whole tiles of columns and to a whole block.
template <class T>
void load_block(const T* src, int64_t ld, int rows, int columns, float* dst) {
  const int64_t step = row_step(columns);
  for (int r = 0; r < BLOCK; ++r, dst += step) {
    const int there = r < rows ? columns : 0;
    if (there) widen_row(src + r * ld, columns, dst);
    std::fill(dst + there, dst + step, 0.0f);
  }
}

// dst (columns x BLOCK) = src^T, src as load_block leaves it.
void turn_block(const float* src, int columns, float* dst) {
  for (int r = 0; r < BLOCK; r += W)
    for (int c = 0; c < columns; c += W)
      turn_square(src + r * row_step(columns) + c, row_step(columns), dst + c * BLOCK_STEP + r, BLOCK_STEP);
}

template <class T>
void store_block(const float* src, int64_t src_ld, int64_t rows, int columns, T* dst, int64_t ld) {
  for (int64_t r = 0; r < rows; ++r, src += src_ld, dst += ld)
    for_columns(columns, [=](int64_t i, auto part) { write(dst + i, read(src + i, part), part); });
}

// A row of scores becomes p, one of dp becomes ds; zeros behind the n keys that the query sees.
INLINE void differentiate_row(float* s, float* d, int n, float scale, float lse, float delta) {
  for_columns(n, [=](int64_t i, auto part) {
    vf p = exp_or_zero(read(s + i, part) * scale - lse);
    write(d + i, p * (read(d + i, part) - delta) * scale, part);
    write(s + i, p, part);
  });
  std::fill(s + n, s + BLOCK, 0.0f);
  std::fill(d + n, d + BLOCK, 0.0f);
}

template <class T>
void differentiate_head(const Head<T>& h, const Gradients<T>& g, Arena& arena) {
  const int64_t tokens = h.queries, K_step = row_step(h.K), V_step = row_step(h.V);
  const int64_t tall = (tokens + BLOCK - 1) / BLOCK * BLOCK;
  const int K_all = (h.K + W - 1) / W * W, V_all = (h.V + W - 1) / W * W;
  arena.reserve(tall * (K_step + 1) + BLOCK * (3 * K_step + 3 * V_step) + BLOCK_STEP * (2 * BLOCK + K_all + V_all) + 256);
  float *dQ = arena.take(tall * K_step), *delta = arena.take(tall);
  float *Q = arena.take(BLOCK * K_step), *Ks = arena.take(BLOCK * K_step), *dK = arena.take(BLOCK * K_step);
  float *dO = arena.take(BLOCK * V_step), *Vs = arena.take(BLOCK * V_step), *dV = arena.take(BLOCK * V_step);
  float *P = arena.take(BLOCK * BLOCK_STEP), *dS = arena.take(BLOCK * BLOCK_STEP);
  float *K_turned = arena.take(K_all * BLOCK_STEP), *V_turned = arena.take(V_all * BLOCK_STEP);
  std::fill(dQ, dQ + tall * K_step, 0.0f);
  for (int64_t t = 0; t < tokens; ++t) delta[t] = dot(g.o + t * g.o_ld, g.d_o + t * g.o_ld, h.V);
  for (int64_t first = 0; first < tokens; first += BLOCK) {
    const int keys = int(std::min<int64_t>(BLOCK, tokens - first));
    load_block(h.k + first * h.k_ld, h.k_ld, keys, h.K, Ks);
    load_block(h.v + first * h.v_ld, h.v_ld, keys, h.V, Vs);
    turn_block(Ks, h.K, K_turned);
    turn_block(Vs, h.V, V_turned);
    std::fill(dK, dK + BLOCK * K_step, 0.0f);
    std::fill(dV, dV + BLOCK * V_step, 0.0f);
    for (int64_t begin = first; begin < tokens; begin += BLOCK) {
      const int queries = int(std::min<int64_t>(BLOCK, tokens - begin));
      const bool diagonal = begin == first;
      load_block(h.q + begin * h.q_ld, h.q_ld, queries, h.K, Q);
      load_block(g.d_o + begin * g.o_ld, g.o_ld, queries, h.V, dO);
      for (int c = 0; c < keys; c += NR)
        for (int r = diagonal ? c / MR * MR : 0; r < queries; r += MR) {
          float *s = P + r * BLOCK_STEP + c, *dp = dS + r * BLOCK_STEP + c;
          strided_tile<false>(h.K, Q + r * K_step, K_step, K_turned + c, BLOCK_STEP, s, BLOCK_STEP, false);
          strided_tile<false>(h.V, dO + r * V_step, V_step, V_turned + c, BLOCK_STEP, dp, BLOCK_STEP, false);
        }
      for (int r = 0; r < BLOCK; ++r) {
        const int seen = r >= queries ? 0 : diagonal ? r + 1 : keys;
        const int64_t t = r < queries ? begin + r : begin;
        differentiate_row(P + r * BLOCK_STEP, dS + r * BLOCK_STEP, seen, h.scale, g.lse[t * g.lse_ld], delta[t]);
      }
      for (int r = 0; r < keys; r += MR) {
        const int skipped = diagonal ? std::min(r, queries) : 0, n = queries - skipped;
        const float *p = P + skipped * BLOCK_STEP + r, *ds = dS + skipped * BLOCK_STEP + r;
        for (int c = 0; c < h.V; c += NR)
          strided_tile<true>(n, p, BLOCK_STEP, dO + skipped * V_step + c, V_step, dV + r * V_step + c, V_step, true);
        for (int c = 0; c < h.K; c += NR)
          strided_tile<true>(n, ds, BLOCK_STEP, Q + skipped * K_step + c, K_step, dK + r * K_step + c, K_step, true);
      }
      for (int c = 0; c < h.K; c += NR)
        for (int r = 0; r < queries; r += MR)
          strided_tile<false>(diagonal ? std::min(keys, r + MR) : keys, dS + r * BLOCK_STEP, BLOCK_STEP, Ks + c, K_step,
                              dQ + (begin + r) * K_step + c, K_step, true);
    }
    store_block(dK, K_step, keys, h.K, g.dk + first * g.q_ld, g.q_ld);
    store_block(dV, V_step, keys, h.V, g.dv + first * g.v_ld, g.v_ld);
  }
  store_block(dQ, K_step, tokens, h.K, g.dq, g.q_ld);
}

// ---------------------------------------------------------------------- all heads of all sequences

// Factors of all sequences one after the other, channels side by side; strides count numbers, from token to token and
// from head to head. Sequence i is the queries q_bounds[i] ... and the keys k_bounds[i] ..., no more queries than keys.
struct Factors {
  const void *q, *k, *v;
  Type type;
  const int64_t *q_bounds, *k_bounds;
  int64_t sequences, H, K, V, q_token, q_head, k_token, k_head, v_token, v_head;
  float scale;
  int64_t threads;

  template <class T>
  Head<T> head(int64_t sequence, int64_t h) const {
    const int64_t first = q_bounds[sequence], key = k_bounds[sequence];
    return {static_cast<const T*>(q) + first * q_token + h * q_head,
            static_cast<const T*>(k) + key * k_token + h * k_head,
            static_cast<const T*>(v) + key * v_token + h * v_head,
            q_token, k_token, v_token, q_bounds[sequence + 1] - first, k_bounds[sequence + 1] - key, int(K), int(V), scale};
  }
};

}  // namespace

extern "C" {

// out (tokens, H, V) and lse (tokens, H), which may be null, both float32, K at most 256.
void attention_causal(const Factors* f, float* out, float* lse) {
  std::vector<Unit> units;
  for (int64_t s = 0; s < f->sequences; ++s) {
    const int64_t queries = f->q_bounds[s + 1] - f->q_bounds[s], before = f->k_bounds[s + 1] - f->k_bounds[s] - queries;
    for (int64_t begin = 0; begin < queries; begin += ROWS)
      for (int64_t h = 0; h < f->H; ++h) units.push_back({s, h, begin, before + begin});
  }
  with_type(f->type, [&](auto t) {
    run_units(units, f->threads, [&](const Unit& u, Arena& arena) {
      const auto head = f->head<decltype(t)>(u.sequence, u.head);
      const int64_t at = f->q_bounds[u.sequence] * f->H + u.head;
      attend_rows(head, u.begin, std::min(u.begin + ROWS, head.queries), out + at * f->V, f->H * f->V,
                  lse ? lse + at : nullptr, f->H, arena);
    });
  });
}

// dq, dk (tokens, H, K) and dv (tokens, H, V) of the factors' type; as many queries as keys everywhere.
void attention_backward(const Factors* f, const float* o, const float* d_o, const float* lse, void* dq, void* dk, void* dv) {
  std::vector<Unit> units;
  for (int64_t s = 0; s < f->sequences; ++s)
    for (int64_t h = 0; h < f->H; ++h) units.push_back({s, h, 0, f->q_bounds[s + 1] - f->q_bounds[s]});
  with_type(f->type, [&](auto t) {
    typedef decltype(t) T;
    run_units(units, f->threads, [&](const Unit& u, Arena& arena) {
      const int64_t at = f->q_bounds[u.sequence] * f->H + u.head, q_at = at * f->K, v_at = at * f->V;
      const Gradients<T> g{o + v_at, d_o + v_at, lse + at, static_cast<T*>(dq) + q_at, static_cast<T*>(dk) + q_at,
                           static_cast<T*>(dv) + v_at, f->H * f->V, f->H, f->H * f->K, f->H * f->V};
      differentiate_head(f->head<T>(u.sequence, u.head), g, arena);
    });
  });
}

}  // extern "C"
