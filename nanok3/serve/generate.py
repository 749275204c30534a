"""One sequence, spoken token by token: read the prompt in chunks, then repeat "sample, show, read what was sampled".

    logits = last row of model(prompt[0:C]), model(prompt[C:2C]), ...       the state carries on from chunk to chunk
    repeat   id ~ sample(logits);   text += id;   logits = model(id)

The state is all that is kept: of a KDA layer a fixed number of bytes however long the text, of an MLA layer one latent
row a token. Only the last row of a chunk goes through the head, so a long prompt costs no more memory than a chunk.

What is shown: whole characters only; nothing of a stop string, not even its beginning while it may still become one;
no end token. Ids without a name in the tokenizer, whose embeddings nothing has trained, are never sampled.

On a CPU a token after the prompt is read by one native call (model/native_decode.py) where the model allows it, else by
torch. With a draft (speculative.py) several are read at once, and those that are what would have been said are kept.

Pictures stand where the prompt has a placeholder for each, or before a text that has none, with a newline between, as
in captions (docs/formats.md). What the model sees of one is computed once, and spliced into the chunks it falls into.

Ours: training texts begin without any token before them, so a prompt is read as it is; for an empty prompt, which would
leave nothing to read, the model reads the document boundary [EOS].
"""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from nanok3.data.chat import IMAGE_PLACEHOLDER
from nanok3.data.images import Image, Source, preprocess_image
from nanok3.data.tokenizer import StreamDecoder, Tokenizer
from nanok3.model.basics import at_least_float32
from nanok3.model.cache import ModelState
from nanok3.model.decoder import K3
from nanok3.model.mtp import Draft, taps
from nanok3.model.native_decode import NativeDecoder
from nanok3.serve.lone_draft import LoneDraft
from nanok3.serve.pictures import Shown, eyes_of, show
from nanok3.serve.sampler import SamplingParams, TokenCounts, new_generator, sample
from nanok3.serve.speculative import Drafted, Drafter, settle

PREFILL_CHUNK = 512
"""Tokens of a prompt read at once."""

Images: TypeAlias = "Sequence[Source | Image | Shown]"
"""Files, bytes, data URLs, prepared pictures; or pictures that have their places (pictures.show), for a prompt that
begins in the middle of one."""


@dataclass(frozen=True)
class Completion:
    """What was said, and what it took."""

    text: str
    """Without end token or stop string; bytes that end inside a character are left out (`ids` has them)."""
    ids: list[int]
    """Every id that was sampled, an ending one included."""
    logprobs: list[float]
    """Of each id, as `sample` defines it."""
    finish_reason: str
    """'stop' (end token or stop string), 'length' (max_tokens, or the context is full) or 'interrupted'."""
    prompt_tokens: int
    """Ids of the prompt that were read: all, unless interrupted before the first was sampled."""
    seconds_prefill: float
    seconds_decode: float
    """Without the time in which a reader of the stream held the pieces."""
    state: ModelState
    """It has read the prompt and all ids but the last; `state.tokens` counts."""
    drafted: Drafted | None = None
    """What was guessed, where there was a draft."""

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens a second."""
        return self.prompt_tokens / max(self.seconds_prefill, 1e-9)

    @property
    def decode_rate(self) -> float:
        """Tokens a second after the first, which comes out of the prefill; 0 where there are none."""
        return max(len(self.ids) - 1, 0) / max(self.seconds_decode, 1e-9)


class StopStrings:
    """Passes text on until one of `stops` occurs in it. Of several the one that is complete first counts, and of those
    the longest, so the result does not depend on how the text was cut into pieces."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self.found: str | None = None
        self._held = ""

    def push(self, text: str) -> str:
        """What may be shown now. Once a stop string is found: the text before it, and nothing from then on."""
        if self.found is not None:
            return ""
        text = self._held + text
        ends = [(text.index(stop) + len(stop), -len(stop), stop) for stop in self.stops if stop in text]
        if ends:
            end, _, self.found = min(ends)
            self._held = ""
            return text[: end - len(self.found)]
        keep = max((_overlap(text, stop) for stop in self.stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back and did not become a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, but not the whole of it."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


@contextmanager
def unbroken() -> Iterator[None]:
    """Ctrl-C waits until the block has ended: a model stopped in the middle of a forward pass would leave a state
    that has read a token in some layers only. Elsewhere than in the main thread no signal arrives anyway."""
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield
        return
    waiting: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: waiting.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if waiting:
        previous(*waiting[0])


class Generation:
    """A running answer: an iterator over pieces of text, each shown once. `completion()` tells at any time what has
    been said; after an interrupt call `interrupt()` first. Made by `stream`."""

    def __init__(
        self,
        model: K3,
        tokenizer: Tokenizer,
        prompt: str | Sequence[int],
        params: SamplingParams,
        state: ModelState | None,
        prefill_chunk: int,
        generator: torch.Generator | None,
        images: Images,
        draft: tuple[Drafter | Draft, int] | None,
    ) -> None:
        if prefill_chunk < 1:
            raise ValueError(f"prefill_chunk is {prefill_chunk}; it must be at least 1")
        self.model, self.params, self.chunk = model, params, prefill_chunk
        self.state = model.new_state(1) if state is None else state
        self.eyes = eyes_of(model)
        prompt, self.pictures = with_images(model, tokenizer, prompt, images, self.state.tokens)
        self.prompt = prompt_ids(model, tokenizer, prompt, self.state)
        self.limit = min(params.max_tokens, room(model, self.state, self.prompt))
        self.generator = new_generator(params.seed) if generator is None else generator
        self.decoder = NativeDecoder.of(model)
        """Reads single tokens; where it is the reason why there is none, torch does."""
        self.ends = {tokenizer.eos_id, tokenizer.end_of_msg_id, *params.stop_ids}
        unsaid = unnamed_ids(tokenizer, model.cfg.vocab_size) + ([] if self.eyes is None else [self.eyes.pad])
        self.forbidden = torch.tensor(unsaid, dtype=torch.int64)
        self.counts = TokenCounts.of(self.prompt, model.cfg.vocab_size) if params.counts_tokens else None
        self.draft = None
        if draft is not None:
            self.draft = LoneDraft(model, self.prompt, draft[0], params, self.generator, draft[1], self.limit)
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.finish_reason: str | None = None
        self.prompt_read = 0
        self.seconds_prefill = self.seconds_decode = 0.0
        self._decoder, self._stops = StreamDecoder(tokenizer), StopStrings(params.stop)
        self._said, self._handed = "", 0
        self._pieces = self._run()

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return next(self._pieces)

    def interrupt(self) -> str:
        """End the answer here; the text said but not yet handed out."""
        if self.finish_reason is None:
            self._finish("interrupted")
        return self._hand_over()

    def completion(self) -> Completion:
        return Completion(
            self._said,
            list(self.ids),
            list(self.logprobs),
            self.finish_reason or "interrupted",
            self.prompt_read,
            self.seconds_prefill,
            self.seconds_decode,
            self.state,
            None if self.draft is None else self.draft.drafted,
        )

    def _run(self) -> Iterator[str]:
        for begin in range(0, len(self.prompt), self.chunk):
            with unbroken():
                start = time.perf_counter()
                logits = self._read(self.prompt[begin : begin + self.chunk])
                self.prompt_read = min(begin + self.chunk, len(self.prompt))
                self.seconds_prefill += time.perf_counter() - start
        while self.finish_reason is None:
            with unbroken():
                start = time.perf_counter()
                if self.draft is None or not self.ids or not self._say_some(self.draft):
                    logits = self._read(self.ids[-1:]) if self.ids else logits
                    self._say(*sample(logits, self.params, self.generator, self.counts))
                    if self.draft is not None and len(self.ids) > 1:
                        self.draft.plain()
                self.seconds_decode += time.perf_counter() - start
            if piece := self._hand_over():
                yield piece

    def _say_some(self, draft: LoneDraft) -> bool:
        """Read the last token and a draft, and say what of it is right and one token more; False if there is none."""
        guesses = draft.guesses(self.ids, self.limit - len(self.ids) - 1)
        if not guesses:
            return False
        rows = draft.read([self.ids[-1], *(guess.id for guess in guesses)], self.state)
        rows, read = rows.index_fill(1, self.forbidden, -torch.inf), 0
        for row, guess in zip(rows, [*guesses, None], strict=True):
            self._say(*settle(row, guess, self.params, self.generator, self.counts))
            read += 1
            if self.finish_reason is not None or guess is None or self.ids[-1] != guess.id:
                break
        draft.keep(read)
        return True

    @torch.no_grad()
    def _read(self, ids: list[int]) -> Float[Tensor, " vocab"]:
        """Logits after `ids`; the state has read them. Ids that may not be said are at -inf."""
        tokens = torch.tensor([ids], device=self.model.lm_head.weight.device)
        tapped = () if self.draft is None else self.draft.tapped
        shown = any(picture.start <= self.state.tokens < picture.end for picture in self.pictures)
        if len(ids) == 1 and not shown and isinstance(self.decoder, NativeDecoder):
            step = self.decoder.step_state(tokens, self.state, tapped=tapped)
            self._tell(step.taps)
            logits = step.logits[0]
        else:
            with taps(self.model, tapped) as found:
                if self.eyes is None:
                    final = self.model.hidden_states(tokens, state=self.state)
                else:
                    final = self.eyes.hidden_states(tokens, self.pictures, self.state, self)
            self._tell(torch.stack([found[layer][0] for layer in tapped], dim=1) if found else None)
            logits = at_least_float32(self.model.lm_head(final[:, -1:])[0, 0]).cpu()
        return logits.index_fill(0, self.forbidden, -torch.inf)

    def _tell(self, features: Float[Tensor, "rows layers D"] | None) -> None:
        """A trained draft reads along."""
        if self.draft is not None and self.draft.tapped and features is not None:
            self.draft.heard(features)

    def _say(self, token: int, logprob: float) -> None:
        self.ids.append(token)
        self.logprobs.append(logprob)
        if self.counts is not None:
            self.counts.add(token)
        if token in self.ends:
            return self._finish("stop")
        self._said += self._stops.push(self._decoder.push(token))
        if self._stops.found is not None:
            self._finish("stop")
        elif len(self.ids) == self.limit:
            self._finish("length")

    def _finish(self, reason: str) -> None:
        self.finish_reason = reason
        self._said += self._stops.flush()

    def _hand_over(self) -> str:
        piece, self._handed = self._said[self._handed :], len(self._said)
        return piece


def stream(
    model: K3,
    tokenizer: Tokenizer,
    prompt: str | Sequence[int],
    params: SamplingParams | None = None,
    state: ModelState | None = None,
    prefill_chunk: int = PREFILL_CHUNK,
    generator: torch.Generator | None = None,
    images: Images = (),
    draft: tuple[Drafter | Draft, int] | None = None,
) -> Generation:
    """An iterator over pieces of the answer to `prompt`, text or ids; the work is done as it is read.

    state: read on from it (it is advanced; one sequence); with one, an empty prompt is an error. generator: random
    numbers shared with other calls, instead of fresh ones from params.seed. images: pictures for the placeholders of
    the prompt (`<|kimi_image_placeholder|>` in a text, the media pad among ids), or before a text without any.
    draft: who guesses, and how many tokens at most; an answer does not depend on it (speculative.py).
    ValueError for a prompt that does not fit into the context or into the vocabulary, for pictures that cannot be read,
    and where their number is not that of the placeholders.
    """
    params = params or SamplingParams()
    return Generation(model, tokenizer, prompt, params, state, prefill_chunk, generator, images, draft)


def generate(
    model: K3,
    tokenizer: Tokenizer,
    prompt: str | Sequence[int],
    params: SamplingParams | None = None,
    state: ModelState | None = None,
    on_text: Callable[[str], None] | None = None,
    prefill_chunk: int = PREFILL_CHUNK,
    generator: torch.Generator | None = None,
    images: Images = (),
    draft: tuple[Drafter | Draft, int] | None = None,
) -> Completion:
    """The whole answer; arguments as in `stream`. `on_text` gets each piece as it comes, together the answer's text.
    Ctrl-C ends it with what was said so far and finish_reason 'interrupted'; the state stays usable."""
    running = stream(model, tokenizer, prompt, params, state, prefill_chunk, generator, images, draft)
    show = on_text or (lambda piece: None)
    try:
        for piece in running:
            show(piece)
    except KeyboardInterrupt:
        show(running.interrupt())
    return running.completion()


def prompt_ids(model: K3, tokenizer: Tokenizer, prompt: str | Sequence[int], state: ModelState) -> list[int]:
    """The ids to read. Names of control tokens inside a text stay text; ids are taken as they are."""
    ids = tokenizer.encode(prompt) if isinstance(prompt, str) else [int(token) for token in prompt]
    if state.batch_size != 1:
        raise ValueError(f"the state holds {state.batch_size} sequences; one is generated at a time")
    if not ids and state.tokens:
        raise ValueError("the prompt is empty; with a state it must hold at least the id that the state has not read")
    ids = ids or [tokenizer.eos_id]
    outside = [token for token in ids if not 0 <= token < model.cfg.vocab_size]
    if outside:
        raise ValueError(f"the prompt holds id {outside[0]}; the model's ids are 0 to {model.cfg.vocab_size - 1}")
    return ids


def with_images(
    model: K3, tokenizer: Tokenizer, prompt: str | Sequence[int], images: Images, start: int = 0
) -> tuple[str | Sequence[int], tuple[Shown, ...]]:
    """The ids of a prompt with pictures, a pad for each of their rows, and where they stand; a text without any as it
    is. start: tokens that were read before."""
    if not model.cfg.has_vision:
        if images:
            raise ValueError("images: this model has no vision tower and reads text only; allowed: none")
        return prompt, ()
    if not images and isinstance(prompt, str):
        return prompt, ()
    pad = model.cfg.media_placeholder_token_id
    assert pad is not None
    placed = tuple(image for image in images if isinstance(image, Shown))
    if placed:
        end, pads = start + len(prompt), list(prompt).count(pad)
        rows = sum(max(0, min(end, image.end) - max(start, image.start)) for image in placed)
        if pads != rows:
            raise ValueError(f"the prompt has {pads} placeholders (id {pad}), the images have {rows} rows there")
        return prompt, placed
    opened = [_opened(image) for image in images if not isinstance(image, Shown)]
    ids = _text_with_images(tokenizer, prompt, opened) if isinstance(prompt, str) else list(prompt)
    return show(ids, opened, pad, start)


def _opened(image: Source | Image) -> Image:
    return image if isinstance(image, Image) else preprocess_image(image)


def _text_with_images(tokenizer: Tokenizer, text: str, images: Sequence[Image]) -> list[int]:
    """Each picture's block in the place of its placeholder, or all before the text and a newline."""
    pieces = text.split(IMAGE_PLACEHOLDER)
    if len(pieces) == 1:
        pieces = [*[""] * len(images), f"\n{text}"]
    if len(pieces) != len(images) + 1:
        wrong = f"the prompt has {len(pieces) - 1} placeholders {IMAGE_PLACEHOLDER} for {len(images)} images"
        raise ValueError(f"{wrong}; allowed: one for each, or none")
    ids = tokenizer.encode(pieces[0])
    for image, piece in zip(images, pieces[1:], strict=True):
        ids += tokenizer.encode(image.prompt, allow_special=True) + tokenizer.encode(piece)
    return ids


def room(model: K3, state: ModelState, prompt: Sequence[int]) -> int:
    """Ids that can follow the prompt before the context is full; ValueError if there is none."""
    used, size = state.tokens + len(prompt), model.cfg.max_position_embeddings
    if used >= size:
        raise ValueError(f"{used} tokens leave no room for an answer; max_position_embeddings is {size}")
    return size - used


def unnamed_ids(tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    """Ids a model must not say: reserved slots without a name, and rows of the head beyond the tokenizer's ids."""
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(f"the tokenizer has {tokenizer.vocab_size} ids, the model only {vocab_size}; it is another's")
    unnamed = [token for name, token in tokenizer.special.items() if name == f"<|reserved_token_{token}|>"]
    return unnamed + list(range(tokenizer.vocab_size, vocab_size))


@torch.no_grad()
def score(model: K3, ids: Sequence[int], chunk: int = PREFILL_CHUNK) -> Float[Tensor, " T1"]:
    """log p(ids[t + 1] | ids[: t + 1]) for t = 0 .. len(ids) - 2, at temperature 1, at least float32, on the CPU. Read
    through the state like a generated text, so that the two can be compared."""
    if len(ids) < 2:
        raise ValueError(f"ids has {len(ids)} entries; at least 2 are needed, of which the first is only read")
    device = model.lm_head.weight.device
    tokens, state = torch.tensor([list(ids)], device=device), model.new_state(1)
    parts = []
    for begin in range(0, len(ids) - 1, chunk):
        end = min(begin + chunk, len(ids) - 1)
        final = model.hidden_states(tokens[:, begin:end], state=state)
        logp = at_least_float32(model.lm_head(final)[0]).log_softmax(-1)
        parts.append(logp.gather(-1, tokens[0, begin + 1 : end + 1, None])[:, 0].cpu())
    return torch.cat(parts)


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def visible(text: str) -> str:
    """Text for a terminal: control characters, which could move the cursor or change the character set, as pictures
    of themselves (U+2400 to U+2421) or U+FFFD; newline and tab stay."""
    pictures = {chr(code): chr(0x2400 + code) for code in range(32)} | {"\x7f": "␡"}
    return _CONTROL.sub(lambda match: pictures.get(match[0], "\N{REPLACEMENT CHARACTER}"), text)
