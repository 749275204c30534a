"""`nanok3 posttrain`: the whole road after pre-training, on a small world, with one report.

    nanok3 posttrain --out runs/posttrain                  SFT, nine experts, one student, a draft: about an hour
    nanok3 posttrain --quick --out runs/posttrain-quick    one domain, three experts: about ten minutes

The same command goes on where it was interrupted. What was trained can be talked to: nanok3 chat OUT/student.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class PosttrainArgs:
    """SFT, experts by reinforcement learning, one student, a draft, and what came of it."""

    out: Path = Path("runs/posttrain")
    """Folder of all parts; a part that is done in it is not done again."""
    preset: Literal["small"] = "small"
    """The plan: three domains and three efforts."""
    quick: bool = False
    """One domain and a smaller model instead."""
    times: float = 1.0
    """Every part's length times this: below 1 for a look, above 1 for better experts."""
    threads: int | None = None
    """CPU threads; torch's own choice when not given."""


def main(args: PosttrainArgs) -> None:
    """Do what is left; KeyboardInterrupt, after the running part has saved, for Ctrl-C."""
    import torch

    from nanok3.data.files import only_one
    from nanok3.posttrain.pipeline import QUICK, SMALL, Pipeline, claims, table
    from nanok3.posttrain.pipeline_report import write_pipeline_report
    from nanok3.train.machine import keep_freed_memory

    keep_freed_memory()
    if args.threads is not None:
        if not 1 <= args.threads <= 1024:
            raise ValueError(f"threads is {args.threads}; it must lie between 1 and 1024")
        torch.set_num_threads(args.threads)
    plan = (QUICK if args.quick else SMALL).times(args.times)
    with only_one(args.out):
        steps = Pipeline(plan, args.out).run()
    for what, found, holds in claims(table(steps)):
        print(f"{'yes' if holds else 'no ':3}  {what}: {found}")
    report = write_pipeline_report(args.out, steps)
    print(f"report: {report}\ntalk to it: nanok3 chat {args.out / 'student'}")
