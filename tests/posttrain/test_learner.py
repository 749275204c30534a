"""The optimizer's side alone."""

import pytest
import torch
from playing import cold_start

from nanok3.posttrain.learner import Learner, _parts
from nanok3.posttrain.rl_settings import LearnerSettings, ObjectiveSettings
from nanok3.posttrain.sample import Sample
from nanok3.posttrain.score import Packed, compare, logprobs


def learner(minibatches=2, **changes):
    return Learner(cold_start(), LearnerSettings(minibatches=minibatches, **changes), ObjectiveSettings(), [0], 1.0)


def sample(number, ids):
    return Sample(0, number, ids=ids, places=[2, 3], logprobs=[-3.0, -2.0], versions=[0, 0])


SAMPLES = [sample(0, [300, 5, 6, 7]), sample(1, [300, 5, 8, 9])]


def test_minibatches_are_nearly_equal_and_none_is_empty():
    assert _parts([3, 1, 2], 2) == [[3], [1, 2]] and _parts([1], 4) == [[1]] and _parts([], 3) == []


def test_withheld_tokens_alone_move_nothing():
    one = learner()
    before = {name: value.clone() for name, value in one.model.state_dict().items()}
    found = one.learn(SAMPLES, [[False, False]] * 2, lambda row, logprob: torch.ones(2), 0)
    assert (found.steps, found.masked.tokens, found.loss) == (0, 0, 0.0)
    assert all(torch.equal(value, before[name]) for name, value in one.model.state_dict().items())
    assert one.learn([], [], lambda row, logprob: torch.ones(0), 0).steps == 0


def test_what_earns_more_becomes_likelier():
    """Two steps, one for each sample: which of the two rises or falls by itself is not said, what parts them is."""
    better, worse = moved(learner(lr=2e-4), SAMPLES[::-1])
    assert better > worse


@pytest.mark.parametrize("number, sign", [(1, 1), (0, -1)])
def test_alone_what_earns_becomes_likelier_and_what_costs_less_likely(number, sign):
    (change,) = moved(learner(minibatches=1, lr=2e-5), [SAMPLES[number]])
    assert change * sign > 0


def moved(one, samples):
    """How much likelier each sample is after its step: number 1 has earned 1, number 0 has cost 1."""

    def advantage(row, logprob):
        return torch.tensor([1.0 if row.samples[answer].number else -1.0 for answer in row.tokens.answer.tolist()])

    forbidden = torch.tensor([0])

    def likely(s):
        with torch.no_grad():
            return logprobs(one.model, Packed.of([s], [[True, True]]), forbidden)

    for s in samples:  # what the model itself gives them, so that the ratio begins at 1
        s.logprobs = likely(s).tolist()
    assert compare(one.model, samples, forbidden, 1.0).largest < 1e-5
    assert one.learn(samples, [[True, True]] * len(samples), advantage, 0).steps == len(samples)
    return [float(likely(s).sum() - sum(s.logprobs)) for s in samples]


def test_the_learning_rate_falls_along_a_line():
    one = learner(lr=1e-3, final_lr_fraction=0.2)
    found = []
    for progress in (0.0, 0.5, 1.0):
        one.set_progress(progress)
        found.append(one.optimizer.lr)
    assert found == pytest.approx([1e-3, 6e-4, 2e-4])


@pytest.mark.parametrize(
    "wrong, message", [({"lr": 0.0}, "lr is 0.0"), ({"epochs": 0}, "epochs is 0"), ({"qat": "int8"}, "qat is 'int8'")]
)
def test_mistakes_are_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        LearnerSettings(**wrong)
