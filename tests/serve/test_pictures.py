"""Pictures in the engine: whatever is cached, cut, shared or taken back, answers are those of one forward pass."""

from __future__ import annotations

import random

import pytest
import torch
from seeing import VOCAB, picture, seeing_model

from nanok3.model.decoder import K3
from nanok3.serve.engine import Engine, Job, Overloaded, Settings
from nanok3.serve.pictures import Eyes, check_pads, show
from nanok3.serve.prefix_cache import Picture
from nanok3.serve.runner import Runner
from nanok3.serve.sampler import SamplingParams
from nanok3.serve.scheduler import Limits

pytestmark = pytest.mark.usefixtures("unchecked")
PAD = VOCAB - 256 + 21
GREEDY = SamplingParams(temperature=0.0, max_tokens=4)
PICTURES = [picture(seed) for seed in range(3)] + [picture(9, 30, 300)]


class Kept:
    def __init__(self):
        self.tokens, self.outcome = [], None

    def push(self, token):
        self.tokens.append(token)
        return False

    def finish(self, outcome):
        self.outcome = outcome

    @property
    def ids(self):
        return [token.id for token in self.tokens]


@pytest.fixture(scope="module")
def model():
    return seeing_model().double()


def engine_for(model, memory=8 << 20, hash_block=16, limits=None, feature_bytes=1 << 20, **settings):
    runner = Runner(model, memory, None, feature_bytes)
    limits = limits or Limits(budget=48, max_sequences=8, grid=2)
    return Engine(runner, {1}, [0, PAD], Settings(hash_block, limits=limits, **settings), runner.arena.poison)


def job(ids, *images, **more):
    prompt, shown = show(ids, images, PAD)
    return Job(prompt, GREEDY, Kept(), top_logprobs=3, pictures=shown, **more)


def run(engine, *jobs, chance=None):
    """chance: now and then somebody has to give way, wherever it is."""
    for one in jobs:
        engine.submit(one)
    while not engine.idle:
        engine.step()
        engine.cache.check()
        if chance and engine.scheduler.running and chance.random() < 0.3:
            engine.scheduler.preempt(chance.choice(engine.scheduler.running))
    return [one.reader for one in jobs]


@torch.no_grad()
def is_the_models_own(model, ids, images, reader):
    """One forward of the torch model with a pad a picture: the same choices, with the same weights."""
    assert reader.outcome.finish_reason in ("stop", "length"), reader.outcome
    rows = sum(image.tokens - 1 for image in images)
    media = {}
    if images:
        media["pixel_values"] = torch.cat([image.pixel_values for image in images])
        media["grid_thw"] = torch.cat([image.grid_thw for image in images])
    logits = model(torch.tensor([[*ids, *reader.ids[:-1]]]), **media).logits[0, len(ids) + rows - 1 :].double()
    logits[:, [0, PAD]] = -torch.inf
    logp = logits.log_softmax(-1)
    assert reader.ids == logp.argmax(-1).tolist()
    for token, row in zip(reader.tokens, logp, strict=True):
        assert [logprob for _, logprob in token.top] == pytest.approx(row.topk(3).values.tolist(), abs=1e-9)


@pytest.mark.parametrize("budget", [5, 20, 512])
def test_a_chunk_may_cut_a_picture(model, budget):
    ids = [2, 3, PAD, 4, PAD, PAD, 5, *range(20, 40)]
    images = [PICTURES[0], PICTURES[3], PICTURES[0]]
    engine = engine_for(model, limits=Limits(budget=budget, max_sequences=4, grid=2))
    (reader,) = run(engine, job(ids, *images))
    is_the_models_own(model, ids, images, reader)
    assert engine.runner.eyes.looked == 2, "a picture that comes twice is looked at once"


def test_a_hit_may_end_inside_a_picture(model):
    """Spans of 16 over pictures of 12 rows: same picture hits, another one misses from where it begins."""
    ids = [*range(10, 20), PAD, PAD, *range(30, 50)]
    engine = engine_for(model, limits=Limits(budget=48, max_sequences=8, grid=1))
    first, again, other = [PICTURES[0], PICTURES[1]], [PICTURES[0], PICTURES[1]], [PICTURES[0], PICTURES[2]]
    cached = []
    for images in (first, again, other):
        (reader,) = run(engine, job(ids, *images))
        is_the_models_own(model, ids, images, reader)
        cached.append(reader.outcome.cached_tokens)
    assert cached == [0, 48, 16], "the boundaries at 16 and 32 lie inside the first and the second picture"


def test_the_same_place_and_another_picture_is_a_miss(model):
    """Placeholders are equal ids; what they stand for is not."""
    ids = [PAD, *range(20, 60)]
    engine = engine_for(model)
    for image in (PICTURES[0], PICTURES[1]):
        (reader,) = run(engine, job(ids, image))
        is_the_models_own(model, ids, [image], reader)
        assert reader.outcome.cached_tokens == 0


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 12))])
def test_warm_is_cold_with_pictures(model, seed):
    """Shared beginnings, other pictures, evictions, pre-emptions, few features kept, chunks and batches of any size."""
    chance = random.Random(seed)
    base = [chance.randrange(20, 230) for _ in range(30)]
    for at in (21, 13, 4):
        base.insert(at, PAD)
    hits = preempted = 0
    for pages, feature_bytes in ((16, 20_000), (60, 1 << 20)):
        memory = pages * Runner(model, 8 << 20).layout.page_bytes
        limits = Limits(budget=chance.choice([20, 100]), max_sequences=4, grid=1)
        engine = engine_for(model, memory, 16, limits, feature_bytes)
        for _ in range(2):
            asked = []
            for _ in range(3):
                ids = base[: chance.randrange(8, len(base))] + [chance.randrange(20, 230)]
                asked.append((ids, [chance.choice(PICTURES[: 1 + k]) for k in range(ids.count(PAD))]))
            readers = run(engine, *(job(ids, *images) for ids, images in asked), chance=chance)
            for (ids, images), reader in zip(asked, readers):
                is_the_models_own(model, ids, images, reader)
                hits += reader.outcome.cached_tokens > 0
        preempted += engine.scheduler.preemptions
    assert hits > 2 and preempted > 0, (hits, preempted)


def test_float32_decodes_natively_behind_a_picture():
    model = seeing_model()
    ids = [2, PAD, *range(40, 80)]
    engine = engine_for(model)
    assert engine.runner.native is not None
    (reader,) = run(engine, job(ids, PICTURES[0]))
    with torch.no_grad():
        grids = {"pixel_values": PICTURES[0].pixel_values, "grid_thw": PICTURES[0].grid_thw}
        logits = model(torch.tensor([[*ids, *reader.ids[:-1]]]), **grids).logits[0, len(ids) + 10 :]
    logits[:, [0, PAD]] = -torch.inf
    for token, row in zip(reader.tokens, logits.log_softmax(-1), strict=True):
        assert token.top[0][1] == pytest.approx(float(row.max()), abs=1e-3)


def test_a_check_of_the_cache_sees_the_picture(model):
    engine = engine_for(model, check_cache=1.0)
    for _ in range(2):
        run(engine, job([*range(10, 20), PAD, *range(30, 70)], PICTURES[0]))
    assert (engine.checks.done, engine.checks.failed) == (1, 0) and engine.checks.worst < 1e-9


def test_a_tower_that_fails_ends_its_own_job_alone(model, monkeypatch):
    engine = engine_for(model)
    monkeypatch.setattr(engine.runner.eyes, "_look", lambda picture: 1 / 0)
    broken, whole = run(engine, job([5, PAD, 6], PICTURES[0]), job([7, 8, 9]))
    assert broken.outcome.finish_reason == "error" and whole.outcome.finish_reason != "error"
    assert engine.pool.free + engine.cache.spans >= 0 and engine.idle


def test_pictures_that_wait_are_bounded(model):
    one = PICTURES[0].pixel_values.nbytes
    engine = engine_for(model, picture_bytes=2 * one)
    jobs = [job([PAD, 5 + k], PICTURES[k % 2]) for k in range(4)]
    for each in jobs:
        engine.submit(each)
    with pytest.raises(Overloaded, match="bytes of pictures"):
        engine.submit(job([PAD, 7], PICTURES[2]))
    jobs.append(job([7, 8]))
    run(engine, *jobs[4:])
    assert engine.pixels.bytes == 0 and all(each.reader.outcome.finish_reason == "length" for each in jobs)


def test_features_are_kept_within_their_bytes(model):
    one = 12 * model.cfg.hidden_size * 8
    eyes = Eyes(model, 2 * one)
    with torch.no_grad():
        for k in (0, 1, 0, 2, 0, 1):
            eyes.features(show([PAD], [PICTURES[k]], PAD)[1][0])
    assert eyes.looked == 4 and eyes.bytes == 2 * one


def test_pads_and_pictures_belong_together(model):
    one, two = PICTURES[:2]
    assert show([5, PAD, 6], [one], PAD)[0] == show([5, *[PAD] * 12, 6], [one], PAD)[0] == [5, *[PAD] * 12, 6]
    assert [(p.start, p.end) for p in show([PAD, PAD], [one, two], PAD, start=100)[1]] == [(100, 112), (112, 124)]
    for ids, images in (([5], [one]), ([PAD], []), ([PAD, PAD], [one]), ([*[PAD] * 6, 5, *[PAD] * 6], [one])):
        with pytest.raises(ValueError, match="placeholders"):
            show(ids, images, PAD)
    shown = show([5, PAD, 6], [one], PAD)[1]
    for prompt, pictures in (
        ([5, PAD, 6], ()),
        ([5, *[PAD] * 13, 6], shown),
        ([5, *[PAD] * 11, 6, 7], shown),
        ([PAD] * 13, shown),
        ([PAD] * 12, (Picture(0, 12, b""), Picture(6, 12, b""))),
    ):
        with pytest.raises(ValueError, match="picture"):
            engine_for(model).submit(Job(prompt, GREEDY, Kept(), pictures=pictures))
    with pytest.raises(ValueError, match="no vision tower"):
        check_pads([5, PAD], shown, None)
    with pytest.raises(ValueError, match="no vision tower"):
        Eyes(K3(model.cfg.tiny()))
