"""Held-out scores of a policy that says what it is told."""

import pytest
from playing import TOKENIZER, OneAnswer, Scripted, said

from nanok3.posttrain.domains import SENTENCES
from nanok3.posttrain.evaluate import Scores, evaluate, first_tasks, scores
from nanok3.posttrain.rl_settings import RolloutSettings
from nanok3.posttrain.sample import Sample

SETTINGS = RolloutSettings(max_tokens=60)


class Few(OneAnswer):
    """Four tasks in all."""

    def tasks(self, split, seed):
        return (task for task, _ in zip(super().tasks(split, seed), range(4)))


def test_accuracy_and_what_it_costs():
    """One answer in four is right; those think three tokens, the others two, one and none."""

    def says(sample):
        word = "no" if sample.prompt % 4 else "yes"
        return said({"role": "assistant", "content": word}, [5] * (3 - sample.prompt % 4))

    speaker = Scripted(says)
    found = evaluate(speaker, TOKENIZER, OneAnswer(), "max", 40, SETTINGS, sentences=SENTENCES)
    assert (found.accuracy, found.count, found.truncated) == (0.25, 40, 0.0) and found.thinking == 1.5
    assert found.error == pytest.approx((0.25 * 0.75 / 40) ** 0.5)
    assert len(set(speaker.begun)) == 40


def test_a_short_stream_is_asked_again_with_other_random_numbers():
    speaker = Scripted(lambda s: said({"role": "assistant", "content": "yes"}))
    assert evaluate(speaker, TOKENIZER, Few(), "low", 10, SETTINGS, sentences=SENTENCES).count == 10
    assert len({params.seed for params in speaker.params}) == 10
    assert len(first_tasks(Few(), 10, "train", 0)) == 4

    class Nothing(OneAnswer):
        def tasks(self, split, seed):
            return iter(())

    with pytest.raises(ValueError, match="'one' has no tasks of split 'held-out'"):
        evaluate(speaker, TOKENIZER, Nothing(), "low", 10, SETTINGS)


def test_what_failed_is_not_counted():
    done = Sample(0, 0, outcome="done", finish="length", reward=0.0, thinking=4)
    failed = Sample(0, 1, outcome="infra-failed", thinking=100)
    assert scores([done, failed]) == Scores(0.0, 4.0, 0.0, 1.0, 1)
    assert scores([failed]).count == 0
