"""General tasks of our own: letter counting, sums of many numbers, reversing and copying words.

Each has one right answer and a working that reaches it in small steps, so that a model of a few million parameters can
learn it, and thinking longer helps: a sum of n numbers takes n - 1 additions, a count one line a letter.

    letters    How many times does "r" stand in "strawberry"?      s 0, t 0, r 1, ...
    sums       What is 17 + 4 + 38?                                17 + 4 = 21; 21 + 38 = 59
    reverse    Write "copper" backwards.                           r, re, rep, ...
    copy       Repeat exactly: "kib 3 tam".

Letter counting and sums have the form of the sets letter_counting and chain_sum of reasoning-gym (`gym.py`), which
are optional; these need nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from nanok3.envs.environment import Task
from nanok3.envs.questions import Item, Maker, answer_task, items

_CONSONANTS, _VOWELS = "bcdfghklmnprstvwz", "aeiou"


def word(random: Random, syllables: int) -> str:
    """A word that nobody has read before, such as `kibotam`."""
    made = "".join(random.choice(_CONSONANTS) + random.choice(_VOWELS) for _ in range(syllables))
    return made + random.choice(["", *_CONSONANTS])


def letters(random: Random) -> Item:
    text = word(random, random.randint(2, 5))
    letter = random.choice(text)
    count, working = 0, []
    for each in text:
        count += each == letter
        working.append(f"{each} {count}")
    return Item(f'How many times does "{letter}" stand in "{text}"?', tuple(working), str(count), f"{letter} {text}")


def sums(random: Random) -> Item:
    terms = [random.randint(1, 10 ** random.randint(1, 2)) for _ in range(random.randint(3, 6))]
    total, working = terms[0], []
    for term in terms[1:]:
        working.append(f"{total} + {term} = {total + term}")
        total += term
    return Item(
        f"What is {' + '.join(map(str, terms))}?", tuple(working), str(total), " ".join(map(str, sorted(terms)))
    )


def reverse(random: Random) -> Item:
    text = word(random, random.randint(2, 4))
    working = [text[-i:][::-1] for i in range(1, len(text) + 1)]
    return Item(f'Write "{text}" backwards.', tuple(working), text[::-1], min(text, text[::-1]))


def copy(random: Random) -> Item:
    parts = [random.choice([word(random, 1), word(random, 2), str(random.randint(0, 99))]) for _ in range(4)]
    text = " ".join(parts[: random.randint(2, 4)])
    return Item(f'Repeat exactly: "{text}".', (text,), text, text)


KINDS: dict[str, Maker] = {"letters": letters, "sums": sums, "reverse": reverse, "copy": copy}


def general_tasks(kind: str, split: str = "train", seed: int = 0) -> Iterator[Task]:
    """An endless stream of tasks of a kind, all different."""
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}; expected one of {', '.join(KINDS)}")
    return (answer_task(kind, item) for item in items(kind, KINDS[kind], split, seed))
