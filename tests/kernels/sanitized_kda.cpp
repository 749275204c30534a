// Runs every entry point of kda.cpp on buffers of exactly the right size, for the address and undefined-behaviour
// sanitizers to watch: odd sizes, grouped heads, both types, packed, empty and one-token sequences, threads.
#include "kda.cpp"

#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

namespace {

std::mt19937 random_bits(1);

std::vector<char> numbers(size_t n, Type type, float low, float high) {
  std::uniform_real_distribution<float> draw(low, high);
  std::vector<char> bytes(n * (type == kFloat32 ? 4 : 2));
  for (size_t i = 0; i < n; ++i) write_one(bytes.data(), int64_t(i), type, draw(random_bits));
  return bytes;
}

bool finite(const std::vector<char>& bytes, Type type) {
  for (size_t i = 0; i < bytes.size() / (type == kFloat32 ? 4 : 2); ++i)
    if (!std::isfinite(read_one(bytes.data(), int64_t(i), type))) return false;
  return true;
}

bool run(std::vector<int64_t> offsets, int64_t H, int64_t HV, int64_t K, int64_t V, Type type, bool states, int64_t parts) {
  const int64_t T = offsets.back(), N = int64_t(offsets.size()) - 1;
  const Type wide = kFloat32;
  auto q = numbers(T * H * K, type, -0.3f, 0.3f), k = numbers(T * H * K, type, -0.3f, 0.3f);
  auto v = numbers(T * HV * V, type, -1, 1), g = numbers(T * HV * K, wide, -5, 0), b = numbers(T * HV, wide, 0, 1);
  auto initial = numbers(N * HV * K * V, wide, -1, 1), d_final = numbers(N * HV * K * V, wide, -1, 1);
  auto d_o = numbers(T * HV * V, type, -1, 1);
  Problem p{};
  p.q = q.data(), p.k = k.data(), p.v = v.data(), p.log_decay = g.data(), p.beta = b.data();
  p.initial_state = states ? reinterpret_cast<float*>(initial.data()) : nullptr;
  p.offsets = offsets.data(), p.sequences = N, p.H = H, p.HV = HV, p.K = K, p.V = V, p.threads = 2, p.parts = parts, p.scale = 0.3f;
  p.q_type = p.k_type = p.v_type = type, p.log_decay_type = p.beta_type = wide;

  std::vector<char> o(v.size()), final_state(initial.size());
  std::vector<float> saved(size_t(T / 64 * HV) * Size(p).state());
  std::vector<float> errors(size_t((T / 16 + N) * HV) * Size(p).errors());
  kda_forward(&p, o.data(), reinterpret_cast<float*>(final_state.data()), nullptr, nullptr);
  kda_forward(&p, o.data(), reinterpret_cast<float*>(final_state.data()), saved.data(), errors.data());

  std::vector<char> dq(parts * T * HV * K * 4), dk(dq.size()), dv(v.size()), dg(parts * g.size()), db(parts * b.size()), d_initial(initial.size());
  Gradients d{d_o.data(), states ? reinterpret_cast<float*>(d_final.data()) : nullptr, dv.data(), dq.data(), dk.data(),
              dg.data(), db.data(), states ? reinterpret_cast<float*>(d_initial.data()) : nullptr, wide, wide, wide, wide};
  p.v = nullptr;
  kda_backward(&p, &d, saved.data(), errors.data());

  p.v = v.data(), p.offsets = nullptr, p.tokens = 1, p.sequences = N < T ? N : T;
  kda_step(&p, reinterpret_cast<float*>(final_state.data()), reinterpret_cast<float*>(final_state.data()), o.data());
  return finite(o, type) && finite(final_state, wide) && finite(dq, wide) && finite(dk, wide) && finite(dv, type) &&
         finite(dg, wide) && finite(db, wide) && finite(d_initial, wide);
}

}  // namespace

int main() {
  const std::vector<std::vector<int64_t>> lengths = {{0, 1}, {0, 17, 17, 18, 150}, {0, 64, 128}, {0, 65, 129, 130}};
  const int64_t sizes[][4] = {{1, 1, 1, 1}, {1, 2, 20, 40}, {2, 2, 32, 33}, {1, 1, 128, 64}};
  int failed = 0;
  for (const auto& offsets : lengths)
    for (const auto& s : sizes)
      for (Type type : {kFloat32, kBfloat16})
        for (bool states : {false, true})
          for (int64_t parts : {1, 2})
            if (parts == 1 || s[3] > 32) failed += !run(offsets, s[0], s[1], s[2], s[3], type, states, parts);
  std::printf("%d failed\n", failed);
  return failed != 0;
}
