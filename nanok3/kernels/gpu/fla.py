"""KDA and attention residuals by fla-core's Triton kernels (>= 0.6.0, the first whose gates keep a prefix unchanged).

The package is imported when it is first asked for: it loads Triton and looks for a GPU. Its operators take our layouts
as they are, (B, T, H, K) with the state as (n, HV, K, V) in float32; what differs is handled here:

    one token, no gradient      fused_recurrent_kda, float32 sums without tensor cores; it has no backward
    everything else             chunk_kda, tiles of 64; with `bounded`, gates in [-5, 0] may use its faster tiles
    q, k, v of unlike types     promoted to one, as its products need
    packed sequences            boundaries in int64 on the device, and a copy on the host so that nothing waits

chunk_kda multiplies float32 in TF32, with errors of 1e-3. So float32 goes there only if the user allows TF32
(torch.set_float32_matmul_precision("high")) or names the backend; otherwise it is NotImplemented, as is all else that
fla does not take, and the caller falls back to its torch form.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import NotImplementedType
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

log = logging.getLogger("nanok3")

OLDEST = (0, 6, 0)
WIDEST_KEY = 256
MOST_SOURCES = 32
"""A kernel is compiled for each power of two of sources; K3 has 9."""


@dataclass(frozen=True)
class Operators:
    """fla's functions that are used here."""

    chunk_kda: Callable[..., tuple[Tensor, Tensor | None]]
    fused_recurrent_kda: Callable[..., tuple[Tensor, Tensor | None]]
    fused_attnres: Callable[..., Tensor]


@functools.cache
def load() -> Operators | str:
    """The operators, or in one line why there are none."""
    try:
        import fla
    except ImportError:
        return "fla-core is not installed; pip install 'nanok3[gpu]'"
    found = getattr(fla, "__version__", "0")
    if _numbers(found) < OLDEST:
        return f"fla-core is {found}; it must be at least {'.'.join(map(str, OLDEST))}: pip install -U fla-core"
    try:
        from fla.ops.attnres import fused_attnres
        from fla.ops.kda import chunk_kda, fused_recurrent_kda
    except ImportError as error:
        return f"fla-core {found} cannot be imported: {error}"
    return Operators(chunk_kda, fused_recurrent_kda, fused_attnres)


def _numbers(version: str) -> tuple[int, ...]:
    """'0.6.0rc1' -> (0, 6, 0)."""
    return tuple(int(n) for n in re.findall(r"\d+", version)[:3])


@functools.cache
def available() -> bool:
    """Whether there are operators; said once in the log where there are none."""
    found = load()
    if isinstance(found, str):
        log.warning("CUDA runs the slower torch forms of KDA and attention residuals: %s", found)
    return isinstance(found, Operators)


# ---------------------------------------------------------------------- KDA


def kda(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T HV V"],
    log_decay: Float[Tensor, "B T HV K"],
    beta: Float[Tensor, "B T HV"],
    initial_state: Float[Tensor, "n HV K V"] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Int[Tensor, " n1"] | None = None,
    scale: float | None = None,
    bounded: bool = False,
    tf32: bool = False,
) -> tuple[Float[Tensor, "B T HV V"], Float[Tensor, "n HV K V"] | None] | NotImplementedType:
    """The operator of model/kda.py. `bounded`: the caller vouches for gates in [-5, 0]; `tf32`: float32 inputs may be
    multiplied in TF32 whatever the user allows elsewhere."""
    dtype = functools.reduce(torch.promote_types, (q.dtype, k.dtype, v.dtype))
    if dtype == torch.float64 or v.numel() == 0 or q.shape[-1] > WIDEST_KEY or not available():
        return NotImplemented
    differentiated = torch.is_grad_enabled() and any(_tracked(q, k, v, log_decay, beta, initial_state))
    one_token = v.shape[1] == 1 and cu_seqlens is None and not differentiated
    if dtype == torch.float32 and not (one_token or tf32 or torch.get_float32_matmul_precision() != "highest"):
        return NotImplemented
    operators = load()
    assert isinstance(operators, Operators)
    arguments: dict[str, Any] = {
        "q": q.to(dtype),
        "k": k.to(dtype),
        "v": v.to(dtype),
        "g": log_decay.float(),
        "beta": beta.float(),
        "scale": q.shape[-1] ** -0.5 if scale is None else scale,
        "initial_state": None if initial_state is None else initial_state.float(),
        "output_final_state": output_final_state,
    }
    if one_token:
        o, final = operators.fused_recurrent_kda(**arguments)
    else:
        arguments |= {"safe_gate": bounded} | _boundaries(cu_seqlens, v.device)
        o, final = operators.chunk_kda(**arguments)
    return o.to(v.dtype), final if output_final_state else None


def _tracked(*tensors: Tensor | None) -> list[bool]:
    return [tensor is not None and tensor.requires_grad for tensor in tensors]


def _boundaries(cu_seqlens: Tensor | None, device: torch.device) -> dict[str, Tensor | None]:
    if cu_seqlens is None:
        return {"cu_seqlens": None, "cu_seqlens_cpu": None}
    there, here = _on_both_sides(cu_seqlens, 0 if cu_seqlens.is_inference() else cu_seqlens._version, device)
    return {"cu_seqlens": there, "cu_seqlens_cpu": here}


@functools.lru_cache(maxsize=4)
def _on_both_sides(cu_seqlens: Tensor, version: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The same boundaries for every layer of a forward, and the same objects: by them fla knows its own plans again.
    `version` tells a tensor that was written into since."""
    return cu_seqlens.to(device, torch.int64, copy=True), cu_seqlens.to("cpu", torch.int64, copy=True)


# ---------------------------------------------------------------------- attention residuals


def mix(
    sources: Sequence[Float[Tensor, "B T D"]],
    norm: Float[Tensor, " D"],
    query: Float[Tensor, "1 D"],
    eps: float,
) -> Float[Tensor, "B T D"] | NotImplementedType:
    """The operator of model/attn_res.py: one kernel that reads each source once. Sums are float32 in any dtype."""
    first = sources[0]
    whole = first.shape[-1] % 16 == 0 and all(source.data_ptr() % 16 == 0 for source in sources)
    alike = all(source.dtype == first.dtype for source in sources) and first.dtype != torch.float64
    if not (whole and alike) or len(sources) > MOST_SOURCES or first.numel() == 0 or not available():
        return NotImplemented
    operators = load()
    assert isinstance(operators, Operators)
    return operators.fused_attnres(query[0], list(sources), norm, rms_eps=eps)
