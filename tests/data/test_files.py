from __future__ import annotations

from pathlib import Path

import pytest

from nanok3.data.files import replacing, write_file


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
