"""`nanok3 distill`: many experts into one student, each teaching its domain and effort (multi-teacher on-policy
distillation).

    nanok3 distill runs/cold --out runs/student --teachers general:max:runs/max general:low:runs/low
    nanok3 distill runs/cold --out runs/student --teachers general:max:runs/max general:low:runs/low --resume

At the end a table compares each teacher with the student on held-out tasks: table.json and report.html.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from nanok3.posttrain.rl_settings import MopdSettings
from nanok3.stages.generate import ModelFlags


@dataclass(frozen=True, kw_only=True)
class DistillArgs(ModelFlags):
    """Teach one student by several experts."""

    teachers: tuple[str, ...]
    """Experts as domain:effort:folder."""
    out: Path = Path("runs/student")
    """Run folder."""
    workers: str | None = None
    """Who plays the student's rollouts, as for nanok3 rl. Not given: this process."""
    worker_key: str = ""
    """The servers' admin key."""
    resume: bool = False
    """Go on from the newest whole checkpoint of --out."""
    train: MopdSettings = field(default_factory=MopdSettings)
    """How it is taught."""


def read_teachers(named: tuple[str, ...]) -> dict[tuple[str, str], Path]:
    """ValueError for what is no domain:effort:folder, and for a pair that is named twice."""
    from nanok3.data.chat import EFFORTS
    from nanok3.serve.run_folder import model_folder

    found: dict[tuple[str, str], Path] = {}
    for text in named:
        domain, _, rest = text.partition(":")
        effort, _, folder = rest.partition(":")
        if effort not in EFFORTS or not folder:
            raise ValueError(f"teachers: {text!r}; allowed: domain:effort:folder with effort {', '.join(EFFORTS)}")
        if (domain, effort) in found:
            raise ValueError(f"teachers: {domain}:{effort} is named twice")
        found[domain, effort] = model_folder(Path(folder))
    return found


def main(args: DistillArgs) -> None:
    """Teach; KeyboardInterrupt, after saving, for Ctrl-C."""
    from nanok3.data.chat import Sentences
    from nanok3.data.files import only_one
    from nanok3.posttrain.domains import domains
    from nanok3.posttrain.mopd import distill
    from nanok3.posttrain.rl_report import write_rl_report
    from nanok3.posttrain.workers import read_workers
    from nanok3.train.machine import keep_freed_memory

    keep_freed_memory()
    if args.resume and not args.out.is_dir():
        raise ValueError(f"out: {args.out} is no run to go on with; leave --resume out to begin one")
    teachers = read_teachers(args.teachers)
    opened = args.open()
    sentences = Sentences.of(opened.folder)
    with only_one(args.out):
        distill(
            opened.model,
            opened.tokenizer,
            teachers,
            domains(),
            args.train,
            args.out,
            resume=args.resume,
            sentences=sentences,
            workers=None if args.workers is None else read_workers(args.workers, args.worker_key),
        )
    print(f"{args.out}: report {write_rl_report(args.out)}; nanok3 chat {args.out}")
