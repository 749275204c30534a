"""The programs we measure ourselves against, installed once into `bench/.venv-peers` and reused.

    python bench/peers.py                     all of them
    python bench/peers.py fla llama.cpp       these

    transformers   the `kimi_linear` model and GPT-2 of transformers 5.24.0, in the environment of its own
    official       the released K3 code, which the wheel of llmcompressor 0.14.0.1 carries, unpacked
    fla            fla-core 0.6.0, unpacked: the plain torch forms of its operators run on a CPU
    llama.cpp      built from the whole source tree inside the sdist of xllamacpp: ten minutes on two cores, once

`ensure(name)` gives a `Peer` or raises `Unavailable` with the reason, so that a benchmark goes on without it;
`find(name)` never installs. Nothing of a peer is imported by nanok3, and none of it is kept in this repository.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HOME = Path(__file__).resolve().parent / ".venv-peers"
FOLDER = HOME / "peers"
PYTHON = HOME / "bin" / "python"
TORCH = "torch==2.13.0"
LLAMA_TOOLS = ("llama-bench", "llama-batched-bench", "llama-tokenize")
LLAMA_PROGRAMS = ("llama_logits", "llama_worker")


class Unavailable(Exception):
    """Why a peer cannot be measured here."""


@dataclass(frozen=True)
class Peer:
    """A peer that is ready: its interpreter (with torch) and the folder of its code or programs."""

    name: str
    version: str
    python: Path
    folder: Path


@dataclass(frozen=True)
class Recipe:
    """How a peer is installed into `folder`."""

    version: str
    folder: Path
    install: Callable[[Path], None]


def ensure(name: str) -> Peer:
    """The peer, installed now if it is not. `Unavailable` tells why it cannot be."""
    if name not in RECIPES:
        raise ValueError(f"peer is {name!r}; allowed: {', '.join(RECIPES)}")
    ready = find(name)
    if ready is not None:
        return ready
    recipe = RECIPES[name]
    FOLDER.mkdir(parents=True, exist_ok=True)
    with _lock(name):
        ready = find(name)  # another process may have installed it while this one waited
        if ready is not None:
            return ready
        print(f"{name} {recipe.version}: installing into {HOME}", file=sys.stderr, flush=True)
        if name != "transformers":
            ensure("transformers")  # the environment: torch first, and what the released code imports
        recipe.install(recipe.folder)
        recipe.folder.mkdir(parents=True, exist_ok=True)
        _mark(recipe).write_text(recipe.version)
    ready = find(name)
    assert ready is not None, f"{name} was just installed"
    return ready


def find(name: str) -> Peer | None:
    """The peer if it is installed in the version wanted, None otherwise."""
    recipe = RECIPES[name]
    mark = _mark(recipe)
    if not mark.is_file() or mark.read_text() != recipe.version or not PYTHON.exists():
        return None
    return Peer(name, recipe.version, PYTHON, recipe.folder)


def llama_program(name: str) -> Path:
    """A program of ours against llama.cpp's library, compiled from bench/`name`.cpp when that is newer."""
    peer, source = ensure("llama.cpp"), Path(__file__).resolve().with_name(f"{name}.cpp")
    program = peer.folder / "build" / "bin" / name
    if not program.exists() or program.stat().st_mtime < source.stat().st_mtime:
        tree, libraries = peer.folder / "source", peer.folder / "build" / "bin"
        command = [_compiler(), "-O2", "-std=c++17", source, f"-I{tree}/include", f"-I{tree}/ggml/include"]
        command += [f"-L{libraries}", "-lllama", "-lggml", "-lggml-base", f"-Wl,-rpath,{libraries}", "-o", program]
        run(command, f"compiling {source.name}")
    return program


def run(command: Sequence[str | Path], what: str) -> None:
    """Run a step; what it says goes to a log beside the peers while it runs. `Unavailable` with the last lines where
    it fails."""
    words, log = [str(word) for word in command], FOLDER / f"{what.split()[0]}-{os.getpid()}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "w") as file:
        try:
            status = subprocess.run(words, stdout=file, stderr=subprocess.STDOUT).returncode
        except OSError as error:
            raise Unavailable(f"{what}: {words[0]} cannot run ({error})") from None
    if status != 0:
        last = "; ".join(line.strip() for line in log.read_text(errors="replace").splitlines()[-4:] if line.strip())
        raise Unavailable(f"{what} failed ({log}): {last}")
    log.unlink()


# ---------------------------------------------------------------------- recipes


def install_transformers(folder: Path) -> None:
    """The environment itself: torch first, so that nothing pulls in another build of it."""
    if not PYTHON.exists():
        run([sys.executable, "-m", "venv", HOME], "making the environment")
    _pip(TORCH)
    _pip("numpy", "safetensors", "transformers==5.24.0", "einops")


def install_official(folder: Path) -> None:
    _unpacked_wheel("llmcompressor==0.14.0.1", folder)


def install_fla(folder: Path) -> None:
    _unpacked_wheel("fla-core==0.6.0", folder)


def install_llama_cpp(folder: Path) -> None:
    """Fetch the sdist, keep the llama.cpp tree of it, build the tools for this very CPU."""
    _compiler()
    # pip keeps an sdist only after its metadata step, which needs these.
    _pip("cython", "scikit-build-core", "setuptools", "wheel", "cmake", "ninja")
    fetched, source, build = folder / "fetched", folder / "source", folder / "build"
    if not source.exists():
        wanted = f"xllamacpp=={RECIPES['llama.cpp'].version}"
        options = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation"]
        shutil.rmtree(folder / "unpacked", ignore_errors=True)  # of an attempt that was broken off
        run([PYTHON, "-m", "pip", "download", "-q", *options, wanted, "-d", fetched], f"fetching {wanted}")
        with tarfile.open(next(fetched.glob("*.tar.gz"))) as archive:
            archive.extractall(folder / "unpacked", filter="data")
        next((folder / "unpacked").glob("*/thirdparty/llama.cpp")).rename(source)
        shutil.rmtree(folder / "unpacked")
    programs = HOME / "bin"
    off = [f"-DLLAMA_{part}=OFF" for part in ("BUILD_TESTS", "BUILD_EXAMPLES", "BUILD_SERVER", "OPENSSL")]
    options = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={programs / 'ninja'}", "-DCMAKE_BUILD_TYPE=Release"]
    configure = [programs / "cmake", "-S", source, "-B", build, *options, "-DGGML_NATIVE=ON", *off]
    run(configure, "configuring llama.cpp")
    compile_all = ["nice", "-n", "10", programs / "ninja", "-C", build, "-j2", *LLAMA_TOOLS]
    run(compile_all, "building llama.cpp")


RECIPES = {
    "transformers": Recipe("5.24.0", FOLDER / "transformers", install_transformers),
    "official": Recipe("0.14.0.1", FOLDER / "official", install_official),
    "fla": Recipe("0.6.0", FOLDER / "fla", install_fla),
    "llama.cpp": Recipe("2026.10.11549", FOLDER / "llama.cpp", install_llama_cpp),
}


# ---------------------------------------------------------------------- helpers


def _pip(*requirements: str) -> None:
    run([PYTHON, "-m", "pip", "install", "-q", *requirements], f"installing {', '.join(requirements)}")


def _unpacked_wheel(requirement: str, folder: Path) -> None:
    """The files of a wheel without what it depends on."""
    wheels = folder.with_name(folder.name + "-wheel")
    run([PYTHON, "-m", "pip", "download", "-q", "--no-deps", requirement, "-d", wheels], f"fetching {requirement}")
    with zipfile.ZipFile(next(wheels.glob("*.whl"))) as archive:
        archive.extractall(folder)
    shutil.rmtree(wheels)


def _compiler() -> str:
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and shutil.which(name):
            return name
    raise Unavailable("no C++ compiler was found (c++, g++ or clang++)")


def _mark(recipe: Recipe) -> Path:
    return recipe.folder / "installed-version"


@contextmanager
def _lock(name: str) -> Iterator[None]:
    """One process installs a peer, others wait for it."""
    with open(FOLDER / f"{name}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main(names: list[str]) -> int:
    missing = 0
    for name in names or list(RECIPES):
        try:
            peer = ensure(name)
            if name == "llama.cpp":
                for program in LLAMA_PROGRAMS:
                    llama_program(program)
            print(f"{name:14s}{peer.version:16s}{peer.folder}")
        except (Unavailable, ValueError) as error:
            missing += 1
            print(f"{name:14s}not available: {error}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
