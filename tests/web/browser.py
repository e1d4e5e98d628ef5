"""Debian's Chromium driven by Playwright, or a skip that says what is missing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

Browser = Any

ARGUMENTS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
             "--disable-background-networking", "--disable-component-update", "--disable-sync",
             "--autoplay-policy=no-user-gesture-required")  # fmt: skip


def chromium() -> str | None:
    """Where the browser is: $CHROMIUM, or as Debian installs it."""
    return os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")


def launch() -> Iterator[Browser]:
    """A browser, closed when the generator goes on."""
    api = pytest.importorskip("playwright.sync_api", reason="the browser tests need the package playwright")
    path = chromium()
    if path is None:
        pytest.skip("the browser tests need Chromium: `make browser` installs it")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(ARGUMENTS))
        yield browser
        browser.close()
