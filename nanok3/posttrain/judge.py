"""An agentic judge: rewards for tasks without a verifier, from comparisons that leave a record.

    desk       read both -> write a rubric -> score both against it -> write the scores to the scorepad
    compare    once as (a, b), once as (b, a); two different winners are a tie
    gate       a candidate longer than sigma l0 loses; two of them both lose
    reward     wins / (K - 1) over all comparisons of the group; a tie is half a win

All four steps have to be made, or the run of the judge is rejected, which is no loss of anybody's: the comparison is
made anew once, and then left out of the count. l0 is the length of the cold start's answer to the same prompt, so that
a judge that likes length cannot teach it.

A judge is a policy like any other: it acts on a `Desk`, an environment with four tools. In tests it is scripted;
`ChatJudge` asks a model behind the chat API.

Source: report 4.1.2 names the four steps, the tournament and the gate with l0 and sigma. The order swap, ties, and what
is done about a rejected run are ours.
"""

from __future__ import annotations

import http.client
import json
import math
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from nanok3.envs.environment import Budget, Reply, Task, Verdict
from nanok3.envs.episode import Policy, Trajectory, play
from nanok3.envs.harness import Harness, messages
from nanok3.envs.in_process import InProcess
from nanok3.envs.tools import Call, ToolError, schemas, tool

WHICH = {"type": "string", "enum": ["A", "B"]}
POINTS = {"type": "number", "minimum": 0, "maximum": 10}
TOOLS = (
    tool("read", "Read a candidate's outcome.", candidate=WHICH),
    tool("rubric", "Write what a good outcome of this task has, before you score.", criteria="string"),
    tool("score", "Score a candidate against the rubric, 0 to 10.", candidate=WHICH, points=POINTS, reason="string"),
    tool("scorepad", "Write both scores down; this is what counts.", A=POINTS, B=POINTS),
)
STEPS = "Read both, write a rubric, score both against it, write the scores to the scorepad, and say that you are done."
SIGMA = 2.0
"""The gate's multiplier (ours)."""


class Desk(InProcess):
    """Two candidates, and what the judge has done with them so far."""

    def perform(self, name: str, arguments: dict[str, Any]) -> str:
        s = self.state
        if name == "read":
            s["read"].append(arguments["candidate"])
            return str(s["texts"][arguments["candidate"]])
        if name == "rubric":
            if not arguments["criteria"].strip():
                raise ToolError("criteria is empty")
            s["rubric"] = arguments["criteria"]
            return "kept"
        if not s["rubric"]:
            raise ToolError("there is no rubric; write one before you score")
        for points in (value for value in arguments.values() if not isinstance(value, str)):
            if not 0 <= points <= 10:
                raise ToolError(f"points is {points}; allowed: 0 to 10")
        if name == "score":
            s["scores"][arguments["candidate"]] = arguments["points"]
            return "scored"
        s["scorepad"] = arguments
        return "written"

    @property
    def missing(self) -> str | None:
        """The step that was skipped, if one was."""
        s = self.state
        for which in ("A", "B"):
            if which not in s["read"]:
                return f"{which} was not read"
            if which not in s["scores"]:
                return f"{which} was not scored"
        if not s["rubric"]:
            return "there is no rubric"
        if s["scorepad"] is None:
            return "there is no scorepad"
        return None if s["scorepad"] == s["scores"] else "the scorepad differs from the scores"

    def judge(self, hidden: bool) -> Verdict:
        """1 for a run that counts."""
        return Verdict(float(self.missing is None), self.missing or "")


@dataclass(frozen=True)
class Judged:
    """One run of the judge: who won, A, B, or None for equal scores; `missing` where the run is rejected."""

    winner: str | None
    missing: str | None
    rubric: str = ""
    played: Trajectory | None = None


def run(judge: Policy, goal: str, first: str, second: str, steps: int = 16) -> Judged:
    """One run over (A, B)."""
    texts = {"A": first, "B": second}
    start: dict[str, Any] = {"texts": texts, "read": [], "rubric": "", "scores": {}, "scorepad": None}
    told = f"Compare the candidates A and B for this task:\n{goal}\n{STEPS}"
    desk = Desk()
    played = play(desk, Task("judge", "judge", told, start, tools=TOOLS, budget=Budget(steps=steps)), judge)
    if played.outcome != "done":
        return Judged(None, played.reason, played=played)
    if desk.missing is not None:
        return Judged(None, desk.missing, desk.state["rubric"], played)
    scores = desk.state["scorepad"]
    winner = None if scores["A"] == scores["B"] else max("AB", key=lambda which: scores[which])
    return Judged(winner, None, desk.state["rubric"], played)


@dataclass(frozen=True)
class Candidate:
    """What is compared: an outcome as text, and its length in tokens."""

    text: str
    tokens: int


def compare(
    judge: Policy, goal: str, one: Candidate, two: Candidate, longest: float = math.inf
) -> tuple[float, float] | None:
    """What each wins: 1, 0, or a half for a tie; (0, 0) where both are too long; None where the judge was rejected."""
    over = one.tokens > longest, two.tokens > longest
    if any(over):
        return float(not over[0]), float(not over[1])
    forward, backward = _accepted(judge, goal, one, two), _accepted(judge, goal, two, one)
    if forward is None or backward is None:
        return None
    wins = (forward.winner, {"A": "B", "B": "A", None: None}[backward.winner])
    if wins[0] != wins[1] or wins[0] is None:
        return 0.5, 0.5
    return (1.0, 0.0) if wins[0] == "A" else (0.0, 1.0)


def _accepted(judge: Policy, goal: str, one: Candidate, two: Candidate) -> Judged | None:
    """A run that made all steps, of two tries."""
    for _ in range(2):
        judged = run(judge, goal, one.text, two.text)
        if judged.missing is None:
            return judged
    return None


def tournament(
    judge: Policy, goal: str, candidates: Sequence[Candidate], l0: float = math.inf, sigma: float = SIGMA
) -> list[float | None]:
    """The reward of each candidate, 0 to 1: its share of comparisons won. None where none of them counts."""
    won, counted = [0.0] * len(candidates), [0] * len(candidates)
    for i, j in combinations(range(len(candidates)), 2):
        result = compare(judge, goal, candidates[i], candidates[j], sigma * l0)
        if result is None:
            continue
        for place, points in zip((i, j), result):
            won[place] += points
            counted[place] += 1
    return [points / count if count else None for points, count in zip(won, counted)]


# ---------------------------------------------------------------------- a judge behind the chat API

Complete = Callable[[dict[str, Any]], dict[str, Any]]
"""A chat request -> the reply's body."""


def over_http(base: str, key: str = "", seconds: float = 120.0) -> Complete:
    """Requests to `base`/chat/completions."""

    def complete(request: dict[str, Any]) -> dict[str, Any]:
        return _answer("chat/completions", request, base, key, seconds)

    return complete


def served_models(base: str, key: str = "", seconds: float = 120.0) -> list[str]:
    """Names of the models behind `base`. ValueError where nobody answers."""
    listed = _answer("models", None, base, key, seconds).get("data")
    return [str(model["id"]) for model in listed or () if isinstance(model, dict) and "id" in model]


def _answer(path: str, request: dict[str, Any] | None, base: str, key: str, seconds: float) -> dict[str, Any]:
    """The JSON of a reply. ValueError with what the server says, or that there is none."""
    if not base.startswith(("http://", "https://")):
        raise ValueError(f"base_url is {base!r}; allowed: http://HOST:PORT/v1, or https")
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    data = None if request is None else json.dumps(request).encode()
    try:
        asked = urllib.request.Request(f"{base.rstrip('/')}/{path}", data, headers)
        with urllib.request.urlopen(asked, timeout=seconds) as reply:
            said = reply.read()
    except urllib.error.HTTPError as error:
        said = error.read(2000).decode("utf-8", "replace")
        hint = "api_key: " if error.code in (401, 403) else ""
        raise ValueError(f"{hint}{base} answers {error.code}: {said}") from None
    except (OSError, http.client.HTTPException, ValueError) as error:  # the last: an address or a key that is none
        reason = getattr(error, "reason", error)
        raise ValueError(f"base_url: {base} cannot be reached ({reason}); is the server running?") from None
    try:
        body = json.loads(said)
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise ValueError(f"base_url: {base} answers no JSON object; allowed: an OpenAI-compatible API, /v1 included")
    return body


@dataclass(frozen=True)
class ChatJudge:
    """A policy that asks a model, through the tools of the chat API."""

    complete: Complete
    model: str = "nanok3"
    max_tokens: int = 512

    def __call__(self, played: Trajectory) -> Reply:
        told = messages(Harness(prompt="none"), played)
        request = {"model": self.model, "messages": told, "tools": schemas(TOOLS), "max_tokens": self.max_tokens}
        try:
            said = self.complete(request)["choices"][0]["message"]
            functions = [call["function"] for call in said.get("tool_calls") or ()]
            calls = tuple(Call(function["name"], function["arguments"]) for function in functions)
            texts = [said.get("content") or "", said.get("reasoning_content") or ""]
            texts += [part for call in calls for part in (call.name, call.arguments)]
            if not all(isinstance(text, str) for text in texts):  # a number among them breaks the next request
                raise TypeError
        except (KeyError, IndexError, TypeError, AttributeError):
            said = "base_url: a reply without choices[0].message; allowed: an OpenAI-compatible API"
            raise ValueError(said) from None
        return Reply(texts[0], calls, texts[1])
