from mimatrix.comm.control.wait_graph import Culprit, Query, WaitGraphSearch


def test_wait_graph_search_follows_waiting_ranks_to_the_culprit() -> None:
    search = WaitGraphSearch(waited_s=2.0, has_suspect=True)
    assert search.start([3], now_s=0.0) == Query((3,))
    assert search.answer(3, 2, now_s=0.1) == Query((2,))
    assert search.answer(3, None, now_s=0.1) is None, "it was not asked"
    assert search.overdue(now_s=1.0) is None
    assert search.overdue(now_s=1.2) == Culprit(2, "it did not come for 2.0 s and does not answer")
    assert search.answer(2, None, now_s=1.2) == Culprit(2, "it did not come for 2.0 s")


def test_wait_graph_search_ends_in_a_cycle_and_among_all_ranks() -> None:
    circle = WaitGraphSearch(waited_s=1.0, has_suspect=True)
    circle.start([0], now_s=0.0)
    circle.answer(0, 1, now_s=0.0)
    assert isinstance(circle.answer(1, 0, now_s=0.0), Culprit)
    among = WaitGraphSearch(waited_s=1.0, has_suspect=False)
    among.start([0, 1, 2], now_s=0.0)
    assert among.answer(0, 2, now_s=0.1) is None
    assert among.answer(2, None, now_s=0.1) is None
    assert among.overdue(now_s=2.0) == Culprit(1, "it did not come for 1.0 s and does not answer")
    among.answer(1, 0, now_s=0.2)
    assert among.overdue(now_s=2.0) is None
    assert among.is_over(now_s=2.0)
