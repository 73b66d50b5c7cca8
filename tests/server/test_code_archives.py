"""Folders as archives: the same files give the same archive, and what should stay at home does."""

import tarfile
from pathlib import Path

import pytest

from mimatrix.cli.jobs.code_archive import archive
from mimatrix.core.errors import UserError


def names(path: Path) -> list[str]:
    with tarfile.open(path) as tar:
        return tar.getnames()


def test_what_is_taken_along(tmp_path: Path) -> None:
    folder = tmp_path / "code"
    saved = ("checkpoints/step-1/z", "ck/step-1/__0_0.distcp", "big.pt")
    for name in ("train.py", "lib/net.py", ".git/x", "__pycache__/y.pyc", *saved):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (tmp_path / "secret").write_text("not yours")
    (folder / "link").symlink_to(tmp_path / "secret")
    digest = archive(folder, tmp_path / "a.tar.gz", 1 << 20)
    assert names(tmp_path / "a.tar.gz") == ["lib/net.py", "train.py"]
    assert archive(folder, tmp_path / "b.tar.gz", 1 << 20) == digest
    (folder / ".mimatrixignore").write_text("# mine\nlib/\n")
    archive(folder, tmp_path / "c.tar.gz", 1 << 20)
    assert names(tmp_path / "c.tar.gz") == [".mimatrixignore", "big.pt", *saved[:2], "train.py"]


def code_in(folder: Path, *files: str) -> Path:
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


def test_files_from_elsewhere_are_put_beside_the_script(tmp_path: Path) -> None:
    folder = code_in(tmp_path / "code", "train.py", "setup.toml", "checkpoints/large")
    other = code_in(tmp_path / "other", "weights.pt", "setup.toml")
    files = [other / "weights.pt", other / "setup.toml"]
    before = sorted(tmp_path.rglob("*"))
    archive(folder, tmp_path / "a.tar.gz", 1 << 20, "train.py", files)
    assert sorted(names(tmp_path / "a.tar.gz")) == ["setup.toml", "train.py", "weights.pt"]
    assert sorted(tmp_path.rglob("*")) == sorted([*before, tmp_path / "a.tar.gz"])
    with tarfile.open(tmp_path / "a.tar.gz") as tar:
        assert [entry.size for entry in tar if entry.name == "setup.toml"] == [len("setup.toml")]


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        (["other/none.txt"], "there is no file .* to upload"),
        (["other/train.py"], "and the script would both be"),
        (["other/a.txt", "more/a.txt"], 'would both be "a.txt" next to the script; rename one of them'),
    ],
)
def test_files_that_cannot_be_beside_the_script(tmp_path: Path, files: list[str], sentence: str) -> None:
    code_in(tmp_path, "code/train.py", "other/train.py", "other/a.txt", "more/a.txt")
    with pytest.raises(UserError, match=sentence):
        archive(tmp_path / "code", tmp_path / "a.tar.gz", 1 << 20, "train.py", [tmp_path / file for file in files])


def test_linked_folders_are_followed_inside_and_told_otherwise(tmp_path: Path) -> None:
    folder = code_in(tmp_path / "code", "train.py", "src/pkg/net.py")
    code_in(tmp_path, "data/huge")
    for link, target in (
        ("pkg", folder / "src" / "pkg"),
        ("data", tmp_path / "data"),
        ("up", folder),
        ("src/back", folder / "src"),
        ("src/pkg/gone", tmp_path / "gone"),
        ("self", folder / "self"),
        ("twice", folder / "src"),
    ):
        (folder / link).symlink_to(target)
    said: list[str] = []
    archive(folder, tmp_path / "a.tar.gz", 1 << 20, "train.py", (), said.append)
    assert names(tmp_path / "a.tar.gz") == ["pkg/net.py", "src/pkg/net.py", "train.py", "twice/pkg/net.py"]
    (sentence,) = said
    assert "were left out: data, pkg/gone, self, src/back, src/pkg/gone and 3 more; upload a file" in sentence
    (folder / ".mimatrixignore").write_text("data\nup\nself\nback\ngone\n")
    archive(folder, tmp_path / "b.tar.gz", 1 << 20, "train.py", (), said.append)
    assert len(said) == 1


def test_a_script_that_is_a_link_is_no_link_left_out(tmp_path: Path) -> None:
    folder = code_in(tmp_path / "code", "x.py")
    (folder / "train.py").symlink_to(code_in(tmp_path / "other", "real.py") / "real.py")
    said: list[str] = []
    archive(folder, tmp_path / "a.tar.gz", 1 << 20, "train.py", (), said.append)
    assert names(tmp_path / "a.tar.gz") == ["x.py", "train.py"]
    assert said == []


def test_too_much_is_refused_with_the_culprit(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "data.bin").write_bytes(b"0" * 5000)
    with pytest.raises(UserError, match=r"name what to leave out in .mimatrixignore.*the largest is data.bin, 5kB"):
        archive(tmp_path / "code", tmp_path / "a.tar.gz", 4000)
