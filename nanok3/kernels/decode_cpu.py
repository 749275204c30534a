"""Decoding on a CPU as one call of C: the records of `cpu/decode_plan.h`, filled with the addresses of tensors.

A `Model` holds where every weight lies and in which type (float32, bf16, MXFP4); a `SequenceMemory` where the memory of
one sequence lies. `Decoder.run` reads rows of tokens through the whole stack, moves the memory on in place and writes
logits.
What a weight is for is known in model/native_decode.py; here are addresses, sizes and the checks that keep C from
reading what is not there.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from nanok3.kernels import native

FORMATS = {torch.float32: 0, torch.bfloat16: 1}
MXFP4 = 2
TAPE = 6
"""Times heads * dim numbers that a row takes on a tape: the inputs of three convolutions, k, e^g and u."""


class _Vector(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("type", ctypes.c_int32)]


class _Matrix(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("format", ctypes.c_int32),
    ]


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class Layer(ctypes.Structure):
    """Every weight a layer may have; those it has not stay null."""

    _fields_ = [
        *_fields(ctypes.c_int32, "is_mla is_moe"),
        *_fields(_Vector, "input_norm post_norm attention_mix_norm attention_mix_query mlp_mix_norm mlp_mix_query"),
        *_fields(_Matrix, "q k v f_a f_b b g_a g_b o"),
        *_fields(_Vector, "q_conv k_conv v_conv A_log dt_bias o_norm"),
        *_fields(_Matrix, "q_a q_b kv_a kv_b"),
        *_fields(_Vector, "q_norm kv_norm"),
        *_fields(_Matrix, "gate up down router latent_down latent_up w1 w2 w3"),
        *_fields(_Vector, "correction latent_norm"),
    ]


class Model(ctypes.Structure):
    """Sizes, switches and the layers; what the numbers mean is said in cpu/decode_plan.h."""

    _fields_ = [
        ("layers", ctypes.POINTER(Layer)),
        *_fields(ctypes.c_int64, "layer_count hidden vocab"),
        *_fields(_Matrix, "embedding head"),
        *_fields(_Vector, "final_norm final_mix_norm final_mix_query"),
        *_fields(ctypes.c_int64, "block kda_heads kda_dim taps mla_heads nope rope v_dim rank q_rank"),
        *_fields(ctypes.c_int64, "intermediate experts top_k inner latent shared"),
        *_fields(ctypes.c_float, "eps qk_eps gate_bound beta linear_beta routed_scale"),
        ("renormalize", ctypes.c_int32),
    ]


class _Sequence(ctypes.Structure):
    _fields_ = [
        *_fields(ctypes.c_int64, "rows tokens"),
        *_fields(ctypes.c_void_p, "conv recurrent latents pages"),
        *_fields(ctypes.c_int64, "page_rows page_stride"),
        ("tape", ctypes.c_void_p),
        ("latent_type", ctypes.c_int32),
    ]


class _Call(ctypes.Structure):
    _fields_ = [
        *_fields(ctypes.c_void_p, "model sequences"),
        *_fields(ctypes.c_int64, "sequence_count rows"),
        *_fields(ctypes.c_void_p, "ids chosen"),
        ("chosen_count", ctypes.c_int64),
        *_fields(ctypes.c_void_p, "logits hidden tapped"),
        ("tap_count", ctypes.c_int64),
        *_fields(ctypes.c_void_p, "taps workspace"),
        *_fields(ctypes.c_int64, "capacity threads"),
    ]


class Chain(ctypes.Structure):
    """What a draft adds to its one block; see cpu/decode_plan.h."""

    _fields_ = [
        *_fields(_Matrix, "table combine"),
        *_fields(_Vector, "token_norm feature_norm"),
        *_fields(ctypes.c_void_p, "features counts said workspace"),
    ]


def available() -> bool:
    """Whether the library could be built here."""
    return native.available("decode")


@functools.cache
def _library() -> Any:
    library = native.load("decode")
    assert library is not None, "callers ask `available` first"
    for call in (library.decode, library.decode_replay, library.decode_chain):
        call.argtypes, call.restype = [ctypes.c_void_p], None
    library.decode_chain.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    for size in (library.decode_workspace, library.chain_workspace):
        size.argtypes, size.restype = [ctypes.c_void_p, ctypes.c_int64], ctypes.c_int64
    library.decode_record_size.restype = ctypes.c_int64
    for which, record in enumerate((Model, Layer, _Sequence, _Call, Chain)):
        assert library.decode_record_size(which) == ctypes.sizeof(record), f"{record.__name__} is not its mirror"
    return library


def refusal(weight: Tensor) -> str | None:
    """Why the kernel cannot read a weight, or None."""
    if type(weight) not in (Tensor, nn.Parameter):
        return f"it is a {type(weight).__name__}"  # what only looks like a tensor has no memory to be read
    if weight.device.type != "cpu":
        return f"it is on {weight.device}"
    if weight.dtype not in FORMATS and weight.dtype != torch.uint8:
        return f"it is {weight.dtype}; float32, bfloat16 and MXFP4 can be read"
    return None if weight.is_contiguous() else "it is not contiguous"


def vector(weight: Tensor) -> _Vector:
    return _Vector(weight.data_ptr(), FORMATS[weight.dtype])


def matrix(weight: Tensor, scale: Tensor | None = None) -> _Matrix:
    """A weight (rows, columns) or a stack of them; with `scale` packed MXFP4."""
    rows, columns = weight.shape[-2:]
    if scale is not None:
        return _Matrix(weight.data_ptr(), scale.data_ptr(), rows, 2 * columns, MXFP4)
    return _Matrix(weight.data_ptr(), None, rows, columns, FORMATS[weight.dtype])


@dataclass(frozen=True)
class MemoryLayout:
    """What a model's sequences keep: shapes of one layer's tensors, and how many layers there are of each kind."""

    kda_layers: int
    mla_layers: int
    conv: tuple[int, int, int]
    """(3, taps - 1, heads * dim)"""
    recurrent: tuple[int, int, int]
    """(heads, key dim, value dim)"""
    latent: int
    """Numbers of a latent row."""


class SequenceMemory:
    """Where one sequence's memory lies; the tensors stay the caller's, and calls move them on in place.

    conv, recurrent: one float32 tensor for each KDA layer, in the model's order, of the layout's shapes. latents: for
    each MLA layer a pool (pages, P, latent) in float32 or bf16, whose pages may lie apart but are each contiguous: of
    an arena (pages, layers, P, latent) the pools are `arena[:, i]`. `pages`: which of them hold the sequence's rows, in
    order, the same in every layer; token t lies in row t % P of page pages[t // P]. A cache that is one piece is a
    pool of one page. The list may be changed between calls; before a call it must have room for the rows to come.
    tokens: how many have been read; a call adds its own.
    """

    def __init__(
        self,
        layout: MemoryLayout,
        conv: Sequence[Float[Tensor, "3 taps HK"]],
        recurrent: Sequence[Float[Tensor, "H K V"]],
        latents: Sequence[Float[Tensor, "pages P L"]],
        pages: Sequence[int] = (),
        tokens: int = 0,
    ) -> None:
        _check_fixed("conv", conv, layout.kda_layers, layout.conv)
        _check_fixed("recurrent", recurrent, layout.kda_layers, layout.recurrent)
        _check_pools(latents, layout)
        self.conv, self.recurrent, self.latents = tuple(conv), tuple(recurrent), tuple(latents)
        self.pages, self.tokens = list(pages), tokens
        addresses = (_addresses(tensors) for tensors in (self.conv, self.recurrent, self.latents))
        self._addresses, self._pages = tuple(addresses), array("q")
        self._known_pages: list[int] = []
        self.pool_pages, rows, stride, dtype = (
            (1 << 62, 1 << 62, 0, torch.float32) if not latents else _pool(latents[0])
        )
        places = (ctypes.cast(a, ctypes.c_void_p).value for a in self._addresses)
        self.record = _Sequence(0, 0, *places, None, rows, stride, None, FORMATS[dtype])
        self.address = ctypes.addressof(self.record)
        self.page_rows = rows
        """Tokens a page holds; a huge number for a model without MLA layers, which needs no pages."""
        self._tape, self._tape_rows = (layout.kda_layers, TAPE * layout.conv[2]), 1 << 62

    def record_on(self, tape: Float[Tensor, "layers rows width"] | None) -> None:
        """From now on calls leave the KDA memory as it is and put what would move it on a tape with room for as many
        rows, (KDA layers, rows, TAPE * heads * dim) in float32; with None they move it again."""
        if tape is None:
            self.record.tape, self._tape_rows = None, 1 << 62
            return
        layers, width = self._tape
        fits = tape.ndim == 3 and (tape.shape[0], tape.shape[2]) == (layers, width) and tape.stride()[1:] == (width, 1)
        if not fits or tape.dtype != torch.float32 or not tape.is_cpu:
            raise ValueError(
                f"the tape is {tape.dtype} of shape {tuple(tape.shape)} on {tape.device}; it must be float32 "
                f"({layers}, rows, {width}) with contiguous rows, on the CPU"
            )
        self._on_tape = tape, _addresses(list(tape))  # read by every call until the next one is given
        self.record.tape, self._tape_rows = ctypes.cast(self._on_tape[1], ctypes.c_void_p).value, tape.shape[1]

    def prepare(self, rows: int) -> None:
        """Write what this call needs into the record; ValueError where there is no room for the rows."""
        if rows < 1:
            raise ValueError(f"a sequence has {rows} rows; each must have at least 1")
        if rows > self._tape_rows:
            raise ValueError(f"a sequence has {rows} rows; its tape has room for {self._tape_rows}")
        if self.latents:
            if len(self.pages) * self.page_rows < self.tokens + rows:
                held = f"{len(self.pages)} pages of {self.page_rows} rows"
                raise ValueError(f"{held} have no room for {rows} tokens after {self.tokens}")
            if self.pages != self._known_pages:
                self._read_pages()
        self.record.rows, self.record.tokens = rows, self.tokens

    def _read_pages(self) -> None:
        if not all(0 <= page < self.pool_pages for page in self.pages):
            raise ValueError(f"pages {self.pages} are not all in the pool, which has {self.pool_pages}")
        self._known_pages, self._pages = list(self.pages), array("q", self.pages)
        self.record.pages = self._pages.buffer_info()[0]


def _pool(pool: Tensor) -> tuple[int, int, int, torch.dtype]:
    return pool.shape[0], pool.shape[1], pool.stride(0), pool.dtype


def _addresses(tensors: Sequence[Tensor]) -> Any:
    return (ctypes.c_void_p * len(tensors))(*(x.data_ptr() for x in tensors))


def _check_fixed(name: str, tensors: Sequence[Tensor], layers: int, shape: tuple[int, ...]) -> None:
    if len(tensors) != layers:
        raise ValueError(f"{name} has {len(tensors)} tensors; the model has {layers} KDA layers")
    for x in tensors:
        if tuple(x.shape) != shape or x.dtype != torch.float32 or not x.is_cpu or not x.is_contiguous():
            raise ValueError(
                f"{name} holds a {x.dtype} tensor of shape {tuple(x.shape)} on {x.device}; it must be float32 {shape}, "
                f"contiguous, on the CPU"
            )


def _check_pools(pools: Sequence[Tensor], layout: MemoryLayout) -> None:
    if len(pools) != layout.mla_layers:
        raise ValueError(f"latents has {len(pools)} tensors; the model has {layout.mla_layers} MLA layers")
    for x in pools:
        fits = x.ndim == 3 and x.shape[2] == layout.latent and x.dtype in FORMATS and x.is_cpu
        if not fits or x.shape[1] == 0 or x.stride()[1:] != (layout.latent, 1) or _pool(x) != _pool(pools[0]):
            raise ValueError(
                f"latents holds a {x.dtype} tensor of shape {tuple(x.shape)} and strides {x.stride()}; all must be "
                f"(pages, P, {layout.latent}) in float32 or bfloat16 with contiguous pages, alike for all layers"
            )


class Decoder:
    """A model by address, and the space in which it computes."""

    def __init__(self, model: Model, layout: MemoryLayout) -> None:
        self.model, self.layout = model, layout
        self._call = _Call(model=ctypes.addressof(model))
        self._workspace = self._chain_workspace = torch.empty(0)

    def run(
        self,
        ids: Int[Tensor, " N"],
        sequences: Sequence[SequenceMemory],
        rows: Sequence[int],
        chosen: Sequence[int],
        with_hidden: bool,
        tapped: Sequence[int] = (),
    ) -> tuple[Float[Tensor, "n vocab"], Float[Tensor, "N D"] | None, Float[Tensor, "N taps D"]]:
        """Logits of the chosen rows, the final normed hidden of all if asked for, and what the attentions of the tapped
        layers read before their norm (the number of layers means the last read). `ids` holds rows[i] tokens of
        sequences[i], one after the other. ValueError before anything is moved on."""
        tokens, wanted = self._checked(ids, sequences, rows, chosen), array("q", chosen)
        records = array("q", [sequence.address for sequence in sequences])
        logits = torch.empty(len(chosen), self.model.vocab)
        hidden = torch.empty(len(tokens), self.model.hidden) if with_hidden else None
        taps, places = torch.empty(len(tokens), len(tapped), self.model.hidden), array("q", tapped)
        self._reserve(len(tokens))
        call = self._call
        call.tapped, call.tap_count = places.buffer_info()
        call.taps = taps.data_ptr()
        call.sequences, call.sequence_count = records.buffer_info()
        call.ids, call.rows = tokens.buffer_info()
        call.chosen, call.chosen_count = wanted.buffer_info()
        call.logits = logits.data_ptr() if chosen else None
        call.hidden = None if hidden is None else hidden.data_ptr()
        call.threads = torch.get_num_threads()
        _library().decode(ctypes.byref(call))
        for sequence, count in zip(sequences, rows):
            sequence.tokens += count
        return logits, hidden, taps

    def guess(
        self,
        chain: Chain,
        features: Float[Tensor, "N D"],
        ids: Sequence[int],
        sequences: Sequence[SequenceMemory],
        rows: Sequence[int],
        counts: Sequence[int],
    ) -> list[list[int]]:
        """Read rows as `run` does, each with the feature before it, and guess counts[i] tokens of sequences[i], which
        must not rise; -1 where no logit was the largest. What is read of guesses lies in the pages, behind `tokens`,
        which only the given rows move on. ValueError before anything is moved on."""
        tokens = self._checked(torch.tensor(ids), sequences, rows, ())
        self._check_chain(features, len(tokens), rows, counts)
        for sequence, own, count in zip(sequences, rows, counts):
            sequence.prepare(own + count - 1)
            sequence.record.rows = own
        self._reserve(len(tokens))
        call, taps, place = (
            self._call,
            torch.empty(len(tokens), self.model.hidden),
            array("q", [self.model.layer_count]),
        )
        records, wanted = array("q", [sequence.address for sequence in sequences]), array("q", counts)
        said = array("q", bytes(8 * len(counts) * counts[0]))
        call.tapped, call.tap_count, call.taps = place.buffer_info()[0], 1, taps.data_ptr()
        call.sequences, call.sequence_count = records.buffer_info()
        call.ids, call.rows = tokens.buffer_info()
        call.hidden, call.threads = None, torch.get_num_threads()
        chain.features, chain.workspace = features.data_ptr(), self._room_for_chains().data_ptr()
        chain.counts, chain.said = wanted.buffer_info()[0], said.buffer_info()[0]
        _library().decode_chain(ctypes.byref(call), ctypes.byref(chain))
        for sequence, own in zip(sequences, rows):
            sequence.tokens += own
        return [list(said[i * counts[0] : i * counts[0] + count]) for i, count in enumerate(counts)]

    def _check_chain(self, features: Tensor, tokens: int, rows: Sequence[int], counts: Sequence[int]) -> None:
        if len(counts) != len(rows) or min(counts) < 1 or list(counts) != sorted(counts, reverse=True):
            raise ValueError(
                f"{len(rows)} sequences want {list(counts)} guesses; each must want at least 1, and none more than the "
                f"one before"
            )
        shape, given = (tokens, self.model.hidden), tuple(features.shape)
        if given != shape or features.dtype != torch.float32 or not features.is_contiguous() or not features.is_cpu:
            raise ValueError(f"features is {features.dtype} of shape {given}; it must be float32 {shape}, contiguous")

    def _room_for_chains(self) -> Tensor:
        """For as many rows as the workspace has room for."""
        size = _library().chain_workspace(ctypes.byref(self.model), self._call.capacity)
        if len(self._chain_workspace) != size:
            self._chain_workspace = torch.zeros(size)
        return self._chain_workspace

    def replay(self, sequences: Sequence[SequenceMemory], rows: Sequence[int]) -> None:
        """Move the KDA memory of each on by the first rows of its tape."""
        for sequence, count in zip(sequences, rows, strict=True):
            if not sequence.record.tape:
                raise ValueError("a sequence has no tape; record_on gives it one")
            sequence.prepare(count)
        records, call = array("q", [sequence.address for sequence in sequences]), self._call
        call.sequences, call.sequence_count = records.buffer_info()
        call.threads = torch.get_num_threads()
        _library().decode_replay(ctypes.byref(call))

    def _checked(
        self, ids: Tensor, sequences: Sequence[SequenceMemory], rows: Sequence[int], chosen: Sequence[int]
    ) -> array[int]:
        """The ids, with everything that C will read or write made sure of."""
        if ids.ndim != 1 or ids.dtype not in (torch.int32, torch.int64) or not ids.is_cpu:
            raise ValueError(f"ids is {ids.dtype} of shape {tuple(ids.shape)}; it must be int64 or int32 of shape (N,)")
        if len(rows) != len(sequences) or not sequences:
            raise ValueError(
                f"{len(sequences)} sequences and {len(rows)} row counts; there must be as many, at least 1"
            )
        if len(set(map(id, sequences))) != len(sequences):
            raise ValueError("a sequence is named twice; its rows must come together")
        for sequence, count in zip(sequences, rows):
            sequence.prepare(count)
        tokens = array("q", ids.tolist())
        if sum(rows) != len(tokens):
            raise ValueError(f"ids has {len(tokens)} rows, the sequences together {sum(rows)}")
        least, most = min(tokens), max(tokens)
        if least < 0 or most >= self.model.vocab:
            raise ValueError(f"ids holds {least if least < 0 else most}; ids must be from 0 to {self.model.vocab - 1}")
        if chosen and not 0 <= min(chosen) <= max(chosen) < len(tokens):
            raise ValueError(f"logits are wanted of rows {list(chosen)}; there are rows 0 to {len(tokens) - 1}")
        return tokens

    def _reserve(self, rows: int) -> None:
        call = self._call
        if rows > call.capacity:
            call.capacity = max(rows, 2 * call.capacity)
            self._workspace = torch.zeros(_library().decode_workspace(ctypes.byref(self.model), call.capacity))
            call.workspace = self._workspace.data_ptr()
