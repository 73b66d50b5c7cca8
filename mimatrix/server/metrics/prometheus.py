"""Metrics for Prometheus, as of the moment of asking. Names and labels are listed in docs/monitoring.md."""

from collections.abc import Callable, Iterator
from functools import partial

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from mimatrix.api.models import JobState, PushReport, Report
from mimatrix.server.context import Context
from mimatrix.server.db.models import AllocationRow, JobRow, NodeRow
from mimatrix.server.db.unreadable import load_rows
from mimatrix.server.jobs.lifecycle import ACTIVE_STATES, WAITING_STATES
from mimatrix.server.metrics.live_state import LiveJob

Figure = Callable[[Report], float | None]
JobFigure = Callable[[LiveJob, Report], float | None]
GroupFigure = Callable[[PushReport], float]
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MOST_RANKS = 2000
"""Series of ranks are given for this number of them, of the newest jobs; other jobs have only series of their own."""
_OF_JOB: dict[str, tuple[str, JobFigure]] = {
    "mimatrix_job_step": ("Steps done", lambda _, said: said.step),
    "mimatrix_job_step_seconds": ("A step, measured", lambda _, said: said.step_s),
    "mimatrix_job_predicted_step_seconds": ("A step, as planned", lambda _, said: said.predicted_step_s),
    "mimatrix_job_samples_per_second": ("Samples a second, all ranks together", lambda job, _: job.samples_per_s),
}
_OF_GROUP: dict[str, tuple[str, GroupFigure]] = {
    "mimatrix_group_pushes": ("Pushes of a group, in all", lambda said: said.pushes),
    "mimatrix_group_samples": ("Samples in them", lambda said: said.samples),
    "mimatrix_group_staleness": ("Pushes of others that its last one did not know", lambda said: said.staleness),
    "mimatrix_group_moved_seconds": ("What it stood still for its pushes, in all", lambda said: said.moved_s),
    "mimatrix_group_waited_seconds": ("What it waited for other groups, in all", lambda said: said.waited_s),
}
_OF_RANK: dict[str, tuple[str, Figure]] = {
    "mimatrix_rank_compute_seconds": ("Computing, in a step", lambda said: said.compute_s),
    "mimatrix_rank_data_seconds": ("Waiting for the loader, in a step", lambda said: said.data_s),
    "mimatrix_rank_waiting_seconds": ("Waiting for other ranks, in a step", lambda said: said.waiting_s),
    "mimatrix_rank_communication_seconds": ("Moving data, in a step", lambda said: said.communication_s),
    "mimatrix_rank_moved_bytes": ("Moved in collectives, in a step", lambda said: said.moved_bytes),
    "mimatrix_device_busy_ratio": ("How busy its device is", lambda said: said.use.busy if said.use else None),
    "mimatrix_device_memory_bytes": (
        "Memory of its device in use",
        lambda said: said.use.memory_bytes if said.use else None,
    ),
    "mimatrix_device_power_watts": ("What its device draws", lambda said: said.use.power_w if said.use else None),
    "mimatrix_device_temperature_celsius": ("How hot it is", lambda said: said.use.temperature_c if said.use else None),
}


def exposition(context: Context) -> bytes:
    """Return all metrics in the text format."""
    registry = CollectorRegistry()
    registry.register(_Now(context))
    return generate_latest(registry)


class _Now(Collector):
    def __init__(self, context: Context) -> None:
        self._context = context

    def collect(self) -> Iterator[Metric]:
        """Yield what the server and the workers know now."""
        yield from self._of_server()
        live = dict(sorted(self._context.live.all().items(), reverse=True))
        yield from _of_jobs(live)
        yield from _of_ranks(live)

    def _of_server(self) -> Iterator[Metric]:
        with self._context.sessions() as session:
            asked = select(JobRow.state, func.count()).group_by(JobRow.state)
            counts = {str(state): int(count) for state, count in session.execute(asked)}
            oldest = session.scalar(select(func.min(JobRow.waiting_since)).where(JobRow.state.in_(WAITING_STATES)))
            held = (AllocationRow.ended_at.is_(None), JobRow.state.in_(ACTIVE_STATES))
            used = set(session.scalars(select(AllocationRow.device).join(JobRow).where(*held)))
            nodes = self._nodes(session)
        jobs = GaugeMetricFamily("mimatrix_jobs", "Jobs in each state", labels=["state"])
        for state in JobState:
            jobs.add_metric([state.value], counts.get(state.value, 0))
        yield jobs
        turned_s = self._context.monotonic() - self._context.controller_turned_at_s
        yield GaugeMetricFamily(
            "mimatrix_controller_turned_seconds", "Since the controller completed a turn", value=max(0.0, turned_s)
        )
        now_s = self._context.clock()
        waits = now_s - oldest if isinstance(oldest, int | float) else 0.0
        yield GaugeMetricFamily("mimatrix_queue_oldest_seconds", "How long the oldest waiting job waits", value=waits)
        devices = GaugeMetricFamily("mimatrix_devices", "Devices", labels=["node", "kind", "state"])
        heard = GaugeMetricFamily("mimatrix_node_heard_seconds", "Since a node last answered", labels=["node"])
        for node, kinds, seen_at in nodes:
            heard.add_metric([node], max(0.0, now_s - seen_at))
            for kind in dict.fromkeys(kinds):
                of_kind = [number for number, each in enumerate(kinds) if each == kind]
                busy = sum(f"{node}/{number}" in used for number in of_kind)
                devices.add_metric([node, kind, "used"], busy)
                devices.add_metric([node, kind, "free"], len(of_kind) - busy)
        yield devices
        yield heard
        refusals = self._context.authenticator.refusals
        about = "Requests that were refused because their token was missing or unknown"
        yield CounterMetricFamily("mimatrix_unauthenticated_requests", about, value=refusals)

    def _nodes(self, session: Session) -> list[tuple[str, list[str], float]]:
        """Return the name of each node, the kinds of its devices, and when it answered last."""
        contain = partial(self._context.unreadable.contain, "node")
        found = []
        for row in load_rows(session, select(NodeRow), NodeRow, NodeRow.name, contain):
            with contain(row.name):
                found.append((row.name, [str(each["kind"]) for each in row.devices["devices"]], float(row.seen_at)))
        return found


def _of_jobs(live: dict[int, LiveJob]) -> Iterator[Metric]:
    for name, (about, figure) in _OF_JOB.items():
        family = GaugeMetricFamily(name, about, labels=["job"])
        for number, job in live.items():
            said = job.leader_report
            _add(family, [str(number)], figure(job, said) if said else None)
        yield family
    yield from _of_groups(live)
    troubles = GaugeMetricFamily("mimatrix_job_trouble", "A rank holds the others up", labels=["job", "kind", "rank"])
    for number, job in live.items():
        for each in job.stragglers:
            troubles.add_metric([str(number), each.kind, str(each.rank)], 1)
    yield troubles


def _of_groups(live: dict[int, LiveJob]) -> Iterator[Metric]:
    """Yield metrics of groups that do not wait for each other; at most as many as of ranks."""
    said = [
        ([str(number), str(each.group)], each.pushed)
        for number, job in live.items()
        for each in job.group_leaders.values()
        if each.pushed
    ][:MOST_RANKS]
    for name, (about, figure) in _OF_GROUP.items():
        family = GaugeMetricFamily(name, about, labels=["job", "group"])
        for labels, pushed in said:
            family.add_metric(labels, figure(pushed))
        yield family


def _of_ranks(live: dict[int, LiveJob]) -> Iterator[Metric]:
    said: list[tuple[list[str], Report]] = []
    for number, job in live.items():
        if len(said) + job.ranks <= MOST_RANKS:
            reports = job.reports.items()
            said += [([str(number), str(rank), job.devices[rank]], each) for rank, each in reports if rank < job.ranks]
    for name, (about, figure) in _OF_RANK.items():
        family = GaugeMetricFamily(name, about, labels=["job", "rank", "device"])
        for labels, report in said:
            _add(family, labels, figure(report))
        yield family


def _add(family: GaugeMetricFamily, labels: list[str], value: float | None) -> None:
    if value is not None:
        family.add_metric(labels, value)
