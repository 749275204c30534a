"""The loop on a model that answers yes or no: it learns, it survives kill -9, it refuses and it warns. Numbers in names
are those of the list of known problems in docs/rl.md."""

import json
import os
import random
import signal
from dataclasses import replace
from itertools import repeat

import pytest
import torch
from playing import TOKENIZER, OneAnswer, cold_start

from nanok3.data.packing import Batch
from nanok3.posttrain import run as run_module
from nanok3.posttrain.domains import SENTENCES
from nanok3.posttrain.effort import Budgets, EffortSettings
from nanok3.posttrain.replay import routers
from nanok3.posttrain.rl import RL, measure_budgets, train
from nanok3.posttrain.rl_settings import LearnerSettings, MopdSettings, ObjectiveSettings, RLSettings, RolloutSettings
from nanok3.posttrain.score import Difference
from nanok3.posttrain.speaker import EngineSpeaker
from nanok3.serve.run_folder import open_model
from nanok3.train.track import read_metrics

SETTINGS = RLSettings(
    iterations=8,
    problems=8,
    rollout=RolloutSettings(prompts=4, samples=4, pause=0.7, max_tokens=24),
    learner=LearnerSettings(lr=2e-3, minibatches=1),
    eval_count=0,
    save_every=0,
)


def frozen(settings=SETTINGS):
    """Budgets that nobody exceeds."""
    tasks, _ = zip(*zip(OneAnswer().tasks("train", 0), range(settings.problems)))
    return Budgets({task.id: 50.0 for task in tasks})


def run_of(settings, folder, model=None, **more):
    domain = OneAnswer()
    model = cold_start() if model is None else model
    return RL(model, TOKENIZER, domain, settings, folder, frozen(settings), lambda _: None, SENTENCES, **more)


def start(settings, folder, resume=False, said=None):
    say = (lambda _: None) if said is None else said.append
    return train(cold_start(), TOKENIZER, OneAnswer(), settings, folder, frozen(settings), say, resume, SENTENCES)


def trained(folder):
    """(iteration, samples) as the run's lines have them; of an iteration that was made twice the last counts."""
    by_step = {line["step"]: line["trained"] for line in read_metrics(folder) if line["kind"] == "rl"}
    return sorted((step, *sample) for step, samples in by_step.items() for sample in samples)


@pytest.mark.slow
def test_it_learns_what_is_rewarded(tmp_path):
    said = []
    settings = replace(SETTINGS, iterations=10, eval_count=60, rollout=replace(SETTINGS.rollout, samples=8))
    found = start(settings, tmp_path, said=said)
    before, after = found.scores
    assert 0.25 < before.accuracy < 0.75 and after.accuracy > before.accuracy + 0.15
    assert any(line.startswith("sampler and trainer differ by largest") for line in said)
    opened = open_model(tmp_path, dtype="float32", device="cpu")
    assert opened.stage == "rl" and opened.answers
    kinds = {line["kind"] for line in read_metrics(tmp_path)}
    assert {"rl", "eval", "sample", "event"} <= kinds
    lines = [line for line in read_metrics(tmp_path) if line["kind"] == "rl"]
    wanted = {"reward", "accuracy", "thinking", "masked", "lag", "zero_variance", "truncated", "tau", "void"}
    assert all(wanted <= line.keys() for line in lines) and lines[-1]["reward"] > lines[0]["reward"]
    assert Budgets.load(tmp_path / "budgets.json") == frozen()


@pytest.mark.slow
def test_13_killed_at_five_random_points_it_trains_on_the_same_samples(tmp_path):
    """A child process kills itself with SIGKILL in the n-th step of its engine; the next goes on from the disk."""
    small = replace(SETTINGS.rollout, prompts=3, samples=3, max_versions=None)
    settings = replace(SETTINGS, iterations=6, save_every=2, rollout=small)
    whole = start(settings, tmp_path / "whole")
    lengths = random.Random(7)
    for kill in range(5):
        child = os.fork()
        if child == 0:
            count, last, step = [0], lengths.randrange(12, 28), EngineSpeaker.step

            def counted(speaker, count=count, last=last, step=step):
                count[0] += 1
                if count[0] == last:
                    os.kill(os.getpid(), signal.SIGKILL)
                step(speaker)

            EngineSpeaker.step = counted
            start(settings, tmp_path / "killed", resume=kill > 0)
            os._exit(0)
        lengths.random()
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, f"child {kill} ended by itself"
    again = start(settings, tmp_path / "killed", resume=True)
    assert trained(tmp_path / "killed") == trained(tmp_path / "whole")
    assert again.rollouts.state_dict() == whole.rollouts.state_dict()
    for (name, one), (_, two) in zip(whole.model.state_dict().items(), again.model.state_dict().items(), strict=True):
        assert torch.equal(one, two), name


def test_resuming_with_another_setting_is_refused(tmp_path):
    settings = replace(SETTINGS, iterations=1, save_every=1)
    start(settings, tmp_path)
    with pytest.raises(ValueError, match=r"problems is 7; .* was begun with 8"):
        start(replace(settings, problems=7), tmp_path, resume=True)
    with pytest.raises(ValueError, match="add --resume"):
        start(settings, tmp_path)
    assert start(replace(settings, iterations=2), tmp_path, resume=True).iteration == 2


def test_a_sampler_that_is_not_the_trainer_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(run_module, "compare", lambda *_: Difference(10, 2e-4, 0.0, 0.0))
    weights = {name: value.clone() for name, value in cold_start().state_dict().items()}
    run = run_of(SETTINGS, tmp_path)
    with pytest.raises(ValueError, match=r"differ by largest 2.0e-04"):
        run.step()
    assert all(torch.equal(value, weights[name]) for name, value in run.model.state_dict().items())


def test_8_answers_that_are_all_cut_off_are_an_alarm(tmp_path):
    said = []
    settings = replace(SETTINGS, iterations=4, rollout=replace(SETTINGS.rollout, max_tokens=2))
    start(settings, tmp_path, said=said)
    assert [line for line in said if "ALARM: 100% of answers are cut off after 2 tokens" in line]
    assert any("max_tokens is too small" in line.get("message", "") for line in read_metrics(tmp_path))
    assert [line["zero_variance"] for line in read_metrics(tmp_path) if line["kind"] == "rl"] == [1.0] * 4


def test_groups_of_equal_rewards_do_not_move_the_weights(tmp_path):
    """Without the square and decay there is nothing to learn from them."""
    learner = replace(SETTINGS.learner, weight_decay=0.0)
    settings = replace(
        SETTINGS, learner=learner, objective=ObjectiveSettings(tau=0.0), effort=EffortSettings(tau=0.001), iterations=1
    )
    run = run_of(settings, tmp_path)
    run.rollouts.limit = lambda problem: -1  # every answer thinks more than that
    before = run.model.lm_head.weight.clone()
    record = run.step()
    assert (record["reward"], record["over_budget"], record["zero_variance"]) == (-1.0, 1.0, 1.0)
    assert torch.equal(run.model.lm_head.weight, before)


@pytest.mark.parametrize("balance", [False, True])
def test_router_biases_stand_still_between_a_rollout_and_its_training(tmp_path, balance):
    settings = replace(SETTINGS, learner=replace(SETTINGS.learner, balance=balance, epochs=2, minibatches=2))
    run = run_of(settings, tmp_path)
    biases = [router.e_score_correction_bias for router in routers(run.model)]
    before, seen = [bias.clone() for bias in biases], []
    backward = run.learner._backward

    def watched(*arguments):
        seen.append(all(torch.equal(bias, old) for bias, old in zip(biases, before)))
        return backward(*arguments)

    run.learner._backward = watched
    run.step()
    assert seen == [True] * 4
    assert any(not torch.equal(bias, old) for bias, old in zip(biases, before)) is balance


@pytest.mark.parametrize("learner", [{"qat": "w4a16"}, {"qat": "w4a8"}, {"replay": True}])
def test_four_bits_and_replay_pass_the_same_check(tmp_path, learner):
    """Masters stay float32; what samples and what is trained are the projected experts."""
    settings = replace(
        SETTINGS, learner=replace(SETTINGS.learner, **learner), rollout=replace(SETTINGS.rollout, prompts=2)
    )
    run = run_of(settings, tmp_path)
    for _ in range(2):
        record = run.step()
    assert run.checked and record["trained_tokens"] > 0


def test_hand_picked_conversations_are_added(tmp_path):
    """PTX: with no preference at all the plain loss alone moves the weights."""
    ids = torch.arange(20)[None]
    batch = Batch(ids, ids + 1, torch.tensor([0, 20], dtype=torch.int32), [None])
    objective = ObjectiveSettings(tau=0.0, ptx_weight=1.0)
    settings = replace(SETTINGS, objective=objective, learner=replace(SETTINGS.learner, weight_decay=0.0))
    with pytest.raises(ValueError, match="no conversations"):
        run_of(settings, tmp_path)
    run = run_of(settings, tmp_path, ptx=repeat(batch))
    run.rollouts.limit = lambda problem: -1
    before = run.model.lm_head.weight.clone()
    assert run.step()["loss"] > 1.0
    assert not torch.equal(run.model.lm_head.weight, before)


def test_budgets_are_measured_with_the_model_as_it_comes():
    settings = replace(SETTINGS, problems=3, budget_samples=2)
    found = measure_budgets(cold_start(), TOKENIZER, OneAnswer(), settings, SENTENCES, "cold")
    assert len(found.tokens) == 3 and set(found.tokens.values()) == {1.0}, "it does not think, and 1 is the least"
    assert found == measure_budgets(cold_start(), TOKENIZER, OneAnswer(), settings, SENTENCES, "cold")


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"minutes": 1.0}, "minutes 1.0; give one of them"),
        ({"rollout": RolloutSettings(samples=1)}, "a group needs at least 2"),
        ({"alarm": 0.0}, "alarm is 0.0"),
        ({"problems": 0}, "problems is 0"),
    ],
)
def test_mistakes_are_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        replace(SETTINGS, **wrong)


def test_a_run_without_a_length_takes_four_minutes():
    for settings in (RLSettings, MopdSettings):
        assert settings().minutes == 4 and settings(iterations=3).minutes is None


def test_settings_are_kept_with_the_run(tmp_path):
    start(replace(SETTINGS, iterations=1, save_every=1), tmp_path)
    kept = torch.load(next((tmp_path / "checkpoints").glob("*/trainer.pt")), weights_only=True)
    assert json.loads(kept["settings"])["problems"] == 8 and (tmp_path / "config.yaml").is_file()
