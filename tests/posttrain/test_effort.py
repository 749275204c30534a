"""Budgets: who is over, what that costs, and that they stay what they were."""

import pytest
import torch
from playing import AGENT, problems, right
from test_rollout import ALL, rollouts

from nanok3.posttrain.effort import Budgets, EffortSettings, budgeted, means
from nanok3.posttrain.objective import group_advantages
from nanok3.posttrain.rl import rewards, spent
from nanok3.posttrain.sample import Group, Sample


def test_exactly_at_the_budget_is_allowed_and_the_override_beats_a_right_answer():
    assert [budgeted(1.0, n, 10) for n in (9, 10, 11)] == [1.0, 1.0, -1.0]
    assert budgeted(0.0, 11, 10) == -1.0 and budgeted(1.0, 10**6, None) == 1.0


def test_what_is_allowed():
    settings = EffortSettings("low", tau=0.5)
    assert [settings.limit(b0, 0.0) for b0 in (10.0, 11.0, 0.3)] == [5, 5, 1]
    assert EffortSettings(tau=3.0, cap=20).limit(10.0, 0.0) == 20
    assert EffortSettings(tau=0.1).limit(30.0, 0.0) == 3, "0.1 * 30 is not rounded down to 2"


def test_tau_falls_from_that_of_max_to_its_own():
    settings = EffortSettings("low", tau=0.5, tau_start=2.0, anneal=0.5)
    assert [settings.tau_at(p) for p in (0.0, 0.25, 0.5, 1.0)] == pytest.approx([2.0, 1.0, 0.5, 0.5])
    assert EffortSettings("low", tau=0.5).tau_at(0.0) == 0.5
    assert EffortSettings("low", tau=0.5, tau_start=2.0, anneal=0.0).tau_at(0.0) == 0.5


def group(thinking, earned, limit):
    samples = [
        Sample(0, k, thinking=t, reward=r, outcome="done")
        for k, (t, r) in enumerate(zip(thinking, earned, strict=True))
    ]
    return Group(0, samples, limit)


def test_the_override_comes_before_the_mean():
    found = rewards(group([5, 11, 3, 10], [1.0, 1.0, 0.0, 1.0], 10), "thinking")
    assert found == [1.0, -1.0, 0.0, 1.0]
    assert group_advantages(torch.tensor(found)).tolist() == pytest.approx([0.75, -1.25, -0.25, 0.75])
    all_over = torch.tensor(rewards(group([11, 12, 13], [1.0, 0.0, 1.0], 10), "thinking"))
    assert group_advantages(all_over).tolist() == [0.0, 0.0, 0.0]


def test_observations_do_not_count():
    source = problems(AGENT)
    sample = rollouts(lambda s: right(s, source(s.prompt), [5] * 7), source, ALL).collect()[0].samples[0]
    turns = [right(Sample(0, 0, turns=turn), source(0), [5] * 7) for turn in range(3)]
    assert spent(sample, "output") == sum(map(len, turns)) < len(sample.ids)
    assert spent(sample, "thinking") == 21


def test_budgets_are_kept(tmp_path):
    budgets = Budgets(means({"a": [2, 4], "b": [0, 0], "none": []}), "cold")
    assert budgets.tokens == {"a": 3.0, "b": 1.0}
    budgets.save(tmp_path / "budgets.json")
    assert Budgets.load(tmp_path / "budgets.json") == budgets
    with pytest.raises(ValueError, match="no budget for problem 'none'"):
        budgets.of("none")
    (tmp_path / "budgets.json").write_text('{"tokens": {"a": "many"}}')
    with pytest.raises(ValueError, match=r"budgets\.json cannot be read"):
        Budgets.load(tmp_path / "budgets.json")


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"effort": "medium"}, "effort is 'medium'"),
        ({"tau": 0.0}, "tau is 0.0"),
        ({"anneal": 2.0}, "anneal is 2.0"),
        ({"cap": 0}, "cap is 0"),
    ],
)
def test_mistakes_are_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        EffortSettings(**wrong)
