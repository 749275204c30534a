"""What holds for every kernel alike: whatever is registered is checked, and nothing is left unwritten.

The rest is in each kernel's own tests: equality with the reference, NaN among the neighbours, the same bits for any
number of threads. `test_sanitizers.py` runs those under sanitizers and on poisoned memory.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import nanok3.kernels
from nanok3.kernels import (
    attention_cpu,
    attn_res_cpu,
    kda_cpu,
    linear_cpu,
    native,
    norms_cpu,
    short_conv_cpu,
    situ_cpu,
    vision_cpu,
)

LIBRARIES = sorted(path.stem for path in native.SOURCES.glob("*.cpp"))
needs_kernels = pytest.mark.skipif(
    not all(map(native.available, LIBRARIES)), reason="no C++ compiler builds the kernels here"
)


def test_every_source_has_its_tests() -> None:
    """`test_sanitizers.py` finds them by name."""
    here = Path(__file__).parent
    for name in LIBRARIES:
        assert (here / f"test_{name}_cpu.py").exists() or (here / f"test_{name}.py").exists(), name


def registered() -> set[str]:
    """Names of all operators of ours, once every module that registers one is imported."""
    for module in pkgutil.iter_modules(nanok3.kernels.__path__, "nanok3.kernels."):
        importlib.import_module(module.name)
    names = torch._C._dispatch_get_all_op_names()
    return {name.removeprefix("nanok3::") for name in names if name.startswith("nanok3::")}


@needs_kernels
def test_every_operator_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is given to `opcheck` by some `test_operators_are_well_formed` (here it only takes down the name)."""
    checked: set[str] = set()
    monkeypatch.setattr(torch.library, "opcheck", lambda op, *_, **__: checked.add(op._qualified_op_name))
    for path in Path(__file__).parent.glob("test_*.py"):
        if path != Path(__file__) and "def test_operators_are_well_formed()" in path.read_text():
            importlib.import_module(path.stem).test_operators_are_well_formed()
    assert {name.removeprefix("nanok3::") for name in checked} == registered()


def _kda(q: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    bounds = torch.tensor([0, 1, 18, 18, 83])
    o, final = kda_cpu.kda(q, q.tanh(), v, g, beta, state, True, bounds)
    return o.sum() + final.square().sum()


def _kda_step(q: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    with torch.no_grad():
        token = [x[:, :1] for x in (q, q, v, g, beta)]
        after = torch.empty_like(state[:1])
        o = kda_cpu.step(*token, state[:1].contiguous(), after=after)
    return o.sum() + after.sum() + 0 * sum(x.sum() for x in (q, v, g, beta, state))


def _kda_inputs() -> list[Tensor]:
    T, HV, K, V = 83, 2, 20, 40
    q = torch.nn.functional.normalize(torch.randn(1, T, 1, K), dim=-1)
    gates = [-5 * torch.rand(1, T, HV, K), torch.rand(1, T, HV)]
    return [q, torch.randn(1, T, HV, V), *gates, torch.randn(4, HV, K, V)]


def _routed(z: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    """For inference; expert 1 has no tokens."""
    chosen = torch.arange(67)[:, None] % 2 * 2
    with torch.no_grad():
        y = linear_cpu.routed(z, chosen, torch.ones(67, 1), (w1, w2, w3), (4.0, 25.0))
    return y.sum() + 0 * sum(x.sum() for x in (z, w1, w2, w3))


ROW = (3, 67, 37)
# A function to a number, how many of its first arguments may be bf16, and its arguments.
CASES: dict[str, tuple[Callable[..., Tensor], int, Callable[[], list[Tensor]]]] = {
    "kda": (_kda, 4, _kda_inputs),
    "kda_step": (_kda_step, 4, _kda_inputs),
    "attention": (
        lambda q, k, v: attention_cpu.causal_attention(q, k, v, 0.3, torch.tensor([0, 1, 18, 18, 103])).sin().sum(),
        3,
        lambda: [torch.randn(1, 103, 2, 24), torch.randn(1, 103, 2, 24), torch.randn(1, 103, 2, 37)],
    ),
    "vision_attention": (
        lambda qkv: vision_cpu.attention(qkv, torch.ones(217, 12).to(torch.complex64), [1, 16, 200]).sin().sum(),
        1,
        lambda: [torch.randn(217, 3, 2, 24)],
    ),
    "gelu_tanh": (lambda x: vision_cpu.gelu_tanh(x).sin().sum(), 1, lambda: [torch.randn(ROW)]),
    "short_conv": (
        lambda u, w: short_conv_cpu.short_conv(u, w, None, torch.arange(67) % 9).sin().sum(),
        1,
        lambda: [torch.randn(ROW), torch.randn(37, 1, 4)],
    ),
    "situ": (lambda a, b: situ_cpu.situ_glu(a, b).sin().sum(), 2, lambda: [torch.randn(ROW), torch.randn(ROW)]),
    "attn_res": (
        lambda a, b, c, n, w: attn_res_cpu.mix([a, b, c], n, w, 1e-5).sin().sum(),
        3,
        lambda: [*(torch.randn(ROW) for _ in range(3)), torch.randn(37), torch.randn(1, 37)],
    ),
    "rms_norm": (
        lambda x, w: norms_cpu.rms_norm(x, w, 1e-5).sin().sum(),
        1,
        lambda: [torch.randn(ROW), torch.randn(37)],
    ),
    "gated_norm": (
        lambda x, g, w: norms_cpu.gated_norm(x, g, w, 1e-5).sin().sum(),
        2,
        lambda: [torch.randn(ROW), torch.randn(ROW), torch.randn(37)],
    ),
    "linear of data": (
        lambda x, w: linear_cpu.linear(x.detach(), w).sin().sum() + 0 * x.sum(),
        2,
        lambda: [torch.randn(ROW), torch.randn(21, 37)],
    ),
    "linear": (lambda x, w: linear_cpu.linear(x, w).sin().sum(), 2, lambda: [torch.randn(ROW), torch.randn(21, 37)]),
    "grouped": (
        lambda x, w: linear_cpu.grouped_linear(x, w, torch.tensor([0, 17, 50])).sin().sum(),
        2,
        lambda: [torch.randn(67, 37), torch.randn(3, 21, 37)],
    ),
    "routed": (
        _routed,
        4,
        lambda: [torch.randn(67, 37), *(torch.randn(3, *s) for s in ((21, 37), (37, 21), (21, 37)))],
    ),
    "l2_norm": (lambda x: norms_cpu.l2_normalize(x).sin().sum(), 1, lambda: [torch.randn(ROW)]),
    "log_decay": (
        lambda z, a, b: norms_cpu.log_decay(z, a, b, -5.0).sin().sum(),
        1,
        lambda: [torch.randn(ROW), torch.randn(67), torch.randn(67 * 37)],
    ),
}


def results(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves)]


@needs_kernels
def test_every_operator_has_a_case() -> None:
    """A new one is written into fresh memory here, or it is missed: those that are called are all that there are."""
    called: set[str] = set()

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            called.add(op._schema.name)
            return op(*args, **(kwargs or {}))

    with Names():
        for function, _, make in CASES.values():
            results(function, make())
    found = {name.removeprefix("nanok3::") for name in called if name.startswith("nanok3::")}
    assert found | {"kda_step"} == registered(), "without gradients a step calls its kernel past torch"


@needs_kernels
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("name", CASES)
def test_every_number_is_written(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory holds NaN instead of whatever was there: no bit of any result or gradient changes."""
    function, activations, make = CASES[name]
    inputs = [x.to(dtype) if i < activations else x for i, x in enumerate(make())]
    clean = results(function, inputs)
    for owner, method in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
        monkeypatch.setattr(owner, method, poisoned(getattr(owner, method)))
    dirty = results(function, inputs)
    assert all(x.isfinite().all() for x in clean)
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))


def poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def filled(*arguments: object, **options: object) -> Tensor:
        x = allocate(*arguments, **options)
        return x.fill_(float("nan")) if x.is_floating_point() else x

    return filled


@needs_kernels
def test_what_cannot_be_read_is_refused() -> None:
    """In a process of its own: what is read in spite of it may end the process; and tests check types themselves."""
    script = Path(__file__).parent / "unreadable_arguments.py"
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout[-1000:] + result.stderr[-3000:]
    assert result.stdout.count("\n") > 300 and "WRONG" not in result.stdout, result.stdout


WHOLE_MODEL = """
import logging
import torch
import nanok3
logging.basicConfig(format="%(message)s")
torch.manual_seed(0)
cfg = nanok3.K3Config.tiny()
model = nanok3.K3(cfg)
for p in model.parameters():
    torch.nn.init.normal_(p, std=0.05)
ids = torch.arange(37)[None] % cfg.vocab_size
model(ids).logits.float().square().mean().backward()
with torch.no_grad():
    state = model.new_state(1)
    whole = model(ids).logits
    parts = [model(ids[:, :36], state=state).logits, model(ids[:, 36:], state=state).logits]
print((torch.cat(parts, 1) - whole).abs().max().item() < 1e-4, all(p.grad is not None for p in model.parameters()))
"""


def test_the_whole_model_works_without_a_compiler(tmp_path: Path) -> None:
    """Training, prefill and decode in torch alone, and one line in the log that says why."""
    env = {**os.environ, "PATH": str(tmp_path)}
    result = subprocess.run([sys.executable, "-c", WHOLE_MODEL], capture_output=True, text=True, env=env, timeout=200)
    assert result.stdout.split()[:1] == ["True"], result.stderr
    (said,) = result.stderr.splitlines()
    assert "no C++ compiler found" in said


@pytest.mark.parametrize("name", sorted(path.stem for path in native.SOURCES.glob("*.cpp")))
def test_sources_are_right_for_other_processors(name: str) -> None:
    """Each branch of the source is read by the compiler, whatever this machine would build. The slow tests in
    test_sanitizers.py also build and run them."""
    compiler = next(filter(None, map(shutil.which, native.COMPILERS)), None)
    if compiler is None or platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("needs a C++ compiler for x86")
    for target in ("x86-64", "haswell", "x86-64-v4", "cooperlake"):
        command = [compiler, "-std=c++17", "-fsyntax-only", f"-march={target}", str(native.SOURCES / f"{name}.cpp")]
        read = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert read.returncode == 0, f"{target}: {read.stderr[-4000:]}"
