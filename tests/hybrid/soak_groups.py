"""Kill a group, a server, or two, again and again while four groups train: `python tests/hybrid/soak_groups.py`.

After each kill the others must end by themselves, with as many versions of every shard as pushes were acknowledged (one
more, if the killed group was told of one no more), and with the accuracy of a run that nobody was killed in.
"""

import argparse
import json
import multiprocessing
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from scipy.stats import t as student
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))
from support.hybrid_tasks import digits, train_together

import mimatrix
from mimatrix.processes.ports import free_port

GROUPS, BATCH = 4, 64
KINDS = ("a group", "a service", "a service and the next")
_APART_S = 0.7
"""Between two kills: shards that lie once have a replica again by then."""
_BEGUN_S, _ENDED_S = 90.0, 120.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    wanted = parser.parse_args()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "mimatrix", "support.hybrid_tasks"])
    torch.set_num_threads(1)
    began, wrong, losses = time.monotonic(), [], []
    for kill in range(wanted.kills):
        seed, what = wanted.seed + kill, KINDS[kill % len(KINDS)]
        with tempfile.TemporaryDirectory(prefix="mimatrix-soak-") as name:
            os.environ["MIMATRIX_SOAK"] = name
            problem, accuracy = one(context, Path(name), seed, what)
        wrong += [f"kill {kill + 1} ({what}): {problem}"] if problem else []
        if accuracy is not None:
            losses.append(train_together(digits(seed), seed, BATCH) - accuracy)
        sys.stdout.write(f"kill {kill + 1}, {what}: {problem or 'well'}\n")
        sys.stdout.flush()
    error = statistics.stdev(losses) / len(losses) ** 0.5
    found = {
        "kills": wanted.kills,
        "wrong": wrong,
        "lost_points": statistics.mean(losses),
        "bound": statistics.mean(losses) + float(student.ppf(0.95, len(losses) - 1)) * error,
        "seconds": time.monotonic() - began,
    }
    sys.stdout.write(json.dumps(found, indent=1) + "\n")
    sys.exit(bool(wrong))


def one(context: Any, folder: Path, seed: int, what: str) -> tuple[str, float | None]:
    """Train, kill `what`, and return what went wrong and the accuracy of the group that ended last."""
    chance, port = random.Random(seed), free_port("127.0.0.1")
    groups: list[BaseProcess] = [
        context.Process(target=learn, args=(folder, number, port, seed)) for number in range(GROUPS)
    ]
    for process in groups:
        process.start()
    try:
        deadline = time.monotonic() + _BEGUN_S
        while len(list(folder.glob("*.pushes"))) < GROUPS:
            if time.monotonic() > deadline:
                return "the groups did not begin", None
            time.sleep(0.02)
        time.sleep(chance.uniform(0.0, 1.5))
        lost = chance.randrange(GROUPS) if what == "a group" else None
        if lost is None:
            first, second = chance.sample(services(folder), 2)
            os.kill(first, signal.SIGKILL)
            if what == KINDS[2]:
                time.sleep(_APART_S)
                os.kill(second, signal.SIGKILL)
        else:
            groups[lost].kill()
        return judged(folder, groups, lost)
    finally:
        for process in groups:
            process.kill()
            process.join(10)
        for pid in services(folder):
            os.kill(pid, signal.SIGKILL)


def judged(folder: Path, groups: list[BaseProcess], lost: int | None) -> tuple[str, float | None]:
    deadline = time.monotonic() + _ENDED_S
    left = [number for number in range(GROUPS) if number != lost]
    for number in left:
        groups[number].join(max(0.1, deadline - time.monotonic()))
        if groups[number].exitcode != 0:
            return f"group {number} ended with {groups[number].exitcode}", None
    ends = sorted((json.loads((folder / f"{number}.json").read_text()) for number in left), key=lambda each: each["at"])
    told = {number: (folder / f"{number}.pushes").read_text().count("\n") for number in range(GROUPS)}
    most = sum(told.values()) + (lost is not None)
    for shard, version in enumerate(ends[-1]["versions"]):
        if not sum(told.values()) <= version <= most:
            return f"shard {shard} is at version {version} after {told} pushes were acknowledged", None
    return "", ends[-1]["accuracy"]


def learn(folder: Path, number: int, port: int, seed: int) -> None:
    """Train as a group of one rank."""
    os.environ |= {
        "RANK": str(number),
        "WORLD_SIZE": str(GROUPS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "MIMATRIX_SOAK": str(folder),
    }
    torch.set_num_threads(1)
    task = digits(seed)
    run = mimatrix.init(BATCH, mode=mimatrix.Hybrid(groups=[[each] for each in range(GROUPS)]), seed=seed, quiet=True)
    net = task.model(seed)
    sgd = torch.optim.SGD(net.parameters(), lr=task.lr, momentum=0.9)
    model, optimizer, loader = run.prepare(net, sgd, torch.utils.data.TensorDataset(*task.train))
    outer: Any = run._world.outer
    leader = outer._joined.leader
    client = leader._client
    push = client.push

    with (folder / f"{number}.pushes").open("w") as note:

        def noted(*words: Any) -> Any:
            found = push(*words)
            note.write("x\n")
            note.flush()
            return found

        client.push = noted
        for _ in run.epochs(task.epochs):
            for inputs, targets in loader:
                run.backward(nn.functional.cross_entropy(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
        leader.flush()
        at, versions = time.monotonic(), client.pull().versions
        run.close()
    found = {"at": at, "versions": versions, "accuracy": task.accuracy(model)}
    (folder / f"{number}.json").write_text(json.dumps(found))


def services(folder: Path) -> list[int]:
    """Return the processes that serve shards of this run."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words, variables = (path / "cmdline").read_bytes(), (path / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"mimatrix.hybrid.server.process" in words and f"MIMATRIX_SOAK={folder}".encode() in variables:
            found.append(int(path.name))
    return found


if __name__ == "__main__":
    main()
