"""`nanok3 sft`: teach a model from conversations.

    nanok3 sft runs/x --data chats.jsonl --out runs/x-sft
    nanok3 sft runs/x --source exercises:2 --source docstrings --out runs/x-sft   conversations made of packages
    nanok3 sft --out runs/x-sft --resume                                  after Ctrl-C, kill -9 or a full disk
    nanok3 sft --domains general agent coding --out runs/world            a small model, from demonstrations alone

One line of the file is one conversation, `messages` as in the chat API (docs/posttrain.md). The loss is on what the
model will say: thoughts, answers, calls and the end of the message. A part of the conversations is held out, by
content, and measured by channel.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from nanok3.posttrain.sft_settings import DEFAULTS, WORLD
from nanok3.train.settings import TrainSettings

if TYPE_CHECKING:
    from nanok3.data.tokenizer import Tokenizer
    from nanok3.model.decoder import K3
    from nanok3.posttrain.sft import Lessons


@dataclass(frozen=True, kw_only=True)
class SftArgs:
    """Teach a model from conversations."""

    model: Annotated[Path | None, tyro.conf.Positional] = None
    """A run, one of its checkpoints, or a model folder. Without one a small model learns --domains from nothing."""
    out: Path = Path("runs/sft")
    """Run folder."""
    data: tyro.conf.UseAppendAction[tuple[Path, ...]] = ()
    """Conversations, .jsonl or .parquet; may be given several times."""
    source: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """NAME or NAME:WEIGHT: chat, passages, exercises, math, mbpp, docstrings, bfcl; may be given several times."""
    conversations: int | None = None
    """Of all sources together, by their weights. Not given: as many as no source has to repeat."""
    held_out: tyro.conf.UseAppendAction[tuple[Path, ...]] = ()
    """Conversations to measure on; a share of the data when not given."""
    held_out_share: float = 0.05
    """Share of the data that is measured on and not learned, by content."""
    domains: tuple[str, ...] = ()
    """Of the small world, to learn from its demonstrations: general, agent, coding."""
    demonstrations: int = 3000
    """Demonstrations of each domain."""
    mistakes: float = 0.25
    """Share of demonstrations that go wrong, so that reinforcement learning has something to do."""
    preset: str = "small"
    """Size of a model that begins from nothing: small or quick."""
    epochs: float = 3.0
    """Passes over the data, unless --train.steps or --train.minutes is given."""
    skip_long: bool = False
    """Leave out conversations that no row holds, and count them; else the first one is an error."""
    resume: bool = False
    """Go on from the newest whole checkpoint of the run folder, with the settings saved there."""
    threads: int | None = None
    """CPU threads; torch's own choice when not given."""
    device: str = "auto"
    """cpu, cuda, or auto: a GPU where there is one."""
    train: TrainSettings = field(default_factory=lambda: DEFAULTS)
    """The schedule and the optimizer; `train.qat` for quantization-aware training."""


def parse(argv: list[str]) -> SftArgs:
    """The command line over the defaults; with --resume over the settings of the run."""
    from nanok3.stages.pretrain import take_option

    default = SftArgs()
    if take_option(argv, "--domains")[0] is not None:
        default = replace(default, train=WORLD)
    if "--resume" in argv:
        default = saved(Path(take_option(argv, "--out")[0] or default.out))
    return tyro.cli(SftArgs, args=argv, prog="nanok3 sft", default=default)


def saved(out: Path) -> SftArgs:
    """The settings that a run was begun with. ValueError where there is no run, or its file is damaged."""
    import yaml

    path = out / "config.yaml"
    if not path.is_file():
        raise ValueError(f"--resume: {path} does not exist; there is no run to go on with")
    try:
        values = yaml.safe_load(path.read_text("utf-8"))["settings"]
        train = TrainSettings(**values.pop("train"))
        read = {f.name: _as_written(values[f.name], str(f.type)) for f in fields(SftArgs) if f.name in values}
    except (yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"--resume: {path} holds no settings of nanok3 sft ({error})") from None
    return SftArgs(**read, out=out, train=train)


def _as_written(value: Any, annotation: str) -> Any:
    if isinstance(value, list):
        return tuple(map(Path, value)) if "Path" in annotation else tuple(value)
    return Path(value) if "Path" in annotation and value is not None else value


def plain(args: SftArgs) -> dict[str, Any]:
    """The settings as YAML can hold them."""
    values = asdict(args)
    for name in ("resume", "out"):
        values.pop(name)
    values["model"] = None if args.model is None else str(args.model)
    for name in ("data", "held_out"):
        values[name] = [str(path) for path in values[name]]
    return values | {"domains": list(args.domains), "source": list(args.source)}


def main(args: SftArgs) -> None:
    """Teach; KeyboardInterrupt, after saving, for Ctrl-C."""
    import torch

    from nanok3.data.files import only_one
    from nanok3.posttrain.sft import describe, finish, trainer_for, write_config
    from nanok3.train.machine import choose_device, choose_precision, keep_freed_memory

    keep_freed_memory()
    if args.threads is not None:
        if not 1 <= args.threads <= 1024:
            raise ValueError(f"threads is {args.threads}; it must lie between 1 and 1024")
        torch.set_num_threads(args.threads)
    check(args)
    device = choose_device(args.device)
    precision = str(choose_precision(args.train.precision, device)).removeprefix("torch.")
    args = replace(args, train=replace(args.train, precision=precision))
    with only_one(args.out):
        model, tokenizer, taught = open_all(args)
        model.to(device)
        trainer = trainer_for(model, tokenizer, taught, args.train, args.out, print, args.epochs, args.resume)
        write_config(args.out, trainer.model, plain(args))
        print(describe(taught, trainer))
        if not trainer.fit():
            raise KeyboardInterrupt
        folder = finish(trainer, tokenizer, taught.sentences)
    print(f"model: {folder}\nreport: {args.out / 'report.html'}\ntalk to it: nanok3 chat {args.out}")


def check(args: SftArgs) -> None:
    """ValueError for flags that do not fit together."""
    if bool(args.data or args.source) == bool(args.domains):
        raise ValueError("give either --data FILE, --source NAME or both, or --domains NAME ...")
    if (args.data or args.source) and args.model is None:
        raise ValueError("--data and --source need a model to teach: nanok3 sft RUN --data FILE --out OUT")
    if args.conversations is not None and (args.conversations < 1 or not args.source):
        raise ValueError(f"conversations is {args.conversations}; it must be at least 1, and needs --source")
    if args.domains and args.model is not None:
        raise ValueError("--domains teaches a new model; leave RUN out")
    if not 0 <= args.held_out_share < 1:
        raise ValueError(f"held_out_share is {args.held_out_share}; it must lie in [0, 1)")
    if args.demonstrations < 1:
        raise ValueError(f"demonstrations is {args.demonstrations}; it must be at least 1")


def open_all(args: SftArgs) -> tuple[K3, Tokenizer, Lessons]:
    """The model to teach, its tokenizer, and what it is taught."""
    import torch

    from nanok3.data.chat import Sentences
    from nanok3.model.decoder import K3
    from nanok3.posttrain.conversations import read_conversations
    from nanok3.posttrain.domains import small_model, small_tokenizer
    from nanok3.posttrain.sft import is_held_out, lessons, world_lessons
    from nanok3.serve.run_folder import open_model

    seq_len, seed = args.train.seq_len, args.train.seed
    if args.model is None:
        taught = world_lessons(args.domains, args.demonstrations, args.mistakes, seed, seq_len)
        torch.manual_seed(seed)
        return K3(small_model(args.preset)), small_tokenizer(), taught
    opened = open_model(args.model, "float32", "cpu")
    rows = [row for path in args.data for row in read_conversations(path)]
    if args.held_out:
        held_out = [row for path in args.held_out for row in read_conversations(path)]
    else:
        held_out = [row for row in rows if is_held_out(row, args.held_out_share)]
        rows = [row for row in rows if not is_held_out(row, args.held_out_share)]
    if args.source:
        from nanok3.posttrain.sources import mixture

        learned, measured = mixture(args.source, args.conversations, args.held_out_share, seed)
        rows, held_out = rows + learned, held_out + measured
    sentences = Sentences.of(opened.folder)
    taught = lessons(rows, held_out, opened.tokenizer, seq_len, sentences, args.skip_long)
    return opened.model, opened.tokenizer, taught
