"""SiTU-GLU: its formula, its bound, its limits, and the backward written by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from nanok3.config import K3Config
from nanok3.model.situ import GatedMLP, activation, situ_glu, situ_glu_reference

BETAS = [(4.0, 25.0), (4.0, None), (None, 25.0), (None, None), (1.0, 2.0)]


def draw(*shape, dtype=torch.float64, scale=5.0):
    return (scale * torch.randn(*shape, dtype=dtype)).requires_grad_(), (scale * torch.randn(*shape)).to(
        dtype
    ).requires_grad_()


def test_it_is_the_formula_of_the_report():
    g, u = (x.detach() for x in draw(50))
    expected = (4 * torch.tanh(g / 4) / (1 + torch.exp(-g))) * (25 * torch.tanh(u / 25))
    for form in (situ_glu, situ_glu_reference):
        torch.testing.assert_close(form(g, u), expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("betas", BETAS)
def test_fast_equals_the_reference_with_gradients(betas):
    g, u = draw(3, 7)
    upstream = torch.randn(3, 7, dtype=torch.float64)
    fast, slow = situ_glu(g, u, *betas), situ_glu_reference(g, u, *betas)
    assert torch.equal(fast, slow)
    for a, b in zip(torch.autograd.grad(fast, (g, u), upstream), torch.autograd.grad(slow, (g, u), upstream)):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("betas", BETAS)
def test_gradcheck(betas):
    assert torch.autograd.gradcheck(lambda g, u: situ_glu(g, u, *betas), draw(2, 5))


def test_its_size_never_exceeds_a_hundred():
    extremes = torch.tensor([-1e30, -1e4, -30.0, 0.0, 30.0, 1e4, 1e30], dtype=torch.float32)
    g, u = torch.meshgrid(extremes, extremes, indexing="ij")
    out = situ_glu(g.contiguous(), u.contiguous())
    assert torch.isfinite(out).all() and out.abs().max() <= 100
    assert out[-1, -1] == 100 and out[-1, 0] == -100 and out[0].abs().max() < 1e-6


def test_item_32_the_sigmoid_reads_the_uncapped_gate():
    """Item 32: sigmoid(g), not sigmoid(4 tanh(g / 4))."""
    g, u = torch.full((1,), -12.0, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    capped = 4 * torch.tanh(g / 4)
    right = capped * torch.sigmoid(g) * 25 * torch.tanh(u / 25)
    wrong = capped * torch.sigmoid(capped) * 25 * torch.tanh(u / 25)
    torch.testing.assert_close(situ_glu(g, u), right)
    assert (situ_glu(g, u) - wrong).abs() > 0.05


def test_near_zero_it_is_swiglu():
    g, u = (1e-4 * x.detach() for x in draw(20))
    torch.testing.assert_close(situ_glu(g, u), F.silu(g) * u, rtol=1e-7, atol=0)


def test_without_caps_it_is_swiglu():
    g, u = (x.detach() for x in draw(20))
    torch.testing.assert_close(situ_glu(g, u, None, None), F.silu(g) * u, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(situ_glu(g, u, 1e6, 1e6), F.silu(g) * u, rtol=1e-8, atol=1e-8)


def test_it_rounds_once():
    g, u = (x.detach().bfloat16() for x in draw(200, dtype=torch.float32))
    out = situ_glu(g, u)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, situ_glu_reference(g.float(), u.float()).bfloat16())


def test_gradients_in_bfloat16_come_back_in_bfloat16():
    g, u = draw(40, dtype=torch.float32)
    gb, ub = g.detach().bfloat16().requires_grad_(), u.detach().bfloat16().requires_grad_()
    dg, du = torch.autograd.grad(situ_glu(gb, ub).float().sum(), (gb, ub))
    assert dg.dtype == du.dtype == torch.bfloat16
    wide = gb.detach().double().requires_grad_(), ub.detach().double().requires_grad_()
    for a, b in zip((dg, du), torch.autograd.grad(situ_glu_reference(*wide).sum(), wide)):
        torch.testing.assert_close(a.double(), b, rtol=2**-6, atol=2**-6)


def test_gradients_at_the_extremes_are_finite():
    g = torch.tensor([-1e4, -100.0, 0.0, 100.0, 1e4], requires_grad=True)
    u = torch.tensor([1e4, -1e4, 0.0, 1e4, -1e4], requires_grad=True)
    for grad in torch.autograd.grad(situ_glu(g, u).sum(), (g, u)):
        assert torch.isfinite(grad).all()


def test_the_config_chooses_the_activation():
    g, u = (x.detach() for x in draw(30))
    cfg = K3Config.tiny()
    assert torch.equal(activation(cfg, g, u), situ_glu(g, u, 4.0, 25.0))
    silu = replace(cfg, hidden_act="silu")
    assert torch.equal(activation(silu, g, u), F.silu(g) * u)
    # the official class reads a missing gate cap as 1, and leaves the up branch uncapped
    bare = replace(cfg, activation_situ_beta=None, activation_situ_linear_beta=None)
    assert torch.equal(activation(bare, g, u), situ_glu(g, u, 1.0, None))


def test_the_mlp_is_down_of_activation_of_gate_and_up():
    cfg = K3Config.tiny()
    mlp = GatedMLP(cfg, 24).double()
    for p in mlp.parameters():
        torch.nn.init.normal_(p)
    x = torch.randn(2, 3, cfg.hidden_size, dtype=torch.float64)
    hidden = situ_glu(x @ mlp.gate_proj.weight.T, x @ mlp.up_proj.weight.T)
    torch.testing.assert_close(mlp(x), hidden @ mlp.down_proj.weight.T)
    assert [n for n, _ in mlp.named_parameters()] == ["gate_proj.weight", "up_proj.weight", "down_proj.weight"]
    swapped = situ_glu(x @ mlp.up_proj.weight.T, x @ mlp.gate_proj.weight.T) @ mlp.down_proj.weight.T
    assert (mlp(x) - swapped).abs().max() > 1
