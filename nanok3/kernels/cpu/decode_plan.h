// What decoding is told: the model as addresses of its weights, the sequences as addresses of their memory, and the
// call. Mirrored field by field in kernels/decode_cpu.py.
#pragma once
#include <cmath>

#include "gemv.h"
#include "team.h"

// A norm weight, a bias or another small thing, in its own type.
struct Vector {
  const void* data;
  int32_t type;  // enum Type
  // n numbers from `at` on as float32: the place itself, or a copy in `scratch`.
  const float* floats(int64_t at, int64_t n, float* scratch) const {
    if (type == kFloat32) return static_cast<const float*>(data) + at;
    read_row(data, at, Type(type), int(n), int(n), scratch);
    return scratch;
  }
};

struct Layer {
  int32_t is_mla, is_moe;
  Vector input_norm, post_norm, attention_mix_norm, attention_mix_query, mlp_mix_norm, mlp_mix_query;
  // KDA; a full-rank gate is g_b alone
  Matrix q, k, v, f_a, f_b, b, g_a, g_b, o;
  Vector q_conv, k_conv, v_conv, A_log, dt_bias, o_norm;
  // MLA (with o and g_b, if it has a gate); without a bottleneck q_b reads the layer's input
  Matrix q_a, q_b, kv_a, kv_b;
  Vector q_norm, kv_norm;
  // dense or shared feed-forward, router, latent, experts
  Matrix gate, up, down, router, latent_down, latent_up, w1, w2, w3;
  Vector correction, latent_norm;
};

struct Model {
  const Layer* layers;
  int64_t layer_count, hidden, vocab;
  Matrix embedding, head;
  Vector final_norm, final_mix_norm, final_mix_query;
  int64_t block;  // layers per block of attention residuals; 0: none, -1: every output is a source
  int64_t kda_heads, kda_dim, taps;
  int64_t mla_heads, nope, rope, v_dim, rank, q_rank;  // q_rank 0: no bottleneck
  int64_t intermediate, experts, top_k, inner, latent, shared;  // latent: the experts' width; shared 0: none
  float eps, qk_eps, gate_bound;  // gate_bound 0: the unbounded softplus form
  float beta, linear_beta;        // of SiTU; beta 0: SwiGLU, linear_beta 0: the second factor is not capped
  float routed_scale;
  int32_t renormalize;
};

// One sequence of the call: `rows` tokens that follow the `tokens` it has read. `conv` and `recurrent` have an address
// for each KDA layer, `latents` for each MLA layer; row t of MLA layer i lies at
// latents[i] + pages[t / page_rows] * page_stride + (t % page_rows) * (rank + rope), in numbers of latent_type.
struct Sequence {
  int64_t rows, tokens;
  float *const *conv, *const *recurrent;  // (3, taps - 1, heads * dim) and (heads, dim, dim), moved on in place
  void* const* latents;
  const int64_t* pages;
  int64_t page_rows, page_stride;
  float* const* tape;  // null: the memory is moved on; else it stays, and each KDA layer's rows are kept here
  int32_t latent_type;
};

// Times heads * dim numbers that a row takes on a tape: the inputs of three convolutions, k, e^g and u.
constexpr int64_t kTape = 6;

struct Call {
  const Model* model;
  Sequence* const* sequences;
  int64_t sequence_count, rows;
  const int64_t* ids;  // of all rows, sequence after sequence
  const int64_t* chosen;  // rows whose logits are wanted
  int64_t chosen_count;
  float *logits, *hidden;  // (chosen, vocab), or null; (rows, hidden) after the final norm, or null
  const int64_t* tapped;   // layers whose attention's input before its norm is wanted; layer_count: the last read
  int64_t tap_count;
  float* taps;             // (rows, tap_count, hidden)
  float* workspace;        // decode_workspace(model, capacity) floats, zero when it was made
  int64_t capacity;        // rows it was made for
  int64_t threads;
};

// A draft that guesses in a chain: the model is its one block, whose input is made of a token and of the feature before
// it; after a call's last rows each sequence goes on with what it has guessed and with its own h as the feature.
struct Chain {
  Matrix table, combine;    // the embedding, and (hidden, 2 hidden) over its norm and the feature's
  Vector token_norm, feature_norm;
  const float* features;    // before each row of the call, (rows, hidden)
  const int64_t* counts;    // guesses of each sequence, falling or equal
  int64_t* said;            // (sequences, counts[0]); -1 where no number was the largest
  float* workspace;         // chain_workspace(model, capacity) floats, zero when it was made
};

// Everything a call computes on its way. Rows are padded to whole groups, and the padding stays zero: no two uses share
// a place, or a NaN that one left in another's padding would reach a row it has nothing to do with.
struct Buffers {
  float *sources, *x;
  float *qkv, *f_a, *g_a, *beta, *decay, *kda_gate, *kda_out;
  float *q_a, *q, *kv, *queries, *read, *mla_gate, *mla_out;
  float *dense_gate, *dense_up, *shared_gate, *shared_up;
  float *scores, *weights, *z, *pair_gate, *pair_up, *pair_out, *y;
  int32_t *chosen, *pairs, *active, *active_count, *bounds;
  int64_t hidden, inner, kda_width, f, q_rank, query, rank, mla_width, dense, shared, latent, pair;  // strides
  int64_t size = 0;

  Buffers(const Model& m, int64_t N, float* base) {
    hidden = padded(m.hidden), f = padded(m.kda_dim), q_rank = padded(m.q_rank);
    inner = m.kda_heads * m.kda_dim;
    kda_width = padded(inner), mla_width = padded(m.mla_heads * m.v_dim);
    query = padded(m.rank + m.rope), rank = padded(m.rank);
    dense = padded(m.intermediate), shared = padded(m.shared);
    latent = padded(m.latent), pair = padded(m.inner);
    auto take = [&](int64_t n) {
      float* at = base + size;
      size += (n + 15) / 16 * 16;
      return at;
    };
    auto take_ints = [&](int64_t n) { return reinterpret_cast<int32_t*>(take(n)); };
    const int64_t P = N * m.top_k;
    sources = take(source_count(m) * N * hidden), x = take(N * hidden);
    qkv = take(N * 3 * inner), f_a = take(N * f), g_a = take(N * f), beta = take(N * m.kda_heads);
    decay = take(N * inner), kda_gate = take(N * inner), kda_out = take(N * kda_width);
    q_a = take(N * q_rank), q = take(N * m.mla_heads * (m.nope + m.rope)), kv = take(N * (m.rank + m.rope));
    queries = take(N * m.mla_heads * query), read = take(N * m.mla_heads * rank);
    mla_gate = take(N * m.mla_heads * m.v_dim), mla_out = take(N * mla_width);
    dense_gate = take(N * dense), dense_up = take(N * dense), shared_gate = take(N * shared);
    shared_up = take(N * shared), scores = take(N * m.experts), weights = take(P);
    z = take(N * latent), pair_gate = take(P * pair), pair_up = take(P * pair), pair_out = take(P * latent);
    y = take(N * latent);
    chosen = take_ints(P), pairs = take_ints(P), active = take_ints(m.experts), bounds = take_ints(m.experts + 1);
    active_count = take_ints(1);
  }

  static int64_t source_count(const Model& m) {
    if (m.block < 0) return 2 * m.layer_count + 1;
    return m.block ? (m.layer_count + m.block - 1) / m.block + 1 : 1;
  }
};

// A product of every row with a matrix, and where it goes.
struct Product {
  const Matrix& m;
  const float* x;
  int64_t x_stride;
  float* y;
  int64_t y_stride;
};

INLINE void multiply(const Product& p, int64_t begin, int64_t end, int64_t rows) {
  dot_rows(p.m, 0, begin, end, rows, [&](int64_t r) { return p.x + r * p.x_stride; },
           [&](int64_t r) { return p.y + r * p.y_stride; });
}

// All products in one phase. Absent matrices are skipped.
inline void multiply_all(Member& team, int64_t rows, std::initializer_list<Product> products) {
  int64_t total = 0;
  for (const Product& p : products)
    if (p.m) total += p.m.rows;
  team.share(total, kPiece, [&](int64_t begin, int64_t end) {
    int64_t first = 0;
    for (const Product& p : products) {
      if (!p.m) continue;
      const int64_t from = begin > first ? begin - first : 0, to = (end < first + p.m.rows ? end - first : p.m.rows);
      if (from < to) multiply(p, from, to, rows);
      first += p.m.rows;
    }
  });
}

// Scratch of one thread, kept between calls.
INLINE float* scratch(size_t floats) {
  static thread_local Arena arena;
  arena.reserve(floats + 16);
  return arena.take(floats);
}
