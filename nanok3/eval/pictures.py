"""What a model sees: questions on held-out pictures, answered greedily, beside chance and beside the blind.

    seen       picture, newline, Question: ... Answer:      the most probable next id, until the answer ends
    blind      the same text with the picture's block taken out
    chance     the one answer that is right most often, given to every question

The pictures and their questions are those of a prepared folder's validation split: what they show is on no training
picture (data/pictures/document.py). An answer is right if it is the true one to the letter; a position if both numbers
are within a tenth of the side of where the centre is exactly, which the true answer rounds. A blind model that beats
chance has found a way to guess from the question alone.

Questions are asked many at a time: all prompts of a group lie in one packed row, grow by an id a round and leave it as
they end. There is no cache, since answers are a few ids long, and the tower runs once over the pictures of a group.
"""

from __future__ import annotations

import base64
import io
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanok3.data.picture_shards import StoredPicture
from nanok3.data.picture_text import media_pad_id
from nanok3.data.pictures.document import question_text
from nanok3.data.prepared import Prepared, TokenSource
from nanok3.data.tokenizer import Tokenizer
from nanok3.model.decoder import K3
from nanok3.model.moonvit import rows_per_item
from nanok3.serve.generate import unnamed_ids

QUESTIONS = 200
"""Of each field, the first ones of the validation split."""
GROUP_TOKENS = 4096
CAPTION_IDS = 40
NEAR = 0.1
"""Of the side: as far as a position may be off."""
_NUMBERS = re.compile(r"(-?[\d.]+)\s*,\s*(-?[\d.]+)")


# ---------------------------------------------------------------------- prompts


@dataclass(frozen=True)
class Prompt:
    """Ids to read on from, and the pictures whose pads are among them."""

    ids: list[int]
    pictures: tuple[StoredPicture, ...] = ()


@dataclass(frozen=True)
class Asked:
    """A question on a held-out document with both prompts. `field` is the question's, but words are told apart by
    their length. `exact` are the numbers of a position."""

    field: str
    question: str
    answer: str
    document: int
    side: tuple[int, int]
    seen: Prompt
    blind: Prompt
    exact: Sequence[float] | None = None


def ask(source: TokenSource, document: int, text: str, tokenizer: Tokenizer) -> tuple[Prompt, Prompt]:
    """A document up to its last picture with `text` behind it; and the same without pictures."""
    ids, pictures = source.tokens(document).tolist(), source.pictures_of(document)
    tail = tokenizer.encode(text)
    kept, at = [], 0
    for picture in pictures:
        kept += ids[at : picture.begin]
        at = picture.end
    return Prompt(ids[:at] + tail, tuple(pictures)), Prompt(kept + tail)


def questions(data: Prepared, kind: str, tokenizer: Tokenizer, most: int = QUESTIONS) -> list[Asked]:
    """The first `most` questions of every field of a kind."""
    source = next(s for s in data.sources("validation") if s.name == kind)
    taken: Counter[str] = Counter()
    found = []
    for document, asked in enumerate(data.validation_questions(kind)):
        first = source.pictures_of(document)[0]
        for question in asked:
            field = _field(question.field, question.answer)
            if taken[field] < most:
                taken[field] += 1
                prompts = ask(source, document, question_text(question.text), tokenizer)
                side = first.width, first.height
                found.append(Asked(field, question.text, question.answer, document, side, *prompts, question.exact))
    return found


def _field(field: str, answer: str) -> str:
    if field == "spelling":
        return f"word of {len(answer.split())}"
    if field != "word":
        return field
    return f"word of {len(answer)}" if " " not in answer else "two words"


# ---------------------------------------------------------------------- answers


class Answerer:
    """A model that answers prompts greedily."""

    def __init__(self, model: K3, source: TokenSource, tokenizer: Tokenizer) -> None:
        self.model, self.source, self.tokenizer = model, source, tokenizer
        unsaid = [*unnamed_ids(tokenizer, model.cfg.vocab_size), media_pad_id(tokenizer)]
        self.unsaid = torch.tensor(unsaid, device=model.lm_head.weight.device)

    def __call__(self, prompts: Sequence[Prompt], most: Sequence[int], never_first: Sequence[int] = ()) -> list[str]:
        """The texts said after the prompts, of at most so many ids each: up to `[EOS]` or the next question."""
        said: list[list[int]] = []
        for group in groups(prompts, GROUP_TOKENS):
            said += self._group([prompts[i] for i in group], [most[i] for i in group], list(never_first))
        return [_first_answer(self.tokenizer.decode(ids)) for ids in said]

    @torch.no_grad()
    def _group(self, prompts: list[Prompt], most: list[int], never_first: list[int]) -> list[list[int]]:
        """Prompts side by side in one packed row, one id longer in each round."""
        features = self._look(prompts)
        said: list[list[int]] = [[] for _ in prompts]
        going = list(range(len(prompts)))
        while going:
            final = self._read([prompts[i] for i in going], [said[i] for i in going], features)
            logits = self.model.lm_head(final).float().index_fill(1, self.unsaid, -torch.inf)
            if never_first and not said[going[0]]:
                logits[:, never_first] = -torch.inf
            for i, token in zip(going, logits.argmax(-1).tolist(), strict=True):
                said[i].append(token)
            going = [i for i in going if not self._ended(said[i], most[i])]
        return [[token for token in ids if token != self.tokenizer.eos_id] for ids in said]

    def _ended(self, ids: list[int], most: int) -> bool:
        return ids[-1] == self.tokenizer.eos_id or len(ids) >= most or "\nQ" in self.tokenizer.decode(ids)

    def _look(self, prompts: list[Prompt]) -> dict[StoredPicture, tuple[Tensor, Tensor]]:
        """Features and grid of every picture, each once."""
        pictures = list(dict.fromkeys(picture for prompt in prompts for picture in prompt.pictures))
        if not pictures:
            return {}
        assert self.source.pictures is not None and self.model.cfg.merge_kernel_size
        device = self.model.lm_head.weight.device
        values = torch.cat([self.source.pictures.pixel_values(picture) for picture in pictures]).to(device)
        grids = torch.tensor([picture.grid for picture in pictures], device=device)
        made = self.model.vision(values, grids).split(rows_per_item(grids, self.model.cfg.merge_kernel_size))
        return dict(zip(pictures, zip(made, grids), strict=True))

    def _read(
        self, prompts: list[Prompt], said: list[list[int]], features: dict[StoredPicture, tuple[Tensor, Tensor]]
    ) -> Tensor:
        """The hidden state at the end of every prompt and what was said after it, (prompts, D)."""
        device = self.model.lm_head.weight.device
        rows = [prompt.ids + more for prompt, more in zip(prompts, said, strict=True)]
        bounds = torch.tensor([0, *map(len, rows)], device=device).cumsum(0)
        ids = torch.tensor([token for row in rows for token in row], device=device)[None]
        shown = [features[picture] for prompt in prompts for picture in prompt.pictures]
        if shown:
            rows_, grids = torch.cat([s[0] for s in shown]), torch.stack([s[1] for s in shown])
            final = self.model.hidden_states(ids, grid_thw=grids, cu_seqlens=bounds, features=rows_)
        else:
            final = self.model.hidden_states(ids, cu_seqlens=bounds)
        return final[0, bounds[1:] - 1]


def groups(prompts: Sequence[Prompt], tokens: int) -> list[list[int]]:
    """Prompts in order, together as long as they have at most so many tokens."""
    found: list[list[int]] = []
    room = 0
    for number, prompt in enumerate(prompts):
        if len(prompt.ids) > room:
            found.append([])
            room = tokens
        found[-1].append(number)
        room -= len(prompt.ids)
    return found


def _first_answer(text: str) -> str:
    return text.split("\nQ")[0].strip()


# ---------------------------------------------------------------------- what is right


def right(asked: Asked, said: str) -> bool:
    """To the letter; of a position, both numbers within a tenth of the side."""
    if asked.exact is None:
        return said == asked.answer
    found = _NUMBERS.fullmatch(said)
    if found is None:
        return False
    sides = asked.side if asked.field == "pixel" else (1, 1)
    return all(
        abs(_number(text) - true) <= NEAR * size + 1e-9
        for text, true, size in zip(found.groups(), asked.exact, sides, strict=True)
    )


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:  # such as 0.1.2
        return float("inf")


def best_constant(asked: Sequence[Asked]) -> float:
    """How often the best single answer is right."""
    answers = Counter(each.answer for each in asked)
    tried = [answer for answer, _ in answers.most_common(1 if asked[0].exact is None else None)]
    return max(sum(right(a, answer) for a in asked) for answer in tried) / len(asked)


# ---------------------------------------------------------------------- the measurement


def evaluate_pictures(
    model: K3, data: Prepared, most: int = QUESTIONS, examples: int = 2, kinds: Sequence[str] | None = None
) -> dict[str, Any]:
    """{"fields": a record for each kind and field, "examples": held-out pictures with the model's caption and answers
    beside the true ones}. ValueError for a model without eyes, or data without pictures."""
    if not model.cfg.has_vision:
        raise ValueError("pictures: this model has no vision tower (vt_hidden_size is null); allowed: one that has")
    sources = [s for s in data.sources("validation") if s.pictures is not None and (kinds is None or s.name in kinds)]
    if not sources:
        raise ValueError(f"pictures: {data.folder} has no held-out pictures; prepare it with --pictures")
    was_training = model.training
    model.eval()
    fields: list[dict[str, Any]] = []
    shown: list[dict[str, Any]] = []
    for source in sources:
        tokenizer = data.tokenizer()
        asked = questions(data, source.name, tokenizer, most)
        answerer = Answerer(model, source, tokenizer)
        longest = [len(tokenizer.encode(" " + a.answer)) + 2 for a in asked]
        seen, blind = answerer([a.seen for a in asked], longest), answerer([a.blind for a in asked], longest)
        fields += tally(source.name, asked, seen, blind)
        shown += show(answerer, asked, seen, examples)
    model.train(was_training)
    return {"fields": fields, "examples": shown, "questions": most}


def tally(kind: str, asked: Sequence[Asked], seen: Sequence[str], blind: Sequence[str]) -> list[dict[str, Any]]:
    """Shares of right answers, a record a field."""
    records = []
    for field in dict.fromkeys(a.field for a in asked):
        of_field = [i for i, a in enumerate(asked) if a.field == field]
        marks = [sum(right(asked[i], said[i]) for i in of_field) / len(of_field) for said in (seen, blind)]
        records.append(
            {
                "kind": kind,
                "field": field,
                "count": len(of_field),
                "right": marks[0],
                "blind": marks[1],
                "chance": best_constant([asked[i] for i in of_field]),
            }
        )
    return records


class Caption(NamedTuple):
    """What a model says of a held-out document, and what the document says: its caption, or its answers."""

    kind: str
    true: str
    said: str


def captions(model: K3, source: TokenSource, tokenizer: Tokenizer, documents: Sequence[int]) -> list[Caption]:
    """What the model says of some documents of a source. One that may begin with what it likes would often begin with a
    question; this is what it says instead."""
    prompts = [ask(source, document, "\n", tokenizer)[0] for document in documents]
    no_question = tokenizer.encode("Question")[:1]
    said = Answerer(model, source, tokenizer)(prompts, [CAPTION_IDS] * len(prompts), no_question)
    true = [_told(source, document, tokenizer) for document in documents]
    return [Caption(source.name, *both) for both in zip(true, said, strict=True)]


def show(answerer: Answerer, asked: Sequence[Asked], seen: Sequence[str], count: int) -> list[dict[str, Any]]:
    """The first held-out documents of a kind that have captions: picture, captions, answers."""
    source, tokenizer = answerer.source, answerer.tokenizer
    first = range(min(len(source), 200))
    documents = sorted(first, key=lambda d: _told(source, d, tokenizer).startswith("Question:"))[:count]
    found = []
    for document, caption in zip(documents, captions(answerer.model, source, tokenizer, documents), strict=True):
        answers = [
            {"question": a.question, "said": said, "true": a.answer, "right": right(a, said)}
            for a, said in zip(asked, seen, strict=True)
            if a.document == document
        ]
        record = {"kind": source.name, "png": _png(source, document), "caption": caption.said, "true": caption.true}
        found.append(record | {"answers": answers})
    return found


def _told(source: TokenSource, document: int, tokenizer: Tokenizer) -> str:
    """The text behind the last picture of a document."""
    end = source.pictures_of(document)[-1].end
    return tokenizer.decode(source.tokens(document, end)[:-1].tolist()).strip()


def _png(source: TokenSource, document: int) -> str:
    """All frames of a document side by side, as base64."""
    assert source.pictures is not None
    frames = [frame for picture in source.pictures_of(document) for frame in source.pictures.frames(picture)]
    width, height = sum(frame.width + 2 for frame in frames) - 2, max(frame.height for frame in frames)
    whole = frames[0].resize((width, height))
    whole.paste((128, 128, 128), (0, 0, width, height))
    x = 0
    for frame in frames:
        whole.paste(frame, (x, 0))
        x += frame.width + 2
    file = io.BytesIO()
    whole.save(file, format="PNG")
    return base64.b64encode(file.getvalue()).decode()
