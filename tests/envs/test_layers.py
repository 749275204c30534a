"""Layers without a sandbox: what is frozen, named, restored, swept."""

from __future__ import annotations

import json
import os

import pytest

from nanok3.envs.layers import MOST_LAYERS, Store, remove, usage


@pytest.fixture
def store():
    made = Store()
    yield made
    made.close()
    assert not made.folder.exists()


def test_a_snapshot_is_a_frozen_upper(store):
    work = store.open((store.layer({"a/b": b"1"}),))
    (store.upper(work) / "c").write_bytes(b"2")
    name = store.snapshot(work, policy="7")
    manifest = store.manifest(name)
    assert len(manifest.layers) == 2 and manifest.note == {"policy": "7"} and manifest.parent is None
    assert (store.folder / "layers" / manifest.layers[0] / "c").read_bytes() == b"2"
    assert not any(store.upper(work).iterdir())
    assert store.manifest(store.snapshot(work)).layers == manifest.layers  # nothing new, no new layer
    (store.upper(work) / "d").write_bytes(b"3")
    store.restore(work, name)
    assert not any(store.upper(work).iterdir()) and work.layers == manifest.layers and work.parent == name
    with pytest.raises(ValueError, match="no such snapshot"):
        store.restore(work, "nothing")
    with pytest.raises(ValueError, match="path is"):
        store.restore(work, "../x")


def test_what_nobody_needs_is_swept(store):
    work = store.open((store.layer({"a": b"1"}),))
    (store.upper(work) / "b").write_bytes(b"2")
    name = store.snapshot(work)
    store.layer({"lost": b""})
    assert store.sweep() == 1
    store.release(work)
    assert store.sweep() == 0 and len(list((store.folder / "layers").iterdir())) == 2
    store.drop(name)
    assert store.sweep() == 2 and not any((store.folder / "work").iterdir())


def test_a_store_is_found_again(tmp_path):
    first = Store(tmp_path / "store")
    work = first.open((first.layer({"a": b"1"}),))
    (first.upper(work) / "b").write_bytes(b"2")
    name = first.snapshot(work)
    second = Store(tmp_path / "store")
    assert second.manifest(name) == first.manifest(name)
    second.sweep()
    assert not any((second.folder / "work").iterdir())  # the first one's workspace was nobody's any more
    assert json.loads((second.folder / "manifests" / f"{name}.json").read_text())["layers"] == list(work.layers)


def test_more_than_twenty_layers_are_joined():
    joined = []
    store = Store(flatten=lambda store, layers, name: joined.append((layers, name)))
    work = store.open((store.layer({"a": b"1"}),))
    for i in range(MOST_LAYERS):
        (store.upper(work) / f"f{i}").write_bytes(b"")
        store.freeze(work)
    assert len(joined) == 1 and len(joined[0][0]) == MOST_LAYERS + 1 and work.layers == (joined[0][1],)
    store.close()


def test_usage_follows_no_link(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").write_bytes(b"x" * 10_000)
    os.symlink("/usr", tmp_path / "link")
    size, count = usage(tmp_path, 100)
    assert count == 3 and 10_000 <= size < 40_000
    assert usage(tmp_path, 1)[1] >= 1
    assert usage(tmp_path / "nothing", 10) == (0, 0)


def test_a_tree_without_rights_is_removed(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_bytes(b"")
    tree = tmp_path / "tree"
    (tree / "a" / "b").mkdir(parents=True)
    os.symlink(outside, tree / "a" / "link")
    os.chmod(tree / "a" / "b", 0)
    os.chmod(tree / "a", 0)
    remove(tree)
    assert not tree.exists() and (outside / "kept").exists()
