"""Picture documents through the prepared folder: written, read, packed, loaded, resumed, damaged."""

from __future__ import annotations

import io
import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from nanok3 import K3, K3Config
from nanok3.data import loader as loader_module
from nanok3.data import prepared
from nanok3.data.images import preprocess_image
from nanok3.data.loader import MixtureLoader
from nanok3.data.packing import NO_TARGET, Batch, Piece, one_pass, pack_whole
from nanok3.data.picture_shards import PictureShards, PictureWriter, StoredPicture, files_of, read_array
from nanok3.data.picture_sources import Writer
from nanok3.data.picture_text import block, encode_document, media_pad_id
from nanok3.data.pictures import kinds
from nanok3.data.pictures.document import Picture
from nanok3.data.plan import Source
from nanok3.data.prepared import Prepared, TokenSource, prepare
from nanok3.data.tokenizer import Tokenizer

T = 256
MIX = kinds.PictureMix(0.4, 90, ("shapes", "compare", "motion"))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory, prose: str) -> list[Source]:
    path = tmp_path_factory.mktemp("texts") / "prose.jsonl"
    parts = [prose[i : i + 400] for i in range(0, 16_000, 400)]
    path.write_text("\n".join(json.dumps({"text": part}) for part in parts))
    return [Source("prose", 2.0, path)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, texts: list[Source], tokenizer: Tokenizer) -> Path:
    """A source of texts and three kinds of pictures, in several shards."""
    out = tmp_path_factory.mktemp("prepared")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepared, "_SHARD_TOKENS", 900)
        prepare(texts, tokenizer, out / "out", 0.1, pictures=MIX)
    return out / "out"


def named(folder: Path, name: str, split: str = "train") -> TokenSource:
    return next(source for source in Prepared(folder).sources(split) if source.name == name)


def test_what_was_drawn_is_what_is_read(folder: Path, tokenizer: Tokenizer) -> None:
    opened = Prepared(folder)
    opened.verify()
    assert opened.manifest["format"] == 2 and sum(opened.weights()) == pytest.approx(2 / 0.6)
    for kind in MIX.kinds:
        drawn = list(
            kinds.with_split(kinds.picture_documents(kind, kinds.open_kind(kind), MIX.counts()[kind], 0), 0.1, 0)
        )
        for split in ("train", "validation"):
            source, documents = named(folder, kind, split), [document for side, document in drawn if side == split]
            assert len(source) == len(documents) and isinstance(source.pictures_of(0), list)
            for number, document in enumerate(documents):
                shown = [part for part in document.parts if isinstance(part, Picture)]
                stored = source.pictures_of(number)
                for picture, found in zip(shown, stored, strict=True):
                    expected = torch.cat([preprocess_image(frame).pixel_values for frame in picture.frames])
                    assert torch.equal(source.pictures.pixel_values(found), expected)
                    t, h, w = found.grid
                    assert t == len(picture.frames) and found.patches == t * h * w == len(expected)
                ids = source.tokens(number).tolist()
                narrow = "".join(p if isinstance(p, str) else block(p) for p in document.parts)
                assert _narrow(ids, stored) == tokenizer.encode(narrow, allow_special=True) + [tokenizer.eos_id]
            assert source.patches.tolist() == [
                sum(p.patches for p in source.pictures_of(i)) for i in range(len(source))
            ]
            entry = opened.manifest["sources"][kind][split]
            assert entry["patches"] == source.patches.sum() and entry["bytes"] == sum(len(d.text) for d in documents)
        held_out = [document for side, document in drawn if side == "validation"]
        assert opened.validation_text(kind).decode() == "".join(document.text for document in held_out)
        assert [tuple(questions) for questions in opened.validation_questions(kind)] == [d.questions for d in held_out]
    assert len(opened.manifest["sources"]["motion"]["train"]["shards"]) > 1


def _narrow(ids: list[int], stored: list[StoredPicture]) -> list[int]:
    """One placeholder a picture instead of one a feature row."""
    for picture in reversed(stored):
        assert len(set(ids[picture.token : picture.token + picture.rows])) == 1
        del ids[picture.token + 1 : picture.token + picture.rows]
    return ids


def test_texts_are_written_as_without_pictures(
    folder: Path, texts: list[Source], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepared, "_SHARD_TOKENS", 900)
        manifest = prepare(texts, tokenizer, tmp_path / "out", 0.1)
    with_pictures = Prepared(folder).manifest
    assert manifest["format"] == 1 and "media_pad_id" not in manifest
    assert manifest["sources"]["prose"] == with_pictures["sources"]["prose"]
    loaders = [MixtureLoader([named(out, "prose")], [1.0], 2, T) for out in (folder, tmp_path / "out")]
    assert loaders[0].state_dict() == loaders[1].state_dict() and "patches_per_row" not in loaders[0]._identity()
    batch = next(loaders[0])
    assert batch.pictures is None and torch.equal(batch.filled, batch.targets != NO_TARGET)


def test_rows_hold_whole_documents_and_no_more_patches_than_asked(folder: Path) -> None:
    for kind in MIX.kinds:
        source, seen = named(folder, kind), Counter()
        for batch in one_pass(source, 3, T, patches_per_row=160):
            check_batch(batch, source)
            for row in range(len(batch.input_ids)):
                mine = [
                    s
                    for s, end in zip(batch.ids, batch.cu_seqlens[1:].tolist(), strict=True)
                    if row * T < end <= (row + 1) * T
                ]
                documents = [segment.document for segment in mine if segment]
                patches = source.patches[documents]
                assert patches.sum() <= 160 or len(patches) == 1
                seen.update(documents)
        assert seen == Counter(range(len(source)))


def check_batch(batch: Batch, *sources: TokenSource) -> None:
    """Pixels, places and targets fit the ids."""
    by_name = {source.name: source for source in sources}
    flat, pictures = batch.input_ids.flatten(), batch.pictures
    assert pictures is not None and len(pictures.ids) == len(pictures.grid_thw) == len(pictures.places)
    rows = pictures.grid_thw[:, 1] * pictures.grid_thw[:, 2] // 4
    places = torch.cat([torch.arange(place, place + n) for place, n in zip(pictures.places, rows, strict=True)])
    (pad,) = set(flat[pictures.places].tolist())
    assert torch.equal(places, torch.nonzero(flat == pad)[:, 0])
    parts = pictures.pixel_values.split(pictures.grid_thw.prod(dim=1).tolist())
    for part, (name, document, number) in zip(parts, pictures.ids, strict=True):
        source = by_name[name]
        assert torch.equal(part, source.pictures.pixel_values(source.pictures_of(document)[number]))
    targets, bounds = batch.targets.flatten(), batch.cu_seqlens.tolist()
    for segment, begin, end in zip(batch.ids, bounds, bounds[1:], strict=False):
        if segment is None:
            continue
        source, expected = by_name[segment.source], np.array([])
        expected = source.tokens(segment.document).astype(np.int64)
        assert segment.offset == 0 and end - begin == len(expected) - 1
        for picture in source.pictures_of(segment.document):
            expected[picture.begin : picture.end] = NO_TARGET
        assert targets[begin:end].tolist() == expected[1:].tolist()
        assert batch.filled.flatten()[begin:end].all()


def test_packing_whole_documents_by_hand() -> None:
    documents = [(0, 11, 8), (1, 7, 90), (2, 5, 8), (3, 4, 8)]
    rows = pack_whole(documents, seq_len=14, patches_per_row=16)
    assert rows == [[Piece(0, 0, 10), Piece(2, 0, 4)], [Piece(1, 0, 6)], [Piece(3, 0, 3)]]


@pytest.fixture
def loader(folder: Path, monkeypatch: pytest.MonkeyPatch) -> MixtureLoader:
    monkeypatch.setattr(loader_module, "_GROUP_TOKENS", 700)
    opened = Prepared(folder)
    return MixtureLoader(opened.sources(), opened.weights(), 5, T, 3)


def same(one: Batch, two: Batch) -> bool:
    tensors = [(one.input_ids, two.input_ids), (one.targets, two.targets), (one.cu_seqlens, two.cu_seqlens)]
    assert (one.pictures is None) == (two.pictures is None)
    if one.pictures and two.pictures:
        tensors += [
            (getattr(one.pictures, n), getattr(two.pictures, n)) for n in ("pixel_values", "grid_thw", "places")
        ]
        assert one.pictures.ids == two.pictures.ids
    return all(torch.equal(a, b) for a, b in tensors) and one.ids == two.ids


def test_text_and_pictures_come_in_one_stream_from_the_first_step(loader: MixtureLoader) -> None:
    sources = [stream.source for stream in loader.streams]
    shares = []
    for _ in range(8):
        batch = next(loader)
        check_batch_of_mixture(batch, sources)
        shares.append({segment.source for segment in batch.ids if segment})
    assert all("prose" in share and share & set(MIX.kinds) for share in shares)
    assert loader.taken[0] == 24 and sum(loader.taken) == 40


def test_no_batch_is_much_more_work_for_the_tower_than_another(folder: Path) -> None:
    """Rows of pictures come by their share, each of at most so many patches: here two of the five in every batch."""
    opened = Prepared(folder)
    loader = MixtureLoader(opened.sources(), opened.weights(), 5, T, 3, patches_per_row=160)
    most = max(160, *(int(source.patches.max()) for source in opened.sources()))
    for _ in range(12):
        batch = next(loader)
        with_pictures = {place // T for place in batch.pictures.places.tolist()}
        assert len(with_pictures) == 2
        assert 0 < batch.pictures.grid_thw.prod(1).sum() <= 2 * most


def check_batch_of_mixture(batch: Batch, sources: list[TokenSource]) -> None:
    assert batch.pictures is not None
    rows = [row for row in range(len(batch.input_ids)) if "prose" not in {s.source for s in _row(batch, row)}]
    part = Batch(
        batch.input_ids[rows],
        batch.targets[rows],
        torch.tensor(sorted({n * T + e for n, row in enumerate(rows) for e in _ends(batch, row)} | {0})),
        [s for row in rows for s in _row(batch, row, padding=True)],
        None,
    )
    places = torch.tensor([rows.index(int(p) // T) * T + int(p) % T for p in batch.pictures.places])
    pictures = type(batch.pictures)(batch.pictures.pixel_values, batch.pictures.grid_thw, places, batch.pictures.ids)
    check_batch(Batch(part.input_ids, part.targets, part.cu_seqlens, part.ids, pictures), *sources)


def _ends(batch: Batch, row: int) -> list[int]:
    return [end - row * T for end in batch.cu_seqlens[1:].tolist() if row * T < end <= (row + 1) * T]


def _row(batch: Batch, row: int, padding: bool = False) -> list:
    ends = batch.cu_seqlens[1:].tolist()
    found = [s for s, end in zip(batch.ids, ends, strict=True) if row * T < end <= (row + 1) * T]
    return [s for s in found if s or padding]


@pytest.mark.parametrize("steps", [0, 1, 7])
def test_a_resumed_run_reads_on_where_it_was(folder: Path, loader: MixtureLoader, steps: int) -> None:
    for _ in range(steps):
        next(loader)
    state = json.loads(json.dumps(loader.state_dict()))
    expected = [next(loader) for _ in range(9)]
    opened = Prepared(folder)
    resumed = MixtureLoader(opened.sources(), opened.weights(), 5, T, 3)
    resumed.load_state_dict(state)
    assert all(same(next(resumed), batch) for batch in expected)
    assert max(stream.epoch for stream in resumed.streams) > 0
    other = MixtureLoader(opened.sources(), opened.weights(), 5, T, 3, patches_per_row=200)
    with pytest.raises(ValueError, match="patches_per_row was None, is 200"):
        other.load_state_dict(state)


def test_workers_share_the_pictures_of_a_step(folder: Path, loader: MixtureLoader) -> None:
    opened = Prepared(folder)
    sources, weights = opened.sources(), opened.weights()
    (whole,) = [next(MixtureLoader(sources, weights, 6, T, 3))]
    halves = [next(MixtureLoader(sources, weights, 3, T, 3, rank, 2)) for rank in (0, 1)]
    assert torch.equal(whole.input_ids[0::2], halves[0].input_ids)
    ids = Counter(i for half in halves for i in half.pictures.ids)
    assert ids == Counter(whole.pictures.ids) and whole.to(torch.device("cpu")).pictures.ids == whole.pictures.ids


def test_a_row_too_short_is_refused(folder: Path) -> None:
    opened = Prepared(folder)
    with pytest.raises(ValueError, match=r"seq_len: 30; documents with pictures are not cut, \w+ needs \d+"):
        MixtureLoader(opened.sources(), opened.weights(), 2, 30)
    with pytest.raises(ValueError, match="seq_len: 30"):
        next(one_pass(named(folder, "compare"), 2, 30))
    with pytest.raises(ValueError, match="patches_per_row: 0"):
        MixtureLoader(opened.sources(), opened.weights(), 2, T, patches_per_row=0)


def test_the_model_takes_a_batch(loader: MixtureLoader, tokenizer: Tokenizer) -> None:
    """Packed rows with pictures give each document what it gives alone."""
    torch.manual_seed(0)
    model = K3(seeing(tokenizer)).eval()
    batch = next(loader)
    pictures = batch.pictures
    with torch.no_grad():
        whole = model.hidden_states(
            batch.input_ids.view(1, -1), pictures.pixel_values, pictures.grid_thw, cu_seqlens=batch.cu_seqlens
        )
        source = named_in(loader, pictures.ids[0].source)
        document = pictures.ids[0].document
        mine = [p for p in pictures.ids if p[:2] == pictures.ids[0][:2]]
        grids = pictures.grid_thw[: len(mine)]
        ids = torch.from_numpy(source.tokens(document)[:-1].astype(np.int64))[None]
        alone = model.hidden_states(ids, pictures.pixel_values[: int(grids.prod(1).sum())], grids)
    begin = batch.cu_seqlens[[(s and s[:2]) == pictures.ids[0][:2] for s in batch.ids].index(True)]
    torch.testing.assert_close(whole[:, begin : begin + ids.shape[1]], alone, atol=2e-4, rtol=1e-3)


def named_in(loader: MixtureLoader, name: str) -> TokenSource:
    return next(stream.source for stream in loader.streams if stream.source.name == name)


EYES = {
    "vt_hidden_size": 32,
    "vt_num_hidden_layers": 2,
    "vt_num_attention_heads": 2,
    "qkv_hidden_size": 32,
    "vt_intermediate_size": 64,
    "mm_hidden_size": 32,
    "patch_size": 14,
    "merge_kernel_size": (2, 2),
    "init_pos_emb_height": 8,
    "init_pos_emb_width": 8,
    "init_pos_emb_time": 4,
    "projector_ln_eps": 1e-5,
}


def seeing(tokenizer: Tokenizer) -> K3Config:
    """The tiny model with a tower of two layers."""
    cfg = K3Config.tiny().with_vocabulary(tokenizer.vocab_size)
    assert cfg.media_placeholder_token_id == media_pad_id(tokenizer)
    return replace(cfg, text_hidden_size=cfg.hidden_size, **EYES)


# ---------------------------------------------------------------------- damage


def damage(path: Path, change: str) -> None:
    content = bytearray(path.read_bytes())
    if change == "flip":
        content[len(content) // 2] ^= 1
    path.unlink()
    if change != "remove":
        path.write_bytes(content[: -3 if change == "cut" else None])


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("change", ["flip", "cut", "remove"])
def test_a_damaged_picture_shard_is_found(folder: Path, tmp_path: Path, which: int, change: str) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    path = files_of(copy / "train" / "motion-00000")[which]
    damage(path, change)
    with pytest.raises(ValueError, match=r"motion-00000\.pictures"):
        Prepared(copy).verify()
    if change != "flip":
        with pytest.raises(ValueError, match=r"motion-00000\.pictures"):
            Prepared(copy).sources()


def test_an_index_that_lies_is_found(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    index = files_of(copy / "train" / "shapes-00000")[1]
    lines = np.load(index)
    for column, wrong in (
        (0, "of document"),
        (6, "of impossible size"),
        (3, "not where the ids have placeholders"),
        (7, "not where|sha256"),
    ):
        changed = lines.copy()
        changed[-1, column] += 28
        np.save(index, changed)
        with pytest.raises(ValueError, match=wrong):
            Prepared(copy).verify()


def test_a_manifest_that_forgot_pictures_is_found(folder: Path, tmp_path: Path) -> None:
    """Its placeholders would be read as words."""
    copy = shutil.copytree(folder, tmp_path / "copy")
    path = copy / "manifest.json"
    for forgotten, wrong in (
        (["pictures"], r"sources\.shapes\.train\S* has no 'pictures'"),
        (["patches"], r"sources\.shapes\.train\S* has no 'patches'"),
        (["pictures_sha256"], r"shards\[0\] has no 'pictures_sha256'"),
        (["pictures", "patches", "pictures_sha256"], r"sources\.shapes\.train\S* has no 'pictures'"),
    ):
        manifest = json.loads((folder / "manifest.json").read_text())
        train = manifest["sources"]["shapes"]["train"]
        for part in (train, *train["shards"]):
            for name in forgotten:
                part.pop(name, None)
        path.write_text(json.dumps(manifest))
        with pytest.raises(ValueError, match=wrong):
            Prepared(copy)
    entry = manifest["sources"]["shapes"]
    del entry["begin"]
    for part in (entry["validation"], *entry["validation"]["shards"]):
        for name in forgotten:
            part.pop(name, None)
    path.write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="train/shapes-00000 has placeholders of pictures, but no pictures"):
        Prepared(copy).verify()


@pytest.mark.parametrize("which", ["shapes-00000.pictures.npy", "shapes-00000.told.npy", "shapes-00000.npy"])
def test_whatever_a_table_became_is_told(folder: Path, tmp_path: Path, which: str) -> None:
    """numpy reads a damaged header as code, as an archive, or as a size that no memory has."""
    path = shutil.copytree(folder, tmp_path / "copy") / "train" / which
    whole = path.read_bytes()
    archive = io.BytesIO()
    np.savez(archive, np.zeros(3))
    huge = whole[:10] + whole[10:128].replace(b"'shape': (", b"'shape': (99999999999999, ").rstrip().ljust(118)
    changed = [whole[:at] + bytes([value]) + whole[at + 1 :] for at in range(128) for value in (0, 40, 58, 255)]
    for content in (archive.getvalue(), archive.getvalue()[:90], b"", b"PK\3\4", huge, *changed):
        path.write_bytes(content)
        try:
            found = read_array(path)
        except ValueError as error:
            assert str(error).startswith(f"{path}: unreadable (")
        else:
            assert content in changed and isinstance(found, np.ndarray)


@pytest.mark.parametrize("change", ["cut", "remove"])
def test_damaged_questions_are_found(folder: Path, tmp_path: Path, change: str) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    damage(copy / "validation" / "compare.jsonl", change)
    with pytest.raises(ValueError, match=r"compare\.jsonl: unreadable"):
        Prepared(copy).verify()
    (copy / "validation" / "compare.jsonl").write_text('{"questions": []}\n')
    with pytest.raises(ValueError, match=r"compare\.jsonl: questions on 1 documents; the manifest has"):
        Prepared(copy).verify()


def test_damaged_pixels_are_named_when_read(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    pack = files_of(copy / "train" / "shapes-00000")[0]
    pack.write_bytes(bytes(pack.stat().st_size))
    source = named(copy, "shapes")
    with pytest.raises(ValueError, match=r"shapes-00000\.pictures: picture at byte 0 is damaged"):
        source.pictures.frames(source.pictures_of(0)[0])


def test_equal_pictures_are_kept_once(tmp_path: Path, texts: list[Source], tokenizer: Tokenizer) -> None:
    document = next(iter(kinds.picture_documents("compare", kinds.open_kind("compare"), 1, 0)))
    placed = encode_document(document, tokenizer).placed
    writer = PictureWriter()
    for number in range(3):
        for each in placed:
            writer.add(number, each)
    entry = writer.flush(tmp_path / "a")
    shards = PictureShards([tmp_path / "a"], [entry | {"documents": 3}])
    assert entry["pictures"] == 6 and len({p.offset for i in range(3) for p in shards.of(0, i)}) == 2
    assert shards.patches(0, 3).tolist() == [entry["patches"] // 3] * 3


def test_mistakes_are_found_before_anything_is_written(
    texts: list[Source], tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clash = [Source("shapes", 1.0, texts[0].path)]
    with pytest.raises(ValueError, match="source shapes: a kind of pictures has that name"):
        prepare(clash, tokenizer, tmp_path / "out", pictures=MIX)
    blind = Tokenizer(tokenizer._ranks, {})
    with pytest.raises(ValueError, match=r"tokenizer: no <\|media_begin\|>"):
        prepare(texts, blind, tmp_path / "out", pictures=MIX)
    assert not (tmp_path / "out").exists()
    assert isinstance(prepared._SplitWriter(tmp_path, "a", "train", np.dtype("<u2")), Writer)
