"""Experts from disk under an enforced memory limit: tokens a second beside what the disk and the page cache allow.

    python bench/stream_experts.py --out runs/streaming --experts 256        2.4 GB, limit a quarter of it

A checkpoint of random weights is written, its experts in MXFP4. Processes of their own generate greedily from it, batch
1, by the torch path and with one thread: resident without a limit (and by native decoding, which streaming cannot use),
and streamed with RLIMIT_DATA at a quarter of the checkpoint's size, which holds for all private memory of the process,
Python and torch included. `cold` drops every byte from the page cache once it was read (posix_fadvise), so that each
read goes to the disk; `warm` has read all files before. The disk and the page cache themselves are measured by reading
the experts' files front to back with pread, in the pieces in which streaming reads.

    bound = rate of pread / bytes read a token

The tokens must be the same in all runs. The checkpoint is removed at the end. Threads and rounds are as they are.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import harness
import torch
import tyro
from random_k3 import config, draw, shards
from safetensors.torch import save_file

from nanok3.model.native_decode import NativeDecoder
from nanok3.model.streamed_experts import stream_of
from nanok3.model.weights import INDEX, DiskTensor, disk_tensors, load

MIB = 1 << 20


@dataclass
class Options(harness.Options):
    out: Path = Path("runs/streaming")
    """Folder of the checkpoint; one that --keep left there is used again."""
    experts: int = 256
    """In each of 11 layers, 0.84 MB each."""
    prompt: int = 64
    tokens: int = 24
    budgets: tuple[int, ...] = (64, 128)
    """MiB for experts."""
    json: Path = Path("runs/bench/stream_experts.json")
    keep: bool = False
    """Leave the checkpoint."""
    worker: str | None = None
    """One run in this process, as JSON; the script calls itself with it."""


@dataclass
class Run:
    """One process. memory None: resident."""

    folder: str
    prompt: int
    tokens: int
    memory: int | None = None
    limit: int | None = None
    cold: bool = False
    native: bool = False


def main(options: Options) -> None:
    if options.worker is not None:
        print(json.dumps(work(Run(**json.loads(options.worker)))))
        return
    if options.threads != 1:
        raise SystemExit(f"threads is {options.threads}; all runs have one thread")
    if not (options.out / "config.json").exists():
        write(options.out, options.experts)
    try:
        size = sum(file.stat().st_size for file in options.out.glob("*.safetensors"))
        rows, facts = measure(options, size)
    finally:
        if not options.keep:
            shutil.rmtree(options.out)
    harness.print_table(rows)
    harness.write_json(options.json, rows, options, **facts)


def write(out: Path, experts: int) -> None:
    """The checkpoint, a shard a layer. Experts are random codes with a scale of 2^-6."""
    cfg = replace(config("bench-s"), num_experts=experts, num_experts_per_token=8)
    cfg = replace(cfg, moe_intermediate_size=1024, routed_expert_hidden_size=512)
    random = torch.Generator().manual_seed(0)
    weight_map: dict[str, str] = {}
    out.mkdir(parents=True)
    tensors = disk_tensors(cfg)
    for part, names in shards(tensors).items():
        made = {name: drawn(name, tensors[name], random) for name in names}
        save_file(made, out / f"model-{part}.safetensors")
        weight_map |= dict.fromkeys(names, f"model-{part}.safetensors")
    (out / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    for file in out.glob("*.safetensors"):
        with open(file, "rb") as stream:
            os.fsync(stream.fileno())  # what is not yet on the disk cannot be dropped from the page cache
    cfg.to_json(out / "config.json")


def drawn(name: str, spec: DiskTensor, random: torch.Generator) -> torch.Tensor:
    if name.endswith("_scale"):
        return torch.full(spec.shape, 121, dtype=torch.uint8)
    if spec.dtype == "U8":
        return torch.randint(0, 256, spec.shape, dtype=torch.uint8, generator=random)
    if name.endswith("A_log"):
        return torch.zeros(spec.shape)
    values = draw(name, spec.shape, lambda *shape: torch.randn(shape, generator=random))
    return values if spec.dtype == "F32" else values.bfloat16()


# ---------------------------------------------------------------------- one process


def work(run: Run) -> dict[str, Any]:
    torch.set_num_threads(1)
    if run.limit is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (run.limit, run.limit))
    experts = "resident" if run.memory is None else "stream"
    model = load(run.folder, experts=experts, expert_memory=run.memory)
    if run.cold:
        drop_after_reading(model)
    found = generate(model, run)
    found["peak"] = peak()
    stream = stream_of(model)
    return found if stream is None else found | {"slots": stream.slots.size, "all": len(stream.files.places)}


def drop_after_reading(model: torch.nn.Module) -> None:
    stream = stream_of(model)
    assert stream is not None
    files, read = stream.files, stream.files.read

    def read_and_drop(key: Any, into: Any) -> int:
        count = read(key, into)
        for place in files.places[key].values():
            os.posix_fadvise(files._open[place.file], place.offset, place.nbytes, os.POSIX_FADV_DONTNEED)
        return count

    files.read = read_and_drop  # type: ignore[method-assign]


@torch.no_grad()
def generate(model: Any, run: Run) -> dict[str, Any]:
    """Greedy tokens, and of the prompt and of the tokens after it: seconds and what was read."""
    ids = torch.randint(0, model.cfg.vocab_size, (1, run.prompt), generator=torch.Generator().manual_seed(1))
    state, said, stream = model.new_state(1), [], stream_of(model)
    native = NativeDecoder(model) if run.native else None
    marks = [mark(stream)]
    logits = model.lm_head(model.hidden_states(ids, state=state)[0, -1])
    marks.append(mark(stream))
    for _ in range(run.tokens):
        said.append(int(logits.argmax()))
        step = torch.tensor([said[-1:]])
        logits = model(step, state=state).logits[0, -1] if native is None else native.step_state(step, state).logits[0]
    marks.append(mark(stream))
    spans = [{name: b[name] - a[name] for name in a} for a, b in zip(marks, marks[1:])]
    return {"said": said, "prompt": spans[0], "decode": spans[1]}


def mark(stream: Any) -> dict[str, float]:
    counted = {} if stream is None else asdict(stream.statistics)
    return {"seconds": time.perf_counter(), "cpu": time.process_time(), **counted}


def peak() -> int:
    """Most resident memory so far, pages of shared libraries included."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM"))


# ---------------------------------------------------------------------- all of them


def measure(options: Options, size: int) -> tuple[list[harness.Record], dict[str, Any]]:
    """A row for each run, and what holds for all of them."""
    limit = size // 4
    base = Run(str(options.out), options.prompt, options.tokens)
    print(f"checkpoint {size / MIB:,.0f} MiB, limit {limit / MIB:,.0f} MiB of private memory")
    rates = {"disk": sequential(options.out, cold=True), "page cache": sequential(options.out, cold=False)}
    for name, rate in rates.items():
        print(f"pread, {name}: {rate / 1e6:,.0f} MB/s")
    resident = call(base)
    rows = [row("resident, torch path", resident), row("resident, native", call(replace(base, native=True)))]
    refused = subprocess.run(command(replace(base, limit=limit)), capture_output=True, text=True, check=False)
    reason = (refused.stderr.strip().splitlines() or ["nothing said"])[-1]
    print(f"resident under the limit: ends with {reason[:90]}")
    assert refused.returncode != 0, "the limit is none"
    for budget in options.budgets:
        for where, cold in (("disk", True), ("page cache", False)):
            sequential(options.out, cold)
            found = call(replace(base, memory=budget * MIB, limit=limit, cold=cold))
            assert found["said"] == resident["said"], "streaming says something else"
            rows.append(row(f"{budget} MiB, {where}", found, rates[where]))
    return rows, {"size": size, "limit": limit, "bytes_a_second": rates, "resident_under_the_limit": reason}


def command(run: Run) -> list[str]:
    return [sys.executable, __file__, "--worker", json.dumps(asdict(run))]


def call(run: Run) -> dict[str, Any]:
    done = subprocess.run(command(run), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def sequential(folder: Path, cold: bool) -> float:
    """Bytes a second of reading all experts' files front to back; afterwards they are in the page cache, or not."""
    buffer, total, seconds = bytearray(MIB), 0, 0.0
    for file in sorted(folder.glob("*.safetensors")):
        number = os.open(file, os.O_RDONLY)
        if cold:
            os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
        else:
            while os.read(number, MIB):
                pass
        start, offset = time.perf_counter(), 0
        while count := os.preadv(number, [buffer], offset):
            offset += count
        seconds, total = seconds + time.perf_counter() - start, total + offset
        if cold:
            os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(number)
    return total / seconds


def row(case: str, found: dict[str, Any], rate: float | None = None) -> harness.Record:
    decode, prompt, tokens = found["decode"], found["prompt"], len(found["said"])
    record: harness.Record = {
        "case": case,
        "tokens_s": tokens / decode["seconds"],
        "by_CPU_time": tokens / decode["cpu"],
        "prompt_s": prompt["seconds"],
        "peak_MB": found["peak"] >> 20,
    }
    if rate is not None:
        record |= {
            "slots": f"{found['slots']} of {found['all']}",
            "hits_share": decode["hits"] / (decode["hits"] + decode["reads"]),
            "MB_a_token": decode["bytes"] / tokens / 1e6,
            "bound_tokens_s": rate * tokens / decode["bytes"],
            "waited_share": decode["seconds_waited"] / decode["seconds"],
            "prompt_MB": prompt["bytes"] / 1e6,
        }
    print(json.dumps(record), flush=True)
    return record


if __name__ == "__main__":
    main(tyro.cli(Options))
