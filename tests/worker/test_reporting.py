"""Reports of workers to the job server."""

import logging
from pathlib import Path

import pytest

from mimatrix.api.models import Report, ReportReply
from mimatrix.worker.rendezvous import WorkerIdentity
from mimatrix.worker.reporting import Reporter, seconds_until_report


def test_ranks_of_a_job_report_at_the_same_time_and_jobs_in_turn() -> None:
    for job, every_s in ((1, 1.0), (2, 1.0), (7, 5.0)):
        turns = {
            round((now_s + seconds_until_report(job, every_s, now_s)) % every_s, 3) % every_s
            for now_s in (1e9 + 0.17 * step for step in range(50))
        }
        assert len(turns) == 1
    assert all(0.25 <= seconds_until_report(3, 1.0, 1e9 + 0.01 * step) <= 1.25 for step in range(100))
    assert len({round(seconds_until_report(job, 1.0, 1e9), 3) for job in range(50)}) == 50


class FakeClient:
    """Answers every report with a notice."""

    def report(self, job: int, report: Report) -> ReportReply:
        return ReportReply(
            leave=False, report_interval_s=1.0, notice=f"rank 1 of job {job} is slow", speaks=report.rank == 0
        )


def test_a_notice_of_the_server_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    identity = WorkerIdentity(server="http://127.0.0.1:9", token="secret", job=7, generation=1, rank=0)
    reporter = Reporter(FakeClient(), identity, tmp_path)  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING, "mimatrix"):
        reporter.start()
        reporter.stop()
    assert "rank 1 of job 7 is slow" in caplog.messages
