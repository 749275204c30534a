"""The local sandbox: what it runs, what it keeps, and what does not get out of it."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest
from sandboxed import needs_sandbox

from nanok3.envs.bubblewrap import Sandboxes, python
from nanok3.envs.layers import MOST_LAYERS
from nanok3.envs.sandbox import Limits

pytestmark = needs_sandbox


@pytest.fixture(scope="module")
def home():
    with Sandboxes() as made:
        yield made
    assert not made.store.folder.exists()


@pytest.fixture
def box(home):
    made = home.open({"kept": b"old\n", "deep/er": b"1"})
    yield made
    made.close()


def sh(box, script, **limits):
    return box.run(["sh", "-c", script], limits=Limits(**limits) if limits else None)


def code(box, text, **limits):
    return box.run([*python(), "-c", text], limits=Limits(**limits) if limits else None)


# ------------------------------------------------------------------ what it does


def test_commands_share_a_workspace(box):
    assert sh(box, "cat kept; echo new > kept; rm deep/er; mkdir x").stdout == b"old\n"
    assert box.read("kept") == b"new\n" and sh(box, "ls deep").stdout == b""
    box.write("y/z", b"\0\xff")
    assert box.read("y/z") == b"\0\xff"
    with pytest.raises(FileNotFoundError):
        box.read("deep/er")
    assert box.run(["cat"], stdin=b"a" * 300_000).stdout == b"a" * 300_000
    assert code(box, "import json, math; print(json.dumps(3))").stdout == b"3\n"
    assert sh(box, "exit 3").status == 3 and box.run(["nothing-of-that-name"]).status != 0


def test_snapshots_restore_and_forks_are_apart(box):
    sh(box, "echo 1 > kept; rm -r deep; mkdir deep; touch deep/new")
    kept = box.snapshot(policy="3")
    fork = box.fork()
    assert sh(fork, "ls deep; cat kept").stdout == b"new\n1\n"
    sh(fork, "echo fork > kept")
    sh(box, "echo 2 > kept; rm -r deep")
    assert (box.read("kept"), fork.read("kept")) == (b"2\n", b"fork\n")
    box.restore(kept)
    assert sh(box, "ls deep; cat kept").stdout == b"new\n1\n"
    fork.close()


def test_files_on_top_are_seen_by_the_fork_alone(box):
    sh(box, "mkdir t; echo mine > t/check; ln -s /usr tests")
    judged = box.with_files({"tests/hidden": b"1", "t/check": b"theirs"})
    assert sh(judged, "cat t/check tests/hidden; ls tests").stdout == b"theirs1hidden\n"
    assert box.read("t/check") == b"mine\n"
    judged.close()


def test_many_layers_are_joined(home):
    box = home.open({"a": b"0", "gone": b""})
    for i in range(MOST_LAYERS + 2):
        upper = home.store.upper(box.workspace)
        (upper / f"f{i}").write_bytes(b"x")
        os.chown(upper / f"f{i}", os.stat(upper).st_uid, -1)
        if i == 3:
            sh(box, "rm gone; echo 1 > a")
        home.store.freeze(box.workspace)
    assert len(box.workspace.layers) < 5
    assert sh(box, "ls | wc -l; cat a; ls gone 2>&1 | wc -l").stdout.split() == [str(i + 2).encode(), b"1", b"1"]
    box.close()


def test_a_program_that_is_asked(box):
    echo = "import sys\nfor line in sys.stdin:\n  print(line.strip()[::-1], flush=True)\n  if line == 'end\\n': break"
    program = box.start([*python(), "-c", echo])
    assert program.ask(b"abc", 10) == b"cba" and program.ask(b"end", 10) == b"dne"
    with pytest.raises(EOFError):
        program.ask(b"more", 10)
    program.close()
    program = box.start(["sleep", "60"])
    with pytest.raises(TimeoutError):
        program.ask(b"?", 0.1)
    program.close()


def test_paused_and_closed(home):
    box = home.open()
    box.pause()
    with pytest.raises(ValueError, match="paused"):
        box.run(["true"])
    box.resume()
    assert box.run(["true"]).ok
    box.close()
    box.close()
    with pytest.raises(ValueError, match="closed"):
        box.run(["true"])


# ------------------------------------------------------------------ what does not get out


def test_there_is_no_network(box):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        ran = code(box, f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)")
    assert not ran.ok and b"PermissionError" in ran.stderr
    assert sh(box, "cat /proc/net/dev | grep -v lo: | wc -l").stdout.strip() == b"2"


def test_nothing_outside_is_read(box, tmp_path):
    (tmp_path / "secret").write_text("secret")
    outside = [tmp_path / "secret", Path.cwd() / "pyproject.toml", Path("/etc/passwd"), Path("/etc/hostname")]
    for path in outside:
        assert not sh(box, f"cat '{path}'").ok, path
    os.environ["NANOK3_TEST_SECRET"] = "hidden"
    assert b"hidden" not in sh(box, "env; cat /proc/*/environ").stdout
    del os.environ["NANOK3_TEST_SECRET"]
    assert sh(box, "ls /workspace/.. | grep -c work; ls /home").stdout == b"1\n"


def test_nothing_outside_is_written(box):
    for path in ("/usr/x", "/x", "/dev/x", "/etc/x", "/proc/sys/kernel/hostname", "/proc/sysrq-trigger"):
        assert not sh(box, f"echo 1 > {path}").ok, path


def test_links_lead_nowhere(box, tmp_path):
    target = tmp_path / "target"
    target.write_text("untouched")
    sh(box, f"ln -s {target} link; ln -s / root; ln -s .. up")
    with pytest.raises(FileNotFoundError):
        box.read("link")
    with pytest.raises(OSError):
        box.write("link", b"changed")
    with pytest.raises(FileNotFoundError):
        box.read(f"root{target}")
    fork = box.with_files({"link": b"mine"})
    assert fork.read("link") == b"mine" and target.read_text() == "untouched"
    fork.close()


def test_a_fork_bomb_ends(box):
    began = time.monotonic()
    ran = sh(box, "f() { f | f & f; }; f", seconds=2, processes=20)
    assert time.monotonic() - began < 20 and (ran.limit or ran.status)
    ran = code(box, "import os\nn = 0\nwhile os.fork(): n += 1; print(n, flush=True)\nos.pause", processes=20)
    assert b"BlockingIOError" in ran.stderr and len(ran.stdout.split()) < 100


def test_the_disk_is_not_filled(box):
    assert sh(box, "head -c 20000000 /dev/zero > big", disk=1 << 20).status != 0
    assert os.stat(box.home.store.upper(box.workspace) / "big").st_size <= 1 << 20
    ran = sh(box, "i=0; while true; do i=$((i+1)); head -c 900000 /dev/zero > b$i; done", disk=4 << 20, seconds=20)
    assert ran.limit == "disk"
    ran = sh(box, "i=0; while true; do i=$((i+1)); : > n$i; done", files=200, seconds=20)
    assert ran.limit == "files"
    assert not sh(box, "head -c 20000000 /dev/zero > /tmp/big", disk=8 << 20).ok
    assert not sh(box, "head -c 20000000 /dev/zero > /dev/shm/big", disk=8 << 20).ok


def test_memory_and_time_end(box):
    hold = "import time\na = bytearray(200 << 20)\nfor i in range(0, len(a), 4096): a[i] = 1\ntime.sleep(9)"
    assert code(box, hold, memory=64 << 20).limit == "memory"
    assert code(box, "a = bytearray(4 << 30)").status != 0  # one process cannot even ask for it
    assert sh(box, "sleep 30", seconds=0.3).limit == "seconds"
    assert sh(box, "trap '' TERM INT HUP; sleep 30 & sleep 30 & wait", seconds=0.3).limit == "seconds"


def test_output_is_bounded(box):
    ran = sh(box, "head -c 30000000 /dev/zero; echo end >&2", output=1000)
    assert ran.ok and len(ran.stdout) == 1000 and ran.stderr == b"end\n"


def test_nobody_outside_is_signalled(box):
    assert sh(box, f"kill -9 {os.getpid()}; kill -9 {os.getppid()}; true").ok
    assert not sh(box, f"test -e /proc/{os.getpid()}/exe && readlink /proc/{os.getpid()}/exe").ok
    everybody = sh(box, "kill -9 -1; true")
    assert everybody.status in (0, 137, -9)
    assert sh(box, "ls /proc | grep -c '^[0-9]'").stdout.strip() in (b"3", b"4", b"5")


def test_no_powers_are_had(box):
    for attempt in ("mount -t tmpfs x /tmp", "unshare -U true", "chroot / true", "mknod d b 259 0", "dmesg -C"):
        assert not sh(box, attempt).ok, attempt
    status = sh(box, "cat /proc/self/status").stdout.decode()
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert int(fields["CapEff"], 16) == int(fields["CapBnd"], 16) == 0 and fields["NoNewPrivs"] == "1"
    assert fields["Seccomp"] == "2"
    call = "import ctypes; print(ctypes.CDLL(None).ptrace(0, 0, 0, 0))"
    assert code(box, call).stdout.strip() == b"-1"


def leaves_nothing(count):
    """Count executions, some of which try to stay; nothing of them is left."""
    mounts = Path("/proc/self/mountinfo").read_text()
    with Sandboxes() as home:
        folder = home.store.folder
        box = home.open()
        for i in range(count):
            script = "(setsid sleep 300 &) ; echo x > f" if i % 3 == 0 else "echo x > f"
            assert sh(box, script).ok
            if i % 10 == 9:
                box.fork().close()
        assert home.store.sweep() >= 0
        marks = [command_line(pid) for pid in os.listdir("/proc") if pid.isdigit()]
        assert not [mark for mark in marks if str(folder).encode() in mark or mark == b"sleep\x00300\x00"]
        assert len(list((folder / "work").iterdir())) == 1
        box.close()
    assert Path("/proc/self/mountinfo").read_text() == mounts and not folder.exists()


def command_line(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_thirty_executions_leave_nothing():
    leaves_nothing(30)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_thousand_executions_leave_nothing():
    leaves_nothing(1000)
