"""Decisions are those that were recorded, bit for bit: which job, which devices, in which order."""

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import pytest

from mimatrix.core.resources import ResourceRequest
from mimatrix.scheduler import (
    Decision,
    DeviceSlot,
    Preempt,
    Queued,
    Running,
    SchedulingPolicy,
    Start,
    State,
    Stop,
    decide,
)
from mimatrix.scheduler.simulation.replay import POLICIES, replay
from mimatrix.scheduler.simulation.trace import Trace

EXAMPLE = Path(__file__).parents[2] / "examples" / "queue.json"
KINDS = (("a100", 4.0), ("v100", 2.0), ("RTX 3090", 1.5))
REQUESTS = ("1", "2", "3", "a100:1", "v100:2", "a100:1,v100:1", "3090:1,2", "2..4", "a100:1..3", "all", "a100:1,1..2")


def state_of(seed: int) -> State:
    chance, devices = random.Random(seed), list[DeviceSlot]()
    for node in range(chance.randint(1, 4)):
        for number in range(chance.randint(1, 4)):
            kind, speed = chance.choice(KINDS)
            devices.append(DeviceSlot(f"n{node}", number, kind, speed, f"r{node % 2}"))
    left, running = chance.sample(devices, len(devices)), list[Running]()
    for number in range(chance.randint(0, 4)):
        taken = [left.pop() for _ in range(min(len(left), chance.randint(1, 3)))]
        if taken:
            running.append(
                Running(
                    100 + number,
                    tuple(sorted(taken)),
                    chance.choice("uvw"),
                    chance.choice((10, 50, 90)),
                    started_s=chance.choice((0.0, 400.0)),
                    max_time_s=chance.choice((None, 500.0, 1500.0, 3000.0)),
                    preemptible=chance.random() < 0.6,
                    is_leaving=chance.random() < 0.2,
                )
            )
    queued = tuple(
        Queued(
            200 + number,
            ResourceRequest.parse(chance.choice((*REQUESTS, "a100:9"))),
            chance.choice("uvw"),
            chance.choice((10, 50, 90)),
            since_s=chance.choice((0.0, 100.0, 900.0)),
            max_time_s=chance.choice((None, 60.0, 1000.0)),
            speeds=chance.choice(({}, {"a100": 10.0, "v100": 30.0})),
        )
        for number in range(chance.randint(0, 8))
    )
    used = {user: chance.random() * 1000 for user in "uvw" if chance.random() < 0.7}
    return State(tuple(devices), queued, tuple(running), used)


def plain(decision: Decision) -> list[Any]:
    match decision:
        case Start(job, devices):
            return ["start", job, [device.name for device in devices]]
        case Preempt(job, other):
            return ["preempt", job, other]
        case Stop(job):
            return ["stop", job]
        case _:
            return ["wait", decision.job]


def trace_of(seed: int) -> Trace:
    chance = random.Random(seed)
    jobs = [
        {
            "job": f"{chance.choice('abc')}-{number}",
            "at_s": round(chance.uniform(0, 500)),
            "devices": chance.choice(("1", "2", "fast:2", "slow:1..3", "all", "fast:9")),
            "work_s": chance.uniform(1, 300),
            "user": chance.choice("uv"),
            "priority": chance.choice((10, 50, 90)),
            "preemptible": chance.random() < 0.5,
            **({} if chance.random() < 0.4 else {"max_time_s": chance.choice((100.0, 500.0))}),
        }
        for number in range(60)
    ]
    fast = {"node": "f", "kind": "fast", "count": 4, "speed": 2}
    slow = {"node": "s", "kind": "slow", "count": 4, "rack": "x"}
    return Trace.from_text(json.dumps({"devices": [fast, slow], "jobs": jobs}))


def replayed(trace: Trace, name: str) -> bytes:
    found = replay(trace, POLICIES[name])
    rows = [
        [job.job, round(job.started_s, 6), round(job.ended_s, 6), job.preempted, job.reached_limit]
        for job in found.jobs
    ]
    return json.dumps([rows, list(found.never), found.decisions]).encode()


def digest_of(parts: list[bytes]) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()


def test_decisions_of_1500_states() -> None:
    policies = (
        SchedulingPolicy(),
        SchedulingPolicy(backfill=False),
        SchedulingPolicy(preempts=False),
        SchedulingPolicy(ageing_s=None, fairshare_weight=0.0),
    )
    parts = [
        json.dumps([plain(each) for each in decide(state_of(seed), 1000.0, policies[seed % 4])]).encode()
        for seed in range(1500)
    ]
    assert digest_of(parts) == "1a5300bcaf01cffb2b242781b305b6cfd30bf6335969a1ec1a70d813d31b96cc"


@pytest.mark.parametrize(
    ("traces", "digest"),
    [
        (range(12), "a30881969b9e712128e27d35a791edd59c027c8713b35728e0ccfbcbcb96a419"),
        (None, "ab7c5dfc968878e5c960ddcb059d23dbad0f7c971b87865a0e368014e727b1fb"),
    ],
    ids=["drawn", "recorded"],
)
def test_replays_of_traces(traces: range | None, digest: str) -> None:
    given = [trace_of(seed) for seed in traces] if traces else [Trace.from_text(EXAMPLE.read_text("utf-8"))]
    assert digest_of([replayed(trace, name) for trace in given for name in POLICIES]) == digest
