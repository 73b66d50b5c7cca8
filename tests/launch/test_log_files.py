"""Output on disk: what is kept of it, and what a reader sees of it."""

from io import FileIO
from pathlib import Path

import pytest

from mimatrix.launch.launcher import LogPart
from mimatrix.launch.local.log_files import RotatingLog, read_log


def test_nothing_was_written_yet(tmp_path: Path) -> None:
    assert read_log(tmp_path / "0", 0, 100) == LogPart(b"", 0)
    assert read_log(tmp_path / "0", -5, 100) == LogPart(b"", 0)


@pytest.mark.parametrize("chunk", [1, 3, 7, 10, 25])
def test_the_last_parts_are_kept(tmp_path: Path, chunk: int) -> None:
    log, whole = RotatingLog(tmp_path / "0", part_bytes=10), bytes(range(200))
    for at in range(0, len(whole), chunk):
        log.write(whole[at : at + chunk])
        end = min(len(whole), at + chunk)
        kept = read_log(tmp_path / "0", 0, 1000)
        assert kept.next_offset == end
        assert kept.data == whole[end - len(kept.data) : end]
        assert min(end, 10) <= len(kept.data) < 2 * (10 + chunk)
        assert len(list((tmp_path / "0").iterdir())) <= 2
    log.close()


def test_a_reader_goes_on_over_parts_and_jumps_over_what_was_dropped(tmp_path: Path) -> None:
    log = RotatingLog(tmp_path / "0", part_bytes=4)
    for text in (b"abcd", b"efgh", b"ij"):
        log.write(text)
    log.close()
    assert read_log(tmp_path / "0", 0, 3) == LogPart(b"efg", 7)
    assert read_log(tmp_path / "0", 7, 100) == LogPart(b"hij", 10)
    assert read_log(tmp_path / "0", 10, 100) == LogPart(b"", 10)
    assert read_log(tmp_path / "0", 99, 100) == LogPart(b"", 99)
    assert read_log(tmp_path / "0", -5, 2) == LogPart(b"fg", 7)
    assert read_log(tmp_path / "0", -99, 100) == LogPart(b"efghij", 10)
    assert read_log(tmp_path / "0", 4, 0) == LogPart(b"", 4)


def test_a_full_disk_drops_output_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = RotatingLog(tmp_path / "0")
    log.write(b"before")
    log.close()
    with monkeypatch.context() as full:
        full.setattr(RotatingLog, "_open_next", lambda _: FileIO("/dev/full", "wb"))
        log.write(b"lost!")
        log.write(b"lost!")
    log.write(b"after")
    log.close()
    assert read_log(tmp_path / "0", 0, 100) == LogPart(b"before", 6)
    assert read_log(tmp_path / "0", 6, 100) == LogPart(b"after", 21)
