"""The delta rule with a decay per channel: the chunked form against the loop, and the laws both obey."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from nanok3.config import K3Config
from nanok3.model import kda as kda_module
from nanok3.model.cache import KDAState
from nanok3.model.kda import KDA, OutputNorm, kda, kda_chunked, kda_reference, l2_normalize, log_decay
from nanok3.model.short_conv import short_conv_reference

LENGTHS = [1, 2, 15, 16, 17, 63, 64, 65, 130]
FORMS = {"reference": kda_reference, "torch": kda_chunked}
GATES = ["random", "wild", "floor", "zero", "softplus"]

# Relative L2 errors against the float64 loop: 3e-7..1.3e-6 in float32 for 16-token chunks, and 3.7e-3 with bfloat16
# inputs (the rounding of the inputs themselves). The gate's gradient stays at 2e-7 with g = -5 throughout, where forms
# that subtract the diagonal afterwards measure 4e-5. Unbounded gates sum up to -800 in a chunk, whose own rounding
# costs more: 2e-6..6e-6.
FLOAT32_BAND, FLOAT32_FLOOR_BAND, FLOAT32_UNBOUNDED_BAND = 3e-6, 6e-7, 1.5e-5
BFLOAT16_BAND = 8e-3


def gates(kind, *shape):
    if kind == "random":
        return -5 * torch.sigmoid(2 * torch.randn(*shape, dtype=torch.float64))
    if kind == "wild":
        return torch.where(torch.rand(*shape) < 0.5, -4.999, -0.01 * torch.rand(*shape, dtype=torch.float64))
    if kind == "floor":
        return torch.full(shape, -5.0, dtype=torch.float64)
    if kind == "zero":
        return torch.zeros(shape, dtype=torch.float64)
    return -50 * torch.rand(*shape, dtype=torch.float64) ** 4  # unbounded, down to -50


def draw(tokens, batch=1, heads=2, value_heads=None, K=8, V=5, gate="random", dtype=torch.float64, sequences=None):
    """(q, k, v, log_decay, beta, initial_state)."""
    HV = value_heads or heads
    q, k = (F.normalize(torch.randn(batch, tokens, heads, K, dtype=torch.float64), dim=-1) for _ in range(2))
    v = torch.randn(batch, tokens, HV, V, dtype=torch.float64)
    beta = torch.sigmoid(torch.randn(batch, tokens, HV, dtype=torch.float64))
    state = torch.randn(sequences or batch, HV, K, V, dtype=torch.float64)
    return [x.to(dtype) for x in (q, k, v, gates(gate, batch, tokens, HV, K), beta, state)]


def with_gradients(form, inputs, upstream, **options):
    """Output, final state and the gradient of every input."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    o, final = form(*leaves, True, **options)
    loss = (o * upstream[0]).sum() + (final * upstream[1]).sum()
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)  # nothing reads the inputs of an empty sequence
    return [o.detach(), final.detach(), *(torch.zeros_like(x) if d is None else d for d, x in zip(grads, leaves))]


NAMES = ["o", "final state", "dq", "dk", "dv", "dlog_decay", "dbeta", "dinitial_state"]


def assert_same(got, wanted, tolerance):
    for name, a, b in zip(NAMES, got, wanted, strict=True):
        scale = max(b.abs().max().item(), 1.0)
        assert (a - b).abs().max().item() <= tolerance * scale, name


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


# ------------------------------------------------------------------ equal


@pytest.mark.parametrize("tokens", [*LENGTHS, 3, 4, 129])
def test_item_12_chunks_equal_the_loop(tokens):
    """Item 12: chunk path == recurrent path, values and all gradients; K != V, two value heads a key head, state in
    and out."""
    inputs = draw(tokens, batch=2, heads=2, value_heads=4, K=6, V=9)
    upstream = torch.randn_like(inputs[2]), torch.randn_like(inputs[5])
    assert_same(with_gradients(kda_chunked, inputs, upstream), with_gradients(kda_reference, inputs, upstream), 1e-12)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("tokens", [17, 64, 130])
def test_item_14_every_gate(gate, tokens):
    """Item 14: g = -5 for 64 tokens and more (G = -320), 0 throughout, and unbounded gates: no inf, no NaN."""
    inputs = draw(tokens, heads=3, K=7, V=4, gate=gate)
    upstream = torch.randn_like(inputs[2]), torch.randn_like(inputs[5])
    got = with_gradients(kda_chunked, inputs, upstream)
    assert all(torch.isfinite(x).all() for x in got)
    assert_same(got, with_gradients(kda_reference, inputs, upstream), 1e-11)


@pytest.mark.parametrize("tokens", [1, 16, 65])
def test_without_a_state_it_starts_from_zero(tokens):
    q, k, v, g, b, state = draw(tokens, batch=2)
    for form in FORMS.values():
        o, final = form(q, k, v, g, b)
        assert final is None
        zero, after = form(q, k, v, g, b, torch.zeros_like(state), True)
        assert torch.equal(o, zero) and after.shape == state.shape


def test_the_scale_multiplies_what_is_read():
    q, k, v, g, b, state = draw(40)
    for form in FORMS.values():
        usual, _ = form(q, k, v, g, b, state)
        torch.testing.assert_close(form(q, k, v, g, b, state, scale=1.0)[0] * 8**-0.5, usual, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_nothing_in_nothing_out(form):
    q, k, v, g, b, state = draw(0)
    o, final = form(q, k, v, g, b, state, True)
    assert o.shape == v.shape and torch.equal(final, state)


def test_gradcheck():
    inputs = [x.requires_grad_() for x in draw(20, heads=1, K=2, V=3)]
    assert torch.autograd.gradcheck(lambda *x: kda_chunked(*x, True), inputs)


def test_gradients_flow_where_they_are_wanted_only():
    q, k, v, g, b, state = draw(33)
    v.requires_grad_()
    o, _ = kda_chunked(q, k, v, g, b, state)
    (dv,) = torch.autograd.grad(o.sum(), v)
    assert dv.shape == v.shape and not q.requires_grad


def test_the_same_run_gives_the_same_bits():
    inputs = draw(100, batch=2, dtype=torch.float32)
    first = kda_chunked(*inputs, True)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, kda_chunked(*inputs, True)))


# ------------------------------------------------------------------ the four verbs


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_item_11_retain_compare_write_read(form):
    """Item 11: the decay comes first, the error is that of the decayed state, and the read comes after the write."""
    S0 = torch.tensor([[2.0, 4.0], [6.0, 8.0]], dtype=torch.float64)[None, None]
    k = torch.tensor([0.6, 0.8], dtype=torch.float64)[None, None, None]
    q = torch.tensor([0.8, 0.6], dtype=torch.float64)[None, None, None]
    v = torch.tensor([1.0, -3.0], dtype=torch.float64)[None, None, None]
    alpha = torch.tensor([0.5, 0.9], dtype=torch.float64)
    beta = torch.full((1, 1, 1), 0.25, dtype=torch.float64)
    o, S = form(q, k, v, alpha.log()[None, None, None], beta, S0, True)
    retained = alpha[:, None] * S0[0, 0]
    error = v[0, 0, 0] - retained.T @ k[0, 0, 0]
    written = retained + 0.25 * torch.outer(k[0, 0, 0], error)
    torch.testing.assert_close(S[0, 0], written, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(o[0, 0, 0], 2**-0.5 * written.T @ q[0, 0, 0], rtol=1e-13, atol=1e-13)
    # and each mistake would be seen
    undecayed = retained + 0.25 * torch.outer(k[0, 0, 0], v[0, 0, 0] - S0[0, 0].T @ k[0, 0, 0])
    for wrong in (2**-0.5 * retained.T @ q[0, 0, 0], 2**-0.5 * S0[0, 0].T @ q[0, 0, 0]):
        assert (wrong - o[0, 0, 0]).abs().max() > 0.1
    assert (undecayed - S[0, 0]).abs().max() > 0.1


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_full_write_is_read_back(form):
    _, k, v, g, b, state = draw(1)
    o, _ = form(k, k, v, g, torch.ones_like(b), state, scale=1.0)
    torch.testing.assert_close(o, v, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_without_writing_and_forgetting_the_state_stays(form):
    q, k, v, g, b, state = draw(70)
    _, final = form(q, k, v, torch.zeros_like(g), torch.zeros_like(b), state, True)
    torch.testing.assert_close(final, state, rtol=0, atol=1e-14)


def test_one_token_from_nothing_does_not_depend_on_its_decay():
    """The diagonal has no decay in it: its gradient is exactly zero, not a difference of two large numbers."""
    q, k, v, g, b, _ = draw(1, gate="floor", dtype=torch.float32)
    g.requires_grad_()
    o, _ = kda_chunked(q, k, v, g, b)
    (dg,) = torch.autograd.grad(o.sum(), g)
    assert dg.abs().max() == 0


# ------------------------------------------------------------------ packed documents and neighbours

BOUNDS = [[0, 70], [0, 1, 70], [0, 69, 70], [0, 16, 32, 70], [0, 0, 17, 17, 18, 50, 70, 70], [0, 1, 2, 3, 70]]


@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_item_12_packed_equals_separate(form, bounds):
    """Item 12: sequences of length 0 and 1 inside a packed row, values, states and gradients."""
    n = len(bounds) - 1
    inputs = draw(70, sequences=n, value_heads=4)
    upstream = torch.randn_like(inputs[2]), torch.randn_like(inputs[5])
    packed = with_gradients(form, inputs, upstream, cu_seqlens=torch.tensor(bounds))
    parts = []
    for i, (a, b) in enumerate(zip(bounds, bounds[1:])):
        own = [x[:, a:b] for x in inputs[:5]] + [inputs[5][i : i + 1]]
        parts.append(with_gradients(kda_reference, own, (upstream[0][:, a:b], upstream[1][i : i + 1])))
    dims = [1, 0, 1, 1, 1, 1, 1, 0]
    joined = [torch.cat([part[j] for part in parts], dim=dim) for j, dim in enumerate(dims)]
    assert_same(packed, joined, 1e-12)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("which", range(5))
def test_a_nan_stays_in_its_document(form, which):
    bounds = [0, 20, 37, 70]
    inputs = draw(70, sequences=3)
    cu = torch.tensor(bounds)
    clean = form(*inputs, True, cu_seqlens=cu)
    inputs[which][:, 20:37] = torch.nan
    o, final = form(*inputs, True, cu_seqlens=cu)
    for a, b in ((0, 20), (37, 70)):
        assert torch.equal(o[:, a:b], clean[0][:, a:b])
    assert torch.equal(final[[0, 2]], clean[1][[0, 2]])
    assert o[:, 20:37].isnan().any()


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_nan_in_one_row_stays_there(form):
    inputs = draw(33, batch=3)
    clean = form(*inputs, True)
    for x in inputs:
        x[1] = torch.nan
    o, final = form(*inputs, True)
    assert torch.equal(o[[0, 2]], clean[0][[0, 2]]) and torch.equal(final[[0, 2]], clean[1][[0, 2]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tokens", [1, 16, 37, 65])
@pytest.mark.parametrize("backend", ["reference", "torch", "auto"])
def test_memory_around_the_inputs_is_never_read(backend, tokens, dtype):
    """Views into poisoned storage, transposed and offset, with gradients."""
    inputs = draw(tokens, batch=2, dtype=dtype)

    def in_poison(x):
        room = torch.full([n + 2 for n in x.shape[::-1]], torch.nan, dtype=dtype)
        view = room.permute(*range(room.dim() - 1, -1, -1))[tuple(slice(1, -1) for _ in x.shape)]
        view.copy_(x)
        assert not view.is_contiguous() or x.numel() == 1
        return view

    upstream = torch.randn_like(inputs[2]), torch.randn_like(inputs[5])
    options = {"backend": backend}
    clean = with_gradients(kda, inputs, upstream, **options)
    views = [in_poison(x).requires_grad_() for x in inputs]
    o, final = kda(*views, True, **options)
    loss = (o * in_poison(upstream[0])).sum() + (final * in_poison(upstream[1])).sum()
    got = [o, final, *torch.autograd.grad(loss, views)]
    assert_same(got, clean, 1e-12 if dtype == torch.float64 else 1e-5)


# ------------------------------------------------------------------ what comes later changes nothing before


FORMS_AND_DTYPES = [("torch", torch.float32), ("torch", torch.float64), ("auto", torch.float32)]


@pytest.mark.parametrize(("backend", "dtype"), FORMS_AND_DTYPES)
@pytest.mark.parametrize("gate", ["random", "floor", "wild"])
@pytest.mark.parametrize("t", [1, 7, 16, 20, 48, 63])
def test_prefix_invariance_bit_for_bit(t, gate, backend, dtype):
    q, k, v, g, b, state = draw(64, batch=2, gate=gate, dtype=dtype)
    before, _ = kda(q, k, v, g, b, state, backend=backend)
    others = draw(64, batch=2, gate="wild", dtype=dtype)
    changed = [torch.cat((x[:, :t], y[:, t:]), dim=1) for x, y in zip((q, k, v, g, b), others)]
    after, _ = kda(*changed, state, backend=backend)
    assert torch.equal(after[:, :t], before[:, :t])
    assert not torch.equal(after[:, t:], before[:, t:])


@pytest.mark.parametrize(("backend", "dtype"), FORMS_AND_DTYPES)
@pytest.mark.parametrize("t", [1, 15, 16, 17, 40, 64])
def test_appending_tokens_changes_no_bit(t, backend, dtype):
    q, k, v, g, b, state = draw(100, dtype=dtype)
    whole, _ = kda(q, k, v, g, b, state, backend=backend)
    prefix, _ = kda(q[:, :t], k[:, :t], v[:, :t], g[:, :t], b[:, :t], state, backend=backend)
    assert torch.equal(whole[:, :t], prefix)


@pytest.mark.parametrize(("backend", "dtype"), FORMS_AND_DTYPES)
def test_a_later_gate_below_the_bound_changes_rounding_at_most(backend, dtype):
    """An unbounded gate sends the whole row through exact differences, so bits may change before it, values not."""
    q, k, v, g, b, state = draw(64, dtype=dtype)
    before, _ = kda(q, k, v, g, b, state, backend=backend)
    g[:, 40:] -= 20
    after, _ = kda(q, k, v, g, b, state, backend=backend)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(after[:, :40], before[:, :40], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_split_anywhere(form):
    q, k, v, g, b, state = draw(41, batch=2)
    whole, end = kda_reference(q, k, v, g, b, state, True)
    for t in range(42):
        o1, middle = form(q[:, :t], k[:, :t], v[:, :t], g[:, :t], b[:, :t], state, True)
        o2, final = form(q[:, t:], k[:, t:], v[:, t:], g[:, t:], b[:, t:], middle, True)
        torch.testing.assert_close(torch.cat((o1, o2), dim=1), whole, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(final, end, rtol=1e-12, atol=1e-12)


# ------------------------------------------------------------------ algebra


def span(inputs, a, b):
    """The affine map of tokens [a, b): S_out = Phi S_in + Psi, read off from two runs."""
    q, k, v, g, beta = (x[:, a:b] for x in inputs[:5])
    K, V = k.shape[-1], v.shape[-1]
    heads = v.shape[2]
    eye = torch.eye(K, dtype=v.dtype).expand(1, heads, K, K)
    _, phi = kda_chunked(q, k, v.new_zeros(1, b - a, heads, K), g, beta, eye, True)
    _, psi = kda_chunked(q, k, v, g, beta, v.new_zeros(1, heads, K, V), True)
    return phi, psi


def then(first, second):
    return second[0] @ first[0], second[0] @ first[1] + second[1]


def test_a_span_of_tokens_is_an_affine_map_and_composition_is_associative():
    inputs = draw(90, K=6, V=4, gate="random")
    state = inputs[5]
    _, final = kda_reference(*inputs, True)
    whole = span(inputs, 0, 90)
    torch.testing.assert_close(whole[0] @ state + whole[1], final, rtol=1e-11, atol=1e-12)
    a, b, c = span(inputs, 0, 17), span(inputs, 17, 50), span(inputs, 50, 90)
    left, right = then(then(a, b), c), then(a, then(b, c))
    for x, y, z in zip(left, right, whole):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(x, z, rtol=1e-11, atol=1e-12)
    nothing = span(inputs, 17, 17)
    assert torch.equal(nothing[0][0, 0], torch.eye(6, dtype=torch.float64)) and nothing[1].abs().max() == 0


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_permuting_heads_permutes_outputs(form):
    inputs = draw(37, heads=5)
    o, final = form(*inputs, True)
    order = torch.tensor([3, 0, 4, 1, 2])
    permuted = [x[:, :, order] for x in inputs[:5]] + [inputs[5][:, order]]
    o2, final2 = form(*permuted, True)
    assert torch.equal(o2, o[:, :, order]) and torch.equal(final2, final[:, order])


def test_grouped_value_heads_share_consecutive_key_heads():
    q, k, v, g, b, state = draw(20, heads=2, value_heads=6)
    wide = [x.repeat_interleave(3, dim=2) for x in (q, k)]
    for form in FORMS.values():
        torch.testing.assert_close(form(q, k, v, g, b, state)[0], form(*wide, v, g, b, state)[0], rtol=0, atol=0)


# ------------------------------------------------------------------ precision


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_float32_stays_in_its_band(gate, backend):
    inputs = draw(256, heads=2, K=32, V=32, gate=gate, dtype=torch.float32)
    wide = [x.double() for x in inputs]
    upstream = torch.randn_like(inputs[2]), torch.randn_like(inputs[5])
    exact = with_gradients(kda_reference, wide, [x.double() for x in upstream])
    got = with_gradients(kda, inputs, upstream, backend=backend)
    for name, a, b in zip(NAMES, got, exact):
        band = {"floor": FLOAT32_FLOOR_BAND, "softplus": FLOAT32_UNBOUNDED_BAND}.get(gate, FLOAT32_BAND)
        assert a.dtype == torch.float32
        assert relative(a, b) < band, name


@pytest.mark.parametrize("backend", ["reference", "torch", "auto"])
def test_bfloat16_inputs_stay_in_their_band(backend):
    wide = draw(200, K=32, V=32)
    inputs = [x.bfloat16() if i in (0, 1, 2) else x.float() for i, x in enumerate(wide)]
    exact, end = kda_reference(*wide, True)
    o, final = kda(*inputs, True, backend=backend)
    assert o.dtype == torch.bfloat16 and final.dtype == torch.float32
    assert relative(o, exact) < BFLOAT16_BAND and relative(final, end) < BFLOAT16_BAND


@pytest.mark.parametrize("noise", [0.0, 1e-3, 0.1, 0.3])
@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_item_13_nearly_collinear_keys(backend, noise):
    """Item 13: repeated tokens, beta near 1, almost no forgetting. Power-series inverses lose everything here;
    substitution stays at 1e-6."""
    q, _, v, g, b, state = draw(64, K=32, V=16)
    k = F.normalize(torch.randn(1, 1, 2, 32, dtype=torch.float64) + noise * torch.randn(1, 64, 2, 32), dim=-1)
    inputs = q, k, v, torch.full_like(g, -0.001), 0.9 + 0.1 * b, state
    exact, end = kda_reference(*inputs, True)
    o, final = kda(*[x.float() for x in inputs], True, backend=backend)
    assert relative(o, exact) < 5e-6 and relative(final, end) < 5e-6


def test_item_13_is_hard_for_a_power_series():
    """The same keys through a truncated series, to know that the test above can fail."""
    k = F.normalize(torch.randn(1, 32) + 1e-3 * torch.randn(64, 32), dim=-1)
    L = (0.95 * k @ k.T).tril(-1)
    series, power = torch.eye(64), torch.eye(64)
    for _ in range(63):
        power = -power @ L
        series = series + power
    exact = torch.linalg.inv(torch.eye(64, dtype=torch.float64) + L.double())
    assert relative(series, exact) > 1.0


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_the_state_is_float32_whatever_comes_in(low):
    inputs = [x.to(low) for x in draw(20)]
    for form in FORMS.values():
        o, final = form(*inputs[:5], inputs[5].float(), True)
        assert o.dtype == low and final.dtype == torch.float32


# ------------------------------------------------------------------ which form runs


def test_a_named_backend_that_cannot_run_is_an_error(unchecked):
    inputs = draw(5)
    with pytest.raises(ValueError, match="backend is 'gpu'; allowed: 'auto', 'reference', 'torch', 'cpu', 'fla'"):
        kda(*inputs, backend="gpu")
    for backend in ("cpu", "fla"):
        with pytest.raises(ValueError, match=f"backend '{backend}' is not available for torch.float64 inputs on cpu"):
            kda(*inputs, backend=backend)


def test_auto_takes_the_chunks_where_the_compiled_form_does_not_apply(monkeypatch):
    seen = []
    monkeypatch.setattr(kda_module, "kda_chunked", lambda *a: seen.append(a) or kda_chunked(*a))
    inputs = draw(5)
    assert torch.equal(kda(*inputs)[0], kda_chunked(*inputs)[0]) and len(seen) == 1


@pytest.mark.parametrize(("sizes", "named"), [({"heads": 0}, "q"), ({"K": 0}, "q"), ({"V": 0}, "v")])
def test_heads_and_widths_of_nothing_are_refused(sizes, named, unchecked):
    H, K, V = (sizes.get(name, size) for name, size in (("heads", 2), ("K", 8), ("V", 5)))
    q, v = torch.zeros(1, 3, H, K), torch.zeros(1, 3, H, V)
    for backend in ("reference", "torch", "auto"):
        with pytest.raises(ValueError, match=rf"{named} has shape \(1, 3, .*must be at least 1"):
            kda(q, q, v, q, q[..., 0] if K else torch.zeros(1, 3, H), backend=backend)


def test_misfitting_inputs_are_named(unchecked):
    q, k, v, g, b, state = draw(6, batch=2, heads=2, value_heads=4)
    for backend in ("reference", "torch", "auto"):
        with pytest.raises(ValueError, match=r"k has shape \(2, 5, 2, 8\); with q \(2, 6, 2, 8\) it must be"):
            kda(q, k[:, :5], v, g, b, backend=backend)
        with pytest.raises(ValueError, match=r"log_decay has shape \(2, 6, 4\)"):
            kda(q, k, v, g[..., 0], b, backend=backend)
        with pytest.raises(ValueError, match=r"beta has shape \(2, 6, 2\)"):
            kda(q, k, v, g, b[:, :, :2], backend=backend)
        with pytest.raises(ValueError, match=r"initial_state has shape \(2, 4, 5, 8\).*it must be \(2, 4, 8, 5\)"):
            kda(q, k, v, g, b, state.mT, backend=backend)
        with pytest.raises(ValueError, match="v has 3 heads; that must be a multiple of the 2 heads of q and k"):
            kda(q, k, v[:, :, :3], g[:, :, :3], b[:, :, :3], backend=backend)
        with pytest.raises(ValueError, match=r"initial_state is torch\.bfloat16; it must be float32 or float64"):
            kda(q, k, v, g, b, state.bfloat16(), backend=backend)
        with pytest.raises(ValueError, match="the batch holds 2; flatten it to 1 first"):
            kda(q, k, v, g, b, cu_seqlens=torch.tensor([0, 6]), backend=backend)
        with pytest.raises(ValueError, match="cu_seqlens must rise from 0 to the row's 6 tokens"):
            kda(q[:1], k[:1], v[:1], g[:1], b[:1], cu_seqlens=torch.tensor([0, 5]), backend=backend)


# ------------------------------------------------------------------ the gates


def test_item_10_the_epsilon_is_added_to_the_sum():
    """Item 10: at magnitude 1e-3 an epsilon on the mean (128 times larger) is wrong by a third."""
    x = 1e-3 * F.normalize(torch.randn(50, 128, dtype=torch.float64), dim=-1) * 2**0.5
    right = x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(l2_normalize(x), right, rtol=1e-13, atol=0)
    on_the_mean = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * 128**-0.5
    assert relative(on_the_mean, right) > 0.33
    assert torch.equal(l2_normalize(torch.zeros(2, 4)), torch.zeros(2, 4))
    assert l2_normalize(torch.randn(2, 4).bfloat16()).dtype == torch.bfloat16


def test_item_09_the_bounded_gate_is_a_sigmoid_not_a_clamp():
    """Item 9: -5 sigmoid(e^A (z + b)), against the clamped softplus that some ports used."""
    z, A, bias = torch.randn(2, 3, 4, 5, dtype=torch.float64), torch.randn(4).double(), torch.randn(20).double()
    g = log_decay(z, A, bias, -5.0)
    shifted = z + bias.view(4, 5)
    torch.testing.assert_close(g, -5 * torch.sigmoid(A.exp()[:, None] * shifted), rtol=1e-13, atol=0)
    clamped = (-A.exp()[:, None] * F.softplus(shifted)).clamp(min=-5)
    assert (g - clamped).abs().max() > 0.5
    assert g.min() > -5 and g.max() < 0


def test_without_a_bound_the_gate_is_the_older_softplus():
    z, A, bias = torch.randn(2, 3, 4, 5, dtype=torch.float64), torch.randn(4).double(), torch.randn(20).double()
    expected = -A.exp()[:, None] * F.softplus(z + bias.view(4, 5))
    torch.testing.assert_close(log_decay(z, A, bias, None), expected, rtol=1e-13, atol=0)


def test_item_01_a_log_is_one_number_a_head():
    """Item 1: used per channel instead, the decay is another one (heads = channels here, so that both fit)."""
    z, A, bias = torch.randn(1, 3, 4, 4, dtype=torch.float64), torch.randn(4).double(), torch.zeros(16).double()
    g = log_decay(z, A, bias, -5.0)
    for h in range(4):
        torch.testing.assert_close(g[:, :, h], -5 * torch.sigmoid(A[h].exp() * z[:, :, h]))
    per_channel = -5 * torch.sigmoid(A.exp() * z)
    assert (g - per_channel).abs().max() > 0.1


@pytest.mark.parametrize("bound", [-5.0, None])
def test_saturated_gates_have_finite_gradients(bound):
    z = torch.tensor([-50.0, 0.0, 50.0]).view(1, 3, 1, 1).requires_grad_()
    A, bias = torch.tensor([100.0], requires_grad=True), torch.zeros(1, requires_grad=True)
    g = log_decay(z, A, bias, bound)
    for grad in torch.autograd.grad(g.clamp(min=-1e30).sum(), (z, A, bias)):
        assert torch.isfinite(grad).all()
    if bound is not None:
        assert torch.equal(g.flatten(), torch.tensor([0.0, -2.5, -5.0]))


def test_gates_are_float32_under_bfloat16():
    z = torch.randn(1, 2, 3, 4).bfloat16()
    assert log_decay(z, torch.zeros(3), torch.zeros(12), -5.0).dtype == torch.float32


# ------------------------------------------------------------------ the layer


def layer(**changes):
    cfg = replace(K3Config.tiny(), **changes)
    module = KDA(cfg).double()
    for p in module.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return cfg, module


@pytest.mark.parametrize("full_rank", [True, False])
def test_the_layer_is_architecture_3_2(full_rank):
    cfg, module = layer(use_full_rank_gate=full_rank, gate_lower_bound=-5.0 if full_rank else None)
    H, K = cfg.kda_num_heads, cfg.kda_head_dim
    x = torch.randn(2, 9, cfg.hidden_size, dtype=torch.float64)
    w = dict(module.named_parameters())

    def heads(y):
        return y.view(2, 9, H, K)

    q, k, v = (
        heads(short_conv_reference(x @ w[f"{n}_proj.weight"].T, w[f"{n}_conv1d.weight"])) for n in ("q", "k", "v")
    )
    q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    z = heads(x @ w["f_a_proj.weight"].T @ w["f_b_proj.weight"].T) + w["dt_bias"].view(H, K)
    rate = w["A_log"].exp()[:, None]
    g = -5 * torch.sigmoid(rate * z) if full_rank else -rate * F.softplus(z)
    beta = torch.sigmoid(x @ w["b_proj.weight"].T)
    o, _ = kda_reference(q, k, v, g, beta)
    gate = x @ w["g_proj.weight"].T if full_rank else x @ w["g_a_proj.weight"].T @ w["g_b_proj.weight"].T
    normed = o / (o.square().mean(-1, keepdim=True) + cfg.rms_norm_eps).sqrt() * w["o_norm.weight"]
    expected = (normed * torch.sigmoid(heads(gate))).flatten(2) @ w["o_proj.weight"].T
    torch.testing.assert_close(module(x), expected, rtol=1e-11, atol=1e-11)


def test_item_19_the_output_gate_is_a_sigmoid_after_norm_and_weight():
    """Item 19: not silu, and after the norm with its weight; all in float32, rounded once."""
    norm = OutputNorm(8, 1e-5)
    torch.nn.init.normal_(norm.weight)
    o, gate = torch.randn(1, 5, 2, 8).bfloat16(), torch.randn(1, 5, 2, 8).bfloat16()
    wide = o.float() * torch.rsqrt(o.float().square().mean(-1, keepdim=True) + 1e-5) * norm.weight
    right = (wide * torch.sigmoid(gate.float())).bfloat16()
    assert torch.equal(norm(o, gate), right)
    gated_first = o.float() * torch.sigmoid(gate.float())
    gated_first = gated_first * torch.rsqrt(gated_first.square().mean(-1, keepdim=True) + 1e-5) * norm.weight
    for wrong in (wide * F.silu(gate.float()), gated_first):
        assert (norm(o, gate).float() - wrong).abs().max() > 0.1


def fresh(cfg, batch=2):
    H, K = cfg.kda_num_heads, cfg.kda_head_dim
    conv = torch.zeros(batch, 3, cfg.short_conv_kernel_size - 1, H * K, dtype=torch.float64)
    return KDAState(conv, torch.zeros(batch, H, K, K, dtype=torch.float64))


@pytest.mark.parametrize("taps", [1, 2, 4])
@pytest.mark.parametrize("cuts", [[1], [2, 3], [16], [3, 4, 5, 30], [*range(1, 33)]])
def test_item_15_the_layer_reads_on_from_its_state(cuts, taps):
    """Item 15: calls shorter than three tokens included."""
    cfg, module = layer(short_conv_kernel_size=taps)
    x = torch.randn(2, 33, cfg.hidden_size, dtype=torch.float64)
    cache = fresh(cfg)
    parts = [module(x[:, a:b], None, cache) for a, b in zip([0, *cuts], [*cuts, 33])]
    torch.testing.assert_close(torch.cat(parts, dim=1), module(x), rtol=1e-11, atol=1e-12)
    whole = fresh(cfg)
    module(x, None, whole)
    torch.testing.assert_close(cache.recurrent, whole.recurrent, rtol=1e-11, atol=1e-12)
    assert torch.equal(cache.conv, whole.conv) or relative(cache.conv, whole.conv) < 1e-12
    assert cache.conv.shape == fresh(cfg).conv.shape


def test_the_layer_keeps_packed_documents_apart():
    cfg, module = layer()
    x = torch.randn(1, 40, cfg.hidden_size, dtype=torch.float64)
    bounds = [0, 1, 18, 18, 40]
    packed = module(x, torch.tensor(bounds))
    alone = [module(x[:, a:b]) for a, b in zip(bounds, bounds[1:]) if b > a]
    torch.testing.assert_close(packed, torch.cat(alone, dim=1), rtol=1e-11, atol=1e-12)


def test_a_call_never_writes_into_the_state_it_was_given():
    cfg, module = layer()
    cache = fresh(cfg)
    conv, recurrent = cache.conv, cache.recurrent
    before = conv.clone(), recurrent.clone()
    module(torch.randn(2, 7, cfg.hidden_size, dtype=torch.float64), None, cache)
    assert torch.equal(conv, before[0]) and torch.equal(recurrent, before[1])
    assert cache.recurrent is not recurrent


def test_gates_start_as_the_report_says():
    _, module = layer()
    module.reset_gates()
    assert torch.equal(module.A_log, torch.zeros_like(module.A_log)), "A_log = 0 with the bounded gate"
    step = F.softplus(module.dt_bias)
    assert step.min() >= 0.999e-3 and step.max() <= 0.1001
    assert step.log().std() > 0.5, "log-uniform, not all the same"
    _, older = layer(gate_lower_bound=None)
    older.reset_gates()
    assert older.A_log.exp().min() >= 1 and older.A_log.exp().max() <= 16
