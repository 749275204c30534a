"""`nanok3 COMMAND`: each command is one file in stages/, a dataclass of arguments and a `main`.

Only the command that runs is imported, so that `--help` answers at once. A user's mistake is a ValueError with the
field and the value; it is printed without a traceback and ends with status 2, and so is what the system refuses (a
full disk, a missing optional package).
"""

from __future__ import annotations

import importlib
import io
import os
import sys
from typing import NamedTuple

import nanok3


class Command(NamedTuple):
    """Stage module, its dataclass of arguments, and one line of help."""

    module: str
    arguments: str
    help: str


COMMANDS = {
    "demo": Command("demo", "DemoArgs", "real text, tokenizer, training, evaluation, report, chat: the whole road"),
    "data": Command("data", "DataArgs", "fetch, clean, split and tokenize text"),
    "tokenizer": Command("tokenizer", "TokenizerArgs", "train a tokenizer, or show how one cuts a text"),
    "pretrain": Command("pretrain", "PretrainArgs", "train a K3 on prepared data"),
    "sft": Command("sft", "SftArgs", "teach a model from conversations"),
    "rl": Command("rl", "RLArgs", "train an expert of one domain and effort by its rewards"),
    "distill": Command("distill", "DistillArgs", "many experts into one student"),
    "posttrain": Command("posttrain", "PosttrainArgs", "a small world: SFT, experts, one student, a report"),
    "draft": Command("draft", "DraftArgs", "train a draft that makes serving a model faster"),
    "envs": Command("envs", "EnvsArgs", "what a model can act in: list the tasks, play one"),
    "eval": Command("eval", "EvalArgs", "bits per byte beside zlib and xz, and a recall probe"),
    "agentic": Command("agentic", "AgenticArgs", "a model behind an OpenAI-compatible API plays environments"),
    "judge": Command("judge", "JudgeArgs", "compare candidate answers with a model as the judge"),
    "generate": Command("generate", "GenerateArgs", "continue one prompt or a file of them"),
    "chat": Command("chat", "ChatArgs", "talk to a model in the terminal"),
    "serve": Command("serve", "ServeArgs", "a model behind an HTTP API that OpenAI's clients use"),
    "quantize": Command("quantize", "QuantizeArgs", "round the routed experts to four bits, and what that costs"),
    "export": Command("export", "ExportArgs", "write a model into a GGUF file for llama.cpp"),
    "inspect": Command("inspect", "InspectArgs", "what a config is made of: layers, parameters, bytes, FLOPs"),
    "plan": Command("plan", "PlanArgs", "what training or serving a config needs, and what would fit"),
    "doctor": Command("doctor", "DoctorArgs", "this machine: what runs on what, proof that it is exact, how fast"),
    "bench": Command("bench", "BenchArgs", "measure side by side with torch and with other programs"),
}


BRIEF_WAIT = {"GOMP_SPINCOUNT": "5000", "KMP_BLOCKTIME": "1"}
"""Read by OpenMP (GNU's and LLVM's) when torch loads: a thread that waits spins about as long as it takes to wake one,
and then sleeps. A step of the demo's model takes 0.18 s with two threads so, and 0.31 where they sleep at once, since
small kernels are over before the second is awake; beside two busy processes 0.57 and 0.34. Spinning for long, the
libraries' own choice, may take ten times as long there."""


def main(argv: list[str] | None = None) -> int:
    """Run one command; the exit status is 0, 2 for a user's mistake, 130 for Ctrl-C."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        return _run(argv)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `nanok3 ... | head` closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except (ValueError, OSError, ImportError) as error:
        print(f"nanok3 {argv[0] if argv else ''}: {error}", file=sys.stderr)
        return 2


def _run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_overview(), flush=True)
        return 0
    if argv[0] in ("-V", "--version"):
        print(f"nanok3 {nanok3.__version__}")
        return 0
    if argv[0] not in COMMANDS:
        print(f"nanok3: unknown command {argv[0]!r}\n\n{_overview()}", file=sys.stderr)
        return 2
    command = COMMANDS[argv[0]]
    if "OMP_WAIT_POLICY" not in os.environ:
        for name, value in BRIEF_WAIT.items():
            os.environ.setdefault(name, value)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # progress is seen at once, in a file or a pipe as well
    stage = importlib.import_module(f"nanok3.stages.{command.module}")
    import tyro

    parse = getattr(stage, "parse", None)  # a stage whose defaults come from a file reads its own command line
    if parse is not None:
        arguments = parse(argv[1:])
    else:
        arguments = tyro.cli(getattr(stage, command.arguments), args=argv[1:], prog=f"nanok3 {argv[0]}")
    stage.main(arguments)
    return 0


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {command.help}" for name, command in COMMANDS.items()]
    return "\n".join(["usage: nanok3 COMMAND [--help]", "", *lines])


if __name__ == "__main__":
    sys.exit(main())
