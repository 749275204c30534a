"""A server under load: time to first token, time between tokens, throughput, share of prompts from the cache.

    python bench/serve.py                                                  our server on a random model, which it starts
    python bench/serve.py --serve runs/x --max-concurrency 1 8 32          the same on a model of yours
    python bench/serve.py --base-url http://127.0.0.1:8000 --model NAME    any server of the OpenAI API that runs
    python bench/serve.py --random-prefix-len 2048 --random-input-len 64   prompts that share their beginning

Flags have the names of the field's other serving benchmarks. Prompts are random ids, so their lengths are exact, behind
a prefix that all prompts of a level share; at `/v1/chat/completions` they are random words, and the lengths are those
that the server counts. Requests come as a Poisson process of `--request-rate` a second, or all at once, and at most
`--max-concurrency` are under way; several numbers give a row each. Each level has prompts of its own, so none finds
what another one left in the cache, and begins with one request that is not counted.

    TTFT   from sending a request to the first piece of its answer with text
    ITL    between two pieces; a piece is a token where the server sends each by itself
    TPOT   from the first piece to the last, over the tokens behind the first (as the server counts them)

It writes the figures as JSON and as one HTML page beside it. Only this machine's own addresses are asked, unless
--allow-remote says otherwise; --num-prompts and --max-seconds bound what is done to a server.
"""

from __future__ import annotations

import json
import math
import random
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import harness
import load
import random_k3
import tyro

from nanok3.data.files import write_file
from nanok3.data.tokenizer import RESERVED, Tokenizer
from nanok3.train import svg

MOST_PROMPTS, MOST_AT_ONCE = 10_000, 512
READY_SECONDS = 180
"""For our own server to load its model."""
WORDS = "the of and to in a is that for it as was with be by on not he his but at are this have from".split()
SHOWN = {"ttft": (50, 90, 99), "itl": (50, 99), "tpot": (50,), "e2el": (50,)}
"""Quantiles of each time, in per cent."""
STYLE = Path(svg.__file__).with_name("report.css")


@dataclass
class Options(harness.Options):
    rounds: int = 1
    """Runs of every level, taking turns; their requests are counted together."""
    base_url: str | None = None
    """A server that runs. Not given: one is started."""
    model: str | None = None
    """Name of the model in requests; not given: the first that the server lists."""
    endpoint: Literal["/v1/completions", "/v1/chat/completions"] = "/v1/completions"
    api_key: str | None = None
    serve: Path | None = None
    """Folder of the model for the server that is started; not given: `--preset`, of random weights."""
    preset: random_k3.Preset = "tiny"
    serve_flags: str = ""
    """Further flags for it, as one text: '--no-prefix-cache --max-num-seqs 8'."""
    num_prompts: int = 64
    """Of each level, in each round."""
    max_concurrency: list[int] = field(default_factory=lambda: [1, 8, 32])
    request_rate: float | None = None
    """Requests a second; not given: all at once."""
    random_input_len: int = 256
    random_output_len: int = 32
    random_prefix_len: int = 0
    """Tokens before those, the same for all prompts of a level."""
    ignore_eos: bool = True
    """Whether each answer has all its tokens, where the server knows the field."""
    temperature: float = 0.0
    seed: int = 0
    max_seconds: float = 300
    """Of one level; what is not done by then is cut and counted as failed."""
    allow_remote: bool = False
    json: Path = Path("runs/bench/serve.json")

    def check(self) -> None:
        """SystemExit names the flag, the value and what is allowed."""
        bounds = {
            "num_prompts": (1, MOST_PROMPTS),
            "rounds": (1, 100),
            "request_rate": (1e-3, 1e6),
            "random_input_len": (1, 2**20),
            "random_output_len": (1, 2**20),
            "random_prefix_len": (0, 2**20),
            "max_seconds": (1, 3600),
        }
        for name, (low, high) in bounds.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise SystemExit(f"{name} is {value}; it must lie between {low:g} and {high:g}")
        wrong = [n for n in self.max_concurrency if not 1 <= n <= MOST_AT_ONCE]
        if wrong or not self.max_concurrency:
            raise SystemExit(f"max_concurrency is {self.max_concurrency}; numbers from 1 to {MOST_AT_ONCE} are allowed")
        if self.cpu_time:
            raise SystemExit("cpu_time: what a server does is measured by the clock only")


# ---------------------------------------------------------------------- one level


def bodies(options: Options, model: str, level: str) -> Iterator[dict[str, Any]]:
    """Requests without end, the same for the same seed and level."""
    draw = random.Random(f"{options.seed} {level}")
    chat = options.endpoint.endswith("chat/completions")

    def piece(tokens: int) -> list[Any]:
        # Single bytes in our own tokenizers, and ordinary tokens in all known ones.
        return [draw.choice(WORDS) if chat else draw.randrange(32, 127) for _ in range(tokens)]

    prefix = piece(options.random_prefix_len)
    fixed = {
        "model": model,
        "max_tokens": options.random_output_len,
        "temperature": options.temperature,
        "ignore_eos": options.ignore_eos,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    while True:
        prompt = prefix + piece(options.random_input_len)
        said = {"messages": [{"role": "user", "content": " ".join(prompt)}]} if chat else {"prompt": prompt}
        yield fixed | said


@dataclass
class Run:
    """The requests of a level in one round."""

    samples: list[load.Sample]
    seconds: float


def run_level(options: Options, target: load.Target, concurrency: int, turn: int) -> Run:
    """Send the requests, in time, at most so many at once."""
    level = f"{concurrency} {turn}"
    first = next(bodies(options, target.model, f"warm {level}"))
    warm = load.ask(target, options.endpoint, first, time.perf_counter() + options.max_seconds)
    if warm.error:
        raise SystemExit(f"the first request failed: {warm.error}")
    made = bodies(options, target.model, level)
    wanted = [next(made) for _ in range(options.num_prompts)]
    due = arrivals(options, level)
    start = time.perf_counter()
    end = start + options.max_seconds

    def one(k: int) -> load.Sample:
        time.sleep(max(0.0, min(start + due[k], end) - time.perf_counter()))
        if time.perf_counter() >= end:
            return load.Sample(error="cut: max_seconds are over")
        return load.ask(target, options.endpoint, wanted[k], end)

    with ThreadPoolExecutor(min(concurrency, options.num_prompts)) as pool:
        samples = list(pool.map(one, range(options.num_prompts)))
    return Run(samples, time.perf_counter() - start)


def arrivals(options: Options, level: str) -> list[float]:
    """Seconds from the start at which requests are due: gaps of a Poisson process."""
    draw, at = random.Random(f"{options.seed} arrivals {level}"), 0.0
    due = []
    for _ in range(options.num_prompts):
        due.append(at)
        at += draw.expovariate(options.request_rate) if options.request_rate else 0.0
    return due


def row(concurrency: int, runs: Sequence[Run]) -> harness.Record:
    """A level's figures; times in milliseconds."""
    samples = [sample for run in runs for sample in run.samples]
    done = [sample for sample in samples if sample.error is None]
    seconds = sum(run.seconds for run in runs)
    prompt, cached, said = (sum(getattr(s, name) for s in done) for name in ("prompt", "cached", "said"))
    times = {
        "ttft": [s.first for s in done],
        "itl": [gap for s in done for gap in s.gaps],
        "tpot": [s.per_token for s in done],
        "e2el": [s.whole for s in done],
    }
    found: harness.Record = {
        "concurrency": concurrency,
        "done": len(done),
        "failed": len(samples) - len(done),
        "req_per_s": len(done) / seconds,
        "out_tok_per_s": said / seconds,
        "cached_share": cached / prompt if prompt else None,
    }
    for name, values in times.items():
        found |= {f"{name}_p{q}_ms": quantile(values, q / 100) for q in SHOWN[name]}
    return found


def quantile(values: Sequence[float], share: float) -> float | None:
    """In milliseconds, between neighbours in proportion; None of nothing."""
    kept = sorted(1e3 * value for value in values if math.isfinite(value))
    if not kept:
        return None
    place = share * (len(kept) - 1)
    low = math.floor(place)
    return kept[low] + (place - low) * (kept[min(low + 1, len(kept) - 1)] - kept[low])


# ---------------------------------------------------------------------- the server


def random_model(preset: random_k3.Preset) -> Path:
    """A folder with random weights and a tokenizer whose every token is one or more ASCII characters, so that a server
    can send each as it comes."""
    folder = Path(f"runs/bench/{preset}-served")
    cfg = random_k3.write(preset, folder)
    letters = [bytes([byte]) for byte in range(32, 127)]
    pieces = [bytes([byte]) for byte in range(256)]
    pairs = [a + b for a in letters for b in letters]
    pieces += pairs + [pair + a for pair in pairs[:300] for a in letters]
    Tokenizer({piece: k for k, piece in enumerate(pieces[: cfg.vocab_size - RESERVED])}).save(folder)
    return folder


@contextmanager
def own_server(folder: Path, threads: int, log: Path, flags: Sequence[str] = ()) -> Iterator[tuple[str, int]]:
    """Start `nanok3 serve` on a free port; its URL and its process."""
    command = [sys.executable, "-m", "nanok3", "serve", str(folder), "--port", "0", "--threads", str(threads), *flags]
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "wb") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        limit = threading.Timer(READY_SECONDS, process.kill)
        limit.start()
        try:
            assert process.stdout is not None
            said = next((line for line in process.stdout if "http://" in line), None)
            limit.cancel()
            if said is None:
                raise SystemExit(f"the server did not start: see {log}")
            print(said.strip())
            yield "http://" + said.split("http://", 1)[1].split("/", 1)[0].rstrip(",\n"), process.pid
        finally:
            limit.cancel()
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


@contextmanager
def server_of(options: Options) -> Iterator[str]:
    """The URL of the one that runs, or of one of our own."""
    if options.base_url:
        yield options.base_url
    else:
        folder, log = options.serve or random_model(options.preset), options.json.with_suffix(".log")
        with own_server(folder, options.threads, log, shlex.split(options.serve_flags)) as (url, _):
            yield url


# ---------------------------------------------------------------------- the page


def page(whole: harness.Record, runs: dict[int, list[Run]]) -> str:
    """The figures as one HTML document that needs nothing else."""
    rows = whole["rows"]
    heads = "".join(f'<th class="number">{svg.escape(name.replace("_", " "))}</th>' for name in rows[0])
    cells = "".join(
        "<tr>" + "".join(f'<td class="number">{svg.escape(harness.cell(n, v))}</td>' for n, v in one.items()) + "</tr>"
        for one in rows
    )
    samples = {level: [s for run in group for s in run.samples if s.error is None] for level, group in runs.items()}
    pictures = [
        distribution("ms to the first token", {n: [s.first for s in found] for n, found in samples.items()}),
        distribution("ms between pieces", {n: [g for s in found for g in s.gaps] for n, found in samples.items()}),
    ]
    facts = {**whole["machine"], **whole["options"]}
    listed = "".join(f"<div><dt>{svg.escape(k)}</dt><dd>{svg.escape(v)}</dd></div>" for k, v in facts.items())
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>nanok3 bench serve</title>\n'
        f"<style>\n{STYLE.read_text('utf-8')}</style>\n</head>\n<body>\n"
        f'<header><p class="kind">nanok3 · bench serve</p><h1>{svg.escape(whole["model"])}</h1>'
        f'<p class="lede">{svg.escape(whole["machine"]["cpu"])}</p></header>\n<main>\n<h2>Levels</h2>'
        f'<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>{cells}</tbody></table></div>\n'
        f'<h2>Distributions</h2><p class="note">Per cent of the requests, or of the gaps, that took at most so long.'
        f' A line for each concurrency.</p><div class="pictures">{"".join(pictures)}</div>\n'
        f'<h2>How this was made</h2><dl class="settings">{listed}</dl>\n</main>\n</body>\n</html>\n'
    )


def distribution(label: str, levels: dict[int, list[float]]) -> str:
    """For each level the share of values at most so large."""
    lines = []
    for colour, (level, values) in enumerate(levels.items()):
        kept = sorted(1e3 * value for value in values if math.isfinite(value) and value > 0)
        points = [(value, 100 * (k + 1) / len(kept)) for k, value in enumerate(kept)]
        lines.append(svg.Line(str(level), points, colour % svg.COLOURS))
    if not any(line.points for line in lines):
        return ""
    x = svg.fit(label, [value for line in lines for value, _ in line.points], log=True)
    return f"<figure><h3>{label}</h3>{svg.line_chart(lines, x, svg.Axis('per cent', 0, 100))}</figure>"


# ---------------------------------------------------------------------- all of it


def measure(options: Options, target: load.Target) -> dict[int, list[Run]]:
    """Levels take turns in each round."""
    runs: dict[int, list[Run]] = {level: [] for level in dict.fromkeys(options.max_concurrency)}
    for turn in range(options.rounds):
        for level in runs:
            runs[level].append(run_level(options, target, level, turn))
    return runs


def main(options: Options) -> None:
    options.check()
    print(harness.machine_line(options.threads))
    with server_of(options) as url:
        target = load.open_target(url, options.model, options.api_key, options.allow_remote)
        runs = measure(options, target)
    table = harness.Table()
    table.add([row(level, group) for level, group in runs.items()])
    samples = [sample for group in runs.values() for run in group for sample in run.samples]
    errors = [sample.error for sample in samples if sample.error]
    for error in dict.fromkeys(errors):
        print(f"failed: {error} ({errors.count(error)} times)")
    pieces = sum(len(sample.gaps) + 1 for sample in samples if not sample.error)
    facts = {"model": target.model, "tokens_per_piece": sum(s.said for s in samples if not s.error) / max(pieces, 1)}
    hidden = replace(options, api_key=options.api_key and "given")
    harness.write_json(options.json, table.records, hidden, **facts)
    document = options.json.with_suffix(".html")
    write_file(document, page(json.loads(options.json.read_text("utf-8")), runs).encode())
    print(f"written: {options.json}, {document}")
    if errors:
        raise SystemExit(1)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
