"""Distillation: who teaches whom, what a token earns, and that the student arrives."""

import json
from dataclasses import replace

import pytest
import torch
from playing import TOKENIZER, OneAnswer, cold_start, teach

from nanok3.data.chat import EFFORTS, encode
from nanok3.data.tokenizer import train_tokenizer
from nanok3.model.weights import save
from nanok3.posttrain.domains import SENTENCES
from nanok3.posttrain.mopd import Mopd, distill, teacher_logprobs, without_effort
from nanok3.posttrain.rl_settings import LearnerSettings, MopdSettings, ObjectiveSettings, RolloutSettings
from nanok3.posttrain.score import Packed, logprobs
from nanok3.stages.distill import read_teachers
from nanok3.train.track import read_metrics

SETTINGS = MopdSettings(
    iterations=2,
    problems=4,
    rollout=RolloutSettings(prompts=9, samples=1, pause=1.0, max_tokens=24),
    learner=LearnerSettings(lr=1e-3, minibatches=4),
    eval_count=0,
    save_every=0,
)


class Named(OneAnswer):
    """The same domain under another name."""

    def __init__(self, name):
        super().__init__()
        self.name = name


DOMAINS = {name: Named(name) for name in ("general", "agent", "coding")}
PAIRS = [(name, effort) for name in DOMAINS for effort in EFFORTS]


def folder_of(model, path, tokenizer=TOKENIZER):
    save(model, path, dtype=torch.float32)
    tokenizer.save(path)
    return path


def mopd(tmp_path, teachers, settings=SETTINGS):
    return Mopd(cold_start(), TOKENIZER, teachers, DOMAINS, settings, tmp_path / "run", lambda _: None, SENTENCES)


@pytest.fixture(scope="module")
def same(tmp_path_factory):
    """A teacher that is the student."""
    return folder_of(cold_start(), tmp_path_factory.mktemp("same"))


def test_a_teacher_that_is_the_student_pays_nothing(tmp_path, same):
    """Zero reward everywhere, so nothing moves but by the optimizer's decay, which is off; one step, since Muon makes
    whole steps of the rounding that is left."""
    settings = replace(SETTINGS, learner=replace(SETTINGS.learner, weight_decay=0.0, minibatches=1))
    run = mopd(tmp_path, dict.fromkeys(PAIRS, same), settings)
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    record = run.step()
    assert abs(record["reverse_kl"]) < 1e-5
    moved = max(float((value - before[name]).abs().max()) for name, value in run.model.named_parameters())
    assert record["grad_norm"] < 1e-4 and moved < 1e-1


def test_nine_constant_teachers_each_for_its_domain_and_effort(tmp_path, monkeypatch, same):
    """Teacher n says -n - 1 of every token; each sample must carry its own number."""
    run = mopd(tmp_path, dict.fromkeys(PAIRS, same))
    opened = []

    def constant(model, samples, forbidden, temperature, most):
        number = opened.pop()
        return {id(sample): torch.full((sample.output,), -1.0 - number) for sample in samples}

    class Counted:
        def __init__(self, number):
            self.number = number

        def open(self, tokenizer, device):
            assert not opened, "one teacher at a time"
            opened.append(self.number)

    monkeypatch.setattr("nanok3.posttrain.mopd.teacher_logprobs", constant)
    run.teachers = {pair: Counted(PAIRS.index(pair)) for pair in run.teachers}
    groups = run.rollouts.collect()
    taught = run._teach(groups)
    assert len(groups) == len(taught) == 9
    for group in groups:
        problem = run.rollouts.problem(group)
        number = PAIRS.index((problem.domain.name, problem.effort))
        assert set(taught[id(group.samples[0])].tolist()) == {-1.0 - number}
        prompt = encode(problem.domain.prompt(problem.task, problem.effort), TOKENIZER)
        assert group.samples[0].ids[: len(prompt)] == prompt, "the student has the effort in its prompt"


def test_the_teacher_scores_the_students_own_ids(tmp_path, same):
    run = mopd(tmp_path, {("general", "max"): same})
    samples = [group.samples[0] for group in run.rollouts.collect()]
    found = teacher_logprobs(run.model, samples, run.learner.forbidden, 1.0, 100)
    for sample in samples:
        torch.testing.assert_close(found[id(sample)], torch.tensor(sample.logprobs), atol=1e-4, rtol=0)
    other = without_effort(samples[0], [7, 7, 7])
    assert [other.ids[p] for p in other.places] == [samples[0].ids[p] for p in samples[0].places]
    row = Packed.of([other], [[True] * other.output])
    assert not torch.allclose(logprobs(run.model, row, run.learner.forbidden), found[id(samples[0])], atol=1e-4)


@pytest.mark.slow
def test_the_student_moves_towards_its_teacher(tmp_path):
    """A teacher that has unlearned `no` teaches it to the student; the bound of a token's reward holds."""
    teacher = folder_of(teach(cold_start(), 16, lambda step, row: "yes"), tmp_path / "teacher")
    settings = replace(
        SETTINGS,
        iterations=16,
        eval_count=100,
        save_every=16,
        rollout=replace(SETTINGS.rollout, prompts=48),
        learner=replace(SETTINGS.learner, final_lr_fraction=0.1),
        objective=ObjectiveSettings(tau=0.01),
    )
    domains = {"one": OneAnswer()}
    said = []
    out = tmp_path / "student"
    distill(
        cold_start(), TOKENIZER, {("one", "max"): teacher}, domains, settings, out, said.append, sentences=SENTENCES
    )
    lines = [line for line in read_metrics(out) if line["kind"] == "mopd"]
    gaps = [line["reverse_kl"] for line in lines]
    assert sum(gaps[-6:]) / 6 < 0.8 * sum(gaps[:3]) / 3, "of 48 answers an iteration's mean is a rough one"
    table = json.loads((out / "table.json").read_text())
    assert table[0]["teacher"]["accuracy"] > 0.8 and table[0]["student"]["accuracy"] > 0.6, "it began at a half"
    with pytest.raises(ValueError, match="add --resume"):
        distill(cold_start(), TOKENIZER, {("one", "max"): teacher}, domains, settings, out, said.append)
    longer = replace(settings, iterations=17, eval_count=0)
    distill(cold_start(), TOKENIZER, {("one", "max"): teacher}, domains, longer, out, said.append, True, SENTENCES)
    assert "going on after iteration 16" in said


def test_a_teacher_with_other_words_is_refused(tmp_path, same):
    path = tmp_path / "other"
    folder_of(cold_start(), path, train_tokenizer(["abab" * 9, "xyxy" * 9], 514))
    run = mopd(tmp_path, {("general", "max"): path})
    with pytest.raises(ValueError, match="its tokenizer is not the student's"):
        run.step()


def test_mistakes_are_named(tmp_path, same):
    with pytest.raises(ValueError, match=r"teachers: \['poetry'\]"):
        mopd(tmp_path, {("poetry", "max"): same})
    with pytest.raises(ValueError, match="r_max is 0"):
        replace(SETTINGS, r_max=0.0)
    with pytest.raises(ValueError, match="form is 'sequence'"):
        replace(SETTINGS, objective=ObjectiveSettings(form="sequence"))
    with pytest.raises(ValueError, match="general:medium"):
        read_teachers(("general:medium:x",))
    with pytest.raises(ValueError, match="named twice"):
        read_teachers((f"general:max:{same}", f"general:max:{same}"))
    assert read_teachers((f"general:max:{same}",)) == {("general", "max"): same}
