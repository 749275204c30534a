"""`nanok3 agentic`: a model behind an OpenAI-compatible API plays environments, and is judged by what it leaves.

    nanok3 serve runs/x --port 8000                                          in another terminal; or any other server
    nanok3 agentic office --base-url http://127.0.0.1:8000/v1 --out runs/office
    nanok3 agentic questions coding --tasks 50 --concurrency 8 --out runs/all
    nanok3 agentic office --out runs/office --resume                         after Ctrl-C, or when the server is back

A family (office, world, coding, questions, bfcl) stands for several kinds of tasks; kinds have the names that `nanok3
envs` lists. --out gets the table (result.json), a line a task (results.jsonl) and transcripts to read.
"""

from __future__ import annotations

import json as json_format
import os
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

if TYPE_CHECKING:
    import threading

    from rich.table import Table

    from nanok3.envs.bubblewrap import Sandboxes
    from nanok3.envs.catalogue import Kind
    from nanok3.eval.agentic import Asking, Job, Played
    from nanok3.eval.agentic_record import Row

LOCAL = "http://127.0.0.1:8000/v1"
DAY = 86_400


@dataclass(frozen=True, kw_only=True)
class AgenticArgs:
    """Let a model behind an OpenAI-compatible API play environments."""

    kinds: Annotated[tuple[str, ...], tyro.conf.Positional] = ("office",)
    """Families (office, world, coding, questions, bfcl) or kinds of tasks, as `nanok3 envs` lists them."""
    base_url: str | None = None
    """Where the API is, /v1 included. Not given: OPENAI_BASE_URL, else http://127.0.0.1:8000/v1."""
    model: str | None = None
    """Name of the model; the first that the server lists when not given."""
    api_key: str | None = None
    """Not given: OPENAI_API_KEY, else none."""
    tasks: int = 20
    """Tasks of each kind."""
    seed: int = 0
    """Of the tasks, and of the sampling where the server takes one."""
    split: Literal["train", "held-out"] = "held-out"
    """The side of the split, which a task's content decides."""
    concurrency: int = 4
    """Tasks that are played at once."""
    max_tokens: int = 2048
    """Tokens of one reply; a reply that is cut off there ends its task with score 0."""
    token_budget: int | None = None
    """Tokens of all replies of a task together; past it the score is 0."""
    effort: Literal["low", "high", "max"] | None = None
    """Sent as reasoning_effort; the server's own when not given."""
    system_prompt: Literal["auto", "none", "short", "careful", "role"] = "auto"
    """What a task begins with (envs/harness.py); auto: short, and none for the small world, whose models are taught
    without one."""
    temperature: float | None = None
    """The server's own when not given."""
    timeout: float = 120.0
    """Seconds a request may take."""
    out: Path = Path("runs/agentic")
    """Folder for the table, the lines and the transcripts."""
    resume: bool = False
    """Go on with the evaluation in --out: what has a score is kept, all else is played."""
    json: bool = False
    """Print JSON instead of a table."""

    def settings(self, kinds: list[str], model: str, base_url: str) -> dict[str, Any]:
        """What the result depends on, and where it was measured."""
        numbers = ("tasks", "seed", "split", "concurrency", "max_tokens", "token_budget")
        names = (*numbers, "effort", "temperature", "system_prompt")
        return {"kinds": kinds, "model": model, "base_url": base_url, **{name: getattr(self, name) for name in names}}


def check(args: AgenticArgs) -> None:
    """ValueError for a number out of its range."""
    for name in ("tasks", "concurrency", "max_tokens", "token_budget"):
        value = getattr(args, name)
        if value is not None and not 1 <= value <= 1_000_000:
            raise ValueError(f"{name} is {value}; it must lie between 1 and 1000000")
    if not 0 < args.timeout <= DAY:
        raise ValueError(f"timeout is {args.timeout}; it must be above 0, and at most {DAY} seconds")
    if args.temperature is not None and not 0 <= args.temperature <= 2:
        raise ValueError(f"temperature is {args.temperature}; it must lie between 0 and 2")


def main(args: AgenticArgs) -> None:
    """Play, write down, print the table; KeyboardInterrupt after the same for Ctrl-C."""
    from nanok3.envs.catalogue import kinds
    from nanok3.eval.agentic import Asking, Crew, connect, kinds_of, served_model
    from nanok3.eval.agentic_record import Folder

    check(args)
    known = {name: kind for name, kind in kinds().items() if kind.domain != "visual"}  # results here are text
    chosen = kinds_of(args.kinds, list(known))
    base_url = args.base_url or os.environ.get("OPENAI_BASE_URL") or LOCAL
    client = connect(base_url, args.api_key or os.environ.get("OPENAI_API_KEY", ""), args.timeout)
    model = served_model(client, args.model)
    asking = Asking(model, args.max_tokens, args.token_budget, args.effort, args.temperature, args.seed)
    jobs = make_jobs([known[name] for name in chosen], args)
    keys = [job.key for job in jobs]
    with ExitStack() as stack:
        homes = {name: stack.enter_context(sandboxes(known[name])) for name in chosen}
        folder = Folder(args.out, args.settings(chosen, model, base_url), args.resume)
        crew = Crew(player(client, asking, known, homes, args.system_prompt), args.concurrency)
        left = [job for job in jobs if job.key not in folder.rows]
        say = (lambda _: None) if args.json else print
        say(f"{model} at {base_url}: {len(left)} of {len(jobs)} tasks to play")
        try:
            for played in crew.run(left):
                say(progress(folder.add(played)))
        except BaseException as stopped:
            found = folder.write(keys)
            say(f"stopped with {found['all']['scored']} of {len(keys)} tasks scored; --resume goes on")
            if found["tasks"]:
                show(found, args)
            if isinstance(stopped, ValueError):
                raise ValueError(f"{stopped} ({args.out} keeps what was played; --resume goes on)") from None
            raise
        show(folder.write(keys), args)


def sandboxes(kind: Kind) -> Any:
    """The sandboxes that a kind needs, as a context."""
    from nanok3.stages.envs import sandboxes as of_kind

    return of_kind(kind)


def make_jobs(kinds: list[Kind], args: AgenticArgs) -> list[Job]:
    """The tasks, kinds in turn, so that what is left of a stopped run is a fair part of the whole."""
    from nanok3.eval.agentic import Job

    of_kinds = [list(islice(kind.tasks(args.split, args.seed), args.tasks)) for kind in kinds]
    for kind, tasks in zip(kinds, of_kinds):
        if len(tasks) < args.tasks:
            raise ValueError(f"tasks is {args.tasks}; {kind.name} has {len(tasks)} in the split {args.split}")
    return [Job(kind.name, n, tasks[n]) for n in range(args.tasks) for kind, tasks in zip(kinds, of_kinds)]


def player(
    client: Any, asking: Asking, known: dict[str, Kind], homes: dict[str, Sandboxes | None], system_prompt: str
) -> Any:
    """How one task is played."""
    from nanok3.envs.harness import Harness
    from nanok3.eval.agentic import FAMILIES, Player, play_job

    def play(job: Job, stop: threading.Event) -> Played | None:
        usual = "none" if job.kind in FAMILIES["world"] else "short"
        harness = Harness(usual if system_prompt == "auto" else system_prompt)
        return play_job(job, known[job.kind].open(homes[job.kind]), Player(client, asking, job, harness), stop)

    return play


def progress(row: Row) -> str:
    score = "none" if row["score"] is None else f"{row['score']:.2f}"
    counts = f"{row['turns']} turns · {row['calls']} calls, {row['tool_errors']} errors"
    return f"{row['key']:20} score {score} · {row['finish']} · {counts} · {row['completion_tokens']} tokens"


def show(found: dict[str, Any], args: AgenticArgs) -> None:
    """The table, or the JSON that was written."""
    from rich.console import Console

    if args.json:
        print(json_format.dumps(found, indent=2))
        return
    console = Console(highlight=False, width=None if os.isatty(1) else 160)
    console.print(table(found))
    if found["all"]["calls"] == 0 and any(row["kind"] not in NO_TOOLS for row in found["tasks"]):
        print("no reply had a call: does the server read the tool calls of this model?")
    print(f"{args.out / 'result.json'}; conversations: {args.out / 'transcripts'}")


NO_TOOLS = ("letters", "sums", "reverse", "copy", "buttons")


def table(found: dict[str, Any]) -> Table:
    """A line for each kind, and one for all."""
    from rich import box
    from rich.table import Table

    from nanok3.eval.agentic_record import HEAD, cells

    title = f"{found['settings']['model']}: tasks played, means over tasks, tokens read and said"
    shown = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    shown.add_column("kind")
    for column in HEAD:
        shown.add_column(column, justify="left" if column == "ended" else "right")
    for kind, s in found["kinds"].items():
        shown.add_row(kind, *cells(s))
    if len(found["kinds"]) > 1:
        shown.add_section()
        shown.add_row("all", *cells(found["all"]))
    return shown
