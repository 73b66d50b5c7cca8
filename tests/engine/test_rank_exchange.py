"""Small messages among ranks; a failure on one rank is raised on all."""

from collections.abc import Callable
from typing import Any

import pytest
from support.ranks import in_groups

from mimatrix.comm import Group
from mimatrix.core.errors import UserError, WorldError
from mimatrix.engine.rank_exchange import RankExchange, gather_or_raise


def errors_of(task: Callable[[int], Any], action: str | None = None) -> list[Exception]:
    """Run `task(rank)` on two ranks and return what each raises."""

    def on_rank(group: Group) -> Exception:
        with pytest.raises(Exception) as caught:  # noqa: PT011 (the caller looks at it)
            gather_or_raise(RankExchange(group), lambda: task(group.rank), action=action)
        return caught.value

    return in_groups(2, on_rank)


def fail_with(error: Exception) -> Callable[[int], None]:
    def task(rank: int) -> None:
        if rank == 1:
            raise error

    return task


def test_gather_or_raise_returns_the_results_of_all_ranks() -> None:
    results = in_groups(3, lambda group: gather_or_raise(RankExchange(group), lambda: group.rank * 10))
    assert results == [[0, 10, 20]] * 3
    assert gather_or_raise(RankExchange(None), lambda: "alone") == ["alone"]


def test_gather_or_raise_raises_a_users_mistake_on_all_ranks() -> None:
    errors = errors_of(fail_with(UserError("too large; use less")))
    assert [(type(error), str(error)) for error in errors] == [(UserError, "rank 1: too large; use less")] * 2


def test_gather_or_raise_keeps_other_errors_on_the_rank_that_failed() -> None:
    other = ValueError("odd")
    first, second = errors_of(fail_with(other))
    assert (type(first), str(first)) == (UserError, "rank 1: ValueError: odd")
    assert second is other


def test_gather_or_raise_names_the_action_that_failed() -> None:
    other = OSError("disk full")
    errors = errors_of(fail_with(other), "write its part")
    assert [str(error) for error in errors] == ["rank 1 could not write its part: OSError: disk full"] * 2
    assert all(isinstance(error, WorldError) for error in errors)
    assert [error.__cause__ for error in errors] == [None, other]
