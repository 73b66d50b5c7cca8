"""What the scheduler would do with a job if it were submitted now.

The answer is computed in a request's thread, from the database and a snapshot of speeds; the controller's own state is
not touched.
"""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

from sqlalchemy import select

from mimatrix.scheduler import DeviceSlot, SchedulingPolicy, Start, State, Wait, decide
from mimatrix.server.context import Context
from mimatrix.server.controller.nodes import slots_of_row
from mimatrix.server.controller.queue_state import load_jobs, queued_of, running_of
from mimatrix.server.controller.speeds import Speeds
from mimatrix.server.controller.usage import read_usage
from mimatrix.server.db.models import JobRow, NodeRow
from mimatrix.server.db.unreadable import load_rows
from mimatrix.server.jobs.lifecycle import ACTIVE_STATES, WAITING_STATES

logger = logging.getLogger(__name__)
_SILENT_S = 30.0
"""A node that was not listed for this time does not answer."""


def dry_run(context: Context, speeds: Speeds, policy: SchedulingPolicy, job: JobRow) -> Start | Wait:
    """Return the decision about a job that is not in the database; its id must be one that no job has."""
    now_s = context.clock()
    with context.sessions() as session:
        slots: dict[str, DeviceSlot] = {}
        answering = select(NodeRow).where(NodeRow.seen_at > now_s - _SILENT_S)
        for node in load_rows(session, answering, NodeRow, NodeRow.name, partial(_leave_out, "node")):
            with _leave_out("node", node.name):
                slots |= slots_of_row(node)
        queued, running = [queued_of(job, speeds, _stored)], []
        for row in load_jobs(session, WAITING_STATES, _leave_out_job):
            with _leave_out_job(row.id):
                queued.append(queued_of(row, speeds, _stored))
        for row in load_jobs(session, ACTIVE_STATES, _leave_out_job):
            with _leave_out_job(row.id):
                running.append(running_of(row, slots, _stored))
        used = read_usage(session)
    decisions = decide(State(tuple(slots.values()), tuple(queued), tuple(running), used), now_s, policy)
    return next(each for each in decisions if isinstance(each, Start | Wait) and each.job == job.id)


def _stored(_what: str, _job: int, wall_s: float) -> float:
    return wall_s


@contextmanager
def _leave_out(what: str, name: object) -> Iterator[None]:
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        logger.debug("a dry run leaves out %s %s (%s)", what, name, error)


def _leave_out_job(job: int) -> AbstractContextManager[None]:
    return _leave_out("job", job)
