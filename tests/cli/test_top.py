"""What `mimatrix top` shows of many ranks."""

from datetime import UTC, datetime

from mimatrix.api.models import PushReport, Rank, Ranks, StragglerReport
from mimatrix.cli.jobs.top import _group_lines, _select_ranks

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def test_of_many_ranks_the_named_come_first_and_then_the_slowest() -> None:
    ranks = tuple(_rank(rank, 0.2 if rank == 40 else 0.1) for rank in range(64))
    late = StragglerReport(kind="hang", rank=60, device="n/60", cause="", lost_s=9.0, sentence="rank 60 is late")
    assert [each.rank for each in _select_ranks(Ranks(ranks=ranks, stragglers=(late,)))] == [60, 40, *range(14)]
    assert _select_ranks(Ranks(ranks=ranks[:16], stragglers=(late,))) == list(ranks[:16])


def test_groups_with_what_they_pushed() -> None:
    ranks = [_rank(rank, 0.1).model_copy(update={"group": rank // 2, "samples_per_s": 50.0}) for rank in range(4)]
    for rank, samples in ((0, 100), (2, 300)):
        said = PushReport(pushes=samples // 10, samples=samples, staleness=1.5, moved_s=2.0, waited_s=0.25)
        ranks[rank] = ranks[rank].model_copy(update={"pushed": said})
    lines = [line.strip() for line in _group_lines(Ranks(ranks=tuple(ranks), stragglers=()))]
    assert lines == [
        "group 1 (rank 2, 3): 30 pushes, 300 samples (75% of all), 50 samples/s, 1.5 late, pushed for 2s, waited 250ms",
        "group 0 (rank 0, 1): 10 pushes, 100 samples (25% of all), 50 samples/s, 1.5 late, pushed for 2s, waited 250ms",
    ]
    assert _group_lines(Ranks(ranks=(_rank(0, 0.1),), stragglers=())) == []


def _rank(rank: int, compute_s: float) -> Rank:
    return Rank(
        rank=rank,
        device=f"n/{rank}",
        at=NOW,
        step=1,
        step_s=0.3,
        compute_s=compute_s,
        data_s=0.0,
        waiting_s=0.3 - compute_s,
        communication_s=0.0,
        samples=1,
        planned_s=None,
        use=None,
    )
