from __future__ import annotations

import os
from pathlib import Path

import pytest

from nanok3.cli import main
from nanok3.data.files import check_file, remove_left, replacing, write_file


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file.bin"
    write_file(path, b"first")
    assert path.read_bytes() == b"first" and path.stat().st_mode & 0o777 == 0o644
    with pytest.raises(RuntimeError), replacing(path) as file:
        file.write(b"second")
        raise RuntimeError
    assert path.read_bytes() == b"first" and list(path.parent.iterdir()) == [path]
    with replacing(path) as file:
        file.write(b"third")
        assert path.read_bytes() == b"first"
    assert path.read_bytes() == b"third" and list(path.parent.iterdir()) == [path]


def test_where_nothing_can_be_made_is_told_with_the_field(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    check_file("out", tmp_path / "new" / "ä b" / "x")
    check_file("out", tmp_path / "file")
    assert not (tmp_path / "new").exists(), "nothing is made to find out"
    for path, message in (
        (tmp_path, "which is a folder; name a file"),
        (tmp_path / "file" / "x", "file is no folder"),
        (tmp_path / "file" / "deeper" / "x", "file is no folder"),
    ):
        with pytest.raises(ValueError, match=f"^out is {path}.*{message}"):
            check_file("out", path)
    for path in (tmp_path / ("x" * 250), tmp_path / ("x" * 300)):  # the temporary name is ten longer
        with pytest.raises(ValueError, match=f"{tmp_path} cannot be written to: File name too long"):
            check_file("out", path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_a_killed_writer_left_is_removed_and_what_a_living_one_writes_is_not(tmp_path: Path) -> None:
    path = tmp_path / "file[1].bin"
    old = [tmp_path / f".{name}" for name in ("file[1].bin-abcd1234", "file1.bin-abcd1234", "file[1].bin-abc")]
    for left in (*old, tmp_path / ".file[1].bin-fresh123"):
        left.write_bytes(b"half")
    for left in old:
        os.utime(left, (0, 0))
    with replacing(path) as file:
        os.utime(file.name, (0, 0))
        remove_left(path)
        file.write(b"whole")
    assert path.read_bytes() == b"whole"
    assert {left.name for left in tmp_path.iterdir()} == {path.name, old[1].name, old[2].name, ".file[1].bin-fresh123"}


@pytest.mark.parametrize(
    "command",
    [
        ["doctor", "--json"],
        ["export", "MODEL", "--gguf"],
        ["generate", "MODEL", "Hi", "--routing-trace"],
        ["generate", "MODEL", "Hi", "--out"],
        ["quantize", "MODEL", "--out"],
    ],
)
def test_commands_say_so_before_they_work(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert main([*(w.replace("MODEL", str(tmp_path / "none")) for w in command), str(tmp_path / "file" / "x")]) == 2
    assert f"{command[-1][2:].replace('-', '_')} is {tmp_path}/file/x; {tmp_path}/file is no folder" in (
        capsys.readouterr().err
    )
