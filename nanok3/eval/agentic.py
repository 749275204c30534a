"""An agentic evaluation: a model behind an OpenAI-compatible API plays tasks, and is judged by the state it leaves.

    task -> environment -> messages -> POST /chat/completions with the task's tools -> calls -> environment -> ...
    finish = answered     a reply without calls: the verifier looks at what is left
           | spent        the task's turns are over: it looks all the same
           | length       a reply was cut off after `max_tokens`; scored 0, as in training
           | budget       more than `token_budget` tokens were said; scored 0
           | context      the conversation no longer fits the model; scored 0
           | infra-failed, server-failed      no score at all, and the task is played again by a run that goes on

The server is asked by the `openai` package, several tasks at once, each in a thread of its own. Thoughts that the
server gave (`reasoning_content`) are sent back with the history, as K3 keeps them; a server that gives none gets none.
The settings, and what a cut answer is worth, are ours.
"""

from __future__ import annotations

import hashlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from nanok3.envs.environment import Environment, Reply, Task
from nanok3.envs.episode import Episode, Trajectory
from nanok3.envs.harness import Harness, messages
from nanok3.envs.tools import Call, schemas

if TYPE_CHECKING:
    from openai import OpenAI

FAMILIES = {
    "office": ("lookup", "move", "ask", "tidy", "days"),
    "world": ("buttons", "ledger", "program"),
    "coding": ("functions", "repositories"),
    "questions": ("letters", "sums", "reverse", "copy"),
    "bfcl": ("bfcl-base", "bfcl-missing", "bfcl-long"),
}
"""Names for several kinds of tasks (envs/catalogue.py) at once."""
RETRIES = 2
"""Of a request that failed on its way, by the client."""
FAILURES = 5
"""Tasks in a row that the server fails before the evaluation stops."""


@dataclass(frozen=True)
class Asking:
    """How the server is asked."""

    model: str
    max_tokens: int = 2048
    """Of one reply."""
    token_budget: int | None = None
    """Of all replies of a task."""
    effort: str | None = None
    """`reasoning_effort`; the server's own where None."""
    temperature: float | None = None
    """The server's own where None."""
    seed: int = 0


@dataclass(frozen=True)
class Job:
    """A task to play: the number-th of its kind."""

    kind: str
    number: int
    task: Task

    @property
    def key(self) -> str:
        return f"{self.kind}-{self.number:04d}"


@dataclass
class Spent:
    """What the replies of one task cost, in tokens as the server counts them."""

    prompt: int = 0
    completion: int = 0
    reasoning: int = 0


@dataclass(frozen=True)
class Played:
    """One task and what came of it; `score` is None where the machinery failed."""

    job: Job
    trajectory: Trajectory
    finish: str
    score: float | None
    spent: Spent
    seconds: float


class Cut(Exception):
    """The model's turn ended where no next one can follow."""

    def __init__(self, finish: str, reply: Reply | None = None) -> None:
        super().__init__(finish)
        self.finish, self.reply = finish, reply


class ServerFailed(Exception):
    """A request came to nothing for reasons that are not the model's."""


# ---------------------------------------------------------------------- the client


def check_url(base_url: str) -> None:
    """ValueError for what is no address of an API."""
    try:
        parts = urlsplit(base_url)
        named = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none, a bracket that is not closed
        named = False
    if not named:
        raise ValueError(f"base_url is {base_url!r}; allowed: http://HOST:PORT/v1 or https://HOST/v1")


def connect(base_url: str, api_key: str, seconds: float) -> OpenAI:
    """A client. ImportError names the extra to install; ValueError for an address that is none."""
    try:
        import openai
    except ImportError:
        raise ImportError("the agentic evaluation needs openai: pip install 'nanok3[eval]'") from None
    check_url(base_url)
    return openai.OpenAI(base_url=base_url, api_key=api_key or "none", timeout=seconds, max_retries=RETRIES)


def served_model(client: OpenAI, asked: str | None) -> str:
    """The model to ask for: the one asked, else the first that the server lists. ValueError where none answers."""
    import openai

    try:
        names = [model.id for model in client.models.list()]
    except openai.NotFoundError:  # a server need not list its models
        names = []
    except openai.OpenAIError as error:
        raise ValueError(_said(client, error)) from None
    if asked is None and not names:
        raise ValueError(f"model: {client.base_url} lists no model; name one with --model")
    if asked is not None and names and asked not in names:
        raise ValueError(f"model is {asked!r}; {client.base_url} has {', '.join(names)}")
    return asked or names[0]


def _said(client: OpenAI, error: Exception) -> str:
    """What a user has to know about a refused request."""
    import openai

    where = str(client.base_url)
    if isinstance(error, openai.APITimeoutError):
        return f"base_url: {where} did not answer within {client.timeout:g} s; --timeout gives it longer"
    if isinstance(error, openai.APIConnectionError):
        return f"base_url: {where} cannot be reached ({error.__cause__ or error}); is the server running?"
    if isinstance(error, openai.AuthenticationError | openai.PermissionDeniedError):
        return f"api_key: {where} refuses the key; --api-key or OPENAI_API_KEY gives another ({error})"
    return f"{where}: {error}"


class Player:
    """A policy: the next reply of a model behind the API to what has happened so far."""

    def __init__(self, client: OpenAI, asking: Asking, job: Job, harness: Harness) -> None:
        self.client, self.asking, self.job, self.harness = client, asking, job, harness
        self.spent = Spent()

    def __call__(self, played: Trajectory) -> Reply:
        completion = self._ask(self.request(played))
        self._count(completion.usage)
        choice = completion.choices[0]
        reply = reply_of(choice.message)
        if choice.finish_reason == "length":
            raise Cut("length", reply)
        if self.asking.token_budget is not None and self.spent.completion > self.asking.token_budget:
            raise Cut("budget", reply)
        return reply

    def request(self, played: Trajectory) -> dict[str, Any]:
        """The body of the next request."""
        told = messages(self.harness, played)
        for message in told:
            if not message.get("reasoning_content"):
                message.pop("reasoning_content", None)
        tools = schemas(self.job.task.tools)
        a = self.asking
        wanted = {"reasoning_effort": a.effort, "temperature": a.temperature, "tools": tools or None}
        fixed = {"model": a.model, "messages": told, "max_tokens": a.max_tokens, "seed": self._seed(played)}
        return fixed | {name: value for name, value in wanted.items() if value is not None}

    def _seed(self, played: Trajectory) -> int:
        """A function of run, task and turn, whoever else is played beside it."""
        name = f"{self.asking.seed} {self.job.key} {len(played.replies)}"
        return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "big") >> 1

    def _ask(self, request: dict[str, Any]) -> Any:
        """The answer. Cut where the conversation has become too long, ValueError for what no task can get past."""
        import openai

        try:
            completion = self.client.chat.completions.create(**request)
        except openai.BadRequestError as error:
            if too_long(error):
                raise Cut("context") from None
            tools = "tool" in str(error).lower() and "tools" in request
            hint = f"; tasks of kind {self.job.kind} need a model and a server that take tools" if tools else ""
            raise ValueError(f"{_said(self.client, error)}{hint}") from None
        except (openai.APITimeoutError, openai.RateLimitError, openai.InternalServerError) as error:
            raise ServerFailed(_said(self.client, error)) from None
        except openai.OpenAIError as error:
            raise ValueError(_said(self.client, error)) from None
        if not getattr(completion, "choices", None):
            raise ServerFailed(f"{self.client.base_url}: an answer without choices: {completion!s:.200}")
        return completion

    def _count(self, usage: Any) -> None:
        if usage is None:
            return
        self.spent.prompt += usage.prompt_tokens or 0
        self.spent.completion += usage.completion_tokens or 0
        details = getattr(usage, "completion_tokens_details", None)
        self.spent.reasoning += getattr(details, "reasoning_tokens", None) or 0


def too_long(error: Any) -> bool:
    """Whether a server refuses a conversation for its length; the API has a code for it, not all servers send it."""
    text = str(error).lower()
    return error.code == "context_length_exceeded" or "context length" in text or "maximum context" in text


def reply_of(message: Any) -> Reply:
    """A message of the client's as an environment takes it; arguments stay the text that was sent. ServerFailed where
    a call's name, its arguments or the content are no text: the client hands on whatever a server sends."""
    functions = [call.function for call in message.tool_calls or () if getattr(call, "function", None)]
    named = [(function.name, function.arguments or "{}") for function in functions]
    if not all(isinstance(part, str) for parts in named for part in parts):
        raise ServerFailed("a reply with a call whose name or arguments are no text")
    calls = tuple(Call(name, arguments) for name, arguments in named)
    if not isinstance(message.content or "", str):
        raise ServerFailed("a reply whose content is no text")
    thinking = getattr(message, "reasoning_content", None) or getattr(message, "reasoning", None) or ""
    return Reply(message.content or "", calls, thinking if isinstance(thinking, str) else "")


# ---------------------------------------------------------------------- one task


def play_job(job: Job, environment: Environment, player: Player, stop: threading.Event) -> Played | None:
    """A whole task; None where it was told to stop. Mistakes of the user's are ValueErrors."""
    began = time.monotonic()
    episode, finish = Episode(environment, job.task), ""
    score: float | None = 0.0
    try:
        episode.reset()
        while episode.running and not finish:
            if stop.is_set():
                return None
            try:
                reply = player(episode.trajectory)
            except Cut as cut:
                finish = cut.finish
                episode.trajectory.replies += [cut.reply] if cut.reply is not None else []
            except ServerFailed as failed:
                finish, score, episode.trajectory.reason = "server-failed", None, str(failed)
            else:
                episode.step(reply)
    finally:
        episode.close()
    played = episode.trajectory
    if played.outcome == "infra-failed":
        finish, score = "infra-failed", None
    elif played.outcome == "done":
        finish, score = "spent" if played.replies[-1].calls else "answered", played.reward
    return Played(job, played, finish, score, player.spent, time.monotonic() - began)


# ---------------------------------------------------------------------- many tasks


@dataclass
class Crew:
    """Threads that play jobs. They are daemons, so that whoever waits for an answer holds nobody up at Ctrl-C."""

    play: Callable[[Job, threading.Event], Played | None]
    concurrency: int
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self, jobs: Sequence[Job]) -> Iterator[Played]:
        """What is played, as it ends. A mistake that no task gets past is raised once, and the rest is left."""
        waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
        ended: queue.SimpleQueue[Played | Exception] = queue.SimpleQueue()
        for job in jobs:
            waiting.put(job)

        def work() -> None:
            while not self.stop.is_set():
                try:
                    played = self.play(waiting.get_nowait(), self.stop)
                except queue.Empty:
                    return
                except Exception as error:
                    ended.put(error)
                    return
                if played is not None:
                    ended.put(played)

        for number in range(min(self.concurrency, len(jobs))):
            threading.Thread(target=work, daemon=True, name=f"nanok3 agentic {number}").start()
        try:
            yield from self._results(ended, len(jobs))
        finally:
            self.stop.set()

    def _results(self, ended: queue.SimpleQueue[Played | Exception], count: int) -> Iterator[Played]:
        failed, seen = 0, 0
        while seen < count:
            found = None
            with suppress(queue.Empty):  # a wait without an end would not notice Ctrl-C everywhere
                found = ended.get(timeout=0.2)
            if found is None:
                continue
            if isinstance(found, Exception):
                raise found
            seen += 1
            failed = failed + 1 if found.finish == "server-failed" else 0
            yield found
            if failed == FAILURES:
                raise ValueError(f"the server failed {failed} tasks in a row, the last with: {found.trajectory.reason}")


def kinds_of(names: Sequence[str], known: Sequence[str]) -> list[str]:
    """Kinds by their own names and those of families, each once. ValueError lists what is allowed."""
    found: list[str] = []
    for name in names:
        if name not in FAMILIES and name not in known:
            raise ValueError(f"kinds is {name!r}; allowed: {', '.join(FAMILIES)}, or one of {', '.join(known)}")
        found += [kind for kind in FAMILIES.get(name, (name,)) if kind not in found]
    if not found:
        raise ValueError(f"kinds is empty; allowed: {', '.join(FAMILIES)}, or one of {', '.join(known)}")
    return found
