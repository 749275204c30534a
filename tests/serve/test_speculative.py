"""A draft never shows in an answer: whatever is guessed, cached, evicted, batched or bound by a grammar."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest
import torch
from test_engine import END, GREEDY, VOCAB, Kept, is_the_models_own, job, prompts, run

from nanok3.config import K3Config
from nanok3.data.tokenizer import train_tokenizer
from nanok3.kernels import native
from nanok3.model.cache import LatentCache
from nanok3.model.decoder import K3
from nanok3.model.mtp import Draft, layer_config, tapped_layers, taps
from nanok3.serve.draft_model import DraftModel
from nanok3.serve.engine import Engine, Settings
from nanok3.serve.grammar import Grammars
from nanok3.serve.metrics import Metrics
from nanok3.serve.offload import Tier
from nanok3.serve.protocol import read_completion
from nanok3.serve.runner import Runner
from nanok3.serve.sampler import SamplingParams, new_generator, probabilities
from nanok3.serve.scheduler import Limits
from nanok3.serve.sequence import Sequence
from nanok3.serve.speculative import Drafter, Gauge, Guess, NGrams, Speculation, settle

pytestmark = pytest.mark.usefixtures("unchecked")
LONG = replace(GREEDY, max_tokens=16)


def make(native_step):
    """In float64 torch verifies; in float32 the native step does: all experts are chosen there, so that rounding tips
    no choice between two."""
    torch.manual_seed(4)
    cfg = K3Config.tiny(initializer_range=0.25).at_depth(4).with_vocabulary(VOCAB)
    if native_step:
        return K3(replace(cfg, num_experts_per_token=cfg.num_experts)).eval()
    return K3(cfg).double().eval()


@pytest.fixture(scope="module")
def model():
    """The faster one that there is."""
    return make(native.available("decode"))


@pytest.fixture(scope="module", params=["torch", "native"])
def either(request):
    if request.param == "native" and not native.available("decode"):
        pytest.skip("no C++ compiler builds the kernel here")
    return make(request.param == "native")


class Oracle:
    """Knows what will be said, and is wrong now and then."""

    def __init__(self, chance=None, wrong=0.0):
        self.answers, self.chance, self.wrong = {}, chance or random.Random(0), wrong

    def propose(self, wishes):
        return [[Guess(self._flawed(token)) for token in self._known(wish)] for wish in wishes]

    def _known(self, wish):
        sequence = wish.sequence
        known = self.answers.get(tuple(sequence.ids[: sequence.prompt_tokens]), [])
        return known[len(sequence.said) : len(sequence.said) + wish.count]

    def _flawed(self, token):
        return self.chance.randrange(2, VOCAB) if self.chance.random() < self.wrong else token


class Even:
    """Allows even ids, in an answer of its own."""

    def __init__(self):
        self.seen = []

    def allowed(self):
        mask = torch.zeros(VOCAB, dtype=torch.bool)
        mask[2 + 2 * (len(self.seen) % 3) :: 2] = True
        return mask

    def advance(self, token):
        assert token % 2 == 0
        self.seen.append(token)


def engine_for(model, drafter=None, tokens=7, pages=400, page_tokens=None, hash_block=16, tier=None, limits=None,
               ends=frozenset({END})):  # fmt: skip
    """drafter: who guesses; or a trained draft."""
    draft = drafter if isinstance(drafter, Draft) else None
    page_bytes = Runner(model, 8 << 20, page_tokens, draft=draft).layout.page_bytes
    runner = Runner(model, pages * page_bytes, page_tokens, draft=draft)
    drafter = drafter if draft is None else runner.drafter
    settings = Settings(hash_block=hash_block, limits=limits or Limits(48, 8, 2), tier=tier)
    speculation = None if drafter is None else Speculation(drafter, tokens, adaptive=False)
    return Engine(runner, set(ends), [0], settings, runner.arena.poison, speculation)


def draft_of(model):
    torch.manual_seed(5)
    draft = Draft(model.cfg).to(model.lm_head.weight.dtype).requires_grad_(False)
    draft.fusion.weight.add_(0.1 * torch.randn_like(draft.fusion.weight))
    return draft


def test_a_perfect_copy_is_accepted_7_of_7(either):
    prompt = list(range(2, 45))
    by_itself = engine_for(either)
    (plain,) = run(by_itself, job(prompt, replace(GREEDY, max_tokens=17)))
    assert len(plain.ids) == 17
    oracle = Oracle()
    oracle.answers[tuple(prompt)] = plain.ids
    engine = engine_for(either, oracle)
    (reader,) = run(engine, job(prompt, replace(GREEDY, max_tokens=17)))
    assert reader.ids == plain.ids
    drafted = engine.speculation.drafted
    assert (drafted.drafts, drafted.tokens, drafted.accepted) == (2, 14, 14)
    assert engine.counters.steps == by_itself.counters.steps - 14


def compare(model, chance, rounds):
    """Engines of random shape with drafts against one without, over prompts that share beginnings."""
    accepted = refused = hits = restored = 0
    for _ in range(rounds):
        pool = prompts(chance, 3)
        kinds = [(prompt, bound) for prompt in pool for bound in (False, True)]
        plain = engine_for(model)
        answers = {}
        for prompt, bound in kinds:
            (reader,) = run(plain, job(prompt, LONG, constraint=Even() if bound else None))
            answers[tuple(prompt), bound] = reader.ids
        oracle = Oracle(chance, chance.choice([0.0, 0.2, 0.6]))
        oracle.answers = {prompt: ids for (prompt, bound), ids in answers.items() if chance.random() < 0.7}
        pages, tier = chance.choice([12, 30, 400]), chance.choice([None, Tier("it", 1 << 22, None, 0)])
        engine = engine_for(
            model, chance.choice([oracle, NGrams(2, 1), draft_of(model)]), chance.randrange(1, 8), pages,
            chance.choice([None, 144]), chance.choice([16, 24, 64]), tier,
            Limits(chance.choice([9, 48, 200]), chance.randrange(1, 7), chance.randrange(1, 4)),
        )  # fmt: skip
        asked = []
        for _ in range(8):
            prompt, bound = chance.choice(kinds)
            if len(prompt) + LONG.max_tokens >= engine.context:
                continue
            speculate = chance.random() < 0.8
            one = job(prompt, LONG, constraint=Even() if bound else None, speculate=speculate)
            asked.append((one, answers[tuple(prompt), bound]))
            engine.submit(one)
            for _ in range(chance.randrange(12)):
                engine.step()
                engine.cache.check()
            if chance.random() < 0.05:
                engine.flush()
            if chance.random() < 0.5:
                engine.cache.make_room(engine.pool.pages)  # all that can be evicted is
        while not engine.idle:
            engine.step()
            engine.cache.check()
        for one, ids in asked:
            assert one.reader.outcome.error is None
            assert one.reader.ids == ids
            if one.constraint is not None:
                assert one.constraint.seen == ids
            hits += one.reader.outcome.cached_tokens > 0
        drafted = engine.speculation.drafted
        accepted, refused = accepted + drafted.accepted, refused + drafted.tokens - drafted.accepted
        restored += 0 if engine.offload is None else engine.offload.restored
        engine.cache.clear()
        assert engine.pool.free == engine.pool.pages
    assert accepted and refused
    return hits, restored


def test_greedy_answers_stay_what_they_are(model):
    compare(model, random.Random(6), rounds=4)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_greedy_answers_stay_what_they_are_1000_times(either, seed):
    """16 times 8 jobs for either way of verifying and each of the 8 seeds: 2,048."""
    hits, restored = compare(either, random.Random(200 + seed), rounds=16)
    assert hits and restored


def test_who_loses_its_pages_amid_drafts_says_the_same(model):
    """Nine pages: two answers grow into a page of which there is one."""
    asked = [list(range(2, 92)), list(range(3, 93))]
    answers = [run(engine_for(model), job(prompt, LONG))[0].ids for prompt in asked]
    oracle = Oracle(random.Random(3), 0.3)
    oracle.answers = {tuple(prompt): ids for prompt, ids in zip(asked, answers)}
    for drafter in (oracle, draft_of(model)):
        engine = engine_for(model, drafter, pages=9, page_tokens=96)
        readers = run(engine, *(job(prompt, LONG) for prompt in asked))
        assert [reader.ids for reader in readers] == answers and engine.scheduler.preemptions


def test_a_later_turn_goes_on_from_states_that_drafts_crossed(either):
    """The boundary at 48 lies inside an accepted run; its state is what the next turn is answered from."""
    prompt = list(range(2, 45))
    (plain,) = run(engine_for(either), job(prompt, LONG))
    oracle = Oracle()
    oracle.answers[tuple(prompt)] = plain.ids
    engine = engine_for(either, oracle)
    (first,) = run(engine, job(prompt, LONG))
    turn = [*prompt, *first.ids, 5, 6, 7]
    (second,) = run(engine, job(turn))
    assert first.ids == plain.ids and second.outcome.cached_tokens == 48
    is_the_models_own(either, turn, second, within=1e-9 if either.lm_head.weight.dtype == torch.float64 else 1e-3)


def test_report_24_warm_answers_with_drafts_are_the_cold_ones_without(model):
    prompt = list(range(2, 60))
    (plain,) = run(engine_for(model), job(prompt, LONG))
    oracle = Oracle(random.Random(4), 0.3)
    oracle.answers[tuple(prompt)] = plain.ids
    engine = engine_for(model, oracle)
    for hit in (0, 48, 48):
        (reader,) = run(engine, job(prompt, LONG))
        assert reader.ids == plain.ids and reader.outcome.cached_tokens == hit
    assert engine.speculation.drafted.accepted


def test_report_39_a_grammar_follows_accepted_tokens_alone(model):
    """Guesses that are forbidden, allowed and not said, and right; one that is right is never thrown away."""
    tokenizer = train_tokenizer(["yes no maybe 01/23 " * 20] * 3, VOCAB)
    grammars = Grammars(tokenizer, VOCAB)
    request = read_completion({"prompt": "x", "structured_outputs": {"regex": r"(\d\d/){3,9}(yes|no)"}})
    ends = {tokenizer.eos_id}

    def answer(drafter):
        engine = engine_for(model, drafter, ends=ends)
        constraint = grammars.for_request(request)
        (reader,) = run(engine, job(range(2, 45), replace(GREEDY, max_tokens=40), constraint=constraint))
        assert reader.outcome.error is None
        return reader.ids, engine

    plain, by_itself = answer(None)
    assert re.fullmatch(r"(\d\d/){3,9}(yes|no)", tokenizer.decode(plain[:-1]))
    for wrong in (0.0, 0.5):
        oracle = Oracle(random.Random(2), wrong)
        oracle.answers[tuple(range(2, 45))] = plain
        ids, engine = answer(oracle)
        drafted = engine.speculation.drafted
        assert ids == plain and drafted.accepted == by_itself.counters.steps - engine.counters.steps


def test_a_seed_says_the_same_with_a_certain_draft(model):
    params = SamplingParams(temperature=0.7, top_p=0.9, seed=3, max_tokens=24, repetition_penalty=1.2)
    prompt = [5, 6, 7, 8] * 6
    (plain,) = run(engine_for(model), job(prompt, params))
    for drafter in (NGrams(), Oracle(random.Random(1), 0.3)):
        if isinstance(drafter, Oracle):
            drafter.answers[tuple(prompt)] = plain.ids
        engine = engine_for(model, drafter)
        (reader,) = run(engine, job(prompt, params), *[job([9, 9, k], GREEDY) for k in range(3)])[:1]
        assert reader.ids == plain.ids
        assert [token.logprob for token in reader.tokens] == pytest.approx(
            [token.logprob for token in plain.tokens], abs=1e-4
        )


def test_readers_that_had_enough_get_no_more(model):
    prompt = list(range(2, 45))
    (plain,) = run(engine_for(model), job(prompt, LONG))
    oracle = Oracle()
    oracle.answers[tuple(prompt)] = plain.ids
    one = job(prompt, LONG)
    one.reader = Kept(lambda ids: len(ids) == 5)
    (reader,) = run(engine_for(model, oracle), one)
    assert reader.ids == plain.ids[:5] and reader.outcome.finish_reason == "stop"


# ------------------------------------------------------------------ distributions


def counted(params, q, draws, seed=0):
    """How often each id comes when guesses are drawn from q."""
    logits = torch.tensor([1.0, 0.3, -0.5, 0.0, 0.8, -2.0])
    generator, found = new_generator(seed), torch.zeros(6, dtype=torch.int64)
    for _ in range(draws):
        guess = Guess(int(torch.multinomial(q, 1, generator=generator)), q)
        token, logprob = settle(logits, guess, params, generator)
        assert logprob == pytest.approx(float((logits / params.temperature).log_softmax(-1)[token]), abs=1e-6)
        found[token] += 1
    return found, probabilities(logits, params)


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0.6, top_p=0.8)])
@pytest.mark.parametrize(
    "q", [[0.3, 0.1, 0.1, 0.2, 0.2, 0.1], [0.9, 0.02, 0.02, 0.02, 0.02, 0.02], [0.0, 0.0, 0.5, 0.0, 0.0, 0.5]]
)
def test_drawn_guesses_leave_the_distribution_as_it_is(params, q):
    """Chi-square with at most 5 degrees of freedom: 25 has a chance of 1e-4."""
    draws = 1500
    found, p = counted(params, torch.tensor(q), draws)
    assert not found[p == 0].any()
    expected = draws * p[p > 0]
    assert float(((found[p > 0] - expected) ** 2 / expected).sum()) < 25


def test_a_guess_is_kept_as_often_as_the_distributions_overlap():
    logits, q = torch.tensor([1.0, 0.3, -0.5]), torch.tensor([0.1, 0.2, 0.7])
    p, generator, kept = probabilities(logits, SamplingParams()), new_generator(1), 0
    for _ in range(1500):
        guess = int(torch.multinomial(q, 1, generator=generator))
        kept += settle(logits, Guess(guess, q), SamplingParams(), generator)[0] == guess
    # A refused guess never comes back: where p < q nothing is left to draw of it.
    assert kept / 1500 == pytest.approx(float(torch.minimum(p, q.double()).sum()), abs=0.05)


def test_distributions_without_a_common_token():
    logits, q = torch.tensor([0.0, -torch.inf, -torch.inf]), torch.tensor([0.0, 1.0, 0.0])
    assert settle(logits, Guess(1, q), SamplingParams(), new_generator(0)) == (0, 0.0)


# ------------------------------------------------------------------ the free draft, and when none pays


def sequence(ids):
    return Sequence("s", list(ids), 1, keys=None)


def test_ngrams_say_what_followed_last():
    drafts = NGrams(3, 2)
    assert isinstance(drafts, Drafter)
    assert drafts.follow(sequence([1, 2, 3, 9, 1, 2, 3, 8, 7, 1, 2, 3]), 3) == [8, 7, 1]
    assert drafts.follow(sequence([4, 5, 4, 5]), 5) == [4, 5, 4, 5, 4], "it goes on into itself"
    assert drafts.follow(sequence([1, 2, 3, 4]), 3) == [] and drafts.follow(sequence([1]), 3) == []
    grows = sequence([1, 2, 3, 1, 2])
    assert drafts.follow(grows, 1) == [3]
    grows.ids += [7, 1, 2]
    assert drafts.follow(grows, 1) == [7], "the nearest counts"
    with pytest.raises(ValueError, match="n-grams from 2 to 1"):
        NGrams(1, 2)


def test_a_draft_that_does_not_pay_is_left_alone():
    one, gauge = sequence([1, 2]), Gauge()
    gauge.took(1, False, 1.0)
    gauge.took(1, True, 2.0)
    for _ in range(Gauge.TRIALS):
        assert gauge.wants(one, 1)
        gauge.accepted(one, 0, 1)  # one token for the time of two
    assert [gauge.wants(one, 1) for _ in range(Gauge.FIRST + 1)] == [False] * Gauge.FIRST + [True]
    for _ in range(Gauge.TRIALS):
        gauge.accepted(one, 0, 1)
    assert [gauge.wants(one, 1) for _ in range(2 * Gauge.FIRST + 1)] == [False] * 2 * Gauge.FIRST + [True]
    for _ in range(8 * Gauge.TRIALS):
        gauge.accepted(one, 3, 1)
    assert gauge.wants(one, 1) and gauge.price(1) == 2.0
    for _ in range(Gauge.FEW):
        gauge.accepted(one, 0, 1)
    new = sequence([1, 2])
    assert [gauge.wants(new, 1) for _ in range(Gauge.FIRST + 1)] == [False] * Gauge.FIRST + [True]


def test_an_engine_measures_before_it_tries(model):
    ticks = iter(range(10_000))
    engine = engine_for(model, NGrams(2, 1))
    engine.speculation.gauge, engine.speculation.clock = Gauge(), lambda: next(ticks)
    prompt = [5, 6] * 8
    (plain,) = run(engine_for(model), job(prompt, LONG))
    (reader,) = run(engine, job(prompt, LONG))
    assert reader.ids == plain.ids and engine.speculation.gauge.measured(1)


@pytest.mark.parametrize("tokens", [0, 16])
def test_draft_lengths_that_cannot_be_are_named(tokens):
    with pytest.raises(ValueError, match=f"draft_tokens is {tokens}"):
        Speculation(NGrams(), tokens)


def test_metrics_count_guesses(model):
    engine = engine_for(model, NGrams(2, 1))
    metrics = Metrics(engine)
    run(engine, job([5, 6] * 8, LONG))
    drafted = engine.speculation.drafted
    lines = metrics.text().decode().splitlines()
    assert f"nanok3_draft_tokens_total {drafted.tokens:.1f}" in lines and drafted.tokens
    assert f"nanok3_draft_tokens_accepted_total {drafted.accepted:.1f}" in lines


# ------------------------------------------------------------------ a trained draft


def test_a_draft_in_the_pages_guesses_what_it_guesses_alone(either):
    """After a prompt in two chunks, accepted and refused guesses: its rows are those of one pass over everything."""
    model, draft = either, draft_of(either)
    engine = engine_for(model, draft, tokens=3)
    drafter, guessed = engine.speculation.drafter, []
    assert isinstance(drafter, DraftModel) and isinstance(drafter, Drafter)

    def propose(wishes):
        guesses = DraftModel.propose(drafter, wishes)
        guessed.append((list(wishes[0].sequence.ids), [guess.id for guess in guesses[0]]))
        return guesses

    drafter.propose = propose
    prompt = list(range(2, 60))
    (reader,) = run(engine, job(prompt, LONG))
    (plain,) = run(engine_for(model), job(prompt, LONG))
    assert reader.ids == plain.ids and len(guessed) > 3
    for ids, guesses in guessed[:4]:
        assert guesses == alone(model, draft, ids, len(guesses))


@torch.no_grad()
def alone(model, draft, ids, count):
    """Guesses after `ids`, from nothing."""
    places = tapped_layers(model.cfg)
    with taps(model, places) as found:
        model(torch.tensor([ids]))
    feature = draft.fuse(torch.stack([found[place] for place in places], dim=2))
    feature = torch.cat((torch.zeros_like(feature[:, :1]), feature[:, :-1]), dim=1)
    cache = LatentCache(1, model.cfg.latent_cache_size, feature.dtype, feature.device)
    tokens, guesses = torch.tensor([ids]), []
    for _ in range(count):
        h = draft.layer(model.model.embed_tokens(tokens), feature, cache=cache)[:, -1:]
        guesses.append(int(model.lm_head(draft.layer.normed(h))[0, 0].argmax()))
        tokens, feature = torch.tensor([guesses[-1:]]), h
    return guesses


def test_drawn_guesses_of_a_draft_are_of_its_distribution(model):
    """Requests without a seed draw; the answer is as long as without, and guesses say what they were drawn from."""
    engine = engine_for(model, draft_of(model), tokens=3)
    seen = []
    settled = engine.speculation.verified
    engine.speculation.verified = lambda piece, accepted: (
        seen.extend(engine.speculation.guesses[piece.sequence.id]), settled(piece, accepted),
    )  # fmt: skip
    never = {END: -torch.inf}
    params = SamplingParams(temperature=0.9, top_p=0.9, max_tokens=12, logit_bias=never)
    (reader,) = run(engine, job(range(2, 40), params))
    assert len(reader.ids) == 12 and seen
    assert all(guess.q[guess.id] > 0 and float(guess.q.sum()) == pytest.approx(1) for guess in seen)


def test_a_layer_of_the_release_is_one_block():
    cfg = layer_config(K3Config.k3())
    assert cfg.kinds == ("mla",) and cfg.is_moe(0) and cfg.attn_res_block_size is None
