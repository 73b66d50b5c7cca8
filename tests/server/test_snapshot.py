"""Folders as archives: the same files give the same archive, and what should stay at home does."""

import tarfile
from pathlib import Path

import pytest

from mimatrix.cli.snapshot import archive
from mimatrix.core.errors import UserError


def names(path: Path) -> list[str]:
    with tarfile.open(path) as tar:
        return tar.getnames()


def test_what_is_taken_along(tmp_path: Path) -> None:
    folder = tmp_path / "code"
    for name in ("train.py", "lib/net.py", ".git/x", "__pycache__/y.pyc", "checkpoints/step-1/z", "big.pt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (tmp_path / "secret").write_text("not yours")
    (folder / "link").symlink_to(tmp_path / "secret")
    digest = archive(folder, tmp_path / "a.tar.gz", 1 << 20)
    assert names(tmp_path / "a.tar.gz") == ["lib/net.py", "train.py"]
    assert archive(folder, tmp_path / "b.tar.gz", 1 << 20) == digest
    (folder / ".mimatrixignore").write_text("# mine\nlib/\n")
    archive(folder, tmp_path / "c.tar.gz", 1 << 20)
    assert names(tmp_path / "c.tar.gz") == [".mimatrixignore", "big.pt", "checkpoints/step-1/z", "train.py"]


def test_too_much_is_refused_with_the_culprit(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "data.bin").write_bytes(b"0" * 5000)
    with pytest.raises(UserError, match=r"name what to leave out in .mimatrixignore.*the largest is data.bin, 5kB"):
        archive(tmp_path / "code", tmp_path / "a.tar.gz", 4000)
