"""Coding tasks: write a function, mend a small repository. The model's code runs in the sandbox only.

    hidden check   = (an expression, the value that it must have)
    in the sandbox   a driver imports the work and evaluates the expressions, each by itself
    outside          the printed values are compared with the expected ones

The expected values never enter the sandbox, and no test file decides: a program that edits tests, leaves early or
prints "passed" has not printed the right values. Judging happens in a fork, so that it changes nothing. Values are
compared as literals; an object that equals everything prints no literal.

The policy sees public examples, and public tests that it may run. Tools: write_file, read_file, run (a shell command),
each a command in the sandbox.
"""

from __future__ import annotations

import ast
import json
import math
import secrets
from collections.abc import Sequence
from typing import Any

from nanok3.envs.bubblewrap import Bubblewrap, Sandboxes, python
from nanok3.envs.environment import InfraError, Observation, Reply, Task, Verdict
from nanok3.envs.gvisor import Containers, GVisor
from nanok3.envs.in_process import InProcess
from nanok3.envs.sandbox import Limits
from nanok3.envs.tools import ToolError, tool

TOOLS = (
    tool("write_file", "Write a file of the workspace.", path="string", content="string"),
    tool("read_file", "Read a file of the workspace.", path="string"),
    tool("run", "Run a shell command in the workspace. python is there; there is no network.", command="string"),
)

_DRIVER = """
import os, sys
out = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
import json
mark, setup, expressions = json.loads(sys.stdin.readline())
sys.path.insert(0, ".")
space = {}
try:
    exec(setup, space)
except BaseException as error:
    print(type(error).__name__, error, file=sys.stderr)
for number, expression in enumerate(expressions):
    try:
        text = repr(eval(expression, space))
    except BaseException as error:
        text = "raised " + type(error).__name__
    print(mark, number, json.dumps(text[:20000]), file=out, flush=True)
"""


def evaluate(box: Bubblewrap | GVisor, setup: str, expressions: Sequence[str], seconds: float) -> list[str | None]:
    """What each expression printed after `setup`, in a fork of the sandbox; None where there is nothing."""
    mark, fork = secrets.token_hex(8), box.fork()
    try:
        line = json.dumps([mark, setup, list(expressions)]).encode() + b"\n"
        ran = fork.run([*python(), "-c", _DRIVER], line, Limits(seconds=seconds))
    finally:
        fork.close()
    found: list[str | None] = [None] * len(expressions)
    for printed in ran.stdout.decode(errors="replace").splitlines():
        parts = printed.split(" ", 2)
        if len(parts) == 3 and parts[0] == mark and parts[1].isdigit() and int(parts[1]) < len(found):
            try:
                text = json.loads(parts[2])
            except ValueError:
                continue
            found[int(parts[1])] = text if isinstance(text, str) else None
    return found


def same(printed: str | None, wanted: Any) -> bool:
    """Whether a printed literal equals the wanted value as Python has it, but for floats: to nine digits."""
    if printed is None:
        return False
    try:
        found = ast.literal_eval(printed)
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        return False
    return _equal(found, wanted)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, int | float) and isinstance(b, int | float):
        return (
            math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12) if isinstance(a, float) or isinstance(b, float) else a == b
        )
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    return bool(a == b)


def literal(expression: str) -> Any:
    """A value as tasks keep it: the text of a Python literal, which JSON carries without loss."""
    return ast.literal_eval(expression)


class Coding(InProcess):
    """A workspace in a sandbox. `Task.state["files"]` is what it holds at first.

    A snapshot names a snapshot of the sandbox's store, so it lives as long as the store.
    """

    def __init__(self, home: Sandboxes | Containers) -> None:
        super().__init__()
        self.home, self.box = home, None  # type: Sandboxes | Containers, Bubblewrap | GVisor | None

    def reset(self, task: Task) -> Observation:
        self.close()
        self.box = self.home.open({path: text.encode() for path, text in task.state["files"].items()})
        return super().reset(task)

    def _box(self) -> Bubblewrap | GVisor:
        if self.box is None:
            raise ValueError("the environment has no sandbox; reset first")
        return self.box

    def perform(self, name: str, arguments: dict[str, Any]) -> str:
        box = self._box()
        try:
            if name == "write_file":
                box.write(arguments["path"], arguments["content"].encode())
                return "written"
            if name == "read_file":
                return box.read(arguments["path"]).decode(errors="replace")
        except (OSError, ValueError) as error:
            raise ToolError(str(error)) from None
        command = f'python() {{ {" ".join(python())} "$@"; }}; {arguments["command"]}'
        return box.run(["sh", "-c", command]).text or "nothing was printed"

    def step(self, reply: Reply) -> Observation:
        """A last reply with a block of code, where the task has one file to write, writes it."""
        wanted = self._task().state.get("answer_file")
        if not reply.calls and wanted and (code := code_in(reply.text)) is not None:
            self._box().write(wanted, code.encode())
        return super().step(reply)

    def judge(self, hidden: bool) -> Verdict:
        task = self._task()
        checks = task.hidden["checks"] if hidden else task.state["examples"]
        expressions = [expression for expression, _ in checks]
        printed = evaluate(self._box(), task.state["setup"], expressions, self.home.limits.seconds)
        right = [same(text, literal(wanted)) for text, (_, wanted) in zip(printed, checks)]
        if hidden:
            return Verdict(float(all(right)))
        said = [
            f"{expression} is {text or 'nothing'}, expected {wanted}"
            for ok, text, (expression, wanted) in zip(right, printed, checks)
            if not ok
        ]
        return Verdict(sum(right) / len(right), "\n".join(said) or "all examples hold")

    def dump(self) -> dict[str, Any]:
        return {"snapshot": self._box().snapshot()}

    def load(self, dumped: dict[str, Any]) -> None:
        try:
            self._box().restore(dumped["snapshot"])
        except ValueError as error:
            raise InfraError(str(error)) from None

    def fork(self) -> Coding:
        other = Coding(self.home)
        other.task, other.state, other.answer = self._task(), dict(self.state), self.answer
        other.steps, other.calls, other.errors = self.steps, self.calls, self.errors
        other.box = self._box().fork()
        return other

    def pause(self) -> None:
        super().pause()
        if self.box is not None:
            self.box.pause()

    def resume(self) -> None:
        super().resume()
        if self.box is not None:
            self.box.resume()

    def close(self) -> None:
        if self.box is not None:
            self.box.close()
            self.box = None


def code_in(text: str) -> str | None:
    """The one block of code between lines of three backticks; None where there is none, or more than one."""
    lines = text.splitlines()
    fences = [i for i, line in enumerate(lines) if line.startswith("```")]
    if len(fences) != 2:
        return None
    return "\n".join(lines[fences[0] + 1 : fences[1]]) + "\n"
