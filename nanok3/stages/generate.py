"""`nanok3 generate`: continue one prompt, or a file of them, each as if it were alone.

    nanok3 generate runs/x "Once upon a time" --max-tokens 100
    nanok3 generate runs/x "A picture of" --image cat.png           for a model that sees
    nanok3 generate runs/x --prompts-file prompts.jsonl --out answers.jsonl      --resume after an interrupt

Text goes to stdout as it is said, everything else to stderr, so a pipe gets the text only. With --out the answers are
JSON lines: `FILE.partial` grows by a line per finished prompt and becomes FILE, in the order of the prompts, when all
are done.
"""

from __future__ import annotations

import io
import json
import os
import secrets
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

if TYPE_CHECKING:
    from nanok3.data.images import Image
    from nanok3.model.decoder import K3
    from nanok3.model.mtp import Draft
    from nanok3.serve.generate import Completion
    from nanok3.serve.run_folder import OpenModel
    from nanok3.serve.sampler import SamplingParams
    from nanok3.serve.speculative import Drafter


@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """Which model runs, and how."""

    model: Annotated[Path, tyro.conf.Positional]
    """A run folder, one of its checkpoints, or any model folder in the official layout."""
    dtype: Literal["auto", "float32", "bfloat16", "stored"] = "auto"
    """auto: bfloat16 on a GPU, float32 on a CPU; stored: as on disk, packed experts stay packed."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU where there is one."""
    threads: int | None = None
    """CPU threads; torch's own choice when not given."""
    expert_inputs: Literal["plain", "mxfp8"] = "plain"
    """mxfp8: routed experts read their inputs rounded to MXFP8, as `--train.qat w4a8` trains them."""
    experts: Literal["resident", "stream"] = "resident"
    """stream: routed experts stay on disk and are read when they are chosen; for models larger than memory, on a
    CPU."""
    expert_memory: str | None = None
    """With --experts stream: memory for those used last, such as 512MiB. Not given: half of what is free."""

    def open(self) -> OpenModel:
        """Load the model with these flags."""
        import torch

        from nanok3.ledger import parse_bytes
        from nanok3.serve.run_folder import open_model

        memory = None if self.expert_memory is None else parse_bytes("expert_memory", self.expert_memory)
        if self.threads is not None:
            if not 1 <= self.threads <= 1024:
                raise ValueError(f"threads is {self.threads}; it must lie between 1 and 1024")
            torch.set_num_threads(self.threads)
        opened = open_model(self.model, self.dtype, self.device, self.experts, memory)
        return with_inputs(opened, self.expert_inputs)


def with_inputs(opened: OpenModel, inputs: str) -> OpenModel:
    """The model with its routed experts on such inputs."""
    if inputs == "mxfp8":
        from nanok3.quant.qat import mxfp8_inputs

        mxfp8_inputs(opened.model, trained_rule(opened.folder))
    return opened


def trained_rule(folder: Path) -> str:
    """The scale rule that a model was packed by or trained with, else the default."""
    from nanok3.stages.eval import run_of, settings_of

    report = folder / "quantization.json"
    if report.is_file():
        return str(json.loads(report.read_text("utf-8")).get("scale_rule", "ceil"))
    return str(settings_of(run_of(folder)).get("train", {}).get("qat_scale_rule", "ceil"))


@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """How tokens are chosen; filters act in the order penalties, temperature, top_k, top_p, min_p."""

    temperature: float = 1.0
    """Below 1 bolder guesses become rarer, above 1 more frequent; 0 always takes the likeliest token."""
    top_p: float = 0.95
    """Keep the fewest tokens whose probabilities reach this sum (0.95 is what K3 is served with)."""
    top_k: int | None = None
    """Keep this many of the likeliest tokens."""
    min_p: float = 0.0
    """Keep tokens at least this probable, relative to the likeliest."""
    seed: int | None = None
    """Equal seeds give equal text; when not given one is drawn and printed."""
    max_tokens: int = 256
    """Tokens of an answer at most."""
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """End the answer before this text; may be given several times."""
    repetition_penalty: float = 1.0
    """Above 1: tokens of the prompt and of the answer become less likely."""
    presence_penalty: float = 0.0
    """Taken from the logit of every token said before."""
    frequency_penalty: float = 0.0
    """Taken from the logit of a token once for each time it was said."""

    def sampling(self) -> SamplingParams:
        """The same as a checked record, with a seed drawn if none was given."""
        from nanok3.serve.sampler import SamplingParams

        params = SamplingParams(**{f.name: getattr(self, f.name) for f in fields(SamplingFlags)})
        return params if params.seed is not None else replace(params, seed=secrets.randbelow(2**32))


@dataclass(frozen=True, kw_only=True)
class GenerateArgs(SamplingFlags, ModelFlags):
    """Continue one prompt or a file of them. A base model continues text; it has not been taught to answer."""

    text: Annotated[str | None, tyro.conf.Positional] = None
    """The prompt. `-` reads it from stdin; without any prompt a text is begun from nothing."""
    prompt: str | None = None
    """The prompt, as a flag."""
    prompts_file: Path | None = None
    """Many prompts: a line each, or .jsonl with a field `prompt`."""
    image: tyro.conf.UseAppendAction[tuple[Path, ...]] = ()
    """A picture for one prompt; may be given several times. It stands before the text, or where the prompt has
    `<|kimi_image_placeholder|>`."""
    prefill_chunk: int = 512
    """Prompt tokens read at once; less saves memory."""
    draft: str | None = None
    """`ngram` guesses what followed the same tokens before, a folder is a draft made by `nanok3 draft`; several tokens
    are read at once, and the answer stays what it is."""
    draft_tokens: int = 7
    """Guesses at a time."""
    json: bool = False
    """Print a JSON line per prompt instead of text."""
    out: Path | None = None
    """Write JSON lines to this file instead of stdout."""
    resume: bool = False
    """Keep the finished prompts of an interrupted --out."""
    routing_trace: Path | None = None
    """Write to this file which experts were chosen; `nanok3 plan --routing-trace FILE` tries memory budgets on it."""


def main(args: GenerateArgs) -> None:
    """Run the command. ValueError for wrong arguments; KeyboardInterrupt, after saving, for Ctrl-C."""
    from nanok3.data.files import check_file
    from nanok3.serve.draft_folder import load_draft
    from nanok3.serve.routing_trace import Recorder

    params, prompts = args.sampling(), read_prompts(args)
    if args.resume and args.out is None:
        raise ValueError("--resume goes on with an --out file; give --out too")
    for name, path in (("routing_trace", args.routing_trace), ("out", args.out)):
        if path is not None:
            check_file(name, path)
    images, named = read_images(args), drafter_of(args.draft, args.draft_tokens)
    answers = Answers(args.out, prompts, settings(args, params), args.seed is None, args.resume) if args.out else None
    if answers is not None:
        params = replace(params, seed=answers.settings["seed"])
    opened = args.open()
    drafter = load_draft(named, opened.model) if isinstance(named, Path) else named
    recorder = None if args.routing_trace is None else Recorder(opened.model)
    done: list[Completion] = []
    try:
        for index, prompt in enumerate(prompts):
            if answers is None or not answers.has(index):
                if len(prompts) > 1:
                    print(f"[{index + 1}/{len(prompts)}] {prompt!r}", file=sys.stderr)
                done.append(answer(args, opened, index, prompt, params, answers, images, drafter))
                if done[-1].finish_reason == "interrupted":
                    raise KeyboardInterrupt
        if answers is not None:
            answers.finish()
    finally:
        if done:
            print(summary(done, params), file=sys.stderr)
            if streaming := streaming_summary(opened.model):
                print(streaming, file=sys.stderr)
            if recorder is not None and args.routing_trace is not None:
                recorder.trace(expert_bytes(opened.model)).save(args.routing_trace)


def answer(
    args: GenerateArgs,
    opened: OpenModel,
    index: int,
    prompt: str,
    params: SamplingParams,
    answers: Answers | None,
    images: list[Image],
    drafter: Drafter | Draft | None = None,
) -> Completion:
    """Answer one prompt and put it where the flags say."""
    from nanok3.serve.generate import generate

    show = None if args.json or answers else printer()
    draft = None if drafter is None else (drafter, args.draft_tokens)
    completion = generate(
        opened.model, opened.tokenizer, prompt, params, None, show, args.prefill_chunk, images=images, draft=draft
    )
    record = record_of(index, prompt, completion, settings(args, params))
    if answers is not None:
        answers.add(record)
    else:
        print(json.dumps(record, ensure_ascii=False) if args.json else "", flush=True)
    return completion


def drafter_of(draft: str | None, tokens: int) -> Drafter | Path | None:
    """Who --draft names: a folder is to be loaded with its model. ValueError for what is neither, and for lengths that
    cannot be."""
    from nanok3.serve.draft_folder import read_facts
    from nanok3.serve.speculative import NGrams, check_tokens

    check_tokens(tokens)
    if draft in (None, "ngram"):
        return None if draft is None else NGrams()
    if not Path(draft).is_dir():
        raise ValueError(f"draft is {draft!r}; allowed: 'ngram', or a folder made by nanok3 draft")
    read_facts(Path(draft))
    return Path(draft)


# ---------------------------------------------------------------------- prompts


def read_prompts(args: GenerateArgs) -> list[str]:
    """The prompts that the flags name, at least one. ValueError for two sources at once and for a bad file."""
    given = [source for source in (args.text, args.prompt, args.prompts_file) if source is not None]
    if len(given) > 1:
        raise ValueError("the prompt was given more than once; use one of: an argument, --prompt, --prompts-file")
    if args.prompts_file is not None:
        return read_prompts_file(args.prompts_file)
    return [sys.stdin.read() if args.text == "-" else str(given[0]) if given else ""]


def read_images(args: GenerateArgs) -> list[Image]:
    """The pictures of the one prompt. ValueError for more prompts, and for a file that is no picture."""
    if not args.image:
        return []
    if args.prompts_file is not None:
        raise ValueError("image goes with one prompt; allowed: an argument or --prompt, without --prompts-file")
    from nanok3.data.images import preprocess_image

    return [preprocess_image(path) for path in args.image]


def read_prompts_file(path: Path) -> list[str]:
    """A prompt a line, blank lines skipped; or of a .jsonl file the field `prompt` of each line."""
    try:
        lines = path.read_text("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"prompts_file: {path} cannot be read ({error})") from None
    numbered = [(number, line.removesuffix("\r")) for number, line in enumerate(lines, 1) if line.strip()]
    if path.suffix == ".jsonl":
        prompts = [_prompt_field(path, number, line) for number, line in numbered]
    else:
        prompts = [line for _, line in numbered]
    if not prompts:
        raise ValueError(f"prompts_file: {path} holds no prompt")
    return prompts


def _prompt_field(path: Path, number: int, line: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"prompts_file: {path} line {number} is not JSON ({error})") from None
    if not isinstance(record, dict) or not isinstance(record.get("prompt"), str):
        raise ValueError(f"prompts_file: {path} line {number} has no field `prompt` that is a string")
    return str(record["prompt"])


# ---------------------------------------------------------------------- answers


def settings(args: GenerateArgs, params: SamplingParams) -> dict[str, Any]:
    """What an answer depends on, beside the prompt."""
    sampling = {f.name: getattr(params, f.name) for f in fields(SamplingFlags)}
    images = {"image": [str(path) for path in args.image]} if args.image else {}
    return {"model": str(args.model), "dtype": args.dtype, **sampling, "stop": list(params.stop), **images}


def record_of(index: int, prompt: str, completion: Completion, settings: dict[str, Any]) -> dict[str, Any]:
    """One JSON line."""
    return {
        "index": index,
        "prompt": prompt,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "prompt_tokens": completion.prompt_tokens,
        "completion_tokens": len(completion.ids),
        "seconds_prefill": round(completion.seconds_prefill, 6),
        "seconds_decode": round(completion.seconds_decode, 6),
        "settings": settings,
    }


class Answers:
    """The --out file while it grows. Every finished prompt is flushed to `FILE.partial`, so that a kill loses at most
    the one being answered; an interrupted one is kept there too, and answered anew by --resume."""

    def __init__(
        self, out: Path, prompts: list[str], settings: dict[str, Any], any_seed: bool, resume: bool = False
    ) -> None:
        self.out, self.partial, self.prompts = out, out.with_name(out.name + ".partial"), prompts
        self.settings, self.any_seed = settings, any_seed
        self.records: dict[int, dict[str, Any]] = {}
        if resume:
            for file in (self.out, self.partial):
                self._take(file)
            self._rewrite(self.partial)
        elif self.partial.exists():
            raise ValueError(f"out: {self.partial} holds an interrupted run; add --resume, or delete it")
        out.parent.mkdir(parents=True, exist_ok=True)

    def has(self, index: int) -> bool:
        return index in self.records and self.records[index]["finish_reason"] != "interrupted"

    def add(self, record: dict[str, Any]) -> None:
        self.records[record["index"]] = record
        with open(self.partial, "a", encoding="utf-8") as file:
            file.write(_line(record))
            file.flush()
            os.fsync(file.fileno())

    def finish(self) -> None:
        """All are answered: FILE takes its name, whole and in order."""
        self._rewrite(self.out)
        self.partial.unlink(missing_ok=True)

    def _rewrite(self, path: Path) -> None:
        from nanok3.data.files import write_file

        write_file(path, "".join(_line(self.records[i]) for i in sorted(self.records)).encode())

    def _take(self, file: Path) -> None:
        """The records of an earlier run; a last line cut short by a crash is left out."""
        lines = file.read_bytes().split(b"\n") if file.exists() else []
        for number, line in enumerate(lines[:-1], 1):
            try:
                record = json.loads(line)
                index, prompt, old = record["index"], record["prompt"], record["settings"]
            except (ValueError, KeyError, TypeError):
                raise ValueError(
                    f"out: {file} line {number} is no answer of this command; --resume needs its own"
                ) from None
            if not 0 <= index < len(self.prompts) or self.prompts[index] != prompt:
                raise ValueError(f"out: {file} line {number} answers another prompt than number {index} of this run")
            self._check_settings(file, old)
            self.records[index] = record

    def _check_settings(self, file: Path, old: dict[str, Any]) -> None:
        if self.any_seed and not self.records:
            self.settings["seed"] = old.get("seed")
        for name, value in self.settings.items():
            if old.get(name) != value:
                raise ValueError(f"out: {file} was made with {name} = {old.get(name)!r}, this run has {value!r}")


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"


# ---------------------------------------------------------------------- what the user sees


def printer() -> Callable[[str], None]:
    """Writes pieces of text to stdout at once. On a terminal control characters are shown, not obeyed; a character
    that the encoding lacks becomes a question mark."""
    from nanok3.serve.generate import visible

    stream = sys.stdout
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")
    terminal = stream.isatty()

    def show(text: str) -> None:
        stream.write(visible(text) if terminal else text)
        stream.flush()

    return show


def summary(done: list[Completion], params: SamplingParams) -> str:
    """One line: how fast, and the seed that says it again."""
    prompt, said = sum(c.prompt_tokens for c in done), sum(len(c.ids) for c in done)
    reading, saying = sum(c.seconds_prefill for c in done), sum(c.seconds_decode for c in done)
    steps = sum(max(len(c.ids) - 1, 0) for c in done)  # the first token of an answer comes out of reading the prompt
    reasons = {c.finish_reason for c in done}
    line = f"prompt: {prompt} tokens, {prompt / max(reading, 1e-9):.1f} tokens/s; "
    line += f"answer: {said} tokens, {steps / max(saying, 1e-9):.1f} tokens/s; seed {params.seed}"
    drafts = [c.drafted for c in done if c.drafted is not None]
    if drafts:
        line += f"; {sum(d.accepted for d in drafts)} of {sum(d.tokens for d in drafts)} guesses were right"
    return line + ("; interrupted" if "interrupted" in reasons else "")


def streaming_summary(model: K3) -> str | None:
    """One line: what reading experts from disk took; None where they are resident."""
    from nanok3.ledger import binary_bytes
    from nanok3.model.streamed_experts import stream_of

    stream = stream_of(model)
    if stream is None:
        return None
    s = stream.statistics
    return (
        f"experts: {stream.slots.size:,} of {len(stream.files.places):,} fit into {binary_bytes(stream.memory)}; "
        f"{s.hits:,} were there ({s.hit_rate:.1%}), {s.reads:,} were read: {binary_bytes(s.bytes)} in "
        f"{s.seconds_reading:.1f} s, of which {s.seconds_waited:.1f} s were waited for"
    )


def expert_bytes(model: K3) -> int:
    """Of one expert: as it is streamed, else as the model's config says it is stored."""
    from nanok3 import capacity
    from nanok3.model.streamed_experts import stream_of

    stream = stream_of(model)
    return capacity.expert_bytes(model.cfg) if stream is None else stream.form.nbytes
