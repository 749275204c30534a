"""Tasks for an agent in the office of `apps.py`. The reward comes from the state that is left, never from a report.

    lookup      a mail asks for a number that stands in a note: answer it
    move        a colleague asks in the chat to move an entry of the calendar
    ask         write to a colleague, wait a day, put the answer into a note
    tidy        archive the mails of one sender and no other
    days        a request every morning for some days, each with its own criterion; the score is the share fulfilled

    score = requests fulfilled / requests, and 0 as soon as anything was changed that nobody asked for

so that writing every number to everybody earns nothing. A number asked for must be the only one in its text.
"""

from __future__ import annotations

import base64
import hashlib
import re
import sqlite3
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from nanok3.envs.apps import ME, TABLES, TOOLS, build, change, use
from nanok3.envs.environment import Budget, Task, Verdict
from nanok3.envs.in_process import InProcess
from nanok3.envs.questions import distinct

PEOPLE = ("ada", "ben", "carla", "deniz", "emil", "fatima", "goro", "hana")
THINGS = ("door", "garage", "safe", "archive room", "printer", "alarm", "bicycle shed", "wifi")
MEETINGS = ("planning", "review", "lunch", "training", "budget talk", "interview")

Want = dict[str, Any]
"""A row that must be new: table and fields; {"number": "7"} is a text whose only number this is."""


def _matches(row: tuple[Any, ...], want: Want) -> bool:
    if row[0] != want["table"]:
        return False
    fields = dict(zip(TABLES[row[0]], row[1:]))
    return all(_fits(fields[name], value) for name, value in want.items() if name != "table")


def _fits(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, dict):
        return re.findall(r"\d+", str(found)) == [wanted["number"]]
    return found == wanted


def score(added: list[tuple[Any, ...]], gone: list[tuple[Any, ...]], hidden: dict[str, Any]) -> tuple[float, str]:
    """The share of wants fulfilled, 0 with anything else changed; and what there is to say."""
    left, done = list(added), 0
    for want in hidden["wants"]:
        found = next((row for row in left if _matches(row, want)), None)
        if found is not None:
            left.remove(found)
            done += 1
    may_go = [tuple(row) for row in hidden["may_go"]]
    strays = len(left) + sum(row not in may_go for row in gone)
    if strays:
        return 0.0, f"{strays} changes that nobody asked for"
    return done / len(hidden["wants"]), f"{done} of {len(hidden['wants'])} requests fulfilled"


class Office(InProcess):
    """The apps as an environment; the database travels in snapshots as its own bytes."""

    database: sqlite3.Connection

    def reset(self, task: Task) -> Any:
        self.database = build(task.state)
        return super().reset(task)

    def perform(self, name: str, arguments: dict[str, Any]) -> str:
        return use(self.database, name, arguments)

    def judge(self, hidden: bool) -> Verdict:
        task = self._task()
        found, said = score(*change(self.database, task.state), dict(task.hidden))
        return Verdict(found) if hidden else Verdict(0.0, said)

    def dump(self) -> dict[str, Any]:
        return {"database": base64.b64encode(self.database.serialize()).decode()}

    def load(self, dumped: dict[str, Any]) -> None:
        self.database = sqlite3.connect(":memory:", check_same_thread=False)
        self.database.deserialize(base64.b64decode(dumped["database"]))


# ---------------------------------------------------------------------- the tasks


def _task(kind: str, goal: str, state: Any, wants: list[Want], turns: list[list[Any]], may_go: Any = ()) -> Task:
    steps = [{"calls": [turn]} for turn in turns]
    hidden = {"wants": wants, "may_go": [list(row) for row in may_go], "solution": [*steps, {"text": "Done."}]}
    name = hashlib.blake2b(f"{goal} {state}".encode(), digest_size=6).hexdigest()
    tools = TOOLS
    return Task(f"{kind}/{name}", "agent", goal, state, hidden, tools, Budget(steps=len(turns) * 2 + 6, calls=100))


def _mail(sender: str, subject: str, body: str) -> dict[str, str]:
    return {"folder": "inbox", "sender": sender, "recipient": ME, "subject": subject, "body": body}


def lookup(random: Random) -> Task:
    who, things = random.choice(PEOPLE), random.sample(THINGS, 3)
    codes = random.sample(range(1000, 10000), 3)
    notes = [{"title": f"{thing} code", "body": f"The code is {code}."} for thing, code in zip(things, codes)]
    asked = _mail(who, f"{things[0]} code", f"Which code does the {things[0]} have? Please mail me the number.")
    state = {"mail": [asked], "note": random.sample(notes, 3)}
    wants = [{"table": "mail", "folder": "sent", "recipient": who, "body": {"number": str(codes[0])}}]
    turns = [["mail_list", {}], ["mail_read", {"id": 1}], ["notes_read", {"title": f"{things[0]} code"}]]
    turns.append(["mail_send", {"to": who, "subject": f"Re: {things[0]} code", "body": str(codes[0])}])
    return _task("lookup", "Answer the mail in your inbox.", state, wants, turns)


def move(random: Random) -> Task:
    who, names = random.choice(PEOPLE), random.sample(MEETINGS, 3)
    days = random.sample(range(2, 20), 4)
    hours = [random.randint(8, 17) for _ in range(4)]
    events = [{"title": n, "day": d, "hour": h, "guest": who} for n, d, h in zip(names, days, hours)]
    text = f"could you move the {names[0]} to day {days[3]} at {hours[3]}?"
    state = {"event": events, "message": [{"channel": "team", "author": who, "text": text}]}
    wants = [{"table": "event", "title": names[0], "day": days[3], "hour": hours[3], "guest": who}]
    turns = [["chat_read", {"channel": "team"}], ["calendar_list", {}]]
    turns.append(["calendar_move", {"id": 1, "day": days[3], "hour": hours[3]}])
    gone = [("event", names[0], days[0], hours[0], who)]
    return _task("move", f"Do what {who} asks for in the channel team.", state, wants, turns, gone)


def ask(random: Random) -> Task:
    who, other = random.sample(PEOPLE, 2)
    thing, count = random.choice(("chairs", "keys", "badges", "tickets")), random.randint(2, 99)
    reply = {"trigger": {"mail_to": who}, "brings": [["mail", _mail(who, thing, f"I need {count} {thing}.")]]}
    state = {"mail": [_mail(other, thing, f"I need {count + 1} {thing}.")], "script": [reply]}
    wants = [{"table": "note", "title": thing, "body": {"number": str(count)}}]
    wants.append({"table": "mail", "folder": "sent", "recipient": who})
    turns = [["mail_send", {"to": who, "subject": thing, "body": f"How many {thing} do you need?"}], ["next_day", {}]]
    turns += [["mail_read", {"id": 3}], ["notes_write", {"title": thing, "body": str(count)}]]
    goal = f"Ask {who} by one mail how many {thing} are needed; write the number into the note {thing!r}."
    return _task("ask", goal, state, wants, turns)


def tidy(random: Random) -> Task:
    who, *others = random.sample(PEOPLE, 3)
    senders = [who, who, *others, random.choice(others)]
    random.shuffle(senders)
    mails = [_mail(s, random.choice(THINGS), f"{random.randint(1, 999)} {random.choice(MEETINGS)}") for s in senders]
    mine = [(i, mail) for i, mail in enumerate(mails, 1) if mail["sender"] == who]
    wants = [{"table": "mail", **mail, "folder": "archive"} for _, mail in mine]
    turns = [["mail_list", {}], *(["mail_move", {"id": i, "folder": "archive"}] for i, _ in mine)]
    gone = [("mail", *mail.values()) for _, mail in mine]
    return _task("tidy", f"Archive all mails from {who}, and no others.", {"mail": mails}, wants, turns, gone)


def days(random: Random) -> Task:
    """One request a morning; each arrives by mail."""
    script, wants, turns = [], [], []
    for day in range(1, random.randint(3, 5) + 1):
        who, number = random.choice(PEOPLE), random.randint(10, 999)
        text, want, call = random.choice((_add, _write, _post))(random, who, number)
        script.append({"day": day, "brings": [["mail", _mail(who, f"day {day}", text)]]})
        turns += [["next_day", {}]] * (day > 1) + [["mail_read", {"id": day}], call]
        wants.append(want)
    goal = f"Work for {len(wants)} days: every morning a mail arrives, and you do what it asks for."
    return _task("days", goal, {"script": script}, wants, turns)


def _add(random: Random, who: str, number: int) -> tuple[str, Want, list[Any]]:
    title, hour = random.choice(MEETINGS), random.randint(8, 17)
    entry = {"title": title, "day": number, "hour": hour, "guest": who}
    return (
        f"Please enter: {title}, day {number}, {hour}, guest {who}.",
        {"table": "event", **entry},
        ["calendar_add", entry],
    )


def _write(random: Random, who: str, number: int) -> tuple[str, Want, list[Any]]:
    note = {"title": f"{who} {number}", "body": str(number * 7)}
    text = f"Please write a note titled {note['title']!r} that says {note['body']}."
    return text, {"table": "note", **note}, ["notes_write", note]


def _post(random: Random, who: str, number: int) -> tuple[str, Want, list[Any]]:
    post = {"channel": "team", "text": f"{who} is in room {number}"}
    return f"Please post in team: {post['text']}", {"table": "message", "author": ME, **post}, ["chat_post", post]


KINDS: dict[str, Callable[[Random], Task]] = {"lookup": lookup, "move": move, "ask": ask, "tidy": tidy, "days": days}


def office_tasks(kind: str, split: str = "train", seed: int = 0) -> Iterator[Task]:
    """An endless stream of tasks of a kind; a task's content decides on its side of the split."""
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}; expected one of {', '.join(KINDS)}")
    return distinct(kind, KINDS[kind], lambda task: task.id, split, seed)
