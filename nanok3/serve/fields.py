"""Reading a stranger's JSON: a field has a type and a range, and a mistake names the field, the value, what is allowed.

    RequestError -> {"error": {"message": "top_p is 2; allowed: a number above 0, at most 1",
                               "type": "invalid_request_error", "param": "top_p", "code": null}}

A field that is null counts as absent. `true` is no number; NaN, which Python's reader takes, is no JSON, and neither
is a number that it makes infinite.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

VALUES = 1 << 21
"""Of one body, about so many at most, twice the longest context: while they are read, nobody else computes."""


@dataclass(eq=False)
class RequestError(Exception):
    """A request that cannot be answered; `body()` is what the client gets."""

    message: str
    param: str | None = None
    code: str | None = None
    status: int = 400
    type: str = "invalid_request_error"

    def __str__(self) -> str:
        return self.message

    def body(self) -> dict[str, Any]:
        param = None if self.param is None else encodable(self.param)
        return {"error": {"message": encodable(self.message), "type": self.type, "param": param, "code": self.code}}


def encodable(text: str) -> str:
    """Text that UTF-8 can hold: a lone surrogate, which JSON may escape, stays escaped."""
    return text.encode("utf-8", "backslashreplace").decode()


def shown(value: object) -> str:
    """A value as JSON, cut to a line."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = repr(type(value))
    return text if len(text) <= 80 else text[:77] + "..."


def refuse(where: str, given: object, allowed: str, code: str | None = None) -> RequestError:
    """The error of one field."""
    return RequestError(f"{where} is {shown(given)}; allowed: {allowed}", where, code)


def refused(error: ValueError) -> RequestError:
    """A mistake that data/messages.py or data/chat.py found: their texts begin with the place."""
    return RequestError(str(error), str(error).split(maxsplit=1)[0].rstrip(":"))


def read_json(body: bytes | str) -> dict[str, Any]:
    """The object that a request's body is."""
    commas = body.count(b"," if isinstance(body, bytes) else ",")  # type: ignore[arg-type]
    if commas > VALUES:
        raise RequestError(f"the body has {commas} commas; allowed: {VALUES}", None, "too_large", 413)
    try:
        value = json.loads(body, parse_constant=_no_constant, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise RequestError(f"the body is no JSON: {reason}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise refuse("the body", value, "a JSON object", "invalid_json")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _no_constant(text)


class Fields:
    """The fields of one object, read by name and type."""

    def __init__(self, given: Mapping[str, Any], where: str = "") -> None:
        self.given, self.where = given, where

    def path(self, name: str) -> str:
        return f"{self.where}.{name}" if self.where else name

    def get(self, name: str) -> Any:
        return self.given.get(name)

    def has(self, name: str) -> bool:
        return self.given.get(name) is not None

    def refuse(self, name: str, allowed: str) -> RequestError:
        return refuse(self.path(name), self.get(name), allowed)

    def string(self, name: str) -> str | None:
        if self.has(name) and not isinstance(self.get(name), str):
            raise self.refuse(name, "a string")
        return self.given.get(name)

    def boolean(self, name: str, default: bool = False) -> bool:
        if not self.has(name):
            return default
        if not isinstance(self.get(name), bool):
            raise self.refuse(name, "true, false")
        return bool(self.get(name))

    def integer(self, name: str, lowest: int, highest: int) -> int | None:
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value <= highest:
            raise self.refuse(name, f"a whole number from {lowest} to {highest}")
        return value

    def number(self, name: str, lowest: float, highest: float) -> float | None:
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool) or not lowest <= value <= highest:
            raise self.refuse(name, f"a number from {lowest:g} to {highest:g}")
        return float(value)

    def choice(self, name: str, allowed: Sequence[str]) -> str | None:
        if self.has(name) and self.get(name) not in allowed:
            raise self.refuse(name, ", ".join(allowed))
        return self.given.get(name)

    def list(self, name: str) -> list[Any]:
        """Empty where the field is absent."""
        if self.has(name) and not isinstance(self.get(name), list):
            raise self.refuse(name, "a list")
        return self.given.get(name) or []

    def object(self, name: str) -> Fields:
        """Without fields where it is absent."""
        value = {} if self.get(name) is None else self.get(name)
        if not isinstance(value, dict):
            raise self.refuse(name, "an object")
        return Fields(value, self.path(name))
