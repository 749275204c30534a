"""`/v1/files`: upload a file once, name it as `ms://ID` in as many requests as needed.

    POST    multipart/form-data with `file` and `purpose`    -> the file's record
    GET     all of this client's, newest first; ?purpose= &limit= &after= &order=
    GET     /ID, /ID/content       DELETE  /ID

Files of the purposes in SEEN are pictures, those of VIDEO are videos. They are decoded when they come: what could not
be used later is refused at once. Other files are kept as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from email.message import Message
from typing import Any
from urllib.parse import quote

from nanok3.serve.fields import RequestError, encodable, refuse
from nanok3.serve.file_store import MOST_FILES, PURPOSES, SEEN, VIDEO, File
from nanok3.serve.server import Call, Server, in_thread

MOST_PARTS = 64
"""Of a form."""


@dataclass(frozen=True)
class Attachment:
    """A file as an answer: bytes that no browser is to take for a page."""

    content: bytes
    name: str

    @property
    def headers(self) -> dict[str, str]:
        return {
            "content-type": "application/octet-stream",
            "content-disposition": f"attachment; filename*=UTF-8''{quote(encodable(self.name), safe='')}",
            "x-content-type-options": "nosniff",
        }


async def upload(server: Server, call: Call) -> dict[str, Any]:
    """Keep a file."""
    form = await in_thread(read_form, call.headers.get("content-type", ""), call.body)
    if "file" not in form:
        raise RequestError("the form has no part file; allowed: a file and its purpose", "file")
    name, content = form["file"]
    purpose = form.get("purpose", ("", b""))[1].decode("utf-8", "replace")
    if purpose not in PURPOSES:
        raise refuse("purpose", purpose, ", ".join(PURPOSES))
    if not content:
        raise RequestError(f"file {name[:80]!r} is empty; allowed: at least one byte", "file")
    if purpose in (*SEEN, VIDEO):
        await in_thread(_check_seen, server, name, purpose, content, pool=server.opening)
    return server.pictures.files.add(_owner(call), name or "file", purpose, content).body()


def _check_seen(server: Server, name: str, purpose: str, content: bytes) -> None:
    decode = server.pictures.decode_video if purpose == VIDEO else server.pictures.decode
    try:
        decode(content)
    except (ValueError, ImportError) as error:
        raise RequestError(f"file {name[:80]!r}: {error}", "file") from None


async def files(server: Server, call: Call) -> dict[str, Any]:
    """Those of this client."""
    found = server.pictures.files.all(_owner(call))
    if call.query.get("order") == "asc":
        found.reverse()
    if purpose := call.query.get("purpose"):
        found = [file for file in found if file.purpose == purpose]
    if after := call.query.get("after"):
        place = next((k for k, file in enumerate(found) if file.id == after), None)
        if place is None:
            raise refuse("after", after, "the id of a file in the list")
        found = found[place + 1 :]
    limit = call.query.get("limit", str(MOST_FILES))
    if not limit.isascii() or not limit.isdecimal() or not 1 <= int(limit[:6]) <= MOST_FILES:
        raise refuse("limit", limit, f"a whole number from 1 to {MOST_FILES}")
    page = found[: int(limit[:6])]
    ends = {"first_id": page[0].id, "last_id": page[-1].id} if page else {"first_id": None, "last_id": None}
    return {"object": "list", "data": [file.body() for file in page], **ends, "has_more": len(found) > len(page)}


async def file(server: Server, call: Call) -> dict[str, Any]:
    return _find(server, call).body()


async def content(server: Server, call: Call) -> Attachment:
    found = _find(server, call)
    return Attachment(found.content, found.name)


async def delete(server: Server, call: Call) -> dict[str, Any]:
    server.pictures.files.delete(call.path["file"], _owner(call))
    return {"id": call.path["file"], "object": "file", "deleted": True}


def _find(server: Server, call: Call) -> File:
    return server.pictures.files.get(call.path["file"], _owner(call))


def _owner(call: Call) -> int | None:
    owner: int | None = call.facts.get("key")
    return owner


# ---------------------------------------------------------------------- multipart/form-data


def read_form(content_type: str, body: bytes) -> dict[str, tuple[str, bytes]]:
    """The parts of a form by name: file name, content. RequestError for what is none; of two parts with one name the
    last counts."""
    boundary = _parameter("content-type", content_type, "boundary").encode("latin-1", "replace")
    if not content_type.lower().startswith("multipart/form-data") or not 1 <= len(boundary) <= 70:
        raise RequestError(
            f"the body is {content_type[:80]!r}; allowed: multipart/form-data with a boundary", "content-type"
        )
    _, *parts = (b"\r\n" + body).split(b"\r\n--" + boundary)
    if len(parts) < 2 or not parts[-1].startswith(b"--"):
        raise RequestError("the form is cut short or has another boundary", "file")
    if len(parts) - 1 > MOST_PARTS:
        raise RequestError(f"the form has {len(parts) - 1} parts; allowed: {MOST_PARTS}", "file")
    form: dict[str, tuple[str, bytes]] = {}
    for part in parts[:-1]:
        head, blank, content = part.partition(b"\r\n\r\n")
        lines = [line.decode("utf-8", "replace").partition(":") for line in head.split(b"\r\n")]
        fields = {key.strip().lower(): value.strip() for key, _, value in lines}
        disposition = fields.get("content-disposition", "")
        name = _parameter("content-disposition", disposition, "name")
        if not blank or not name:
            raise RequestError("a part of the form has no name", "file")
        form[name] = (_parameter("content-disposition", disposition, "filename"), content)
    return form


def _parameter(header: str, value: str, name: str) -> str:
    """A parameter of a header's value, also in the form of RFC 2231; empty where it is not there."""
    message = Message()
    message[header] = value.replace("\r", " ").replace("\n", " ")
    try:
        found = message.get_param(name, "", header)
    except ValueError:  # as where the number of a continuation has thousands of digits
        raise RequestError(f"the header {header} cannot be read", header) from None
    return str(found[2] if isinstance(found, tuple) else found)
