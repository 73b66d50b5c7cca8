"""Kill training while it saves, again and again: what loads next is always a whole checkpoint, and none is lost.

`python tests/engine/soak_saving.py --rounds 20` prints one JSON object. `make soak` runs it; CI a few rounds of it.
Rounds take turns: one process; two ranks of which one is killed; two ranks that are killed together.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

SCRIPT = Path(__file__).parent / "scripts" / "saver.py"
ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 60.0
WAYS = ("alone", "one of two", "two of two")


def start(ranks: int, folder: Path, steps: int) -> "subprocess.Popen[str]":
    words = [str(SCRIPT), str(folder), str(steps)]
    launcher = ["-m", "mimatrix.cli.main", "run", "-n", str(ranks), "--grace", "0.2s", "--timeout", "60s"]
    settings = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *(launcher if ranks > 1 else []), *words]
    return subprocess.Popen(
        command, env=settings, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def loaded(process: "subprocess.Popen[str]", ranks: int) -> tuple[int, list[int]]:
    """Return the step from which all ranks resume, and their processes."""
    assert process.stdout
    lines = [process.stdout.readline() for _ in range(ranks)]
    words = [line.split()[-3:] for line in lines]
    if any(len(each) < 3 or each[0] != "loaded" for each in words):
        process.kill()
        raise AssertionError(f"{lines}; {process.stderr.read() if process.stderr else ''}")
    (step,) = {int(each[1]) for each in words}
    return step, [int(each[2]) for each in words]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def one_round(way: str, folder: Path, chance: random.Random) -> Iterator[str]:
    """Go on from the last checkpoint, kill in the middle; what was wrong."""
    ranks = 1 if way == "alone" else 2
    known = [int(name.split("-")[1]) for name in names(folder) if name.startswith("step-")]
    process = start(ranks, folder, 1)
    step, children = loaded(process, ranks)
    if step != max(known, default=0):
        yield f"{way}: went on at step {step}, but {names(folder)} were there"
    until = time.time() + DEADLINE_S
    while not any(int(name.split("-")[1]) > step for name in names(folder) if name.startswith("step-")):
        time.sleep(0.005)
        if time.time() > until or process.poll() is not None:
            process.kill()
            yield f"{way}: nothing was saved after step {step}: {process.stderr.read() if process.stderr else ''}"
            return
    time.sleep(chance.uniform(0.0, 0.3))
    victims = children if way == "two of two" else [chance.choice(children)]
    for victim in victims:
        os.kill(victim, signal.SIGKILL)
    try:
        process.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        yield f"{way}: the others hang"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    wanted = parser.parse_args()
    chance = random.Random(wanted.seed)
    wrong: list[str] = []
    struck, started = 0, time.time()
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home) / "checkpoints"
        for number in range(wanted.rounds):
            wrong += one_round(WAYS[number % len(WAYS)], folder, chance)
            struck += any(name.startswith(".") for name in names(folder))
            sys.stderr.write(f"round {number + 1} of {wanted.rounds}: {len(wrong)} wrong\n")
        step, _ = loaded(start(1, folder, 0), 1)
    said = {"rounds": wanted.rounds, "in_the_middle_of_a_save": struck, "last_step": step, "wrong": wrong}
    sys.stdout.write(json.dumps(said | {"seconds": time.time() - started}) + "\n")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
