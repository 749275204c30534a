"""`nanok3 pretrain`: train a K3 from scratch on prepared data.

    nanok3 pretrain --data runs/data --out runs/first --preset small --train.minutes 10
    nanok3 pretrain --out runs/first --resume          go on after Ctrl-C, kill -9 or a full disk
    nanok3 pretrain --config run.yaml --train.lr 2e-3  preset < YAML file < flags

The run folder holds config.yaml (what was really used), metrics.jsonl, checkpoints/, report.html and, at the end,
model/ in the official layout with its tokenizer.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import sys
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanok3.config import K3Config
from nanok3.train.settings import TrainSettings

if TYPE_CHECKING:
    from nanok3.data.loader import Span
    from nanok3.data.prepared import Prepared
    from nanok3.model.decoder import K3
    from nanok3.train.loop import Trainer


SEEING: dict[str, Any] = {"minutes": 30.0, "batch_size": 4}
SEEING |= {"lr": 5e-3, "vision_lr_scale": 0.25, "vision_optimizer": "muon"}
GLANCE: dict[str, Any] = {"batch_size": 4, "lr": 6e-3, "adam_lr_scale": 0.6, "final_lr_fraction": 0.03}
GLANCE |= {"vision_lr_scale": 0.28, "vision_optimizer": "muon", "picture_lead": 0.33}
RECIPES: dict[str, dict[str, Any]] = {"vision-small": SEEING, "vision-tiny": GLANCE}
"""How a preset is trained unless flags say otherwise, found by measurement (docs/vision.md)."""


@dataclass(frozen=True)
class PretrainArgs:
    """Train a K3 from scratch on prepared data. `--config FILE` reads any of these from a YAML file first."""

    out: Path = Path("runs/pretrain")
    """Run folder."""
    data: Path = Path("runs/data")
    """Prepared data (`nanok3 data` makes it)."""
    mixture: tuple[str, ...] = ()
    """Weights of the sources as name:weight, for those that should differ from the prepared ones; one that takes part
    in some rows of the run only as name:weight@0-4000 or name:weight@4000-; by default kinds of pictures take part
    from the row on that the prepared data say."""
    preset: str = "small"
    """Model preset: tiny, small, base or k3; vision-tiny or vision-small, which see; or an official config.json."""
    depth: int | None = None
    """Scale the preset to this many layers (width, heads and experts follow)."""
    set: tuple[str, ...] = ()
    """Single fields of the model's config, as field=value."""
    resume: bool = False
    """Go on from the newest whole checkpoint of the run folder, with the settings saved there."""
    threads: int | None = None
    """CPU threads; torch's own choice when not given."""
    device: str = "auto"
    """cpu, cuda, or auto: a GPU where there is one."""
    rules: bool = True
    """Print the table of which rule updates each parameter; it is always in the run folder, parameters.txt."""
    evaluate: bool = True
    """At the end, measure the model on held-out text, as `nanok3 eval` does."""
    train: TrainSettings = field(default_factory=TrainSettings)
    """The schedule and the optimizer."""


# ---------------------------------------------------------------------- settings: preset < YAML < flags


def parse(argv: list[str]) -> PretrainArgs:
    """The command line over `--config FILE` (or, with --resume, the run's own config.yaml) over the defaults."""
    import tyro

    file, rest = take_option(argv, "--config")
    preset = take_option(rest, "--preset")[0]
    default = PretrainArgs()
    if "--resume" in rest and file is None:
        out = Path(take_option(rest, "--out")[0] or default.out)
        if not (out / "config.yaml").exists():
            raise ValueError(f"--resume: {out / 'config.yaml'} does not exist; there is no run to go on with")
        file = str(out / "config.yaml")
    if file is not None:
        default = from_yaml(Path(file), default, preset)
    elif preset is not None:
        default = replace(default, train=recipe(preset))
    # A length on the command line replaces one from the file, be it steps or minutes.
    for given, other in (("steps", "minutes"), ("minutes", "steps")):
        if take_option(rest, f"--train.{given}")[0] is not None:
            none: dict[str, Any] = {other: None}
            default = replace(default, train=replace(default.train, **none))
    return tyro.cli(PretrainArgs, args=rest, prog="nanok3 pretrain", default=default)


def recipe(preset: str) -> TrainSettings:
    """How a preset is trained unless a file and flags say otherwise."""
    return TrainSettings(**RECIPES.get(preset, {}))


def take_option(argv: list[str], name: str) -> tuple[str | None, list[str]]:
    """The value of `--name VALUE` or `--name=VALUE`, and the rest of the command line."""
    for i, word in enumerate(argv):
        if word == name:
            if i + 1 == len(argv):
                raise ValueError(f"{name} needs a value")
            return argv[i + 1], argv[:i] + argv[i + 2 :]
        if word.startswith(f"{name}="):
            return word.split("=", 1)[1], argv[:i] + argv[i + 1 :]
    return None, argv


def from_yaml(path: Path, default: PretrainArgs, preset: str | None = None) -> PretrainArgs:
    """Settings of a YAML file over `default`, or over the recipe of `preset` or of the file's. ValueError names the
    file and what in it is wrong."""
    import yaml

    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except FileNotFoundError:
        raise ValueError(f"--config: {path} does not exist") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"--config: {path} is not valid YAML: {error}") from None
    values = document.get("settings", document) if isinstance(document, dict) else None
    if not isinstance(values, dict) or not isinstance(values.get("train", {}), dict):
        raise ValueError(f"--config: {path} must hold a mapping of settings, and `train` another")
    train = _known(path, "train.", values.pop("train", {}), TrainSettings)
    known = _known(path, "", values, PretrainArgs)
    chosen = preset or known.get("preset")
    start = default.train if chosen is None else recipe(chosen)
    return replace(default, **known, train=replace(start, **_one_length(train)))


def _one_length(given: dict[str, Any]) -> dict[str, Any]:
    """The settings of a file; its length, steps or minutes, replaces that of a recipe."""
    other = {"steps": "minutes", "minutes": "steps"}
    return {other[name]: None for name in other if given.get(name) is not None} | given


def _known(path: Path, prefix: str, values: dict[str, Any], record: type) -> dict[str, Any]:
    types = {f.name: str(f.type) for f in fields(record)}
    unknown = sorted(map(str, set(values) - set(types)))
    if unknown:
        raise ValueError(f"--config: {path} has unknown settings {[prefix + u for u in unknown]}; allowed: {[*types]}")
    return {name: _typed(f"--config: {path}: {prefix}{name}", value, types[name]) for name, value in values.items()}


def _typed(where: str, value: Any, annotation: str) -> Any:
    """A YAML value as the dataclass wants it: whole numbers serve as floats, and so does 1e-3, which YAML reads as
    text. ValueError names the setting otherwise."""
    if annotation == "tuple[str, ...]":
        if not isinstance(value, list):
            raise ValueError(f"{where} is {value!r}; it must be a list")
        return tuple(map(str, value))
    wanted = annotation.split(" | ")
    if value is None and "None" in wanted:
        return None
    convert = {"int": int, "float": float, "bool": bool, "str": str, "Path": Path}[wanted[0]]
    exact = type(value) is convert or (convert is Path and isinstance(value, str))
    number = convert is float and type(value) in (int, str)
    try:
        if exact or number:
            return convert(value)
    except ValueError:
        pass
    raise ValueError(f"{where} is {value!r}; it must be {annotation}")


def model_config(args: PretrainArgs, vocab_size: int) -> K3Config:
    """The preset, scaled, with single fields set and the tokenizer's vocabulary. ValueError on an unknown one."""
    presets = {"tiny": K3Config.tiny, "small": K3Config.small, "base": K3Config.base, "k3": K3Config.k3}
    presets |= {"vision-tiny": K3Config.vision_tiny, "vision-small": K3Config.vision_small}
    if args.preset in presets:
        cfg = presets[args.preset]()
    elif Path(args.preset).exists():
        cfg = K3Config.from_json(args.preset)
    else:
        raise ValueError(f"preset is {args.preset!r}; allowed: {', '.join(presets)}, or an official config.json")
    if args.depth is not None:
        cfg = cfg.at_depth(args.depth)
    return replace(cfg, **_changes(cfg, args.set)).with_vocabulary(vocab_size)


def _changes(cfg: K3Config, assignments: tuple[str, ...]) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    names = [f.name for f in fields(K3Config) if f.name != "source"]
    for assignment in assignments:
        name, _, value = assignment.partition("=")
        if name not in names:
            raise ValueError(f"--set {assignment}: {name!r} is no field of the config; allowed: {', '.join(names)}")
        try:
            changes[name] = json.loads(value)
        except json.JSONDecodeError:
            changes[name] = value
    return changes


# ---------------------------------------------------------------------- the stage


def main(args: PretrainArgs) -> None:
    """Set up, train, and at the end evaluate, save model/ and write the report."""
    import torch

    from nanok3.data.files import only_one
    from nanok3.train.machine import keep_freed_memory

    keep_freed_memory()
    if args.threads is not None:
        if not 1 <= args.threads <= 1024:
            raise ValueError(f"threads is {args.threads}; it must lie between 1 and 1024")
        torch.set_num_threads(args.threads)
    with only_one(args.out):
        trainer, data = set_up(args)
        if not trainer.fit():
            raise KeyboardInterrupt  # saved; the status tells a script that there is more to do
        finish(args, trainer, data)


def set_up(args: PretrainArgs) -> tuple[Trainer, Prepared]:
    """Data, model and trainer, fresh or at the newest checkpoint."""
    import torch

    from nanok3.data.loader import MixtureLoader
    from nanok3.data.prepared import Prepared
    from nanok3.model.decoder import K3
    from nanok3.model.mtp import attach
    from nanok3.train.checkpoint import latest, load_checkpoint
    from nanok3.train.loop import Trainer
    from nanok3.train.machine import choose_device, choose_precision

    settings = args.train
    if settings.steps is None and settings.minutes is None:
        raise ValueError("give the length of the run: --train.steps N or --train.minutes M")
    data = Prepared(args.data)
    data.verify()
    checkpoint, passed_over = latest(args.out)
    for problem in passed_over:
        print(f"passed over: {problem}")
    if not args.resume and ((args.out / "metrics.jsonl").exists() or checkpoint is not None or passed_over):
        raise ValueError(f"out: {args.out} holds a run; add --resume, or choose another folder")
    if checkpoint is None and passed_over:
        raise ValueError(f"out: no checkpoint of {args.out} is whole; repair or remove them to start again")
    if checkpoint is None and (args.out / "model").exists():
        raise ValueError(f"out: {args.out} is finished and kept no checkpoint to go on from")
    state: dict[str, Any] | None = None
    if checkpoint is not None:
        model, state = load_checkpoint(checkpoint)
        print(f"going on from {checkpoint}")
    else:
        torch.manual_seed(settings.seed)
        cfg = model_config(args, data.manifest["vocab_size"])
        model = K3(replace(cfg, num_nextn_predict_layers=int(settings.mtp_weight > 0)))
        if settings.mtp_weight:
            attach(model)
    check_pads(data, model.cfg)
    device = choose_device(args.device)
    model.to(device)
    precision = str(choose_precision(settings.precision, device)).removeprefix("torch.")
    args = replace(args, train=replace(settings, precision=precision))
    write_config(args, model.cfg)
    apply_outside(model, args.train)
    weights = mixture_weights(data, args.mixture)
    loader = MixtureLoader(
        data.sources(),
        weights,
        settings.batch_size,
        settings.seq_len,
        settings.seed,
        picture_text_weight=settings.picture_text_weight,
        spans=mixture_spans(data, args.mixture),
        picture_lead=settings.picture_lead,
    )
    tokenizer = data.tokenizer()
    sizes = torch.tensor([len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size - 256)] + [0] * 256)
    validation = validation_batches(data, args)
    config = {"settings": plain(args), "model": model.cfg.to_dict()}
    trainer = Trainer(model, loader, args.train, args.out, sizes, validation, sampler(data), print, config)
    if state is not None:
        trainer.load_state_dict(state)
    else:
        print(describe_run(trainer))
        show_rules(trainer, args)
    return trainer, data


def check_pads(data: Prepared, cfg: K3Config) -> None:
    """ValueError where the model would look for pictures at another id than the data has them."""
    pad = data.manifest.get("media_pad_id")
    if pad is not None and cfg.has_vision and pad != cfg.media_placeholder_token_id:
        raise ValueError(
            f"media_placeholder_token_id is {cfg.media_placeholder_token_id}; the pictures of {data.folder} stand at "
            f"id {pad} (<|media_pad|> of its tokenizer)"
        )


def apply_outside(model: K3, settings: TrainSettings) -> None:
    """What is done to a built model, in this order: recompute, then compile."""
    from nanok3.train.recompute import compile_layers, recompute_activations

    if settings.recompute:
        recompute_activations(model)
    if settings.compile:
        compile_layers(model)


def show_rules(trainer: Trainer, args: PretrainArgs) -> None:
    """Every parameter in exactly one group: the table, in the run folder and on the screen."""
    from rich.console import Console

    from nanok3.train.muon import rules_table

    table = rules_table(trainer.optimizer.rules)
    with (args.out / "parameters.txt").open("w", encoding="utf-8") as file:
        Console(file=file, width=140).print(table)
    if args.rules:
        Console(width=140).print(table)


def describe_run(trainer: Trainer) -> str:
    """Two lines: how big, how long."""
    from nanok3.ledger import active_parameters
    from nanok3.model.decoder import K3

    assert isinstance(trainer.model, K3)
    cfg, s = trainer.model.cfg, trainer.settings
    total = sum(p.numel() for p in trainer.model.parameters())
    tokens = s.batch_size * s.accumulate * s.seq_len
    length = f"{s.steps} steps" if s.steps is not None else f"{s.minutes:g} minutes"
    active = active_parameters(cfg)
    return (
        f"{cfg.num_hidden_layers} layers, {total / 1e6:.1f} M parameters, {active / 1e6:.1f} M active per token; "
        f"{length} of {tokens} tokens in {s.precision}\n"
        f"matmul peak measured here: {trainer.peak_flops / 1e9:.0f} GFLOP/s"
    )


def mixture_spans(data: Prepared, changes: tuple[str, ...]) -> list[Span]:
    """The rows of which the changes `name:weight@begin-end` speak, for every source; where none does, those of the
    prepared folder."""
    from nanok3.data.loader import Span

    spans = {source.name: Span(begin) for source, begin in zip(data.sources(), data.begins(), strict=True)}
    for change in changes:
        name, at, rows = change.partition(":")[0], *change.partition("@")[1:]
        if not at:
            continue
        match = re.fullmatch(r"([0-9]{1,15})-([0-9]{0,15})", rows)
        span = Span(int(match[1]), int(match[2]) if match[2] else None) if match else Span()
        if not match or (span.end is not None and span.end <= span.begin):
            raise ValueError(f"mixture: {change!r}; expected rows as in name:weight@0-2000 or name:weight@2000-")
        spans[name] = span
    return list(spans.values())


def mixture_weights(data: Prepared, changes: tuple[str, ...]) -> list[float]:
    """The prepared weights with `name:weight` changes."""
    names = [source.name for source in data.sources()]
    weights = dict(zip(names, data.weights(), strict=True))
    for change in changes:
        name, _, value = change.partition("@")[0].partition(":")
        if name not in weights:
            raise ValueError(f"mixture: {name!r} is no source of {data.folder}; allowed: {', '.join(names)}")
        try:
            weights[name] = float(value)
        except ValueError:
            weights[name] = math.nan
        if not 0 < weights[name] < math.inf:
            raise ValueError(f"mixture: {change!r} must be name:weight with a positive number")
    return list(weights.values())


def validation_batches(data: Prepared, args: PretrainArgs, tokens: int = 8192) -> dict[str, Any]:
    """A fixed sample of each slice for the curve: its first rows, about `tokens` of them."""
    from itertools import islice

    from nanok3.data.packing import one_pass

    rows, length = args.train.batch_size, args.train.seq_len
    count = max(1, tokens // (rows * length))
    return {s.name: list(islice(one_pass(s, rows, length), count)) for s in data.sources("validation")}


def sampler(data: Prepared, tokens: int = 40) -> Any:
    """A callback that lets the model continue the first words of a held-out document of each text, always with the
    same seed, and say what it sees on a held-out picture of each kind."""
    from nanok3.eval.pictures import captions
    from nanok3.serve.generate import generate
    from nanok3.serve.sampler import SamplingParams

    tokenizer = data.tokenizer()
    sources = data.sources("validation")
    prompts = [tokenizer.decode(s.tokens(0, 0, 8).tolist()) for s in sources if s.pictures is None]
    params = SamplingParams(temperature=0.8, top_p=0.95, seed=0, max_tokens=tokens)

    def sample(model: K3) -> list[tuple[str, str]]:
        was_training = model.training
        model.eval()
        said = [generate(model, tokenizer, prompt, params) for prompt in prompts]
        seen = [captions(model, s, tokenizer, [0])[0] for s in sources if s.pictures is not None]
        model.train(was_training)
        if any(s.finish_reason == "interrupted" for s in said):
            raise KeyboardInterrupt
        shown = [(f"[{kind}: {true}]\n", caption) for kind, true, caption in seen]
        return [*((prompt, s.text) for prompt, s in zip(prompts, said, strict=True)), *shown]

    return sample


def finish(args: PretrainArgs, trainer: Trainer, data: Prepared) -> None:
    """model/, the measurements on held-out text, and report.html."""
    from nanok3.data.files import write_file
    from nanok3.model.decoder import K3
    from nanok3.model.mtp import save_prediction
    from nanok3.model.weights import save
    from nanok3.stages import eval
    from nanok3.train.report import write_report

    assert isinstance(trainer.model, K3)
    folder = args.out / "model"
    trainer.model.compute_dtype = None
    with trainer.qat.projected():  # what was trained is what is served
        save(trainer.model, folder)
        save_prediction(trainer.model, folder)
    data.tokenizer().save(folder)
    write_file(folder / "nanok3.json", (json.dumps({"stage": "pretrain"}) + "\n").encode())
    print(f"model: {folder}")
    if args.evaluate:
        print("measuring it on held-out text (about a minute)")
        eval.main(eval.EvalArgs(model=args.out, data=(args.data,), threads=args.threads))
    else:
        print(f"report: {write_report(args.out)}")


def write_config(args: PretrainArgs, cfg: K3Config) -> None:
    """config.yaml: the resolved settings, the model's config and the command."""
    import yaml

    from nanok3.data.files import write_file
    from nanok3.ledger import active_parameters, parameters

    size = {"total": parameters(cfg), "active": active_parameters(cfg)}
    document = {"command": command_line(), "settings": plain(args), "parameters": size, "model": cfg.to_dict()}
    args.out.mkdir(parents=True, exist_ok=True)
    write_file(args.out / "config.yaml", yaml.safe_dump(document, sort_keys=False).encode())


def plain(args: PretrainArgs) -> dict[str, Any]:
    """The settings as YAML can hold them."""
    values = asdict(args)
    values.pop("resume")
    values.update(out=str(args.out), data=str(args.data), mixture=list(args.mixture), set=list(args.set))
    return values


def command_line() -> str:
    """The command as the user typed it."""
    return shlex.join(["nanok3", *sys.argv[1:]])
