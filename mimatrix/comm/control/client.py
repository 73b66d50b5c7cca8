"""A rank's line to the coordinator: who was lost, what went wrong, and permission to go on between hosts."""

import socket
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from mimatrix.comm.control.messages import LEFT, ControlMessage, Decoder, MessageType, connected
from mimatrix.core.errors import MismatchError, PeerLost, WorldError

_MOMENT_S = 0.2
_VERDICT_S = 3.0
"""How long the coordinator may take to find out who holds everybody up."""


@dataclass(frozen=True, slots=True)
class WaitStatus:
    """For whom a rank waits (None: for anybody), where, and since when by the monotonic clock."""

    rank: int | None
    call: object
    round: int
    since_s: float


class ControlClient:
    """One for each rank. A thread of its own reads; whoever waits asks `check` now and then."""

    def __init__(self, rank: int, hosts: list[str], address: str, port: int, generation: int, token: str) -> None:
        self.rank, self.hosts = rank, hosts
        self.sent, self.received = 0, 0
        self.waiting: WaitStatus | None = None
        self._generation = generation
        self._lost: dict[int, str] = {}
        self._faults: list[tuple[set[int], WorldError]] = []
        self._said: dict[tuple[str, int], list[Any]] = {}
        self._changed = threading.Condition()
        self._stream = connected(address, port, timeout_s=30)
        self._stream.settimeout(None)
        self._send(MessageType.HELLO, {"rank": rank, "host": hosts[rank], "token": token})
        threading.Thread(target=self._listen, name="mimatrix-control", daemon=True).start()

    @property
    def waits_for(self) -> int | None:
        """Whom this rank waits for now, if it knows."""
        waiting = self.waiting
        return waiting.rank if waiting else None

    def begin_waiting(self, rank: int | None, call: object, number: int) -> None:
        """From now on another rank is waited for, or anybody, in a round of a call."""
        self.waiting = WaitStatus(rank, call, number, time.monotonic())

    def end_waiting(self) -> None:
        """It goes on."""
        self.waiting = None

    def arrive(self, group: str, ticket: int, members: Collection[int], said: object) -> None:
        """Say that this rank has come as far as `ticket`; `said` reaches the others with their permission to go."""
        self._send(MessageType.ARRIVE, {"group": group, "ticket": ticket, "members": list(members), "said": said})

    def wait_arrivals(self, group: str, ticket: int, timeout_s: float) -> list[Any] | None:
        """What all said when everyone had arrived; None if that has not happened within `timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: (group, ticket) in self._said, timeout_s)
            return self._said.pop((group, ticket), None)

    def check(self, peer: int, members: Collection[int], doing: str) -> None:
        """Raise if there is a `failure`."""
        if found := self.failure(peer, members, doing):
            raise found

    def failure(self, peer: int, members: Collection[int], doing: str) -> WorldError | None:
        """Whether somebody found a mismatch, a member was lost, or the `peer` waited for has left.

        A peer may have done all that is expected of it and then left: look once more at what it did, after this.
        """
        for ranks, error in self._faults.copy():
            if ranks <= set(members):
                return error
        for rank, why in self._lost.copy().items():
            # One that left in good order may have been done already; only who waits for it misses it.
            if rank == peer or (rank in members and rank != self.rank and why != LEFT):
                return PeerLost(f"{self.name(rank)} was lost in {doing}: {why}", rank)
        return None

    def report_timeout(
        self, peer: int, members: Collection[int], doing: str, waited_s: float, arrival: tuple[str, int] | None = None
    ) -> NoReturn:
        """A deadline has passed: have the coordinator find who is to blame, then raise.

        `arrival` is the group and ticket waited for, where it is the coordinator that gives the permission.
        """
        complaint = {"waits_for": peer, "waited_s": waited_s, "arrival": arrival, "members": list(members)}
        self._complain(complaint, peer, members, doing)
        raise PeerLost(f"{self.name(0)} was lost in {doing}: its coordinator does not answer", 0)

    def diagnose(self, members: Collection[int], doing: str, waited_s: float) -> None:
        """Something inside torch failed without saying why: raise if a member turns out to be lost, or to be silent."""
        complaint = {"waits_for": None, "waited_s": waited_s, "arrival": None, "members": list(members)}
        self._complain(complaint, -1, members, doing)

    def _complain(self, complaint: dict[str, Any], peer: int, members: Collection[int], doing: str) -> None:
        """Send a complaint and raise the verdict, if there is one in time."""
        until = time.monotonic() + _MOMENT_S
        self._until_verdict(until, peer, members, doing)
        with suppress(OSError):
            self._send(MessageType.LATE, complaint)
        self._until_verdict(until + _VERDICT_S, peer, members, doing)

    def _until_verdict(self, until: float, peer: int, members: Collection[int], doing: str) -> None:
        while time.monotonic() < until:
            self.check(peer, members, doing)
            with self._changed:
                self._changed.wait(0.02)

    def name(self, rank: int) -> str:
        """`rank 3 on hostname`."""
        return f"rank {rank} on {self.hosts[rank]}"

    def report_mismatch(self, text: str, ranks: Collection[int]) -> NoReturn:
        """Two ranks ask for different things: tell everyone, then raise."""
        self._tell_of({"text": text, "ranks": sorted(ranks), "failed": None})
        raise MismatchError(text)

    def report_failure(self, members: Collection[int], doing: str, error: BaseException) -> None:
        """Something went wrong on this rank in the middle of a collective: those who wait for it must know."""
        if isinstance(error, WorldError):
            return  # they know, or will be told by whoever knows
        text = f"{self.name(self.rank)} failed in {doing}: {type(error).__name__}: {error}"
        self._tell_of({"text": text, "ranks": sorted(members), "failed": self.rank})

    def _tell_of(self, body: dict[str, Any]) -> None:
        self._blame(body)
        with suppress(OSError):
            self._send(MessageType.FAULT, body)

    def _blame(self, body: dict[str, Any]) -> None:
        text, rank = str(body["text"]), body["failed"]
        error = MismatchError(text) if rank is None else PeerLost(text, rank)
        with self._changed:
            self._faults.append((set(body["ranks"]), error))
            self._changed.notify_all()

    def close(self) -> None:
        """Say goodbye."""
        with suppress(OSError):
            self._send(MessageType.BYE, {})
            self._stream.shutdown(socket.SHUT_WR)

    def _send(self, kind: MessageType, body: dict[str, Any]) -> None:
        self.sent += 1
        self._stream.sendall(ControlMessage(kind, self._generation, body).encode())

    def _listen(self) -> None:
        inbox = Decoder(self._generation)
        why = "its connection closed"
        try:
            while data := self._stream.recv(1 << 16):
                for message in inbox.feed(data):
                    self.received += 1
                    self._take(message)
        except (OSError, WorldError) as error:
            why = str(error)
        # The coordinator lives beside rank 0.
        self._lose(0, why)
        self._stream.close()

    def _take(self, message: ControlMessage) -> None:
        body = message.body
        match message.type:
            case MessageType.GO:
                with self._changed:
                    self._said[body["group"], body["ticket"]] = body["said"]
                    self._changed.notify_all()
            case MessageType.LOST:
                self._lose(body["rank"], body["why"])
            case MessageType.FAULT:
                self._blame(body)
            case MessageType.PROBE:
                with suppress(OSError):
                    self._send(MessageType.STATE, {"waits_for": self.waits_for})

    def _lose(self, rank: int, why: str) -> None:
        with self._changed:
            self._lost.setdefault(rank, why)
            self._changed.notify_all()
