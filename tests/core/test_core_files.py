import stat
from pathlib import Path

import pytest

from mimatrix.core.files import create_atomic, replace_atomic, write_atomic


def test_write_atomic_replaces_a_file_as_a_whole(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    write_atomic(file, "old")
    with file.open() as reader:
        write_atomic(file, b"new \xc3\xa4")
        assert reader.read() == "old"
    assert file.read_text("utf-8") == "new ä"
    assert [each.name for each in tmp_path.iterdir()] == ["a.json"]


def test_write_atomic_creates_private_files_on_request(tmp_path: Path) -> None:
    write_atomic(tmp_path / "token", "secret", mode=0o600)
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    file = tmp_path / "a"
    write_atomic(file, "old")

    def fail(partial: Path) -> None:
        partial.write_text("half")
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        replace_atomic(file, fail)
    assert file.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["a"]


def test_write_atomic_raises_where_the_directory_is_missing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        write_atomic(tmp_path / "missing" / "a", "text")


def test_create_atomic_refuses_a_file_that_exists(tmp_path: Path) -> None:
    create_atomic(tmp_path / "a", "first")
    with pytest.raises(FileExistsError):
        create_atomic(tmp_path / "a", "second")
    assert (tmp_path / "a").read_text() == "first"
    assert [each.name for each in tmp_path.iterdir()] == ["a"]
