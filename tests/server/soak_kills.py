"""Kill the server again and again while jobs run: `python tests/server/soak_kills.py --kills 50`.

After every kill it is started anew; in the end every job must be done, with every event once and no tick of its output
missing or doubled.
"""

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.servers import ServerProcess, end_all

from mimatrix.api.models import ENDED, JobState, Submission


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    wanted = parser.parse_args()
    chance = random.Random(wanted.seed)
    began, wrong, done = time.monotonic(), [], 0
    with tempfile.TemporaryDirectory(prefix="mimatrix-soak-") as folder:
        up = ServerProcess(Path(folder) / "data", devices=3).start()
        numbers: list[int] = []
        try:
            for kill in range(wanted.kills):
                submit(up, numbers, chance)
                time.sleep(chance.uniform(0, 2))
                up.kill(signal.SIGKILL)
                time.sleep(chance.uniform(0, 1))
                up.start()
                print(f"kill {kill + 1}: {len(numbers)} jobs so far", flush=True)
            for number in numbers:
                job = up.until(number, lambda job: job.state in ENDED, 120)
                wrong += objections(up, number, job.state)
                done += 1
        finally:
            up.kill(signal.SIGTERM)
            end_all(up.data)
    print(json.dumps({"kills": wanted.kills, "jobs": done, "wrong": wrong, "seconds": time.monotonic() - began}))
    sys.exit(bool(wrong))


def submit(up: ServerProcess, numbers: list[int], chance: random.Random) -> None:
    """Up to four that wait or run: three have devices. The first goes by the command, the others copy it."""
    if not numbers:
        numbers.append(up.submit("patient.py", "--", "5"))
    with up.client() as client:
        digest = next(path.name.partition(".")[0] for path in (up.data / "code-archives").iterdir())
        while sum(client.job(number).state not in ENDED for number in numbers[-8:]) < 4:
            seconds = f"{chance.uniform(2, 12):.1f}"
            job = Submission(name="patient", script="patient.py", code_archive=digest, arguments=(seconds,))
            numbers.append(client.submit(job).id)


def objections(up: ServerProcess, number: int, state: JobState) -> list[str]:
    """Return what is not as it should be."""
    found = []
    with up.client() as client:
        events, text, offset = client.events(number), "", 0
        while (part := client.log(number, 0, offset)).text:
            offset, text = part.next_offset, text + part.text
    states = [event.state for event in events]
    if state is not JobState.DONE:
        found.append(f"job {number} is {state}: {events[-1].reason}")
    # Short ones may have ended before anybody saw them train.
    wanted = {JobState.STARTING: (1,), JobState.TRAINING: (0, 1), JobState.DONE: (1,)}
    found += [
        f"job {number}: {each} {states.count(each)} times"
        for each, counts in wanted.items()
        if states.count(each) not in counts
    ]
    ticks = [int(line.split()[1]) for line in text.splitlines() if line.startswith("tick")]
    if ticks != list(range(1, len(ticks) + 1)) or not ticks:
        found.append(f"job {number}: ticks {ticks[:5]}...{ticks[-5:]}")
    return found


if __name__ == "__main__":
    main()
