"""The C++ KDA kernel against a float64 loop over tokens, values and every gradient."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize

from nanok3.kernels import kda_cpu, native

pytestmark = pytest.mark.skipif(not native.available("kda"), reason="no C++ compiler builds the kernel here")

NAMES = ("q", "k", "v", "log_decay", "beta", "initial_state")
LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 130)
SIZES = ((1, 1, 8, 8), (2, 2, 32, 32), (1, 2, 20, 40), (2, 4, 48, 16), (1, 1, 64, 128), (1, 1, 128, 64), (3, 9, 16, 16))
BOUND = 5e-6  # relative error in float32, extremes included


def loop(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, initial_state: Tensor, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The recurrence, one token at a time: decay, compare, write, read."""
    bounds = None if cu_seqlens is None else cu_seqlens.tolist()
    if bounds is not None:
        spans = [(slice(None), a, b, n) for n, (a, b) in enumerate(zip(bounds, bounds[1:], strict=False))]
    else:
        spans = [(slice(n, n + 1), 0, q.shape[1], n) for n in range(q.shape[0])]
    group = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(group, 2) for x in (q, k))
    outputs, states = [], []
    for row, begin, end, n in spans:
        S = initial_state[n : n + 1]
        for t in range(begin, end):
            S = log_decay[row, t].exp().unsqueeze(-1) * S
            error = v[row, t] - (S * k[row, t].unsqueeze(-1)).sum(2)
            S = S + (beta[row, t].unsqueeze(-1) * k[row, t]).unsqueeze(-1) * error.unsqueeze(2)
            outputs.append(q.shape[-1] ** -0.5 * (S * q[row, t].unsqueeze(-1)).sum(2))
        states.append(S)
    o = torch.cat(outputs).reshape(v.shape) if outputs else v * 0
    return o, torch.cat(states)


def gates(kind: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    u = torch.rand(shape, generator=generator)
    values = {
        "mild": -0.2 * u,
        "wild": -5 * u**0.3,
        "lowest": torch.full(shape, -5.0),
        "none": torch.zeros(shape),
        "softplus": -torch.nn.functional.softplus(30 * u - 15),  # mostly small, some far below -5
        "sudden": torch.where(u < 0.1, -1000.0, -u),
    }
    return values[kind]


def make(
    B: int, T: int, size: tuple[int, int, int, int], kind: str = "mild", N: int | None = None, seed: int = 0
) -> list[Tensor]:
    """float32 inputs in the order of NAMES; size is (H, HV, K, V)."""
    H, HV, K, V = size
    g = torch.Generator().manual_seed(seed)
    q, k = (normalize(torch.randn(B, T, H, K, generator=g), dim=-1) for _ in range(2))
    v, state = torch.randn(B, T, HV, V, generator=g), torch.randn(N or B, HV, K, V, generator=g)
    return [q, k, v, gates(kind, (B, T, HV, K), g), torch.rand(B, T, HV, generator=g), state]


def run(inputs: list[Tensor], cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor]:
    o, state = kda_cpu.kda(*inputs, output_final_state=True, cu_seqlens=cu_seqlens)
    return o, state


def gradients(outputs: tuple[Tensor, Tensor], inputs: list[Tensor], seed: int = 1) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    weights = [torch.randn(x.shape, generator=g).to(outputs[0].dtype).to(x.dtype) for x in outputs]
    return torch.autograd.grad(outputs, inputs, weights, materialize_grads=True)


def relative(ours: Tensor, exact: Tensor) -> float:
    return ((ours.double() - exact).norm() / exact.norm().clamp_min(1e-30)).item()


def check(inputs: list[Tensor], cu_seqlens: Tensor | None = None, bound: float = BOUND) -> None:
    """Outputs, final state and all six gradients within `bound` of the float64 loop."""
    ours = [x.detach().requires_grad_() for x in inputs]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    result, wanted = run(ours, cu_seqlens), loop(*exact, cu_seqlens)
    errors = {name: relative(a, b) for name, a, b in zip(("o", "state"), result, wanted, strict=True)}
    got, want = gradients(result, ours), gradients(wanted, exact)
    errors |= {f"d{name}": relative(a, b) for name, a, b in zip(NAMES, got, want, strict=True)}
    assert max(errors.values()) < bound, errors
    for x, g in zip(inputs, got, strict=True):
        assert g.dtype == x.dtype and g.shape == x.shape


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("T", LENGTHS)
def test_equal_to_loop(T: int, size: tuple[int, int, int, int]) -> None:
    check(make(2, T, size))


@pytest.mark.parametrize("kind", ("wild", "lowest", "none"))
@pytest.mark.parametrize("T", (1, 17, 130))
def test_extreme_gates(T: int, kind: str) -> None:
    check(make(1, T, (2, 2, 32, 48), kind))


@pytest.mark.parametrize("kind", ("mild", "lowest", "none", "softplus", "sudden"))
@pytest.mark.parametrize("T", (1, 2, 17, 130))
@pytest.mark.parametrize("size", ((2, 2, 32, 48), (1, 2, 20, 40)))
def test_gates_without_a_bound(T: int, kind: str, size: tuple[int, int, int, int]) -> None:
    check(make(1, T, size, kind))


@pytest.mark.parametrize("noise", (0.0, 1e-3, 0.1))
def test_nearly_equal_keys(noise: float) -> None:
    """Repeated tokens: L is close to all ones, where a power series for the inverse loses every digit."""
    q, k, v, g, beta, state = make(1, 130, (2, 2, 64, 32))
    k = normalize(k[:, :1] + noise * torch.randn(k.shape, generator=torch.Generator().manual_seed(3)), dim=-1)
    check([q, k, v, g * 0.005, 0.9 + 0.1 * beta, state])


def test_small_gradients_keep_their_digits() -> None:
    """A mean over many tokens gives gradients of 1e-9: the strongest decay must not push them into denormals."""
    inputs = make(1, 48, (1, 1, 32, 32), "lowest")
    ours = [x.requires_grad_() for x in inputs]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    got = torch.autograd.grad((run(ours)[0] * 1e-9).sum(), ours)
    want = torch.autograd.grad((loop(*exact, None)[0] * 1e-9).sum(), exact)
    for name, a, b in zip(NAMES, got, want, strict=True):
        assert relative(a, b) < BOUND, name


def test_gate_of_a_lone_token_has_no_gradient() -> None:
    """Without a past, o = s (q.k) b v: the diagonal of M carries no gate, exactly."""
    inputs = [x.requires_grad_() for x in make(1, 1, (2, 2, 32, 32), "wild")[:5]]
    o, _ = kda_cpu.kda(*inputs)
    assert torch.autograd.grad(o.sum(), inputs[3])[0].abs().max() == 0


@pytest.mark.parametrize("size", ((2, 2, 32, 32), (1, 2, 20, 40)))
@pytest.mark.parametrize("lengths", ((1,), (0, 1, 1, 0), (17, 0, 64, 1, 63), (5, 65, 1, 129, 0)))
def test_packed_sequences(lengths: tuple[int, ...], size: tuple[int, int, int, int]) -> None:
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    check(make(1, sum(lengths), size, N=len(lengths)), cu_seqlens)


def test_packed_is_separate_bitwise() -> None:
    lengths = (1, 70, 16, 0, 33)
    *inputs, state = make(1, sum(lengths), (2, 2, 32, 32), N=len(lengths))
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    o, final = run([*inputs, state], cu_seqlens)
    for n, (a, b) in enumerate(zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True)):
        alone, alone_final = run([*(x[:, a:b] for x in inputs), state[n : n + 1]])
        assert torch.equal(o[:, a:b], alone) and torch.equal(final[n : n + 1], alone_final)


@settings(max_examples=15, deadline=None)
@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=6), K=st.integers(1, 40), V=st.integers(1, 70))
def test_any_shape(lengths: list[int], K: int, V: int) -> None:
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    check(make(1, sum(lengths), (1, 2, K, V), "wild", N=len(lengths)), cu_seqlens)


def test_without_initial_state() -> None:
    inputs = make(1, 80, (2, 2, 32, 32))
    zero = [*inputs[:5], torch.zeros_like(inputs[5])]
    o, state = kda_cpu.kda(*inputs[:5], output_final_state=True)
    assert torch.equal(o, run(zero)[0]) and torch.equal(state, run(zero)[1])
    assert kda_cpu.kda(*inputs[:5])[1] is None


def test_only_some_gradients_asked_for() -> None:
    """Final state unused, output unused, and inputs that do not require gradients."""
    inputs = make(1, 40, (2, 2, 32, 32))
    for part in (0, 1):
        ours = [x.detach().requires_grad_(name in ("k", "beta")) for name, x in zip(NAMES, inputs, strict=True)]
        exact = [x.detach().double() for x in inputs]
        for x in (exact[1], exact[4]):
            x.requires_grad_()
        got = torch.autograd.grad(run(ours)[part].square().sum(), (ours[1], ours[4]))
        want = torch.autograd.grad(loop(*exact, None)[part].square().sum(), (exact[1], exact[4]))
        assert all(relative(a, b) < BOUND for a, b in zip(got, want, strict=True))


BF16 = {
    "mixed": ("q", "k", "v"),
    "all": ("q", "k", "v", "log_decay", "beta"),
    "values": ("v",),
    "gates": ("log_decay", "beta"),
}


@pytest.mark.parametrize("which", BF16)
@pytest.mark.parametrize("size", ((2, 2, 32, 32), (1, 2, 20, 40)))
def test_bf16(which: str, size: tuple[int, int, int, int]) -> None:
    """Inputs rounded to bf16 are exact numbers; only outputs are rounded, so errors are bf16's half ulp."""
    inputs = [
        x.bfloat16() if name in BF16[which] else x for name, x in zip(NAMES, make(2, 65, size, "wild"), strict=True)
    ]
    check(inputs, bound=3e-3)
    o, state = run(inputs)
    assert o.dtype == inputs[2].dtype and state.dtype == torch.float32
    wide_o, wide_state = run([x.float() for x in inputs])
    assert torch.equal(o, wide_o.to(o.dtype)) and torch.equal(state, wide_state)


def test_bf16_rounds_to_nearest_and_keeps_nan() -> None:
    """o = v where k = q = e_1, beta = 1, scale = 1: what comes out is the kernel's own rounding."""
    v = torch.tensor([1.0, 1.00390625, 1.01171875, -3e38, float("inf"), float("nan"), 1e-40, 0.0])
    one = torch.zeros(1, 1, 1, 8)
    one[..., 0] = 1
    arguments = (one, one, v.bfloat16().view(1, 1, 1, 8), torch.zeros(1, 1, 1, 8), torch.ones(1, 1, 1))
    o, _ = kda_cpu.kda(*arguments, scale=1.0)
    assert torch.equal(o.flatten().nan_to_num(7.0, 8.0, 9.0), v.bfloat16().nan_to_num(7.0, 8.0, 9.0))
    halves = torch.tensor([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-12, -1 - 2**-8, 0.0, 3.0, 2**-130])
    state = torch.zeros(1, 1, 8, 8)
    state[0, 0, 0] = halves  # with beta = 0 the output is q's row of the state
    zero = torch.zeros(1, 1, 1)
    o, _ = kda_cpu.kda(one, one, torch.zeros_like(arguments[2]), arguments[3], zero, state, scale=1.0)
    assert torch.equal(o.flatten()[:7], halves.bfloat16()[:7])


@pytest.mark.parametrize("cut", (1, 15, 16, 40, 64, 99))
def test_split_anywhere(cut: int) -> None:
    *inputs, state = make(2, 100, (2, 2, 32, 48))
    whole, final = run([*inputs, state])
    first, between = run([*(x[:, :cut] for x in inputs), state])
    second, end = run([*(x[:, cut:] for x in inputs), between])
    assert relative(torch.cat((first, second), 1), whole.double()) < 1e-6
    assert relative(end, final.double()) < 1e-6


@pytest.mark.parametrize("kind", ("mild", "wild", "lowest", "sudden"))
def test_prefix_invariance_bitwise(kind: str) -> None:
    """An output depends on no later token, not even on whether there is one, nor on what it holds."""
    *inputs, state = make(1, 70, (2, 2, 32, 48), kind)
    o, _ = run([*inputs, state])
    for t in (1, 3, 15, 16, 17, 63, 64, 65, 69):
        assert torch.equal(run([*(x[:, :t] for x in inputs), state])[0], o[:, :t])
        changed = [x.clone() for x in inputs]
        for x in changed:
            x[:, t:] = float("nan")
        assert torch.equal(run([*changed, state])[0][:, :t], o[:, :t])


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("size", ((1, 2, 20, 40), (2, 2, 8, 8)))
def test_poisoned_neighbours(size: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    """Nothing outside the inputs is read: NaN before and behind each changes no bit of the result."""

    def poisoned(x: Tensor) -> Tensor:
        buffer = torch.full((x.numel() + 512,), float("nan"), dtype=x.dtype)
        buffer[256 : 256 + x.numel()] = x.flatten()
        return buffer[256 : 256 + x.numel()].view(x.shape)

    *inputs, state = make(2, 21, size)
    inputs = [x.to(dtype) for x in inputs]
    results = []
    for wrap in (Tensor.clone, poisoned):
        leaves = [wrap(x).requires_grad_() for x in (*inputs, state)]
        outputs = run(leaves)
        results.append((*outputs, *gradients(outputs, leaves)))
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("lengths", ((1, 0, 65, 64, 1), (16, 3), (40, 40, 40)))
def test_every_element_is_written(lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs start as NaN instead of whatever memory held; the slots no sequence uses are written too."""
    new_empty = Tensor.new_empty
    monkeypatch.setattr(Tensor, "new_empty", lambda x, *a, **k: new_empty(x, *a, **k).fill_(float("nan")))
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    q, k, v, g, beta, state = make(1, sum(lengths), (1, 2, 20, 40), N=len(lengths))
    o, final, *saved = outputs = kda_cpu.forward(q, k, v, g, beta, state, cu_seqlens, 0.2, True)
    grads = kda_cpu.backward(o, final, q, k, g, beta, state, *saved, cu_seqlens, 0.2)
    assert all(x.isfinite().all() for x in (*outputs, *grads))


def test_non_contiguous_inputs() -> None:
    inputs = make(2, 20, (2, 2, 24, 40))
    views = [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in inputs]
    assert not any(x.is_contiguous() for x in views)
    assert all(torch.equal(a, b) for a, b in zip(run(views), run(inputs), strict=True))


def test_deterministic_and_independent_of_threads() -> None:
    inputs = make(1, 200, (3, 9, 20, 48), N=4)  # more heads than one thread takes together
    cu_seqlens = torch.tensor([0, 1, 40, 193, 200])
    threads = torch.get_num_threads()
    results = []
    try:
        for i in range(30):
            torch.set_num_threads((1, 2, 5)[i % 3])
            leaves = [x.detach().requires_grad_() for x in inputs]
            outputs = run(leaves, cu_seqlens)
            results.append((*outputs, *gradients(outputs, leaves)))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("size", ((1, 1, 20, 130), (1, 2, 32, 64)))
def test_more_threads_than_heads(size: tuple[int, int, int, int]) -> None:
    """The value columns are shared out: outputs are the same bits, gradients are sums of parts, the same bits for one
    number of threads."""
    inputs = [x.bfloat16() if name == "v" else x for name, x in zip(NAMES, make(1, 150, size, "wild"), strict=True)]
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5, 5):
            torch.set_num_threads(threads)
            leaves = [x.detach().requires_grad_() for x in inputs]
            outputs = run(leaves)
            results.append((*outputs, *gradients(outputs, leaves)))
            moving = inputs[5].clone()
            results[-1] += (kda_cpu.step(*(x[:, :1] for x in inputs[:5]), moving), moving)
    finally:
        torch.set_num_threads(before)
    for many in results[1:]:
        for name, a, b in zip(("o", "state", *(f"d{name}" for name in NAMES), "step", "moved"), results[0], many):
            same = name in ("o", "state", "dv", "dinitial_state", "step", "moved")
            assert torch.equal(a, b) if same else relative(b, a.double()) < 1e-6, name
    assert all(torch.equal(a, b) for a, b in zip(*results[2:], strict=True))


def test_heads_permuted() -> None:
    inputs = make(1, 40, (4, 4, 32, 32))
    order = torch.tensor([2, 0, 3, 1])
    permuted = [x[:, :, order] if x.dim() > 3 and name != "initial_state" else x for name, x in zip(NAMES, inputs)]
    permuted[4], permuted[5] = inputs[4][:, :, order], inputs[5][:, order]
    o, state = run(inputs)
    assert torch.equal(run(permuted)[0], o[:, :, order]) and torch.equal(run(permuted)[1], state[:, order])


def test_closed_gate_and_zero_beta_keep_the_state() -> None:
    q, k, v, g, beta, state = make(1, 50, (2, 2, 32, 32), "none")
    o, final = run([q, k, v, g, beta * 0, state])
    assert torch.equal(final, state)
    assert relative(o[0, 7], 32**-0.5 * torch.einsum("hkv,hk->hv", state[0], q[0, 7]).double()) < 1e-6


def test_many_short_sequences() -> None:
    inputs = make(1, 3000, (1, 1, 16, 16), N=3000)
    o, state = run(inputs, torch.arange(3001))
    batch = [x.transpose(0, 1) for x in inputs[:5]]
    assert torch.equal(o, run([*batch, inputs[5]])[0].transpose(0, 1))
    assert state.shape[0] == 3000


def test_empty() -> None:
    o, state = run(make(2, 0, (2, 2, 16, 16)))
    assert o.shape == (2, 0, 2, 16) and state.shape == (2, 2, 16, 16)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("kind", ("wild", "sudden"))
@pytest.mark.parametrize("size", SIZES + ((2, 2, 20, 303), (1, 1, 128, 256)))
def test_step(size: tuple[int, int, int, int], dtype: torch.dtype, kind: str) -> None:
    """Token by token in place is the loop."""
    *inputs, state = make(3, 6, size, kind)
    inputs = [x.to(dtype) for x in inputs]
    o, final = loop(*(x.double() for x in (*inputs, state)), None)
    moving = state.clone()
    where = moving.data_ptr()
    steps = [kda_cpu.step(*(x[:, t : t + 1] for x in inputs), moving) for t in range(6)]
    assert moving.data_ptr() == where
    after = torch.full_like(state, float("nan"))
    into = kda_cpu.step(*(x[:, :1] for x in inputs), state, after=after)
    again = state.clone()
    assert torch.equal(into, steps[0]) and torch.equal(kda_cpu.step(*(x[:, :1] for x in inputs), again), into)
    assert torch.equal(after, again)
    assert relative(torch.cat(steps, 1), o) < (1e-6 if dtype == torch.float32 else 3e-3)
    assert relative(moving, final) < 1e-6


def test_operators_are_well_formed() -> None:
    """Schemas, fakes (also with symbolic shapes) and autograd registrations, as torch checks them."""
    inputs = [x.requires_grad_() for x in make(2, 20, (1, 2, 8, 8))]
    packed = [x.requires_grad_() for x in make(1, 70, (2, 2, 8, 8), N=3)]
    cu_seqlens = torch.tensor([0, 1, 1, 70])
    torch.library.opcheck(torch.ops.nanok3.kda_fwd, (*inputs, None, 0.3, True))
    torch.library.opcheck(torch.ops.nanok3.kda_fwd, (*packed, cu_seqlens, 0.3, True))
    with torch.no_grad():
        o, final, *saved = kda_cpu.forward(*packed, cu_seqlens, 0.3, True)
        q, k, _, g, beta, state = (x.detach() for x in packed)
    torch.library.opcheck(torch.ops.nanok3.kda_bwd, (o, final, q, k, g, beta, state, *saved, cu_seqlens, 0.3))
    token = [x.detach()[:, :1] for x in inputs[:5]]
    torch.library.opcheck(torch.ops.nanok3.kda_step, (*token, inputs[5].detach(), 0.3))


COMPILED = """
import torch
from nanok3.kernels import kda_cpu

def block(q, v, g, beta, state):
    o, state = kda_cpu.kda(q, q, 2.0 * v, g, beta, state, output_final_state=True)
    return o.sin().sum() + state.square().sum()

q = torch.nn.functional.normalize(torch.randn(1, 20, 1, 16), dim=-1)
inputs = [q, torch.randn(1, 20, 1, 16), -torch.rand(1, 20, 1, 16), torch.rand(1, 20, 1), torch.randn(1, 1, 16, 16)]
for f in (block, torch.compile(block, backend="aot_eager", fullgraph=True)):
    leaves = [x.detach().requires_grad_() for x in inputs]
    print(float(sum(g.double().square().sum() for g in torch.autograd.grad(f(*leaves), leaves))))
"""


def test_torch_compile_works_around_it() -> None:
    """In a process of its own: the type checks that tests add to annotated functions cannot be traced."""
    result = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True, timeout=120)
    eager, compiled = result.stdout.split() or [result.stderr, ""]
    assert eager == compiled


def test_nothing_is_saved_without_gradients() -> None:
    inputs = make(1, 130, (1, 1, 32, 32))
    assert [x.numel() for x in kda_cpu.forward(*inputs, None, 1.0, False)[2:]] == [0, 0]
    states, errors = kda_cpu.forward(*inputs, None, 1.0, True)[2:]
    assert states.shape == (2, 1, 32 * 32) and errors.shape == (9, 1, 16 * 32)


def test_what_it_does_not_take() -> None:
    *inputs, state = make(1, 4, (1, 1, 16, 16))
    assert kda_cpu.kda(*(x.double() for x in inputs)) is NotImplemented
    assert kda_cpu.kda(*(x.half() for x in inputs)) is NotImplemented
    assert kda_cpu.kda(*inputs, state.double()) is NotImplemented
    assert kda_cpu.kda(*(x.to("meta") for x in inputs)) is NotImplemented
    token = [x[:, :1] for x in inputs]
    assert kda_cpu.step(*token, state.transpose(2, 3)) is NotImplemented


def test_wrong_shapes_are_named() -> None:
    q, k, v, g, beta, state = make(1, 4, (2, 2, 16, 16))
    for name, bad in {
        "log_decay": (q, k, v, g[..., :8], beta),
        "beta": (q, k, v, g, beta[:, :3]),
        "multiple": (q, k, v[:, :, :1], g[:, :, :1], beta[:, :, :1]),
    }.items():
        with pytest.raises(Exception, match=name):
            kda_cpu._check_shapes(*bad, None, None)
    with pytest.raises(ValueError, match="state"):
        kda_cpu._check_shapes(q, k, v, g, beta, state[:, :1], None)
    with pytest.raises(ValueError, match=r"rise from 0 to 4 tokens, got \[0, 3, 2, 4\]"):
        kda_cpu.kda(q, k, v, g, beta, cu_seqlens=torch.tensor([0, 3, 2, 4]))
    with pytest.raises(ValueError, match="batch of 1"):
        kda_cpu.kda(*(x.expand(2, *x.shape[1:]) for x in (q, k, v, g, beta)), cu_seqlens=torch.tensor([0, 4]))


def test_what_only_looks_like_a_tensor_is_left_to_torch() -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        x, state = torch.rand(1, 3, 1, 8), torch.rand(1, 1, 8, 8)
        assert kda_cpu.kda(x, x, x, -x, x[..., 0]) is NotImplemented
    real = torch.rand(1, 3, 1, 8)
    assert kda_cpu.kda(real, real, real, -real, real[..., 0], state) is NotImplemented
