"""`nanok3 demo`: the whole road on real text and drawn pictures, in about twelve minutes on two cores.

    tokenizer    learn 4096 pieces from plays, conversations, code and exercises
    data         split, deduplicate, encode; draw pictures with captions and questions
    pretrain     a small K3: KDA, gated MLA, attention residuals, LatentMoE with Quantile Balancing, per-head Muon,
                 and a vision tower that learns with the text from the first step
    eval         bits per byte on text it has not seen, beside zlib and xz; a recall probe; questions on pictures it
                 has not seen, beside the same questions without the picture
    generate     three samples
    chat         it continues what you type; or, with --serve, a page in the browser and an API for OpenAI's clients

With --no-pictures all of the time goes to text, and the model has no tower.

Each step is a command that can be run by hand; the demo prints it, says how long it will take, and reuses what an
earlier run has finished. An interrupted training goes on where it stopped.
"""

from __future__ import annotations

import base64
import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

MODEL = ("--preset", "vision-tiny")
"""With the preset's recipe (`RECIPES` in stages/pretrain.py)."""
BLIND_MODEL = ("--preset", "small", "--depth", "4")
"""The same without a tower."""
ROWS = ("--train.batch-size", "4", "--train.seq-len", "512")
RATES = ("--train.lr", "1.5e-2", "--train.adam-lr-scale", "0.6", "--train.final-lr-fraction", "0.03")
PACE = ("--train.eval-every", "200", "--train.sample-every", "400", "--train.save-every", "400")
"""The model of the demo and how it is trained, found by measurement: docs/log.md has the search."""
PICTURES = ("--pictures", "0.15", "--picture-kinds", "forms", "silhouettes", "tiles", "letters")
"""What can be learned in the time: shapes in cells, and words with a letter a cell. The recipe of vision-tiny begins
with little else than pictures, when the tower learns to see, and goes on with 15 in 100 (docs/vision.md)."""
PICTURE_DOCUMENTS = 60_000
PICTURE_FILE = "picture.png"
PROMPTS = ("**HAMLET**\n", "A: hi, how are you?\nB:", "def add(a, b):\n")
PROMPTS_FILE = "prompts.jsonl"


@dataclass(frozen=True)
class DemoArgs:
    """Everything from raw text and pictures to a model you can talk to."""

    out: Path | None = None
    """Folder for everything the demo makes, runs/demo or runs/demo-quick when not given; delete it to start over."""
    quick: bool = False
    """Little training, two minutes in all, to see that everything works."""
    pictures: bool = True
    """Learn from text and pictures together; --no-pictures: from text alone."""
    minutes: float | None = None
    """Minutes of training; 9.5 when not given (0.6 with --quick)."""
    threads: int | None = None
    """CPU threads; all cores when not given."""
    chat: bool = True
    """End with an interactive prompt where there is a terminal."""
    serve: bool = False
    """End with the chat page instead."""
    port: int = 8000
    """Where the page is."""


@dataclass(frozen=True)
class Step:
    """One command of the road: what it does, how long it takes, what shows that it is finished."""

    does: str
    seconds: int | float
    command: list[str]
    done: Callable[[], bool]


def main(args: DemoArgs) -> None:
    """Run the steps that are not finished yet, then show what came out."""
    from rich.console import Console

    console = Console(highlight=False)
    start = time.monotonic()
    if args.out is None:
        args = replace(args, out=Path("runs/demo-quick" if args.quick else "runs/demo"))
    assert args.out is not None
    args.out.mkdir(parents=True, exist_ok=True)
    prompts = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS)
    (args.out / PROMPTS_FILE).write_text(prompts, encoding="utf-8")
    steps = road(args)
    left = sum(step.seconds for step in steps if not step.done())
    console.print(
        f"[bold]nanok3 demo[/bold]: {len(steps)} steps, about {_minutes(left)}; everything goes to {args.out}"
    )
    for number, step in enumerate(steps, 1):
        console.print(f"\n[bold]{number}/{len(steps)} {step.does}[/bold]")
        if step.done():
            console.print(f"finished by an earlier run; delete {args.out} to start over", style="dim")
            continue
        console.print(f"$ nanok3 {shlex.join(step.command)}    (about {_minutes(step.seconds)})", style="cyan")
        began = time.monotonic()
        status = _run(step.command)
        if status:
            console.print(f"stopped with status {status}; the same command goes on from here", style="yellow")
            raise SystemExit(status)
        console.print(f"done in {_minutes(time.monotonic() - began)}", style="dim")
    console.print(
        f"\n[bold]Finished in {_minutes(time.monotonic() - start)}.[/bold] Report: {args.out}/run/report.html"
    )
    _talk(args, console)


def _talk(args: DemoArgs, console: Console) -> None:
    """What one can do with the model now; one of it at once."""
    called = sys.argv[0] if Path(sys.argv[0]).name == "nanok3" else "python -m nanok3"
    chat = ["chat", f"{args.out}/run"]
    picture = example_picture(args.out) if args.out is not None else None
    serve = ["serve", f"{args.out}/run", *(["--port", str(args.port)] if args.port != 8000 else [])]
    console.print(f"Talk to it here:        {called} {shlex.join(chat)}")
    if picture is not None:
        console.print(f"and show it a picture:  /image {picture}    and then:  /ask Which shape?")
    console.print(f"or in the browser:      {called} {shlex.join(serve)}    then open http://127.0.0.1:{args.port}/")
    if args.serve:
        _run(serve)
    elif args.chat and sys.stdin.isatty():
        _run(chat)


def example_picture(out: Path) -> Path | None:
    """A held-out picture that the model was asked about, as a file to show it; None where it was asked about none."""
    path = out / "run" / "final.json"
    final = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    examples = final.get("pictures", {}).get("examples", [])
    if not examples:
        return None
    (out / PICTURE_FILE).write_bytes(base64.b64decode(examples[0]["png"]))
    return out / PICTURE_FILE


def road(args: DemoArgs) -> list[Step]:
    """The steps as commands."""
    out = args.out or Path("runs/demo")
    run, data, tokenizer = out / "run", out / "data", out / "tokenizer"
    minutes = args.minutes or (0.6 if args.quick else 9.5)
    threads = ["--threads", str(args.threads)] if args.threads is not None else []
    learn = ["--max-bytes", "3000000"] if args.quick else []
    sample = ["--bytes", "50000"] if args.quick else []
    draw: list[str] = []
    model: tuple[str, ...] = (*BLIND_MODEL, *RATES)
    if args.pictures:
        draw = [*PICTURES, "--picture-documents", str(2000 if args.quick else PICTURE_DOCUMENTS)]
        # Half a minute is too short to see anything, with a lead or without one.
        model = (*MODEL, "--train.picture-lead", "0") if args.quick else MODEL
        sample += ["--picture-questions", "20"] if args.quick else []
    train = ["pretrain", "--data", str(data), "--out", str(run), "--no-evaluate", "--no-rules"]
    train += [*model, *ROWS, *PACE]
    train += ["--train.minutes", f"{minutes:g}", *threads]
    if (run / "config.yaml").exists():
        train = ["pretrain", "--out", str(run), "--resume", *threads]
    samples = ["generate", str(run), "--max-tokens", "80", "--temperature", "0.8", "--seed", "1", *threads]
    return [
        Step(
            "Fetch real text and learn a tokenizer from it",
            12 if args.quick else 20,
            ["tokenizer", "--out", str(tokenizer), *learn],
            (tokenizer / "tiktoken.model").exists,
        ),
        Step(
            "Split, deduplicate and encode the text" + (", and draw pictures" if args.pictures else ""),
            18 if args.quick or not args.pictures else 45,
            ["data", "--tokenizer", str(tokenizer), "--out", str(data), *draw],
            (data / "manifest.json").exists,
        ),
        Step("Train a small K3 on it", 60 * minutes + 10, train, (run / "model" / "config.json").exists),
        Step(
            "Measure what it learned, on what it has not seen",
            24 if args.quick else 40,
            ["eval", str(run), "--data", str(data), *sample, *threads],
            (run / "final.json").exists,
        ),
        Step("Let it continue three texts", 10, [*samples, "--prompts-file", str(out / PROMPTS_FILE)], lambda: False),
    ]


def _run(command: list[str]) -> int:
    """One command in a process of its own; its exit status. Ctrl-C reaches the command, which saves and ends."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = subprocess.Popen([sys.executable, "-m", "nanok3", *command], preexec_fn=_interruptible)
        return process.wait()
    finally:
        signal.signal(signal.SIGINT, before)


def _interruptible() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.1f} min"
