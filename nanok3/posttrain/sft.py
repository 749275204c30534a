"""Supervised fine-tuning: the training loop of pre-training over conversations, with a loss on sampled tokens only.

    OUT/metrics.jsonl      as in pre-training; validation by channel: all, think, response, tools, end
    OUT/checkpoints/       a run that was killed goes on bit for bit
    OUT/model/             the model, its tokenizer and wording, and the marker {"stage": "sft"}

Rows are packed from whole conversations, and the states of KDA and the keys of MLA begin anew at each (`cu_seqlens`).
Quantization-aware training (report 4.1.4: from here on) is the setting `qat`. The rates are ours.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from nanok3.data.chat import OURS, SENTENCES_FILE, Sentences
from nanok3.data.clean import digest, unit
from nanok3.data.files import write_file
from nanok3.data.packing import Batch
from nanok3.data.tokenizer import Tokenizer
from nanok3.ledger import active_parameters, parameters
from nanok3.model.decoder import K3
from nanok3.model.weights import save
from nanok3.posttrain.conversation_loader import ConversationLoader
from nanok3.posttrain.conversations import SAMPLED, Conversation, Conversations, Encoder, Example, conversation_of
from nanok3.posttrain.domains import SENTENCES, Mistakes, demonstrations, domains, small_model, small_tokenizer
from nanok3.posttrain.sft_settings import WORLD
from nanok3.serve.generate import generate
from nanok3.serve.run_folder import MARKER
from nanok3.serve.sampler import SamplingParams
from nanok3.train.checkpoint import latest, load_checkpoint
from nanok3.train.loop import Trainer
from nanok3.train.report import write_report
from nanok3.train.settings import TrainSettings

# ---------------------------------------------------------------------- data


@dataclass(frozen=True)
class Lessons:
    """What is learned and what is measured on, in one wording."""

    train: Conversations
    held_out: Conversations
    sentences: Sentences = OURS
    skipped: int = 0
    """Conversations that were left out because they are longer than a row."""

    def facts(self) -> dict[str, Any]:
        """For the record: conversations and tokens of each kind."""
        sides = {"train": self.train, "held_out": self.held_out}
        return {side: {"conversations": len(of), **of.counts()} for side, of in sides.items()} | {
            "skipped": self.skipped
        }


def is_held_out(conversation: Conversation, share: float) -> bool:
    """By content, so that the same conversation twice falls on one side."""
    return unit(digest(json.dumps([conversation.messages, conversation.tools], sort_keys=True, default=str)), 0) < share


def fitting(examples: Iterable[Example], seq_len: int, skip: bool) -> tuple[list[Example], int]:
    """Those that a row holds, and how many it does not. ValueError at the first of these unless they are skipped."""
    kept, long = [], 0
    for example in examples:
        if len(example.ids) - 1 <= seq_len:
            kept.append(example)
        elif skip:
            long += 1
        else:
            needed = len(example.ids) - 1
            raise ValueError(
                f"{example.where}: messages come to {needed + 1} tokens; a row of seq_len = {seq_len} holds "
                f"{seq_len + 1}, and none is cut. Take --train.seq-len {needed} or more, or --skip-long"
            )
    return kept, long


def lessons(
    train: Iterable[Conversation],
    held_out: Iterable[Conversation],
    tokenizer: Tokenizer,
    seq_len: int,
    sentences: Sentences = OURS,
    skip_long: bool = False,
) -> Lessons:
    """Both sides encoded. ValueError for a row that cannot be used, with its file, line and field."""
    encoder = Encoder(tokenizer, sentences)
    sides = [fitting(map(encoder, side), seq_len, skip_long) for side in (train, held_out)]
    (ours, long), (theirs, also_long) = sides
    if not ours:
        raise ValueError("data: there are no conversations to train on")
    pad = tokenizer.pad_id
    return Lessons(
        Conversations("train", ours, pad), Conversations("held-out", theirs, pad), sentences, long + also_long
    )


def by_channel(held_out: Conversations, batch_size: int, seq_len: int, tokens: int = 8192) -> dict[str, list[Batch]]:
    """The same rows, about `tokens` of them, with all targets, and with those of each channel alone."""
    if not len(held_out):
        return {}
    counts = held_out.counts()
    slices = {"all": SAMPLED} | {k.name.lower(): (k,) for k in SAMPLED if counts[k.name.lower()]}
    count = max(1, tokens // (batch_size * seq_len))
    return {name: held_out.one_pass(batch_size, seq_len, kinds)[:count] for name, kinds in slices.items()}


# ---------------------------------------------------------------------- the run


class SftTrainer(Trainer):
    """The loop of pre-training; what is said differs."""

    def how_to_resume(self) -> str:
        return f"nanok3 sft --out {self.run} --resume"


def prompts_of(held_out: Conversations, count: int) -> list[tuple[list[int], int]]:
    """The ids before the first answer of some conversations, and how many ids the answers have together."""
    found = []
    for example in held_out.examples[:count]:
        first = int((example.kinds > 0).argmax())
        found.append((example.ids[:first].tolist(), int((example.kinds > 0).sum())))
    return found


def answering(held_out: Conversations, tokenizer: Tokenizer, count: int = 3) -> Callable[[Any], list[tuple[str, str]]]:
    """A callback that lets the model answer the first held-out prompts that have no pictures."""
    texts = Conversations(held_out.name, [e for e in held_out.examples if not e.pictures], held_out.pad_id)
    prompts = prompts_of(texts, count)

    def sample(model: K3) -> list[tuple[str, str]]:
        was_training = model.training
        model.eval()
        said = []
        for prompt, tokens in prompts:
            params = SamplingParams(temperature=1.0, seed=0, max_tokens=min(2 * tokens, 512))
            answer = generate(model, tokenizer, prompt, params)
            if answer.finish_reason == "interrupted":
                raise KeyboardInterrupt
            said.append((tokenizer.decode(prompt), tokenizer.decode(answer.ids)))
        model.train(was_training)
        return said

    return sample


def schedule(settings: TrainSettings, rows: int, epochs: float) -> TrainSettings:
    """The settings with a length: `epochs` passes over the rows, unless steps or minutes are given."""
    if settings.steps is not None or settings.minutes is not None:
        return settings
    if not 0 < epochs < math.inf:
        raise ValueError(f"epochs is {epochs}; it must be above 0 and finite")
    return replace(settings, steps=max(1, math.ceil(epochs * rows / (settings.batch_size * settings.accumulate))))


def token_sizes(tokenizer: Tokenizer) -> torch.Tensor:
    """Bytes of each id; reserved ids are markup and count none."""
    sizes = [len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size - 256)]
    return torch.tensor(sizes + [0] * 256)


def trainer_for(
    model: K3,
    tokenizer: Tokenizer,
    taught: Lessons,
    settings: TrainSettings,
    out: Path,
    say: Callable[[str], None] = print,
    epochs: float = 3.0,
    resume: bool = False,
) -> SftTrainer:
    """A trainer at the start, or at the newest checkpoint of `out`. ValueError for a folder that holds a run, unless
    it is gone on with."""
    if model.cfg.vocab_size != tokenizer.vocab_size:
        raise ValueError(f"vocab_size is {model.cfg.vocab_size}; the tokenizer has {tokenizer.vocab_size} ids")
    checkpoint, passed_over = latest(out)
    for problem in passed_over:
        say(f"passed over: {problem}")
    if not resume and ((out / "metrics.jsonl").exists() or checkpoint is not None):
        raise ValueError(f"out: {out} holds a run; add --resume, or choose another folder")
    state: dict[str, Any] | None = None
    if checkpoint is not None:
        device = model.lm_head.weight.device
        model, state = load_checkpoint(checkpoint)
        model.to(device)
        say(f"going on from {checkpoint}")
    loader = ConversationLoader(taught.train, settings.batch_size, settings.seq_len, settings.seed)
    settings = schedule(settings, len(loader.rows), epochs)
    validation = by_channel(taught.held_out, settings.batch_size, settings.seq_len)
    sample = answering(taught.held_out, tokenizer) if settings.sample_every and len(taught.held_out) else None
    trainer = SftTrainer(model, loader, settings, out, token_sizes(tokenizer), validation, sample, say)
    if state is not None:
        trainer.load_state_dict(state)
    else:
        trainer.track.write("conversations", 0, **taught.facts())
    return trainer


def finish(trainer: Trainer, tokenizer: Tokenizer, sentences: Sentences) -> Path:
    """model/ and the report; what was trained, rounded where it was trained rounded, is what is served."""
    assert isinstance(trainer.model, K3)
    folder = trainer.run / "model"
    trainer.model.compute_dtype = None
    packed = trainer.qat.mode != "off" and trainer.model.cfg.expert_format is not None
    with trainer.qat.projected():
        save(trainer.model, folder, "mxfp4" if packed else "bf16")
    tokenizer.save(folder)
    if sentences != OURS:
        write_file(folder / SENTENCES_FILE, (json.dumps(asdict(sentences), indent=2) + "\n").encode())
    write_file(folder / MARKER, (json.dumps({"stage": "sft"}) + "\n").encode())
    write_report(trainer.run)
    return folder


def write_config(out: Path, model: nn.Module, settings: dict[str, Any]) -> None:
    """config.yaml: the resolved settings and the model's config."""
    assert isinstance(model, K3)
    size = {"total": parameters(model.cfg), "active": active_parameters(model.cfg)}
    document = {"settings": settings, "parameters": size, "model": model.cfg.to_dict()}
    out.mkdir(parents=True, exist_ok=True)
    write_file(out / "config.yaml", yaml.safe_dump(document, sort_keys=False).encode())


def describe(taught: Lessons, trainer: Trainer) -> str:
    """One line: how much there is to learn."""
    counts = taught.train.counts()
    given, sampled = counts.pop("given"), sum(counts.values())
    shares = ", ".join(f"{kind} {count}" for kind, count in counts.items())
    return (
        f"{len(taught.train)} conversations, {len(taught.held_out)} held out; {sampled} tokens to learn ({shares}), "
        f"{given} given; {trainer.settings.steps or trainer.settings.minutes} "
        f"{'steps' if trainer.settings.steps else 'minutes'}"
    )


# ---------------------------------------------------------------------- the small world


def world_lessons(names: Sequence[str], count: int, mistakes: float, seed: int, seq_len: int) -> Lessons:
    """Demonstrations of the named domains, `count` of each, and a tenth as many held out, of other tasks."""
    known = domains()
    for name in names:
        if name not in known:
            raise ValueError(f"domains: {name!r}; allowed: {', '.join(known)}")
    chosen = [known[name] for name in names]
    sides = []
    for split, number in (("train", count), ("held-out", max(1, count // 10))):
        rows = demonstrations(chosen, number, split, Mistakes(mistakes, seed))
        sides.append([conversation_of(row, f"{split} demonstration {i}") for i, row in enumerate(rows)])
    return lessons(sides[0], sides[1], small_tokenizer(), seq_len, SENTENCES)


def cold_start(
    out: Path,
    names: Sequence[str] = ("general", "agent", "coding"),
    preset: str = "small",
    settings: TrainSettings = WORLD,
    count: int = 3000,
    mistakes: float = 0.25,
    epochs: float = 3.0,
    say: Callable[[str], None] = print,
    resume: bool = False,
    model: K3 | None = None,
) -> Path:
    """A small model taught by demonstrations alone, from random weights or from `model`; returns its folder
    OUT/model."""
    taught = world_lessons(names, count, mistakes, settings.seed, settings.seq_len)
    torch.manual_seed(settings.seed)
    model = model or K3(small_model(preset))
    tokenizer = small_tokenizer()
    trainer = trainer_for(model, tokenizer, taught, settings, out, say, epochs, resume)
    write_config(out, trainer.model, {"domains": list(names), "preset": preset, "train": asdict(trainer.settings)})
    say(describe(taught, trainer))
    if not trainer.fit():
        raise KeyboardInterrupt
    return finish(trainer, tokenizer, SENTENCES)
