r"""Text to ids and back: byte-level BPE in K3's own format, trained with `tokenizers`, run by `tiktoken`.

A file `tiktoken.model` holds one line a token, `base64(bytes) rank`. Text is cut by `PATTERN` into words,
digit groups, punctuation and blanks; inside each piece the neighbours of lowest rank are merged until none is
left:

    merge picks   argmin over neighbours (a, b) of   rank(a + b)

After the n ranks follow 256 reserved ids for control tokens, the named ones at the offsets of the release
(vocabulary 163,584 + 256 = 163,840). Text never yields one of them: `[EOS]` typed by a user stays five
characters. Only `encode(text, allow_special=True)`, for markup that the program itself wrote, recognizes them.

Sources: the public tokenizer files of the Kimi family (format, pattern, names; K3 kept K2's ranks and
pattern). Like the official code, text is first cut into 400,000 characters and there into runs of at most
25,000 blanks or non-blanks, each encoded alone; a lone surrogate becomes U+FFFD. What is ours: the training,
and the names at the same offsets in vocabularies of other sizes.
"""

from __future__ import annotations

import base64
import codecs
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, SupportsInt

import tiktoken
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from nanok3.data.clean import without_lone_surrogates
from nanok3.data.files import write_file

_LEAD = r"[^\r\n\p{L}\p{N}]?"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        f"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTION}",
        f"{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
"""K3's pre-tokenizer, a regular expression of Rust's dialect (`&&` intersects character classes)."""

RESERVED = 256
"""Ids kept for control tokens behind the ranks."""

MAX_VOCAB_SIZE = 1 << 24
"""The largest vocabulary that is trained, a hundred times that of the release."""

SPECIAL_OFFSETS = {
    "[BOS]": 0,
    "[EOS]": 1,
    "<|end_of_msg|>": 2,
    "<|open|>": 3,
    "<|close|>": 4,
    "<|sep|>": 5,
    "[start_header_id]": 6,
    "[end_header_id]": 7,
    "[EOT]": 9,
    "<|media_begin|>": 18,
    "<|media_content|>": 19,
    "<|media_end|>": 20,
    "<|media_pad|>": 21,
    "<osagent_mode>": 65,
    "[UNK]": 254,
    "[PAD]": 255,
}
"""Names of reserved slots, counted from the first reserved id. The others are `<|reserved_token_{id}|>`."""

MODEL_FILE = "tiktoken.model"
CONFIG_FILE = "tokenizer_config.json"
_NOT_SKIPPED = {"<|open|>", "<|close|>", "<|sep|>"}
_LINE = re.compile(rb"([A-Za-z0-9+/]+={0,2}) ([0-9]{1,9})")
_PIECE_CHARS = 400_000
_RUN_CHARS = 25_000
_LONG_RUN = re.compile(rf"(?<!\S)\S{{{_RUN_CHARS + 1},}}|(?<!\s)\s{{{_RUN_CHARS + 1},}}")


def _cut(text: str) -> Iterator[str]:
    """The parts that are encoded one by one: at most 400,000 characters, no run of one kind beyond 25,000."""
    for begin in range(0, len(text), _PIECE_CHARS):
        piece = text[begin : begin + _PIECE_CHARS]
        start = 0
        for run in _LONG_RUN.finditer(piece) if len(piece) > _RUN_CHARS else ():
            for end in range(run.start() + _RUN_CHARS, run.end(), _RUN_CHARS):
                yield piece[start:end]
                start = end
        yield piece[start:]


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Token bytes -> rank. Raises ValueError unless the ranks are 0..n-1 and every single byte is a token."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line:
            continue
        parts = _LINE.fullmatch(line)
        if parts is None or len(parts[1]) % 4:
            raise ValueError(f"{path}: line {number} is {line[:60]!r}; expected 'base64 rank'")
        ranks[base64.b64decode(parts[1])] = int(parts[2])
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError(f"{path}: {len(ranks)} distinct tokens do not have the ranks 0 to {len(ranks) - 1}")
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise ValueError(f"{path}: byte {missing[0]} is not a token ({len(missing)} of 256 missing)")
    return ranks


def _read_names(path: Path, first: int) -> dict[int, str]:
    """Names of reserved ids from the `added_tokens_decoder` of a tokenizer_config.json (earlier models of the
    family used the slots otherwise), those of the release if there is no such file or entry."""
    added = _read_added(path) if path.exists() else {}
    if not added:
        return {first + offset: name for name, offset in SPECIAL_OFFSETS.items()}
    names: dict[int, str] = {}
    for token, entry in added.items():
        if not re.fullmatch(r"[0-9]{1,9}", token):
            raise ValueError(f"{path}: special id {token[:60]!r}; expected a number")
        name = entry.get("content") if isinstance(entry, dict) else None
        if not isinstance(name, str) or not name or name != without_lone_surrogates(name):
            raise ValueError(f"{path}: special id {token} is {str(entry)[:60]!r}; expected a mapping with its content")
        if name in names.values():
            raise ValueError(f"{path}: two special ids share the name {name!r}")
        names[int(token)] = name
    outside = [token for token in names if not first <= token < first + RESERVED]
    if outside:
        raise ValueError(f"{path}: special id {outside[0]} is outside {first} to {first + RESERVED - 1}")
    return names


def _read_added(path: Path) -> dict[str, Any]:
    """The `added_tokens_decoder` of a tokenizer_config.json, empty if it has none."""
    try:
        config = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON ({error})") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path}: {str(config)[:60]}; expected a mapping")
    added = config.get("added_tokens_decoder")
    if not isinstance(added, dict | None):
        raise ValueError(f"{path}: added_tokens_decoder is {str(added)[:60]!r}; expected a mapping")
    return added or {}


class Tokenizer:
    """Ranks and reserved names of one vocabulary. Build it by `Tokenizer.load` or `train_tokenizer`."""

    def __init__(self, ranks: dict[bytes, int], names: dict[int, str] | None = None) -> None:
        first = len(ranks)
        if names is None:
            names = {first + offset: name for name, offset in SPECIAL_OFFSETS.items()}
        slots = range(first, first + RESERVED)
        self.special = {names.get(slot, f"<|reserved_token_{slot}|>"): slot for slot in slots}
        if len(self.special) != RESERVED:
            raise ValueError(f"special tokens: two of the {len(names)} reserved ids share a name")
        self.vocab_size = first + RESERVED
        # By slot, not by name: earlier models of the family name them differently.
        self.bos_id = first + SPECIAL_OFFSETS["[BOS]"]  # declared by the release, never put before a text
        self.eos_id = first + SPECIAL_OFFSETS["[EOS]"]  # ends a training document
        self.end_of_msg_id = first + SPECIAL_OFFSETS["<|end_of_msg|>"]  # ends a chat message
        self.pad_id = first + SPECIAL_OFFSETS["[PAD]"]  # fills a batch
        self._ranks = ranks
        self._bpe = tiktoken.Encoding("nanok3", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=self.special)

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Tokenizer:
        """Read `tiktoken.model` from a folder (or the file itself), and special names from the folder's
        `tokenizer_config.json` where there is one. Raises ValueError for a missing or malformed file."""
        path = Path(folder)
        path = path / MODEL_FILE if path.is_dir() else path
        if not path.is_file():
            raise ValueError(f"tokenizer: no {path}; expected {MODEL_FILE} or its folder (nanok3 tokenizer makes one)")
        ranks = _read_ranks(path)
        return cls(ranks, _read_names(path.parent / CONFIG_FILE, len(ranks)))

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write `tiktoken.model` and `tokenizer_config.json` into `folder`, each whole or not at all."""
        added = {
            str(token): {"content": name, "special": name not in _NOT_SKIPPED}
            for name, token in self.special.items()
            if not name.startswith("<|reserved_token_")
        }
        config = {"added_tokens_decoder": added, "eos_token": self.token_name(self.eos_id)}
        write_file(Path(folder) / CONFIG_FILE, (json.dumps(config, indent=2) + "\n").encode())
        write_file(Path(folder) / MODEL_FILE, self.to_bytes())

    def to_bytes(self) -> bytes:
        """The content of `tiktoken.model`."""
        by_rank = sorted(self._ranks, key=self._ranks.__getitem__)
        return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(by_rank))

    def fingerprint(self) -> str:
        """sha256 of `tiktoken.model` and the special names: equal fingerprints give equal ids."""
        return hashlib.sha256(self.to_bytes() + repr(sorted(self.special.items())).encode()).hexdigest()

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        """Ids of `text`. Names of control tokens inside it are ordinary text unless `allow_special`."""
        if allow_special:
            return [token for part in _cut(text) for token in self._bpe.encode(part, allowed_special="all")]
        return [token for part in _cut(text) for token in self._bpe.encode_ordinary(part)]

    def encode_batch(self, texts: Iterable[str], threads: int = 8) -> list[list[int]]:
        """`[encode(text) for text in texts]`, over `threads` threads."""
        parts = [list(_cut(text)) for text in texts]
        flat = [part for cut in parts for part in cut]
        encoded = iter(self._bpe.encode_ordinary_batch(flat, num_threads=threads))
        return [[token for ids in islice(encoded, len(cut)) for token in ids] for cut in parts]

    def decode(self, ids: Iterable[SupportsInt]) -> str:
        """Text of `ids` (integers, or a row of an array or tensor); bytes that are not UTF-8 become U+FFFD, control
        tokens their names. Raises ValueError for an id outside the vocabulary."""
        tokens = [self._known(int(token)) for token in ids]
        return self._bpe.decode(tokens)

    def token_bytes(self, token: int) -> bytes:
        """The bytes one id stands for; of a control token, those of its name."""
        return self._bpe.decode_single_token_bytes(self._known(token))

    def token_name(self, token: int) -> str:
        """What a person may be shown for one id: its text, bytes that are not whole characters as U+FFFD."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def _known(self, token: int) -> int:
        if not 0 <= token < self.vocab_size:
            raise ValueError(f"token id {token} is outside the vocabulary, 0 to {self.vocab_size - 1}")
        return token


class StreamDecoder:
    """Decodes ids one at a time and gives out whole characters only: what a token leaves unfinished waits for
    the next one. The parts together are `decode` of all ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The characters completed by `token`, possibly none."""
        return self._utf8.decode(self._tokenizer.token_bytes(token))

    def flush(self) -> str:
        """The rest: U+FFFD if the stream ended inside a character, else nothing."""
        return self._utf8.decode(b"", final=True)


def _byte_alphabet() -> dict[str, int]:
    """The printable character by which byte-level BPE trainers write each byte -> that byte: the character of
    its own code where that is printable Latin-1, else the next free one from U+0100 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


def check_vocab_size(vocab_size: int) -> None:
    """ValueError for a size that no training can give."""
    if vocab_size < 256 + RESERVED:
        raise ValueError(f"vocab_size: {vocab_size} is below {256 + RESERVED}, bytes and reserved ids")
    if vocab_size > MAX_VOCAB_SIZE:
        raise ValueError(f"vocab_size: {vocab_size} is above {MAX_VOCAB_SIZE}")


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn `vocab_size - 512` merges from `texts`; 256 of the ids are the bytes and 256 the reserved ones.
    Equal texts in equal order give equal ranks. Raises ValueError if the texts hold fewer merges."""
    check_vocab_size(vocab_size)
    alphabet = _byte_alphabet()
    split = pre_tokenizers.Split(tokenizers.Regex(PATTERN), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model = tokenizers.Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - RESERVED,
        min_frequency=2,
        show_progress=False,
        initial_alphabet=sorted(alphabet),
    )
    parts = (part for text in texts for part in _cut(without_lone_surrogates(text)))
    model.train_from_iterator(iter(lambda: list(islice(parts, 1000)), []), trainer)
    ranks = {bytes(alphabet[c] for c in token): rank for token, rank in model.get_vocab().items()}
    if len(ranks) < vocab_size - RESERVED:
        raise ValueError(
            f"vocab_size: {vocab_size} is more than the texts fill; they give {len(ranks) + RESERVED} at most"
        )
    return Tokenizer(ranks)
