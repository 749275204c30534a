"""The tower and projector against the official code's numbers, and the ways public ports got them wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from nanok3.config import K3Config
from nanok3.data.images import patchify
from nanok3.model import moonvit
from nanok3.model.decoder import K3
from nanok3.model.moonvit import MoonViT, Projector, read_grids, resize_table, rows_per_item

FIXTURES = Path(__file__).parent.parent / "fixtures" / "vision"
CASES = ["table_grid", "smaller", "minimal", "larger", "one_side_equal", "t2", "t3", "t4_table", "batch"]


@pytest.fixture(scope="module")
def cfg():
    return K3Config.from_json(FIXTURES / "model")


@pytest.fixture(scope="module")
def expected():
    return load_file(FIXTURES / "expected.safetensors")


@pytest.fixture(scope="module")
def weights():
    return load_file(FIXTURES / "model" / "model.safetensors")


def build(cfg, weights, dtype):
    """Tower and projector, made without memory, then given the stored tensors under their names."""
    with torch.device("meta"):
        tower, projector = MoonViT(cfg), Projector(cfg)
    for module, prefix in ((tower, "vision_tower."), (projector, "mm_projector.")):
        stored = {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}
        module.load_state_dict({name: w.to(dtype) for name, w in stored.items()}, strict=True, assign=True)
    return tower, projector


def inputs(expected, case, dtype):
    return expected[f"{case}.pixel_values"].to(dtype), expected[f"{case}.grid_thw"]


def largest(a, b):
    return (a.double() - b.double()).abs().max().item()


# ------------------------------------------------------------------ equal to the official code


@pytest.mark.parametrize("case", CASES)
def test_float64_equals_the_official_values(cfg, weights, expected, case):
    tower, projector = build(cfg, weights, torch.float64)
    merged = tower(*inputs(expected, case, torch.float64))
    assert merged.dtype == torch.float64
    assert largest(merged, expected[f"{case}.merged"]) < 1e-9
    assert largest(projector(merged), expected[f"{case}.features"]) < 1e-9


@pytest.mark.parametrize("case", ["table_grid", "t3"])
def test_every_stage_equals_the_official_values(cfg, weights, expected, case):
    tower, _ = build(cfg, weights, torch.float64)
    stages = {"patch_embed": tower.patch_embed, "final_layernorm": tower.encoder.final_layernorm}
    stages |= {f"block.{b:02d}": block for b, block in enumerate(tower.encoder.blocks)}
    seen = {}
    for name, module in stages.items():
        module.register_forward_hook(lambda _m, _i, out, name=name: seen.update({name: out}))
    tower(*inputs(expected, case, torch.float64))
    assert len(seen) == 2 + cfg.vt_num_hidden_layers
    for name, value in seen.items():
        assert largest(value, expected[f"{case}.{name}"]) < 1e-9, name


@pytest.mark.parametrize("case", CASES)
def test_float32_stays_within_5e5(cfg, weights, expected, case):
    tower, projector = build(cfg, weights, torch.float32)
    features = projector(tower(*inputs(expected, case, torch.float32)))
    assert features.dtype == torch.float32
    assert largest(features, expected[f"{case}.features"]) < 5e-5


@pytest.mark.parametrize("masters", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("case", CASES)
def test_bfloat16_stays_within_three_percent(cfg, weights, expected, case, masters):
    tower, projector = build(cfg, weights, masters)
    features = projector(tower(*inputs(expected, case, torch.bfloat16)))
    truth = expected[f"{case}.features"]
    assert features.dtype == torch.bfloat16
    assert (features.double() - truth).norm() < 0.03 * truth.norm()


@pytest.mark.parametrize("case", CASES)
def test_rows_per_item(cfg, expected, case):
    rows = rows_per_item(expected[f"{case}.grid_thw"], cfg.merge_kernel_size)
    assert rows == expected[f"{case}.tokens_per_item"].tolist()


# ------------------------------------------------------------------ packing


def test_a_packed_mix_equals_its_items_one_by_one(cfg, weights, expected):
    tower, _ = build(cfg, weights, torch.float64)
    pixels, grids = inputs(expected, "batch", torch.float64)
    patches = pixels.split(grids.prod(dim=1).tolist())
    alone = torch.cat([tower(p, grid[None]) for p, grid in zip(patches, grids, strict=True)])
    torch.testing.assert_close(tower(pixels, grids), alone, rtol=0, atol=1e-12)


def test_items_do_not_see_their_neighbours(cfg, weights, expected):
    tower, _ = build(cfg, weights, torch.float64)
    pixels, grids = inputs(expected, "batch", torch.float64)
    clean = tower(pixels, grids).split(rows_per_item(grids, cfg.merge_kernel_size))
    starts = [0, *grids.prod(dim=1).cumsum(0).tolist()]
    for poisoned in range(len(grids)):
        dirty_pixels = pixels.clone()
        dirty_pixels[starts[poisoned] : starts[poisoned + 1]] = float("nan")
        dirty = tower(dirty_pixels, grids).split(rows_per_item(grids, cfg.merge_kernel_size))
        for item in range(len(grids)):
            if item == poisoned:
                assert dirty[item].isnan().all()
            else:
                torch.testing.assert_close(dirty[item], clean[item], rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_attention_runs_where_only_the_linear_memory_kernel_is_allowed(cfg, weights, expected, dtype):
    tower, _ = build(cfg, weights, dtype)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        tower(*inputs(expected, "batch", dtype)).sum().backward()


# ------------------------------------------------------------------ mistakes that others made


def rows_first(make):
    def turned(grid, head_width, like):
        t, h, w = grid
        pairs = make((t, h, w), head_width, like).unflatten(-1, (-1, 2))
        return pairs.flip(-1).flatten(-2)

    return turned


def halves_paired(x, turn):
    """Channel i with channel i + K/2 instead of its neighbour."""
    a, b = x.chunk(2, dim=-1)
    turned = torch.complex(a, b) * turn[:, None]
    return torch.cat([turned.real, turned.imag], dim=-1)


def time_for_one_frame(place):
    def positions(table, grid):
        out = place(table, grid)
        return out + moonvit.frame_sinusoid(1, table.shape[-1], table) if grid[0] == 1 else out

    return positions


def sum_over_frames(merge):
    return lambda x, grid, kernel: grid[0] * merge(x, grid, kernel)


def antialiased(table, height, width):
    image = table.permute(2, 0, 1)[None]
    return F.interpolate(image, (height, width), mode="bilinear", antialias=True)[0].permute(1, 2, 0)


def corners_aligned(table, height, width):
    image = table.permute(2, 0, 1)[None]
    return F.interpolate(image, (height, width), mode="bilinear", align_corners=True)[0].permute(1, 2, 0)


MUTATIONS = {
    "rows before columns": ("turns", rows_first(moonvit.turns), "table_grid"),
    "channels paired by halves": ("rotate", halves_paired, "table_grid"),
    "time added to a picture": ("positions", time_for_one_frame(moonvit.positions), "table_grid"),
    "sum over frames": ("merge_patches", sum_over_frames(moonvit.merge_patches), "t3"),
    "table smoothed": ("resize_table", antialiased, "smaller"),
    "table corners aligned": ("resize_table", corners_aligned, "larger"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_known_mistake_would_be_seen(cfg, weights, expected, monkeypatch, name):
    function, mistaken, case = MUTATIONS[name]
    tower, _ = build(cfg, weights, torch.float64)
    monkeypatch.setattr(moonvit, function, mistaken)
    assert largest(tower(*inputs(expected, case, torch.float64)), expected[f"{case}.merged"]) > 1e-4


def test_the_two_kinds_of_gelu_are_told_apart(cfg, weights, expected, monkeypatch):
    tower, projector = build(cfg, weights, torch.float64)
    projector.proj[1] = nn.GELU(approximate="tanh")
    merged = tower(*inputs(expected, "table_grid", torch.float64))
    assert largest(projector(merged), expected["table_grid.features"]) > 1e-7
    exact = F.gelu
    monkeypatch.setattr(F, "gelu", lambda x, approximate: exact(x))
    assert largest(tower(*inputs(expected, "table_grid", torch.float64)), expected["table_grid.merged"]) > 1e-7


def test_the_norm_epsilon_is_the_float32_one(cfg, weights, expected):
    tower, _ = build(cfg, weights, torch.float64)
    assert {m.eps for m in tower.modules() if hasattr(m, "eps")} == {torch.finfo(torch.float32).eps}
    for module in tower.modules():
        if hasattr(module, "eps"):
            module.eps = 2.0**-7
    assert largest(tower(*inputs(expected, "table_grid", torch.float64)), expected["table_grid.merged"]) > 1e-4


def test_a_grid_of_the_tables_size_takes_the_table_itself():
    table = torch.randn(6, 8, 4)
    assert resize_table(table, 6, 8) is table
    assert resize_table(table, 8, 6).shape == (8, 6, 4)


def test_nothing_is_stored_besides_the_official_tensors(cfg, weights, expected):
    """A time table kept as a buffer may stay behind in another dtype; moving the tower moves everything."""
    tower, projector = build(cfg, weights, torch.bfloat16)
    assert not list(tower.buffers()) and not list(projector.buffers())
    merged = tower.double()(*inputs(expected, "t3", torch.float64))
    assert largest(merged, expected["t3.merged"]) < 1e-9


# ------------------------------------------------------------------ learning


@pytest.mark.parametrize("case", ["batch", "table_grid"])
def test_gradients_reach_every_parameter(cfg, weights, expected, case):
    tower, projector = build(cfg, weights, torch.float64)
    features = projector(tower(*inputs(expected, case, torch.float64)))
    features.square().mean().backward()
    for name, parameter in [*tower.named_parameters(), *projector.named_parameters()]:
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


def test_the_gradient_is_the_slope(cfg, weights, expected):
    tower, projector = build(cfg, weights, torch.float64)
    pixels, grids = inputs(expected, "batch", torch.float64)

    def loss():
        return projector(tower(pixels, grids)).square().mean()

    generator = torch.Generator().manual_seed(0)
    step = 1e-6
    for parameter in (tower.patch_embed.pos_emb.weight, tower.encoder.blocks[0].wqkv.weight):
        parameter.grad = None
        loss().backward()
        way = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            parameter += step * way
            above = loss()
            parameter -= 2 * step * way
            below = loss()
            parameter += step * way
        slope = (parameter.grad * way).sum()
        torch.testing.assert_close((above - below) / (2 * step), slope, rtol=1e-5, atol=1e-9)


def test_initialization(cfg):
    """A matrix begins by what goes in, and the table of places with 0.1, whatever the deviation of the text is; only
    the size of the rows follows that."""
    torch.manual_seed(0)
    for module in (MoonViT(cfg), Projector(cfg)):
        for name, parameter in module.named_parameters():
            if parameter.dim() == 1:
                size = cfg.initializer_range if name == "post_norm.weight" else 1.0
                assert torch.equal(parameter, torch.full_like(parameter, size)), name
            else:
                inputs = 100 if "pos_emb" in name else parameter[0].numel()
                assert parameter.std().item() == pytest.approx(inputs**-0.5, rel=0.1), name


# ------------------------------------------------------------------ the release


def test_the_release_builds_without_memory_and_has_the_official_size():
    with torch.device("meta"):
        tower, projector = MoonViT(K3Config.k3()), Projector(K3Config.k3())
    assert sum(p.numel() for p in tower.parameters()) == 401_214_464
    assert sum(p.numel() for p in projector.parameters()) == 46_144_512
    shapes = {name: list(p.shape) for name, p in [*tower.state_dict().items(), *projector.state_dict().items()]}
    assert len(shapes) == 168
    official = {
        "patch_embed.proj.weight": [1024, 3, 14, 14],
        "patch_embed.pos_emb.weight": [64, 64, 1024],
        "encoder.blocks.26.norm0.weight": [1024],
        "encoder.blocks.26.norm1.weight": [1024],
        "encoder.blocks.26.wqkv.weight": [4608, 1024],
        "encoder.blocks.26.wo.weight": [1024, 1536],
        "encoder.blocks.26.mlp.fc0.weight": [4096, 1024],
        "encoder.blocks.26.mlp.fc1.weight": [1024, 4096],
        "encoder.final_layernorm.weight": [1024],
        "proj.0.weight": [4096, 4096],
        "proj.2.weight": [7168, 4096],
        "post_norm.weight": [7168],
    }
    assert {name: shapes[name] for name in official} == official


# ------------------------------------------------------------------ before training


def square(level: tuple[int, int, int]) -> torch.Tensor:
    """The patches of a square on white paper."""
    levels = np.full((56, 56, 3), 255, np.uint8)
    levels[20:44, 12:36] = level
    return patchify(levels)


@pytest.mark.parametrize("width", [64, 192])
def test_a_new_tower_works_on_its_patches_at_any_width(width):
    """With the text's 0.02 everywhere a block would add a tenth of the stream at width 64, and the text would get rows
    fifty times as large as its own."""
    tower = {"vt_hidden_size": width, "qkv_hidden_size": width, "mm_hidden_size": width, "vt_num_attention_heads": 2}
    torch.manual_seed(0)
    model = K3(replace(K3Config.vision_tiny(), **tower, vt_intermediate_size=4 * width))
    grown = []
    for block in model.vision_tower.encoder.blocks:
        block.register_forward_hook(lambda _, old, new: grown.append(float((new - old[0]).norm() / old[0].norm())))
    pictures = torch.cat([square((220, 40, 40)), square((50, 85, 225))])
    with torch.no_grad():
        red, blue = model.vision(pictures, torch.tensor([[1, 4, 4], [1, 4, 4]])).split(4)
    assert len(grown) == 2 and all(0.4 < ratio < 2 for ratio in grown)
    assert float(red.pow(2).mean().sqrt()) == pytest.approx(0.02, rel=0.01)  # as the text's embeddings
    assert float((red - blue).norm() / red.norm()) > 0.4


# ------------------------------------------------------------------ mistakes of a user


@pytest.mark.parametrize(
    ("grid", "patches", "message"),
    [
        ([[1, 3, 4]], 12, r"grid_thw\[0\] is 3 x 4 patches"),
        ([[1, 2, 2], [1, 4, 5]], 24, r"grid_thw\[1\] is 4 x 5 patches"),
        ([[1, 0, 2]], 0, r"grid_thw\[0\] is 0 x 2 patches"),
        ([[1, -2, -2]], 4, r"grid_thw\[0\] is -2 x -2 patches"),
        ([[5, 2, 2]], 20, r"t = 5 frames; allowed: 1 to 4"),
        ([[0, 2, 2]], 0, r"t = 0 frames; allowed: 1 to 4"),
        ([[1, 2, 2], [2, 2, 4]], 8, r"2 items of 20 patches in all, pixel_values holds 8"),
        ([], 4, r"shape \(0,\)"),
        ([1, 2, 2], 4, r"shape \(3,\)"),
        ([[1.0, 2.0, 2.0]], 4, r"torch.float32"),
    ],
)
def test_wrong_grids_are_refused(grid, patches, message):
    with pytest.raises(ValueError, match=message):
        read_grids(torch.tensor(grid), patches, merge=(2, 2), frames=4)


def test_no_item_at_all_is_refused():
    with pytest.raises(ValueError, match="0 items of 0 patches"):
        read_grids(torch.empty(0, 3, dtype=torch.int64), 0, merge=(2, 2), frames=4)


def test_patches_of_another_size_are_refused(cfg):
    with pytest.raises(ValueError, match=r"\(3, 16, 16\); expected \(3, 14, 14\)"):
        MoonViT(cfg)(torch.zeros(4, 3, 16, 16), torch.tensor([[1, 2, 2]]))
