"""Prefixes that were evicted and come back: whole or not at all, and never wrong."""

import os
import random
import shutil
import struct
import threading
from dataclasses import replace
from hashlib import sha256

import pytest
import torch
from test_engine import END, VOCAB, Kept, is_the_models_own, job, run
from test_scheduler import GEOMETRIES, World

from nanok3.config import K3Config
from nanok3.model.decoder import K3
from nanok3.serve.arena import Arena, Shapes
from nanok3.serve.engine import Engine, Job, Settings
from nanok3.serve.offload import ArenaBytes, Offload, PageBytes, Tier, fingerprint, load_conversation, save_conversation
from nanok3.serve.runner import Runner
from nanok3.serve.sampler import SamplingParams
from nanok3.serve.scheduler import Limits
from nanok3.serve.unit_store import Unit, UnitStore, from_bytes, to_bytes


class Digests:
    """The pages of a WrittenMemory as bytes: a row is a digest, a state page is one."""

    row_bytes = 8

    def __init__(self, memory, groups):
        self.memory, self.state_bytes = memory, 8 * groups

    def copy(self, source, target):
        self.memory.copy(source, target)

    def rows(self, pages, start, end):
        size = self.memory.page_tokens
        rows = [self.memory.content[pages[position // size]][position % size] for position in range(start, end)]
        return struct.pack(f"{len(rows)}q", *rows)

    def write_rows(self, pages, start, rows):
        for position, (row,) in enumerate(struct.iter_unpack("q", rows), start):
            page = pages[position // self.memory.page_tokens]
            self.memory.content[page][position % self.memory.page_tokens] = row

    def state(self, pages):
        return struct.pack(f"{len(pages)}q", *(self.memory.content[page][0] for page in pages))

    def write_state(self, pages, state):
        for page, (digest,) in zip(pages, struct.iter_unpack("q", state), strict=True):
            self.memory.content[page] = [digest]


class TieredWorld(World):
    def __init__(self, tier, **more):
        super().__init__(**more)
        self.bytes = Digests(self.memory, more["groups"])
        assert isinstance(self.bytes, PageBytes)
        self.open(tier)

    def open(self, tier):
        self.offload = Offload(tier, self.cache, self.layout, self.bytes)
        self.scheduler.before_lookup = lambda sequence: self.offload.restore(
            sequence.keys.keys, len(sequence.ids), len(self.scheduler.running)
        )


def damage(folder, chance):
    """Something that happens to files."""
    files = sorted(folder.glob("*.unit"))
    if not files:
        return
    file, other = chance.choice(files), chance.choice(files)
    data = bytearray(file.read_bytes())
    match chance.randrange(5):
        case 0:
            file.write_bytes(data[: chance.randrange(len(data))])
        case 1:
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            file.write_bytes(data)
        case 2:
            file.unlink()
        case 3:
            file.write_bytes(other.read_bytes())
        case 4:
            begin = data.find(b'"identity": "') + 13
            data[begin : begin + 64] = b"0" * 64
            file.write_bytes(data[:-32] + sha256(data[:-32]).digest())


@pytest.mark.parametrize(("page_tokens", "span"), GEOMETRIES)
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 12))])
def test_evictions_restarts_and_damage_never_mix_up_memory(page_tokens, span, groups, seed, tmp_path):
    """World.read and World.check compare every row and state with the digests of the sequence's own tokens."""
    chance = random.Random(f"{page_tokens} {span} {groups} {seed}")
    tier = Tier("it", memory=chance.choice([0, 2000, 100_000]), folder=tmp_path, disk=chance.choice([3000, 1 << 20]))
    world = TieredWorld(tier, pages=150 // page_tokens + 5 * groups, page_tokens=page_tokens, span=span, groups=groups,
                        budget=chance.choice([7, 23]), max_sequences=3, grid=2)  # fmt: skip
    bases = [[chance.randrange(3) for _ in range(60)] for _ in range(4)]
    alive, restored = [], 0
    for turn in range(1000):
        if turn >= 150 and restored + world.offload.restored:
            break
        if chance.random() < 0.5 and len(alive) < 4:
            ids = chance.choice(bases)[: chance.randrange(1, 60)] + [
                chance.randrange(3) for _ in range(chance.randrange(6))
            ]
            alive.append(world.add(ids))
        world.step(lambda sequence: chance.randrange(3))
        for sequence in list(alive):
            if chance.random() < 0.15 or len(sequence.said) > 10:
                world.scheduler.finish(sequence)
                alive.remove(sequence)
        happening = chance.random()
        if happening < 0.05:
            world.offload.store.settle()
            damage(tmp_path, chance)
        elif happening < 0.08:
            restored += world.offload.restored
            world.offload.store.close()
            world.open(tier)
        elif happening < 0.12:
            world.cache.make_room(world.pool.pages)
            world.check()
    world.offload.store.settle()
    assert restored + world.offload.restored > 0
    store = world.offload.store
    assert store.memory_used == sum(unit.size for unit in store._held.values()) <= max(tier.memory, 0)
    assert store.disk_used == sum(place.size for place in store._files.values()) <= tier.disk
    for sequence in alive:
        world.scheduler.finish(sequence)
    world.cache.clear()
    world.check()
    assert world.pool.free == world.pool.pages


def small_world(tier, **more):
    return TieredWorld(
        tier, **({"pages": 60, "page_tokens": 4, "span": 4, "groups": 2, "budget": 100, "grid": 2} | more)
    )


def test_an_evicted_prefix_comes_back_as_a_chain_of_units():
    """The turn's end builds on the grid's boundaries, which left as units of their own."""
    world = small_world(Tier("it"))
    ids = list(range(30))
    world.run(world.add(ids))
    assert world.cache.make_room(world.pool.pages)
    again = world.add(ids)
    world.run(again)
    assert again.cached_tokens == 28 and world.offload.restored_tokens == 28
    assert world.offload.store.counts.found >= 2


def test_a_state_alone_comes_back_where_the_latents_stayed():
    world = small_world(Tier("it"))
    first = world.add(list(range(30)))
    world.run(first)
    node = world.cache.match(first.keys.keys, 17).node
    assert node.depth == 4
    world.offload.leaving(node)
    world.cache.drop_snapshot(node)
    again = world.add([*range(17), 99, 99])
    world.run(again)
    assert again.cached_tokens == 16 and world.offload.restored_tokens == 0


def test_report_32_a_unit_without_one_of_its_groups_is_a_miss(tmp_path):
    """Report 32: latents restored, one group not."""
    world = small_world(Tier("it", memory=0, folder=tmp_path))
    ids = list(range(30))
    world.run(world.add(ids))
    world.cache.make_room(world.pool.pages)
    world.offload.store.settle()
    for file in tmp_path.glob("*.unit"):
        unit = from_bytes(file.read_bytes(), world.offload.identity, "it")
        whole = to_bytes(unit, world.offload.identity)
        cut = replace(unit, state=unit.state[:8])
        file.write_bytes(to_bytes(cut, world.offload.identity)[:-32] + whole[-32:])
    again = world.add(ids)
    world.run(again)
    assert again.cached_tokens == 0 and world.offload.store.counts.damaged > 0
    assert world.offload.restored == 0


def test_other_keys_find_nothing(tmp_path):
    """Another salt has other keys; another model refuses the files, which then are removed."""
    tier = Tier("it", memory=0, folder=tmp_path)
    world = small_world(tier)
    world.run(world.add(list(range(30))))
    world.cache.make_room(world.pool.pages)
    other = world.add([1, *range(1, 30)])
    world.run(other)
    assert other.cached_tokens == 0
    world.offload.store.close()
    (tmp_path / "mine.txt").write_text("not a unit")
    (tmp_path / f".{'0' * 64}.unit-x").write_text("unfinished")
    again = small_world(tier).offload.store
    assert len(again) > 0
    with pytest.raises(ValueError, match="is in use by a server"):
        small_world(tier)
    again.close()
    assert len(small_world(replace(tier, model="other")).offload.store) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


# ---------------------------------------------------------------------- the store


def unit(number, size=100, start=0, base=b""):
    return Unit(start, base, (bytes([number]) * 32,), bytes(size), b"state")


def test_the_longest_unused_leaves_memory_and_then_the_folder(tmp_path):
    store = UnitStore("it", 2 * unit(0).size, tmp_path, 2 * len(to_bytes(unit(0), "it")))
    for number in range(4):
        store.put(unit(number))
        store.settle()
    store.touch(unit(0).key)
    assert (len(store._held), len(store._files)) == (2, 2)
    store.put(unit(4))
    store.settle()
    there = [store.get(unit(number).key) is not None for number in range(5)]
    assert there == [True, False, True, True, True]


def test_a_base_stays_as_long_as_what_builds_on_it():
    store = UnitStore("it", 3 * unit(0).size)
    base = unit(1)
    for one in (base, unit(2), unit(3, start=1, base=base.key)):
        store.put(one)
    store.put(unit(4))
    assert store.get(base.key) is not None and store.get(unit(2).key) is None


def test_what_is_kept_and_what_was_refused_is_counted(tmp_path):
    store = UnitStore("it", 2 * unit(0).size, tmp_path, 10 * unit(0).size)
    for one in (*map(unit, range(3)), unit(0), unit(9, 5000)):
        store.put(one)
    store.settle()
    assert (store.counts.stored, store.counts.refused, store.counts.dropped) == (3, 1, 0)
    assert store.units_kept == {"memory": 2, "disk": 1}
    file = next(tmp_path.glob("*.unit"))
    assert store.bytes_kept == {"memory": 2 * unit(0).size, "disk": file.stat().st_size}


def test_without_a_folder_what_leaves_memory_is_gone_and_too_large_never_comes():
    store = UnitStore("it", 1000)
    store.put(unit(1, 5000))
    assert len(store) == 0
    for number in range(20):
        store.put(unit(number))
    assert store.memory_used <= 1000 and store.counts.dropped > 0


def test_a_folder_that_cannot_be_written_costs_only_the_unit(tmp_path):
    store = UnitStore("it", 0, tmp_path / "units", 1 << 20)
    shutil.rmtree(tmp_path / "units")
    (tmp_path / "units").write_text("a file")
    store.put(unit(1))
    store.settle()
    assert store.get(unit(1).key) is None and store.counts.dropped == 1


BEGIN = len(b"nanok3 prefix 1\n")


def with_header(path, header):
    data = path.read_bytes()
    length = int.from_bytes(data[BEGIN : BEGIN + 8], "little")
    path.write_bytes(data[:BEGIN] + len(header).to_bytes(8, "little") + header + data[BEGIN + 8 + length :])


@pytest.mark.parametrize("value", ["1.5", "-3", "true", "null", '"1"'])
def test_a_header_that_says_nonsense_is_no_unit(value, tmp_path):
    store = UnitStore("me", 0, tmp_path, 10_000)
    store.put(unit(1, start=7, base=unit(2).key))
    store.close()
    (path,) = tmp_path.iterdir()
    header = path.read_bytes()[BEGIN + 8 :].split(b"}")[0] + b"}"
    with_header(path, header.replace(b'"start": 7', b'"start": ' + value.encode()))
    assert not UnitStore("me", 0, tmp_path, 10_000).place(unit(1).key) and not list(tmp_path.iterdir())


def test_whatever_lies_in_the_folder_does_not_stop_the_server(tmp_path):
    """Folders, pipes, links to nowhere, headers nested without end: left or removed, and never waited for."""
    store = UnitStore("me", 0, tmp_path, 10_000)
    store.put(unit(1))
    store.put(unit(2))
    store.close()
    with_header(tmp_path / f"{unit(1).key.hex()}.unit", b"[" * 100_000)
    (tmp_path / f"{unit(3).key.hex()}.unit").mkdir()
    (tmp_path / f".{unit(3).key.hex()}.unit-x").mkdir()
    (tmp_path / "nowhere").symlink_to(tmp_path / "none")
    (tmp_path / f"{unit(4).key.hex()}.unit").symlink_to(tmp_path / "none")
    os.mkfifo(tmp_path / f"{unit(5).key.hex()}.unit")
    store = UnitStore("me", 0, tmp_path, 10_000)
    assert store.get(unit(2).key).key == unit(2).key and len(store) == 1


def test_a_file_that_cannot_be_removed_or_dated_does_no_harm(tmp_path, monkeypatch):
    store = UnitStore("me", 0, tmp_path, 10_000)
    store.put(unit(1))
    store.settle()

    def refused(*arguments, **more):
        raise PermissionError(1, "not permitted")

    monkeypatch.setattr(os, "utime", refused)
    monkeypatch.setattr(type(tmp_path), "unlink", refused)
    assert store.get(unit(1).key).key == unit(1).key
    store.clear()
    assert len(store) == 0


def test_a_folder_that_cannot_be_one_is_named(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ValueError, match=r"cache_folder .*file cannot be used"):
        UnitStore("me", 0, tmp_path / "file", 10_000)


@pytest.mark.parametrize("what", ["memory", "disk"])
def test_budgets_below_nothing_are_named(what):
    with pytest.raises(ValueError, match=f"{what} is -1; it must be at least 0 bytes"):
        Tier("it", **{what: -1})


@pytest.mark.parametrize("at", [0, 5, 20, 60, -40, -1])
def test_every_changed_byte_is_noticed(at):
    data = bytearray(to_bytes(unit(1), "it"))
    data[at] ^= 4
    with pytest.raises(ValueError, match=r"holds no saved prefix|damaged"):
        from_bytes(bytes(data), "it", "it")


# ---------------------------------------------------------------------- a model's pages

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(3)
    cfg = K3Config.tiny(initializer_range=0.25).at_depth(4).with_vocabulary(VOCAB)
    return K3(cfg).double().eval()


@pytest.mark.parametrize(("dtype", "page_tokens"), [(torch.float64, 144), (torch.bfloat16, 176), (torch.float32, 96)])
def test_pages_as_bytes_and_back(model, dtype, page_tokens):
    shapes = Shapes.of(model.cfg, dtype)
    arena = Arena(shapes, shapes.layout(page_tokens), 24)
    arena.bytes.random_(0, 120)
    pages, other, n = [3, 5, 9, 4], [10, 11, 12, 13], 2 * page_tokens + 7
    view, before = ArenaBytes(arena), arena.bytes.clone()
    rows = view.rows(pages, 11, n)
    assert len(rows) == (n - 11) * view.row_bytes
    view.write_rows(other, 11, rows)
    for layer in range(shapes.mla_layers):
        there = arena.rows(other, layer, n)
        assert torch.equal(there[11:], arena.rows(pages, layer, n)[11:])
    assert torch.equal(arena.latents[10, :, :11], before[10].view(dtype)[: arena.latents[0].numel()].view_as(
        arena.latents[10])[:, :11])  # fmt: skip
    groups = len(arena.layout.groups)
    source, target = list(range(groups)), list(range(groups, 2 * groups))
    state = view.state(source)
    view.write_state(target, state)
    for one, two in zip(arena.states(source), arena.states(target), strict=True):
        assert torch.equal(one.conv, two.conv) and torch.equal(one.recurrent, two.recurrent)
    assert len(state) == view.state_bytes == shapes.kda_layers * shapes.state_size * shapes.state_dtype.itemsize


def engine_for(model, tier, memory=1 << 20, page_tokens=None, hash_block=16):
    runner = Runner(model, memory, page_tokens)
    limits = Limits(budget=48, max_sequences=3, grid=2)
    return Engine(runner, {END}, [0], Settings(hash_block, limits=limits, tier=tier), runner.arena.poison)


def evict(engine):
    assert engine.cache.make_room(engine.pool.pages) and engine.cache.spans == 0


def test_an_evicted_prefix_comes_back_and_answers_are_the_cold_ones(model, tmp_path):
    chance = random.Random(1)
    tier = Tier(fingerprint(model), memory=1 << 18, folder=tmp_path)
    engine = engine_for(model, tier)
    base = [chance.randrange(2, VOCAB) for _ in range(120)]
    hits = 0
    for turn in range(8):
        prompt = base[: chance.randrange(40, 120)] + [chance.randrange(2, VOCAB) for _ in range(chance.randrange(4))]
        (reader,) = run(engine, job(prompt))
        is_the_models_own(model, prompt, reader)
        hits += bool(reader.outcome.cached_tokens)
        evict(engine)
        if turn == 4:  # another server, with other pages
            engine.drain()
            engine = engine_for(model, tier, page_tokens=144)
    assert hits > 4 and engine.offload.restored > 1


def test_many_at_once_with_too_few_pages(model, tmp_path):
    chance = random.Random(2)
    engine = engine_for(model, Tier(fingerprint(model), memory=1 << 18, folder=tmp_path), memory=5 << 16)
    bases = [[chance.randrange(2, VOCAB) for _ in range(90)] for _ in range(4)]
    several = [chance.choice(bases)[: chance.randrange(20, 90)] for _ in range(14)]
    rounds = [several[:7], several[7:], several[:7]]
    readers = [reader for prompts in rounds for reader in run(engine, *map(job, prompts))]
    for prompt, reader in zip([*several, *several[:7]], readers, strict=True):
        is_the_models_own(model, prompt, reader)
    assert engine.offload.restored > 0


def test_files_are_read_ahead_when_a_job_comes(model, tmp_path, monkeypatch):
    engine, wanted = engine_for(model, Tier("it", memory=0, folder=tmp_path)), []
    run(engine, job(range(2, 60)))
    evict(engine)
    engine.offload.store.settle()
    monkeypatch.setattr(os, "posix_fadvise", lambda file, *rest: wanted.append(os.fstat(file).st_ino), raising=False)
    engine.submit(job(range(100, 160)))
    assert wanted == []
    engine.submit(job(range(2, 60)))
    assert sorted(wanted) == sorted(path.stat().st_ino for path in tmp_path.glob("*.unit")) and wanted


def test_a_flush_forgets_the_tier_too(model, tmp_path):
    engine = engine_for(model, Tier("it", memory=0, folder=tmp_path))
    run(engine, job(range(2, 60)))
    evict(engine)
    engine.flush()
    (reader,) = run(engine, job(range(2, 60)))
    assert reader.outcome.cached_tokens == 0 and not list(tmp_path.glob("*.unit"))


def test_new_weights_find_nothing_of_the_old_ones_nor_of_another_process(model):
    one, two = engine_for(model, Tier("it")), engine_for(model, Tier("it"))
    ids = list(range(40))
    assert one.keys(ids).keys == two.keys(ids).keys
    one.weight_version = two.weight_version = 1
    assert one.keys(ids).keys != two.keys(ids).keys


def test_report_36_a_conversation_is_saved_goes_on_and_is_loaded_elsewhere(model, tmp_path):
    """What was said after the file was written changes nothing in it."""
    tier, path = Tier(fingerprint(model)), tmp_path / "conversation"
    engine = engine_for(model, tier)
    (reader,) = run(engine, job(range(2, 75)))
    ids = [*range(2, 75), *reader.ids]
    assert save_conversation(engine, ids, path) == 64
    before = path.read_bytes()
    run(engine, job([*ids, 5, 6]), job(ids[:50]))
    assert path.read_bytes() == before

    other = engine_for(model, tier, page_tokens=144)
    assert load_conversation(other, path) == ids
    (second,) = run(other, job([*ids, 5, 6, 7]))
    assert second.outcome.cached_tokens == 64
    is_the_models_own(model, [*ids, 5, 6, 7], second)

    with pytest.raises(ValueError, match="another model"):
        load_conversation(engine_for(model, replace(tier, model="other")), path)
    with pytest.raises(ValueError, match="another layout"):
        load_conversation(engine_for(model, tier, hash_block=24), path)
    with pytest.raises(ValueError, match="salt it was saved with"):
        load_conversation(other, path, salt=(b"tenant",))
    other.weight_version = 1
    with pytest.raises(ValueError, match="weights and the salt"):
        load_conversation(other, path)
    path.write_bytes(before[:-1])
    with pytest.raises(ValueError, match="damaged"):
        load_conversation(engine, path)
    with pytest.raises(ValueError, match="nothing is cached"):
        save_conversation(engine, [9] * 40, path)
    with pytest.raises(ValueError, match="no tier"):
        save_conversation(engine_for(model, None), ids, path)


def test_saving_while_the_engine_runs(model, tmp_path):
    engine = engine_for(model, Tier("it"))
    engine.start()
    engine.submit(Job(list(range(2, 60)), SamplingParams(temperature=0.0, max_tokens=40), Kept()))
    last = Job(list(range(2, 60)), SamplingParams(temperature=0.0, max_tokens=1), Kept())
    engine.submit(last)
    engine.ask(lambda: None)
    while last.reader.outcome is None:
        engine.ask(lambda: None)
    assert save_conversation(engine, range(2, 60), tmp_path / "file") == 48
    with pytest.raises(ZeroDivisionError):
        engine.ask(lambda: 1 // 0)
    assert engine.drain(), "however long it takes beside others"
    assert save_conversation(engine, range(2, 60), tmp_path / "file") == 48


def test_whoever_asks_while_the_engine_ends_is_answered(model):
    """An errand that comes behind the last step is done all the same; nobody waits for ever."""
    for _ in range(20):
        engine = engine_for(model, None)
        engine.start()
        ending = threading.Thread(target=engine.drain, args=(0,))
        ending.start()
        assert [engine.ask(lambda k=k: k) for k in range(5)] == [0, 1, 2, 3, 4]
        ending.join()
        assert engine.ask(lambda: 5) == 5


def test_what_is_cached_at_the_end_is_there_for_the_next_server(model, tmp_path):
    tier = Tier(fingerprint(model), memory=0, folder=tmp_path)
    for hits in (0, 48):
        engine = engine_for(model, tier)
        (reader,) = run(engine, job(range(2, 60)))
        assert reader.outcome.cached_tokens == hits
        is_the_models_own(model, range(2, 60), reader)
        engine.drain(), engine.drain()
        assert engine.cache.spans == 0 and list(tmp_path.glob("*.unit"))


def test_fingerprints_differ_by_one_weight(model):
    before = fingerprint(model)
    weight = model.lm_head.weight.data
    old, weight[3, 3] = weight[3, 3].clone(), 7.0
    assert fingerprint(model) != before
    weight[3, 3] = old
    assert fingerprint(model) == before
