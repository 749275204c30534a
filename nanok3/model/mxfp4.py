"""MXFP4: four-bit floats in blocks of 32 that share a power of two (OCP MX formats; architecture 2.8).

A nibble is a sign and one of eight magnitudes; a scale byte s stands for 2^(s - 127):

    W[r, c] = +-{0, 0.5, 1, 1.5, 2, 3, 4, 6} * 2^(scale[r, c // 32] - 127)

Two nibbles a byte, the even column in the low half. Every value is exact in bfloat16. K3 keeps its routed experts so.

Whoever rounds to MXFP4 here (training, export, serving) takes the scale of a block from `block_exponent`. quant/mxfp.py
has the same for MXFP8, and the rounding that training does.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

BLOCK = 32
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SCALE_BIAS = 127
SCALE_RULES = ("ceil", "floor", "even")


def dequantize_mxfp4(
    packed: UInt8[Tensor, "*b half"], scale: UInt8[Tensor, "*b blocks"], dtype: torch.dtype = torch.bfloat16
) -> Float[Tensor, "*b columns"]:
    """packed (..., C/2) and scale (..., C/32) to values (..., C) of `dtype`: exact wherever `dtype` can hold them."""
    table = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], dtype=dtype, device=packed.device)
    # One look-up gives both nibbles of a byte, low half first.
    byte = torch.arange(256, device=packed.device)
    pairs = torch.stack((table[byte & 15], table[byte >> 4]), dim=-1)
    values = pairs[packed.int()].flatten(-2)
    # Powers of two are made in float64, where 2^-127 is no denormal, and are exact in every dtype that reaches them.
    exponent = scale.int() - SCALE_BIAS
    factor = torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), exponent).to(dtype)
    return (values.unflatten(-1, (-1, BLOCK)) * factor.unsqueeze(-1)).flatten(-2)


def quantize_mxfp4(
    weight: Float[Tensor, "*b columns"], rule: str = "ceil"
) -> tuple[UInt8[Tensor, "*b half"], UInt8[Tensor, "*b blocks"]]:
    """The nearest MXFP4 values, ties to the even code; beyond 6 scales the largest. With `rule` ceil nothing lies
    beyond. A block that MXFP4 can hold exactly comes back exactly. ValueError on a width that is no multiple of 32 or a
    value that is not finite."""
    check_blocks(weight)
    blocks = weight.double().unflatten(-1, (-1, BLOCK))
    exponent = block_exponent(blocks.abs().amax(-1), rule)
    scaled = blocks / torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), exponent).unsqueeze(-1)
    codes = _nearest_code(scaled.abs()) | torch.signbit(scaled).to(torch.uint8) << 3
    codes = codes.flatten(-2).unflatten(-1, (-1, 2))
    return codes[..., 0] | codes[..., 1] << 4, (exponent + SCALE_BIAS).to(torch.uint8)


def check_blocks(weight: Float[Tensor, "*b columns"]) -> None:
    """ValueError on what no block can hold."""
    if weight.shape[-1] % BLOCK:
        raise ValueError(f"MXFP4 needs an input width that is a multiple of {BLOCK}, got {weight.shape[-1]}")
    if not bool(torch.isfinite(weight).all()):
        raise ValueError("MXFP4 has no code for inf or NaN, and the weight holds one")


def block_exponent(
    largest: Float[Tensor, "*b"], rule: str = "ceil", top: float = MAGNITUDES[-1], bits: int = 1
) -> Int[Tensor, "*b"]:
    """The exponent e of a block's scale 2^e from its largest magnitude, for elements up to `top` whose fraction has
    `bits` bits (those of MXFP4 by default). K3 did not publish its rule; three are in use:

        ceil     the smallest e with largest <= top 2^e: nothing is cut off (the default)
        floor    e = floor(log2 largest) - floor(log2 top): finer steps, but up to a quarter of the largest is lost
        even     floor of the largest rounded to `bits` bits: cuts off where that costs no more than rounding would

    A block of zeros has e = 0. The scale byte is e + 127, and e stays within what a byte below NaN's 255 holds.
    """
    if rule not in SCALE_RULES:
        raise ValueError(f"scale rule is {rule!r}; allowed: {', '.join(SCALE_RULES)}")
    mantissa, exponent = torch.frexp(largest)  # largest = mantissa * 2^exponent, exactly, with mantissa in [0.5, 1)
    top_mantissa, top_exponent = math.frexp(top)
    needed = exponent - top_exponent
    if rule == "ceil":
        needed = needed + (mantissa > top_mantissa).int()
    elif rule == "even":
        needed = needed + (mantissa >= 1 - 2.0 ** -(bits + 2)).int()
    return torch.where(largest > 0, needed, torch.zeros_like(needed)).clamp(-SCALE_BIAS, 127)


def _nearest_code(magnitude: Tensor) -> Tensor:
    """Index into MAGNITUDES: count the midpoints passed; an even index wins a tie."""
    code = torch.zeros_like(magnitude, dtype=torch.uint8)
    for i, (low, high) in enumerate(zip(MAGNITUDES, MAGNITUDES[1:])):
        middle = (low + high) / 2
        code += magnitude >= middle if i % 2 else magnitude > middle
    return code
