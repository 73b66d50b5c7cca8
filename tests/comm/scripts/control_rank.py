"""One rank of a job that only holds its connection to the coordinator, without torch: `RANK HOSTS ADDRESS SILENCE_S`.

Prints `ready`, and then the first news as one line of JSON. Rank 0 prints the coordinator's port first; the others
read it from standard input. With the word `stopped` at the end, the rank stops itself once it has met the others; with
`talking` it sends something all the time.
"""

import json
import os
import signal
import sys
import time
from contextlib import suppress

from mimatrix.comm.control.client import ControlClient
from mimatrix.comm.control.coordinator_process import start_coordinator

TOKEN = "a secret of this test"
WAIT_S = 60.0


def say(line: object) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(rank: int, hosts: list[str], address: str, silence_s: float, mode: str) -> None:
    if rank == 0:
        say(start_coordinator(address, 0, TOKEN, len(hosts)).port)
    port = int(sys.stdin.readline())
    control = ControlClient.connect(rank, hosts, address, port, 0, TOKEN, silence_s=silence_s)
    control.arrive("start", 1, range(len(hosts)), None)
    assert control.wait_arrivals("start", 1, 30) is not None
    say("ready")
    if mode == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    until, ticket = time.monotonic() + WAIT_S, 0
    news: list[str] = []
    while not news and time.monotonic() < until:
        time.sleep(0.02)
        if mode == "talking":
            ticket += 1
            with suppress(OSError):
                control.arrive("talk", ticket, range(len(hosts)), None)
        news = [str(failure) for failure in [control.failure(-1, range(len(hosts)), "a test")] if failure]
    say(json.dumps(news))
    control.close()


if __name__ == "__main__":
    rank, hosts, address, silence_s, *rest = sys.argv[1:]
    main(int(rank), hosts.split(","), address, float(silence_s), "".join(rest))
