"""A rank's connection to the coordinator: which ranks were lost, what failed, and synchronisation between hosts."""

import socket
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from mimatrix.comm.control.call_comparison import CallReport
from mimatrix.comm.control.messages import LEFT, ControlMessage, Decoder, FrameSender, MessageType, connect
from mimatrix.comm.control.user_calls import Caller, UserCall, describe_calls, describe_ended
from mimatrix.core.errors import DifferentCalls, MismatchError, PeerLost, UserError, WorldError

_CONNECT_S = 30.0
_NEWS_S = 0.2
"""How long news of a lost rank may be on its way."""
_VERDICT_S = 3.0
"""How long the coordinator may take to find the rank that blocks the others."""
_BLOCKED_S = 2.0
"""After how long the user's thread tells the coordinator that it waits for a rank to come."""
_REPORT_EVERY_S = 1.0
_STILL_S = 0.5
"""How long ago a thread that still waits may have said so."""


@dataclass(frozen=True, slots=True)
class WaitStatus:
    """Which rank this one waits for (None: any), in which round of which call, since when (monotonic clock)."""

    rank: int | None
    call: object
    round: int
    since_s: float


@dataclass(frozen=True, slots=True)
class ArrivalWait:
    """Which ranks this one waits for, to begin which call of a group, since when (monotonic clock)."""

    number: int
    needs: tuple[int, ...]
    user_call: UserCall | None
    since_s: float


class ControlClient:
    """The client of one rank. A thread of its own reads; ranks that wait call `check` from time to time."""

    def __init__(self, rank: int, hosts: list[str], stream: socket.socket, generation: int) -> None:
        self.rank, self.hosts = rank, hosts
        self.sent, self.received = 0, 0
        self.waiting: WaitStatus | None = None
        self.caller = Caller()
        """The user's thread of this rank, and the call that it is in."""
        self.begun: dict[str, int] = {}
        """The number of the last call that this rank has begun, by group."""
        self._arrival_waits: dict[str, ArrivalWait] = {}
        self._blocked_in, self._blocked_at_s, self._reported_s = "", 0.0, 0.0
        self._stream, self._generation = stream, generation
        self._sender = FrameSender(stream)
        self._lost: dict[int, str] = {}
        self._faults: list[tuple[set[int], WorldError | DifferentCalls]] = []
        self._arrivals: dict[tuple[str, int], list[Any]] = {}
        self._changed = threading.Condition()

    @classmethod
    def connect(
        cls, rank: int, hosts: list[str], address: str, port: int, generation: int, token: str
    ) -> "ControlClient":
        """Connect to the coordinator, greet it with the job's token, and start to listen."""
        stream = connect(address, port, timeout_s=_CONNECT_S)
        stream.settimeout(None)
        client = cls(rank, hosts, stream, generation)
        client._send(MessageType.HELLO, {"rank": rank, "host": hosts[rank], "token": token})
        threading.Thread(target=client._listen, name="mimatrix-control", daemon=True).start()
        return client

    @property
    def waits_for(self) -> int | None:
        """The rank that this one waits for now, if it is a particular one."""
        waiting = self.waiting
        return waiting.rank if waiting else None

    def begin_waiting(self, rank: int | None, call: object, number: int) -> None:
        """Record that this rank now waits for another (None: for any) in round `number` of a call."""
        self.waiting = WaitStatus(rank, call, number, time.monotonic())

    def end_waiting(self) -> None:
        """Record that this rank does not wait any more."""
        self.waiting = None

    def await_arrival(self, group: str, number: int, needs: Collection[int], user_call: UserCall | None) -> None:
        """Record that a thread waits until `needs` have begun call `number` of a group."""
        self._arrival_waits[group] = ArrivalWait(number, tuple(needs), user_call, time.monotonic())

    def expect_arrival(self, group: str, number: int, needs: Collection[int], user_call: UserCall | None) -> None:
        """Do as `await_arrival`, unless a thread already waits for the same call."""
        wait = self._arrival_waits.get(group)
        if wait is None or wait.number != number:
            self.await_arrival(group, number, needs, user_call)

    def end_arrival(self, group: str) -> None:
        """Record that no thread waits in a group any more."""
        self._arrival_waits.pop(group, None)

    def note_waiting(self, group: str) -> None:
        """Record that the calling thread waits in a group; tell the coordinator if it is the user's, for too long."""
        if threading.get_ident() != self.caller.thread:
            return
        now, wait = time.monotonic(), self._arrival_waits.get(group)
        self._blocked_in, self._blocked_at_s = group, now
        if wait and now - wait.since_s > _BLOCKED_S and now - self._reported_s > _REPORT_EVERY_S:
            self._reported_s = now
            with suppress(OSError):
                self._send(MessageType.BLOCKED, {"blocked": self._describe_block()})

    def _describe_block(self) -> dict[str, Any] | None:
        """Return for whom the user's thread waits now, if it waits for a rank to come."""
        wait = self._arrival_waits.get(self._blocked_in)
        if wait is None or time.monotonic() - self._blocked_at_s > _STILL_S:
            return None
        call = wait.user_call or self.caller.current
        return {
            "group": self._blocked_in,
            "number": wait.number,
            "needs": wait.needs,
            "begun": self.begun.copy(),
            "background": [group for _, group in self.caller.background.copy().values()],
            "call": call.to_json() if call else None,
        }

    def _describe_state(self) -> dict[str, Any]:
        """Return for whom this rank waits now, which calls it has begun, and in which call the user's script is."""
        call = self.caller.current
        return {
            "waits_for": self.waits_for,
            "blocked": self._describe_block(),
            "begun": self.begun.copy(),
            "call": call.to_json() if call else None,
        }

    def arrive(self, group: str, ticket: int, members: Collection[int], payload: object) -> None:
        """Announce that this rank has reached `ticket`; members that wait for it receive `payload`."""
        body = {"group": group, "ticket": ticket, "members": list(members), "payload": payload}
        self._send(MessageType.ARRIVE, body)

    def wait_arrivals(self, group: str, ticket: int, timeout_s: float) -> list[Any] | None:
        """Return the payloads of all members once all have reached `ticket`, or None after `timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: (group, ticket) in self._arrivals, timeout_s)
            return self._arrivals.pop((group, ticket), None)

    @property
    def has_news(self) -> bool:
        """Whether a rank was lost or has left, or a fault was reported; cheaper to ask than `check`."""
        return bool(self._lost or self._faults)

    def has_left(self, rank: int) -> bool:
        """Return whether a rank has said goodbye."""
        return self._lost.get(rank) == LEFT

    def check(self, peer: int, members: Collection[int], doing: str) -> None:
        """Raise the `failure`, if there is one."""
        if failure := self.failure(peer, members, doing):
            raise failure

    def failure(
        self, peer: int, members: Collection[int], doing: str, user_call: UserCall | None = None
    ) -> WorldError | UserError | None:
        """Return an error if a rank reported a mismatch, a member was lost, or the awaited `peer` has left.

        A peer may have finished all that is expected of it and left since: look at its progress again after this.
        """
        for ranks, error in self._faults.copy():
            if ranks <= set(members):
                return error
        for rank, reason in self._lost.copy().items():
            # A rank that said goodbye may have been done already; only a rank that waits for it misses it.
            if rank == peer or (rank in members and rank != self.rank and reason != LEFT):
                return self._loss(rank, reason, doing, user_call or self.caller.of_this_thread())
        return None

    def _loss(self, rank: int, reason: str, doing: str, call: UserCall | None) -> PeerLost | DifferentCalls:
        # A rank that ended without an error has done all that the script asked of it: the script is to blame, and to
        # start it again would not help.
        if call and reason == LEFT:
            return DifferentCalls(describe_ended(self.rank, rank, call))
        return PeerLost(f"{self.describe(rank)} was lost in {call or doing}: {reason}", rank)

    def report_timeout(
        self, peer: int, members: Collection[int], doing: str, waited_s: float, arrival: tuple[str, int] | None = None
    ) -> NoReturn:
        """Have the coordinator find the rank that is to blame for a timeout, then raise.

        `arrival` is the group and ticket that this rank waits for, if it waits for the coordinator.
        """
        complaint = {"waits_for": peer, "waited_s": waited_s, "arrival": arrival, "members": list(members)}
        self._complain(complaint, peer, members, doing)
        raise PeerLost(f"{self.describe(0)} was lost in {doing}: its coordinator does not answer", 0)

    def diagnose(self, members: Collection[int], doing: str, waited_s: float) -> None:
        """Raise if a member is lost or does not answer, after torch failed without saying why."""
        complaint = {"waits_for": None, "waited_s": waited_s, "arrival": None, "members": list(members)}
        self._complain(complaint, -1, members, doing)

    def report_unfinished(self, group: str, number: int, members: Collection[int], doing: str, waited_s: float) -> None:
        """Raise if a member did not come to a native call, which cannot say itself for whom it waits.

        Args:
            group: The group of the `CallLog` to which the call was added.
            number: What `CallLog.add` returned for the call.
            members: The ranks of the group.
            doing: What this rank does, for the error, such as `all_reduce of 10 float32`.
            waited_s: How long the call has not finished.

        Returns:
            None, after about three seconds, if all members have begun the call: then raise the call's own error.

        Raises:
            PeerLost: A member has not begun the call, or does not answer.
            DifferentCalls: A member has ended without making the call.
            MismatchError: The members made different calls.
        """
        call = self.caller.of_this_thread()
        complaint = {
            "waits_for": None,
            "waited_s": waited_s,
            "arrival": None,
            "members": list(members),
            "call": [group, number],
            "user_call": call.to_json() if call else None,
        }
        self._complain(complaint, -1, members, doing)

    def post_calls(self, report: CallReport) -> None:
        """Tell the coordinator which calls this rank made, without waiting; a report may be dropped."""
        message = ControlMessage(MessageType.CALLS, self._generation, report.to_json())
        with suppress(OSError):
            self.sent += self._sender.post(message.encode())

    def report_mismatch(self, text: str, ranks: Collection[int]) -> NoReturn:
        """Tell all ranks that two of them make different calls, then raise."""
        self._report({"text": text, "ranks": sorted(ranks), "failed": None, "is_users": False})
        raise MismatchError(text)

    def report_different_calls(self, calls: dict[int, UserCall | None]) -> NoReturn:
        """Tell all ranks that two of them are in different calls of the user's script, then raise.

        Other pairs of ranks may notice it as well: all raise what came to the coordinator first.
        """
        text, until = describe_calls(calls), time.monotonic() + _NEWS_S
        with suppress(OSError):
            body = {"text": text, "ranks": sorted(calls), "failed": None, "is_users": True}
            self._send(MessageType.FAULT, body)
            self._check_until(until, -1, range(len(self.hosts)), "")
        raise DifferentCalls(text)

    def report_failure(self, members: Collection[int], doing: str, error: BaseException) -> None:
        """Tell the members that this rank failed within a collective, so that they do not wait for it."""
        if isinstance(error, WorldError | DifferentCalls):
            return  # they are told by the rank that noticed it
        text = f"{self.describe(self.rank)} failed in {doing}: {type(error).__name__}: {error}"
        self._report({"text": text, "ranks": sorted(members), "failed": self.rank, "is_users": False})

    def pass_on(self, error: BaseException, members: Collection[int]) -> None:
        """Tell the members, which may wait for this rank, that another one is to blame for its failure."""
        if isinstance(error, PeerLost):
            self._report({"text": str(error), "ranks": sorted(members), "failed": error.rank, "is_users": False})
        elif isinstance(error, DifferentCalls):
            self._report({"text": str(error), "ranks": sorted(members), "failed": None, "is_users": True})

    def describe(self, rank: int) -> str:
        """Return `rank 3 on hostname`."""
        return f"rank {rank} on {self.hosts[rank]}"

    def close(self) -> None:
        """Say goodbye."""
        with suppress(OSError):
            self._send(MessageType.BYE, {"begun": self.begun})
            self._stream.shutdown(socket.SHUT_WR)

    def _complain(self, complaint: dict[str, Any], peer: int, members: Collection[int], doing: str) -> None:
        """Send a complaint and raise the coordinator's verdict, if it comes in time."""
        until = time.monotonic() + _NEWS_S
        self._check_until(until, peer, members, doing)
        with suppress(OSError):
            self._send(MessageType.LATE, complaint)
        self._check_until(until + _VERDICT_S, peer, members, doing)

    def _check_until(self, until: float, peer: int, members: Collection[int], doing: str) -> None:
        while time.monotonic() < until:
            self.check(peer, members, doing)
            with self._changed:
                self._changed.wait(0.02)

    def _report(self, body: dict[str, Any]) -> None:
        self._add_fault(body)
        with suppress(OSError):
            self._send(MessageType.FAULT, body)

    def _add_fault(self, body: dict[str, Any]) -> None:
        text, rank = str(body["text"]), body["failed"]
        error: WorldError | DifferentCalls = MismatchError(text) if rank is None else PeerLost(text, rank)
        if body["is_users"]:
            error = DifferentCalls(text)
        with self._changed:
            self._faults.append((set(body["ranks"]), error))
            self._changed.notify_all()

    def _send(self, message_type: MessageType, body: dict[str, Any]) -> None:
        self.sent += 1
        self._sender.send(ControlMessage(message_type, self._generation, body).encode())

    def _listen(self) -> None:
        decoder = Decoder(self._generation)
        reason = "its connection closed"
        try:
            while data := self._stream.recv(1 << 16):
                for message in decoder.feed(data):
                    self.received += 1
                    self._handle(message)
        except (OSError, WorldError) as error:
            reason = str(error)
        # The coordinator runs in the process of rank 0.
        self._lose(0, reason)
        self._stream.close()

    def _handle(self, message: ControlMessage) -> None:
        body = message.body
        match message.type:
            case MessageType.GO:
                with self._changed:
                    self._arrivals[body["group"], body["ticket"]] = body["payloads"]
                    self._changed.notify_all()
            case MessageType.LOST:
                self._lose(body["rank"], body["reason"])
            case MessageType.FAULT:
                self._add_fault(body)
            case MessageType.PROBE:
                with suppress(OSError):
                    self._send(MessageType.STATE, self._describe_state())

    def _lose(self, rank: int, reason: str) -> None:
        with self._changed:
            self._lost.setdefault(rank, reason)
            self._changed.notify_all()
