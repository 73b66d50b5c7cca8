"""Where a group that joins continues."""

from mimatrix.hybrid.server.hold import latest_pushes, resolve_join
from mimatrix.hybrid.server.push_log import PushLog


def test_a_group_that_rejoins_is_level_with_the_slowest() -> None:
    logs = [
        PushLog(9, 9, {0: 7, 1: 2}, incarnations={0: 1, 1: 1}),
        PushLog(8, 8, {0: 6, 1: 2}, incarnations={0: 1, 1: 1}),
    ]
    assert latest_pushes(logs) == {0: 7, 1: 2}
    assert resolve_join(1, logs, {0}) == (7, 2)
    assert resolve_join(2, logs, {0, 1}) == (0, 1)
    assert resolve_join(1, logs, set()) == (2, 2)
