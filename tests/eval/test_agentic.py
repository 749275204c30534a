"""The agentic evaluation: tasks played through HTTP by OpenAI's client, what is written, how it stops and goes on."""

from __future__ import annotations

import builtins
import json
import threading
from itertools import islice
from types import SimpleNamespace

import httpx2
import openai
import pytest
from served import listening, served

from nanok3.cli import main
from nanok3.data.chat import answer, encode
from nanok3.data.tokenizer import train_tokenizer
from nanok3.envs.catalogue import kinds
from nanok3.envs.environment import Budget, InfraError, Reply, Task
from nanok3.envs.episode import solution
from nanok3.envs.general import general_tasks
from nanok3.envs.harness import Harness
from nanok3.envs.office import Office, office_tasks
from nanok3.envs.questions import AnswerEnvironment
from nanok3.envs.tools import Call, schemas
from nanok3.eval.agentic import Asking, Crew, Cut, Job, Player, ServerFailed, kinds_of, play_job, reply_of
from nanok3.eval.agentic_record import Folder, summary, transcript
from nanok3.stages.agentic import AgenticArgs, player
from nanok3.stages.agentic import main as agentic

TASKS = list(islice(office_tasks("tidy", "held-out", 0), 2))
TOKENIZER = train_tokenizer([json.dumps(schemas(TASKS[0].tools)), str(TASKS[0].hidden), 'key="id" type='], 512 + 180)
"""Of few tokens for what is said here."""


def line(reply):
    """A turn as a line of the scripted server."""
    calls = [
        {"id": str(n), "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for n, call in enumerate(reply.calls)
    ]
    said = {"role": "assistant", "content": reply.text, "reasoning_content": reply.thinking or "I look."}
    return {"ids": encode(answer(said | ({"tool_calls": calls} if calls else {})), TOKENIZER)}


def solving(task):
    return [line(reply) for reply in solution(task)]


def server(*lines):
    return served(*lines, tokenizer=TOKENIZER)


def args(base, out, **given):
    return AgenticArgs(**{"kinds": ("tidy",), "base_url": base, "tasks": 2, "concurrency": 1, "out": out, **given})


def finish_of(out):
    return {row["key"]: (row["finish"], row["score"]) for row in json.loads((out / "result.json").read_text())["tasks"]}


# ---------------------------------------------------------------------- through HTTP


def test_a_task_is_solved_and_another_failed(tmp_path, capsys):
    wrong = [line(Reply(calls=(Call("mail_read", {"id": 99}),))), line(Reply("It is done, trust me."))]
    with server(*solving(TASKS[0]), *wrong) as stub, listening(stub.app) as base:
        agentic(args(base, tmp_path))
    found = json.loads((tmp_path / "result.json").read_text())
    assert finish_of(tmp_path) == {"tidy-0000": ("answered", 1.0), "tidy-0001": ("answered", 0.0)}
    whole, (solved, failed) = found["all"], found["tasks"]
    assert (whole["accuracy"], whole["turns"], found["complete"]) == (0.5, 3.0, True)
    assert (solved["turns"], solved["tool_errors"], failed["turns"], failed["tool_errors"]) == (4, 0, 2, 1)
    assert solved["completion_tokens"] > solved["reasoning_tokens"] > 0 and solved["prompt_tokens"] > 1000
    shown = capsys.readouterr().out
    assert "stub at http" in shown and "50.0%" in shown and "answered 2" in shown
    text = (tmp_path / "transcripts" / "tidy-0001.md").read_text()
    for part in ("**score 0**", "(thinks) I look.", "calls `mail_read`", "error of mail_read", "trust me"):
        assert part in text


def test_a_run_that_was_stopped_goes_on(tmp_path, capsys, monkeypatch):
    def after_one(self, jobs, run=Crew.run):
        yield next(run(self, jobs))
        raise KeyboardInterrupt

    sums = list(islice(general_tasks("sums", "held-out", 0), 2))
    with server(*solving(sums[0]), *solving(sums[1])) as stub, listening(stub.app) as base:
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(Crew, "run", after_one)
            agentic(args(base, tmp_path, kinds=("sums",)))
        found = json.loads((tmp_path / "result.json").read_text())
        assert not found["complete"] and finish_of(tmp_path) == {"sums-0000": ("answered", 1.0)}
        assert "1 of 2 tasks scored; --resume goes on" in capsys.readouterr().out
        with (tmp_path / "results.jsonl").open("a") as file:
            file.write('{"key": "sums-0001", "sco')  # killed in the middle of a line
        with pytest.raises(ValueError, match="add --resume"):
            agentic(args(base, tmp_path, kinds=("sums",)))
        with pytest.raises(ValueError, match=r"seed is 1; .* was begun with 0"):
            agentic(args(base, tmp_path, kinds=("sums",), resume=True, seed=1))
        agentic(args(base, tmp_path, kinds=("sums",), resume=True, json=True))
    found = json.loads(capsys.readouterr().out)
    assert found["complete"] and found["all"]["tasks"] == 2 and found["tasks"][0]["score"] == 1
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 2


def test_several_at_once_and_a_reply_that_is_cut(tmp_path):
    with server(line(Reply("x" * 200))) as stub, listening(stub.app) as base:
        agentic(args(base, tmp_path, kinds=("questions",), tasks=2, concurrency=4, max_tokens=40))
    found = json.loads((tmp_path / "result.json").read_text())
    assert list(found["kinds"]) == ["letters", "sums", "reverse", "copy"]
    assert found["all"]["finish"] == {"length": 8} and found["all"]["accuracy"] == 0
    assert found["all"]["completion_tokens"] == 40


def test_mistakes_are_told(tmp_path, capsys):
    assert main(["agentic", "--base-url", "http://127.0.0.1:9/v1", "--out", str(tmp_path / "a")]) == 2
    assert "http://127.0.0.1:9/v1/ cannot be reached" in capsys.readouterr().err
    for address in ("http://", "http://[::1/v1", "localhost:8000"):
        assert main(["agentic", "--base-url", address]) == 2
        assert f"base_url is '{address}'; allowed: http://HOST:PORT/v1" in capsys.readouterr().err
    assert main(["agentic", "chess"]) == 2
    assert "kinds is 'chess'; allowed: office, world, coding, questions, bfcl, or one of" in capsys.readouterr().err
    assert main(["agentic", "--concurrency", "0"]) == 2
    assert "concurrency is 0; it must lie between 1 and 1000000" in capsys.readouterr().err
    assert main(["agentic", "--out", str(tmp_path / "none"), "--timeout", "0"]) == 2
    assert "timeout is 0.0; it must be above 0" in capsys.readouterr().err
    assert main(["agentic", "--out", str(tmp_path / "none"), "--timeout", "1e30"]) == 2
    assert "timeout is 1e+30; it must be above 0, and at most 86400 seconds" in capsys.readouterr().err
    with served() as stub, listening(stub.app) as base:
        with pytest.raises(ValueError, match=r"model is 'gpt'; .* has stub"):
            agentic(args(base, tmp_path / "b", model="gpt"))
        with pytest.raises(ValueError, match="there is no evaluation to go on with"):
            agentic(args(base, tmp_path / "b", resume=True))


def test_without_the_package_the_extra_is_named(tmp_path, capsys, monkeypatch):
    def no_openai(name, *more, real=builtins.__import__, **named):
        if name == "openai":
            raise ImportError(name)
        return real(name, *more, **named)

    monkeypatch.setattr(builtins, "__import__", no_openai)
    assert main(["agentic", "--out", str(tmp_path)]) == 2
    assert "pip install 'nanok3[eval]'" in capsys.readouterr().err


# ---------------------------------------------------------------------- one task, the server played by a function


class Answers:
    """A client whose server says these: replies, or what is raised."""

    base_url, timeout = "http://x/v1/", 3.0

    def __init__(self, *answers):
        self.answers, self.asked = list(answers), []
        self.chat = SimpleNamespace(completions=self)

    def create(self, **request):
        self.asked.append(request)
        said = self.answers.pop(0)
        if isinstance(said, Exception):
            raise said
        return said


def completion(text="", calls=(), thinking=None, finish="stop", tokens=7):
    functions = [SimpleNamespace(function=SimpleNamespace(name=n, arguments=a)) for n, a in calls]
    message = SimpleNamespace(content=text, tool_calls=functions or None, reasoning_content=thinking)
    usage = SimpleNamespace(prompt_tokens=100, completion_tokens=tokens, completion_tokens_details=None)
    return SimpleNamespace(choices=[SimpleNamespace(message=message, finish_reason=finish)], usage=usage)


def status(kind, code=400, message="no", field=None):
    response = httpx2.Response(code, request=httpx2.Request("POST", "http://x"))
    return getattr(openai, kind)(message, response=response, body={"code": field})


def played(client, task=TASKS[0], environment=None, **asking):
    job = Job("tidy", 0, task)
    player = Player(client, Asking("m", **asking), job, Harness())
    return play_job(job, environment or Office(), player, threading.Event())


def test_what_is_asked():
    client = Answers(completion(calls=[("mail_list", "{}")], thinking="so"), completion("done"))
    found = played(client, effort="low", temperature=0.5, max_tokens=9)
    first, second = client.asked
    assert {"model": "m", "max_tokens": 9, "reasoning_effort": "low", "temperature": 0.5}.items() <= first.items()
    assert {tool["function"]["name"] for tool in first["tools"]} >= {"mail_list", "notes_read"}
    assert [m["role"] for m in second["messages"]] == ["system", "user", "assistant", "tool"]
    assert second["messages"][2]["reasoning_content"] == "so" and second["messages"][:2] == first["messages"]
    assert first["seed"] != second["seed"] and (found.finish, found.score) == ("answered", 0.0)
    client = Answers(completion(calls=[("mail_list", "{}")]), completion("done"))
    played(client)
    assert all("reasoning_content" not in message for message in client.asked[1]["messages"])
    assert "temperature" not in client.asked[0] and "reasoning_effort" not in client.asked[0]


def test_ends_that_are_no_answer():
    again = completion(calls=[("mail_list", "{}")])
    task = Task("t", "agent", "go", TASKS[0].state, TASKS[0].hidden, TASKS[0].tools, Budget(steps=2))
    assert (found := played(Answers(again, again), task)).finish == "spent" and found.score == 0
    assert (found := played(Answers(again, again), token_budget=10)).finish == "budget" and found.score == 0
    assert len(found.trajectory.replies) == 2 and found.spent.completion == 14
    for error in (
        status("BadRequestError", field="context_length_exceeded"),
        status("BadRequestError", message="This model's maximum context length is 4096 tokens"),
    ):
        assert (found := played(Answers(again, error))).finish == "context" and found.score == 0
    for error in (status("RateLimitError", 429), status("InternalServerError", 503)):
        assert (found := played(Answers(error))).finish == "server-failed" and found.score is None
    assert played(Answers(SimpleNamespace(choices=None))).finish == "server-failed"


def test_broken_calls_are_errors_that_the_model_sees():
    client = Answers(completion(calls=[("mail_list", "{"), ("fly", "")]), completion("done"))
    assert played(client).trajectory.tool_errors == 2
    results = [m["content"] for m in client.asked[1]["messages"] if m["role"] == "tool"]
    assert "arguments are not JSON" in results[0] and "there is no tool 'fly'" in results[1]


def test_what_no_task_gets_past():
    with pytest.raises(ValueError, match=r"tasks of kind tidy need a model and a server that take tools"):
        played(Answers(status("BadRequestError", message='"auto" tool choice requires a parser')))
    with pytest.raises(ValueError, match="api_key: http://x/v1/ refuses the key"):
        played(Answers(status("AuthenticationError", 401)))


def test_machinery_that_fails_gives_no_score():
    class Broken(AnswerEnvironment):
        def judge(self, hidden):
            raise InfraError("the disk is gone")

    task = Task("q", "general", "1 + 1", hidden={"answer": "2"})
    found = played(Answers(completion("2")), task, Broken())
    assert (found.finish, found.score) == ("infra-failed", None) and "the disk is gone" in found.trajectory.reason
    assert summary([{"score": None, "finish": "infra-failed"}])["finish"] == {"infra-failed": 1}


def test_a_server_that_fails_every_task_stops_it():
    found = played(Answers(status("InternalServerError", 503, "out of memory")))
    jobs, seen = [Job("tidy", n, TASKS[0]) for n in range(9)], []
    with pytest.raises(ValueError, match=r"failed 5 tasks in a row, the last with: .*out of memory"):
        for one in Crew(lambda job, stop: found, 1).run(jobs):
            seen.append(one)
    assert len(seen) == 5


def test_a_crew_plays_every_job_once_and_tells_of_a_mistake():
    jobs = [Job("sums", n, TASKS[0]) for n in range(20)]
    found = list(Crew(lambda job, stop: SimpleNamespace(job=job, finish="answered"), 4).run(jobs))
    assert sorted(one.job.number for one in found) == list(range(20))

    def wrong(job, stop):
        raise ValueError(f"no {job.key}")

    with pytest.raises(ValueError, match="no sums-000"):
        list(Crew(wrong, 4).run(jobs))


@pytest.mark.parametrize(
    "asked, kind, begins",
    [("auto", "tidy", "short"), ("auto", "ledger", "none"), ("none", "tidy", "none"), ("role", "ledger", "role")],
)
def test_the_small_world_has_no_system_prompt(asked, kind, begins, monkeypatch):
    """Its models were taught without one, and are asked as they were taught."""
    monkeypatch.setattr("nanok3.eval.agentic.play_job", lambda job, environment, playing, stop: playing.harness.prompt)
    play = player(None, Asking("m"), kinds(), {kind: None}, asked)
    task = next(iter(kinds()[kind].tasks("held-out", 0)))
    assert play(Job(kind, 0, task), threading.Event()) == begins


def test_families_and_names():
    known = ["lookup", "days", "sums", "functions"]
    assert kinds_of(["sums", "questions", "sums"], known) == ["sums", "letters", "reverse", "copy"]
    with pytest.raises(ValueError, match="kinds is empty"):
        kinds_of([], known)


def test_other_names_for_thoughts_and_calls():
    said = SimpleNamespace(content=None, tool_calls=None, reasoning="hm")
    assert reply_of(said) == Reply("", (), "hm")
    strange = SimpleNamespace(content="x", tool_calls=[SimpleNamespace(custom=1)], reasoning_content=None)
    assert reply_of(strange) == Reply("x")
    assert Cut("length").reply is None


def test_a_call_or_content_that_is_no_text_is_the_servers_failure():
    """The client's own types are not checked against what came."""
    for name, arguments in ((None, "{}"), ("read", 17), ({}, "{}")):
        call = SimpleNamespace(function=SimpleNamespace(name=name, arguments=arguments))
        with pytest.raises(ServerFailed, match="no text"):
            reply_of(SimpleNamespace(content="", tool_calls=[call]))
    with pytest.raises(ServerFailed, match="no text"):
        reply_of(SimpleNamespace(content=5, tool_calls=None))


def test_a_transcript_shows_text_that_looks_like_markdown():
    client = Answers(completion("```", calls=[("mail_send", '{"to": "```` x"}')]), completion("done"))
    assert '`````\n{"to": "```` x"}\n`````' in transcript(played(client))


def test_a_folder_keeps_what_has_a_score(tmp_path):
    folder = Folder(tmp_path, {"tasks": 1}, False)
    folder.add(played(Answers(status("RateLimitError", 429))))
    assert folder.write(["tidy-0000"])["complete"] is False
    assert Folder(tmp_path, {"tasks": 3}, True).rows == {} and (tmp_path / "results.jsonl").read_text() == ""
