"""Which documents are trained on: sources, mixture, and the fate of every document.

A mixture is a list of sources with weights, their shares of the training tokens. Before anything is encoded, every
cleaned document is hashed once, and the hash alone decides:

    fate(document) = duplicate       if its digest was seen before, in this source or an earlier one
                   = left out        if the source has a byte limit and the digest ranks beyond it
                   = validation      if unit(digest) < share
                   = train           otherwise

So the split follows the text and never its place, and no line of a validation document is trained on under another
name. A source with fewer documents than the share needs (one long file, say) is first cut into sections at
paragraph ends. Memory holds digests, not texts.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nanok3.data.clean import clean, digest, sections, unit
from nanok3.data.corpus import Document, Report, Skipped, documents, log_skipped
from nanok3.data.packages import BUILT_IN


@dataclass(frozen=True)
class Source:
    """A corpus and its share of the training tokens. `path` is None for a built-in one; `max_bytes` takes only so
    much of it, by hash."""

    name: str
    weight: float = 1.0
    path: Path | None = None
    max_bytes: int | None = None


PROFILES: dict[str, tuple[Source, ...]] = {
    "tiny": (
        Source("prose", 0.45),
        Source("chat", 0.25, max_bytes=6_000_000),
        Source("code", 0.25, max_bytes=6_000_000),
        Source("math", 0.05),
    ),
    "full": (
        Source("prose", 0.30),
        Source("chat", 0.25),
        Source("code", 0.35),
        Source("math", 0.03),
        Source("math-full", 0.07),
    ),
}
"""Mixtures: `tiny` for the demo (18 MB of text, 16 MB to download), `full` for all that is built in (39 MB, 102 MB)."""


def _known(name: str) -> bool:
    return name in BUILT_IN or (name != "" and os.path.exists(name))


def weight_of(text: str) -> float:
    """The number that `text` writes, nan if it is none."""
    return float(text) if re.fullmatch(r"[0-9]+\.?[0-9]*|\.[0-9]+", text, re.ASCII) else math.nan


def parse_source(text: str) -> Source:
    """`name`, `name:weight`, `path` or `path:weight`. A built-in name wins over a file of that name. Raises
    ValueError for a path that does not exist or a weight that is not a positive, finite number."""
    name, colon, weight = text.rpartition(":")
    value = weight_of(weight)
    if not colon or (math.isnan(value) and (_known(text) or not _known(name))):
        name, weight, value = text, "1", 1.0
    if not 0 < value < math.inf:
        raise ValueError(f"source {text!r}: weight {weight}; expected a positive number")
    if not _known(name):
        raise ValueError(f"source {text!r}: neither one of {', '.join(BUILT_IN)} nor a file or folder")
    return Source(name, value) if name in BUILT_IN else Source(Path(name).resolve().stem, value, Path(name))


def mixture(profile: str, sources: Sequence[str] = ()) -> tuple[Source, ...]:
    """The sources given as text, or those of the profile if there are none. Raises ValueError for an unknown
    profile or two sources of one name."""
    if not sources:
        if profile not in PROFILES:
            raise ValueError(f"profile {profile!r}; expected one of {', '.join(PROFILES)}")
        return PROFILES[profile]
    parsed = tuple(map(parse_source, sources))
    twice = [name for name, count in Counter(source.name for source in parsed).items() if count > 1]
    if twice:
        raise ValueError(f"sources: two are called {twice[0]!r}; rename a file or put both into one folder")
    return parsed


@dataclass
class Plan:
    """What becomes of one source: how to read its cleaned documents (again and again), split and bytes of every
    digest that is kept, and the counts for the report."""

    source: Source
    read: Callable[[], Iterator[Document]]
    split: dict[bytes, str]
    sizes: dict[bytes, int]
    duplicates: int
    left_out: int
    skipped: int


def _reader(source: Source, cache: Path | None, report: Report) -> Callable[[], Iterator[Document]]:
    """Built-in corpora are small and kept; the user's files may not fit into memory and are read anew each time,
    reported on the first."""
    if source.path is None:
        kept = list(BUILT_IN[source.name](cache))
        return lambda: iter(kept)
    path, reports = source.path, iter([report])
    return lambda: documents(path, source.name, next(reports, lambda skipped: None))


def _cleaned(documents: Iterator[Document], most: int | None = None) -> Iterator[Document]:
    """Documents with clean texts, cut into sections of at most `most` characters if that is given."""
    for document in documents:
        text = clean(document.text)
        if most is None:
            yield Document(text, document.source, document.name)
            continue
        for number, part in enumerate(sections(text, most // 2, most)):
            yield Document(part, document.source, f"{document.name}#{number}")


def _survey(texts: Iterator[Document], seed: int, seen: set[bytes]) -> tuple[dict[bytes, int], int]:
    """Digest -> bytes of the documents that are not in `seen` and not repeated, and how many were."""
    sizes: dict[bytes, int] = {}
    duplicates = 0
    for document in texts:
        key = digest(document.text, seed)
        if key in seen or key in sizes:
            duplicates += 1
        elif document.text:
            sizes[key] = len(document.text.encode())
    return sizes, duplicates


def _limit(sizes: dict[bytes, int], max_bytes: int | None) -> dict[bytes, int]:
    """The documents, in their order, that rank first by hash and together stay within `max_bytes`."""
    if max_bytes is None or sum(sizes.values()) <= max_bytes:
        return sizes
    kept: set[bytes] = set()
    total = 0
    for key in sorted(sizes, key=lambda key: unit(key, 1)):
        total += sizes[key]
        if kept and total > max_bytes:
            break
        kept.add(key)
    return {key: size for key, size in sizes.items() if key in kept}


def _split(keys: Iterable[bytes], share: float) -> dict[bytes, str]:
    """Train or validation for every digest; with two documents or more and a share, at least one of each."""
    by_hash = sorted(keys, key=lambda key: unit(key, 0))
    count = sum(unit(key, 0) < share for key in by_hash)
    if share:
        count = min(max(count, 1), len(by_hash) - 1)
    return {key: "validation" if rank < count else "train" for rank, key in enumerate(by_hash)}


def _plan_source(source: Source, share: float, seed: int, seen: set[bytes], cache: Path | None, report: Report) -> Plan:
    skipped: list[Skipped] = []

    def note(skip: Skipped) -> None:
        skipped.append(skip)
        report(skip)

    reader, most = _reader(source, cache, note), None
    sizes, duplicates = _survey(_cleaned(reader()), seed, seen)
    if len(sizes) * share < 1 and share:
        most = min(16_000, max(200, int(sum(sizes.values()) * share / 2)))
        sizes, duplicates = _survey(_cleaned(reader(), most), seed, seen)
    kept = _limit(sizes, source.max_bytes)
    seen.update(kept)
    return Plan(
        source=source,
        read=lambda: _cleaned(reader(), most),
        split=_split(kept, share),
        sizes=kept,
        duplicates=duplicates,
        left_out=len(sizes) - len(kept),
        skipped=sum(skip.count for skip in skipped),
    )


def plan(
    sources: Sequence[Source],
    validation: float = 0.05,
    seed: int = 0,
    cache: Path | None = None,
    report: Report = log_skipped,
) -> list[Plan]:
    """Read all sources once and decide the fate of every document. `cache` holds the packages (None: the user's
    cache folder), `report` hears of what is skipped. Raises ValueError for a source that cannot be read, a weight
    that is not positive and finite, or a validation share outside 0 to 0.5."""
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed: {seed}; expected 0 to 2**64 - 1")
    if not 0 <= validation <= 0.5:
        raise ValueError(f"validation: {validation}; expected a share from 0 to 0.5")
    for source in sources:
        if not 0 < source.weight < math.inf:
            raise ValueError(f"source {source.name}: weight {source.weight}; expected a positive number")
    seen: set[bytes] = set()
    return [_plan_source(source, validation, seed, seen, cache, report) for source in sources]


def kept_documents(plan: Plan, seed: int = 0) -> Iterator[tuple[str, Document]]:
    """Split and document of everything the plan kept, in the order of the source. A repeated document comes once;
    one that was not there on the first reading does not come."""
    split = dict(plan.split)
    for document in plan.read():
        where = split.pop(digest(document.text, seed), None)
        if where is not None:
            yield where, document


def training_texts(plans: Sequence[Plan], max_bytes: int, seed: int = 0) -> Iterator[str]:
    """At most `max_bytes` of training text to learn a tokenizer from, in the proportions of the mixture; documents
    are taken by hash. A source too small for its part is taken whole."""
    weights = sum(plan.source.weight for plan in plans)
    for plan in plans:
        train = {key: size for key, size in plan.sizes.items() if plan.split[key] == "train"}
        part = _limit(train, int(max_bytes * plan.source.weight / weights))
        for _, document in kept_documents(plan, seed):
            if digest(document.text, seed) in part:
                yield document.text
