"""The optimizer's side alone."""

import pytest
import torch
from playing import cold_start

from nanok3.posttrain.learner import Learner, _parts
from nanok3.posttrain.rl_settings import LearnerSettings, ObjectiveSettings
from nanok3.posttrain.sample import Sample
from nanok3.posttrain.score import Packed, compare, logprobs


def learner(**changes):
    return Learner(cold_start(), LearnerSettings(minibatches=2, **changes), ObjectiveSettings(), [0], 1.0)


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
    one = learner(lr=2e-4)

    def advantage(row, logprob):
        return torch.tensor([1.0 if row.samples[answer].number else -1.0 for answer in row.tokens.answer.tolist()])

    marks, forbidden = [[True, True]] * 2, torch.tensor([0])
    for s in SAMPLES:  # what the model itself gives them, so that the ratio begins at 1
        s.logprobs = logprobs(one.model, Packed.of([s], [[True, True]]), forbidden).tolist()
    assert compare(one.model, SAMPLES, forbidden, 1.0).largest < 1e-5
    assert one.learn(SAMPLES, marks, advantage, 0).steps == 2
    better, worse = (
        float((logprobs(one.model, Packed.of([s], [[True, True]]), forbidden) - torch.tensor(s.logprobs)).sum())
        for s in (SAMPLES[1], SAMPLES[0])
    )
    assert better > 0 > worse


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
