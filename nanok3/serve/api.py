"""The HTTP API as an ASGI app: which function answers which path.

    POST /v1/chat/completions   POST /v1/completions      GET /v1/models, /v1/models/{model}
    POST /v1/responses          POST /v1/messages, /v1/messages/count_tokens
    POST, GET, DELETE /v1/files, /v1/files/{file}, /v1/files/{file}/content
    POST /tokenize, /detokenize, /apply-template          GET /tokenizer_info, /health, /ready, /metrics, /v1/loads
    POST /admin/flush, /admin/save, /admin/load, /admin/reload           GET /  the chat page

FastAPI carries it and writes /openapi.json. Bodies are read by protocol.py, not by annotations: its rules have an
error for each field that names what is allowed, and its cost is microseconds. The package is an optional one, so it is
imported inside `make_app`, and endpoints know nothing of it.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanok3.data.tokenizer import Tokenizer
from nanok3.serve import (
    chat_api,
    completions_api,
    conversations_api,
    files_api,
    messages_api,
    openapi,
    page,
    reload_api,
    responses_api,
    status_api,
    tokens_api,
)
from nanok3.serve.answers import ClientGone
from nanok3.serve.engine import Engine
from nanok3.serve.fields import RequestError
from nanok3.serve.files_api import Attachment
from nanok3.serve.http_gate import FACTS, Gate, error_answer
from nanok3.serve.server import Call, Constrain, Server, ServerSettings

if TYPE_CHECKING:
    from fastapi import FastAPI, Request, Response

Found = Mapping[str, Any] | bytes | Attachment | AsyncIterator[bytes]
"""What an endpoint returns: JSON, plain text, a file, or a stream of server-sent events."""


@dataclass(frozen=True)
class Route:
    """One path."""

    method: str
    path: str
    answer: Callable[[Server, Call], Awaitable[Found]]
    summary: str
    body: Mapping[str, Any] | None = None
    """JSON schema of the request, for /openapi.json."""
    kinds: tuple[str, ...] = ("application/json",)
    """Content types of the answer."""
    asked: str = "application/json"
    """That of the request."""
    query: Mapping[str, Any] | None = None
    """JSON schemas of what may stand behind the path."""


SPOKEN = ("application/json", "text/event-stream")
ROUTES = (
    Route("POST", "/v1/chat/completions", chat_api.chat_completions, "The next message", openapi.CHAT, SPOKEN),
    Route("POST", "/v1/completions", completions_api.completions, "Continue texts", openapi.COMPLETION, SPOKEN),
    Route(
        "POST",
        "/v1/responses",
        responses_api.responses,
        "The same, as OpenAI's Responses API",
        openapi.RESPONSE,
        SPOKEN,
    ),
    Route(
        "POST", "/v1/messages", messages_api.messages, "The same, as Anthropic's Messages API", openapi.MESSAGES, SPOKEN
    ),
    Route("POST", "/v1/messages/count_tokens", messages_api.count_tokens, "Tokens of a prompt", openapi.MESSAGES),
    Route("POST", "/v1/files", files_api.upload, "Upload a file", openapi.FILE, asked="multipart/form-data"),
    Route("GET", "/v1/files", files_api.files, "The files of this client", query=openapi.FILES_QUERY),
    Route("GET", "/v1/files/{file}", files_api.file, "One of them"),
    Route("GET", "/v1/files/{file}/content", files_api.content, "Its content", kinds=("application/octet-stream",)),
    Route("DELETE", "/v1/files/{file}", files_api.delete, "Delete it"),
    Route("GET", "/v1/models", status_api.models, "The models served here"),
    Route("GET", "/v1/models/{model:path}", status_api.model, "One of them"),
    Route("POST", "/tokenize", tokens_api.tokenize, "Ids of a text or a conversation", openapi.TOKENIZE),
    Route("POST", "/detokenize", tokens_api.detokenize, "Text of ids", openapi.DETOKENIZE),
    Route("GET", "/tokenizer_info", tokens_api.tokenizer_info, "Who encodes"),
    Route("POST", "/apply-template", tokens_api.apply_template, "The prompt of a conversation", openapi.CHAT),
    Route("GET", "/health", status_api.health, "Whether the engine runs"),
    Route("GET", "/ready", status_api.ready, "Whether requests are taken"),
    Route("GET", "/metrics", status_api.metrics, "Numbers for Prometheus", kinds=("text/plain",)),
    Route("GET", "/v1/loads", status_api.loads, "How much is going on"),
    Route("POST", "/admin/flush", status_api.flush, "Forget all cached prefixes"),
    Route("POST", "/admin/reload", reload_api.reload, "Read other weights into the model", openapi.RELOAD),
    Route("POST", "/admin/save", conversations_api.save, "Write a conversation's memory into a file", openapi.SAVED),
    Route("POST", "/admin/load", conversations_api.load, "Read it again", openapi.SAVED),
)


def make_app(
    engine: Engine, tokenizer: Tokenizer, settings: ServerSettings | None = None, constrain: Constrain | None = None
) -> FastAPI:
    """The app over an engine whose thread runs, or that somebody steps."""
    try:
        from fastapi import FastAPI, Response
        from starlette.exceptions import HTTPException
        from starlette.middleware.cors import CORSMiddleware
    except ImportError:
        raise ImportError("the server needs FastAPI: pip install 'nanok3[serve]'") from None

    server = Server(engine, tokenizer, settings or ServerSettings(), constrain)
    app = FastAPI(title="nanok3", docs_url=None, redoc_url=None)  # their pages load scripts from the web
    for route in ROUTES:
        app.add_api_route(
            route.path,
            _endpoint(server, route),
            methods=[route.method],
            summary=route.summary,
            name=route.path,
            openapi_extra=openapi.operation(route.path, route.body, route.asked, route.query),
            responses=openapi.responses(route.kinds),
            response_class=Response,
        )
    for path, (content, kind) in page.files().items():
        app.add_route(path, _file(content, kind), methods=["GET"], include_in_schema=False)
    app.add_exception_handler(HTTPException, _not_there)
    app.add_middleware(Gate, settings=server.settings.gate)
    if server.settings.origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=server.settings.origins, allow_methods=["*"], allow_headers=["*"]
        )
    return app


def _endpoint(server: Server, route: Route) -> Callable[[Any], Awaitable[Any]]:
    """A function as FastAPI wants it. It reads annotations, which here cannot name what may not be installed."""
    from fastapi import Request
    from starlette.requests import ClientDisconnect

    async def endpoint(request: Any) -> Any:
        try:
            body = await request.body()
        except ClientDisconnect:
            raise ClientGone from None
        call = Call(
            body, request.path_params, request.headers, request.receive, request.scope[FACTS], request.query_params
        )
        return _response(await route.answer(server, call))

    endpoint.__annotations__ = {"request": Request}
    return endpoint


def _file(content: bytes, kind: str) -> Callable[[Any], Awaitable[Response]]:
    """A function that answers with a file of the page."""
    from starlette.responses import Response

    async def file(request: Any) -> Response:
        return Response(content, headers={**page.HEADERS, "content-type": kind})

    return file


def _response(found: Found) -> Response:
    from starlette.responses import Response, StreamingResponse

    if isinstance(found, bytes):
        return Response(found, media_type="text/plain; version=0.0.4")
    if isinstance(found, Attachment):
        return Response(found.content, headers=found.headers)
    if isinstance(found, Mapping):
        return Response(json.dumps(found), media_type="application/json")
    kept = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # proxies shall pass each event on
    return StreamingResponse(found, media_type="text/event-stream", headers=kept)


async def _not_there(request: Request, error: Any) -> Response:
    """A path or a method that does not exist."""
    from starlette.responses import Response

    what = f"{request.method} {request.url.path}: {error.detail}"
    status, headers, body = error_answer(RequestError(what, None, "not_found", error.status_code), request.url.path)
    return Response(body, status, {key.decode(): value.decode() for key, value in headers} | (error.headers or {}))
