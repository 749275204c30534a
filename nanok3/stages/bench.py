"""`nanok3 bench`: run the side-by-side measurements of the checkout, and make their figures into a page.

    nanok3 bench                          what there is
    nanok3 bench kda fused --threads 2    run these
    nanok3 bench quick                    a few minutes of them
    nanok3 bench all                      every one that can run here within an hour; the others are named with why
    nanok3 bench --report                 all figures so far as Markdown, for docs/log.md

A benchmark is a script of bench/ that writes runs/bench/NAME.json; its own flags are those of the script
(`python bench/kda.py --help`).
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated

import tyro

QUICK = ("kda", "fused", "linear", "decode", "startup")
"""A few minutes together."""
TIMES = {
    **dict.fromkeys(("decode", "fused", "linear", "sandbox", "startup", "vision"), "1 min"),
    **dict.fromkeys(("kda", "profile_step", "serve", "speculative", "stream_experts"), "5 min"),
    "gpu_check": "8 min",
    "prefix": "5 min",
    "soak": "10 min",
    **dict.fromkeys(("context", "inference", "train_step"), "<1 h"),
    "qat": "hours",
    "quality": "2.5 h",
}
"""Roughly, on two quiet cores, once the peers are there: building llama.cpp takes ten minutes more."""
TOO_LONG = ("qat", "quality")
"""For `all`: who wants them names them."""
FOLDER = Path("runs/bench")
CLOSED_PIPE = 141
"""Status of a benchmark whose reader is gone (`| head`), as bench/harness.py gives it."""


@dataclass(frozen=True, kw_only=True)
class BenchArgs:
    """Run the benchmarks of the checkout."""

    names: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Which; `quick` for a few minutes of them, `all` for every one that can run here within an hour. Without a name
    they are listed with what each takes."""
    threads: int | None = None
    """CPU threads; each benchmark's own default when not given."""
    rounds: int | None = None
    """Turns of every contender."""
    json: Path = FOLDER
    """The folder of the figures: NAME.json of each."""
    report: bool = False
    """Print the figures of that folder as Markdown instead of measuring."""


def main(args: BenchArgs) -> None:
    """Run the command; SystemExit(1) if a benchmark fails."""
    scripts = benchmarks(checkout())
    for name in ("threads", "rounds"):
        value = getattr(args, name)
        if value is not None and not 1 <= value <= 1024:
            raise ValueError(f"{name} is {value}; it must lie between 1 and 1024")
    if args.report:
        print(report(args.json, checkout()), end="")
    elif not args.names:
        print("\n".join(listed(scripts)))
    else:
        for name in scripts if "all" in args.names else ():
            if name not in args.names and (why := obstacle(name)):
                print(f"skipped {name}: {why}")
        failed = [name for name in chosen(args.names, scripts) if not run(name, scripts[name], args)]
        if failed:
            print(f"failed: {', '.join(failed)}", file=sys.stderr)
            raise SystemExit(1)


# ---------------------------------------------------------------------- what there is


def checkout() -> Path:
    """The folder of the benchmarks. ValueError where the package was installed without it."""
    folder = Path(__file__).parents[2] / "bench"
    if not (folder / "harness.py").exists():
        raise ValueError(f"benchmarks live in the checkout, in bench/; {folder} is not there. Clone the repository")
    return folder


def benchmarks(folder: Path) -> dict[str, Path]:
    """Scripts that can be run and write figures, by name."""
    found = {}
    for script in sorted(folder.glob("*.py")):
        source = script.read_text("utf-8")
        if '__name__ == "__main__"' in source and f"{FOLDER}/{script.stem}" in source:
            found[script.stem] = script
    return found


def listed(scripts: dict[str, Path]) -> Iterator[str]:
    """A line for each benchmark, in a terminal as many as it takes."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 1000
    for name, script in scripts.items():
        line = f"{name:14s} {TIMES.get(name, ''):>6s}  {about(script)}"
        yield from textwrap.wrap(line, max(width, 40), subsequent_indent=" " * 23)


def about(script: Path) -> str:
    """The first line of its docstring."""
    return (ast.get_docstring(ast.parse(script.read_text("utf-8"))) or "").partition("\n")[0]


def obstacle(name: str) -> str | None:
    """Why `all` leaves a benchmark out here, or None."""
    if name in TOO_LONG:
        return f"it takes {TIMES[name]}; `nanok3 bench {name}` runs it"
    if name == "gpu_check":
        import torch

        return None if torch.cuda.is_available() else "torch finds no GPU here"
    return None


def chosen(names: Sequence[str], scripts: dict[str, Path]) -> list[str]:
    """The names with `quick`, `all` and beginnings of one name only spelt out, each once. ValueError for any other."""
    wanted: list[str] = []
    every = [n for n in scripts if obstacle(n) is None] if "all" in names else []
    several = {"quick": [n for n in QUICK if n in scripts], "all": every} | {n: [n] for n in scripts}
    for name in names:
        found = several[name] if name in several else [n for n in scripts if n.startswith(name)]
        if name not in several and len(found) != 1:
            raise ValueError(f"names holds {name!r}; allowed: quick, all, {', '.join(scripts)}")
        wanted += found
    return list(dict.fromkeys(wanted))


# ---------------------------------------------------------------------- running


def run(name: str, script: Path, args: BenchArgs) -> bool:
    """One benchmark in a process of its own; whether it ended well."""
    flags = [str(script)]
    if args.threads is not None:
        flags += ["--threads", str(args.threads)]
    if args.rounds is not None:
        flags += ["--rounds", str(args.rounds)]
    if args.json != FOLDER:
        flags += ["--json", str(args.json / f"{name}.json")]
    print(f"\n== {name}: {about(script)}", flush=True)
    status = subprocess.run([sys.executable, *flags], env=environment(args.threads), check=False).returncode
    if status == CLOSED_PIPE:
        raise BrokenPipeError
    return status == 0


def environment(threads: int | None) -> dict[str, str]:
    """Threads that sleep while they wait, the same number for every library."""
    set_here = {"OMP_WAIT_POLICY": "passive"} | ({} if threads is None else {"OMP_NUM_THREADS": str(threads)})
    return {**os.environ, **set_here}


# ---------------------------------------------------------------------- figures


def report(figures: Path, folder: Path) -> str:
    """Every JSON file of a folder as a Markdown table. ValueError where there is none, or one is damaged."""
    harness = _harness(folder)
    files = sorted(figures.glob("*.json"))
    if not files:
        raise ValueError(f"json: {figures} holds no figures; run `nanok3 bench quick` first")
    sections = []
    for file in files:
        try:
            whole = json.loads(file.read_text("utf-8"))
            sections.append(harness.markdown(file.stem, whole))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"json: {file} holds no figures of a benchmark ({error!r}); remove it") from None
    return "\n".join(sections)


def _harness(folder: Path) -> ModuleType:
    """bench/harness.py, which knows how its tables look."""
    spec = importlib.util.spec_from_file_location("harness", folder / "harness.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules.setdefault("harness", importlib.util.module_from_spec(spec))  # its dataclasses look it up
    spec.loader.exec_module(module)
    return module
