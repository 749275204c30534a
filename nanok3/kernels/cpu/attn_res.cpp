// Attention residuals on a CPU: a softmax over depth for every token, forward and backward.
//
//   s_i = c . v_i r_i,   r_i = 1 / sqrt(mean(v_i^2) + eps),   a = softmax(s),   m = sum_i a_i v_i
//
// All sources of a token are read together: they stay in the first-level cache between the scores and the mix.
#include <cmath>

#include "rows.h"

namespace {

constexpr int64_t BLOCK = 16;  // tokens a thread takes at once

template <class T>
const T* row(const void* base, int64_t token, int64_t D) {
  return static_cast<const T*>(base) + token * D;
}

// Softmax of n numbers in place; there is room for whole vectors of them.
void softmax(float* x, int64_t n) {
  float largest = x[0], sum = 0;
  for (int64_t i = 1; i < n; ++i) largest = x[i] > largest ? x[i] : largest;
  for (int64_t i = 0; i < n; i += W) store(x + i, exp_or_zero(load(x + i) - largest));
  for (int64_t i = 0; i < n; ++i) sum += x[i];
  for (int64_t i = 0; i < n; ++i) x[i] /= sum;
}

}  // namespace

extern "C" {

// sources: S pointers to (tokens, D); combined (D) is c; mixed (tokens, D). saved (tokens, 3, S) keeps a, r and s for
// the backward pass, or is null.
void attn_res_forward(const void* const* sources, int64_t S, const float* combined, void* mixed, float* saved,
                      int64_t tokens, int64_t D, Type type, float eps, int64_t threads) {
  with_type(type, [=](auto t) {
    typedef decltype(t) T;
    for_blocks(Blocks(tokens, BLOCK), threads, [=](int64_t, int64_t begin, int64_t end) {
      std::vector<float> weights(S + W, 0.0f);
      for (int64_t token = begin; token < end; ++token) {
        float* kept = saved ? saved + token * 3 * S : nullptr;
        for (int64_t s = 0; s < S; ++s) {
          const T* v = row<T>(sources[s], token, D);
          float sums[2];
          sum_columns(D, sums, [=](int64_t i, auto part, vf* sums) {
            vf x = read(v + i, part);
            sums[0] += x * read(combined + i, part);
            sums[1] += x * x;
          });
          float inverse = 1.0f / std::sqrt(sums[1] / D + eps);
          weights[s] = sums[0] * inverse;
          if (kept) kept[S + s] = inverse, kept[2 * S + s] = weights[s];
        }
        softmax(weights.data(), S);
        if (kept) memcpy(kept, weights.data(), S * 4);
        T* out = static_cast<T*>(mixed) + token * D;
        for_columns(D, [&](int64_t i, auto part) {
          vf sum = {};
          for (int64_t s = 0; s < S; ++s) sum += weights[s] * read(row<T>(sources[s], token, D) + i, part);
          write(out + i, sum, part);
        });
      }
    });
  });
}

// Gradients of every source (S pointers to (tokens, D)) and of c.
void attn_res_backward(const void* d_mixed, const void* const* sources, int64_t S, const float* combined,
                       const float* saved, void* const* d_sources, float* d_combined, int64_t tokens, int64_t D,
                       Type type, int64_t threads) {
  Blocks blocks(tokens, BLOCK);
  SumOverRows sums(blocks, D);
  with_type(type, [&](auto t) {
    typedef decltype(t) T;
    for_blocks(blocks, threads, [&](int64_t block, int64_t begin, int64_t end) {
      std::vector<float> scratch(3 * S);
      float *da = scratch.data(), *along_query = da + S, *along_value = da + 2 * S, *d_query = sums.line(block);
      for (int64_t token = begin; token < end; ++token) {
        const float *a = saved + token * 3 * S, *inverse = a + S, *score = a + 2 * S;
        const T* dm = row<T>(d_mixed, token, D);
        float mean = 0;
        for (int64_t s = 0; s < S; ++s) {
          const T* v = row<T>(sources[s], token, D);
          float dot[1];
          sum_columns(D, dot, [=](int64_t i, auto part, vf* dot) { dot[0] += read(dm + i, part) * read(v + i, part); });
          da[s] = dot[0];
          mean += a[s] * da[s];
        }
        // d score / d v = r c - s r^2 / D v
        for (int64_t s = 0; s < S; ++s) {
          float d_score = a[s] * (da[s] - mean);
          along_query[s] = d_score * inverse[s];
          along_value[s] = d_score * score[s] * inverse[s] * inverse[s] / D;
        }
        for_columns(D, [&](int64_t i, auto part) {
          vf c = read(combined + i, part), d = read(dm + i, part), dc = read(d_query + i, part);
          for (int64_t s = 0; s < S; ++s) {
            vf v = read(row<T>(sources[s], token, D) + i, part);
            T* dv = static_cast<T*>(d_sources[s]) + token * D + i;
            write(dv, a[s] * d + along_query[s] * c - along_value[s] * v, part);
            dc += along_query[s] * v;
          }
          write(d_query + i, dc, part);
        });
      }
    });
  });
  sums.write(d_combined);
}

}  // extern "C"
