"""The docs name real things: files, tests, functions, commands. Each check is also shown a text with a wrong name."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import importlib
import inspect
import io
import re
import shlex
import typing
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tyro

from nanok3.cli import COMMANDS

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "nanok3"
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FIDELITY = ROOT / "docs" / "fidelity.md"
BASES = (ROOT, PACKAGE, ROOT / "docs")
"""Where a path in a doc may begin; `data/plan.py` is short for nanok3/data/plan.py."""

FILE = re.compile(r"(?<![\w./:-])(?!llama\.cpp\b)(?:[\w.-]+/)*\w[\w-]*\.(?:py|md|cpp|h|css)\b(?!\()")
FOLDER = re.compile(r"(?<![\w./-])(?:nanok3|tests|docs|bench|examples)/(?:[\w.-]+/)*(?![\w.*{-])")
LINK = re.compile(r"\]\((?!\w+:)([^)#]+)")
TEST = re.compile(r"(tests/[\w/]+\.py)::(\w+)")
FOLDERS = "config|ledger|capacity|cli|ops|baselines|data|envs|model|kernels|posttrain|quant|train|serve|eval|stages"
SYMBOL = re.compile(rf"`(?!config\.(?:json|yaml)`)((?:{FOLDERS})(?:\.\w+)+)(?:\(\))?`")
CALL = re.compile(r"^(?:\S*/)?(?:python3? -m )?nanok3(?:\s+(?P<words>.*))?$")


# ---------------------------------------------------------------------- files


def missing_files(text: str, folder: Path) -> list[str]:
    """Paths and links of a text that lead nowhere. A bare file name may lie anywhere in the repository."""
    wrong = [link for link in LINK.findall(text) if not (folder / link).exists()]
    text = re.sub(r"\w+://\S+", "", LINK.sub("]", text))
    for name in sorted({*FILE.findall(text), *FOLDER.findall(text)}):
        found = any((base / name).exists() for base in BASES) if "/" in name else name in file_names()
        if not found:
            wrong.append(name)
    return wrong


@functools.cache
def file_names() -> set[str]:
    folders = (PACKAGE, ROOT / "tests", ROOT / "docs")
    return {path.name for folder in folders for path in folder.rglob("*.*")} | {path.name for path in ROOT.glob("*.*")}


@pytest.mark.parametrize("doc", DOCS, ids=lambda path: path.name)
def test_every_file_exists(doc):
    said_to_exist, _, _ = doc.read_text().partition("\n## Not built yet\n")
    assert missing_files(said_to_exist, doc.parent) == []


def test_a_missing_file_is_seen():
    bad = "See nanok3/model/kda.py, `model/kdaa.py`, `kda.py` and `kdb.py`, [x](notes.md), nanok3/modell/, tests/."
    assert missing_files(bad, ROOT) == ["notes.md", "kdb.py", "model/kdaa.py", "nanok3/modell/"]
    assert missing_files("https://example.org/nanok3/none.py and [a](https://example.org/b.md)", ROOT) == []


# ---------------------------------------------------------------------- tests and symbols


@functools.cache
def defined(path: Path) -> dict[str, set[str]]:
    """Names at the top of a module; for a class the names inside it, instance attributes included."""
    names: dict[str, set[str]] = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            names[node.name] = {name for inner in node.body for name in bound(inner)}
            names[node.name] |= {
                n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)
            }
        else:
            names |= {name: set() for name in bound(node)}
    return names


def bound(node: ast.stmt) -> list[str]:
    """What a statement gives a name to."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    parts = (part for target in targets for part in getattr(target, "elts", [target]))
    return [part.id for part in parts if isinstance(part, ast.Name)]


def missing_tests(text: str) -> list[str]:
    """`tests/x.py::name` of a text that no test file defines."""
    return [
        f"{path}::{name}"
        for path, name in TEST.findall(text)
        if not (ROOT / path).exists() or name not in defined(ROOT / path) or not name.startswith("test_")
    ]


def missing_symbols(text: str) -> list[str]:
    """`package.module.name` in backticks that the source does not define; read, not imported."""
    return [dotted for dotted in SYMBOL.findall(text) if not exists(dotted.split("."))]


def exists(parts: list[str]) -> bool:
    """Whether folders, then a module, then at most a name and a name in that class lead to something."""
    path = PACKAGE
    while parts and (path / parts[0]).is_dir():
        path, parts = path / parts[0], parts[1:]
    module, name, member = [*parts, *[None] * 3][:3]
    if module is None:
        return True
    if len(parts) > 3 or not (path / f"{module}.py").exists():
        return False
    known = defined(path / f"{module}.py")
    return name is None or (name in known and (member is None or member in known[name]))


@pytest.mark.parametrize("doc", DOCS, ids=lambda path: path.name)
def test_every_test_and_symbol_exists(doc):
    assert missing_tests(doc.read_text()) == []
    assert missing_symbols(doc.read_text()) == []


def test_a_missing_test_or_symbol_is_seen():
    good = "tests/test_docs.py::test_a_missing_file_is_seen `model.kda.kda` `config.K3Config.at_depth` `train.muon`"
    good += " `model.kda.KDA.forward` `train.loop.Trainer.optimizer` `official.MXFP4_BLOCK`"
    good += " `train.settings.TrainSettings.lr`"
    assert missing_tests(good) == missing_symbols(good) == []
    for bad in ("tests/test_docs.py::test_nothing", "tests/test_none.py::test_a", "tests/test_docs.py::defined"):
        assert missing_tests(f"{good} {bad}") == [bad]
    for bad in ("model.kda.kdb", "model.kdb.kda", "config.K3Config.width", "train.loop.Trainer.optimiser", "model.x"):
        assert missing_symbols(f"{good} `{bad}`") == [bad]


# ---------------------------------------------------------------------- commands


def code_lines(text: str) -> Iterator[str]:
    """Lines of fenced blocks, continued lines joined, and code spans outside of them."""
    for block in re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        yield from re.sub(r"\s*\\\n\s*", " ", block).splitlines()
    yield from re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))


def calls(text: str) -> Iterator[list[str]]:
    """The words after `nanok3` of every command; what follows two blanks or ` #` is a remark."""
    for line in code_lines(text):
        for part in re.split(r"\s\||&&|;", re.split(r"\s{2,}|\s#", line.strip())[0]):
            call = CALL.match(part.strip())
            if call and call["words"]:
                yield shlex.split(re.sub(r"\s>.*", "", call["words"]))


def flags_of(record: type, prefix: str = "--") -> set[str]:
    """The flags tyro makes of a dataclass: dashes for underscores, `--no-` for what is true or false, a dot for a
    dataclass inside; positional fields have none."""
    flags: set[str] = set()
    for name, hint in typing.get_type_hints(record, include_extras=True).items():
        dashed = name.replace("_", "-")
        if dataclasses.is_dataclass(hint):
            flags |= flags_of(typing.cast(type, hint), f"{prefix}{dashed}.")
        elif tyro.conf.Positional not in getattr(hint, "__metadata__", ()):
            flags |= {prefix + dashed} | ({f"{prefix}no-{dashed}"} if hint is bool else set())
    return flags


def flags_before_tyro(parse: Callable[..., object]) -> set[str]:
    """What a stage that reads its own command line takes out of it first: `take_option(argv, "--config")`."""
    taken = [node for node in ast.walk(ast.parse(inspect.getsource(parse))) if isinstance(node, ast.Call)]
    names = [call.args[1] for call in taken if getattr(call.func, "id", "") == "take_option" and len(call.args) == 2]
    return {node.value for node in names if isinstance(node, ast.Constant)}


def wrong_calls(text: str) -> list[str]:
    """What is wrong with the commands of a text: an unknown command, an unknown flag, or words that do not parse."""
    wrong = []
    for words in calls(text):
        name, *rest = words
        if name in COMMANDS:
            wrong += [f"nanok3 {name}: {problem}" for problem in wrong_words(COMMANDS[name], rest)]
        elif words not in (["--help"], ["--version"]):
            wrong.append(f"nanok3 {name}: no such command")
    return wrong


def wrong_words(command, words: list[str]) -> list[str]:
    stage = importlib.import_module(f"nanok3.stages.{command.module}")
    record = getattr(stage, command.arguments)
    taken = flags_before_tyro(stage.parse) if hasattr(stage, "parse") else set()
    flags = flags_of(record) | taken | {"--help"}
    unknown = [word for word in words if word.startswith("--") and word.split("=")[0] not in flags]
    if unknown or "--help" in words:
        return [f"no such flag {word}" for word in unknown]
    for flag in taken & set(words) - flags_of(record):
        at = words.index(flag)
        words = words[:at] + words[at + 2 :]
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            tyro.cli(record, args=words)
    except SystemExit:
        return [f"{shlex.join(words)} does not parse"]
    return []


@pytest.mark.parametrize("doc", DOCS, ids=lambda path: path.name)
def test_every_command_parses(doc):
    assert wrong_calls(doc.read_text()) == []


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_of_a_stages_docstring_parses(command):
    docstring = importlib.import_module(f"nanok3.stages.{COMMANDS[command].module}").__doc__
    assert wrong_calls(f"```\n{docstring}\n```\n") == []


def test_commands_are_found_in_blocks_and_spans():
    text = "```\nnanok3 chat runs/x   talk to it\n$ cd x; .venv/bin/nanok3 inspect k3 \\\n  --json | head\n```\n"
    text += "`python -m nanok3 plan k3 --serve  # big` and nanok3 in prose, `nanok3.load(x)`, `nanok3/model/`\n"
    assert list(calls(text)) == [["chat", "runs/x"], ["inspect", "k3", "--json"], ["plan", "k3", "--serve"]]


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("serv", "nanok3 serv: no such command"),
        ("pretrain --train.step 3", "nanok3 pretrain: no such flag --train.step"),
        ("pretrain --train.batch_size 3", "nanok3 pretrain: no such flag --train.batch_size"),
        ("pretrain --batch-size 3", "nanok3 pretrain: no such flag --batch-size"),
        ("pretrain --train.no-lr", "nanok3 pretrain: no such flag --train.no-lr"),
        ("inspect --config k3", "nanok3 inspect: no such flag --config"),
        ("pretrain --train.steps many", "nanok3 pretrain: --train.steps many does not parse"),
        ("plan k3 --precision int3", "nanok3 plan: k3 --precision int3 does not parse"),
        ("generate --seed 1", "nanok3 generate: --seed 1 does not parse"),
    ],
)
def test_a_wrong_command_is_seen(command, problem):
    right = "nanok3 pretrain --config run.yaml --train.lr 2e-3 --train.no-balance --set hidden_size=64 --resume"
    assert wrong_calls(f"```\n{right}\n```\n") == []
    assert wrong_calls(f"```\n{right}\nnanok3 {command}    a remark\n```\n") == [problem]
    assert wrong_calls(f"Type `nanok3 {command}`.") == [problem]


def missing_targets(text: str) -> list[str]:
    """`make x` in code for which the Makefile has no x."""
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    asked = [target for line in code_lines(text) for target in re.findall(r"^(?:\$ )?make ([\w-]+)", line)]
    return [target for target in asked if target not in targets]


@pytest.mark.parametrize("doc", DOCS, ids=lambda path: path.name)
def test_every_make_target_exists(doc):
    assert missing_targets(doc.read_text()) == []
    assert missing_targets("```\nmake demo\nmake tea   hot\n```") == ["tea"]


# ---------------------------------------------------------------------- fidelity.md


def tables(text: str) -> Iterator[list[dict[str, str]]]:
    """The rows of each table, by the column names of its head."""
    for block in re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE):
        head, _, *rows = ([cell.strip() for cell in line.strip("|\n").split("|")] for line in block.splitlines())
        yield [dict(zip(head, row, strict=True)) for row in rows]


def wrong_rows(text: str) -> list[str]:
    """Claims of an unknown kind, and claims that name no test and do not say so."""
    wrong = []
    for row in (row for table in tables(text) for row in table):
        if "kind" in row and row["kind"] not in ("evidence", "derived", "ours"):
            wrong.append(f"{row['claim']}: kind {row['kind']!r}")
        if "test" in row and not TEST.search(row["test"]) and "none" not in row["test"]:
            wrong.append(f"{next(iter(row.values()))}: no test, and not said")
    return wrong


def numbers(text: str, letter: str) -> list[int]:
    return sorted(int(n) for n in re.findall(rf"^\| {letter}(\d+) \|", text, re.MULTILINE))


def test_every_claim_has_a_kind_and_a_test_or_says_that_it_has_none():
    assert wrong_rows(FIDELITY.read_text()) == []
    bad = "| claim | kind | test |\n|---|---|---|\n| a | rumour | tests/x.py::test_y |\n| b | ours | - |\n"
    assert wrong_rows(bad) == ["a: kind 'rumour'", "b: no test, and not said"]


def test_disagreements_and_known_mistakes_are_complete():
    text = FIDELITY.read_text()
    assert numbers(text, "D") == [*range(1, 20)]
    assert numbers(text, "M") == [*range(1, 43)]
    assert numbers(text, "B") == [*range(1, 40)]


@pytest.mark.parametrize(("word", "letter"), [("item", "M"), ("report", "B")])
def test_known_mistakes_and_reports_name_every_test_that_bears_their_number(word, letter):
    cells = {row["#"]: row["test"] for table in tables(FIDELITY.read_text()) for row in table if "#" in row}
    named = re.compile(rf"^(?:async )?def (test_{word}_(\d+)_\w+)", re.MULTILINE)
    found = [name for path in (ROOT / "tests").rglob("test_*.py") for name in named.findall(path.read_text())]
    assert len(found) > 20
    assert [name for name, number in found if name not in cells[f"{letter}{int(number)}"]] == []


def test_every_mechanism_has_a_row():
    text = FIDELITY.read_text()
    modules = [path.stem for path in (PACKAGE / "model").glob("*.py") if path.stem != "__init__"]
    assert [module for module in modules if f"`model.{module}." not in text] == []


def test_what_is_said_not_to_exist_does_not():
    """The last table of fidelity.md: a row whose file has come belongs into a table above."""
    planned = [
        row["planned place"] for table in tables(FIDELITY.read_text()) for row in table if "planned place" in row
    ]
    assert len(planned) > 5
    places = [place for cell in planned for place in re.findall(r"[\w/]+(?:\.py|/)", cell)]
    assert [place for place in places if (PACKAGE / place).exists()] == []


# ---------------------------------------------------------------------- tour.md


def test_every_folder_of_the_package_has_its_line():
    text = (ROOT / "docs" / "tour.md").read_text()
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert len(folders) > 5 and [name for name in sorted(folders) if f"\n- `nanok3/{name}/` " not in text] == []
