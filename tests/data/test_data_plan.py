from __future__ import annotations

import json
from pathlib import Path

import pytest

from nanok3.data.corpus import Skipped
from nanok3.data.plan import PROFILES, Source, kept_documents, mixture, parse_source, plan, training_texts


def corpus(path: Path, texts: list[str]) -> Source:
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts), "utf-8")
    return Source(path.stem, 1.0, path)


def kept(sources: list[Source], **options) -> list[dict[str, list[str]]]:
    result = []
    for made in plan(sources, **options):
        split: dict[str, list[str]] = {"train": [], "validation": []}
        for where, document in kept_documents(made, options.get("seed", 0)):
            split[where].append(document.text)
        result.append(split)
    return result


TEXTS = [f"document number {i}" for i in range(400)]


def test_the_split_is_a_partition_of_about_the_right_size(tmp_path: Path) -> None:
    (split,) = kept([corpus(tmp_path / "a.jsonl", TEXTS)], validation=0.1)
    assert sorted(split["train"] + split["validation"]) == sorted(TEXTS)
    assert 20 <= len(split["validation"]) <= 60
    assert split["train"] == [text for text in TEXTS if text in set(split["train"])]  # in the source's order


def test_the_split_follows_the_text_and_not_its_place(tmp_path: Path) -> None:
    (split,) = kept([corpus(tmp_path / "a.jsonl", TEXTS)])
    (other,) = kept([corpus(tmp_path / "b.jsonl", [f"new {i}" for i in range(50)] + TEXTS[::-1])])
    assert set(split["validation"]) == {text for text in other["validation"] if text in TEXTS}
    (salted,) = kept([corpus(tmp_path / "a.jsonl", TEXTS)], seed=1)
    assert set(salted["validation"]) != set(split["validation"])


def test_duplicates_are_removed_within_and_across_sources(tmp_path: Path) -> None:
    first = corpus(tmp_path / "a.jsonl", [*TEXTS, *TEXTS[:30], "same\r\ntext  ", "same\ntext"])
    second = corpus(tmp_path / "b.jsonl", [*TEXTS[100:], "only here", *(f"b {i}" for i in range(30))])
    plans = plan([first, second])
    assert [made.duplicates for made in plans] == [31, 300]
    found = [document.text for made in plans for _, document in kept_documents(made)]
    assert len(found) == len(set(found)) == 400 + 1 + 31 and "only here" in found


def test_small_sources_are_cut_so_that_both_splits_have_something(tmp_path: Path, prose: str) -> None:
    path = tmp_path / "book.txt"
    path.write_text(prose * 3 + "The end.\n", "utf-8")
    (made,) = plan([Source("book", 1.0, path)])
    splits = [where for where, _ in kept_documents(made)]
    assert splits.count("validation") >= 1 and splits.count("train") > 10
    assert made.duplicates > 0  # the repeated paragraphs cannot be on both sides
    once = path.with_name("once.txt")
    once.write_text(prose, "utf-8")
    (made,) = plan([Source("once", 1.0, once)])
    assert "".join(document.text for _, document in kept_documents(made)) == prose
    assert next(document.name for _, document in kept_documents(made)) == "once.txt#0"


def test_two_documents_are_one_of_each_and_one_is_trained_on(tmp_path: Path) -> None:
    for texts, sizes in ((["one", "two"], (1, 1)), (["one"], (1, 0))):
        (split,) = kept([corpus(tmp_path / "a.jsonl", texts)])
        assert (len(split["train"]), len(split["validation"])) == sizes
    (split,) = kept([corpus(tmp_path / "a.jsonl", TEXTS)], validation=0.0)
    assert not split["validation"] and len(split["train"]) == 400


def test_a_byte_limit_takes_documents_by_hash(tmp_path: Path) -> None:
    source = corpus(tmp_path / "a.jsonl", TEXTS)
    (small,) = plan([Source("a", 1.0, source.path, max_bytes=2000)])
    (large,) = plan([Source("a", 1.0, source.path, max_bytes=4000)])
    assert 1900 < sum(small.sizes.values()) <= 2000 and small.left_out == 400 - len(small.sizes)
    assert set(small.sizes) < set(large.sizes)
    names = [int(document.text.split()[-1]) for _, document in kept_documents(small)]
    assert names == sorted(names) and max(names) > 300 and min(names) < 100


def test_a_byte_limit_keeps_the_validation_share(tmp_path: Path) -> None:
    (split,) = kept([Source("a", 1.0, corpus(tmp_path / "a.jsonl", TEXTS).path, max_bytes=2000)], validation=0.25)
    assert 0.1 < len(split["validation"]) / len([*split["validation"], *split["train"]]) < 0.4


def test_what_is_skipped_is_reported_once_and_counted(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    corpus(tmp_path / "folder" / "a.jsonl", [*TEXTS[:5], " ", ""])
    (tmp_path / "folder" / "b.txt").write_bytes(b"\xff")
    reports: list[Skipped] = []
    (made,) = plan([Source("folder", 1.0, tmp_path / "folder")], report=reports.append)
    assert len(list(kept_documents(made))) == 5
    assert [each.name for each in reports] == ["a.jsonl", "b.txt"] and made.skipped == 3


def test_documents_that_appear_later_are_not_taken(tmp_path: Path) -> None:
    source = corpus(tmp_path / "a.jsonl", TEXTS)
    (made,) = plan([source])
    corpus(tmp_path / "a.jsonl", ["new", *TEXTS[:10]])
    assert [document.text for _, document in kept_documents(made)] == TEXTS[:10]


def test_training_texts_follow_the_weights_and_leave_validation_alone(tmp_path: Path) -> None:
    a, b = corpus(tmp_path / "a.jsonl", TEXTS), corpus(tmp_path / "b.jsonl", [f"another text {i}" for i in range(400)])
    plans = plan([Source("a", 3.0, a.path), Source("b", 1.0, b.path)])
    validation = {document.text for made in plans for where, document in kept_documents(made) if where == "validation"}
    texts = list(training_texts(plans, 4000))
    sizes = [sum(len(text) for text in texts if text.startswith(start)) for start in ("document", "another")]
    assert 2900 < sizes[0] <= 3000 and 900 < sizes[1] <= 1000
    assert not validation & set(texts)
    assert len(list(training_texts(plans, 10**9))) == 800 - len(validation)


def test_sources_as_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("my notes.txt", "a:b.txt", "prose"):
        (tmp_path / name).write_text("x")
    assert parse_source("prose") == Source("prose", 1.0) and parse_source("math-full:0.5") == Source("math-full", 0.5)
    assert parse_source("my notes.txt:2") == Source("my notes", 2.0, Path("my notes.txt"))
    assert parse_source("a:b.txt") == Source("a:b", 1.0, Path("a:b.txt"))
    assert parse_source("./prose:3") == Source("prose", 3.0, Path("./prose"))
    assert parse_source(".").name == tmp_path.name
    with pytest.raises(ValueError, match=r"source 'poetry': neither one of prose, chat, code, math, math-full nor"):
        parse_source("poetry")
    with pytest.raises(ValueError, match="source 'prose:0': weight 0; expected a positive number"):
        parse_source("prose:0")
    with pytest.raises(ValueError, match="source 'prose:-1'"):
        parse_source("prose:-1")
    for weight in ("nan", "inf", "-inf", "²", "1_0", "", "x", "9" * 400):
        for name in ("prose", "my notes.txt", "."):
            with pytest.raises(ValueError) as error:
                parse_source(f"{name}:{weight}")
            assert str(error.value) == f"source '{name}:{weight}': weight {weight}; expected a positive number"
    for text in ("", ":2", ":"):
        with pytest.raises(ValueError, match=f"source '{text}': neither"):
            parse_source(text)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_weights(weight: float) -> None:
    with pytest.raises(ValueError, match=f"source math: weight {weight}; expected a positive number"):
        plan([Source("prose"), Source("math", weight)])


def test_mixture() -> None:
    assert mixture("tiny") is PROFILES["tiny"]
    assert [source.weight for source in mixture("full", ["prose:2", "math"])] == [2.0, 1.0]
    with pytest.raises(ValueError, match="profile 'huge'; expected one of tiny, full"):
        mixture("huge")
    with pytest.raises(ValueError, match="two are called 'prose'"):
        mixture("tiny", ["prose", "prose:2"])
    for profile in PROFILES.values():
        assert sum(source.weight for source in profile) == pytest.approx(1)


@pytest.mark.parametrize("share", [-0.1, 0.6])
def test_impossible_shares(share: float) -> None:
    with pytest.raises(ValueError, match=f"validation: {share}; expected a share from 0 to 0.5"):
        plan([], share)
    with pytest.raises(ValueError, match="seed: -1; expected 0 to"):
        plan([], seed=-1)
