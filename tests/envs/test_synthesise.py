"""The synthesiser: what it asks has one answer, found twice; what is wrong does not pass the checks."""

from __future__ import annotations

from itertools import islice

from nanok3.envs.episode import play, scripted, solution
from nanok3.envs.questions import Item
from nanok3.envs.search import Index, SearchEnvironment, own_source
from nanok3.envs.synthesise import Lines, checked, grow, questions, rechecked, synthesised_tasks

A = """class A:
    '''Holds x.'''
    x: int
    y: int = 3

    def m(self): ...


def f(first, b):
    '''Does f.'''
"""
B = """def g(
    only,
):
    '''Does g.'''


def twice(a): ...
"""
DOCS = {"a.py": A, "b.py": B, "c.py": "def twice(b): ...\n", "d.md": "no Python ("}


def test_the_graph_has_one_node_for_a_name():
    graph = grow(DOCS)
    assert len(graph.of("file")) == 3 and graph.nodes["class", "A"].text == "Holds x."
    assert [node.name for node in graph.nodes["function", "twice"].parents] == ["b.py", "c.py"]
    assert {node.name for node in graph.of("field")} == {"A.x", "A.y"}


def test_questions_have_one_answer():
    found = {item.question: item.answer for item in checked(questions(grow(DOCS)), DOCS)}
    assert found["In which file is the class A defined? Give its path."] == "a.py"
    assert found["How many annotated fields does the body of the class A have?"] == "2"
    assert found["What is the name of the first parameter of the function g in b.py?"] == "only"
    assert found["Which function is described as: 'Does f.'?"] == "f"
    assert not any("twice" in question for question in found)


def test_wrong_and_repeated_questions_do_not_pass():
    good = next(item for item in questions(grow(DOCS)) if item.key == "file class A")
    for wrong in ("b.py", "", "A"):
        assert not list(checked([Item(good.question, (), wrong, good.key)], DOCS))
    again = Item(good.question.upper(), (), good.answer, good.key)
    assert list(checked([good, again, good], DOCS)) == [good]
    for answer, key in (("3", "fields A"), ("b", "parameter a.py f"), ("g", "described function Does f.")):
        assert not rechecked(Item("?", (), answer, key), Lines(DOCS))


def test_tasks_over_our_own_source():
    index = Index({path: text for path, text in own_source().items() if "/model/" in path or "/envs/" in path})
    tasks = list(islice(synthesised_tasks(index), 40))
    assert len({task.id for task in tasks}) == 40 and all(task.tools for task in tasks)
    for task in tasks[:5]:
        assert play(SearchEnvironment(index), task, scripted(solution(task))).reward == 1.0
    held = {task.id for task in islice(synthesised_tasks(index, "held-out", 1), 20)}
    assert len(held) == 20 and not held & {task.id for task in islice(synthesised_tasks(index, "train", 1), 60)}
