"""Strangers at every socket while jobs train: `python tests/server/soak_hostile.py --seconds 600` prints a JSON object.

A job server runs two synchronous jobs and one of two groups. For the given time, random and mutated bytes reach every
socket on which a process of ours listens, over IPv4, IPv6 and Unix; what torch and its libraries listen on is left
alone, and so is Ray: on its nodes we listen on nothing but the gRPC server that Ray puts into each of its workers.
Afterwards both synchronous jobs must have the losses of an undisturbed run, the third must be done, nothing of ours may
have ended, and neither memory nor descriptors may have grown.
"""

import argparse
import json
import random
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.hostile import (
    OpenSocket,
    descendants,
    listeners_of,
    open_silently,
    payload,
    processes_with,
    sample_requests,
    used_by,
    visit,
)
from support.servers import ServerProcess, end_all

from mimatrix.api.models import ENDED, JobState

OURS = ("mimatrix.cli.main up", "mimatrix.comm.control", "mimatrix.hybrid.server", "mimatrix.launch")
"""What a command line has in it if everything that it listens on is ours."""
ROOM_BYTES, ROOM_DESCRIPTORS = 48 << 20, 12


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    wanted = parser.parse_args()
    chance = random.Random(wanted.seed)
    with tempfile.TemporaryDirectory(prefix="mimatrix-hostile-") as folder:
        up = ServerProcess(Path(folder) / "data", devices=7).start()
        try:
            result = besiege(up, wanted.seconds, chance)
        finally:
            up.kill(signal.SIGTERM)
            end_all(up.data)
    print(json.dumps(result))
    sys.exit(bool(result["wrong"]))


def besiege(up: ServerProcess, seconds: float, chance: random.Random) -> dict[str, Any]:
    """Run the jobs under attack; return what was sent and what was wrong."""
    steps = str(int((seconds + 60) / 0.1))  # longer than the attack
    plain = up.submit("training.py", "--", steps, "0")
    up.until(plain, lambda job: job.state in ENDED, 300)
    jobs = [up.submit("training.py", "--devices", "2", "--", steps, "0.1") for _ in "ab"]
    jobs.append(up.submit("in_groups.py", "--groups", "0/1"))
    for number in jobs:
        up.until(number, lambda job: job.state is JobState.TRAINING, 120)
    before = {pid: (text, *used_by(pid)) for pid, text in our_processes(up).items()}
    sent, silent = attack(up, jobs[0], seconds, chance)
    wrong = [f"{text} ended" for pid, (text, *_) in before.items() if not used_by(pid)[0]]
    for stream in silent:
        stream.close()
    time.sleep(12)  # what was held for strangers is let go after a deadline
    grown = [
        (text, used_by(pid)[0] - memory, used_by(pid)[1] - opened) for pid, (text, memory, opened) in before.items()
    ]
    wrong += [f"{text} grew" for text, memory, opened in grown if memory > ROOM_BYTES or opened > ROOM_DESCRIPTORS]
    (up.data / "checkpoints" / f"job-{jobs[2]}" / "enough").touch()
    for number in jobs:
        job = up.until(number, lambda job: job.state in ENDED, 300)
        if job.state is not JobState.DONE:
            wrong.append(f"job {number} is {job.state}: {job.reason}")
    losses = [read_losses(up, number) for number in (plain, *jobs[:2])]
    pairs = zip(jobs, losses[1:], strict=False)
    wrong += [f"losses of job {job} differ" for job, found in pairs if not alike(found, losses[0])]
    return {"seconds": seconds, "sent": dict(sent), "grown": grown, "steps": len(losses[0]), "wrong": wrong}


def our_processes(up: ServerProcess) -> dict[int, str]:
    """Return the server's processes and those of its jobs, with their command lines."""
    assert up.process
    found = descendants({up.process.pid}) | processes_with(str(up.data))
    return {one.pid: one.command for one in listeners_of(found)}


def targets(up: ServerProcess) -> list[OpenSocket]:
    """Return the sockets of ours: all of processes that have only such, and the Unix sockets of workers."""
    assert up.process
    found = listeners_of(descendants({up.process.pid}) | processes_with(str(up.data)))
    return [one for one in found if one.path or any(word in one.command for word in OURS)]


def attack(
    up: ServerProcess, job: int, seconds: float, chance: random.Random
) -> tuple[Counter[str], list[socket.socket]]:
    """Visit all sockets at random; return how many visits each kind had, and connections that stay silent."""
    secret = (up.data / "token").read_text().strip()
    samples = [*sample_requests(secret, job), *sample_requests("nobody", job)]
    sent: Counter[str] = Counter()
    silent: list[socket.socket] = []
    until, looked_at, found = time.monotonic() + seconds, 0.0, targets(up)
    while time.monotonic() < until:
        if time.monotonic() - looked_at > 10:
            found, looked_at = targets(up), time.monotonic()
            for stream in silent[:200]:
                stream.close()
            silent = [*silent[200:], *(stream for one in found for stream in open_silently(one, 20))]
        one = chance.choice(found)
        kind = next((word for word in OURS if word in one.command), "a worker's Unix socket")
        sent[f"{kind}: {visit(one, payload(chance, samples), chance)}"] += 1
        time.sleep(0.002)
    return sent, silent


def read_losses(up: ServerProcess, number: int) -> dict[str, float]:
    """Return the loss of each step of a job."""
    return dict(json.loads((up.data / "checkpoints" / f"job-{number}.losses").read_text()))


def alike(found: dict[str, float], wanted: dict[str, float]) -> bool:
    """Return whether two runs had the same losses, to the rounding of float64."""
    return found.keys() == wanted.keys() and all(
        abs(loss - wanted[step]) <= 1e-10 * max(1, abs(wanted[step])) for step, loss in found.items()
    )


if __name__ == "__main__":
    main()
