from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

import nanok3.data
from nanok3.data.corpus import Document, Skipped, documents


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def parquet(path: Path, **columns: list) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=2)
    return path


def read(path: Path, **options) -> tuple[list[Document], list[Skipped]]:
    skipped: list[Skipped] = []
    return list(documents(path, report=skipped.append, **options)), skipped


@pytest.mark.parametrize("suffix", [".txt", ".md", ".py", ".TXT"])
def test_a_text_file_is_one_document(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"notes{suffix}", "\ufeffOne.\r\n\r\nTwo é.\n")
    assert read(path) == ([Document("One.\r\n\r\nTwo é.\n", "notes", f"notes{suffix}")], [])
    assert [document.source for document in nanok3.data.documents(path, "mine")] == ["mine"]


def test_jsonl_records(tmp_path: Path) -> None:
    messages = [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "Hel"}, {"type": "image"}, {"type": "text", "text": "lo"}],
        },
    ]
    records = [
        {"text": "one", "content": "no"},
        {"content": "two\n", "id": 7},
        {"messages": messages},
        {"text": "\ud800"},
    ]
    path = write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, records)))
    found, skipped = read(path)
    assert [document.text for document in found] == ["one", "two\n", "user: Hi\n\nassistant: Hello", "\ud800"]
    assert [document.name for document in found] == ["a.jsonl:1", "a.jsonl:2", "a.jsonl:3", "a.jsonl:4"]
    assert not skipped


def test_bad_lines_are_reported_and_skipped(tmp_path: Path) -> None:
    lines = [
        b'{"text": "good"}',
        b"not json",
        b'{"text": 5}',
        b"[1]",
        b'{"other": "x"}',
        b'{"messages": [{"role": "user"}]}',
        b'{"messages": "x"}',
        b'{"text": "  "}',
        b"",
        b'{"text": "\xff"}',
        b'{"text": "' + b"x" * 500 + b'"}',
        b'{"text": "also good"}',
        b"{" * 300,
        b'{"text": "' + b"y" * 500,
    ]
    found, skipped = read(write(tmp_path / "a.jsonl", b"\n".join(lines)), max_line_bytes=400)
    assert [(document.text, document.name) for document in found] == [
        ("good", "a.jsonl:1"),
        ("also good", "a.jsonl:12"),
    ]
    assert skipped == [
        Skipped("a.jsonl", "not JSON, 2 times, first at line 2", 2),
        Skipped("a.jsonl", "no record with text, content or messages, 5 times, first at line 3", 5),
        Skipped("a.jsonl", "empty at line 8", 1),
        Skipped("a.jsonl", "not UTF-8 at line 10", 1),
        Skipped("a.jsonl", "longer than 400 bytes, 2 times, first at line 11", 2),
    ]


@pytest.mark.parametrize("length", [99, 100, 101])
def test_the_longest_line(tmp_path: Path, length: int) -> None:
    line = b'{"text": "' + b"x" * (length - 12) + b'"}'
    path = write(tmp_path / "a.jsonl", b'{"text": "first"}\n' + line + b"\n" + b'{"text": "last"}')
    found, skipped = read(path, max_line_bytes=100)
    assert len(line) == length and len(found) == 3 - (length > 100) and len(skipped) == (length > 100)


def test_parquet_columns(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", id=[1, 2, 3, 4, 5], content=["x"] * 5, text=["one", None, " ", "é", "five"])
    found, skipped = read(path)
    assert [(document.text, document.name) for document in found] == [
        ("one", "a.parquet:1"),
        ("é", "a.parquet:4"),
        ("five", "a.parquet:5"),
    ]
    assert skipped == [Skipped("a.parquet", "empty or not text, 2 times, first at row 2", 2)]
    found, _ = read(parquet(tmp_path / "b.parquet", content=["only"]))
    assert found[0].text == "only"


def _truncated(tmp_path: Path) -> Path:
    whole = parquet(tmp_path / "whole" / "a.parquet", text=["x" * 1000] * 50).read_bytes()
    return write(tmp_path / "bad.parquet", whole[: len(whole) // 2])


def _damaged(tmp_path: Path) -> Path:
    whole = bytearray(
        parquet(tmp_path / "whole" / "b.parquet", text=[os.urandom(500).hex() for _ in range(50)]).read_bytes()
    )
    whole[len(whole) // 3 : len(whole) // 2] = bytes(len(whole) // 2 - len(whole) // 3)
    return write(tmp_path / "bad.parquet", bytes(whole))


BROKEN = {
    "not UTF-8": (lambda folder: write(folder / "bad.txt", b"abc\xff\xfe"), r"not UTF-8 \(byte 0xff at offset 3\)"),
    "UTF-16": (lambda folder: write(folder / "bad.md", "hello".encode("utf-16")), "binary|not UTF-8"),
    "binary": (lambda folder: write(folder / "bad.py", b"\x7fELF\0\0"), r"binary \(a zero byte at offset 4\)"),
    "empty": (lambda folder: write(folder / "bad.txt", ""), "empty"),
    "blanks": (lambda folder: write(folder / "bad.txt", " \n\n"), "empty"),
    "empty jsonl": (lambda folder: write(folder / "bad.jsonl", ""), "empty"),
    "no usable line": (
        lambda folder: write(folder / "bad.jsonl", "1\n\0\n"),
        "no record .* at line 1; not JSON at line 2",
    ),
    "truncated parquet": (_truncated, "unreadable"),
    "damaged parquet": (_damaged, "unreadable"),
    "no parquet": (lambda folder: write(folder / "bad.parquet", "hello"), "unreadable"),
    "no column": (
        lambda folder: parquet(folder / "bad.parquet", words=["x"]),
        r"columns \['words'\], none of them text",
    ),
    "numbers": (lambda folder: parquet(folder / "bad.parquet", text=[1, 2]), "empty or not text, 2 times"),
    "suffix": (lambda folder: write(folder / "bad.docx", "x"), r"suffix '\.docx'; expected one of \.txt, \.md"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files_are_refused_by_name(tmp_path: Path, case: str) -> None:
    make, message = BROKEN[case]
    path = make(tmp_path)
    with pytest.raises(ValueError, match=message) as error:
        read(path)
    assert str(error.value).startswith(f"{path}: ") and str(error.value).count(str(path)) == 1


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files_in_a_folder_are_reported_and_skipped(tmp_path: Path, case: str) -> None:
    make, _ = BROKEN[case]
    path = make(tmp_path / "corpus")
    whole = tmp_path / "corpus" / "whole"
    for leftover in whole.glob("*"):
        leftover.unlink()
    write(tmp_path / "corpus" / "a.txt", "good")
    write(tmp_path / "corpus" / "sub" / "z.txt", "also good")
    found, skipped = read(tmp_path / "corpus")
    good = [document.name for document in found if not document.name.startswith("bad")]
    assert good == ["a.txt", "sub/z.txt"] and len(found) < 60
    assert [each.name for each in skipped] == [path.name] and str(tmp_path) not in skipped[0].reason


def test_folders_are_read_in_order_without_hidden_names(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.md", "a/c/d.py", "B.txt", ".hidden.txt", ".git/config.txt", "a/.x/y.txt"):
        write(tmp_path / name, name)
    (tmp_path / "dangling.txt").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop").symlink_to(tmp_path)
    found, skipped = read(tmp_path)
    assert [document.name for document in found] == ["B.txt", "b.txt", "a/z.md", "a/c/d.py"]
    assert skipped == [
        Skipped("loop", "a link to a folder, not followed"),
        Skipped("dangling.txt", "a broken link"),
    ]
    assert {document.source for document in found} == {tmp_path.name}


def test_what_can_be_no_file_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a.txt", "good")
    write(tmp_path / "sub" / "closed" / "b.txt", "unreachable")
    os.mkfifo(tmp_path / "sub" / "pipe.txt")
    (tmp_path / "device.txt").symlink_to(os.devnull)
    scan = os.scandir

    def refusing(path: str | Path):  # permissions do not hold for every user that runs tests
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refusing)
    found, skipped = read(tmp_path)
    assert [document.name for document in found] == ["a.txt"]
    assert skipped == [
        Skipped("device.txt", "no regular file"),
        Skipped("sub/pipe.txt", "no regular file"),
        Skipped("sub/closed", "unreadable folder (Permission denied)"),
    ]
    with pytest.raises(ValueError, match=r"pipe\.txt: neither file nor folder"):
        documents(tmp_path / "sub" / "pipe.txt")


def test_lines_that_json_cannot_hold(tmp_path: Path) -> None:
    lines = ['{"text": "good"}', '{"text": "x", "n": ' + "1" * 5000 + "}", '{"text": ' + "[" * 200_000, "[" * 200_000]
    found, skipped = read(write(tmp_path / "a.jsonl", "\n".join(lines)))
    assert [document.text for document in found] == ["good"]
    assert skipped == [
        Skipped("a.jsonl", "a number of too many digits at line 2", 1),
        Skipped("a.jsonl", "nested too deeply, 2 times, first at line 3", 2),
    ]


def test_missing_paths_and_empty_folders(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere\.txt: no such file or folder"):
        documents(tmp_path / "nowhere.txt")
    with pytest.raises(ValueError, match="no document in it"):
        read(tmp_path)


def test_the_log_is_the_default_report(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path / "a.txt", "good")
    write(tmp_path / "b.txt", b"\xff")
    with caplog.at_level(logging.WARNING, "nanok3.data"):
        assert len(list(documents(tmp_path))) == 1
    assert caplog.messages == ["b.txt: not UTF-8 (byte 0xff at offset 0); skipped"]


def test_a_huge_line_of_text_is_just_a_document(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "x" * 3_000_000)
    assert len(read(path)[0][0].text) == 3_000_000


def test_files_are_read_lazily(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": "x"}\n' * 100_000)
    stream = documents(path)
    assert next(stream).name == "a.jsonl:1"
    path.write_bytes(b"")
    assert len(list(stream)) < 100_000


def test_prepared_data_is_no_source(tmp_path):
    """The validation texts of an earlier run must not come back as documents to train on."""
    (tmp_path / "notes.txt").write_text("a note")
    for name in ("train", "validation", "tokenizer"):
        (tmp_path / "old" / name).mkdir(parents=True)
    (tmp_path / "old" / "manifest.json").write_text("{}")
    (tmp_path / "old" / "validation" / "x.txt").write_text("held out")
    skipped = []
    assert [d.text for d in documents(tmp_path, report=skipped.append)] == ["a note"]
    assert [(s.name, s.reason) for s in skipped] == [("old", "a folder of prepared data, not a source of documents")]
