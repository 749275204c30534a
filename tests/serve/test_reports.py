"""Public bug reports of other engines about caches and states, by number: docs/fidelity.md lists them all.

Freed pages hold NaN, and so do all pages before they are first written: what is read without having been written
shows. A state or a row that is registered must be that of one pass over its own tokens.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from test_engine import END, GREEDY, VOCAB, Kept, is_the_models_own, job, run
from test_scheduler import World

from nanok3.config import K3Config
from nanok3.model.cache import KDAState
from nanok3.model.decoder import K3
from nanok3.serve.arena import Arena, Shapes
from nanok3.serve.engine import Engine, Job, Settings
from nanok3.serve.page_pool import Kind, PagePool
from nanok3.serve.prefix_cache import Picture, PrefixCache, SpanKeys
from nanok3.serve.runner import Runner
from nanok3.serve.scheduler import Limits
from nanok3.serve.sequence import Sequence

pytestmark = pytest.mark.usefixtures("unchecked")
ONE = replace(GREEDY, max_tokens=1)


def small(dtype):
    """All experts are chosen: a near tie between two would turn float32's rounding into another answer."""
    torch.manual_seed(4)
    cfg = K3Config.tiny(initializer_range=0.25).at_depth(4).with_vocabulary(VOCAB)
    return K3(replace(cfg, num_experts_per_token=cfg.num_experts)).to(dtype).eval()


@pytest.fixture(scope="module", params=[torch.float64, torch.float32], ids=["through the model", "natively"])
def model(request):
    found = small(request.param)
    assert (Runner(found, 8 << 20).native is None) == (request.param is torch.float64)
    return found


def engine_for(model, hash_block=16, memory=4 << 20, budget=48, **limits):
    runner = Runner(model, memory)
    limits = Limits(budget, **{"max_sequences": 8, "grid": 2, **limits})
    engine = Engine(runner, {END}, [0], Settings(hash_block, limits=limits), runner.arena.poison)
    for page in range(runner.pages):
        runner.arena.poison(page)
    return engine


def within(model):
    return 1e-9 if model.lm_head.weight.dtype == torch.float64 else 1e-3


def words(seed, count):
    return random.Random(seed).choices(range(2, VOCAB), k=count)


def check_memory(engine, model, ids):
    """Everything that is registered of a sequence, against one pass; how many states that were."""
    node, states, pass_ = engine.cache.root, 0, model.new_state(1)
    for key in engine.keys(ids).keys:
        node = node.children.get(key)
        if node is None:
            break
        n = node.depth * engine.cache.span
        with torch.no_grad():
            model(torch.tensor([ids[n - engine.cache.span : n]]), state=pass_)
        arena, mla = engine.runner.arena, 0
        kept = iter(() if node.snapshot is None else arena.states(list(node.snapshot)))
        for layer in pass_.layers:
            if not isinstance(layer, KDAState):
                rows = arena.rows(engine.cache.pages_of(node), mla, n)
                torch.testing.assert_close(rows, layer.latents[0, :n], rtol=0, atol=within(model))
                mla += 1
            elif node.snapshot is not None:
                here = next(kept)
                torch.testing.assert_close(here.recurrent, layer.recurrent, rtol=0, atol=within(model))
                torch.testing.assert_close(here.conv, layer.conv, rtol=0, atol=within(model))
        states += node.snapshot is not None
    return states


def one_after_another(world, ids):
    sequence = world.add(ids)
    world.run(sequence)
    return sequence


@pytest.mark.parametrize("shared", [1, 15, 16, 17, 31, 33, 47, 48])
def test_report_22_short_common_beginnings_hit_and_misses_have_a_reason(shared):
    """Reports 53749, 40696, 48401: no hit below one inflated block, and nothing says so."""
    world = World(pages=400, page_tokens=24, span=16, groups=2, budget=100, grid=8)
    first, second, third = (one_after_another(world, [*range(shared), *[99 + k] * 40]) for k in range(3))
    assert (first.match.limit, first.match.latent_tokens) == ("latents", 0)
    assert second.match.latent_tokens == third.cached_tokens == shared // 16 * 16
    assert second.match.limit == ("snapshot" if shared >= 16 else "latents")


def test_report_23_two_requests_with_a_long_common_beginning_are_enough():
    world = World(pages=400, page_tokens=256, span=512, groups=2, budget=2048)
    common = list(range(20_000))
    _, second, third = (one_after_another(world, [*common, *[k] * 1000]) for k in range(3))
    assert second.cached_tokens == 16_384, "a grid of 4,096 tokens"
    assert third.cached_tokens == 19_968, "and then where they parted"


def test_report_25_what_joins_running_answers_is_written_before_it_is_found(model):
    engine = engine_for(model)
    speaking = [job(words(k, 20), replace(GREEDY, max_tokens=8)) for k in range(2)]
    for one in speaking:
        engine.submit(one)
    for _ in range(3):
        engine.step()
    joining = [job([*words(9, 70), k]) for k in range(2)]
    run(engine, *joining)
    run(engine, *(again := [job([*words(9, 70), k]) for k in range(2)]))
    assert [one.reader.outcome.cached_tokens for one in again] == [64, 64]
    for one in (*speaking, *joining, *again):
        is_the_models_own(model, one.prompt, one.reader, within(model))
        assert check_memory(engine, model, [*one.prompt, *one.reader.ids])


def test_report_26_the_same_prompt_twice_gives_the_same_numbers(model):
    """With report 24, as far as it is one without drafts."""
    engine, prompt = engine_for(model), words(1, 75)
    cold, warm = (run(engine, job(prompt))[0] for _ in range(2))
    assert (cold.outcome.cached_tokens, warm.outcome.cached_tokens) == (0, 64) and cold.ids == warm.ids
    for one, two in zip(cold.tokens, warm.tokens, strict=True):
        assert [p for _, p in one.top] == pytest.approx([p for _, p in two.top], abs=within(model))
    assert check_memory(engine, model, prompt) >= 2


@pytest.mark.parametrize("budget", [64, 200])
def test_report_27_a_snapshot_does_not_depend_on_who_is_read_beside_it(model, budget):
    engine = engine_for(model, hash_block=32, budget=budget)
    several = [words(1, 65), words(2, 130)]
    run(engine, *(job(prompt, ONE) for prompt in several))
    assert [check_memory(engine, model, prompt) for prompt in several] == [1, 2]


def test_report_28_tree_and_lists_agree_after_anything():
    """Against a plain set of what was registered and not yet evicted."""
    chance = random.Random(28)
    pool = PagePool(60)
    left: set[bytes] = set()
    cache = PrefixCache(pool, 4, 4, 2, lambda node: left.add(node.key))
    registered: dict[tuple[int, ...], None] = {}
    for _ in range(3000):
        ids = [chance.randrange(2) for _ in range(4 * chance.randrange(1, 6))]
        keys = SpanKeys(4)
        keys.push(ids)
        match = cache.match(keys.keys, len(ids) + 1)
        assert match.node.snapshot is not None or match.node is cache.root
        assert match.tokens == 0 or tuple(ids[: match.tokens]) in registered
        if chance.random() < 0.5:
            taken = cache.take(match)
            need = len(keys.keys) - match.node.depth + 2
            if cache.make_room(need):
                node, pages = match.node, [*taken.pages, *pool.take(Kind.LATENT, need - 2)]
                for depth in range(node.depth + 1, len(keys.keys) + 1):
                    node = cache.insert(node, keys.keys[depth - 1], cache.span_pages(depth, pages))
                cache.keep_snapshot(node, pool.take(Kind.SNAPSHOT, 2), chance.random() < 0.5)
                registered[tuple(ids)] = None
                pool.release(pages)
            else:
                pool.release(taken.pages)
            pool.release(taken.snapshot)
            cache.unpin(match.node)
        elif chance.random() < 0.2:
            cache.make_room(chance.randrange(60))
        elif chance.random() < 0.02:
            cache.clear()
            registered.clear()
        cache.check()
    assert len(left) > 20
    assert cache.make_room(60) and not list(cache.nodes())


@pytest.mark.parametrize("budget", [16, 23, 64])
def test_report_29_the_states_layout_is_the_same_in_every_chunk(model, budget):
    engine, prompt = engine_for(model, budget=budget), words(3, 90)
    (reader,) = run(engine, job(prompt))
    is_the_models_own(model, prompt, reader, within(model))
    assert check_memory(engine, model, prompt) >= 2
    node = engine.cache.match(engine.keys(prompt).keys, 90).node
    for state in engine.runner.arena.states(list(node.snapshot)):
        assert not torch.allclose(state.recurrent, state.recurrent.transpose(-1, -2), atol=0.01), "or nobody could tell"


def test_report_29_keys_and_values_of_other_widths():
    shapes = Shapes(1, 8, torch.float32, 3, (3, 3, 10), (2, 5, 7), torch.float32)
    arena = Arena(shapes, shapes.layout(), 8)
    for page in range(8):
        arena.poison(page)
    groups = list(range(len(arena.layout.groups)))
    for k, state in enumerate(arena.states(groups)):
        assert state.recurrent.shape == (1, 2, 5, 7)
        state.recurrent.fill_(k), state.conv.fill_(-k)
    for k, state in enumerate(arena.states(groups)):
        assert (state.recurrent == k).all() and (state.conv == -k).all()


@pytest.mark.parametrize("first", [17, 31, 32, 33, 47])
def test_report_30_a_chunk_that_crosses_a_boundary_goes_on_from_the_chunk_before(model, first):
    engine, prompt = engine_for(model, hash_block=32, budget=first), words(5, 75)
    (reader,) = run(engine, job(prompt))
    is_the_models_own(model, prompt, reader, within(model))
    check_memory(engine, model, prompt)


def test_report_33_the_second_turn_has_its_state(model):
    engine, prompt = engine_for(model), words(6, 40)
    for _ in range(3):
        (reader,) = run(engine, job(prompt))
        is_the_models_own(model, prompt, reader, within(model))
        assert len(prompt) == 40 or reader.outcome.cached_tokens >= 32
        prompt = [*prompt, *reader.ids, 5, 6, 7]


def test_report_34_a_hit_in_anothers_slot_loads_the_snapshot(model):
    """A pool of few pages: the second conversation gets the pages of a third, which ended in between."""
    engine, prompt = engine_for(model), words(7, 40)
    run(engine, job(prompt))
    slot = run_and_note_state(engine, job(words(8, 40)))
    (reader,) = run(engine, again := job([*prompt, 9, 9]))
    assert again.reader.outcome.cached_tokens == 32 and slot
    is_the_models_own(model, again.prompt, reader, within(model))


def run_and_note_state(engine, one):
    engine.submit(one)
    engine.step()
    found = list(engine._jobs[one.id].sequence.state)
    while not engine.idle:
        engine.step()
    return found


@pytest.mark.parametrize("edited", [3, 20, 40, 63, 66])
def test_report_35_an_edit_in_the_middle_goes_back_to_a_boundary_before_it(model, edited):
    engine, prompt = engine_for(model), words(10, 70)
    run(engine, job(prompt))
    changed = [*prompt]
    changed[edited] = prompt[edited] % (VOCAB - 3) + 2
    (reader,) = run(engine, job(changed))
    is_the_models_own(model, changed, reader, within(model))
    assert reader.outcome.cached_tokens == {3: 0, 20: 0, 40: 32, 63: 32, 66: 64}[edited]


@pytest.mark.parametrize("bit", [0, 8, 16, 100, 255])
def test_report_37_another_picture_under_the_same_text_is_a_miss(bit):
    """One bit anywhere in the digest, and where in the picture a span lies."""
    digest = bytes(range(32))
    other = (int.from_bytes(digest) ^ 1 << bit).to_bytes(32)
    ids = [1] * 8 + [0] * 20 + [2] * 8
    hits = {}
    for name, picture in [
        ("first", Picture(8, 28, digest)),
        ("same", Picture(8, 28, digest)),
        ("other", Picture(8, 28, other)),
        ("longer", Picture(4, 28, digest)),
    ]:
        world = world_of_pictures() if name == "first" else world
        keys = SpanKeys(4, (), (picture,))
        keys.push(ids)
        sequence = Sequence(name, list(ids), len(ids), keys)
        world.scheduler.add(sequence)
        world.run(sequence)
        hits[name] = sequence.match.latent_tokens
    assert hits == {"first": 0, "same": 32, "other": 8, "longer": 4}


def world_of_pictures():
    return World(pages=200, page_tokens=4, span=4, groups=1, budget=100, grid=1)


def test_siblings_read_their_prompt_once(model):
    """Several answers to one prompt: the others compute no more of it than one span."""
    engine, prompt = engine_for(model, max_sequences=6), words(11, 90)
    read, before = [], engine.runner.read

    def counted(work, all_logits):
        read.append(sum(min(piece.start + piece.count, 90) - min(piece.start, 90) for piece in work))
        return before(work, all_logits)

    engine.runner.read = counted
    jobs = [Job(prompt, replace(GREEDY, temperature=1.0, seed=k), Kept()) for k in range(5)]
    run(engine, *jobs)
    assert sum(read) <= 90 + 4 * 16 and sum(read) == 90 + 4 * 10
    assert [one.reader.outcome.cached_tokens for one in jobs] == [0, 80, 80, 80, 80]
