from __future__ import annotations

import math
import re
from fractions import Fraction

from nanok3.data.exercises import exercises, sheet


def evaluate(text: str) -> Fraction:
    """The value of sums, products, brackets and fractions, exactly."""
    return eval(re.sub(r"\d+", lambda number: f"Fraction({number[0]})", text), {"Fraction": Fraction})


def right_answer(question: str) -> str:
    """The answer by another road than the generator's."""
    numbers = [int(number) for number in re.findall(r"-?\d+", question)]
    if found := re.fullmatch(r"What is (\d+)% of (\d+)\?", question):
        return str(Fraction(int(found[1]) * int(found[2]), 100))
    if found := re.fullmatch(r"What is ([^a-z]*)\?", question):
        return str(evaluate(found[1]))
    if question.startswith("Divide"):
        return "{} remainder {}".format(*divmod(*numbers))
    if found := re.fullmatch(r"Solve (\d+)x \+ (\d+) = (-?\d+)\.", question):
        a, b, c = map(int, found.groups())
        return f"x = {Fraction(c - b, a)}"
    if question.startswith("Solve x + y"):
        total, difference = int(numbers[0]), int(numbers[-1])
        return f"x = {Fraction(total + difference, 2)}, y = {Fraction(total - difference, 2)}"
    if "divisor" in question:
        return str(math.gcd(*numbers))
    if question.startswith("Continue"):
        return str(numbers[-1] + numbers[1] - numbers[0])
    boxes, each, gone = numbers
    return str(boxes * each - gone)


def test_every_answer_is_right_and_every_equation_of_the_working_holds() -> None:
    kinds, equations = set(), 0
    for document in exercises(seed=3, count=150):
        found = re.findall(r"Question: (.*)\nWorking: (.*)\nAnswer: (.*)\n", document.text)
        assert len(found) == 8
        for question, working, answer in found:
            assert answer == right_answer(question), question
            kinds.add(re.sub(r"[A-Z][a-z]+ has|\d+|-|[+*/() ]|x|y", "", question)[:12])
            for clause in re.split(r"; |, |\.(?: |$)| and | first", working):
                sides = [side for side in clause.split(" = ") if re.fullmatch(r"[-\d+*/() ]+", side)]
                assert len({evaluate(side) for side in sides}) <= 1, working
                equations += len(sides) > 1
    assert len(kinds) >= 10 and equations > 500


def test_sheets_depend_on_seed_and_number_alone() -> None:
    assert sheet(0, 5) == sheet(0, 5) == list(exercises(0, 6))[5].text
    assert len({sheet(seed, number) for seed in range(3) for number in range(50)}) == 150
    assert [document.name for document in exercises(count=2)] == ["sheet 0", "sheet 1"]
