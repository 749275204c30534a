"""The container: what is written comes back by another reader, bit for bit; MXFP4 only changes places."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf_reader import read_gguf

from nanok3.model.mxfp4 import dequantize_mxfp4, quantize_mxfp4
from nanok3.quant.gguf import BF16, F32, MXFP4, GGUFTensor, file_size, header, mxfp4_blocks, write_gguf

KEYS = {
    "a.bool": True,
    "a.count": 2**32 - 1,
    "a.factor": -0.5,
    "a.text": "çà 漢字",
    "a.list": [0, -1, 2**31 - 1],
    "a.words": ["", "x y", "ü"],
}


def test_keys_and_tensors_come_back(tmp_path: Path) -> None:
    values = torch.randn(3, 5)
    parts = {
        "odd": GGUFTensor("odd", (3, 5), F32, lambda: iter(values)),
        "half": GGUFTensor("half", (15,), BF16, lambda: [values.flatten().bfloat16()]),
        "scalar": GGUFTensor("scalar", (1,), F32, lambda: [torch.tensor([7.0])]),
    }
    seen: list[tuple[int, int]] = []
    with open(tmp_path / "x.gguf", "wb") as file:
        size = write_gguf(file, KEYS, list(parts.values()), lambda done, total: seen.append((done, total)))
    assert size == (tmp_path / "x.gguf").stat().st_size == file_size(header(KEYS, list(parts.values())), parts.values())
    assert seen[-1] == (size, size) and len(seen) == 3
    read = read_gguf(tmp_path / "x.gguf")
    assert read.keys == KEYS
    assert torch.equal(read.tensors["odd"], values.double())
    assert torch.equal(read.tensors["half"], values.flatten().bfloat16().double())
    assert read.tensors["scalar"].item() == 7


def test_mxfp4_blocks_hold_the_same_values(tmp_path: Path) -> None:
    packed, scale = quantize_mxfp4(torch.randn(2, 3, 96) * torch.logspace(-3, 3, 3)[:, None])
    tensor = GGUFTensor("w", (2, 3, 96), MXFP4, lambda: [mxfp4_blocks(packed, scale)])
    assert tensor.nbytes == 2 * 3 * 3 * 17
    with open(tmp_path / "x.gguf", "wb") as file:
        write_gguf(file, {}, [tensor])
    read = read_gguf(tmp_path / "x.gguf")
    assert torch.equal(read.tensors["w"], dequantize_mxfp4(packed, scale, torch.float64))


@pytest.mark.parametrize("n", [2, 4])
def test_a_tensor_of_another_size_than_announced_is_a_bug(n: int, tmp_path: Path) -> None:
    tensor = GGUFTensor("x", (3,), F32, lambda: [torch.zeros(n)])
    with open(tmp_path / "x.gguf", "wb") as file, pytest.raises(AssertionError, match="announced were 12"):
        write_gguf(file, {}, [tensor])
