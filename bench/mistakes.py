"""Errors in a training script: what they are answered with, and after how long. Writes docs/measurements/mistakes.md.

`python -m bench.mistakes` runs every script of tests/engine/scripts/mistakes.py under `mimatrix run`, on one rank and on two
ranks; errors that one rank makes alone run in every stage.
"""

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.markdown import MEASUREMENTS, ROOT, machine, write_page

SCRIPT = ROOT / "tests" / "engine" / "scripts" / "mistakes.py"
LIMIT_S = 60.0
IN_STAGE_3 = ("averaged_model", "model_on_rank_0", "state_dict_on_rank_0")
"""Mistakes in stage 3 only."""


@dataclass(frozen=True, slots=True)
class MistakeRun:
    """How a script with an error ended: `seconds` are from its first line to the end of all ranks."""

    name: str
    stage: int
    ranks: int
    code: int
    seconds: float
    tracebacks: int
    sentence: str


def names() -> list[str]:
    """Return the names of all errors."""
    command = [sys.executable, str(SCRIPT), "--list"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=LIMIT_S).stdout.split()


def make(name: str, stage: int, ranks: int) -> MistakeRun:
    """Run the script with one error."""
    with TemporaryDirectory() as folder:
        words = ["run", "-n", str(ranks), str(SCRIPT), name, str(stage), f"{folder}/began"]
        done = subprocess.run(
            [sys.executable, "-m", "mimatrix.cli.main", *words],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        ended_s = time.time()
        began_s = max(float(path.read_text()) for path in Path(folder).iterdir())
    last = (done.stderr.splitlines() or [""])[-1]
    sentence = re.sub(r"^mimatrix: (rank \d failed: )?", "", last)
    tracebacks = (done.stdout + done.stderr).count("Traceback")
    return MistakeRun(name, stage, ranks, done.returncode, round(ended_s - began_s, 2), tracebacks, sentence)


def cases() -> list[tuple[str, int, int]]:
    """Return name, stage and ranks of everything that is run."""
    found = [(name, 3 if name in IN_STAGE_3 else 0, 2) for name in names()]
    found += [(name, stage, 2) for name in names() if "on_rank_0" in name for stage in (1, 2, 3)]
    found += [(name, 0, 1) for name in names() if "on_rank_0" not in name and not name.startswith("other_")]
    return sorted(dict.fromkeys(found), key=lambda case: (-case[2], case[1]))


def main() -> None:
    """Run all errors, one after the other, and write the page and its raw figures."""
    runs = []
    for case in cases():
        runs.append(make(*case))
        print(runs[-1], flush=True)
    MEASUREMENTS.joinpath("mistakes.json").write_text(json.dumps([asdict(run) for run in runs], indent=1))
    rows = [
        f"| {run.name} | {run.stage} | {run.ranks} | {run.code} | {run.seconds:.1f} | {run.sentence} |" for run in runs
    ]
    refused = [run for run in runs if run.code]
    write_page(
        "mistakes.md",
        f"""# Mistakes on purpose

Made by `python -m bench.mistakes` ({machine()}): {len(runs)} runs, of which {len(refused)} were refused, after
{max(run.seconds for run in refused):.1f} s at most, with {sum(run.tracebacks for run in runs)} tracebacks. Seconds are from the first line of the
script, which may train for an epoch before the error, to the end of all processes. The sentence is the last line of `mimatrix run`. Code 0 means that the script is
right there: a stream that shards itself by rank has one shard alone, and outside stage 3 a rank may run the model, average or copy it by itself.
[Raw figures](mistakes.json).

| mistake | stage | ranks | exit code | seconds | answer |
|---|---|---|---|---|---|
"""
        + "\n".join(rows)
        + "\n",
    )


if __name__ == "__main__":
    main()
