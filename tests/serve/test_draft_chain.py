"""All guesses of a draft in one native call: those that torch makes row by row."""

from __future__ import annotations

import pytest
import torch
from test_engine import GREEDY
from test_speculative import draft_of, make

from nanok3.kernels import native
from nanok3.serve.lone_draft import PAGE, alone
from nanok3.serve.prefix_cache import SpanKeys
from nanok3.serve.sampler import new_generator
from nanok3.serve.scheduler import Work
from nanok3.serve.sequence import Sequence
from nanok3.serve.speculative import Wish

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.mark.skipif(not native.available("decode"), reason="no C++ compiler builds the kernel here")
def test_one_call_guesses_what_torch_does_row_by_row():
    """Sequences of unlike length that want unlike many guesses, with one thread and with two; and a NaN ends them."""
    model, counts = make(native_step=True), (2, 7, 1, 5)
    draft = draft_of(model)
    random_features = torch.randn(20, 3, model.cfg.hidden_size, generator=torch.Generator().manual_seed(1))

    def guesses(natively=True):
        drafter, pages = alone(model, draft, PAGE * len(counts))
        assert drafter._native is not None
        drafter._native = drafter._native if natively else None
        wishes = []
        for i, count in enumerate(counts):
            ids = [2 + (7 * i + 3 * t) % 50 for t in range(6 + 4 * i)]
            sequence = Sequence(str(i), ids, len(ids), SpanKeys(1 << 62), pages=[pages[i]])
            drafter.follow(Work(sequence, 0, len(ids) - 1), random_features[: len(ids) - 1])
            sequence.computed = len(ids) - 1
            wishes.append(Wish(sequence, count, GREEDY, new_generator(0)))
        return [[guess.id for guess in found] for found in drafter.propose(wishes)]

    chained = guesses()
    assert [len(found) for found in chained] == list(counts)
    threads = torch.get_num_threads()
    torch.set_num_threads(3 - min(threads, 2))
    try:
        assert guesses() == chained
    finally:
        torch.set_num_threads(threads)
    assert guesses(natively=False) == chained
    model.lm_head.weight.data[chained[1][3]] = torch.nan
    assert guesses() == [[]] * len(counts)
