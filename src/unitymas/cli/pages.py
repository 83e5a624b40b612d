"""`unitymas view`, and `unitymas train` with the report and the live page of its run."""

from __future__ import annotations

import argparse
import webbrowser
from itertools import chain
from pathlib import Path

from ..benchmarks.pages import report, viewer
from ..benchmarks.pages.live import in_progress, serve, watching
from ..benchmarks.pages.trace_sources import labelled_episodes
from . import training
from .arguments import COUNT, PORT, Parser


def train_main(argv: list[str] | None = None) -> int:
    """Run `unitymas train`: the trainer's own command, and then the report of the run."""

    def report_of(directory: Path) -> None:
        report.build([directory], directory / "report.html")

    return training.train_main(argv or [], report_of, watching)


def view_main(argv: list[str] | None = None) -> int:
    """Run `unitymas view`: write the page beside the data and open it. A run in progress is served as a live page."""
    parser = Parser(prog="unitymas view", description="Look at episodes in the browser.")
    parser.add_argument(
        "source", type=Path, help="run directory, evaluation, or trace file (.jsonl, .jsonl.zst, .json)"
    )
    parser.add_argument(
        "beside", type=Path, nargs="*", help="further sources to compare with, such as after beside before"
    )
    parser.add_argument(
        "-o", "--out", type=Path, help="where to write the page (default: view.html in the source)"
    )
    parser.add_argument("--headline", help="metric to show as the score")
    parser.add_argument("--limit", type=COUNT, help="largest number of episodes of each source")
    parser.add_argument("--no-open", action="store_true", help="do not start a browser")
    parser.add_argument(
        "--live",
        action=argparse.BooleanOptionalAction,
        help="show a page that refreshes itself, on a local server (default: for a run in progress)",
    )
    parser.add_argument("--port", type=PORT, default=0, help="port of the local server (default: a free one)")
    given = parser.parse_intermixed_args(argv)
    sources = [given.source, *given.beside]
    if given.live and (given.beside or given.out or given.source.is_file()):
        parser.error("--live shows one run's directory, without --out")
    if given.live or (
        given.live is None and not (given.beside or given.out or given.no_open) and in_progress(given.source)
    ):
        return serve(given.source, given.port, open_browser=not given.no_open)
    out = given.out or (given.source if given.source.is_dir() else given.source.parent) / "view.html"
    episodes = labelled_episodes(sources, limit=given.limit)
    first = next(episodes, None)
    if first is None:
        raise ValueError(
            f"{', '.join(map(str, sources))}: no episode there; give a run directory or a file of traces"
        )
    viewer.build_labelled(
        chain([first], episodes),
        out,
        title=" and ".join(s.name or str(s) for s in sources),
        headline=given.headline,
    )
    print(f"{out}  ({out.stat().st_size / 1e6:.1f} MB)")
    if not given.no_open:
        webbrowser.open(out.resolve().as_uri())
    return 0
