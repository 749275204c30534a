"""Rollouts with a speaker that says what it is told: what is kept, paused, resumed and left out. Numbers in names are
those of the list of known problems in docs/rl.md."""

import json
import random
import time
from collections import Counter
from dataclasses import replace

import pytest
import torch
from playing import AGENT, GENERAL, TOKENIZER, OneAnswer, Scripted, message, problems, right, said

from nanok3.data.chat import encode, render
from nanok3.envs.environment import Budget
from nanok3.envs.questions import AnswerEnvironment
from nanok3.envs.tools import schemas
from nanok3.posttrain.domains import SENTENCES
from nanok3.posttrain.objective import Tokens
from nanok3.posttrain.rl_settings import RolloutSettings
from nanok3.posttrain.rollout import Rollouts
from nanok3.posttrain.sample import Sample
from nanok3.posttrain.score import Packed
from nanok3.posttrain.throttle import Throttle

ALL = RolloutSettings(prompts=2, samples=3, pause=1.0, max_tokens=200)
YES = {"role": "assistant", "content": "yes"}
NO = {"role": "assistant", "content": "no"}


def rollouts(says, source, settings=ALL, **more):
    return Rollouts(Scripted(says), TOKENIZER, source, settings, sentences=SENTENCES, **more)


def text_ids(generator, count):
    """Random ids that a tokenizer would never give in this order."""
    return [generator.randrange(TOKENIZER.vocab_size - 256) for _ in range(count)]


# ------------------------------------------------------------------ what is kept


def test_4_a_row_holds_the_ids_that_were_sampled():
    """Three turns with random ids in the thought; among them `h`, `e` apart, which encoding again would join."""
    source = problems(AGENT)
    thoughts = {}

    def says(sample):
        key = sample.prompt, sample.number, sample.turns
        if key not in thoughts:
            ids = text_ids(random.Random(str(key)), 20)
            thoughts[key] = [*ids, *(TOKENIZER.encode(c)[0] for c in "hello")]
        return right(sample, source(sample.prompt), thoughts[key])

    played = rollouts(says, source)
    for group in played.collect():
        for sample in group.samples:
            assert (sample.finish, sample.reward, sample.turns) == ("stop", 1.0, 3)
            turns = [
                right(replace(sample, turns=turn), source(sample.prompt), thoughts[sample.prompt, sample.number, turn])
                for turn in range(3)
            ]
            assert [sample.ids[place] for place in sample.places] == [token for turn in turns for token in turn]
            assert sample.thinking == 3 * 25
            decoded = TOKENIZER.decode(thoughts[sample.prompt, sample.number, 0])
            assert TOKENIZER.encode(decoded) != thoughts[sample.prompt, sample.number, 0], (
                "the test would prove nothing"
            )


def test_17_18_turn_by_turn_equals_the_rendered_conversation():
    source = problems(AGENT, 1)
    played = rollouts(lambda sample: right(sample, source(0)), source, replace(ALL, prompts=1))
    sample = played.collect()[0].samples[0]
    task = source(0).task
    messages = [{"role": "user", "content": task.goal}]
    for number, turn in enumerate(task.hidden["solution"]):
        messages.append(message(turn, f"c{number}"))
        results = [str(task.state["table"][turn["calls"][0][1]["k"]])] if number == 0 else ["ok"]
        messages += [{"role": "tool", "tool_call_id": f"c{number}", "content": r} for r in results if turn.get("calls")]
    whole = render(
        messages, schemas(task.tools), thinking_effort="max", add_generation_prompt=False, sentences=SENTENCES
    )
    assert sample.ids == encode(whole, TOKENIZER)


def test_6_only_sampled_tokens_are_trained_on():
    """The gradient at what was observed, and at the prompt, is exactly zero."""
    source = problems(AGENT)
    sample = rollouts(lambda sample: right(sample, source(sample.prompt)), source).collect()[0].samples[0]
    row = Packed.of([sample], [[True] * sample.output])
    logits = torch.zeros(len(sample.ids), 8, requires_grad=True)
    logits[row.places].sum().backward()
    given = [place for place in range(len(sample.ids)) if place not in set(sample.places)]
    assert (logits.grad[[place - 1 for place in given if place]] == 0).all()
    assert len(row.places) == sample.output == len(sample.logprobs) == row.tokens.count
    assert [sample.ids[place + 1] for place in row.places] == row.targets.tolist()
    result = str(source(0).task.state["table"][source(0).task.hidden["solution"][0]["calls"][0][1]["k"]])
    assert TOKENIZER.encode(result)[0] in [sample.ids[place] for place in given], "what was observed is there"


def test_9_10_the_end_token_is_trained_and_nothing_behind_it():
    source = problems(OneAnswer())
    group = rollouts(lambda sample: said(YES), source).collect()[0]
    for sample in group.samples:
        assert sample.ids[sample.places[-1]] == TOKENIZER.end_of_msg_id and sample.places[-1] == len(sample.ids) - 1
        assert sample.finish == "stop"
    eos = rollouts(lambda sample: [*said(YES)[:-1], TOKENIZER.eos_id], source).collect()[0]
    assert {(s.finish, s.reward) for s in eos.samples} == {("stop", 1.0)}, "a second end is no truncation"


def test_5_lengths_that_differ_are_an_error():
    sample = Sample(0, 0, ids=[1, 2, 3], places=[1, 2], logprobs=[-1.0], versions=[0, 0])
    with pytest.raises(ValueError, match="the three must be equal"):
        Packed.of([sample], [[True, True]])
    assert Tokens.of([(0, [], [])]).count == 0


def test_19_broken_markup_is_an_observation_and_counted():
    """Random ids, control tokens among them, and calls cut short: no exception, and never a reward."""
    source, markers = problems(AGENT), [TOKENIZER.special[m] for m in ("<|open|>", "<|close|>", "<|sep|>")]

    def says(sample):
        generator = random.Random(f"{sample.prompt} {sample.number} {sample.turns}")
        whole = right(Sample(sample.prompt, 0), source(sample.prompt))
        cut = whole[: generator.randrange(len(whole))]
        noise = [generator.choice([*markers, *text_ids(generator, 3)]) for _ in range(30)]
        return [*cut, *noise, TOKENIZER.end_of_msg_id]

    groups = rollouts(says, source, replace(ALL, prompts=20)).collect()
    samples = [sample for group in groups for sample in group.samples]
    assert len(samples) == 60 and {s.outcome for s in samples} == {"done"} and {s.reward for s in samples} == {0.0}
    assert sum(s.problems for s in samples) > 60 and any(s.tool_errors for s in samples)


def test_20_the_calls_of_the_serving_parser_are_played():
    source = problems(AGENT)
    groups = rollouts(lambda sample: right(sample, source(sample.prompt)), source).collect()
    assert all(s.reward == 1.0 and not s.problems for group in groups for s in group.samples)


def test_an_answer_without_its_end_stops_a_conversation():
    source = problems(AGENT)
    broken = rollouts(lambda sample: [*right(sample, source(sample.prompt))[:-1], TOKENIZER.eos_id], source).collect()
    assert {(s.finish, s.reward, s.turns) for g in broken for s in g.samples} == {("broken", 0.0, 1)}


def test_a_turn_too_long_is_cut_and_earns_nothing():
    source = problems(OneAnswer())
    cut = rollouts(lambda sample: said(YES, [5] * 300), source, replace(ALL, max_tokens=20)).collect()[0]
    assert {(s.finish, s.reward, s.output, s.thinking) for s in cut.samples} == {("length", 0.0, 20, 20)}


def test_a_budget_ends_the_thought_one_token_beyond():
    source = problems(OneAnswer())
    thoughts = {0: 4, 1: 5, 2: 6}
    played = rollouts(lambda s: said(YES, [5] * thoughts[s.number]), source, limit=lambda problem: 5)
    group = played.collect()[0]
    assert [(s.finish, s.thinking) for s in group.samples] == [("stop", 4), ("stop", 5), ("budget", 6)]


# ------------------------------------------------------------------ pauses


def slow(sample):
    """The last sample of every other prompt thinks for long."""
    return said(YES if sample.number else NO, [5] * (40 if sample.number == 2 and sample.prompt % 2 else 1))


def settings(**changes):
    return replace(ALL, **{"prompts": 4, "pause": 0.6, "max_tokens": 100, **changes})


def test_pauses_and_resumes_first():
    played = rollouts(slow, problems(OneAnswer()), settings())
    assert [group.prompt for group in played.collect()] == [0, 2]
    paused = [(s.prompt, s.number) for g in played.groups for s in g.samples if s.outcome == "running" and s.ids]
    assert paused, "the slow ones are at work"
    played.renew()
    speaker, before = played.speaker, len(played.speaker.begun)
    played.collect()
    assert speaker.begun[before : before + len(paused)] == paused


def test_a_group_is_given_out_when_all_of_it_has_ended_and_tokens_keep_their_version():
    played = rollouts(slow, problems(OneAnswer()), settings())
    spans = set()
    for _ in range(12):
        for group in played.collect():
            assert len(group.samples) == 3 and group.complete
            for sample in group.samples:
                assert sample.versions == sorted(sample.versions) and len(sample.versions) == len(sample.logprobs)
                assert [round(-p) for p in sample.logprobs] == sample.versions, "the logprob its own policy gave it"
                spans.add(len(set(sample.versions)))
        played.renew()
    assert max(spans) > 1


def test_14_stored_logprobs_are_those_of_the_policies_that_sampled():
    played = rollouts(slow, problems(OneAnswer()), settings())
    old = {}
    for _ in range(6):
        for group in played.collect():
            for s in group.samples:
                if (s.prompt, s.number) in old:
                    ids, logprobs = old[s.prompt, s.number]
                    assert s.ids[: len(ids)] == ids and s.logprobs[: len(logprobs)] == logprobs
        old |= {
            (s.prompt, s.number): (list(s.ids), list(s.logprobs))
            for g in played.groups
            for s in g.samples
            if s.outcome == "running"
        }
        played.renew()
    assert old


def test_15_lag_counts_from_the_oldest_token_and_the_time_in_the_queue():
    sample = Sample(0, 0, versions=[2, 2, 4])
    assert sample.lag(4) == 2 and sample.lag(7) == 5 and Sample(0, 0).lag(3) == 0
    assert sample.trained(5, 2) == [False, False, True] and sample.trained(5, None) == [True] * 3


def test_12_slow_prompts_are_trained_as_often_as_they_are_sampled():
    """Durations 4 and 40 with a limit of 2 updates: nothing is thrown away, old tokens are withheld."""

    def says(sample):
        return said(YES, [5] * (40 if sample.prompt % 2 else 4))

    played = rollouts(says, problems(OneAnswer(), 60), settings(samples=2, pause=0.25, max_versions=2, in_flight=8))
    trained, withheld, counted = Counter(), 0, 0
    while True:
        groups = played.collect()
        if not groups and not played.groups:
            break
        for group in groups:
            trained[group.prompt % 2] += len(group.valid)
            marks = [mark for s in group.valid for mark in s.trained(played.version, 2)]
            withheld, counted = withheld + marks.count(False), counted + len(marks)
        played.renew()
    assert trained == {0: 60, 1: 60}
    assert 0 < withheld < counted


@pytest.mark.parametrize("stop", [1, 2, 3, 5, 8])
def test_13_a_queue_that_was_saved_goes_on_as_if_nothing_had_happened(stop):
    """(prompt, sample) pairs, ids, log-probabilities and versions; the state goes through JSON."""

    def run(interrupted):
        played = rollouts(slow, problems(OneAnswer(), 12), settings())
        found = []
        for iteration in range(40):
            found += [
                (s.prompt, s.number, tuple(s.ids), tuple(s.logprobs), tuple(s.versions))
                for group in played.collect()
                for s in group.samples
            ]
            played.renew()
            if interrupted and iteration == stop:
                state = json.loads(json.dumps(played.state_dict()))
                played = rollouts(slow, problems(OneAnswer(), 12), settings())
                played.load_state_dict(state)
        return found

    whole = run(False)
    assert len(whole) == 36 and run(True) == whole


def test_13_an_agent_that_was_paused_goes_on_in_its_environment():
    """Between its second and third turn the process ends."""
    source = problems(AGENT, 3)

    def says(sample):
        return right(sample, source(sample.prompt), [5] * (60 * sample.number * (1 + sample.prompt)))

    def make():
        return rollouts(says, source, replace(ALL, prompts=3, samples=2, pause=0.5, max_tokens=400))

    played = make()
    played.collect()
    resumed = make()
    paused = [s for g in played.groups for s in g.samples if s.outcome == "running"]
    assert any(s.snapshot and s.turns for s in paused)
    resumed.load_state_dict(json.loads(json.dumps(played.state_dict())))
    for each in (played, resumed):
        each.renew()
        groups = []
        while each.groups:
            groups += each.collect()
        assert all(s.reward == 1.0 for g in groups for s in g.samples)


# ------------------------------------------------------------------ what breaks


class Hangs(AnswerEnvironment):
    """In the step of one task."""

    def step(self, reply):
        if self.task.goal.endswith("say yes 1"):
            time.sleep(3)
        return super().step(reply)


@pytest.mark.parametrize("workers", [0, 3])
def test_21_a_hung_environment_is_no_reward_of_zero(workers):
    domain = OneAnswer(Hangs)
    stream = problems(domain, 2)

    def source(number):
        found = stream(number)
        return found and replace(found, task=replace(found.task, budget=Budget(step_seconds=0.2)))

    began = time.monotonic()
    groups = rollouts(lambda sample: said(YES), source, replace(ALL, env_workers=workers)).collect()
    assert time.monotonic() - began < 2.5
    assert [len(group.valid) for group in groups] == [3, 0]
    assert {(s.outcome, s.reward) for s in groups[1].samples} == {("infra-failed", None)}
    assert all("not done within" in s.reason for s in groups[1].samples)


def test_random_numbers_belong_to_prompt_sample_and_place():
    source = problems(OneAnswer())
    played = rollouts(lambda sample: said(YES), source)
    played.collect()
    seeds = [params.seed for params in played.speaker.params]
    assert len(set(seeds)) == len(seeds)
    again = rollouts(lambda sample: said(YES), source)
    again.collect()
    assert [params.seed for params in again.speaker.params] == seeds
    assert {(p.temperature, p.top_p, p.top_k) for p in again.speaker.params} == {(1.0, 1.0, None)}


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"top_p": 0.9}, "top_p is 0.9"),
        ({"top_k": 50}, "top_k is 50"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"pause": 0.0}, "pause is 0.0"),
        ({"samples": 0}, "samples is 0"),
        ({"max_versions": -1}, "max_versions is -1"),
    ],
)
def test_2_settings_under_which_the_sampler_is_another_policy_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        RolloutSettings(**wrong)


def test_throttle_follows_the_engine():
    throttle = Throttle(64)
    assert throttle.look(64, 0, 0.5) == 64
    assert throttle.look(60, 0, 0.95) == 54
    assert throttle.look(54, 3, 0.8) == 48
    assert throttle.look(40, 5, 0.2) == 48, "who waits for another's prefix waits for no page"
    assert [throttle.look(48, 0, 0.3), throttle.look(54, 0, 0.3), throttle.look(60, 0, 0.3)] == [54, 60, 64]
    assert throttle.look(0, 4, 1.0) == 64, "nobody runs: there is nobody to take away"
    assert Throttle(1).look(1, 1, 1.0) == 1
    with pytest.raises(ValueError, match="in_flight is 0"):
        Throttle(0)


def test_throttled_rollouts_end_all_the_same():
    played = rollouts(slow, problems(OneAnswer(), 8), settings(pause=1.0, in_flight=3))
    most = 0
    step = played.speaker.step

    def watched():
        nonlocal most
        most = max(most, len(played.speaker.turns))
        step()

    played.speaker.step = watched
    assert len(played.collect()) == 4 and most == 3


def test_general_tasks_are_played_to_their_verdict():
    source = problems(GENERAL)
    groups = rollouts(lambda s: right(s, source(s.prompt)) if s.number else said(NO), source).collect()
    assert [[s.reward for s in group.samples] for group in groups] == [[0.0, 1.0, 1.0]] * 2
