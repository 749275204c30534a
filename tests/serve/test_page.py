"""The files of the chat page: complete, carried by the wheel, without anything from elsewhere, safe by construction."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

from nanok3.serve import page

FOLDER = Path(page.__file__).parent
FILES = page.files()
TEXTS = {path: content.decode() for path, (content, _) in FILES.items()}
SCRIPTS = {path: text for path, text in TEXTS.items() if path.endswith(".js")}


def test_every_file_of_the_folder_is_served_with_its_type():
    served = {"index.html" if path == "/" else path.removeprefix("/page/") for path in FILES}
    assert served == {file.name for file in FOLDER.iterdir() if file.suffix not in (".py", "")}
    assert FILES["/"][1].startswith("text/html") and FILES["/page/page.js"][1].startswith("text/javascript")


def test_every_file_that_is_named_is_there_and_none_is_elsewhere():
    named = set(re.findall(r'(?:href|src)="([^"#]+)"', TEXTS["/"]))
    assert {f"/{name}" for name in named} <= FILES.keys() and "page/page.js" in named
    for text in SCRIPTS.values():
        assert {f"/page/{name}" for name in re.findall(r'from "\./([^"]+)"', text)} <= FILES.keys()
    for path, text in TEXTS.items():
        assert not re.search(r"(?:src|href)=[\"']?(?:https?:)?//|@import|url\(", text), path


def test_every_script_is_used():
    text = TEXTS["/"] + "".join(SCRIPTS.values())
    assert [path for path in FILES if path != "/" and path.rsplit("/")[-1] not in text] == []


def test_no_script_makes_elements_of_text():
    unsafe = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|srcdoc")
    assert [path for path, text in SCRIPTS.items() if unsafe.search(text)] == []


def test_the_document_has_no_script_or_style_of_its_own():
    document = TEXTS["/"]
    assert not re.search(r"<style|\bstyle=|\son\w+=|javascript:", document)
    assert all(re.search(r"^<script [^>]*\bsrc=", script) for script in re.findall(r"<script[^>]*>", document))


def test_the_policy_allows_this_server_only():
    rules = dict(rule.strip().split(" ", 1) for rule in page.HEADERS["Content-Security-Policy"].split(";"))
    for name in ("default-src", "script-src", "style-src", "connect-src"):
        assert rules[name] == "'self'"
    assert rules["img-src"] == "'self' data: blob:"


def test_the_wheel_carries_the_page():
    """It takes all of the folder nanok3 that git does not ignore."""
    root = FOLDER.parents[2]
    wheel = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel == {"packages": ["nanok3"]}
    files = [str(file.relative_to(root)) for file in FOLDER.iterdir() if file.is_file()]
    ignored = subprocess.run(["git", "check-ignore", *files], cwd=root, capture_output=True, text=True)
    assert ignored.stdout == "" and len(files) > 8
