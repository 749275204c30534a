"""`nanok3 judge`: candidate answers compared by a model behind an OpenAI-compatible API, by a rubric it writes first.

    nanok3 judge candidates.jsonl --base-url http://127.0.0.1:8000/v1 --out verdicts.jsonl
    nanok3 judge candidates.jsonl --criteria "Short, right, and says where it is from." --sigma 1.5

A line of the file: {"goal": "...", "candidates": ["...", {"text": "...", "tokens": 12}], "l0": 40}. `tokens` is the
length of a candidate, counted in words when not given; `l0` the length of the cold start's answer, without which no
candidate is too long. Every pair is compared in both orders; a candidate longer than sigma * l0 loses.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

if TYPE_CHECKING:
    from nanok3.posttrain.judge import Candidate, ChatJudge

LOCAL = "http://127.0.0.1:8000/v1"
DAY = 86_400


@dataclass(frozen=True, kw_only=True)
class JudgeArgs:
    """Compare candidate answers with a model as the judge."""

    candidates: Annotated[Path, tyro.conf.Positional]
    """JSONL: goal, candidates and l0 a line."""
    base_url: str | None = None
    """Where the API is, /v1 included. Not given: OPENAI_BASE_URL, else http://127.0.0.1:8000/v1."""
    model: str | None = None
    """Name of the judging model; the first that the server lists when not given."""
    api_key: str | None = None
    """Not given: OPENAI_API_KEY, else none."""
    criteria: str = ""
    """What the rubric has to contain; the judge writes its own when not given."""
    sigma: float = 2.0
    """A candidate longer than sigma * l0 loses."""
    max_tokens: int = 1024
    """Tokens of one reply of the judge."""
    timeout: float = 120.0
    """Seconds a request may take."""
    out: Path | None = None
    """Write the verdicts to this file as JSONL; they are printed in any case."""


@dataclass(frozen=True)
class Case:
    """A line of the file."""

    goal: str
    candidates: list[Candidate]
    l0: float


def main(args: JudgeArgs) -> None:
    """Judge line by line; what is done stays in --out."""
    from nanok3.data.files import check_file
    from nanok3.posttrain.judge import tournament

    for name in ("sigma", "max_tokens", "timeout"):
        if not getattr(args, name) > 0:
            raise ValueError(f"{name} is {getattr(args, name)}; it must be above 0")
    if args.timeout > DAY:
        raise ValueError(f"timeout is {args.timeout}; it must be at most {DAY} seconds")
    if args.out is not None:
        check_file("out", args.out)
    cases = list(read_cases(args.candidates))
    if not cases:
        raise ValueError(f"candidates: {args.candidates} has no line")
    judge = open_judge(args)
    verdicts = []
    for number, case in enumerate(cases, 1):
        goal = f"{case.goal}\nThe rubric has to contain: {args.criteria}" if args.criteria else case.goal
        rewards = tournament(judge, goal, case.candidates, case.l0, args.sigma)
        longest = args.sigma * case.l0
        gated = [candidate.tokens > longest for candidate in case.candidates]
        verdicts.append({"goal": case.goal, "rewards": rewards, "too_long": gated})
        print(f"{number}/{len(cases)} {shown(rewards, gated)}  {case.goal:.60}")
        if args.out is not None:
            write(args.out, verdicts)
    rejected = sum(reward is None for verdict in verdicts for reward in verdict["rewards"])
    if rejected:
        print(f"{rejected} candidates have no verdict: the judge left out a step in every run over them")


def shown(rewards: list[float | None], gated: list[bool]) -> str:
    """The rewards of one line; * for a candidate that was too long."""
    cells = ["none" if reward is None else f"{reward:.2f}" for reward in rewards]
    return " ".join(cell + "*" * long for cell, long in zip(cells, gated))


def write(path: Path, verdicts: list[dict[str, Any]]) -> None:
    from nanok3.data.files import write_file

    write_file(path, "".join(json.dumps(verdict) + "\n" for verdict in verdicts).encode())


def open_judge(args: JudgeArgs) -> ChatJudge:
    """The judge behind the API. ValueError where no server answers."""
    from nanok3.posttrain.judge import ChatJudge, over_http, served_models

    base = args.base_url or os.environ.get("OPENAI_BASE_URL") or LOCAL
    key = args.api_key or os.environ.get("OPENAI_API_KEY", "")
    names = served_models(base, key, args.timeout)
    if args.model is not None and names and args.model not in names:
        raise ValueError(f"model is {args.model!r}; {base} has {', '.join(names)}")
    if args.model is None and not names:
        raise ValueError(f"model: {base} lists no model; name one with --model")
    return ChatJudge(over_http(base, key, args.timeout), args.model or names[0], args.max_tokens)


def read_cases(path: Path) -> Iterator[Case]:
    """The lines, checked. ValueError names the line, the field and what is allowed."""
    if not path.is_file():
        raise ValueError(f"candidates: no file {path}")
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"candidates: {path} is no UTF-8 ({error})") from None
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            yield read_case(line, f"{path}: line {number}")


def read_case(line: str, where: str) -> Case:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: no JSON: {error}") from None
    goal = row.get("goal") if isinstance(row, dict) else None
    if not isinstance(goal, str) or not goal.strip():
        raise ValueError(f"{where}: goal is {goal!r:.60}; allowed: a string that is not empty")
    given = row.get("candidates")
    if not isinstance(given, list) or len(given) < 2:
        raise ValueError(f"{where}: candidates is {given!r:.60}; allowed: a list of at least two")
    l0 = row.get("l0")
    if l0 is not None and (isinstance(l0, bool) or not isinstance(l0, int | float) or not l0 > 0):
        raise ValueError(f"{where}: l0 is {l0!r:.60}; allowed: a number above 0")
    read = [read_candidate(one, f"{where}: candidates[{k}]") for k, one in enumerate(given)]
    return Case(goal, read, math.inf if l0 is None else float(l0))


def read_candidate(given: Any, where: str) -> Candidate:
    """A text, or an object with text and tokens."""
    from nanok3.posttrain.judge import Candidate

    if isinstance(given, str):
        given = {"text": given}
    text = given.get("text") if isinstance(given, dict) else None
    if not isinstance(text, str):
        raise ValueError(f"{where} is {given!r:.60}; allowed: a string, or an object with text and tokens")
    tokens = given.get("tokens", len(text.split()))
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0:
        raise ValueError(f"{where}.tokens is {tokens!r:.60}; allowed: a number of at least 0")
    return Candidate(text, tokens)
