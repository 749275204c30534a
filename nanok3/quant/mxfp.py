"""MXFP4 and MXFP8: blocks of 32 small floats that share a power of two (OCP MX formats; K3 report 4).

    x = element * 2^(scale byte - 127)
    MXFP4   E2M1: sign, 2 bits of exponent (bias 1), 1 bit of fraction     largest 6     routed experts' weights
    MXFP8   E4M3: sign, 4 bits of exponent (bias 7), 3 bits of fraction    largest 448   what these weights are fed

How a block gets its scale (three rules) is said in model/mxfp4.py, which holds the stored form of MXFP4 and is asked
here too: one table of largest magnitude -> scale byte for training, export and serving. Elements are rounded to the
nearest, ties to the even code; what lies beyond the largest becomes the largest.

    reference_block    one block, from the bits of the format and exact fractions; slow, what everything is held to
    project            the nearest values of a whole tensor, as training, export and serving see them
    quantize_mxfp8     the same as stored bytes; for MXFP4 that is model/mxfp4.py
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from nanok3.model.mxfp4 import BLOCK, SCALE_BIAS, SCALE_RULES, block_exponent


@dataclass(frozen=True)
class Element:
    """A small float. `exponent` and `fraction` count bits; `top` is the largest finite value."""

    name: str
    exponent: int
    fraction: int
    top: float

    @property
    def bias(self) -> int:
        return 2 ** (self.exponent - 1) - 1


MXFP4 = Element("MXFP4", exponent=2, fraction=1, top=6.0)
MXFP8 = Element("MXFP8", exponent=4, fraction=3, top=448.0)


# ---------------------------------------------------------------------- bit by bit


def decode(code: int, element: Element) -> Fraction:
    """The value of a code, from its fields; the sign bit may be set."""
    fraction = code & (1 << element.fraction) - 1
    exponent = code >> element.fraction & (1 << element.exponent) - 1
    sign = -1 if code >> element.fraction >> element.exponent else 1
    leading = 1 if exponent else 0  # a zero exponent field holds the numbers without a leading one
    size = Fraction(leading) + Fraction(fraction, 1 << element.fraction)
    return sign * size * Fraction(2) ** (max(exponent, 1) - element.bias)


def reference_block(values: Sequence[float], element: Element, rule: str = "ceil") -> tuple[list[int], int]:
    """Codes and scale byte of one block. ValueError for a value that is not finite."""
    exact = [Fraction(value) for value in map(_finite, values)]
    exponent = reference_exponent(max(map(abs, exact)), element, rule)
    scale = Fraction(2) ** exponent
    signs = [1 << element.fraction + element.exponent if math.copysign(1, value) < 0 else 0 for value in values]
    return [s | _nearest(abs(x) / scale, element) for s, x in zip(signs, exact)], exponent + SCALE_BIAS


def reference_exponent(largest: Fraction, element: Element, rule: str) -> int:
    """The rules of `block_exponent`, by counting up from the smallest scale."""
    if rule not in SCALE_RULES:
        raise ValueError(f"scale rule is {rule!r}; allowed: {', '.join(SCALE_RULES)}")
    if largest == 0:
        return 0
    top = Fraction(element.top)
    octave = 2 ** math.floor(math.log2(element.top))
    if rule == "even":  # half a unit in the last of `fraction` bits may carry into the next power of two
        power = _power_below(largest)
        largest += power / 2 ** (element.fraction + 1)
    exponents = range(-SCALE_BIAS, SCALE_BIAS + 1)
    if rule == "ceil":
        return next((e for e in exponents if largest <= top * Fraction(2) ** e), SCALE_BIAS)
    return max((e for e in exponents if octave * Fraction(2) ** e <= largest), default=-SCALE_BIAS)


def _power_below(x: Fraction) -> Fraction:
    power = Fraction(2) ** (x.numerator.bit_length() - x.denominator.bit_length())
    return power if power <= x else power / 2


def _nearest(magnitude: Fraction, element: Element) -> int:
    """The code of the nearest magnitude that is no more than the largest; of two as near, the even one."""
    codes = range(1 << element.fraction + element.exponent)
    allowed = [code for code in codes if decode(code, element) <= Fraction(element.top)]
    return min(allowed, key=lambda code: (abs(decode(code, element) - magnitude), code & 1))


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(f"a block holds {value}; MX formats have no place for it")
    return value


# ---------------------------------------------------------------------- all at once


def project(x: Float[Tensor, "*b columns"], element: Element, rule: str = "ceil") -> Float[Tensor, "*b columns"]:
    """Every value replaced by its nearest in the format, blocks of 32 along the last dimension; same dtype. bfloat16
    and wider hold the result exactly. NaN and inf come out as NaN. ValueError on a width that is no multiple of 32."""
    values, scale = _scaled(x, element, rule)
    return (values * scale).flatten(-2).to(x.dtype)


def _scaled(x: Tensor, element: Element, rule: str) -> tuple[Tensor, Tensor]:
    """Elements and scales (..., blocks, 32) and (..., blocks, 1), whose product is the projection."""
    if x.shape[-1] % BLOCK:
        raise ValueError(f"{element.name} needs a width that is a multiple of {BLOCK}, got {x.shape[-1]}")
    blocks = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (-1, BLOCK))
    exponent = block_exponent(blocks.abs().amax(-1, keepdim=True), rule, element.top, element.fraction)
    one = torch.ones_like(exponent, dtype=torch.float64)
    # The inverse of a power of two is one as well: nothing is rounded before _round.
    inverse, scale = (torch.ldexp(one, e).to(blocks.dtype) for e in (-exponent, exponent))
    return _round(blocks * inverse, element), scale


def _round(y: Tensor, element: Element) -> Tensor:
    """To the nearest element: a multiple of the step between two neighbours, which is constant within an octave."""
    lowest = 2.0 ** (1 - element.bias)
    step = _octave(y).clamp_(min=lowest).mul_(2.0**-element.fraction)
    return (y / step).round_().mul_(step).clamp_(-element.top, element.top)


def _octave(y: Tensor) -> Tensor:
    """2^floor(log2 |y|), read off the bits; 0 for what is too small to have a leading one, inf for what is not
    finite."""
    bits = {torch.float32: (torch.int32, 0x7F80_0000), torch.float64: (torch.int64, 0x7FF0_0000_0000_0000)}
    integer, mask = bits[y.dtype]
    return y.view(integer).bitwise_and(mask).view(y.dtype)


def quantize_mxfp8(
    x: Float[Tensor, "*b columns"], rule: str = "ceil"
) -> tuple[Float[Tensor, "*b columns"], UInt8[Tensor, "*b blocks"]]:
    """Elements as torch.float8_e4m3fn and scale bytes. ValueError as in `project`, and for a value that is not
    finite."""
    if not bool(torch.isfinite(x).all()):
        raise ValueError("MXFP8 has no place for inf or NaN, and the tensor holds one")
    values, scale = _scaled(x, MXFP8, rule)
    byte = torch.frexp(scale.double().squeeze(-1)).exponent - 1 + SCALE_BIAS
    return values.flatten(-2).to(torch.float8_e4m3fn), byte.to(torch.uint8)


def dequantize_mxfp8(
    elements: Float[Tensor, "*b columns"], scale: UInt8[Tensor, "*b blocks"], dtype: torch.dtype = torch.bfloat16
) -> Float[Tensor, "*b columns"]:
    """The values: exact wherever `dtype` can hold them."""
    exponent = scale.int() - SCALE_BIAS
    factor = torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), exponent)
    values = elements.double().unflatten(-1, (-1, BLOCK)) * factor.unsqueeze(-1)
    return values.flatten(-2).to(dtype)
