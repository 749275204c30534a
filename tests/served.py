"""A server in the test's own process: the scripted stub, its engine in a thread, and a client that speaks ASGI."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from contextlib import contextmanager

import httpx2
import uvicorn

from nanok3.data.tokenizer import Tokenizer
from nanok3.serve.api import make_app
from nanok3.serve.engine import Engine, Settings
from nanok3.serve.scheduler import Limits
from nanok3.serve.scripted import Scripted, read_reply
from nanok3.serve.scripted_runner import ScriptedRunner
from nanok3.serve.server import ServerSettings

TOKENIZER = Tokenizer({bytes([byte]): byte for byte in range(256)})
AFTER_THOUGHT = "<|close|>think<|sep|><|open|>response<|sep|>"
END = "<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"


def message(thought="Hm.", content="Hello, world.", calls="", delay_ms=0):
    """A line of a script: an answer as a model writes it. calls: markup between `response` and the message's end."""
    parts = [thought, AFTER_THOUGHT, content]
    parts += [f"<|close|>response<|sep|>{calls}<|close|>message<|sep|><|end_of_msg|>"] if calls else [END]
    segments = [{"text": part, "special": k % 2 == 1} for k, part in enumerate(parts)]
    return {"segments": segments, "delay_ms": delay_ms}


def call(name, **arguments):
    """Markup of a tool call."""
    parts = [
        f'<|open|>argument key="{key}" type="string"<|sep|>{value}<|close|>argument<|sep|>'
        for key, value in arguments.items()
    ]
    tag = f'<|open|>call tool="{name}" index="1"<|sep|>'
    return f"<|open|>tools<|sep|>{tag}{''.join(parts)}<|close|>call<|sep|><|close|>tools<|sep|>"


class Served:
    """An app, its engine, and requests to it."""

    def __init__(self, app, engine):
        self.app, self.engine = app, engine

    def client(self, **headers):
        transport = httpx2.ASGITransport(app=self.app, raise_app_exceptions=True)
        return httpx2.AsyncClient(transport=transport, base_url="http://served", headers=headers, timeout=60)

    def request(self, method, path, body=None, headers=None, content=None):
        async def ask():
            async with self.client(**(headers or {})) as client:
                return await client.request(method, path, json=body, content=content)

        return asyncio.run(ask())

    def post(self, path, body=None, headers=None, content=None):
        return self.request("POST", path, body, headers, content)

    def get(self, path, headers=None):
        return self.request("GET", path, headers=headers)

    def together(self, *bodies, path="/v1/chat/completions", headers=None):
        """Several requests at once."""

        async def ask():
            async with self.client(**(headers or {})) as client:
                return await asyncio.gather(*(client.post(path, json=body) for body in bodies))

        return asyncio.run(ask())

    def chat(self, text="hi", headers=None, **fields):
        """The body of the answer to a message."""
        return self.post("/v1/chat/completions", {"messages": [user(text)], **fields}, headers)

    def stream(self, path="/v1/chat/completions", **body):
        """The events of a stream as JSON, and whether it was closed by [DONE]."""
        if path == "/v1/chat/completions":
            body.setdefault("messages", [user("hi")])
        response = self.post(path, {"stream": True, **body})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        return events_of(response.text)

    def is_free(self, seconds=20.0):
        """Whether all pages but the cache's are free, at once or soon."""
        end = time.monotonic() + seconds
        while not self.engine.idle and time.monotonic() < end:
            time.sleep(0.005)
        self.engine.cache.clear()
        return self.engine.idle and self.engine.pool.free == self.engine.pool.pages


def events_of(text):
    data = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    done = data[-1:] == ["[DONE]"]
    return [json.loads(one) for one in (data[:-1] if done else data)], done


def user(text):
    return {"role": "user", "content": text}


@contextmanager
def served(
    *lines,
    server=None,
    context=8192,
    pages=1024,
    limits=None,
    constrain=None,
    start=True,
    tokenizer=TOKENIZER,
    **settings,
):
    """A server that says these lines of a script. settings: of the engine."""
    replies = [read_reply(json.dumps(line), tokenizer) for line in lines or [message()]]
    runner = ScriptedRunner(Scripted(replies, tokenizer), context, pages)
    settings = {"hash_block": 64, **settings}
    engine = Engine(
        runner,
        {tokenizer.eos_id, tokenizer.end_of_msg_id},
        [],
        Settings(limits=limits or Limits(budget=512, max_sequences=8), **settings),
    )
    app = make_app(engine, tokenizer, server or ServerSettings(names=("stub",)), constrain)
    if start:
        engine.start()
    try:
        yield Served(app, engine)
    finally:
        engine.drain(0)


@contextmanager
def listening(app):
    """The app on a free port of this machine, for clients that cannot do without: its address, /v1 included."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, access_log=False, timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1"
    finally:
        server.should_exit = True
        thread.join(10)
