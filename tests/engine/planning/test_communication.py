"""Times of collectives, as plans are made from them."""

from collections.abc import Mapping
from typing import Any

import pytest

from mimatrix.engine.planning.communication import measure_exchange_s
from mimatrix.engine.rank_exchange import RankExchange


class TimedExchange(RankExchange):
    """Takes 1 ms for each exchange by a clock of its own, and 50 ms for some."""

    def __init__(self, slow_calls: set[int]) -> None:
        super().__init__(None)
        self._slow_calls, self._calls, self.now_s = slow_calls, 0, 0.0

    def all_gather(self, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        self._calls += 1
        self.now_s += 0.05 if self._calls in self._slow_calls else 0.001
        return super().all_gather(message)


@pytest.mark.parametrize("slow_calls", [set(), {6}, {4, 9, 12}])
def test_a_collective_that_was_interrupted_does_not_count(slow_calls: set[int]) -> None:
    exchange = TimedExchange(slow_calls)
    assert measure_exchange_s(exchange, lambda: exchange.now_s) == pytest.approx(0.001)
