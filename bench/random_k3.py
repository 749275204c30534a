"""A K3 of random weights in the official layout, on which all inference engines are measured: equal names, equal bytes.

    python bench/random_k3.py --preset bench-s --out runs/bench/bench-s

    tiny       5 layers,   64 wide, 1 M parameters            for tests
    bench-s   12 layers,  512 wide, 133 M, 56 M used a token
    bench-m   24 layers, 1024 wide, 960 M, 420 M used a token

Matrices are N(0, 1/inputs), so that a signal keeps its size; norms are near 1; gates spread over slow and fast decay;
nothing is zero. Random experts are chosen nearly evenly, as balanced ones are. Experts are stored packed in MXFP4; an
engine that wants other types converts the same values, exactly.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import tyro
from safetensors.torch import save_file
from torch import Tensor

from nanok3.config import K3Config, with_expert_format
from nanok3.model.mxfp4 import quantize_mxfp4
from nanok3.model.weights import INDEX, DiskTensor, disk_tensors

Preset = Literal["tiny", "bench-s", "bench-m"]


@dataclass
class Options:
    preset: Preset = "bench-s"
    out: Path = Path("runs/bench/bench-s")
    seed: int = 0


class Shape(NamedTuple):
    """What tells the presets apart."""

    depth: int
    width: int
    heads: int
    dim: int
    q: int
    kv: int
    experts: int
    top: int
    inner: int
    dense: int
    block: int
    vocab: int


SHAPES = {
    "tiny": Shape(5, 64, 2, 32, q=32, kv=32, experts=8, top=2, inner=32, dense=128, block=2, vocab=512),
    "bench-s": Shape(12, 512, 8, 64, q=192, kv=128, experts=32, top=4, inner=256, dense=2048, block=4, vocab=32768),
    "bench-m": Shape(24, 1024, 16, 128, q=384, kv=256, experts=64, top=8, inner=256, dense=4096, block=6, vocab=32768),
}


def config(preset: Preset) -> K3Config:
    """Every fourth layer is MLA, and so is the last."""
    s = SHAPES[preset]
    full = tuple(l for l in range(1, s.depth + 1) if l % 4 == 0 or l == s.depth)
    cfg = K3Config(
        vocab_size=s.vocab,
        hidden_size=s.width,
        num_hidden_layers=s.depth,
        intermediate_size=s.dense,
        attn_res_block_size=s.block,
        kda_layers=tuple(l for l in range(1, s.depth + 1) if l not in full),
        full_attn_layers=full,
        kda_num_heads=s.heads,
        kda_head_dim=s.dim,
        num_attention_heads=s.heads,
        num_key_value_heads=s.heads,
        q_lora_rank=s.q,
        kv_lora_rank=s.kv,
        qk_nope_head_dim=s.dim,
        qk_rope_head_dim=s.dim // 2,
        v_head_dim=s.dim,
        num_experts=s.experts,
        num_experts_per_token=s.top,
        num_shared_experts=2,
        moe_intermediate_size=s.inner,
        routed_expert_hidden_size=s.width // 2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return with_expert_format(cfg, "mxfp4")


def draw(name: str, shape: tuple[int, ...], normal: Callable[..., Tensor]) -> Tensor:
    """Values for the tensor of this official name."""
    if name.endswith("A_log"):
        return 0.5 * normal(*shape)
    if name.endswith("dt_bias"):
        return normal(*shape) - 2
    if name.endswith("e_score_correction_bias"):
        return 0.05 * normal(*shape)
    if "norm" in name.rsplit(".", 2)[-2]:
        return 1 + 0.1 * normal(*shape)
    if "conv1d" in name:
        return 0.5 * normal(*shape)
    if "embed_tokens" in name:
        return normal(*shape)
    gain = 1.5 if any(part in name for part in (".mlp.", "shared_experts", ".experts.")) else 1.0
    return gain / math.sqrt(shape[-1]) * normal(*shape)


def shards(tensors: dict[str, DiskTensor]) -> dict[str, list[str]]:
    """The tensors of each layer, and those of no layer, by the part of the name that tells them apart."""
    found: dict[str, list[str]] = {}
    for name in tensors:
        steps = name.split(".")
        found.setdefault(steps[steps.index("layers") + 1] if "layers" in steps else "globals", []).append(name)
    return found


def fill(
    names: list[str], tensors: dict[str, DiskTensor], normal: Callable[..., Tensor], heads: int
) -> dict[str, Tensor]:
    """The stored tensors of one shard."""
    made: dict[str, Tensor] = {}
    for name in names:
        spec = tensors[name]
        if name.endswith("_scale"):
            continue  # comes with its packed half
        if name.endswith("_packed"):
            rows, half = spec.shape
            stem = name.removesuffix("_packed")
            made[name], made[f"{stem}_scale"] = quantize_mxfp4(draw(stem, (rows, 2 * half), normal))
        elif name.endswith("A_log"):
            made[name] = torch.zeros(spec.shape)
            made[name][:heads] = draw(name, (heads,), normal)
        else:
            values = draw(name, spec.shape, normal)
            made[name] = values if spec.dtype == "F32" else values.bfloat16()
    return made


def write(preset: Preset, out: Path, seed: int = 0) -> K3Config:
    """Write the checkpoint, a shard a layer; nothing is done where it already lies."""
    cfg = config(preset)
    done = out / f"{preset}-{seed}.done"
    if done.exists():
        return cfg
    out.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = disk_tensors(cfg, packed=True)
    parts = shards(tensors)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(parts.values(), 1):
        file = f"model-{number:05}-of-{len(parts):05}.safetensors"
        made = fill(names, tensors, lambda *shape: torch.randn(*shape, generator=generator), cfg.kda_num_heads)
        save_file(made, out / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(made, file)
    cfg.to_json(out / "config.json")
    total = sum(spec.nbytes for spec in tensors.values())
    (out / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    done.touch()
    return cfg


def main(options: Options) -> None:
    write(options.preset, options.out, options.seed)
    size = sum(file.stat().st_size for file in options.out.glob("*.safetensors"))
    print(f"{options.out}: {options.preset}, {size:,} bytes")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
