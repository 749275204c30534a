"""The three domains: what is demonstrated is what the environments reward, in the efforts' order of length."""

import json
from itertools import islice
from random import Random

import pytest

from nanok3.data.chat import EFFORTS, encode, encode_with_mask
from nanok3.envs.environment import Reply
from nanok3.envs.episode import play, scripted
from nanok3.envs.tools import Call
from nanok3.posttrain.conversations import conversation_of
from nanok3.posttrain.domains import (
    SENTENCES,
    Mistakes,
    conversation,
    demonstrations,
    domains,
    played,
    small_model,
    small_tokenizer,
)

DOMAINS = domains()


def replies_of(row):
    """The assistant's messages of a row as replies."""
    for message in row["messages"]:
        if message["role"] == "assistant":
            calls = [call["function"] for call in message.get("tool_calls", ())]
            yield Reply(
                message["content"],
                tuple(Call(call["name"], call["arguments"]) for call in calls),
                message["reasoning_content"],
            )


@pytest.mark.parametrize("name", DOMAINS)
def test_demonstrations_earn_the_reward_unless_they_are_to_go_wrong(name):
    domain, random = DOMAINS[name], Random(0)
    tries = 0.7 if name == "coding" else 1.0  # of low effort there is one, which is right half the time
    for share, low, high in ((0.0, tries, 1.0), (1.0, 0.0, 0.4)):
        rewards = []
        for task in islice(domain.tasks(), 60):
            row = domain.demonstration(task, random.choice(EFFORTS), random, share)
            rewards.append(play(domain.open(task), task, scripted(list(replies_of(row)))).reward)
        assert low <= sum(rewards) / 60 <= high, (share, rewards)


def cost(reply):
    """Characters of thought, and ten for a try."""
    return len(reply.thinking) + 10 * sum(call.name == "write" for call in reply.calls)


@pytest.mark.parametrize("name", DOMAINS)
def test_more_effort_is_more_thinking_and_lengths_vary_under_each(name):
    domain, lengths = DOMAINS[name], {}
    for effort in EFFORTS:
        rows = [domain.demonstration(task, effort, Random(i), 0) for i, task in enumerate(islice(domain.tasks(), 90))]
        lengths[effort] = [sum(map(cost, replies_of(row))) for row in rows]
        assert len(set(lengths[effort])) > 2
    low, high, most = (sum(lengths[effort]) for effort in EFFORTS)
    assert low < high <= most and low < 0.7 * most


@pytest.mark.parametrize("name", DOMAINS)
def test_the_prompt_is_how_every_demonstration_begins(name):
    domain, tokenizer = DOMAINS[name], small_tokenizer()
    for effort in EFFORTS:
        task = next(domain.tasks())
        row = conversation_of(domain.demonstration(task, effort, Random(1), 0), "here")
        ids, sampled = encode_with_mask(row.render(SENTENCES), tokenizer)
        prompt = encode(domain.prompt(task, effort), tokenizer)
        assert ids[: len(prompt)] == prompt and sampled.index(True) == len(prompt)
        assert len(ids) <= 400


def test_rows_are_json_and_a_function_of_their_settings():
    rows = demonstrations([*DOMAINS.values()], 9, mistakes=Mistakes(0.5, 3))
    assert len(rows) == 27 and json.loads(json.dumps(rows)) == rows
    assert demonstrations([*DOMAINS.values()], 9, mistakes=Mistakes(0.5, 3)) == rows
    assert demonstrations([*DOMAINS.values()], 9, mistakes=Mistakes(0.5, 4)) != rows
    with pytest.raises(ValueError, match=r"mistakes: share is 2; it must lie in \[0, 1\]"):
        Mistakes(2)


def test_a_domain_of_few_tasks_repeats_them():
    few = [row["messages"][0]["content"] for row in demonstrations([DOMAINS["coding"]], 300, "held-out")]
    assert len(few) == 300 and 10 < len(set(few)) < 200


def test_observations_become_messages_with_the_calls_they_answer():
    task = next(DOMAINS["agent"].tasks())
    replies = [Reply(calls=(Call("get", {"k": "S"}), Call("get", "{")), thinking="t"), Reply("ok")]
    seen = played(DOMAINS["agent"].open(task), task, replies)
    before = [{"role": "user", "content": task.goal}]
    user, said, one, two, last = conversation(before, replies, seen)
    assert user == before[0] and said["reasoning_content"] == "t" and last["content"] == "ok"
    assert [one["tool_call_id"], two["tool_call_id"]] == [call["id"] for call in said["tool_calls"]]
    assert one["content"] == str(task.state["table"]["S"]) and two["content"].startswith("error: arguments")


def test_no_merge_holds_a_digit_and_the_markup_is_few_tokens():
    tokenizer = small_tokenizer()
    names = [tokenizer.token_bytes(i) for i in range(256, tokenizer.vocab_size - 256)]
    assert not any(bytes([digit]) in name for name in names for digit in b"0123456789")
    assert len(tokenizer.encode("assistant")) == 1 and len(tokenizer.encode("3BDIKNQACEFGHJLMOPR")) == 19
    assert small_model("quick").vocab_size == small_model("small").vocab_size == tokenizer.vocab_size
    with pytest.raises(ValueError, match="preset is 'x'; allowed: quick, small"):
        small_model("x")
