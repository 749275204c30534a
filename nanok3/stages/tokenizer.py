"""`nanok3 tokenizer`: learn a byte-level BPE vocabulary from the training split, or show how a text is cut."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass
class TokenizerArgs:
    """Train a tokenizer in K3's format, or show the tokens of a text with one that exists."""

    out: Path = Path("runs/tokenizer")
    """Folder to write; with `--show`, the folder to read."""
    vocab_size: int = 4096
    """Ids in all: 256 bytes, the learned merges, 256 reserved for control tokens."""
    profile: Literal["tiny", "full"] = "tiny"
    """The built-in mixture that is taken if no sources are given."""
    sources: tuple[str, ...] = ()
    """Sources instead of a profile, as for `nanok3 data`."""
    max_bytes: int = 10_000_000
    """Bytes to learn from, taken from the sources by their weights."""
    validation: float = 0.05
    """Share of the documents that is not learned from; give `nanok3 data` the same."""
    seed: int = 0
    """Salt of the hashes that choose; give `nanok3 data` the same."""
    cache: Path | None = None
    """Folder for downloaded packages; by default nanok3/data in the user's cache folder."""
    show: str | None = None
    """Print the tokens of this text and do nothing else."""


def main(args: TokenizerArgs) -> None:
    """Run the command. Raises ValueError for wrong arguments or unreadable input."""
    if args.show is None:
        train(args)
    else:
        show(args.out, args.show)


def train(args: TokenizerArgs) -> None:
    """Train, save, and say how many bytes a token holds on text the tokenizer has not seen."""
    import time

    from rich.console import Console
    from rich.table import Table

    from nanok3.data.plan import kept_documents, mixture, plan, training_texts
    from nanok3.data.tokenizer import check_vocab_size, train_tokenizer
    from nanok3.stages.data import Reports, check_out

    check_out(args.out)
    check_vocab_size(args.vocab_size)
    console, start = Console(), time.perf_counter()
    with console.status("reading") as status:
        plans = plan(mixture(args.profile, args.sources), args.validation, args.seed, args.cache, Reports(console))
        texts = list(training_texts(plans, args.max_bytes, args.seed))
        size = sum(len(text.encode()) for text in texts)
        status.update(f"learning from {size:,} bytes")
        tokenizer = train_tokenizer(texts, args.vocab_size)
    tokenizer.save(args.out)
    shown = Table("source", "validation documents", "bytes", "tokens", "bytes/token")
    for made in plans:
        kept = [document.text for split, document in kept_documents(made, args.seed) if split == "validation"]
        counts = len(kept), sum(len(text.encode()) for text in kept), sum(map(len, tokenizer.encode_batch(kept)))
        shown.add_row(made.source.name, *(f"{count:,}" for count in counts), f"{counts[1] / max(counts[2], 1):.2f}")
    console.print(shown)
    console.print(
        f"{args.out}: {args.vocab_size:,} ids learned from {len(texts):,} documents, {size:,} bytes, "
        f"in {time.perf_counter() - start:.1f} s",
        markup=False,
        soft_wrap=True,
    )


def show(folder: Path, text: str) -> None:
    """Print ids and tokens of `text`."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from nanok3.data.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(folder)
    ids = tokenizer.encode(text)
    shown = Table("id", "bytes", "token")
    for token in ids:
        shown.add_row(str(token), tokenizer.token_bytes(token).hex(" "), Text(repr(tokenizer.token_name(token))))
    console = Console()
    console.print(shown)
    console.print(f"{len(ids)} tokens, {len(text.encode('utf-8', 'replace'))} bytes")
