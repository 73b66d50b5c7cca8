"""The coordinator: a thread of rank 0 that knows which ranks are connected, and synchronises ranks of several hosts.

It carries no model data. For each synchronisation a rank sends it one message and receives one, however many ranks
there are; its own load grows with them and is counted apart. When a rank vanishes, it tells all others which one. When
a rank complains that another did not come, it follows who waits for whom to the one that waits for no other.
"""

import secrets
import selectors
import socket
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from mimatrix.comm.control.call_comparison import CallComparison, CallReport
from mimatrix.comm.control.deadlock import BlockedRank, Deadlock, DeadlockSearch
from mimatrix.comm.control.messages import LEFT, ControlMessage, Decoder, MessageType, close_in_children
from mimatrix.comm.control.unfinished_calls import RankState, UnfinishedCall, UnfinishedCalls, WaitingRank
from mimatrix.comm.control.user_calls import UserCall, describe_calls, describe_ended
from mimatrix.comm.control.wait_graph import Culprit, Query, WaitGraphSearch
from mimatrix.core.errors import WorldError

_SEND_S = 1.0


@dataclass(slots=True)
class _Member:
    """One connection and the rank at its other end; -1 until that has greeted."""

    stream: socket.socket
    decoder: Decoder
    rank: int = -1
    host: str = ""


class Coordinator:
    """Serves the ranks of one generation on a thread of its own until closed."""

    def __init__(self, listener: socket.socket, generation: int) -> None:
        self._listener, self._generation = listener, generation
        self.port: int = listener.getsockname()[1]
        self.token = secrets.token_hex(16)
        """What a rank has to show; published in the job's store, so that only its ranks know it."""
        self.received, self.sent = 0, 0
        self._members: dict[int, _Member] = {}
        self._arrivals: dict[tuple[str, int], dict[int, dict[str, Any]]] = {}
        self._search: WaitGraphSearch | None = None
        self._deadlocks = DeadlockSearch()
        self._calls = CallComparison()
        self._unfinished = UnfinishedCalls()
        self._hosts: dict[int, str] = {}
        self._ended: dict[int, Mapping[str, int]] = {}
        """The last call of each group that a rank began before it said goodbye."""
        self._lost: dict[int, str] = {}
        self._selector = selectors.DefaultSelector()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mimatrix-coordinator", daemon=True)

    @classmethod
    def start(cls, address: str, generation: int) -> "Coordinator":
        """Listen on a free port of `address`, start the thread, and return the coordinator."""
        listener = close_in_children(socket.create_server((address, 0), backlog=1024))
        coordinator = cls(listener, generation)
        coordinator._selector.register(listener, selectors.EVENT_READ)
        coordinator._thread.start()
        return coordinator

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop once all ranks have said goodbye, or after `timeout_s`."""
        until = time.monotonic() + timeout_s
        while self._members and time.monotonic() < until:
            time.sleep(0.005)
        self._closing.set()
        self._thread.join(timeout=2)

    def _run(self) -> None:
        while not self._closing.is_set():
            for key, _ in self._selector.select(timeout=0.05):
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._receive(key.data)
            self._check_search()
        # All connections that are still open, those of strangers and the listener included.
        for key in list(self._selector.get_map().values()):
            cast(socket.socket, key.fileobj).close()
        self._selector.close()

    def _accept(self) -> None:
        stream = close_in_children(self._listener.accept()[0])
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._selector.register(stream, selectors.EVENT_READ, _Member(stream, Decoder(self._generation)))

    def _receive(self, member: _Member) -> None:
        try:
            data = member.stream.recv(1 << 16)
            if not data:
                self._drop(member, "its connection closed")
                return
            for message in member.decoder.feed(data):
                self.received += 1
                self._handle(member, message)
        except OSError as error:
            self._drop(member, f"its connection broke ({error.strerror})")
        except WorldError as error:
            self._drop(member, str(error))
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            # One bad message must not end the thread that serves all ranks.
            self._drop(member, f"a control message is corrupt: {type(error).__name__}: {error}; check its version")

    def _handle(self, member: _Member, message: ControlMessage) -> None:
        body = message.body
        if member.rank < 0 and not (message.type is MessageType.HELLO and body.get("token") == self.token):
            raise WorldError("a process that is not a rank of this job connected; its connection is closed")
        match message.type:
            case MessageType.HELLO:
                self._on_hello(member, int(body["rank"]), str(body["host"]))
            case MessageType.ARRIVE:
                self._on_arrive(member.rank, body)
            case MessageType.LATE:
                if body.get("call"):
                    self._on_unfinished(member.rank, body)
                else:
                    self._on_late(body)
            case MessageType.BLOCKED:
                self._on_blocked(member.rank, body["blocked"])
            case MessageType.STATE:
                state = RankState.from_json(body)
                self._unfinished.answer(member.rank, state)
                self._on_state(member.rank, state.waits_for)
                self._act_on(self._deadlocks.answer(member.rank, BlockedRank.from_json(body["blocked"])))
            case MessageType.CALLS:
                self._on_calls(member.rank, CallReport.from_json(body, member.rank))
            case MessageType.FAULT:
                self._send_all(MessageType.FAULT, body)
            case MessageType.BYE:
                state = RankState.from_json({"begun": body["begun"], "waits_for": None, "call": None})
                self._ended[member.rank] = state.begun
                self._unfinished.answer(member.rank, state)
                self._drop(member, LEFT)
            case _:
                raise WorldError(
                    f"a rank sent {message.type.name}, which only the coordinator sends; check its version"
                )

    def _on_hello(self, member: _Member, rank: int, host: str) -> None:
        member.rank, member.host = rank, host
        self._members[rank], self._hosts[rank] = member, host
        for lost, reason in self._lost.items():
            self._send_to(member, MessageType.LOST, {"rank": lost, "reason": reason})

    def _on_arrive(self, rank: int, body: dict[str, Any]) -> None:
        """Once all members of a group have reached the same ticket, let them go, each with the payloads of all."""
        group, ticket = str(body["group"]), int(body["ticket"])
        arrived = self._arrivals.setdefault((group, ticket), {})
        arrived[rank] = body
        if len(arrived) == len(body["members"]):
            del self._arrivals[group, ticket]
            payloads = [arrived[member].get("payload") for member in body["members"]]
            for member in body["members"]:
                if member in self._members:
                    answer = {"group": group, "ticket": ticket, "payloads": payloads}
                    self._send_to(self._members[member], MessageType.GO, answer)

    def _on_calls(self, rank: int, report: CallReport) -> None:
        """Compare the calls of a rank with those of others, and tell all ranks if they differ."""
        if difference := self._calls.take(rank, report):
            names = {rank: f"rank {rank} on {self._hosts[rank]}" for rank in difference.ranks}
            text, ranks = difference.describe(names), difference.ranks
            body = {"text": text, "ranks": ranks, "failed": None, "is_users": difference.is_users}
            self._send_all(MessageType.FAULT, body)

    def _on_unfinished(self, rank: int, body: dict[str, Any]) -> None:
        """Ask all members of a group whether they have come to a call that does not finish on one of them."""
        call = UnfinishedCall.from_json(body, time.monotonic())
        if self._is_known(call.members):
            return
        if ended := call.find_ended(self._ended):
            text = describe_ended(rank, ended[0], UserCall.from_json(body["user_call"]))
            self._send_all(MessageType.FAULT, {"text": text, "ranks": [rank], "failed": ended[0], "is_users": True})
            return
        self._act_on(self._unfinished.complain(call))

    def _is_known(self, members: Collection[int]) -> bool:
        """Return whether one of the members was lost, so that all were told the reason."""
        return any(reason != LEFT and rank in members for rank, reason in self._lost.items())

    def _on_late(self, body: dict[str, Any]) -> None:
        """Start to search for the rank that blocks the others, unless it is known or a search is in progress."""
        if self._search or self._is_known(body["members"]):
            return
        suspect = body["waits_for"]
        if body["arrival"]:
            group, ticket = body["arrival"]
            arrived = self._arrivals.get((group, ticket), {})
            members: list[int] = next((arrival["members"] for arrival in arrived.values()), [])
            suspect = next((rank for rank in members if rank not in arrived), suspect)
        suspects = list(self._members) if suspect is None else [suspect]
        self._search = WaitGraphSearch(waited_s=float(body["waited_s"]), has_suspect=suspect is not None)
        self._act_on(self._search.start(suspects, time.monotonic()))

    def _on_blocked(self, rank: int, body: dict[str, Any] | None) -> None:
        """Look whether ranks wait for each other in different calls, or for one that has ended."""
        blocked = BlockedRank.from_json(body)
        for ended in blocked.find_ended(self._ended) if blocked else ():
            text = describe_ended(rank, ended, blocked.call if blocked else None)
            self._send_all(MessageType.FAULT, {"text": text, "ranks": [rank], "failed": ended, "is_users": True})
        self._act_on(self._deadlocks.report(rank, blocked))

    def _on_state(self, rank: int, waits_for: int | None) -> None:
        if self._search:
            self._act_on(self._search.answer(rank, waits_for, time.monotonic()))

    def _check_search(self) -> None:
        if self._search:
            self._act_on(self._search.overdue(time.monotonic()))
        if self._search and self._search.is_over(time.monotonic()):
            self._search = None
        for outcome in self._unfinished.decide(time.monotonic()):
            self._act_on_late_member(outcome)

    def _act_on_late_member(self, outcome: Culprit | WaitingRank) -> None:
        """Tell all ranks which one did not come, or find the one that it waits for itself."""
        match outcome:
            case Culprit(rank, reason):
                if rank not in self._lost:
                    self._lose(rank, reason)
            case WaitingRank(rank, waits_for, waited_s):
                if not self._search:
                    self._search = WaitGraphSearch(waited_s=waited_s, has_suspect=True, asked=[rank])
                    self._act_on(self._search.start([waits_for], time.monotonic()))

    def _act_on(self, outcome: Culprit | Query | Deadlock | None) -> None:
        match outcome:
            case Deadlock(calls):
                text = describe_calls(calls)
                self._send_all(
                    MessageType.FAULT, {"text": text, "ranks": sorted(calls), "failed": None, "is_users": True}
                )
            case Culprit(rank, reason):
                self._search = None
                self._lose(rank, reason)
            case Query(ranks):
                for rank in ranks:
                    if rank in self._members:
                        self._send_to(self._members[rank], MessageType.PROBE, {})
            case None:
                pass

    def _drop(self, member: _Member, reason: str) -> None:
        with suppress(KeyError):
            self._selector.unregister(member.stream)
        member.stream.close()
        if self._members.get(member.rank) is member:
            del self._members[member.rank]
            self._lose(member.rank, reason)

    def _lose(self, rank: int, reason: str) -> None:
        self._lost[rank] = reason
        self._send_all(MessageType.LOST, {"rank": rank, "reason": reason})

    def _send_all(self, message_type: MessageType, body: dict[str, Any]) -> None:
        self._send(self._members.values(), ControlMessage(message_type, self._generation, body))

    def _send_to(self, member: _Member, message_type: MessageType, body: dict[str, Any]) -> None:
        self._send([member], ControlMessage(message_type, self._generation, body))

    def _send(self, members: Iterable[_Member], message: ControlMessage) -> None:
        frame = message.encode()
        for member in list(members):
            # Frames are small and a rank always reads them: a full stream belongs to a process that was stopped.
            with suppress(OSError):
                member.stream.settimeout(_SEND_S)
                member.stream.sendall(frame)
                self.sent += 1
