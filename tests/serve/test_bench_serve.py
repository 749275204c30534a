"""bench/serve.py against a server of the test: figures from known times, failures counted, bounds kept."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture(scope="module")
def serve():
    """The script, imported as it finds its neighbours when it runs."""
    sys.path.insert(0, str(BENCH))
    import serve

    yield serve
    sys.path.remove(str(BENCH))


class Handler(BaseHTTPRequestHandler):
    """Answers with as many pieces as tokens were asked for; half of the prompt comes from the cache."""

    def log_message(self, *_):
        pass

    def do_GET(self):
        self._head("application/json")
        self.wfile.write(json.dumps({"data": [{"id": "stub"}]}).encode())

    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.bodies.append(body)
            server.now += 1
            server.most = max(server.most, server.now)
        time.sleep(0.01)
        if next(server.count) in server.failing:
            self.send_error(429)
        else:
            self._stream(body)
        with server.lock:
            server.now -= 1

    def _stream(self, body):
        self._head("text/event-stream")
        chat = "messages" in body
        said = {"delta": {"content": "x"}} if chat else {"text": "x"}
        self._event({"choices": [{"index": 0, "delta": {"role": "assistant"}}]})
        self.wfile.write(b": keep-alive\n\n")
        time.sleep(self.server.first)
        if len(self.server.bodies) > self.server.answered:
            self.server.over.wait(60)
        for _ in range(body["max_tokens"]):
            self._event({"choices": [{"index": 0, **said}]})
        length = 100 if chat else len(body["prompt"])
        usage = {"prompt_tokens": length, "completion_tokens": body["max_tokens"], "cached_tokens": length // 2}
        self._event({"choices": [], "usage": usage})
        if self.server.ends:
            self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, body):
        self.wfile.write(b"data: " + json.dumps(body).encode() + b"\n\n")
        self.wfile.flush()

    def _head(self, kind):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()


@pytest.fixture
def stub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.lock, server.bodies, server.count, server.failing = threading.Lock(), [], itertools.count(), set()
    server.now = server.most = 0
    server.first, server.ends = 0.0, True
    server.answered, server.over = 1 << 30, threading.Event()
    server.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server
    server.over.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def options(serve, stub, tmp_path):
    def made(**more):
        small = {"num_prompts": 6, "max_concurrency": [2], "random_input_len": 10, "random_output_len": 3}
        return serve.Options(base_url=stub.url, json=tmp_path / "serve.json", **{**small, **more})

    return made


def figures(options):
    return json.loads(options.json.read_text())


def test_figures_and_page(serve, stub, options):
    stub.first = 0.05
    chosen = options(max_concurrency=[1, 3], random_prefix_len=30, api_key="secret", request_rate=1000)
    serve.main(chosen)
    whole = figures(chosen)
    assert [row["concurrency"] for row in whole["rows"]] == [1, 3] and whole["model"] == "stub"
    for row in whole["rows"]:
        assert (row["done"], row["failed"], row["cached_share"]) == (6, 0, 0.5)
        assert 50 <= row["ttft_p50_ms"] <= row["ttft_p90_ms"] <= row["ttft_p99_ms"] < 5000
        assert row["e2el_p50_ms"] >= row["ttft_p50_ms"] and row["itl_p50_ms"] < 50
        assert row["out_tok_per_s"] == pytest.approx(3 * row["req_per_s"])
    assert whole["tokens_per_piece"] == 1
    page = chosen.json.with_suffix(".html").read_text()
    assert "<svg" in page and "src=" not in page and "<script" not in page
    assert "secret" not in page + chosen.json.read_text()
    assert 2 <= stub.most <= 3


def test_prompts_have_the_lengths_and_the_prefix_asked_for(serve, stub, options):
    chosen = options(max_concurrency=[1, 2], random_prefix_len=7)
    serve.main(chosen)
    warm, *prompts = [body["prompt"] for body in stub.bodies[:7]]
    assert all(len(prompt) == 17 for prompt in [warm, *prompts])
    assert len({tuple(prompt[:7]) for prompt in prompts}) == 1 and prompts[0][:7] != warm[:7]
    assert len({tuple(prompt[7:]) for prompt in prompts}) == 6
    # Another level, other prompts; the same seed, the same again.
    assert stub.bodies[8]["prompt"][:7] != prompts[0][:7]
    first, stub.bodies[:] = sorted(map(str, stub.bodies)), []
    serve.main(chosen)
    assert sorted(map(str, stub.bodies)) == first


def test_chat(serve, stub, options):
    serve.main(options(endpoint="/v1/chat/completions", random_prefix_len=5))
    body = stub.bodies[1]
    assert len(body["messages"][0]["content"].split()) == 15 and "prompt" not in body
    assert body["stream_options"] == {"include_usage": True} and body["ignore_eos"] is True


def test_failures_are_counted_and_told(serve, stub, options, capsys):
    stub.failing = {2, 3}
    with pytest.raises(SystemExit) as end:
        serve.main(options())
    assert end.value.code == 1 and "status 429" in capsys.readouterr().out
    row = figures(options())["rows"][0]
    assert (row["done"], row["failed"]) == (4, 2)


def test_a_stream_that_breaks_off_has_failed(serve, stub, options):
    stub.ends = False
    with pytest.raises(SystemExit, match="broke off"):
        serve.main(options())


def test_it_ends_in_time(serve, stub, options):
    """The first request, outside of the time, is answered at once, and no other before the test is over."""
    stub.answered = 1
    with pytest.raises(SystemExit):
        serve.main(options(max_seconds=2, max_concurrency=[1], num_prompts=50))
    row = figures(options())["rows"][0]
    assert (row["done"], row["failed"]) == (0, 50)
    assert len(stub.bodies) < 50, "what had not begun in time was not sent"


def test_other_machines_are_not_asked(serve, options):
    for url in ("http://192.0.2.1:8000", "http://example.org", "ftp://127.0.0.1", "127.0.0.1:8000"):
        chosen = options()
        chosen.base_url = url
        with pytest.raises(SystemExit, match="base_url"):
            serve.main(chosen)


def test_a_server_that_is_not_there(serve, options):
    chosen = options()
    chosen.base_url = "http://127.0.0.1:9"
    with pytest.raises(SystemExit, match="no list of models"):
        serve.main(chosen)


@pytest.mark.parametrize(
    "wrong",
    [{"num_prompts": 0}, {"num_prompts": 10**6}, {"max_concurrency": [0]}, {"max_concurrency": []}, {"max_seconds": 0},
     {"random_prefix_len": -1}, {"request_rate": 0.0}, {"request_rate": math.nan}, {"cpu_time": True}],
    ids=str,
)  # fmt: skip
def test_bounds(serve, options, wrong):
    with pytest.raises(SystemExit, match=next(iter(wrong))):
        options(**wrong).check()


def test_quantiles(serve):
    assert serve.quantile([0.004, 0.001, 0.002, 0.003, 0.005], 0.5) == 3
    assert serve.quantile([0.001, 0.002], 0.9) == pytest.approx(1.9)
    assert serve.quantile([math.nan], 0.5) is None


@pytest.mark.slow
def test_a_short_soak_leaves_nothing_behind(tmp_path):
    """The script ends with status 1 for any error, any page, file or thread that is left, and memory that grew."""
    command = [sys.executable, str(BENCH / "soak.py"), "--minutes", "0.33", "--clients", "16"]
    done = subprocess.run([*command, "--json", str(tmp_path / "soak.json")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "soak.json").read_text())["rows"][0]["requests"] > 16
