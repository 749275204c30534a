"""BFCL's conversations: a small package of our own in the place of the real one, played in the real sandbox."""

from __future__ import annotations

import json
import os
import zipfile
from types import SimpleNamespace

import pytest
from sandboxed import needs_sandbox

from nanok3.data import bfcl as package
from nanok3.data.bfcl import SIMULATORS, SOURCES, call_of, scenarios
from nanok3.envs import bfcl
from nanok3.envs.bfcl import BfclEnvironment, Simulators, agrees, bfcl_tasks
from nanok3.envs.bubblewrap import Sandboxes
from nanok3.envs.environment import InfraError, Reply
from nanok3.envs.episode import play, scripted, solution
from nanok3.envs.process import resident
from nanok3.envs.tools import Call

DESK = """
import random, time
from bfcl_eval.eval_checker.multi_turn_eval.func_source_code.long_context import EXTRA
COUNT = [0]

class TicketAPI:
    def _load_scenario(self, scenario, long_context=False):
        self._random = random.Random(scenario.get("seed", 1))
        self.tickets = dict(scenario.get("tickets", {}))
        self.closed = set()
        self.parent = self
        self._started = time.time()
        if long_context:
            self.tickets["extra"] = EXTRA

    def open_ticket(self, title, urgent=False):
        COUNT[0] += 1
        number = str(self._random.randint(1000, 9999))
        self.tickets[number] = {"title": title, "urgent": urgent, "tags": (1, 2.0)}
        return {"id": number, "count": COUNT[0]}

    def close_ticket(self, title):
        found = [k for k, v in self.tickets.items() if v["title"] == title]
        if not found:
            return {"error": "no such ticket"}
        self.closed.add(found[0])
        return {"closed": found[0]}

    def list_tickets(self):
        return [v["title"] for v in self.tickets.values()]

    def spend(self, what):
        self.tickets["spent"] = {"title": what}
        if what == "time":
            while True:
                pass
        if what == "memory":
            return "x" * (1 << 30)
        return open(what).read()

    def _hidden(self):
        return "secret"
"""
PLAIN = "class {}:\n    def add(self, a, b):\n        return {{'result': a + b}}\n"
TOOLS = [
    {"name": "open_ticket", "properties": {"title": {"type": "string"}, "urgent": {"type": "boolean"}}},
    {"name": "close_ticket", "properties": {"title": {"type": "string"}}},
    {"name": "list_tickets", "properties": {}},
    {"name": "spend", "properties": {"what": {"type": "string"}}},
]
ADD = {"name": "add", "properties": {"a": {"type": "float"}, "b": {"type": "float"}}}


def described(tool):
    shape = {
        "type": "dict",
        "properties": tool["properties"],
        "required": [k for k in tool["properties"] if k[0] != "u"],
    }
    return {"name": tool["name"], "description": "does it", "parameters": shape}


def record(number, *turns, **more):
    """(what is said, calls of the ground truth) by turn."""
    one = {"id": f"multi_turn_x_{number}", "question": [[{"role": "user", "content": said}] for said, _ in turns]}
    start = {"TicketAPI": {"tickets": {"7": {"title": "old"}}}}
    one |= {"initial_config": start, "involved_classes": ["TicketAPI", "MathAPI"], **more}
    return one, {"id": one["id"], "ground_truth": [calls for _, calls in turns]}


RECORDS = [
    record(0, ("Open x.", ["open_ticket('x', urgent=True)"]), ("Close old.", ["close_ticket(title='old')"])),
    record(1, ("What is there?", ["list_tickets()"]), ("Add.", []), ("1 and 2.", ["add(a=1, b=2)"])),
    record(2, ("Wrong truth.", ["open_ticket(title=3)"])),
    record(3, ("Hidden.", ["close_ticket(title='old')"]), excluded_function=["spend", "list_tickets"]),
]


@pytest.fixture(scope="module", autouse=True)
def wheel(tmp_path_factory):
    """A package of the same shape."""
    path = tmp_path_factory.mktemp("bfcl") / "x.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{SOURCES}/long_context.py", "EXTRA = {'title': 'extra'}")
        for simulator, module in SIMULATORS.items():
            text = DESK if simulator == "TicketAPI" else PLAIN.format(simulator)
            archive.writestr(f"{SOURCES}/{module}.py", text)
            tools = {"TicketAPI": TOOLS, "MathAPI": [ADD]}.get(simulator, [])
            lines = "\n".join(json.dumps(described(tool)) for tool in tools)
            archive.writestr(f"bfcl_eval/data/multi_turn_func_doc/{module}.json", lines)
        for category in package.CATEGORIES:
            for folder, side in (("", 0), ("possible_answer/", 1)):
                lines = "\n".join(json.dumps(both[side]) for both in RECORDS)
                archive.writestr(f"bfcl_eval/data/{folder}BFCL_v4_multi_turn_{category}.json", lines)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(package, "fetch", lambda wanted, cache=None: path)
        yield


@pytest.fixture(scope="module")
def home():
    with Sandboxes() as made:
        yield made


def tasks(kind="bfcl-base"):
    return list(bfcl_tasks(kind, "train"))


def played(home, task, *replies):
    return play(BfclEnvironment(home), task, scripted(list(replies)))


def calls(*named):
    return Reply(calls=tuple(Call(name, arguments) for name, arguments in named))


DONE = Reply("Done.")


def test_scenarios():
    first, second, _, hidden = scenarios("base")
    assert first.questions == ("Open x.", "Close old.") and first.classes == ("TicketAPI", "MathAPI")
    assert first.truth == ((("open_ticket", {"title": "x", "urgent": True}),), (("close_ticket", {"title": "old"}),))
    assert second.truth[1] == () and [f["name"] for f in hidden.functions] == ["open_ticket", "close_ticket", "add"]
    assert [task.id for task in tasks()] == ["bfcl-base/0", "bfcl-base/1", "bfcl-base/3"], (
        "one asks for what no tool does"
    )
    assert list(bfcl_tasks("bfcl-base", "held-out")) == []
    shape = tasks()[0].tools[-1].parameters
    assert shape["type"] == "object" and shape["properties"]["a"] == {"type": "number"}
    for wrong in ("open_ticket", "other()", "a.open_ticket()", "open_ticket(f())", "1 + 1"):
        with pytest.raises(ValueError):
            call_of(wrong, {"open_ticket": described(TOOLS[0])})


@needs_sandbox
@pytest.mark.parametrize("kind", list(bfcl.KINDS))
def test_solutions_earn_all_and_less_earns_nothing(home, kind):
    for task in tasks(kind):
        whole = solution(task)
        assert played(home, task, *whole).reward == 1.0
        turns = len(task.state["questions"])
        every = tuple(Call(tool.name, dict.fromkeys(tool.parameters["properties"], "x")) for tool in task.tools)
        attacks = {
            "empty": [Reply("")] * turns,
            "claims": [Reply("All done. Reward: 1.0")] * turns,
            "prompt copied": [Reply(task.goal)] * turns,
            "every call": [Reply(calls=every), DONE] * turns,
            "one turn short": whole[:-1] + [Reply(calls=every)] * task.budget.steps,
            "the calls as text": [Reply(json.dumps(task.hidden["truth"]))] * turns,
            "all at once": [Reply(calls=tuple(call for reply in whole for call in reply.calls)), *[DONE] * turns],
            "without the last calls": [*[reply for reply in whole if reply is not whole[-2]], DONE],
            "something else besides": [calls(("open_ticket", {"title": "mine"})), *whole],
            "private": [calls(("_hidden", {}), ("__class__", {}), ("_load_scenario", {"scenario": {}})), DONE] * turns,
        }
        for attack, replies in attacks.items():
            if attack == "all at once" and turns == 1:
                continue
            assert played(home, task, *replies).reward == 0.0, (task.id, attack)


@needs_sandbox
def test_results_have_to_be_seen(home):
    """What changes nothing is right only if it was looked up, in this turn or before, and something was called."""
    task = tasks()[1]
    look, add = calls(("list_tickets", {})), calls(("add", {"a": 1, "b": 2}))
    assert played(home, task, look, DONE, DONE, add, DONE).reward == 1.0
    assert played(home, task, look, add, DONE, DONE, look, DONE).reward == 1.0, "seen before"
    assert played(home, task, look, add, DONE, DONE, DONE).reward == 0.0, "nothing called where something is wanted"
    assert played(home, task, add, DONE, DONE, look, DONE).reward == 0.0, "the list came too late"
    assert played(home, task, look, DONE, DONE, calls(("add", {"a": 2, "b": 2})), DONE).reward == 0.0
    assert played(home, task, look, look, DONE, add, DONE, add, DONE).reward == 1.0, "more calls are allowed"


@needs_sandbox
def test_what_a_policy_sees(home):
    environment = BfclEnvironment(home)
    assert environment.reset(tasks()[0]).text == "Open x."
    (opened, failed) = environment.step(
        calls(("open_ticket", {"title": "x", "urgent": True}), ("close_ticket", {"title": "no"}))
    ).results
    assert json.loads(opened.content)["count"] == 1 and not opened.error
    assert failed.content == '{"error": "no such ticket"}' and failed.error
    for name, given, says in (
        ("open_ticket", {}, "title is missing"),
        ("open_ticket", '{"title": ', "arguments are not JSON"),
        ("nothing", {}, "there is no tool 'nothing'"),
        ("spend", {"what": "/etc/passwd"}, "Error during execution: [Errno 2] No such file"),
    ):
        (result,) = environment.step(calls((name, given))).results
        assert result.error and says in result.content
    seen = environment.step(DONE)
    assert seen.text == "Close old." and not seen.done
    environment.step(calls(("close_ticket", {"title": "old"})))
    assert environment.step(DONE).done
    assert environment.verdict(hidden=False).detail == "2 of 2 turns were answered"
    assert environment.verdict().score == 0.0, "the attempt at the file is in the state"


@needs_sandbox
def test_pauses_snapshots_and_forks(home):
    task, environment = tasks()[0], BfclEnvironment(home)
    environment.reset(task)
    environment.step(calls(("open_ticket", {"title": "x", "urgent": True})))
    environment.step(DONE)
    kept, other = environment.snapshot(), environment.fork()
    environment.pause()
    with pytest.raises(ValueError, match="paused"):
        environment.step(DONE)
    other.step(calls(("open_ticket", {"title": "worse"})))
    environment.resume()
    environment.step(calls(("close_ticket", {"title": "old"})))
    environment.step(DONE)
    other.step(DONE)
    assert (environment.verdict().score, other.verdict().score) == (1.0, 0.0)
    third = BfclEnvironment(home)
    third.reset(task)
    third.restore(kept)
    third.step(calls(("close_ticket", {"title": "old"})))
    third.step(DONE)
    assert third.verdict().score == 1.0


@needs_sandbox
def test_what_takes_too_much_is_an_error_and_leaves_no_trace(monkeypatch):
    monkeypatch.setattr(bfcl, "SECONDS", 1)
    task = tasks()[0]
    with Sandboxes() as own:
        replies = [calls(("spend", {"what": what})) for what in ("time", "memory")]
        found = played(own, task, *replies, *solution(task))
        assert found.reward == 0.0, "no memory is an exception of the call's own, as any other"
        slow, large = (seen.results[0] for seen in found.observations[1:3])
        assert "took more than 1 seconds" in slow.content and "Error during execution" in large.content
        assert played(own, task, replies[0], *solution(task)).reward == 1.0


@needs_sandbox
def test_nothing_is_left_for_the_next_question_or_behind(home):
    task = tasks()[0]
    with Sandboxes() as own:
        simulators = Simulators.of(own)
        assert simulators is Simulators.of(own) is not Simulators.of(home)
        answers = [simulators.ask(dict(task.state), task.hidden["truth"], judge=True) for _ in range(2)]
        assert answers[0] == answers[1] and all(answers[0]["states"]), "counters of the module, clocks, random numbers"
        process = simulators.process.process
        process.kill()
        with pytest.raises(InfraError, match=r"the simulators' process: "):
            simulators.ask(dict(task.state), [[]])
        assert simulators.ask(dict(task.state), task.hidden["truth"], judge=True) == answers[0], "it begins again"
        last = simulators.process.process.pid
        assert resident(last) > 0
    assert not os.path.exists(f"/proc/{last}") and not own.store.folder.exists()


def test_a_failing_truth_is_nobodys_fault():
    """The machinery's failure gives no reward; the policy's calls that took too much do not agree."""
    task = tasks()[0]
    answers = {"ours": None, "right": {"results": [], "states": []}}
    environment = object.__new__(BfclEnvironment)
    super(BfclEnvironment, environment).__init__()
    environment.task, environment.answer = task, "Done."
    environment.state = {"turns": [["mine"], ["mine"]]}
    environment.simulators = SimpleNamespace(
        ask=lambda start, turns, judge: answers["ours" if turns[0] == ["mine"] else "right"]
    )
    assert environment.verdict().score == 0.0
    answers["right"] = None
    with pytest.raises(InfraError, match="took too much"):
        environment.verdict()


def test_states_and_results_are_compared_turn_by_turn():
    def seen(*turns):
        return {"results": [[[r, False] for r in results] for results, _ in turns], "states": [s for _, s in turns]}

    right = seen((["a", "a"], "1"), ([], "1"), (["b"], "2"))
    assert agrees(seen((["a", "c", "a"], "1"), (["b"], "9"), (["b"], "2")), right), "a turn without truth is free"
    assert not agrees(seen((["a"], "1"), ([], "1"), (["b"], "2")), right), "wanted twice, seen once"
    assert not agrees(seen((["a", "a"], "3"), ([], "1"), (["b"], "2")), right), "another state on the way"
    assert not agrees(seen((["a", "a", "b"], "1"), ([], "1"), ([], "2")), right), "nothing called"


@pytest.mark.slow
@needs_sandbox
@pytest.mark.parametrize("kind", list(bfcl.KINDS))
def test_the_real_package(kind, monkeypatch):
    """Fetched by pip, 2 MB: each solution earns 1, and answering every turn without a call earns nothing."""
    pytest.importorskip("mpmath")
    from nanok3.data import packages

    monkeypatch.setattr(package, "fetch", packages.fetch)
    with Sandboxes(packages=("mpmath",)) as own:
        found = [*bfcl_tasks(kind, "train"), *bfcl_tasks(kind, "held-out")]
        assert len(found) == 199
        for task in found:
            assert played(own, task, *solution(task)).reward == 1.0, task.id
            assert played(own, task, *[DONE] * len(task.state["questions"])).reward == 0.0, task.id
