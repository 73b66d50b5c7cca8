"""Open dashboards, without their browsers: what each page asks, as often as its JavaScript does, and how long answers take.

Beside them a Prometheus, and somebody at a command line who asks for what pages ask for seldom.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from bench.server.load import whole_answer
from bench.server.week import RANKS, Life

EVERY_S = 2.0
SELDOM_S = 10.0
WHOLE_S = 60.0
PIECES = 16
END_BYTES = 65_536
_RUNNING = "&".join(f"state={each}" for each in ("starting", "profiling", "training", "saving"))
_LIVE = f"{_RUNNING}&state=queued&state=preempted"
_ENDED = "state=done&state=failed&state=cancelled"


@dataclass
class Asked:
    """What was asked, by route, and how long each answer took."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    """Of the largest answers."""
    refused: list[str] = field(default_factory=list)


class Browser:
    """Somebody's connections."""

    def __init__(self, port: int, secret: str, asked: Asked) -> None:
        self._port, self._asked = port, asked
        self._head = f"HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {secret}\r\n\r\n"
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def get(self, route: str, path: str) -> bytes:
        """The body."""
        if not self._idle:
            # An answer may be larger than what a stream takes at once.
            self._idle.append(await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 22))
        reader, writer = self._idle.pop()
        began = time.perf_counter()
        writer.write(f"GET {path} {self._head}".encode())
        head, _, body = (await whole_answer(reader)).partition(b"\r\n\r\n")
        self._asked.seconds.setdefault(route, []).append(time.perf_counter() - began)
        self._asked.sizes[route] = max(len(body), self._asked.sizes.get(route, 0))
        self._idle.append((reader, writer))
        if not head.startswith(b"HTTP/1.1 200"):
            self._asked.refused.append(f"{path}: {head[:40]!r}")
        return body

    def close(self) -> None:
        """All of them."""
        for _, writer in self._idle:
            writer.close()


async def look(port: int, secret: str, lives: Sequence[Life], seconds: float, asked: Asked) -> None:
    """Ten dashboards: five on all jobs, four on one job each, one on the cluster; and the two others."""
    ran = [each for each in lives if each.started_s]
    ended = [each for each in ran if each.ended_s] or ran
    running = [each for each in ran if each.ended_s is None]
    pages: list[Callable[[Browser], Page]] = [partial(Overview, searches=viewer == 4) for viewer in range(5)]
    pages += [partial(OneJob, life=life) for life in (running[0], running[-1], running[len(running) // 2], ended[-1])]
    pages += [Cluster, Prometheus, partial(Caller, lives=running)]
    ends = time.monotonic() + seconds
    await asyncio.gather(
        *(_open(make, Browser(port, secret, asked), ends, at / len(pages)) for at, make in enumerate(pages))
    )


async def _open(make: Callable[[Browser], "Page"], browser: Browser, ends: float, later: float) -> None:
    await asyncio.sleep(later * EVERY_S)
    page = make(browser)
    await browser.get("/api/me", "/api/me")
    while time.monotonic() < ends:
        await page.refresh()
        await asyncio.sleep(min(page.every_s, max(0.0, ends - time.monotonic())))
    browser.close()


class Page:
    """What is asked again and again."""

    every_s = EVERY_S

    def __init__(self, browser: Browser) -> None:
        self._get = browser.get
        self._at: dict[str, float] = {}

    async def refresh(self) -> None:
        """Once."""

    def _is_due(self, what: str, every_s: float = SELDOM_S) -> bool:
        if time.monotonic() - self._at.get(what, -WHOLE_S) < every_s:
            return False
        self._at[what] = time.monotonic()
        return True


class Overview(Page):
    """overview.js; who searches is given a thousand that have ended."""

    def __init__(self, browser: Browser, *, searches: bool) -> None:
        super().__init__(browser)
        self._ended = ("/api/jobs (ended, 1,000)", 1000) if searches else ("/api/jobs (ended, 50)", 50)

    async def refresh(self) -> None:
        """Jobs that live and nodes; now and then those that have ended, and the day."""
        await asyncio.gather(self._get("/api/jobs (live)", f"/api/jobs?limit=1000&{_LIVE}"), self._use())
        if self._is_due("ended"):
            route, most = self._ended
            await self._get(route, f"/api/jobs?limit={most}&{_ENDED}")

    async def _use(self) -> None:
        await self._get("/api/nodes", "/api/nodes")
        if self._is_due("use"):
            await self._get("/api/use (day)", "/api/use?hours=24")


class OneJob(Page):
    """job.js, curves.js and log.js."""

    def __init__(self, browser: Browser, life: Life) -> None:
        super().__init__(browser)
        self._life, self._offset, self._is_read = life, -END_BYTES, False
        self._path = f"/api/jobs/{life.number}"
        self.every_s = SELDOM_S if life.ended_s else EVERY_S

    async def refresh(self) -> None:
        """The job first, the rest at once."""
        await self._get("/api/jobs/N", self._path)
        wanted: list[Awaitable[Any]] = [self._curves(), self._log(), self._seldom()]
        if not self._life.ended_s:
            wanted.append(self._get("/api/jobs/N/ranks", f"{self._path}/ranks"))
        await asyncio.gather(*wanted)

    async def _curves(self) -> None:
        is_whole = self._is_due("whole", WHOLE_S)
        route = "/api/jobs/N/history (whole)" if is_whole else "/api/jobs/N/history (new)"
        if is_whole or not self._life.ended_s:
            since_s = self._life.created_s if is_whole else time.time() - 5
            await self._get(route, f"{self._path}/history?points=300&ranks=last&since={since_s}")

    async def _log(self) -> None:
        if self._is_read and self._life.ended_s:
            return
        for _ in range(PIECES):
            asked = f"{self._path}/log?rank=0&generation=1&offset={self._offset}"
            found = json.loads(await self._get("/api/jobs/N/log", asked))
            self._offset, self._is_read = found["next_offset"], not found["text"]
            if self._is_read:
                return

    async def _seldom(self) -> None:
        if self._is_due("seldom", WHOLE_S if self._life.ended_s else SELDOM_S):
            await asyncio.gather(
                self._get("/api/jobs/N/plan", f"{self._path}/plan"),
                self._get("/api/jobs/N/events", f"{self._path}/events"),
                self._get("/api/jobs/N/checkpoints", f"{self._path}/checkpoints"),
            )


class Cluster(Page):
    """cluster.js."""

    async def refresh(self) -> None:
        """Nodes, and who runs."""
        await asyncio.gather(
            self._get("/api/nodes", "/api/nodes"),
            self._get("/api/jobs (running)", f"/api/jobs?limit=1000&{_RUNNING}"),
        )


class Prometheus(Page):
    """Scrapes."""

    every_s = 15.0

    async def refresh(self) -> None:
        """Once."""
        await self._get("/metrics", "/metrics")


class Caller(Page):
    """`mimatrix jobs --all`, `metrics`, and a look at devices and at the week."""

    def __init__(self, browser: Browser, lives: Sequence[Life]) -> None:
        super().__init__(browser)
        self._lives, self._turn = lives, 0

    async def refresh(self) -> None:
        """One of them after the other."""
        life = self._lives[self._turn % len(self._lives)]
        node, device = f"node-{life.place:02d}", self._turn % RANKS
        asked = (
            ("/api/jobs (all, 1,000)", "/api/jobs?limit=1000"),
            ("/api/jobs (all, 50)", "/api/jobs?limit=50"),
            ("/api/use (week)", "/api/use?hours=168"),
            ("/api/devices/NODE/N", f"/api/devices/{node}/{device}"),
            ("/api/jobs/N/history (all ranks)", f"/api/jobs/{self._lives[0].number}/history?points=300"),
        )
        await self._get(*asked[self._turn % len(asked)])
        self._turn += 1
