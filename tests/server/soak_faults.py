"""Faults of the machine under a job server: `python tests/server/soak_faults.py WHAT` prints a JSON object.

`supervisors`: the supervisor of a random team is killed, 20 times; its job is restarted and ends well, and never runs
twice at a time. `agents`: the node agent of a random node of a Ray cluster is killed at random moments, while three
jobs run; the one over two nodes and the one with restarts end well, the one without fails if it is hit, none is lost or
runs twice at a time, and no process is left. `disks` (root): the disk of the data, of the checkpoints and of the logs
is full for some seconds, one after the other; jobs end well, the server answers, and takes jobs afterwards. `restore`:
the database is replaced by an older copy while jobs run; teams that it does not know end, no job is lost, none runs
twice at a time, and new jobs run. A job that the copy has in the queue runs again, since the copy does not know that it
has run.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.hostile import processes_with
from support.ray_clusters import RayCluster, ray_cluster
from support.servers import ServerProcess, end_all

from mimatrix.api.models import ENDED, JobState

SUPERVISOR = "mimatrix.launch.local.supervisor"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=sorted(FAULTS))
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    wanted = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mimatrix-faults-") as folder:
        wrong = FAULTS[wanted.what](Path(folder), wanted.times, random.Random(wanted.seed))
    print(json.dumps({"what": wanted.what, "times": wanted.times, "wrong": wrong, "seconds": time.monotonic() - began}))
    sys.exit(bool(wrong))


def supervisors(folder: Path, times: int, chance: random.Random) -> list[str]:
    """Kill supervisors, one after the other."""
    up = ServerProcess(folder / "data", devices=3).start()
    numbers: list[int] = []
    try:
        for kill in range(times):
            while len([number for number in numbers if not has_ended(up, number)]) < 3:
                numbers.append(up.submit("exclusive.py", "--retries", "30", "--", "4"))
            time.sleep(chance.uniform(0.2, 2))
            if running := supervisors_of(up):
                with suppress(ProcessLookupError):
                    os.kill(chance.choice(running), signal.SIGKILL)
            print(f"kill {kill + 1}: {len(numbers)} jobs so far", flush=True)
        wrong = finish(up, numbers)
    finally:
        up.kill(signal.SIGTERM)
        end_all(up.data)
    return wrong + [f"process {pid} is left" for pid in processes_with(str(up.data))]


class RayServer(ServerProcess):
    """`mimatrix up` on a Ray cluster, whose nodes say what devices there are."""

    def __init__(self, data: Path, address: str) -> None:
        super().__init__(data)
        self._words = ("--launcher", "ray", "--address", address)


def agents(folder: Path, times: int, chance: random.Random) -> list[str]:
    """Kill node agents of Ray, one after the other."""
    # Paths of sockets have to be short.
    with (
        tempfile.TemporaryDirectory(prefix="mmx-", ignore_cleanup_errors=True) as place,
        ray_cluster(Path(place)) as ray,
    ):
        os.environ.update(ray.environment)
        up = RayServer(folder / "data", ray.address).start()
        try:
            wrong = kill_agents(up, ray, times, chance)
        finally:
            up.kill(signal.SIGTERM)
        wrong += [f"process {pid} is left: {command_of(pid)}" for pid in left_on(ray, up, 20)]
    return wrong


def kill_agents(up: ServerProcess, ray: RayCluster, times: int, chance: random.Random) -> list[str]:
    """Keep jobs of three kinds running while agents are killed; return what is wrong with them."""
    kinds = {"spread": ("cpu:2", 2, 30), "restartable": ("a40:1", 1, 30), "single": ("a40:1", 1, 0)}
    numbers: dict[int, str] = {}
    kills = 0
    while kills < times:
        going = {numbers[number] for number in numbers if not has_ended(up, number)}
        for kind in kinds.keys() - going:
            devices, _, retries = kinds[kind]
            words = ("--devices", devices, "--retries", str(retries), "--", "4")
            numbers[up.submit("exclusive.py", *words)] = kind
        time.sleep(chance.uniform(0.2, 6))
        node = chance.choice([machine.name for machine in ray.machines])
        found = ray.agents(node)
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        kills += bool(found)
        if found:
            print(f"kill {kills}, on {node}: {len(numbers)} jobs so far", flush=True)
    wrong = []
    for number, kind in sorted(numbers.items()):
        job = up.until(number, lambda job: job.state in ENDED, 300)
        print(f"job {number} ({kind}): {job.state} in generation {job.generation}", flush=True)
        _, ranks, retries = kinds[kind]
        place = up.data / "checkpoints" / f"job-{number}"
        done = (place / "runs").read_text().split() if (place / "runs").exists() else []
        if (place / "twice").exists():
            wrong.append(f"job {number} ran twice at a time")
        with up.client() as client:
            restarts = sum(event.kind == "restarted" for event in client.events(number))
        if restarts > retries:
            wrong.append(f"job {number} was restarted {restarts} times")
        if job.state is JobState.DONE:
            if done.count(str(job.generation)) != ranks:
                wrong.append(f"job {number} is done, and its ranks ended in generations {done}")
        elif retries or job.state is not JobState.FAILED:
            wrong.append(f"job {number} ({kind}) is {job.state}: {job.reason}")
        elif done or not job.exit_cause:
            wrong.append(f"job {number} failed with cause {job.exit_cause}, and its ranks ended in {done}")
    return wrong


def left_on(ray: RayCluster, up: ServerProcess, within_s: float) -> list[int]:
    """Return processes of jobs that are still there after a while: supervisors, reapers and members."""
    deadline = time.monotonic() + within_s
    while True:
        ours = processes_with(str(up.data)) | processes_with(str(ray.folder / "nodes"))
        words = (SUPERVISOR, "mimatrix.launch.local.reaper", "exclusive.py")
        found = sorted(pid for pid in ours if any(word in command_of(pid) for word in words))
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.2)


def command_of(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def disks(folder: Path, times: int, chance: random.Random) -> list[str]:
    """Fill one disk after the other while jobs run."""
    del times, chance
    data, checkpoints = folder / "data", folder / "checkpoints"
    mounts = {"data": data, "checkpoints": checkpoints, "logs": data / "launcher"}
    for place in mounts.values():
        place.mkdir(parents=True, exist_ok=True)
        mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "mimatrix-faults", str(place)]
        subprocess.run(mount, check=True, timeout=10)
    wrong: list[str] = []
    up = ServerProcess(data, "--checkpoints", str(checkpoints), devices=3)
    try:
        up.start()
        for name, place in mounts.items():
            numbers = [
                up.submit("training.py", "--retries", "3", "--", "120", "0.1"),
                up.submit("exclusive.py", "--", "8"),
            ]
            for number in numbers:
                up.until(number, lambda job: job.state is not JobState.QUEUED, 60)
            fill(place)
            time.sleep(6)
            with up.client() as client:
                client.jobs()  # still answers
            (place / "filler").unlink()
            wrong += [f"{name}: {text}" for text in finish(up, numbers)]
            print(f"{name}: done", flush=True)
    finally:
        if up.process:
            up.kill(signal.SIGTERM)
        end_all(data)
        for place in reversed(mounts.values()):
            subprocess.run(["umount", "-l", str(place)], check=True, timeout=10)
    return wrong


def restore(folder: Path, times: int, chance: random.Random) -> list[str]:
    """Go back to an older copy of the database."""
    del times, chance
    up = ServerProcess(folder / "data", devices=2).start()
    try:
        known = [up.submit("exclusive.py", "--", "12"), up.submit("exclusive.py", "--", "3")]
        for number in known:
            up.until(number, lambda job: job.state is JobState.STARTING or job.state in ENDED or job.generation > 0, 60)
        waits = up.submit("exclusive.py", "--", "1")  # queued in the copy; runs before the copy comes back
        copy_database(up.data, folder / "copy.db")
        up.until(waits, lambda job: job.state in ENDED, 60)
        lost = up.submit("exclusive.py", "--", "60")  # the copy does not know it
        up.until(lost, lambda job: job.state is JobState.TRAINING or job.generation > 0, 60)
        up.kill(signal.SIGKILL)
        for name in ("-wal", "-shm"):
            (up.data / f"mimatrix.db{name}").unlink(missing_ok=True)
        shutil.copy(folder / "copy.db", database_of(up.data))
        up.start()
        fresh = up.submit("exclusive.py", "--", "1")  # gets the number of the lost one
        wrong = finish(up, [*known, waits, fresh])
        runs = {number: (up.data / "checkpoints" / f"job-{number}" / "runs").read_text().split() for number in known}
        wrong += [f"job {number} ran {len(found)} times" for number, found in runs.items() if len(found) != 1]
        with up.client() as client:
            ticks = client.log(fresh, 0, 0).text.count("tick")
        if not 1 <= ticks <= 12:
            wrong.append(f"job {fresh} has {ticks} ticks, which are another job's")
    finally:
        up.kill(signal.SIGTERM)
        end_all(up.data)
    return wrong


def has_ended(up: ServerProcess, number: int) -> bool:
    with up.client() as client:
        return client.job(number).state in ENDED


def finish(up: ServerProcess, numbers: list[int]) -> list[str]:
    """Wait until all jobs have ended; return what is wrong with them."""
    wrong = []
    for number in numbers:
        job = up.until(number, lambda job: job.state in ENDED, 180)
        if job.state is not JobState.DONE:
            wrong.append(f"job {number} is {job.state}: {job.reason}")
        if any(up.data.parent.glob(f"**/job-{number}/twice")):
            wrong.append(f"job {number} ran twice at a time")
    return wrong


def supervisors_of(up: ServerProcess) -> list[int]:
    """Return the supervisors of this server's teams."""
    return sorted(pid for pid in processes_with(str(up.data)) if SUPERVISOR in command_of(pid))


def fill(place: Path) -> None:
    """Leave no room on the disk of a folder."""
    with suppress(OSError), (place / "filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(1 << 16))
    with suppress(OSError), (place / "filler").open("ab", buffering=0) as filler:
        while True:
            filler.write(b"\0")


def database_of(data: Path) -> Path:
    (found,) = (path for path in data.glob("*.db"))
    return found


def copy_database(data: Path, to: Path) -> None:
    """Copy the database as `sqlite3 .backup` does."""
    with closing(sqlite3.connect(database_of(data))) as source, closing(sqlite3.connect(to)) as target:
        source.backup(target)


FAULTS: dict[str, Callable[[Path, int, random.Random], list[str]]] = {
    "agents": agents,
    "disks": disks,
    "restore": restore,
    "supervisors": supervisors,
}

if __name__ == "__main__":
    main()
