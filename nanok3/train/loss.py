"""Next-token loss over a large vocabulary, without ever holding all logits.

    loss = sum over valid tokens of  logsumexp(W h) - (W h)[target]

K3 has 163,840 words: the float32 logits of 16k tokens alone would be 10 GiB. The loss is one scalar, so its
gradient with respect to the logits, softmax(W h) - onehot(target), is known up to one factor while the logits
of a chunk are still at hand. The forward pass therefore walks over the tokens in chunks, forms each chunk's
gradients at once and throws its logits away; the backward pass only multiplies by the factor that arrives
from above (ours; a well-known arrangement). Matmuls run in the dtype of `hidden` (bf16 in float32 where the
processor has no bf16), the softmax and the sums in at least float32.

The loss of an optimizer step is one mean over all its tokens. A mean per microbatch, averaged, would weigh a
token by the company it keeps; hence `cross_entropy` returns a sum and a count, and `step_loss` divides by the
count of the whole step:

    tokens = sum(count_targets(batch.targets) for batch in microbatches)    # of all ranks
    for batch in microbatches:
        loss_sum, _ = cross_entropy(model.hidden_states(batch.inputs), model.lm_head.weight, batch.targets)
        step_loss(loss_sum, tokens).backward()

Tokens may weigh differently (`weighted_cross_entropy`); then the sum of weights takes the place of their number.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from nanok3.model.basics import product_dtype

IGNORE = -100
"""Target of a position that is not predicted: padding, a prompt, the last token of a document."""


def cross_entropy_reference(
    hidden: Float[Tensor, "*b D"], weight: Float[Tensor, "vocab D"], targets: Int[Tensor, "*b"]
) -> tuple[Float[Tensor, ""], int]:
    """`cross_entropy` in the plainest form, with all logits in memory."""
    logits = (hidden @ weight.to(hidden.dtype).T).to(_softmax_dtype(hidden.dtype))
    loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORE, reduction="sum")
    return loss, count_targets(targets)


def cross_entropy(
    hidden: Float[Tensor, "*b D"],
    weight: Float[Tensor, "vocab D"],
    targets: Int[Tensor, "*b"],
    chunk: int | None = None,
) -> tuple[Float[Tensor, ""], int]:
    """Sum of the token losses in nats (float32; float64 for float64 `hidden`) and the number of tokens in it.

    `targets` equal to -100 count neither in the loss nor in the number, and their rows of `hidden` may hold
    anything. At most `chunk` x vocab logits exist at a time (None: as many tokens as suit the vocabulary and the
    device). The gradient of `weight` comes back in the dtype of `weight`. ValueError for a target that is no
    row of `weight`.
    """
    loss, _ = weighted_cross_entropy(hidden, weight, targets, None, chunk)
    return loss, count_targets(targets)


def weighted_cross_entropy(
    hidden: Float[Tensor, "*b D"],
    weight: Float[Tensor, "vocab D"],
    targets: Int[Tensor, "*b"],
    token_weights: Float[Tensor, "*b"] | None,
    chunk: int | None = None,
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """The token losses summed with their weights (None: all 1), which is what is learned from; and without, for the
    log, which has no gradient."""
    if chunk is None:
        chunk = _default_chunk(len(weight), hidden.device)
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}; it must be at least 1 token")
    flat = targets.flatten()
    rows = (flat != IGNORE).nonzero().squeeze(1)
    wanted = flat[rows].long()
    _check_targets(wanted, weight.shape[0])
    states = hidden.reshape(-1, hidden.shape[-1]).to(product_dtype(hidden))
    weighing = None if token_weights is None else token_weights.flatten()[rows]
    return _ChunkedCrossEntropy.apply(states, weight, rows, wanted, weighing, chunk, torch.is_grad_enabled())


def sum_of_weights(targets: Int[Tensor, "*b"], token_weights: Float[Tensor, "*b"] | None) -> float:
    """Of the positions that are predicted."""
    if token_weights is None:
        return count_targets(targets)
    return float(token_weights[targets != IGNORE].sum(dtype=torch.float64))


def count_targets(targets: Int[Tensor, "*b"]) -> int:
    """How many positions are predicted."""
    return int((targets != IGNORE).sum())


def step_loss(loss_sum: Float[Tensor, ""], tokens_of_step: float) -> Float[Tensor, ""]:
    """A microbatch's share of the step's mean loss; all shares add up to the mean over all tokens.

    `tokens_of_step` counts the valid targets of every microbatch on every rank, or adds up their weights. Where ranks
    average their gradients instead of adding them, the caller multiplies by the number of ranks.
    """
    return loss_sum / max(tokens_of_step, 1)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Both gradients are finished in the forward pass, for an upstream gradient of 1."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        rows: Tensor,
        targets: Tensor,
        weights: Tensor | None,
        chunk: int,
        grad: bool,
    ) -> tuple[Tensor, Tensor]:
        dtype = _softmax_dtype(hidden.dtype)
        matrix = weight.to(hidden.dtype)
        # Two buffers serve all chunks: fresh memory for every chunk costs more than the softmax itself.
        logits = hidden.new_empty(min(chunk, len(rows)), len(weight))
        work = logits if dtype == hidden.dtype else torch.empty_like(logits, dtype=dtype)
        loss, plain = (torch.zeros((), dtype=dtype, device=hidden.device) for _ in range(2))
        d_hidden = torch.zeros_like(hidden) if grad and ctx.needs_input_grad[0] else None
        d_weight = torch.zeros_like(weight, dtype=dtype) if grad and ctx.needs_input_grad[1] else None
        parts = rows.split(chunk)
        weighing = [None] * len(parts) if weights is None else weights[:, None].to(dtype).split(chunk)
        for some, wanted, w in zip(parts, targets[:, None].split(chunk), weighing, strict=True):
            states, n = hidden[some], len(some)
            torch.mm(states, matrix.T, out=logits[:n])
            losses = _softmax_(work[:n].copy_(logits[:n]) if work is not logits else work[:n], wanted)
            plain += losses.sum()
            loss += (losses if w is None else losses * w).sum()
            if d_hidden is None and d_weight is None:
                continue
            d_logits = work[:n].scatter_add_(1, wanted, -torch.ones_like(losses))
            d_logits = logits[:n].copy_(d_logits if w is None else d_logits.mul_(w))
            if d_hidden is not None:
                d_hidden[some] = d_logits @ matrix
            if d_weight is not None:
                d_weight += d_logits.T @ states
        ctx.save_for_backward(d_hidden, None if d_weight is None else d_weight.to(weight.dtype))
        ctx.mark_non_differentiable(plain)
        return loss, plain

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, _plain: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight = ctx.saved_tensors
        scaled = [None if d is None else d * upstream.to(d.dtype) for d in (d_hidden, d_weight)]
        return (*scaled, None, None, None, None, None)


def _softmax_(logits: Tensor, wanted: Tensor) -> Tensor:
    """Turn logits (n, vocab) into probabilities in place; returns the losses (n, 1) of the wanted entries (n,
    1)."""
    logits -= logits.amax(1, keepdim=True)
    hit = logits.gather(1, wanted)
    total = logits.exp_().sum(1, keepdim=True)
    logits /= total
    return total.log() - hit


def _softmax_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _default_chunk(vocab: int, device: torch.device) -> int:
    """Tokens for about 4 M logits on a CPU, whose caches they should not leave by far, and 128 M elsewhere."""
    return min(max((2**22 if device.type == "cpu" else 2**27) // vocab, 128), 4096)


def _check_targets(wanted: Tensor, vocab: int) -> None:
    if wanted.numel():
        low, high = (int(bound) for bound in wanted.aminmax())
        if low < 0 or high >= vocab:
            raise ValueError(
                f"targets run from {low} to {high}; allowed: 0 to {vocab - 1} (rows of weight) and {IGNORE}"
            )
