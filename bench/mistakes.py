"""What mistakes in a script are answered with, and after how long: writes docs/measurements/mistakes.md.

`python -m bench.mistakes` runs every mistake of tests/engine/scripts/mistakes.py under `mimatrix run`, alone and on two
ranks; those that one rank makes alone in every stage.
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
class Answer:
    """How a mistake ended: `seconds` are from its first line to the end of all ranks."""

    name: str
    stage: int
    ranks: int
    code: int
    seconds: float
    tracebacks: int
    sentence: str


def names() -> list[str]:
    """Return the names of all mistakes."""
    command = [sys.executable, str(SCRIPT), "--list"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=LIMIT_S).stdout.split()


def make(name: str, stage: int, ranks: int) -> Answer:
    """Make one mistake."""
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
    return Answer(name, stage, ranks, done.returncode, round(ended_s - began_s, 2), tracebacks, sentence)


def cases() -> list[tuple[str, int, int]]:
    """Return name, stage and ranks of everything that is run."""
    found = [(name, 3 if name in IN_STAGE_3 else 0, 2) for name in names()]
    found += [(name, stage, 2) for name in names() if "on_rank_0" in name for stage in (1, 2, 3)]
    found += [(name, 0, 1) for name in names() if "on_rank_0" not in name and not name.startswith("other_")]
    return sorted(dict.fromkeys(found), key=lambda case: (-case[2], case[1]))


def main() -> None:
    """Make all mistakes, one after the other, and write the page and its raw figures."""
    answers = []
    for case in cases():
        answers.append(make(*case))
        print(answers[-1], flush=True)
    MEASUREMENTS.joinpath("mistakes.json").write_text(json.dumps([asdict(answer) for answer in answers], indent=1))
    rows = [
        f"| {answer.name} | {answer.stage} | {answer.ranks} | {answer.code} | {answer.seconds:.1f} | {answer.sentence} |"
        for answer in answers
    ]
    refused = [answer for answer in answers if answer.code]
    write_page(
        "mistakes.md",
        f"""# Mistakes on purpose

Made by `python -m bench.mistakes` ({machine()}): {len(answers)} runs, of which {len(refused)} were refused, after
{max(answer.seconds for answer in refused):.1f} s at most, with {sum(answer.tracebacks for answer in answers)} tracebacks. Seconds are from the first line of the
mistake, which may train for an epoch before, to the end of all processes. The sentence is the last line of `mimatrix run`. What ended with code 0 is no
mistake there: a stream that shards itself by rank has one shard alone, and outside stage 3 a rank may run the model, average or copy it by itself.
[Raw figures](mistakes.json).

| mistake | stage | ranks | exit code | seconds | answer |
|---|---|---|---|---|---|
"""
        + "\n".join(rows)
        + "\n",
    )


if __name__ == "__main__":
    main()
