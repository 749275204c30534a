"""Rollouts through servers: the same samples as in this process, new weights after every update, what is refused."""

from __future__ import annotations

import copy
import os
import re
import socket
import threading
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from playing import TOKENIZER, OneAnswer
from served import Served, listening

from nanok3.cli import main
from nanok3.config import K3Config
from nanok3.model.decoder import K3
from nanok3.model.weights import save
from nanok3.posttrain import rl as rl_module
from nanok3.posttrain.domains import SENTENCES
from nanok3.posttrain.effort import Budgets
from nanok3.posttrain.http_worker import HttpSpeaker, HttpWorkers, Server
from nanok3.posttrain.rl import RL
from nanok3.posttrain.rl_settings import LearnerSettings, RLSettings, RolloutSettings
from nanok3.posttrain.speaker import open_engine
from nanok3.serve.api import make_app
from nanok3.serve.http_gate import GateSettings
from nanok3.serve.server import ServerSettings

SETTINGS = RLSettings(
    iterations=2,
    problems=2,
    rollout=RolloutSettings(prompts=2, samples=3, pause=1.0, max_tokens=12),
    learner=LearnerSettings(lr=2e-3, minibatches=1),
    eval_count=0,
    save_every=0,
)


def untaught(depth=1):
    """A model of random weights: it says anything, until it is cut off."""
    torch.manual_seed(3)
    return K3(K3Config.tiny().at_depth(depth).with_vocabulary(TOKENIZER.vocab_size)).eval()


@pytest.fixture(autouse=True)
def rewards(monkeypatch):
    """So that there is something to learn from them."""
    monkeypatch.setattr(rl_module, "rewards", lambda group, counted: [float(sum(s.ids) % 3) for s in group.valid])


@contextmanager
def worker(reload=True):
    """A server with a model of other weights than the run's; its address without /v1, and the app to ask directly."""
    model = untaught()
    with torch.no_grad():
        model.lm_head.weight.zero_()
    engine = open_engine(model, TOKENIZER, 8)
    app = make_app(engine, TOKENIZER, ServerSettings(gate=GateSettings(admin_key="root"), reload=reload))
    engine.start()
    try:
        with listening(app) as base:
            yield base.removesuffix("/v1"), Served(app, engine)
    finally:
        engine.drain(0)


def played(folder, workers=None, settings=SETTINGS):
    """Two iterations: the samples of each, and the weights at the end."""
    tasks = [task for task, _ in zip(OneAnswer().tasks("train", 0), range(2))]
    budgets = Budgets({task.id: 50.0 for task in tasks})
    rl = RL(untaught(), TOKENIZER, OneAnswer(), settings, folder, budgets, lambda _: None, SENTENCES, workers=workers)
    collect, seen = rl.rollouts.collect, []

    def watched():
        groups = collect()
        seen.append(copy.deepcopy([sample for group in groups for sample in group.samples]))
        return groups

    rl.rollouts.collect = watched
    rl.step(), rl.step()
    rl.rollouts.close()
    return seen, rl.model.state_dict(), rl


def test_an_iteration_over_http_trains_on_the_same_samples(tmp_path):
    here, weights, _ = played(tmp_path / "a")
    with worker() as (one, stub), worker() as (two, other):
        there, as_well, rl = played(tmp_path / "b", HttpWorkers((one, two), "root"))
        assert stub.engine.weight_version == other.engine.weight_version == 1
        assert stub.engine.counters.said_tokens and other.engine.counters.said_tokens, "both have played"
    for ours, theirs in zip(here, there, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert (a.ids, a.places, a.versions, a.reward) == (b.ids, b.places, b.versions, b.reward)
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)
    assert {version for sample in there[1] for version in sample.versions} == {1}
    assert all(torch.allclose(weights[name], as_well[name], atol=1e-4) for name in weights)
    assert rl.speaker.said_tokens == sum(sample.output for group in there for sample in group)
    assert not list((tmp_path / "b/weights").iterdir()), "weights that were read are removed"


def test_a_pause_keeps_what_was_said(tmp_path):
    with worker() as (url, stub):
        settings = replace(SETTINGS, rollout=replace(SETTINGS.rollout, pause=0.4, prompts=3))
        seen, _, _ = played(tmp_path, HttpWorkers((url,), "root"), settings)
        assert stub.is_free()
    for sample in (sample for part in seen for sample in part):
        assert len(sample.versions) == len(sample.logprobs) == len(sample.places)
        assert sample.versions == sorted(sample.versions)


def test_servers_say_how_full_they_are(tmp_path):
    """What waits there and what runs there decide how many turns are asked for."""
    now = [0.0]
    with worker() as (url, stub):
        speaker = HttpSpeaker([url], tmp_path, lambda folder: None, clock=lambda: now[0])
        assert speaker.load() == (0, 0, 0.0)
        said = {"num_waiting_reqs": 3, "pages": {"total": 100, "latent": {"used": 60}, "any": {"free": 7}}}
        speaker.servers[0].ask = lambda method, path, body=None: said
        assert speaker.load() == (0, 0, 0.0), "not asked again at once"
        now[0] += 1.0
        speaker._at_work = [None] * 8
        assert speaker.load() == (5, 3, 0.6)
        speaker._at_work, said["pages"] = [], None
        now[0] += 1.0
        with pytest.raises(ValueError, match=r"/v1/loads does not say pages"):
            speaker.load()
        assert stub.is_free()


def test_what_the_endpoint_refuses(tmp_path):
    admin = {"Authorization": "Bearer root"}
    save(untaught(depth=2), tmp_path / "other")
    save(untaught(), tmp_path / "half")
    os.truncate(tmp_path / "half/model.safetensors", 60_000)
    with worker(reload=False) as (url, closed):
        answer = closed.post("/admin/reload", {"folder": "x", "version": 1}, admin)
        assert answer.status_code == 501 and "--allow-reload" in answer.text
        with pytest.raises(ValueError, match=r"/admin/reload answers 401"):
            Server(url).ask("POST", "/admin/reload", {})
    with worker() as (_, stub):
        for body, message in (
            ({"folder": str(tmp_path), "version": 1}, "folder is"),
            ({"folder": "x" * 9999, "version": 1}, "allowed: a folder with a model"),
            ({"folder": str(tmp_path / "half"), "version": 1}, "truncated"),
            ({"folder": str(tmp_path / "other"), "version": -1}, "version is -1"),
            ({"folder": str(tmp_path / "other")}, "version is null"),
            ({"folder": str(tmp_path / "other"), "version": 1}, "another shape"),
        ):
            answer = stub.post("/admin/reload", body, admin)
            assert answer.status_code == 400 and message in answer.text, answer.text
        answer = stub.post("/v1/completions", {"prompt": [1, 2], "return_token_ids": True})
        assert answer.status_code == 400 and "true only with logprobs" in answer.text
        asked = {"prompt": [1, 2], "return_token_ids": True, "logprobs": 0, "max_tokens": 3, "ignore_eos": True}
        choice = stub.post("/v1/completions", asked).json()["choices"][0]
        assert len(choice["token_ids"]) == 3 == len(choice["logprobs"]["token_logprobs"])
        assert choice["weight_version"] == 0


def test_mistakes(tmp_path, capsys):
    with pytest.raises(ValueError, match=r"http://127.0.0.1:9 cannot be reached"):
        HttpSpeaker(["http://127.0.0.1:9"], tmp_path, lambda folder: None)
    for url in ("ftp://x", "ftp://y:1/v1", "http://", "http:///v1", "", "http://x:port", "http://[::1", "http://x/y"):
        with pytest.raises(ValueError, match=rf"workers: '{re.escape(url)}'; allowed: http://HOST:PORT of a nanok3"):
            HttpSpeaker([url], tmp_path, lambda folder: None)
    with pytest.raises(ValueError, match="workers is empty"):
        HttpSpeaker([], tmp_path, lambda folder: None)
    replay = replace(SETTINGS, learner=replace(SETTINGS.learner, replay=True))
    with pytest.raises(ValueError, match=r"learner.replay is True"):
        HttpWorkers(("http://x",)).speaker(untaught(), TOKENIZER, replay, tmp_path)
    with pytest.raises(ValueError, match=r"cannot be reached"):
        rl_module.train(
            untaught(), TOKENIZER, OneAnswer(), SETTINGS, tmp_path / "run", workers=HttpWorkers(("[::1]:9",))
        )
    assert not (tmp_path / "run").exists(), "nothing is written for servers that are not there"
    assert main(["serve", str(tmp_path), "--port", "0", "--allow-reload"]) == 2
    assert "allow_reload needs --admin-key" in capsys.readouterr().err


@pytest.mark.parametrize("said", [b"", b"SSH-2.0-x\r\n", b"{}", b"<html>", b'{"data": []}', b"[]"])
def test_a_server_that_is_none_of_ours(said):
    head = b"" if said.startswith(b"SSH") or not said else b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(said)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer():
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(head + said)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ValueError, match=r"^workers: http://127.0.0.1:\d+"):
            HttpWorkers((f"http://127.0.0.1:{listener.getsockname()[1]}",)).check(SETTINGS)
        thread.join()
