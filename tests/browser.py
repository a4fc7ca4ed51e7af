"""A headless Chromium of this machine (Debian: apt-get install chromium), driven by Playwright."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

BINARY = Path("/usr/bin/chromium")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]


def require_chromium() -> None:
    """Skip the test, with a reason, where there is no Chromium; fail it in CI, where there must be one."""
    if BINARY.exists():
        return
    if os.environ.get("CI") == "true":  # noqa: TID251
        pytest.fail("chromium is not installed; CI installs it (.ci/run)")
    pytest.skip("chromium is not installed (Debian: apt-get install chromium)")


@asynccontextmanager
async def chromium() -> AsyncIterator:
    """A browser that knows nothing yet."""
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=str(BINARY), args=FLAGS)
        try:
            yield browser
        finally:
            await browser.close()
