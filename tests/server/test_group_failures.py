"""A job of groups that do not wait for each other: seen by group, and none ends because another is lost."""

import os
import signal
import time
from pathlib import Path

import pytest
from support.servers import ServerProcess, server
from support.workers import process_of

from mimatrix.api.models import ENDED, JobState

pytestmark = pytest.mark.timeout(180)


@pytest.mark.long
def test_a_lost_group_ends_no_other(tmp_path: Path) -> None:
    with server(tmp_path / "data", devices=2) as there:
        number = there.submit("in_groups.py", "--groups", "0/1")
        there.until(number, lambda job: job.progress.step > 50)
        with there.client() as client:
            while not all(rank.pushed and rank.pushed.pushes > 5 for rank in client.ranks(number).ranks):
                time.sleep(0.2)
            first, second = client.ranks(number).ranks
            assert (first.group, second.group) == (0, 1)
            assert first.pushed
            assert first.pushed.samples == 16 * first.pushed.pushes
            assert client.job(number).progress.metrics.keys() == {"loss", "staleness"}
        seen = there.command("top", "--once").stdout
        assert "group 0 (rank 0): " in seen
        assert "group 1 (rank 1): " in seen
        os.kill(process_of((there.data / "address").read_text().strip(), number, 0), signal.SIGKILL)
        _until_said(there, number, "group 0 was lost, the others keep training: rank 0 on ")
        with there.client() as client:
            (left,) = client.ranks(number).ranks
            assert left.pushed
            before = left.pushed.pushes
            time.sleep(3.0)
            job = client.job(number)
            assert job.state is JobState.TRAINING
            (left,) = client.ranks(number).ranks
            assert left.pushed
            assert left.pushed.pushes > before
        (there.data / "checkpoints" / f"job-{number}" / "enough").touch()
        job = there.until(number, lambda job: job.state in ENDED)
        assert (job.state, job.reason) == (JobState.DONE, "all ranks ended well but 1, whose groups were lost")
        with there.client() as client:
            lost = [each.reason for each in client.events(number) if "was lost" in each.reason]
        assert len(lost) == 1
        rows = there.command("metrics", str(number), "--csv").stdout.splitlines()
        assert "group_pushes_rank1" in rows[0]


@pytest.mark.long
def test_a_lost_group_returns(tmp_path: Path) -> None:
    """That of rank 0, which has the store and speaks for the job; its service dies with it."""
    with server(tmp_path / "data", devices=2) as there:
        number = there.submit("in_groups.py", "--groups", "0/1", "--retries", "1")
        _until_pushed(there, number, 0, 5)
        address = (there.data / "address").read_text().strip()
        before = process_of(address, number, 0)
        os.kill(before, signal.SIGKILL)
        _until_said(there, number, "group 0 is started again (restart 1): rank 0 on ")
        _until_pushed(there, number, 0, 5)
        assert process_of(address, number, 0) != before
        with there.client() as client:
            assert [rank.group for rank in client.ranks(number).ranks] == [0, 1]
            assert client.job(number).generation == 1
        folder = there.data / "checkpoints" / f"job-{number}"
        assert (folder / ".meeting-1").exists()
        (folder / "enough").touch()
        job = there.until(number, lambda job: job.state in ENDED)
        assert (job.state, job.reason) == (JobState.DONE, "all ranks ended well")
        assert not list(folder.glob(".meeting*"))


@pytest.mark.wording
def test_groups_that_do_not_fit(tmp_path: Path) -> None:
    there = ServerProcess(tmp_path / "data")
    script = str(Path(__file__).parent / "scripts" / "in_groups.py")
    said = there.command("submit", "--groups", "0/1", "--devices", "3", script)
    assert (said.returncode, said.stdout) == (2, "")
    assert "--groups 0/1 has 2 ranks, and --devices is 3; give as many of both" in said.stderr
    assert "give as many of both" in there.command("submit", "--groups", "0/1", "--devices", "2..3", script).stderr
    assert "is not a list of groups" in there.command("submit", "--groups", "a/b", script).stderr


def _until_pushed(there: ServerProcess, number: int, rank: int, pushes: int) -> None:
    deadline = time.monotonic() + 60
    with there.client() as client:
        while True:
            found = next((each.pushed for each in client.ranks(number).ranks if each.rank == rank), None)
            if found and found.pushes > pushes:
                return
            assert time.monotonic() < deadline, there.said()
            time.sleep(0.2)


def _until_said(there: ServerProcess, number: int, words: str) -> None:
    deadline = time.monotonic() + 30
    with there.client() as client:
        while not any(words in event.reason for event in client.events(number)):
            assert time.monotonic() < deadline, there.said()
            time.sleep(0.2)
