"""Our Triton kernels, and fla-core's through our glue, each in a process where Triton's interpreter is switched on.

They need packages that the project's own environment does not have (triton 1 GB, fla-core): without them this skips,
and what needs no Triton is tested all the same. To run all of it: pip install triton fla-core einops.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nanok3.kernels.gpu import grouped, language, packed, situ_experts, tiles

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


def needs(*packages: str):
    missing = [p for p in packages if importlib.util.find_spec(p) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def run(file: str, **environment: str) -> None:
    """pytest on a file of this folder that it would not collect by itself, without the shape checks on kernels."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-o", "addopts=", str(HERE / file)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@needs("triton")
def test_kernels_under_the_interpreter():
    run("interpreted_kernels.py", TRITON_INTERPRET="1")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@needs("triton", "fla", "einops")
def test_fla_under_the_interpreter():
    run("interpreted_fla.py", TRITON_INTERPRET="1", FLA_DISABLE_BACKEND_DISPATCH="1")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@needs("triton")
def test_kernels_assemble_for_gpus(tmp_path):
    run("compiled_kernels.py", TRITON_CACHE_DIR=str(tmp_path))


# ---------------------------------------------------------------------- without Triton


@pytest.mark.parametrize("counts", [[3, 0, 17, 1], [0, 0, 5], [64, 65, 63], [1], [0] * 9, [16]], ids=str)
@pytest.mark.parametrize("height", [1, 16, 64])
def test_tiles_cover_every_row_once(counts, height):
    rows = sum(counts)
    made = tiles.row_tiles(torch.tensor(counts, dtype=torch.int32), rows, height)
    owners = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).tolist()
    seen = []
    for expert, start in zip(made.expert.tolist(), made.start.tolist()):
        if expert < len(counts):
            mine = range(start, min(start + height, int(made.ends[expert])))
            assert mine and all(owners[row] == expert for row in mine)
            seen += mine
        else:
            assert expert == len(counts)
    assert sorted(seen) == list(range(rows))


def test_the_number_of_tiles_is_known_without_looking_at_the_counts():
    """What the launch needs must not depend on values: on meta tensors there are none."""
    made = tiles.row_tiles(torch.empty(5, dtype=torch.int64, device="meta"), 100, 16)
    assert made.expert.shape == made.start.shape == (11,)


@pytest.mark.parametrize("rows", [1, 16, 17, 1000, 10**6])
@pytest.mark.parametrize("size", [2, 4])
def test_tiles_are_powers_of_two_that_the_tensor_cores_take(rows, size):
    tile = tiles.choose(rows, 8, 3000, 100, size)
    for side in (tile.rows, tile.columns, tile.inner):
        assert side >= 16 and side & (side - 1) == 0
    # What the steps in flight keep in shared memory.
    assert (tile.rows + tile.columns) * tile.inner * size * tile.stages <= 96 * 1024


@pytest.mark.usefixtures("unchecked")
def test_wrong_inputs_are_named():
    counts, z = torch.tensor([2, 1]), torch.zeros(3, 64)
    w1, w2 = torch.zeros(2, 32, 64), torch.zeros(2, 64, 32)
    with pytest.raises(ValueError, match=r"x is torch\.float64; these kernels take float32, bfloat16 and float16"):
        grouped.grouped_linear(z.double(), w1.double(), counts)
    with pytest.raises(ValueError, match=r"w2 is torch\.bfloat16, x is torch\.float32"):
        situ_experts.expert_mlp(z, w1, w2.bfloat16(), w1, counts)
    with pytest.raises(ValueError, match="weight holds 2 experts, counts 3"):
        grouped.grouped_linear(z, w1, torch.tensor([2, 1, 0]))
    with pytest.raises(ValueError, match="packed has 16 bytes a row for 64 columns"):
        packed.packed_linear(
            z, torch.zeros(2, 8, 16, dtype=torch.uint8), torch.zeros(2, 8, 1, dtype=torch.uint8), counts
        )
    with pytest.raises(ValueError, match=r"scale has shape \(2, 8, 1\)"):
        packed.packed_linear(
            z, torch.zeros(2, 8, 32, dtype=torch.uint8), torch.zeros(2, 8, 1, dtype=torch.uint8), counts
        )


def test_no_rows_give_no_rows_and_zero_gradients():
    z, counts = torch.zeros(0, 4, requires_grad=True), torch.tensor([0, 0])
    w1, w2 = torch.ones(2, 6, 4, requires_grad=True), torch.ones(2, 4, 6, requires_grad=True)
    y = situ_experts.expert_mlp(z, w1, w2, w1, counts)
    assert y.shape == (0, 4)
    assert all((g == 0).all() for g in torch.autograd.grad(y.sum(), (w1, w2)))
    assert grouped.grouped_linear(z, w1, counts).shape == (0, 6)


def test_without_triton_the_kernels_can_be_read():
    assert language.available() == (importlib.util.find_spec("triton") is not None)
