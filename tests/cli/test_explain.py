"""What `mimatrix explain` prints below the events: why a job waits now, unless its last event says so."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from mimatrix.api.models import Event, EventKind, Job, JobProgress, JobState
from mimatrix.cli.jobs import jobs

AT = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(("free", "has_now"), [(1, False), (2, True)])
def test_the_reason_is_compared_and_not_its_sentence(
    free: int, has_now: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    event = Event(
        id=1,
        at=AT,
        state=JobState.QUEUED,
        generation=0,
        kind=EventKind.WAITING,
        reason="as an older version said it",
        data={"wait": {"kind": "behind", "free": 1}},
    )
    job = _job("as this version says it", {"kind": "waiting", "wait": {"kind": "behind", "free": free}})

    @contextmanager
    def connected() -> Iterator[Any]:
        yield SimpleNamespace(job=lambda _: job, events=lambda _: [event])

    monkeypatch.setattr(jobs, "connected", connected)
    jobs.explain(1)
    assert ("as this version says it" in capsys.readouterr().out) == has_now


def _job(reason: str, reason_data: dict[str, Any]) -> Job:
    return Job(
        id=1,
        name="x",
        user="ann",
        state=JobState.QUEUED,
        reason=reason,
        reason_data=reason_data,
        script="x.py",
        arguments=(),
        devices="1",
        priority=50,
        preemptible=False,
        max_time_s=None,
        max_restarts=0,
        generation=0,
        allocation=(),
        exit_code=None,
        created_at=AT,
        started_at=None,
        ended_at=None,
        progress=JobProgress(),
    )
