"""The tables behind gpu_check.py: how fast, and against what the hardware and torch's own operators can do.

Times are the median of CUDA events around one call each, after calls that compile and warm up. TFLOP/s count what the
mathematics needs, GB/s the bytes that have to move once.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from gpu_numerics import draw_kda, loss_of
from torch import Tensor

from nanok3.config import K3Config
from nanok3.kernels.gpu import fla, packed, situ_experts
from nanok3.kernels.gpu.tiles import Tile, choose, row_tiles
from nanok3.ledger import flops_per_token
from nanok3.model.decoder import K3
from nanok3.model.kda import kda_chunked
from nanok3.model.mxfp4 import quantize_mxfp4
from nanok3.model.situ import situ_glu
from nanok3.train.machine import matmul_rate
from nanok3.train.muon import K3Optimizer

if TYPE_CHECKING:
    from gpu_check import Bench


def seconds(run: Callable[[], object], device: str = "cuda", warm: int = 3, repeat: int = 7) -> float:
    """Median seconds of one call."""
    for _ in range(warm):
        run()
    taken = []
    for _ in range(repeat):
        if device == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            taken.append(start.elapsed_time(end) / 1e3)
        else:
            began = time.perf_counter()
            run()
            taken.append(time.perf_counter() - began)
    return statistics.median(taken)


# ---------------------------------------------------------------------- KDA beside softmax attention


def kda_speed(bench: Bench) -> None:
    """bfloat16, 16 heads of 128, one row of T tokens."""
    H, D = 16, 128
    for T in (1024, 4096) if bench.quick else (1024, 4096, 16384, 65536):
        inputs = [x.to(bench.device) for x in draw_kda(1, T, H, H, D, D, torch.bfloat16)]
        forms: dict[str, Callable[..., Tensor]] = {
            "fla, exact gates": lambda *x: fla.kda(*x)[0],
            "fla, bounded gates": lambda *x: fla.kda(*x, bounded=True)[0],
            "softmax attention": _softmax,
        }
        if T <= 4096:
            forms["torch chunks"] = lambda *x: kda_chunked(*x)[0]
        for name, form in forms.items():
            if bench.time_left() < 5:
                return
            leaves = [x.requires_grad_() for x in inputs]
            gradient = torch.randn_like(inputs[2])
            with torch.no_grad():
                forward = seconds(functools.partial(form, *inputs))
            both = seconds(functools.partial(_both, form, leaves, gradient))
            bench.row(
                T=T, form=name, forward_ms=forward * 1e3, forward_backward_ms=both * 1e3, ns_a_token=both / T * 1e9
            )


def _both(form: Callable[..., Tensor], leaves: list[Tensor], gradient: Tensor) -> object:
    """Forward and backward. Softmax attention uses no gates."""
    return torch.autograd.grad(form(*leaves), leaves, gradient, allow_unused=True)


def _softmax(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


# ---------------------------------------------------------------------- experts


def experts_speed(bench: Bench) -> None:
    """32 experts of 3072 x 3584 (K3's own size), bfloat16, uneven loads; forward, and forward and backward."""
    E, width, L = (8, 512, 512) if bench.quick else (32, 3072, 3584)
    weights = [torch.randn(E, *s, device=bench.device, dtype=torch.bfloat16) / s[1] ** 0.5 for s in _shapes(width, L)]
    peak = matmul_rate(torch.bfloat16, bench.device)
    for rows in (512, 8192, 65536):
        if bench.time_left() < 5:
            return
        counts = torch.bincount(torch.randint(0, E, (rows,)), minlength=E).to(bench.device)
        z = torch.randn(rows, L, device=bench.device, dtype=torch.bfloat16)
        work = 2 * 3 * rows * width * L
        for name, form in (("ours, Triton", _ours), ("torch grouped_mm", _torch_experts)):
            leaves = [x.requires_grad_() for x in (z, *weights)]
            gradient = torch.randn_like(z)
            with torch.no_grad():
                forward = seconds(functools.partial(form, *leaves, counts=counts))
            both = seconds(functools.partial(_both, functools.partial(form, counts=counts), leaves, gradient))
            bench.row(
                rows=rows,
                form=name,
                forward_ms=forward * 1e3,
                forward_tflops=work / forward / 1e12,
                both_tflops=3 * work / both / 1e12,
                of_peak=3 * work / both / peak,
            )
    _tile_sweep(bench, weights)


def _shapes(width: int, L: int) -> tuple[tuple[int, int], ...]:
    return (width, L), (L, width), (width, L)


def _ours(z: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, counts: Tensor) -> Tensor:
    return situ_experts.expert_mlp(z, w1, w2, w3, counts)


def _torch_experts(z: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, counts: Tensor) -> Tensor:
    ends = counts.cumsum(0).to(torch.int32)

    def product(x: Tensor, w: Tensor) -> Tensor:
        return F.grouped_mm(x, w.transpose(1, 2), offs=ends)

    return product(situ_glu(product(z, w1), product(z, w3)), w2)


@torch.no_grad()
def _tile_sweep(bench: Bench, weights: list[Tensor]) -> None:
    """The upward products with other tiles than the chosen one: what to change in kernels/gpu/tiles.py, if anything."""
    w1, _, w3 = weights
    (E, O, I), rows = w1.shape, 16384
    z = torch.randn(rows, I, device=bench.device, dtype=torch.bfloat16)
    counts = torch.full((E,), rows // E, device=bench.device)
    chosen = choose(rows, E, O, I, 2, widest=64)
    others = [Tile(128, 128, 64, 8, 3), Tile(64, 128, 64, 4, 3), Tile(128, 64, 64, 4, 4), Tile(64, 64, 64, 4, 4)]
    for tile in (chosen, *others):
        if bench.time_left() < 3:
            return
        tiles = row_tiles(counts, rows, tile.rows)
        try:
            taken = seconds(lambda t=tile, s=tiles: situ_experts.upward(z, w1, w3, s, t, (4.0, 25.0), False))
        except Exception as error:  # more shared memory than this card has
            bench.row(tile=str(tile), tflops=None, note=f"{type(error).__name__}")
            continue
        bench.row(tile=str(tile), tflops=2 * 2 * rows * O * I / taken / 1e12, note="chosen" if tile is chosen else "")


@torch.no_grad()
def packed_speed(bench: Bench) -> None:
    """Decoding: few rows, each for other experts; 16 experts of 3072 x 3584 in MXFP4."""
    E, width, L = (4, 512, 512) if bench.quick else (16, 3072, 3584)
    stored = [
        tuple(x.to(bench.device) for x in quantize_mxfp4(torch.randn(E, *s) / s[1] ** 0.5)) for s in _shapes(width, L)
    ]
    size = sum(x.numel() for pair in stored for x in pair)
    source = torch.empty(2**30, dtype=torch.uint8, device=bench.device)
    copy = 2 * source.numel() / seconds(source.clone)
    bench.row(rows=0, form="copy of a GiB", us=None, gb_per_s=copy / 1e9)
    for rows in (E, 4 * E, 32 * E):
        z = torch.randn(rows, L, device=bench.device, dtype=torch.bfloat16)
        counts = torch.full((E,), rows // E, device=bench.device)
        taken = seconds(lambda z=z, c=counts: packed.packed_expert_mlp(z, *stored, c))
        bench.row(rows=rows, form="ours, packed", us=taken * 1e6, gb_per_s=size / taken / 1e9)


# ---------------------------------------------------------------------- the whole model


def training_speed(bench: Bench) -> None:
    """A whole step (forward, backward, Muon) in bfloat16, and the share of the measured matmul rate."""
    cfg = K3Config.base() if bench.cuda else K3Config.tiny()
    model = K3(cfg).to(bench.device)
    model.compute_dtype = torch.bfloat16 if bench.cuda else None
    optimizer = K3Optimizer(model, lr=1e-3)
    peak = matmul_rate(torch.bfloat16 if bench.cuda else torch.float32, bench.device)
    sizes = ((8, 2048), (2, 8192), (1, 32768)) if bench.cuda and not bench.quick else ((2, 64),)
    for batch, T in sizes:
        if bench.time_left() < 10 and bench.cuda:
            return
        ids = torch.randint(0, cfg.vocab_size, (batch, T), device=bench.device)

        def step(ids: Tensor = ids) -> None:
            loss_of(model, ids).backward()
            optimizer.step()
            optimizer.zero_grad()

        taken = seconds(step, bench.device, warm=2, repeat=3)
        rate = batch * T / taken
        bench.row(
            model=f"{sum(p.numel() for p in model.parameters()) / 1e6:.0f} M",
            batch=batch,
            T=T,
            ms=taken * 1e3,
            tokens_a_second=rate,
            of_peak=rate * flops_per_token(cfg, T, training=True) / peak,
            gib=torch.cuda.max_memory_allocated() / 2**30 if bench.cuda else None,
        )


@torch.no_grad()
def decode_speed(bench: Bench) -> None:
    """One token after the other, after a prompt; every layer is launched from Python, so small batches show that."""
    cfg = K3Config.base() if bench.cuda else K3Config.tiny()
    cfg = replace(cfg, max_position_embeddings=1 << 20)
    model = K3(cfg).to(bench.device, torch.bfloat16 if bench.cuda else torch.float32).eval()
    for batch, prompt in ((1, 512), (64, 512), (1, 32768)) if bench.cuda and not bench.quick else ((1, 32), (4, 32)):
        if bench.time_left() < 5 and bench.cuda:
            return
        state = model.new_state(batch)
        ids = torch.randint(0, cfg.vocab_size, (batch, prompt), device=bench.device)
        began = time.perf_counter()
        for piece in ids.split(2048, dim=1):
            model.hidden_states(piece, state=state)
        if bench.cuda:
            torch.cuda.synchronize()
        read = time.perf_counter() - began
        taken = seconds(lambda i=ids[:, :1], s=state: model(i, state=s), bench.device, warm=3, repeat=15)
        bench.row(
            batch=batch,
            prompt=prompt,
            first_prompt_tokens_a_second=batch * prompt / read,
            ms_a_token=taken * 1e3,
            decoded_a_second=batch / taken,
        )
