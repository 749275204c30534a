"""The laws of the KDA operator, and the mistakes known from other implementations, for every backend that is here.

    (a) chunks = loop: lengths around 16 and 64, K != V, HV = 2 H   test_a_equal_to_the_loop
    (b) split anywhere                                              test_b_split_anywhere
    (c) affine in the state, and associative                        test_c_affine_and_associative
    (d) prefix invariance, bit for bit                              test_d_prefix_invariance
    (e) packed = separate, lengths 0 and 1 included                 test_e_packed_is_separate
    (f) gradients = loop; gradcheck                                 test_a_..., test_f_gradcheck
    (g) extremes: g = 0 and -5, beta 0 and 1, equal keys, poison    test_g_extremes, test_g_poisoned_neighbours
    (h) beta = g = 0 keeps the state; one token = decode step       test_h_...
    (i) error bands in float32 and bf16                             test_i_error_bands
    (j) heads permuted                                              test_j_heads_permuted
    (k) the gradient of a lone token's gate is 0                    test_k_...

Numbers of spec section 5 (bugs of fla, FlashKDA, vLLM); what is not listed concerns code we do not have (context
parallel kernels, autotuning, several chunk sizes), except 14: test_weights.py and test_muon.py.
     1 power series for the inverse              test_g_extremes[keys]
     2 a later gate moves earlier bits           test_d_prefix_invariance, outputs and gradients
     3 K no power of two beside NaN              test_g_poisoned_neighbours (K = 60)
     5 a chain of segments drifts                test_bug_05_eight_segments
     7 grouped value heads                       test_a_equal_to_the_loop
     8 a gate of the wrong rank                  test_bug_08_a_gate_for_each_channel
    10 tails of a chunk                          test_a_... (1, 15, 63, 65), test_g_poisoned_neighbours
    12 inputs that are not contiguous            test_bug_12_turned_inputs
    13 NaN gradient of a saturated gate          test_bug_13_saturated_gates
    15 [K, V] against [V, K]                     test_bug_15_prefill_twice_then_decode
    16 the wrong kind of gate                    test_bug_16_the_gate_is_the_configurations
    17 not the same bits twice                   test_bug_17_fifty_times_the_same_bits
    18 a test that compares a thing with itself  test_bug_18_the_backend_asked_for_runs
    19 one gradient too many                     every test that asks for gradients
    20 a last sequence of one token              test_bug_20_a_tail_of_one_token
    21 a second geometry in one process          test_bug_21_another_geometry
    22 gates below -5; noise in dg               test_bug_22_gates_below_the_bound, test_k_...
    23 very many sequences                       test_bug_23_seventy_thousand_sequences
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nanok3.config import K3Config
from nanok3.kernels import native
from nanok3.model import kda as kda_module
from nanok3.model.kda import KDA, kda, kda_reference, log_decay

NAMES = ("q", "k", "v", "log_decay", "beta", "state")


@dataclass(frozen=True)
class Backend:
    """What a backend is tested with: its type and device, and how far it may be from the float64 loop."""

    name: str
    dtype: torch.dtype
    bound: float
    device: str = "cpu"

    def __call__(self, *inputs: Tensor, **options) -> tuple[Tensor, Tensor]:
        return kda(*inputs, output_final_state=True, backend=self.name, **options)

    def draw(self, T: int, gate: float = -5.0, **sizes) -> list[Tensor]:
        return [x.to(self.device, self.dtype) for x in draw(T, gate, **sizes)]


def here(backend: Backend) -> object:
    missing = ""
    if backend.name == "cpu" and not native.available("kda"):
        missing = "no C++ compiler builds the kernel here"
    if backend.name == "fla" and not torch.cuda.is_available():
        missing = "needs a CUDA device"
    mark = pytest.mark.skipif(bool(missing), reason=missing)
    return pytest.param(backend, marks=mark, id=f"{backend.name}-{str(backend.dtype)[6:]}")


EVERY = [
    here(Backend("reference", torch.float64, 1e-13)),
    here(Backend("torch", torch.float64, 1e-11)),
    here(Backend("torch", torch.float32, 1e-5)),
    here(Backend("cpu", torch.float32, 5e-6)),
    here(Backend("fla", torch.float32, 5e-3, "cuda")),
]
FAST = EVERY[1:]
each = pytest.mark.parametrize("backend", EVERY)
each_fast = pytest.mark.parametrize("backend", FAST)


def draw(
    T: int, gate: float = -5.0, B: int = 1, H: int = 2, HV: int = 4, K: int = 24, V: int = 40, N: int = 0
) -> list[Tensor]:
    """Inputs in the order of NAMES; gates from `gate` to 0, most of them near 0."""
    q, k = (F.normalize(torch.randn(B, T, H, K, dtype=torch.float64), dim=-1) for _ in range(2))
    v, state = torch.randn(B, T, HV, V, dtype=torch.float64), torch.randn(N or B, HV, K, V, dtype=torch.float64)
    g = gate * torch.rand(B, T, HV, K, dtype=torch.float64) ** 3
    return [q, k, v, g, torch.sigmoid(torch.randn(B, T, HV, dtype=torch.float64)), state]


def relative(a: Tensor, exact: Tensor) -> float:
    return ((a.double().cpu() - exact.double().cpu()).norm() / exact.double().cpu().norm().clamp_min(1e-30)).item()


def with_gradients(run: Callable, inputs: list[Tensor], upstream: list[Tensor], **options) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    outputs = run(*leaves, **options)
    grads = torch.autograd.grad(outputs, leaves, [u.to(o) for u, o in zip(upstream, outputs)], materialize_grads=True)
    return [*(x.detach() for x in outputs), *grads]


def loop(*inputs: Tensor, **options) -> tuple[Tensor, Tensor]:
    return kda_reference(*inputs, output_final_state=True, **options)


def check(backend: Backend, inputs: list[Tensor], factor: float = 1.0, **options) -> None:
    """Outputs, final state and six gradients within the backend's bound of the float64 loop."""
    upstream = [torch.randn_like(x, dtype=torch.float64) for x in (inputs[2], inputs[5])]
    got = with_gradients(backend, inputs, upstream, **options)
    exact = with_gradients(loop, [x.double() for x in inputs], upstream, **options)
    for name, a, b in zip(("o", "final", *NAMES), got, exact, strict=True):
        assert relative(a, b) < factor * backend.bound, name


# ---------------------------------------------------------------------- the laws


@each_fast
@pytest.mark.parametrize("T", (1, 15, 16, 17, 63, 64, 65, 200))
def test_a_equal_to_the_loop(T: int, backend: Backend) -> None:
    check(backend, backend.draw(T, B=2 if T < 100 else 1))


@each
def test_b_split_anywhere(backend: Backend) -> None:
    *inputs, state = backend.draw(50)
    whole, end = loop(*(x.double() for x in (*inputs, state)))
    for t in (0, 1, 15, 16, 17, 32, 49, 50):
        first, middle = backend(*(x[:, :t] for x in inputs), state)
        second, final = backend(*(x[:, t:] for x in inputs), middle)
        assert relative(torch.cat((first, second), 1), whole) < backend.bound
        assert relative(final, end) < backend.bound


@each
def test_c_affine_and_associative(backend: Backend) -> None:
    """Tokens a..b turn S into Phi S + Psi; maps of neighbouring spans compose, in any grouping."""
    *inputs, state = backend.draw(60, H=2, HV=2, K=16, V=32)

    def span(a: int, b: int) -> tuple[Tensor, Tensor]:
        q, k, v, g, beta = (x[:, a:b] for x in inputs)
        identity = torch.eye(16).to(state).expand(1, 2, 16, 16).contiguous()
        phi = backend(q, k, torch.zeros_like(v[..., :16]), g, beta, identity)[1]
        return phi, backend(q, k, v, g, beta, torch.zeros_like(state))[1]

    def then(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return second[0] @ first[0], second[0] @ first[1] + second[1]

    end, a, b, c = backend(*inputs, state)[1], span(0, 17), span(17, 40), span(40, 60)
    for phi, psi in (then(then(a, b), c), then(a, then(b, c)), span(0, 60)):
        assert relative(phi @ state + psi, end) < backend.bound


@each
@pytest.mark.parametrize("gate", (-0.2, -5.0))
def test_d_prefix_invariance(gate: float, backend: Backend) -> None:
    """Neither outputs nor gradients of the first t tokens know whether more follow, or what."""
    *inputs, state = backend.draw(70, gate)
    outputs = backend(*inputs, state)[0]
    others = backend.draw(70, -5.0)[:5]
    upstream = torch.randn_like(outputs)
    for t in (1, 7, 16, 17, 33, 64, 69):
        changed = [torch.cat((x[:, :t], y[:, t:]), 1) for x, y in zip(inputs, others)]
        gradients = []
        for tokens in (changed, [x[:, :t] for x in inputs]):
            leaves = [x.detach().requires_grad_() for x in tokens]
            o = backend(*leaves, state)[0][:, :t]
            assert torch.equal(o, outputs[:, :t])
            gradients.append([g[:, :t] for g in torch.autograd.grad(o, leaves, upstream[:, :t])])
        if backend.name == "cpu":
            assert all(torch.equal(a, b) for a, b in zip(*gradients)), t
        assert all(relative(a, b) < backend.bound for a, b in zip(*gradients)), t


@each
def test_e_packed_is_separate(backend: Backend) -> None:
    lengths = (1, 0, 33, 16, 1, 0)
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    *inputs, state = backend.draw(sum(lengths), N=len(lengths))
    o, final = backend(*inputs, state, cu_seqlens=bounds.to(backend.device))
    for n, (a, b) in enumerate(zip(bounds[:-1], bounds[1:])):
        alone, end = backend(*(x[:, a:b] for x in inputs), state[n : n + 1])
        assert a == b or relative(o[:, a:b], alone) < backend.bound
        assert relative(final[n], end[0]) < backend.bound
    if backend.name != "reference":
        check(backend, [*inputs, state], cu_seqlens=bounds.to(backend.device))


def test_f_gradcheck() -> None:
    """Of the backward written by hand that has float64."""
    backend = Backend("torch", torch.float64, 1e-11)
    inputs = [x.requires_grad_() for x in draw(20, H=1, HV=1, K=3, V=2)]
    assert torch.autograd.gradcheck(lambda *x: backend(*x), inputs)


@each_fast
@pytest.mark.parametrize("which", ("no decay", "lowest", "beta 0", "beta 1", "keys", "keys and noise"))
def test_g_extremes(which: str, backend: Backend) -> None:
    q, k, v, g, beta, state = backend.draw(80)
    noise = {"keys": 0.0, "keys and noise": 1e-3}.get(which)
    if noise is not None:
        k = F.normalize(k[:, :1] + noise * torch.randn(k.shape).to(k), dim=-1)
        g, beta = g * 0 - 0.001, torch.ones_like(beta)
    g = {"no decay": g * 0, "lowest": g * 0 - 5}.get(which, g)
    beta = {"beta 0": beta * 0, "beta 1": beta * 0 + 1}.get(which, beta)
    check(backend, [q, k, v, g, beta, state])


@each
@pytest.mark.parametrize("T", (1, 21, 65))
def test_g_poisoned_neighbours(T: int, backend: Backend) -> None:
    """NaN before, behind and between the rows of every input."""
    inputs = backend.draw(T, H=1, HV=2, K=60, V=36)

    def poisoned(x: Tensor) -> Tensor:
        room = torch.full([n + 2 for n in x.shape], torch.nan, dtype=x.dtype, device=x.device)
        room[tuple(slice(1, -1) for _ in x.shape)] = x
        return room[tuple(slice(1, -1) for _ in x.shape)]

    upstream = [torch.randn_like(inputs[2]), torch.randn_like(inputs[5])]
    clean = with_gradients(backend, inputs, upstream)
    dirty = with_gradients(backend, [poisoned(x) for x in inputs], [poisoned(x) for x in upstream])
    assert all(relative(a, b) < backend.bound for a, b in zip(dirty, clean, strict=True))


@each
def test_h_without_decay_and_writing_the_state_stays(backend: Backend) -> None:
    q, k, v, g, beta, state = backend.draw(70)
    assert torch.equal(backend(q, k, v, g * 0, beta * 0, state)[1], state)


@each
def test_h_a_token_is_a_decode_step(backend: Backend) -> None:
    """Without gradients one token takes the kernel made for it; its state and output are those of the other path."""
    *inputs, state = backend.draw(20, B=3)
    whole, end = backend(*inputs, state)
    before = state.clone()
    with torch.no_grad():
        parts, moving = [], state
        for t in range(20):
            o, moving = backend(*(x[:, t : t + 1] for x in inputs), moving)
            parts.append(o)
    assert relative(torch.cat(parts, 1), whole) < backend.bound and relative(moving, end) < backend.bound
    assert torch.equal(state, before), "the state given is only read"


@pytest.mark.parametrize("backend", [p for p in EVERY if "float32" in p.id])
@pytest.mark.parametrize("gate", (-0.2, -5.0))
def test_i_error_bands(gate: float, backend: Backend) -> None:
    """float32 to the backend's bound; bf16 inputs to the rounding of the inputs (3.7e-3)."""
    inputs = backend.draw(256, gate, H=1, HV=1, K=32, V=32)
    check(backend, inputs)
    rounded = [x.bfloat16() if name in "qkv" else x for name, x in zip(NAMES, inputs)]
    o, final = backend(*rounded)
    exact, end = loop(*(x.double() for x in inputs))
    assert o.dtype == torch.bfloat16 and final.dtype == torch.float32
    assert 1e-3 < relative(o, exact) < 8e-3 and relative(final, end) < 8e-3


@each
def test_j_heads_permuted(backend: Backend) -> None:
    """Heads of very different gates, so that an offset of one head would be seen."""
    inputs = backend.draw(40, H=4, HV=4)
    inputs[3] = inputs[3] * torch.tensor([1.0, 0.01, 0.5, 0.0]).to(inputs[3])[:, None]
    order = torch.tensor([2, 0, 3, 1], device=backend.device)
    upstream = [torch.randn_like(inputs[2]), torch.randn_like(inputs[5])]

    def permuted(tensors: list[Tensor]) -> list[Tensor]:
        return [
            x[:, order] if x.shape[1] == 4 and x.dim() == 4 and x.shape[0] == 1 else x[:, :, order] for x in tensors
        ]

    straight = with_gradients(backend, inputs, upstream)
    crossed = with_gradients(backend, permuted(inputs), permuted(upstream))
    assert all(relative(a, b) < backend.bound for a, b in zip(crossed, permuted(straight), strict=True))


@each
def test_k_a_lone_token_gives_its_gate_no_gradient(backend: Backend) -> None:
    inputs = [x.requires_grad_() for x in backend.draw(1)[:5]]
    o, _ = backend(*inputs)
    assert torch.autograd.grad(o.sum(), inputs[3])[0].abs().max() == 0


# ---------------------------------------------------------------------- known mistakes


@each
def test_bug_05_eight_segments(backend: Backend) -> None:
    """Hardly any decay: what one segment loses, no later one forgets."""
    *inputs, state = backend.draw(8 * 24, gate=-1e-3)
    exact, end = loop(*(x.double() for x in (*inputs, state)))
    parts, moving = [], state
    for n in range(8):
        o, moving = backend(*(x[:, 24 * n : 24 * n + 24] for x in inputs), moving)
        parts.append(o)
    assert relative(torch.cat(parts, 1), exact) < backend.bound and relative(moving, end) < backend.bound


@each
def test_bug_08_a_gate_for_each_channel(backend: Backend, unchecked: None) -> None:
    q, k, v, g, beta, state = backend.draw(6)
    with pytest.raises(ValueError, match=r"log_decay has shape \(1, 6, 4\)"):
        backend(q, k, v, g[..., 0], beta, state)


@each
def test_bug_12_turned_inputs(backend: Backend) -> None:
    inputs = backend.draw(20)
    turned = [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in inputs]
    upstream = [torch.randn_like(inputs[2]), torch.randn_like(inputs[5])]
    straight, other = (with_gradients(backend, x, upstream) for x in (inputs, turned))
    assert not any(x.is_contiguous() for x in turned)
    assert all(relative(a, b) < backend.bound for a, b in zip(other, straight, strict=True))


@pytest.mark.parametrize("compiled", (True, False))
def test_bug_13_saturated_gates(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr(native, "load", lambda name: None)
    z = torch.tensor([-50.0, 0.0, 50.0]).view(1, 3, 1, 1).requires_grad_()
    A_log, bias = torch.tensor([100.0], requires_grad=True), torch.zeros(1, requires_grad=True)
    grads = torch.autograd.grad(log_decay(z, A_log, bias, -5.0).sum(), (z, A_log, bias))
    assert all(x.isfinite().all() for x in grads)


@each
def test_bug_15_prefill_twice_then_decode(backend: Backend) -> None:
    """K = V, so that a transposed state would fit; the loop has none to transpose."""
    *inputs, state = backend.draw(40, K=32, V=32)
    exact, end = loop(*(x.double() for x in (*inputs, state)))
    parts, moving = [], state
    with torch.no_grad():
        for a, b in ((0, 17), (17, 36), (36, 37), (37, 38), (38, 39), (39, 40)):
            o, moving = backend(*(x[:, a:b] for x in inputs), moving)
            parts.append(o)
    assert relative(torch.cat(parts, 1), exact) < backend.bound and relative(moving, end) < backend.bound
    assert relative(moving.mT, end) > 0.5, "the state is not symmetric"


def test_bug_16_the_gate_is_the_configurations() -> None:
    """The same weights under the bounded and the older gate are two models."""
    cfg = K3Config.tiny()
    bounded, older = KDA(cfg), KDA(replace(cfg, gate_lower_bound=None))
    for p in bounded.parameters():
        torch.nn.init.normal_(p, std=0.3)
    older.load_state_dict(bounded.state_dict())
    x = torch.randn(1, 9, cfg.hidden_size)
    assert relative(older(x), bounded(x)) > 1e-2


@each
def test_bug_17_fifty_times_the_same_bits(backend: Backend) -> None:
    inputs = backend.draw(37)
    upstream = [torch.randn_like(inputs[2]), torch.randn_like(inputs[5])]
    first = with_gradients(backend, inputs, upstream)
    for _ in range(4 if backend.name == "reference" else 49):
        assert all(torch.equal(a, b) for a, b in zip(first, with_gradients(backend, inputs, upstream), strict=True))


@each
def test_bug_18_the_backend_asked_for_runs(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own function and no other."""
    own = {"reference": "kda_reference", "torch": "kda_chunked", "cpu": "_kda_cpu", "fla": "_kda_fla"}
    ran = []
    for function in own.values():
        original = getattr(kda_module, function)
        monkeypatch.setattr(kda_module, function, lambda *a, f=function, o=original: ran.append(f) or o(*a))
    backend(*backend.draw(5))
    assert ran == [own[backend.name]]


@each
@pytest.mark.parametrize("head", (127, 8191))
def test_bug_20_a_tail_of_one_token(head: int, backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory holds NaN, and the last sequence is one token."""
    if backend.name == "reference" and head > 1000:
        pytest.skip("one token after another")
    inputs = backend.draw(head + 1, H=1, HV=1, K=16, V=16, N=2)
    bounds = torch.tensor([0, head, head + 1], device=backend.device)
    for owner, method in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
        original = getattr(owner, method)
        monkeypatch.setattr(owner, method, lambda *a, o=original, **k: filled(o(*a, **k)))
    upstream = [torch.randn_like(inputs[2]), torch.randn_like(inputs[5])]
    got = with_gradients(backend, inputs, upstream, cu_seqlens=bounds)
    alone = [*(x[:, -1:] for x in inputs[:5]), inputs[5][1:]]
    want = with_gradients(loop, [x.double() for x in alone], [upstream[0][:, -1:], upstream[1][1:]])
    assert all(x.isfinite().all() for x in got)
    tail = [x[1:] if x.shape[0] == 2 else x[:, -1:] for x in got]
    # A lone token's gate has an exact zero among its terms, and in float32 the rest is what a short sum leaves.
    assert all(relative(a, b) < 3 * backend.bound for a, b in zip(tail, want, strict=True))


def filled(x: Tensor) -> Tensor:
    return x.fill_(torch.nan) if x.is_floating_point() else x


@each_fast
def test_bug_21_another_geometry(backend: Backend) -> None:
    for K, V in ((64, 64), (128, 128), (64, 128), (32, 16), (64, 64)):
        check(backend, backend.draw(33, H=1, HV=1, K=K, V=V))


@each_fast
def test_bug_22_gates_below_the_bound(backend: Backend) -> None:
    """-50 a token, as the older gate may give: exact here, where a bounded kernel would overflow."""
    check(backend, backend.draw(40, gate=-50.0), factor=2.0)


@each_fast
@pytest.mark.parametrize("gate", (-1e4, -1e38, -torch.inf))
def test_bug_22_gates_that_forget_everything(gate: float, backend: Backend) -> None:
    inputs = backend.draw(40)
    inputs[3][:, [3, 4, 20], :, ::3] = gate
    for a, b in zip(backend(*inputs), loop(*(x.double() for x in inputs)), strict=True):
        assert relative(a, b) < 2 * backend.bound


@pytest.mark.parametrize("backend", FAST[2:])
def test_bug_23_seventy_thousand_sequences(backend: Backend) -> None:
    """Of one token each: o = s (q.k) b v."""
    n = 70_000
    q, k, v, _, beta, _ = inputs = backend.draw(n, H=1, HV=1, K=4, V=4, N=1)
    o, final = backend(*inputs[:5], cu_seqlens=torch.arange(n + 1, device=backend.device))
    assert relative(o, 0.5 * (q * k).sum(-1, keepdim=True) * beta.unsqueeze(-1) * v) < backend.bound
    assert final.shape == (n, 1, 4, 4) and final.isfinite().all()
