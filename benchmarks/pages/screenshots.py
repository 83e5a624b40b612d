"""Screenshots for the documentation, from a run and from our board.

    make demo
    python -m unitymas.benchmarks.pages.screenshots runs/demo/mask-hotpotqa-shared-seed0 docs/images

It needs Playwright (``pip install playwright``) and a Chromium: its own, or the one on the path.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..leaderboard import board as leaderboard
from . import viewer
from .trace_sources import labelled_episodes

if TYPE_CHECKING:
    from playwright.sync_api import Page

WIDTH, HEIGHT = 1400, 900


def main(argv: Sequence[str]) -> int:
    """Draw the pictures: RUN [FOLDER]."""
    if not argv:
        print(__doc__, file=sys.stderr)
        return 2
    run, folder = Path(argv[0]), Path(argv[1] if len(argv) > 1 else "docs/images")
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as playwright:
        pages = Path(scratch)
        viewer.build_labelled(labelled_episodes([run]), pages / "view.html", title=run.name)
        leaderboard.build("benchmarks/submissions", pages / "site")
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, device_scale_factor=1.5)

        def show(file: Path, address: str = "") -> None:
            page.goto("about:blank")
            page.goto(file.as_uri() + address)
            page.wait_for_selector("html[data-ready]")

        show(pages / "view.html")
        page.screenshot(path=folder / "viewer.png")
        page.locator(".graph").screenshot(path=folder / "team.png")
        _side_by_side(page)
        page.screenshot(path=folder / "viewer-compare.png")
        show(pages / "view.html", "#part=train")
        _coloured_reply(page)
        page.locator(".detail").screenshot(path=folder / "viewer-tokens.png")
        show(pages / "site/index.html")
        page.screenshot(path=folder / "leaderboard.png")
        browser.close()
    print(*sorted(str(file) for file in folder.glob("*.png")), sep="\n")
    return 0


def _side_by_side(page: Page) -> None:
    page.get_by_role("button", name="side by side").click()
    page.wait_for_selector(".episode[data-side=b]")


def _coloured_reply(page: Page) -> None:
    """Open the searcher's reply in the first training episode, with coloured tokens."""
    page.locator(".row").first.click()
    page.wait_for_selector(".episode .graph")
    page.locator(".node", has_text="tok").nth(2).click()
    page.wait_for_selector(".tok")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
