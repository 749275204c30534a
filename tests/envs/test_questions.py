"""What counts as an answer; the split is by content; more passes are right more often."""

from __future__ import annotations

from itertools import islice
from random import Random

import pytest

from nanok3.envs.environment import Reply
from nanok3.envs.episode import play, scripted, solution
from nanok3.envs.questions import AnswerEnvironment, Item, answer_in, answer_task, items, passes, split_of


@pytest.mark.parametrize(
    "text, answer",
    [
        ("42", "42"),
        ("  42 \n", "42"),
        ("Answer: 42", "42"),
        ("thus\nAnswer: a b ", "a b"),
        ("", None),
        ("\n \n", None),
        ("Answer:", None),
        ("42\n43", None),
        ("Answer: 1\nAnswer: 42", None),
        ("Answer: 42\nor not", "42\nor not"),
        ("so\nAnswer:\n1 2\n3 4", "1 2\n3 4"),
        ("so Answer: 42", None),
    ],
)
def test_the_answer_of_a_text(text, answer):
    assert answer_in(text) == answer


def test_right_and_wrong():
    task = answer_task("k", Item("Six times seven?", ("6 * 7 = 42",), "42", "6 7"))
    played = play(AnswerEnvironment(), task, scripted(solution(task)))
    assert played.reward == 1.0 and played.outcome == "done"
    for text in ("43", "42 43", "Answer: 42.", "42\n42", "", "the answer is 42"):
        assert play(AnswerEnvironment(), task, scripted([Reply(text)])).reward == 0.0, text


def test_the_public_verifier_does_not_know_the_answer():
    task = answer_task("k", Item("Six times seven?", (), "42", "6 7"))
    said = {play(AnswerEnvironment(), task, scripted([Reply(text)])).public for text in ("42", "43")}
    assert len(said) == 1


def number(random):
    n = random.randint(0, 999)
    return Item(str(n), (), str(n), str(n))


def test_the_split_is_by_content_and_the_stream_by_seed():
    train = [item.key for item in islice(items("k", number, "train", 0), 200)]
    other = {item.key for item in items("k", number, "train", 1)}
    held = {item.key for item in items("k", number, "held-out", 1)}
    assert len(set(train)) == 200 and not held.intersection(train) and not held & other
    assert train == [item.key for item in islice(items("k", number, "train", 0), 200)]
    assert 60 < len(held) < 140 and len(other) + len(held) > 600
    assert all(split_of(f"k {key}") == "held-out" for key in held)
    with pytest.raises(ValueError, match="split is 'test'"):
        next(items("k", number, "test", 0))


def test_more_passes_are_right_more_often():
    item = Item("?", ("1 + 1 = 2", "2 + 40 = 42"), "42", "k")

    def right(count):
        ends = [passes(item, count, 0.3, Random(seed)).splitlines()[-1] for seed in range(400)]
        return sum(end.split()[-1] == "42" for end in ends) / 400

    assert 0.62 < right(1) < 0.78 and right(5) > right(1) + 0.1
