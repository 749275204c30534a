"""Causal softmax attention on a CPU: the torch face of `cpu/attention.cpp`. For inference; training has torch's.

    o_t = sum_s a_ts v_s,    a_t = softmax over the keys s that token t sees of  scale q_t . k_s

Neither a matrix of scores nor a padded copy of the values is made. Sums are float32, and so is the result. What the
kernel cannot take (gradients, other types or devices, no compiler) returns NotImplemented, and the caller falls back
to its torch form.
"""

from __future__ import annotations

from types import NotImplementedType

import torch
from jaxtyping import Float
from torch import Tensor

from nanok3.kernels import rows

MOST_CHANNELS = 256
"""Of a query or key: what one block of cpu/product.h holds."""


def causal_attention(
    q: Float[Tensor, "B T H K"], k: Float[Tensor, "B S H K"], v: Float[Tensor, "B S H V"], scale: float
) -> Float[Tensor, "B T H V"] | NotImplementedType:
    """The last query sees all S keys, the one before it S - 1, ...; float32 or bf16 in, float32 out."""
    batch, queries, heads, channels = q.shape
    if k.shape[1] < queries or channels > MOST_CHANNELS or torch.compiler.is_compiling():
        return NotImplemented
    if not rows.supported("attention", q, k, v) or rows.through_torch(q, k, v):
        return NotImplemented
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    out = torch.empty(batch, queries, heads, v.shape[-1])
    run = rows.function("attention", "attention_causal", "ppptnnnnnnnnnnnfpn")
    sizes = (rows.DTYPES[q.dtype], queries, k.shape[1], heads, channels, v.shape[-1])
    strides = (*q.stride()[1:3], *k.stride()[1:3], *v.stride()[1:3])
    for a, b, c, o in zip(q, k, v, out):
        run(a.data_ptr(), b.data_ptr(), c.data_ptr(), *sizes, *strides, scale, o.data_ptr(), torch.get_num_threads())
    return out
