"""A server's folder as a week of use leaves it: jobs, what happened to them, who had which device, figures in all tiers.

Nodes have eight devices. On most of them one job follows the other: those that hold them now have waiting behind them
what asks for the same kind, so that nothing starts while somebody measures.
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
from bench.server.load import StandingLauncher
from mimatrix.api.models import PROTOCOL, DeviceUsage, EventKind, JobState, Progress, Report, Role
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
class Size:
    """How much there is."""

    jobs: int = 1000
    devices: int = 500

    @property
    def running(self) -> int:
        """Each has a node; a few devices are free."""
        return max(1, int(0.96 * self.devices) // RANKS)

    @property
    def waiting(self) -> int:
        """In line."""
        return int(0.14 * self.jobs)

    @property
    def lasting(self) -> int:
        """Of those that run, since the week began."""
        return min(4, self.running // 2)


@dataclass(frozen=True, slots=True)
class Life:
    """One job: from when to when it was where. One that waits is nowhere."""

    number: int
    created_s: float
    place: int | None = None
    started_s: float | None = None
    ended_s: float | None = None

    @property
    def seats(self) -> list[str]:
        """The devices that it has, or had."""
        return [] if self.place is None else [f"node-{self.place:02d}/{device}" for device in range(RANKS)]

    @property
    def user(self) -> str:
        """Whose it is."""
        return USERS[self.number * 7 % len(USERS)]

    @property
    def name(self) -> str:
        """For people."""
        return f"{_NAMES[self.number % len(_NAMES)]} {self.number}"

    @property
    def state(self) -> JobState:
        """Where in its life it is."""
        if self.started_s is None:
            return JobState.QUEUED
        if self.ended_s is None:
            return JobState.TRAINING
        return (*[JobState.DONE] * 7, JobState.FAILED, JobState.FAILED, JobState.CANCELLED)[self.number % 10]

    def step_at(self, at_s: float) -> int:
        """How far it was, or is."""
        return int((at_s - self.started_s) / _STEP_S) if self.started_s else 0


def nodes(size: Size) -> tuple[NodeInfo, ...]:
    """The machines; what nobody runs on is of a kind that nobody asks for."""
    found = []
    for node, first in enumerate(range(0, size.devices, RANKS)):
        kind = "NVIDIA H100" if node < size.running else "NVIDIA A10"
        devices = (DeviceInfo(kind, 80 << 30),) * min(RANKS, size.devices - first)
        address = f"10.0.{node // 250}.{node % 250 + 1}"
        found.append(NodeInfo(f"node-{node:02d}", address, devices, near=f"rack {node // 8}"))
    return tuple(found)


def fill(data: Path, size: Size, now_s: float) -> list[Life]:
    """Write all of it; the jobs, the oldest first."""
    (data / "code-archives").mkdir(parents=True)
    (data / "code-archives" / f"{sha256(_ARCHIVE).hexdigest()}.tar.gz").write_bytes(_ARCHIVE)
    found = lives(size, now_s)
    engine, sessions = opened(address_in(data))
    with sessions.begin() as session:
        _add(session, JobRow, [_job(each, now_s) for each in found])
        _add(session, EventRow, [event for each in found for event in _events(each, now_s)])
        _add(session, AllocationRow, [stint for each in found for stint in _stints(each)])
        _add(session, TokenRow, [_token(each) for each in found if each.started_s])
        _add(session, AuditRow, [entry for each in found for entry in _audit(each)])
        _add(session, UsageRow, [{"user": user, "amount": 1e6, "at": now_s} for user in USERS])
    with sessions.begin() as session:
        _write_samples(session, found, size, now_s)
    engine.dispose()
    return found


def lives(size: Size, now_s: float) -> list[Life]:
    """One after the other on each node that is used; then who waits."""
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
        Life(number + 1, start - draw.uniform(0, 3600), place, start, end)
        for number, (start, end, place) in enumerate(spans)
    ]
    waits = sorted(draw.uniform(now_s - DAY_S, now_s) for _ in range(size.waiting))
    return [*ran, *(Life(len(ran) + 1 + number, at) for number, at in enumerate(waits))]


def _job(life: Life, now_s: float) -> dict[str, Any]:
    plan, profile = _PLANS[life.number % len(_PLANS)] if life.started_s else (None, None)
    progress = Progress(
        step=life.step_at(life.ended_s or now_s),
        epoch=3,
        samples_per_s=1234.5,
        step_s=_STEP_S,
        metrics={"loss": 1.25, "lr": 3e-4},
    )
    return {
        "id": life.number,
        "name": life.name,
        "user": life.user,
        "state": life.state,
        "reason": _reason(life),
        "script": "train.py",
        "arguments": ["--width", "2048", "--depth", "24", "--seed", str(life.number)],
        "environment": {"WANDB_MODE": "offline", "DATA": "shared/data"},
        "snapshot": sha256(_ARCHIVE).hexdigest(),
        "devices": f"NVIDIA H100:{RANKS if life.started_s else 2 * RANKS}",
        "priority": 40 + life.number % 20,
        "preemptible": False,
        "max_time_s": None,
        "max_restarts": 1,
        "restarts": 0,
        "generation": 1 if life.started_s else 0,
        "seats": life.seats if life.ended_s is None else [],
        "stop_kind": "",
        "exit_code": {JobState.DONE: 0, JobState.FAILED: 1}.get(life.state),
        "created_at": life.created_s,
        "submitted_at": life.created_s,
        "waiting_since": life.created_s,
        "started_at": life.started_s,
        "ended_at": life.ended_s,
        "progress": progress.model_dump(mode="json") if life.started_s else {},
        "profile": profile,
        "plan": plan,
    }


def _reason(life: Life) -> str:
    return {
        JobState.QUEUED: f"needs {2 * RANKS} x NVIDIA H100, 0 of 480 free",
        JobState.TRAINING: "training",
        JobState.DONE: "all ranks ended well",
        JobState.FAILED: f"rank 3 on {(life.seats or ['?'])[-1]} ended with exit code 1: RuntimeError: loss is not finite",
        JobState.CANCELLED: "cancelled",
    }[life.state]


def _events(life: Life, now_s: float) -> Iterator[dict[str, Any]]:
    """What each went through; a job that lasts is split anew every quarter of an hour."""

    def event(at_s: float, state: JobState, reason: str) -> dict[str, Any]:
        generation = 0 if state is JobState.QUEUED else 1
        return {
            "job": life.number,
            "at": at_s,
            "state": state,
            "generation": generation,
            "kind": _KINDS[state],
            "reason": reason,
        }

    yield event(life.created_s, JobState.QUEUED, f"submitted by {life.user}")
    yield event(life.created_s + 1, JobState.QUEUED, f"needs {RANKS} x NVIDIA H100, 0 of 480 free")
    if life.started_s is None:
        return
    yield event(life.started_s, JobState.STARTING, f"{RANKS} x NVIDIA H100 on one node are free")
    yield event(life.started_s + 20, JobState.PROFILING, "measuring its devices")
    yield event(life.started_s + 60, JobState.TRAINING, "training")
    at_s, until_s = life.started_s + 900, life.ended_s or now_s
    while at_s < until_s:
        yield event(
            at_s, JobState.TRAINING, f"another split: rank 5 takes {at_s % 7 + 20:.0f} % longer than a minute ago"
        )
        at_s += 900
    if life.ended_s:
        yield event(life.ended_s, life.state, _reason(life))


def _stints(life: Life) -> Iterator[dict[str, Any]]:
    for seat in life.seats:
        yield {
            "seat": seat,
            "job": life.number,
            "generation": 1,
            "started_at": life.started_s,
            "ended_at": life.ended_s,
        }


def _token(life: Life) -> dict[str, Any]:
    """That its workers had; those that run get another one when the server starts."""
    return {
        "user": life.user,
        "role": Role.WORKER,
        "digest": digest_of(f"of {life.number}"),
        "job": life.number,
        "created_at": life.started_s,
        "ended_at": life.ended_s,
    }


def _audit(life: Life) -> Iterator[dict[str, Any]]:
    for action in (f"PUT /api/code-archives/{sha256(_ARCHIVE).hexdigest()}", "POST /api/jobs"):
        yield {
            "at": life.created_s,
            "user": life.user,
            "role": Role.USER,
            "action": action,
            "status": 201,
            "address": "127.0.0.1",
        }


def points(found: list[Life], now_s: float) -> list[tuple[float, int, int]]:
    """When, in which tier and of whom: every tier has what its time holds, in the order in which it was written."""
    spans = [(CLUSTER, now_s - WEEK_S, now_s)]
    spans += [(each.number, each.started_s, each.ended_s or now_s) for each in found if each.started_s]
    wanted = []
    for number, tier in enumerate(TIERS):
        oldest_s = now_s - min(tier.kept_s, WEEK_S)
        for job, start_s, end_s in spans:
            first = int((now_s - end_s) / tier.every_s)
            last = int((now_s - max(start_s, oldest_s)) / tier.every_s)
            wanted += [(now_s - back * tier.every_s, number, job) for back in range(first, last)]
    return sorted(wanted)


def _write_samples(session: Session, found: list[Life], size: Size, now_s: float) -> None:
    by_number = {each.number: each for each in found}
    drawn, rows = _figures(), list[dict[str, Any]]()
    for at_s, tier, job in points(found, now_s):
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
    """Points of a job of eight ranks, made from reports as the server makes them."""
    draw, found = random.Random(2), []
    for _ in range(200):
        live = LiveJob(1, tuple(f"n/{rank}" for rank in range(RANKS)))
        for rank in range(RANKS):
            live.record_report(rank, _report(draw, rank), 0.0)
        found.append(point_of(live))
    return found


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


def _planned(seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """A plan of eight devices, and the curves that it was made from."""
    asked = problem(CASES[0], seed)
    profile: dict[str, Any] = json.loads(Measurements(MODEL, asked.profiles).to_text())
    return make_plan(asked).to_json(), profile


_PLANS = [_planned(seed) for seed in range(3)]


def host(data: str, port: str, jobs: str, devices: str) -> None:
    """The server."""
    from mimatrix.server import Settings, serve

    size = Size(int(jobs), int(devices))
    serve(Settings(data=Path(data), port=int(port)), lambda _: StandingLauncher(nodes(size), LOG))


if __name__ == "__main__":
    host(*sys.argv[2:])
