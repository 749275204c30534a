"""What stands between a policy and an environment, as parts that can be changed one by one.

    harness = system prompt + names of tools + form of results + context + memory + subagents
    drawn   = a function of (task group, seed): all samples of a group see one harness, other groups see others

A model that has met one harness learns its wording; one that has met many learns the task. A harness is white: the
parts are data, messages are made from the trajectory by a pure function, and its digest travels with every sample.

    context "all"       messages only ever grow: those of k turns begin those of k + 1
    context "window"    results older than the last few are left out of what the policy reads, and so it is read anew

Source: report 4.2 names the parts (tool interface, system prompt, context management, skills, memories, subagents).
The settings are ours, and emulate nobody's program.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from random import Random
from typing import Any, Literal

from nanok3.envs.environment import Environment, Observation, Reply, Result, Task, Verdict
from nanok3.envs.episode import Policy, Trajectory
from nanok3.envs.tools import Call, Tool, ToolError, read_arguments, tool

PROMPTS = {
    "none": "",
    "short": "Use the tools. Answer without a call when you are done.",
    "careful": "You act through tools. Look before you change anything, change only what is asked for, then say so.",
    "role": "You are an assistant at work on a computer. Every call is carried out at once and cannot be taken back.",
}
NAMES: dict[str, Callable[[str], str]] = {
    "plain": lambda name: name,
    "camel": lambda name: name.split("_")[0] + "".join(part.capitalize() for part in name.split("_")[1:]),
    "spaced": lambda name: f"env.{name}",
}
MEMORY = (
    tool("remember", "Keep a line for later; it outlives the context.", text="string"),
    tool("recall", "Read all lines that were kept."),
)
_HELP = "Give a part of the work to a helper with the same tools; its answer comes back."
DELEGATE = tool("delegate", _HELP, goal="string")
LEFT_OUT = "[left out]"


@dataclass(frozen=True)
class Harness:
    """The settings. `window` is how many results stay in view, or None for all; `helper_steps` 0 is no subagent."""

    prompt: str = "short"
    names: str = "plain"
    results: Literal["text", "json"] = "text"
    window: int | None = None
    memory: bool = False
    helper_steps: int = 0

    @property
    def digest(self) -> str:
        """Eight bytes that stand for the settings."""
        return hashlib.blake2b(json.dumps(asdict(self), sort_keys=True).encode(), digest_size=8).hexdigest()


def draw(group: str, seed: int = 0, helpers: bool = False) -> Harness:
    """The harness of a task group; `helpers` where the caller has a policy for subagents."""
    random = Random(f"harness {seed} {group}")
    return Harness(
        prompt=random.choice(list(PROMPTS)),
        names=random.choice(list(NAMES)),
        results=random.choice(("text", "json")),
        window=random.choice((None, None, 4, 8)),
        memory=random.random() < 0.5,
        helper_steps=random.choice((0, 4)) if helpers else 0,
    )


def messages(harness: Harness, played: Trajectory) -> list[dict[str, Any]]:
    """What the policy reads next, as the chat API's messages."""
    told: list[dict[str, Any]] = []
    if PROMPTS[harness.prompt]:
        told.append({"role": "system", "content": PROMPTS[harness.prompt]})
    if not played.observations:
        return told
    told.append({"role": "user", "content": played.observations[0].text})
    count = sum(len(seen.results) for seen in played.observations)
    first = 0 if harness.window is None else count - harness.window
    number = 0
    for turn, reply in enumerate(played.replies):
        calls = [_call(f"{turn}-{i}", call) for i, call in enumerate(reply.calls)]
        said: dict[str, Any] = {"role": "assistant", "content": reply.text, "reasoning_content": reply.thinking}
        told.append({**said, "tool_calls": calls} if calls else said)
        seen = played.observations[turn + 1] if turn + 1 < len(played.observations) else Observation()
        for i, result in enumerate(seen.results):
            content = result.content if number >= first else LEFT_OUT
            told.append({"role": "tool", "tool_call_id": f"{turn}-{i}", "content": content})
            number += 1
        if seen.text:
            told.append({"role": "user", "content": seen.text})
    return told


def _call(name: str, call: Call) -> dict[str, Any]:
    arguments = call.arguments if isinstance(call.arguments, str) else json.dumps(dict(call.arguments))
    return {"id": name, "type": "function", "function": {"name": call.name, "arguments": arguments}}


class Harnessed(Environment):
    """An environment seen through a harness. `helper` is the policy of subagents."""

    def __init__(self, inner: Environment, harness: Harness, helper: Policy | None = None) -> None:
        if harness.helper_steps and helper is None:
            raise ValueError(f"harness: helper_steps is {harness.helper_steps}; without a helper it must be 0")
        self.inner, self.harness, self.helper = inner, harness, helper
        self.kept: list[str] = []
        self.turns = 0

    def tools(self, task: Task) -> tuple[Tool, ...]:
        """What the policy is shown."""
        rename = NAMES[self.harness.names]
        shown = [replace(each, name=rename(each.name)) for each in task.tools]
        shown += MEMORY if self.harness.memory else ()
        return (*shown, *([DELEGATE] if self.harness.helper_steps else []))

    def reset(self, task: Task) -> Observation:
        self.task, self.kept, self.turns = task, [], 0
        own = {each.name for each in (*MEMORY, DELEGATE)}
        assert not own & {each.name for each in task.tools}
        self.back = {NAMES[self.harness.names](each.name): each.name for each in task.tools}
        return self.inner.reset(task)

    def step(self, reply: Reply) -> Observation:
        """Own calls are answered here, all others by the environment in one step; results keep the calls' order."""
        self.turns += 1
        if not reply.calls:
            return self.inner.step(reply)
        own = {each.name: each for each in self.tools(self.task)[len(self.task.tools) :]}
        passed = tuple(self._back(call) for call in reply.calls if call.name not in own)
        seen = self.inner.step(replace(reply, calls=passed)) if passed else Observation()
        theirs = iter(seen.results)
        results = [self._own(own[c.name], c) if c.name in own else next(theirs) for c in reply.calls]
        shown = tuple(self._shown(call, result) for call, result in zip(reply.calls, results))
        return replace(seen, results=shown, done=seen.done or self.turns >= self.task.budget.steps)

    def _back(self, call: Call) -> Call:
        """The environment's own name; a name that was not shown stays unknown."""
        return replace(call, name=self.back.get(call.name, f"{call.name} "))

    def _shown(self, call: Call, result: Result) -> Result:
        content = result.content
        if self.harness.results == "json":
            content = json.dumps({"error" if result.error else "result": content}, ensure_ascii=False)
        return replace(result, name=call.name, content=content)

    def _own(self, shown: Tool, call: Call) -> Result:
        try:
            arguments = read_arguments(shown, call.arguments)
        except ToolError as error:
            return Result(call.name, f"error: {error}", error=True)
        if call.name == "remember":
            self.kept.append(arguments["text"])
            return Result(call.name, "kept")
        if call.name == "recall":
            return Result(call.name, "\n".join(self.kept) or "nothing was kept")
        return Result(call.name, self._delegate(arguments["goal"]))

    def _delegate(self, goal: str) -> str:
        """A helper acts on the same environment, with a trajectory of its own."""
        assert self.helper is not None
        played = Trajectory(replace(self.task, goal=goal), [Observation(goal)])
        for _ in range(self.harness.helper_steps):
            reply = self.helper(played)
            played.replies.append(reply)
            if not reply.calls:
                return reply.text or "the helper said nothing"
            seen = self.inner.step(replace(reply, text=""))
            played.observations.append(seen)
            if seen.done:
                break
        return "the helper did not finish"

    def verdict(self, hidden: bool = True) -> Verdict:
        return self.inner.verdict(hidden)

    def snapshot(self) -> bytes:
        state = {"harness": self.harness.digest, "kept": self.kept, "turns": self.turns}
        return json.dumps({**state, "inner": base64.b64encode(self.inner.snapshot()).decode()}).encode()

    def restore(self, snapshot: bytes) -> None:
        read = json.loads(snapshot)
        if read["harness"] != self.harness.digest:
            raise ValueError(f"snapshot of harness {read['harness']}; this is {self.harness.digest}")
        self.kept, self.turns = read["kept"], read["turns"]
        self.inner.restore(base64.b64decode(read["inner"]))

    def fork(self) -> Harnessed:
        other = Harnessed(self.inner.fork(), self.harness, self.helper)
        other.task, other.back = self.task, self.back
        other.kept, other.turns = list(self.kept), self.turns
        return other

    def pause(self) -> None:
        self.inner.pause()

    def resume(self) -> None:
        self.inner.resume()

    def close(self) -> None:
        self.inner.close()
