"""What every benchmark shares: contenders that take turns, medians, one line about the machine, a table, a JSON file.

    seconds = rounds({"C++ kernel": run_a, "torch": run_b}, options.rounds)
    table = Table()
    table.add(rows_of("D=64 T=512 forward", seconds, ours="C++ kernel"))
    write_json(options.json, table.records, options)

All contenders of a case run once in each round, every round beginning with another one, so that a busy moment of the
machine hits all of them and none always follows the same neighbour. The first round warms up and is not counted. A
row gives the median, the spread (half the range of the middle half) and the best, and the ratio of its median to
ours: above 1 ours is faster.

A table is a list of flat records. The same records go to the terminal, to JSON and, by `nanok3 bench --report`, to
Markdown; a benchmark with other columns than times (bits per byte, bytes of memory) hands over records of its own.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from nanok3.data.files import check_file

MAY_BE_ZERO = frozenset({"burst", "depths", "loop_up_to", "random_prefix_len", "seed", "slow_up_to"})
"""Flags of some benchmark of which 0 is a number like others; of all others it must be 1 at least."""
MOST_THREADS = 1024
CLOSED_PIPE = 141
"""Status of a program whose reader is gone, as a shell gives it: 128 and the number of SIGPIPE."""
Clock = Callable[[], float]
Record = dict[str, Any]


@dataclass
class Options:
    """The flags that every benchmark knows; each derives its own from these and gives `json` a name."""

    threads: int = 1
    rounds: int = 5
    cpu_time: bool = False
    """Count the process's CPU seconds instead of the clock: for a machine with other work, with one thread only."""
    json: Path = Path("runs/bench/unnamed.json")
    """Where the figures go."""

    def __post_init__(self) -> None:
        """SystemExit for a number that measures nothing, and for a place that cannot be written to: before the hours
        of measuring that would be lost."""
        for name, value in vars(self).items():
            least = 0 if name in MAY_BE_ZERO else 1
            for number in value if isinstance(value, list | tuple) else [value]:
                if type(number) is int and number < least:
                    raise SystemExit(f"{name} is {number}; it must be at least {least}")
        if self.threads > MOST_THREADS:
            raise SystemExit(f"threads is {self.threads}; it must lie between 1 and {MOST_THREADS}")
        try:
            check_file("json", self.json)
        except ValueError as error:
            raise SystemExit(str(error)) from None

    def clock(self) -> Clock:
        if self.cpu_time and self.threads > 1:
            raise SystemExit("--cpu-time adds up all threads: use it with --threads 1")
        return time.process_time if self.cpu_time else time.perf_counter


@dataclass
class Row:
    """One contender in one case. `more` holds further columns: tokens a second, the share of a peak."""

    case: str
    contender: str
    median_ms: float
    spread_ms: float
    best_ms: float
    ratio: float | None = None
    more: Record = field(default_factory=dict)

    def record(self) -> Record:
        """As a flat record."""
        flat = asdict(self)
        return {**{name: value for name, value in flat.items() if name != "more"}, **self.more}


def _end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Ctrl-C, and `| head`, which closes the pipe, are no errors of a benchmark: it ends without a traceback."""
    if issubclass(kind, BrokenPipeError):
        os._exit(CLOSED_PIPE)
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)


sys.excepthook = _end


# ---------------------------------------------------------------------- measuring


def rounds(
    contenders: Mapping[str, Callable[[], object]], n: int, clock: Clock = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds of each contender in each of n rounds, after one round that warms up."""
    names = list(contenders)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(n + 1):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            start = clock()
            contenders[name]()
            taken = clock() - start
            if turn:
                seconds[name].append(taken)
    return seconds


def spread(times: Sequence[float]) -> float:
    """Half the range of the middle half."""
    ordered, quarter = sorted(times), len(times) // 4
    return (ordered[-1 - quarter] - ordered[quarter]) / 2


def rows_of(
    case: str,
    seconds: Mapping[str, Sequence[float]],
    ours: str | None = None,
    more: Callable[[str, float], Record] | None = None,
) -> list[Row]:
    """A row for each contender. `more(contender, median seconds)` gives its further columns."""
    reference = statistics.median(seconds[ours]) if ours else None
    rows = []
    for name, times in seconds.items():
        median = statistics.median(times)
        ratio = median / reference if reference else None
        extra = more(name, median) if more else {}
        rows.append(Row(case, name, median * 1e3, spread(times) * 1e3, min(times) * 1e3, ratio, extra))
    return rows


def must_agree(what: str, error: float, bound: float) -> None:
    """Contenders that compute different things are not worth timing."""
    if not error <= bound:
        raise SystemExit(f"{what} differs by {error:.1e}, allowed is {bound:.0e}: nothing to time")


# ---------------------------------------------------------------------- the machine


def machine(threads: int) -> dict[str, Any]:
    """Date, processor, cores, threads, load, versions and commit."""
    return {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "cpu": processor(),
        "cores": os.cpu_count(),
        "threads": threads,
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "commit": commit(),
    }


def processor() -> str:
    """The processor's name as the system gives it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def commit() -> str | None:
    """The checkout's commit, with a + where files differ from it; None outside of git."""
    folder = Path(__file__).parent
    said = []
    for arguments in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "--untracked-files=no"]):
        try:
            done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        said.append(done.stdout.strip())
    return said[0] + ("+" if said[1] else "")


def machine_line(threads: int = 1) -> str:
    """One line to print above a table."""
    m = machine(threads)
    return f"{m['cpu']}, {threads} of {m['cores']} core(s), load {m['load']:.1f}, torch {m['torch']}, {m['commit']}"


# ---------------------------------------------------------------------- tables


class Table:
    """Prints records as they come, the heading with the first ones, and keeps them."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.widths: dict[str, int] = {}

    def add(self, rows: Iterable[Row | Record]) -> None:
        """Print these rows; their columns are those of the first rows, a value that is missing stays blank."""
        new = [row.record() if isinstance(row, Row) else row for row in rows]
        if not self.widths and new:
            self._begin(new)
        for record in new:
            print(self._line([cell(name, record.get(name)) for name in self.widths]), flush=True)
        self.records += new

    def _begin(self, new: list[Record]) -> None:
        for name in dict.fromkeys(name for record in new for name in record):
            cells = [cell(name, record.get(name)) for record in new]
            text = any(isinstance(record.get(name), str) for record in new)
            # Negative: from the left. Room to spare, for what later rows bring.
            widest, least = max(map(len, [name, *cells])), 12 if self.widths else 32
            self.widths[name] = -max(widest, least) - 2 if text else max(widest, 8)
        print(self._line([name.replace("_", " ") for name in self.widths]))

    def _line(self, cells: Iterable[str]) -> str:
        sized = zip(cells, self.widths.values())
        return " ".join(text.ljust(-width) if width < 0 else text.rjust(width) for text, width in sized).rstrip()


def cell(name: str, value: object) -> str:
    """A value as the tables write it: ratios as 2.3x, columns that begin with of_ or end with share as per cent."""
    if value is None:
        return ""
    if not isinstance(value, float):
        return str(value)
    if name.startswith("of_") or name.endswith("share"):
        return f"{value:.0%}" if abs(value) >= 0.1 else f"{value:.1%}"
    if name.endswith("ratio"):
        return f"{value:.2f}x" if value < 10 else f"{value:.0f}x"
    if value and abs(value) >= 1e9:
        return f"{value:.3g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.3g}"


def print_table(rows: Iterable[Row | Record]) -> None:
    """A whole table at once."""
    Table().add(rows)


def markdown(name: str, whole: Record) -> str:
    """What `write_json` wrote as a section with one table: the machine, the flags, further facts, the rows."""
    machine, rows = whole["machine"], whole["rows"]
    told = ", ".join(f"{key} {value}" for key, value in machine.items() if value is not None)
    flags = " ".join(f"{key}={value}" for key, value in whole["options"].items() if key != "json")
    known = {"name", "machine", "options", "rows"}
    facts = [f"{key.replace('_', ' ')} {cell(key, value)}" for key, value in whole.items() if key not in known]
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [
        f"### {name}",
        "",
        f"{told}. Flags: {flags}." + (f" {'; '.join(facts)}." if facts else ""),
        "",
        "| " + " | ".join(column.replace("_", " ") for column in columns) + " |",
        "|" + "---|" * len(columns),
        *("| " + " | ".join(cell(column, row.get(column)) for column in columns) + " |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------------- figures on disk


def write_json(path: Path, rows: Iterable[Row | Record], options: Options, **facts: object) -> None:
    """The rows, the flags, the machine and further facts (a peak, a copy rate), under a temporary name first."""
    records = [row.record() if isinstance(row, Row) else row for row in rows]
    whole = {"name": path.stem, "machine": machine(options.threads), "options": asdict(options), **facts}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(json.dumps({**whole, "rows": records}, indent=1, default=str) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
