"""The prediction layer learns beside the model: from each thought, the token after the next (report table 1; the form
is DeepSeek-V3's).

    feature_s    what the model read of its depth for the last time at token s
    h_s          layer(embedding of token s + 1, feature_s)          model/mtp.py; row s + 1 there
    loss         mean CE(token s + 1)  +  W  mean over s of CE(head(norm(h_s)), token s + 2)

Embedding and head are the model's own, and the second loss moves them and the features too: the model learns to think
one token ahead. Tokens s, s + 1 and s + 2 stand in one document; its first token has no thought before it and is not
guessed from, though later rows see its row. The layer is a submodule of the model while it trains, so the optimizer,
Quantile Balancing, QK-Clip, QAT, recomputation and the gradient's norm treat it as one layer more.

Packed rows and pictures are what they are for the model: the layer reads the row as it was spliced. K3 did not publish
W; that it is one number for the whole run, and 0 (no layer) unless asked for, is ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from nanok3.baselines.frame import Baseline
from nanok3.data.packing import Batch
from nanok3.ledger import prediction_flops
from nanok3.model.basics import position_in_document
from nanok3.model.decoder import K3
from nanok3.model.mtp import PredictionLayer, prediction_of, taps
from nanok3.train.loss import IGNORE, count_targets, cross_entropy, step_loss


def layer_of(model: K3 | Baseline, weight: float) -> PredictionLayer | None:
    """The layer that is to learn. ValueError where there is a weight without a layer, or a layer without a weight."""
    layer = prediction_of(model)
    if layer is None and weight:
        kind = "a baseline" if isinstance(model, Baseline) else "this model, or the checkpoint it came from,"
        raise ValueError(f"mtp_weight is {weight}; {kind} has no prediction layer, it must be 0")
    if layer is not None and not weight:
        raise ValueError("mtp_weight is 0; the model has a prediction layer, which must go on learning: above 0")
    return layer


def labels(batch: Batch) -> Int[Tensor, "1 T"]:
    """Of each row: the next token, where the row and the one before it are of one document."""
    targets = batch.targets.view(1, -1)
    first = position_in_document(batch.cu_seqlens, targets.shape[1]) == 0
    return targets.masked_fill(first, IGNORE)


class Prediction:
    """The second loss of a run; with weight 0 it does nothing.

    begin(batches)               the step's microbatches
    with watch():                around the model's forward of each
    loss(batch)                  its share, weighted; afterwards `mean` is the step's, not weighted
    """

    def __init__(self, model: K3 | Baseline, weight: float) -> None:
        self.model, self.weight, self.layer = model, weight, layer_of(model, weight)
        self.mean: float | None = None
        self._tokens = 0
        self._embedded = torch.empty(0)
        self._features: dict[int, Tensor] = {}

    def begin(self, batches: Sequence[Batch]) -> None:
        if self.layer is not None:
            self.mean, self._tokens = 0.0, sum(count_targets(labels(batch)) for batch in batches)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Keep what the layer will read: the spliced embedding and the last feature."""
        if self.layer is None:
            yield
            return
        assert isinstance(self.model, K3)

        def embedding(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            self._embedded = inputs[0]

        handle = self.model.model.register_forward_pre_hook(embedding)
        try:
            with taps(self.model, (len(self.model.model.layers),)) as self._features:
                yield
        finally:
            handle.remove()

    def hidden(self, batch: Batch) -> Float[Tensor, "1 T D"] | None:
        """What the head reads to guess the token after the next, for the rows just watched; inside the observers, so
        that routers are counted."""
        if self.layer is None:
            return None
        (feature,) = self._features.values()
        h = self.layer(self._embedded, before(feature, batch.cu_seqlens), batch.cu_seqlens)
        return self.layer.normed(h)

    def loss(self, hidden: Float[Tensor, "1 T D"] | None, batch: Batch) -> Float[Tensor, ""] | None:
        """A microbatch's share of the step's weighted loss."""
        if hidden is None:
            return None
        loss_sum, _ = cross_entropy(hidden, self.model.lm_head.weight, labels(batch))
        share = step_loss(loss_sum, self._tokens)
        assert self.mean is not None
        self.mean += float(share.detach())
        return self.weight * share

    @torch.no_grad()
    def score(self, batch: Batch) -> tuple[float, int]:
        """Summed loss and number of guesses of a batch that was just watched, for validation."""
        hidden = self.hidden(batch)
        if hidden is None:
            return 0.0, 0
        loss_sum, count = cross_entropy(hidden, self.model.lm_head.weight, labels(batch))
        return float(loss_sum), count

    def flops(self, tokens: int) -> float:
        """A token's, forward and backward, in rows of so many."""
        if self.layer is None:
            return 0.0
        assert isinstance(self.model, K3)
        return 3 * prediction_flops(self.model.cfg, tokens)


def before(x: Float[Tensor, "1 T D"], cu_seqlens: Int[Tensor, " n1"]) -> Float[Tensor, "1 T D"]:
    """Each row that of the token before it; zero at a document's beginning."""
    first = position_in_document(cu_seqlens, x.shape[1]) == 0
    return x.roll(1, dims=1).masked_fill(first[None, :, None], 0)
