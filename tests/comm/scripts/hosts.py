"""Ranks of several hosts, between which Gloo carries: they make different calls, one comes late or dies, or all agree.

One line of JSON for each rank. Before a call that was made before, no rank asks the coordinator.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from forks import forked, joined, say, world

EQUAL_CALLS = 200
MAX_CALLS = 4096
LATE_S = 3.0
KILLED, LEFT = 2, 3


def on_hosts(on_rank: Callable[[int], None]) -> Callable[[int], None]:
    def run(rank: int) -> None:
        os.environ |= {"MIMATRIX_HOST": f"host-{rank}", "MIMATRIX_TRANSPORT": "c10d"}
        joined()
        on_rank(rank)

    return run


def on_pairs(on_rank: Callable[[int], None]) -> Callable[[int], None]:
    """Two ranks on each host: windows inside, messages between."""

    def run(rank: int) -> None:
        os.environ |= {"MIMATRIX_HOST": f"host-{rank // 2}", "MIMATRIX_TRANSPORT": "mixed"}
        joined()
        on_rank(rank)

    return run


def report(scenario: str, rank: int, calls: Callable[[], object]) -> None:
    """Print what some calls raise and after how long, and how many control messages this rank has sent for them."""
    control, started = world().mimatrix.endpoint.control, time.monotonic()
    before = control.sent
    try:
        calls()
        error: Exception | None = None
    except Exception as raised:  # noqa: BLE001 (reported)
        error = raised
    outcome = {"error": type(error).__name__, "text": str(error), "took_s": time.monotonic() - started}
    counters = dict(world().mimatrix.counters)
    say({"scenario": scenario, "rank": rank, "sent": control.sent - before, "counters": counters} | outcome)


def all_reduce(times: int, count: int = 10, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
    for _ in range(times):
        dist.all_reduce(torch.ones(count), op)


def other_length(rank: int) -> None:
    report("other_length", rank, lambda: all_reduce(1, 1000 if rank == 1 else 10))


def other_length_later(rank: int) -> None:
    """At a number at which ranks do not report what they call."""
    all_reduce(20)
    report("other_length_later", rank, lambda: all_reduce(1, 1000 if rank == 1 else 10))


def other_op_known(rank: int) -> None:
    """Repeat known calls in another order, where Gloo notices nothing and ends with wrong sums."""
    all_reduce(10)
    all_reduce(10, op=dist.ReduceOp.MAX)
    all_reduce(1, op=dist.ReduceOp.MAX if rank == 1 else dist.ReduceOp.SUM)
    report("other_op_known", rank, lambda: all_reduce(MAX_CALLS))


def alike_then_late(rank: int) -> None:
    all_reduce(1)
    report("alike", rank, lambda: all_reduce(EQUAL_CALLS))
    if rank == 1:
        time.sleep(LATE_S)
    report("late", rank, lambda: all_reduce(2))


def killed_in_pairs(rank: int) -> None:
    """Kill a rank while the others are in a collective of windows and messages."""
    all_reduce(3, 1 << 20)
    if rank == KILLED:
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL))
        timer.start()
    report("killed_in_pairs", rank, lambda: all_reduce(MAX_CALLS, 1 << 20))


def left_in_pairs(rank: int) -> None:
    """End a rank cleanly while the others are in a collective, where not all of them wait for it directly."""
    all_reduce(3, 1 << 20)
    if rank != LEFT:
        report("left_in_pairs", rank, lambda: all_reduce(1, 1 << 20))
        time.sleep(0.5)  # so that ranks do not name each other instead


SCENARIOS = (other_length, other_length_later, other_op_known, alike_then_late)

if __name__ == "__main__":
    for each in SCENARIOS:
        if len(sys.argv) < 2 or each.__name__ in sys.argv:
            say({"scenario": each.__name__, "ended": forked(3, on_hosts(each), timeout_s=20)})
    for each in (killed_in_pairs, left_in_pairs):
        if len(sys.argv) < 2 or each.__name__ in sys.argv:
            say({"scenario": each.__name__, "ended": forked(4, on_pairs(each), timeout_s=20)})
