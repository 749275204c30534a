"""The engine on a small real model: what is cached, batched, cut or evicted never shows in an answer."""

import random
from dataclasses import replace

import pytest
import torch

from nanok3.config import K3Config
from nanok3.model.decoder import K3
from nanok3.serve.engine import Engine, Settings
from nanok3.serve.job import Job, Overloaded, Stopping
from nanok3.serve.runner import Runner
from nanok3.serve.sampler import SamplingParams
from nanok3.serve.saying import Saying
from nanok3.serve.scheduler import Limits

pytestmark = pytest.mark.usefixtures("unchecked")
VOCAB = 512
END = 1
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


class Kept:
    """A reader that keeps what it is told."""

    def __init__(self, enough=lambda ids: False):
        self.tokens, self.outcome, self.enough = [], None, enough

    def push(self, token):
        self.tokens.append(token)
        return self.enough(self.ids)

    def finish(self, outcome):
        assert self.outcome is None, "a job ends once"
        self.outcome = outcome

    @property
    def ids(self):
        return [token.id for token in self.tokens]


@pytest.fixture(scope="module")
def model():
    """KDA and MLA layers in float64: rounding neither shows nor tips a close choice of experts."""
    torch.manual_seed(3)
    cfg = K3Config.tiny(initializer_range=0.25).at_depth(4).with_vocabulary(VOCAB)
    assert {"kda", "mla"} <= set(cfg.kinds)
    return K3(cfg).double().eval()


def engine_for(model, memory=8 << 20, page_tokens=None, hash_block=16, **settings):
    limits = settings.pop("limits", Limits(budget=48, max_sequences=8, grid=2))
    runner = Runner(model, memory, page_tokens)
    return Engine(runner, {END}, [0], Settings(hash_block=hash_block, limits=limits, **settings), runner.arena.poison)


def run(engine, *jobs):
    for job in jobs:
        engine.submit(job)
    while not engine.idle:
        engine.step()
        engine.cache.check()
    return [job.reader for job in jobs]


def job(prompt, params=GREEDY, **more):
    return Job(list(prompt), params, Kept(), top_logprobs=3, **more)


@torch.no_grad()
def is_the_models_own(model, prompt, reader, within=1e-9):
    """One forward pass over prompt and answer, from nothing: at every place the same choice, with the same weight."""
    prompt, said = list(prompt), reader.ids
    logits = model(torch.tensor([[*prompt, *said[:-1]]])).logits[0, len(prompt) - 1 :].double()
    logits[:, 0] = -torch.inf
    logp = logits.log_softmax(-1)
    assert said == logp.argmax(-1).tolist()
    for token, row in zip(reader.tokens, logp, strict=True):
        assert [logprob for _, logprob in token.top] == pytest.approx(row.topk(3).values.tolist(), abs=within)


def prompts(chance, count, longest=100):
    base = [[chance.randrange(2, VOCAB) for _ in range(longest)] for _ in range(3)]

    def one():
        end = [chance.randrange(2, VOCAB) for _ in range(chance.randrange(6))]
        return chance.choice(base)[: chance.randrange(1, longest)] + end

    return [one() for _ in range(count)]


def test_one_answer_is_the_models(model):
    prompt = list(range(2, 45))
    (reader,) = run(engine_for(model), job(prompt))
    is_the_models_own(model, prompt, reader)
    assert reader.outcome.prompt_tokens == 43 and reader.outcome.said_tokens == len(reader.ids)


@pytest.mark.parametrize("page_tokens", [None, 96, 144])
def test_a_batch_of_all_lengths_says_what_each_says_alone(model, page_tokens):
    several = prompts(random.Random(1), 8)
    readers = run(engine_for(model, page_tokens=page_tokens), *map(job, several))
    for prompt, reader in zip(several, readers):
        is_the_models_own(model, prompt, reader)


def test_warm_is_cold(model):
    """Shared prefixes, edits in the middle, evictions, a cleared cache, chunks and batches of all sizes."""
    chance = random.Random(5)
    interleave(model, chance, rounds=3)


def interleave(model, chance, rounds, within=1e-9):
    hits = evicted = 0
    for _ in range(rounds):
        limits = Limits(chance.choice([3, 17, 48, 200]), chance.randrange(1, 7), chance.randrange(1, 4))
        engine = engine_for(
            model, chance.choice([1 << 19, 1 << 20, 1 << 23]), chance.choice([None, 96, 144]), limits=limits,
            hash_block=chance.choice([16, 24, 64]),
        )  # fmt: skip
        pool = prompts(chance, 8)
        pool += [prompt[: len(prompt) // 2] + [9] + prompt[len(prompt) // 2 + 1 :] for prompt in pool[:4] if prompt]
        jobs = [job(chance.choice(pool)) for _ in range(10)]
        for one in jobs:
            if len(one.prompt) < engine.context:
                engine.submit(one)
            for _ in range(chance.randrange(4)):
                engine.step()
            if chance.random() < 0.05:
                engine.flush()
            if chance.random() < 0.1:
                engine.cancel(chance.choice(jobs))
            engine.cache.check()
        while not engine.idle:
            engine.step()
            engine.cache.check()
        for one in jobs:
            if one.reader.outcome is not None and not one.cancelled:
                hits += bool(one.reader.outcome.cached_tokens)
                is_the_models_own(model, one.prompt, one.reader, within)
        evicted += engine.pool.free < engine.pool.pages // 4
        engine.cache.clear()
        assert engine.pool.free == engine.pool.pages
    assert hits > rounds // 2


@pytest.fixture(scope="module")
def native_model():
    """In float32 every short piece goes through the native step. All experts are chosen: a near tie between two would
    turn rounding into another answer."""
    torch.manual_seed(4)
    cfg = K3Config.tiny(initializer_range=0.25).at_depth(4).with_vocabulary(VOCAB)
    return K3(replace(cfg, num_experts_per_token=cfg.num_experts)).eval()


def test_warm_is_cold_natively(native_model):
    assert Runner(native_model, 8 << 20).without_native is None
    interleave(native_model, random.Random(8), rounds=3, within=1e-3)


def test_a_second_turn_hits(model):
    engine = engine_for(model)
    prompt = list(range(2, 60))
    (first,) = run(engine, job(prompt))
    (second,) = run(engine, job([*prompt, *first.ids, 5, 6, 7]))
    assert second.outcome.cached_tokens == 48
    is_the_models_own(model, [*prompt, *first.ids, 5, 6, 7], second)


def test_seeded_answers_do_not_depend_on_the_company(model):
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=8)
    (by_itself,) = run(engine_for(model), job([5, 6, 7], params))
    company = [job(prompt, SamplingParams(max_tokens=8)) for prompt in prompts(random.Random(2), 6)]
    reader = run(engine_for(model), *company[:3], job([5, 6, 7], params), *company[3:])[3]
    assert reader.ids == by_itself.ids


def test_nan_ends_its_own_request_alone(model):
    """One of two sequences is given NaN memory: the other does not notice, nor who gets the pages next."""
    engine = engine_for(model)
    good, bad = job(range(2, 40)), job(range(3, 41))
    engine.submit(good), engine.submit(bad)
    engine.step()
    for page in engine._jobs[bad.id].sequence.state:
        engine.runner.arena.poison(page)
    while not engine.idle:
        engine.step()
    assert isinstance(engine._saying, Saying) and not engine._saying.ended, "each end was taken off"
    assert bad.reader.outcome.finish_reason == "error" and "NaN" in bad.reader.outcome.error
    assert 0 not in bad.reader.ids
    is_the_models_own(model, good.prompt, good.reader)
    (after,) = run(engine, job(range(3, 41), salt=(b"other",)))
    is_the_models_own(model, range(3, 41), after)


@pytest.mark.parametrize("which", ["model", "native_model"])
def test_prompts_read_in_one_row_are_those_read_alone(which, request):
    """One token beside a long prompt, prompts that go on from cached ones at other boundaries, a scored one."""
    model = request.getfixturevalue(which)
    engine = engine_for(model, limits=Limits(budget=512, max_sequences=8, grid=2))
    rows, whole = [], model.hidden_states
    model.hidden_states = lambda ids, **more: rows.append((more.get("cu_seqlens"), ids)) or whole(ids, **more)
    try:
        base = list(range(2, 150))
        run(engine, job(base[:50]), job(base[40:]))
        several = [[9], base[:50] + list(range(60, 80)), base[40:] + [3] * 33, list(range(300, 5, -1)), [8] * 17]
        readers = run(engine, *map(job, several), job(base[:70], prompt_logprobs=True))
    finally:
        del model.hidden_states
    assert any(bounds is not None and len(bounds) > 2 for bounds, _ in rows), "they were read one by one"
    assert readers[1].outcome.cached_tokens and readers[2].outcome.cached_tokens
    within = 1e-9 if which == "model" else 1e-4
    for prompt, reader in zip([*several, base[:70]], readers, strict=True):
        is_the_models_own(model, prompt, reader, within)
    assert len(readers[-1].outcome.prompt_logprobs) == 69


def test_who_fails_in_a_row_of_several_fails_alone(native_model):
    engine, whole = engine_for(native_model, limits=Limits(budget=512)), native_model.hidden_states

    def fails(ids, **more):
        return 1 / 0 if bool((ids == 13).any()) else whole(ids, **more)

    native_model.hidden_states = fails
    try:
        good, bad, other = run(engine, job(range(20, 60)), job([13] * 40), job(range(100, 140)))
    finally:
        del native_model.hidden_states
    assert bad.outcome.finish_reason == "error" and "division" in bad.outcome.error
    is_the_models_own(native_model, range(20, 60), good, 1e-4)
    is_the_models_own(native_model, range(100, 140), other, 1e-4)


def test_a_reader_that_raises_ends_alone(model):
    class Broken(Kept):
        def push(self, token):
            raise RuntimeError("no room")

    engine = engine_for(model)
    broken = Job([4, 5, 6], GREEDY, Broken())
    good = job([7, 8, 9])
    run(engine, broken, good)
    assert broken.reader.outcome.finish_reason == "error" and good.reader.outcome.finish_reason in ("length", "stop")


def test_constraint_restricts_and_follows(model):
    class Even:
        def __init__(self):
            self.seen = []

        def allowed(self):
            mask = torch.zeros(VOCAB, dtype=torch.bool)
            mask[2::2] = True
            return mask

        def advance(self, token):
            self.seen.append(token)

    constraint = Even()
    (reader,) = run(engine_for(model), job([3, 4, 5], constraint=constraint))
    assert reader.ids == constraint.seen and all(token % 2 == 0 for token in reader.ids)


def test_prompt_logprobs_are_those_of_the_whole_prompt(model):
    prompt = list(range(2, 60))
    engine = engine_for(model)
    run(engine, job(prompt))
    (reader,) = run(engine, job(prompt, replace(GREEDY, max_tokens=1), prompt_logprobs=True))
    wanted = model(torch.tensor([prompt])).logits[0].detach().double().log_softmax(-1)
    got = [token.logprob for token in reader.outcome.prompt_logprobs]
    assert got == pytest.approx([float(wanted[t, prompt[t + 1]]) for t in range(57)], abs=1e-9)
    assert reader.outcome.cached_tokens == 0


def test_cancel_deadline_overload_and_shutdown(model):
    engine = engine_for(model, max_waiting=2)
    first, second = job(range(2, 50)), job(range(2, 50), seconds=0.0)
    engine.submit(first), engine.submit(second)
    with pytest.raises(Overloaded):
        engine.submit(job([4]))
    engine.step()
    engine.cancel(first)
    engine.step()
    assert (first.reader.outcome.finish_reason, second.reader.outcome.finish_reason) == ("cancelled", "timeout")
    assert engine.running == 0 and engine.idle
    engine.start()
    last = job(range(2, 9))
    engine.submit(last)
    assert engine.drain(20) and last.reader.outcome.finish_reason in ("length", "stop")
    with pytest.raises(Stopping):
        engine.submit(job([4]))


@pytest.mark.parametrize(
    ("prompt", "what"), [([], "empty"), ([VOCAB], "holds id 512"), ([2] * 100_000, "has 100000 tokens")]
)
def test_prompts_that_cannot_be_served_are_named(model, prompt, what):
    with pytest.raises(ValueError, match=what):
        engine_for(model).submit(job(prompt))


def test_memory_too_small_for_one_sequence_is_named(model):
    with pytest.raises(ValueError, match="one short sequence needs"):
        Runner(model, 1000)
