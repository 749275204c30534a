"""The glue to fla-core against a stand-in with fla 0.6.0's signatures, which computes with our references."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from nanok3.kernels.gpu import fla
from nanok3.model.attn_res import mix_reference
from nanok3.model.kda import kda_reference

CALLS: list[tuple[str, dict]] = []


def chunk_kda(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, safe_gate=False,
    cu_seqlens=None, cu_seqlens_cpu=None,
):  # fmt: skip
    """What the real one asserts, and the reference."""
    assert initial_state is None or initial_state.dtype == torch.float32
    assert q.dtype == k.dtype == v.dtype and g.shape == (*v.shape[:3], q.shape[3]) and beta.shape == v.shape[:3]
    assert cu_seqlens is None or (cu_seqlens.dtype == torch.int64 and not cu_seqlens_cpu.is_cuda)
    CALLS.append(("chunk", {"safe_gate": safe_gate, "cu_seqlens": cu_seqlens, "cpu": cu_seqlens_cpu, "g": g}))
    return kda_reference(q, k, v, g, beta, initial_state, output_final_state, cu_seqlens, scale)


def fused_recurrent_kda(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None):
    CALLS.append(("recurrent", {}))
    o, state = kda_reference(q, k, v, g, beta, initial_state, True, cu_seqlens, scale)
    return o, state if output_final_state else None


def fused_attnres(query, residuals, rms_weight, output_rms_weight=None, rms_eps=1e-6, scale=1.0):
    assert query.shape == rms_weight.shape
    CALLS.append(("attnres", {}))
    return mix_reference(residuals, rms_weight, query[None], rms_eps)


def forget():
    fla.load.cache_clear()
    fla.available.cache_clear()
    CALLS.clear()


@pytest.fixture(autouse=True)
def clean():
    forget()
    yield
    forget()
    torch.set_float32_matmul_precision("highest")


def install(monkeypatch, version="0.6.0"):
    """A package `fla` of that version."""
    package, ops, kda, attnres = (types.ModuleType(n) for n in ("fla", "fla.ops", "fla.ops.kda", "fla.ops.attnres"))
    package.__version__ = version
    kda.chunk_kda, kda.fused_recurrent_kda, attnres.fused_attnres = chunk_kda, fused_recurrent_kda, fused_attnres
    for module in (package, ops, kda, attnres):
        monkeypatch.setitem(sys.modules, module.__name__, module)


def draw(B=1, T=5, H=1, HV=2, K=4, V=3, dtype=torch.bfloat16):
    q, k = (torch.randn(B, T, H, K).to(dtype) for _ in range(2))
    return q, k, torch.randn(B, T, HV, V).to(dtype), -torch.rand(B, T, HV, K), torch.rand(B, T, HV)


def same(got, want):
    torch.testing.assert_close(got, want)


def test_training_runs_the_chunk_kernel_with_what_the_reference_gives(monkeypatch):
    install(monkeypatch)
    inputs, state = draw(), torch.randn(1, 2, 4, 3)
    got = fla.kda(*inputs, state, True, scale=0.3, bounded=True)
    same(got, kda_reference(*inputs, state, True, scale=0.3))
    assert [(name, c["safe_gate"]) for name, c in CALLS] == [("chunk", True)]
    assert fla.kda(*inputs)[1] is None


def test_one_token_runs_the_recurrent_kernel_unless_a_gradient_is_asked_for(monkeypatch):
    install(monkeypatch)
    inputs, state = draw(T=1), torch.randn(1, 2, 4, 3)
    same(fla.kda(*inputs, state, True), kda_reference(*inputs, state, True))
    fla.kda(*inputs, state.requires_grad_(), True)
    with torch.no_grad():
        fla.kda(*inputs, state, True)
    assert [name for name, _ in CALLS] == ["recurrent", "chunk", "recurrent"]


def test_packed_rows_hand_over_the_same_boundaries_to_every_layer(monkeypatch):
    """By their identity fla knows its plans again; a tensor written into since must not be mistaken for the old one."""
    install(monkeypatch)
    inputs, cu_seqlens = draw(T=6), torch.tensor([0, 2, 6], dtype=torch.int32)
    for _layer in range(2):
        same(fla.kda(*inputs, cu_seqlens=cu_seqlens), kda_reference(*inputs, cu_seqlens=cu_seqlens))
    first, second = (c for _, c in CALLS)
    assert first["cu_seqlens"] is second["cu_seqlens"] and first["cpu"] is second["cpu"]
    cu_seqlens[1] = 3
    same(fla.kda(*inputs, cu_seqlens=cu_seqlens), kda_reference(*inputs, cu_seqlens=cu_seqlens))
    with torch.inference_mode():
        fla.kda(*inputs, cu_seqlens=torch.tensor([0, 6]))


def test_types_are_brought_together(monkeypatch):
    install(monkeypatch)
    q, k, v, g, beta = draw()
    o, state = fla.kda(
        q.float(), k, v, g.bfloat16(), beta, torch.zeros(1, 2, 4, 3, dtype=torch.float64), True, tf32=True
    )
    assert o.dtype == v.dtype and state.dtype == torch.float32
    assert CALLS[0][1]["g"].dtype == torch.float32


def test_float32_is_not_multiplied_in_tf32_unasked(monkeypatch):
    install(monkeypatch)
    inputs = draw(dtype=torch.float32)
    assert fla.kda(*inputs) is NotImplemented
    assert fla.kda(*inputs, tf32=True) is not NotImplemented
    torch.set_float32_matmul_precision("high")
    assert fla.kda(*inputs) is not NotImplemented
    torch.set_float32_matmul_precision("highest")
    with torch.no_grad():  # the step for one token has no product in it
        assert fla.kda(*draw(T=1, dtype=torch.float32)) is not NotImplemented


def test_what_fla_does_not_take_is_left_to_torch(monkeypatch):
    install(monkeypatch)
    assert fla.kda(*(x.double() for x in draw())) is NotImplemented
    assert fla.kda(*draw(T=0)) is NotImplemented
    assert fla.kda(*draw(K=257)) is NotImplemented
    assert not CALLS


@pytest.mark.parametrize("version,named", [("0.5.2", "fla-core is 0.5.2; it must be at least 0.6.0"), ("", "at least")])
def test_an_old_version_is_named_and_not_used(monkeypatch, caplog, version, named):
    install(monkeypatch, version)
    assert named in fla.load()
    assert fla.kda(*draw()) is NotImplemented and fla.kda(*draw()) is NotImplemented
    assert [named in record.message for record in caplog.records] == [True]  # said once


@pytest.mark.parametrize("version", ["0.6.0", "0.6.0rc1", "0.10.2", "1.0", "2"])
def test_newer_versions_are_used(monkeypatch, version):
    install(monkeypatch, version)
    assert fla.available() == (version != "2" or fla._numbers("2") >= fla.OLDEST)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "fla", None)
    assert "pip install 'nanok3[gpu]'" in fla.load()
    assert not fla.available()


def test_depth_sources_go_to_the_fused_kernel(monkeypatch):
    install(monkeypatch)
    values, norm, query = [torch.randn(1, 3, 16) for _ in range(4)], torch.rand(16), torch.randn(1, 16)
    same(fla.mix(values, norm, query, 1e-5), mix_reference(values, norm, query, 1e-5))
    assert [name for name, _ in CALLS] == ["attnres"]


def test_sources_that_the_kernel_would_misread_are_left_to_torch(monkeypatch):
    install(monkeypatch)
    norm, query = torch.rand(16), torch.randn(1, 16)
    good = torch.randn(1, 3, 16)
    shifted = torch.randn(49)[1:].view(1, 3, 16)  # 4 bytes off a boundary of 16
    for sources in (
        [good.double()],
        [good, good.bfloat16()],
        [good, shifted],
        [good[..., :15]],
        [good] * 33,
        [good[:, :0]],
    ):
        assert fla.mix(sources, norm[: sources[0].shape[-1]], query[:, : sources[0].shape[-1]], 1e-5) is NotImplemented
    assert not CALLS
