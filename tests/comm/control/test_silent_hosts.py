"""A host that falls silent is named by all others within seconds; a process that is busy or stopped is not."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.namespaces import CableHost, cabled_hosts, needs_root

from mimatrix.comm.control.liveness import describe_break, is_silence, silence_limit, watch_host
from mimatrix.core import environment
from mimatrix.core.errors import UserError

SCRIPT = Path(__file__).parents[1] / "scripts" / "control_rank.py"
NAMES = ["a", "b", "c"]
SINCE = r"its host has been silent since \d\d:\d\d:\d\d"


@pytest.fixture
def hosts() -> Iterator[Sequence[CableHost]]:
    with cabled_hosts(len(NAMES)) as made:
        yield made


class ControlRank:
    """A process on one host with nothing but a connection to the coordinator."""

    def __init__(self, stack: ExitStack, hosts: Sequence[CableHost], rank: int, silence_s: float, mode: str) -> None:
        words = [sys.executable, str(SCRIPT), str(rank), ",".join(NAMES), hosts[0].address, str(silence_s), mode]
        self.process = stack.enter_context(
            subprocess.Popen(
                hosts[rank].command(*words),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | {environment.SILENCE_S.name: str(silence_s)},
            )
        )
        stack.callback(self.process.kill)

    def read(self) -> str:
        """Return the next line that it prints."""
        assert self.process.stdout
        return self.process.stdout.readline().strip()

    def tell(self, line: str) -> None:
        """Give it a line on standard input."""
        assert self.process.stdin
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()


def start_ranks(
    stack: ExitStack, hosts: Sequence[CableHost], silence_s: float, modes: Sequence[str] = ("", "", "")
) -> list[ControlRank]:
    ranks = [ControlRank(stack, hosts, rank, silence_s, mode) for rank, mode in enumerate(modes)]
    port = ranks[0].read()
    for rank in ranks:
        rank.tell(port)
    assert [rank.read() for rank in ranks] == ["ready"] * 3
    return ranks


@needs_root
@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("cut", "mode", "silence_s", "within_s"),
    [
        pytest.param(1, "", 2.0, 5.0, id="of-a-rank"),
        pytest.param(0, "", 2.0, 5.0, id="of-the-coordinator"),
        pytest.param(1, "talking", 2.0, 5.0, id="in-the-middle-of-messages"),
        pytest.param(1, "", 8.0, 10.0, id="with-the-default-limit", marks=pytest.mark.long),
    ],
)
def test_silent_host_is_named_by_all_others(
    hosts: Sequence[CableHost], cut: int, mode: str, silence_s: float, within_s: float
) -> None:
    with ExitStack() as stack:
        ranks = start_ranks(stack, hosts, silence_s, [mode] * 3)
        started = time.monotonic()
        hosts[cut].cut()
        for rank in ranks:
            (news,) = json.loads(rank.read())
            named = cut if rank is not ranks[cut] else 0
            if rank is ranks[0] is ranks[cut]:
                # The host of the coordinator is alone now: for it all others are silent.
                assert re.fullmatch(rf"rank [12] on [bc] was lost in a test: {SINCE}", news)
            elif rank is ranks[cut] and mode:
                # Cut off in the middle of messages, it may hear the kernel give up the connection first.
                assert re.match("(rank 0 on a|the coordinator of this job, a process on a,) was lost in a test: ", news)
            else:
                assert re.fullmatch(rf"rank {named} on {NAMES[named]} was lost in a test: {SINCE}", news)
        assert time.monotonic() - started < within_s


@needs_root
@pytest.mark.timeout(60)
def test_stopped_process_is_not_taken_for_a_silent_host(hosts: Sequence[CableHost]) -> None:
    """Its kernel answers, as that of a rank in a debugger or in a long call does."""
    with ExitStack() as stack:
        ranks = start_ranks(stack, hosts, 1.0, ["", "stopped", ""])
        time.sleep(4)
        ranks[2].process.kill()
        (news,) = json.loads(ranks[0].read())
        assert news == "rank 2 on c was lost in a test: its connection closed", "and not rank 1"
        pid = stopped_child(ranks[1].process.pid)
        os.kill(pid, signal.SIGCONT)
        assert "rank 2 on c was lost" in ranks[1].read()


def stopped_child(pid: int) -> int:
    """Return the process that `ip netns exec` became or started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(children[0]) if children else pid


def test_kernel_is_told_the_limit() -> None:
    with socket.socket() as stream:
        watch_host(stream, 6.0)
        assert stream.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 6000
        idle_s = stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
        assert idle_s + stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) < 6


def test_silence_is_told_from_a_connection_that_broke() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as line:
        reset, silent = ConnectionResetError(104, "Connection reset by peer"), TimeoutError(110, "timed out")
        assert not is_silence(reset)
        assert describe_break(line, reset) == "its connection broke (Connection reset by peer)"
        assert is_silence(silent)
        time.sleep(1.5)
        now_s = time.time()
        candidates = [time.strftime("%H:%M:%S", time.localtime(now_s - age_s)) for age_s in (1.0, 1.5, 2.0, 2.5)]
        assert describe_break(line, silent).removeprefix("its host has been silent since ") in candidates


@pytest.mark.parametrize(("text", "limit_s"), [("", 8.0), ("20", 20.0), ("1.5", 1.5)])
def test_limit_is_a_setting(monkeypatch: pytest.MonkeyPatch, text: str, limit_s: float) -> None:
    monkeypatch.setenv(environment.SILENCE_S.name, text)
    assert silence_limit() == limit_s


@pytest.mark.parametrize("text", ["soon", "0", "0.5", "-3", "nan", "inf"])
def test_limit_that_is_no_time_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(environment.SILENCE_S.name, text)
    with pytest.raises(UserError, match=f'MIMATRIX_SILENCE_S is "{text}"; use a number of seconds from 1 on'):
        silence_limit()
