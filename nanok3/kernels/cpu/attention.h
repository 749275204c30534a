// What attention is made of beside its products: rows of scores that become weights, and work cut into units for threads.
#pragma once
#include <algorithm>
#include <cmath>

#include "product.h"

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

// weights[0:n] = e^(scale s - largest), which may be the scores themselves. Returns the sum, before rounding.
template <class T>
INLINE float exponentials(const float* scores, int n, float scale, float largest, T* weights) {
  float sums[1];
  sum_columns(n, sums, [=](int64_t i, auto part, auto& acc) {
    vf p = exp_or_zero(read(scores + i, part) * scale - largest);
    write(weights + i, p, part);
    acc[0] += within(p, part);
  });
  return sums[0];
}

template <class A, class B>
float dot(const A* a, const B* b, int64_t n) {
  float sums[1];
  sum_columns(n, sums, [=](int64_t i, auto part, auto& acc) { acc[0] += read(a + i, part) * read(b + i, part); });
  return sums[0];
}

// Queries from `begin` on of a head of a sequence.
struct Unit {
  int64_t sequence, head, begin, cost;
};

// run(unit, arena) for all, the most expensive first.
template <class Run>
void run_units(std::vector<Unit> units, int64_t threads, Run run) {
  std::stable_sort(units.begin(), units.end(), [](const Unit& a, const Unit& b) { return a.cost > b.cost; });
  const int64_t n = int64_t(units.size());
  if (!n) return;
  if (threads > n) threads = n;
#pragma omp parallel for schedule(dynamic) num_threads(int(threads)) if (threads > 1)
  for (int64_t i = 0; i < n; ++i) {
    static thread_local Arena arena;
    run(units[i], arena);
  }
}
