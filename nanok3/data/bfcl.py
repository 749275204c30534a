"""The Berkeley function-calling leaderboard's package: tools as JSON schemas, and its conversations of several turns.

    scenario = what the user says, turn by turn + the simulators' start + the calls that a right answer makes in each

The package is read as the archive it is, never installed or imported; what is code in it is handed out as text
(`simulator_files`) for a sandbox. Calls of the ground truth are written as Python, and are read as syntax.

Source: bfcl-eval 2026.3.23 (Apache-2.0).
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from nanok3.data.packages import Package, fetch

BFCL = Package("bfcl-eval", "2026.3.23", "3bb6dfa5f0c68ad403c9ec50b00db2bb3b4cc9b38ab1ff33f48fe30d853d3a0a")
CATEGORIES = ("base", "miss_param", "long_context")
"""Of the conversations of several turns; in a fourth the tools change on the way."""
SIMULATORS = {
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TwitterAPI": "posting_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "VehicleControlAPI": "vehicle_control",
}
"""Class -> its module, and the file that describes its functions."""
STATELESS = ("MathAPI",)
"""Nothing is loaded into these."""
SOURCES = "bfcl_eval/eval_checker/multi_turn_eval/func_source_code"
MPMATH = "mpmath"
"""The one package that the simulators need beside Python's own."""

_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}


def schema_of(given: Any) -> Any:
    """A schema with JSON's names of types in the place of Python's."""
    if isinstance(given, list):
        return [schema_of(each) for each in given]
    if not isinstance(given, Mapping):
        return given
    made = {name: schema_of(value) for name, value in given.items()}
    kind = made.get("type")
    return made | {"type": _TYPES.get(kind, kind)} if isinstance(kind, str) else made


def json_lines(wheel: ZipFile, path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in wheel.read(path).splitlines() if line.strip()]


@dataclass(frozen=True)
class Scenario:
    """One conversation. `truth` are calls (name, arguments) by turn, `functions` the descriptions of what there is."""

    id: str
    questions: tuple[str, ...]
    classes: tuple[str, ...]
    start: Mapping[str, Any]
    functions: tuple[dict[str, Any], ...]
    truth: tuple[tuple[tuple[str, dict[str, Any]], ...], ...]


def call_of(text: str, functions: Mapping[str, Mapping[str, Any]]) -> tuple[str, dict[str, Any]]:
    """`f(1, x='a')` as a name and arguments by their names. ValueError for what is no such call."""
    call = ast.parse(text.strip(), mode="eval").body
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.id not in functions:
        raise ValueError(f"{text!r} is no call of {', '.join(functions)}")
    names = list(functions[call.func.id]["parameters"]["properties"])
    given = {name: ast.literal_eval(value) for name, value in zip(names, call.args)}
    given |= {word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg}
    return call.func.id, given


def scenarios(category: str, cache: Path | None = None) -> Iterator[Scenario]:
    """All of a category, in the order of the set. Fetches the package where it is not here."""
    name = f"BFCL_v4_multi_turn_{category}.json"
    with ZipFile(fetch(BFCL, cache)) as wheel:
        truths = {one["id"]: one["ground_truth"] for one in json_lines(wheel, f"bfcl_eval/data/possible_answer/{name}")}
        described = {
            simulator: json_lines(wheel, f"bfcl_eval/data/multi_turn_func_doc/{module}.json")
            for simulator, module in SIMULATORS.items()
        }
        records = json_lines(wheel, f"bfcl_eval/data/{name}")
    for record in records:
        known = {one["name"]: one for each in record["involved_classes"] for one in described[each]}
        left_out = record.get("excluded_function", ())
        yield Scenario(
            record["id"],
            tuple("\n".join(message["content"] for message in turn) for turn in record["question"]),
            tuple(record["involved_classes"]),
            record["initial_config"],
            tuple(one for one in known.values() if one["name"] not in left_out),
            tuple(tuple(call_of(call, known) for call in turn) for turn in truths[record["id"]]),
        )


def simulator_files(cache: Path | None = None) -> dict[str, bytes]:
    """The simulators' sources by their paths, under packages that are empty otherwise."""
    names = [*SIMULATORS.values(), "long_context"]
    with ZipFile(fetch(BFCL, cache)) as wheel:
        files = {f"{SOURCES}/{name}.py": wheel.read(f"{SOURCES}/{name}.py") for name in names}
    parts = SOURCES.split("/")
    return files | {"/".join([*parts[:depth], "__init__.py"]): b"" for depth in range(1, len(parts) + 1)}
