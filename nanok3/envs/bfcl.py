"""BFCL's conversations of several turns over its stateful simulators: a file system, a car, a broker, a travel agency.

    a call      all calls so far, and this one, on fresh simulators -> its result           (a fork, in a sandbox)
    next turn   a reply without calls is answered by what the user says next; after the last one the episode ends
    right       after every turn that needs calls: the state is that after the ground truth's calls, and all results
                that those give were seen by then

The simulators are another project's code, so they run in a bubblewrap sandbox and nowhere else. One process of it has
imported them and forks for every question, so nothing of one episode is left for another. Calls go in as JSON and are
methods looked up by name among the described ones, never evaluated as the original does. The state of an environment is
the list of its calls: the simulators draw their random numbers from the scenario's seed, so the same calls give the
same state, and pauses, snapshots and forks cost nothing.

Judging asks twice, once with the policy's calls and once with those of the ground truth, and compares outside: neither
run knows of the other. A call that takes too long or too much memory is an error that the policy reads, and leaves no
trace in the state.

Source: bfcl-eval's multi_turn_checker (state and responses after each turn). Ours: states are compared as plain data,
and results that say "error" are counted as such.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from typing import Any

from nanok3.data.bfcl import SIMULATORS, SOURCES, STATELESS, Scenario, scenarios, schema_of, simulator_files
from nanok3.envs.bubblewrap import Sandboxes, python
from nanok3.envs.environment import Budget, InfraError, Observation, Reply, Result, Task, Verdict
from nanok3.envs.in_process import InProcess
from nanok3.envs.process import Process
from nanok3.envs.sandbox import Limits
from nanok3.envs.tools import Tool, ToolError, read_arguments

KINDS = {"bfcl-base": "base", "bfcl-missing": "miss_param", "bfcl-long": "long_context"}
"""Name here -> category there."""
TRAIN = 150
"""Scenarios that may be learned from, the first of each category; the same number is the same story in all."""
STEPS_A_TURN = 20
SECONDS = 5
"""Of all calls of an episode, played again."""

_SERVER = """
import hashlib, importlib, json, os, resource, signal, sys
out = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
sys.path.insert(0, ".")
setup = json.loads(sys.stdin.readline())
classes = {n: getattr(importlib.import_module(setup["package"] + "." + m), n) for n, m in setup["modules"].items()}

def plain(value, above=()):
    if id(value) in above:
        return "above"
    above = (*above, id(value))
    if isinstance(value, dict):
        return ["dict", sorted([plain(k, above), plain(v, above)] for k, v in value.items())]
    if isinstance(value, (set, frozenset)):
        return ["set", sorted(plain(v, above) for v in value)]
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, [plain(v, above) for v in value]]
    if isinstance(value, (bool, str, type(None))):
        return [type(value).__name__, repr(value)]
    if isinstance(value, (int, float)):
        return ["number", repr(int(value) if value == value // 1 else value)]
    if hasattr(value, "__dict__"):
        return [type(value).__name__, plain({k: v for k, v in vars(value).items() if k[:1] != "_"}, above)]
    return [type(value).__name__, repr(value)]

def digest(text):
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()

def perform(instances, name, arguments):
    try:
        owner = [i for i in instances.values() if callable(getattr(i, name, None))][-1]
        found = getattr(owner, name)(**arguments)
        if isinstance(found, dict):
            try:
                return json.dumps(found), "error" in found
            except (TypeError, ValueError):
                return str(found), "error" in found
        return str(found), False
    except Exception as error:
        return "Error during execution: " + str(error), True

def play(asked):
    instances = {}
    for name in asked["classes"]:
        instances[name] = classes[name]()
        if name not in setup["stateless"]:
            instances[name]._load_scenario(asked["start"].get(name, {}), long_context=asked["long"])
    results, states = [], []
    for turn in asked["turns"]:
        results.append([])
        for name, arguments in turn:
            text, error = perform(instances, name, arguments)
            results[-1].append([digest(text), error, text])
        states.append(digest(json.dumps(plain(instances))) if asked["judge"] else "")
    last = results[-1][-1][2][:100000] if results and results[-1] else ""
    return {"results": [[r[:2] for r in turn] for turn in results], "states": states, "last": last}

print("{}", file=out, flush=True)
for line in sys.stdin:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(read)
            resource.setrlimit(resource.RLIMIT_AS, (400 << 20, 400 << 20))
            signal.alarm(setup["seconds"])
            with os.fdopen(write, "w") as answer:
                answer.write(json.dumps(play(json.loads(line))))
            code = 0
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read) as answer:
        said = answer.read()
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) or not said:
        said = "{}"
    print(said, file=out, flush=True)
"""

Calls = Sequence[Sequence[Any]]
"""Name and arguments of each; lists where they come from JSON."""


class Simulators:
    """A sandboxed process that has imported the simulators. Begins when first asked, and again if it has ended.

    A thread of its own begins it and asks: a sandbox dies with the thread that has begun it, and episodes give each
    step another one."""

    def __init__(self, home: Sandboxes) -> None:
        self.home, self.box, self.process = home, None, None  # type: Sandboxes, Bubblewrap | None, Process | None
        self._thread = ThreadPoolExecutor(1, "nanok3 simulators")
        home.at_close.append(self.close)

    @classmethod
    def of(cls, home: Sandboxes) -> Simulators:
        """The one of these sandboxes."""
        found = next((each for each in home.kept if isinstance(each, cls)), None)
        if found is None:
            home.kept.append(found := cls(home))
        return found

    def ask(self, state: dict[str, Any], turns: Sequence[Calls], judge: bool = False) -> dict[str, Any] | None:
        """What came of the calls of these turns: {"results": [[[digest, error], ...], ...], "states": digests after
        each turn where `judge` asks for them, "last": the last result's text}. None if they took too much."""
        asked = {"classes": state["classes"], "start": state["start"], "long": state["long"], "judge": judge}
        line = json.dumps({**asked, "turns": [list(turn) for turn in turns]}).encode()
        return self._thread.submit(self._ask, line).result()

    def _ask(self, line: bytes) -> dict[str, Any] | None:
        try:
            return json.loads(self._running().ask(line, SECONDS + 5)) or None
        except (TimeoutError, EOFError, ValueError) as error:
            self._end()
            raise InfraError(f"the simulators' process: {error}") from None

    def _running(self) -> Process:
        if self.process is None:
            self.box = self.box or self.home.open(simulator_files())
            self.process = self.box.start([*python(), "-c", _SERVER], Limits(seconds=24 * 3600, output=8 << 20))
            package = SOURCES.replace("/", ".")
            setup = {"package": package, "modules": SIMULATORS, "stateless": STATELESS, "seconds": SECONDS}
            self.process.ask(json.dumps(setup).encode(), 60)
        return self.process

    def _end(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            with suppress(InfraError):
                process.close()

    def close(self) -> None:
        self._thread.submit(self._end).result()
        self._thread.shutdown()
        if self.box is not None:
            self.box.close()
            self.box = None


class BfclEnvironment(InProcess):
    """One conversation. `state["turns"]` holds the calls of each turn so far."""

    def __init__(self, home: Sandboxes) -> None:
        super().__init__()
        self.home, self.simulators = home, Simulators.of(home)

    def reset(self, task: Task) -> Observation:
        seen = super().reset(task)
        self.state = {"turns": [[]]}
        return seen

    def step(self, reply: Reply) -> Observation:
        questions, turns = self._task().state["questions"], self.state["turns"]
        if reply.calls or len(turns) == len(questions) or self._over():
            return super().step(reply)
        self.steps += 1
        turns.append([])
        return Observation(questions[len(turns) - 1], done=self._over())

    def _over(self) -> bool:
        return self.answer is not None or self.steps >= self._task().budget.steps

    def perform(self, name: str, arguments: dict[str, Any]) -> Result:
        turns = self.state["turns"]
        asked = [*turns[:-1], [*turns[-1], (name, arguments)]]
        found = self.simulators.ask(dict(self._task().state), asked)
        if found is None:
            raise ToolError(f"{name} took more than {SECONDS} seconds, or too much memory; it was not carried out")
        turns[-1].append([name, arguments])
        return Result(name, found["last"], error=bool(found["results"][-1][-1][1]))

    def judge(self, hidden: bool) -> Verdict:
        task, turns = self._task(), self.state["turns"]
        questions = task.state["questions"]
        if not hidden:
            reached = len(turns) - (self.answer is None)
            return Verdict(reached / len(questions), f"{reached} of {len(questions)} turns were answered")
        if len(turns) < len(questions) or self.answer is None:
            return Verdict(0.0)
        start, truth = dict(task.state), task.hidden["truth"]
        ours, right = (self.simulators.ask(start, each, judge=True) for each in (turns, truth))
        if right is None:
            raise InfraError("the ground truth's calls took too much")
        return Verdict(float(ours is not None and agrees(ours, right)))

    def fork(self) -> BfclEnvironment:
        other = BfclEnvironment(self.home)
        other.reset(self._task())
        other.restore(self.snapshot())
        return other


def agrees(ours: dict[str, Any], right: dict[str, Any]) -> bool:
    """Whether the policy's turns come to the same as the ground truth's, wherever that calls anything."""
    seen: list[str] = []
    for mine, state, wanted, wanted_state in zip(ours["results"], ours["states"], right["results"], right["states"]):
        seen += [digest for digest, _ in mine]
        if not wanted:
            continue
        left = list(seen)
        for digest, _ in wanted:
            if digest not in left:
                return False
            left.remove(digest)
        if not mine or state != wanted_state:
            return False
    return True


def task_of(scenario: Scenario, kind: str) -> Task:
    """A scenario as a task of ours."""
    tools = tuple(Tool(f["name"], f["description"], schema_of(f["parameters"])) for f in scenario.functions)
    turns: list[dict[str, Any]] = []
    for calls in scenario.truth:
        turns += [{"calls": [list(call) for call in calls]}] if calls else []
        turns.append({"text": "Done." if calls else "I need to know more to do that."})
    state = {"questions": list(scenario.questions), "classes": list(scenario.classes), "start": dict(scenario.start)}
    hidden = {"truth": [[list(call) for call in calls] for calls in scenario.truth], "solution": turns}
    budget = Budget(steps=STEPS_A_TURN * len(scenario.questions), calls=200, characters=20_000)
    long = KINDS[kind] == "long_context"
    name = f"{kind}/{scenario.id.rpartition('_')[2]}"
    return Task(name, "agent", scenario.questions[0], {**state, "long": long}, hidden, tools, budget)


def fits(task: Task) -> bool:
    """Whether the ground truth keeps to the tools as they are described; number 173 of the set does not."""
    tools = {each.name: each for each in task.tools}
    try:
        for name, arguments in (call for turn in task.hidden["truth"] for call in turn):
            read_arguments(tools[name], arguments)
    except (KeyError, ToolError):
        return False
    return True


def bfcl_tasks(kind: str, split: str, seed: int = 0) -> Iterator[Task]:
    """Always in the order of the set; the package is fetched where it is not here."""
    found = scenarios(KINDS[kind])
    chosen = islice(found, TRAIN) if split == "train" else islice(found, TRAIN, None)
    yield from filter(fits, (task_of(scenario, kind) for scenario in chosen))
