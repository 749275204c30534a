"""Drafts without an engine: `generate` says what it says without them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from nanok3.config import K3Config
from nanok3.data.tokenizer import Tokenizer
from nanok3.kernels import native
from nanok3.model.cache import LatentCache
from nanok3.model.decoder import K3
from nanok3.model.mtp import Draft, tapped_layers, taps
from nanok3.serve.draft_model import DraftModel
from nanok3.serve.generate import generate
from nanok3.serve.sampler import SamplingParams
from nanok3.serve.speculative import Gauge, Guess, NGrams
from nanok3.stages.generate import drafter_of

pytestmark = pytest.mark.usefixtures("unchecked")
BIAS = dict.fromkeys(range(256, 512), -torch.inf)
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, logit_bias=BIAS)


class Flawed:
    """What will be said, with mistakes."""

    def __init__(self, ids, chance):
        self.ids, self.chance = ids, chance

    def propose(self, wishes):
        said = len(wishes[0].sequence.said)
        known = self.ids[said : said + wishes[0].count]
        return [[Guess(token if self.chance.random() < 0.8 else 3) for token in known]]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer({bytes([byte]): byte for byte in range(256)})


@pytest.mark.parametrize("way", ["torch", "native"])
def test_an_answer_is_the_same_with_drafts(way, tokenizer, monkeypatch):
    """So is the state: the next turn goes on from it. The gauge may not stop what it is to show."""
    if way == "native" and not native.available("decode"):
        pytest.skip("no C++ compiler builds the kernel here")
    monkeypatch.setattr(Gauge, "price", lambda self, sequences: 0.0)
    torch.manual_seed(1)
    model = K3(K3Config.tiny(initializer_range=0.2).at_depth(3).with_vocabulary(512)).eval()
    model = model.double() if way == "torch" else model
    greedy = replace(GREEDY, max_tokens=40 if way == "native" else 12)
    for params in (greedy, replace(greedy, temperature=1.0, seed=4)):
        plain = generate(model, tokenizer, "abcabcabcab", params)
        trained = Draft(model.cfg).to(model.lm_head.weight.dtype).requires_grad_(False)
        for drafter in (NGrams(2, 1), Flawed(plain.ids, random.Random(2)), trained):
            found = generate(model, tokenizer, "abcabcabcab", params, draft=(drafter, 5))
            assert found.ids == plain.ids and found.text == plain.text
            assert found.state.tokens == plain.state.tokens
            assert plain.drafted is None and found.drafted.tokens >= found.drafted.accepted
            if isinstance(drafter, Flawed):
                assert found.drafted.accepted > 4
            short, last = replace(GREEDY, max_tokens=4), found.ids[-1:]
            more = [generate(model, tokenizer, last, short, one.state.clone()).ids for one in (plain, found)]
            assert more[0] == more[1]


@pytest.mark.parametrize("way", ["torch", "native"])
def test_a_trained_draft_guesses_what_it_guesses_over_the_whole_text(way, tokenizer, monkeypatch):
    """Prompt in chunks, accepted and refused guesses: as if it had read everything at once."""
    if way == "native" and not native.available("decode"):
        pytest.skip("no C++ compiler builds the kernel here")
    monkeypatch.setattr(Gauge, "price", lambda self, sequences: 0.0)
    torch.manual_seed(3)
    model = K3(K3Config.tiny(initializer_range=0.2).at_depth(3).with_vocabulary(512)).eval()
    draft = Draft(model.cfg).requires_grad_(False)
    if way == "torch":
        model, draft = model.double(), draft.double()
    guessed, propose = [], DraftModel.propose

    def watched(self, wishes):
        found = propose(self, wishes)
        guessed.append((list(wishes[0].sequence.ids), [guess.id for guess in found[0]]))
        return found

    monkeypatch.setattr(DraftModel, "propose", watched)
    params = replace(GREEDY, max_tokens=10)
    generate(model, tokenizer, "abcabcabcab" * 3, params, prefill_chunk=7, draft=(draft, 3))
    assert len(guessed) > 2
    for ids, guesses in guessed:
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


def test_a_draft_that_is_none_is_named(tmp_path):
    assert drafter_of(None, 7) is None and isinstance(drafter_of("ngram", 7), NGrams)
    with pytest.raises(ValueError, match="draft is 'mgram'; allowed: 'ngram', or a folder"):
        drafter_of("mgram", 7)
    with pytest.raises(ValueError, match="is no draft"):
        drafter_of(str(tmp_path), 7)
    with pytest.raises(ValueError, match="draft_tokens is 99"):
        drafter_of("ngram", 99)
