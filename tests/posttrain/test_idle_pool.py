"""Prefixes of samples that wait: the same answers with the pool and without, and what is kept for whom."""

from __future__ import annotations

import pytest
import torch
from playing import AGENT, TOKENIZER, problems

from nanok3.config import K3Config
from nanok3.model.decoder import K3
from nanok3.posttrain.domains import SENTENCES
from nanok3.posttrain.rl import since
from nanok3.posttrain.rl_settings import EngineSettings, RolloutSettings
from nanok3.posttrain.rollout import Rollouts
from nanok3.posttrain.sample import Sample
from nanok3.posttrain.speaker import EngineSpeaker, open_engine
from nanok3.posttrain.turn import Turn
from nanok3.serve.sampler import SamplingParams


@pytest.fixture(scope="module")
def model():
    """Random weights: it hardly ever ends by itself."""
    torch.manual_seed(3)
    return K3(K3Config.tiny().at_depth(4).with_vocabulary(TOKENIZER.vocab_size)).eval()


def speaker(model, pool_mib=64, in_flight=64, record_routes=False):
    """Its own memory is 56 pages; an answer that has ended leaves 9 of them in the cache."""
    settings = EngineSettings(memory_mib=1, pool_mib=pool_mib)
    return EngineSpeaker(open_engine(model, TOKENIZER, in_flight, settings, record_routes))


def samples(count=10):
    """Samples with long prompts that share nothing."""
    made = [Sample(0, number, ids=[(7 * number + 3 * i) % 90 + 5 for i in range(70)]) for number in range(count)]
    for one in made:
        one.begins = len(one.ids)
    return made


def say(speaker, these, tokens=12):
    """A turn of each, one after another; tokens that were read for them."""
    before = speaker.counts()
    for one in these:
        say_together(speaker, [one], tokens)
    grown = since(before, speaker.counts())
    return grown["prompt_tokens"] - grown["cached_tokens"]


def say_together(speaker, these, tokens=12):
    turns = [Turn(one, TOKENIZER, "output", None, speaker.engine.weight_version) for one in these]
    for turn in turns:
        speaker.begin(turn, SamplingParams(seed=turn.sample.seed(0), max_tokens=tokens))
    while any(turn.outcome is None for turn in turns):
        speaker.step()


def tell(speaker, these):
    """What an environment answers."""
    for one in these:
        one.ids += [(11 * one.number + i) % 90 + 5 for i in range(9)]
        one.begins = len(one.ids)
        speaker.rest(one)


def assert_same(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert (a.ids, a.places) == (b.ids, b.places)
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)


def test_what_waited_goes_on_with_the_same_tokens_and_is_not_read_again(model):
    read, said = {}, {}
    for pool in (0, 64):
        mouth, said[pool] = speaker(model, pool), samples()
        for _ in range(2):
            read[pool] = say(mouth, said[pool], 30)
            tell(mouth, said[pool])
    assert_same(said[0], said[64])
    counts = mouth.counts()
    assert counts["pool_written"] > 0 and counts["pool_returned"] >= 5 and counts["pool_bytes"] > 0
    assert read[64] < 10 * 50 < 10 * 70 < read[0], "of 109 tokens the last spans, or most of them"
    mouth.engine.cache.check()
    assert not any("pool" in name for name in speaker(model, 0).counts())


def test_what_was_paused_goes_on_with_the_same_tokens(model):
    """Under the same weights: others have taken its pages meanwhile, and it is not read again."""
    read, said = {}, {}
    for pool in (0, 64):
        mouth, said[pool] = speaker(model, pool), samples(6)
        turns = [Turn(one, TOKENIZER, "output", None, 0) for one in said[pool]]
        for turn in turns:
            mouth.begin(turn, SamplingParams(seed=turn.sample.seed(0), max_tokens=60))
        while min(one.output for one in said[pool]) < 20:
            mouth.step()
        mouth.pause()
        assert {turn.outcome.finish_reason for turn in turns} == {"cancelled"}
        for one in said[pool]:
            mouth.rest(one)
        others = samples(16)[6:]
        say(mouth, others)
        mouth.forget(others)
        read[pool] = say(mouth, said[pool])
    assert_same(said[0], said[64])
    assert read[64] < 6 * 40 < 6 * 80 < read[0], "all of 90 tokens, or what follows the last boundary"


def test_what_is_over_is_neither_written_nor_kept(model):
    mouth, first, second = speaker(model), samples(10), samples(20)[10:]
    say(mouth, first)
    tell(mouth, first)
    say(mouth, second)
    kept = mouth.counts()
    assert kept["pool_written"] > 0 == kept["pool_dropped"]
    mouth.forget(first)
    mouth.forget(first)
    after = mouth.counts()
    assert after["pool_dropped"] > 0 and after["pool_bytes"] < kept["pool_bytes"]
    mouth.forget(second)
    assert mouth.counts()["pool_bytes"] == 0, "nobody waits, so nothing is kept"
    written = mouth.counts()["pool_written"]
    for number in range(2):
        others = [Sample(1, k, ids=[(k * 31 + i * number) % 90 + 5 for i in range(70)], begins=70) for k in range(6)]
        for one in others:
            say(mouth, [one], 4)
            mouth.forget([one])
    assert mouth.counts()["pool_written"] == written and mouth.counts()["pool_left_out"] > 0


def test_a_beginning_that_two_share_stays_until_both_are_over(model):
    mouth, (one, other) = speaker(model), samples(2)
    other.ids[:] = one.ids
    say(mouth, [one])
    tell(mouth, [one])
    mouth.rest(other)
    say(mouth, samples(14)[2:])
    assert mouth.engine.offload.store.units_kept["memory"]
    mouth.forget([one])
    keys = mouth.engine.keys(other.ids).keys
    assert any(mouth.engine.offload.store.place(key) for key in keys)
    mouth.forget([other])
    assert not any(mouth.engine.offload.store.place(key) for key in keys)


def test_new_weights_find_nothing_old(model):
    mouth, said = speaker(model), samples()
    say(mouth, said)
    tell(mouth, said)
    assert len(mouth.engine.offload.store)
    old = [key for one in said for key in mouth.engine.keys(one.ids).keys]
    mouth.renew(1)
    store = mouth.engine.offload.store
    assert len(store) == 0 and mouth.counts()["pool_dropped"] > 0
    assert not {key for one in said for key in mouth.engine.keys(one.ids).keys} & set(old), "keys name the weights"
    whole = sum(len(one.ids) for one in said)
    assert say(mouth, said) == whole, "all is read with the new weights"
    assert all(unit.key not in old for unit in store._held.values())


def test_pages_that_were_taken_from_those_who_speak_come_back(model):
    """More run than there are pages for: what a sequence had read and said is written, and not read again."""
    said = {}
    for pool in (0, 64):
        mouth, said[pool] = speaker(model, pool), samples(9)
        say_together(mouth, said[pool], 170)
        counts = mouth.counts()
        assert counts["preemptions"] > 0
    assert_same(said[0], said[64])
    assert counts["pool_returned"] > 0 and counts["pool_tokens"] >= 80


def test_rollouts_tell_it_who_goes_on(model):
    """Those that were paused; of the others nothing is kept, and their tokens are those without a pool."""
    played = {}
    for pool in (0, 64):
        mouth = speaker(model, pool)
        settings = RolloutSettings(prompts=6, samples=2, pause=0.5, max_tokens=24, in_flight=8)
        rollouts = Rollouts(mouth, TOKENIZER, problems(AGENT, 6), settings, sentences=SENTENCES)
        played[pool] = [sample for group in rollouts.collect() for sample in group.samples]
        rollouts.close()
    assert len(played[0]) and [one.ids for one in played[0]] == [one.ids for one in played[64]]
    waiting = [s for group in rollouts.groups for s in group.samples if s.outcome == "running" and s.ids]
    assert waiting and mouth.pool._keys.keys() == {id(sample) for sample in waiting}


def test_where_there_are_no_prefixes_there_is_no_pool(model):
    mouth = speaker(model, record_routes=True)
    assert mouth.engine.offload is None
    say(mouth, samples(1))
    assert mouth.counts().keys() == {"prompt_tokens", "cached_tokens", "preemptions"}
    with pytest.raises(ValueError, match=r"pool_mib is -1; it must be at least 0"):
        EngineSettings(pool_mib=-1)
    with pytest.raises(ValueError, match=r"memory_mib is 0; it must be at least 1"):
        EngineSettings(memory_mib=0)
