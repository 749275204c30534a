"""gVisor's back-end against a stand-in for runsc that keeps its contract; a real one was not to be had.

The stand-in refuses what runsc's documentation does not allow: unknown flags, other top-level flags than those the
container was begun with, an image in a folder that holds one, a name that is taken, a command in a paused container.
"""

from __future__ import annotations

import json
import os
import stat
import sys
import textwrap
import time

import pytest

from nanok3.envs import gvisor
from nanok3.envs.catalogue import kinds
from nanok3.envs.environment import InfraError
from nanok3.envs.episode import play, scripted, solution
from nanok3.envs.gvisor import Containers
from nanok3.envs.sandbox import Limits

RUNSC = """
import json, os, shutil, subprocess, sys

VERBS = {
    "run": {"--bundle", "--detach"},
    "restore": {"--bundle", "--detach", "--image-path"},
    "checkpoint": {"--image-path", "--leave-running"},
    "exec": {"--cwd"},
    "pause": set(), "resume": set(), "delete": {"--force"},
}

def fail(text):
    sys.exit(print("runsc:", text, file=sys.stderr) or 128)

words, top = sys.argv[1:], []
while words and words[0].startswith("--"):
    top.append(words.pop(0))
verb, flags = words.pop(0), {}
if verb not in VERBS:
    fail("unknown verb " + verb)
while words and words[0].startswith("-"):
    name, _, value = words.pop(0).partition("=")
    if name not in VERBS[verb]:
        fail(f"{verb} does not know {name}")
    flags[name] = value
name, *command = words
root = next(each.partition("=")[2] for each in top if each.startswith("--root="))
with open(os.path.join(root, "..", "calls"), "a") as log:
    log.write(json.dumps([verb, flags, command]) + "\\n")
if "--network=none" not in top:
    fail("this test allows no network")
here = os.path.join(root, name)
files, about = os.path.join(here, "files"), os.path.join(here, "about")
exists = os.path.exists(here)
if exists and json.load(open(about))["top"] != top:
    fail("other top-level flags than the container's")
if verb in ("run", "restore"):
    config = json.load(open(os.path.join(flags["--bundle"], "config.json")))
    if exists:
        fail("container already exists")
    if "--detach" not in flags:
        fail("it would wait here")
    if not {"bounding", "effective"} <= config["process"]["capabilities"].keys() or config["ociVersion"] != "1.0.0":
        fail("config.json is none")
    for mount in config["mounts"]:
        if not os.path.isdir(flags["--bundle"] + "/rootfs" + mount["destination"]):
            fail("no place for " + mount["destination"])
    os.makedirs(here)
    if verb == "run":
        os.makedirs(files)
    else:
        shutil.copytree(os.path.join(flags["--image-path"], "files"), files, symlinks=True)
    json.dump({"top": top, "paused": False}, open(about, "w"))
elif not exists:
    fail("no such container")
elif verb == "checkpoint":
    if os.path.exists(os.path.join(flags["--image-path"], "checkpoint.img")):
        fail("the folder holds an image")
    os.makedirs(flags["--image-path"])
    shutil.copytree(files, os.path.join(flags["--image-path"], "files"), symlinks=True)
    open(os.path.join(flags["--image-path"], "checkpoint.img"), "w").close()
    if "--leave-running" not in flags:
        shutil.rmtree(here)
elif verb == "exec":
    if json.load(open(about))["paused"]:
        fail("cannot execute in a container in state paused")
    assert flags["--cwd"] == "/workspace"
    sys.exit(subprocess.run(command, cwd=files, env={"PATH": "/usr/bin:/bin"}).returncode)
elif verb == "delete":
    if "--force" not in flags:
        fail("it runs")
    shutil.rmtree(here)
else:
    json.dump({"top": top, "paused": verb == "pause"}, open(about, "w"))
"""


@pytest.fixture
def runsc(tmp_path, monkeypatch):
    """A runsc on PATH, and root as far as the back-end can tell."""
    program = tmp_path / "bin" / "runsc"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable} -IS\n{textwrap.dedent(RUNSC)}")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(gvisor.os, "geteuid", lambda: 0)
    return tmp_path


@pytest.fixture
def home(runsc):
    with Containers(runsc / "store") as made:
        yield made


def calls(home):
    return [json.loads(line) for line in (home.folder / "calls").read_text().splitlines()]


def test_commands_files_and_limits(home):
    box = home.open({"a/b.txt": b"hello"})
    assert box.read("a/b.txt") == b"hello" and box.run(["ls"]).stdout == b"a\n"
    ran = box.run(["sh", "-c", "cat; echo two >&2; exit 3"], b"one")
    assert (ran.status, ran.stdout, ran.stderr, ran.limit) == (3, b"one", b"two\n", None)
    began = time.monotonic()
    slow = box.run(["sleep", "20"], limits=Limits(seconds=0.3))
    assert slow.limit == "seconds" and time.monotonic() - began < 10
    assert len(box.run(["head", "-c", "5000", "/dev/zero"], limits=Limits(output=100)).stdout) == 100
    verb, flags, command = calls(home)[-1]
    assert (verb, flags) == ("exec", {"--cwd": "/workspace"}) and command[:4] == ["timeout", "-k", "1", "10"]
    with pytest.raises(ValueError, match=r"path is '../x'"):
        box.write("../x", b"")


def test_snapshots_forks_and_pauses(home):
    box = home.open({"x": b"1"})
    kept = box.snapshot()
    box.write("x", b"2")
    other = box.with_files({"y": b"3"})
    assert (other.read("x"), other.read("y")) == (b"2", b"3")
    with pytest.raises(FileNotFoundError):
        box.read("y")
    old = box.name
    box.restore(kept)
    assert box.read("x") == b"1" and box.name != old and old not in home.live
    box.pause()
    with pytest.raises(ValueError, match="paused"):
        box.run(["true"])
    assert home.runsc("exec", "--cwd=/workspace", box.name, "true").status == 128, "it is, outside too"
    box.resume()
    assert box.run(["true"]).ok
    verbs = [verb for verb, _, _ in calls(home)]
    assert verbs.count("checkpoint") == 2 and verbs.count("restore") == 2
    assert all("--leave-running" in flags for verb, flags, _ in calls(home) if verb == "checkpoint")
    other.close()
    other.close()
    with pytest.raises(ValueError, match="closed"):
        other.run(["true"])
    for wrong, message in (("0123456789ab", "no such snapshot"), ("../x", "a name that `snapshot` gave")):
        with pytest.raises(ValueError, match=message):
            box.restore(wrong)


def test_the_bundle(home):
    config = json.loads((home.bundle / "config.json").read_text())
    assert config["root"] == {"path": "rootfs", "readonly": True}
    process = config["process"]
    assert process["user"]["uid"] != 0 and process["noNewPrivileges"] and not any(process["capabilities"].values())
    assert {each["type"] for each in config["linux"]["namespaces"]} >= {"pid", "network", "mount", "ipc"}
    assert config["linux"]["resources"]["memory"]["limit"] == home.limits.memory
    mounts = {each["destination"]: each for each in config["mounts"]}
    assert mounts["/workspace"]["type"] == "tmpfs" and f"size={home.limits.disk}" in mounts["/workspace"]["options"]
    assert all("ro" in each["options"] for each in mounts.values() if each["type"] == "bind")
    assert not {"/etc", "/root", "/home", "/"} & mounts.keys()


def test_nothing_is_left(runsc):
    with Containers() as own:
        box = own.open({"x": b""})
        forks = [box.fork() for _ in range(3)]
        assert len(own.live) == 4 and forks[0].read("x") == b""
        forks[0].close()
        state = own.folder / "state"
        assert len(list(state.iterdir())) == 3
    assert not own.folder.exists() and not own.live


def test_a_task_of_the_catalogue_is_played_in_it(home):
    kind = kinds()["repositories"]
    task = next(kind.tasks("train", 0))
    assert play(kind.open(home), task, scripted(solution(task))).reward == 1.0
    assert play(kind.open(home), task, scripted([])).reward == 0.0
    for name in ("kernel", "bfcl-base"):
        with pytest.raises(ValueError, match="sandbox is 'gvisor'; allowed for this kind: 'bubblewrap'"):
            kinds()[name].open(home)


def test_what_goes_wrong(home, runsc, monkeypatch):
    with pytest.raises(InfraError, match=r"runsc pause: runsc: no such container"):
        home.call("pause", "nobody")
    (runsc / "bin" / "runsc").chmod(0o644)
    with pytest.raises(InfraError, match=r"runsc run: "):
        home.open()
    (runsc / "bin" / "runsc").chmod(0o755)
    monkeypatch.setattr(gvisor.os, "geteuid", lambda: 1000)
    with pytest.raises(ImportError, match="need root"):
        Containers()
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ImportError, match=r"only run in a sandbox, and there is none: .* need runsc: https"):
        Containers()
