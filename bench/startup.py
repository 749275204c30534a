"""Start-up: CPU seconds of `nanok3 --help` and of `import nanok3`, each in a fresh process.

    python bench/startup.py --rounds 7

Processes take turns. CPU seconds (user and system) of the whole child are counted, which other work on the machine
hardly changes. `import nanok3` alone loads no torch; `nanok3.K3` does, and that is what a script pays for: it is
compared with `import torch`.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import harness
import tyro

HELP_AT_MOST, IMPORT_AT_MOST = 0.3, 0.2
PROGRAMS = {
    "an empty program": "",
    "nanok3 --help": "from nanok3.cli import main; main(['--help'])",
    "nanok3 pretrain --help": "from nanok3.cli import main; main(['pretrain', '--help'])",
    "import torch": "import torch",
    "import nanok3": "import nanok3",
}
BEYOND_TORCH = """
import time, torch
start = time.process_time()
import nanok3; nanok3.K3
print(time.process_time() - start)
"""


@dataclass
class Options(harness.Options):
    rounds: int = 7
    json: Path = Path("runs/bench/startup.json")


def child(code: str) -> str:
    """Run a program of its own; what it printed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], check=True, env=environment, capture_output=True, text=True)
    return done.stdout


def runner(code: str) -> Callable[[], object]:
    return lambda: child(f"try:\n {code or 'pass'}\nexcept SystemExit: pass")


def children_seconds() -> float:
    """CPU seconds of all finished children so far."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main(options: Options) -> None:
    print(harness.machine_line(1))
    seconds = harness.rounds({name: runner(code) for name, code in PROGRAMS.items()}, options.rounds, children_seconds)
    # Inside one process: the difference of two imports of torch is smaller than what they vary by.
    seconds["nanok3.K3 after torch"] = [float(child(BEYOND_TORCH)) for _ in range(options.rounds)]
    table = harness.Table()
    table.add(harness.rows_of("CPU time", seconds))
    found = {
        "help_seconds": (min(seconds["nanok3 --help"]), HELP_AT_MOST),
        "import_beyond_torch": (min(seconds["nanok3.K3 after torch"]), IMPORT_AT_MOST),
    }
    for what, (measured, most) in found.items():
        verdict = "reached" if measured <= most else "MISSED"
        print(f"{what.replace('_', ' ')}: {measured:.2f} s, at most {most} s: {verdict}")
    harness.write_json(
        options.json, table.records, options, **{what: measured for what, (measured, _) in found.items()}
    )


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
