"""Make the pictures of docs/dashboard.md anew: `make pictures`, on a quiet machine."""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS))

from playwright.sync_api import Browser  # noqa: E402
from support.browsers import DESK, PHONE, Visit, browser, visit  # noqa: E402
from support.clusters import node  # noqa: E402
from support.servers import SCRIPTS, ServerProcess, server  # noqa: E402

from mimatrix.api.models import JobState  # noqa: E402

PICTURES = TESTS.parent / "docs" / "pictures"
SHOWN = Path(__file__).parent / "scripts" / "shown.py"
CLUSTER = (1280, 890)


def main() -> None:
    """Run a few jobs of a small team, and take pictures of what the team sees of them."""
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        server(Path(folder) / "data", devices=4) as up,
        browser() as chromium,
    ):
        ann, ben = (_token(up, name) for name in ("ann", "ben"))
        _hand_in(up, ben, "warm-up", SCRIPTS / "hello.py", "1")
        _hand_in(up, ann, "broken", SCRIPTS / "failing.py", "1")
        first = _hand_in(up, ann, "mlp-planned", SHOWN, "2", "150", "planned")
        up.until(first, lambda job: job.progress.step > 0)
        other = _hand_in(up, ben, "sweep-1", SCRIPTS / "patient.py", "1", "400")
        _hand_in(up, ben, "sweep-2", SCRIPTS / "patient.py", "4", "400")
        _hand_in(up, ann, "large", SCRIPTS / "patient.py", "a100:8", "400")
        time.sleep(80)
        _shoot(chromium, up, ann, "#/", "jobs")
        _shoot(chromium, up, ann, "#/", "phone", size=PHONE)
        _shoot(chromium, up, ann, f"#/jobs/{first}", "job", down_to=".job > .log")
        nodes = _cluster(first, other)
        _shoot(chromium, up, ann, "#/cluster", "cluster", scheme="dark", size=CLUSTER, nodes=nodes)
        up.until(first, lambda job: job.state is JobState.DONE, within_s=150)
        second = _hand_in(up, ann, "mlp-even", SHOWN, "2", "80", "even", priority=100)
        up.until(second, lambda job: job.progress.step > 0)
        time.sleep(60)
        _shoot(chromium, up, ann, f"#/jobs/{second}", "slow", down_to=".two")
        up.until(second, lambda job: job.state is JobState.DONE, within_s=150)
        third = _hand_in(up, ann, "groups", SCRIPTS / "in_groups.py", "3", priority=100, groups="0/1/2")
        up.until(third, lambda job: job.progress.step > 0)
        time.sleep(45)
        _shoot(chromium, up, ann, f"#/jobs/{third}", "groups", down_to=".job > .two")


def _token(up: ServerProcess, user: str) -> str:
    secret: str = json.loads(up.command("tokens", "add", user, "--role", "user", "--json").stdout)["secret"]
    return secret


def _hand_in(
    up: ServerProcess,
    token: str,
    name: str,
    script: Path,
    devices: str,
    *arguments: str,
    priority: int = 50,
    groups: str = "",
) -> int:
    options = ("--name", name, "--devices", devices, "--priority", str(priority), "--groups", groups, "--json")
    done = subprocess.run(
        [sys.executable, "-m", "mimatrix.cli.main", "submit", *options, str(script), "--", *arguments],
        env={**os.environ, "MIMATRIX_DATA": str(up.data), "MIMATRIX_SERVER": "", "MIMATRIX_TOKEN": token},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    number: int = json.loads(done.stdout)["id"]
    return number


def _shoot(
    chromium: Browser,
    up: ServerProcess,
    token: str,
    route: str,
    name: str,
    *,
    size: tuple[int, int] = DESK,
    scheme: Literal["light", "dark"] = "light",
    down_to: str = "",
    nodes: list[dict[str, Any]] | None = None,
) -> None:
    with visit(chromium, f"http://127.0.0.1:{up.port}", size, scheme) as seen:
        if nodes:
            seen.page.route("**/api/nodes", lambda route: route.fulfill(json=nodes))
        seen.sign_in(token)
        seen.go(route)
        seen.page.wait_for_timeout(4000)
        if down_to:
            seen.page.set_viewport_size({"width": size[0], "height": _end_of(seen, down_to) + 20})
            seen.page.wait_for_timeout(500)
        seen.page.screenshot(path=PICTURES / f"dashboard-{name}.png")


def _cluster(first: int, other: int) -> list[dict[str, Any]]:
    """More machines than a test has, some of them busy."""
    found = [
        node("gpu-1", 4, rack="rack-a", jobs=(first,) * 4, link=(1.1e9, 1.08e9, 1.25e9)),
        node("gpu-2", 4, rack="rack-a", jobs=(first, first, None, other), link=(4.1e8, 4.3e8, 1.25e9)),
        node("gpu-3", 4, rack="rack-a"),
        node("old-1", 8, rack="rack-b", kind="V100", jobs=(other,) * 8, link=(2.1e6, 1.0e6, 1.25e8)),
        node("old-2", 2, rack="rack-b", kind="V100") | {"answers": False},
    ]
    spread = random.Random(5)
    for device in (device for each in found for device in each["devices"] if device["use"]):
        device["use"] = device["use"] | {"busy": spread.uniform(0.4, 0.98)}
        device["moved_bytes_per_s"] = spread.uniform(2e8, 3e8) if device["kind"] == "A100" else spread.uniform(1e5, 3e5)
    found[-1]["seen_at"] = datetime.fromtimestamp(time.time() - 190, UTC).isoformat()
    return found


def _end_of(seen: Visit, selector: str) -> int:
    box = seen.page.locator(selector).first.bounding_box()
    assert box
    return int(box["y"] + box["height"])


if __name__ == "__main__":
    main()
