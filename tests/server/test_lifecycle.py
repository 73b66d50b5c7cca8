"""The life of a job: one table, and one function that moves and writes."""

from collections.abc import Iterable
from pathlib import Path

import pytest
from sqlalchemy import select

from mimatrix.api.models import EventKind, JobState, Submission
from mimatrix.server.db.engine import address_in, opened
from mimatrix.server.db.models import EventRow, JobRow
from mimatrix.server.jobs.events import JobEvent
from mimatrix.server.jobs.lifecycle import TRANSITIONS, is_allowed, transition
from mimatrix.server.jobs.service import new_row

SUBMISSION = Submission(name="x", script="x.py", code_archive="0" * 64)

BECAUSE = JobEvent(EventKind.WAITING, "because", {"number": 1})


def test_every_state_is_in_the_table_and_every_end_can_be_reached() -> None:
    assert set(TRANSITIONS) == set(JobState)
    for state in (state for state in JobState if state.is_active):
        assert all(is_allowed(state, end) for end in JobState if end.is_final)
    for end in (state for state in JobState if state.is_final):
        assert TRANSITIONS[end] == {JobState.QUEUED}


@pytest.mark.parametrize("old", JobState)
@pytest.mark.parametrize("new", JobState)
@pytest.mark.wording
def test_moves_are_those_of_the_table(tmp_path: Path, old: JobState, new: JobState) -> None:
    job = new_row(SUBMISSION, "ann", 1.0)
    job.id, job.state = 1, old

    class Added(list[object]):
        def add(self, row: object) -> None:
            self.append(row)

        def add_all(self, rows: Iterable[object]) -> None:
            self.extend(rows)

        def execute(self, statement: object) -> None:
            assert "UPDATE allocations" in str(statement)

    added = Added()
    if not is_allowed(old, new):
        with pytest.raises(AssertionError, match=f"cannot go from {old} to {new}"):
            transition(added, job, new, BECAUSE, 2.0)  # type: ignore[arg-type]
        assert job.state == old
        return
    transition(added, job, new, BECAUSE, 2.0)  # type: ignore[arg-type]
    (event,) = added
    assert isinstance(event, EventRow)
    assert (event.state, event.reason, event.at, event.generation) == (new, "because", 2.0, job.generation)
    assert (event.kind, event.data) == (EventKind.WAITING, {"number": 1})
    assert (job.state, job.reason) == (new, "because")
    assert job.generation == (1 if new is JobState.STARTING else 0)


def test_row_and_event_are_written_together_or_not_at_all(tmp_path: Path) -> None:
    engine, sessions = opened(address_in(tmp_path))
    with sessions.begin() as session:
        session.add(new_row(SUBMISSION, "ann", 1.0))

    def cut_off() -> None:
        with sessions.begin() as session:
            transition(session, session.get_one(JobRow, 1), JobState.STARTING, BECAUSE, 2.0)
            raise RuntimeError("cut off")

    with pytest.raises(RuntimeError, match="cut off"):
        cut_off()
    with sessions() as session:
        assert session.get_one(JobRow, 1).state == JobState.QUEUED
        assert not session.scalars(select(EventRow)).all()
    engine.dispose()
