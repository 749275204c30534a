"""The small world of post-training: three domains, their prompts, and demonstrations to start from. All of it is ours.

    domain     kind       what counts as effort      low                 high               max
    general    buttons    thinking tokens            no thinking         every 2nd state    every state
    agent      ledger     all output tokens          no thinking         every 2nd state    every state
    coding     program    all output tokens          none, one try       every 2nd, two     every state, two

A demonstration shows the effort that it is labelled with in most cases, and now and then another one's, so that the
lengths vary and a budget can choose among them. A share of demonstrations ends in a mistake (`Mistakes`): what comes of
them is right in part, and reinforcement learning has something to learn.

The vocabulary is bytes, reserved ids, and merges learned from the markup alone. No merge holds a digit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any, Literal

from nanok3.config import K3Config
from nanok3.data.chat import EFFORTS, Segment, Sentences, render
from nanok3.data.tokenizer import Tokenizer, train_tokenizer
from nanok3.envs.environment import Environment, Observation, Reply, Task
from nanok3.envs.questions import AnswerEnvironment
from nanok3.envs.small_world import ROWS, STATES, Ledger, Workbench, fitting, small_tasks, trace
from nanok3.envs.tools import Call, schemas

SENTENCES = Sentences(
    tools="tools\n{}",
    new_tools="new tools\n{}",
    thinking_effort="effort {}",
    tool_choice_none="no call",
    tool_choice_required="call",
    json_object="json",
    json_schema="json\n{}",
)
"""OURS in fewer words."""
MERGES = 160
OWN_EFFORT = 0.7
"""Share of demonstrations that show the effort they are labelled with."""


@dataclass(frozen=True)
class Mistakes:
    """How demonstrations go wrong."""

    share: float = 0.25
    """Of demonstrations with one wrong state or digit in them, and all that follows from it."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError(f"mistakes: share is {self.share}; it must lie in [0, 1]")


Demonstrator = Callable[[Task, str, bool, Random], list[Reply]]
"""Task, effort shown, whether it goes wrong -> what is said."""


@dataclass(frozen=True)
class Domain:
    """What reinforcement learning and demonstrations need of a domain."""

    name: str
    kind: str
    counted: Literal["thinking", "output"]
    environment: Callable[[], Environment]
    demonstrate: Demonstrator

    def tasks(self, split: str = "train", seed: int = 0) -> Iterator[Task]:
        """A stream of tasks, a function of split and seed."""
        return small_tasks(self.kind, split, seed)

    def open(self, task: Task) -> Environment:
        """A fresh environment for one trajectory; not yet reset."""
        return self.environment()

    def messages(self, task: Task) -> list[dict[str, Any]]:
        """What is said before the model's first turn."""
        return [{"role": "user", "content": task.goal}]

    def prompt(self, task: Task, effort: str | None) -> list[Segment]:
        """Everything before the first sampled token."""
        return render(self.messages(task), schemas(task.tools) or None, thinking_effort=effort, sentences=SENTENCES)

    def demonstration(self, task: Task, effort: str, random: Random, mistakes: float) -> dict[str, Any]:
        """One conversation as `nanok3 sft` reads it: a line of JSON."""
        shown = effort if random.random() < OWN_EFFORT else random.choice(EFFORTS)
        replies = self.demonstrate(task, shown, random.random() < mistakes, random)
        tools = {"tools": schemas(task.tools)} if task.tools else {}
        messages = conversation(self.messages(task), replies, played(self.open(task), task, replies))
        return {"messages": messages, **tools, "effort": effort}


# ---------------------------------------------------------------------- episodes as conversations


def played(environment: Environment, task: Task, replies: Sequence[Reply]) -> list[Observation]:
    """What the environment answers to each reply."""
    environment.reset(task)
    seen = []
    for reply in replies:
        seen.append(environment.step(reply))
        if seen[-1].done:
            break
    environment.close()
    return seen


def conversation(
    before: Sequence[Mapping[str, Any]], replies: Sequence[Reply], seen: Sequence[Observation]
) -> list[dict[str, Any]]:
    """Replies and observations as messages behind those that stand before."""
    messages = [dict(message) for message in before]
    for turn, (reply, observation) in enumerate(zip(replies, seen, strict=True)):
        calls = [_call(call, f"{turn}.{number}") for number, call in enumerate(reply.calls)]
        said = {"role": "assistant", "content": reply.text, "reasoning_content": reply.thinking}
        messages.append(said | ({"tool_calls": calls} if calls else {}))
        for number, result in enumerate(observation.results):
            messages.append({"role": "tool", "content": result.content, "tool_call_id": f"{turn}.{number}"})
    return messages


def _call(call: Call, name: str) -> dict[str, Any]:
    arguments = call.arguments if isinstance(call.arguments, str) else dict(call.arguments)
    return {"id": name, "type": "function", "function": {"name": call.name, "arguments": arguments}}


# ---------------------------------------------------------------------- who demonstrates, and how it goes wrong


STRIDES = {"low": 6, "high": 2, "max": 1}
"""Buttons pressed in one step; all six is no step that is written down."""


def _pressed(task: Task, effort: str, wrong: bool, random: Random) -> tuple[str, int]:
    """What is thought, and the state at the end."""
    start, order, stride = task.hidden["start"], task.hidden["buttons"], STRIDES[effort]
    slip = random.randrange(1, STATES) if wrong else 0
    said = trace(start, order, stride, slip, random.randrange(len(order) // stride))
    return said if stride < len(order) else "", int(said[-1])


def _press(task: Task, effort: str, wrong: bool, random: Random) -> list[Reply]:
    thinking, end = _pressed(task, effort, wrong, random)
    return [Reply(f"{task.hidden['name']}{end}", thinking=thinking)]


def _keep(task: Task, effort: str, wrong: bool, random: Random) -> list[Reply]:
    """What a call will say is said before it."""
    name = task.hidden["name"]
    thinking, end = _pressed(task, effort, wrong, random)
    get, put = Call("get", {"k": name}), Call("set", {"k": name, "v": end})
    return [Reply(name, (get,)), Reply(f"{name}{end}", (put,), thinking), Reply("ok")]


def _fill(task: Task, effort: str, wrong: bool, random: Random) -> list[Reply]:
    """The states up to what is lost, and then a button that fits; where two do, the tests decide. One that goes wrong
    is off in a state, or takes a button that does not fit."""
    order, end, stride = task.hidden["buttons"], task.hidden["end"], STRIDES[effort]
    kept = order[:-1]
    steps = len(kept) // stride
    at = random.randrange(steps + 1) if wrong else None
    slip = 0 if at in (None, steps) else random.randrange(1, STATES)
    known = trace(1, kept[: steps * stride], stride, slip, at or 0)
    state, rest = int(known[-1]), kept[steps * stride :]
    fits = fitting(rest, end, state)
    if at == steps or not fits:
        fits = [button for button in ROWS[-1] if button not in fits]
    tries = random.sample(fits, min(len(fits), 1 if effort == "low" else 2))
    if order[-1] in tries:
        tries = tries[: tries.index(order[-1]) + 1]
    thoughts = [f"{known}{rest}{tries[0]}{end}", *(f"{state}{rest}{button}{end}" for button in tries[1:])]
    said = zip(tries, [""] if effort == "low" else thoughts)
    return [*(Reply(button, (Call("fill", {"b": button}),), thought) for button, thought in said), Reply("ok")]


def domains() -> dict[str, Domain]:
    """The three, by name."""
    found = (
        Domain("general", "buttons", "thinking", AnswerEnvironment, _press),
        Domain("agent", "ledger", "output", Ledger, _keep),
        Domain("coding", "program", "output", Workbench, _fill),
    )
    return {domain.name: domain for domain in found}


def demonstrations(
    chosen: Sequence[Domain], count: int, split: str = "train", mistakes: Mistakes | None = None
) -> list[dict[str, Any]]:
    """`count` conversations of each domain, the efforts in turn, shuffled. A domain with fewer tasks repeats them."""
    mistakes = mistakes or Mistakes()
    random = Random(f"demonstrations {mistakes.seed} {split}")
    made = []
    for domain in chosen:
        stream, seen = domain.tasks(split, mistakes.seed), list[Task]()
        for number in range(count):
            task = next(stream, None)
            seen += [task] if task else []
            task = task or seen[number % len(seen)]
            made.append(domain.demonstration(task, EFFORTS[number % 3], random, mistakes.share))
    random.shuffle(made)
    return made


# ---------------------------------------------------------------------- tokenizer and model


@cache
def small_tokenizer() -> Tokenizer:
    """Bytes and merges of the markup's words; what holds a digit is left out of their training."""
    made = demonstrations([*domains().values()], 60)
    pieces = [
        piece.text
        for row in made
        for piece in render(row["messages"], row.get("tools"), thinking_effort=row["effort"], sentences=SENTENCES)
        if not piece.allow_special and not any(map(str.isdigit, piece.text))
    ]
    return train_tokenizer(pieces, 512 + MERGES)


def small_model(preset: str = "small") -> K3Config:
    """Sizes for minutes on two cores: quick has 0.9 M parameters, small 1.5 M."""
    sizes = {"quick": K3Config.tiny().at_depth(4), "small": K3Config.tiny()}
    if preset not in sizes:
        raise ValueError(f"preset is {preset!r}; allowed: {', '.join(sizes)}")
    return sizes[preset].with_vocabulary(small_tokenizer().vocab_size)
