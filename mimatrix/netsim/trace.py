"""A timeline as a Chrome trace: open it in chrome://tracing or ui.perfetto.dev."""

from mimatrix.netsim.timeline import Timeline

_MOST_MOVES = 200_000
"""Beyond this the viewers choke; the rounds of every rank are always there."""


def chrome_trace(timeline: Timeline) -> dict[str, object]:
    """Return rows of rounds for each rank, and below each rank its reads unless there are too many."""
    events: list[dict[str, object]] = []
    names = timeline.traffic.fabric.cluster.device_names
    for rank in range(timeline.traffic.ranks):
        device = names[timeline.traffic.placement[rank]]
        events.append({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank} on {device}"}})
        for span in timeline.spans(rank):
            if span.began_s > span.waited_from_s:
                events.append(_event("wait", rank, "rounds", span.waited_from_s, span.began_s))
            events.append(_event(f"round {span.round}", rank, "rounds", span.began_s, span.ended_s))
    return {"traceEvents": events + _moves(timeline), "displayTimeUnit": "ns"}


def _moves(timeline: Timeline) -> list[dict[str, object]]:
    traffic = timeline.traffic
    if len(traffic.src) > _MOST_MOVES:
        return []
    return [
        _event(
            f"{'add' if traffic.adds[move] else 'read'} from rank {traffic.src[move]}",
            int(traffic.dst[move]),
            "reads",
            float(timeline.move_began_s[move]),
            float(timeline.move_ended_s[move]),
            bytes=float(traffic.fraction[move] * timeline.message_bytes),
        )
        for move in range(len(traffic.src))
    ]


def _event(name: str, rank: int, row: str, began_s: float, ended_s: float, **args: object) -> dict[str, object]:
    micro = {"ts": began_s * 1e6, "dur": (ended_s - began_s) * 1e6}
    return {"name": name, "ph": "X", "pid": rank, "tid": row, "args": args} | micro
