"""How a team ended, for people: whose fault it was, its exit code once, and the last that it said."""

import json
import re
from collections.abc import Collection, Mapping, Sequence

from mimatrix.core.environment import GROUPS
from mimatrix.core.errors import MiMatrixError, UserError
from mimatrix.core.exit_codes import PREEMPTED
from mimatrix.hybrid.groups import Groups, check_groups
from mimatrix.launch import EndedFor, Launcher, MemberState, Phase, TeamState

_TAIL_BYTES = 4096
_MOST_CHARACTERS = 200
# Colours and the like, whole; then every other character that is none to be printed.
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|.)")


def groups_of(environment: Mapping[str, str], ranks: int) -> Groups:
    """Who goes with whom in a job that says so to its workers; none where all go together."""
    try:
        return check_groups(json.loads(GROUPS.get(environment, "[]")), ranks)
    except (ValueError, TypeError, UserError):
        return ()  # its workers say what is wrong with it


def lost_ranks(state: TeamState, groups: Groups) -> dict[int, int]:
    """Of each group that was lost while others go on: its number, and who failed in it."""
    found = {}
    for number, group in enumerate(groups if not state.has_ended else ()):
        failed = [rank for rank in group if _has_failed(state.members[rank])]
        if failed:
            found[number] = first_failed(state, failed)
    return found


def first_failed(state: TeamState, ranks: Sequence[int]) -> int:
    """Of ranks that failed together: who is told to end fails after the one that was the reason."""
    return next((rank for rank in ranks if not _followed(state.members[rank])), ranks[0])


def failed_rank(state: TeamState, groups: Groups = (), gone: Collection[int] = ()) -> int | None:
    """The rank to blame, the first that failed; None where all ended well, or all of some group.

    Of groups that were told to save and go, one that did so speaks for all. Those that were `gone` before do not count.
    """
    codes = [member.code for member in state.members]
    if any(all(codes[rank] == 0 for rank in group) for group in groups):
        return None
    if groups and PREEMPTED in codes:
        return codes.index(PREEMPTED)
    left = [rank for rank, code in enumerate(codes) if code != 0 and rank not in gone]
    if state.first_failure in gone and left:
        return left[0]
    if state.first_failure is not None:
        return state.first_failure
    return next((rank for rank, member in enumerate(state.members) if member.code != 0), None)


def told(rank: int, seat: str, member: MemberState, words: str = "") -> str:
    """`rank 0 on n/0 ended with exit code 1; its last line: "ValueError: no"`."""
    how = member.cause.describe() if member.cause else "was lost"
    return f"rank {rank} on {seat} {how}" + (f'; its last line: "{words}"' if words else "")


def last_words(launcher: Launcher, team: str, rank: int) -> str:
    """The last line that a rank printed, if any: not long, and nothing but characters that can be seen."""
    try:
        data = launcher.read_log(team, rank, -_TAIL_BYTES).data
    except MiMatrixError:
        return ""  # never started, forgotten, or its node is gone
    lines = (_visible(line) for line in reversed(re.split(r"[\r\n]+", data.decode(errors="replace"))))
    line = next(filter(None, lines), "")
    return line if len(line) <= _MOST_CHARACTERS else f"{line[: _MOST_CHARACTERS - 3]}..."


def _followed(member: MemberState) -> bool:
    """Whether it was ended because another rank failed."""
    return member.cause is not None and member.cause.ended_for is EndedFor.PEER


def _has_failed(member: MemberState) -> bool:
    return member.phase is Phase.LOST or (member.phase is Phase.EXITED and member.code not in (0, PREEMPTED))


def _visible(line: str) -> str:
    plain = _ESCAPES.sub("", line).replace("\t", " ")
    return "".join(each for each in plain if each.isprintable()).strip()
