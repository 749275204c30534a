"""Quantile Balancing: the router bias that gives every expert its share of the tokens, read off a distribution.

    route     top-k of  s_ij + b_j            s sigmoid scores; the bias decides who is chosen, and nothing else
    cutoff    a_i  = (k+1)-th largest of  s_ij + b_j        what an expert must exceed to win token i
    required  r_ij = a_i - s_ij               the bias with which expert j would just win it
    next      b_j  = k/E-quantile over i of r_ij,  then minus the mean over j

With that bias expert j wins the fraction k/E of the tokens, were the cutoffs to stay: no step size to tune (report
2.3.3, eqs. 13-14). It is one step of exact coordinate descent on the dual of the balanced assignment problem (App. C,
`solve`). The bias acts from the next optimizer step on and is frozen at inference.

Tokens of a step arrive in microbatches and on several machines, so the distribution is kept as counts (App. D): per
layer and expert 1000 equal bins over [min b - 1, max b + 1], which contains every r; one sum over all machines; then
the quantile is read from the cumulative counts, linear within its bin. With bins of width w the error is at most w;
as w shrinks the result tends to the ceil(q)-th smallest r, q = m k / E, which is what `next_bias` takes.

Ours: the cutoff is found from the chosen experts instead of by a top-(k+1), and hooks exist only inside `observe()`, so
that evaluation cannot count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from nanok3.model.latent_moe import tally

BINS = 1000


# ---------------------------------------------------------------------- exact


def cutoffs(biased: Float[Tensor, "m E"], chosen: Int[Tensor, "m k"]) -> Float[Tensor, "m 1"]:
    """The (k+1)-th largest biased score of each token: the largest that was not chosen. Where all are chosen (k = E)
    the smallest stands in."""
    if chosen.shape[1] == biased.shape[1]:
        return biased.amin(1, keepdim=True)
    return biased.scatter(1, chosen, -torch.inf).amax(1, keepdim=True)


def next_bias(scores: Float[Tensor, "m E"], bias: Float[Tensor, " E"], top_k: int) -> Float[Tensor, " E"]:
    """The exact update from all tokens of a step at once, mean-centred. Without tokens the bias stays; with k = E there
    is nothing to balance and it is zero."""
    tokens, experts = scores.shape
    if top_k == experts:
        return torch.zeros_like(bias)
    if tokens == 0:
        return bias.clone()
    quantile = _required(scores, bias, top_k).kthvalue(_rank(tokens, top_k, experts), dim=0).values
    return quantile - quantile.mean()


def solve(scores: Float[Tensor, "m E"], top_k: int, rounds: int = 200) -> Float[Tensor, " E"]:
    """The balancing bias of a fixed set of tokens: Algorithm 1 of the report from zero bias, alternating the two exact
    coordinate minimisations until nothing changes or `rounds` are over.

        alpha_i = (k+1)-th largest over j of  s_ij - beta_j
        beta_j  = (mk/E + 1)-th largest over i of  s_ij - alpha_i              the bias is -beta, mean-centred
    """
    tokens, experts = scores.shape
    bias = scores.new_zeros(experts)
    if top_k == experts or tokens == 0:
        return bias
    rank = min(_rank(tokens, top_k, experts) + 1, tokens)  # ascending in alpha - s: the same order statistic
    for _ in range(rounds):
        before = bias
        bias = _required(scores, bias, top_k).kthvalue(rank, dim=0).values
        bias = bias - bias.mean()
        if torch.equal(bias, before):
            break
    return bias


def _required(scores: Tensor, bias: Tensor, top_k: int) -> Tensor:
    """r (m, E)."""
    biased = scores + bias
    return cutoffs(biased, biased.topk(top_k, dim=1).indices) - scores


def _rank(tokens: int, top_k: int, experts: int) -> int:
    """ceil(m k / E), the number of tokens an expert should win."""
    return -(-tokens * top_k // experts)


# ---------------------------------------------------------------------- from counts


def count_required(
    scores: Float[Tensor, "m E"], chosen: Int[Tensor, "m k"], bias: Float[Tensor, " E"], bins: int = BINS
) -> Int[Tensor, "E bins"]:
    """Histogram of the required biases of each expert over [min b - 1, max b + 1]; every row sums to m."""
    experts = scores.shape[1]
    low, width = _range(bias, bins)
    required = cutoffs(scores + bias, chosen) - scores
    place = required.sub_(low).div_(width).int().clamp_(0, bins - 1)
    place += torch.arange(experts, dtype=torch.int32, device=scores.device) * bins
    return tally(place.flatten(), experts * bins).view(experts, bins)


def quantiles(
    counts: Int[Tensor, "*layers E bins"], bias: Float[Tensor, "*layers E"], top_k: int
) -> Float[Tensor, "*layers E"]:
    """The k/E-quantile of every histogram, in float64: the first bin whose cumulative count reaches ceil(q), and in it
    the share (q - before) / inside. Not centred; NaN where a histogram is empty."""
    experts, bins = counts.shape[-2:]
    reached = counts.cumsum(-1)
    total = reached[..., -1:]
    q = total.double() * top_k / experts
    rank = (total * top_k + experts - 1) // experts
    place = (reached < rank).sum(-1, keepdim=True).clamp(max=bins - 1)
    inside = counts.gather(-1, place)
    before = reached.gather(-1, place) - inside
    low, width = _range(bias.double(), bins)
    value = low + (place + ((q - before) / inside).clamp(0, 1)) * width
    return torch.where(total > 0, value, torch.nan).squeeze(-1)


def _range(bias: Tensor, bins: int) -> tuple[Tensor, Tensor]:
    """Lower end and bin width, with a last axis of 1 for a stack of layers."""
    low, high = bias.amin(-1, keepdim=True), bias.amax(-1, keepdim=True)
    if bias.dim() > 1:
        low, high = low.unsqueeze(-1), high.unsqueeze(-1)
    return low - 1, (high - low + 2) / bins


# ---------------------------------------------------------------------- in a model


@dataclass(frozen=True)
class RouterLoad:
    """How the tokens of one step were spread over the experts of one layer."""

    name: str
    loads: Int[Tensor, " E"]
    """Tokens that chose each expert."""

    @property
    def max_over_mean(self) -> float:
        """1 is perfect balance; 1.0 also without any token."""
        mean = float(self.loads.double().mean())
        return float(self.loads.max()) / mean if mean else 1.0

    @property
    def dead(self) -> int:
        """Experts that no token chose."""
        return int((self.loads == 0).sum())


def _bias(router: nn.Module) -> Tensor:
    return router.get_buffer("e_score_correction_bias")


class QuantileBalancer:
    """Sets the bias of every router of a model once per optimizer step.

        with balancer.observe():            around the forward of each microbatch
            hidden = model.hidden_states(ids)
        ...
        loads = balancer.step()             after the optimizer's step

    A router is a submodule with a buffer `e_score_correction_bias` whose output has `scores` and `chosen`. Counts are
    taken in training mode only. `update_bias=False` leaves the biases alone and only reports loads. `ema` in [0, 1)
    keeps that much of the old bias (report: optional, less noise; 0 is no memory).
    """

    def __init__(self, model: nn.Module, update_bias: bool = True, ema: float = 0.0, bins: int = BINS) -> None:
        if not 0 <= ema < 1:
            raise ValueError(f"ema is {ema}; it must lie in [0, 1)")
        if bins < 1:
            raise ValueError(f"bins is {bins}; it must be at least 1")
        self.routers = {
            name: module for name, module in model.named_modules() if hasattr(module, "e_score_correction_bias")
        }
        self.update_bias, self.ema, self.bins = update_bias, ema, bins
        self._top_k: int | None = None
        self._rows: Tensor | None = None
        self._tokens = 0
        self.counts = self._empty()
        """int64 (layers, E, bins + 1): the histograms, and the load in the last column."""

    @property
    def layers(self) -> list[str]:
        """Names of the routers, in the order of every other list here."""
        return list(self.routers)

    @contextmanager
    def observe(self, mask: Bool[Tensor, "*b"] | None = None) -> Iterator[None]:
        """Count what the routers see inside. `mask` is true for real tokens, one entry for each token of the
        microbatch; padding must not vote."""
        if mask is not None:
            self._tokens, self._rows = mask.numel(), mask.flatten().nonzero()[:, 0]  # once, not in every layer
        handles = [
            module.register_forward_hook(self._hook(layer)) for layer, module in enumerate(self.routers.values())
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._rows = None

    @torch.no_grad()
    def step(self, all_reduce: Callable[[Tensor], Any] | None = None) -> list[RouterLoad]:
        """Set the biases for the next step, forget the counts, and return each layer's loads.

        `all_reduce` sums a tensor in place over all ranks that saw different tokens (data and context parallel, not
        tensor parallel); it is called once.
        """
        if not self.routers:
            return []
        if all_reduce is not None:
            all_reduce(self.counts)
        histograms, loads = self.counts[..., :-1], self.counts[..., -1].clone()
        if self.update_bias and self._top_k is not None:
            self._set_biases(histograms, self._top_k)
        self.counts.zero_()
        return [RouterLoad(name, load) for name, load in zip(self.routers, loads, strict=True)]

    def _set_biases(self, histograms: Tensor, top_k: int) -> None:
        biases = [_bias(module) for module in self.routers.values()]
        old = torch.stack(biases).double()
        new = quantiles(histograms, old, top_k)
        new = new - new.mean(-1, keepdim=True)
        if top_k == histograms.shape[1]:
            new = torch.zeros_like(new)
        new = self.ema * old + (1 - self.ema) * new
        new = torch.where(new.isnan(), old, new)  # no token came by: the bias stays
        for bias, values in zip(biases, new, strict=True):
            bias.copy_(values)

    def _hook(self, layer: int) -> Callable[[nn.Module, Any, Any], None]:
        @torch.no_grad()
        def count(module: nn.Module, _inputs: Any, routing: Any) -> None:
            # A checkpointed forward runs again during backward; its tokens were counted the first time.
            if not module.training or torch._C._current_graph_task_id() != -1:
                return
            scores, chosen = routing.scores.detach(), routing.chosen
            if self._rows is not None:
                if self._tokens != len(scores):
                    raise ValueError(f"the mask has {self._tokens} tokens; router {layer} saw {len(scores)}")
                scores, chosen = scores[self._rows], chosen[self._rows]
            self._top_k = chosen.shape[1]
            counts = self.counts[layer]
            counts[:, :-1] += count_required(scores, chosen, _bias(module), self.bins)
            counts[:, -1] += tally(chosen.flatten(), len(counts))

        return count

    def _empty(self) -> Tensor:
        biases = [_bias(module) for module in self.routers.values()]
        sizes = {len(bias) for bias in biases}
        if len(sizes) > 1:
            raise ValueError(f"routers have different numbers of experts: {sorted(sizes)}; they must be equal")
        experts = sizes.pop() if sizes else 0
        device = biases[0].device if biases else None
        return torch.zeros(len(biases), experts, self.bins + 1, dtype=torch.int64, device=device)

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Counts in the middle of a step; the biases themselves are buffers of the model."""
        return {"counts": self.counts.clone(), "top_k": self._top_k}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """ValueError when the counts are those of another model."""
        counts = state["counts"]
        if counts.shape != self.counts.shape:
            raise ValueError(f"balancer counts have shape {list(counts.shape)}; expected {list(self.counts.shape)}")
        self.counts.copy_(counts)
        self._top_k = state["top_k"]
