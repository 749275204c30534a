"""Coding in the sandbox: what is judged are values that never were in there."""

from __future__ import annotations

from itertools import islice

import pytest
from sandboxed import needs_sandbox

from nanok3.envs.bubblewrap import Sandboxes
from nanok3.envs.coding import Coding, code_in, same
from nanok3.envs.coding_tasks import coding_tasks
from nanok3.envs.environment import InfraError, Reply
from nanok3.envs.episode import play, scripted, solution
from nanok3.envs.sandbox import Limits
from nanok3.envs.tools import Call


@pytest.mark.parametrize(
    "printed, wanted, right",
    [
        ("3", 3, True),
        ("3.0", 3, True),
        ("True", 1, True),
        ("'3'", 3, False),
        ("3.1", 3, False),
        ("0.30000000000000004", 0.3, True),
        ("[1, (2, 'a')]", [1, (2, "a")], True),
        ("[1, [2, 'a']]", [1, (2, "a")], False),
        ("{'a': 1.0}", {"a": 1.0}, True),
        ("{1}", {1}, True),
        ("<object>", 3, False),
        ("raised ValueError", 3, False),
        ("__import__('os')", 3, False),
        (None, None, False),
    ],
)
def test_values_are_literals(printed, wanted, right):
    assert same(printed, wanted) is right


def test_the_block_of_code():
    assert code_in("so\n```python\ndef f(x):\n    return x\n```\n") == "def f(x):\n    return x\n"
    assert code_in("def f(x): return x") is None and code_in("```\na\n```\n```\nb\n```") is None


@pytest.fixture(scope="module")
def home():
    with Sandboxes() as made:
        yield made


@needs_sandbox
@pytest.mark.parametrize("kind", ["functions", "repositories"])
def test_solutions_solve(home, kind):
    for task in islice(coding_tasks(kind), 3):
        played = play(Coding(home), task, scripted(solution(task)))
        assert played.reward == 1.0 and played.public == "all examples hold", played
    assert not any((home.store.folder / "work").iterdir())


CHEATS = {
    "leaves early": "import os, sys\nprint('all tests passed')\nos._exit(0)\n",
    "equals all": "class A:\n    __eq__ = lambda s, o: True\n    __repr__ = lambda s: 'any'\ndef f(x): return A()\n",
    "no value": "def f(x): pass\n",
    "prints": "def f(x):\n    import os\n    os.write(1, b'0 0 \"3\"')\n    raise SystemExit(0)\n",
    "hangs": "import time\ntime.sleep(1000)\n",
    "looks": "import sys\ndef f(x):\n    return str(sys._getframe(1).f_locals)\n",
    "spoils the driver": "import builtins as b\nb.repr = lambda x: '3'\nb.eval = lambda *a: 3\ndef f(x): return 3\n",
}


@needs_sandbox
@pytest.mark.parametrize("cheat", CHEATS)
def test_cheats_earn_nothing(cheat):
    task = next(coding_tasks("functions"))
    with Sandboxes(limits=Limits(seconds=1.0)) as home:
        played = play(Coding(home), task, scripted([Reply(f"```\n{CHEATS[cheat]}```")]))
    assert played.outcome == "done" and played.reward == 0.0


@needs_sandbox
def test_examples_alone_and_edited_tests_earn_nothing(home):
    task = next(coding_tasks("functions"))
    table = dict(task.state["examples"])
    cases = "".join(f"    if 'f(' + repr(x) + ')' == {e!r}: return {w}\n" for e, w in table.items())
    played = play(Coding(home), task, scripted([Reply(f"```\ndef f(x):\n{cases}```")]))
    assert played.reward == 0.0 and played.public == "all examples hold"
    repository = next(coding_tasks("repositories"))
    edits = [{"path": name, "content": "print('OK')\n"} for name in ("test_shop.py", "unittest.py", "sitecustomize.py")]
    calls = tuple(Call("write_file", edit) for edit in edits)
    assert play(Coding(home), repository, scripted([Reply(calls=calls), Reply("done")])).reward == 0.0


@needs_sandbox
def test_tools_forks_and_snapshots(home):
    task, env = next(coding_tasks("repositories")), Coding(home)
    env.reset(task)
    calls = [
        Call("read_file", {"path": "prices.py"}),
        Call("read_file", {"path": "../x"}),
        Call("read_file", {"path": "x"}),
    ]
    calls += [Call("run", {"command": "python test_shop.py; echo $((6 * 7))"}), Call("run", {"command": "exit 4"})]
    seen = env.step(Reply(calls=tuple(calls))).results
    assert [result.error for result in seen] == [False, True, True, False, False]
    assert "42" in seen[3].content and "[exit status 4]" in seen[4].content
    kept, fork = env.snapshot(), env.fork()
    fork.step(solution(task)[1])
    assert fork.verdict().score == 1.0 and env.verdict().score == 0.0
    env.step(solution(task)[1])
    assert env.verdict().score == 1.0
    env.restore(kept)
    assert env.verdict().score == 0.0
    with pytest.raises(InfraError):
        env.load({"snapshot": "nothing"})
    env.pause()
    with pytest.raises(ValueError, match="paused"):
        env.verdict()
    env.resume()
    fork.close()
    env.close()
