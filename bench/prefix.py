"""What the prefix cache saves, what it costs, and whether long prompts hold short ones up.

    python bench/prefix.py                                    our server on a random model of 1 M parameters
    python bench/prefix.py --preset bench-s --prefix 8192     a larger model, a shorter prefix
    python bench/prefix.py --burst-len 8192 --flags="--max-num-batched-tokens 128"

    miss, hit      seconds to the first token of a prompt of `--prefix` tokens that nobody sent before and `--new` more,
                   and of the same prefix with other new tokens; the hit's prompt is read from its last boundary on
    memory         bytes of the pages that one cached prefix holds, beside what `nanok3 plan` counts for so many tokens
                   (latents, and one state). Pages are whole, and a prefix has states at its grid's boundaries as well
    short prompts  95th percentile of the time to the first token of short prompts, `--short-clients` at a time, alone
                   and while `--burst` prompts of `--burst-len` tokens wait for theirs

Short ones are measured after the prefix, so all is warm. Everything is asked over HTTP, on this machine.
"""

from __future__ import annotations

import json
import random
import shlex
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import load
import random_k3
import serve
import torch
import tyro

from nanok3.ledger import kda_state_bytes, state_bytes
from nanok3.serve.arena import Shapes

SECONDS = 280.0
"""Longer no single request may take."""


@dataclass
class Options(harness.Options):
    rounds: int = 3
    preset: random_k3.Preset = "tiny"
    prefix: int = 32_768
    new: int = 512
    burst: int = 4
    burst_len: int = 8192
    short_len: int = 64
    short_clients: int = 4
    shorts: int = 60
    """Short prompts alone, and as many beside the burst."""
    memory: float = 0.5
    """GiB of the server's pages."""
    flags: str = ""
    """Further flags of the server."""
    seed: int = 0
    json: Path = Path("runs/bench/prefix.json")


def ask(target: load.Target, prompt: list[int], tokens: int = 2) -> load.Sample:
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": tokens, "stream": True, "ignore_eos": True}
    body |= {"temperature": 0, "stream_options": {"include_usage": True}}
    sample = load.ask(target, "/v1/completions", body, time.perf_counter() + SECONDS)
    if sample.error:
        raise SystemExit(f"a request failed: {sample.error}")
    return sample


def ids(draw: random.Random, count: int) -> list[int]:
    """Characters in our own tokenizers."""
    return [draw.randrange(32, 127) for _ in range(count)]


def pages(target: load.Target) -> int:
    """That the cache holds, of both kinds."""
    connection = target.connect(60)
    connection.request("GET", "/v1/loads")
    found = json.loads(connection.getresponse().read())["pages"]
    connection.close()
    return int(found["latent"]["cached"] + found["snapshot"]["cached"])


def measure_prefix(options: Options, target: load.Target) -> harness.Record:
    """Each round has a prefix of its own."""
    misses, hits, held, cached = [], [], [], []
    for turn in range(options.rounds):
        draw = random.Random(f"{options.seed} prefix {turn}")
        prefix, before = ids(draw, options.prefix), pages(target)
        misses.append(ask(target, prefix + ids(draw, options.new)).first)
        held.append(pages(target) - before)
        found = [ask(target, prefix + ids(draw, options.new)) for _ in range(3)]
        hits += [one.first for one in found[1:]]  # the first one leaves a state where the two parted
        cached.append(min(one.cached for one in found[1:]))
    cfg = random_k3.config(options.preset)
    page = Shapes.of(cfg, torch.float32).layout().page_bytes
    miss, hit = statistics.median(misses), statistics.median(hits)
    return {
        "case": f"{options.prefix:,} + {options.new} tokens",
        "miss_s": miss,
        "hit_s": hit,
        "miss_to_hit_ratio": miss / hit,
        "cached_tokens": min(cached),
        "held_mib": statistics.median(held) * page / 2**20,
        "plan_mib": state_bytes(cfg, options.prefix + options.new, plain=4) / 2**20,
        "state_mib": kda_state_bytes(cfg) / 2**20,
    }


def short_ones(options: Options, target: load.Target, name: str) -> list[float]:
    """Times to the first token."""

    def one(number: int) -> float:
        draw = random.Random(f"{options.seed} {name} {number}")
        time.sleep(draw.random() * 0.02)
        return ask(target, ids(draw, options.short_len), 4).first

    with ThreadPoolExecutor(options.short_clients) as pool:
        return list(pool.map(one, range(options.shorts)))


def measure_burst(options: Options, target: load.Target) -> harness.Record:
    alone = short_ones(options, target, "alone")
    draw = random.Random(f"{options.seed} burst")
    longs = [ids(draw, options.burst_len) for _ in range(options.burst)]
    threads = [threading.Thread(target=ask, args=(target, prompt)) for prompt in longs]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    beside = short_ones(options, target, "beside")
    busy = any(thread.is_alive() for thread in threads)
    for thread in threads:
        thread.join()
    p95 = [serve.quantile(times, 0.95) or 0.0 for times in (alone, beside)]
    return {
        "case": f"short ones beside {options.burst} x {options.burst_len:,}",
        "alone_p50_ms": serve.quantile(alone, 0.5),
        "alone_p95_ms": p95[0],
        "beside_p50_ms": serve.quantile(beside, 0.5),
        "beside_p95_ms": p95[1],
        "beside_to_alone_ratio": p95[1] / p95[0],
        "burst_lasted": str(busy),
    }


def main(options: Options) -> None:
    print(harness.machine_line(options.threads))
    log = options.json.with_suffix(".log")
    flags = ["--memory", str(options.memory), *shlex.split(options.flags)]
    with serve.own_server(serve.random_model(options.preset), options.threads, log, flags) as (url, _):
        target = load.open_target(url, None, None, False)
        rows = [measure_prefix(options, target), measure_burst(options, target)]
    for row in rows:
        for name, value in row.items():
            print(f"{name.replace('_', ' '):>24} {harness.cell(name, value)}")
    harness.write_json(options.json, rows, options)
    print(f"written: {options.json}")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
