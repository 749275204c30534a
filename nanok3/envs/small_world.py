"""Three kinds of tasks, one a domain, so short that a model of a million parameters learns them in minutes.

    ladder     a2b3c1d4e4f2g1h3                 general: the sum; a partial sum a step is thinking that helps
    ledger     ada+3 to ben                     agent: get and set on a table of numbers, judged by the table
    program    x3*4+ f1=5 f2=8                  coding: mend a program of a stack machine, so that f is what is wanted

A step of the ladder that adds one number is one fact of some hundred; one that adds four at once is one of thousands.
So an answer that skips steps is short and often wrong, and no reward can teach a small model to skip them all. Numbers
to add are at most 4, since it is the units of sums that small models learn last.

The stack machine reads left to right: a digit or x is pushed, an operator takes two. It is run in this process: a
program is a string that a few lines below interpret, and no code of anybody's.

Sources: the form of the tasks is that of chain sums, of key-value applications and of one-line fixes; the tasks are
ours, as K3's are not published.
"""

from __future__ import annotations

import hashlib
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

from nanok3.envs.environment import Budget, Task, Verdict
from nanok3.envs.in_process import InProcess
from nanok3.envs.questions import distinct
from nanok3.envs.tools import ToolError, tool

NAMES = ("ada", "ben", "eva", "ida", "leo", "max", "tom", "zoe")
LETTERS = "abcdefgh"


def _name(kind: str, content: str) -> str:
    return f"{kind}/{hashlib.blake2b(content.encode(), digest_size=6).hexdigest()}"


# ---------------------------------------------------------------------- general


def ladder(random: Random) -> Task:
    """The sum of eight digits. Judged by `questions.AnswerEnvironment`."""
    terms = [random.randint(1, 4) for _ in LETTERS]
    goal, total = "".join(f"{l}{term}" for l, term in zip(LETTERS, terms)), str(sum(terms))
    told = {"text": total, "thinking": climb(terms, 1)}
    hidden = {"answer": total, "terms": terms, "solution": [told]}
    return Task(_name("ladder", goal), "general", goal, {}, hidden, budget=Budget(steps=1))


def climb(terms: Sequence[int], stride: int, slip: int = 0, at: int = 0) -> str:
    """The partial sums, `stride` numbers a step, each behind the letter of the last number in it: `d10h20`. `slip` is
    added from step `at` on, which is how a mistake goes on."""
    ends = range(stride if stride > 1 else 2, len(terms) + 1, stride)
    return "".join(f"{LETTERS[n - 1]}{sum(terms[:n]) + slip * (step >= at)}" for step, n in enumerate(ends))


# ---------------------------------------------------------------------- agent


class Ledger(InProcess):
    """A table of numbers by name. Right is the table that was asked for, and no other."""

    def perform(self, name: str, arguments: dict[str, Any]) -> str:
        key = arguments["k"]
        if key not in self.state["table"]:
            raise ToolError("no such name")
        if name == "get":
            return str(self.state["table"][key])
        self.state["table"][key] = arguments["v"]
        return "ok"

    def judge(self, hidden: bool) -> Verdict:
        task = self._task()
        if not hidden:
            changed = sum(self.state["table"][k] != v for k, v in task.state["table"].items())
            return Verdict(0.0, f"{changed} numbers changed")
        return Verdict(float(self.state["table"] == task.hidden["table"] and self.answer is not None))


LEDGER_TOOLS = (tool("get", "", k="string"), tool("set", "", k="string", v="integer"))


def ledger(random: Random) -> Task:
    """Write a number, or the number and so much more, under another name."""
    one, target = random.sample(NAMES, 2)
    table = {name: random.randint(10, 49) for name in NAMES}
    more = random.randint(0, 4)
    goal = f"{one}+{more} to {target}" if more else f"{one} to {target}"
    value = table[one] + more
    working = f"{table[one]}+{more}={value}" if more else str(value)
    turns: list[dict[str, Any]] = [{"calls": [["get", {"k": one}]]}]
    turns += [{"calls": [["set", {"k": target, "v": value}]], "thinking": working}, {"text": "ok"}]
    hidden = {"table": table | {target: value}, "solution": turns, "target": target, "terms": [table[one], more]}
    name = _name("ledger", f"{goal} {table}")
    return Task(name, "agent", goal, {"table": table}, hidden, LEDGER_TOOLS, Budget(steps=4, calls=8))


def columns(one: int, two: int) -> str:
    """A number of two digits and one of one, units first: `9+4=13 2+1=3`."""
    units = one % 10 + two
    return f"{one % 10}+{two}={units} {one // 10}+{units // 10}={one // 10 + units // 10}"


# ---------------------------------------------------------------------- coding

_OPERATORS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}
LONGEST = 12
"""Characters of a program at most; so no number grows beyond reason."""


def evaluate(program: str, x: int) -> int:
    """What a program leaves on the stack. ToolError says what is wrong with it."""
    if not re.fullmatch(rf"[x0-9+*-]{{1,{LONGEST}}}", program):
        raise ToolError(f"1 to {LONGEST} of x 0-9 + - *")
    stack: list[int] = []
    for symbol in program:
        if symbol not in _OPERATORS:
            stack.append(x if symbol == "x" else int(symbol))
        elif len(stack) < 2:
            raise ToolError(f"nothing to {symbol}")
        else:
            right, left = stack.pop(), stack.pop()
            stack.append(_OPERATORS[symbol](left, right))
    if len(stack) != 1:
        raise ToolError(f"{len(stack)} numbers left")
    return stack[0]


class Workbench(InProcess):
    """One program; writing it shows its values at 1 and 2. Right is one that has the wanted values elsewhere too."""

    def perform(self, name: str, arguments: dict[str, Any]) -> str:
        values = [evaluate(arguments["p"], x) for x in (1, 2)]
        self.state["program"] = arguments["p"]
        return f"f1={values[0]} f2={values[1]}"

    def judge(self, hidden: bool) -> Verdict:
        wanted = self._task().hidden["values" if hidden else "shown"]
        right = [evaluate(self.state["program"], x) == value for x, value in wanted]
        if hidden:
            return Verdict(float(all(right) and self.answer is not None))
        return Verdict(0.0, f"{sum(right)} of {len(right)} values are right")


WORKBENCH_TOOLS = (tool("write", "", p="string"),)


def program(random: Random) -> Task:
    """f(x) = a x + b, of which a digit is wrong; f(1) and f(2) are given."""
    a, b = random.randint(2, 5), random.randint(0, 5)
    wrong = random.choice([digit for digit in range(10) if digit not in (a, b)])
    broken = random.choice([f"x{wrong}*{b}+", f"x{a}*{wrong}+"])
    goal = f"{broken} f1={a + b} f2={2 * a + b}"
    working = f"{2 * a + b}-{a + b}={a} {a + b}-{a}={b}"
    write = [["write", {"p": f"x{a}*{b}+"}]]
    values = {"shown": [[x, a * x + b] for x in (1, 2)], "values": [[x, a * x + b] for x in range(3, 9)]}
    hidden = {**values, "a": a, "b": b, "solution": [{"calls": write, "thinking": working}, {"text": "ok"}]}
    state = {"program": broken}
    return Task(_name("program", goal), "coding", goal, state, hidden, WORKBENCH_TOOLS, Budget(steps=4, calls=8))


KINDS: dict[str, Callable[[Random], Task]] = {"ladder": ladder, "ledger": ledger, "program": program}


def small_tasks(kind: str, split: str = "train", seed: int = 0) -> Iterator[Task]:
    """A stream of different tasks of a kind; endless but for `program`, of which there are some hundreds."""
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}; expected one of {', '.join(KINDS)}")
    return distinct(kind, KINDS[kind], lambda task: task.id, split, seed)
