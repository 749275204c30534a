"""A whole K3 read in every way there is, on an awkward model, for every backend:

token by token = in pieces = at once = in a batch = packed with others;  logits and gradients = those in float64
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from nanok3.config import K3Config
from nanok3.eval.exactness import Backend, Check, error_of, or_failed
from nanok3.model.decoder import K3
from nanok3.model.native_decode import NativeDecoder


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
    ("later tokens reach no earlier ones", _later_tokens, 3e-5),
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
            yield from or_failed(what, backend, _both_sides(what, sides, bound, backend, model))


def _both_sides(
    what: str, sides: Callable[[K3], tuple[Tensor, Tensor]], bound: float, backend: Backend, model: K3
) -> Iterator[Check]:
    found, expected = sides(model)
    yield Check(what, backend.name, error_of(found, expected), bound)


def check_float64(backend: Backend, model: K3 | None = None) -> Iterator[Check]:
    """Logits and gradients of a packed row beside the same model in float64."""
    yield from or_failed("logits and gradients", backend, _float64_checks(backend, model))


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
