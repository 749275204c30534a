"""BM25 against the formula written out, and the search tools."""

from __future__ import annotations

import math

import pytest

from nanok3.envs.environment import Reply
from nanok3.envs.questions import Item, answer_task
from nanok3.envs.search import Index, SearchEnvironment, own_source, terms, with_tools
from nanok3.envs.tools import Call

DOCS = {"a": "the cat sat on the mat", "b": "a dog and a cat and a cat", "c": "rain_drop", "d": ""}


def slow(query, title):
    bags = {t: terms(f"{t} {text}") for t, text in DOCS.items()}
    mean = sum(map(len, bags.values())) / len(bags)
    total = 0.0
    for term in terms(query):
        n = sum(term in bag for bag in bags.values())
        f = bags[title].count(term)
        idf = math.log(1 + (len(bags) - n + 0.5) / (n + 0.5))
        total += idf * f * 2.2 / (f + 1.2 * (0.25 + 0.75 * len(bags[title]) / mean))
    return total


def test_the_formula():
    index = Index(DOCS)
    for query in ("cat", "the cat", "dog mat cat", "drop", "nothing"):
        expected = sorted(((slow(query, t), t) for t in DOCS if slow(query, t) > 0), key=lambda p: (-p[0], p[1]))
        found = index.search(query)
        assert [hit.title for hit in found] == [title for _, title in expected]
        assert [hit.score for hit in found] == pytest.approx([score for score, _ in expected])
    assert index.line("a", "mat") == "the cat sat on the mat" and index.line("d", "x") == ""


def test_our_own_source_is_found():
    index = Index(own_source())
    assert "nanok3/model/kda.py" in [hit.title for hit in index.search("kda_reference")]


def test_the_tools():
    env = SearchEnvironment(Index({**DOCS, "long": "x" * 3100}))
    env.reset(with_tools(answer_task("k", Item("Who sat?", (), "cat", "k"))))
    calls = [("search", {"query": "mat"}), ("search", {"query": "zzz"}), ("open", {"title": "long", "page": 3})]
    calls += [("open", {"title": "long", "page": 4}), ("open", {"title": "none"}), ("open", {"title": "a"})]
    seen = env.step(Reply(calls=tuple(Call(*call) for call in calls))).results
    assert seen[0].content.startswith("a: the cat") and seen[1].content == "nothing was found"
    assert seen[2].content == "page 3 of 3\n" + "x" * 100
    assert [r.error for r in seen] == [False, False, False, True, True, False]
    fork = env.fork()
    fork.step(Reply("Answer: cat"))
    env.step(Reply("dog"))
    assert (fork.verdict().score, env.verdict().score) == (1.0, 0.0)
