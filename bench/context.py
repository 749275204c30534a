"""What a longer context costs: K3, its two kinds of layers alone, and a GPT-2 of equal active size.

    python bench/context.py                             1K to 128K tokens, one thread
    python bench/context.py --lengths 1024 16384 --cpu-time

Four models of the same width: K3 as it is (bench-s, three KDA layers to one MLA), the same with KDA in every layer, the
same with MLA in every layer, and GPT-2 with as many active parameters in its layers, keys and values cached, through
torch (K3 decodes in its one native call; a few milliseconds of GPT-2's time at short lengths are torch's own). For each
length: milliseconds to decode one more token, megabytes of memory held, and microseconds a token to read a prompt of
that length. Memory for decoding is made up, not read: its values change no time. A measurement that would take longer
than `--limit` seconds, judged by the lengths before, is left out and said so.

After the table: for each model the line through its decoding times, so much at no context and so much more for every
1,024 tokens; and the length from which K3 is faster than GPT-2, by these lines and in the measured prompts.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import harness
import numpy as np
import random_k3
import torch
import torch.nn.functional as F
import tyro
from torch import Tensor

from nanok3.baselines.gpt2 import GPT2, Attention, GPT2Config
from nanok3.config import K3Config
from nanok3.model.cache import LatentCache
from nanok3.model.decoder import K3
from nanok3.model.native_decode import NativeDecoder
from nanok3.serve.generate import PREFILL_CHUNK

K3_NAME, KDA_NAME, MLA_NAME, GPT_NAME = "K3", "KDA only", "MLA only", "GPT-2"


@dataclass
class Options(harness.Options):
    preset: random_k3.Preset = "bench-s"
    lengths: list[int] = field(default_factory=lambda: [1024 << i for i in range(8)])
    tokens: int = 8
    """Decoded at each length, in each round."""
    rounds: int = 3
    limit: float = 60
    """Seconds that one prompt may take."""
    json: Path = Path("runs/bench/context.json")


# ---------------------------------------------------------------------- the models


class OfK3:
    """A K3 that decodes by its native step, or in torch where there is none."""

    def __init__(self, cfg: K3Config) -> None:
        self.model = K3(cfg).eval()
        decoder = NativeDecoder.of(self.model)
        self.decoder = decoder if isinstance(decoder, NativeDecoder) else None

    def state(self, tokens: int) -> object:
        state = self.model.new_state(1)
        for layer in state.layers:
            if isinstance(layer, LatentCache):
                layer.append(torch.randn(1, tokens, self.model.cfg.latent_cache_size))
        state.tokens = tokens
        self.nbytes = state.nbytes
        return state

    def step(self, ids: Tensor, state: object) -> None:
        if self.decoder is not None:
            self.decoder.step_state(ids, state)
        else:
            self.model(ids, state=state)

    def prefill(self, ids: Tensor) -> None:
        state = self.model.new_state(1)
        for part in ids.split(PREFILL_CHUNK, dim=1):
            final = self.model.hidden_states(part, state=state)
        self.model.lm_head(final[:, -1:])


class OfGPT2:
    """The baseline, with a cache of keys and values beside it that has room for so many tokens more."""

    def __init__(self, cfg: GPT2Config, room: int) -> None:
        self.model, self.room = GPT2(cfg).eval(), room

    def state(self, tokens: int) -> list[list[Tensor]]:
        cfg = self.model.cfg
        shape = (1, cfg.num_attention_heads, tokens + self.room, cfg.head_dim)
        layers = [[torch.randn(shape), torch.randn(shape)] for _ in range(cfg.num_hidden_layers)]
        self.nbytes = sum(2 * math.prod(shape[:2]) * tokens * cfg.head_dim * 4 for _ in layers)
        self.tokens = tokens
        return layers

    def step(self, ids: Tensor, state: list[list[Tensor]]) -> None:
        model = self.model
        x = model.embed_tokens(ids) + model.embed_positions.weight[self.tokens]
        for layer, memory in zip(model.layers, state):
            x = x + self.attend(layer.mixer, layer.input_norm(x), memory)
            x = x + layer.mlp(layer.mlp_norm(x))
        model.lm_head(model.norm(x))
        self.tokens += 1

    def attend(self, mixer: Attention, x: Tensor, memory: list[Tensor]) -> Tensor:
        """One new row against all rows."""
        q, *new = mixer.qkv_proj(x).unflatten(-1, (3, -1, mixer.cfg.head_dim)).transpose(1, 3).unbind(2)
        for kept, row in zip(memory, new):
            kept[:, :, self.tokens : self.tokens + 1] = row
        k, v = (kept[:, :, : self.tokens + 1] for kept in memory)
        out: Tensor = mixer.o_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return out

    def prefill(self, ids: Tensor) -> None:
        self.model.lm_head(self.model.hidden_states(ids)[:, -1:])


Contender = OfK3 | OfGPT2


def contenders(options: Options) -> dict[str, Contender]:
    """All four, in float32, with weights of the right size drawn anew."""
    cfg = random_k3.config(options.preset)
    every = tuple(range(1, cfg.num_hidden_layers + 1))
    k3, room = OfK3(cfg), options.tokens * (options.rounds + 1)
    return {
        K3_NAME: k3,
        KDA_NAME: OfK3(replace(cfg, kda_layers=every, full_attn_layers=())),
        MLA_NAME: OfK3(replace(cfg, kda_layers=(), full_attn_layers=every)),
        GPT_NAME: OfGPT2(equal_gpt2(k3.model, max(options.lengths) + room), room),
    }


def active_parameters(model: K3) -> int:
    """Of the layers, in matrices that one token uses."""
    cfg, total = model.cfg, 0.0
    for name, value in model.model.layers.named_parameters():
        share = cfg.num_experts_per_token / cfg.num_experts if ".experts." in name else 1.0
        total += share * value.numel() * (value.ndim > 1)
    return round(total)


def equal_gpt2(k3: K3, positions: int) -> GPT2Config:
    """K3's depth and vocabulary, and the width at which 12 D^2 a layer is K3's active size, in heads of 64."""
    cfg = k3.cfg
    width = math.sqrt(active_parameters(k3) / (12 * cfg.num_hidden_layers))
    heads = max(1, round(width / 64))
    return GPT2Config(
        vocab_size=cfg.vocab_size,
        hidden_size=64 * heads,
        num_hidden_layers=cfg.num_hidden_layers,
        num_attention_heads=heads,
        max_position_embeddings=positions,
    )


# ---------------------------------------------------------------------- measuring


def decode(options: Options, models: dict[str, Contender], length: int, vocab: int) -> dict[str, list[float]]:
    """Seconds a token of each model in each round, at this length."""
    states = {name: model.state(length) for name, model in models.items()}
    ids = torch.randint(0, vocab, (1, 1))

    def run(name: str) -> Callable[[], None]:
        return lambda: [models[name].step(ids, states[name]) for _ in range(options.tokens)]  # type: ignore[arg-type, return-value, func-returns-value]

    seconds = harness.rounds({name: run(name) for name in models}, options.rounds, options.clock())
    return {name: [t / options.tokens for t in times] for name, times in seconds.items()}


class Prompts:
    """Reads one prompt of each length with each model, as long as the next is expected to stay within the limit."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.before: dict[str, list[tuple[int, float]]] = {}

    def seconds(self, name: str, model: Contender, length: int, vocab: int) -> float | None:
        if self.expected(name, length) > self.options.limit:
            return None
        ids = torch.randint(0, vocab, (1, length))
        clock = self.options.clock()
        if name not in self.before:
            model.prefill(ids)  # warms up
        start = clock()
        model.prefill(ids)
        taken = clock() - start
        self.before.setdefault(name, []).append((length, taken))
        return taken

    def expected(self, name: str, length: int) -> float:
        """By the power of the length that the last two took, at least linear."""
        known = self.before.get(name, [])
        if not known:
            return 0.0
        power = 1.0
        if len(known) > 1:
            (n1, t1), (n2, t2) = known[-2:]
            power = max(1.0, math.log(t2 / t1) / math.log(n2 / n1))
        return known[-1][1] * (length / known[-1][0]) ** power


# ---------------------------------------------------------------------- what it says


@dataclass(frozen=True)
class Line:
    """Decoding time over context: milliseconds at none, and more for each 1,024 tokens."""

    start: float
    slope: float

    @classmethod
    def through(cls, lengths: list[int], ms: list[float]) -> Line:
        # Relative errors count, or the longest lengths would decide alone.
        slope, start = np.polyfit([n / 1024 for n in lengths], ms, 1, w=[1 / t for t in ms])
        return cls(float(start), float(slope))

    def crosses(self, other: Line) -> float | None:
        """The length from which this line is below the other; None if it never is, 0 if it always is."""
        if self.start <= other.start:
            return 0.0 if self.slope <= other.slope else None
        return 1024 * (self.start - other.start) / (other.slope - self.slope) if other.slope > self.slope else None


def report(rows: list[harness.Record]) -> dict[str, object]:
    """The lines, the crossover in decoding, and the first prompt that K3 reads faster."""
    lines = {}
    for name in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == name]
        lines[name] = Line.through([row["tokens"] for row in own], [row["decode_ms"] for row in own])
        print(f"{name:9s} decodes in {lines[name].start:.2f} ms + {lines[name].slope:.4f} ms for every 1,024 tokens")
    at = lines[K3_NAME].crosses(lines[GPT_NAME])
    says = "never" if at is None else "at every length" if at == 0 else f"from {at:,.0f} tokens on"
    print(f"K3 decodes faster than GPT-2 {says}")
    prompts = {(row["model"], row["tokens"]): row["prefill_us_per_token"] for row in rows}
    both = [n for (name, n), us in prompts.items() if name == K3_NAME and us and prompts.get((GPT_NAME, n))]
    faster = [n for n in both if prompts[K3_NAME, n] < prompts[GPT_NAME, n]]
    print(f"K3 reads prompts faster than GPT-2 at {faster or 'none'} of the lengths {both}")
    return {
        "lines": {name: vars(line) for name, line in lines.items()},
        "decode_crossover": at,
        "prompts_faster": faster,
    }


@torch.no_grad()
def main(options: Options) -> None:
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    models, prompts, table = contenders(options), Prompts(options), harness.Table()
    k3, gpt = models[K3_NAME], models[GPT_NAME]
    assert isinstance(k3, OfK3) and isinstance(gpt, OfGPT2)
    cfg, vocab = k3.model.cfg, k3.model.cfg.vocab_size
    print(harness.machine_line(options.threads) + (", CPU time" if options.cpu_time else ", clock"))
    print(
        f"K3: {cfg.num_hidden_layers} layers, {cfg.hidden_size} wide, {active_parameters(k3.model):,} active in layers"
    )
    print(f"GPT-2: {gpt.model.cfg.num_hidden_layers} layers, {gpt.model.cfg.hidden_size} wide; float32 throughout")
    for length in options.lengths:
        times = decode(options, models, length, vocab)
        rows = []
        for name, model in models.items():
            read = prompts.seconds(name, model, length, vocab)
            if read is None:
                print(f"{name}: a prompt of {length:,} would take over {options.limit:.0f} s: left out")
            rows.append(
                {
                    "model": name,
                    "tokens": length,
                    "decode_ms": 1e3 * median(times[name]),
                    "spread_ms": 1e3 * harness.spread(times[name]),
                    "held_MB": model.nbytes / 1e6,
                    "prefill_us_per_token": None if read is None else 1e6 * read / length,
                    "load": os.getloadavg()[0],
                }
            )
        table.add(rows)
        harness.write_json(options.json, table.records, options)
    harness.write_json(options.json, table.records, options, **report(table.records))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
