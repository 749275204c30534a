"""`POST /admin/reload`: other weights for the model that is served, as rollouts need after every update.

    {"folder": "/shared/version-7", "version": 7}  ->  {"status": "reloaded", "version": 7}

Only with `nanok3 serve --allow-reload` and the admin key. The weights are read beside the engine and copied in between
two of its steps; all cached prefixes are forgotten. Answers that are under way go on with the new weights.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from nanok3.model.weights import load
from nanok3.serve.fields import Fields, RequestError, read_json
from nanok3.serve.runner import Runner
from nanok3.serve.server import Call, Server, in_thread


async def reload(server: Server, call: Call) -> dict[str, Any]:
    """The endpoint."""
    if not server.settings.reload or not isinstance(server.engine.runner, Runner):
        raise RequestError("this server keeps its weights; it needs --allow-reload", None, "not_supported", 501)
    f = Fields(await in_thread(read_json, call.body))
    folder, version = f.string("folder"), f.integer("version", 0, 2**31 - 1)
    if folder is None or not _has_model(Path(folder)):
        raise f.refuse("folder", "a folder with a model that this server can read")
    if version is None:
        raise f.refuse("version", "a number, 0 to 2147483647")
    await asyncio.to_thread(_reload, server, server.engine.runner, Path(folder), version)
    return {"status": "reloaded", "version": version}


def _has_model(folder: Path) -> bool:
    try:
        return (folder / "config.json").is_file()
    except OSError:  # a name that no file system takes
        return False


def _reload(server: Server, runner: Runner, folder: Path, version: int) -> None:
    model = runner.model
    try:
        read = load(folder, model.lm_head.weight.dtype, "cpu")
    except (ValueError, OSError) as error:  # also a file that is not there yet, or cut off
        raise RequestError(str(error), "folder") from None
    weights = read.state_dict()
    if {name: w.shape for name, w in weights.items()} != {name: w.shape for name, w in model.state_dict().items()}:
        raise RequestError(f"folder: {folder} holds a model of another shape than the one served here", "folder")

    def swap() -> None:
        model.load_state_dict(weights)
        server.engine.weight_version = version

    server.engine.ask(swap)
    server.engine.flush()
