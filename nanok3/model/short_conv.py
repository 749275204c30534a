"""The short convolution in front of KDA: four taps per channel, causal, then SiLU (architecture 3.2).

    y_t[c] = silu( sum_{j=0..W-1} w[c, j] u_{t-W+1+j}[c] ),    W = 4, so w[c, 3] meets the current token

It gives each projection a little local context before the long memory. Missing history is zero; a document never sees
the one before it; the last W - 1 inputs are the state that decoding carries on.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from nanok3.model.basics import at_least_float32


def short_conv_reference(
    u: Float[Tensor, "B T C"],
    weight: Float[Tensor, "C 1 W"],
    history: Float[Tensor, "B H C"] | None = None,
    position: Int[Tensor, " T"] | None = None,
) -> Float[Tensor, "B T C"]:
    """Token by token, tap by tap. `history`: the W-1 inputs before u; `position`: place in the packed document."""
    taps = weight.shape[-1]
    u, weight = at_least_float32(u), at_least_float32(weight)
    rows = []
    for t in range(u.shape[1]):
        total = torch.zeros_like(u[:, 0])
        for back in range(taps):
            if position is not None and back > int(position[t]):
                break
            source = t - back
            if source >= 0:
                total = total + weight[:, 0, taps - 1 - back] * u[:, source]
            elif history is not None:
                total = total + weight[:, 0, taps - 1 - back] * history[:, source]
        rows.append(F.silu(total))
    return torch.stack(rows, dim=1)


def short_conv(
    u: Float[Tensor, "B T C"],
    weight: Float[Tensor, "C 1 W"],
    history: Float[Tensor, "B H C"] | None = None,
    position: Int[Tensor, " T"] | None = None,
) -> Float[Tensor, "B T C"]:
    """W shifted multiply-adds over the whole row; the result has u's dtype, the sum is taken in at least float32."""
    result = _short_conv_cpu(u, weight, history, position)
    if result is not None:
        return result
    taps, tokens = weight.shape[-1], u.shape[1]
    before = u.new_zeros(u.shape[0], taps - 1, u.shape[2]) if history is None else history.to(u.dtype)
    padded = torch.cat((before, u), dim=1)
    w = at_least_float32(weight)[:, 0]
    total = at_least_float32(u) * w[:, -1]
    for back in range(1, taps):
        shifted = padded[:, taps - 1 - back : taps - 1 - back + tokens]
        if position is not None:
            # Selected, not multiplied by zero: a NaN in the neighbouring document must not leak.
            shifted = shifted.masked_fill((position < back)[None, :, None], 0)
        total = total + shifted * w[:, taps - 1 - back]
    return F.silu(total).to(u.dtype)


def _short_conv_cpu(u: Tensor, weight: Tensor, history: Tensor | None, position: Tensor | None) -> Tensor | None:
    """The same in one pass, or None where that does not apply: another device, float64, no compiler."""
    from nanok3.kernels import short_conv_cpu

    result = short_conv_cpu.short_conv(u, weight, history, position)
    return None if result is NotImplemented else result


class ShortConv(nn.Module):
    """The weight (C, 1, W) under its official name, kept in float32."""

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, taps, dtype=torch.float32))

    def forward(
        self,
        u: Float[Tensor, "B T C"],
        history: Float[Tensor, "B H C"] | None = None,
        position: Int[Tensor, " T"] | None = None,
    ) -> Float[Tensor, "B T C"]:
        return short_conv(u, self.weight, history, position)

    def reset_parameters(self, std: float) -> None:
        bound = self.weight.shape[-1] ** -0.5  # fan-in is the number of taps; torch's own rule for convolutions
        nn.init.uniform_(self.weight, -bound, bound)
