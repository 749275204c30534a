"""Rollouts in actors of Ray: the same samples as in this process, new weights after every update, actors that die.

Most of it runs against a stand-in whose actors are objects of this process; the last test begins Ray itself.
"""

from __future__ import annotations

import copy
import importlib.util
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from playing import TOKENIZER, OneAnswer

from nanok3.config import K3Config
from nanok3.model.decoder import K3
from nanok3.model.weights import save
from nanok3.posttrain import ray_worker
from nanok3.posttrain import rl as rl_module
from nanok3.posttrain.domains import SENTENCES
from nanok3.posttrain.effort import Budgets
from nanok3.posttrain.http_worker import HttpWorkers
from nanok3.posttrain.mopd import Mopd
from nanok3.posttrain.ray_worker import RayWorkers
from nanok3.posttrain.rl import RL, train
from nanok3.posttrain.rl_settings import LearnerSettings, MopdSettings, RLSettings, RolloutSettings
from nanok3.posttrain.workers import read_workers

SETTINGS = RLSettings(
    iterations=2,
    problems=2,
    rollout=RolloutSettings(prompts=2, samples=3, pause=1.0, max_tokens=12),
    learner=LearnerSettings(lr=2e-3, minibatches=1),
    eval_count=0,
    save_every=0,
)


class Died(Exception):
    pass


class TooLong(Exception):
    pass


class Actor:
    """Calls are made at once; a dead one's answers cannot be fetched."""

    def __init__(self, inner):
        self.inner, self.calls, self.dies_at = inner, 0, None

    def __getattr__(self, name):
        def remote(*given):
            self.calls += name == "work"
            if self.dies_at is not None and self.calls > self.dies_at:
                return ("died", None)
            return ("value", copy.deepcopy(getattr(self.inner, name)(*copy.deepcopy(given))))

        return SimpleNamespace(remote=remote)


class Ray:
    """As much of Ray as is used."""

    exceptions = SimpleNamespace(RayActorError=Died, GetTimeoutError=TooLong)

    def __init__(self):
        self.actors, self.begun, self.killed, self.needs, self.places = [], [], 0, [], True
        self.in_turn = True
        """Whether all answers are there at once; otherwise the first actor is always the quicker one."""

    def is_initialized(self):
        return False

    def init(self, **how):
        self.begun.append(how)
        if how.get("address") not in ("local", "here:1"):
            raise ConnectionError("nobody there")

    def shutdown(self):
        self.begun.append("ended")

    def remote(self, kind):
        def make(*given):
            self.actors.append(Actor(kind(*given)))
            return self.actors[-1]

        def options(**needs):
            self.needs.append(needs)
            return SimpleNamespace(remote=make)

        return SimpleNamespace(options=options)

    def put(self, value):
        return copy.deepcopy(value)

    def get(self, what, timeout=None):
        if timeout is not None and not self.places:
            raise TooLong
        if isinstance(what, list):
            return [self.get(each) for each in what]
        if what[0] == "died":
            raise Died("it is gone")
        return what[1]

    def wait(self, answers, num_returns, timeout=None):
        ready = num_returns if self.in_turn or timeout is None else 0
        return list(answers[:ready]), list(answers[ready:])

    def kill(self, actor):
        self.killed += 1


@pytest.fixture
def ray(monkeypatch):
    made = Ray()
    monkeypatch.setattr(ray_worker, "_ray", lambda: made)
    return made


@pytest.fixture(autouse=True)
def rewards(monkeypatch):
    """So that there is something to learn from them."""
    monkeypatch.setattr(rl_module, "rewards", lambda group, counted: [float(sum(s.ids) % 3) for s in group.valid])


def untaught():
    """A model of random weights: it says anything, until it is cut off."""
    torch.manual_seed(3)
    return K3(K3Config.tiny().at_depth(1).with_vocabulary(TOKENIZER.vocab_size)).eval()


def played(folder, workers=None, settings=SETTINGS, meanwhile=lambda rl: None):
    """Two iterations: the samples of each, the weights at the end, and the run."""
    tasks = [task for task, _ in zip(OneAnswer().tasks("train", 0), range(2))]
    budgets = Budgets({task.id: 50.0 for task in tasks})
    rl = RL(untaught(), TOKENIZER, OneAnswer(), settings, folder, budgets, lambda _: None, SENTENCES, workers=workers)
    collect, seen = rl.rollouts.collect, []

    def watched():
        groups = collect()
        seen.append(copy.deepcopy([sample for group in groups for sample in group.samples]))
        return groups

    rl.rollouts.collect = watched
    rl.step()
    meanwhile(rl)
    rl.step()
    rl.rollouts.close()
    rl.speaker.close()
    return seen, rl.model.state_dict(), rl


def assert_same(here, there):
    for ours, theirs in zip(here, there, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert (a.ids, a.places, a.versions, a.reward) == (b.ids, b.places, b.versions, b.reward)
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)
    assert {version for sample in there[1] for version in sample.versions} == {1}


def test_actors_train_on_the_same_samples(tmp_path, ray):
    here, weights, _ = played(tmp_path / "a")
    there, as_well, rl = played(tmp_path / "b", RayWorkers(2))
    assert_same(here, there)
    assert all(torch.allclose(weights[name], as_well[name], atol=1e-4) for name in weights)
    assert rl.speaker.said_tokens == sum(sample.output for group in there for sample in group)
    assert all(actor.calls for actor in ray.actors) and len(ray.actors) == 2 == ray.killed
    assert all(actor.inner.engine.weight_version == 1 for actor in ray.actors)
    assert ray.begun[0]["address"] == "local" and ray.begun[0]["num_cpus"] == 2 and ray.begun[-1] == "ended"
    assert ray.needs == [{"scheduling_strategy": "SPREAD", "num_cpus": 1, "num_gpus": 0}]


def test_a_sample_comes_back_to_where_its_prefix_is(tmp_path, ray):
    """A paused sample is begun where it was; what is over is forgotten everywhere."""
    ray.in_turn = False
    settings = replace(SETTINGS, rollout=replace(SETTINGS.rollout, pause=0.5, prompts=3, in_flight=4))
    homes = []

    def meanwhile(rl):
        running = [s for group in rl.rollouts.groups for s in group.samples if s.outcome == "running"]
        homes.extend((sample, rl.speaker._home[id(sample)]) for sample in running if sample.ids)
        hand = rl.speaker._hand

        def watched(turn, params, worker):
            for sample, home in homes:
                assert sample is not turn.sample or home is worker
            hand(turn, params, worker)

        rl.speaker._hand = watched

    seen, _, rl = played(tmp_path, RayWorkers(2), settings, meanwhile)
    assert [len(sample.versions) > sample.versions.count(0) > 0 for sample, _ in homes] == [True, True]
    for sample in (sample for part in seen for sample in part):
        assert len(sample.versions) == len(sample.logprobs) == len(sample.places)
        assert sample.versions == sorted(sample.versions)
    left = {id(s) for group in rl.rollouts.groups for s in group.samples if s.outcome == "running"}
    assert rl.speaker._home.keys() <= left


@pytest.mark.parametrize("dies_at", [0, 1, 2])
def test_what_a_lost_actor_had_goes_on_elsewhere(tmp_path, ray, monkeypatch, dies_at):
    monkeypatch.setattr(ray_worker, "STEPS", 3)

    def meanwhile(rl):
        ray.actors[0].dies_at = ray.actors[0].calls + dies_at

    seen, _, rl = played(tmp_path, RayWorkers(2), SETTINGS, meanwhile)
    assert [worker.name for worker in rl.speaker.workers] == [] and ray.killed == 1, "the other one was left at the end"
    assert len(seen[1]) == 6
    for sample in seen[1]:
        assert sample.outcome == "done" and sample.output <= 12
        assert sample.finish != "length" or sample.output == 12, "it goes on to the end, and no further"
        assert sample.versions == [1] * sample.output == [1] * len(sample.logprobs)


def test_the_last_actor_lost_and_other_weights_end_the_run(tmp_path, ray):
    def all_die(rl):
        for actor in ray.actors:
            actor.dies_at = 0

    with pytest.raises(RuntimeError, match=r"worker \d was the last one, and has ended: it is gone"):
        played(tmp_path / "a", RayWorkers(2), SETTINGS, all_die)

    def forgetful(rl):
        for actor in ray.actors[-1:]:
            actor.inner.reload = lambda weights, version: version

    with pytest.raises(RuntimeError, match=r"worker 0 has weights 0, not 1"):
        played(tmp_path / "b", RayWorkers(1), SETTINGS, forgetful)


def test_a_student_is_played_by_actors_too(tmp_path, ray):
    model = untaught()
    save(model, tmp_path / "teacher")
    TOKENIZER.save(tmp_path / "teacher")
    rollout = RolloutSettings(prompts=2, samples=1, pause=1.0, max_tokens=6)
    settings = MopdSettings(iterations=1, problems=2, rollout=rollout, eval_count=0, save_every=0)
    teachers = {("one", "max"): tmp_path / "teacher"}
    lengths = []
    for name, workers in (("a", None), ("b", RayWorkers(2))):
        run = Mopd(untaught(), TOKENIZER, teachers, {"one": OneAnswer()}, settings, tmp_path / name, workers=workers)
        run.step()
        lengths.append(run.speaker.said_tokens)
        run.speaker.close()
    assert lengths[0] == lengths[1] > 0 and ray.killed == 2


def test_workers_say_how_full_they_are(tmp_path, ray):
    workers = RayWorkers(2).speaker(untaught(), TOKENIZER, SETTINGS, tmp_path)
    for worker, load in zip(workers.workers, [(3, 2, 0.4), (5, 0, 0.8)]):
        worker.load, worker.counts = load, {"preemptions": 2, "pool_bytes": 10}
    workers._at_work = dict.fromkeys(range(9))
    assert workers.load() == (7, 2, 0.8)
    assert workers.counts() == {"preemptions": 4, "pool_bytes": 20}


def test_mistakes(tmp_path, ray, monkeypatch):
    assert read_workers("ray:2") == RayWorkers(2) and read_workers("ray:3@here:1") == RayWorkers(3, "here:1")
    assert read_workers("http://a,http://b", "k") == HttpWorkers(("http://a", "http://b"), "k")
    for text in ("ray:", "ray:x", "ray:0", "ray:-1", "ray:1@", "ray:1.5", "ray:²"):
        with pytest.raises(ValueError, match=r"workers: .*; allowed: ray:N, or ray:N@ADDRESS"):
            read_workers(text)
    replay = replace(SETTINGS, learner=replace(SETTINGS.learner, replay=True))
    with pytest.raises(ValueError, match=r"learner.replay is True"):
        RayWorkers(1).check(replay)
    with pytest.raises(ValueError, match=r"no Ray at 'elsewhere:1' \(nobody there\); allowed: ray:N"):
        RayWorkers(1, "elsewhere:1").speaker(untaught(), TOKENIZER, SETTINGS, tmp_path)
    ray.places = False
    with pytest.raises(ValueError, match=r"no place for 3 of one CPU each"):
        RayWorkers(3, "here:1").speaker(untaught(), TOKENIZER, SETTINGS, tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr(ray_worker, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"need ray, which is not installed: pip install 'nanok3\[ray\]'"):
        train(untaught(), TOKENIZER, OneAnswer(), SETTINGS, tmp_path / "run", workers=RayWorkers(2))
    assert not (tmp_path / "run").exists(), "nothing is written before workers are there"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_with_ray_itself(tmp_path):
    """The same samples from two processes, and what happens when one of them is killed."""
    here, _, _ = played(tmp_path / "a")
    there, _, _ = played(tmp_path / "b", RayWorkers(2))
    assert_same(here, there)
    import ray

    def kill(rl):
        ray.kill(rl.speaker.workers[0].actor)

    seen, _, _ = played(tmp_path / "c", RayWorkers(2), SETTINGS, kill)
    assert len(seen[1]) == 6 and all(sample.outcome == "done" for sample in seen[1])
    assert not ray.is_initialized(), "what was begun here is ended here"
