"""A real browser on a real server, which remembers whom it asked and what went wrong."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, ConsoleMessage, Page, expect

from support.chromium import CHROMIUM
from support.chromium import browser as browser

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: apt-get install chromium")
# Machines that test are busy ones.
expect.set_options(timeout=20_000)
DESK = (1280, 900)
PHONE = (360, 740)


@dataclass
class Visit:
    """One page, from its first request on."""

    page: Page
    origin: str
    hosts: set[str] = field(default_factory=set)
    errors: list[str] = field(default_factory=list)

    def go(self, route: str) -> None:
        self.page.goto(f"{self.origin}/{route}")

    def sign_in(self, token: str) -> None:
        self.go(f"#token={token}")
        self.page.wait_for_selector("#who:not([hidden])")

    def is_wider_than_the_screen(self) -> bool:
        return bool(self.page.evaluate("document.documentElement.scrollWidth > innerWidth"))

    def barriers(self) -> list[str]:
        """Return what axe finds that keeps people out."""
        found = Axe().run(self.page).response["violations"]
        return [
            f"{each['id']} ({each['impact']}): {[node['html'][:160] for node in each['nodes'][:3]]}"
            for each in found
            if each["impact"] in ("serious", "critical")
        ]


@contextmanager
def visit(
    browser: Browser, origin: str, size: tuple[int, int] = DESK, scheme: Literal["light", "dark"] = "light"
) -> Iterator[Visit]:
    """At its end nobody else was asked, and nothing went wrong in the page."""
    context = browser.new_context(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme)
    context.set_default_timeout(20_000)
    found = Visit(context.new_page(), origin)

    def heard(message: ConsoleMessage) -> None:
        # A request that the server refused is told by the page itself.
        if message.type == "error" and not message.text.startswith("Failed to load resource"):
            found.errors.append(message.text)

    found.page.on("request", lambda request: found.hosts.add(urlsplit(request.url).netloc))
    found.page.on("console", heard)
    found.page.on("pageerror", lambda error: found.errors.append(str(error)))
    yield found
    context.close()
    assert found.errors == []
    assert found.hosts == {urlsplit(origin).netloc}
