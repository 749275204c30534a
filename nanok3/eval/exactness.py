"""Whether this machine computes what the formulas say: every operator beside its slow form, outputs and all gradients,
on small awkward sizes, for every backend. Its neighbours: exactness_model.py compares every way to read a text with the
others, exactness_watch.py finds out which kernel answers.

The error of a tensor is its largest deviation over the largest expected value. Bounds lie about ten times above what
rounding does and far below what a bug does; where the formula promises equal bits the bound is 0.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

log = logging.getLogger("nanok3")

FORWARD_BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
GRADIENT_BOUNDS = {torch.float32: 3e-5, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Check:
    """One comparison."""

    what: str
    backend: str
    error: float
    bound: float

    @property
    def ok(self) -> bool:
        return self.error <= self.bound  # false for NaN


@dataclass(frozen=True)
class Backend:
    """A way to run the model's operators: inside `context`, on `device`."""

    name: str
    context: Callable[[], AbstractContextManager[object]] = nullcontext
    device: str = "cpu"


@dataclass(frozen=True)
class Draw:
    """Makes an operator's inputs: `draw(*shape)` in the type under test, `wide` in float32 as gates and states are.
    `large` asks for the sizes of a small model instead of awkward ones."""

    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    large: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "_generator", torch.Generator().manual_seed(self.seed))

    def __call__(self, *shape: int) -> Tensor:
        return self.wide(*shape).to(self.dtype)

    def wide(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=getattr(self, "_generator")).to(self.device)  # noqa: B009

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=getattr(self, "_generator")).to(self.device)  # noqa: B009


@dataclass(frozen=True)
class Operator:
    """One operator of the model. `run` is the model's own function, which picks the backend; `reference` the plain
    formula; `draw` makes the arguments of both, of which the floating tensors are differentiated."""

    name: str
    run: Callable[..., Any]
    reference: Callable[..., Any]
    draw: Callable[[Draw], tuple[Any, ...]]
    gradients: bool = True
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    """In which it is compared with the reference."""
    flops: Callable[..., float] | None = None
    """Arithmetic of a forward call as a function of the arguments; None where memory is what limits."""
    reads: Callable[..., float] | None = None
    """Bytes that a forward call has to read, where that is what limits and inputs and outputs are not the measure."""
    why_torch: str = "torch's is used"
    """For a report: why no kernel of ours is asked, where none is."""


# ---------------------------------------------------------------------- operators


def error_of(found: Tensor, expected: Tensor) -> float:
    """The largest deviation over the largest expected value; infinite where shapes or finiteness differ."""
    if found.shape != expected.shape or not bool(found.isfinite().all()):
        return float("inf")
    if not found.numel():
        return 0.0
    expected = expected.detach().double().cpu()
    deviation = float((found.detach().double().cpu() - expected).abs().max())
    return deviation / max(float(expected.abs().max()), 1e-30) if deviation else 0.0


def check_operator(operator: Operator, backend: Backend, dtype: torch.dtype) -> Iterator[Check]:
    """Outputs with and without autograd, then gradients, beside the reference in float64."""
    name = f"{operator.name}, {str(dtype).removeprefix('torch.')}"
    yield from or_failed(name, backend, _operator_checks(name, operator, backend, dtype))


def or_failed(what: str, backend: Backend, checks: Iterator[Check]) -> Iterator[Check]:
    """A backend that raises is as broken as one that computes wrong, and must not hide what the others do."""
    try:
        yield from checks
    except Exception as error:
        log.error("%s on %s raised %r", what, backend.name, error)
        yield Check(what, backend.name, float("inf"), 0.0)


def _operator_checks(name: str, operator: Operator, backend: Backend, dtype: torch.dtype) -> Iterator[Check]:
    inputs = operator.draw(Draw(dtype, backend.device))
    outputs, gradients = _evaluate(operator.reference, [_double(x) for x in inputs], operator.gradients)
    with backend.context():
        found, found_gradients = _evaluate(operator.run, list(inputs), operator.gradients)
        with torch.no_grad():
            plain = tensors_of(operator.run(*inputs))
    errors = [error_of(a, b) for some in (found, plain) for a, b in zip(some, outputs, strict=True)]
    yield Check(name, backend.name, max(errors), FORWARD_BOUNDS[dtype])
    if operator.gradients:
        errors = [error_of(a, b) for a, b in zip(found_gradients, gradients, strict=True)]
        yield Check(f"{name}, gradients", backend.name, max(errors), GRADIENT_BOUNDS[dtype])


def _evaluate(run: Callable[..., Any], inputs: list[Any], gradients: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs, and the gradients of all floating inputs for a fixed random upstream gradient."""
    leaves = [leaf(x) for x in inputs] if gradients else inputs
    with torch.set_grad_enabled(gradients):
        outputs = tensors_of(run(*leaves))
    if not gradients:
        return outputs, []
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(o.shape, generator=generator).to(o.device, o.dtype) for o in outputs]
    wanted = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
    return outputs, list(torch.autograd.grad(outputs, wanted, upstream))


def leaf(x: Any) -> Any:
    if isinstance(x, nn.Parameter):
        return nn.Parameter(x.detach())
    return x.detach().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x


def _double(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    return x.cpu().double() if x.is_floating_point() else x.cpu()


def tensors_of(result: Any) -> list[Tensor]:
    """The tensors of a result: one, or those of a tuple or list."""
    several = result if isinstance(result, tuple | list) else (result,)
    return [x for x in several if isinstance(x, Tensor)]
