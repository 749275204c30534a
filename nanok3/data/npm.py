"""Archives of the npm registry as optional sources, where the npm client is there.

A package is fetched once by `npm pack`, checked against its sha256 and kept in the user's cache folder beside the
wheels (packages.py); it is read as the archive it is, nothing of it runs.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

from nanok3.data.packages import Package, cache_folder

FLUENT_EMOJI = Package(
    "@iconify-json/fluent-emoji-flat", "1.2.6", "7d064769dee690815f823bc5bcc511d957198caf9f5edd8dd9c1aa48a6aeb175"
)
FLAG_ICONS = Package("flag-icons", "7.5.0", "c0b80bf0e08006a60f56621d6bc49f8c7131f4d1fef6737a165a673431f4b518")
WORLD_COUNTRIES = Package(
    "world-countries", "5.1.0", "329eb6ef4099ffb590219c9beb634bf489a5e4b10d8ab0ac52a58ebf7b9f8495"
)


def fetch_npm(package: Package, cache: Path | None = None) -> Path:
    """The package's archive in `cache` (by default `cache_folder()`), downloaded if it is not there or damaged.
    Raises ImportError without npm, OSError if it fails, ValueError if what came is not the pinned file."""
    cache = cache or cache_folder()
    path = cache / f"{package.name.replace('/', '-').removeprefix('@')}-{package.version}.tgz"
    if path.exists() and _sha256(path) == package.sha256:
        return path
    client = npm_client()
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=".download-") as folder:
        requirement = f"{package.name}@{package.version}"
        command = [client, "pack", "--silent", "--pack-destination", folder, requirement]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
        if done.returncode:
            last = (done.stderr.strip() or "no message").splitlines()[-1]
            raise OSError(f"could not download {requirement} with npm: {last}")
        (archive,) = Path(folder).glob("*.tgz")
        if (found := _sha256(archive)) != package.sha256:
            raise ValueError(f"{archive.name}: sha256 {found}; expected {package.sha256}")
        os.replace(archive, path)
    return path


def npm_client() -> str:
    """The npm program; ImportError if there is none."""
    client = shutil.which("npm")
    if client is None:
        raise ImportError("icons and flags come from npm packages: install Node.js, which brings npm")
    return client


def read_members(archive: Path, prefix: str, suffix: str) -> dict[str, bytes]:
    """The contents of an archive's files, in the order of their names."""
    with tarfile.open(archive) as tar:
        members = [m for m in tar if m.isfile() and m.name.startswith(prefix) and m.name.endswith(suffix)]
        found: dict[str, bytes] = {}
        for member in sorted(members, key=lambda m: m.name):
            file = tar.extractfile(member)
            assert file is not None
            found[member.name] = file.read()
    return found


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
