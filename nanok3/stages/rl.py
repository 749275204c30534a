"""`nanok3 rl`: train an expert of one domain and effort from a model that was taught to answer.

    nanok3 rl runs/cold --domain general --out runs/max --train.minutes 4
    nanok3 rl runs/max --out runs/low --budgets runs/max/budgets.json --train.effort.effort low --train.effort.tau 0.75
    nanok3 rl runs/cold --domain general --out runs/max --resume
    nanok3 serve runs/cold --port 8001 --admin-key KEY --allow-reload            a worker, and the run that uses it
    nanok3 rl runs/cold --out runs/max --workers http://127.0.0.1:8001 --worker-key KEY
    nanok3 rl runs/cold --out runs/max --workers ray:2                           two actors of Ray on this machine

Budgets are measured with the first model and handed on with --budgets: they belong to the cold start. The run folder
has config.yaml, metrics.jsonl, budgets.json, checkpoints/, report.html and model/.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from nanok3.posttrain.rl_settings import RLSettings
from nanok3.stages.generate import ModelFlags

if TYPE_CHECKING:
    from nanok3.posttrain.sample import Domain


@dataclass(frozen=True, kw_only=True)
class RLArgs(ModelFlags):
    """Train an expert by reinforcement learning."""

    domain: str = "general"
    """general, agent or coding."""
    out: Path = Path("runs/rl")
    """Run folder."""
    budgets: Path | None = None
    """budgets.json of the cold start; measured with MODEL when not given."""
    workers: str | None = None
    """Who plays the rollouts: servers (nanok3 serve --allow-reload), http://HOST:PORT with commas between several,
    which have to see --out under the same name; or ray:N, N actors of Ray on this machine, ray:N@ADDRESS in a cluster.
    Not given: this process."""
    worker_key: str = ""
    """The servers' admin key."""
    resume: bool = False
    """Go on from the newest whole checkpoint of --out."""
    train: RLSettings = field(default_factory=RLSettings)
    """How it is trained."""


def domain_called(name: str) -> Domain:
    """ValueError for a name there is no domain of."""
    from nanok3.posttrain.domains import domains

    known = domains()
    if name not in known:
        raise ValueError(f"domain is {name!r}; allowed: {', '.join(map(repr, known))}")
    return known[name]


def main(args: RLArgs) -> None:
    """Train; KeyboardInterrupt, after saving, for Ctrl-C."""
    from nanok3.data.chat import Sentences
    from nanok3.data.files import only_one
    from nanok3.posttrain.effort import Budgets
    from nanok3.posttrain.rl import train
    from nanok3.posttrain.rl_report import write_rl_report
    from nanok3.posttrain.workers import read_workers
    from nanok3.train.machine import keep_freed_memory

    keep_freed_memory()
    if args.resume and not args.out.is_dir():
        raise ValueError(f"out: {args.out} is no run to go on with; leave --resume out to begin one")
    domain = domain_called(args.domain)
    budgets = None if args.budgets is None else Budgets.load(args.budgets)
    opened = args.open()
    if not opened.answers:
        raise ValueError(f"model: {args.model} is a base model; teach it to answer first (nanok3 sft)")
    sentences = Sentences.of(opened.folder)
    with only_one(args.out):
        train(
            opened.model,
            opened.tokenizer,
            domain,
            args.train,
            args.out,
            budgets,
            resume=args.resume,
            sentences=sentences,
            workers=None if args.workers is None else read_workers(args.workers, args.worker_key),
        )
    print(f"{args.out}: report {write_rl_report(args.out)}; nanok3 chat {args.out}")
