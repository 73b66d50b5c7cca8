from mimatrix.core.hosts import ranks_by_host


def test_ranks_are_listed_by_host_in_the_order_of_first_ranks() -> None:
    assert ranks_by_host(["b", "a", "b", "c"]) == {"b": (0, 2), "a": (1,), "c": (3,)}
    assert list(ranks_by_host(["b", "a", "b", "c"])) == ["b", "a", "c"]


def test_no_ranks_have_no_hosts() -> None:
    assert ranks_by_host([]) == {}
