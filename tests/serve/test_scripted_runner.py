"""The stub behind the engine: the script comes whatever the sampling; of a script under a mask, what it allows."""

from __future__ import annotations

import pytest
import torch
from served import TOKENIZER

from nanok3.serve.engine import Engine, Job, Reading, Settings
from nanok3.serve.sampler import SamplingParams
from nanok3.serve.scheduler import Limits
from nanok3.serve.scripted import Reply, Scripted
from nanok3.serve.scripted_runner import ScriptedRunner

END = TOKENIZER.end_of_msg_id


class Kept:
    def __init__(self):
        self.ids, self.outcome = [], None

    def push(self, token):
        self.ids.append(token.id)
        return False

    def finish(self, outcome):
        self.outcome = outcome


class Only:
    """A constraint that always allows the same ids."""

    def __init__(self, *ids):
        self.mask = torch.zeros(TOKENIZER.vocab_size, dtype=torch.bool)
        self.mask[list(ids)] = True

    def allowed(self):
        return self.mask

    def advance(self, token):
        pass


def run(*replies, jobs=1, pages=256, budget=64, constraint=None, prompt=(1,), **params):
    runner = ScriptedRunner(Scripted([Reply(*reply) for reply in replies], TOKENIZER), 4096, pages)
    engine = Engine(runner, {END}, [], Settings(hash_block=16, limits=Limits(budget, 64)))
    readers = [Kept() for _ in range(jobs)]
    for reader in readers:
        engine.submit(Job(list(prompt), SamplingParams(max_tokens=50, **params), reader, constraint))
    while not engine.idle:
        engine.step()
        engine.cache.check()
    return readers, engine


def test_it_reads_as_a_model_does():
    assert isinstance(ScriptedRunner(Scripted([Reply((END,))], TOKENIZER)), Reading)


@pytest.mark.parametrize("params", [{"temperature": 2.0}, {"temperature": 0.0}, {"top_k": 1, "presence_penalty": 2.0}])
def test_the_script_is_said_at_any_temperature(params):
    script = (5, 5, 7, 5, 300, END)
    (reader,), _ = run((script,), **params)
    assert tuple(reader.ids) == script and reader.outcome.finish_reason == "stop"


def test_requests_get_lines_in_turn_also_when_their_pages_are_taken_away():
    lines = [((k, k, k, *range(100, 130), END),) for k in range(1, 5)]
    readers, engine = run(*lines, jobs=4, pages=9, prompt=range(100))
    assert engine.scheduler.preemptions > 0
    assert [tuple(reader.ids) for reader in readers] == [line[0] for line in lines]


def test_a_mask_leaves_what_it_allows_of_the_script():
    script = ((1, 2, 3, 2, END),)
    assert run(script, constraint=Only(2, 3, END))[0][0].ids == [2, 3, 2, END]
    assert run(script, constraint=Only(9, END))[0][0].ids == [END]
    assert run(script, constraint=Only(40, 9))[0][0].ids == [9] * 50


def test_delays_of_a_batch_are_waited_for_once(monkeypatch):
    slept = []
    monkeypatch.setattr("nanok3.serve.scripted_runner.time.sleep", slept.append)
    run(((1, 2, 3, 4, END), 0.02), jobs=8)  # as many as begin in one step
    assert slept == [0.02] * 5


def test_prompts_are_scored_evenly():
    runner = ScriptedRunner(Scripted([Reply((5, END))], TOKENIZER))
    engine = Engine(runner, {END}, [], Settings(limits=Limits(budget=4)))
    reader = Kept()
    engine.submit(Job(list(range(10)), SamplingParams(max_tokens=1), reader, prompt_logprobs=True))
    while not engine.idle:
        engine.step()
    scores = {round(token.logprob, 6) for token in reader.outcome.prompt_logprobs}
    assert len(reader.outcome.prompt_logprobs) == 9 and len(scores) == 1 and reader.ids == [5]
