"""A server under many clients that behave badly, for as long as you like: does it stay right, small and quick?

    python bench/soak.py --minutes 10                64 clients, our server on a random model of 1 M parameters
    python bench/soak.py --minutes 1 --clients 16

Each client does one thing after another, drawn at random: reads a stream to its end, or leaves in the middle of it, by
closing the connection, by resetting it, or by being killed (a process of its own); asks for a whole answer and waits,
or leaves; sends fields, JSON or HTTP that are mistakes; sets a deadline that cannot be held. Each has a list of answers
that are right, and everything else is an error. Beside them one thread notes the server's memory.

    errors      answers that were none of the right ones, and tracebacks in the server's log
    memory      resident MiB after a quarter of the time and at the end, and the slope of a line through what is between
    baseline    once all clients have gone: nothing runs or waits, no page is used, no thread or file is left; after a
                flush all pages are free and the tier is empty
    step        quantiles of what a step takes to decide who reads what with which pages, by the clock and in the
                engine's own CPU time (nanok3_scheduler_seconds, nanok3_scheduler_cpu_seconds); by the clock it has what
                the machine gives to other programs in it, so on a busy one it says little. What prefixes take that
                leave for the tier and return is beside it (nanok3_offload_step_cpu_seconds)

It ends with status 1 if there was an error, a counter off its baseline, or memory that grew.
"""

from __future__ import annotations

import http.client
import json
import math
import random
import re
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import harness
import load
import random_k3
import serve
import tyro

ADMIN = "soak"
GROWTH_MIB = 16.0
"""More than that, from the first quarter to the end, is growth."""
RAW = (
    b"GET\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{",
)
"""No requests: the right answer is a 400, or none."""
MISTAKES: tuple[dict[str, Any], ...] = (
    {"temperature": 9},
    {"messages": []},
    {"messages": [{"role": "user", "content": "hi"}], "tools": [{"type": "x"}]},
    {"messages": [{"role": "tool", "content": "hi"}]},
    {"messages": [{"role": "user", "content": "hi"}], "max_tokens": "many"},
)
LEAVE = """
import json, socket, sys
host, port, body = sys.argv[1], int(sys.argv[2]), sys.argv[3].encode()
s = socket.create_connection((host, port))
s.sendall(b"POST /v1/completions HTTP/1.1\\r\\nHost: x\\r\\nContent-Length: %d\\r\\n\\r\\n" % len(body) + body)
while s.recv(100):
    pass
"""
"""The client that is killed."""


@dataclass
class Options(harness.Options):
    minutes: float = 10
    clients: int = 64
    preset: random_k3.Preset = "tiny"
    seed: int = 0
    tokens: int = 48
    """Of the longest answers."""
    json: Path = Path("runs/bench/soak.json")

    def check(self) -> None:
        if not 0 < self.minutes <= 240:
            raise SystemExit(f"minutes is {self.minutes}; it must lie above 0 and be at most 240")
        if not 1 <= self.clients <= serve.MOST_AT_ONCE:
            raise SystemExit(f"clients is {self.clients}; allowed: 1 to {serve.MOST_AT_ONCE}")


# ---------------------------------------------------------------------- what clients do


class Client:
    """One after another, things that clients do. `done` counts them, `errors` has what should not have come."""

    def __init__(self, target: load.Target, options: Options, number: int) -> None:
        self.target, self.options, self.draw = target, options, random.Random(f"{options.seed} client {number}")
        self.done: Counter[str] = Counter()
        self.errors: list[str] = []
        self.actions: dict[Callable[[], None], int] = {
            self.streams: 8, self.leaves_a_stream: 5, self.resets_a_stream: 2, self.waits: 3, self.leaves: 3,
            self.makes_a_mistake: 3, self.sends_no_json: 1, self.sends_no_http: 1, self.has_no_time: 1,
        }  # fmt: skip

    def run(self, end: float) -> None:
        while time.monotonic() < end:
            (action,) = self.draw.choices(list(self.actions), list(self.actions.values()))
            try:
                action()
            except Exception as error:  # of the client's own: it is told, not lost with its thread
                self.errors.append(f"{action.__name__}: {error!r}")
            self.done[action.__name__] += 1

    def expect(self, right: bool, what: str) -> None:
        if not right:
            self.errors.append(what[:300])

    def body(self, **more: Any) -> dict[str, Any]:
        """A prompt that shares its beginning with those of other clients, with an end of its own."""
        begin = random.Random(f"{self.options.seed} prefix {self.draw.randrange(6)}")
        prompt = [begin.randrange(32, 127) for _ in range(self.draw.choice([20, 300, 700]))]
        prompt += [self.draw.randrange(32, 127) for _ in range(self.draw.randrange(1, 40))]
        tokens = self.draw.randrange(1, self.options.tokens + 1)
        return {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 1.0, **more}

    def ask(self, path: str, body: bytes) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = self.target.connect(120)
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        return connection, connection.getresponse()

    def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        connection, response = self.ask(path, body)
        found = response.status, response.read()
        connection.close()
        return found

    # ------------------------------------------------------------ each of them

    def streams(self) -> None:
        sample = load.ask(self.target, "/v1/completions", self.body(stream=True), time.perf_counter() + 120)
        self.expect(sample.error is None, f"a stream: {sample.error}")

    def _some_of_a_stream(self) -> http.client.HTTPConnection:
        connection, response = self.ask("/v1/completions", json.dumps(self.body(stream=True, n=2)).encode())
        self.expect(response.status == 200, f"a stream: status {response.status}")
        for _ in range(self.draw.randrange(6)):
            response.readline()
        return connection

    def leaves_a_stream(self) -> None:
        self._some_of_a_stream().close()

    def resets_a_stream(self) -> None:
        connection = self._some_of_a_stream()
        assert connection.sock is not None
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.sock.close()
        connection.close()

    def waits(self) -> None:
        status, said = self.post("/v1/completions", json.dumps(self.body(logprobs=1)).encode())
        self.expect(status == 200, f"an answer: status {status}: {said!r}")

    def leaves(self) -> None:
        connection = self.target.connect(120)
        connection.request("POST", "/v1/completions", json.dumps(self.body()), {"Content-Type": "application/json"})
        time.sleep(self.draw.random() * 0.2)
        connection.close()

    def makes_a_mistake(self) -> None:
        mistake = self.draw.choice(MISTAKES)
        status, said = self.post("/v1/chat/completions", json.dumps(mistake).encode())
        self.expect(status == 400 and b'"message"' in said, f"{mistake}: status {status}: {said!r}")

    def sends_no_json(self) -> None:
        status, said = self.post("/v1/completions", bytes(self.draw.randrange(256) for _ in range(30)))
        self.expect(status == 400, f"no JSON: status {status}: {said!r}")

    def sends_no_http(self) -> None:
        with socket.create_connection((self.target.host, self.target.port), timeout=10) as raw:
            raw.sendall(self.draw.choice(RAW))
            raw.shutdown(socket.SHUT_WR)
            said = raw.recv(4096)
        self.expect(not said or b" 400 " in said.split(b"\r\n")[0], f"no HTTP: {said!r}")

    def has_no_time(self) -> None:
        status, said = self.post("/v1/completions", json.dumps(self.body(timeout=0.001)).encode())
        self.expect(status in (200, 504), f"a deadline: status {status}: {said!r}")


def kill_clients(target: load.Target, options: Options, end: float) -> int:
    """Start a process that streams, kill it, and again; how many."""
    draw, killed = random.Random(f"{options.seed} killed"), 0
    while time.monotonic() < end - 1:
        body = json.dumps({"prompt": [40] * 300, "max_tokens": 400, "ignore_eos": True, "stream": True})
        command = [sys.executable, "-S", "-c", LEAVE, target.host, str(target.port), body]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
            time.sleep(0.2 + draw.random())
            process.kill()
        killed += 1
        time.sleep(1)
    return killed


# ---------------------------------------------------------------------- what the server says and weighs


def get(target: load.Target, path: str, method: str = "GET") -> bytes:
    connection = target.connect(60)
    connection.request(method, path, headers={"Authorization": f"Bearer {ADMIN}"})
    said = connection.getresponse().read()
    connection.close()
    return said


def readings(target: load.Target) -> dict[str, float]:
    """All of /metrics by name and labels."""
    lines = get(target, "/metrics").decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")}


def weight(pid: int) -> float:
    """Resident MiB."""
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1024 if found else math.nan


def held(pid: int) -> dict[str, int]:
    """What a process keeps open."""
    return {
        "files": len(list(Path(f"/proc/{pid}/fd").iterdir())),
        "threads": len(list(Path(f"/proc/{pid}/task").iterdir())),
    }


def quantile(after: dict[str, float], before: dict[str, float], name: str, share: float) -> float:
    """Of a histogram, between two readings: in milliseconds, within a bucket in proportion."""
    edges = []
    for key, count in after.items():
        if found := re.fullmatch(rf'nanok3_{name}_bucket{{le="(.+)"}}', key):
            edges.append((float(found[1]), count - before.get(key, 0.0)))
    edges.sort()
    wanted, low, under = share * edges[-1][1], 0.0, 0.0
    for edge, count in edges:
        if count >= wanted:
            part = (wanted - under) / max(count - under, 1)
            return 1e3 * (low if math.isinf(edge) else low + part * (edge - low))
        low, under = edge, count
    return math.nan


@dataclass
class Memory:
    """MiB over time."""

    at: list[float] = field(default_factory=list)
    mib: list[float] = field(default_factory=list)

    def watch(self, pid: int, begin: float, end: float) -> None:
        while (now := time.monotonic()) < end:
            self.at.append(now - begin)
            self.mib.append(weight(pid))
            time.sleep(min(1.0, (end - begin) / 50))

    def warm(self) -> tuple[list[float], list[float]]:
        """What came after the first quarter."""
        first = len(self.at) // 4
        return self.at[first:], self.mib[first:]

    @property
    def growth(self) -> float:
        """From the median of the first fifth after warming up to that of the last."""
        _, mib = self.warm()
        fifth = max(1, len(mib) // 5)
        return sorted(mib[-fifth:])[fifth // 2] - sorted(mib[:fifth])[fifth // 2]

    @property
    def slope(self) -> float:
        """MiB an hour, by least squares."""
        at, mib = self.warm()
        x, y = sum(at) / len(at), sum(mib) / len(mib)
        below = sum((a - x) ** 2 for a in at)
        return 3600 * sum((a - x) * (m - y) for a, m in zip(at, mib)) / below if below else 0.0


def off_baseline(target: load.Target, pid: int, before: dict[str, int], seconds: float = 30) -> list[str]:
    """What is not as it was, when all clients have gone; it has some seconds."""
    end = time.monotonic() + seconds
    while True:
        loads, now = json.loads(get(target, "/v1/loads")), held(pid)
        pages = loads["pages"]
        rest = {
            "running": loads["num_running_reqs"],
            "waiting": loads["num_waiting_reqs"],
            "pages used": pages["latent"]["used"] + pages["snapshot"]["used"],
            "files": max(0, now["files"] - before["files"]),
            "threads": max(0, now["threads"] - before["threads"]),
        }
        left = [f"{name}: {count} too many" for name, count in rest.items() if count]
        if not left or time.monotonic() > end:
            break
        time.sleep(0.2)
    get(target, "/admin/flush", "POST")
    time.sleep(0.5)
    loads, found = json.loads(get(target, "/v1/loads")), readings(target)
    lost = loads["pages"]["total"] - loads["pages"]["any"]["free"]
    left += [f"pages: {lost} not free after a flush"] if lost else []
    for name, value in found.items():
        if value and re.match(
            r"nanok3_(cache_spans|cache_snapshots|offload_bytes|offload_units_kept|num_requests)", name
        ):
            left.append(f"{name}: {value:g} after a flush")
    return left


# ---------------------------------------------------------------------- all of it


def soak(options: Options, target: load.Target, pid: int) -> tuple[harness.Record, list[str]]:
    clients = [Client(target, options, number) for number in range(options.clients)]
    clients[0].streams()
    time.sleep(0.5)
    before, begin = held(pid), time.monotonic()
    # The pool of threads that requests are read in fills up once, and stays.
    before = {"files": before["files"], "threads": before["threads"] + 40}
    end, memory = begin + 60 * options.minutes, Memory()
    killed: list[int] = []
    threads = [threading.Thread(target=client.run, args=(end,)) for client in clients]
    threads.append(threading.Thread(target=memory.watch, args=(pid, begin, end)))
    threads.append(threading.Thread(target=lambda: killed.append(kill_clients(target, options, end))))
    for thread in threads:
        thread.start()
    time.sleep(15 * options.minutes)
    warm = readings(target)
    for thread in threads:
        thread.join()
    after = readings(target)
    problems = off_baseline(target, pid, before)
    done = sum((client.done for client in clients), Counter())
    problems += [error for client in clients for error in client.errors]
    if not memory.growth <= GROWTH_MIB:
        problems.append(f"memory grew by {memory.growth:.1f} MiB; allowed: {GROWTH_MIB:g}")
    record: harness.Record = {
        "minutes": options.minutes,
        "clients": options.clients,
        "requests": done.total(),
        "killed": sum(killed),
        "tokens": int(after["nanok3_generation_tokens_total"]),
        "steps": int(after["nanok3_steps_total"]),
        "problems": len(problems),
        "mib_warm": memory.warm()[1][0],
        "mib_end": memory.mib[-1],
        "mib_growth": memory.growth,
        "mib_per_hour": memory.slope,
        **{
            f"{short}_p{round(100 * share)}_ms": quantile(after, warm, name, share)
            for short, name in (("scheduler", "scheduler_seconds"), ("scheduler_cpu", "scheduler_cpu_seconds"),
                                ("tier_cpu", "offload_step_cpu_seconds"), ("answer", "step_answer_seconds"),
                                ("model", "step_model_seconds"))
            for share in (0.5, 0.99)
        },
        **{name: after.get(f"nanok3_{name}_total", 0.0) for name in ("cached_tokens", "preemptions", "offload_hits")},
    }  # fmt: skip
    for name, count in done.most_common():
        print(f"  {name.replace('_', ' ')}: {count}")
    for reason, count in after.items():
        if reason.startswith("nanok3_requests_finished_total"):
            print(f"  {reason.removeprefix('nanok3_')} {count:g}")
    return record, problems


def main(options: Options) -> None:
    options.check()
    print(harness.machine_line(options.threads))
    log = options.json.with_suffix(".log")
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--memory", "0.01", "--hash-block", "64", "--admin-key", ADMIN, "--max-num-seqs", "64"]
        flags += ["--cache-memory", "4MiB", "--cache-folder", folder, "--cache-disk", "16MiB"]
        with serve.own_server(serve.random_model(options.preset), options.threads, log, flags) as (url, pid):
            record, problems = soak(options, load.open_target(url, None, ADMIN, False), pid)
    said = log.read_text("utf-8", "replace")
    problems += [f"the log has {said.count('Traceback')} tracebacks: {log}"] if "Traceback" in said else []
    record["problems"] = len(problems)
    for problem in list(dict.fromkeys(problems))[:20]:
        print("PROBLEM", problem)
    for name, value in record.items():
        print(f"{name.replace('_', ' '):>22} {harness.cell(name, value)}")
    harness.write_json(options.json, [record], options, problems=problems[:100])
    print(f"written: {options.json}")
    if problems:
        raise SystemExit(1)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
