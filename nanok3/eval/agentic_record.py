"""What an agentic evaluation leaves: a line a task, a table, and conversations that a person can read.

    OUT/config.json        how it was played
    OUT/results.jsonl      a line for every task that has ended, written when it does
    OUT/result.json        the table and all lines; "complete" says whether every task is in it
    OUT/transcripts/       a Markdown file a task

A run that was ended, by whatever means, goes on from results.jsonl; a last line that was cut off is left out.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nanok3.data.files import write_file
from nanok3.envs.tools import Call
from nanok3.eval.agentic import Played

Row = dict[str, Any]
FREE = ("tasks", "base_url", "concurrency")
"""Settings that may change when a run goes on."""


class Folder:
    """The folder of one evaluation."""

    def __init__(self, path: Path, settings: Mapping[str, Any], resume: bool) -> None:
        """ValueError for a folder that holds another evaluation, or one that is not to go on."""
        self.path, self.settings = path, dict(settings)
        self.lines = path / "results.jsonl"
        begun = self.lines.is_file()
        if begun and not resume:
            raise ValueError(f"out: {path} holds an evaluation; add --resume, or choose another folder")
        if resume and not begun:
            raise ValueError(f"--resume: {self.lines} does not exist; there is no evaluation to go on with")
        rows = self._read() if begun else []
        self.rows: dict[str, Row] = {row["key"]: row for row in rows if row["score"] is not None}
        if begun:
            self._same()
            write_file(self.lines, "".join(_line(row) for row in self.rows.values()).encode())
        path.mkdir(parents=True, exist_ok=True)
        write_file(path / "config.json", _pretty(self.settings))

    def _read(self) -> list[Row]:
        rows = []
        for line in self.lines.read_text("utf-8", errors="replace").splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:
                continue
        return rows

    def _same(self) -> None:
        before = json.loads((self.path / "config.json").read_text("utf-8"))
        for name, value in self.settings.items():
            if name not in FREE and before.get(name) != value:
                was = before.get(name)
                raise ValueError(f"{name} is {value!r}; {self.path} was begun with {was!r}, which cannot change")

    def add(self, played: Played) -> Row:
        """Write down a task that has ended."""
        row = row_of(played)
        self.rows[row["key"]] = row
        with self.lines.open("a", encoding="utf-8") as file:
            file.write(_line(row))
        write_file(self.path / "transcripts" / f"{row['key']}.md", transcript(played).encode("utf-8", "replace"))
        return row

    def write(self, keys: Sequence[str]) -> dict[str, Any]:
        """Write result.json about the tasks of these keys, and give its content."""
        rows = [self.rows[key] for key in keys if key in self.rows]
        scored = sum(row["score"] is not None for row in rows)
        found = {"complete": scored == len(keys), "settings": self.settings, **summaries(rows), "tasks": rows}
        write_file(self.path / "result.json", _pretty(found))
        return found


def _line(row: Row) -> str:
    return json.dumps(row) + "\n"


def _pretty(value: Any) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()


def row_of(played: Played) -> Row:
    """A task's line."""
    trajectory, spent = played.trajectory, played.spent
    return {
        "key": played.job.key,
        "kind": played.job.kind,
        "task": played.job.task.id,
        "score": played.score,
        "finish": played.finish,
        "turns": len(trajectory.replies),
        "calls": trajectory.calls,
        "tool_errors": trajectory.tool_errors,
        "prompt_tokens": spent.prompt,
        "completion_tokens": spent.completion,
        "reasoning_tokens": spent.reasoning,
        "seconds": round(played.seconds, 3),
        "detail": trajectory.reason or trajectory.public,
    }


# ---------------------------------------------------------------------- the table

MEANS = ("turns", "calls", "tool_errors", "prompt_tokens", "completion_tokens", "reasoning_tokens", "seconds")


def summary(rows: Sequence[Row]) -> Row:
    """Over the tasks that have a score: accuracy is the share of full ones. Finish reasons are those of all."""
    scored = [row for row in rows if row["score"] is not None]
    n = max(len(scored), 1)
    return {
        "tasks": len(rows),
        "scored": len(scored),
        "accuracy": sum(row["score"] == 1 for row in scored) / n,
        "score": sum(row["score"] for row in scored) / n,
        **{name: sum(row[name] for row in scored) / n for name in MEANS},
        "finish": dict(Counter(row["finish"] for row in rows).most_common()),
    }


def summaries(rows: Sequence[Row]) -> dict[str, Any]:
    """Of all tasks, and of each kind."""
    kinds = dict.fromkeys(row["kind"] for row in rows)
    return {"all": summary(rows), "kinds": {kind: summary([r for r in rows if r["kind"] == kind]) for kind in kinds}}


HEAD = ("tasks", "right", "score", "turns", "calls", "errors", "read", "said", "thought", "seconds", "ended")


def cells(s: Row) -> list[str]:
    """A summary as the table's columns: means over tasks, read and said in tokens."""
    shares = [f"{s['accuracy']:.1%}", f"{s['score']:.3f}"]
    few = [f"{s[name]:.1f}" for name in ("turns", "calls", "tool_errors")]
    many = [f"{s[name]:.0f}" for name in ("prompt_tokens", "completion_tokens", "reasoning_tokens")]
    ended = ", ".join(f"{name} {count}" for name, count in s["finish"].items())
    return [str(s["tasks"]), *shares, *few, *many, f"{s['seconds']:.1f}", ended]


# ---------------------------------------------------------------------- a conversation on paper


def transcript(played: Played) -> str:
    """A task from its goal to its verdict, as Markdown."""
    trajectory, task = played.trajectory, played.job.task
    score = "none" if played.score is None else f"{played.score:g}"
    said = trajectory.reason or trajectory.public
    parts = [f"# {task.id}", f"**score {score}**, {played.finish}{f': {said}' if said else ''}", "## Goal", task.goal]
    if task.tools:
        parts.append("Tools: " + ", ".join(f"`{tool.name}`" for tool in task.tools))
    for turn, reply in enumerate(trajectory.replies):
        parts.append(f"## Turn {turn + 1}")
        parts += [_quoted(reply.thinking)] if reply.thinking else []
        parts += [reply.text] if reply.text else []
        parts += [_call(call) for call in reply.calls]
        after = trajectory.observations[turn + 1 : turn + 2]
        for result in after[0].results if after else ():
            name = f"error of {result.name}" if result.error else f"result of {result.name}"
            parts.append(f"{name}:\n\n{_block(result.content)}")
    return "\n\n".join(parts) + "\n"


def _quoted(text: str) -> str:
    return "\n".join(f"> {line}" for line in f"(thinks) {text}".split("\n"))


def _call(call: Call) -> str:
    arguments = call.arguments if isinstance(call.arguments, str) else json.dumps(dict(call.arguments))
    return f"calls `{call.name}`:\n\n{_block(arguments)}"


def _block(text: str) -> str:
    """A block that the text cannot end, and that shows it as it is."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}\n{text}\n{fence}"
