"""Sampler and trainer on a real model: the same log-probabilities by two paths, and what has to be refused. Numbers in
names are those of the list of known problems in docs/rl.md."""

import copy
from dataclasses import replace

import pytest
import torch
from playing import AGENT, TOKENIZER, OneAnswer, problems

from nanok3.config import K3Config
from nanok3.model.decoder import K3
from nanok3.posttrain.domains import SENTENCES
from nanok3.posttrain.replay import RecordingRunner, replayed, routers
from nanok3.posttrain.rl_settings import RolloutSettings
from nanok3.posttrain.rollout import Rollouts
from nanok3.posttrain.sample import Sample
from nanok3.posttrain.score import Difference, Packed, check_same, compare, logprobs, packed
from nanok3.posttrain.speaker import EngineSpeaker, forbidden_ids, open_engine

SETTINGS = RolloutSettings(prompts=2, samples=4, pause=1.0, max_tokens=12)


@pytest.fixture(scope="module")
def model():
    """Weights drawn anew, wide enough apart that rounding is seen."""
    torch.manual_seed(3)
    cfg = K3Config.tiny(initializer_range=0.1).at_depth(4).with_vocabulary(TOKENIZER.vocab_size)
    return K3(cfg).eval()


def sampled(model, settings=SETTINGS, domain=None, **more):
    """Samples of one iteration, and the rollouts."""
    speaker = EngineSpeaker(open_engine(model, TOKENIZER, settings.in_flight, **more))
    source = problems(domain or OneAnswer(), settings.prompts)
    played = Rollouts(speaker, TOKENIZER, source, settings, sentences=SENTENCES)
    groups = played.collect()
    return [sample for group in groups for sample in group.samples], played


def forbidden(model):
    return torch.tensor(forbidden_ids(model, TOKENIZER))


def test_1_sampler_and_trainer_agree(model):
    """By cached decoding among others, and by one packed pass: float32, largest difference."""
    samples, _ = sampled(model)
    assert len(samples) == 8 and sum(sample.output for sample in samples) > 60
    found = compare(model, samples, forbidden(model), 1.0)
    assert found.tokens == sum(sample.output for sample in samples) and found.largest < 1e-4
    check_same(found, torch.float32)
    alone, _ = sampled(model, replace(SETTINGS, in_flight=1))
    assert [s.ids for s in alone] == [s.ids for s in samples]
    assert [s.logprobs for s in alone] == [pytest.approx(s.logprobs, abs=1e-5) for s in samples]


@pytest.mark.parametrize("temperature", [0.6, 1.5])
def test_3_the_temperature_is_on_both_sides(model, temperature):
    samples, _ = sampled(model, replace(SETTINGS, temperature=temperature))
    assert compare(model, samples, forbidden(model), temperature).largest < 1e-4
    one_sided = compare(model, samples, forbidden(model), 1.0)
    assert one_sided.largest > 0.1
    with pytest.raises(ValueError, match="sampler and trainer differ by largest"):
        check_same(one_sided, torch.float32)


def test_1_ids_that_are_never_said_are_left_out_on_both_sides(model):
    samples, _ = sampled(model)
    with pytest.raises(ValueError, match=r"less than 0\.0001"):
        check_same(compare(model, samples, torch.zeros(0, dtype=torch.int64), 1.0), torch.float32)


def test_the_largest_difference_decides():
    found = Difference.of(torch.zeros(100), torch.cat([torch.zeros(99), torch.ones(1)]))
    assert (found.largest, found.percentile95) == (1.0, 0.0) and found.mean == pytest.approx(0.01)
    check_same(found, torch.bfloat16)
    with pytest.raises(ValueError, match="largest 1"):
        check_same(found, torch.float32)


def test_packed_rows_are_the_samples_alone(model):
    samples, _ = sampled(model)
    marks = [[True] * sample.output for sample in samples]
    alone = torch.cat([logprobs(model, Packed.of([s], [m]), forbidden(model)) for s, m in zip(samples, marks)])
    rows = list(packed([*samples, Sample(9, 9, ids=[1, 2])], [*marks, []], 150))
    assert 1 < len(rows) < 8 and sum(len(row.samples) for row in rows) == 8
    together = torch.cat([logprobs(model, row, forbidden(model)) for row in rows])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)
    assert [row.tokens.answer.max() + 1 for row in rows] == [len(row.samples) for row in rows]


def test_logits_in_chunks_have_the_same_gradient(model, monkeypatch):
    samples, _ = sampled(model)
    row = Packed.of(samples, [[True] * sample.output for sample in samples])

    def gradient():
        model.zero_grad()
        logprobs(model, row, forbidden(model)).sum().backward()
        return model.lm_head.weight.grad.clone()

    whole = gradient()
    monkeypatch.setattr("nanok3.posttrain.score.LOGITS", 10 * model.cfg.vocab_size)
    torch.testing.assert_close(gradient(), whole)
    model.zero_grad()


def test_16_after_an_update_nothing_cached_is_read(model):
    """A sample is paused, the weights change: what it says then is what a model without any past says."""
    model = copy.deepcopy(model)
    settings = replace(SETTINGS, pause=0.2, max_tokens=40)
    speaker = EngineSpeaker(open_engine(model, TOKENIZER, 64))
    played = Rollouts(speaker, TOKENIZER, problems(OneAnswer(), 2), settings, sentences=SENTENCES)
    played._fill()
    for _ in range(15):
        played._begin_turns()
        played._step()
    played._pause()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    played.renew()
    paused = {(s.prompt, s.number) for g in played.groups for s in g.samples if s.outcome == "running" and s.output > 5}
    samples = [s for group in played.collect() for s in group.samples if (s.prompt, s.number) in paused]
    assert samples and all(set(s.versions) == {0, 1} for s in samples)
    marks = [[True] * s.output for s in samples]
    row = Packed.of(samples, marks)
    apart = (logprobs(model, row, forbidden(model)).detach() - row.tokens.logprob).abs()
    new = torch.tensor([version == 1 for s in samples for version in s.versions])
    assert apart[new].max() < 1e-4 < 0.01 < apart[~new].max(), "new tokens of the new weights, old ones of the old"


# ------------------------------------------------------------------ routing replay


def test_24_the_trainer_goes_where_the_sampler_went(model):
    samples, _ = sampled(model, domain=AGENT, record_routes=True)
    row = Packed.of(samples, [[True] * sample.output for sample in samples])
    chosen = []
    handles = [r.register_forward_hook(lambda m, i, out: chosen.append(out.chosen)) for r in routers(model)]
    with replayed(model, row):
        found = logprobs(model, row, forbidden(model))
    for handle in handles:
        handle.remove()
    assert (found.detach() - row.tokens.logprob).abs().max() < 1e-5
    model.zero_grad()
    found.sum().backward()
    assert all(router.weight.grad.abs().sum() > 0 for router in routers(model))
    model.zero_grad()


def test_24_recorded_routes_are_followed_with_the_weights_of_now(model):
    """Other routers would choose otherwise; replay does not let them, and mixes by their own scores."""
    samples, _ = sampled(model, record_routes=True)
    row = Packed.of(samples, [[True] * sample.output for sample in samples])
    other = copy.deepcopy(model)
    with torch.no_grad():
        for router in routers(other):
            router.weight.add_(0.3 * torch.randn_like(router.weight))
    free, replay = logprobs(other, row, forbidden(model)).detach(), None
    with replayed(other, row):
        replay = logprobs(other, row, forbidden(model)).detach()
    assert (free - replay).abs().max() > 1e-3


def test_24_a_missing_record_is_an_error(model):
    samples, _ = sampled(model, record_routes=True)
    short = replace(samples[0], routes=samples[0].routes[: len(samples[0].routes) // 8 * 4])
    for broken, message in (
        (replace(samples[0], routes=""), "0 tokens have recorded"),
        (short, "have recorded routes"),
    ):
        with pytest.raises(ValueError, match=message), replayed(model, Packed.of([broken], [[True] * broken.output])):
            pass


def test_recording_changes_nothing_that_is_said(model):
    recorded, played = sampled(model, record_routes=True)
    plain, _ = sampled(model)
    assert [s.ids for s in recorded] == [s.ids for s in plain] and isinstance(
        played.speaker.engine.runner, RecordingRunner
    )
