"""Linear maps and routed experts on a CPU: the torch face of `cpu/linear.cpp`.

    linear           y = x W^T
    grouped_linear   y = x W_e^T, rows sorted by expert, counts[e] of them for expert e
    routed           y_t = sum over the chosen experts of p_te W2_e SiTU(W1_e z_t, W3_e z_t); or in two steps, the same
    expert_answers   bits: the answers of some experts, others may follow when they are there,
    weigh_answers    and their weighted sum

Sums are float32 and rounded once. Weights are read as they are stored, float32, bf16 or MXFP4, and never copied.
`linear` and `grouped_linear` are differentiable where inputs and weights are of one type; packed weights and `routed`
are for inference. What the kernel cannot take (other types or devices, no compiler) returns NotImplemented, and the
caller falls back to its torch form.
"""

from __future__ import annotations

import ctypes
import functools
import math
from types import NotImplementedType
from typing import NamedTuple

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from nanok3.kernels import native, rows

PACKED = 2
"""MXFP4's number in cpu/formats.h, after those of `rows.DTYPES`."""
PARTS_AT_ONCE = 1 << 26
"""Numbers that `routed` holds between the experts and their weighted sum: 256 MiB."""


class Packed(NamedTuple):
    """MXFP4 matrices: two weights a byte, the even column in the low half, and a scale byte for 32 columns."""

    nibbles: UInt8[Tensor, "*b O half"]
    scale: UInt8[Tensor, "*b O blocks"]


Weight = Tensor | Packed


@native.constant_when_traced
def preferred(dtype: torch.dtype) -> bool:
    """Whether plain products of this type are faster here than torch's. By what the processor can do, not by timing:

    - bf16 without instructions for it: torch multiplies number by number, some 60 times slower than float32
    - float32 on AMD processors with AVX-512: torch's library does not use these vectors there
    """
    if dtype == torch.bfloat16:
        return not _features() & {"avx512_bf16", "amx_bf16", "bf16", "svebf16"}
    return dtype == torch.float32 and {"avx512f", "amd"} <= _features()


@native.constant_when_traced
def preferred_for_groups() -> bool:
    """Whether grouped bf16 products are. Torch's library builds a program for each new number of rows, and experts have
    another number at every step; so where both multiply pairs of bf16, ours is faster; not where torch has AMX."""
    return preferred(torch.bfloat16) or _features() & {"avx512_bf16", "amx_bf16"} == {"avx512_bf16"}


@functools.cache
def _features() -> set[str]:
    return set(native.cpu_features().lower().replace(":", " ").split())


def linear(x: Float[Tensor, "*b I"], weight: Weight) -> Float[Tensor, "*b O"] | NotImplementedType:
    """weight (O, I), or packed. Differentiable for a plain weight of x's type."""
    if not _takes(x, weight, 2) or x.shape[-1:] != _shape(weight)[1:]:
        return NotImplemented
    outputs, inputs = _shape(weight)
    flat = x.reshape(x.shape[:-1].numel(), inputs)
    if not rows.through_torch(x, *_tensors(weight)):
        return _forward(flat, weight, *_one_group(flat)).view(*x.shape[:-1], outputs)
    if not _differentiable(x, weight):
        return NotImplemented
    y = _linear(flat, weight) if x.requires_grad else _linear_of_data(weight, flat)
    return y.view(*x.shape[:-1], outputs)


def grouped_linear(
    x: Float[Tensor, "m I"], weight: Weight, counts: Int[Tensor, " E"]
) -> Float[Tensor, "m O"] | NotImplementedType:
    """weight (E, O, I), or packed; the counts add up to m. Differentiable for a plain weight of x's type."""
    if not _takes(x, weight, 3) or not rows.readable(counts) or counts.dtype != torch.int64:
        return NotImplemented
    experts, _, inputs = _shape(weight)
    if x.ndim != 2 or x.shape[1] != inputs or counts.shape != (experts,):
        return NotImplemented
    if not rows.through_torch(x, *_tensors(weight)):
        return grouped_forward(x, weight, counts)
    return _grouped(x, weight, counts) if _differentiable(x, weight) else NotImplemented


def routed(
    z: Float[Tensor, "n L"],
    chosen: Int[Tensor, "n N"],
    weights: Float[Tensor, "n N"],
    matrices: tuple[Weight, Weight, Weight],
    betas: tuple[float | None, float | None],
) -> Float[Tensor, "n L"] | NotImplementedType:
    """The answers of the chosen experts, weighed and summed in the order of `chosen`. matrices: W1 and W3 (E, F, L)
    with W2 (E, L, F) between them, all in one format. betas: the two caps, None where there is none (both: SwiGLU).
    For inference: without gradients."""
    if not all(_takes(z, w, 3) for w in matrices) or len({_format(w) for w in matrices}) != 1:
        return NotImplemented
    if not rows.readable(chosen, weights) or not _fit_together(z, chosen, weights, matrices):
        return NotImplemented
    if rows.through_torch(z, weights, *(x for w in matrices for x in _tensors(w))):
        return NotImplemented
    L = z.shape[1]
    y = torch.empty(z.shape, dtype=z.dtype)
    size = max(1, PARTS_AT_ONCE // max(1, chosen.shape[1] * L))
    for start in range(0, z.shape[0], size):
        some = slice(start, start + size)
        _routed(z[some], chosen[some], weights[some], matrices, betas, y[some])
    return y


def expert_answers(
    z: Float[Tensor, "n L"],
    tokens: Int[Tensor, " m"],
    counts: Int[Tensor, " E"],
    matrices: tuple[Weight, Weight, Weight],
    betas: tuple[float | None, float | None],
    out: Float[Tensor, "m L"],
) -> Float[Tensor, "m L"] | NotImplementedType:
    """Write the answers of experts to `out`, float32: counts[e] rows for expert e, row i about z[tokens[i]]. For
    inference."""
    if not all(_takes(z, w, 3) for w in matrices) or len({_format(w) for w in matrices}) != 1:
        return NotImplemented
    if rows.through_torch(z, *(x for w in matrices for x in _tensors(w))) or not rows.readable(tokens, counts, out):
        return NotImplemented
    E, F, L = _shape(matrices[0])
    fits = _shape(matrices[1]) == (E, L, F) and _shape(matrices[2]) == (E, F, L) and z.ndim == 2 and z.shape[1] == L
    assert fits and out.shape == (len(tokens), L) and out.dtype == torch.float32 and out.is_contiguous()
    assert counts.shape == (E,) and tokens.dtype == counts.dtype == torch.int64
    assert not len(tokens) or 0 <= int(tokens.min()) <= int(tokens.max()) < len(z)
    counts, tokens, z = _checked(counts, tokens), tokens.contiguous(), z.contiguous()
    held = [_pointers(w) for w in matrices]
    memory = [address for _, *pair in held for address in pair]
    caps = (math.inf if beta is None else beta for beta in betas)
    run = rows.function("linear", "expert_answers", "ptppntppppppnnffpn")
    first = (z.data_ptr(), rows.DTYPES[z.dtype], tokens.data_ptr(), counts.data_ptr(), E, _format(matrices[0]))
    run(*first, *memory, F, L, *caps, out.data_ptr(), torch.get_num_threads())
    return out


def weigh_answers(
    answers: Float[Tensor, "m L"], place: Int[Tensor, "n N"], weights: Float[Tensor, "n N"], dtype: torch.dtype
) -> Float[Tensor, "n L"]:
    """y_t = sum over k of weights[t, k] answers[place[t, k]], after `expert_answers` has made them all."""
    (n, per_token), L = place.shape, answers.shape[1]
    assert answers.dtype == torch.float32 and answers.is_contiguous() and weights.shape == place.shape
    assert not place.numel() or 0 <= int(place.min()) <= int(place.max()) < len(answers)
    place, weights, y = place.contiguous(), weights.float().contiguous(), torch.empty(n, L, dtype=dtype)
    run = rows.function("linear", "weigh_answers", "pppnnnptn")
    shape = (answers.data_ptr(), place.data_ptr(), weights.data_ptr(), n, per_token, L)
    run(*shape, y.data_ptr(), rows.DTYPES[dtype], torch.get_num_threads())
    return y


def _fit_together(z: Tensor, chosen: Tensor, weights: Tensor, matrices: tuple[Weight, Weight, Weight]) -> bool:
    """The kernel reads raw memory, so every shape is checked."""
    E, F, L = _shape(matrices[0])
    if _shape(matrices[1]) != (E, L, F) or _shape(matrices[2]) != (E, F, L) or z.ndim != 2 or z.shape[1] != L:
        return False
    return chosen.ndim == 2 and chosen.dtype == torch.int64 and len(chosen) == len(z) and chosen.shape == weights.shape


def _tensors(weight: Weight) -> list[Tensor]:
    return list(weight) if isinstance(weight, Packed) else [weight]


def _shape(weight: Weight) -> tuple[int, ...]:
    """Of the matrices that a weight stands for."""
    return (*weight.nibbles.shape[:-1], 2 * weight.nibbles.shape[-1]) if isinstance(weight, Packed) else weight.shape


def _format(weight: Weight) -> int:
    return PACKED if isinstance(weight, Packed) else rows.DTYPES[weight.dtype]


def _takes(x: Tensor, weight: Weight, dimensions: int) -> bool:
    """Whether both can be read, and the weight has so many dimensions and, if packed, a scale for every 32 columns."""
    if not rows.supported("linear", x) or _tensors(weight)[0].ndim != dimensions:
        return False
    if not isinstance(weight, Packed):
        return rows.supported("linear", weight)
    *outer, columns = _shape(weight)
    bytes_of_both = all(w.dtype == torch.uint8 for w in weight) and rows.readable(*weight)
    return bytes_of_both and columns % 32 == 0 and weight.scale.shape == (*outer, columns // 32)


def _differentiable(x: Tensor, weight: Weight) -> bool:
    return isinstance(weight, Tensor) and weight.dtype == x.dtype


def _pointers(weight: Weight) -> tuple[list[Tensor], int, int]:
    """The memory of a weight (kept by whoever holds the list), its address and that of its scales."""
    parts = [w.contiguous() for w in _tensors(weight)]
    return parts, parts[0].data_ptr(), parts[1].data_ptr() if len(parts) > 1 else 0


def _one_group(x: Tensor) -> tuple[ctypes.Array[ctypes.c_int64], int]:
    """All rows belong to one weight: their count in memory, and its address."""
    counts = (ctypes.c_int64 * 1)(x.shape[0])
    return counts, ctypes.addressof(counts)


def _forward(x: Tensor, weight: Weight, counts: object, address: int, experts: int = 1) -> Tensor:
    x = x.contiguous()
    parts, data, scale = _pointers(weight)
    outputs = parts[0].shape[-2]
    y = torch.empty(x.shape[0], outputs, dtype=x.dtype)
    run = rows.function("linear", "linear_forward", "ptpptnnpnpn")
    shape = (_format(weight), outputs, x.shape[1])
    run(
        x.data_ptr(), rows.DTYPES[x.dtype], data, scale, *shape, address, experts, y.data_ptr(), torch.get_num_threads()
    )
    return y


def _gradients(d_out: Tensor, x: Tensor, weight: Tensor, counts: object, address: int, experts: int) -> list[Tensor]:
    d_out, weight = d_out.to(x.dtype).contiguous(), weight.contiguous()
    dx = torch.empty(x.shape, dtype=x.dtype)
    inputs = rows.function("linear", "linear_inputs", "pptnnpnpn")
    shape = (rows.DTYPES[x.dtype], *weight.shape[-2:], address, experts)
    inputs(d_out.data_ptr(), weight.data_ptr(), *shape, dx.data_ptr(), torch.get_num_threads())
    return [dx, _weight_gradient(d_out, x, weight, counts, address, experts)]


def _weight_gradient(d_out: Tensor, x: Tensor, weight: Tensor, counts: object, address: int, experts: int) -> Tensor:
    d_out, x = d_out.to(x.dtype).contiguous(), x.contiguous()
    dw = torch.empty(weight.shape, dtype=weight.dtype)
    weights = rows.function("linear", "linear_weights", "pptnnpnpn")
    shape = (rows.DTYPES[x.dtype], *weight.shape[-2:], address, experts)
    weights(d_out.data_ptr(), x.data_ptr(), *shape, dw.data_ptr(), torch.get_num_threads())
    return dw


def linear_forward(x: Tensor, weight: Tensor) -> Tensor:
    return _forward(x, weight, *_one_group(x))


def linear_backward(d_out: Tensor, x: Tensor, weight: Tensor) -> list[Tensor]:
    """Gradients of x and weight."""
    return _gradients(d_out, x, weight, *_one_group(x), 1)


def data_forward(weight: Tensor, x: Tensor) -> Tensor:
    return linear_forward(x, weight)


def data_backward(d_out: Tensor, weight: Tensor, x: Tensor) -> list[Tensor]:
    """Gradient of weight alone: nobody asks for that of data, such as pixels."""
    return [_weight_gradient(d_out, x, weight, *_one_group(x), 1)]


def grouped_forward(x: Tensor, weight: Weight, counts: Tensor) -> Tensor:
    counts = _checked(counts, x)
    return _forward(x, weight, counts, counts.data_ptr(), counts.numel())


def grouped_backward(d_out: Tensor, x: Tensor, weight: Tensor, counts: Tensor) -> list[Tensor]:
    """Gradients of x and weight; the latter zero for experts without rows."""
    counts = _checked(counts, x)
    return _gradients(d_out, x, weight, counts, counts.data_ptr(), counts.numel())


def _checked(counts: Tensor, x: Tensor) -> Tensor:
    """Counts that the kernel may follow without leaving x."""
    rows_of_all, numbers = x.shape[0], counts.tolist()  # of any size in Python: a sum of int64 may run over
    if sum(numbers) != rows_of_all or min(numbers, default=0) < 0:
        raise ValueError(f"counts is {numbers}; it must hold no negative number and add up to {rows_of_all} rows")
    return counts.contiguous()


def _routed(
    z: Tensor,
    chosen: Tensor,
    weights: Tensor,
    matrices: tuple[Weight, Weight, Weight],
    betas: tuple[float | None, float | None],
    y: Tensor,
) -> None:
    z, chosen, weights = z.contiguous(), chosen.contiguous(), weights.float().contiguous()
    held = [_pointers(w) for w in matrices]
    first = held[0][0][0]
    experts, inner = first.shape[:2]
    (n, per_token), latent = chosen.shape, z.shape[1]
    if chosen.numel() and not 0 <= int(chosen.min()) <= int(chosen.max()) < experts:
        raise ValueError(f"chosen holds an expert outside 0 ... {experts - 1}")
    parts = torch.empty(n * per_token, latent)
    memory = [address for _, *pair in held for address in pair]
    caps = (math.inf if beta is None else beta for beta in betas)
    run = rows.function("linear", "routed_experts", "ptnppnntppppppnnffppn")
    shape = (z.data_ptr(), rows.DTYPES[z.dtype], n, chosen.data_ptr(), weights.data_ptr(), per_token, experts)
    after = (inner, latent, *caps, parts.data_ptr(), y.data_ptr(), torch.get_num_threads())
    run(*shape, _format(matrices[0]), *memory, *after)


_linear = rows.operator(
    "linear",
    "Tensor x, Tensor weight",
    linear_forward,
    linear_backward,
    gradients=2,
    fake=lambda x, weight: x.new_empty(x.shape[0], weight.shape[0]),
)
_linear_of_data = rows.operator(
    "linear_of_data",
    "Tensor weight, Tensor x",
    data_forward,
    data_backward,
    gradients=1,
    fake=lambda weight, x: x.new_empty(x.shape[0], weight.shape[0]),
)
_grouped = rows.operator(
    "grouped_linear",
    "Tensor x, Tensor weight, Tensor counts",
    grouped_forward,
    grouped_backward,
    gradients=2,
    fake=lambda x, weight, counts: x.new_empty(x.shape[0], weight.shape[1]),
)
