"""Worked exercises in arithmetic and small algebra, made by a seed: no download, no licence, no end.

Every exercise is a question, its working and the answer; a document is a sheet of eight. All of it is ours.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from random import Random

from nanok3.data.corpus import Document

Exercise = tuple[str, str, str]
"""Question, working, answer."""


def _sum(random: Random) -> Exercise:
    a, b = random.randint(10, 999), random.randint(10, 999)
    ones, tens = a % 10 + b % 10, a % 100 - a % 10 + b % 100 - b % 10
    hundreds = a + b - ones - tens
    return f"What is {a} + {b}?", f"{hundreds} + {tens} + {ones} = {a + b}.", str(a + b)


def _difference(random: Random) -> Exercise:
    b, c = random.randint(10, 500), random.randint(10, 500)
    a = b + c
    return f"What is {a} - {b}?", f"{a} - {b // 10 * 10} = {a - b // 10 * 10}, less {b % 10} is {c}.", str(c)


def _product(random: Random) -> Exercise:
    a, b = random.randint(11, 99), random.randint(11, 99)
    tens, ones = b // 10 * 10, b % 10
    working = f"{a} * {tens} = {a * tens} and {a} * {ones} = {a * ones}; {a * tens} + {a * ones} = {a * b}."
    return f"What is {a} * {b}?", working, str(a * b)


def _quotient(random: Random) -> Exercise:
    a, b = random.randint(100, 999), random.randint(3, 19)
    working = f"{b} * {a // b} = {a // b * b}, and {a} - {a // b * b} = {a % b}."
    return f"Divide {a} by {b}.", working, f"{a // b} remainder {a % b}"


def _order(random: Random) -> Exercise:
    a, b, c = (random.randint(2, 20) for _ in range(3))
    if random.random() < 0.5:
        return f"What is {a} + {b} * {c}?", f"{b} * {c} = {b * c} first; {a} + {b * c}.", str(a + b * c)
    return f"What is ({a} + {b}) * {c}?", f"{a} + {b} = {a + b} first; {a + b} * {c}.", str((a + b) * c)


def _equation(random: Random) -> Exercise:
    a, x, b = random.randint(2, 12), random.randint(-20, 20), random.randint(1, 40)
    c = a * x + b
    return f"Solve {a}x + {b} = {c}.", f"{a}x = {c} - {b} = {a * x}, so x = {a * x} / {a}.", f"x = {x}"


def _two_equations(random: Random) -> Exercise:
    x, y = random.randint(1, 40), random.randint(1, 40)
    working = f"Adding both, 2x = {2 * x}, so x = {x}; then y = {x + y} - {x} = {y}."
    return f"Solve x + y = {x + y} and x - y = {x - y}.", working, f"x = {x}, y = {y}"


def _fractions(random: Random) -> Exercise:
    a, b = Fraction(random.randint(1, 9), random.randint(2, 12)), Fraction(random.randint(1, 9), random.randint(2, 12))
    common = math.lcm(a.denominator, b.denominator)
    left, right = int(a * common), int(b * common)
    return f"What is {a} + {b}?", f"{left}/{common} + {right}/{common} = {left + right}/{common}.", str(a + b)


def _percent(random: Random) -> Exercise:
    share, whole = random.randint(1, 19) * 5, random.randint(2, 60) * 20
    working = f"1% is {whole / 100:g}; {share} * {whole / 100:g} = {share * whole // 100}."
    return f"What is {share}% of {whole}?", working, str(share * whole // 100)


def _divisor(random: Random) -> Exercise:
    factor = random.randint(2, 15)
    a, b = factor * random.randint(5, 30), factor * random.randint(2, 20)
    steps, left, right = [], a, b
    while right:
        steps.append(f"{left} = {left // right} * {right} + {left % right}")
        left, right = right, left % right
    return f"What is the greatest common divisor of {a} and {b}?", "; ".join(steps) + ".", str(left)


def _sequence(random: Random) -> Exercise:
    start, step = random.randint(-20, 60), random.randint(2, 15)
    terms = ", ".join(str(start + step * i) for i in range(4))
    working = f"Each number is {step} more than the one before: {start + 3 * step} + {step}."
    return f"Continue: {terms}, ...", working, str(start + 4 * step)


_THINGS = ["apples", "books", "stamps", "bricks", "letters", "candles", "tickets", "bottles"]
_PEOPLE = ["Ada", "Ben", "Carla", "Deniz", "Emil", "Fatima", "Goro", "Hana"]


def _story(random: Random) -> Exercise:
    who, thing = random.choice(_PEOPLE), random.choice(_THINGS)
    boxes, each, gone = random.randint(2, 12), random.randint(3, 25), random.randint(1, 5)
    question = f"{who} has {boxes} boxes of {each} {thing} and gives away {gone}. How many {thing} are left?"
    return question, f"{boxes} * {each} = {boxes * each}; {boxes * each} - {gone}.", str(boxes * each - gone)


_KINDS = [
    _sum,
    _difference,
    _product,
    _quotient,
    _order,
    _equation,
    _two_equations,
    _fractions,
    _percent,
    _divisor,
    _sequence,
    _story,
]


def worked(seed: int, number: int) -> Exercise:
    """One exercise of any kind, a function of both."""
    random = Random(f"{seed} one {number}")
    return random.choice(_KINDS)(random)


def sheet(seed: int, number: int, length: int = 8) -> str:
    """The text of one sheet: `length` exercises of one kind, or (every other sheet) of all kinds."""
    random = Random(f"{seed} {number}")
    kinds = [random.choice(_KINDS)] if number % 2 else _KINDS
    exercises = (random.choice(kinds)(random) for _ in range(length))
    return "\n".join(f"Question: {q}\nWorking: {w}\nAnswer: {a}\n" for q, w, a in exercises)


def exercises(seed: int = 0, count: int = 1500) -> Iterator[Document]:
    """`count` sheets, about 0.8 kB each."""
    for number in range(count):
        yield Document(sheet(seed, number), "math", f"sheet {number}")
