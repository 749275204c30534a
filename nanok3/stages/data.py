"""`nanok3 data`: fetch the corpora, split, deduplicate and encode them into a folder that training reads."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rich.table import Table

    from nanok3.data.pictures.kinds import PictureMix


@dataclass
class DataArgs:
    """Prepare training data: built-in corpora, or your own .txt, .md, .py, .jsonl and .parquet files; and pictures."""

    out: Path = Path("runs/data")
    """Folder to write."""
    tokenizer: Path = Path("runs/tokenizer")
    """Folder of the tokenizer (`nanok3 tokenizer` makes one)."""
    profile: Literal["tiny", "full"] = "tiny"
    """The built-in mixture that is taken if no sources are given."""
    sources: tuple[str, ...] = ()
    """Sources instead of a profile: prose, chat, code, math, math-full, or a file or folder; each may carry a
    weight, its share of the training tokens, as in `prose:3 notes/:1`."""
    validation: float = 0.05
    """Share of the documents, chosen by hash, that is kept for validation."""
    seed: int = 0
    """Salt of the hashes that choose."""
    pictures: float = 0.0
    """Share of the training tokens that picture documents take (drawn here, with their captions); 0 for none."""
    picture_documents: int = 12_000
    """Picture documents of all kinds together, those for validation included."""
    picture_kinds: tuple[str, ...] = ()
    """Kinds of pictures, by default those of the profile: forms, silhouettes, tiles, shapes, places, letters,
    spelling; full adds compare, words, plots, tables, motion, digits, photos, svg. There are also icons and flags,
    which need npm."""
    contact_sheet: Path | None = None
    """PNG file to write: some documents of every kind of pictures in a grid."""
    cache: Path | None = None
    """Folder for downloaded packages; by default nanok3/data in the user's cache folder."""


class Reports:
    """Prints what is skipped, the first few times for each source file, and counts it."""

    def __init__(self, console: Any) -> None:
        self.console, self.count = console, 0

    def __call__(self, skipped: Any) -> None:
        self.count += 1
        if self.count <= 20:
            self.console.print(f"skipped {skipped.name}: {skipped.reason}", style="yellow", markup=False)


def table(manifest: dict[str, Any]) -> Table:
    """One line a source, and all of them: what a person checks before training."""
    from rich import box
    from rich.table import Table

    shown = Table(box=box.SIMPLE_HEAD, padding=0)  # ten columns in 80 characters
    shown.add_column("source")
    counts = ("train\ndocs", "valid.\ndocs", "bytes", "tokens", "bytes/\ntoken")
    for column in ("share", *counts, "dupli-\ncates", "left\nout", "skip-\nped"):
        shown.add_column(column, justify="right", no_wrap=True)
    weights = sum(entry["weight"] for entry in manifest["sources"].values())
    total: Counter[str] = Counter()
    for name, entry in manifest["sources"].items():
        line = _counts(entry)
        total.update(line)
        shown.add_row(name, f"{entry['weight'] / weights:.0%}", *_cells(line))
    shown.add_section()
    shown.add_row("all", "100%", *_cells(total))
    return shown


def _counts(entry: dict[str, Any]) -> dict[str, int]:
    train, validation = entry["train"], entry["validation"]
    return {
        "train": train["documents"],
        "validation": validation["documents"],
        "bytes": train["bytes"] + validation["bytes"],
        "tokens": train["tokens"] + validation["tokens"],
        "duplicates": entry["duplicates"],
        "left_out": entry["left_out"],
        "skipped": entry["skipped"],
    }


def _cells(line: dict[str, int]) -> list[str]:
    cells = {name: f"{value:,}" for name, value in line.items()}
    ratio = f"{line['bytes'] / max(line['tokens'], 1):.2f}"
    front, back = ("train", "validation", "bytes", "tokens"), ("duplicates", "left_out", "skipped")
    return [*(cells[name] for name in front), ratio, *(cells[name] for name in back)]


def picture_table(manifest: dict[str, Any]) -> Table:
    """One line a kind of pictures: what it costs besides its tokens."""
    from rich import box
    from rich.table import Table

    shown = Table(box=box.SIMPLE_HEAD, padding=0)
    shown.add_column("pictures of")
    for column in ("train\npictures", "valid.\npictures", "patches", "patches/\npicture", "patches/\ntoken"):
        shown.add_column(column, justify="right", no_wrap=True)
    total: Counter[str] = Counter()
    for name, entry in manifest["sources"].items():
        if "pictures" in entry["train"]:
            both = entry["train"], entry["validation"]
            line = {split: entry[split]["pictures"] for split in ("train", "validation")}
            line |= {count: sum(split[count] for split in both) for count in ("patches", "tokens")}
            total.update(line)
            shown.add_row(name, *_picture_cells(line))
    shown.add_section()
    shown.add_row("all", *_picture_cells(total))
    return shown


def _picture_cells(line: dict[str, int]) -> list[str]:
    cells = [f"{line[name]:,}" for name in ("train", "validation", "patches")]
    pictures = max(line["train"] + line["validation"], 1)
    return [*cells, f"{line['patches'] / pictures:.1f}", f"{line['patches'] / max(line['tokens'], 1):.2f}"]


def picture_mix(args: DataArgs) -> PictureMix | None:
    """The pictures that are asked for. Raises ValueError for flags that ask for pictures without a share."""
    from nanok3.data.files import check_file
    from nanok3.data.pictures.kinds import PROFILE_KINDS, PictureMix

    if args.pictures == 0:
        if args.picture_kinds or args.contact_sheet is not None or args.picture_documents != DataArgs.picture_documents:
            wrong = "picture_documents, picture_kinds and contact_sheet need a share, as in --pictures 0.2"
            raise ValueError(f"pictures: 0; {wrong}")
        return None
    if args.contact_sheet is not None:
        check_file("contact_sheet", args.contact_sheet)
    return PictureMix(args.pictures, args.picture_documents, args.picture_kinds or PROFILE_KINDS[args.profile])


def check_out(out: Path) -> None:
    """ValueError unless `out` names a folder. An empty argument arrives as the current folder, whose files would then
    lie among those that are written."""
    if out == Path():
        raise ValueError("out: empty, or the current folder; expected the name of a folder")
    if out.exists() and not out.is_dir():
        raise ValueError(f"out: {out} is a file; expected the name of a folder")


def main(args: DataArgs) -> None:
    """Run the command. Raises ValueError for wrong arguments or unreadable input."""
    import time

    from rich.console import Console

    from nanok3.data.contact_sheet import write_sheet
    from nanok3.data.plan import mixture
    from nanok3.data.prepared import prepare
    from nanok3.data.tokenizer import Tokenizer

    check_out(args.out)
    console, start = Console(), time.perf_counter()
    sources, pictures = mixture(args.profile, args.sources), picture_mix(args)
    tokenizer = Tokenizer.load(args.tokenizer)
    reports = Reports(console)
    with console.status("preparing") as status:
        manifest = prepare(
            sources, tokenizer, args.out, args.validation, args.seed, args.cache, reports, status.update, pictures
        )
    console.print(table(manifest))
    if pictures is not None:
        console.print(picture_table(manifest))
    if args.contact_sheet is not None:
        shown = write_sheet(args.out, args.contact_sheet)
        console.print(f"{args.contact_sheet} shows {shown} picture documents", markup=False, soft_wrap=True)
    console.print(f"{args.out} is ready after {time.perf_counter() - start:.1f} s", markup=False, soft_wrap=True)
