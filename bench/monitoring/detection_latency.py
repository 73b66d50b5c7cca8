"""How soon a rank that becomes slow, or stops, is named: in events, logs, terminal and browser."""

import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import Page
from support.chromium import browser
from support.workers import process_of

from bench.markdown import table
from bench.monitoring.server_process import MonitoredServer, run_server
from mimatrix.launch.throttle.cpu_quota import quotas

SPEED = 0.5
"""Of a processor, for each rank; half of it when slowed."""
SLOW, HANG = "the others are idle because of rank 1", "rank 1 on "
_PLACES = {"events": "events (explain)", "log": "log of the job", "said": "log of the server", "top": "mimatrix top"}
_GIVE_UP_S = 60.0
Look = Callable[[], str]


def measure(rounds: int) -> dict[str, Any]:
    """Return the seconds until each place shows the sentence, by round."""
    figures: dict[str, list[dict[str, float]]] = {"slow": [], "hang": []}
    with run_server() as server, quotas({0: SPEED, 1: SPEED, 2: SPEED / 2}) as groups:
        number = server.submit("even.py")
        server.wait_until(number, lambda job: job.progress.step > 50, 120)
        for rank in (0, 1):
            groups[rank].write_text(str(process_of(server.address, number, rank)))
        second = process_of(server.address, number, 1)
        for _ in range(rounds):
            _wait_until_quiet(server, number)
            with _watch_all(server, number, SLOW) as times:
                groups[2].write_text(str(second))
            figures["slow"].append(times)
            groups[1].write_text(str(second))
            _wait_until_quiet(server, number)
            with _watch_all(server, number, "has not entered") as times:
                os.kill(second, signal.SIGSTOP)
            figures["hang"].append(times)
            os.kill(second, signal.SIGCONT)
            print(figures["slow"][-1], figures["hang"][-1], flush=True)
    return figures


def section(figures: dict[str, Any]) -> str:
    """Return this part of the page."""
    rows = []
    for place, shown in (*_PLACES.items(), ("page", "dashboard")):
        slow, hang = ([times[place] for times in figures[kind]] for kind in ("slow", "hang"))
        rows.append(
            [shown, *(f"{statistics.median(each):.1f} ({min(each):.1f} to {max(each):.1f})" for each in (slow, hang))]
        )
    return f"""## How soon a rank is named
`python -m bench.monitoring detection_latency`

Two ranks of half a processor each (control groups); rank 1 gets a quarter in mid-run, and later is stopped (SIGSTOP) while the
other one comes to its all-reduce. Seconds from that moment until the sentence that names it is to be read, median and range of
{len(figures["slow"])} times. Wanted: 10 and 15.

{table(["where", "slowed to half [s]", "stopped [s]"], rows)}"""


def _wait_until_quiet(server: MonitoredServer, number: int) -> None:
    """Wait until no rank is named, and for several seconds more."""
    deadline = time.monotonic() + _GIVE_UP_S
    with server.client() as client:
        while client.ranks(number).stragglers:
            assert time.monotonic() < deadline, "a rank is still named"
            time.sleep(0.2)
    time.sleep(8)


@contextmanager
def _watch_all(server: MonitoredServer, number: int, words: str) -> Iterator[dict[str, float]]:
    """Watch every place while the body makes a rank slow; the yielded times are filled once all places show it."""
    times: dict[str, float] = {}
    ready, begun = threading.Barrier(len(_PLACES) + 2, timeout=60), threading.Event()
    began: list[float] = []
    errors: list[Exception] = []

    def watch(place: str, open_look: Callable[[], Any]) -> None:
        try:
            with open_look() as look:
                before = look().count(words)
                ready.wait()
                begun.wait(_GIVE_UP_S)
                while look().count(words) <= before:
                    if time.monotonic() - began[0] > _GIVE_UP_S:
                        raise TimeoutError(f'"{words}" was not seen in {place} within {_GIVE_UP_S:g} s')
                    time.sleep(0.1)
                times[place] = round(time.monotonic() - began[0], 2)
        except Exception as error:  # noqa: BLE001 (raised by the thread that started it)
            errors.append(error)
            ready.abort()

    places = {
        **{place: _look_at(server, number, place) for place in _PLACES},
        "page": lambda: _open_page(server, number),
    }
    threads = [threading.Thread(target=watch, args=each, daemon=True) for each in places.items()]
    for thread in threads:
        thread.start()
    try:
        ready.wait()
        began.append(time.monotonic())
        yield times
        begun.set()
    finally:
        begun.set()
        for thread in threads:
            thread.join(_GIVE_UP_S + 30)
    if errors:
        raise errors[0]


def _look_at(server: MonitoredServer, number: int, place: str) -> Callable[[], Any]:
    @contextmanager
    def open_look() -> Iterator[Look]:
        with server.client() as client:
            looks: dict[str, Look] = {
                "events": lambda: "\n".join(event.reason for event in client.events(number)),
                "log": lambda: client.log(number, 0, -60_000).text,
                "said": server.log.read_text,
                "top": lambda: " ".join(server.command("top", "--once").split()),
            }
            yield looks[place]

    return open_look


@contextmanager
def _open_page(server: MonitoredServer, number: int) -> Iterator[Look]:
    """Open the job in the dashboard; yield a function that returns its text."""
    with browser() as chromium:
        page: Page = chromium.new_page()
        page.goto(f"{server.address}/#token={server.token}")
        page.wait_for_selector("#who:not([hidden])")
        page.goto(f"{server.address}/#/jobs/{number}")
        page.wait_for_selector("h1")
        page.wait_for_timeout(5000)  # all that is there already is shown then
        yield lambda: str(page.locator("main").inner_text())
