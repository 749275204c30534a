"""Drafts without an engine: `generate` says what it says without them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from nanok3.config import K3Config
from nanok3.data.tokenizer import Tokenizer
from nanok3.kernels import native
from nanok3.model.decoder import K3
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
        for drafter in (NGrams(2, 1), Flawed(plain.ids, random.Random(2))):
            found = generate(model, tokenizer, "abcabcabcab", params, draft=(drafter, 5))
            assert found.ids == plain.ids and found.text == plain.text
            assert found.state.tokens == plain.state.tokens
            assert plain.drafted is None and found.drafted.tokens >= found.drafted.accepted
            if isinstance(drafter, Flawed):
                assert found.drafted.accepted > 4
            short, last = replace(GREEDY, max_tokens=4), found.ids[-1:]
            more = [generate(model, tokenizer, last, short, one.state.clone()).ids for one in (plain, found)]
            assert more[0] == more[1]


def test_a_draft_that_is_none_is_named():
    assert drafter_of(None, 7) is None and isinstance(drafter_of("ngram", 7), NGrams)
    with pytest.raises(ValueError, match="draft is 'mgram'"):
        drafter_of("mgram", 7)
    with pytest.raises(ValueError, match="draft_tokens is 99"):
        drafter_of("ngram", 99)
