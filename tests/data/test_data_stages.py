from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import tyro

from nanok3.data import packages
from nanok3.data.corpus import Document
from nanok3.data.exercises import exercises
from nanok3.data.loader import MixtureLoader
from nanok3.data.prepared import Prepared
from nanok3.data.tokenizer import Tokenizer
from nanok3.stages import data, tokenizer


@pytest.fixture
def corpora(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, prose: str) -> Path:
    """Small corpora in the place of the built-in ones, and a folder of the user's own."""
    paragraphs = prose.split("\n\n")
    for name in packages.BUILT_IN:
        made = [Document(f"{name} {i}. {paragraphs[i % len(paragraphs)]}\n", name, str(i)) for i in range(40)]
        monkeypatch.setitem(packages.BUILT_IN, name, lambda cache, made=made: iter(made))
    monkeypatch.setitem(packages.BUILT_IN, "math", lambda cache: exercises(count=40))
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "a.md").write_text(prose, "utf-8")
    (tmp_path / "own" / "b.bin").write_bytes(b"\0")
    return tmp_path


def run(module, arguments: type, *flags: str | Path) -> None:
    module.main(tyro.cli(arguments, args=[str(flag) for flag in flags]))


@pytest.mark.parametrize("own", [False, True])
def test_from_corpora_to_batches(corpora: Path, own: bool, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ["--sources", "prose:3", f"{corpora / 'own'}:1"] if own else ["--profile", "tiny"]
    run(tokenizer, tokenizer.TokenizerArgs, "--out", corpora / "tok", "--vocab-size", "800", *chosen)
    shown = capsys.readouterr().out
    assert "800 ids learned from" in shown and "bytes/token" in shown
    run(data, data.DataArgs, "--out", corpora / "data", "--tokenizer", corpora / "tok", *chosen)
    shown = capsys.readouterr().out
    assert ("skipped b.bin: suffix '.bin'" in shown) == own and "is ready after" in shown
    opened = Prepared(corpora / "data")
    opened.check_tokenizer(Tokenizer.load(corpora / "tok"))
    names = ["prose", "own"] if own else ["prose", "chat", "code", "math"]
    assert (
        [source.name for source in opened.sources()]
        == [source.name for source in opened.sources("validation")]
        == names
    )
    batch = next(MixtureLoader(opened.sources(), opened.weights(), 4, 64))
    assert batch.input_ids.shape == (4, 64)
    for source in opened.sources():
        entry = opened.manifest["sources"][source.name]
        for number in (entry["train"]["documents"], entry["train"]["tokens"] + entry["validation"]["tokens"]):
            assert f"{number:,}" in shown


def test_pictures_beside_texts(corpora: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tokenizer, tokenizer.TokenizerArgs, "--out", corpora / "tok", "--vocab-size", "800", "--sources", "prose")
    flags = ["--out", corpora / "data", "--tokenizer", corpora / "tok", "--sources", "prose"]
    chosen = ["--pictures", "0.25", "--picture-documents", "60", "--picture-kinds", "shapes", "words"]
    run(data, data.DataArgs, *flags, *chosen, "--contact-sheet", corpora / "sheet.png")
    shown = capsys.readouterr().out
    opened = Prepared(corpora / "data")
    sources = opened.manifest["sources"]
    assert list(sources) == ["prose", "shapes", "words"] and opened.weights()[0] == pytest.approx(0.75 / 0.25 * 1 / 3)
    assert sum(opened.weights()[1:]) / sum(opened.weights()) == pytest.approx(0.25)
    assert f"{sources['shapes']['train']['pictures']:,}" in shown and "patches/" in shown
    assert f"{sum(sources[k][s]['patches'] for k in ('shapes', 'words') for s in ('train', 'validation')):,}" in shown
    assert (corpora / "sheet.png").read_bytes().startswith(b"\x89PNG") and "shows 10 picture documents" in shown
    batch = next(MixtureLoader(opened.sources(), opened.weights(), 4, 160))
    assert batch.pictures is not None
    for wrong in (["--contact-sheet", corpora / "x.png"], ["--picture-kinds", "words"], ["--picture-documents", "9"]):
        with pytest.raises(ValueError, match="pictures: 0; picture_documents, picture_kinds and contact_sheet need"):
            run(data, data.DataArgs, *flags, *wrong)
    before = (corpora / "data" / "manifest.json").stat()
    for sheet in (corpora, corpora / "sheet.png" / "x.png"):
        with pytest.raises(ValueError, match="contact_sheet is"):
            run(data, data.DataArgs, *flags, *chosen, "--contact-sheet", sheet)
    assert (corpora / "data" / "manifest.json").stat() == before
    with pytest.raises(ValueError, match=r"pictures: 1\.5; expected a share"):
        run(data, data.DataArgs, *flags, "--pictures", "1.5")


def test_show(corpora: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tokenizer, tokenizer.TokenizerArgs, "--out", corpora / "tok", "--vocab-size", "700", "--sources", "prose")
    capsys.readouterr()
    run(tokenizer, tokenizer.TokenizerArgs, "--out", corpora / "tok", "--show", "The [EOS] é")
    shown = capsys.readouterr().out
    for token in Tokenizer.load(corpora / "tok").encode("The [EOS] é"):
        assert str(token) in shown
    assert f"{len(Tokenizer.load(corpora / 'tok').encode('The [EOS] é'))} tokens, 12 bytes" in shown


def test_mistakes_are_named(corpora: Path) -> None:
    with pytest.raises(ValueError, match="nowhere"):
        run(data, data.DataArgs, "--tokenizer", corpora / "nowhere")
    with pytest.raises(ValueError, match="source 'poetry'"):
        run(tokenizer, tokenizer.TokenizerArgs, "--out", corpora / "tok", "--sources", "poetry")


@pytest.mark.parametrize(("module", "arguments"), [(data, data.DataArgs), (tokenizer, tokenizer.TokenizerArgs)])
def test_out_must_name_a_folder(corpora: Path, module, arguments: type, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tokenizer, tokenizer.TokenizerArgs, "--out", corpora / "tok", "--vocab-size", "600", "--sources", "prose")
    (corpora / "empty").mkdir()
    monkeypatch.chdir(corpora / "empty")
    inputs = ["--sources", "prose", *(["--tokenizer", corpora / "tok"] if module is data else [])]
    with pytest.raises(ValueError, match="out: empty, or the current folder"):
        run(module, arguments, "--out", "", *inputs)
    assert not list(Path().iterdir())
    with pytest.raises(ValueError, match=r"out: .*a\.md is a file"):
        run(module, arguments, "--out", corpora / "own" / "a.md", *inputs)


def test_prepared_data_are_not_prepared_again(corpora: Path) -> None:
    run(tokenizer, tokenizer.TokenizerArgs, "--out", corpora / "tok", "--vocab-size", "600", "--sources", "prose")
    flags = ["--tokenizer", corpora / "tok", "--sources", corpora / "own", "--out", corpora / "own"]
    for _ in range(2):
        with pytest.raises(ValueError, match="overlaps the source"):
            run(data, data.DataArgs, *flags)
    assert sorted(path.name for path in (corpora / "own").iterdir()) == ["a.md", "b.bin"]


def test_a_vocabulary_beyond_reach_is_refused_before_reading(corpora: Path) -> None:
    with pytest.raises(ValueError, match=f"vocab_size: {2**24 + 1} is above {2**24}"):
        run(tokenizer, tokenizer.TokenizerArgs, "--out", corpora / "tok", "--vocab-size", str(2**24 + 1))
    assert not (corpora / "tok").exists()


def test_help_needs_no_torch() -> None:
    code = "import sys; from nanok3.stages import data, tokenizer; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
