"""A rank's connection to the coordinator: which ranks were lost, what failed, and synchronisation between hosts."""

import socket
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any, NoReturn

from mimatrix.comm.control.call_comparison import CallReport
from mimatrix.comm.control.faults import Fault
from mimatrix.comm.control.liveness import DEFAULT_SILENCE_S, describe_break, is_silence
from mimatrix.comm.control.losses import Losses, RankLoss
from mimatrix.comm.control.messages import ControlMessage, Decoder, FrameSender, MessageType, connect, greeting
from mimatrix.comm.control.user_calls import Caller, UserCall, describe_calls
from mimatrix.comm.control.waits import ArrivalWait, WaitStatus
from mimatrix.core.errors import DifferentCalls, MismatchError, PeerLost, UserError, WorldError

_CONNECT_S = 30.0
_POLL_S = 0.05
_NEWS_S = 0.2
"""How long news of a lost rank may be on its way."""
_VERDICT_S = 3.0
"""How long the coordinator may take to find the rank that blocks the others."""
_BLOCKED_S = 2.0
"""After how long the user's thread tells the coordinator that it waits for a rank to come."""
_REPORT_EVERY_S = 1.0
_STILL_S = 0.5
"""How long ago a thread that still waits may have said so."""


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
        self._losses = Losses(rank, hosts)
        self._is_closing = False
        self._arrivals: dict[tuple[str, int], list[Any]] = {}
        self._announced: dict[str, tuple[int, ...]] = {}
        """The members of each group, as the coordinator has been told."""
        self._replies: dict[int, dict[str, Any]] = {}
        self._loads: list[dict[str, Any]] = []
        self._changed = threading.Condition()

    @classmethod
    def connect(
        cls,
        rank: int,
        hosts: list[str],
        address: str,
        port: int,
        generation: int,
        token: str,
        *,
        silence_s: float = DEFAULT_SILENCE_S,
    ) -> "ControlClient":
        """Connect to the coordinator, greet it with the job's token, and start to listen.

        Args:
            rank: This rank.
            hosts: The host of each rank; the coordinator is on the one of rank 0.
            address: The coordinator's address.
            port: Its port.
            generation: The membership that this rank belongs to.
            token: The job's token.
            silence_s: After how long without an answer of its kernel the coordinator's host counts as silent.
        """
        stream = connect(address, port, _CONNECT_S, silence_s)
        stream.settimeout(None)
        client = cls(rank, hosts, stream, generation)
        stream.sendall(greeting(token, generation))
        client._send(MessageType.HELLO, {"rank": rank, "host": hosts[rank]})
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
        ranks = tuple(members)
        is_known, self._announced[group] = self._announced.get(group) == ranks, ranks
        body = {"group": group, "ticket": ticket, "members": None if is_known else ranks, "payload": payload}
        self._send(MessageType.ARRIVE, body)

    def wait_arrivals(self, group: str, ticket: int, timeout_s: float) -> list[Any] | None:
        """Return the payloads of all members once all have reached `ticket`, or None after `timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: (group, ticket) in self._arrivals, timeout_s)
            return self._arrivals.pop((group, ticket), None)

    @property
    def has_news(self) -> bool:
        """Whether a rank or the coordinator was lost, or a fault was reported; cheaper to ask than `check`."""
        return self._losses.has_news

    def has_left(self, rank: int) -> bool:
        """Return whether a rank has said goodbye."""
        loss = self._losses.ranks.get(rank)
        return loss is not None and loss.has_left

    def check(self, peer: int, members: Collection[int], doing: str) -> None:
        """Raise the `failure`, if there is one."""
        if failure := self.failure(peer, members, doing):
            raise failure

    def failure(
        self, peer: int, members: Collection[int], doing: str, user_call: UserCall | None = None
    ) -> WorldError | UserError | None:
        """Return an error if a rank reported a mismatch, a member or the coordinator was lost, or `peer` has left.

        A peer may have finished all that is expected of it and left since: look at its progress again after this.
        """
        return self._losses.failure(peer, members, doing, user_call or self.caller.of_this_thread())

    def report_timeout(
        self, peer: int, members: Collection[int], doing: str, waited_s: float, arrival: tuple[str, int] | None = None
    ) -> NoReturn:
        """Have the coordinator find the rank that is to blame for a timeout, then raise.

        `arrival` is the group and ticket that this rank waits for, if it waits for the coordinator.
        """
        complaint = {"waits_for": peer, "waited_s": waited_s, "arrival": arrival, "members": list(members)}
        self._complain(complaint, peer, members, doing)
        raise self._losses.coordinator_error(doing, "it does not answer")

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
        self._report(Fault(text=text, ranks=tuple(sorted(ranks))))
        raise MismatchError(text)

    def report_different_calls(self, calls: dict[int, UserCall | None]) -> NoReturn:
        """Tell all ranks that two of them are in different calls of the user's script, then raise.

        Other pairs of ranks may notice it as well: all raise what came to the coordinator first.
        """
        text, until = describe_calls(calls), time.monotonic() + _NEWS_S
        with suppress(OSError):
            fault = Fault(text=text, ranks=tuple(sorted(calls)), is_users=True)
            self._send(MessageType.FAULT, fault.to_json())
            self._check_until(until, -1, range(len(self.hosts)), "")
        raise DifferentCalls(text)

    def report_failure(self, members: Collection[int], doing: str, error: BaseException) -> None:
        """Tell the members that this rank failed within a collective, so that they do not wait for it."""
        if isinstance(error, WorldError | DifferentCalls):
            return  # they are told by the rank that noticed it
        text = f"{self.describe(self.rank)} failed in {doing}: {type(error).__name__}: {error}"
        self._report(Fault(text=text, ranks=tuple(sorted(members)), failed=self.rank))

    def pass_on(self, error: BaseException, members: Collection[int]) -> None:
        """Tell the members, which may wait for this rank, that another one is to blame for its failure."""
        if isinstance(error, PeerLost):
            self._report(Fault(text=str(error), ranks=tuple(sorted(members)), failed=error.rank))
        elif isinstance(error, DifferentCalls):
            self._report(Fault(text=str(error), ranks=tuple(sorted(members)), is_users=True))

    def describe(self, rank: int) -> str:
        """Return `rank 3 on hostname`."""
        return self._losses.describe(rank)

    def close(self) -> None:
        """Say goodbye."""
        self._is_closing = True
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

    def request(self, number: int, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Ask the job's store, and return its reply to the request with this number.

        Raises:
            PeerLost: A rank was lost meanwhile, which may be the one that was to write the value.
            WorldError: The coordinator is lost, or does not answer.
        """
        doing = f"a request for {body['key']} in the job's store"
        self._ask(MessageType.STORE, body, doing)
        self._await(lambda: number in self._replies, timeout_s + _VERDICT_S, doing)
        return self._replies.pop(number)

    def coordinator_load(self) -> dict[str, int]:
        """Return how many messages the coordinator has received and sent."""
        self._ask(MessageType.LOAD, {}, "a question to the coordinator")
        self._await(lambda: bool(self._loads), _VERDICT_S, "a question to the coordinator")
        return self._loads.pop()

    def _ask(self, message_type: MessageType, body: dict[str, Any], doing: str) -> None:
        try:
            self._send(message_type, body)
        except OSError as error:
            self.check(-1, range(len(self.hosts)), doing)
            raise self._losses.coordinator_error(doing, describe_break(self._stream, error)) from error

    def _await(self, has_come: Callable[[], bool], timeout_s: float, doing: str) -> None:
        """Wait for an answer of the coordinator."""
        until = time.monotonic() + timeout_s
        with self._changed:
            while not self._changed.wait_for(has_come, min(_POLL_S, max(0.0, until - time.monotonic()))):
                self.check(-1, range(len(self.hosts)), doing)
                if time.monotonic() >= until:
                    raise self._losses.coordinator_error(doing, "it does not answer")

    def _report(self, fault: Fault) -> None:
        self._add_fault(fault)
        with suppress(OSError):
            self._send(MessageType.FAULT, fault.to_json())

    def _add_fault(self, fault: Fault) -> None:
        with self._changed:
            self._losses.faults.append(fault)
            self._changed.notify_all()

    def _send(self, message_type: MessageType, body: dict[str, Any]) -> None:
        self.sent += 1
        self._sender.send(ControlMessage(message_type, self._generation, body).encode())

    def _listen(self) -> None:
        decoder = Decoder(self._generation)
        reason, is_silent = "its connection closed", False
        try:
            while data := self._stream.recv(1 << 16):
                for message in decoder.feed(data):
                    self.received += 1
                    self._handle(message)
        except OSError as error:
            reason, is_silent = describe_break(self._stream, error), is_silence(error)
        except WorldError as error:
            reason = str(error)
        except Exception as error:  # noqa: BLE001 (this thread must not end without a word, whatever it was sent)
            reason = f"it sent a corrupt message ({type(error).__name__}: {error})"
        if not self._is_closing:
            with self._changed:
                self._losses.lose_coordinator(reason, is_silent=is_silent)
                self._changed.notify_all()
        self._stream.close()

    def _handle(self, message: ControlMessage) -> None:
        body = message.body
        match message.type:
            case MessageType.GO:
                with self._changed:
                    self._arrivals[body["group"], body["ticket"]] = body["payloads"]
                    self._changed.notify_all()
            case MessageType.REPLY:
                with self._changed:
                    self._replies[body["number"]] = body
                    self._changed.notify_all()
            case MessageType.LOAD:
                with self._changed:
                    self._loads.append(body)
                    self._changed.notify_all()
            case MessageType.LOST:
                with self._changed:
                    self._losses.ranks.setdefault(int(body["rank"]), RankLoss.from_json(body))
                    self._changed.notify_all()
            case MessageType.FAULT:
                self._add_fault(Fault.from_json(body))
            case MessageType.PROBE:
                with suppress(OSError):
                    self._send(MessageType.STATE, self._describe_state())
            case _:
                raise WorldError(f"it sent {message.type.name}, which only ranks send; check its version")
