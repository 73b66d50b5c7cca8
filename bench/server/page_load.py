"""How long pages of the dashboard take in a real browser until they can be used."""

import statistics
import time
from typing import Any

from playwright.sync_api import Browser, Page
from support.chromium import browser

_SHOWN = {"overview": ".jobs li", "cluster": ".device", "job": ".charts canvas"}
"""What a page has when it shows what it is for."""
# Ready is when it was shown and the browser had time for something else; times count from the navigation.
_WATCH = """
window.watched = {ready: 0, tasks: [], answers: []};
const watch = (type, list, more) => new PerformanceObserver((found) =>
  found.getEntries().forEach((each) => list.push(each.duration))).observe({type, buffered: true, ...more});
watch("longtask", watched.tasks);
watch("event", watched.answers, {durationThreshold: 16});
const look = () => {
  if (!document.querySelector(SHOWN)) return requestAnimationFrame(look);
  requestAnimationFrame(() => setTimeout(() => { watched.ready = performance.now(); }));
};
look();
"""


def measure(address: str, token: str, job: int, loads: int) -> dict[str, Any]:
    """Load each page: the first time, with an empty cache, and then again and again."""
    routes = {"overview": "#/", "cluster": "#/cluster", "job": f"#/jobs/{job}"}
    with browser() as chromium:
        return {name: _page(chromium, address, token, name, route, loads) for name, route in routes.items()}


def _page(chromium: Browser, address: str, token: str, name: str, route: str, loads: int) -> dict[str, Any]:
    context = chromium.new_context(viewport={"width": 1280, "height": 900})
    # A first visit with nothing in the cache, in a browser that has the token.
    context.add_init_script(f"sessionStorage.setItem('mimatrix-token', '{token}')")
    context.add_init_script(f"{{ const SHOWN = {_SHOWN[name]!r}; {_WATCH} }}")
    page = context.new_page()
    page.goto(f"{address}/{route}")
    cold = _watch_page(page, name)
    warm = []
    for _ in range(loads):
        page.reload()
        warm.append(_watch_page(page, name))
    context.close()
    return {
        "cold_ms": cold["ready"],
        "ready_ms": statistics.median(each["ready"] for each in warm),
        "slowest_ms": max(each["ready"] for each in warm),
        "longest_task_ms": max(max(each["tasks"], default=0.0) for each in (cold, *warm)),
        "answers_ms": max(max(each["answers"], default=0.0) for each in (cold, *warm)),
        "loads": loads,
    }


def _watch_page(page: Page, name: str) -> dict[str, Any]:
    """Return the timings of a page, with words typed into the overview's filter, and for several refreshes."""
    _wait(page, "watched.ready > 0")
    if name == "overview":
        before = page.locator(".jobs li").count()
        page.locator("#text").press_sequentially("vit 9", delay=60)
        _wait(page, f"document.querySelectorAll('.jobs li').length != {before}")
    page.wait_for_timeout(2500)
    found: dict[str, Any] = page.evaluate("watched")
    return found


def _wait(page: Page, is_so: str) -> None:
    """Wait for a condition, evaluated from outside: the page's policy forbids what it would run by itself."""
    deadline = time.monotonic() + 20
    while not page.evaluate(is_so):
        assert time.monotonic() < deadline, f"it never was that {is_so}"
        page.wait_for_timeout(10)
