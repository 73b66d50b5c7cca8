"""Ranks that make different calls are told so by the coordinator, although none waits for it before a call."""

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.control import greet, start_coordinator
from support.ranks import together

from mimatrix.collectives.schedule import Collective
from mimatrix.comm.calls import CallSignature
from mimatrix.comm.control.call_comparison import CallComparison, CallDifference, CallEntry, CallReport
from mimatrix.comm.control.call_log import CallLog, is_reported
from mimatrix.comm.control.client import ControlClient
from mimatrix.comm.control.coordinator import Coordinator
from mimatrix.comm.control.messages import ControlMessage, Decoder, FrameSender, MessageType
from mimatrix.comm.control.user_calls import UserCall
from mimatrix.core.errors import DifferentCalls, MismatchError, PeerLost, WorldError

HOSTS = ["a", "b", "c"]
SUM = CallSignature(Collective.ALL_REDUCE, torch.float32, "sum", 10, "c10d")
GATHER = CallSignature(Collective.ALL_GATHER, torch.float32, "sum", 6, "c10d")
STEP = UserCall("optimizer.step", "s", place="train.py, line 30")
EVALUATE = UserCall("run.evaluate", "e", fix="call run.evaluate on all ranks", place="train.py, line 41")
FIX = "; every rank must call the same collectives in the same order with the same sizes and types"


@contextmanager
def connected(ranks: int = 2) -> Iterator[tuple[Coordinator, list[ControlClient]]]:
    coordinator = start_coordinator(world_size=3)
    clients = [
        ControlClient.connect(rank, HOSTS[:ranks], "127.0.0.1", coordinator.port, 3, coordinator.token)
        for rank in range(ranks)
    ]
    try:
        # The coordinator knows all of them once they have met.
        for client in clients:
            client.arrive("start", 1, range(ranks), None)
        for client in clients:
            assert client.wait_arrivals("start", 1, 5) is not None
        yield coordinator, clients
    finally:
        for client in clients:
            client.close()
        coordinator.close()


def logs_of(clients: Sequence[ControlClient]) -> list[CallLog]:
    return [CallLog("all", range(len(clients)), client) for client in clients]


def meet(clients: Sequence[ControlClient], ticket: int = 1) -> None:
    """Return once the coordinator has read all that these ranks have sent, and they all that it answered."""
    for client in clients:
        client.arrive("meet", ticket, [each.rank for each in clients], None)
    for client in clients:
        assert client.wait_arrivals("meet", ticket, 5) is not None


def failures(clients: Sequence[ControlClient], within_s: float = 1.0) -> list[Exception | None]:
    until = time.monotonic() + within_s
    while True:
        errors = [client.failure(-1, range(len(clients)), "a test") for client in clients]
        if all(errors) or time.monotonic() > until:
            return list(errors)
        time.sleep(0.005)


def sentences(clients: Sequence[ControlClient], kind: type[Exception] = MismatchError) -> set[str]:
    errors = failures(clients)
    assert [type(error) for error in errors] == [kind] * len(clients)
    return {str(error) for error in errors}


def test_same_calls_by_any_algorithm_are_silent() -> None:
    with connected(3) as (_, clients):
        logs = logs_of(clients)
        for number in range(1, 2001):
            for log in logs:
                call = replace(SUM, count=number, choice=f"algorithm of {log}")
                assert log.add(call, STEP) == number
        for log in logs:
            log.report()
        meet(clients)
        assert failures(clients, within_s=0) == [None] * 3
        assert {client.begun["all/calls"] for client in clients} == {2000}


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (replace(SUM, count=20), "all_reduce of 20 float32 (sum)"),
        (replace(SUM, reduce_op="max"), "all_reduce of 10 float32 (max)"),
        (replace(SUM, dtype=torch.float64), "all_reduce of 10 float64 (sum)"),
        (replace(SUM, dtype=torch.complex64), "all_reduce of 10 complex64 (sum)"),
        (replace(SUM, collective=Collective.BROADCAST, root=1), "broadcast from 1 of 10 float32 (sum)"),
        (replace(SUM, shares=7), "all_reduce of 10 float32 (sum, by shares)"),
        (GATHER, "all_gather of 6 float32 (sum)"),
    ],
)
def test_different_calls_are_told_to_every_rank(other: CallSignature, words: str) -> None:
    with connected(3) as (_, clients):
        logs = logs_of(clients)
        for number in range(1, 8):
            for rank, log in enumerate(logs):
                log.add(other if number == 7 and rank == 1 else SUM, None)
        (text,) = sentences(clients)
        asks = "ranks disagree at call number 7: rank 0 on a asks for all_reduce of 10 float32 (sum), rank 1 on b for"
        swapped = f"ranks disagree at call number 7: rank 1 on b asks for {words}, rank 2 on c for"
        assert text in (f"{asks} {words}{FIX}", f"{swapped} all_reduce of 10 float32 (sum){FIX}")


def test_calls_in_another_order_are_told() -> None:
    with connected() as (_, clients):
        for log, calls in zip(logs_of(clients), ((SUM, GATHER), (GATHER, SUM)), strict=True):
            for call in (SUM, *calls, SUM):
                log.add(call, None)
        (text,) = sentences(clients)
        assert text.startswith("ranks disagree at call number 2: rank 0 on a asks for all_reduce of 10 float32 (sum), ")
        assert "rank 1 on b for all_gather of 6 float32 (sum); every rank" in text


def test_calls_that_differ_only_in_shares_are_told_apart() -> None:
    with connected() as (_, clients):
        for rank, log in enumerate(logs_of(clients)):
            log.add(replace(GATHER, shares=rank + 1), None)
        (text,) = sentences(clients)
        assert "all_gather of 6 float32 (sum, by shares), rank 1 on b for the same with other shares; " in text


def test_difference_between_regular_reports_is_found_when_a_rank_waits() -> None:
    with connected() as (_, clients):
        for rank, log in enumerate(logs_of(clients)):
            for number in range(1, 51):
                log.add(replace(SUM, count=20) if number == 40 and rank == 1 else SUM, None)
            log.report()
        (text,) = sentences(clients)
        assert text.startswith("ranks disagree at call number 40: rank 0 on a asks for all_reduce of 10 float32 (sum)")


def test_difference_that_has_left_the_logs_is_still_told() -> None:
    with connected() as (_, clients):
        for rank, log in enumerate(logs_of(clients)):
            for number in range(1, 2049):
                log.add(replace(SUM, count=20) if number == 1100 and rank == 1 else SUM, None)
        (text,) = sentences(clients)
        assert text == (
            "ranks disagree before call number 2033: rank 0 on a and rank 1 on b made different calls, "
            f"which their logs do not have any more{FIX}"
        )


def test_rank_that_is_far_ahead_is_compared_with_those_behind() -> None:
    with connected() as (_, clients):
        ahead, behind = logs_of(clients)
        for _ in range(16 * 1024):
            ahead.add(SUM, None)
        for number in range(1, 129):
            behind.add(SUM if number != 120 else GATHER, None)
        (text,) = sentences(clients)
        assert text.startswith("ranks disagree at call number 120: rank 0 on a asks for all_reduce of 10 float32 (sum)")


def test_different_calls_of_the_user_are_named() -> None:
    with connected() as (_, clients):
        for log, call in zip(logs_of(clients), (EVALUATE, STEP), strict=True):
            log.add(SUM, STEP)
            log.add(SUM, call)
        assert sentences(clients, DifferentCalls) == {
            "rank 0 called run.evaluate (train.py, line 41) where rank 1 called optimizer.step (train.py, line 30); "
            "call run.evaluate on all ranks"
        }


def test_lines_of_the_user_that_explain_different_sizes_are_named() -> None:
    with connected() as (_, clients):
        for log, line, count in zip(logs_of(clients), (30, 35), (10, 20), strict=True):
            log.add(replace(SUM, count=count), replace(STEP, place=f"train.py, line {line}"))
        (text,) = sentences(clients, DifferentCalls)
        assert "rank 0 called optimizer.step (train.py, line 30) where rank 1 called" in text


def test_calls_of_the_user_that_are_unknown_fit_all() -> None:
    with connected() as (_, clients):
        for log, call in zip(logs_of(clients), (None, STEP), strict=True):
            log.add(SUM, call)
        meet(clients)
        assert failures(clients, within_s=0) == [None, None]


def test_fault_of_a_group_is_told_once_and_not_to_other_groups() -> None:
    with connected(3) as (_, clients):
        pair = [CallLog("pair", [0, 1], client) for client in clients[:2]]
        for count, log in enumerate(pair):
            for _ in range(8):
                log.add(replace(SUM, count=count), None)
        sentences(clients[:2])
        meet(clients)
        # The start, the fault, and this meeting.
        assert [client.received for client in clients] == [3, 3, 3]
        assert clients[2].failure(-1, [1, 2], "another group") is None


def test_ten_thousand_calls_send_few_messages() -> None:
    assert [number for number in range(1, 3100) if is_reported(number)] == [
        *range(1, 9), *range(16, 1024, 16), 1024, 2048, 3072
    ]  # fmt: skip
    with connected(1) as (_, (client,)):
        (log,) = logs_of([client])
        before = client.sent
        for _ in range(10_000):
            log.add(SUM, STEP)
        assert 15 < client.sent - before < 100
        before = client.sent
        for _ in range(100):
            log.report()
        assert client.sent == before + 1, "at most once a second"


def test_threads_that_add_at_once_get_different_numbers() -> None:
    with connected(1) as (_, (client,)):
        (log,) = logs_of([client])
        numbers = together(4, lambda _: [log.add(SUM, None) for _ in range(500)])
        assert sorted(number for each in numbers for number in each) == list(range(1, 2001))
        assert log.number == client.begun["all/calls"] == 2000
        log.report()
        meet([client])
        assert failures([client], within_s=0) == [None]


def test_log_does_not_wait_for_a_coordinator_that_does_not_read() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        client = ControlClient(0, ["a"], ours, 3)
        (log,) = logs_of([client])
        started = time.monotonic()
        for _ in range(1024 * 1024):
            log.add(SUM, STEP)
        assert 0 < client.sent < 1024, "the rest was dropped"
        assert time.monotonic() - started < 60
        # What was sent is whole: a frame that was cut is finished before another begins.
        decoder, read = Decoder(3), threading.Thread(target=client.close)
        read.start()
        messages = [message for data in iter(lambda: theirs.recv(1 << 16), b"") for message in decoder.feed(data)]
        read.join(10)
        assert [message.type for message in messages] == [MessageType.CALLS] * (len(messages) - 1) + [MessageType.BYE]
        assert len(messages) == client.sent


def test_frames_of_several_threads_do_not_mix() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = FrameSender(ours)
        frames = [ControlMessage(MessageType.FAULT, 3, {"text": str(n) * 100_000}).encode() for n in range(4)]

        def send(rank: int) -> int:
            if rank < 4:
                for _ in range(20):
                    sender.send(frames[rank])
                return 0
            decoder, count = Decoder(3), 0
            while count < 80:
                count += len(list(decoder.feed(theirs.recv(1 << 16))))
            return count

        assert together(5, send)[4] == 80


def entries(counts: Sequence[int], first: int = 1) -> tuple[CallEntry, ...]:
    """Return entries of calls with these sizes; the digest is the sum of sizes so far, from 1000 on."""
    found, digest = [], 1000
    for number, count in enumerate(counts, first):
        found.append(CallEntry(number, digest, digest + count, f"all_reduce of {count}"))
        digest += count
    return tuple(found)


def report(counts: Sequence[int], start: int = 0) -> CallReport:
    return CallReport("g", (0, 1, 2), entries(counts)[start:])


def test_reports_are_compared_in_any_order() -> None:
    one, other = [5] * 40, [5] * 20 + [6] + [5] * 19
    reports = [(rank, report(calls[:stop], max(0, stop - 16))) for rank, calls in ((0, one), (1, other))
               for stop in (1, 2, 16, 32, 40)]  # fmt: skip
    orders: list[Callable[[int], Any]] = [lambda n: n, lambda n: -n, lambda n: (n % 5, n), lambda n: (-(n % 5), n)]
    for order in orders:
        comparison = CallComparison()
        taken = [comparison.take(*reports[n]) for n in sorted(range(len(reports)), key=order)]
        (difference,) = [each for each in taken if each]
        if difference.is_first:
            assert [entry.number for _, entry in difference.calls] == [21, 21]
        else:
            assert {entry.number for _, entry in difference.calls} == {25}, "the last reports came first"
        assert difference.ranks == [0, 1]


def test_comparison_forgets_what_all_agree_on_and_is_bounded() -> None:
    comparison, calls = CallComparison(), [1] * 5000
    for stop in range(16, 5000, 16):
        comparison.take(0, report(calls[:stop], stop - 16))
    (group,) = comparison.groups.values()
    assert len(group.entries) == 4096
    for rank in (1, 2):
        assert comparison.take(rank, report(calls[:4992], 4992 - 16)) is None
    assert list(group.entries) == [4992]
    for n in range(3000):
        comparison.take(0, CallReport(f"group {n}", (0,), entries([1])))
    assert len(comparison.groups) == 1024


def test_report_that_contradicts_the_same_rank_is_refused() -> None:
    comparison = CallComparison()
    comparison.take(0, report([1, 2]))
    with pytest.raises(WorldError, match="contradicts the sender's own earlier report"):
        comparison.take(0, report([1, 3]))


def test_difference_names_the_lower_rank_first() -> None:
    (one,), (other,) = entries([1]), entries([2])
    difference = CallDifference(((0, one), (2, other)))
    assert difference.describe({0: "rank 0 on a", 2: "rank 2 on c"}) == (
        f"ranks disagree at call number 1: rank 0 on a asks for all_reduce of 1, rank 2 on c for all_reduce of 2{FIX}"
    )


GOOD: dict[str, Any] = {
    "group": "all",
    "members": [0, 1],
    "number": 2,
    "digest": 9,
    "before": 0,
    "recent": [[1, 8, "all_reduce", None], [2, 9, "all_reduce", STEP.to_json()]],
}
BAD: list[dict[str, Any]] = [
    {"group": 3},
    {"group": "x" * 1000},
    {"members": []},
    {"members": [1, 2]},
    {"members": [0, 0]},
    {"members": [0, True]},
    {"members": [0, -1]},
    {"members": {"0": 1}},
    {"number": 3},
    {"number": "2"},
    {"digest": 7},
    {"digest": None},
    {"before": -1},
    {"before": 1 << 32},
    {"recent": []},
    {"recent": "recent"},
    {"recent": [[n, 9, "x", None] for n in range(1, 100)], "number": 99},
    {"recent": [[1, 8, "x", None], [3, 9, "x", None]], "number": 3},
    {"recent": [[2, 9, "x" * 1000, None]]},
    {"recent": [[2, 9, "x", ["run.evaluate"]]]},
    {"recent": [[2, 9, "x", [1, 2, 3, 4, 5]]]},
    {"recent": [[2, 9, "x", ["x" * 1000, "", "", "", ""]]]},
    {"recent": [[2, 9, 5, None]]},
    {"recent": [[2, 9, "x"]]},
    {"recent": [[0, 9, "x", None]], "number": 0},
    {"recent": [[2.5, 9, "x", None]], "number": 2.5},
    {"recent": [[1 << 60, 9, "x", None]], "number": 1 << 60},
    {"recent": [None]},
]


@pytest.mark.parametrize("change", BAD)
def test_malformed_reports_are_refused(change: dict[str, Any]) -> None:
    assert CallReport.from_json(GOOD, 0).to_json() == {**GOOD, "members": (0, 1)}
    with pytest.raises(WorldError, match="corrupt"):
        CallReport.from_json(GOOD | change, 0)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (MessageType.CALLS, {}),
        (MessageType.CALLS, GOOD | {"members": [0, 1]}),
        (MessageType.LATE, {"call": ["all"], "members": [0], "waited_s": 1.0}),
        (MessageType.LATE, {"call": ["all", 1], "members": ["0"], "waited_s": 1.0}),
        (MessageType.LATE, {"call": ["all", 1], "members": [0], "waited_s": "long"}),
        (MessageType.STATE, {"waits_for": None, "blocked": None, "begun": {"all/calls": "1"}, "call": None}),
        (MessageType.STATE, {"waits_for": None, "blocked": None}),
        (MessageType.BLOCKED, {}),
        (MessageType.BYE, {"begun": {"all/calls": "1"}}),
        (MessageType.ARRIVE, {"group": "all"}),
    ],
)
def test_malformed_messages_harm_only_their_sender(kind: MessageType, body: dict[str, Any]) -> None:
    with connected(3) as (_, clients):
        clients[2]._stream.sendall(ControlMessage(kind, 3, body).encode())
        until = time.monotonic() + 5
        while not (error := clients[0].failure(-1, [0, 2], "a test")) and time.monotonic() < until:
            time.sleep(0.005)
        assert isinstance(error, PeerLost)
        assert error.rank == 2
        assert "corrupt" in str(error)
        meet(clients[:2])
        for log in (CallLog("pair", [0, 1], client) for client in clients[:2]):
            log.add(SUM, None)
        meet(clients[:2], ticket=2)
        assert [client.failure(-1, [0, 1], "a test") for client in clients[:2]] == [None, None]


def complain(client: ControlClient, log_group: str, number: int, members: Sequence[int] = (0, 1, 2)) -> str:
    """Return the error that a complaint leads to, or nothing."""
    try:
        client.report_unfinished(log_group, number, members, "all_reduce of 10 float32", 30.0)
    except (PeerLost, DifferentCalls) as error:
        return str(error)
    return ""


def test_rank_that_did_not_come_is_named_on_all_others() -> None:
    with connected(3) as (_, clients):
        logs = logs_of(clients)
        for rank in (0, 1, 2, 0, 2):
            logs[rank].add(SUM, None)
        said = together(3, lambda rank: complain(clients[rank], "all", 2) if rank != 1 else "")
        sentence = "rank 1 on b was lost in all_reduce of 10 float32: it did not come for 30.0 s"
        assert said == [sentence, "", sentence]


def test_rank_that_did_not_come_is_named_with_the_call_that_it_is_in() -> None:
    with connected() as (_, clients):
        log, _ = logs_of(clients)
        number = log.add(SUM, None)
        with clients[1].caller.calling(EVALUATE), clients[0].caller.calling(STEP):
            assert complain(clients[0], "all", number, (0, 1)) == (
                "rank 1 on b was lost in optimizer.step (train.py, line 30): it did not come for 30.0 s; "
                "it is in run.evaluate (train.py, line 41)"
            )


def test_silent_rank_is_named() -> None:
    with connected(2) as (coordinator, clients):
        with greet(coordinator, 2, "c"):
            for client in clients:
                client.hosts.append("c")
                CallLog("all", range(3), client).add(SUM, None)
            said = together(2, lambda rank: complain(clients[rank], "all", 1))
        assert set(said) == {
            "rank 2 on c was lost in all_reduce of 10 float32: it did not come for 30.0 s and does not answer"
        }


@pytest.mark.long
def test_complaint_ends_without_an_error_if_all_have_come() -> None:
    with connected(3) as (_, clients):
        for log in logs_of(clients):
            log.add(SUM, None)
        assert complain(clients[0], "all", 1) == ""
        assert failures(clients, within_s=0) == [None] * 3


def test_rank_that_ended_before_a_call_is_named_and_one_that_ended_after_it_is_not() -> None:
    with connected(3) as (_, clients):
        logs = logs_of(clients)
        for rank in (0, 1, 2, 0, 2):
            logs[rank].add(SUM, None)
        clients[1].close()
        assert complain(clients[2], "all", 1) == ""
        with clients[0].caller.calling(STEP):
            ended = "rank 1 has ended, and rank 0 waits for it in optimizer.step (train.py, line 30)"
            assert complain(clients[0], "all", 2).startswith(ended)


@pytest.mark.long
def test_complaints_about_several_calls_do_not_disturb_each_other() -> None:
    """Rank 2 did not come to the pair's call; all have come to the other, about which both complain as well."""
    with connected(3) as (_, clients):
        logs = logs_of(clients)
        for log in logs:
            log.add(SUM, None)
        pair = CallLog("pair", [0, 2], clients[0])
        pair.add(SUM, None)

        def each(rank: int) -> str:
            if rank == 0:
                return complain(clients[0], "pair", 1, (0, 2))
            return complain(clients[1], "all", 1, (0, 1))

        assert together(2, each) == [
            "rank 2 on c was lost in all_reduce of 10 float32: it did not come for 30.0 s",
            "",
        ]
