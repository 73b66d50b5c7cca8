"""Kill or stop a random rank at a random moment, again and again: every survivor must name it in time.

`python tests/comm/soak.py --rounds 100` prints one JSON object. `make soak` runs it; CI runs a few rounds of it.
"""

import argparse
import json
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
from torch._C._distributed_c10d import ProcessGroupGloo, TCPStore

from mimatrix.comm import AlgorithmChoice, C10dBackend, Endpoint, Group
from mimatrix.comm.memory.memfd import MemfdWindows
from mimatrix.core.errors import PeerLost

DEADLINE_S = 2.0
IN_TIME_S = {"kill": 1.5, "stop": DEADLINE_S + 4.0}
CHOICES = [
    AlgorithmChoice("windows", "gdraa", 4),
    AlgorithmChoice("windows", "ring"),
    AlgorithmChoice("send_recv", "ring"),
    AlgorithmChoice("send_recv", "gdraa", 2),
]
RANKS: set[int] = set()
"""Every process that was a rank."""


@dataclass
class Said:
    """What one survivor saw."""

    rank: int
    named: int
    when_s: float
    text: str


def rank_alone(rank: int, size: int, port: int, ready: int, report: int) -> None:
    """One rank: collectives without end, until a peer is lost."""
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, size, rank == 0, timedelta(seconds=20))
    gloo = C10dBackend(ProcessGroupGloo(store, rank, size, timedelta(seconds=20)), rank, size, 20.0)
    endpoint = Endpoint.join(store, rank, size, {"host": MemfdWindows()})
    group = Group.create(endpoint, "all", range(size), backends={"cpu": gloo}, timeout_s=DEADLINE_S, tune=False)
    tensor, placed = torch.ones(300_000), group.empty(300_000)
    group.barrier()
    os.write(ready, b".")
    try:
        for number in range(1_000_000):
            choice = CHOICES[number % len(CHOICES)]
            tensor.fill_(1.0)
            group.all_reduce(tensor, choice=choice)
            assert tensor[0] == size
            group.all_reduce(placed, "max", choice=CHOICES[number % 2])
    except PeerLost as lost:
        said = Said(rank, lost.rank, time.time(), str(lost))
        os.write(report, json.dumps(asdict(said)).encode() + b"\n")
        endpoint.close()


def one_round(how: str, size: int, chance: random.Random) -> list[str]:
    """Start ranks, kill or stop one; what was wrong about it."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    ready_read, ready_write = os.pipe()
    report_read, report_write = os.pipe()
    ranks = {}
    for rank in range(size):
        child = os.fork()
        if child == 0:
            with suppress(BaseException):
                rank_alone(rank, size, port, ready_write, report_write)
            os._exit(0)
        ranks[rank] = child
        RANKS.add(child)
    for _ in range(size):
        os.read(ready_read, 1)
    time.sleep(chance.uniform(0, 0.15))
    victim = chance.randrange(size)
    os.kill(ranks[victim], signal.SIGKILL if how == "kill" else signal.SIGSTOP)
    struck = time.time()
    ended = ends_within(ranks, victim, IN_TIME_S[how] + 8)
    os.kill(ranks[victim], signal.SIGKILL)
    os.waitpid(ranks[victim], 0)
    os.close(report_write)
    said = [Said(**json.loads(line)) for line in os.fdopen(report_read).read().splitlines()]
    for descriptor in (ready_read, ready_write):
        os.close(descriptor)
    return ended + list(complaints(said, how, victim, size, struck))


def ends_within(ranks: dict[int, int], victim: int, limit_s: float) -> list[str]:
    """Wait for the survivors' processes; those that hang are ended."""
    until, hanging = time.time() + limit_s, []
    for rank, child in ranks.items():
        while rank != victim and os.waitpid(child, os.WNOHANG) == (0, 0):
            time.sleep(0.01)
            if time.time() > until:
                hanging.append(f"rank {rank} hangs")
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                break
    return hanging


def complaints(said: list[Said], how: str, victim: int, size: int, struck: float) -> Iterator[str]:
    heard = {each.rank for each in said}
    for rank in range(size):
        if rank != victim and rank not in heard:
            yield f"{how} of {victim} of {size}: rank {rank} said nothing"
    for each in said:
        if each.named != victim:
            yield f"{how} of {victim} of {size}: rank {each.rank} named {each.named}: {each.text}"
        if each.when_s - struck > IN_TIME_S[how]:
            yield f"{how} of {victim} of {size}: rank {each.rank} took {each.when_s - struck:.2f} s: {each.text}"


def left_behind() -> set[str]:
    """Sockets and processes of our ranks that still exist, and shared memory."""
    sockets = {line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines() if "@mimatrix" in line}
    ours = {name for name in sockets if int(name.split("-")[1]) in RANKS}
    alive = {f"process {rank}" for rank in RANKS if Path(f"/proc/{rank}").exists()}
    return ours | alive | {f"/dev/shm/{path.name}" for path in Path("/dev/shm").iterdir()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    wanted = parser.parse_args()
    chance, before = random.Random(wanted.seed), left_behind()
    wrong: list[str] = []
    started = time.time()
    for number in range(wanted.rounds):
        how, size = ("stop" if number % 5 == 4 else "kill"), chance.choice([2, 3, 4])
        wrong += one_round(how, size, chance)
        print(f"round {number + 1} of {wanted.rounds}: {len(wrong)} wrong", file=sys.stderr, flush=True)
    left = sorted(left_behind() - before)
    print(json.dumps({"rounds": wanted.rounds, "wrong": wrong, "left": left, "seconds": time.time() - started}))
    sys.exit(1 if wrong or left else 0)


if __name__ == "__main__":
    main()
