"""What tests of rollouts share: a speaker that says what it is told, and small things to play."""

import copy
import functools

import torch

from nanok3.config import K3Config
from nanok3.data.chat import answer, encode, render
from nanok3.envs.environment import Task
from nanok3.envs.questions import AnswerEnvironment
from nanok3.model.decoder import K3
from nanok3.posttrain.domains import SENTENCES, domains, small_tokenizer
from nanok3.posttrain.sample import Problem
from nanok3.serve.engine import Outcome, Token
from nanok3.train.loss import cross_entropy

TOKENIZER = small_tokenizer()
GENERAL, AGENT = domains()["general"], domains()["agent"]


def problems(domain, count=10**6, effort="max"):
    """A source of so many prompts over the domain's first tasks."""
    stream, tasks = domain.tasks("train", 0), []

    def source(number):
        while len(tasks) <= number < count:
            tasks.append(next(stream))
        return Problem(number, domain, effort, tasks[number]) if number < count else None

    return source


def said(message, thinking=()):
    """The ids of a turn: ids thought, and then what closes the thought and says the message."""
    return [*thinking, *encode(answer(message), TOKENIZER)]


def right(sample, problem, thinking=()):
    """The solution of a problem, turn by turn."""
    turn = problem.task.hidden["solution"][sample.turns]
    return said(message(turn, "0"), thinking)


def message(turn, name):
    """A turn of a solution in the shape of the chat API."""
    made = {"role": "assistant", "content": turn.get("text", "")}
    calls = [
        {"id": name, "type": "function", "function": {"name": n, "arguments": a}} for n, a in turn.get("calls", ())
    ]
    return made | ({"tool_calls": calls} if calls else {})


class Scripted:
    """A speaker: `says(sample)` gives the ids of the turn it stands in; each step says one token of every turn."""

    context = 4096
    said_tokens = 0

    def __init__(self, says):
        self.says, self.turns, self.begun, self.version, self.params = says, [], [], 0, []

    def begin(self, turn, params):
        sample = turn.sample
        ids = self.says(sample)
        assert sample.ids[sample.begins :] == ids[: len(sample.ids) - sample.begins], "a paused turn goes on as it was"
        self.begun.append((sample.prompt, sample.number))
        self.params.append(params)
        self.turns.append([turn, ids[len(sample.ids) - sample.begins :], params.max_tokens])

    def step(self):
        for entry in self.turns:
            turn, ids, left = entry
            token, *rest = ids
            entry[1], entry[2] = rest, left - 1
            enough = turn.push(Token(token, -0.01 * (len(turn.sample.ids) % 7) - self.version))
            if enough or not rest or token == TOKENIZER.end_of_msg_id:
                turn.finish(ended("stop"))
            elif left == 1:
                turn.finish(ended("length"))
        self.turns = [entry for entry in self.turns if entry[0].outcome is None]

    def pause(self):
        for turn, *_ in self.turns:
            turn.finish(ended("cancelled"))
        self.turns = []

    def renew(self, version):
        assert not self.turns
        self.version = version

    def load(self):
        return len(self.turns), 0, 0.0

    def rest(self, sample):
        assert sample.outcome == "running"

    def forget(self, samples):
        assert all(sample.outcome != "running" for sample in samples)

    def counts(self):
        return {}

    def close(self):
        assert not self.turns


def ended(reason):
    return Outcome(reason, None, 0, 0, 0, 0.0, None, 0.0, None)


class OneAnswer:
    """A domain of questions whose answer is `yes`."""

    name, counted = "one", "thinking"

    def __init__(self, environment=AnswerEnvironment):
        self.environment = environment

    def tasks(self, split, seed):
        for number in range(10**6):
            yield Task(f"one/{split}{number}", "one", f"say yes {number}", hidden={"answer": "yes"})

    def open(self, task):
        return self.environment()

    def prompt(self, task, effort):
        return render([{"role": "user", "content": task.goal}], thinking_effort=effort, sentences=SENTENCES)


def teach(model, steps, answer_of, effort="max"):
    """Some steps on prompts and the answers to them; answer_of(step, row) gives the word."""
    domain, optimizer = OneAnswer(), torch.optim.AdamW(model.parameters(), 3e-3)
    tasks = [task for task, _ in zip(domain.tasks("train", 0), range(64))]
    for step in range(steps):
        ids, targets, bounds = [], [], [0]
        for row in range(8):
            prompt = encode(domain.prompt(tasks[(8 * step + row) % 64], effort), TOKENIZER)
            answered = said({"role": "assistant", "content": answer_of(step, row)})
            ids += [*prompt, *answered]
            targets += [-100] * (len(prompt) - 1) + answered + [-100]
            bounds.append(len(ids))
        hidden = model.hidden_states(torch.tensor([ids]), cu_seqlens=torch.tensor(bounds, dtype=torch.int32))
        loss, count = cross_entropy(hidden, model.lm_head.weight, torch.tensor([targets]))
        (loss / count).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@functools.cache
def _cold():
    torch.manual_seed(5)
    model = K3(K3Config.tiny().at_depth(4).with_vocabulary(TOKENIZER.vocab_size))
    return teach(model, 45, lambda step, row: "yes" if (row + row // 3 + step) % 2 else "no")


def cold_start():
    """A small model that answers yes or no with even chances: the same weights every time, in a model of its own."""
    return copy.deepcopy(_cold())
