"""Routed experts that stay on disk: the chosen ones are read when they are needed, the recently used kept.

    chosen experts of a chunk (all its tokens at once)
        in memory      their tokens are computed first
        on disk        a thread reads them, one after the other in the order of the file, while this one computes the
                       shared experts and whatever has arrived; each is read once for a chunk, however small the memory

Attention, routers, shared experts and embeddings are resident. Experts lie in a fixed number of places (`expert_slots`)
in the bytes of the file, MXFP4 or plain, and are multiplied from there. Reading is `pread` into these places: the
memory of the process does not grow by what was read, as it would with a mapped file. An expert's rows, sums and their
order are those of resident experts, so are the results, bit for bit where both take the C++ kernel.

Ours: K3 says nothing of this. A token of the release needs 16 of 896 experts in each of 92 layers, 1.8 % of 1.45 TB.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from nanok3.config import K3Config
from nanok3.model.basics import at_least_float32
from nanok3.model.expert_slots import Key, Slots
from nanok3.model.latent_moe import LatentMoE, Routing, caps, tally
from nanok3.model.mxfp4 import dequantize_mxfp4
from nanok3.model.situ import activation

MATRICES = ("w1", "w2", "w3")


@dataclass
class StreamStatistics:
    """What streaming did so far. A hit is an expert that a chunk chose and that was in memory."""

    hits: int = 0
    reads: int = 0
    bytes: int = 0
    seconds_reading: float = 0.0
    """Of the reading thread."""
    seconds_waited: float = 0.0
    """Of the computing thread, which had nothing else to do."""

    @property
    def hit_rate(self) -> float:
        return self.hits / max(1, self.hits + self.reads)


# ---------------------------------------------------------------------- files


class Stored(NamedTuple):
    """Where a tensor lies."""

    file: Path
    offset: int
    nbytes: int


class ExpertFiles:
    """The bytes of all experts in their files, which are opened once and stay so."""

    def __init__(self, places: Mapping[Key, Mapping[str, Stored]]) -> None:
        self.places = places
        files = {place.file for tensors in places.values() for place in tensors.values()}
        self._open = {file: os.open(file, os.O_RDONLY) for file in sorted(files)}
        self._close = weakref.finalize(self, _close, list(self._open.values()))
        self._state = {file: _state(number) for file, number in self._open.items()}

    def read(self, key: Key, into: Mapping[str, Any]) -> int:
        """Read an expert's tensors into writable buffers; the number of bytes. Neighbours in a file are read at once.
        ValueError where a file has become shorter, or was written to, since it was opened."""
        tensors = sorted(self.places[key].items(), key=lambda item: item[1])
        begin, total = 0, 0
        for end in range(1, len(tensors) + 1):
            if end < len(tensors) and _adjacent(tensors[end - 1][1], tensors[end][1]):
                continue
            self._read_run(tensors[begin][1], [memoryview(into[name]).cast("B") for name, _ in tensors[begin:end]])
            total += sum(place.nbytes for _, place in tensors[begin:end])
            begin = end
        return total

    def _read_run(self, start: Stored, buffers: list[memoryview]) -> None:
        number, offset = self._open[start.file], start.offset
        while buffers:
            count = os.preadv(number, buffers, offset)
            if count == 0:
                size = os.fstat(number).st_size
                raise ValueError(f"{start.file}: truncated: an expert's bytes at {offset}, the file ends at {size}")
            offset += count
            while buffers and count >= len(buffers[0]):
                count -= len(buffers.pop(0))
            if buffers:
                buffers[0] = buffers[0][count:]
        if _state(number) != self._state[start.file]:
            raise ValueError(f"{start.file}: changed while its experts were being read; load the model again")


def _close(numbers: list[int]) -> None:
    for number in numbers:
        os.close(number)


def _state(number: int) -> tuple[int, int]:
    """Size, and when it was last written to."""
    found = os.fstat(number)
    return found.st_size, found.st_mtime_ns


def _adjacent(one: Stored, other: Stored) -> bool:
    return one.file == other.file and one.offset + one.nbytes == other.offset


# ---------------------------------------------------------------------- memory


class ExpertForm(NamedTuple):
    """The tensors of one expert: name -> (shape, dtype). Names are w1, w2, w3; packed ones w1_packed, w1_scale, ..."""

    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]]

    @property
    def nbytes(self) -> int:
        return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in self.tensors.values())

    @property
    def packed(self) -> bool:
        return "w1_packed" in self.tensors


def slots_of(memory: int, form: ExpertForm, top_k: int, experts: int) -> int:
    """Experts that a budget holds, at most all. ValueError where not even those of one token in one layer have room."""
    least = top_k * form.nbytes
    if memory < least:
        raise ValueError(
            f"expert_memory is {memory}; it must be at least {least} bytes: the {top_k} experts that a token chooses "
            f"in a layer, {form.nbytes} each"
        )
    return min(memory // form.nbytes, experts)


class ExpertStream:
    """The experts of all layers: files, places in memory, the thread that reads, and statistics. Chunks take turns."""

    def __init__(self, cfg: K3Config, files: ExpertFiles, form: ExpertForm, slots: int) -> None:
        self.cfg, self.files, self.form = cfg, files, form
        self.slots = Slots(slots)
        self.statistics = StreamStatistics()
        self.tensors = {name: torch.empty(slots, *shape, dtype=dtype) for name, (shape, dtype) in form.tensors.items()}
        self._bytes = {name: value.view(slots, -1).view(torch.uint8).numpy() for name, value in self.tensors.items()}
        self._reader = ThreadPoolExecutor(1, "experts")
        self._turn = threading.Lock()
        self._changed = threading.Condition()

    @property
    def memory(self) -> int:
        """Bytes of all places."""
        return self.slots.size * self.form.nbytes

    def fetch(self, layer: int, chosen: Int[Tensor, "n N"]) -> Fetch:
        """Begin to read what is not there of the experts that a chunk chose."""
        return Fetch(self, layer, chosen.unique().tolist())

    def answers(
        self, z: Float[Tensor, "n L"], tokens: Int[Tensor, " m"], rows: Sequence[tuple[int, int]], out: Tensor
    ) -> bool:
        """Write the answers of some experts to `out`: rows has (slot, number of rows) with slots ascending, row i is
        about z[tokens[i]]. Whether it was done in C++."""
        from nanok3.kernels import linear_cpu

        counts = torch.zeros(self.slots.size, dtype=torch.int64)
        slots, numbers = zip(*rows)
        counts[list(slots)] = torch.tensor(numbers)
        matrices = tuple(
            linear_cpu.Packed(self.tensors[f"{w}_packed"], self.tensors[f"{w}_scale"])
            if self.form.packed
            else self.tensors[w]
            for w in MATRICES
        )
        assert len(matrices) == 3
        if linear_cpu.expert_answers(z, tokens, counts, matrices, caps(self.cfg), out) is not NotImplemented:
            return True
        for (slot, _), some in zip(rows, _split(tokens, numbers)):
            out[some.start : some.stop] = self._expert(slot, z[tokens[some]])
        return False

    def _expert(self, slot: int, z: Float[Tensor, "n L"]) -> Float[Tensor, "n L"]:
        w1, w2, w3 = (self._weight(w, slot, z.dtype) for w in MATRICES)
        return F.linear(activation(self.cfg, F.linear(z, w1), F.linear(z, w3)), w2)

    def _weight(self, matrix: str, slot: int, dtype: torch.dtype) -> Tensor:
        if self.form.packed:
            packed, scale = self.tensors[f"{matrix}_packed"], self.tensors[f"{matrix}_scale"]
            return dequantize_mxfp4(packed[slot], scale[slot], dtype)
        return self.tensors[matrix][slot].to(dtype)


def _split(tokens: Tensor, numbers: Sequence[int]) -> Iterator[slice]:
    start = 0
    for number in numbers:
        yield slice(start, start + number)
        start += number
    assert start == len(tokens)


class Fetch:
    """The experts that one chunk chose in one layer, while they are read and used.

    with stream.fetch(layer, chosen) as fetch:
        ...                              anything else: the thread is reading
        for wave in fetch.waves():       [(expert, slot), ...] that are there; when the next is asked for, their places
            ...                          may be taken
    """

    def __init__(self, stream: ExpertStream, layer: int, experts: list[int]) -> None:
        self.stream, self.layer, self.experts = stream, layer, experts
        self._busy = {(layer, e) for e in experts}
        self._ready: list[tuple[int, int]] = []
        self._error: BaseException | None = None
        self._given_up = False
        self._reading: Future[None] | None = None

    def __enter__(self) -> Fetch:
        stream = self.stream
        stream._turn.acquire()
        places = [(e, stream.slots.find((self.layer, e))) for e in self.experts]
        self._ready = [(e, slot) for e, slot in places if slot is not None]
        stream.statistics.hits += len(self._ready)
        missing = [e for e, slot in places if slot is None]
        if missing:
            self._reading = stream._reader.submit(self._read, missing)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            with self.stream._changed:
                self._given_up = True
                self.stream._changed.notify_all()
            if self._reading is not None:
                self._reading.result()
        finally:
            self.stream._turn.release()

    def waves(self) -> Iterator[list[tuple[int, int]]]:
        """What has arrived since the last one, until all have been handed out. ValueError if a file cannot be read."""
        changed, left = self.stream._changed, len(self.experts)
        while left:
            with changed:
                start = time.perf_counter()
                changed.wait_for(lambda: self._ready or self._error)
                self.stream.statistics.seconds_waited += time.perf_counter() - start
                if self._error is not None:
                    raise self._error
                wave, self._ready = self._ready, []
            yield wave
            left -= len(wave)
            with changed:
                self._busy -= {(self.layer, e) for e, _ in wave}
                changed.notify_all()

    def _read(self, missing: list[int]) -> None:
        """In the reading thread."""
        stream, changed = self.stream, self.stream._changed
        for e in missing:
            with changed:
                slot = None
                while slot is None and not self._given_up:
                    slot = stream.slots.take((self.layer, e), self._busy)
                    if slot is None:
                        changed.wait()
                if slot is None:
                    return
            start = time.perf_counter()
            try:
                count = stream.files.read((self.layer, e), {name: x[slot] for name, x in stream._bytes.items()})
            except (OSError, ValueError) as error:
                with changed:
                    stream.slots.drop((self.layer, e))
                    self._error = error
                    changed.notify_all()
                return
            with changed:
                self._ready.append((e, slot))
                stream.statistics.reads += 1
                stream.statistics.bytes += count
                stream.statistics.seconds_reading += time.perf_counter() - start
                changed.notify_all()


# ---------------------------------------------------------------------- the layer


def routed_streamed(
    stream: ExpertStream, fetch: Fetch, z: Float[Tensor, "n L"], routing: Routing
) -> Float[Tensor, "n L"]:
    """sum_e p_e Expert_e(z), the experts in the order in which they arrive, the sum in that of `routing`."""
    from nanok3.kernels import linear_cpu

    n, per_token = routing.chosen.shape
    flat = routing.chosen.flatten()
    by_expert = flat.argsort(stable=True).split(tally(flat, stream.cfg.num_experts).tolist())
    answers = torch.empty(len(flat), z.shape[1], dtype=at_least_float32(z[:0]).dtype)
    place = torch.empty_like(flat)
    done, native = 0, True
    for wave in fetch.waves():
        wave.sort(key=lambda pair: pair[1])
        pairs = torch.cat([by_expert[e] for e, _ in wave])
        rows = [(slot, len(by_expert[e])) for e, slot in wave]
        native = stream.answers(z, pairs // per_token, rows, answers[done : done + len(pairs)])
        place[pairs] = torch.arange(done, done + len(pairs))
        done += len(pairs)
    if native:
        return linear_cpu.weigh_answers(answers, place.view(n, per_token), routing.weights, z.dtype)
    by_token = answers.index_select(0, place).view(n, per_token, -1)
    return (routing.weights.to(by_token.dtype).unsqueeze(-1) * by_token).sum(1).to(z.dtype)


class StreamedMoE(LatentMoE):
    """`LatentMoE` without experts of its own."""

    def __init__(self, cfg: K3Config, layer: int, stream: ExpertStream) -> None:
        super().__init__(cfg)
        del self.experts
        self.layer, self.stream = layer, stream

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        if torch.is_grad_enabled() and (self.training or x.requires_grad):
            raise ValueError("streamed experts are for inference; load with experts='resident' to train")
        flat = x.flatten(0, 1)
        routing = self.gate(flat)
        with self.stream.fetch(self.layer, routing.chosen) as fetch:
            shared = self.shared_experts(x) if self.cfg.num_shared_experts else None
            y = self._to_model(routed_streamed(self.stream, fetch, self._to_latent(flat), routing)).view_as(x)
        return y if shared is None else y + shared


def stream_of(model: nn.Module) -> ExpertStream | None:
    """Where a model's experts come from; None where they are resident."""
    return next((module.stream for module in model.modules() if isinstance(module, StreamedMoE)), None)
