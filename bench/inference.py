"""Prefill and decode side by side: ours, llama.cpp and the released code, on the same random weights.

    python bench/inference.py                                         bench-s, all types, one thread
    python bench/inference.py --presets bench-m --dtypes mxfp4 --threads 2

A checkpoint is written once (bench/random_k3.py) and exported once for llama.cpp (`nanok3 export --gguf`). Every engine
is a process of its own that loads it, answers requests line by line and does nothing in between; in each round all of
them run each case once, every round beginning with another engine. Columns: tokens a second (median over rounds),
half the range of the middle half, the best; the ratio to ours (above 1 ours is faster); CPU seconds; for decoding the
bytes of weights and memory that a step must read, and the rate of that reading as a share of the machine's measured
one; the peak of resident memory of that process; the load of the machine.

What is held equal is printed above the table; `RULES` has it.
"""

from __future__ import annotations

import json
import math
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import harness
import peers
import random_k3
import torch
import tyro
from torch import Tensor

import nanok3
from nanok3.config import K3Config
from nanok3.kernels import roofline
from nanok3.model.cache import ModelState
from nanok3.model.native_decode import NativeDecoder
from nanok3.model.weights import disk_tensors
from nanok3.serve.generate import PREFILL_CHUNK

Dtype = Literal["float32", "bf16", "mxfp4"]
OURS, LLAMA, OFFICIAL = "ours", "llama.cpp", "official"
GGUF = {"float32": "f32", "bf16": "bf16", "mxfp4": "mxfp4"}
TORCH = {"float32": torch.float32, "bf16": torch.bfloat16, "mxfp4": None}

RULES = """\
Held equal:
  1 one checkpoint, seed 0, experts on the grid of MXFP4; llama.cpp reads our GGUF export of it. float32 and bf16: the
    same values in every engine. mxfp4: each engine's own form. Ours multiplies four-bit experts by unrounded inputs,
    llama.cpp rounds inputs to eight bits in blocks, the released code has none of it and is left out.
  2 the same number of threads; a waiting thread sleeps (OMP_WAIT_POLICY, GOMP_SPINCOUNT); all are built for this CPU.
  3 logits of the last token only, for the released code too, whose forward would compute all of them.
  4 decoding at the depth of the table, without sampling; the state that depth needs is built outside of the time.
  5 memory as each engine has it: ours latents in the model's type, llama.cpp latents in float16, the released code
    expanded keys and values in the model's type; KDA states float32 everywhere.
  6 KDA as each engine has it: ours chunks of 16, the released code FLA's naive chunks, llama.cpp token by token.
  7 one round is not counted; engines take turns; the load average stands beside every row.
  8 (training, not here)"""


@dataclass
class Options(harness.Options):
    presets: list[random_k3.Preset] = field(default_factory=lambda: ["bench-s"])
    dtypes: list[Dtype] = field(default_factory=lambda: ["float32", "bf16", "mxfp4"])
    engines: list[str] = field(default_factory=lambda: [OURS, LLAMA, OFFICIAL])
    prefill: list[int] = field(default_factory=lambda: [512, 2048, 8192])
    batches: list[int] = field(default_factory=lambda: [1, 8])
    depths: list[int] = field(default_factory=lambda: [0, 512])
    tokens: int = 32
    """Steps of a decoding case."""
    slow_up_to: int = 512
    """The released code reads longer prompts, and decodes batches, only below this."""
    folder: Path = Path("runs/bench/models")
    json: Path = Path("runs/bench/inference.json")


@dataclass(frozen=True)
class Case:
    """What is asked of an engine, as a line: what, tokens, batch, depth."""

    what: Literal["prefill", "decode"]
    tokens: int
    batch: int = 1
    depth: int = 0

    def line(self) -> str:
        return f"{self.what} {self.tokens} {self.batch} {self.depth}\n"

    def __str__(self) -> str:
        if self.what == "prefill":
            return f"prefill {self.tokens}"
        return f"decode, batch {self.batch}, depth {self.depth}"


def cases(options: Options) -> list[Case]:
    prefill = [Case("prefill", tokens) for tokens in options.prefill]
    decode = [Case("decode", options.tokens, batch, depth) for batch in options.batches for depth in options.depths]
    return prefill + decode


# ---------------------------------------------------------------------- our engine, as a process


class Ours:
    """What nanok3 does by default: the model's forward for a prompt, the native step for decoding where it can."""

    def __init__(self, folder: Path, dtype: Dtype) -> None:
        self.model = nanok3.load(folder, dtype=TORCH[dtype])
        decoder = NativeDecoder.of(self.model)
        self.decoder = decoder if isinstance(decoder, NativeDecoder) else None
        self.remark = None if self.decoder else f"decoding in torch: {decoder}"
        self.generator = torch.Generator().manual_seed(0)

    def ids(self, batch: int, tokens: int) -> Tensor:
        return torch.randint(3, self.model.cfg.vocab_size, (batch, tokens), generator=self.generator)

    def read(self, ids: Tensor, state: ModelState) -> None:
        """As `generate` reads a prompt: in chunks, the head on the last row only."""
        for part in ids.split(PREFILL_CHUNK, dim=1):
            final = self.model.hidden_states(part, state=state)
        self.model.lm_head(final[:, -1:])

    def step(self, ids: Tensor, state: ModelState) -> None:
        if self.decoder is not None:
            self.decoder.step_state(ids, state)
        else:
            self.model(ids, state=state)

    @torch.no_grad()
    def measure(self, what: str, tokens: int, batch: int, depth: int) -> dict[str, float]:
        state = self.model.new_state(batch)
        if what == "prefill":
            prompt = self.ids(batch, tokens)
            return timed(lambda: self.read(prompt, state))
        if depth:
            self.read(self.ids(batch, depth), state)
        for _ in range(2):
            self.step(self.ids(batch, 1), state)
        steps = [self.ids(batch, 1) for _ in range(tokens)]
        return timed(lambda: [self.step(ids, state) for ids in steps])


def timed(run: Callable[[], object]) -> dict[str, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}


def peak_memory() -> int:
    """The most bytes this process held at once. Not getrusage's figure, which begins with that of the parent."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)", status)[1])  # type: ignore[index]


def work(folder: Path, dtype: Dtype, threads: int) -> None:
    """The process of our engine."""
    torch.set_num_threads(threads)
    engine = Ours(folder, dtype)
    print(json.dumps({"ready": True, "remark": engine.remark}), flush=True)
    for line in sys.stdin:
        what, *numbers = line.split()
        answer = engine.measure(what, *map(int, numbers))
        print(json.dumps({**answer, "peak_rss": peak_memory()}), flush=True)


# ---------------------------------------------------------------------- engines, from outside


class Engine:
    """A process that has loaded the model and waits for requests."""

    def __init__(self, name: str, command: Sequence[str | Path], threads: int) -> None:
        quiet = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}
        self.name = name
        self.process = subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **quiet},
        )
        self.remark = self._answer().get("remark")

    def measure(self, case: Case) -> dict[str, float]:
        assert self.process.stdin
        self.process.stdin.write(case.line())
        self.process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise peers.Unavailable(f"{self.name} ended with status {self.process.wait()}")
        return json.loads(line)


def command_of(name: str, options: Options, model: Path, dtype: Dtype) -> list[str | Path]:
    """How an engine is started. `Unavailable` where it is not installed or has no such type."""
    threads = str(options.threads)
    if name == OURS:
        return [sys.executable, __file__, "--work", model, dtype, threads]
    if name == LLAMA:
        program = peers.llama_program("llama_worker")
        return [program, exported(model, dtype), threads]
    if dtype == "mxfp4":
        raise peers.Unavailable("the released code decodes packed experts when it loads them; see bf16")
    peer, fla = peers.ensure("official"), peers.ensure("fla")
    script = Path(__file__).with_name("official_k3.py")
    kind = {"float32": "float32", "bf16": "bfloat16"}[dtype]
    folders = ["--official", peer.folder, "--fla", fla.folder, "--model", model]
    return [peer.python, script, *folders, "--dtype", kind, "--threads", threads]


def exported(model: Path, dtype: Dtype) -> Path:
    """The model as a GGUF file, written by the command a user has."""
    file = model.with_name(f"{model.name}-{dtype}.gguf")
    if not file.exists():
        export = [sys.executable, "-m", "nanok3", "export", model, "--gguf", file, "--dtype", GGUF[dtype]]
        subprocess.run(list(map(str, export)), check=True, stdout=subprocess.DEVNULL)
    return file


@contextmanager
def started(options: Options, model: Path, dtype: Dtype) -> Iterator[list[Engine]]:
    """All engines that can be had; the reason is printed for the others."""
    with ExitStack() as stack:
        engines = []
        for name in options.engines:
            try:
                engine = Engine(name, command_of(name, options, model, dtype), options.threads)
            except peers.Unavailable as reason:
                print(f"{model.name} {dtype}: without {name}: {reason}")
                continue
            stack.callback(engine.close)
            engines.append(engine)
            if engine.remark:
                print(f"{model.name} {dtype}: {name}: {engine.remark}")
        yield engines


# ---------------------------------------------------------------------- what a step must read


def step_bytes(cfg: K3Config, dtype: Dtype, case: Case) -> int:
    """Bytes that decoding one step moves at least: the weights it uses, once, and each sequence's memory: states read
    and written, latents read. Experts: the expected number that `batch` tokens choose between them."""
    size = {"BF16": 4 if dtype == "float32" else 2, "F32": 4, "U8": 1}
    used = 1 - (1 - cfg.num_experts_per_token / cfg.num_experts) ** case.batch
    total = 0.0
    for name, spec in disk_tensors(cfg, packed=dtype == "mxfp4").items():
        if "embed_tokens" not in name:
            total += math.prod(spec.shape) * size[spec.dtype] * (used if ".experts." in name else 1)
    latents = cfg.latent_cache_size * (case.depth + case.tokens // 2) * size["BF16"] * cfg.kinds.count("mla")
    kda = cfg.kda_num_heads * cfg.kda_head_dim * (4 * cfg.kda_head_dim + 3 * size["BF16"] * cfg.short_conv_kernel_size)
    return round(total + case.batch * (latents + 2 * kda * cfg.kinds.count("kda")))


# ---------------------------------------------------------------------- measuring


def measure(engines: list[Engine], case: Case, options: Options) -> dict[str, list[dict[str, float]]]:
    """Every engine once a round, after one round that warms up."""
    able = [e for e in engines if e.name != OFFICIAL or _affordable(case, options)]
    samples: dict[str, list[dict[str, float]]] = {engine.name: [] for engine in able}
    for turn in range(options.rounds + 1):
        first = turn % len(able)
        for engine in able[first:] + able[:first]:
            answer = engine.measure(case)
            if turn:
                samples[engine.name].append({**answer, "load": os.getloadavg()[0]})
    return samples


def _affordable(case: Case, options: Options) -> bool:
    return max(case.tokens, case.depth) <= options.slow_up_to and case.batch == 1


def records(
    label: str,
    case: Case,
    samples: dict[str, list[dict[str, float]]],
    nbytes: int | None,
    rate: float | None,
    clock: str,
) -> Iterator[harness.Record]:
    tokens = case.tokens * case.batch
    ours = statistics.median(s[clock] for s in samples[OURS]) if OURS in samples else None
    for name, taken in samples.items():
        times = [s[clock] for s in taken]
        median = statistics.median(times)
        moved = nbytes * case.tokens / median if nbytes and name == OURS else None
        yield {
            "weights": label,
            "case": str(case),
            "engine": name,
            "tokens_per_s": tokens / median,
            "spread": tokens / median * harness.spread(times) / median,
            "best": tokens / min(times),
            "ratio": median / ours if ours else None,
            "cpu_ms_per_token": 1e3 * statistics.median(s["cpu"] for s in taken) / tokens,
            "MB_per_step": nbytes / 1e6 if nbytes and name == OURS else None,
            "of_bandwidth": moved / rate if moved and rate else None,
            "peak_MB": max(s["peak_rss"] for s in taken) / 1e6,
            "load": statistics.median(s["load"] for s in taken),
        }


def main(options: Options) -> None:
    options.clock()
    clock = "cpu" if options.cpu_time else "wall"
    reading = roofline.read_bandwidth(options.threads, time.process_time if options.cpu_time else time.perf_counter)
    print(harness.machine_line(options.threads) + f", {'CPU time' if options.cpu_time else 'clock'}")
    print(f"memory is read at {reading / 1e9:.1f} GB/s" if reading else "no compiler: the memory's rate is not known")
    print(RULES)
    table = harness.Table()
    for preset in options.presets:
        model = options.folder / preset
        cfg = random_k3.write(preset, model)
        for dtype in options.dtypes:
            needs = {case: step_bytes(cfg, dtype, case) for case in cases(options) if case.what == "decode"}
            with started(options, model, dtype) as engines:
                for case in cases(options):
                    samples = measure(engines, case, options)
                    table.add(records(f"{preset} {dtype}", case, samples, needs.get(case), reading, clock))
                    harness.write_json(options.json, table.records, options, read_bytes_per_s=reading, rules=RULES)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))  # type: ignore[arg-type]
    else:
        main(tyro.cli(Options, description=__doc__))
