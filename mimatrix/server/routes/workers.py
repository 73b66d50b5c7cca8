"""Workers: rendezvous, reports, profiles, plans and checkpoints. Tensors never come here."""

from collections import Counter

from fastapi import APIRouter, Response

from mimatrix.api import models as m
from mimatrix.server.auth.dependencies import Shared, Worker
from mimatrix.server.auth.tokens import Bearer
from mimatrix.server.context import Context
from mimatrix.server.db.models import JobRow
from mimatrix.server.errors import ApiError
from mimatrix.server.jobs.documents import checked_plan, checked_profile
from mimatrix.server.jobs.events import plan_changed
from mimatrix.server.jobs.lifecycle import record_event
from mimatrix.server.jobs.service import find_job
from mimatrix.server.metrics.live_state import LiveJob
from mimatrix.server.routes.jobs import JobId

router = APIRouter(prefix="/api", tags=["workers"])
_MAX_REASON = 500


@router.post("/jobs/{number}/join")
def join(number: JobId, said: m.RendezvousRequest, shared: Shared, who: Worker) -> m.Rendezvous:
    """Announce a worker, and get the address of rank 0; the port is 0 until rank 0 has announced itself."""
    live = _live(number, said.protocol, said.generation, shared, who)
    with shared.sessions() as session:
        row = find_job(session, number)
    _check_rank(number, said.rank, len(row.allocation))
    first = live.join(said.rank, said)
    return m.Rendezvous(
        ranks=len(row.allocation),
        local_rank=_local_rank(row, said.rank),
        local_ranks=Counter(map(_node, row.allocation))[_node(row.allocation[said.rank])],
        master_address=first.address if first else "",
        master_port=first.port if first else 0,
        generation=said.generation,
    )


@router.post("/jobs/{number}/report")
async def report(number: JobId, said: m.Report, shared: Shared, who: Worker) -> m.ReportReply:
    """Report progress and metrics. Nothing is written to disk here; the controller does that periodically."""
    return take_report(number, said, shared, who)


def take_report(number: int, said: m.Report, shared: Context, who: Bearer) -> m.ReportReply:
    """Store a report, and return the reply.

    Raises:
        ApiError: The worker is not one of this job's current generation.
    """
    live = _live(number, said.protocol, said.generation, shared, who)
    _check_rank(number, said.rank, live.ranks)
    speaks = live.record_report(said.rank, said, shared.clock())
    notice = live.pop_notice() if speaks else ""
    return m.ReportReply(
        leave=live.leave, report_interval_s=shared.live.report_interval_s(), notice=notice, speaks=speaks
    )


@router.put("/jobs/{number}/profile", status_code=204, response_class=Response)
def profile(number: JobId, said: m.DocumentUpload, shared: Shared, who: Worker) -> Response:
    """Store the profile of a job's devices."""
    return _store(number, said, shared, who, "profile")


@router.put("/jobs/{number}/plan", status_code=204, response_class=Response)
def plan(number: JobId, said: m.DocumentUpload, shared: Shared, who: Worker) -> Response:
    """Store the plan of a job."""
    return _store(number, said, shared, who, "plan")


@router.put("/jobs/{number}/checkpoints", status_code=204, response_class=Response)
def saved(number: JobId, said: m.CheckpointList, shared: Shared, who: Worker) -> Response:
    """Store the list of a job's checkpoints."""
    _live(number, said.protocol, said.generation, shared, who)
    with shared.sessions.begin() as session:
        find_job(session, number, to_change=True).checkpoints = said.model_dump(mode="json")["checkpoints"]
    return Response(status_code=204)


def _store(number: int, said: m.DocumentUpload, shared: Context, who: Bearer, what: str) -> Response:
    content = checked_plan(said.content) if what == "plan" else checked_profile(said.content)
    live, now_s = _live(number, said.protocol, said.generation, shared, who), shared.clock()
    with shared.sessions.begin() as session:
        row = find_job(session, number, to_change=True)
        setattr(row, what, content)
        why = content.get("why")
        if why and live.claim_plan_event(now_s):
            record_event(session, row, plan_changed(why[:_MAX_REASON]), now_s)
    return Response(status_code=204)


def _live(number: int, protocol: int, generation: int, shared: Context, who: Bearer) -> LiveJob:
    if who.job != number:
        raise ApiError(403, f"this token belongs to a worker of job {who.job}; it is not valid for job {number}")
    if protocol != m.PROTOCOL:
        raise ApiError(
            409,
            f"the server has protocol version {m.PROTOCOL} and the worker {protocol}; install the same version on both",
        )
    live = shared.live.get(number, generation)
    if live is None:
        raise ApiError(409, f"generation {generation} of job {number} does not run; it was stopped or restarted")
    return live


def _check_rank(number: int, rank: int, ranks: int) -> None:
    if rank >= ranks:
        raise ApiError(422, f"rank {rank} is not one of the {ranks} ranks of job {number}")


def _node(device: str) -> str:
    return device.rpartition("/")[0]


def _local_rank(row: JobRow, rank: int) -> int:
    return sum(_node(device) == _node(row.allocation[rank]) for device in row.allocation[:rank])
