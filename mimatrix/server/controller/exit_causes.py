"""Which rank made a team end, and what it printed last."""

import re
from collections.abc import Collection, Sequence

from mimatrix.api.text import one_line
from mimatrix.core.errors import MiMatrixError
from mimatrix.core.exit_codes import PREEMPTED
from mimatrix.launch import EndedFor, ExitCause, Launcher, MemberState, Phase, TeamState, is_transient
from mimatrix.server.jobs.events import RankFailure

Groups = tuple[tuple[int, ...], ...]
_TAIL_BYTES = 4096
_MAX_CHARACTERS = 200


def failed_groups(state: TeamState, groups: Groups) -> dict[int, int]:
    """Return each group that was lost while others run, with the rank that failed in it."""
    found = {}
    for number, group in enumerate(groups if not state.has_ended else ()):
        failed = [rank for rank in group if _has_failed(state.members[rank])]
        if failed:
            found[number] = first_failed(state, failed)
    return found


def first_failed(state: TeamState, ranks: Sequence[int]) -> int:
    """Return the rank to blame among ranks that failed together: one that was not ended because of another."""
    return next((rank for rank in ranks if not _was_ended_for_peer(state.members[rank])), ranks[0])


def failed_rank(state: TeamState, groups: Groups = (), lost: Collection[int] = ()) -> int | None:
    """Return the rank to blame, the first that failed; None if all ended well, or all of some group did.

    Of groups that were told to save and stop, one that did so speaks for all. Those `lost` before do not count.
    """
    codes = [member.code for member in state.members]
    if any(all(codes[rank] == 0 for rank in group) for group in groups):
        return None
    if groups and PREEMPTED in codes:
        return codes.index(PREEMPTED)
    left = [rank for rank, code in enumerate(codes) if code != 0 and rank not in lost]
    if state.first_failure in lost and left:
        return first_failed(state, left)
    if state.first_failure is not None:
        return state.first_failure
    return next((rank for rank, code in enumerate(codes) if code != 0), None)


def failure_of(launcher: Launcher, team: str, rank: int, state: TeamState, devices: Sequence[str]) -> RankFailure:
    """Return how a rank failed, with the last line that it printed."""
    cause = state.members[rank].cause or ExitCause.lost()
    device = str(devices[rank]) if rank < len(devices) else "?"
    return RankFailure(rank=rank, device=device, cause=cause, last_line=last_line(launcher, team, rank))


def last_line(launcher: Launcher, team: str, rank: int) -> str:
    """Return the last line that a rank printed, if any: not long, and of printable characters only.

    Raises:
        OSError: The machine is short of something for the moment, such as descriptors.
    """
    try:
        data = launcher.read_log(team, rank, -_TAIL_BYTES).data
    except MiMatrixError:
        return ""  # never started, forgotten, or its node is gone
    except OSError as error:
        if is_transient(error):
            raise
        return ""
    lines = (one_line(line) for line in reversed(re.split(r"[\r\n]+", data.decode(errors="replace"))))
    line = next(filter(None, lines), "")
    return line if len(line) <= _MAX_CHARACTERS else f"{line[: _MAX_CHARACTERS - 3]}..."


def _was_ended_for_peer(member: MemberState) -> bool:
    return member.cause is not None and member.cause.ended_for is EndedFor.PEER


def _has_failed(member: MemberState) -> bool:
    return member.phase is Phase.LOST or (member.phase is Phase.EXITED and member.code not in (0, PREEMPTED))
