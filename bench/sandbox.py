"""Sandboxes: commands a second and the latency of what an environment asks of them, each beside doing it without.

    python bench/sandbox.py --rounds 30

The contenders of a case take turns; medians of the clock, as a command's time is mostly spent in other processes. At
the end one sandbox runs `--commands` in a row, and processes, mounts and files are counted before and after.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import tyro

from nanok3.envs.bubblewrap import Bubblewrap, Sandboxes, python


@dataclass
class Options(harness.Options):
    rounds: int = 30
    commands: int = 100
    json: Path = Path("runs/bench/sandbox.json")


def workspace(files: int) -> dict[str, bytes]:
    """Files of 10 kB in folders of a hundred."""
    return {f"d{i // 100}/f{i}": bytes(10_000) for i in range(files)}


def copied(folder: Path) -> None:
    target = tempfile.mkdtemp()
    shutil.copytree(folder, target, dirs_exist_ok=True)
    shutil.rmtree(target)


def snapshot(box: Bubblewrap) -> Callable[[], object]:
    def once() -> object:
        upper = box.home.store.upper(box.workspace)
        (upper / "new").write_bytes(b"x")
        if box.home.store.owner is not None:
            os.chown(upper / "new", box.home.store.owner, box.home.store.owner)
        return box.snapshot()

    return once


def cases(box: Bubblewrap, large: Bubblewrap) -> dict[str, dict[str, Callable[[], object]]]:
    layer = large.home.store.folder / "layers" / large.workspace.layers[-1]
    program = [*python(), "-c", "print(1)"]
    return {
        "true": {"sandbox": lambda: box.run(["true"]), "bare": lambda: subprocess.run(["true"], check=True)},
        "python": {
            "sandbox": lambda: box.run(program),
            "bare": lambda: subprocess.run(program, check=True, capture_output=True),
        },
        "fork, 2000 files": {"sandbox": lambda: large.fork().close(), "copy": lambda: copied(layer)},
        "snapshot, 2000 files": {"sandbox": snapshot(large), "copy": lambda: copied(layer)},
        "write and read a file": {
            "sandbox": lambda: (box.write("a", b"1"), box.read("a")),
            "bare": lambda: (layer / "a").write_bytes(b"1"),
        },
    }


def things() -> tuple[int, int]:
    """Processes and mounts of this machine."""
    mounts = len(Path("/proc/self/mountinfo").read_text().splitlines())
    return sum(name.isdigit() for name in os.listdir("/proc")), mounts


def in_a_row(home: Sandboxes, count: int) -> dict[str, Any]:
    """`count` commands in one sandbox, one after the other."""
    mounts = things()[1]
    box, seconds = home.open(), []
    for _ in range(count):
        began = time.perf_counter()
        assert box.run(["sh", "-c", "echo x > f"]).ok
        seconds.append(time.perf_counter() - began)
    box.close()
    assert things()[1] == mounts and not (home.store.folder / "work" / box.workspace.name).exists()
    ordered = sorted(seconds)
    return {
        "case": f"{count} commands in a row",
        "commands a second": round(count / sum(seconds), 1),
        "median ms": round(1000 * statistics.median(seconds), 1),
        "p95 ms": round(1000 * ordered[int(0.95 * (count - 1))], 1),
        "worst ms": round(1000 * ordered[-1], 1),
    }


def main(options: Options) -> None:
    print(harness.machine_line(1))
    table, row = harness.Table(), harness.Table()
    with Sandboxes() as home:
        box, large = home.open({"a": b"1"}), home.open(workspace(2000))
        for case, contenders in cases(box, large).items():
            seconds = harness.rounds(contenders, options.rounds)
            table.add(harness.rows_of(case, seconds, next(iter(contenders))))
        print()
        row.add([in_a_row(home, options.commands)])
        folder = home.store.folder
    assert not folder.exists()
    harness.write_json(options.json, table.records + row.records, options)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
