"""`nanok3 envs`: what a model can act in, and what an episode looks like.

nanok3 envs                                       all kinds of tasks, and what each needs
nanok3 envs lookup                                one task, played by its solution
nanok3 envs repositories --policy nothing         by a policy that only says it is done
nanok3 envs sums --policy attacks                 by the attack suite: what each attack earns, and the solution
nanok3 envs --policy attacks                      all kinds that can be played here, a line a kind
nanok3 envs sums --count 3 --seed 7 --split held-out
nanok3 envs lookup --json tasks.jsonl --count 100   tasks with goal, tools and solution as JSON lines
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

if TYPE_CHECKING:
    from nanok3.envs.catalogue import Home, Kind
    from nanok3.envs.environment import Task
    from nanok3.envs.episode import Trajectory


@dataclass(frozen=True, kw_only=True)
class EnvsArgs:
    """List the environments, or play some tasks of one kind."""

    kind: Annotated[str | None, tyro.conf.Positional] = None
    """The kind of task to play; all are listed when not given."""
    count: int = 1
    """Tasks to play or to write."""
    seed: int = 0
    """Of the stream of tasks."""
    split: Literal["train", "held-out"] = "train"
    """The side of the split, which a task's content decides."""
    policy: Literal["solution", "nothing", "attacks"] = "solution"
    """Who plays: the task's own solution, one that answers "Done." at once, or every attack of the suite."""
    sandbox: Literal["bubblewrap", "gvisor"] = "bubblewrap"
    """What code is run in; gvisor, which also keeps processes in snapshots, needs runsc and root."""
    json: Path | None = None
    """Write the tasks to this file instead of playing them."""


def main(args: EnvsArgs) -> None:
    """Run the command. ValueError for a kind that is not there, ImportError for what it needs."""
    from nanok3.envs.catalogue import kinds

    if not 1 <= args.count <= 1_000_000:
        raise ValueError(f"count is {args.count}; it must lie between 1 and 1000000")
    known = kinds()
    if args.kind is None and args.policy == "attacks":
        for kind in known.values():
            show_attacked(kind, args)
        return
    if args.kind is None:
        show_kinds(list(known.values()))
        return
    if args.kind not in known:
        raise ValueError(f"kind is {args.kind!r}; expected one of {', '.join(known)}")
    kind = known[args.kind]
    tasks = islice(kind.tasks(args.split, args.seed), args.count)
    if args.json is not None:
        write_tasks(args.json, tasks)
        return
    with sandboxes(kind, args.sandbox) as home:
        if args.policy == "attacks":
            for line in attack_lines(attacked(kind, list(tasks), home)):
                print(line)
            return
        for task in tasks:
            show_episode(play_one(kind, task, home, args.policy))


def show_kinds(found: list[Kind]) -> None:
    """One line a kind; what it needs, and whether that is here."""
    from nanok3.envs.bubblewrap import check
    from nanok3.envs.gvisor import missing

    for kind in found:
        print(f"{kind.domain:8} {kind.name:20} {f'needs {kind.needs}' if kind.needs else ''}".rstrip())
    print(f"\nsandboxes: bubblewrap: {check() or 'works here'}")
    print(f"           gvisor: {missing() or 'runsc is here'}")


@contextmanager
def sandboxes(kind: Kind, sandbox: str = "bubblewrap") -> Iterator[Home | None]:
    """The sandboxes that a kind needs, closed at the end."""
    from nanok3.envs.bubblewrap import Sandboxes
    from nanok3.envs.gvisor import Containers

    if "bubblewrap" not in kind.needs:
        yield None
        return
    with (Containers if sandbox == "gvisor" else Sandboxes)(packages=kind.packages) as home:
        yield home


def play_one(kind: Kind, task: Task, home: Home | None, policy: str) -> Trajectory:
    from nanok3.envs.environment import Reply
    from nanok3.envs.episode import play, scripted, solution

    return play(kind.open(home), task, scripted(solution(task) if policy == "solution" else [Reply("Done.")]))


def attacked(kind: Kind, tasks: list[Task], home: Home | None) -> dict[str, list[float | None]]:
    """What each attack earned in each task, and last the solution."""
    from nanok3.envs.attacks import ATTACKS
    from nanok3.envs.episode import play, scripted, solution

    who = {**ATTACKS, "the solution": solution}
    return {
        name: [play(kind.open(home), task, scripted(replies(task))).reward for task in tasks]
        for name, replies in who.items()
    }


def attack_lines(earned: dict[str, list[float | None]]) -> Iterator[str]:
    """A line an attack: its rewards, task by task."""
    for name, rewards in earned.items():
        yield f"{name:24} {' '.join('none' if reward is None else f'{reward:g}' for reward in rewards)}"


def show_attacked(kind: Kind, args: EnvsArgs) -> None:
    """One line a kind: how many attacks earned nothing, and what the solution earned; or why it is not played."""
    try:
        tasks = list(islice(kind.tasks(args.split, args.seed), args.count))
        with sandboxes(kind, args.sandbox) as home:
            earned = attacked(kind, tasks, home)
    except ImportError as error:
        print(f"{kind.name:20} not played: {error}")
        return
    *attacks, right = earned.values()
    nothing = sum(not any(rewards) for rewards in attacks)
    some = [name for name, rewards in earned.items() if any(rewards)][:-1]
    found = f"; earned something: {', '.join(some)}" if some else ""
    solved = sum(1 for reward in right if reward == 1)
    print(f"{kind.name:20} {nothing} of {len(attacks)} attacks earned nothing, {solved} of {len(right)} solved{found}")


def show_episode(played: Trajectory) -> None:
    """The conversation, then what came of it."""
    print(f"== {played.task.id} ==\n{played.task.goal}")
    for reply, seen in zip(played.replies, [*played.observations[1:], None]):
        if reply.thinking:
            print(f"  (thinks) {reply.thinking}".replace("\n", "\n           "))
        for call in reply.calls:
            said = call.arguments if isinstance(call.arguments, str) else json.dumps(dict(call.arguments))
            print(f"  -> {call.name} {said}")
        if reply.text:
            print(f"  says: {reply.text}")
        for result in seen.results if seen else ():
            print(f"  <- {result.content}".replace("\n", "\n     "))
        if seen and seen.text:
            print(f"{seen.text}")
    reward = "none" if played.reward is None else f"{played.reward:g}"
    said = played.reason or played.public
    print(f"  {played.outcome}, reward {reward}{f' ({said})' if said else ''}\n")


def write_tasks(path: Path, tasks: Iterator[Task]) -> None:
    """A line a task, with what a policy sees and what its solution is."""
    from nanok3.data.files import replacing
    from nanok3.envs.tools import schemas

    count = 0
    with replacing(path) as file:
        for task in tasks:
            shown = {"id": task.id, "domain": task.domain, "goal": task.goal, "tools": schemas(task.tools)}
            file.write((json.dumps({**shown, "solution": task.hidden["solution"]}) + "\n").encode())
            count += 1
    print(f"{path}: {count} tasks")
