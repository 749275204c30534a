"""The prepared form of a mixture: token shards that are written once and memory-mapped ever after.

    manifest.json                        counts and hashes of what follows; written last
    tokenizer/                           the tokenizer that made the ids
    train/SOURCE-00000.bin, .npy         ids, uint16 or uint32; where each document begins, and the end
    validation/SOURCE-00000.bin, .npy
    validation/SOURCE.txt                the validation documents as text, end to end, for other compressors

A source of pictures (pictures/kinds.py) has, in addition, the files of picture_shards.py beside each token shard, and

    validation/SOURCE.jsonl              a line for each validation document: its questions with their answers, its keys

A document is its ids and `[EOS]` (ours). The weights of the mixture are kept in the manifest and applied by the
loader, and so are the rows of a run before which a kind of pictures takes no part; preparing does not sample. Each
source is read a second time here (`plan` was the first), so memory holds one batch and one shard, never a corpus.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from nanok3.data.corpus import Document, Report, log_skipped
from nanok3.data.files import remove_left, replacing, write_file
from nanok3.data.picture_shards import (
    PICTURE_SHARD,
    PictureShards,
    PictureWriter,
    StoredPicture,
    read_array,
    verify_pictures,
)
from nanok3.data.picture_sources import WORD_BYTES, check_mix, drawn, write_kind
from nanok3.data.picture_text import PlacedPicture, media_pad_id
from nanok3.data.pictures.document import Question
from nanok3.data.pictures.kinds import PictureMix
from nanok3.data.plan import Plan, Source, kept_documents, plan, training_texts
from nanok3.data.tokenizer import Tokenizer

SPLITS = ("train", "validation")
MANIFEST = "manifest.json"
FORMAT = 1
PICTURE_FORMAT = 2
"""Of a folder with pictures, which programs that know only the first must not read as text."""
_SHARD_TOKENS = 1 << 24
_BATCH_CHARS = 4 << 20

_SHARD = {"name": str, "documents": int, "tokens": int, "sha256": str}
_SPLIT = {"documents": int, "bytes": int, "tokens": int, "shards": [_SHARD]}
_ENTRY = {"weight": int | float, "train": _SPLIT, "validation": _SPLIT}
_PICTURE_SPLIT = _SPLIT | {"pictures": int, "patches": int, "shards": [_SHARD | PICTURE_SHARD]}
_PICTURE_ENTRY = _ENTRY | {"begin": int, "train": _PICTURE_SPLIT, "validation": _PICTURE_SPLIT}
_MANIFEST = {"tokenizer": str, "vocab_size": int, "eos_id": int, "pad_id": int, "dtype": str, "sources": {}}


class _SplitWriter:
    """Writes one split of one source: ids into shards, and counts. `pictures` for one that has any."""

    def __init__(
        self, folder: Path, source: str, split: str, dtype: np.dtype[Any], pictures: PictureWriter | None = None
    ) -> None:
        self.folder, self.source, self.split, self.dtype, self.pictures = folder, source, split, dtype, pictures
        self.shards: list[dict[str, Any]] = []
        self.pending: list[np.ndarray] = []
        self.documents = self.bytes = self.tokens = self.pending_tokens = 0

    def add(
        self,
        ids: list[int],
        size: int,
        placed: Sequence[PlacedPicture] = (),
        told: Sequence[tuple[int, int]] = (),
    ) -> None:
        for each in placed:
            assert self.pictures is not None
            self.pictures.add(len(self.pending), each)
        if self.pictures is not None:
            self.pictures.tell(len(self.pending), told)
        self.pending.append(np.array(ids, self.dtype))
        self.documents += 1
        self.bytes += size
        self.tokens += len(ids)
        self.pending_tokens += len(ids)
        if self.pending_tokens >= _SHARD_TOKENS:
            self.flush()

    def flush(self) -> None:
        """Write the pending documents as one shard."""
        if not self.pending:
            return
        name = f"{self.split}/{self.source}-{len(self.shards):05d}"
        content = np.concatenate(self.pending).tobytes()
        starts = np.cumsum([0, *map(len, self.pending)], dtype=np.int64)
        write_file(self.folder / f"{name}.bin", content)
        with replacing(self.folder / f"{name}.npy") as file:
            np.save(file, starts)
        self.shards.append(
            {
                "name": name,
                "documents": len(self.pending),
                "tokens": self.pending_tokens,
                "sha256": hashlib.sha256(content).hexdigest(),
            }
        )
        if self.pictures is not None:
            self.shards[-1] |= self.pictures.flush(self.folder / name)
            self.pictures = PictureWriter()
        self.pending, self.pending_tokens = [], 0

    def summary(self) -> dict[str, Any]:
        return {
            "documents": self.documents,
            "bytes": self.bytes,
            "tokens": self.tokens,
            **({name: sum(s[name] for s in self.shards) for name in ("pictures", "patches")} if self.pictures else {}),
            "shards": self.shards,
        }


def _batches(kept: Iterator[tuple[str, Document]]) -> Iterator[list[tuple[str, Document]]]:
    """Lists of a few million characters, to be encoded by several threads at once."""
    batch: list[tuple[str, Document]] = []
    size = 0
    for pair in kept:
        batch.append(pair)
        size += len(pair[1].text)
        if size >= _BATCH_CHARS:
            yield batch
            batch, size = [], 0
    yield batch


def _write_source(plan: Plan, tokenizer: Tokenizer, folder: Path, seed: int) -> dict[str, Any]:
    """Encode and write one source; returns its part of the manifest."""
    name = plan.source.name
    writers = {split: _SplitWriter(folder, name, split, token_dtype(tokenizer.vocab_size)) for split in SPLITS}
    with replacing(folder / "validation" / f"{name}.txt") as raw:
        for batch in _batches(kept_documents(plan, seed)):
            encoded = tokenizer.encode_batch(document.text for _, document in batch)
            for (split, document), ids in zip(batch, encoded, strict=True):
                content = document.text.encode()
                writers[split].add([*ids, tokenizer.eos_id], len(content))
                if split == "validation":
                    raw.write(content)
    for writer in writers.values():
        writer.flush()
    return {
        "weight": plan.source.weight,
        "duplicates": plan.duplicates,
        "skipped": plan.skipped,
        "left_out": plan.left_out,
        **{split: writer.summary() for split, writer in writers.items()},
    }


def _write_pictures(
    mix: PictureMix,
    plans: Sequence[Plan],
    tokenizer: Tokenizer,
    folder: Path,
    validation: float,
    seed: int,
    cache: Path | None,
) -> dict[str, Any]:
    """All kinds of a mix; returns their part of the manifest."""
    dtype = token_dtype(tokenizer.vocab_size)
    weights, begins = mix.weights(sum(plan.source.weight for plan in plans)), mix.begins()
    written = {}
    for kind, documents in drawn(mix, training_texts(plans, WORD_BYTES, seed), validation, seed, cache).items():
        writers = {split: _SplitWriter(folder, kind, split, dtype, PictureWriter()) for split in SPLITS}
        write_kind(kind, documents, tokenizer, folder, writers)
        counts = {split: writer.summary() for split, writer in writers.items()}
        shares = {"weight": weights[kind], "begin": begins[kind]}
        written[kind] = {**shares, "duplicates": 0, "skipped": 0, "left_out": 0, **counts}
    return written


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest of uint16 and uint32 that holds every id, little-endian."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def _check_apart(folder: Path, sources: Sequence[Source]) -> None:
    """ValueError if `folder` holds a source or lies in one: the next run would read what this one writes, and train
    on the validation documents."""
    out = folder.resolve()
    for source in sources:
        path = source.path.resolve() if source.path else None
        if path and (out == path or path in out.parents or out in path.parents):
            raise ValueError(f"out: {folder} overlaps the source {source.path}; choose a folder apart from the sources")


def _remove_left(folder: Path) -> None:
    """What a run that was killed was writing, and would lie there unseen."""
    for split in SPLITS:
        for left in (folder / split).glob(".*-????????"):
            remove_left(left.with_name(left.name[1:-9]))


def prepare(
    sources: Sequence[Source],
    tokenizer: Tokenizer,
    out: str | os.PathLike[str],
    validation: float = 0.05,
    seed: int = 0,
    cache: Path | None = None,
    report: Report = log_skipped,
    progress: Callable[[str], None] = lambda step: None,
    pictures: PictureMix | None = None,
) -> dict[str, Any]:
    """Write the folder described above and return its manifest. An interrupted run leaves a folder without a
    manifest, which the loader refuses; the next run writes it anew. Arguments as for `plan`; `pictures` adds picture
    documents. Raises ValueError if `out` holds a source or lies in one, ImportError if a kind of pictures needs a
    package that is missing."""
    folder = Path(out)
    _check_apart(folder, sources)
    if pictures is not None:
        check_mix(pictures, [source.name for source in sources], tokenizer)
    progress("reading " + ", ".join(source.name for source in sources))
    plans = plan(sources, validation, seed, cache, report)
    (folder / MANIFEST).unlink(missing_ok=True)  # from here on the folder is not whole
    _remove_left(folder)
    written = {}
    for each in plans:
        progress(f"encoding {each.source.name}")
        written[each.source.name] = _write_source(each, tokenizer, folder, seed)
    if pictures is not None:
        progress("drawing pictures")
        written |= _write_pictures(pictures, plans, tokenizer, folder, validation, seed, cache)
    tokenizer.save(folder / "tokenizer")
    manifest = {
        "format": FORMAT if pictures is None else PICTURE_FORMAT,
        "tokenizer": tokenizer.fingerprint(),
        "vocab_size": tokenizer.vocab_size,
        "eos_id": tokenizer.eos_id,
        "pad_id": tokenizer.pad_id,
        **({} if pictures is None else {"media_pad_id": media_pad_id(tokenizer)}),
        "dtype": token_dtype(tokenizer.vocab_size).name,
        "seed": seed,
        "validation": validation,
        "sources": written,
    }
    write_file(folder / MANIFEST, (json.dumps(manifest, indent=2) + "\n").encode())
    return manifest


class TokenSource:
    """The documents of one source and split, as ids; with `pictures`, those that stand among them. Shards are mapped
    when first touched."""

    def __init__(self, folder: Path, name: str, split: str, manifest: dict[str, Any]) -> None:
        shards = manifest["sources"][name][split]["shards"]
        has_pictures = "pictures" in manifest["sources"][name][split]
        self.name, self.split, self.pad_id = name, split, int(manifest["pad_id"])
        self.bytes = int(manifest["sources"][name][split]["bytes"])
        self._dtype = np.dtype(manifest["dtype"]).newbyteorder("<")
        self._paths = [folder / f"{shard['name']}.bin" for shard in shards]
        for path, shard in zip(self._paths, shards, strict=True):
            _check_size(path, shard["tokens"] * self._dtype.itemsize)
        self._starts = [
            _read_starts(path.with_suffix(".npy"), shard) for path, shard in zip(self._paths, shards, strict=True)
        ]
        self._first = np.cumsum([0, *(len(starts) - 1 for starts in self._starts)])
        self._maps: dict[int, np.ndarray] = {}
        self.lengths = np.concatenate([np.diff(starts) for starts in self._starts] or [np.zeros(0, np.int64)])
        """Tokens of every document, `[EOS]` counted."""
        self.pictures = PictureShards([folder / shard["name"] for shard in shards], shards) if has_pictures else None
        self.patches = np.concatenate(
            [self.pictures.patches(i, len(s) - 1) for i, s in enumerate(self._starts) if self.pictures]
            or [np.zeros(len(self.lengths), np.int64)]
        )
        """Patches of every document's pictures, the work that they are to the tower."""
        hashes = [shard["sha256"] for shard in shards] + [shard["pictures_sha256"] for shard in shards if has_pictures]
        self.digest = hashlib.sha256(repr([manifest["tokenizer"], name, split, hashes]).encode()).hexdigest()
        """Stands for all ids of the source."""

    def __len__(self) -> int:
        return len(self.lengths)

    def locate(self, document: int) -> tuple[int, int]:
        """Shard of a document and its number inside that shard."""
        shard = int(np.searchsorted(self._first, document, side="right")) - 1
        return shard, document - int(self._first[shard])

    def tokens(self, document: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Ids `start` to `stop` of a document, (n,) in the shard's dtype, without a copy."""
        shard, local = self.locate(document)
        if shard not in self._maps:
            self._maps[shard] = np.memmap(self._paths[shard], self._dtype, "r")
        begin, end = self._starts[shard][local : local + 2]
        return self._maps[shard][begin:end][start:stop]

    def pictures_of(self, document: int) -> list[StoredPicture]:
        """The pictures of a document in their order; none in a source of texts."""
        return self.pictures.of(*self.locate(document)) if self.pictures else []

    def told_of(self, document: int) -> list[tuple[int, int]]:
        """Bounds of the ids that only the document's pictures tell."""
        return self.pictures.told(*self.locate(document)) if self.pictures else []


def _check_size(path: Path, size: int) -> None:
    found = path.stat().st_size if path.exists() else None
    if found != size:
        raise ValueError(f"{path}: {'missing' if found is None else f'{found} bytes'}; the manifest says {size}")


def _read_starts(path: Path, shard: dict[str, Any]) -> np.ndarray:
    """Where the documents of a shard begin, and the end, (documents + 1,)."""
    starts = read_array(path)
    if starts.dtype.kind != "i" or starts.shape != (shard["documents"] + 1,):
        raise ValueError(f"{path}: {starts.dtype} {starts.shape}; expected {shard['documents'] + 1} integers")
    if starts[0] != 0 or starts[-1] != shard["tokens"] or (np.diff(starts) < 1).any():
        raise ValueError(f"{path}: does not rise from 0 to {shard['tokens']}, the tokens of the shard")
    return starts


def _check_shape(path: Path, value: object, shape: Any, field: str) -> None:
    """ValueError unless `value` is built like `shape`: a type, a dict of the keys it must have, or a list of one."""
    kind = type(shape) if isinstance(shape, dict | list) else shape
    expected = {dict: "a mapping", list: "a list", int: "an integer", str: "a text"}.get(kind, "a number")
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{path}: {field} is {str(value)[:60]!r}; expected {expected}")
    if isinstance(value, dict):
        for key, inner in shape.items():
            if key not in value:
                raise ValueError(f"{path}: {field} has no {key!r}; prepare the data again (nanok3 data)")
            _check_shape(path, value[key], inner, f"{field}.{key}")
    elif isinstance(value, list):
        for number, each in enumerate(value):
            _check_shape(path, each, shape[0], f"{field}[{number}]")


def _read_manifest(path: Path) -> dict[str, Any]:
    """The manifest with everything that readers rely on; ValueError, with the path, for any other content."""
    try:
        manifest = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON ({error})") from error
    _check_shape(path, manifest, {"format": int}, "manifest")
    if manifest["format"] not in (FORMAT, PICTURE_FORMAT):
        raise ValueError(f"{path}: format {manifest['format']}; this version reads {FORMAT} and {PICTURE_FORMAT}")
    _check_shape(path, manifest, _MANIFEST, "manifest")
    if manifest["format"] == PICTURE_FORMAT:
        _check_shape(path, manifest, {"media_pad_id": int}, "manifest")
    for name, entry in manifest["sources"].items():
        _check_shape(path, entry, _ENTRY, f"sources.{name}")
        if "begin" in entry or any("pictures" in entry[split] for split in SPLITS):
            _check_shape(path, entry, _PICTURE_ENTRY, f"sources.{name}")
    if manifest["dtype"] not in ("uint16", "uint32"):
        raise ValueError(f"{path}: dtype {manifest['dtype']!r}; expected uint16 or uint32")
    return manifest


class Prepared:
    """A prepared folder, opened for reading. Raises ValueError if it is incomplete or of another format; `verify`
    looks for damage inside the files."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        path = self.folder / MANIFEST
        if not path.is_file():
            raise ValueError(f"{path}: missing; the folder was not prepared, or not to the end (nanok3 data)")
        self.manifest = _read_manifest(path)

    def sources(self, split: str = "train") -> list[TokenSource]:
        """The sources that have documents in `split`."""
        names = [name for name, entry in self.manifest["sources"].items() if entry[split]["documents"]]
        return [TokenSource(self.folder, name, split, self.manifest) for name in names]

    def weights(self, split: str = "train") -> list[float]:
        """Their weights, in the same order."""
        entries = self.manifest["sources"].values()
        return [float(entry["weight"]) for entry in entries if entry[split]["documents"]]

    def begins(self, split: str = "train") -> list[int]:
        """The first row of a run in which each takes part, in the same order; 0 for what takes part from the start."""
        entries = self.manifest["sources"].values()
        return [int(entry.get("begin", 0)) for entry in entries if entry[split]["documents"]]

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the ids; ValueError if the folder's is damaged or was exchanged."""
        path = self.folder / "tokenizer"
        tokenizer = Tokenizer.load(path)
        if tokenizer.fingerprint() != self.manifest["tokenizer"]:
            raise ValueError(f"{path}: changed, not the tokenizer that made the ids; prepare the data again")
        return tokenizer

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """ValueError unless `tokenizer` is the one that made the ids."""
        if tokenizer.fingerprint() != self.manifest["tokenizer"]:
            raise ValueError(
                f"{self.folder}: prepared with another tokenizer (vocab_size {self.manifest['vocab_size']}, "
                f"given {tokenizer.vocab_size}); prepare the data again"
            )

    def validation_text(self, name: str) -> bytes:
        """The validation documents of one source, end to end; as many bytes as its `TokenSource.bytes`."""
        return (self.folder / "validation" / f"{name}.txt").read_bytes()

    def validation_questions(self, name: str) -> list[list[Question]]:
        """The questions of every validation document of a picture source, in the order of its documents. Raises
        ValueError if the file is damaged."""
        path = self.folder / "validation" / f"{name}.jsonl"
        try:
            records = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
            found = [[Question(**question) for question in record["questions"]] for record in records]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: unreadable ({error}); prepare the data again") from error
        if len(found) != (documents := self.manifest["sources"][name]["validation"]["documents"]):
            raise ValueError(f"{path}: questions on {len(found)} documents; the manifest has {documents}")
        return found

    def verify(self) -> None:
        """Read every file and compare it with the manifest: shards by their hash, the places where documents begin
        by the `[EOS]` before them, the tokenizer by its fingerprint, validation texts by their size. Raises one
        ValueError that names all damaged files."""
        checks: list[Callable[[], object]] = [self.tokenizer]
        for name, entry in self.manifest["sources"].items():
            text = self.folder / "validation" / f"{name}.txt"
            checks.append(partial(_check_size, text, entry["validation"]["bytes"]))
            if "pictures" in entry["validation"]:
                checks.append(partial(self.validation_questions, name))
            shards = [shard for split in SPLITS for shard in entry[split]["shards"]]
            checks += [partial(self._verify_shard, shard) for shard in shards]
        damaged = []
        for check in checks:
            try:
                check()
            except ValueError as error:
                damaged.append(str(error))
        if damaged:
            raise ValueError("\n".join(damaged))

    def _verify_shard(self, shard: dict[str, Any]) -> None:
        path = self.folder / f"{shard['name']}.bin"
        dtype = np.dtype(self.manifest["dtype"]).newbyteorder("<")
        _check_size(path, shard["tokens"] * dtype.itemsize)
        content = path.read_bytes()
        if hashlib.sha256(content).hexdigest() != shard["sha256"]:
            raise ValueError(f"{path}: damaged, its sha256 is not the one of the manifest; prepare the data again")
        starts = _read_starts(path.with_suffix(".npy"), shard)
        ids = np.frombuffer(content, dtype)
        if "pictures" in shard:
            pads = np.flatnonzero(ids == self.manifest["media_pad_id"])
            verify_pictures(self.folder / shard["name"], shard, pads, starts)
        elif (ids == self.manifest.get("media_pad_id", -1)).any():
            path = self.folder / MANIFEST
            raise ValueError(f"{path}: {shard['name']} has placeholders of pictures, but no pictures")
        if not np.array_equal(starts[1:] - 1, np.flatnonzero(ids == self.manifest["eos_id"])):
            raise ValueError(f"{path.with_suffix('.npy')}: damaged, documents do not begin after [EOS]")
