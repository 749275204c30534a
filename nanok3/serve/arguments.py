"""The arguments of one tool call: from elements of the markup to the JSON text that the API has, piece by piece.

    argument(key="city", type="string") Paris       ->  {"city": "Paris"
    argument(key="days", type="number") 3           ->  , "days": 3
    end of the call                                 ->  }
    json(type="object") {"city": ...                ->  the text as it is

A string goes out as it grows, escaped letter by letter. Any other type waits for its end, since only then is it known
to be JSON; it goes out as it was written (`1e2` stays `1e2`), or, where it is no JSON, as a string. So the text is an
object whatever the model wrote in its elements, and a broken one only where the model wrote it whole itself.

An argument given twice keeps its first value, which may have been sent already. Words that find no place are reported.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NoReturn

JSON_BLANKS = " \t\n\r"
_KINDS = {dict: "object", list: "array", str: "string", bool: "boolean", float: "number", type(None): "null"}


def json_kind(text: str) -> str | None:
    """JSON's name of the type of the value that `text` is; None if it is none."""
    try:
        # Numbers only have to be ones: Python's whole numbers end at 4,300 digits, JSON's do not.
        value = json.loads(text, parse_int=float, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return _KINDS[type(value)]


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


class Arguments:
    """Takes the elements and the text of a call, hands the JSON text to `emit` and faults to `report(kind, text)`."""

    def __init__(self, emit: Callable[[str], None], report: Callable[[str, str], None]) -> None:
        self._emitted, self._report = emit, report
        self._keys: set[str] = set()
        self._whole = False
        """Whether the arguments are one text of the model's own."""
        self._type: str | None = None
        """Of the open value: a JSON type, 'whole', or 'lost' for one that has no place."""
        self._held: list[str] = []
        self._loose: list[str] = []

    def _emit(self, text: str) -> None:
        if text:
            self._emitted(text)

    def open_argument(self, key: str | None, kind: str | None) -> None:
        """An argument begins. Without a type it is a string."""
        self._drop_loose()
        if kind not in _KINDS.values():
            self._report("argument_type", kind or "")
        if key is None or key in self._keys or self._whole:
            fault = "malformed_tag" if key is None else "repeated_argument"
            self._lose(fault, key or "")
            return
        self._emit(("{" if not self._keys else ", ") + _quoted(key) + ": ")
        self._keys.add(key)
        self._type = kind or "string"
        if self._type == "string":
            self._emit('"')

    def open_json(self, kind: str | None) -> None:
        """All arguments in one text."""
        self._drop_loose()
        if kind != "object":
            self._report("argument_type", kind or "")
        if self._keys or self._whole:
            self._lose("repeated_argument", "json")
        else:
            self._type, self._whole = "whole", True

    def _lose(self, fault: str, key: str) -> None:
        self._report(fault, key)
        self._type = "lost"

    def text(self, text: str) -> None:
        """More of the open value, or text outside any."""
        if self._type is None:
            self._loose.append(text)
        elif self._type == "string":
            self._emit(_quoted(text)[1:-1])
        else:
            self._held.append(text)
            if self._type == "whole":
                self._emit(text)

    def close(self) -> None:
        """The open value ends."""
        text, kind = "".join(self._held), self._type
        self._held.clear()
        self._type = None
        if kind == "string":
            self._emit('"')
        elif kind == "whole":
            self._check_whole(text)
        elif kind == "lost":
            self._report("stray_text", text)
        else:
            self._emit_json(text.strip(JSON_BLANKS), text, kind or "")

    def _emit_json(self, value: str, written: str, kind: str) -> None:
        found = json_kind(value)
        self._emit(value if found else _quoted(written))
        if kind in _KINDS.values() and found != kind:
            self._report("argument_type", kind)

    def _check_whole(self, text: str) -> None:
        if json_kind(text) != "object":
            self._report("arguments_not_json", "")

    def end(self) -> None:
        """The call ends. Text that stood alone in it was meant as its arguments."""
        loose = "".join(self._loose)
        if self._keys:
            self._drop_loose()
            self._emit("}")
        elif self._whole:
            self._drop_loose()
        elif loose.strip():
            self._report("missing_open", "json")
            self._emit(loose)
            self._check_whole(loose)
        else:
            self._emit("{}")

    def cut(self) -> None:
        """The answer broke off: what is held goes out as it is."""
        if self._type == "lost":
            self.close()
        elif self._type is not None:
            self._emit("" if self._type == "whole" else "".join(self._held))
        elif self._keys or self._whole:
            self._drop_loose()
        else:
            self._emit("".join(self._loose))

    def _drop_loose(self) -> None:
        loose = "".join(self._loose)
        self._loose.clear()
        if loose.strip():
            self._report("stray_text", loose)
