"""`mimatrix bench` with shares: every candidate has a row, and results are right for what each rank owns."""

import json
import subprocess
import sys

import pytest

COMMAND = [sys.executable, "-m", "mimatrix.cli.main", "bench"]


def bench(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*COMMAND, *words], capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize("collective", ["reducescatter", pytest.param("allgather", marks=pytest.mark.long)])
def test_bench_measures_and_checks_uneven_shares(collective: str) -> None:
    words = ("--world", "3", "--bytes", "64KiB", "--shares", "0.6,0.4,0", "--candidates", "--seconds", "0.1")
    done = bench(collective, *words, "--algorithms", "c10d padded", "--json")
    assert done.returncode == 0, done.stderr
    rows = {row["who"]: row for row in json.loads(done.stdout)}
    assert {"gloo", "mimatrix", "windows gdraa", "c10d padded"} <= rows.keys()
    assert {row["wrong"] for row in rows.values()} == {0}
    assert rows["mimatrix"]["choice"] == "windows gdraa"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["allreduce", "--shares", "1,1"], "use --shares with reducescatter or allgather"),
        (["allgather", "--shares", "1,1,1"], "got 3 shares for 2 ranks; give one for each rank"),
        (["allgather", "--shares", "half,half"], 'invalid shares "half,half"; write for example 0.6,0.25,0.15'),
        (["allgather", "--shares", "1,-1"], "weights must be finite, not negative"),
        (["allgather", "--shares", "nan,1"], "weights must be finite, not negative"),
    ],
)
def test_bench_refuses_shares_that_do_not_fit(words: list[str], sentence: str) -> None:
    done = bench(*words)
    assert done.returncode == 2
    assert sentence in done.stderr.replace("\n", " ")
