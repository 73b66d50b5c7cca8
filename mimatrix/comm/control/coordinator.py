"""The coordinator: a thread beside rank 0 that knows who is there, and lets ranks of several hosts go on together.

It carries no model data. For each synchronisation a rank sends it one message and gets one back, however many ranks
there are; its own load grows with them and is counted apart. When a rank vanishes it tells everyone who it was. When a
rank complains that another did not come, it follows who waits for whom to the one that waits for nobody.
"""

import secrets
import selectors
import socket
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from mimatrix.comm.control.messages import LEFT, ControlMessage, Decoder, MessageType, close_in_children
from mimatrix.comm.control.wait_graph import Culprit, Query, WaitGraphSearch
from mimatrix.core.errors import WorldError

_SEND_S = 1.0


@dataclass(slots=True)
class _Member:
    """One connection and the rank behind it."""

    stream: socket.socket
    inbox: Decoder
    rank: int = -1
    host: str = ""


class Coordinator:
    """Runs on its own thread until closed."""

    def __init__(self, address: str, generation: int) -> None:
        self._listener = close_in_children(socket.create_server((address, 0), backlog=1024))
        self.port: int = self._listener.getsockname()[1]
        self.token = secrets.token_hex(16)
        """What a rank has to show; published in the job's store, so that only its ranks know it."""
        self.received, self.sent = 0, 0
        self._generation = generation
        self._members: dict[int, _Member] = {}
        self._arrivals: dict[tuple[str, int], dict[int, dict[str, Any]]] = {}
        self._search: WaitGraphSearch | None = None
        self._gone: dict[int, str] = {}
        self._poller = selectors.DefaultSelector()
        self._poller.register(self._listener, selectors.EVENT_READ)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mimatrix-coordinator", daemon=True)
        self._thread.start()

    def close(self, patience_s: float = 5.0) -> None:
        """Stop once all ranks have said goodbye, or when patience ends."""
        until = time.monotonic() + patience_s
        while self._members and time.monotonic() < until:
            time.sleep(0.005)
        self._closing.set()
        self._thread.join(timeout=2)

    def _run(self) -> None:
        while not self._closing.is_set():
            for key, _ in self._poller.select(timeout=0.05):
                if key.fileobj is self._listener:
                    self._welcome()
                else:
                    self._hear(key.data)
            self._look_after_search()
        # All that ever called and is still there, strangers and the listener included.
        for key in list(self._poller.get_map().values()):
            cast(socket.socket, key.fileobj).close()
        self._poller.close()

    def _welcome(self) -> None:
        stream = close_in_children(self._listener.accept()[0])
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._poller.register(stream, selectors.EVENT_READ, _Member(stream, Decoder(self._generation)))

    def _hear(self, member: _Member) -> None:
        try:
            data = member.stream.recv(1 << 16)
            if not data:
                self._drop(member, "its connection closed")
                return
            for message in member.inbox.feed(data):
                self.received += 1
                self._take(member, message)
        except OSError as error:
            self._drop(member, f"its connection broke ({error.strerror})")
        except WorldError as error:
            self._drop(member, str(error))

    def _take(self, member: _Member, message: ControlMessage) -> None:
        body = message.body
        if member.rank < 0 and not (message.type is MessageType.HELLO and body.get("token") == self.token):
            raise WorldError("somebody who is no rank of this job called; the connection is closed")
        match message.type:
            case MessageType.HELLO:
                self._join(member, int(body["rank"]), str(body["host"]))
            case MessageType.ARRIVE:
                self._arrive(member.rank, body)
            case MessageType.LATE:
                self._complain(body)
            case MessageType.STATE:
                self._hear_of(member.rank, body["waits_for"])
            case MessageType.FAULT:
                self._tell_all(MessageType.FAULT, body)
            case MessageType.BYE:
                self._drop(member, "")
            case _:
                raise WorldError(f"a control message of kind {message.type.name} came from a rank; it is refused")

    def _join(self, member: _Member, rank: int, host: str) -> None:
        member.rank, member.host = rank, host
        self._members[rank] = member
        for lost, why in self._gone.items():
            self._tell(member, MessageType.LOST, {"rank": lost, "why": why})

    def _arrive(self, rank: int, body: dict[str, Any]) -> None:
        """All ranks of a group at the same ticket: they may go, each with what the others said."""
        key = str(body["group"]), int(body["ticket"])
        arrived = self._arrivals.setdefault(key, {})
        arrived[rank] = body
        if len(arrived) == len(body["members"]):
            del self._arrivals[key]
            said = [arrived[each].get("said") for each in body["members"]]
            for each in body["members"]:
                if each in self._members:
                    self._tell(self._members[each], MessageType.GO, {"group": key[0], "ticket": key[1], "said": said})

    def _complain(self, body: dict[str, Any]) -> None:
        """Somebody's deadline has passed: start to look for the one to blame, unless that is known or under way."""
        known = any(why != LEFT and rank in body["members"] for rank, why in self._gone.items())
        if self._search or known:
            return
        suspect = body["waits_for"]
        if body["arrival"]:
            group, ticket = body["arrival"]
            arrived = self._arrivals.get((group, ticket), {})
            members: list[int] = next((each["members"] for each in arrived.values()), [])
            suspect = next((rank for rank in members if rank not in arrived), suspect)
        suspects = list(self._members) if suspect is None else [suspect]
        self._search = WaitGraphSearch(float(body["waited_s"]), known=suspect is not None)
        self._act_on(self._search.start(suspects, time.monotonic()))

    def _hear_of(self, rank: int, waits_for: int | None) -> None:
        if self._search:
            self._act_on(self._search.answer(rank, waits_for, time.monotonic()))

    def _look_after_search(self) -> None:
        if self._search:
            self._act_on(self._search.overdue(time.monotonic()))
        if self._search and self._search.is_over(time.monotonic()):
            self._search = None

    def _act_on(self, found: Culprit | Query | None) -> None:
        match found:
            case Culprit(rank, why):
                self._search = None
                self._lose(rank, why)
            case Query(ranks):
                for rank in ranks:
                    if rank in self._members:
                        self._tell(self._members[rank], MessageType.PROBE, {})
            case None:
                pass

    def _drop(self, member: _Member, why: str) -> None:
        with suppress(KeyError):
            self._poller.unregister(member.stream)
        member.stream.close()
        if self._members.get(member.rank) is member:
            del self._members[member.rank]
            self._lose(member.rank, why or LEFT)

    def _lose(self, rank: int, why: str) -> None:
        self._gone[rank] = why
        self._tell_all(MessageType.LOST, {"rank": rank, "why": why})

    def _tell_all(self, kind: MessageType, body: dict[str, Any]) -> None:
        self._send(self._members.values(), ControlMessage(kind, self._generation, body))

    def _tell(self, member: _Member, kind: MessageType, body: dict[str, Any]) -> None:
        self._send([member], ControlMessage(kind, self._generation, body))

    def _send(self, members: Iterable[_Member], message: ControlMessage) -> None:
        frame = message.encode()
        for member in list(members):
            # Frames are small and a rank always reads them: a stream that is full belongs to one that has stopped.
            with suppress(OSError):
                member.stream.settimeout(_SEND_S)
                member.stream.sendall(frame)
                self.sent += 1
