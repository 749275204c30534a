"""Endpoints about the server itself: its model, whether it runs, how much it does."""

from __future__ import annotations

import asyncio
from importlib.util import find_spec
from typing import Any

from nanok3.serve.fields import RequestError
from nanok3.serve.metrics import pages
from nanok3.serve.server import Call, Server


def _entry(server: Server, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": server.created,
        "owned_by": "nanok3",
        "max_model_len": server.engine.context,
        "supports_image_in": server.sees,
        "supports_video_in": server.sees and find_spec("av") is not None,
    }


async def models(server: Server, call: Call) -> dict[str, Any]:
    """All names of the one model."""
    return {"object": "list", "data": [_entry(server, name) for name in server.settings.names]}


async def model(server: Server, call: Call) -> dict[str, Any]:
    """One of them."""
    return _entry(server, server.check_model(call.path["model"]))


async def health(server: Server, call: Call) -> dict[str, Any]:
    """503 once the engine has ended."""
    if not server.engine.alive:
        raise RequestError("the engine does not run", None, "not_running", 503, "service_unavailable")
    return {"status": "ok"}


async def ready(server: Server, call: Call) -> dict[str, Any]:
    """503 while no requests are taken."""
    if not server.engine.accepting:
        raise RequestError("the server is shutting down", None, "shutting_down", 503, "service_unavailable")
    return {"status": "ready"}


async def metrics(server: Server, call: Call) -> bytes:
    return server.metrics.text()


async def loads(server: Server, call: Call) -> dict[str, Any]:
    """What a router in front of several servers wants to know."""
    engine = server.engine
    kept = {} if engine.offload is None else {"offload_bytes": engine.offload.store.bytes_kept}
    return {
        "num_running_reqs": engine.running,
        "num_waiting_reqs": engine.waiting,
        "max_running_reqs": engine.settings.limits.max_sequences,
        "max_model_len": engine.context,
        "pages": {"total": engine.pool.pages, **pages(engine)},
        **kept,
    }


async def flush(server: Server, call: Call) -> dict[str, Any]:
    """Running answers keep what they hold."""
    await asyncio.to_thread(server.engine.flush)
    return {"status": "flushed"}
