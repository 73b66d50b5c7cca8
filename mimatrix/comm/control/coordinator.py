"""The coordinator: it knows which ranks are connected, synchronises ranks of several hosts, and keeps their store.

It carries no model data. For each synchronisation a rank sends it one message and receives one, however many ranks
there are; its own load grows with them and is counted apart. When a rank vanishes, it tells all others which one. When
a rank complains that another did not come, it follows who waits for whom to the one that waits for no other.

In a job it is a process of its own (`coordinator_process`), so no rank is special: each of them may be lost.
"""

import logging
import secrets
import socket
import threading
import time
from collections.abc import Collection, Mapping
from typing import Any

from mimatrix.comm.control.call_comparison import CallComparison, CallReport
from mimatrix.comm.control.deadlock import BlockedRank, Deadlock, DeadlockSearch
from mimatrix.comm.control.faults import Fault
from mimatrix.comm.control.key_value_store import KeyValueStore, StoreReply, StoreRequest
from mimatrix.comm.control.losses import RankLoss
from mimatrix.comm.control.messages import ControlMessage, MessageType, close_in_children
from mimatrix.comm.control.server import ControlServer, ServerLimits
from mimatrix.comm.control.synchronisation import RankArrival, Synchronisation
from mimatrix.comm.control.unfinished_calls import RankState, UnfinishedCall, UnfinishedCalls, WaitingRank
from mimatrix.comm.control.user_calls import UserCall, describe_calls, describe_ended
from mimatrix.comm.control.wait_graph import Culprit, Query, WaitGraphSearch
from mimatrix.core.errors import WorldError

_logger = logging.getLogger(__name__)
_LINGER_S = 5.0
"""How long a coordinator without ranks waits for those that have not come yet."""
_FIRST_LINGER_S = 30.0
"""How long it waits for the first."""


class Coordinator:
    """Decides for the ranks of one generation. `start` runs it on a thread, `serve` on the calling one."""

    def __init__(
        self,
        listener: socket.socket,
        generation: int,
        *,
        world_size: int,
        token: str = "",
        limits: ServerLimits | None = None,
    ) -> None:
        self.port: int = listener.getsockname()[1]
        self.token = token or secrets.token_hex(32)
        """What a rank has to show."""
        self._world_size = world_size
        self._server = ControlServer(listener, self.token, generation, world_size, limits or ServerLimits())
        self._synchronisation = Synchronisation()
        self._store = KeyValueStore()
        self._search: WaitGraphSearch | None = None
        self._deadlocks = DeadlockSearch()
        self._calls = CallComparison()
        self._unfinished = UnfinishedCalls()
        self._hosts: dict[int, str] = {}
        self._ended: dict[int, Mapping[str, int]] = {}
        """The last call of each group that a rank began before it said goodbye."""
        self._lost: dict[int, RankLoss] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mimatrix-coordinator", daemon=True)
        self._alone_since_s, self._linger_s = time.monotonic(), _FIRST_LINGER_S

    @classmethod
    def start(
        cls,
        address: str,
        generation: int,
        *,
        world_size: int,
        token: str = "",
        limits: ServerLimits | None = None,
    ) -> "Coordinator":
        """Listen on a free port of `address`, and serve on a thread of this process until closed."""
        listener = close_in_children(socket.create_server((address, 0), backlog=1024))
        coordinator = cls(listener, generation, world_size=world_size, token=token, limits=limits)
        coordinator._thread.start()
        return coordinator

    @property
    def is_serving(self) -> bool:
        """Whether its thread runs."""
        return self._thread.is_alive()

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop the thread once all ranks have said goodbye, or after `timeout_s`."""
        until = time.monotonic() + timeout_s
        while self._server.ranks and time.monotonic() < until:
            time.sleep(0.005)
        self._closing.set()
        self._thread.join(timeout=2)

    def serve(self) -> None:
        """Serve on this thread until no rank is connected, and none is to be expected."""
        self._server.serve(self, self._is_abandoned)

    def _run(self) -> None:
        # The error is logged, and the ranks are told.
        try:
            self._server.serve(self, self._closing.is_set)
        except Exception:  # noqa: BLE001
            _logger.error("the coordinator of this process has ended")

    def _is_abandoned(self) -> bool:
        if self._server.ranks:
            return False
        has_all_seen = len(self._server.joined) == self._world_size
        return has_all_seen or time.monotonic() - self._alone_since_s > self._linger_s

    def on_join(self, rank: int, host: str) -> None:
        """Tell a rank which others were lost before it came."""
        self._hosts[rank] = host
        for lost, loss in self._lost.items():
            self._send_to(rank, MessageType.LOST, {"rank": lost, **loss.to_json()})

    def on_leave(self, rank: int, reason: str) -> None:
        """Tell all ranks that one is gone."""
        self._alone_since_s, self._linger_s = time.monotonic(), _LINGER_S
        self._store.forget(rank)
        self._synchronisation.forget(rank)
        self._lose(rank, RankLoss(reason, has_left=rank in self._ended))

    def on_tick(self) -> None:
        """Look at the deadlines of searches and of requests to the store."""
        self._check_search()
        self._reply(self._store.expire(time.monotonic()))

    @property
    def has_deadlines(self) -> bool:
        """Whether a search is in progress, or a rank waits for the store."""
        return self._search is not None or bool(self._unfinished.calls) or self._store.is_awaited

    def on_message(self, rank: int, message: ControlMessage) -> None:
        """Handle a rank's message.

        Raises:
            WorldError: Only the coordinator sends such messages, or a field is missing or of the wrong type.
        """
        body = message.body
        match message.type:
            case MessageType.ARRIVE:
                self._on_arrive(rank, body)
            case MessageType.STORE:
                self._reply(self._store.handle(rank, StoreRequest.from_json(body), time.monotonic()))
            case MessageType.LATE:
                if body.get("call"):
                    self._on_unfinished(rank, body)
                else:
                    self._on_late(body)
            case MessageType.BLOCKED:
                self._on_blocked(rank, body["blocked"])
            case MessageType.STATE:
                state = RankState.from_json(body)
                self._unfinished.answer(rank, state)
                self._on_state(rank, state.waits_for)
                self._act_on(self._deadlocks.answer(rank, BlockedRank.from_json(body["blocked"])))
            case MessageType.CALLS:
                self._on_calls(rank, CallReport.from_json(body, rank))
            case MessageType.FAULT:
                self._report(Fault.from_json(body))
            case MessageType.LOAD:
                load = {"received": self._server.received, "sent": self._server.sent}
                self._send_to(rank, MessageType.LOAD, load)
            case MessageType.BYE:
                state = RankState.from_json({"begun": body["begun"], "waits_for": None, "call": None})
                self._ended[rank] = state.begun
                self._unfinished.answer(rank, state)
                self._server.dismiss(rank, "it left")
            case _:
                raise WorldError(
                    f"a rank sent {message.type.name}, which only the coordinator sends; check its version"
                )

    def _reply(self, replies: list[StoreReply]) -> None:
        for reply in replies:
            self._send_to(reply.rank, MessageType.REPLY, reply.to_json())

    def _on_arrive(self, rank: int, body: dict[str, Any]) -> None:
        """Once all members of a group have reached the same ticket, let them go, each with the payloads of all."""
        arrival = RankArrival.from_json(body)
        if payloads := self._synchronisation.arrive(rank, arrival):
            answer = {"group": arrival.group, "ticket": arrival.ticket, "payloads": list(payloads.values())}
            self._server.send(payloads, MessageType.GO, answer)

    def _on_calls(self, rank: int, report: CallReport) -> None:
        """Compare the calls of a rank with those of others, and tell all ranks if they differ."""
        if difference := self._calls.take(rank, report):
            names = {rank: f"rank {rank} on {self._hosts[rank]}" for rank in difference.ranks}
            text, ranks = difference.describe(names), tuple(difference.ranks)
            self._report(Fault(text=text, ranks=ranks, is_users=difference.is_users))

    def _on_unfinished(self, rank: int, body: dict[str, Any]) -> None:
        """Ask all members of a group whether they have come to a call that does not finish on one of them."""
        call = UnfinishedCall.from_json(body, time.monotonic())
        if self._is_known(call.members):
            return
        if ended := call.find_ended(self._ended):
            text = describe_ended(rank, ended[0], UserCall.from_json(body["user_call"]))
            self._report(Fault(text=text, ranks=(rank,), failed=ended[0], is_users=True))
            return
        self._act_on(self._unfinished.complain(call))

    def _is_known(self, members: Collection[int]) -> bool:
        """Return whether one of the members was lost, so that all were told the reason."""
        return any(not loss.has_left and rank in members for rank, loss in self._lost.items())

    def _on_late(self, body: dict[str, Any]) -> None:
        """Start to search for the rank that blocks the others, unless it is known or a search is in progress."""
        if self._search or self._is_known(body["members"]):
            return
        suspect = None if body["waits_for"] is None else int(body["waits_for"])
        if body["arrival"]:
            group, ticket = body["arrival"]
            suspect = self._synchronisation.find_missing(str(group), int(ticket), default=suspect)
        suspects = self._server.ranks if suspect is None else [suspect]
        self._search = WaitGraphSearch(waited_s=float(body["waited_s"]), has_suspect=suspect is not None)
        self._act_on(self._search.start(suspects, time.monotonic()))

    def _on_blocked(self, rank: int, body: dict[str, Any] | None) -> None:
        """Look whether ranks wait for each other in different calls, or for one that has ended."""
        blocked = BlockedRank.from_json(body)
        for ended in blocked.find_ended(self._ended) if blocked else ():
            text = describe_ended(rank, ended, blocked.call if blocked else None)
            self._report(Fault(text=text, ranks=(rank,), failed=ended, is_users=True))
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
                    self._lose(rank, RankLoss(reason))
            case WaitingRank(rank, waits_for, waited_s):
                if not self._search:
                    self._search = WaitGraphSearch(waited_s=waited_s, has_suspect=True, asked=[rank])
                    self._act_on(self._search.start([waits_for], time.monotonic()))

    def _act_on(self, outcome: Culprit | Query | Deadlock | None) -> None:
        match outcome:
            case Deadlock(calls):
                self._report(Fault(text=describe_calls(calls), ranks=tuple(sorted(calls)), is_users=True))
            case Culprit(rank, reason):
                self._search = None
                self._lose(rank, RankLoss(reason))
            case Query(ranks):
                self._server.send(ranks, MessageType.PROBE, {})
            case None:
                pass

    def _lose(self, rank: int, loss: RankLoss) -> None:
        self._lost[rank] = loss
        self._send_all(MessageType.LOST, {"rank": rank, **loss.to_json()})

    def _report(self, fault: Fault) -> None:
        self._send_all(MessageType.FAULT, fault.to_json())

    def _send_all(self, message_type: MessageType, body: dict[str, Any]) -> None:
        self._server.send(self._server.ranks, message_type, body)

    def _send_to(self, rank: int, message_type: MessageType, body: dict[str, Any]) -> None:
        self._server.send([rank], message_type, body)
