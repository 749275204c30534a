"""A tokenizer in GGUF's terms: tokens as printable text, and merges instead of ranks.

Our tokenizer merges the two neighbours whose union has the lowest rank; llama.cpp merges the pair that stands first in
a list. Cutting every token by the ranks below its own leaves the two halves from which it is made:

    merges = [halves(token) for token by rank if it has two]

The cutting of text into words is named, not written: `kimi-k2` is K3's pattern, and that program's own code for it.
There it is coarser where a lower-case letter meets an upper-case one, which changes nothing, since no token spans such
a place; and finer at combining marks, so that Hindi, for one, can get other ids than ours.

Reserved ids are control tokens: no text typed by a user becomes one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nanok3.quant.gguf import Value

PRE_TOKENIZER = "kimi-k2"
NORMAL, CONTROL, UNUSED = 1, 3, 5


def without_vocabulary() -> dict[str, Value]:
    """A model that is spoken to in ids."""
    return {"tokenizer.ggml.model": "none"}


def vocabulary(
    tokens: Sequence[bytes], special: Mapping[str, int], vocab_size: int, ids: Mapping[str, int]
) -> dict[str, Value]:
    """tokens: the bytes of each rank; special: the reserved ids, by name, behind them; vocab_size: rows of the model's
    head, of which the last may have no token; ids: `bos`, `eos` and the like. ValueError where two tokens would look
    alike or the head is too small."""
    texts = [printable(token) for token in tokens] + sorted(special, key=special.__getitem__)
    if len(texts) > vocab_size:
        raise ValueError(f"the tokenizer has {len(texts)} ids, the model only {vocab_size}; it is another's")
    kinds = [NORMAL] * len(tokens) + [CONTROL] * len(special) + [UNUSED] * (vocab_size - len(texts))
    texts += [f"<|unused_{i}|>" for i in range(len(texts), vocab_size)]
    if len(set(texts)) != vocab_size:
        twice = next(text for text in texts if texts.count(text) > 1)
        raise ValueError(f"two tokens are both written {twice!r}, which llama.cpp cannot tell apart")
    pairs = merges(tokens)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": PRE_TOKENIZER,
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": kinds,
        **({"tokenizer.ggml.merges": pairs} if pairs else {}),  # a tokenizer of bytes has none
        **{f"tokenizer.ggml.{name}_token_id": token for name, token in ids.items()},
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_eos_token": False,
    }


def merges(tokens: Sequence[bytes]) -> list[str]:
    """`left right` for every token that two others make, by rank."""
    ranks = {token: rank for rank, token in enumerate(tokens)}
    pairs = [halves(token, ranks) for token in tokens]
    return [f"{printable(pair[0])} {printable(pair[1])}" for pair in pairs if len(pair) == 2]


def halves(token: bytes, ranks: Mapping[bytes, int]) -> list[bytes]:
    """What is left of `token` when it is merged by ranks below its own: two parts, or one for a single byte, or more
    for a token that no merging reaches."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 1:
        unions = [ranks.get(left + right, len(ranks)) for left, right in zip(parts, parts[1:])]
        lowest = min(unions)
        if lowest >= ranks[token]:
            break
        at = unions.index(lowest)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def printable(token: bytes) -> str:
    """Bytes as the characters by which byte-level BPE files write them: printable Latin-1 as itself, the other 68
    bytes as the characters from U+0100 on."""
    return "".join(_CHARACTERS[byte] for byte in token)


def _characters() -> list[str]:
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]


_CHARACTERS = _characters()
