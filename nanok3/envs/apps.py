"""An office in miniature: mail, notes, chat and a calendar in one sqlite database in memory, and a clock of days.

    state    = six tables; a snapshot is the database's own bytes
    events   = rows of `script`: on a day, or the day after something was done, a mail or a message arrives
    change   = (rows that are new, rows that are gone) beside the start, without what the script brought

The verifier (`office.py`) reads the change and nothing else: what a policy says it has done is not looked at, and a
thing done that nobody asked for is as visible as one left out.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Mapping
from typing import Any

from nanok3.envs.tools import ToolError, tool

ME = "me"
TABLES: dict[str, tuple[str, ...]] = {
    "mail": ("folder", "sender", "recipient", "subject", "body"),
    "note": ("title", "body"),
    "message": ("channel", "author", "text"),
    "event": ("title", "day", "hour", "guest"),
}
"""What the verifier compares. Each table has `id`, and `made`: start, script or me."""

_FOLDER = {"type": "string", "enum": ["inbox", "archive"]}
TOOLS = (
    tool("mail_list", "List the mails of a folder: inbox, sent or archive.", folder_="string"),
    tool("mail_read", "Read a mail.", id="integer"),
    tool("mail_send", "Send a mail.", to="string", subject="string", body="string"),
    tool(
        "mail_move", "Move a mail to a folder.", id="integer", folder={"type": "string", "enum": ["inbox", "archive"]}
    ),
    tool("notes_list", "List the titles of all notes."),
    tool("notes_read", "Read a note.", title="string"),
    tool("notes_write", "Write a note, in place of one with this title.", title="string", body="string"),
    tool("chat_read", "Read a channel.", channel="string"),
    tool("chat_post", "Post to a channel.", channel="string", text="string"),
    tool("calendar_list", "List the entries of the calendar."),
    tool("calendar_add", "Add an entry.", title="string", day="integer", hour="integer", guest_="string"),
    tool("calendar_move", "Move an entry.", id="integer", day="integer", hour="integer"),
    tool("calendar_remove", "Remove an entry.", id="integer"),
    tool("next_day", "Wait until the next day begins."),
)


def build(start: Mapping[str, Any]) -> sqlite3.Connection:
    """A database from rows by table; `script` rows have a day, a trigger or None, and what arrives."""
    database = sqlite3.connect(":memory:", check_same_thread=False)
    for table, columns in TABLES.items():
        database.execute(f"CREATE TABLE {table} (id INTEGER PRIMARY KEY, {', '.join(columns)}, made DEFAULT 'start')")
    database.execute("CREATE TABLE script (id INTEGER PRIMARY KEY, day INTEGER, trigger, brings, ready INTEGER)")
    database.execute("CREATE TABLE clock (day INTEGER)")
    database.execute("INSERT INTO clock VALUES (1)")
    for table in TABLES:
        for row in start.get(table, ()):
            _insert(database, table, row, "start")
    for step in start.get("script", ()):
        values = (step.get("day"), json.dumps(step.get("trigger")), json.dumps(step["brings"]))
        database.execute("INSERT INTO script (day, trigger, brings) VALUES (?, ?, ?)", values)
    _arrive(database)
    return database


def _insert(database: sqlite3.Connection, table: str, row: Mapping[str, Any], made: str) -> int:
    columns = TABLES[table]
    marks = ", ".join("?" * (len(columns) + 1))
    values = [*(row.get(column) for column in columns), made]
    cursor = database.execute(f"INSERT INTO {table} ({', '.join(columns)}, made) VALUES ({marks})", values)
    return int(cursor.lastrowid or 0)


def today(database: sqlite3.Connection) -> int:
    return int(database.execute("SELECT day FROM clock").fetchone()[0])


def _notice(database: sqlite3.Connection, what: Mapping[str, str]) -> None:
    """Something was done: the steps of the script that waited for it come the next day."""
    for number, trigger in database.execute("SELECT id, trigger FROM script WHERE ready IS NULL").fetchall():
        wanted = json.loads(trigger)
        if wanted and all(what.get(key) == value for key, value in wanted.items()):
            database.execute("UPDATE script SET ready = ? WHERE id = ?", (today(database) + 1, number))


def _arrive(database: sqlite3.Connection) -> None:
    """What is due by now arrives, once."""
    due = "SELECT id, brings FROM script WHERE COALESCE(ready, day) <= ? AND (trigger = 'null' OR ready IS NOT NULL)"
    for number, brings in database.execute(due, (today(database),)).fetchall():
        for table, row in json.loads(brings):
            _insert(database, table, row, "script")
        database.execute("DELETE FROM script WHERE id = ?", (number,))


def contents(database: sqlite3.Connection) -> Counter[tuple[Any, ...]]:
    """The rows of all tables that the script did not bring, without their numbers."""
    found: Counter[tuple[Any, ...]] = Counter()
    for table, columns in TABLES.items():
        for row in database.execute(f"SELECT {', '.join(columns)} FROM {table} WHERE made <> 'script'"):
            found[(table, *row)] += 1
    return found


Change = tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]


def change(database: sqlite3.Connection, start: Mapping[str, Any]) -> Change:
    """Rows that are new and rows that are gone since the start."""
    before, after = contents(build(start)), contents(database)
    return list((after - before).elements()), list((before - after).elements())


# ---------------------------------------------------------------------- the tools


def _table(rows: list[tuple[Any, ...]], *names: str) -> str:
    return "\n".join(", ".join(f"{n}: {v}" for n, v in zip(names, row)) for row in rows) or "nothing"


def _one(database: sqlite3.Connection, table: str, number: int) -> tuple[Any, ...]:
    columns = ", ".join(TABLES[table])
    row = database.execute(f"SELECT {columns} FROM {table} WHERE id = ?", (number,)).fetchone()
    if row is None:
        raise ToolError(f"id is {number}; there is no such {table}")
    return row


def use(database: sqlite3.Connection, name: str, a: Mapping[str, Any]) -> str:
    """Carry out one call with arguments that fit its schema."""
    app, _, verb = name.partition("_")
    used = {"mail": _mail, "notes": _notes, "chat": _chat, "calendar": _calendar, "next": _next}[app](database, verb, a)
    database.commit()
    return used


def _mail(database: sqlite3.Connection, verb: str, a: Mapping[str, Any]) -> str:
    if verb == "list":
        rows = database.execute("SELECT id, sender, subject FROM mail WHERE folder = ?", (a.get("folder", "inbox"),))
        return _table(rows.fetchall(), "id", "from", "subject")
    if verb == "read":
        return _table([_one(database, "mail", a["id"])], "folder", "from", "to", "subject", "body")
    if verb == "move":
        _one(database, "mail", a["id"])
        database.execute("UPDATE mail SET folder = ? WHERE id = ?", (a["folder"], a["id"]))
        return "moved"
    row = {"folder": "sent", "sender": ME, "recipient": a["to"], "subject": a["subject"], "body": a["body"]}
    _insert(database, "mail", row, ME)
    _notice(database, {"mail_to": a["to"]})
    return "sent"


def _notes(database: sqlite3.Connection, verb: str, a: Mapping[str, Any]) -> str:
    if verb == "list":
        return _table(database.execute("SELECT title FROM note").fetchall(), "title")
    if verb == "read":
        row = database.execute("SELECT body FROM note WHERE title = ?", (a["title"],)).fetchone()
        if row is None:
            raise ToolError(f"title is {a['title']!r:.80}; there is no such note")
        return str(row[0])
    database.execute("DELETE FROM note WHERE title = ?", (a["title"],))
    _insert(database, "note", a, ME)
    return "written"


def _chat(database: sqlite3.Connection, verb: str, a: Mapping[str, Any]) -> str:
    if verb == "read":
        rows = database.execute("SELECT author, text FROM message WHERE channel = ?", (a["channel"],)).fetchall()
        return "\n".join(f"{author}: {text}" for author, text in rows) or "nothing"
    _insert(database, "message", {**a, "author": ME}, ME)
    _notice(database, {"posted_to": a["channel"]})
    return "posted"


def _calendar(database: sqlite3.Connection, verb: str, a: Mapping[str, Any]) -> str:
    if verb == "list":
        rows = database.execute("SELECT id, title, day, hour, guest FROM event").fetchall()
        return _table(rows, "id", "title", "day", "hour", "guest")
    if verb == "add":
        return f"added as {_insert(database, 'event', a, ME)}"
    _one(database, "event", a["id"])
    if verb == "move":
        database.execute("UPDATE event SET day = ?, hour = ? WHERE id = ?", (a["day"], a["hour"], a["id"]))
        return "moved"
    database.execute("DELETE FROM event WHERE id = ?", (a["id"],))
    return "removed"


def _next(database: sqlite3.Connection, verb: str, a: Mapping[str, Any]) -> str:
    database.execute("UPDATE clock SET day = day + 1")
    _arrive(database)
    return f"it is day {today(database)}"
