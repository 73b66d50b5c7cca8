"""What the job server is told of a script's metrics: some of every curve, and every evaluation."""

from mimatrix.worker.metric_feed import MetricFeed


def losses(start: int, stop: int) -> list[tuple[int, dict[str, float]]]:
    return [(step, {"loss": 1.0 / (1 + step)}) for step in range(start, stop)]


def test_evaluations_wait_until_they_are_sent_and_losses_do_not() -> None:
    feed = MetricFeed()
    feed.add(losses(0, 100))
    feed.drop(len(feed.waiting(64)))
    feed.add([*losses(100, 200), (200, {"val": 0.5}), *losses(200, 300), (300, {"val": 0.25}), (300, {"test": 0.1})])
    assert feed.newest == {"loss": 1 / 300}
    assert feed.waiting(64) == [(200, {"val": 0.5}), (300, {"val": 0.25}), (300, {"test": 0.1})]
    feed.drop(2)
    assert feed.waiting(64) == [(300, {"test": 0.1})]


def test_what_the_body_logs_once_in_a_while_is_an_evaluation_too() -> None:
    feed = MetricFeed()
    feed.add((step, {**values, **({"val": 2.0} if step == 50 else {})}) for step, values in losses(0, 60))
    assert (50, {"val": 2.0}) in feed.waiting(64)
    assert list(feed.newest) == ["loss"]


def test_the_first_entries_are_all_sent_since_nobody_knows_yet_what_is_frequent() -> None:
    feed = MetricFeed()
    feed.add([(0, {"val": 3.0}), *losses(0, 2), (2, {"val": 2.0})])
    assert [step for step, _ in feed.waiting(64)] == [0, 0, 1, 2]
    assert feed.newest == {"val": 2.0, "loss": 0.5}


def test_many_and_long_names_are_cut_into_parts_that_fit_a_report() -> None:
    feed = MetricFeed()
    values = {f"{number:03}" + "ü" * 97: float(number) for number in range(100)}
    feed.add([(7, values)])
    sent: dict[str, float] = {}
    while part := feed.waiting(64):
        assert sum(len(name.encode()) for _, found in part for name in found) < 4096
        assert all(step == 7 and len(found) <= 32 for step, found in part)
        sent |= {name: value for _, found in part for name, value in found.items()}
        feed.drop(len(part))
    assert sent == values


def test_a_rank_that_does_not_speak_keeps_nothing_to_send() -> None:
    feed = MetricFeed()
    feed.add([(0, {"val": 3.0})], keeps=False)
    assert (feed.waiting(64), feed.newest) == ([], {"val": 3.0})
