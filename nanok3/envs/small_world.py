"""Three kinds of tasks, one a domain, so short that a model of a million parameters learns them in minutes.

    buttons    3BDIKNQ                        general: where a machine in state 3 ends when these are pressed
    ledger     S BDIKNQ to W                  agent: read a state, press, write it elsewhere; judged by the table
    program    x3*4+ f1=9                     coding: one digit of a program is wrong; writing another runs its tests

The machine has six rows of three buttons, and one of each row is pressed. A button moves every state to another one
(`TABLE`), and the order of buttons matters. A model meets these 90 facts in its demonstrations alone. A step that
presses two buttons is one of 45 for each pair of rows, and all six at once are one of 3,645. So an answer that skips
states is short and often wrong, and no reward can teach a small model to skip them all: it is composition that takes
steps (compare the word problem of S5). A thought repeats the buttons: to find a button and to press it are two things,
and a small model learns them one by one. Rows have letters of their own, so that a button is found by what it is:
by its place it was still not found after 480 steps.

A program with one wrong digit can be mended in two ways that give the wanted f(1), and only tests tell which is meant:
one try is right half the time, two are enough.

The stack machine reads left to right: a digit or x is pushed, an operator takes two. It is run in this process: a
program is a string that a few lines below interpret, and no code of anybody's.

Sources: the form of the tasks is that of chain sums, of key-value applications and of one-line fixes; the tasks are
ours, as K3's are not published.
"""

from __future__ import annotations

import hashlib
import operator
import re
from collections.abc import Callable, Iterator
from itertools import permutations
from random import Random
from typing import Any

from nanok3.envs.environment import Budget, Task, Verdict
from nanok3.envs.in_process import InProcess
from nanok3.envs.questions import distinct
from nanok3.envs.tools import ToolError, tool

STATES = 5
ROWS = ("ABC", "DEF", "GHI", "JKL", "MNO", "PQR")
"""Capitals: no merge of the small vocabulary joins them."""
READ, WRITTEN = "STUV", "WXYZ"
"""Names of a ledger that are read and that are written: the capitals that are no buttons."""


def _name(kind: str, content: str) -> str:
    return f"{kind}/{hashlib.blake2b(content.encode(), digest_size=6).hexdigest()}"


# ---------------------------------------------------------------------- general


def _table() -> dict[str, tuple[int, ...]]:
    """For each button the states after it; none stays, and no two buttons of a row do the same."""
    random, states = Random("buttons"), list(range(1, STATES + 1))
    moves = [m for m in permutations(states) if all(one != other for one, other in zip(m, states))]
    return {button: move for row in ROWS for button, move in zip(row, random.sample(moves, len(row)))}


TABLE = _table()


def press(state: int, buttons: str) -> int:
    """The state after all buttons."""
    for button in buttons:
        state = TABLE[button][state - 1]
    return state


def trace(state: int, order: str, stride: int, slip: int = 0, at: int = 0) -> str:
    """The states, one every `stride` buttons, each behind these: `BD4IK2`. At step `at` the state is off by `slip`, and
    what follows goes on from there."""
    said = ""
    for begin in range(0, len(order), stride):
        pressed = order[begin : begin + stride]
        state = (press(state, pressed) - 1 + slip * (begin == at * stride)) % STATES + 1
        said += f"{pressed}{state}"
    return said


def _order(random: Random) -> str:
    return "".join(map(random.choice, ROWS))


def buttons(random: Random) -> Task:
    """Six presses. Judged by `questions.AnswerEnvironment`."""
    start, order = random.randint(1, STATES), _order(random)
    end = str(press(start, order))
    told = {"text": end, "thinking": trace(start, order, 1)}
    hidden = {"answer": end, "start": start, "buttons": order, "solution": [told]}
    goal = f"{start}{order}"
    return Task(_name("buttons", goal), "general", goal, {}, hidden, budget=Budget(steps=1))


# ---------------------------------------------------------------------- agent


class Ledger(InProcess):
    """A table of states by name. Right is the table that was asked for, and no other."""

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
    """Write, under one name, the state that another one's gets to when buttons are pressed. Names that are read and
    names that are written are different ones, so that a name, like a button, is found by what it is."""
    one, target = random.choice(READ), random.choice(WRITTEN)
    table = {name: random.randint(1, STATES) for name in READ + WRITTEN}
    order = _order(random)
    value = press(table[one], order)
    table[target] = random.choice([state for state in range(1, STATES + 1) if state != value])
    goal = f"{one} {order} to {target}"
    turns: list[dict[str, Any]] = [{"calls": [["get", {"k": one}]]}]
    turns += [{"calls": [["set", {"k": target, "v": value}]], "thinking": trace(table[one], order, 1)}, {"text": "ok"}]
    hidden: dict[str, Any] = {"table": table | {target: value}, "solution": turns, "target": target}
    hidden |= {"start": table[one], "buttons": order}
    name = _name("ledger", f"{goal} {table}")
    return Task(name, "agent", goal, {"table": table}, hidden, LEDGER_TOOLS, Budget(steps=4, calls=8))


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
    """One program; writing it runs its two public tests. Right is one that has the wanted values elsewhere too."""

    def perform(self, name: str, arguments: dict[str, Any]) -> str:
        values = [(x, evaluate(arguments["p"], x), wanted) for x, wanted in self.state["tests"]]
        self.state["program"] = arguments["p"]
        return " ".join(f"f{x} {'ok' if value == wanted else 'no'}" for x, value, wanted in values)

    def judge(self, hidden: bool) -> Verdict:
        wanted = self._task().hidden["values"] if hidden else self.state["tests"]
        right = [evaluate(self.state["program"], x) == value for x, value in wanted]
        if hidden:
            return Verdict(float(all(right) and self.answer is not None))
        return Verdict(0.0, f"{sum(right)} of {len(right)} values are right")


WORKBENCH_TOOLS = (tool("write", "", p="string"),)


def written(a: int, b: int) -> str:
    """The program of a x + b."""
    return f"x{a}*{b}+"


def program(random: Random) -> Task:
    """f(x) = a x + b, of which a digit is wrong; f(1), a digit too, is given. Changing the other digit instead gives
    f(1) as well."""
    a = random.randint(2, 9)
    b = random.randint(0, 9 - a)
    first = random.random() < 0.5
    digits = [w for w in range(a + b + 1) if w != (a if first else b)]
    wrong = random.choice(digits)
    broken, other = ((wrong, b), (wrong, a + b - wrong)) if first else ((a, wrong), (a + b - wrong, wrong))
    goal = f"{written(*broken)} f1={a + b}"
    turns: list[dict[str, Any]] = [{"calls": [["write", {"p": written(*pair)}]]} for pair in (other, (a, b))]
    values = {"values": [[x, a * x + b] for x in range(3, 9)]}
    hidden = {**values, "right": [a, b], "other": list(other), "sum": a + b, "solution": [*turns, {"text": "ok"}]}
    state = {"program": written(*broken), "tests": [[x, a * x + b] for x in (1, 2)]}
    return Task(
        _name("program", f"{goal} {a}"), "coding", goal, state, hidden, WORKBENCH_TOOLS, Budget(steps=4, calls=8)
    )


KINDS: dict[str, Callable[[Random], Task]] = {"buttons": buttons, "ledger": ledger, "program": program}


def small_tasks(kind: str, split: str = "train", seed: int = 0) -> Iterator[Task]:
    """A stream of different tasks of a kind; endless but for `program`, of which there are some hundreds."""
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}; expected one of {', '.join(KINDS)}")
    return distinct(kind, KINDS[kind], lambda task: task.id, split, seed)
