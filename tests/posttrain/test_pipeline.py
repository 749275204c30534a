"""The whole road: parts are done once, in order, and what came of them is said as it was measured."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
import torch

from nanok3.config import K3Config
from nanok3.data.chat import to_text
from nanok3.model.decoder import K3
from nanok3.posttrain import pipeline
from nanok3.posttrain.conversations import conversation_of
from nanok3.posttrain.domains import SENTENCES, domains
from nanok3.posttrain.effort import TAUS, Budgets
from nanok3.posttrain.evaluate import Scores
from nanok3.posttrain.pipeline import ORDER, QUICK, SMALL, STEPS, Pipeline, Plan, added, claims, table
from nanok3.posttrain.pipeline_report import curves, page, readable, write_pipeline_report
from nanok3.train.track import Tracker


def score(accuracy, thinking, output=30.0):
    return {"accuracy": accuracy, "thinking": thinking, "output": output, "truncated": 0.0, "count": 100}


def made(low=(0.5, 6.0), most=(0.9, 20.0), student=0.88):
    """steps.json of a road that was gone to its end."""
    pairs = {"high": (0.8, 10.0), "low": low, "max": most}
    cold = {f"general-{effort}": score(0.4, 12.0) for effort in pairs}
    rows = [
        {"domain": "general", "effort": e, "teacher": score(*found), "student": score(student - 0.9 + found[0], 9.0)}
        for e, found in pairs.items()
    ]
    sample = {"general": {"text": "<think> & so<|end_of_msg|>", "reward": 1.0}}
    experts = {f"general-{effort}": {"seconds": 60.0, "cpu_seconds": 30.0} for effort in pairs}
    return {
        "cold": {"scores": cold, "samples": sample, "seconds": 100.0, "cpu_seconds": 60.0},
        **experts,
        "student": {"table": rows, "samples": sample, "seconds": 50.0, "cpu_seconds": 30.0},
    }


def test_claims_hold_or_do_not_as_the_numbers_say():
    assert [row.effort for row in table(made())] == ["low", "high", "max"]
    holds = {what: (found, held) for what, found, held in claims(table(made()))}
    assert all(held for _, held in holds.values()) and len(holds) == 4
    assert holds["general: reinforcement learning gives +0.15 at max"][0] == "+0.500"
    assert holds["general: low thinks for less than 0.7 of max's tokens"][0] == "0.30"
    for steps, wrong in (
        (made(most=(0.54, 20.0)), "gives +0.15"),
        (made(low=(0.5, 15.0)), "for less than 0.7"),
        (made(low=(0.95, 6.0)), "max is right more often"),
        (made(student=0.8), "within 0.03"),
    ):
        assert [what for what, _, held in claims(table(steps)) if not held and wrong in what]


def test_the_report_shows_them_escaped(tmp_path):
    text = page("x", made())
    assert "&lt;think&gt; &amp; so" in text and "<think>" not in text
    assert '<td class="number">0.900</td>' in text and "6.3" not in text and "Three teachers and" in text
    assert "5.5 minutes in all, 3.0 minutes of CPU time" in text
    assert write_pipeline_report(tmp_path, made(student=0.5)).read_text().count('<td class="number">no</td>') == 1


def test_a_transcript_is_readable_and_what_is_broken_stays_as_it_was_said():
    task = next(domains()["agent"].tasks())
    row = domains()["agent"].demonstration(task, "max", Random(4), 0.0)
    text = to_text(conversation_of(row, "here").render(SENTENCES))
    name = task.hidden["name"]
    who = [line for line in readable(text).splitlines() if not line.startswith("  ")]
    assert who[:3] == ["user", task.goal, "assistant"] and who[3:5] == ["tool", str(task.hidden["start"])]
    assert f"  says    {name}\n  calls   get k={name}\n" in readable(text) and "<|" not in readable(text)
    assert '<|open|>message role="assistant"' in readable(text[:-60]), "its last message has no end"
    assert readable("<|open|>call<|sep|>x") == "<|open|>call<|sep|>x"


def test_the_report_draws_what_the_experts_learned(tmp_path):
    folder = tmp_path / "general-max"
    track = Tracker(folder)
    for step in range(1, 6):
        track.write("rl", step, accuracy=0.1 * step)
    found = curves(tmp_path, made())
    assert found.count("<figure>") == 1 and "general: rollouts that are right" in found and "</svg>" in found
    assert curves(tmp_path / "elsewhere", made()) == ""
    assert "How the experts learned" in page("x", made(), found) and "How the experts" not in page("x", made())


class Told(Pipeline):
    """Parts that only say that they were done, the third of which is interrupted once."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.done, self.break_at = [], None

    def _part(self, name):
        if self.break_at == name:
            raise KeyboardInterrupt
        self.done.append(name)
        return {"name": name}

    def _facts(self, folder):
        return self._part("facts")

    def _cold(self, folder):
        return self._part("cold")

    def _expert(self, folder, name, effort):
        assert folder == self.out / f"{name}-{effort}"
        return self._part(folder.name)

    def _student(self, folder):
        return self._part("student")

    def _draft(self, folder):
        return self._part("draft")


def test_parts_are_done_once_and_in_order(tmp_path):
    first = Told(SMALL, tmp_path, str)
    first.break_at = "general-low"
    with pytest.raises(KeyboardInterrupt):
        first.run()
    assert first.done == ["facts", "cold", "general-max", "general-high"]
    again = Told(SMALL, tmp_path, str)
    steps = again.run()
    experts = [f"{name}-{effort}" for name in ("agent", "coding") for effort in ("max", "high", "low")]
    assert again.done == ["general-low", *experts, "student", "draft"] and len(steps) == 13
    assert Told(SMALL, tmp_path, str).run() == steps == json.loads((tmp_path / STEPS).read_text())["steps"]
    twice, once = SMALL.times(2).cold_steps, SMALL.cold_steps
    with pytest.raises(ValueError, match=rf"cold_steps is {twice}; .* was begun with {once}, which cannot change"):
        Told(replace(SMALL, cold_steps=twice), tmp_path, str)
    assert not {"facts", "draft"} & Told(QUICK, tmp_path / "quick", str).run().keys()


def test_an_expert_of_less_effort_begins_as_max_and_with_its_budget(tmp_path, monkeypatch):
    trained = []

    def train(model, tokenizer, domain, settings, folder, budgets, *rest):
        trained.append((folder.name, model, settings.effort, budgets is None))
        Budgets({"a": 1.0}).save(folder / "budgets.json")
        return SimpleNamespace(scores=[Scores(0.5, 1.0, 2.0, 0.0, 9)], iteration=1)

    monkeypatch.setattr(pipeline, "train", train)
    monkeypatch.setattr(pipeline, "write_rl_report", lambda folder: None)
    road = Pipeline(QUICK, tmp_path, str)
    monkeypatch.setattr(road, "model", lambda name: name)
    for effort in ORDER:
        road._expert(tmp_path / f"general-{effort}", "general", effort)
    names = [name for name, *_ in trained]
    assert names == ["general-max", "general-high", "general-low"]
    assert [model for _, model, *_ in trained] == ["cold", "general-max", "general-max"]
    taus = TAUS["general"]
    assert [e.tau_start for _, _, e, _ in trained] == [None, taus["max"], taus["max"]]
    assert [none for *_, none in trained] == [True, False, False]


def test_plans():
    for name in ("facts_steps", "cold_steps", "max_iterations", "branch_iterations", "student_iterations"):
        assert getattr(QUICK.times(0.5), name) == math.ceil(getattr(QUICK, name) / 2)
    assert QUICK.times(0.001).max_iterations == 1 and QUICK.times(0.5).draft_steps == 0 == QUICK.draft_steps
    assert replace(QUICK.times(0.5), eval_count=1).problems == QUICK.problems
    with pytest.raises(ValueError, match="times is 0; it must be above 0"):
        SMALL.times(0)
    with pytest.raises(ValueError, match="domains: 'x'; allowed: general, agent, coding"):
        Pipeline(Plan(domains=("x",)), Path("anywhere"))


def test_what_several_experts_have_changed_is_added_to_what_they_began_as():
    models = []
    for seed in range(3):
        torch.manual_seed(seed)
        models.append(K3(K3Config.tiny().at_depth(1)))
    start, one, two = (dict(model.state_dict()) for model in models)
    start = {name: value.clone() for name, value in start.items()}
    for name, value in added(models[0], models[1:]).state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(value, one[name] + two[name] - start[name])
    again = added(models[1], models[2:]).state_dict()
    assert all(torch.allclose(value, two[name]) for name, value in again.items())


@pytest.mark.slow
def test_a_short_road_to_its_end(tmp_path):
    """Seconds of each part: nothing is learned, everything is there."""
    short = {"facts_steps": 1, "demonstrations": 40, "draft_steps": 1}
    few = {"eval_count": 2, "problems": 1, "prompts": 1, "student_prompts": 3, "max_tokens": 8}
    plan = replace(QUICK.times(0.002), **short, **few)
    steps = Pipeline(plan, tmp_path, str).run()
    assert list(steps) == ["facts", "cold", "general-max", "general-high", "general-low", "student", "draft"]
    assert len(table(steps)) == 3
    links = re.findall(r'href="([^"]*)"', write_pipeline_report(tmp_path, steps).read_text())
    assert len(links) == 6 and all((tmp_path / link).is_file() for link in links)
