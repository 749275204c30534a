"""The apps: what calls do to the tables, what the script brings and when, what counts as a change."""

from __future__ import annotations

import pytest

from nanok3.envs.apps import TOOLS, build, change, today, use
from nanok3.envs.tools import ToolError

START = {
    "mail": [{"folder": "inbox", "sender": "ada", "recipient": "me", "subject": "s", "body": "b"}],
    "note": [{"title": "n", "body": "old"}],
    "event": [{"title": "lunch", "day": 3, "hour": 12, "guest": "ben"}],
    "script": [
        {"day": 2, "brings": [["message", {"channel": "team", "author": "ben", "text": "hello"}]]},
        {"trigger": {"mail_to": "ben"}, "brings": [["mail", {"folder": "inbox", "sender": "ben", "subject": "re"}]]},
    ],
}


def test_calls_change_the_tables():
    db = build(START)
    assert use(db, "mail_list", {}) == "id: 1, from: ada, subject: s"
    assert "body: b" in use(db, "mail_read", {"id": 1})
    assert use(db, "notes_read", {"title": "n"}) == "old" and change(db, START) == ([], [])
    use(db, "notes_write", {"title": "n", "body": "new"})
    use(db, "mail_move", {"id": 1, "folder": "archive"})
    use(db, "calendar_move", {"id": 1, "day": 4, "hour": 9})
    use(db, "calendar_add", {"title": "x", "day": 1, "hour": 8})
    use(db, "calendar_remove", {"id": 2})
    new, gone = change(db, START)
    assert ("note", "n", "new") in new and ("note", "n", "old") in gone
    assert ("event", "lunch", 4, 9, "ben") in new and len(new) == len(gone) == 3


def test_the_script_brings_what_is_due_once():
    db = build(START)
    assert use(db, "chat_read", {"channel": "team"}) == "nothing"
    use(db, "next_day", {})
    assert use(db, "chat_read", {"channel": "team"}) == "ben: hello" and use(db, "mail_list", {}).count("id") == 1
    use(db, "mail_send", {"to": "ben", "subject": "q", "body": "?"})
    assert use(db, "mail_list", {}).count("id") == 1  # the answer comes the next day
    assert use(db, "next_day", {}) == "it is day 3" and use(db, "mail_list", {}).count("from: ben") == 1
    use(db, "next_day", {})
    assert use(db, "chat_read", {"channel": "team"}) == "ben: hello" and today(db) == 4
    assert change(db, START) == ([("mail", "sent", "me", "ben", "q", "?")], [])


@pytest.mark.parametrize("name, key", [("mail_read", "id"), ("mail_move", "id"), ("calendar_remove", "id")])
def test_what_is_not_there(name, key):
    with pytest.raises(ToolError, match="9; there is no such"):
        use(build(START), name, {key: 9, "folder": "archive"})
    with pytest.raises(ToolError, match="no such note"):
        use(build(START), "notes_read", {"title": "nothing"})


def test_text_is_never_sql():
    db = build(START)
    use(db, "notes_write", {"title": "'; DROP TABLE mail; --", "body": "x"})
    assert use(db, "mail_list", {"folder": "' OR 1=1 --"}) == "nothing" and use(db, "mail_list", {}).count("id") == 1


def test_every_tool_can_be_used():
    assert len({tool.name for tool in TOOLS}) == len(TOOLS) == 14
