"""Routing replay: a sampled token is trained through the experts that it was sampled through.

    rollout    RecordingRunner keeps the chosen experts of every token it reads
    training   chosen := those of the rollout;  weights from the live scores,  p_e = s_e / sum of chosen s

Two computations of the same router may disagree where two scores are close, and a token that goes through another
expert has another probability. The mixture weights are never replayed: they are gathered from the scores of now, so the
router has its gradient. A sample that goes on after an update is read again as a whole, and its routes are then those
of that reading.

Source: rollout routing replay (arXiv:2510.11370). K3 does not claim it (its remedy is one scheme of numbers for both);
here it is a switch. Rollouts with it go through torch, since the native step keeps its choices to itself, and without
the prefix cache, so that every sample is read from its beginning.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor, nn

from nanok3.model.decoder import K3
from nanok3.model.latent_moe import Router, Routing
from nanok3.posttrain.sample import Sample
from nanok3.posttrain.score import Packed, length
from nanok3.serve.runner import Runner
from nanok3.serve.scheduler import Work


def routers(model: K3) -> list[Router]:
    """In the order of the layers."""
    return [module for module in model.modules() if isinstance(module, Router)]


class RecordingRunner(Runner):
    """A runner that keeps which experts each token went to, by sequence."""

    def __init__(self, model: K3, memory: int, page_tokens: int | None = None) -> None:
        super().__init__(model, memory, page_tokens)
        self.native, self.without_native = None, "routes are recorded"
        self._routes: dict[str, Int[Tensor, "layers T k"]] = {}

    def read(self, work: list[Work], all_logits: frozenset[str] = frozenset()) -> dict[str, Tensor | Exception]:
        """Piece by piece, so that it is plain whose tokens a router saw."""
        results: dict[str, Tensor | Exception] = {}
        for piece in work:
            found: list[Tensor] = []
            hooks = [
                r.register_forward_hook(lambda m, i, out, kept=found: kept.append(out.chosen))
                for r in routers(self.model)
            ]
            try:
                results |= super().read([piece], all_logits)
            finally:
                for hook in hooks:
                    hook.remove()
            self._keep_routes(piece, found)
        return results

    def _keep_routes(self, piece: Work, found: list[Tensor]) -> None:
        """Behind those of the tokens before; a sequence that is read anew begins anew."""
        new = torch.stack(found).to("cpu", torch.int16)
        assert new.shape[1] == piece.count
        before = self._routes.get(piece.sequence.id, new[:, :0])
        self._routes[piece.sequence.id] = torch.cat([before[:, : piece.start], new], dim=1)

    def take(self, name: str) -> str:
        """The routes of a sequence as text, once; empty where none were kept."""
        routes = self._routes.pop(name, None)
        return "" if routes is None else base64.b64encode(routes.numpy().tobytes()).decode()


def routes_of(sample: Sample, layers: int, top_k: int) -> Int[Tensor, "layers T k"]:
    """What a sample's text holds. ValueError where a token is missing."""
    flat = np.frombuffer(base64.b64decode(sample.routes), dtype=np.int16)
    needed = length(sample)
    if layers == 0 or flat.size % (layers * top_k) or flat.size // (layers * top_k) < needed:
        have = flat.size // max(layers * top_k, 1)
        raise ValueError(
            f"prompt {sample.prompt}, sample {sample.number}: {have} tokens have recorded routes, {needed} are needed"
        )
    return torch.from_numpy(flat.reshape(layers, -1, top_k)[:, :needed].astype(np.int64))


@contextmanager
def replayed(model: K3, row: Packed) -> Iterator[None]:
    """Inside, the tokens of a packed row go to the experts that were recorded for them."""
    modules, top_k = routers(model), model.cfg.num_experts_per_token
    chosen = torch.cat([routes_of(sample, len(modules), top_k) for sample in row.samples], dim=1)
    handles = [m.register_forward_hook(_replay(m, c)) for m, c in zip(modules, chosen)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _replay(router: Router, chosen: Tensor) -> Callable[[nn.Module, Any, Routing], Routing]:
    def hook(module: nn.Module, inputs: Any, routing: Routing) -> Routing:
        wanted = chosen.to(routing.scores.device)
        assert len(wanted) == len(routing.scores)
        weights = routing.scores.gather(1, wanted)
        if router.cfg.moe_renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return Routing(routing.scores, wanted, weights * router.cfg.routed_scaling_factor)

    return hook
