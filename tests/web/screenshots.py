"""Pictures of the page for the documentation: `python -m tests.web.screenshots RUNS [FOLDER]`.

RUNS should hold two or three trained music runs and a trained text run; the best by validation are shown.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

from deeprnn.web.limits import Limits
from tests.web.browser import launch
from tests.web.conftest import Server, serve

DESKTOP = {"width": 1280, "height": 860}
PHONE = {"width": 390, "height": 844}


def choose(server: Server) -> tuple[list[str], str]:
    """Two or three music runs, and a text run."""

    def best(*kinds: str) -> list[str]:
        runs = [e.summary for e in server.page.library.entries()]
        fit = [r for r in runs if r.get("kind") in kinds and r.get("playable") and "/" not in r["name"]]
        return [r["id"] for r in sorted(fit, key=lambda r: r["valid"] or 1e9)]

    music, text = best("music"), best("char") or best("word")
    if len(music) < 2 or not text:
        raise SystemExit("the folder must hold two playable music runs and a text run")
    return music[:3], text[0]


class Camera:
    """Opens the page in a fresh window and writes what it shows."""

    def __init__(self, browser: Any, server: Server, folder: Path) -> None:
        self.browser, self.server, self.folder = browser, server, folder

    def open(
        self, path: str, scheme: str = "light", viewport: dict[str, int] | None = None, ratio: int = 1
    ) -> Any:
        context = self.browser.new_context(
            color_scheme=scheme, viewport=viewport or DESKTOP, device_scale_factor=ratio, has_touch=ratio > 1
        )
        page = context.new_page()
        page.goto(f"{self.server.url}/#/{path}")
        page.wait_for_selector("article, .home")
        page.wait_for_timeout(700)
        return page

    def take(self, page: Any, name: str) -> None:
        """As PNG, pressed as small as it goes."""
        from PIL import Image

        shot = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
        shot.save(self.folder / f"{name}.png", optimize=True)
        page.context.close()


def music(camera: Camera, a: str) -> None:
    """The roll at light, playing at dark, and on a phone."""
    for name, scheme, viewport, ratio in (
        ("page-music-light", "light", DESKTOP, 1),
        ("page-music-dark", "dark", DESKTOP, 1),
        ("page-phone", "dark", PHONE, 2),
    ):
        page = camera.open(f"run/{a}", scheme, viewport, ratio)
        page.locator("#length").fill("22")
        page.locator("#continue").click()
        page.wait_for_selector("text=/22 frames in/")
        page.wait_for_selector("text=/surprise \\d/")
        page.evaluate("window.scrollTo(0, 0)")
        if viewport is PHONE:
            page.locator(".bench").evaluate("el => window.scrollTo(0, el.offsetTop - 70)")
        if scheme == "dark":
            page.locator("button.play").first.click()
            page.wait_for_timeout(4200)
        camera.take(page, name)


def compare(camera: Camera, runs: list[str]) -> None:
    """The same beginning continued by all, the best last."""
    viewport = {**DESKTOP, "height": 260 + 360 * len(runs)}
    page = camera.open("compare/" + "/".join(reversed(runs)), "light", viewport)
    page.locator("#continue").click()
    page.wait_for_selector("text=/frames in/")
    page.wait_for_timeout(600)
    page.locator(".bench").evaluate("el => window.scrollTo(0, el.offsetTop - 70)")
    page.wait_for_timeout(200)
    camera.take(page, "page-compare")


def text(camera: Camera, run: str) -> None:
    """Text going on, with the alternatives of one symbol."""
    page = camera.open(f"run/{run}", "dark")
    page.locator("#continue").click()
    page.wait_for_timeout(2500)
    page.locator(".tok").nth(46).hover()
    page.wait_for_timeout(200)
    camera.take(page, "page-text-dark")


def main(runs: str, folder: str = "docs/images") -> None:
    """Take them all."""
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    running, browsers = serve(Path(runs), Limits()), launch()
    server = next(running)
    camera = Camera(next(browsers), server, place)
    songs, letters = choose(server)
    a = songs[0]
    camera.take(camera.open(""), "page-overview")
    page = camera.open(f"run/{a}")
    page.locator("#learning").evaluate(
        "el => window.scrollTo(0, el.getBoundingClientRect().top + scrollY - 90)"
    )
    page.wait_for_timeout(300)
    camera.take(page, "page-learning")
    music(camera, a)
    compare(camera, songs)
    text(camera, letters)
    next(browsers, None)
    next(running, None)


if __name__ == "__main__":
    main(*sys.argv[1:])
