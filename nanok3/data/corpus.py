"""The user's own files as documents: `.txt`, `.md` and `.py` (one document a file), `.jsonl` (one a line) and
`.parquet` (one a row).

    for document in documents("notes/"):        a folder, recursively and sorted, or one file
        document.text, document.name

A JSON record or a parquet table gives its `text`, or else its `content`; a JSON record may hold `messages`
instead (a list of `{"role", "content"}`), which become blocks `role: content` with an empty line between them.

What is broken never passes silently:

| input | given by name | found in a folder |
|---|---|---|
| not UTF-8, a zero byte (binary), an unreadable or truncated parquet, another suffix | refused | reported, skipped |
| nothing in it: an empty file, no line or row that can be used | refused | reported, skipped |
| a pipe, a device, a broken link, a folder that cannot be read | refused | reported, skipped |
| a link to a folder | read | reported, skipped |
| a jsonl line that is no JSON record with text, not UTF-8, or longer than a limit | reported, skipped | the same |
| an empty document (nothing but blanks) | reported, skipped | the same |

"Refused" is a `ValueError` with the file's name; a folder is refused when nothing in it can be read. "Reported"
goes to `report`, by default to the log, once for each file and reason. Of a parquet in a folder, the rows before the
damage are kept. Names that start with a dot are left alone.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_LINE_BYTES = 1 << 20
"""The longest line of a .jsonl file that is read, in bytes."""

_LOG = logging.getLogger("nanok3.data")
_FIELDS = ("text", "content")


@dataclass(frozen=True)
class Document:
    """One text to train on. `source` is the corpus it belongs to, `name` tells where in it: a file, with line or
    row number where a file holds many."""

    text: str
    source: str
    name: str


@dataclass(frozen=True)
class Skipped:
    """`count` documents that were left out of `name` for one reason."""

    name: str
    reason: str
    count: int = 1


Report = Callable[[Skipped], None]


def log_skipped(skipped: Skipped) -> None:
    """Write one line to the log `nanok3.data`."""
    _LOG.warning("%s: %s; skipped", skipped.name, skipped.reason)


class _Unusable(str):
    """In the place of a text: the reason why there is none."""


_Item = tuple[str, str | _Unusable]
"""A place inside a file ("", "line 3", "row 3") and the text found there."""


def _decode(content: bytes) -> str | _Unusable:
    if b"\0" in content:
        return _Unusable(f"binary (a zero byte at offset {content.index(0)})")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return _Unusable(f"not UTF-8 (byte 0x{content[error.start]:02x} at offset {error.start})")
    return text if text.strip() else _Unusable("empty")


def _read_text(path: Path, max_line_bytes: int) -> Iterator[_Item]:
    yield "", _decode(path.read_bytes())


def _message(message: dict[str, Any]) -> str:
    content = message["content"]
    if not isinstance(content, str):
        content = "".join(part["text"] for part in content if part.get("type") == "text")
    return f"{message['role']}: {content}"


def _record_text(line: bytes) -> str | _Unusable:
    """The text of one line of JSON."""
    try:
        record = json.loads(line.decode())
        if isinstance(record, dict) and "messages" in record and not any(key in record for key in _FIELDS):
            text: object = "\n\n".join(map(_message, record["messages"]))
        else:
            text = next((record[key] for key in _FIELDS if key in record), None)
    except UnicodeDecodeError:
        return _Unusable("not UTF-8")
    except json.JSONDecodeError:
        return _Unusable("not JSON")
    except RecursionError:
        return _Unusable("nested too deeply")
    except ValueError:  # Python's limit for reading an integer
        return _Unusable("a number of too many digits")
    except (TypeError, KeyError, AttributeError):
        return _Unusable("no record with text, content or messages")
    if not isinstance(text, str):
        return _Unusable("no record with text, content or messages")
    return text if text.strip() else _Unusable("empty")


def _read_jsonl(path: Path, max_line_bytes: int) -> Iterator[_Item]:
    with path.open("rb") as file:
        number = 0
        while line := file.readline(max_line_bytes + 1):
            number += 1
            if len(line) <= max_line_bytes or line.endswith(b"\n"):
                if line.strip():
                    yield f"line {number}", _record_text(line.removeprefix(b"\xef\xbb\xbf"))
                continue
            while line and not line.endswith(b"\n"):
                line = file.readline(max_line_bytes)
            yield f"line {number}", _Unusable(f"longer than {max_line_bytes} bytes")


def _read_parquet(path: Path, max_line_bytes: int) -> Iterator[_Item]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(f"{path}: reading .parquet needs pyarrow: pip install 'nanok3[data]'") from error
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            column = next((field for field in _FIELDS if field in table.schema_arrow.names), None)
            if column is None:
                raise ValueError(f"columns {table.schema_arrow.names}, none of them text or content")
            for batch in table.iter_batches(batch_size=1024, columns=[column]):
                for value in batch.column(0).to_pylist():
                    number += 1
                    usable = isinstance(value, str) and value.strip()
                    yield f"row {number}", value if usable else _Unusable("empty or not text")
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"unreadable after {number} rows ({str(error).splitlines()[0]})") from error


_READERS: dict[str, Callable[[Path, int], Iterator[_Item]]] = {
    ".txt": _read_text,
    ".md": _read_text,
    ".py": _read_text,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}


def _summary(path: Path, name: str, found: dict[str, tuple[int, str]]) -> Iterator[Skipped]:
    """One `Skipped` a reason, from reason -> (how often, where first)."""
    for reason, (count, where) in found.items():
        places = "" if not where else f" at {where}" if count == 1 else f", {count} times, first at {where}"
        yield Skipped(name, f"{reason}{places}", count)


def _reader(path: Path) -> Callable[[Path, int], Iterator[_Item]]:
    if path.suffix.lower() not in _READERS:
        raise ValueError(f"{path}: suffix {path.suffix!r}; expected one of {', '.join(_READERS)}")
    return _READERS[path.suffix.lower()]


def _read_file(path: Path, name: str, source: str, report: Report, max_line_bytes: int) -> Iterator[Document]:
    """The documents of one file; ValueError, with the path, if there are none."""
    read = _reader(path)
    found: dict[str, tuple[int, str]] = {}
    usable = 0
    try:
        for where, text in read(path, max_line_bytes):
            if isinstance(text, _Unusable):
                count, first = found.get(text, (0, where))
                found[text] = (count + 1, first)
            else:
                usable += 1
                yield Document(text, source, f"{name}:{where.split()[-1]}" if where else name)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    skipped = list(_summary(path, name, found))
    if not usable:
        raise ValueError(f"{path}: {'; '.join(each.reason for each in skipped) or 'empty'}")
    for each in skipped:
        report(each)


def _files(folder: Path, report: Report) -> Iterator[Path]:
    """Files below `folder`, sorted by path, without those that a name starting with a dot hides. What can be no file
    is reported and never opened: reading a pipe would wait for ever."""

    def skip(path: str | Path, reason: str) -> None:
        report(Skipped(Path(path).relative_to(folder).as_posix(), reason))

    def unreadable(error: OSError) -> None:
        skip(error.filename, f"unreadable folder ({error.strerror})")

    for parent, folders, files in os.walk(folder, onerror=unreadable):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if {"train", "validation", "tokenizer"} <= set(folders) and "manifest.json" in files:
            # Its validation texts would come back as training documents.
            skip(parent, "a folder of prepared data, not a source of documents")
            folders.clear()
            continue
        for path in (Path(parent) / name for name in folders):
            if path.is_symlink():
                skip(path, "a link to a folder, not followed")
        for path in (Path(parent) / name for name in sorted(files) if not name.startswith(".")):
            if os.path.isfile(path):
                yield path
            else:
                skip(path, "no regular file" if os.path.exists(path) else "a broken link")


def _read_folder(folder: Path, source: str, report: Report, max_line_bytes: int) -> Iterator[Document]:
    """The documents of every file below `folder`; files that are refused are reported instead."""
    usable = 0
    for path in _files(folder, report):
        name = path.relative_to(folder).as_posix()
        try:
            for document in _read_file(path, name, source, report, max_line_bytes):
                usable += 1
                yield document
        except (ValueError, OSError) as error:
            report(Skipped(name, str(error).removeprefix(f"{path}: ")))
    if not usable:
        raise ValueError(f"{folder}: no document in it; expected files {', '.join(_READERS)}")


def documents(
    path: str | os.PathLike[str],
    source: str | None = None,
    report: Report = log_skipped,
    max_line_bytes: int = MAX_LINE_BYTES,
) -> Iterator[Document]:
    """The documents of one file, or of all files in a folder, as they stand (see the table above). `source` names
    the corpus, by default after the file or folder. Raises ValueError at once for a missing path or an unknown
    suffix, and while reading for a file that cannot be read; ImportError if pyarrow is needed and absent."""
    path = Path(path)
    source = source or path.resolve().stem
    if path.is_dir():
        return _read_folder(path, source, report, max_line_bytes)
    if not path.is_file():
        raise ValueError(f"{path}: {'neither file nor folder' if path.exists() else 'no such file or folder'}")
    _reader(path)
    return _read_file(path, path.name, source, report, max_line_bytes)
