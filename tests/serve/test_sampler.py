"""The sampler against a plain-Python reading of its docstring, and against its own frequencies."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanok3.serve import sampler
from nanok3.serve.filters import TOLERANCE
from nanok3.serve.sampler import (
    Row,
    Sampled,
    SamplingParams,
    TokenCounts,
    draw,
    new_generator,
    probabilities,
    sample,
    sample_rows,
)

INF = math.inf


def logits_of(*p: float) -> torch.Tensor:
    return torch.tensor(p, dtype=torch.float64).log()


def kept(p: tuple[float, ...], **params: Any) -> list[int]:
    """Ids that may be drawn."""
    return probabilities(logits_of(*p), SamplingParams(**params)).nonzero().flatten().tolist()


def reference(logits: list[float], params: SamplingParams, prompt: set[int], said: Counter[int]) -> list[float]:
    """The docstring, step by step, over lists."""
    z = [value + params.logit_bias.get(i, 0.0) for i, value in enumerate(logits)]
    for i in prompt | set(said):
        z[i] = z[i] / params.repetition_penalty if z[i] > 0 else z[i] * params.repetition_penalty
        z[i] -= params.presence_penalty * (said[i] > 0) + params.frequency_penalty * said[i]
    weights = [math.exp((value - max(z)) / params.temperature) for value in z]
    p = [w / sum(weights) for w in weights]
    ranked = sorted(range(len(p)), key=lambda i: (-p[i], i))[: params.top_k]
    total, before, survivors = sum(p[i] for i in ranked), 0.0, []
    for i in ranked:
        reached = params.top_p < 1 and before >= params.top_p * total * (1 - TOLERANCE)
        if not reached and p[i] >= params.min_p * p[ranked[0]] * (1 - TOLERANCE):
            survivors.append(i)
        before += p[i]
    mass = sum(p[i] for i in survivors)
    return [p[i] / mass if i in survivors else 0.0 for i in range(len(p))]


numbers = st.floats(-4, 4).map(lambda x: round(x, 2))


@settings(max_examples=150, deadline=None)
@given(
    logits=st.lists(numbers, min_size=2, max_size=12),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_p=st.sampled_from([0.05, 0.333, 0.71, 0.999, 1.0]),
    top_k=st.sampled_from([None, 1, 3, 50]),
    min_p=st.sampled_from([0.0, 0.03, 0.4, 1.0]),
    penalties=st.tuples(st.sampled_from([1.0, 1.3, 0.8]), st.sampled_from([0.0, 0.7]), st.sampled_from([0.0, 0.4])),
)
def test_probabilities_equal_the_reference(logits, temperature, top_p, top_k, min_p, penalties) -> None:  # type: ignore[no-untyped-def]
    repetition, presence, frequency = penalties
    params = SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias={0: 0.5},
    )
    counts = TokenCounts.of([0], len(logits))
    for token in (1, 1):
        counts.add(token)
    p = probabilities(torch.tensor(logits, dtype=torch.float64), params, counts)
    expected = torch.tensor(reference(logits, params, {0}, Counter({1: 2})), dtype=torch.float64)
    torch.testing.assert_close(p, expected, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("params", [{}, {"temperature": 0.5}, {"top_p": 0.8}, {"top_k": 3}, {"min_p": 0.3}])
def test_frequencies_follow_the_probabilities(params: dict[str, Any]) -> None:
    """Pearson's chi square stays below the 1 in 10,000 quantile for 5 degrees of freedom at most (25.7)."""
    logits, draws = torch.tensor([0.3, -1.0, 1.2, 0.0, -0.4, 0.9]), 2000
    record, generator = SamplingParams(**params), new_generator(11)
    p = probabilities(logits, record)
    seen = torch.zeros(len(logits), dtype=torch.float64)
    for _ in range(draws):
        seen[sample(logits, record, generator)[0]] += 1
    possible = p > 0
    assert not seen[~possible].any()
    expected = draws * p[possible]
    assert float(((seen[possible] - expected) ** 2 / expected).sum()) < 25.7


def test_greedy_is_the_first_maximum_and_needs_no_randomness() -> None:
    logits = torch.tensor([0.0, 2.0, -1.0, 2.0])
    generator = new_generator(0)
    before = generator.get_state()
    token, logprob = sample(logits, SamplingParams(temperature=0.0), generator)
    assert token == 1 and torch.equal(generator.get_state(), before)
    assert logprob == pytest.approx(float(logits.double().log_softmax(0)[1]))
    assert probabilities(logits, SamplingParams(temperature=0.0)).tolist() == [0, 1, 0, 0]


def test_the_smallest_temperature_is_greedy() -> None:
    logits = torch.tensor([5.0, 5.001, -300.0])
    assert probabilities(logits, SamplingParams(temperature=5e-324)).tolist() == [0, 1, 0]


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    p = (0.5, 0.25, 0.125, 0.125)
    assert kept(p, top_p=1e-9) == [0]
    assert kept(p, top_p=0.5) == [0]
    assert kept(p, top_p=0.501) == [0, 1]
    assert kept(p, top_p=0.75) == [0, 1]
    assert kept(p, top_p=0.875) == [0, 1, 2]  # of equals the lower id
    assert kept(p, top_p=0.999) == kept(p, top_p=1.0) == [0, 1, 2, 3]


@pytest.mark.parametrize("tenths", range(1, 10))
def test_top_p_of_equal_probabilities_is_not_a_matter_of_rounding(tenths: int) -> None:
    assert kept((0.1,) * 10, top_p=tenths / 10) == list(range(tenths))
    in_float32 = torch.full((10,), 0.1).log()
    assert int((probabilities(in_float32, SamplingParams(top_p=tenths / 10)) > 0).sum()) == tenths


def test_top_p_one_keeps_the_farthest_tail() -> None:
    p = probabilities(torch.tensor([0.0, -40.0]), SamplingParams(top_k=2))
    assert 0 < float(p[1]) < 1e-16


def test_top_k_keeps_exactly_k_and_top_p_counts_what_it_left() -> None:
    p = (0.2, 0.3, 0.2, 0.2, 0.1)
    assert kept(p, top_k=1) == [1]
    assert kept(p, top_k=3) == [0, 1, 2]  # of equals the lower ids
    assert kept(p, top_k=99) == [0, 1, 2, 3, 4]
    assert kept((0.4, 0.2, 0.2, 0.2), top_k=2, top_p=0.65) == [0]  # 0.4 of the 0.6 left is two thirds
    assert kept((0.4, 0.2, 0.2, 0.2), top_p=0.65) == [0, 1, 2]


def test_min_p_is_relative_to_the_likeliest() -> None:
    p = (0.4, 0.3, 0.2, 0.1)
    assert kept(p, min_p=0.25) == [0, 1, 2, 3]
    assert kept(p, min_p=0.26) == [0, 1, 2]
    assert kept(p, min_p=1.0) == [0]
    assert kept((0.25,) * 4, min_p=1.0) == [0, 1, 2, 3]


def test_what_is_at_minus_infinity_never_comes() -> None:
    logits = torch.tensor([-INF, 0.0, -INF, 0.5, -INF])
    for params in ({}, {"top_k": 4}, {"top_p": 0.99999}, {"repetition_penalty": 2.0, "presence_penalty": 1.0}):
        record, generator = SamplingParams(**params), new_generator(5)
        counts = TokenCounts.of([0, 1, 2], 5)
        assert {sample(logits, record, generator, counts)[0] for _ in range(200)} == {1, 3}


def test_draw_skips_zeros_at_either_end() -> None:
    p, generator = torch.tensor([0, 0, 0.5, 0, 0.5, 0], dtype=torch.float64), new_generator(1)
    assert {draw(p, generator) for _ in range(500)} == {2, 4}


@pytest.mark.parametrize("bad", [[0.0, math.nan, 1.0], [math.nan] * 3, [0.0, INF, 1.0], [-INF] * 3, [INF, math.nan]])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_are_an_error_and_not_token_zero(bad: list[float], temperature: float) -> None:
    with pytest.raises(ValueError, match=r"NaN|inf"):
        sample(torch.tensor(bad), SamplingParams(temperature=temperature), new_generator(0))


def test_seeds() -> None:
    logits = torch.zeros(1000)

    def tokens(seed: int | None) -> list[int]:
        generator = new_generator(seed)
        return [sample(logits, SamplingParams(), generator)[0] for _ in range(8)]

    assert tokens(3) == tokens(3) != tokens(4)
    assert tokens(None) != tokens(None)


def test_one_random_number_a_token_whatever_the_filters() -> None:
    """So that changing a filter does not shift the randomness of later tokens."""
    logits, states = torch.randn(50), []
    for params in ({}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}):
        generator = new_generator(9)
        sample(logits, SamplingParams(**params), generator)
        states.append(generator.get_state())
    assert all(torch.equal(state, states[0]) for state in states)


def test_logprob_is_of_the_whole_distribution_at_the_temperature() -> None:
    logits = torch.randn(30, generator=torch.Generator().manual_seed(0))
    token, logprob = sample(logits, SamplingParams(temperature=0.7, top_k=2, top_p=0.5), new_generator(0))
    assert logprob == pytest.approx(float((logits.double() / 0.7).log_softmax(0)[token]), abs=1e-12)


def rows_of_all_kinds(vocab: int = 1003) -> list[Row]:
    """Fresh ones each time, so that each begins with the same random numbers."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {},
        {"top_p": 0.9, "temperature": 0.6},
        {"top_k": 7, "min_p": 0.1},
        {"temperature": 1.4, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
        {"temperature": 0.0, "logit_bias": {3: 2.5}, "presence_penalty": 0.5},
    ]
    noise = torch.Generator().manual_seed(4)
    rows = []
    for k in range(17):
        logits, params = 4 * torch.randn(vocab, generator=noise), SamplingParams(**kinds[k % len(kinds)])
        counts = TokenCounts.of([k, 2 * k], vocab) if params.counts_tokens else None
        allowed = torch.rand(vocab, generator=noise) < 0.5 if k % 5 == 0 else None
        rows.append(Row(logits, params, new_generator(k), counts, allowed, k % 4))
    return rows


@pytest.mark.parametrize("at_once", [1, 4000, 2**18])
def test_a_row_has_the_same_bits_alone_and_beside_others(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    forbidden = torch.tensor([0, 5, 1002])
    alone = [sample_rows([row], forbidden)[0] for row in rows_of_all_kinds()]
    monkeypatch.setattr(sampler, "AT_ONCE", at_once)
    assert sample_rows(rows_of_all_kinds(), forbidden) == alone
    assert sample_rows(rows_of_all_kinds()[::-1], forbidden) == alone[::-1]
    assert all(isinstance(found, Sampled) and found.token not in (0, 5, 1002) for found in alone)
    assert [len(found.top) for found in alone if isinstance(found, Sampled)] == [k % 4 for k in range(17)]


@pytest.mark.parametrize("bad", [math.nan, INF, -INF])
def test_a_broken_row_is_an_error_of_its_own(bad: float) -> None:
    expected, rows = sample_rows(rows_of_all_kinds()), rows_of_all_kinds()
    for k in (0, 3, 16):
        rows[k].logits[7 if bad != -INF else slice(None)] = bad
    found = sample_rows(rows)
    assert all(isinstance(found[k], ValueError) for k in (0, 3, 16))
    assert all(found[k] == expected[k] for k in range(17) if k not in (0, 3, 16))


def test_nan_at_a_forbidden_id_is_an_error_all_the_same() -> None:
    row = Row(torch.tensor([math.nan, 0.0, 1.0]), SamplingParams(), new_generator(0))
    (found,) = sample_rows([row], torch.tensor([0]))
    assert isinstance(found, ValueError) and "id 0 is NaN" in str(found)


def test_top_gives_the_most_probable_ids_at_the_temperature() -> None:
    logits = torch.tensor([0.0, 3.0, 1.0, 2.0])
    (found,) = sample_rows([Row(logits, SamplingParams(temperature=0.5, top_k=1), new_generator(0), top=9)])
    assert isinstance(found, Sampled) and [token for token, _ in found.top] == [1, 3, 2, 0]
    expected = (logits.double() / 0.5).log_softmax(0)
    assert [p for _, p in found.top] == pytest.approx(expected[[1, 3, 2, 0]].tolist(), abs=1e-12)


def test_logits_are_not_changed() -> None:
    logits = torch.randn(6, dtype=torch.float64)
    before = logits.clone()
    params = SamplingParams(top_p=0.5, frequency_penalty=1.0, logit_bias={2: -INF})
    counts = TokenCounts.of([1], 6)
    counts.add(0)
    sample(logits, params, new_generator(0), counts)
    assert torch.equal(logits, before)


def test_bias_decides_and_must_name_an_id() -> None:
    logits = torch.zeros(4)
    greedy = SamplingParams(temperature=0.0, logit_bias={2: 5.0, 3: 9.0, 0: -INF})
    assert sample(logits, greedy, new_generator(0))[0] == 3
    with pytest.raises(ValueError, match=r"id 4.*0 to 3"):
        sample(logits, SamplingParams(logit_bias={4: 1.0}), new_generator(0))


@pytest.mark.parametrize(
    "name, value",
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", INF),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("top_k", 0),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("seed", -1),
        ("seed", 2**63),
        ("max_tokens", 0),
        ("stop", "end"),
        ("stop", ("a", "")),
        ("repetition_penalty", 0.0),
        ("presence_penalty", math.nan),
        ("frequency_penalty", INF),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: INF}),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_wrong_params_are_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})
