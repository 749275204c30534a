"""The vision tower beside that of transformers, and the preparation of pictures: patches and pictures a second.

    python bench/vision.py                              the tower of the preset vision-small, forward and with gradients
    python bench/vision.py --width 1024 --layers 2      two blocks of the release's
    python bench/vision.py --dtype bfloat16             weights, pixels and all between them in bf16

    ours              nanok3/model/moonvit.py
    transformers      `Kimi_K25VisionModel` with SDPA, which it takes by itself: the tower of the model before K3. It
                      has the same products and attention, but LayerNorm, biases and bicubic positions

Three mixes: the pictures of a training batch (small, of many sizes, most sizes more than once), photographs of all
kinds of sizes, and one large picture. Each contender gets the same patches and grids in one call. As in training, the C
library keeps freed memory, which helps both. The two towers have other weights, so that their features are not
compared; ours are held to the official values by the tests.

Preparing means all that lies between the bytes of a PNG and the patches; what decoding takes of it stands beside.
"""

from __future__ import annotations

import importlib
import io
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import harness
import peers
import torch
import tyro
from PIL import Image
from torch import Tensor, nn

from nanok3.config import K3Config
from nanok3.data import images
from nanok3.model.moonvit import MoonViT
from nanok3.train.machine import keep_freed_memory


@dataclass
class Options(harness.Options):
    width: int = 192
    layers: int = 4
    dtype: Literal["float32", "bfloat16"] = "float32"
    backward: bool = True
    """Also time forward and backward together."""
    prepare: bool = True
    """Also time the preparation of pictures."""
    json: Path = Path("runs/bench/vision.json")


Grid = tuple[int, int, int]
Look = Callable[[Tensor, Tensor], Tensor]


def mixes() -> dict[str, list[Grid]]:
    """Grids in patches, the same in every run."""
    draw = random.Random(0)
    small = [(1, 2 * draw.randint(2, 3), 2 * draw.randint(2, 5)) for _ in range(60)]
    photographs = [(1, 2 * draw.randint(6, 20), 2 * draw.randint(6, 20)) for _ in range(6)]
    return {"60 small pictures": small, "6 photographs": photographs, "1 of 48 x 48": [(1, 48, 48)]}


def our_tower(options: Options) -> tuple[nn.Module, Look]:
    width = options.width
    changes = {"vt_hidden_size": width, "mm_hidden_size": width, "qkv_hidden_size": width}
    changes |= {"vt_num_hidden_layers": options.layers, "vt_intermediate_size": 4 * width}
    cfg = replace(K3Config.vision_small(), **changes, vt_num_attention_heads=width // 32)
    tower = MoonViT(replace(cfg, init_pos_emb_height=64, init_pos_emb_width=64))
    return tower, lambda pixels, grids: tower(pixels, grids)


def their_tower(options: Options) -> tuple[nn.Module, Look]:
    transformers = peers.ensure("transformers")
    sys.path += [str(path) for path in transformers.python.parents[1].glob("lib/python*/site-packages")]
    module = importlib.import_module("transformers.models.kimi_k25.modeling_kimi_k25")
    sizes = {"hidden_size": options.width, "num_hidden_layers": options.layers}
    sizes |= {"intermediate_size": 4 * options.width, "num_attention_heads": options.width // 32}
    tower = module.Kimi_K25VisionModel._from_config(module.Kimi_K25VisionConfig(**sizes), attn_implementation="sdpa")
    return tower, lambda pixels, grids: tower(pixels, grids).pooler_output


def towers(options: Options, table: harness.Table) -> None:
    looks = {"ours": our_tower(options)}
    try:
        looks["transformers"] = their_tower(options)
    except peers.Unavailable as reason:
        print(f"transformers is left out: {reason}")
    dtype = getattr(torch, options.dtype)
    for tower, _ in looks.values():
        tower.to(dtype)
    for name, grids in mixes().items():
        thw = torch.tensor(grids)
        patches = int(thw.prod(dim=1).sum())
        torch.manual_seed(0)
        pixels = torch.randn(patches, 3, 14, 14).to(dtype)
        ways = {"forward": _forward, "with gradients": _both} if options.backward else {"forward": _forward}
        for way, run in ways.items():
            contenders = {who: partial(run, *each, pixels, thw) for who, each in looks.items()}
            seconds = harness.rounds(contenders, options.rounds, options.clock())
            table.add(
                harness.rows_of(f"{name}, {way}, {options.dtype}", seconds, "ours", partial(_rate, "patches", patches))
            )


def _rate(what: str, count: int, _contender: str, seconds: float) -> harness.Record:
    return {what: count, f"{what}/s": round(count / seconds, 1)}


def _forward(tower: nn.Module, look: Look, pixels: Tensor, grids: Tensor) -> None:
    with torch.no_grad():
        look(pixels, grids)


def _both(tower: nn.Module, look: Look, pixels: Tensor, grids: Tensor) -> None:
    look(pixels, grids).square().mean().backward()
    tower.zero_grad()


def preparation(options: Options, table: harness.Table) -> None:
    """Whole, and what of it decoding takes."""
    for width, height, count in ((70, 56, 40), (640, 480, 6), (3000, 2000, 1)):
        content = _png(width, height)
        contenders = {
            "preprocess_image": partial(_times, count, images.preprocess_image, content),
            "decoding alone": partial(_times, count, _decode, content),
        }
        seconds = harness.rounds(contenders, options.rounds, options.clock())
        case = f"PNG of {width} x {height}"
        table.add(harness.rows_of(case, seconds, "preprocess_image", partial(_rate, "pictures", count)))


def _png(width: int, height: int) -> bytes:
    """A picture that is neither flat nor noise."""
    small = width // 4, height // 4
    colours = Image.frombytes("RGB", small, random.Random(1).randbytes(small[0] * small[1] * 3))
    file = io.BytesIO()
    colours.resize((width, height), Image.Resampling.BICUBIC).save(file, format="PNG")
    return file.getvalue()


def _times(count: int, form: Callable[[bytes], object], content: bytes) -> None:
    for _ in range(count):
        form(content)


def _decode(content: bytes) -> None:
    Image.open(io.BytesIO(content)).convert("RGB").load()


def main(options: Options) -> None:
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    print(harness.machine_line(options.threads))
    began = time.perf_counter()
    seen, prepared = harness.Table(), harness.Table()
    towers(options, seen)
    if options.prepare:
        preparation(options, prepared)
    harness.write_json(options.json, seen.records + prepared.records, options)
    print(f"{options.json} after {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
