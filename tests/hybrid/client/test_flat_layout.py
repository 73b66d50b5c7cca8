"""Spans of parameters in shards."""

from mimatrix.hybrid.client.flat_layout import split_spans
from mimatrix.hybrid.server.shard import ParamSpan


def test_shards_may_cut_through_parameters() -> None:
    spans = (ParamSpan(0, 0, 5), ParamSpan(1, 0, 3), ParamSpan(2, 1, 2))
    assert list(split_spans(spans, (4, 5, 1))) == [
        (ParamSpan(0, 0, 4),),
        (ParamSpan(0, 0, 1), ParamSpan(1, 0, 3), ParamSpan(2, 1, 1)),
        (ParamSpan(2, 1, 1),),
    ]
