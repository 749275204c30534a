"""`/tokenize`, `/detokenize` and `/apply-template`: what a prompt is, before it costs anything.

A text is tokenized as text: names of control tokens in it are letters. A conversation is rendered as for an answer.
"""

from __future__ import annotations

from typing import Any

from nanok3.serve.fields import Fields, RequestError, read_json, refuse
from nanok3.serve.protocol import MAX_TOKENS
from nanok3.serve.sampling_fields import allowed_ids, is_id
from nanok3.serve.server import Call, Server, in_thread

MOST_CHARACTERS = 4 * MAX_TOKENS
"""Of a text to tokenize."""


async def tokenize(server: Server, call: Call) -> dict[str, Any]:
    """{"prompt": text} or the fields of a chat request; with "return_token_strs" the tokens' texts too."""
    f = Fields(await in_thread(read_json, call.body))
    server.check_model(f.string("model"))
    if f.has("messages"):
        ids = (await server.read_chat(f.given, call)).ids
    else:
        ids = await in_thread(_encoded, server, f)
    found = {"count": len(ids), "max_model_len": server.engine.context, "tokens": ids}
    if f.boolean("return_token_strs"):
        found["token_strs"] = await in_thread(lambda: [server.tokenizer.token_name(token) for token in ids])
    return found


def _encoded(server: Server, f: Fields) -> list[int]:
    text = f.string("prompt")
    if text is None:
        raise f.refuse("prompt", "a string, or messages in its place")
    if len(text) > MOST_CHARACTERS:
        raise RequestError(f"prompt has {len(text)} characters; allowed: {MOST_CHARACTERS}", "prompt")
    return server.tokenizer.encode(text)


async def detokenize(server: Server, call: Call) -> dict[str, Any]:
    """{"tokens": ids}"""
    return {"prompt": await in_thread(_decoded, server, call.body)}


def _decoded(server: Server, body: bytes) -> str:
    f = Fields(read_json(body))
    server.check_model(f.string("model"))
    if not isinstance(f.get("tokens"), list):
        raise f.refuse("tokens", "a list of token ids")
    ids = f.list("tokens")
    if len(ids) > MAX_TOKENS:
        raise RequestError(f"tokens has {len(ids)} ids; allowed: {MAX_TOKENS}", "tokens")
    for k, token in enumerate(ids):
        if not is_id(token, server.tokenizer.vocab_size):
            raise refuse(f"tokens[{k}]", token, allowed_ids(server.tokenizer.vocab_size))
    return server.tokenizer.decode(ids)


async def tokenizer_info(server: Server, call: Call) -> dict[str, Any]:
    """What evaluation harnesses ask before they let the server encode. The end has an id and no text: no text encodes
    to it, and a harness that took the ids of its name for it would score another prompt without a word."""
    return {
        "tokenizer_class": "nanok3",
        "vocab_size": server.tokenizer.vocab_size,
        "bos_token": None,
        "eos_token": None,
        "eos_token_id": server.tokenizer.eos_id,
    }


async def apply_template(server: Server, call: Call) -> dict[str, Any]:
    """The prompt of a chat request as text, and in the parts that are encoded one by one: only what is `special` can
    be a control token."""
    asked = await server.read_chat(call.body, call)
    parts = [{"text": segment.text, "special": segment.allow_special} for segment in asked.segments]
    return {"prompt": "".join(segment.text for segment in asked.segments), "segments": parts, "count": len(asked.ids)}
