"""A team that cannot be started: whether another try may help is a value, and an archive cannot fill the disk."""

import errno
import gzip
import os
import resource
import stat
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from support.launcher_contract import Ground, eventually, pack

from mimatrix.core.errors import UserError
from mimatrix.launch import LocalLauncher, cores
from mimatrix.launch.local import launcher as local_launcher
from mimatrix.launch.local.archive import ArchiveLimits, read_failure, start_unpacking
from mimatrix.launch.local.launch_spec import build_spec
from mimatrix.launch.start_failure import StartError, StartFailure, StartFailureKind, TeamRefusedError, is_transient


@pytest.fixture
def ground(tmp_path: Path) -> Iterator[Ground]:
    ground = Ground(lambda: LocalLauncher(tmp_path / "place", "here", cores(1)), tmp_path)
    yield ground
    ground.clear()


def bomb(path: Path, size: int, kind: bytes = tarfile.REGTYPE) -> Path:
    """Write an archive whose only entry claims `size` bytes, of which few are there."""
    entry = tarfile.TarInfo("zeros")
    entry.size, entry.type = size, kind
    path.write_bytes(gzip.compress(entry.tobuf(tarfile.GNU_FORMAT) + bytes(1 << 20)))
    return path


def unpack(archive: Path, folder: Path, limits: ArchiveLimits) -> StartFailure | None:
    return unpack_and_measure(archive, folder, limits)[0]


def unpack_and_measure(archive: Path, folder: Path, limits: ArchiveLimits) -> tuple[StartFailure | None, int]:
    """Return the failure, and the most memory in bytes that the child had."""
    child, receiver = start_unpacking(archive, folder, None, limits)
    with os.fdopen(receiver, "rb") as pipe:
        failure = read_failure(pipe.read())
    _, status, used = os.wait4(child, 0)
    assert status == 0
    return failure, used.ru_maxrss << 10


def entry(kind: bytes, data: bytes) -> bytes:
    """One entry of a tar file, of a kind that only it would have."""
    found = tarfile.TarInfo("entry")
    found.size, found.type = len(data), kind
    return found.tobuf(tarfile.GNU_FORMAT) + data + bytes(-len(data) % 512)


def record(keyword: bytes, value: bytes) -> bytes:
    """One record of a pax header; its length counts itself."""
    rest = b" " + keyword + b"=" + value + b"\n"
    length = len(rest)
    while length != len(rest) + len(str(length)):
        length = len(rest) + len(str(length))
    return str(length).encode() + rest


def pax_bomb(path: Path, headers: int, size: int, kind: bytes = tarfile.XHDTYPE) -> Path:
    """Files with no contents, each after a header of this size that compresses well."""
    header = entry(kind, record(b"comment", b"x" * size))
    path.write_bytes(gzip.compress((header + entry(tarfile.REGTYPE, b"")) * headers + bytes(1024)))
    return path


def test_archive_bomb_is_refused_before_it_is_unpacked(ground: Ground) -> None:
    archive = bomb(ground.folder / "bomb.tar.gz", 64 << 30)
    with pytest.raises(UserError, match=r"bomb\.tar\.gz is too large \(it unpacks to more than"):
        ground.launcher.start(replace(ground.team(""), archive=archive))
    assert ground.launcher.states() == {}


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME])
def test_archive_header_bomb_is_refused(tmp_path: Path, kind: bytes) -> None:
    failure = unpack(bomb(tmp_path / "bomb.tar.gz", 32 << 30, kind), tmp_path / "work", ArchiveLimits())
    assert failure
    assert failure.kind in (StartFailureKind.ARCHIVE_TOO_LARGE, StartFailureKind.ARCHIVE_INVALID)


@pytest.mark.parametrize("size", [(1 << 20) - 100, 100_000])
@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE])
def test_archive_of_large_headers_takes_little_memory(tmp_path: Path, size: int, kind: bytes) -> None:
    small = pack(tmp_path / "small.tar.gz", {"a": "b"})
    _, before = unpack_and_measure(small, tmp_path / "small", ArchiveLimits())
    archive = pax_bomb(tmp_path / "bomb.tar.gz", (200 << 20) // size, size, kind)
    failure, most = unpack_and_measure(archive, tmp_path / "work", ArchiveLimits())
    assert most - before < 48 << 20
    assert (failure is not None) == (size > 200_000)
    if failure:
        assert failure.kind is StartFailureKind.ARCHIVE_TOO_LARGE


@pytest.mark.wording
def test_archive_of_headers_is_decompressed_to_the_limit_only(tmp_path: Path) -> None:
    """The files have no contents at all."""
    archive = pax_bomb(tmp_path / "bomb.tar.gz", 300, 100_000)
    failure = unpack(archive, tmp_path / "work", ArchiveLimits(max_bytes=20 << 20))
    assert failure
    assert (failure.kind, failure.is_transient) == (StartFailureKind.ARCHIVE_TOO_LARGE, False)
    assert "it unpacks to more than 20MiB, with its headers" in failure.describe()


def test_archive_whose_global_header_is_repeated_takes_little_memory(tmp_path: Path) -> None:
    small = pack(tmp_path / "small.tar.gz", {"a": "b"})
    _, before = unpack_and_measure(small, tmp_path / "small", ArchiveLimits())
    keywords = b"".join(record(b"k%d" % number, b"") for number in range(9000))
    archive = tmp_path / "bomb.tar.gz"
    archive.write_bytes(
        gzip.compress(entry(tarfile.XGLTYPE, keywords) + entry(tarfile.REGTYPE, b"") * 2000 + bytes(1024))
    )
    failure, most = unpack_and_measure(archive, tmp_path / "work", ArchiveLimits())
    assert failure is None
    assert most - before < 48 << 20


@pytest.mark.parametrize("shape", ["long names", "a chain of headers"])
@pytest.mark.wording
def test_archive_whose_headers_do_not_fit_into_memory_is_refused(tmp_path: Path, shape: str) -> None:
    contents = {
        "long names": (entry(tarfile.GNUTYPE_LONGNAME, b"n" * 100_000 + b"\0") + entry(tarfile.REGTYPE, b"")) * 400,
        "a chain of headers": entry(tarfile.XHDTYPE, record(b"a", b"b")) * 5000,
    }
    archive = tmp_path / "bomb.tar.gz"
    archive.write_bytes(gzip.compress(contents[shape] + entry(tarfile.REGTYPE, b"") + bytes(1024)))
    limits = ArchiveLimits(max_memory_bytes=16 << 20)
    failure = unpack(archive, tmp_path / "work", limits)
    assert failure
    assert not failure.is_transient
    assert failure.kind in (StartFailureKind.ARCHIVE_TOO_LARGE, StartFailureKind.ARCHIVE_INVALID)
    if shape != "a chain of headers":
        assert "its headers take more than 16MiB of memory" in failure.describe()


def test_archive_of_as_many_files_as_are_allowed_fits_into_memory(tmp_path: Path) -> None:
    info = tarfile.TarInfo("a/long/path/as/people/have/them/in/their/projects/module.py")
    info.pax_headers = {"mtime": "1700000000.25"}
    one = info.tobuf(tarfile.PAX_FORMAT)
    archive = tmp_path / "job.tar.gz"
    archive.write_bytes(gzip.compress(one * 20_000 + bytes(1024), 1))
    share = ArchiveLimits().max_memory_bytes // 5
    assert unpack(archive, tmp_path / "work", ArchiveLimits(max_memory_bytes=share)) is None


def test_archive_limits_count_bytes_and_files(tmp_path: Path) -> None:
    archive = pack(tmp_path / "job.tar.gz", {f"file-{number}": "12345" for number in range(4)})
    # Each file is a header and a block, and at the end is a block of zeros.
    fits = 4 * 1024 + 512
    assert unpack(archive, tmp_path / "fits", ArchiveLimits(max_bytes=fits, max_files=4)) is None
    assert len(list((tmp_path / "fits").iterdir())) == 4
    for name, limits in (("bytes", ArchiveLimits(max_bytes=fits - 1)), ("files", ArchiveLimits(max_files=3))):
        failure = unpack(archive, tmp_path / name, limits)
        assert failure
        assert (failure.kind, failure.is_transient) == (StartFailureKind.ARCHIVE_TOO_LARGE, False)
        assert list((tmp_path / name).iterdir()) == []


def test_team_that_starts_slowly_does_not_hold_up_its_launcher(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    """The archive is a pipe that stays silent; the team can be ended meanwhile."""
    pipe = ground.folder / "pipe"
    os.mkfifo(pipe)
    team = ground.team("")
    monkeypatch.setattr(local_launcher, "build_spec", lambda *given: replace(build_spec(*given), archive=str(pipe)))
    ground.launcher.start(team)
    assert not ground.state(team.name).has_ended
    ground.launcher.end(team.name)
    eventually(lambda: ground.state(team.name).has_ended, "the end of the team")


@contextmanager
def no_descriptors_left() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 2, before[1]))
    taken = []
    try:
        with suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for descriptor in taken:
            os.close(descriptor)


def test_start_without_descriptors_is_transient(ground: Ground) -> None:
    team = ground.team("print('later')")
    with no_descriptors_left(), pytest.raises(StartError) as raised:
        ground.launcher.start(team)
    assert raised.value.is_transient
    ground.launcher.start(team)
    ground.ended(team.name)
    assert ground.output(team.name) == "later\n"


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM, errno.ENOSPC, errno.EAGAIN, errno.EDQUOT])
def test_shortage_is_transient(number: int) -> None:
    assert is_transient(OSError(number, "x"))
    assert not is_transient(OSError(errno.ENOENT, "x"))


@pytest.mark.wording
def test_start_failure_raises_by_what_may_help() -> None:
    short = StartFailure(kind=StartFailureKind.COMMAND, rank=1, detail="Cannot allocate memory", is_transient=True)
    assert isinstance(short.to_error(), StartError)
    wrong = StartFailure(kind=StartFailureKind.COMMAND, rank=1, detail="no such file")
    assert isinstance(wrong.to_error(), TeamRefusedError)
    assert str(wrong.to_error()) == "rank 1 cannot be started: no such file"


def test_names_of_teams_and_launch_specs_are_private(ground: Ground) -> None:
    name = ground.start("")
    ground.ended(name)
    teams = ground.folder / "place" / "teams"
    assert stat.S_IMODE(teams.stat().st_mode) & 0o066 == 0
    assert stat.S_IMODE((teams / name / "order.json").stat().st_mode) == 0o600


def test_token_reaches_its_member_and_is_in_no_environment(ground: Ground) -> None:
    """It comes through a pipe: /proc shows environments to every process of the same user."""
    code = """
import os, pathlib
token = os.read(int(os.environ["MIMATRIX_TOKEN_FD"]), 100).decode()
shown = [pathlib.Path(f"/proc/{pid}/environ").read_text() for pid in (os.getpid(), os.getppid())]
print(token, [token in text for text in shown])
"""
    team = ground.team(code)
    ground.launcher.start(replace(team, environment={**team.environment, "MIMATRIX_TOKEN": "a-secret"}))
    ground.ended(team.name)
    assert ground.output(team.name) == "a-secret [False, False]\n"
