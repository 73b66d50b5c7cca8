"""Code archives on the server: durable when they are acknowledged, and checked before they are used."""

import asyncio
import hashlib
import os
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from mimatrix.server.errors import ApiError
from mimatrix.server.jobs.code_archives import CodeArchives

ARCHIVE = os.urandom(3 << 20)
DIGEST = hashlib.sha256(ARCHIVE).hexdigest()


async def parts(data: bytes = ARCHIVE) -> AsyncIterator[bytes]:
    for start in range(0, len(data), 65_536):
        yield data[start : start + 65_536]


@pytest.fixture
def store(tmp_path: Path) -> CodeArchives:
    return CodeArchives(tmp_path)


def test_an_archive_is_stored_under_its_digest(store: CodeArchives, tmp_path: Path) -> None:
    assert store.path(DIGEST) is None
    asyncio.run(store.store(DIGEST, parts()))
    path = store.path(DIGEST)
    assert path is not None
    assert path.read_bytes() == ARCHIVE
    assert list(tmp_path.iterdir()) == [path]


def test_an_archive_with_another_digest_is_refused(store: CodeArchives, tmp_path: Path) -> None:
    with pytest.raises(ApiError, match="does not have this SHA-256"):
        asyncio.run(store.store(DIGEST, parts(b"other")))
    assert list(tmp_path.iterdir()) == []


def test_an_archive_that_a_power_loss_cut_off_is_uploaded_again(tmp_path: Path) -> None:
    asyncio.run(CodeArchives(tmp_path).store(DIGEST, parts()))
    (tmp_path / f"{DIGEST}.tar.gz").write_bytes(ARCHIVE[:1000])
    restarted = CodeArchives(tmp_path)
    assert restarted.path(DIGEST) is None
    asyncio.run(restarted.store(DIGEST, parts()))
    path = restarted.path(DIGEST)
    assert path is not None
    assert path.read_bytes() == ARCHIVE


def test_what_an_upload_left_behind_is_removed_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "0123.partial").write_bytes(b"x")
    CodeArchives(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_archive_is_on_disk_when_it_is_acknowledged(
    store: CodeArchives, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[str, str]] = []
    real = os.fsync

    def fsync(handle: int) -> None:
        synced.append((Path(f"/proc/self/fd/{handle}").readlink().suffix, threading.current_thread().name))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    asyncio.run(store.store(DIGEST, parts()))
    assert [kind for kind, _ in synced] == [".partial", ""], "the file before its name, then the directory"
    assert all(thread != threading.main_thread().name for _, thread in synced), "the event loop does not wait for disks"


def test_other_requests_do_not_wait_for_a_slow_disk(store: CodeArchives, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: time.sleep(0.5))

    async def both() -> float:
        storing = asyncio.create_task(store.store(DIGEST, parts()))
        longest_s = 0.0
        while not storing.done():
            began_s = time.monotonic()
            await asyncio.sleep(0.01)
            longest_s = max(longest_s, time.monotonic() - began_s)
        await storing
        return longest_s

    assert asyncio.run(both()) < 0.4
