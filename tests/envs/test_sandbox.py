"""What holds for every sandbox: paths, limits, and the refusal where there is none."""

from __future__ import annotations

import platform
import shutil

import pytest

from nanok3.envs import bubblewrap
from nanok3.envs.sandbox import Limits, Ran, missing, safe_path


@pytest.mark.parametrize("path", ["", "/etc/passwd", "../x", "a/../../x", "a\0b", "a/" * 600])
def test_paths_that_lead_out(path):
    with pytest.raises(ValueError, match="below the workspace"):
        safe_path(path)


def test_limits_and_texts():
    with pytest.raises(ValueError, match="seconds is 0"):
        Limits(seconds=0)
    assert Ran(0, b"a\n", b"b", 0.1).text == "a\nb" and Ran(0, b"", b"", 0.1).ok
    assert Ran(3, b"", b"", 0.1).text == "[exit status 3]"
    assert "limit on memory" in Ran(-9, b"", b"", 0.1, "memory").text


def test_without_bubblewrap_the_line_to_install(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "bwrap" else "/usr/bin/" + name)
    assert missing() == "sandboxes need bwrap: apt-get install bubblewrap" or platform.system() != "Linux"
    bubblewrap.check.cache_clear()
    with pytest.raises(ImportError, match="only run in a sandbox"):
        bubblewrap.Sandboxes()
    bubblewrap.check.cache_clear()
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    assert "need Linux" in missing()
