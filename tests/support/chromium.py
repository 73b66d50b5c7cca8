"""A Chromium without a window, for tests and measurements of the dashboard."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, sync_playwright

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
"""Its program, or None if none is installed."""


@contextmanager
def browser() -> Iterator[Browser]:
    """Start one, and close it at the end."""
    with sync_playwright() as playwright:
        # Where root runs it, in a container, Chromium has no sandbox of its own.
        found = playwright.chromium.launch(executable_path=CHROMIUM, chromium_sandbox=os.getuid() != 0)
        try:
            yield found
        finally:
            found.close()
