"""Warm against cold: the check passes a sound cache, sees a broken page, and leaves nothing behind."""

from __future__ import annotations

import logging

import pytest
import torch

from nanok3.config import K3Config
from nanok3.model.decoder import K3
from nanok3.serve.cache_check import CacheChecks
from nanok3.serve.engine import Engine, Job, Settings
from nanok3.serve.page_pool import Kind
from nanok3.serve.runner import Runner
from nanok3.serve.sampler import SamplingParams
from nanok3.serve.scheduler import Limits

pytestmark = pytest.mark.usefixtures("unchecked")
PROMPT = list(range(2, 60))


class Reader:
    def push(self, token):
        return False

    def finish(self, outcome):
        self.outcome = outcome


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(3)
    return K3(K3Config.tiny(initializer_range=0.25).at_depth(4).with_vocabulary(512)).double().eval()


def engine_for(model, share):
    limits = Limits(budget=16, max_sequences=4, grid=2)
    runner = Runner(model, 8 << 20)
    return Engine(runner, {1}, [0], Settings(hash_block=16, check_cache=share, limits=limits), runner.arena.poison)


def run(engine, prompt=PROMPT):
    reader = Reader()
    engine.submit(Job(prompt, SamplingParams(temperature=0.0, max_tokens=3), reader))
    while not engine.idle:
        engine.step()
    engine.cache.check()
    return reader.outcome


def test_a_sound_cache_passes_and_pages_come_back(model):
    engine = engine_for(model, 1.0)
    for _ in range(3):
        run(engine)
    assert isinstance(engine.checks, CacheChecks) and (engine.checks.done, engine.checks.failed) == (2, 0)
    assert engine.checks.worst < 1e-9 and engine.checks.skipped == 0
    engine.cache.clear()
    assert engine.pool.free == engine.pool.pages


def test_a_share_is_a_share(model):
    engine = engine_for(model, 0.5)
    for _ in range(7):
        run(engine)
    assert engine.checks.done == 3
    never = engine_for(model, 0.0)
    run(never), run(never)
    assert never.checks.done == 0


def test_a_broken_state_is_seen(model, caplog):
    engine = engine_for(model, 1.0)
    run(engine)
    for node in engine.cache.nodes():
        for page in node.snapshot or ():
            engine.runner.arena.clear(page)
    caplog.set_level(logging.ERROR, "nanok3")
    assert run(engine).cached_tokens > 0
    assert engine.checks.failed == 1 and engine.checks.worst > 1e-3 and "differ" in caplog.text


def test_without_pages_nothing_is_checked_and_nothing_breaks(model, monkeypatch):
    engine = engine_for(model, 1.0)
    run(engine)
    taken = []
    finish = engine.scheduler.finish

    def finish_and_fill(sequence):
        finish(sequence)
        engine.cache.clear()
        taken.extend(engine.pool.take(Kind.LATENT, engine.pool.free))

    monkeypatch.setattr(engine.scheduler, "finish", finish_and_fill)
    run(engine)
    assert (engine.checks.done, engine.checks.skipped) == (0, 1)
    engine.pool.release(taken)
    assert engine.pool.free == engine.pool.pages


def test_an_engine_that_drains_checks_no_more(model):
    engine = engine_for(model, 1.0)
    run(engine)
    engine.submit(Job(PROMPT, SamplingParams(temperature=0.0, max_tokens=1), Reader()))
    while engine._jobs or engine._inbox:
        engine.step()
    assert engine.checks.pending and not engine.idle
    engine.start()
    assert engine.drain(5) and engine.checks.done == 0
