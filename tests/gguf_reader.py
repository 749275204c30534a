"""A reader of GGUF files for tests: written from the format's description, not from our writer."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
MAGNITUDES = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


@dataclass
class GGUF:
    """A file in memory: its keys, and its tensors as values in float64, outermost dimension first."""

    keys: dict[str, Any]
    tensors: dict[str, Tensor]
    types: dict[str, int]


class _Cursor:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, letter: str) -> Any:
        (value,) = struct.unpack_from(f"<{letter}", self.data, self.at)
        self.at += struct.calcsize(f"<{letter}")
        return value

    def string(self) -> str:
        length = self.take("Q")
        self.at += length
        return self.data[self.at - length : self.at].decode()

    def value(self, kind: int) -> Any:
        if kind == 8:
            return self.string()
        if kind == 9:
            inner, count = self.take("I"), self.take("Q")
            return [self.value(inner) for _ in range(count)]
        return self.take(SCALARS[kind])


def read_gguf(path: Path) -> GGUF:
    cursor = _Cursor(path.read_bytes())
    assert cursor.data[:4] == b"GGUF"
    cursor.at = 4
    assert cursor.take("I") == 3
    count, keys = cursor.take("Q"), cursor.take("Q")
    found = {cursor.string(): cursor.value(cursor.take("I")) for _ in range(keys)}
    assert len(found) == keys
    infos = []
    for _ in range(count):
        name, dimensions = cursor.string(), cursor.take("I")
        shape = [cursor.take("Q") for _ in range(dimensions)][::-1]
        infos.append((name, shape, cursor.take("I"), cursor.take("Q")))
    begin = -(-cursor.at // 32) * 32
    tensors, end = {}, begin
    for name, shape, kind, offset in infos:
        assert (begin + offset) == -(-end // 32) * 32, "tensors follow one another at multiples of 32"
        tensors[name], end = _values(cursor.data, begin + offset, shape, kind)
    assert len(cursor.data) == -(-end // 32) * 32 and len(tensors) == count
    return GGUF(found, tensors, {name: kind for name, _, kind, _ in infos})


def _values(data: bytes, at: int, shape: list[int], kind: int) -> tuple[Tensor, int]:
    n = torch.Size(shape).numel()
    if kind == 39:
        return _mxfp4(data, at, n).view(shape), at + n // 32 * 17
    dtype, size = {0: (torch.float32, 4), 30: (torch.bfloat16, 2)}[kind]
    raw = bytearray(data[at : at + n * size])
    return torch.frombuffer(raw, dtype=dtype).view(shape).double(), at + n * size


def _mxfp4(data: bytes, at: int, n: int) -> Tensor:
    """Value by value: a scale byte, then 16 bytes with values j and j + 16."""
    values = []
    for block in range(n // 32):
        scale, *codes = data[at + 17 * block : at + 17 * (block + 1)]
        nibbles = [c & 15 for c in codes] + [c >> 4 for c in codes]
        values += [(-1) ** (x >> 3) * MAGNITUDES[x & 7] * 2.0 ** (scale - 127) for x in nibbles]
    return torch.tensor(values, dtype=torch.float64)
