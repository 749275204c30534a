"""Checkpoints in the official layout: which tensors exist, how ours map onto them, loading and saving.

Names, shapes and dtypes on disk are the release's (architecture section 2); in memory only two things differ: the
experts of a layer are stacked, and A_log has one entry per head (the release pads it with zeros to 128). Seven kinds of
tensors stay float32 whatever the rest is stored in.

    disk_tensors(cfg)     every (name -> shape, dtype) of a checkpoint, from the config alone: 497,220 for the release
    load(folder)          single or sharded safetensors, MXFP4-packed or plain experts; memory-mapped, or with
                          experts="stream" read when they are needed
    save(model, folder)   written to temporary names, flushed, renamed

A checkpoint that does not fit is refused with one error that lists every missing, extra and misshapen tensor.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from nanok3.config import K3Config, with_expert_format
from nanok3.model.decoder import K3, DecoderLayer
from nanok3.model.expert_slots import Key
from nanok3.model.latent_moe import LatentMoE, PackedExperts
from nanok3.model.mxfp4 import BLOCK, dequantize_mxfp4, quantize_mxfp4
from nanok3.model.streamed_experts import (
    ExpertFiles,
    ExpertForm,
    ExpertStream,
    Stored,
    StreamedMoE,
    slots_of,
    stream_of,
)

DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "U8": torch.uint8,
}
PLAIN_DTYPES = ("BF16", "F16", "F32", "F64")
A_LOG_PADDING = 128
MAX_SHARD_BYTES = 5_000_000_000
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_EXPERT = re.compile(r"(?P<layer>.*block_sparse_moe)\.experts\.(?P<matrix>w[123])$")
_FLOAT32 = re.compile(r"(A_log|dt_bias|[qkv]_conv1d\.weight|o_norm\.weight|e_score_correction_bias)$")
_FLOAT32_LINEAR = re.compile(r"(A_log|dt_bias|e_score_correction_bias)$")


# ---------------------------------------------------------------------- the layout


@dataclass(frozen=True)
class DiskTensor:
    """One tensor of a checkpoint, and the place in the model that it fills: the parameter `target`, or with `expert`
    set the slice of a stacked one."""

    shape: tuple[int, ...]
    dtype: str
    target: str
    expert: int | None = None

    @property
    def nbytes(self) -> int:
        size = DTYPES[self.dtype].itemsize
        for n in self.shape:
            size *= n
        return size


def disk_tensors(cfg: K3Config, packed: bool | None = None) -> dict[str, DiskTensor]:
    """Every tensor of a checkpoint of `cfg` by its official name. packed: experts in MXFP4 (default: as cfg says)."""
    packed = cfg.expert_format is not None if packed is None else packed
    with torch.device("meta"):
        model = K3(cfg)
    tensors: dict[str, DiskTensor] = {}
    for name, value in model.state_dict().items():
        tensors.update(_on_disk(cfg, name, tuple(value.shape), packed))
    return tensors


def _on_disk(cfg: K3Config, name: str, shape: tuple[int, ...], packed: bool) -> Iterator[tuple[str, DiskTensor]]:
    disk = name if name.startswith(("vision_tower.", "mm_projector.")) else cfg.text_prefix + name
    expert = _EXPERT.match(disk)
    if expert:
        E, rows, columns = shape
        for e in range(E):
            stem = f"{expert['layer']}.experts.{e}.{expert['matrix']}.weight"
            if packed:
                yield f"{stem}_packed", DiskTensor((rows, columns // 2), "U8", f"{name}_packed", e)
                yield f"{stem}_scale", DiskTensor((rows, columns // BLOCK), "U8", f"{name}_scale", e)
            else:
                yield stem, DiskTensor((rows, columns), "BF16", name, e)
        return
    if name.endswith("A_log"):
        shape = _a_log_shape(cfg)
    yield disk, DiskTensor(shape, "F32" if _kept_float32(cfg, name) else "BF16", name)


def _a_log_shape(cfg: K3Config) -> tuple[int, ...]:
    if cfg.model_type == "kimi_linear":
        return (1, 1, cfg.kda_num_heads, 1)
    return (-(-cfg.kda_num_heads // A_LOG_PADDING) * A_LOG_PADDING,)


def _kept_float32(cfg: K3Config, name: str) -> bool:
    pattern = _FLOAT32_LINEAR if cfg.model_type == "kimi_linear" else _FLOAT32
    return pattern.search(name) is not None


# ---------------------------------------------------------------------- reading files


@dataclass(frozen=True)
class _Entry:
    """Where a tensor lies: file, offset in it, and what the file's header says it is."""

    file: Path
    offset: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: str


def read_header(file: Path) -> dict[str, _Entry]:
    """The tensors of one safetensors file. ValueError names a file that is truncated or no safetensors file."""
    if not file.is_file():
        raise ValueError(f"{file}: not a file; expected a safetensors file")
    size = file.stat().st_size
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(f"{file}: not a safetensors file, or truncated ({size} bytes)")
        try:
            header = json.loads(stream.read(length))
        except (ValueError, RecursionError):  # not JSON, not text, a number of thousands of digits, nested without end
            raise ValueError(f"{file}: not a safetensors file (its header is not JSON)") from None
    if not isinstance(header, dict):
        raise ValueError(f"{file}: not a safetensors file (its header is no object)")
    entries = {name: _entry(file, name, header[name], 8 + length) for name in header if name != "__metadata__"}
    for name, entry in entries.items():
        if entry.offset + entry.nbytes > size:
            raise ValueError(f"{file}: truncated: tensor {name!r} ends at byte {entry.offset + entry.nbytes} of {size}")
    return entries


def _entry(file: Path, name: str, fields: Any, data: int) -> _Entry:
    """One line of a header, whose byte counts are relative to `data`; ValueError where it makes no sense."""
    try:
        (begin, end), shape, dtype = fields["data_offsets"], tuple(fields["shape"]), fields["dtype"]
        whole = all(type(n) is int and n >= 0 for n in (begin, end, *shape))
        sensible = whole and begin <= end and isinstance(dtype, str)
    except (KeyError, TypeError, ValueError):
        sensible = False
    if not sensible:
        raise ValueError(f"{file}: not a safetensors file (the header says {fields!r} of tensor {name!r})")
    if dtype in DTYPES and end - begin != math.prod(shape) * DTYPES[dtype].itemsize:
        raise ValueError(f"{file}: tensor {name!r} has {end - begin} bytes; {dtype} {list(shape)} needs another number")
    return _Entry(file, data + begin, end - begin, shape, dtype)


def checkpoint_entries(folder: Path) -> dict[str, _Entry]:
    """All tensors of a checkpoint folder, single file or shards."""
    index = folder / INDEX
    if not index.exists():
        if not (folder / SINGLE).exists():
            raise ValueError(f"{folder}: no {SINGLE} and no {INDEX}; expected a checkpoint in the official layout")
        return read_header(folder / SINGLE)
    try:
        if not index.is_file():
            raise ValueError("not a file")
        weight_map = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"].items())
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{index}: not a safetensors index (no weight_map)") from None
    for name, shard in weight_map.items():
        if not _is_file_name(shard):
            raise ValueError(
                f"{index}: weight_map gives {shard!r} for {name!r}; it must be the name of a file beside it"
            )
    entries: dict[str, _Entry] = {}
    absent = sorted({shard for shard in weight_map.values() if not (folder / shard).exists()})
    if absent:
        raise ValueError(f"{folder}: shards named in {INDEX} are missing: {', '.join(absent)}")
    for shard in sorted(set(weight_map.values())):
        found = read_header(folder / shard)
        lost = sorted(n for n, s in weight_map.items() if s == shard and n not in found)
        if lost:
            raise ValueError(f"{folder / shard}: tensors promised by {INDEX} are missing: {_listed(lost)}")
        entries.update(found)
    return entries


def _is_file_name(name: Any) -> bool:
    """Whether a name stays in its folder and can be looked up there."""
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\\0") and len(name) < 200


class _Unmapped:
    """A file that is read tensor by tensor: mapped, it would count as memory of the process under some limits."""

    def __init__(self, file: Path) -> None:
        self.file = open(file, "rb", buffering=0)  # noqa: SIM115

    def read(self, entry: _Entry) -> Tensor:
        value = torch.empty(entry.nbytes, dtype=torch.uint8)
        rest = value.numpy().data
        self.file.seek(entry.offset)
        while rest:
            count = self.file.readinto(rest)
            if not count:
                raise ValueError(f"{entry.file}: truncated: {len(rest)} bytes of a tensor are missing")
            rest = rest[count:]
        return value.view(DTYPES[entry.dtype]).view(entry.shape)

    def release(self, entry: _Entry) -> None:
        """Nothing is held."""


class _Mapped:
    """A memory-mapped file whose pages are given back once read, so that loading S bytes needs S bytes, not 2 S."""

    RELEASE_EVERY = 1 << 24

    def __init__(self, file: Path) -> None:
        with open(file, "rb") as stream:
            # A private mapping: torch wants a writable buffer, the file stays untouched.
            self.map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        self.unreleased = 0

    def read(self, entry: _Entry) -> Tensor:
        """A view of the file's bytes; it must be copied before `release`."""
        if entry.nbytes == 0:
            return torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        dtype = DTYPES[entry.dtype]
        count = entry.nbytes // dtype.itemsize
        return torch.frombuffer(self.map, dtype=dtype, count=count, offset=entry.offset).view(entry.shape)

    def release(self, entry: _Entry) -> None:
        self.unreleased += entry.nbytes
        if self.unreleased >= self.RELEASE_EVERY and hasattr(self.map, "madvise"):
            self.map.madvise(mmap.MADV_DONTNEED)
            self.unreleased = 0


# ---------------------------------------------------------------------- loading


def load(
    folder: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    experts: str = "resident",
    expert_memory: int | None = None,
) -> K3:
    """Build the model of a checkpoint folder (config.json and safetensors in the official layout) and fill it.

    dtype None keeps the stored precision: bfloat16, float32 where the release has it, routed experts packed if they are
    stored packed (inference only). A dtype converts: float32 tensors stay float32 under bfloat16, packed experts are
    decoded exactly. experts 'stream' leaves the routed experts on disk, in the bytes they are stored in, and keeps at
    most `expert_memory` bytes of them (not given: half of what is free when the rest is loaded); inference on a CPU.
    ValueError lists every tensor that is missing, extra or misshapen.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; expected a checkpoint in the official layout")
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype is {dtype}; allowed: a floating-point dtype or None (as stored)")
    _check_streaming(experts, expert_memory, torch.device(device))
    cfg = K3Config.from_json(folder / "config.json")
    entries = without_cut_layers(cfg, checkpoint_entries(folder))
    packed = any(name.endswith(".weight_packed") for name in entries)
    wanted = disk_tensors(cfg, packed)
    refuse_misfits(folder, cfg, wanted, entries)
    with torch.device("meta"):
        model = K3(cfg)
    if experts == "stream":
        return _load_streamed(model, wanted, entries, dtype, expert_memory)
    if packed and dtype is None:
        _pack_experts(model)
    _fill(model, wanted, entries, dtype, torch.device(device))
    return model.eval()


def _check_streaming(experts: str, memory: int | None, device: torch.device) -> None:
    if experts not in ("resident", "stream"):
        raise ValueError(f"experts is {experts!r}; allowed: 'resident' or 'stream'")
    if experts == "resident" and memory is not None:
        raise ValueError(f"expert_memory is {memory}; it needs experts='stream'")
    if experts == "stream" and device.type != "cpu":
        raise ValueError(f"experts is 'stream' on device {device}; allowed: 'stream' on 'cpu', else 'resident'")


def _load_streamed(
    model: K3, wanted: dict[str, DiskTensor], entries: dict[str, _Entry], dtype: torch.dtype | None, memory: int | None
) -> K3:
    """Resident trunk first, then the experts with what is left; of their bytes nothing is read yet."""
    cfg = model.cfg
    routed = {name: spec for name, spec in wanted.items() if spec.expert is not None}
    places = _expert_places(routed, entries)
    form = _expert_form(routed, entries, dtype)
    if memory is not None:
        slots_of(memory, form, cfg.num_experts_per_token, len(places))
    _fill(
        model,
        {n: spec for n, spec in wanted.items() if n not in routed},
        entries,
        dtype,
        torch.device("cpu"),
        _Unmapped,
    )
    if memory is None:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
        memory = max(free, cfg.num_experts_per_token * form.nbytes)
    slots = slots_of(memory, form, cfg.num_experts_per_token, len(places))
    stream = ExpertStream(cfg, ExpertFiles(places), form, slots)
    for layer in model.model.layers:
        if isinstance(layer, DecoderLayer) and isinstance(layer.feed_forward, LatentMoE):
            layer.block_sparse_moe = _streamed(layer.feed_forward, layer.layer, stream)
    return model.eval().requires_grad_(False)


def _streamed(moe: LatentMoE, layer: int, stream: ExpertStream) -> StreamedMoE:
    """The same modules around experts on disk."""
    with torch.device("meta"):
        streamed = StreamedMoE(moe.cfg, layer, stream)
    for name, module in moe.named_children():
        if name != "experts":
            setattr(streamed, name, module)
    return streamed


def _expert_places(routed: dict[str, DiskTensor], entries: dict[str, _Entry]) -> dict[Key, dict[str, Stored]]:
    """Where the tensors of every expert lie."""
    places: dict[Key, dict[str, Stored]] = {}
    for name, spec in routed.items():
        entry, layer = entries[name], re.search(r"layers\.(\d+)\.", spec.target)
        assert layer is not None and spec.expert is not None
        tensor = spec.target.rpartition(".")[2]
        places.setdefault((int(layer[1]), spec.expert), {})[tensor] = Stored(entry.file, entry.offset, entry.nbytes)
    return places


def _expert_form(routed: dict[str, DiskTensor], entries: dict[str, _Entry], dtype: torch.dtype | None) -> ExpertForm:
    """What every expert consists of. ValueError where there are none, or of several types, or of a wider one than the
    model is to compute in: experts are read as they are stored."""
    if not routed:
        raise ValueError("experts is 'stream', but the model has no routed experts; allowed: 'resident'")
    forms = {
        (spec.target.rpartition(".")[2], entries[name].shape, DTYPES[entries[name].dtype])
        for name, spec in routed.items()
    }
    tensors = {tensor: (shape, stored) for tensor, shape, stored in sorted(forms, key=lambda form: form[0])}
    types = sorted({str(stored).removeprefix("torch.") for _, _, stored in forms})
    if len(types) > 1:
        raise ValueError(f"experts is 'stream', but they are stored in {' and '.join(types)}; allowed: one type")
    (_, stored), *_ = tensors.values()
    if dtype is not None and stored != torch.uint8 and torch.promote_types(dtype, stored) != dtype:
        raise ValueError(
            f"dtype is {dtype}, but streamed experts are read as stored, in {stored}; allowed: None, {stored}"
        )
    return ExpertForm(tensors)


def without_cut_layers(cfg: K3Config, entries: dict[str, _Entry]) -> dict[str, _Entry]:
    """A config cut to fewer layers loads from the whole checkpoint: layers past its end are left out."""
    layer = re.compile(re.escape(cfg.text_prefix) + r"model\.layers\.(\d+)\.")

    def kept(name: str) -> bool:
        match = layer.match(name)
        return match is None or int(match[1]) < cfg.num_hidden_layers

    return {name: entry for name, entry in entries.items() if kept(name)}


def refuse_misfits(folder: Path, cfg: K3Config, wanted: dict[str, DiskTensor], entries: dict[str, _Entry]) -> None:
    """ValueError with everything that is missing, unknown or of another shape or type, in one list."""
    problems = []
    missing = [name for name in wanted if name not in entries]
    extra = [name for name in entries if name not in wanted]
    if missing:
        problems.append(f"{len(missing)} missing: {_listed(missing)}")
    if extra:
        problems.append(f"{len(extra)} unknown: {_listed(extra)}")
    wrong = [
        f"{name} is {entry.dtype} {list(entry.shape)}, expected {spec.dtype} {list(spec.shape)}"
        for name, spec in wanted.items()
        if (entry := entries.get(name)) is not None and not _fits(cfg, name, spec, entry)
    ]
    if wrong:
        problems.append(f"{len(wrong)} misshapen: {_listed(wrong)}")
    if problems:
        raise ValueError(f"{folder}: the checkpoint does not fit its config.json; " + "; ".join(problems))


def _fits(cfg: K3Config, name: str, spec: DiskTensor, entry: _Entry) -> bool:
    dtype = entry.dtype == "U8" if spec.dtype == "U8" else entry.dtype in PLAIN_DTYPES
    shapes = [spec.shape]
    if name.endswith("A_log"):  # some exports leave the padding out
        shapes.append((cfg.kda_num_heads,))
    return dtype and entry.shape in shapes


def _listed(names: list[str]) -> str:
    """All of them up to a screenful; a checkpoint of another model would fill a book."""
    return ", ".join(names) if len(names) <= 200 else ", ".join(names[:200]) + f", and {len(names) - 200} more"


def _pack_experts(model: K3) -> None:
    for module in list(model.modules()):
        if isinstance(module, LatentMoE):
            with torch.device("meta"):
                module.experts = PackedExperts(model.cfg)


def _fill(
    model: K3,
    wanted: dict[str, DiskTensor],
    entries: dict[str, _Entry],
    dtype: torch.dtype | None,
    device: torch.device,
    opened: Callable[[Path], _Mapped | _Unmapped] = _Mapped,
) -> None:
    """Copy file by file, in the order of the bytes; destinations are made when their first piece arrives."""
    targets: dict[str, Tensor] = {}
    by_file: dict[Path, list[str]] = {}
    for name in sorted(wanted, key=lambda n: (entries[n].file, entries[n].offset)):
        by_file.setdefault(entries[name].file, []).append(name)
    scales: dict[str, Tensor] = {}
    for file, names in by_file.items():
        mapped = opened(file)
        for name in names:
            entry, spec = entries[name], wanted[name]
            _place(model, name, spec, mapped.read(entry), targets, scales, dtype, device)
            mapped.release(entry)
    assert not scales, "every scale met its packed matrix"
    for target, value in targets.items():
        _assign(model, target, value)


def _place(
    model: K3,
    name: str,
    spec: DiskTensor,
    value: Tensor,
    targets: dict[str, Tensor],
    halves: dict[str, Tensor],
    dtype: torch.dtype | None,
    device: torch.device,
) -> None:
    target = spec.target
    if spec.dtype == "U8" and dtype is not None:  # decode: packed bytes and scales meet, whichever comes first
        stem, half = name.rsplit("_", 1)
        if stem not in halves:
            halves[stem] = value.clone()
            return
        packed, scale = (value, halves.pop(stem)) if half == "packed" else (halves.pop(stem), value)
        value, target = dequantize_mxfp4(packed, scale, dtype), target.rsplit("_", 1)[0]
    elif spec.target.endswith("A_log"):
        value = _without_padding(name, value.flatten(), model.cfg.kda_num_heads)
    shape = value.shape if spec.expert is None else (model.cfg.num_experts, *value.shape)
    if target not in targets:
        targets[target] = torch.empty(shape, dtype=_kept_dtype(model.cfg, target, value, dtype), device=device)
    destination = targets[target] if spec.expert is None else targets[target][spec.expert]
    destination.copy_(value)


def _kept_dtype(cfg: K3Config, target: str, value: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    if dtype is None or value.dtype == torch.uint8:
        # The correction bias steers a top-k over float32 scores: never less, whatever the file says.
        return torch.float32 if target.endswith("e_score_correction_bias") else value.dtype
    return torch.promote_types(dtype, torch.float32) if _FLOAT32.search(target) else dtype


def _without_padding(name: str, value: Tensor, heads: int) -> Tensor:
    if bool((value[heads:] != 0).any()):
        raise ValueError(f"{name}: entries after the first {heads} (one a head) must be zero padding")
    return value[:heads]


def _assign(model: K3, target: str, value: Tensor) -> None:
    path, _, leaf = target.rpartition(".")
    module = model.get_submodule(path)
    if leaf in module._parameters:
        module._parameters[leaf] = nn.Parameter(value)
    else:
        module._buffers[leaf] = value


# ---------------------------------------------------------------------- saving


def write_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """A safetensors file. OSError, as from any other writer, for a full disk or a folder that is gone."""
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{path.parent.parent} cannot be written to: {error}") from None


def save(
    model: K3,
    folder: str | os.PathLike[str],
    experts: str = "bf16",
    dtype: torch.dtype = torch.bfloat16,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write config.json, generation_config.json and the weights in the official layout.

    experts: 'mxfp4' packs the routed experts, 'bf16' stores them plain, in `dtype`. dtype: of everything that is not
    kept in float32 (float32 for a training checkpoint). Files are written aside and renamed; stale shards of an
    earlier save are removed.
    """
    if experts not in ("mxfp4", "bf16"):
        raise ValueError(f"experts is {experts!r}; allowed: 'mxfp4' or 'bf16'")
    if stream_of(model) is not None:
        raise ValueError("the model's experts are streamed; load with experts='resident' to save it")
    if dtype not in DTYPES.values() or not dtype.is_floating_point:
        raise ValueError(f"dtype is {dtype}; allowed: bfloat16, float16, float32, float64")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    cfg = replace(with_expert_format(model.cfg, experts), dtype=str(dtype).removeprefix("torch."))
    cfg = replace(cfg, num_nextn_predict_layers=0)  # model/mtp.py adds one
    specs = disk_tensors(cfg, packed=experts == "mxfp4")
    shards = _shards(specs, max_shard_bytes, dtype)
    names = [SINGLE] if len(shards) == 1 else [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in _from_1(shards)]
    state = model.state_dict()
    with tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") as aside:
        for file, shard in zip(names, shards):
            tensors = {name: _stored(cfg, name, specs[name], state, dtype) for name in shard}
            write_tensors(tensors, Path(aside) / file)
        if len(shards) > 1:
            weight_map = {name: file for file, shard in zip(names, shards) for name in shard}
            total = sum(_nbytes(spec, dtype) for spec in specs.values())
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (Path(aside) / INDEX).write_text(json.dumps(index, indent=2))
            names.append(INDEX)
        generation = {"bos_token_id": cfg.bos_token_id, "eos_token_id": cfg.eos_token_id}
        (Path(aside) / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
        cfg.to_json(Path(aside) / "config.json")
        # Shards are renamed one by one: without an index, new and old ones are never taken for one checkpoint.
        (folder / INDEX).unlink(missing_ok=True)
        for file in [*names, "generation_config.json", "config.json"]:
            _publish(Path(aside) / file, folder / file)
    for stale in [*folder.glob(SINGLE), *folder.glob("model-*-of-*.safetensors")]:
        if stale.name not in names:
            stale.unlink()


def _from_1(items: list[list[str]]) -> range:
    return range(1, len(items) + 1)


def _shards(specs: dict[str, DiskTensor], limit: int, dtype: torch.dtype) -> list[list[str]]:
    """Names in order, cut where the next tensor would pass the limit."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, spec in specs.items():
        nbytes = _nbytes(spec, dtype)
        if shards[-1] and size + nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += nbytes
    return shards


def _nbytes(spec: DiskTensor, dtype: torch.dtype) -> int:
    return spec.nbytes if spec.dtype != "BF16" else spec.nbytes // 2 * dtype.itemsize


def _stored(cfg: K3Config, name: str, spec: DiskTensor, state: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    """The tensor as it goes to disk."""
    value = _from_state(name, spec, state)
    if spec.dtype == "U8":
        return value.contiguous()
    if spec.target.endswith("A_log"):
        padded = torch.zeros(_a_log_shape(cfg), dtype=value.dtype).flatten()
        padded[: len(value)] = value.cpu()
        value = padded.view(spec.shape)
    wide = torch.promote_types(dtype, torch.float32) if spec.dtype == "F32" else dtype
    return value.detach().to(device="cpu", dtype=wide).contiguous()


def _from_state(name: str, spec: DiskTensor, state: dict[str, Tensor]) -> Tensor:
    """A slice of the model's state, packed or unpacked where disk and memory differ."""
    if spec.expert is None:
        return state[spec.target]
    if spec.target in state:
        return state[spec.target][spec.expert]
    if spec.dtype == "U8":
        stem, half = spec.target.rsplit("_", 1)
        return quantize_mxfp4(state[stem][spec.expert].detach())[0 if half == "packed" else 1].cpu()
    packed, scale = state[f"{spec.target}_packed"][spec.expert], state[f"{spec.target}_scale"][spec.expert]
    return dequantize_mxfp4(packed, scale)


def _publish(source: Path, destination: Path) -> None:
    with open(source, "rb") as stream:
        os.fsync(stream.fileno())
    os.chmod(source, 0o644)  # temporary files are private, checkpoints are not
    os.replace(source, destination)
