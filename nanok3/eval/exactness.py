"""Whether this machine computes what the formulas say: every operator beside its slow form, every way to read a text
beside the others.

Two kinds of checks, both on small awkward sizes, each for every backend:

    operators   one call, its outputs and every gradient, beside the plain reference in float64
    a whole K3  token by token = in pieces = at once = in a batch = packed with others, gradients included

The error of a tensor is its largest deviation over the largest expected value. Bounds lie about ten times above what
rounding does and far below what a bug does; where the formula promises equal bits the bound is 0.

Which backend an operator takes is not looked up but watched: `watch` runs it and notes which device kernel was asked
and whether it answered. So the report cannot disagree with the dispatch.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, no_type_check

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from nanok3.config import K3Config
from nanok3.model.decoder import K3
from nanok3.model.native_decode import NativeDecoder

log = logging.getLogger("nanok3")

KERNELS = ("nanok3.kernels.", "fla.")
"""Modules whose functions are device kernels, or stand before them."""
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


# ---------------------------------------------------------------------- which kernel answers


@dataclass(frozen=True)
class Answer:
    """A kernel that was asked, as `module.function`, and whether it took the call. Matrix products and attention that
    torch computes itself appear as `torch.name`."""

    kernel: str
    taken: bool


@contextmanager
def watch() -> Iterator[list[Answer]]:
    """Notes every kernel that the block asks, in this thread: it has taken the call if it returns tensors, and refused
    it if it returns NotImplemented. What returns anything else only prepares a call, or says whether one could be made.
    """
    answers: list[Answer] = []
    inside: list[FrameType] = []

    @no_type_check  # called for every function of the block: checking its types takes longer than the block
    def note(frame: FrameType, event: str, value: object) -> None:
        module, name = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if event == "call" and not inside and module.startswith(KERNELS):
            inside.append(frame)
        elif event == "return" and inside and frame is inside[0]:
            inside.clear()
            if value is NotImplemented or _tensors(value):
                answers.append(Answer(f"{module.removeprefix(KERNELS[0])}.{name}", value is not NotImplemented))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        with _Products(answers):
            yield answers
    finally:
        sys.setprofile(before)


class _Products(TorchDispatchMode):
    """Notes torch's own products as they pass by."""

    def __init__(self, answers: list[Answer]) -> None:
        super().__init__()
        self.answers = answers

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = op._schema.name.removeprefix("aten::")
        if name.endswith("mm") or "attention" in name:
            self.answers.append(Answer(f"torch.{name.lstrip('_')}", True))
        return op(*args, **(kwargs or {}))


def kernels_of(operator: Operator, draw: Draw, training: bool = False) -> list[Answer]:
    """What a call of `operator` with these inputs asks for, each once; nothing where torch does small change only."""
    inputs = [_leaf(x) if training else x for x in operator.draw(draw)]
    with torch.set_grad_enabled(training):
        operator.run(*inputs)  # unwatched: the first call imports and builds
        with watch() as answers:
            operator.run(*inputs)
    return list(dict.fromkeys(answers))


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
    yield from _or_failed(name, backend, _operator_checks(name, operator, backend, dtype))


def _or_failed(what: str, backend: Backend, checks: Iterator[Check]) -> Iterator[Check]:
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
            plain = _tensors(operator.run(*inputs))
    errors = [error_of(a, b) for some in (found, plain) for a, b in zip(some, outputs, strict=True)]
    yield Check(name, backend.name, max(errors), FORWARD_BOUNDS[dtype])
    if operator.gradients:
        errors = [error_of(a, b) for a, b in zip(found_gradients, gradients, strict=True)]
        yield Check(f"{name}, gradients", backend.name, max(errors), GRADIENT_BOUNDS[dtype])


def _evaluate(run: Callable[..., Any], inputs: list[Any], gradients: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs, and the gradients of all floating inputs for a fixed random upstream gradient."""
    leaves = [_leaf(x) for x in inputs] if gradients else inputs
    with torch.set_grad_enabled(gradients):
        outputs = _tensors(run(*leaves))
    if not gradients:
        return outputs, []
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(o.shape, generator=generator).to(o.device, o.dtype) for o in outputs]
    wanted = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
    return outputs, list(torch.autograd.grad(outputs, wanted, upstream))


def _leaf(x: Any) -> Any:
    if isinstance(x, nn.Parameter):
        return nn.Parameter(x.detach())
    return x.detach().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x


def _double(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    return x.cpu().double() if x.is_floating_point() else x.cpu()


def _tensors(result: Any) -> list[Tensor]:
    """The tensors of a result: one, or those of a tuple or list."""
    several = result if isinstance(result, tuple | list) else (result,)
    return [x for x in several if isinstance(x, Tensor)]


# ---------------------------------------------------------------------- a whole model


def awkward_model(seed: int = 0) -> K3:
    """A K3 with every mechanism of the text model and sizes that fit no vector register, weights drawn wide enough
    that gates, experts and attention really choose."""
    cfg = replace(
        K3Config.tiny(),
        hidden_size=76,
        intermediate_size=92,
        attn_res_block_size=2,
        kda_num_heads=3,
        kda_head_dim=20,
        num_attention_heads=3,
        num_key_value_heads=3,
        q_lora_rank=28,
        kv_lora_rank=36,
        qk_nope_head_dim=20,
        qk_rope_head_dim=12,
        v_head_dim=20,
        num_experts=7,
        num_experts_per_token=3,
        moe_intermediate_size=36,
        routed_expert_hidden_size=44,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = K3(cfg)
        for name, weight in model.named_parameters():
            drawn = torch.randn(weight.shape)
            if weight.ndim == 1:  # norm weights, decay rates and their shifts
                weight.add_(0.3 * drawn)
            else:
                width = 1 if name.endswith("embed_tokens.weight") else weight.shape[-1]
                weight.copy_(drawn * width**-0.5)
    return model.eval().requires_grad_(False)


LENGTHS = (1, 16, 0, 33, 17)
"""Documents of the packed row; 16 is the tile of the chunk form."""
PIECES = (1, 15, 17, 2, 32)


def _ids(model: K3, rows: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(model.cfg.vocab_size, (rows, sum(LENGTHS)), generator=generator)
    return ids.to(model.lm_head.weight.device)


def _bounds(ids: Tensor) -> Tensor:
    return torch.tensor([0, *LENGTHS], device=ids.device).cumsum(0)


def _in_pieces(model: K3, ids: Tensor, pieces: Iterable[int]) -> Tensor:
    state = model.new_state(len(ids))
    return torch.cat([model(part, state=state).logits for part in ids.split(list(pieces), dim=1)], dim=1)


def _token_by_token(model: K3) -> tuple[Tensor, Tensor]:
    ids = _ids(model)
    return _in_pieces(model, ids, [1] * ids.shape[1]), model(ids).logits


def _cached(model: K3) -> tuple[Tensor, Tensor]:
    ids = _ids(model)
    return _in_pieces(model, ids, PIECES), model(ids).logits


def _native_decoding(model: K3) -> tuple[Tensor, Tensor]:
    """As `nanok3 generate` decodes; where there is no native decoder, that is the model itself."""
    ids = _ids(model, 3)
    state, decoder = model.new_state(3), NativeDecoder.of(model)
    rows = [model(ids[:, :40], state=state).logits]
    for token in ids[:, 40:].split(1, dim=1):
        if isinstance(decoder, NativeDecoder):
            rows.append(decoder.step_state(token, state).logits[:, None])
        else:
            rows.append(model(token, state=state).logits)
    return torch.cat(rows, dim=1), model(ids).logits


def _batched(model: K3) -> tuple[Tensor, Tensor]:
    ids = _ids(model, 3)
    return model(ids).logits, torch.cat([model(row).logits for row in ids.split(1)])


def _batched_decoding(model: K3) -> tuple[Tensor, Tensor]:
    ids = _ids(model, 3)
    pieces = [ids.shape[1] - 3, 1, 1, 1]
    return _in_pieces(model, ids, pieces), torch.cat([_in_pieces(model, row, pieces) for row in ids.split(1)])


def _packed(model: K3) -> tuple[Tensor, Tensor]:
    ids = _ids(model)
    alone = [model(part).logits for part in ids.split(list(LENGTHS), dim=1) if part.shape[1]]
    return model(ids, cu_seqlens=_bounds(ids)).logits, torch.cat(alone, dim=1)


def _later_tokens(model: K3) -> tuple[Tensor, Tensor]:
    ids = _ids(model)
    other = ids.clone()
    other[:, 40:] = (other[:, 40:] + 1) % model.cfg.vocab_size
    return model(other).logits[:, :40], model(ids).logits[:, :40]


def _twice(model: K3) -> tuple[Tensor, Tensor]:
    ids = _ids(model)
    return model(ids).logits, model(ids).logits


def _threads(model: K3) -> tuple[Tensor, Tensor]:
    ids, threads = _ids(model), torch.get_num_threads()
    many = model(ids).logits
    torch.set_num_threads(1 if threads > 1 else 2)
    try:
        return many, model(ids).logits
    finally:
        torch.set_num_threads(threads)


Equality = tuple[str, Callable[[K3], tuple[Tensor, Tensor]], float]
EQUALITIES: tuple[Equality, ...] = (
    ("token by token = at once", _token_by_token, 3e-5),
    ("in pieces with a cache = at once", _cached, 3e-5),
    ("one native call a token = at once", _native_decoding, 3e-5),
    ("a batch = each row alone", _batched, 3e-5),
    ("decoding a batch = each row alone", _batched_decoding, 3e-5),
    ("packed documents = each alone", _packed, 3e-5),
    ("later tokens do not reach earlier ones", _later_tokens, 3e-5),
    ("one number of threads = another", _threads, 3e-5),
    ("twice the same = the same bits", _twice, 0.0),
)
"""Name, function of the model that gives both sides, bound. In float32."""


def check_equalities(
    backend: Backend, model: K3 | None = None, equalities: Sequence[Equality] = EQUALITIES
) -> Iterator[Check]:
    """All ways to read the same tokens beside each other."""
    model = (model or awkward_model()).to(backend.device)
    with backend.context(), torch.no_grad():
        for what, sides, bound in equalities:
            yield from _or_failed(what, backend, _both_sides(what, sides, bound, backend, model))


def _both_sides(
    what: str, sides: Callable[[K3], tuple[Tensor, Tensor]], bound: float, backend: Backend, model: K3
) -> Iterator[Check]:
    found, expected = sides(model)
    yield Check(what, backend.name, error_of(found, expected), bound)


def check_float64(backend: Backend, model: K3 | None = None) -> Iterator[Check]:
    """Logits and gradients of a packed row beside the same model in float64."""
    yield from _or_failed("logits and gradients", backend, _float64_checks(backend, model))


def _float64_checks(backend: Backend, model: K3 | None) -> Iterator[Check]:
    model = (model or awkward_model()).to(backend.device)
    with backend.context():
        logits, gradients = _logits_and_gradients(model)
    expected_logits, expected_gradients = _logits_and_gradients(copy.deepcopy(model).cpu().double())
    yield Check("logits = those in float64", backend.name, error_of(logits, expected_logits), 3e-5)
    errors = [error_of(a, b) for a, b in zip(gradients, expected_gradients, strict=True)]
    yield Check("gradients = those in float64", backend.name, max(errors), 2e-4)


def _logits_and_gradients(model: K3) -> tuple[Tensor, Sequence[Tensor]]:
    """Of a packed row, for a fixed random upstream gradient and every parameter that takes part."""
    model = copy.deepcopy(model).requires_grad_()
    ids = _ids(model)
    logits = model(ids, cu_seqlens=_bounds(ids)).logits
    upstream = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3)).to(logits)
    gradients = torch.autograd.grad(logits, list(model.parameters()), upstream, allow_unused=True)
    return logits.detach(), [g for g in gradients if g is not None]
