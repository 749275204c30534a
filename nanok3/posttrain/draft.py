"""Training a draft for speculative decoding on a frozen model (report 4, eq. 16): EAGLE-3 with K3's loss.

    p_t = softmax(model's logits after token t)         frozen
    for j = 0 .. 6:                                     seven guesses in a row, as in use
        h^j_t = layer(token t, feature)                 feature: fused from the model for j = 0, then h^(j-1)_(t-1)
        q^j_t = softmax(head(norm(h^j_t)))
    loss = mean over j, t of  -log sum_v min(p_t(v), q^j_t(v))

The sum is the chance that a guess drawn from q is kept, so the loss is the logarithm of what decoding gains from; no
cross entropy is added. In a chain that began at token t - j, the query at t sees the rows of the model's features up to
t - j and the chain's own j rows behind them: the causal scores shifted by j, and a diagonal for each earlier guess.
The tokens of a chain are those of the text. Rows of packed documents never see each other.

What is logged on held-out text: the mean chance by position in the chain, and the accepted length it gives,
1 + sum_k prod_(j <= k) chance_j along each chain. Where the model was trained for MXFP4 experts or on MXFP8 inputs, the
draft is, too (posttrain/draft_run.py). Ours: AdamW and its rate, and the floor of the loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nanok3.data.packing import Batch
from nanok3.model.basics import at_least_float32, position_in_document
from nanok3.model.decoder import K3
from nanok3.model.mla import GatedMLA
from nanok3.model.mtp import Draft, tapped_layers, taps
from nanok3.train.loss import IGNORE

UNROLL = 7
LOWEST = -30.0
"""Of log sum min(p, q): distributions that have nothing in common cost 30, not infinitely much."""


def overlap_loss(p: Float[Tensor, "*b V"], q: Float[Tensor, "*b V"]) -> Float[Tensor, "*b"]:
    """-log sum_v min(p, q), both given as logits; exp of its negative is the chance that a guess is kept."""
    smaller = torch.minimum(at_least_float32(p).log_softmax(-1), at_least_float32(q).log_softmax(-1))
    return -smaller.clamp(min=2 * LOWEST).logsumexp(-1).clamp(min=LOWEST, max=0.0)


@dataclass(frozen=True)
class Read:
    """What the frozen model makes of a packed row."""

    embedded: Float[Tensor, "1 T D"]
    features: Float[Tensor, "1 T 3 D"]
    final: Float[Tensor, "1 T D"]
    position: Int[Tensor, " T"]
    """Of each token in its document."""
    scored: Bool[Tensor, " T"]
    """Whether a token follows it in its document."""


@torch.no_grad()
def read(model: K3, batch: Batch) -> Read:
    """A batch as one packed row."""
    ids, targets = batch.input_ids.view(1, -1), batch.targets.view(-1)
    wanted = tapped_layers(model.cfg)
    with taps(model, wanted) as found:
        final = model.hidden_states(ids, cu_seqlens=batch.cu_seqlens)
    features = torch.stack([found[place] for place in wanted], dim=2)
    position = position_in_document(batch.cu_seqlens, ids.shape[1])
    embedded = model.model.embed_tokens(ids).to(final.dtype)
    return Read(embedded, features, final, position, targets != IGNORE)


def unroll(draft: Draft, row: Read, steps: int = UNROLL) -> list[Float[Tensor, "1 T D"]]:
    """h^0 .. h^(steps - 1). Row t of h^j is of use where at least j tokens of its document stand before it."""
    layer, feature = draft.layer, draft.fuse(row.features)
    keys: list[tuple[Tensor, Tensor]] = []
    found: list[Tensor] = []
    for _ in range(steps):
        x = layer.combine(row.embedded, _from_before(feature, row.position))
        x = x + _attend(draft, x, keys, row.position)
        feature = x + layer.mtp_block.feed(x)
        found.append(feature)
    return found


def _from_before(x: Float[Tensor, "1 T D"], position: Int[Tensor, " T"]) -> Float[Tensor, "1 T D"]:
    """Each row that of the token before; zero at a document's beginning."""
    return x.roll(1, dims=1).masked_fill((position == 0)[None, :, None], 0)


def _attend(
    draft: Draft, x: Float[Tensor, "1 T D"], keys: list[tuple[Tensor, Tensor]], position: Int[Tensor, " T"]
) -> Float[Tensor, "1 T D"]:
    """The block's attention in guess j = len(keys); appends the keys and values of this guess."""
    block = draft.layer.mtp_block
    mla = block.self_attn
    assert isinstance(mla, GatedMLA)
    normed = block.input_layernorm(x)
    keys.append(mla.keys_values(mla.latents(normed)))
    q, j = at_least_float32(mla.queries(normed)), len(keys) - 1
    (k0, v0), own = keys[0], [tuple(y.roll(j - m, dims=1) for y in keys[m]) for m in range(1, j + 1)]
    scores = mla.scale * torch.einsum("bthk,bshk->bths", q, at_least_float32(k0))
    scores = scores.masked_fill(~_visible(position, j)[None, :, None], -torch.inf)
    diagonal = [mla.scale * (q * k).sum(-1, keepdim=True) for k, _ in own]
    weights = torch.cat((scores, *diagonal), dim=-1).softmax(-1).nan_to_num()  # rows of no use may see nothing
    tokens = x.shape[1]
    o = torch.einsum("bths,bshv->bthv", weights[..., :tokens], at_least_float32(v0))
    for m, (_, v) in enumerate(own):
        o = o + weights[..., tokens + m : tokens + m + 1] * v
    o = o.flatten(2)
    if mla.cfg.mla_use_output_gate:
        o = o * torch.sigmoid(at_least_float32(mla.g_proj(normed)))
    attended: Tensor = mla.o_proj(o.to(x.dtype))
    return attended


def _visible(position: Int[Tensor, " T"], j: int) -> Bool[Tensor, "T T"]:
    """Rows up to t - j of the same document."""
    t = torch.arange(len(position), device=position.device)
    start = t - position
    return (t[None] <= t[:, None] - j) & (start[None] == start[:, None])


def losses(model: K3, draft: Draft, row: Read, steps: int = UNROLL) -> list[Float[Tensor, " T"]]:
    """The loss of every row in each guess; NaN where it is of no use."""
    with torch.no_grad():
        p = model.lm_head(row.final)[0]

    def loss(h: Tensor) -> Tensor:
        return overlap_loss(p, model.lm_head(draft.layer.normed(h))[0])

    found = []
    for j, h in enumerate(unroll(draft, row, steps)):
        # Computed again in the backward pass: seven times the logits of all words would not fit.
        of_rows = checkpoint(loss, h, use_reentrant=False)
        assert isinstance(of_rows, Tensor)
        found.append(of_rows.masked_fill(~(row.scored & (row.position >= j)), torch.nan))
    return found


def mean_loss(of_guesses: Sequence[Float[Tensor, " T"]]) -> Float[Tensor, ""]:
    """Over all rows and guesses that count."""
    together = torch.stack(list(of_guesses))
    counts = ~together.isnan()
    return together.masked_fill(~counts, 0).sum() / counts.sum().clamp(min=1)


@dataclass
class Acceptance:
    """Chances that guesses are kept, added up over held-out rows."""

    kept: list[float]
    counts: list[int]
    length: float = 0.0
    chains: int = 0

    @classmethod
    def empty(cls, steps: int = UNROLL) -> Acceptance:
        return cls([0.0] * steps, [0] * steps)

    def add(self, of_guesses: Sequence[Float[Tensor, " T"]]) -> None:
        """One row's losses."""
        chances = [(-of_rows.detach().double()).exp() for of_rows in of_guesses]
        for j, chance in enumerate(chances):
            self.kept[j] += float(chance.nansum())
            self.counts[j] += int((~chance.isnan()).sum())
        # Guess j of the chain that began at t stands in row t + j.
        shifted = [torch.cat((chance[j:], chance.new_full((j,), torch.nan))) for j, chance in enumerate(chances)]
        whole = torch.stack(shifted)
        whole = whole[:, ~whole.isnan().any(0)]
        self.length += float((1 + whole.cumprod(0).sum(0)).sum())
        self.chains += whole.shape[1]

    @property
    def by_position(self) -> list[float]:
        """The mean chance of the first guess, the second, ..."""
        return [kept / max(count, 1) for kept, count in zip(self.kept, self.counts)]

    @property
    def accepted_length(self) -> float:
        """Tokens a pass gives, the model's own included; NaN without a whole chain."""
        return self.length / self.chains if self.chains else math.nan


@torch.no_grad()
def measure(model: K3, draft: Draft, batches: Sequence[Batch], steps: int = UNROLL) -> Acceptance:
    """On held-out text."""
    found = Acceptance.empty(steps)
    for batch in batches:
        found.add(losses(model, draft, read(model, batch), steps))
    return found
