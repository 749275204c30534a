from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest

from nanok3.data import prepared
from nanok3.data.plan import Source, kept_documents, plan
from nanok3.data.prepared import Prepared, TokenSource, prepare, token_dtype
from nanok3.data.tokenizer import Tokenizer, train_tokenizer


@pytest.fixture
def sources(tmp_path: Path, prose: str) -> list[Source]:
    paragraphs = prose.split("\n\n")
    result = []
    for name, count in (("a", 60), ("b", 45)):
        texts = [f"{name} {i}: {paragraphs[i % len(paragraphs)]}\n" for i in range(count)]
        path = tmp_path / f"{name}.jsonl"
        path.write_text("\n".join(json.dumps({"text": text}) for text in [*texts, texts[0], " "]), "utf-8")
        result.append(Source(name, 1.0 + len(result), path))
    return result


def test_what_is_written_is_what_was_read(
    sources: list[Source], tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepared, "_SHARD_TOKENS", 1500)
    monkeypatch.setattr(prepared, "_BATCH_CHARS", 3000)
    manifest = prepare(sources, tokenizer, tmp_path / "out", report=lambda skipped: None)
    opened = Prepared(tmp_path / "out")
    assert opened.manifest == manifest == json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert opened.weights() == opened.weights("validation") == [1.0, 2.0]
    for split in ("train", "validation"):
        for source, made in zip(opened.sources(split), plan(sources), strict=True):
            texts = [document.text for where, document in kept_documents(made) if where == split]
            entry = manifest["sources"][source.name]
            assert [tokenizer.decode(source.tokens(i)[:-1]) for i in range(len(source))] == texts
            assert all(source.tokens(i)[-1] == tokenizer.eos_id for i in range(len(source)))
            assert source.lengths.tolist() == [len(source.tokens(i)) for i in range(len(source))]
            assert source.bytes == sum(len(text.encode()) for text in texts) == entry[split]["bytes"]
            assert entry[split]["documents"] == len(texts) and entry[split]["tokens"] == source.lengths.sum()
            assert (entry["duplicates"], entry["skipped"]) == (1, 1)
            if split == "validation":
                assert opened.validation_text(source.name) == "".join(texts).encode()
            else:
                assert len(entry[split]["shards"]) > 2
                assert (
                    source.locate(0) == (0, 0) and source.locate(len(source) - 1)[0] == len(entry[split]["shards"]) - 1
                )
    opened.check_tokenizer(opened.tokenizer())
    leftovers = [path.name for path in (tmp_path / "out").rglob("*") if path.name.startswith(".")]
    assert not leftovers


def test_shards_are_plain_arrays(sources: list[Source], tokenizer: Tokenizer, tmp_path: Path) -> None:
    manifest = prepare(sources, tokenizer, tmp_path / "out", report=lambda skipped: None)
    (shard,) = manifest["sources"]["a"]["train"]["shards"]
    content = (tmp_path / "out" / f"{shard['name']}.bin").read_bytes()
    ids, starts = np.frombuffer(content, "<u2"), np.load(tmp_path / "out" / f"{shard['name']}.npy")
    assert hashlib.sha256(content).hexdigest() == shard["sha256"] and manifest["dtype"] == "uint16"
    assert starts[0] == 0 and starts[-1] == len(ids) == shard["tokens"] and len(starts) == shard["documents"] + 1
    (source, _) = Prepared(tmp_path / "out").sources()
    assert source.tokens(3, 2, 5).tolist() == ids[starts[3] + 2 : starts[3] + 5].tolist()


def test_preparing_twice_gives_the_same_bytes(sources: list[Source], tokenizer: Tokenizer, tmp_path: Path) -> None:
    for name in ("one", "two"):
        prepare(sources, tokenizer, tmp_path / name, report=lambda skipped: None)
    files = sorted(path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*") if path.is_file())
    assert len(files) == 1 + 2 + 4 + 4 + 2
    for path in files:
        assert (tmp_path / "one" / path).read_bytes() == (tmp_path / "two" / path).read_bytes(), path


def test_large_vocabularies_take_four_bytes() -> None:
    assert token_dtype(1 << 16) == np.dtype("<u2") and token_dtype((1 << 16) + 1) == np.dtype("<u4")
    assert token_dtype(163840).itemsize == 4


def test_an_interrupted_run_is_refused_and_repaired(
    sources: list[Source], tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(sources, tokenizer, tmp_path / "out", report=lambda skipped: None)
    first = Prepared(tmp_path / "out").sources()[0].tokens(0).tolist()

    def interrupted(step: str) -> None:
        if step == "encoding b":
            raise KeyboardInterrupt

    with pytest.raises(ValueError, match="validation: 2"):
        prepare(sources, tokenizer, tmp_path / "out", validation=2.0)
    assert Prepared(tmp_path / "out").sources()  # a mistake in the arguments harms nothing
    with pytest.raises(KeyboardInterrupt):
        prepare(sources, tokenizer, tmp_path / "out", report=lambda skipped: None, progress=interrupted)
    with pytest.raises(ValueError, match=r"manifest\.json: missing; the folder was not prepared, or not to the end"):
        Prepared(tmp_path / "out")
    prepare(sources, tokenizer, tmp_path / "out", report=lambda skipped: None)
    assert Prepared(tmp_path / "out").sources()[0].tokens(0).tolist() == first


def test_what_a_killed_run_left_is_removed(sources: list[Source], tokenizer: Tokenizer, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for split in ("train", "validation"):
        (out / split).mkdir(parents=True)
        for name in (".pictures.jsonl-abcdefgh", ".a-00000.bin-12345678", ".fresh.txt-abcdefgh", "mine", ".mine"):
            (out / split / name).write_text("x")
            if "fresh" not in name:  # which another run may be writing
                os.utime(out / split / name, (0, 0))
    prepare(sources, tokenizer, out, report=lambda skipped: None)
    for split in ("train", "validation"):
        kept = {path.name for path in (out / split).iterdir() if path.name.startswith(".") or path.name == "mine"}
        assert kept == {".fresh.txt-abcdefgh", "mine", ".mine"}


def test_damaged_folders_are_refused(sources: list[Source], tokenizer: Tokenizer, tmp_path: Path, prose: str) -> None:
    prepare(sources, tokenizer, tmp_path / "out", report=lambda skipped: None)
    opened, shard = Prepared(tmp_path / "out"), tmp_path / "out" / "train" / "b-00000.bin"
    with pytest.raises(ValueError, match=r"prepared with another tokenizer \(vocab_size 700, given 650\)"):
        opened.check_tokenizer(train_tokenizer([prose], 650))
    size = shard.stat().st_size
    shard.write_bytes(shard.read_bytes()[:-2])
    with pytest.raises(ValueError, match=rf"b-00000\.bin: {size - 2} bytes; the manifest says {size}"):
        opened.sources()
    shard.unlink()
    with pytest.raises(ValueError, match=r"b-00000\.bin: missing"):
        opened.sources()
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    (tmp_path / "out" / "manifest.json").write_text(json.dumps(manifest | {"format": 99}))
    with pytest.raises(ValueError, match="format 99; this version reads 1"):
        Prepared(tmp_path / "out")


def test_a_source_without_validation_documents_is_left_out_of_the_split(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("short")
    (tmp_path / "two.jsonl").write_text('{"text": "x y"}\n{"text": "z"}\n')
    mixture = [Source("one", 1.0, tmp_path / "one.txt"), Source("two", 2.0, tmp_path / "two.jsonl")]
    prepare(mixture, tokenizer, tmp_path / "out")
    opened = Prepared(tmp_path / "out")
    assert [source.name for source in opened.sources()] == ["one", "two"]
    assert [source.name for source in opened.sources("validation")] == ["two"] and opened.weights("validation") == [2.0]
    assert opened.validation_text("one") == b""


def test_digests_tell_sources_and_contents_apart(sources: list[Source], tokenizer: Tokenizer, tmp_path: Path) -> None:
    def digests(**options) -> list[str]:
        prepare(sources, tokenizer, tmp_path / "out", report=lambda skipped: None, **options)
        opened = Prepared(tmp_path / "out")
        return [source.digest for split in ("train", "validation") for source in opened.sources(split)]

    first = digests()
    assert len(set(first)) == 4 and digests() == first and not set(digests(seed=1)) & set(first)
    assert isinstance(Prepared(tmp_path / "out").sources()[0], TokenSource)


@pytest.mark.parametrize(
    ("out", "source"),
    [
        ("notes", "notes"),
        ("notes/out", "notes"),
        ("notes/.out", "notes"),
        ("notes", "notes/sub"),
        ("notes", "notes/a.txt"),
        ("notes/a.txt", "notes/a.txt"),
        ("other/../notes/out", "notes"),
        ("link/out", "notes"),
        ("notes/out", "link"),
    ],
)
def test_a_folder_is_never_its_own_source(tokenizer: Tokenizer, tmp_path: Path, out: str, source: str) -> None:
    (tmp_path / "notes" / "sub").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    for name in ("a.txt", "sub/b.txt"):
        (tmp_path / "notes" / name).write_text(f"a few words in {name}")
    (tmp_path / "link").symlink_to(tmp_path / "notes")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError) as error:
        prepare([Source("prose"), Source("mine", 1.0, tmp_path / source)], tokenizer, tmp_path / out)
    assert str(error.value).startswith(f"out: {tmp_path / out} overlaps the source {tmp_path / source};")
    assert sorted(tmp_path.rglob("*")) == before
    prepare([Source("mine", 1.0, tmp_path / source)], tokenizer, tmp_path / "notes out")  # a common beginning only


def _flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_verify_names_every_damaged_file(sources: list[Source], tokenizer: Tokenizer, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare(sources, tokenizer, out, report=lambda skipped: None)
    opened = Prepared(out)
    opened.verify()
    _flip(out / "train" / "a-00000.bin", 100)
    starts = np.load(out / "train" / "b-00000.npy")
    starts[3] += 1
    np.save(out / "train" / "b-00000.npy", starts)
    (out / "validation" / "a-00000.npy").write_bytes(b"no array")
    text = out / "validation" / "b.txt"
    text.write_bytes(text.read_bytes()[:-1])
    (out / "validation" / "a.txt").unlink()
    opened.sources("train")  # none of it shows in a size or an end
    with pytest.raises(ValueError) as error:
        opened.verify()
    lines = str(error.value).splitlines()
    damaged = [
        "validation/a.txt",
        "train/a-00000.bin",
        "validation/a-00000.npy",
        "validation/b.txt",
        "train/b-00000.npy",
    ]
    assert [line.split(": ")[0] for line in lines] == [str(out / name) for name in damaged]
    with pytest.raises(ValueError, match=r"a-00000\.npy: unreadable"):
        opened.sources("validation")


def test_an_exchanged_tokenizer_is_refused(
    sources: list[Source], tokenizer: Tokenizer, tmp_path: Path, prose: str
) -> None:
    prepare(sources, tokenizer, tmp_path / "out", report=lambda skipped: None)
    train_tokenizer([prose[::-1]], tokenizer.vocab_size).save(tmp_path / "out" / "tokenizer")
    opened = Prepared(tmp_path / "out")
    for read in (opened.tokenizer, opened.verify):
        with pytest.raises(ValueError, match=r"out/tokenizer: changed, not the tokenizer that made the ids"):
            read()


def _without(key: str):
    return lambda manifest: {name: value for name, value in manifest.items() if name != key}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda manifest: b"{", "not JSON"),
        (lambda manifest: b"\xff", "not JSON"),
        (lambda manifest: b"[" * 200_000, "not JSON"),
        (lambda manifest: [], "manifest is '\\[\\]'; expected a mapping"),
        (lambda manifest: {}, "manifest has no 'format'"),
        (lambda manifest: {"format": 1}, "manifest has no 'tokenizer'"),
        (_without("sources"), "manifest has no 'sources'"),
        (lambda manifest: manifest | {"sources": []}, "manifest.sources is '\\[\\]'; expected a mapping"),
        (lambda manifest: manifest | {"sources": {"a": {"weight": "x"}}}, "sources.a.weight is 'x'; expected a number"),
        (lambda manifest: manifest | {"sources": {"a": {"weight": 1}}}, "sources.a has no 'train'"),
        (lambda manifest: manifest | {"vocab_size": True}, "manifest.vocab_size is 'True'; expected an integer"),
        (lambda manifest: manifest | {"dtype": "float32"}, "dtype 'float32'; expected uint16 or uint32"),
    ],
)
def test_malformed_manifests(sources: list[Source], tokenizer: Tokenizer, tmp_path: Path, change, message: str) -> None:
    manifest = prepare(sources, tokenizer, tmp_path / "out", report=lambda skipped: None)
    changed = change(manifest)
    path = tmp_path / "out" / "manifest.json"
    path.write_bytes(changed if isinstance(changed, bytes) else json.dumps(changed).encode())
    with pytest.raises(ValueError, match=message) as error:
        Prepared(tmp_path / "out")
    assert str(error.value).startswith(f"{path}: ")
