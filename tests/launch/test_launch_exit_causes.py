"""How a process ended is a value: it survives storage, and one function renders it."""

import json

import pytest

from mimatrix.launch.exit_causes import EndedFor, ExitCause, ExitKind
from mimatrix.launch.launcher import MemberState, Phase

CAUSES = [
    (ExitCause.from_returncode(0), 0, "ended with exit code 0"),
    (ExitCause.from_returncode(3), 3, "ended with exit code 3"),
    (ExitCause.from_returncode(-9), -9, "was killed by SIGKILL"),
    (ExitCause.from_returncode(-40), -40, "was killed by signal 40"),
    (
        ExitCause(kind=ExitKind.SIGNALED, signal=15, ended_for=EndedFor.PEER, because_of=2),
        -15,
        "was killed by SIGTERM because rank 2 failed",
    ),
    (
        ExitCause(kind=ExitKind.EXITED, code=5, ended_for=EndedFor.REQUEST),
        5,
        "ended with exit code 5 when it was told to end",
    ),
    (
        ExitCause(kind=ExitKind.SIGNALED, signal=9, ended_for=EndedFor.TIMEOUT),
        -9,
        "was killed by SIGKILL at its time limit",
    ),
    (ExitCause.from_returncode(0, detail="process 12 is left"), 0, "ended with exit code 0; process 12 is left"),
    (ExitCause.refused("no such file"), 126, "could not be started: no such file"),
    (
        ExitCause(kind=ExitKind.CANCELLED, ended_for=EndedFor.REQUEST),
        -15,
        "was told to end before it was started",
    ),
    (ExitCause.lost("node n1 is gone"), None, "was lost: node n1 is gone"),
    (ExitCause.lost(), None, "was lost"),
]


@pytest.mark.parametrize(("cause", "returncode", "sentence"), CAUSES)
@pytest.mark.wording
def test_exit_cause_is_stored_and_described(cause: ExitCause, returncode: int | None, sentence: str) -> None:
    assert ExitCause.from_json(json.loads(json.dumps(cause.to_json()))) == cause
    assert cause.returncode == returncode
    assert cause.describe() == sentence


def test_exit_cause_is_clean_only_with_code_0() -> None:
    assert [cause.is_clean for cause, _, _ in CAUSES] == [cause.returncode == 0 for cause, _, _ in CAUSES]


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"kind": "vanished"},
        {"kind": "exited", "code": "3"},
        {"kind": "exited", "code": True},
        {"kind": "lost", "detail": 3},
        {"kind": "exited", "reason": "x"},
        {"kind": "exited", "ended_for": "fun"},
    ],
)
def test_exit_cause_refuses_other_data(data: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"does not describe|is not a valid"):
        ExitCause.from_json(data)


def test_exit_cause_names_the_rank_of_the_whole_team() -> None:
    peer = ExitCause(kind=ExitKind.SIGNALED, signal=15, ended_for=EndedFor.PEER, because_of=1)
    assert peer.renumber((4, 7).__getitem__).because_of == 7
    assert ExitCause.lost().renumber((4, 7).__getitem__) == ExitCause.lost()


def test_member_state_has_a_code_only_after_it_ended() -> None:
    killed = ExitCause.from_returncode(-9)
    assert MemberState(Phase.EXITED, killed).code == -9
    assert MemberState(Phase.LOST, ExitCause.lost("node n1 is gone")).code is None
    restarted = MemberState(Phase.RUNNING, killed, restarts=1)
    assert (restarted.code, restarted.cause) == (None, killed)
