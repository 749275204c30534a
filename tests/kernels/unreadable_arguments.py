"""Every kernel with every argument exchanged for one that it cannot read: run by `test_every_kernel.py`.

Each line says what was tried and what came of it: `refused` (NotImplemented, and torch does it), an error of the user's
(ValueError), `the same` (the call was possible, and twice gave the same with other numbers around the arguments), or
WRONG and why. A process that ends by a signal has read what it must not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from nanok3.kernels import (
    attention_cpu,
    attn_res_cpu,
    kda_cpu,
    linear_cpu,
    newton_schulz_cpu,
    norms_cpu,
    short_conv_cpu,
    situ_cpu,
    vision_cpu,
)
from nanok3.model.mxfp4 import quantize_mxfp4

rand = torch.rand
E, F, L = 3, 32, 64  # experts
CHOSEN = torch.tensor([[0, 2], [1, 0], [2, 1]])


def routed(z: Tensor, chosen: Tensor, weights: Tensor, *matrices: Tensor) -> Any:
    return linear_cpu.routed(z, chosen, weights, matrices, (4.0, 25.0))


def packed(x: Tensor, nibbles: Tensor, scale: Tensor) -> Any:
    return linear_cpu.linear(x, linear_cpu.Packed(nibbles, scale))


def kda(q: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, bounds: Tensor) -> Any:
    o = kda_cpu.kda(q, q, v, g, beta, state, False, bounds)
    return o if o is NotImplemented else o[0]


def vision_attention(qkv: Tensor, angle: Tensor) -> Any:
    turn = torch.polar(torch.ones_like(angle), angle) if type(angle) is Tensor else angle
    return vision_cpu.attention(qkv, turn, [3, 4])


# A kernel as it is called, and arguments that it takes.
CALLS: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {
    "kda": (
        kda,
        [rand(1, 7, 2, 5)] * 2 + [-rand(1, 7, 2, 5), rand(1, 7, 2), rand(2, 2, 5, 5), torch.tensor([0, 3, 7])],
    ),
    "attention": (
        lambda q, k, v, bounds: attention_cpu.causal_attention(q, k, v, 0.3, bounds),
        [rand(1, 7, 2, 5)] * 2 + [rand(1, 7, 2, 4), torch.tensor([0, 3, 7])],
    ),
    "vision_attention": (vision_attention, [rand(7, 3, 2, 6), rand(7, 3)]),
    "gelu_tanh": (vision_cpu.gelu_tanh, [rand(3, 7)]),
    "newton_schulz": (lambda G: newton_schulz_cpu.newton_schulz(G, 5, (3.4, -4.7, 2.0)), [rand(2, 7, 5)]),
    "kda_step": (kda_cpu.step, [rand(3, 1, 2, 5)] * 4 + [rand(3, 1, 2), rand(3, 2, 5, 5)]),
    "short_conv": (short_conv_cpu.short_conv, [rand(2, 7, 12), rand(12, 1, 4), rand(2, 3, 12), torch.arange(7)]),
    "situ": (situ_cpu.situ_glu, [rand(3, 7), rand(3, 7)]),
    "attn_res": (lambda a, b, n, q: attn_res_cpu.mix([a, b], n, q, 1e-5), [rand(2, 7)] * 2 + [rand(7), rand(1, 7)]),
    "rms_norm": (lambda x, w: norms_cpu.rms_norm(x, w, 1e-5), [rand(3, 7), rand(7)]),
    "gated_norm": (lambda x, g, w: norms_cpu.gated_norm(x, g, w, 1e-5), [rand(3, 7), rand(3, 7), rand(7)]),
    "l2_norm": (norms_cpu.l2_normalize, [rand(3, 7)]),
    "log_decay": (lambda z, a, b: norms_cpu.log_decay(z, a, b, -5.0), [rand(3, 4, 7), rand(4), rand(28)]),
    "linear": (linear_cpu.linear, [rand(3, 7), rand(5, 7)]),
    "packed": (packed, [rand(3, 64), *quantize_mxfp4(rand(5, 64))]),
    "grouped_linear": (linear_cpu.grouped_linear, [rand(6, 7), rand(E, 5, 7), torch.tensor([4, 0, 2])]),
    "routed": (routed, [rand(3, L), CHOSEN, rand(3, 2), rand(E, F, L), rand(E, L, F), rand(E, F, L)]),
}
CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "one less": lambda x: x[..., :-1].contiguous(),
    "one more": lambda x: torch.cat((x, x[..., :1]), -1),
    "a row less": lambda x: x[:-1].contiguous(),
    "a row more": lambda x: torch.cat((x, x[:1])),
    "a row": lambda x: x[:1],
    "nothing": lambda x: x[:0],
    "a dimension less": lambda x: x[0].clone(),
    "a dimension more": lambda x: x[None],
    "a number": lambda x: x.flatten()[0],
    "another type": lambda x: x.double() if x.is_floating_point() else x.short(),
    "infinite": lambda x: x / 0.0 if x.is_floating_point() else torch.full_like(x, torch.iinfo(x.dtype).max),
    "negative": lambda x: -1 - x,
}


class Wrapped(Tensor):
    """Its numbers lie somewhere else, as those of a distributed tensor."""

    @staticmethod
    def __new__(cls, x: Tensor) -> Wrapped:
        return Tensor._make_wrapper_subclass(cls, x.shape, dtype=x.dtype, device=x.device)

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> Any:
        raise AssertionError("the kernel used it")


def amid(x: Tensor, noise: float) -> Tensor:
    """A copy of x between a thousand numbers on either side."""
    if isinstance(x, Wrapped):
        return x
    around = torch.full((x.numel() + 2000,), noise if x.is_floating_point() else 1, dtype=x.dtype)
    around[1000 : 1000 + x.numel()] = x.flatten()
    return around[1000 : 1000 + x.numel()].view(x.shape)


def told(function: Callable[..., Any], *arguments: Tensor) -> str:
    """What comes of a call, tried with two surroundings of its arguments."""
    results = []
    for noise in (3e38, -3e38):
        try:
            results.append(function(*(amid(x, noise) for x in arguments)))
        except ValueError as error:
            results.append(str(error))
        except Exception as error:
            return f"WRONG: {error!r}"
    first, second = results
    if isinstance(first, Tensor):
        return "the same" if torch.equal(first.nan_to_num(), second.nan_to_num()) else "WRONG: it depends on memory"
    return "refused" if first is NotImplemented else f"{first}"


def lines(name: str, function: Callable[..., Any], arguments: list[Tensor]) -> Iterator[str]:
    whole = told(function, *arguments)
    yield f"{name}: {whole}" if whole == "the same" else f"{name}: WRONG, {whole}"
    yield from transformed(name, function, *arguments)
    for i, x in enumerate(arguments):
        before, after = arguments[:i], arguments[i + 1 :]
        wrapped = told(function, *before, Wrapped(x), *after)
        yield f"{name}, argument {i} wrapped: {wrapped if wrapped == 'refused' else 'WRONG, ' + wrapped}"
        for change, of in CHANGES.items():
            yield f"{name}, argument {i} {change}: {told(function, *before, of(x), *after)}"


def transformed(name: str, function: Callable[..., Any], first: Tensor, *others: Tensor) -> Iterator[str]:
    """Inside torch's transforms, of which a kernel that reads memory would lose the batch and the tangent."""
    answers = []
    torch.func.vmap(lambda x: answers.append(function(x, *others)) or x)(first[None])
    with forward_ad.dual_level():
        answers.append(function(forward_ad.make_dual(first, first), *others))
    for transform, answer in zip(("vmap", "forward differentiation"), answers, strict=True):
        yield f"{name} in {transform}: {'refused' if answer is NotImplemented else 'WRONG'}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for name, call in CALLS.items():
        for line in lines(name, *call):
            print(line, flush=True)
