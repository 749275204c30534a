"""`nanok3 doctor`: what this machine is, what every operator runs on, proof that it computes right, how fast, what to
change.

    nanok3 doctor
    nanok3 doctor --threads 2 --json doctor.json

It builds the kernels that are missing, runs each operator once to see which kernel answers, compares each with its
plain form in float64 and every way of reading a text with the others, and times the operators beside what the hardware
gives. It ends with status 1 if a comparison fails.
"""

from __future__ import annotations

import json
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanok3.eval.exactness import Backend, Check, Operator
    from nanok3.eval.exactness_model import Equality
    from nanok3.eval.exactness_watch import Answer
    from nanok3.stages.doctor_machine import Built, Facts
    from nanok3.stages.doctor_speed import Rates, Speed


RAISES = "raises"
MOST_KERNELS = 4
"""That one line names."""
WIDTH = 80
"""Of the terminal that everything fits into."""


@dataclass(frozen=True, kw_only=True)
class DoctorArgs:
    """Look at this machine, prove that the operators are exact on it, and say what would make it faster."""

    threads: int | None = None
    """CPU threads; torch's own choice when not given."""
    json: Path | None = None
    """Write everything found to this file as well."""


def main(
    args: DoctorArgs, operators: Sequence[Operator] | None = None, equalities: Sequence[Equality] | None = None
) -> None:
    """Run the command on its own tables or on others; SystemExit(1) if a check fails."""
    import torch

    from nanok3.data.files import check_file, write_file
    from nanok3.eval.exactness_model import EQUALITIES
    from nanok3.stages.doctor_operators import OPERATORS
    from nanok3.train.machine import keep_freed_memory

    if args.threads is not None:
        if not 1 <= args.threads <= 1024:
            raise ValueError(f"threads is {args.threads}; it must lie between 1 and 1024")
        torch.set_num_threads(args.threads)
    if args.json is not None:
        check_file("json", args.json)
    keep_freed_memory()  # as every run does: else large results are timed with their page faults
    found = examine(operators or OPERATORS, EQUALITIES if equalities is None else equalities)
    failed = [check for check in found["checks"] if not check["ok"]]
    if failed:
        print(f"{len(failed)} of {len(found['checks'])} checks FAILED: do not trust this machine's results.")
    if args.json is not None:
        write_file(args.json, (json.dumps(found, indent=1) + "\n").encode())
    if failed:
        raise SystemExit(1)


def examine(operators: Sequence[Operator], equalities: Sequence[Equality]) -> dict[str, Any]:
    """All sections, printed as they come; returns what was found as plain records."""
    from nanok3.stages import doctor_speed
    from nanok3.stages.doctor_advice import advice as advice_of
    from nanok3.stages.doctor_machine import collect

    start = time.perf_counter()
    facts = collect()
    _show("Machine", machine_lines(facts))
    _show("Libraries", library_lines(facts))
    _show("Kernels", map(kernel_line, facts.kernels))
    routes = [route for operator in operators for route in routes_of(operator, facts)]
    _show("What every operator runs on", route_lines(routes))
    checks = list(all_checks(operators, backends(facts), equalities))
    _show("Exactness: largest error over largest value, outputs / gradients", check_lines(checks))
    rates = doctor_speed.measure_rates(facts)
    broken = {route.operator for route in routes if route.inference == RAISES}
    speeds = [doctor_speed.measure_operator(o, rates) for o in operators if o.name not in broken]
    _show("Speed: one call without gradients, float32", speed_lines(rates, speeds))
    advice = advice_of(facts, rates)
    _show("What to change", (line for text in advice or ["Nothing."] for line in wrapped(text, 2)))
    print(f"\n{time.perf_counter() - start:.0f} seconds.")
    return {
        "facts": asdict(facts),
        "routes": [asdict(route) for route in routes],
        "checks": [{**asdict(check), "ok": check.ok} for check in checks],
        "rates": asdict(rates),
        "speeds": [asdict(speed) for speed in speeds],
        "advice": advice,
    }


def wrapped(line: str, indent: int) -> list[str]:
    """As lines that fit into a terminal behind the blanks of a section, all but the first indented."""
    return textwrap.wrap(
        line, WIDTH - 2, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )


def _show(title: str, lines: Iterable[str]) -> None:
    print(f"\n{title}" if title != "Machine" else title)
    for line in lines:
        print(f"  {line}", flush=True)


# ---------------------------------------------------------------------- hardware and software


def machine_lines(facts: Facts) -> Iterator[str]:
    """What the hardware is."""
    yield f"processor  {facts.processor}, {facts.system}"
    yield f"           {' '.join(facts.flags) or 'no vector instructions that we know'}"
    quota = f", of which a container allows {facts.quota:g}" if facts.quota else ""
    yield f"cores      {facts.cores}{quota}; {facts.threads} threads, load {facts.load:.1f}"
    free = f", {facts.memory_free / 2**30:.1f} free" if facts.memory_free else ""
    yield f"memory     {facts.memory / 2**30:.1f} GiB{free}" if facts.memory else "memory     unknown"
    yield f"GPU        {'; '.join(facts.gpus) or 'none that torch can use'}"
    yield f"compiler   {facts.compiler or 'none'}"


def library_lines(facts: Facts) -> Iterator[str]:
    """torch, then the core and each extra with what it is for."""
    from nanok3.stages.doctor_machine import EXTRAS

    yield f"Python {sys.version.split()[0]}, torch {facts.torch} with {facts.blas}"
    for extra in sorted({library.extra for library in facts.libraries}):
        named = [f"{l.name} {l.version or 'ABSENT'}" for l in facts.libraries if l.extra == extra]
        what = f"  ({EXTRAS[extra]})" if extra in EXTRAS else ""
        yield from wrapped(f"{extra or 'core':9s}  {', '.join(named)}{what}", 11)


def kernel_line(kernel: Built) -> str:
    """One library of the cache."""
    if kernel.error:
        return f"{kernel.name:13s} cannot be built: {kernel.error}"
    return f"{kernel.name:13s} " + ("in the cache" if kernel.seconds is None else f"built in {kernel.seconds:.1f} s")


# ---------------------------------------------------------------------- which backend


@dataclass(frozen=True)
class Route:
    """What an operator runs on for a device and type, without gradients and with them, and why."""

    operator: str
    device: str
    dtype: str
    inference: str
    training: str | None
    why: str


def routes_of(operator: Operator, facts: Facts) -> Iterator[Route]:
    """Found by running it: the dispatch itself answers."""
    import torch

    from nanok3.eval.exactness import Draw
    from nanok3.eval.exactness_watch import kernels_of

    for device in ("cpu", *(["cuda"] if facts.gpus else [])):
        for dtype in (torch.float32, torch.bfloat16):
            draw, name = Draw(dtype, device), str(dtype).removeprefix("torch.")
            try:
                plain = kernels_of(operator, draw)
                training = kernels_of(operator, draw, training=True) if operator.gradients else None
            except Exception as error:  # the checks will say FAILED; the other operators have routes all the same
                yield Route(operator.name, device, name, RAISES, None, repr(error))
                continue
            both = [*plain, *(training or [])]
            trained = None if training is None else taken(training)
            yield Route(operator.name, device, name, taken(plain), trained, reason(both, facts, operator.why_torch))


def taken(answers: Sequence[Answer]) -> str:
    """The kernels that took the call; torch where none did."""
    names = list(dict.fromkeys(answer.kernel for answer in answers if answer.taken))
    more = f" and {len(names) - MOST_KERNELS} more" if len(names) > MOST_KERNELS else ""
    return ", ".join(names[:MOST_KERNELS]) + more or "torch"


def reason(answers: Sequence[Answer], facts: Facts, why_torch: str) -> str:
    """Why these kernels and no others; `why_torch` where none of ours was asked."""
    failed = {kernel.name: kernel.error for kernel in facts.kernels if kernel.error}
    refused = [answer.kernel for answer in answers if not answer.taken]
    for kernel in refused:
        library = kernel.split(".")[0].removesuffix("_cpu")
        if library in failed:
            return f"{library} cannot be built here"
    used = {answer.kernel for answer in answers if answer.taken and not answer.kernel.startswith("torch.")}
    if refused and not used:
        return f"{refused[0]} does not take these inputs"
    return "our kernel" if used else why_torch


def route_lines(routes: Sequence[Route]) -> Iterator[str]:
    """A line for an operator and device; a second one where bfloat16 goes another way."""
    width = max((len(route.operator) for route in routes), default=0)
    shown: set[tuple[str, str, str, str | None]] = set()
    for route in routes:
        way = (route.operator, route.device, route.inference, route.training)
        if way in shown:
            continue
        first = not any(entry[:2] == way[:2] for entry in shown)
        shown.add(way)
        name = route.operator if first else f"  in {route.dtype}"
        device = "" if route.device == "cpu" else f" on {route.device}"
        training = "" if route.training in (None, route.inference) else f"; training {route.training}"
        yield from wrapped(f"{name + device:{width}s}  {route.inference}{training}  ({route.why})", width + 2)


# ---------------------------------------------------------------------- exactness


def backends(facts: Facts) -> list[Backend]:
    """What there is to be checked: the kernels of this machine, torch alone, and a GPU."""
    from nanok3.eval.exactness import Backend
    from nanok3.stages.doctor_machine import without_kernels

    built = any(kernel.error is None for kernel in facts.kernels)
    found = [Backend("kernels")] if built else []
    found.append(Backend("torch", without_kernels))
    return [*found, *([Backend("cuda", device="cuda")] if facts.gpus else [])]


def all_checks(
    operators: Sequence[Operator], backends: Sequence[Backend], equalities: Sequence[Equality]
) -> Iterator[Check]:
    """Every operator in its types, then the whole model, for every backend."""
    from nanok3.eval.exactness import check_operator
    from nanok3.eval.exactness_model import check_equalities, check_float64

    for operator in operators:
        for dtype in operator.dtypes:
            for backend in backends:
                yield from check_operator(operator, backend, dtype)
    for backend in backends:
        yield from check_equalities(backend, equalities=equalities)
        yield from check_float64(backend)


def check_lines(checks: Sequence[Check]) -> Iterator[str]:
    """A line for each comparison, a column for each backend, the bound, ok or FAILED."""
    names = list(dict.fromkeys(check.backend for check in checks))
    table: dict[str, list[Check]] = {}
    for check in checks:
        table.setdefault(check.what.removesuffix(", gradients"), []).append(check)
    width = max(map(len, table), default=0)
    yield f"{'':{width}s} " + " ".join(f"{name:>11s}" for name in names) + f" {'bound':>11s}"
    for what, row in table.items():
        cells = [_errors([check.error for check in row if check.backend == name]) for name in names]
        bound = _errors([check.bound for check in row if check.backend == row[0].backend])
        verdict = "ok" if all(check.ok for check in row) else "FAILED"
        yield f"{what:{width}s} " + " ".join(f"{cell:>11s}" for cell in (*cells, bound)) + f" {verdict}"


def _errors(values: Sequence[float]) -> str:
    return " / ".join(f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e+") if value else "0" for value in values)


# ---------------------------------------------------------------------- speed


def speed_lines(rates: Rates, speeds: Sequence[Speed]) -> Iterator[str]:
    """The limits of the hardware, then each operator beside its own."""
    if rates.multiply_add:
        yield f"multiply-adds on registers {rates.multiply_add / 1e9:.0f} GFLOP/s: the peak"
    peak = "" if rates.multiply_add else " (the known peak)"
    told = f"{rates.float32 / 1e9:.0f} GFLOP/s float32{peak}, {rates.bfloat16 / 1e9:.1f} bfloat16"
    yield f"torch products             {told}"
    if rates.read:
        yield f"reading memory             {rates.read / 1e9:.1f} GB/s"
    yield f"copying memory             {rates.copy / 1e9:.1f} GB/s read and written"
    for speed in speeds:
        unit = "GFLOP/s" if speed.limited_by == "peak" else "GB/s"
        amount = f"{speed.per_second / 1e9:8.1f} {unit:7s} {speed.per_second / speed.limit:5.0%} of {speed.limited_by}"
        yield f"{speed.operator:20s} {speed.seconds * 1e3:9.3f} ms {amount}"
