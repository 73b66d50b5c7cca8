"""How teams ended, in words: the code once, and the last line of a real team's output."""

import errno
import io
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from pydantic import ValidationError

from mimatrix.api.models import Submission
from mimatrix.launch import (
    EndedFor,
    ExitCause,
    Launcher,
    LocalLauncher,
    Member,
    MemberState,
    Phase,
    Team,
    TeamState,
    cores,
)
from mimatrix.server.controller.exit_causes import failed_groups, failed_rank, last_line
from mimatrix.server.jobs.events import RankFailure

LOST = Phase.LOST


def exited(returncode: int, because_of: int | None = None) -> MemberState:
    cause = ExitCause.from_returncode(returncode)
    if because_of is not None:
        cause = replace(cause, ended_for=EndedFor.PEER, because_of=because_of)
    return MemberState(Phase.EXITED, cause)


@pytest.mark.parametrize(
    ("cause", "line", "sentence"),
    [
        (ExitCause.from_returncode(1), "", "rank 0 on n/0 ended with exit code 1"),
        (ExitCause.from_returncode(1), "boom", 'rank 0 on n/0 ended with exit code 1; its last line: "boom"'),
        (ExitCause.from_returncode(-9), "", "rank 0 on n/0 was killed by SIGKILL"),
        (ExitCause.lost("node x is gone"), "", "rank 0 on n/0 was lost: node x is gone"),
        (ExitCause.lost(), "hm", 'rank 0 on n/0 was lost; its last line: "hm"'),
    ],
)
@pytest.mark.wording
def test_sentences(cause: ExitCause, line: str, sentence: str) -> None:
    failure = RankFailure(rank=0, device="n/0", cause=cause, last_line=line)
    assert failure.describe() == sentence
    assert ExitCause.from_json(failure.to_json()["cause"]) == cause


def test_a_log_that_cannot_be_read_hides_no_exit() -> None:
    class Broken:
        def read_log(self, *_: object) -> None:
            raise OSError(errno.EIO, "Input/output error")

    assert last_line(cast(Launcher, Broken()), "job-1.1", 0) == ""


def test_who_is_to_blame() -> None:
    well, bad = exited(0), exited(1)
    assert failed_rank(TeamState((well, well))) is None
    assert failed_rank(TeamState((well, bad))) == 1
    assert failed_rank(TeamState((bad, bad), first_failure=1)) == 1
    assert failed_rank(TeamState((well, MemberState(LOST)))) == 1


def test_who_is_to_blame_among_groups() -> None:
    well, killed, saved = exited(0), exited(-9), exited(75)
    groups = ((0, 1), (2,))
    assert failed_rank(TeamState((well, killed, well), 1), groups) is None
    assert failed_rank(TeamState((well, killed, killed), 1), groups) == 1
    assert failed_rank(TeamState((killed, killed, saved), 1), groups) == 2
    assert failed_rank(TeamState((killed, killed, killed), 1), groups, lost={0, 1}) == 2
    ended = exited(-15, because_of=1)
    assert failed_rank(TeamState((ended, exited(2), killed), 2), groups, lost={2}) == 1, "and not who was ended for it"
    runs = MemberState(Phase.RUNNING)
    assert failed_groups(TeamState((ended, killed, runs), 1), groups) == {0: 1}
    assert failed_groups(TeamState((runs, runs, saved), 2), groups) == {}
    assert failed_groups(TeamState((ended, killed, runs), 1), ()) == {}


@pytest.mark.parametrize("groups", [[[0]], [[0], [0]], [[0, 1], []], [[0, 1, 2]], [["a"], [1]], 7, "[[[["])
def test_a_submission_with_groups_that_do_not_fit_is_refused(groups: object) -> None:
    job = {"name": "x", "script": "x.py", "code_archive": "0" * 64, "devices": "2"}
    assert Submission.model_validate({**job, "groups": [[0], [1]]}).groups == ((0,), (1,))
    with pytest.raises(ValidationError):
        Submission.model_validate({**job, "groups": groups})


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("raise ValueError('no such layer')", "ValueError: no such layer"),
        ("print('one\\ntwo\\n\\n  ')", "two"),
        ("print('\\x1b[31mred\\x1b[0m\\tand\\x07 \\u202eplain\\x00')", "red and plain"),
        ("print('10%\\r50%\\r')", "50%"),
        ("print('x' * 9999)", "x" * 197 + "..."),
        ("pass", ""),
    ],
)
def test_last_line(tmp_path: Path, script: str, words: str) -> None:
    launcher = LocalLauncher(tmp_path / "launcher", devices=cores(1))
    (node,) = launcher.nodes()
    packed = tmp_path / "code.tar.gz"
    with tarfile.open(packed, mode="w:gz") as tar:
        entry = tarfile.TarInfo("x.py")
        entry.size = len(script.encode())
        tar.addfile(entry, io.BytesIO(script.encode()))
    launcher.start(
        Team(
            name="job-1.1",
            command=(sys.executable, "x.py"),
            members=(Member(node.name, 0),),
            archive=packed,
            environment={"PYTHONUTF8": "1"},
        )
    )
    deadline = time.monotonic() + 30
    while not launcher.states()["job-1.1"].has_ended:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert last_line(launcher, "job-1.1", 0) == words
    assert last_line(launcher, "job-2.1", 0) == ""
