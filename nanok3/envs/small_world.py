"""Three kinds of tasks, one a domain, so short that a model of a million parameters learns them in minutes.

    buttons    S3BDIKNQ       general: machine S is in state 3; where does it end when these are pressed?
    ledger     SBDIKNQ        agent: press them on machine S: read its state, write the new one; judged by the table
    program    BDIKN?=4       coding: the last button is lost; filling one in runs two of five tests; judged by all

A machine has six rows of three buttons, and one of each row is pressed. A button moves every state to another one
(`TABLE`), and the order of buttons matters. A model meets these 90 facts in its demonstrations alone. A step that
presses two buttons is one of 45 for each pair of rows, and all six at once are one of 3,645. So an answer that skips
states is short and often wrong, and no reward can teach a small model to skip them all: it is composition that takes
steps (compare the word problem of S5).

To find something in the prompt and to make something of it are two things, and a small model learns them one by one.
So a thought begins with the state that was found, and repeats the buttons. Names, buttons and states are found by what
they are, for a row has letters of its own: by its place a button was still not found after 480 steps. What a call will
say is said before it, where a prompt is nearer: an argument far behind the prompt was still guessed after 400 steps.

A program begins in state x. Where two buttons bring it to the wanted f(1), only the tests tell which is meant.

Sources: the form of the tasks is that of chain sums, of key-value applications and of one-line fixes; the tasks are
ours, as K3's are not published.
"""

from __future__ import annotations

import hashlib
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
NAMES = "STUV"
"""Machines: capitals that are no buttons."""


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
    """The states, first the one it begins in, then one every `stride` buttons, each behind these: `3BD4IK2`. At step
    `at` the state is off by `slip`, and what follows goes on from there."""
    said = str(state)
    for begin in range(0, len(order), stride):
        pressed = order[begin : begin + stride]
        state = (press(state, pressed) - 1 + slip * (begin == at * stride)) % STATES + 1
        said += f"{pressed}{state}"
    return said


def _order(random: Random) -> str:
    return "".join(map(random.choice, ROWS))


def buttons(random: Random) -> Task:
    """Six presses. Judged by `questions.AnswerEnvironment`."""
    name, start, order = random.choice(NAMES), random.randint(1, STATES), _order(random)
    told = {"text": f"{name}{press(start, order)}", "thinking": trace(start, order, 1)}
    hidden = {"answer": told["text"], "name": name, "start": start, "buttons": order, "solution": [told]}
    goal = f"{name}{start}{order}"
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
    """Press the buttons of one machine: read its state, write the one it gets to, which is another one."""
    while True:
        table = {name: random.randint(1, STATES) for name in NAMES}
        name, order = random.choice(NAMES), _order(random)
        start, value = table[name], press(table[name], order)
        if value != start:
            break
    turns: list[dict[str, Any]] = [{"text": name, "calls": [["get", {"k": name}]]}]
    setting = {"text": f"{name}{value}", "calls": [["set", {"k": name, "v": value}]]}
    turns += [setting | {"thinking": trace(start, order, 1)}, {"text": "ok"}]
    hidden = {"table": table | {name: value}, "solution": turns, "name": name, "start": start, "buttons": order}
    goal = f"{name}{order}"
    budget = Budget(steps=4, calls=8)
    return Task(_name("ledger", f"{goal} {table}"), "agent", goal, {"table": table}, hidden, LEDGER_TOOLS, budget)


# ---------------------------------------------------------------------- coding


class Workbench(InProcess):
    """A program without its last button; filling one in runs two public tests. Right is one that has the wanted value
    in every state."""

    def perform(self, name: str, arguments: dict[str, Any]) -> str:
        if arguments["b"] not in TABLE:
            raise ToolError(f"b is {arguments['b']!r:.20}; one of {''.join(TABLE)} was expected")
        self.state["program"] = self.state["kept"] + arguments["b"]
        return " ".join(f"f{x} {'ok' if right else 'no'}" for x, right in self._tested(self.state["tests"]))

    def _tested(self, wanted: list[list[int]]) -> list[tuple[int, bool]]:
        """Each x, and whether the program has the wanted value there; nothing filled in has none."""
        program = self.state["program"]
        return [(x, program is not None and press(x, program) == value) for x, value in wanted]

    def judge(self, hidden: bool) -> Verdict:
        if not hidden:
            right = [found for _, found in self._tested(self.state["tests"])]
            return Verdict(0.0, f"{sum(right)} of {len(right)} values are right")
        right = [found for _, found in self._tested(self._task().hidden["values"])]
        return Verdict(float(all(right) and self.answer is not None))


WORKBENCH_TOOLS = (tool("fill", "", b="string"),)


def fitting(kept: str, end: int, x: int = 1) -> list[str]:
    """The buttons of the last row that bring x, behind the others, to `end`."""
    return [button for button in ROWS[-1] if press(x, kept + button) == end]


def program(random: Random) -> Task:
    """Five buttons, and what f(1) has to be. f(1) and f(2) together fit one button; to fill in is allowed twice."""
    while True:
        order = _order(random)
        kept, (one, two) = order[:-1], (press(x, order) for x in (1, 2))
        fits = fitting(kept, one)
        if len(set(fits) & set(fitting(kept, two, 2))) == 1:
            break
    tries = sorted(fits, key=lambda button: button == order[-1])[-2:]
    turns: list[dict[str, Any]] = [{"text": button, "calls": [["fill", {"b": button}]]} for button in tries]
    values = [[x, press(x, order)] for x in range(1, STATES + 1)]
    hidden = {"values": values, "end": one, "buttons": order, "solution": [*turns, {"text": "ok"}]}
    state = {"kept": kept, "program": None, "tests": [[1, one], [2, two]]}
    goal, budget = f"{kept}?={one}", Budget(steps=3, calls=2)
    return Task(_name("program", f"{goal} {order[-1]}"), "coding", goal, state, hidden, WORKBENCH_TOOLS, budget)


KINDS: dict[str, Callable[[Random], Task]] = {"buttons": buttons, "ledger": ledger, "program": program}


def small_tasks(kind: str, split: str = "train", seed: int = 0) -> Iterator[Task]:
    """A stream of different tasks of a kind; endless but for `program`, of which there are some hundreds."""
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}; expected one of {', '.join(KINDS)}")
    return distinct(kind, KINDS[kind], lambda task: task.id, split, seed)
