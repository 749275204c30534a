"""`POST /admin/save` and `/admin/load`: one conversation's states and latents in a file of its own.

    {"file": "trip", "messages": [...]}     the fields of a chat request; or "prompt": text or ids
    {"file": "trip"}                        -> its tokens are in the prefix cache again

Files lie in one folder of the server and are named by plain words, so a request reaches no other. A file of another
model, other weights or another layout is refused (offload.py). Pictures are not kept: what follows one is not saved.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from nanok3.serve.fields import Fields, RequestError, read_json
from nanok3.serve.offload import load_conversation, save_conversation
from nanok3.serve.sampling_fields import allowed_ids, is_id
from nanok3.serve.server import Call, Server, in_thread


async def save(server: Server, call: Call) -> dict[str, Any]:
    """Write what is cached of a conversation; how many of its tokens that are."""
    f = Fields(await in_thread(read_json, call.body))
    path, salt = _path(server, f), _salt(f)
    if f.has("messages"):
        ids = (await server.read_chat({name: f.given[name] for name in f.given if name != "file"})).ids
    else:
        ids = await in_thread(_ids, server, f)
    kept = await in_thread(_refusing, f, save_conversation, server.engine, ids, path, salt)
    return {"file": path.name, "tokens": len(ids), "saved_tokens": kept, "bytes": path.stat().st_size}


async def load(server: Server, call: Call) -> dict[str, Any]:
    """Read a file into the prefix cache."""
    f = Fields(await in_thread(read_json, call.body))
    path = _path(server, f)
    if not path.is_file():
        raise RequestError(f"file: no conversation {path.name!r} was saved here", "file", "not_found", 404)
    ids = await in_thread(_refusing, f, load_conversation, server.engine, path, _salt(f))
    return {"file": path.name, "tokens": len(ids)}


def _path(server: Server, f: Fields) -> Path:
    folder = server.settings.conversations
    if folder is None or server.engine.offload is None:
        raise RequestError("this server keeps no conversations; it needs --cache-folder", None, "not_supported", 501)
    name = f.string("file")
    if name is None or not re.fullmatch(r"\w[\w.-]{0,127}", name, re.ASCII):
        raise f.refuse("file", "a name of letters, digits, '_', '.' and '-', 1 to 128 of them")
    return folder / name


def _salt(f: Fields) -> tuple[bytes, ...]:
    salt = f.string("cache_salt")
    return () if salt is None else (salt.encode("utf-8", "replace"),)


def _ids(server: Server, f: Fields) -> list[int]:
    prompt, size = f.get("prompt"), server.tokenizer.vocab_size
    if isinstance(prompt, str):
        return server.tokenizer.encode(prompt)
    if not isinstance(prompt, list) or not all(is_id(token, size) for token in prompt):
        raise f.refuse("prompt", f"a string or a list, each entry {allowed_ids(size)}; or messages in its place")
    return prompt


def _refusing(f: Fields, function: Any, *arguments: Any) -> Any:
    """A file or a conversation that will not do is the asker's mistake."""
    try:
        return function(*arguments)
    except ValueError as error:
        raise RequestError(str(error), "file") from None
