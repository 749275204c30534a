"""The chat page: one document, a style and four scripts, all of them served by the server that they talk to.

    files() -> {"/": (bytes, type), "/page/page.js": (bytes, type), ...}       what a web server mounts
    HEADERS                                                                  what goes with each of them

Nothing is built and nothing is fetched from elsewhere, so the page works without a network. The policy in HEADERS is a
second lock: text of a model becomes text nodes in markup.js, and even if it became markup, no script of it would run,
and no place but this server would hear of it.
"""

from __future__ import annotations

from pathlib import Path

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = (
    "default-src 'self'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def files() -> dict[str, tuple[bytes, str]]:
    """Path of each file on the server, its content and its type; the document itself is `/`."""
    found = {}
    for file in sorted(Path(__file__).parent.iterdir()):
        if file.suffix in TYPES:
            path = "/" if file.name == "index.html" else f"/page/{file.name}"
            found[path] = (file.read_bytes(), TYPES[file.suffix])
    return found
