"""Which ranks train together."""

import pytest

from mimatrix.core.errors import UserError
from mimatrix.hybrid.groups import check_groups, group_by_host, locate_rank


def test_groups_must_be_lists_of_ranks() -> None:
    with pytest.raises(UserError, match=r"groups = \[0\] is not a list of lists of ranks"):
        check_groups([0], 1)  # type: ignore[list-item]


def test_every_rank_is_in_exactly_one_group() -> None:
    assert check_groups([[2, 0], [1]], 3) == ((0, 2), (1,))
    for groups in ([[0], [1]], [[0, 1], [1, 2]], [[0, 1, 2], []]):
        with pytest.raises(UserError, match="give every rank one group"):
            check_groups(groups, 3)


def test_ranks_of_a_host_form_a_group() -> None:
    groups = group_by_host(["b", "a", "b"])
    assert groups == ((0, 2), (1,))
    assert locate_rank(groups, 2) == (0, 1)
