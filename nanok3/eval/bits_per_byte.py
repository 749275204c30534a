"""How well a model predicts text it has not seen, in a unit that no tokenizer can flatter: bits per byte.

    bits per byte = (nats of every token of every document) / (ln 2 x bytes of the documents)

A model with an arithmetic coder would need that many bits for each byte of the text, so the number stands beside
what `zlib -9` and `xz -9e` need for the same bytes. Every token counts, and what is not spelled out here is ours:

    first token      K3 puts no token before a document and never learns p(first token). Nothing predicts it, so it
                     is charged ln(vocabulary) nats, as by a uniform guess.
    end              [EOS] is not part of the text: it adds neither nats nor bytes. (Compressors see the documents
                     joined and do not say where they end either.)
    long documents   a prediction looks back over at most `context` tokens: a longer document is cut into pieces that
                     know nothing of each other (`context=None` never cuts). The last token of a piece is read again
                     as the first of the next, so that every token but a document's first is predicted once.
    compressors      start from nothing and carry no weights, where the model has read a corpus and its own size is
                     not counted. The comparison says how much of the text's regularity is found, not who wins a prize.

Speed: pieces that fit are packed into rows of `row` tokens (document boundaries in `cu_seqlens`); a longer piece is
read in windows of `row` tokens through `ModelState`, which is exact. Logits exist for `CHUNK` tokens at a time.
"""

from __future__ import annotations

import lzma
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

CHUNK = 1024
"""Tokens whose logits exist at once."""


@runtime_checkable
class LanguageModel(Protocol):
    """What is asked of a model here: K3 has it, and so has a test's oracle."""

    training: bool

    def train(self, mode: bool = True) -> Any: ...

    def hidden_states(self, input_ids: Any, *, cu_seqlens: Any = None, state: Any = None) -> Any: ...

    def lm_head(self, hidden: Any) -> Any: ...

    def new_state(self, batch_size: int = 1) -> Any: ...


@runtime_checkable
class TextTokenizer(Protocol):
    """What is asked of a tokenizer."""

    def encode_batch(self, texts: Iterable[str]) -> list[list[int]]: ...


# ---------------------------------------------------------------------- the score of one set of documents


@dataclass(frozen=True)
class Score:
    """Sums over a set of documents; `nats` includes the charge for first tokens."""

    nats: float
    tokens: int
    bytes: int

    @property
    def loss(self) -> float:
        """Nats a token."""
        return self.nats / max(self.tokens, 1)

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / max(self.bytes, 1)


def bits_per_byte(
    model: LanguageModel,
    documents: Iterable[Sequence[int]],
    byte_count: int,
    vocab_size: int,
    context: int | None = 4096,
    row: int = 4096,
) -> Score:
    """Score `documents`, each a sequence of token ids without [EOS], that are `byte_count` bytes of text together.

    vocab_size: of the model, for the charge of first tokens. context: most tokens a prediction may look back on,
    None for all. row: tokens of one forward call; it changes speed and memory, not the result. ValueError for a
    context or row below 2.
    """
    for name, value in (("context", context), ("row", row)):
        if value is not None and value < 2:
            raise ValueError(f"{name} is {value}; it must be at least 2 tokens")
    texts = [document for document in documents if len(document)]
    pieces = [piece for text in texts for piece in cut(text, context)]
    nats = len(texts) * math.log(vocab_size)
    with evaluating(model):
        for group in pack((piece for piece in pieces if len(piece) <= row + 1), row):
            nats += _packed_nats(model, group)
        for piece in pieces:
            if len(piece) > row + 1:
                nats += _long_nats(model, piece, row)
    return Score(nats, sum(map(len, texts)), byte_count)


def cut(document: Sequence[int], context: int | None) -> list[Sequence[int]]:
    """Pieces that make at most `context` predictions each, all of a document's together; none of a single token. A
    piece of n + 1 tokens makes n predictions, and its last token begins the next piece."""
    predictions = len(document) - 1
    size = context or max(predictions, 1)
    return [document[start : start + size + 1] for start in range(0, predictions, size)]


def pack(pieces: Iterable[Sequence[int]], row: int) -> Iterator[list[Sequence[int]]]:
    """Groups of whole pieces that make at most `row` predictions together."""
    group: list[Sequence[int]] = []
    used = 0
    for piece in pieces:
        if group and used + len(piece) - 1 > row:
            yield group
            group, used = [], 0
        group.append(piece)
        used += len(piece) - 1
    if group:
        yield group


def _packed_nats(model: LanguageModel, pieces: list[Sequence[int]]) -> float:
    """Nats of all predictions, in one forward call."""
    device = model_device(model)
    inputs = torch.tensor([token for piece in pieces for token in piece[:-1]], device=device)
    targets = torch.tensor([token for piece in pieces for token in piece[1:]], device=device)
    bounds = torch.tensor([0, *(len(piece) - 1 for piece in pieces)], device=device).cumsum(0)
    hidden = model.hidden_states(inputs[None], cu_seqlens=bounds)[0]
    return next_token_nats(model, hidden, targets).sum().item()


def _long_nats(model: LanguageModel, piece: Sequence[int], row: int) -> float:
    """The same for one piece longer than a row: window by window, memory carried over."""
    ids = torch.tensor(piece, device=model_device(model))
    state, nats = model.new_state(1), 0.0
    for inputs, targets in zip(ids[:-1].split(row), ids[1:].split(row)):
        hidden = model.hidden_states(inputs[None], state=state)[0]
        nats += next_token_nats(model, hidden, targets).sum().item()
    return nats


def next_token_nats(
    model: LanguageModel, hidden: Float[Tensor, "n D"], targets: Int[Tensor, " n"]
) -> Float[Tensor, " n"]:
    """-log p(target) of each row in nats, float64; the logits of `CHUNK` rows exist at a time."""
    parts = [hidden.new_zeros(0, dtype=torch.float64)]
    for states, wanted in zip(hidden.split(CHUNK), targets.split(CHUNK)):
        if len(states):
            logits = model.lm_head(states)
            logits = logits if logits.dtype == torch.float64 else logits.float()
            parts.append((logits.logsumexp(-1) - logits.gather(1, wanted[:, None])[:, 0]).double())
    return torch.cat(parts)


def model_device(model: LanguageModel) -> torch.device:
    parameters = getattr(model, "parameters", None)
    first = next(parameters(), None) if parameters is not None else None
    return torch.device("cpu") if first is None else first.device


@contextmanager
def evaluating(model: LanguageModel) -> Iterator[None]:
    """No gradients and evaluation mode inside (balancing statistics stand still); the mode of before afterwards."""
    training = model.training
    model.train(False)
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


# ---------------------------------------------------------------------- the same bytes, compressed


def compressors(text: bytes) -> dict[str, float]:
    """Bits per byte of `zlib` (level 9) and `xz` (preset 9, extreme) on `text`, headers included. ValueError for no
    bytes."""
    if not text:
        raise ValueError("text is empty; bits per byte need at least one byte")
    packed = {"zlib": zlib.compress(text, 9), "xz": lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)}
    return {name: 8 * len(data) / len(text) for name, data in packed.items()}


# ---------------------------------------------------------------------- slices: named sets of texts


def evaluate_slices(
    model: LanguageModel,
    tokenizer: TextTokenizer,
    slices: Mapping[str, Sequence[str]],
    vocab_size: int,
    context: int | None = 4096,
    max_bytes: int | None = 200_000,
    row: int = 4096,
) -> dict[str, dict[str, float | int]]:
    """For each slice {"bits_per_byte", "zlib", "xz", "bytes", "tokens", "documents", "loss"}.

    slices: name -> texts. Of each slice the first `max_bytes` bytes are taken (whole documents, the last one cut).
    Slices without text are left out. Compressors read the same bytes, joined.
    """
    records: dict[str, dict[str, float | int]] = {}
    for name, texts in slices.items():
        taken = first_bytes(texts, max_bytes)
        joined = "".join(taken).encode()
        if not joined:
            continue
        score = bits_per_byte(model, tokenizer.encode_batch(taken), len(joined), vocab_size, context, row)
        records[name] = {
            "bits_per_byte": score.bits_per_byte,
            **compressors(joined),
            "bytes": score.bytes,
            "tokens": score.tokens,
            "documents": len(taken),
            "loss": score.loss,
        }
    return records


def first_bytes(texts: Sequence[str], limit: int | None) -> list[str]:
    """Texts from the front until `limit` UTF-8 bytes; the last is cut between two characters. Lone surrogates become
    U+FFFD, as the tokenizer reads them."""
    taken: list[str] = []
    left = math.inf if limit is None else limit
    for text in texts:
        content = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()
        if len(content) > left:
            content = content[: int(left)]
        if whole := content.decode("utf-8", "ignore"):
            taken.append(whole)
        left -= len(content)
        if left <= 0:
            break
    return taken
