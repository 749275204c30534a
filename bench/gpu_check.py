"""On a CUDA machine: is everything right there, and how fast is it? One prepared script, in under eight minutes.

    python bench/gpu_check.py --minutes 8 --json runs/bench/gpu_check.json
    python bench/gpu_check.py --device cpu --quick          the same on a CPU, without what needs CUDA: its own test

First numbers (bench/gpu_numerics.py): every operator and backend, values and gradients, and the whole model against
float64 on the CPU and against the official checkpoints of tests/fixtures. Then tables (bench/gpu_tables.py): KDA beside
softmax attention, the experts' products, packed weights, training and decoding. Exit status 1 if a comparison failed or
a section of numbers broke.

Sections run in a second process that reports line by line. One that breaks is named and the next one begins; one that
hangs, runs over its time or leaves the GPU unusable (an illegal access spoils a process for good) ends with its
process, and a new one goes on behind it. Nothing is fetched from a network.
"""

from __future__ import annotations

import gc
import json
import os
import queue
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import tyro

ROOT = Path(__file__).parent.parent
GRACE = 40.0
"""Seconds over its share after which a section is given up; starting the process and compiling count too."""

LEAST = 5.0
"""Seconds below which no further section is begun."""


@dataclass
class Options(harness.Options):
    device: str = "cuda"
    """cuda, or cpu to try the script itself."""
    minutes: float = 8.0
    """For everything; later sections get what earlier ones left."""
    quick: bool = False
    """Smaller sizes."""
    only: tuple[str, ...] = ()
    """Names of sections; all by default."""
    json: Path = Path("runs/bench/gpu_check.json")


@dataclass(frozen=True)
class Section:
    """A function of a Bench; `share` of the minutes is what it may take."""

    name: str
    module: str
    share: float
    cuda: bool = False
    """Says nothing without CUDA."""
    decisive: bool = True
    """Whether a broken section fails the whole."""
    configurations: int = 1
    """Of each autotuned kernel of fla: trying all of them would take the minutes alone."""

    def function(self) -> Callable[[Bench], None]:
        function: Callable[[Bench], None] = getattr(__import__(self.module), self.name)
        return function


SECTIONS = (
    Section("environment", "gpu_numerics", 0.06),
    Section("kda_values", "gpu_numerics", 0.16),
    Section("kda_invariants", "gpu_numerics", 0.08),
    Section("depth", "gpu_numerics", 0.06),
    Section("experts", "gpu_numerics", 0.08, cuda=True),
    Section("packed_experts", "gpu_numerics", 0.06, cuda=True),
    Section("elementwise", "gpu_numerics", 0.04),
    Section("attention", "gpu_numerics", 0.04),
    Section("golden", "gpu_numerics", 0.08),
    Section("gradients", "gpu_numerics", 0.06),
    Section("training", "gpu_numerics", 0.08),
    Section("resume", "gpu_numerics", 0.05),
    Section("generation", "gpu_numerics", 0.05),
    Section("waiting", "gpu_numerics", 0.04, cuda=True),
    Section("kda_speed", "gpu_tables", 0.14, cuda=True, decisive=False, configurations=3),
    Section("experts_speed", "gpu_tables", 0.08, cuda=True, decisive=False),
    Section("packed_speed", "gpu_tables", 0.05, cuda=True, decisive=False),
    Section("training_speed", "gpu_tables", 0.10, decisive=False),
    Section("decode_speed", "gpu_tables", 0.08, decisive=False),
)


class Bench:
    """What a section gets: the device, how much time is left, and where its findings go."""

    def __init__(self, device: str, quick: bool, seconds: float, section: str) -> None:
        self.device, self.quick, self.section = device, quick, section
        self.deadline = time.monotonic() + seconds

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"

    def time_left(self) -> float:
        return self.deadline - time.monotonic()

    def row(self, **columns: object) -> None:
        """A line of a table."""
        say("row", section=self.section, columns=columns)

    def check(self, what: str, error: float, bound: float) -> None:
        """A comparison: it holds when error <= bound, and never when the error is NaN."""
        say("row", section=self.section, columns={"check": what, "error": error, "bound": bound, "ok": error <= bound})

    def skip(self, what: str, why: str) -> None:
        say("row", section=self.section, columns={"check": what, "skipped": why})


def say(event: str, **fields: object) -> None:
    """One event to the first process. Infinities and NaN are written as Python's json knows them."""
    print("\x1e" + json.dumps({"event": event, **fields}, default=str), flush=True)


# ---------------------------------------------------------------------- the second process


def work(device: str, quick: bool, names: list[str], seconds: dict[str, float]) -> None:
    """Run sections one after the other; stops behind one that left the GPU unusable."""
    import torch

    torch.manual_seed(0)
    for section in (s for s in SECTIONS if s.name in names):
        say("begin", section=section.name)
        try:
            if section.cuda and device != "cuda":
                say("row", section=section.name, columns={"check": section.name, "skipped": "no CUDA device"})
            else:
                if device == "cuda":
                    few_configurations(section.configurations)
                section.function()(Bench(device, quick, seconds[section.name], section.name))
            if device == "cuda":
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
        except Exception as error:
            place = [f"{Path(f.filename).name}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)][-3:]
            say("broken", section=section.name, why=f"{type(error).__name__}: {error}"[:600], place=" > ".join(place))
            if device == "cuda" and not _usable():
                return
        say("end", section=section.name)


def few_configurations(most: int) -> None:
    """Let each autotuner of fla try only the first few of its configurations, from what it came with."""
    from nanok3.kernels.gpu import fla

    if not fla.available():
        return
    from triton.runtime.autotuner import Autotuner

    for tuner in [o for o in gc.get_objects() if type(o).__mro__.count(Autotuner)]:
        tuner.all_configs = getattr(tuner, "all_configs", tuner.configs)
        tuner.configs = tuner.all_configs[:most]
        tuner.cache.clear()


def _usable() -> bool:
    """Whether this process can still compute on the GPU."""
    import torch

    try:
        torch.cuda.synchronize()
        return bool(torch.ones(2, device="cuda").sum().item() == 2)
    except Exception:  # whatever it says: it cannot compute
        return False


# ---------------------------------------------------------------------- the first process


class Findings:
    """Everything that was said, printed as it comes."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.broken: dict[str, str] = {}
        self.table, self.heading = harness.Table(), {}.keys()
        self.seconds: dict[str, float] = {}

    def begin(self, name: str) -> None:
        print(f"\n{name}")
        self.heading = {}.keys()

    def take(self, event: dict[str, Any]) -> None:
        if event["event"] == "row":
            columns = event["columns"]
            self.rows.append({"section": event["section"], **columns})
            if "skipped" in columns:
                print(f"  {columns['check']}: skipped: {columns['skipped']}", flush=True)
            else:
                self._print(columns)
        elif event["event"] == "broken":
            self.give_up(event["section"], f"{event['why']} ({event['place']})")

    def _print(self, columns: dict[str, Any]) -> None:
        if columns.keys() == {"what", "value"}:
            print(f"  {columns['what']}: {columns['value']}", flush=True)
            return
        if "ok" in columns:
            verdict = "ok    " if columns["ok"] else "FAILED"
            print(f"  {verdict} {columns['error']:8.1e} of {columns['bound']:.0e}  {columns['check']}", flush=True)
            return
        if columns.keys() != self.heading:
            self.table, self.heading = harness.Table(), columns.keys()
        self.table.add([columns])

    def give_up(self, section: str, why: str) -> None:
        self.broken[section] = why
        print(f"  BROKEN: {why}", flush=True)

    @property
    def failed(self) -> list[str]:
        wrong = [f"{r['section']}: {r['check']}" for r in self.rows if r.get("ok") is False]
        decisive = {s.name for s in SECTIONS if s.decisive}
        return wrong + [f"{name} broke" for name in self.broken if name in decisive]


def supervise(options: Options, names: list[str], findings: Findings) -> None:
    """Start the second process, and again behind a section that ended it, until all sections had their turn."""
    end = time.monotonic() + 60 * options.minutes
    while names:
        left = end - time.monotonic()
        if left < LEAST:
            for name in names:
                findings.begin(name)
                findings.take({"event": "row", "section": name, "columns": {"check": name, "skipped": "no time left"}})
            return
        shares = sum(s.share for s in SECTIONS if s.name in names)
        seconds = {s.name: left * s.share / shares for s in SECTIONS if s.name in names}
        names = _follow(options, names, seconds, findings)


def _follow(options: Options, names: list[str], seconds: dict[str, float], findings: Findings) -> list[str]:
    """Read one process to its end; the sections that still have to run."""
    job = json.dumps([options.device, options.quick, names, seconds])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, __file__, "--work", job]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, bufsize=1)
    lines, waiting = _lines(process), list(names)
    current, began = names[0], time.monotonic()
    try:
        while True:
            over = began + seconds[current] + GRACE - time.monotonic()
            try:
                line = lines.get(timeout=max(over, 0.0))
            except queue.Empty:
                findings.give_up(current, f"still running after {time.monotonic() - began:.0f} s; ended")
                return waiting[1:]
            if line == "":
                if waiting:
                    status = process.wait()
                    if current not in findings.broken:
                        findings.give_up(current, f"the process ended with status {status}")
                    return waiting[1:]
                return []
            if not line.startswith("\x1e"):
                continue  # what libraries print
            event = json.loads(line[1:])
            if event["event"] == "begin":
                current, began = event["section"], time.monotonic()
                findings.begin(current)
            elif event["event"] == "end":
                findings.seconds[current] = time.monotonic() - began
                waiting.remove(current)
                current = waiting[0] if waiting else current
                began = time.monotonic()
            else:
                findings.take(event)
    finally:
        process.kill()
        process.wait()


def _lines(process: subprocess.Popen[str]) -> queue.Queue[str]:
    """What the process prints, line by line, and '' at its end."""
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put("")

    threading.Thread(target=read, daemon=True).start()
    return lines


def check(options: Options) -> Findings:
    """All of it."""
    unknown = [name for name in options.only if name not in {s.name for s in SECTIONS}]
    if unknown:
        raise SystemExit(f"--only names {unknown[0]!r}; allowed: {', '.join(s.name for s in SECTIONS)}")
    findings = Findings()
    supervise(options, [s.name for s in SECTIONS if not options.only or s.name in options.only], findings)
    return findings


def _finds_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def main(options: Options) -> int:
    if options.device not in ("cuda", "cpu"):
        raise SystemExit(f"--device is {options.device!r}; allowed: cuda, cpu")
    if options.device == "cuda" and not _finds_cuda():
        raise SystemExit("torch finds no CUDA device here; --device cpu --quick tries the script without one")
    began = time.monotonic()
    findings = check(options)
    facts = {"failed": findings.failed, "broken": findings.broken, "seconds": findings.seconds}
    harness.write_json(options.json, findings.rows, options, **facts)
    checks = [row for row in findings.rows if "ok" in row]
    print(f"\n{sum(r['ok'] for r in checks)} of {len(checks)} comparisons hold; {time.monotonic() - began:.0f} s")
    for what in findings.failed:
        print(f"FAILED {what}")
    print(f"figures in {options.json}")
    return 1 if findings.failed else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(*json.loads(sys.argv[2]))
    else:
        raise SystemExit(main(tyro.cli(Options)))
