"""The supervisor of one team: a process of its own that outlives the one that started it.

`python -m mimatrix.launch.local.supervisor FOLDER` starts it. It unpacks the archive, has a reaper start each member,
keeps what they print, ends all members, or those of a group, when one fails, restarts a lost group where that was
ordered, ends all when it is told to, and records every change. It ends when no process of the team is left.
"""

import os
import selectors
import signal
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType

from mimatrix.core.environment import REJOINS, RENDEZVOUS
from mimatrix.launch.local.archive import start_unpacking
from mimatrix.launch.local.log_files import Log
from mimatrix.launch.local.reaper import NOW, Charge, Kind, Post, Report, read_reports, start_guard
from mimatrix.launch.local.store import Order, Record, TeamFolder
from mimatrix.launch.local.team_state import Ending, Ledger
from mimatrix.launch.local.users import find_account
from mimatrix.processes.proc import ENDS, Identity, adopt_orphans, descendants, identify, send

_CHUNK = 1 << 16
_KILL_S, _AGAIN_S = 5.0, 0.02
# How often, and for how long at the end, a record is tried again that a full disk did not take.
_UNSAVED_S, _LAST_TRIES = 1.0, 60
# Before a lost group is started again.
_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
# By Python itself, which undoes it in what it starts.
_IGNORED = {signal.SIGPIPE, signal.SIGXFSZ}


def main() -> int:
    """Start the keeper of a folder; return when its members have started, or when it is clear that they will not."""
    settles, says = os.pipe()
    if os.fork():
        os.close(says)
        os.read(settles, 1)
        return 0
    os.close(settles)
    keep(TeamFolder(Path(sys.argv[1])), lambda: os.close(says))
    return 0


def keep(folder: TeamFolder, settle: Callable[[], None]) -> None:
    """Keep the team of this folder until it has ended, unless somebody claimed it; `settle` when all have started."""
    keeper = _Keeper(folder, folder.read_order(), _listen())
    adopt_orphans()
    if folder.claim(keeper.record):
        keeper.run(settle)


class _Keeper:
    """The guards that are at work, and what is known of their members."""

    def __init__(self, folder: TeamFolder, order: Order, heard: int) -> None:
        self._folder = folder
        self._order = order
        self._heard = heard
        self._me = identify(os.getpid())
        self._ledger = Ledger(len(order.environments), order.groups, order.restarts, others=order.others)
        self._logs = [Log(folder.log(rank)) for rank in range(len(order.environments))]
        self._posts: dict[int, Post] = {}
        self._guards: list[Identity | None] = [None] * len(order.environments)
        self._account = find_account(order.run_as)
        self._selector = selectors.DefaultSelector()
        self._sent: dict[int, Ending] = {}
        self._saved: Record | None = None
        self._returning: dict[int, float] = {}
        """Lost groups, and when they are started again."""
        self._pause_s = _PAUSE_S

    @property
    def record(self) -> Record:
        """What is to be read of the team now."""
        team = replace(self._ledger.team, returning=bool(self._returning))
        return Record(team, self._me, tuple(self._guards), self._ledger.refusal)

    def run(self, settle: Callable[[], None]) -> None:
        """Start all members and stay until nothing of them is left."""
        self._unpack()
        if not self._ledger.team.has_ended:
            self._selector.register(self._heard, selectors.EVENT_READ)
            self._start(range(len(self._order.environments)))
            self._save()
        is_settled = False
        while self._posts or self._returning:
            if self._ledger.has_started and not is_settled:
                settle()
                is_settled = True
            self._turn()
        for log in self._logs:
            log.close()  # not before: a member that returns goes on in it
        for _ in range(_LAST_TRIES):
            if self._save():
                break
            time.sleep(_UNSAVED_S)

    def _unpack(self) -> None:
        """Fill the work folder; the ledger knows if there is no team to start after that."""
        child, says = start_unpacking(Path(self._order.archive), self._folder.work, self._account)
        refusal = self._hear_out(child, says)
        os.close(says)
        _, status = os.waitpid(child, 0)
        if self._ledger.is_told:
            self._ledger.cancel()
        elif refusal or status:
            code = os.waitstatus_to_exitcode(status)
            self._ledger.refuse(
                refusal or f"{self._order.archive} was not unpacked (code {code}); start the team again"
            )

    def _hear_out(self, child: int, says: int) -> str:
        """What the child says until it ends. If we are told to end the team, the child ends at once."""
        said = b""
        with selectors.DefaultSelector() as selector:
            selector.register(says, selectors.EVENT_READ)
            selector.register(self._heard, selectors.EVENT_READ)
            while True:
                ready = {key.fd for key, _ in selector.select()}
                if self._heard in ready:
                    self._hear()
                    os.kill(child, signal.SIGKILL)
                if says in ready:
                    came = os.read(says, _CHUNK)
                    said += came
                    if not came:
                        return said.decode(errors="replace")

    def _start(self, ranks: Iterable[int]) -> None:
        """Have these members started, for the first time or again."""
        order = self._order
        for rank in ranks:
            restarts = str(self._ledger.team.members[rank].restarts)
            environment = order.environments[rank] | ({REJOINS.name: restarts} if order.groups else {})
            try:
                post = start_guard(Charge(order.words, environment, self._folder.work, order.grace_s, self._account))
            except OSError as error:  # no process to be had
                self._ledger.take([(rank, Report(Kind.REFUSED, time.monotonic(), text=str(error)))])
                continue
            self._posts[rank], self._guards[rank] = post, post.guard
            self._sent.pop(rank, None)
            self._selector.register(post.output, selectors.EVENT_READ, rank)
            self._selector.register(post.reports, selectors.EVENT_READ, rank)

    def _turn(self) -> None:
        """Wait for whatever is next, deal with it, and write it down."""
        reports: list[tuple[int, Report]] = []
        gone: list[int] = []
        waits = [_UNSAVED_S] * (self._saved != self.record) + [at - time.monotonic() for at in self._returning.values()]
        for key, _ in self._selector.select(max(0.0, min(waits)) if waits else None):
            if key.fd == self._heard:
                self._hear()
            elif key.fd == self._posts[key.data].output:
                self._read_output(key.data)
            elif came := os.read(key.fd, _CHUNK):
                reports += [(key.data, report) for report in read_reports(came)]
            else:
                gone.append(key.data)
        self._ledger.take(reports)
        for rank in gone:
            self._relieve(rank)
        self._return()
        self._pass_on()
        self._save()

    def _return(self) -> None:
        """Start lost groups again that have waited long enough: each time longer, since it may be lost at once."""
        now_s, lost = time.monotonic(), self._ledger.lost()
        self._returning = {group: self._returning.get(group, now_s + self._pause_s) for group in lost}
        for group in [group for group, at_s in self._returning.items() if at_s <= now_s]:
            del self._returning[group]
            if self._have_met():
                self._pause_s = min(_LONGEST_PAUSE_S, 2 * self._pause_s)
                self._start(self._ledger.restart_group(group))
            else:
                self._ledger.abandon(group)

    def _have_met(self) -> bool:
        """Whether groups have left word for those of them that come again; before, there is nothing to return to."""
        word = RENDEZVOUS.get(self._order.environments[0])
        try:
            return bool(word and Path(word).exists())
        except OSError:  # of a file system that is gone, or not for us
            return False

    def _hear(self) -> None:
        for number in os.read(self._heard, _CHUNK):
            if number == NOW or number in ENDS:
                self._ledger.tell(Ending.NOW if number == NOW else Ending.WITH_GRACE)

    def _read_output(self, rank: int) -> bool:
        """Take what a member has printed; False when there is nothing."""
        output = self._posts[rank].output
        try:
            came = os.read(output, _CHUNK)
        except BlockingIOError:
            return False
        self._logs[rank].write(came)
        if not came:
            with suppress(KeyError):
                self._selector.unregister(output)
        return bool(came)

    def _relieve(self, rank: int) -> None:
        """A guard has ended: kill whom it had to leave to us, and take the last that its member printed."""
        post = self._posts[rank]
        with suppress(ChildProcessError):
            # Not before it can be waited for are its children ours.
            os.waitpid(post.guard.pid, 0)
        self._kill_strays(but={other.guard.pid for place, other in self._posts.items() if place != rank})
        while self._read_output(rank):
            pass
        for line in (post.output, post.reports):
            with suppress(KeyError):
                self._selector.unregister(line)
            os.close(line)
        del self._posts[rank]
        self._ledger.leave(rank, time.monotonic())

    def _kill_strays(self, but: set[int]) -> None:
        """Kill all below us who are not below these guards, as far as that can be had soon."""
        deadline = time.monotonic() + _KILL_S
        while (strays := descendants(os.getpid(), but)) and time.monotonic() < deadline:
            for who in strays:
                with suppress(PermissionError):
                    send(who, signal.SIGKILL)
            time.sleep(_AGAIN_S)
            _wait_for_ended()

    def _pass_on(self) -> None:
        """Tell the guards what they have not been told yet."""
        for rank, post in self._posts.items():
            ending = self._ledger.ending_of(rank)
            if ending > self._sent.get(rank, Ending.NOT):
                self._sent[rank] = ending
                send(post.guard, NOW if ending == Ending.NOW else signal.SIGTERM)

    def _save(self) -> bool:
        """Write down what has changed; False where the disk does not take it."""
        record = self.record
        if record != self._saved:
            try:
                self._folder.save(record)
            except OSError:
                return False
            self._saved = record
        return True


def _listen() -> int:
    """A descriptor on which the signals to end arrive as bytes from now on, whatever our parent did with signals."""
    heard, told = os.pipe()
    os.set_blocking(told, False)
    signal.set_wakeup_fd(told)
    for number in signal.valid_signals() - _IGNORED:
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    for number in (*ENDS, NOW):
        signal.signal(number, _ignore)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    return heard


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """The wakeup pipe has it."""


def _wait_for_ended() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


if __name__ == "__main__":
    sys.exit(main())
