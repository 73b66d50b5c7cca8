"""Telling the server how it goes, now and then, and hearing what it wants. Training never waits for it."""

import json
import math
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mimatrix.core.errors import MiMatrixError
from mimatrix.wire.client import Client
from mimatrix.wire.messages import (
    MOST_PROFILE_BYTES,
    PROTOCOL,
    Checkpoint,
    JobState,
    Measured,
    Pushed,
    Report,
    Saved,
    Traffic,
    Waiting,
)
from mimatrix.worker.device_metrics import gauge
from mimatrix.worker.rendezvous import WorkerIdentity
from mimatrix.worker.tensorboard import TensorBoardWriter

_AGAIN_S = 1.0
_LONGEST_S = 10.0
_MOST_METRICS = 32
_IMPORTS_S = 5.0
_LEAST_STEPS, _MOST_STEPS, _RECENT_S = 3, 100, 3.0
"""A report has means over the steps of so many seconds."""
_LONG = 10
"""One in so many steps may take long, and is not counted."""
_GOLDEN = 0.618034
"""Multiples of it are spread evenly between whole numbers."""
_PARTS = ("compute", "waiting", "communication", "data")
_SPEEDS = ("samples_per_s", "step_s")


class Reporter:
    """The thread that speaks with the server for one worker."""

    def __init__(
        self, client: Client, mine: WorkerIdentity, checkpoints: Path, link: Callable[[], Traffic | None] = lambda: None
    ) -> None:
        self._client, self._mine, self._checkpoints = client, mine, checkpoints
        self._link, self._board = link, TensorBoardWriter(checkpoints)
        self._run: Any = None
        self._speaks = mine.rank == 0
        self._is_asked = False
        self._told_plan = -1
        self._told_curves = False
        self._told_saved: tuple[Any, ...] = ()
        self._since_s = time.monotonic()
        self._gauge = gauge()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._report_on, name="mimatrix-reports", daemon=True)

    def start(self) -> None:
        """From now on."""
        self._thread.start()

    def stop(self) -> None:
        """A last word, and no more."""
        self._over.set()
        self._thread.join(timeout=5.0)

    def observe(self, run: Any) -> None:
        """A run begins in this process."""
        self._run = run
        run.leave_when(lambda: self._is_asked, self._checkpoints)

    def _report_on(self) -> None:
        pause = wait = 0.0
        while not self._over.wait(wait):
            pause = self._reported(pause)
            wait = until_turn(self._mine.job, pause, time.time())
        self._reported(0.0)
        self._board.close()

    def _reported(self, pause: float) -> float:
        """When to report again. A server that is away is not waited for, and asked less and less often."""
        report = self._report()
        self._write_down(report)
        try:
            orders = self._client.report(self._mine.job, report)
            self._is_asked = self._is_asked or orders.leave
            if orders.notice:
                sys.stderr.write(f"mimatrix: {orders.notice}\n")
            self._speaks = orders.speaks
            if self._run is not None and self._speaks:
                self._tell_curves()
                self._tell_plan()
                self._tell_saved()
            return orders.again_s
        except MiMatrixError:
            return min(_LONGEST_S, max(_AGAIN_S, 2 * pause))

    def _report(self) -> Report:
        mine, run = self._mine, self._run
        known: dict[str, Any] = {"protocol": PROTOCOL, "generation": mine.generation, "rank": mine.rank}
        known |= {"use": self._gauge(), "traffic": self._link()}
        if run is None:
            return Report(**known, state=JobState.STARTING if self._begins() else JobState.TRAINING)
        stats, plan, history = _recent(run.stats()), run.plan, run.logged(-1)
        known |= {"state": JobState(run.phase), "step": run.step, "epoch": run.position.epoch}
        if stats:
            seconds = sum(each.seconds for each in stats) / len(stats)
            known |= {f"{name}_s": _usual(stats, f"{name}_s") for name in _PARTS} | {
                "step_s": _usual(stats, "seconds"),
                "samples_per_s": _short(sum(run.split.batches) / seconds) if seconds else 0.0,
                "samples": stats[-1].samples,
                "moved_bytes": sum(stats[-1].moved_bytes.values()),
            }
        if plan:
            known |= {"predicted_step_s": _short(plan.step_s), "planned_s": _short(plan.parts[run.rank].busy_s)}
        known |= {"follows": run.settings.follows, "waiting": _waiting(run.waiting), "aside": run.aside}
        known |= {"group": run.group, "pushed": _pushed(run.pushing)}
        return Report(**known, metrics=_finite(history[0][1] if history else {}))

    def _write_down(self, report: Report) -> None:
        if self._run is not None and self._speaks:
            self._board.follow(self._run, {name: getattr(report, name) for name in _SPEEDS})

    def _begins(self) -> bool:
        """A script is read and imports for a while; one that knows nothing of runs is taken to train after that."""
        return time.monotonic() - self._since_s < _IMPORTS_S or "mimatrix.engine.run" in sys.modules

    def _tell_curves(self) -> None:
        """What devices do with this model, once: the server knows then where jobs like this one run well."""
        measured = self._run.measurements
        if measured and not self._told_curves:
            self._told_curves = True  # also where there are too many: plans are told all the same
            text = measured.to_text()
            if len(text) < MOST_PROFILE_BYTES // 2:
                self._store("profile", json.loads(text))

    def _tell_plan(self) -> None:
        plan = self._run.plan
        if plan and plan.version > self._told_plan:
            why = next((why for _, changed, why in self._run.plan_changes if changed.version == plan.version), "")
            self._store("plan", plan.to_json() | {"why": why})
            self._told_plan = plan.version

    def _tell_saved(self) -> None:
        kept = self._run.checkpoints
        if kept != self._told_saved:
            listed = tuple(
                Checkpoint(
                    path=each.path, step=each.step, saved_at=datetime.fromtimestamp(each.at_s, UTC), bytes=each.bytes
                )
                for each in kept
            )
            said = Saved(protocol=PROTOCOL, generation=self._mine.generation, checkpoints=listed)
            self._client.store(self._mine.job, "checkpoints", said)
            self._told_saved = kept

    def _store(self, what: str, content: dict[str, Any]) -> None:
        measured = Measured(protocol=PROTOCOL, generation=self._mine.generation, content=content)
        self._client.store(self._mine.job, what, measured)


def until_turn(job: int, every_s: float, now_s: float) -> float:
    """Seconds until the ranks of a job report next: all at once, since whoever reports holds up those that wait for it.

    Jobs have turns of their own, and a turn that is very near is left out.
    """
    left_s = (job * _GOLDEN * every_s - now_s) % every_s if every_s else 0.0
    return left_s if left_s >= every_s / 4 else left_s + every_s


def _usual(stats: list[Any], name: str) -> float:
    """A mean without the longest tenth, one at least: a pause in one step says nothing of the others."""
    values = sorted(getattr(each, name) for each in stats)
    kept = values[: len(values) - -(-len(values) // _LONG)] or values
    return _short(sum(kept) / len(kept))


def _short(value: float) -> float:
    """Six digits: more are noise, and bytes."""
    return float(f"{value:.6g}")


def _recent(stats: list[Any]) -> list[Any]:
    found: list[Any] = []
    seconds = 0.0
    for each in reversed(stats[-_MOST_STEPS:]):
        if len(found) >= _LEAST_STEPS and seconds >= _RECENT_S:
            break
        found.append(each)
        seconds += each.seconds
    return found[::-1]


def _pushed(now: Any) -> Pushed | None:
    if now is None:
        return None
    seconds = {name: _short(getattr(now, name)) for name in ("staleness", "moved_s", "waited_s")}
    return Pushed(pushes=now.pushes, samples=now.samples, **seconds)


def _waiting(found: Any) -> Waiting | None:
    if found is None:
        return None
    seconds = time.monotonic() - found.since_s
    return Waiting(call=str(found.call)[:200], round=found.round, peer=found.rank, seconds=seconds)


def _finite(metrics: dict[str, float]) -> dict[str, float | None]:
    """What JSON can carry, and not too much of it."""
    found = {name[:100]: _short(value) if math.isfinite(value) else None for name, value in metrics.items()}
    return dict(list(found.items())[:_MOST_METRICS])
