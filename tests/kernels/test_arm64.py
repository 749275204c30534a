"""The portable path on the processor it is for: kernels compiled for arm64 and run under an emulator.

Needs a cross compiler and qemu's user mode (Debian: g++-aarch64-linux-gnu, qemu-user-static). A small program includes
the source, calls its C interface with numbers of its own and compares with plain loops in double.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from nanok3.kernels import native

pytestmark = pytest.mark.slow
COMPILER = shutil.which("aarch64-linux-gnu-g++")
EMULATOR = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
RANDOM = r"""
#include <cmath>
#include <cstdio>
#include <vector>
static unsigned long seed = 1;
static double uniform() {
  return double((seed = seed * 6364136223846793005ul + 1442695040888963407ul) >> 40) / (1 << 24);
}
static int verdict(double error, double largest) {
  std::printf("%.1e\n", error / largest);
  return error < 2e-6 * largest ? 0 : 1;
}
"""
KDA = r"""
#include "kda.cpp"
#pragma GCC optimize("O1")  // of what follows: version 12 breaks on the plain loops, not on the kernel
// One token and one column of the state: retain, compare, write, read.
__attribute__((noinline)) void column(double* S, const float* q, const float* k, const float* g, double b, double v,
                                      int64_t K, int64_t V, double* o) {
  double e = v;
  for (int64_t r = 0; r < K; ++r) S[r * V] *= std::exp(double(g[r])), e -= S[r * V] * k[r];
  *o = 0;
  for (int64_t r = 0; r < K; ++r) S[r * V] += b * e * k[r], *o += S[r * V] * q[r];
}
int main() {
  const int64_t T = 83, H = 1, HV = 2, K = 20, V = 40;
  std::vector<float> q(T * H * K), k(T * H * K), v(T * HV * V), g(T * HV * K), b(T * HV), s0(HV * K * V);
  std::vector<float> o(T * HV * V), s(HV * K * V);
  for (auto* x : {&q, &k, &v, &s0}) for (float& y : *x) y = float(uniform() - 0.5);
  for (float& y : g) y = float(-5 * std::pow(uniform(), 3));
  for (float& y : b) y = float(uniform());
  for (int64_t t = 0; t < T * H; ++t) {
    double n = 0;
    for (int64_t i = 0; i < K; ++i) n += k[t * K + i] * k[t * K + i];
    for (int64_t i = 0; i < K; ++i) k[t * K + i] /= float(std::sqrt(n));
  }
  const int64_t bounds[] = {0, T};
  Problem p{q.data(), k.data(), v.data(), g.data(), b.data(), s0.data(), bounds, 1, T, H, HV, K, V, 1, 2, 0.2f};
  kda_forward(&p, o.data(), s.data(), nullptr, nullptr);
  double error = 0, largest = 0;
  for (int64_t h = 0; h < HV; ++h) {
    std::vector<double> S(s0.begin() + h * K * V, s0.begin() + (h + 1) * K * V), o_t(V);
    for (int64_t t = 0; t < T; ++t) {
      const int64_t row = t * HV + h;
      for (int64_t c = 0; c < V; ++c)
        column(&S[c], &q[t * K], &k[t * K], &g[row * K], b[row], v[row * V + c], K, V, &o_t[c]);
      for (int64_t c = 0; c < V; ++c) {
        error = std::fmax(error, std::fabs(0.2f * o_t[c] - o[row * V + c]));
        largest = std::fmax(largest, std::fabs(0.2f * o_t[c]));
      }
    }
    for (int64_t i = 0; i < K * V; ++i) error = std::fmax(error, std::fabs(S[i] - s[h * K * V + i]));
  }
  return verdict(error, largest);
}
"""
LINEAR = r"""
#include "linear.cpp"
int main() {  // MXFP4: two codes a byte, the low half first, a scale of 2^(s - 127) for 32 columns
  const double values[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6};
  const int64_t m = 19, O = 21, I = 64, counts[] = {m};
  std::vector<uint8_t> codes(O * I / 2), scale(O * I / 32);
  std::vector<float> x(m * I), y(m * O);
  for (auto& c : codes) c = uint8_t(uniform() * 256);
  for (auto& s : scale) s = uint8_t(120 + uniform() * 8);
  for (auto& a : x) a = float(uniform() - 0.5);
  linear_forward(x.data(), Type(0), codes.data(), scale.data(), 2, O, I, counts, 1, y.data(), 2);
  double error = 0, largest = 0;
  for (int64_t r = 0; r < m; ++r)
    for (int64_t c = 0; c < O; ++c) {
      double sum = 0;
      for (int64_t i = 0; i < I; ++i) {
        const int code = codes[(c * I + i) / 2] >> (i % 2 * 4) & 15;
        sum += x[r * I + i] * values[code] * std::ldexp(1, scale[(c * I + i) / 32] - 127);
      }
      error = std::fmax(error, std::fabs(sum - y[r * O + c])), largest = std::fmax(largest, std::fabs(sum));
    }
  return verdict(error, largest);
}
"""


@pytest.mark.skipif(not (COMPILER and EMULATOR), reason="no compiler and emulator for arm64 here")
@pytest.mark.parametrize("name", ["kda", "linear"])
def test_right_on_arm64(name: str, tmp_path: Path) -> None:
    """Values, to float32's rounding."""
    assert COMPILER and EMULATOR
    (tmp_path / "main.cpp").write_text(RANDOM + {"kda": KDA, "linear": LINEAR}[name])
    flags = [flag for flag in native.COMMON_FLAGS if flag not in ("-fPIC", "-shared")]
    command = [COMPILER, *flags, "-static", "-fopenmp", f"-I{native.SOURCES}", "main.cpp", "-o", "program"]
    built = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert built.returncode == 0, built.stderr[-4000:]
    ran = subprocess.run([EMULATOR, "./program"], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0 and float(ran.stdout) > 0, ran.stdout + ran.stderr
