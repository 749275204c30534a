"""What a request of another shape calls the fields of a chat request, so that its mistakes bear its own names.

    client's body --chat_body--> chat request, whose objects are `Said`: they know where they stood
    "tools[0].function.name is ..."   ->   place_in(chat request, "tools[0].function.name") = "tools[0].name"

A mistake is found in the chat request, and its path is walked down there: an object that was said elsewhere gives its
place, a field of it that had another name gives that; all the rest keeps its name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from nanok3.serve.fields import RequestError


class Said(dict[str, Any]):
    """An object of a chat request that was written for a request of another shape."""

    def __init__(self, given: Mapping[str, Any], place: str = "", **fields: str) -> None:
        """place: where it stood; "" is the request itself. fields: places of those fields that stood elsewhere."""
        super().__init__(given)
        self.place, self.fields = place, fields

    def put(self, name: str, value: Any, place: str) -> None:
        """A field that stood at this place."""
        self[name], self.fields[name] = value, place

    def field(self, name: str) -> str:
        """Where a field stood."""
        return self.fields.get(name) or (f"{self.place}.{name}" if self.place else name)


def place_in(body: Mapping[str, Any], path: str) -> str:
    """Where that stood which this path names in a chat request."""
    here: Any = body
    place = ""
    for name, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", path):
        if index:
            place += f"[{index}]"
            here = here[int(index)] if isinstance(here, list) and int(index) < len(here) else None
        else:
            place = here.field(name) if isinstance(here, Said) else f"{place}.{name}" if place else name
            here = here.get(name) if isinstance(here, Mapping) else None
        if isinstance(here, Said):
            place = here.place
    return place


def named(error: RequestError, body: Mapping[str, Any]) -> RequestError:
    """The same mistake of a chat request, under the names of the request that it was made of."""
    if error.param is None or not isinstance(body, Said):
        return error
    place = place_in(body, error.param)
    if error.message.startswith(error.param):
        error.message = place + error.message.removeprefix(error.param)
    error.param = place
    return error
