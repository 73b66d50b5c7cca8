"""A server's folder as a week of use leaves it: jobs, their events, which job had which device, figures in all tiers.

Nodes have eight devices. On most of them one job follows the other; the waiting jobs ask for the kind of device that the
running ones hold, so that nothing starts during the measurement.
"""

import json
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from sqlalchemy import insert
from sqlalchemy.orm import Session

from bench.planner_speed import CASES, MODEL, problem
from bench.server.load import FakeLauncher
from mimatrix.api.models import PROTOCOL, DeviceUsage, EventKind, JobProgress, JobState, Report, Role
from mimatrix.launch.devices import DeviceInfo, NodeInfo
from mimatrix.monitor.downsampling import DAY_S, TIERS
from mimatrix.planner.model.profile import Measurements
from mimatrix.planner.planner import make_plan
from mimatrix.server.auth.tokens import digest_of
from mimatrix.server.db.engine import address_in, opened
from mimatrix.server.db.models import AllocationRow, AuditRow, EventRow, JobRow, SampleRow, TokenRow, UsageRow
from mimatrix.server.metrics.live_state import LiveJob
from mimatrix.server.metrics.store import CLUSTER, point_of

WEEK_S = 7 * DAY_S
RANKS = 8
USERS = ("ann", "ben", "cho", "dee", "eli", "fay", "gus", "hal", "ida", "jon", "kim", "lea")
LOG = b"".join(b"step %6d loss 1.2345 samples/s 1234.5 (an ordinary line of output)\n" % step for step in range(12_000))
_ARCHIVE = b"nothing"
_NAMES = ("gpt-base", "gpt-large", "vit", "resnet-sweep", "ablation", "bert-finetune", "diffusion", "nightly eval")
_STEP_S = 0.41
_MANY = 20_000
_KINDS = {state: EventKind.__members__.get(state.name, EventKind.PHASE_CHANGED) for state in JobState}


@dataclass(frozen=True, slots=True)
class HistorySize:
    """The size of the history."""

    jobs: int = 1000
    devices: int = 500

    @property
    def running(self) -> int:
        """Jobs that run: each has a node, and a few devices are free."""
        return max(1, int(0.96 * self.devices) // RANKS)

    @property
    def waiting(self) -> int:
        """Jobs in the queue."""
        return int(0.14 * self.jobs)

    @property
    def lasting(self) -> int:
        """Running jobs that started when the week began."""
        return min(4, self.running // 2)


@dataclass(frozen=True, slots=True)
class SyntheticJob:
    """One job: when it was on which node. A job that waits has none."""

    number: int
    created_s: float
    place: int | None = None
    started_s: float | None = None
    ended_s: float | None = None

    @property
    def devices(self) -> list[str]:
        """The devices that it has, or had."""
        return [] if self.place is None else [f"node-{self.place:02d}/{device}" for device in range(RANKS)]

    @property
    def user(self) -> str:
        """Its user."""
        return USERS[self.number * 7 % len(USERS)]

    @property
    def name(self) -> str:
        """Its display name."""
        return f"{_NAMES[self.number % len(_NAMES)]} {self.number}"

    @property
    def state(self) -> JobState:
        """Its state in the end."""
        if self.started_s is None:
            return JobState.QUEUED
        if self.ended_s is None:
            return JobState.TRAINING
        return (*[JobState.DONE] * 7, JobState.FAILED, JobState.FAILED, JobState.CANCELLED)[self.number % 10]

    def step_at(self, at_s: float) -> int:
        """Return the step that it had reached."""
        return int((at_s - self.started_s) / _STEP_S) if self.started_s else 0


def nodes(size: HistorySize) -> tuple[NodeInfo, ...]:
    """Return the machines; those without jobs are of a kind that no job asks for."""
    machines = []
    for node, first in enumerate(range(0, size.devices, RANKS)):
        kind = "NVIDIA H100" if node < size.running else "NVIDIA A10"
        devices = (DeviceInfo(kind, 80 << 30),) * min(RANKS, size.devices - first)
        address = f"10.0.{node // 250}.{node % 250 + 1}"
        machines.append(NodeInfo(f"node-{node:02d}", address, devices, rack=f"rack {node // 8}"))
    return tuple(machines)


def fill(data: Path, size: HistorySize, now_s: float) -> list[SyntheticJob]:
    """Write the history; return the jobs, the oldest first."""
    (data / "code-archives").mkdir(parents=True)
    (data / "code-archives" / f"{sha256(_ARCHIVE).hexdigest()}.tar.gz").write_bytes(_ARCHIVE)
    jobs = synthetic_jobs(size, now_s)
    engine, sessions = opened(address_in(data))
    with sessions.begin() as session:
        _add(session, JobRow, [_job_row(job, now_s) for job in jobs])
        _add(session, EventRow, [event for job in jobs for event in _events(job, now_s)])
        _add(session, AllocationRow, [row for job in jobs for row in _allocations(job)])
        _add(session, TokenRow, [_token(job) for job in jobs if job.started_s])
        _add(session, AuditRow, [entry for job in jobs for entry in _audit(job)])
        _add(session, UsageRow, [{"user": user, "amount": 1e6, "at": now_s} for user in USERS])
    with sessions.begin() as session:
        _write_samples(session, jobs, size, now_s)
    engine.dispose()
    return jobs


def synthetic_jobs(size: HistorySize, now_s: float) -> list[SyntheticJob]:
    """Return jobs one after the other on each node in use, then the waiting ones."""
    draw, began_s = random.Random(1), now_s - WEEK_S
    spans: list[tuple[float, float | None, int]] = [(began_s, None, place) for place in range(size.lasting)]
    changing = range(size.lasting, size.running)
    ended = size.jobs - size.running - size.waiting
    for index, place in enumerate(changing):
        count = len(range(index, ended, len(changing)))
        changes = sorted(draw.uniform(began_s, now_s) for _ in range(count))
        starts: list[float] = [began_s, *changes]
        ends: list[float | None] = [*changes, None]
        spans += [(start, end, place) for start, end in zip(starts, ends, strict=True)]
    spans.sort(key=lambda span: span[0])
    ran = [
        SyntheticJob(number + 1, start - draw.uniform(0, 3600), place, start, end)
        for number, (start, end, place) in enumerate(spans)
    ]
    waits = sorted(draw.uniform(now_s - DAY_S, now_s) for _ in range(size.waiting))
    return [*ran, *(SyntheticJob(len(ran) + 1 + number, at) for number, at in enumerate(waits))]


def _job_row(job: SyntheticJob, now_s: float) -> dict[str, Any]:
    plan, profile = _PLANS[job.number % len(_PLANS)] if job.started_s else (None, None)
    progress = JobProgress(
        step=job.step_at(job.ended_s or now_s),
        epoch=3,
        samples_per_s=1234.5,
        step_s=_STEP_S,
        metrics={"loss": 1.25, "lr": 3e-4},
    )
    return {
        "id": job.number,
        "name": job.name,
        "user": job.user,
        "state": job.state,
        "reason": _reason(job),
        "script": "train.py",
        "arguments": ["--width", "2048", "--depth", "24", "--seed", str(job.number)],
        "environment": {"WANDB_MODE": "offline", "DATA": "shared/data"},
        "code_archive": sha256(_ARCHIVE).hexdigest(),
        "devices": f"NVIDIA H100:{RANKS if job.started_s else 2 * RANKS}",
        "priority": 40 + job.number % 20,
        "preemptible": False,
        "max_time_s": None,
        "max_restarts": 1,
        "restarts": 0,
        "generation": 1 if job.started_s else 0,
        "allocation": job.devices if job.ended_s is None else [],
        "stop_kind": "",
        "exit_code": {JobState.DONE: 0, JobState.FAILED: 1}.get(job.state),
        "created_at": job.created_s,
        "submitted_at": job.created_s,
        "waiting_since": job.created_s,
        "started_at": job.started_s,
        "ended_at": job.ended_s,
        "progress": progress.model_dump(mode="json") if job.started_s else {},
        "profile": profile,
        "plan": plan,
    }


def _reason(job: SyntheticJob) -> str:
    return {
        JobState.QUEUED: f"needs {2 * RANKS} x NVIDIA H100, 0 of 480 free",
        JobState.TRAINING: "training",
        JobState.DONE: "all ranks ended well",
        JobState.FAILED: f"rank 3 on {(job.devices or ['?'])[-1]} ended with exit code 1: RuntimeError: loss is not finite",
        JobState.CANCELLED: "cancelled",
    }[job.state]


def _events(job: SyntheticJob, now_s: float) -> Iterator[dict[str, Any]]:
    """Yield the events of a job; a long one is split again every quarter of an hour."""

    def event(at_s: float, state: JobState, reason: str) -> dict[str, Any]:
        generation = 0 if state is JobState.QUEUED else 1
        return {
            "job": job.number,
            "at": at_s,
            "state": state,
            "generation": generation,
            "kind": _KINDS[state],
            "reason": reason,
        }

    yield event(job.created_s, JobState.QUEUED, f"submitted by {job.user}")
    yield event(job.created_s + 1, JobState.QUEUED, f"needs {RANKS} x NVIDIA H100, 0 of 480 free")
    if job.started_s is None:
        return
    yield event(job.started_s, JobState.STARTING, f"{RANKS} x NVIDIA H100 on one node are free")
    yield event(job.started_s + 20, JobState.PROFILING, "measuring its devices")
    yield event(job.started_s + 60, JobState.TRAINING, "training")
    at_s, until_s = job.started_s + 900, job.ended_s or now_s
    while at_s < until_s:
        yield event(
            at_s, JobState.TRAINING, f"another split: rank 5 takes {at_s % 7 + 20:.0f} % longer than a minute ago"
        )
        at_s += 900
    if job.ended_s:
        yield event(job.ended_s, job.state, _reason(job))


def _allocations(job: SyntheticJob) -> Iterator[dict[str, Any]]:
    for device in job.devices:
        yield {
            "device": device,
            "job": job.number,
            "generation": 1,
            "started_at": job.started_s,
            "ended_at": job.ended_s,
        }


def _token(job: SyntheticJob) -> dict[str, Any]:
    """Return the token that its workers had; running ones get another when the server starts."""
    return {
        "user": job.user,
        "role": Role.WORKER,
        "digest": digest_of(f"of {job.number}"),
        "job": job.number,
        "created_at": job.started_s,
        "ended_at": job.ended_s,
    }


def _audit(job: SyntheticJob) -> Iterator[dict[str, Any]]:
    for action in (f"PUT /api/code-archives/{sha256(_ARCHIVE).hexdigest()}", "POST /api/jobs"):
        yield {
            "at": job.created_s,
            "user": job.user,
            "role": Role.USER,
            "action": action,
            "status": 201,
            "address": "127.0.0.1",
        }


def points(jobs: list[SyntheticJob], now_s: float) -> list[tuple[float, int, int]]:
    """Return time, tier and job of every sample: every tier has what its time holds, in the order of writing."""
    spans = [(CLUSTER, now_s - WEEK_S, now_s)]
    spans += [(job.number, job.started_s, job.ended_s or now_s) for job in jobs if job.started_s]
    wanted = []
    for number, tier in enumerate(TIERS):
        oldest_s = now_s - min(tier.kept_s, WEEK_S)
        for job, start_s, end_s in spans:
            first = int((now_s - end_s) / tier.every_s)
            last = int((now_s - max(start_s, oldest_s)) / tier.every_s)
            wanted += [(now_s - back * tier.every_s, number, job) for back in range(first, last)]
    return sorted(wanted)


def _write_samples(session: Session, jobs: list[SyntheticJob], size: HistorySize, now_s: float) -> None:
    by_number = {job.number: job for job in jobs}
    drawn, rows = _figures(), list[dict[str, Any]]()
    for at_s, tier, job in points(jobs, now_s):
        if job == CLUSTER:
            figures: dict[str, Any] = {"devices": size.devices, "used": RANKS * size.running, "queued": size.waiting}
        else:
            step = by_number[job].step_at(at_s)
            loss = float(f"{1 + 8 / (1 + step / 5e4) + (step % 97) / 970:.4g}")
            figures = {**drawn[step % len(drawn)], "step": step, "metrics": {"loss": loss, "lr": 3e-4}}
        rows.append({"job": job, "tier": tier, "at": at_s, "figures": figures})
        if len(rows) == _MANY:
            _add(session, SampleRow, rows)
            rows = []
    _add(session, SampleRow, rows)


def _figures() -> list[dict[str, Any]]:
    """Return samples of a job of eight ranks, made from reports as the server makes them."""
    draw, samples = random.Random(2), []
    for _ in range(200):
        live = LiveJob(1, tuple(f"n/{rank}" for rank in range(RANKS)))
        for rank in range(RANKS):
            live.record_report(rank, _report(draw, rank), 0.0)
        samples.append(point_of(live))
    return samples


def _report(draw: random.Random, rank: int) -> Report:
    busy_s = draw.uniform(0.3, 0.36)
    return Report(
        protocol=PROTOCOL,
        generation=1,
        rank=rank,
        state=JobState.TRAINING,
        samples_per_s=draw.uniform(1200, 1260),
        step_s=draw.uniform(0.4, 0.42),
        compute_s=busy_s,
        data_s=draw.uniform(0.001, 0.004),
        waiting_s=0.38 - busy_s,
        communication_s=draw.uniform(0.01, 0.03),
        predicted_step_s=0.4032,
        use=DeviceUsage(
            busy=draw.uniform(0.8, 1),
            memory_bytes=draw.randrange(60 << 30, 70 << 30),
            memory_total_bytes=80 << 30,
            power_w=draw.uniform(500, 700),
            temperature_c=draw.uniform(55, 75),
        ),
    )


def _add(session: Session, table: Any, rows: list[dict[str, Any]]) -> None:
    if rows:
        session.execute(insert(table), rows)


def _plan_and_profile(seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a plan of eight devices, and the curves that it was made from."""
    devices = problem(CASES[0], seed)
    profile: dict[str, Any] = json.loads(Measurements(MODEL, devices.profiles).to_text())
    return make_plan(devices).to_json(), profile


_PLANS = [_plan_and_profile(seed) for seed in range(3)]


def host(data: str, port: str, jobs: str, devices: str) -> None:
    """Run the server."""
    from mimatrix.server import ServerSettings, serve

    size = HistorySize(int(jobs), int(devices))
    serve(ServerSettings(data=Path(data), port=int(port)), lambda _: FakeLauncher(nodes(size), LOG))


if __name__ == "__main__":
    host(*sys.argv[2:])
