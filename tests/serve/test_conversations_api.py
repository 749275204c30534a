"""What a real model's server keeps beyond its pool and its life: evicted prefixes, and conversations in files."""

from __future__ import annotations

import pytest
import torch
from served import TOKENIZER, Served, message, served, user

import nanok3
from nanok3.config import K3Config
from nanok3.model.decoder import K3
from nanok3.stages.serve import ServeArgs, open_app

pytestmark = pytest.mark.usefixtures("unchecked")
GREEDY = {"temperature": 0, "max_tokens": 8}
TEXT = "Once upon a time there was a small language model that had read very little. "
ADMIN = {"authorization": "Bearer root"}


def save_model(path, seed=3):
    torch.manual_seed(seed)
    cfg = K3Config.tiny(initializer_range=0.25).at_depth(4).with_vocabulary(TOKENIZER.vocab_size + 64)
    nanok3.save(K3(cfg), path)
    TOKENIZER.save(path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("run") / "tiny-model")


class Running:
    """`nanok3 serve` in this process, until the block ends as SIGTERM would end it."""

    def __init__(self, folder, cache, **flags):
        small = {"memory": 0.0005, "hash_block": 16, "dtype": "float32", "device": "cpu", "admin_key": "root"}
        args = ServeArgs(model=folder, cache_folder=cache, **{**small, **flags})
        self.app, self.engine, _ = open_app(args)

    def __enter__(self):
        self.engine.start()
        return Served(self.app, self.engine)

    def __exit__(self, *_):
        assert self.engine.drain()


def complete(server, text=TEXT):
    body = server.post("/v1/completions", {"prompt": text, **GREEDY, "logprobs": 0}).json()
    return body["choices"][0]["logprobs"]["tokens"], body["usage"]["cached_tokens"]


def numbers(server):
    lines = server.get("/metrics").text.splitlines()
    return {k: float(v) for k, v in (line.rsplit(" ", 1) for line in lines if line.startswith("nanok3_offload"))}


def test_an_evicted_prefix_outlives_the_server(folder, tmp_path):
    with Running(folder, tmp_path) as server:
        said, cached = complete(server)
        assert cached == 0
        others = (f"{k} {TEXT[::-1]}" for k in range(40))  # the pool has no room for all of these
        while not numbers(server)['nanok3_offload_units_total{event="stored"}']:
            complete(server, next(others))
    with Running(folder, tmp_path, cache_memory="1MiB") as server:
        assert numbers(server)['nanok3_offload_bytes{tier="disk"}'] > 0
        again, cached = complete(server)
        assert again == said and cached == (len(TEXT) - 1) // 16 * 16
        found = numbers(server)
        assert found["nanok3_offload_hits_total"] == found["nanok3_offload_restore_seconds_count"] == 1
        assert found["nanok3_offload_hit_tokens_total"] == cached
        assert found['nanok3_offload_units_kept{tier="disk"}'] > 0
        loads = server.get("/v1/loads").json()["offload_bytes"]
        assert loads["disk"] == found['nanok3_offload_bytes{tier="disk"}'] and loads["memory"] <= 1 << 20


def test_other_weights_do_not_find_it(folder, tmp_path):
    with Running(folder, tmp_path / "cache") as server:
        complete(server)
    other = save_model(tmp_path / "other", seed=4)
    with Running(other, tmp_path / "cache") as server:
        assert complete(server)[1] == 0 and numbers(server)["nanok3_offload_hits_total"] == 0


def test_a_conversation_is_saved_and_loaded(folder, tmp_path):
    turn = [user(TEXT)]
    with Running(folder, tmp_path) as server:
        asked = {"messages": turn, **GREEDY}
        answer = server.post("/v1/chat/completions", asked).json()["choices"][0]["message"]
        saved = server.post("/admin/save", {"file": "trip", "messages": turn}, ADMIN).json()
        assert saved["saved_tokens"] > len(TEXT) and saved["bytes"] > saved["saved_tokens"]
        server.post("/admin/flush", headers=ADMIN)
        assert server.post("/admin/load", {"file": "trip"}, ADMIN).json()["tokens"] == saved["tokens"]
        again = server.post("/v1/chat/completions", asked).json()
        assert again["choices"][0]["message"] == answer
        assert again["debug"][0]["cached_tokens"] == saved["saved_tokens"]
        for body, status, what in [
            ({"file": "../trip"}, 400, "a name of letters"),
            ({}, 400, "a name of letters"),
            ({"file": "none"}, 404, "no conversation 'none'"),
            ({"file": "trip", "cache_salt": "mine"}, 400, "the salt it was saved with"),
        ]:
            refused = server.post("/admin/load", body, ADMIN)
            assert refused.status_code == status and what in refused.json()["error"]["message"]
        for body, what in [
            ({"file": "x", "prompt": "never said here"}, "nothing is cached"),
            ({"file": "x"}, "prompt"),
        ]:
            refused = server.post("/admin/save", body, ADMIN)
            assert refused.status_code == 400 and what in refused.json()["error"]["message"]
        assert server.post("/admin/load", {"file": "trip"}).status_code == 401
    file = tmp_path / "conversations" / "trip"
    with Running(save_model(tmp_path / "other", seed=4), tmp_path / "others") as server:
        (tmp_path / "others" / "conversations").mkdir(parents=True)
        (tmp_path / "others" / "conversations" / "trip").write_bytes(file.read_bytes())
        refused = server.post("/admin/load", {"file": "trip"}, ADMIN)
        assert refused.status_code == 400 and "another model" in refused.json()["error"]["message"]


def test_a_server_without_a_folder_says_so():
    from nanok3.serve.http_gate import GateSettings
    from nanok3.serve.server import ServerSettings

    with served(message(), server=ServerSettings(gate=GateSettings(admin_key="root"))) as stub:
        refused = stub.post("/admin/save", {"file": "x", "prompt": "a"}, ADMIN)
        assert refused.status_code == 501 and "--cache-folder" in refused.json()["error"]["message"]
        assert "offload" not in stub.get("/metrics").text and "offload_bytes" not in stub.get("/v1/loads").json()


@pytest.mark.parametrize(
    ("flags", "wrong"),
    [
        ({"cache_disk": "1GiB"}, "cache_disk is 1GiB; it needs --cache-folder"),
        ({"cache_memory": "much"}, "cache_memory is 'much'; allowed: a number with a unit"),
        ({"cache_memory": "1GiB", "prefix_cache": False}, "allowed: no --no-prefix-cache"),
        ({"cache_memory": "1GiB", "scripted": "x"}, "allowed: no --scripted"),
    ],
)
def test_flags_that_are_mistakes(flags, wrong):
    with pytest.raises(ValueError, match=wrong):
        open_app(ServeArgs(**flags))
