"""GGUF, the file that llama.cpp reads: keys with values, a table of tensors, then their bytes.

    "GGUF"  version 3  tensors  keys
    each key        name, kind of value, value
    each tensor     name, dimensions (innermost first), type, where its bytes begin
    bytes           every tensor at a multiple of 32 from the first

Strings are a length of 8 bytes and UTF-8; numbers are little-endian. The table stands before the bytes and needs
nothing but shapes, so a file is written in one pass with one tensor in memory. Source: the description in ggml's
gguf.h; the blocks of MXFP4 are those of its ggml-common.h.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import torch
from jaxtyping import UInt8
from torch import Tensor

from nanok3.model.mxfp4 import BLOCK

MAGIC, VERSION, ALIGNMENT = b"GGUF", 3, 32
Value = bool | int | float | str | Sequence[int] | Sequence[str]
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9
_HALF = BLOCK // 2


@dataclass(frozen=True)
class TensorType:
    """A number format: its number in the file, and the bytes that `block` neighbouring values take."""

    number: int
    block: int
    block_bytes: int


F32 = TensorType(0, 1, 4)
BF16 = TensorType(30, 1, 2)
MXFP4 = TensorType(39, BLOCK, 1 + _HALF)


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor to be written. `parts` is called when its turn comes and gives its bytes piece by piece."""

    name: str
    shape: tuple[int, ...]
    """Outermost first, as torch has it."""
    type: TensorType
    parts: Callable[[], Iterable[Tensor]]

    @property
    def nbytes(self) -> int:
        return nbytes(self.shape, self.type)


def nbytes(shape: Sequence[int], kind: TensorType) -> int:
    """Bytes of a tensor, whose rows are a whole number of blocks."""
    assert shape[-1] % kind.block == 0, f"rows of {list(shape)} are no whole blocks of {kind.block}"
    return torch.Size(shape).numel() // kind.block * kind.block_bytes


def aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


# ---------------------------------------------------------------------- writing


def write_gguf(
    file: BinaryIO,
    metadata: Mapping[str, Value],
    tensors: Sequence[GGUFTensor],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Write a whole file; the number of its bytes. `progress(done, total)` hears of every tensor's bytes."""
    head = header(metadata, tensors)
    total = file_size(head, tensors)
    done = file.write(head)
    for tensor in tensors:
        begin = done
        for part in tensor.parts():
            done += file.write(raw(part))
        assert done - begin == tensor.nbytes, f"{tensor.name} is {done - begin} bytes, announced were {tensor.nbytes}"
        done += file.write(bytes(aligned(done) - done))
        progress(done, total)
    assert done == total
    return done


def file_size(head: bytes, tensors: Iterable[GGUFTensor]) -> int:
    return len(head) + sum(aligned(tensor.nbytes) for tensor in tensors)


def header(metadata: Mapping[str, Value], tensors: Sequence[GGUFTensor]) -> bytes:
    """Everything before the first tensor's bytes, padded. ValueError for a number that is too large."""
    out = bytearray(MAGIC + struct.pack("<IQQ", VERSION, len(tensors), len(metadata)))
    for key, value in metadata.items():
        try:
            out += _string(key) + _value(value)
        except (struct.error, OverflowError):
            raise ValueError(f"{key} is {value}: the file has 32 bits for it") from None
    offset = 0
    for tensor in tensors:
        out += _string(tensor.name) + struct.pack("<I", len(tensor.shape))
        out += struct.pack(f"<{len(tensor.shape)}Q", *reversed(tensor.shape))
        out += struct.pack("<IQ", tensor.type.number, offset)
        offset += aligned(tensor.nbytes)
    return bytes(out) + bytes(aligned(len(out)) - len(out))


def _string(text: str) -> bytes:
    data = text.encode("utf-8")
    return struct.pack("<Q", len(data)) + data


def _value(value: Value) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", _BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", _UINT32, value)
    if isinstance(value, float):
        return struct.pack("<If", _FLOAT32, value)
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _string(value)
    return struct.pack("<I", _ARRAY) + _array(value)


def _array(values: Sequence[int] | Sequence[str]) -> bytes:
    """All of one kind: strings, or numbers of 32 bits with sign."""
    assert values, "an empty list does not tell its kind"
    strings = [v for v in values if isinstance(v, str)]
    if strings:
        return struct.pack("<IQ", _STRING, len(values)) + b"".join(map(_string, strings))
    return struct.pack(f"<IQ{len(values)}i", _INT32, len(values), *values)


# ---------------------------------------------------------------------- number formats


def raw(values: Tensor) -> memoryview:
    """The bytes of a tensor as they lie in memory, in order."""
    return values.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


def mxfp4_blocks(packed: UInt8[Tensor, "*b half"], scale: UInt8[Tensor, "*b blocks"]) -> UInt8[Tensor, "*b bytes"]:
    """Our two arrays as ggml's blocks of 17 bytes: the scale, then 16 bytes of which byte j holds value j in its low
    half and value j + 16 in its high half. Codes and scales stay what they are, so nothing is rounded."""
    pairs = packed.unflatten(-1, (-1, _HALF))
    codes = torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(-2)  # (..., blocks, 32) in order
    halves = codes[..., :_HALF] | codes[..., _HALF:] << 4
    return torch.cat((scale.unsqueeze(-1), halves), dim=-1).flatten(-2)
