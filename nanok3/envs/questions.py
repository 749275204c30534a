"""Tasks that end in one answer: what counts as the answer, and an exact comparison.

    answer(text) = all that follows "Answer:", if that stands once in the text and begins a line
                 | the whole text, if it is one line without that word
                 | nothing

The rule is strict on purpose. A reward that looks for the right answer anywhere in a text is earned by a list of all
answers, and one that looks at the form alone by an empty thought with any words behind it (problem 22). Thinking is
never looked at.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import TypeVar

from nanok3.data.clean import digest, unit
from nanok3.envs.environment import Budget, Task, Verdict
from nanok3.envs.in_process import InProcess

MARK = "Answer:"
HELD_OUT = 0.1
SPLITS = ("train", "held-out")


@dataclass(frozen=True)
class Item:
    """A question, the working that leads to its answer line by line, and the answer. `key` is its content."""

    question: str
    working: tuple[str, ...]
    answer: str
    key: str


Maker = Callable[[Random], Item]
Thing = TypeVar("Thing")


def answer_in(text: str) -> str | None:
    """The one answer of a text, or None where there is none or more than one."""
    before, mark, after = text.strip().partition(MARK)
    if mark:
        alone = MARK not in after and (not before or before.endswith("\n"))
        return after.strip() or None if alone else None
    return before if before and "\n" not in before else None


def split_of(key: str, share: float = HELD_OUT) -> str:
    """Train or held-out, by content: equal items of different seeds fall on the same side."""
    return "held-out" if unit(digest(key), 0) < share else "train"


def distinct(
    kind: str, make: Callable[[Random], Thing], key: Callable[[Thing], str], split: str, seed: int
) -> Iterator[Thing]:
    """The endless stream of different things of one kind on one side of the split; a function of (kind, split, seed).
    `key` is a thing's content.

    Ends where a thousand draws in a row bring nothing new.
    """
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}; expected one of {', '.join(SPLITS)}")
    seen: set[str] = set()
    number = last = 0
    while number - last < 1000:
        thing = make(Random(f"{seed} {kind} {number}"))
        number += 1
        content = key(thing)
        if content not in seen and split_of(content) == split:
            seen.add(content)
            last = number
            yield thing


def items(kind: str, make: Maker, split: str, seed: int) -> Iterator[Item]:
    """Different items of one kind."""
    return distinct(kind, make, lambda item: f"{kind} {item.key}", split, seed)


def answer_task(kind: str, item: Item, domain: str = "general") -> Task:
    """The item as a task of one turn."""
    goal = f"{item.question}\nEnd with a new line: {MARK!r}, then the answer and nothing else."
    name = hashlib.blake2b(f"{kind} {item.key}".encode(), digest_size=6).hexdigest()
    told = {"text": f"{MARK} {item.answer}", "thinking": "\n".join(item.working)}
    hidden = {"answer": item.answer, "working": list(item.working), "solution": [told]}
    return Task(f"{kind}/{name}", domain, goal, {}, hidden, budget=Budget(steps=1))


def passes(item: Item, count: int, error: float, random: Random) -> str:
    """A scratchpad of `count` passes over the working, each with a wrong last line by chance `error`, and what most
    of them found. More passes are right more often, which is what an effort level has to teach."""
    found, lines = [], []
    for _ in range(count):
        wrong = random.random() < error
        found.append(_spoil(item.answer, random) if wrong else item.answer)
        lines += [*item.working[:-1], f"so {found[-1]}"]
    best = max(dict.fromkeys(found), key=found.count)
    return "\n".join([*lines, f"most often {best}"] if count > 1 else lines)


def _spoil(answer: str, random: Random) -> str:
    """One character replaced by another of its kind."""
    at = random.randrange(len(answer))
    kind = "0123456789" if answer[at].isdigit() else "abcdefghijklmnopqrstuvwxyz"
    return answer[:at] + random.choice([c for c in kind if c != answer[at]]) + answer[at + 1 :]


class AnswerEnvironment(InProcess):
    """One turn; right or wrong."""

    def judge(self, hidden: bool) -> Verdict:
        answer = None if self.answer is None else answer_in(self.answer)
        if answer is None:
            return Verdict(0.0, f"there is not one answer; end with a new line: {MARK!r}, then the answer")
        if not hidden:
            return Verdict(0.0, "there is one answer")
        return Verdict(float(self._right(answer, self._task().hidden)))

    def _right(self, answer: str, hidden: Mapping[str, str]) -> bool:
        return answer == hidden["answer"]
