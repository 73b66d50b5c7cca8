"""Open dashboards, without their browsers: what each page requests, as often as its JavaScript does, and how long answers take.

In addition a Prometheus, and a command-line user who requests what pages request rarely.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from bench.server.load import read_response
from bench.server.synthetic_history import RANKS, SyntheticJob

EVERY_S = 2.0
SELDOM_S = 10.0
WHOLE_S = 60.0
PIECES = 16
END_BYTES = 65_536
_RUNNING = "&".join(f"state={each}" for each in ("starting", "profiling", "training", "saving"))
_LIVE = f"{_RUNNING}&state=queued&state=preempted"
_ENDED = "state=done&state=failed&state=cancelled"


@dataclass
class RequestStats:
    """The requests, by route, and how long each answer took."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    """Of the largest answers."""
    refused: list[str] = field(default_factory=list)


class DashboardClient:
    """The connections of one browser."""

    def __init__(self, port: int, secret: str, stats: RequestStats) -> None:
        self._port, self._stats = port, stats
        self._head = f"HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {secret}\r\n\r\n"
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def get(self, route: str, path: str) -> bytes:
        """Return the body of a response."""
        if not self._idle:
            # An answer may be larger than what a stream takes at once.
            self._idle.append(await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 22))
        reader, writer = self._idle.pop()
        began = time.perf_counter()
        writer.write(f"GET {path} {self._head}".encode())
        head, _, body = (await read_response(reader)).partition(b"\r\n\r\n")
        self._stats.seconds.setdefault(route, []).append(time.perf_counter() - began)
        self._stats.sizes[route] = max(len(body), self._stats.sizes.get(route, 0))
        self._idle.append((reader, writer))
        if not head.startswith(b"HTTP/1.1 200"):
            self._stats.refused.append(f"{path}: {head[:40]!r}")
        return body

    def close(self) -> None:
        """Close all connections."""
        for _, writer in self._idle:
            writer.close()


async def open_dashboards(
    port: int, secret: str, jobs: Sequence[SyntheticJob], seconds: float, stats: RequestStats
) -> None:
    """Open ten dashboards: five on all jobs, four on one job each, one on the cluster; and the two other clients."""
    ran = [job for job in jobs if job.started_s]
    ended = [job for job in ran if job.ended_s] or ran
    running = [job for job in ran if job.ended_s is None]
    pages: list[Callable[[DashboardClient], Page]] = [
        partial(OverviewPage, searches=viewer == 4) for viewer in range(5)
    ]
    pages += [partial(JobPage, job=job) for job in (running[0], running[-1], running[len(running) // 2], ended[-1])]
    pages += [ClusterPage, PrometheusScraper, partial(CommandLineUser, jobs=running)]
    ends = time.monotonic() + seconds
    await asyncio.gather(
        *(_open(make, DashboardClient(port, secret, stats), ends, at / len(pages)) for at, make in enumerate(pages))
    )


async def _open(make: Callable[[DashboardClient], "Page"], client: DashboardClient, ends: float, later: float) -> None:
    await asyncio.sleep(later * EVERY_S)
    page = make(client)
    await client.get("/api/me", "/api/me")
    while time.monotonic() < ends:
        await page.refresh()
        await asyncio.sleep(min(page.every_s, max(0.0, ends - time.monotonic())))
    client.close()


class Page:
    """A page that is refreshed again and again."""

    every_s = EVERY_S

    def __init__(self, client: DashboardClient) -> None:
        self._get = client.get
        self._at: dict[str, float] = {}

    async def refresh(self) -> None:
        """Send the requests of one refresh."""

    def _is_due(self, what: str, every_s: float = SELDOM_S) -> bool:
        if time.monotonic() - self._at.get(what, -WHOLE_S) < every_s:
            return False
        self._at[what] = time.monotonic()
        return True


class OverviewPage(Page):
    """The requests of overview.js; a search lists a thousand finished jobs."""

    def __init__(self, client: DashboardClient, *, searches: bool) -> None:
        super().__init__(client)
        self._ended = ("/api/jobs (ended, 1,000)", 1000) if searches else ("/api/jobs (ended, 50)", 50)

    async def refresh(self) -> None:
        """Request live jobs and nodes; from time to time finished jobs, and the use of the day."""
        await asyncio.gather(self._get("/api/jobs (live)", f"/api/jobs?limit=1000&{_LIVE}"), self._use())
        if self._is_due("ended"):
            route, most = self._ended
            await self._get(route, f"/api/jobs?limit={most}&{_ENDED}")

    async def _use(self) -> None:
        await self._get("/api/nodes", "/api/nodes")
        if self._is_due("use"):
            await self._get("/api/usage (day)", "/api/usage?hours=24")


class JobPage(Page):
    """The requests of job.js, curves.js and log.js."""

    def __init__(self, client: DashboardClient, job: SyntheticJob) -> None:
        super().__init__(client)
        self._job, self._offset, self._is_read = job, -END_BYTES, False
        self._path = f"/api/jobs/{job.number}"
        self.every_s = SELDOM_S if job.ended_s else EVERY_S

    async def refresh(self) -> None:
        """Request the job first, the rest at once."""
        await self._get("/api/jobs/N", self._path)
        wanted: list[Awaitable[Any]] = [self._curves(), self._log(), self._seldom()]
        if not self._job.ended_s:
            wanted.append(self._get("/api/jobs/N/ranks", f"{self._path}/ranks"))
        await asyncio.gather(*wanted)

    async def _curves(self) -> None:
        is_whole = self._is_due("whole", WHOLE_S)
        route = "/api/jobs/N/history (whole)" if is_whole else "/api/jobs/N/history (new)"
        if is_whole or not self._job.ended_s:
            since_s = self._job.created_s if is_whole else time.time() - 5
            await self._get(route, f"{self._path}/history?points=300&ranks=last&since={since_s}")

    async def _log(self) -> None:
        if self._is_read and self._job.ended_s:
            return
        for _ in range(PIECES):
            path = f"{self._path}/log?rank=0&generation=1&offset={self._offset}"
            part = json.loads(await self._get("/api/jobs/N/log", path))
            self._offset, self._is_read = part["next_offset"], not part["text"]
            if self._is_read:
                return

    async def _seldom(self) -> None:
        if self._is_due("seldom", WHOLE_S if self._job.ended_s else SELDOM_S):
            await asyncio.gather(
                self._get("/api/jobs/N/plan", f"{self._path}/plan"),
                self._get("/api/jobs/N/events", f"{self._path}/events"),
                self._get("/api/jobs/N/checkpoints", f"{self._path}/checkpoints"),
            )


class ClusterPage(Page):
    """The requests of cluster.js."""

    async def refresh(self) -> None:
        """Request nodes, and running jobs."""
        await asyncio.gather(
            self._get("/api/nodes", "/api/nodes"),
            self._get("/api/jobs (running)", f"/api/jobs?limit=1000&{_RUNNING}"),
        )


class PrometheusScraper(Page):
    """The scrapes of Prometheus."""

    every_s = 15.0

    async def refresh(self) -> None:
        """Scrape once."""
        await self._get("/metrics", "/metrics")


class CommandLineUser(Page):
    """`mimatrix jobs --all`, `metrics`, and a look at devices and at the week."""

    def __init__(self, client: DashboardClient, jobs: Sequence[SyntheticJob]) -> None:
        super().__init__(client)
        self._jobs, self._turn = jobs, 0

    async def refresh(self) -> None:
        """Send one of the requests, in turn."""
        job = self._jobs[self._turn % len(self._jobs)]
        node, device = f"node-{job.place:02d}", self._turn % RANKS
        requests = (
            ("/api/jobs (all, 1,000)", "/api/jobs?limit=1000"),
            ("/api/jobs (all, 50)", "/api/jobs?limit=50"),
            ("/api/usage (week)", "/api/usage?hours=168"),
            ("/api/devices/NODE/N", f"/api/devices/{node}/{device}"),
            ("/api/jobs/N/history (all ranks)", f"/api/jobs/{self._jobs[0].number}/history?points=300"),
        )
        await self._get(*requests[self._turn % len(requests)])
        self._turn += 1
