"""Decoding side by side: the whole stack in one native call, and torch operator by operator.

    python bench/decode.py --batches 1 8 32 --depths 0 512 2048
    python bench/decode.py --model FOLDER

The folder is a checkpoint in the official layout, by default a random one that is made once (bench/random_k3.py), read
as it is stored unless --dtype says otherwise. Both contenders
start from the same states, which have read `depth` random tokens, and read the same tokens on; a step is one token of
every sequence with the logits of all. Before anything is timed their logits are compared.

The last columns are for ours: the bytes that a step has to read (weights once, of the experts those that so many rows
choose on average; states read and written; latents), the rate that follows, and its share of the read bandwidth
measured in the same run. A step that computes more than it reads (large batches) is not bound by that limit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import random_k3
import torch
import tyro
from harness import Options as SharedOptions
from harness import Table, machine_line, must_agree, rounds, rows_of, write_json
from torch import Tensor

from nanok3.kernels import roofline
from nanok3.model.cache import ModelState
from nanok3.model.decoder import K3
from nanok3.model.latent_moe import Experts, PackedExperts
from nanok3.model.native_decode import NativeDecoder
from nanok3.model.weights import load

MADE = Path("runs/bench/models/bench-s")
PREFILL = 256
"""Tokens read at once on the way to a depth."""


@dataclass
class Options(SharedOptions):
    model: Path | None = None
    dtype: Literal["stored", "float32"] = "stored"
    batches: list[int] = field(default_factory=lambda: [1, 8, 32])
    depths: list[int] = field(default_factory=lambda: [0, 512, 2048])
    steps: int = 16
    """Native steps in a round; torch takes a quarter of them, and times are per step."""
    json: Path = Path("runs/bench/decode.json")


def step_bytes(model: K3, batch: int, depth: int) -> float:
    """Bytes that one step of `batch` sequences has to move."""
    cfg = model.cfg
    chosen = 1 - (1 - cfg.num_experts_per_token / cfg.num_experts) ** batch  # share of the experts anyone wants
    total = 0.0
    for module in model.modules():
        share = chosen if isinstance(module, (Experts, PackedExperts)) else 1.0
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        total += share * sum(x.nbytes for x in own)
    table = model.model.embed_tokens.weight
    unread = table.nbytes - batch * table[0].nbytes
    vision = sum(x.nbytes for x in [*model.parameters()]) - _language_bytes(model)
    kda = cfg.kinds.count("kda") * cfg.kda_num_heads * cfg.kda_head_dim**2 * 4 * 2
    latents = cfg.kinds.count("mla") * cfg.latent_cache_size * table.element_size() * depth
    return total - unread - vision + batch * (kda + latents)


def _language_bytes(model: K3) -> int:
    return sum(x.nbytes for part in (model.model, model.lm_head) for x in part.parameters())


def state_at(model: K3, batch: int, depth: int, generator: torch.Generator) -> ModelState:
    state = model.new_state(batch)
    for start in range(0, depth, PREFILL):
        ids = torch.randint(model.cfg.vocab_size, (batch, min(PREFILL, depth - start)), generator=generator)
        model.hidden_states(ids, state=state)
    return state


def torch_step(model: K3, ids: Tensor, state: ModelState) -> Tensor:
    return model(ids, state=state).logits[:, -1]


def contenders(decoder: NativeDecoder, state: ModelState, ids: Tensor, steps: int) -> dict[str, Callable[[], None]]:
    """Each goes on from a copy of the state in every round."""
    ours, theirs = state.clone(), state.clone()

    def native() -> None:
        for _ in range(steps):
            decoder.step_state(ids, ours)

    def by_torch() -> None:
        for _ in range(max(1, steps // 4)):
            torch_step(decoder.model, ids, theirs)

    return {"native": native, "torch": by_torch}


def check_equal(decoder: NativeDecoder, state: ModelState, ids: Tensor) -> None:
    """In float32 the two differ by rounding; in bf16, where torch rounds every result, by much more."""
    ours, theirs = decoder.step_state(ids, state.clone()).logits, torch_step(decoder.model, ids, state.clone()).float()
    bound = 1e-3 if state.layers[0].layout[-1] == decoder.model.lm_head.weight.dtype == torch.float32 else 1.0
    must_agree("the native step", ((ours - theirs).norm() / theirs.norm()).item(), bound)


@torch.no_grad()
def main(options: Options) -> None:
    torch.set_num_threads(options.threads)
    clock = options.clock()
    folder = options.model or MADE
    if options.model is None:
        random_k3.write("bench-s", folder)
    model = load(folder, dtype=torch.float32 if options.dtype == "float32" else None)
    decoder = NativeDecoder.of(model)
    if isinstance(decoder, str):
        raise SystemExit(f"no native decoding: {decoder}")
    bandwidth = roofline.read_bandwidth(options.threads, clock)
    assert bandwidth is not None
    print(machine_line(options.threads))
    print(f"reading memory: {bandwidth / 1e9:.1f} GB/s; {folder.name}, weights {options.dtype}")
    generator, table = torch.Generator().manual_seed(0), Table()
    for depth in options.depths:
        for batch in options.batches:
            state = state_at(model, batch, depth, generator)
            ids = torch.randint(model.cfg.vocab_size, (batch, 1), generator=generator)
            check_equal(decoder, state, ids)
            seconds = rounds(contenders(decoder, state, ids, options.steps), options.rounds, clock)
            each = {"native": options.steps, "torch": max(1, options.steps // 4)}
            per_step = {name: [s / each[name] for s in times] for name, times in seconds.items()}
            moved = step_bytes(model, batch, depth)

            def more(name: str, median: float, batch: int = batch, moved: float = moved) -> dict[str, object]:
                rate = moved / median if name == "native" else None
                return {
                    "tokens_per_s": batch / median,
                    "MB_per_step": moved / 1e6 if rate else None,
                    "GB_per_s": rate / 1e9 if rate else None,
                    "of_bandwidth": rate / bandwidth if rate else None,
                }

            table.add(rows_of(f"batch {batch} depth {depth}", per_step, "native", more))
    write_json(options.json, table.records, options, read_bandwidth=bandwidth)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
