"""Newton-Schulz on a CPU: the torch face of `cpu/newton_schulz.cpp`. For small matrices, and no gradients.

Each matrix stays in a core's cache through all steps; threads take matrices, so the results are the same bits for any
number of them. What the kernel cannot take (large matrices, other types or devices, no compiler) returns
NotImplemented, and the caller falls back to its torch form.
"""

from __future__ import annotations

from types import NotImplementedType

import torch
from jaxtyping import Float
from torch import Tensor

from nanok3.kernels import rows

MOST_ON_THE_SMALLER_SIDE = 256
"""Four squares of this side are 1 MiB; what is larger, torch's products do as well."""


def newton_schulz(
    G: Float[Tensor, "n r c"], steps: int, coefficients: tuple[float, float, float]
) -> Float[Tensor, "n r c"] | NotImplementedType:
    """Steps of X <- a X + (b A + c A A) X, A = X X^T, from X = G / (|G| + 1e-7), for each of n float32 matrices."""
    if G.dtype != torch.float32 or not rows.supported("newton_schulz", G) or rows.through_torch(G):
        return NotImplemented
    if G.ndim != 3 or not (steps >= 1 and 1 <= min(G.shape[1:]) <= MOST_ON_THE_SMALLER_SIDE):
        return NotImplemented
    G = G.contiguous()
    out = torch.empty_like(G)
    run = rows.function("newton_schulz", "newton_schulz", "pnnnnfffpn")
    run(G.data_ptr(), *G.shape, steps, *coefficients, out.data_ptr(), torch.get_num_threads())
    return out
