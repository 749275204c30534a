"""A program seen from outside, here without a sandbox around it: output, memory, deadline, what is asked of it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from nanok3.envs.process import Process, resident
from nanok3.envs.sandbox import Limits

pytestmark = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc here")


def ran(tmp_path, code, stdin=b"", **limits):
    return Process([sys.executable, "-S", "-c", code], tmp_path, tmp_path, Limits(**limits), stdin).finish()


def test_output_and_status(tmp_path):
    found = ran(tmp_path, "import sys; print(sys.stdin.read()[::-1]); print('e', file=sys.stderr); sys.exit(3)", b"abc")
    assert (found.status, found.stdout, found.stderr, found.limit) == (3, b"cba\n", b"e\n", None) and not found.ok
    assert len(ran(tmp_path, "print('x' * 500_000)", output=1000).stdout) == 1000


def test_limits(tmp_path):
    assert ran(tmp_path, "import time; time.sleep(30)", seconds=0.3).limit == "seconds"
    hold = "import time; a = b'x' * (100 << 20); time.sleep(30)"
    assert ran(tmp_path, hold, memory=50 << 20).limit == "memory"
    assert ran(tmp_path, "open('f', 'wb').write(bytes(1 << 20))", disk=1 << 16).limit == "disk"
    assert ran(tmp_path, "[open(f'g{i}', 'w') for i in range(30)]", files=10).limit == "files"


def test_memory_is_of_all_descendants():
    code = "import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', 'a = b\"x\" * (60 << 20); input()'])"
    parent = subprocess.Popen([sys.executable, "-S", "-c", code], stdin=subprocess.PIPE)
    end = time.monotonic() + 20
    while resident(parent.pid) < 60 << 20:
        assert time.monotonic() < end
        time.sleep(0.02)
    parent.communicate(b"\n")
    assert resident(parent.pid) == 0


def test_it_is_asked(tmp_path):
    echo = "for line in __import__('sys').stdin: print(line.strip() * 2, flush=True)"
    program = Process([sys.executable, "-S", "-c", echo], tmp_path, tmp_path, Limits(output=100), None)
    assert program.ask(b"ab", 10) == b"abab"
    with pytest.raises(EOFError, match="too long"):
        program.ask(b"x" * 200, 10)
    program.close()
    program.close()
    assert program.process.returncode is not None
