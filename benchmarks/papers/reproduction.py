"""Grid of conditions × seeds: run the missing cells, store the results, and write one page.

A paper's file declares a `Paper`: the conditions as plain settings, the claims to judge, and `play(settings, seed, folder)`,
which runs one cell. `texts/<name>.md` holds its words, also the expected result, which is written before the first run.
`command(PAPER)` does the rest. A cell is written to `results/<name>.json` when it is finished, under a hash of its settings. It
runs again only if these change.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import math
import platform
import shutil
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ...agents.basics.hints import counted
from ...agents.basics.json_types import JsonObject, JsonView
from ..evaluation.identity import this_run
from ..evaluation.stats import student_quantile
from ..pages.html import write_page
from ..speed.clock import Seconds

HERE = Path(__file__).resolve()
CHECKOUT = (HERE.parents[2] / "docs").is_dir()
RESULTS = HERE.parent / "results" if CHECKOUT else Path("papers")
PAGES = HERE.parents[2] / "docs" / "papers" if CHECKOUT else Path("papers")
"""Folder of the pages: the docs of a checkout, or the current folder where the package is installed."""

ConditionSettings = JsonView
"""Settings of a condition, as its paper's `play` reads them."""
CellFigures = JsonObject
"""Figures of a cell: `final`, numbers by name, and `curve`, pairs of (step, the paper's metric)."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """Claim that condition `better` has a higher `metric` than `worse` (a lower one if `less`), compared seed by seed.

    If `worse` is empty, the metric of `better` is itself a difference, and the claim is that it is above 0.
    """

    says: str
    better: str
    worse: str
    metric: str = ""
    less: bool = False
    margin: float = 0.0
    """Largest distance below that still counts as no worse."""


@dataclass(frozen=True, kw_only=True)
class Paper:
    """Comparison on one page."""

    name: str
    title: str
    source: str
    expected: str
    """Expected direction of each result, and why. Written and committed before the first run of the grid."""
    conditions: Mapping[str, tuple[str, ConditionSettings]]
    """Conditions by name: a line that describes the condition, and its settings."""
    claims: tuple[Claim, ...]
    play: Callable[[ConditionSettings, int, Path], CellFigures]
    metric: str
    """Metric of the curves, and of claims that name no other."""
    columns: tuple[str, ...] = ()
    """Further figures of the table."""
    answer: str = ""
    """Main findings in one or two sentences, at the top of the page."""
    setting: str = ""
    """The task, the models and the sizes."""
    reading: str = ""
    """Text on what the figures show and what they do not, written after the runs."""


def texts(name: str, **values: object) -> dict[str, str]:
    """Return title, source and sections of `texts/NAME.md`, as fields of a `Paper`. `values` fill the fields in braces."""
    text = (HERE.parent / "texts" / f"{name}.md").read_text(encoding="utf-8")
    head, *sections = (text.format(**values) if values else text).split("\n## ")
    title, source = head.split("\n", 1)
    pairs = (section.split("\n", 1) for section in sections)
    return {
        "title": title.removeprefix("# "),
        "source": source.strip(),
        **{heading.lower(): words.strip() for heading, words in pairs},
    }


class Mean(NamedTuple):
    """Mean over seeds with Student's 95% interval. With fewer than two seeds there is no interval."""

    value: float
    half: float | None
    n: int

    def __str__(self) -> str:
        digits = 3 if abs(self.value) < 1000 else 0  # a count needs no decimals
        return f"{self.value:.{digits}f}" + ("" if self.half is None else f" ± {self.half:.{digits}f}")


def mean_of(values: Sequence[float]) -> Mean:
    """Return the mean over seeds. Tasks are not counted as independent, because the tasks of a run share one model."""
    n = len(values)
    if n < 2:
        return Mean(statistics.fmean(values), None, n)
    half = -student_quantile(0.025, n - 1) * statistics.stdev(values) / math.sqrt(n)
    return Mean(statistics.fmean(values), half, n)


# running ----------------------------------------------------------------------------------------------


def key_of(settings: ConditionSettings) -> str:
    """Return a hash of a condition's settings."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


def load(paper: Paper) -> dict[str, CellFigures]:
    """Return the finished cells of the paper's conditions by "condition/seed"."""
    path = RESULTS / f"{paper.name}.json"
    cells: dict[str, CellFigures] = json.loads(path.read_text())["cells"] if path.exists() else {}
    return {name: cell for name, cell in cells.items() if name.rpartition("/")[0] in paper.conditions}


def outdated(paper: Paper, cells: Mapping[str, CellFigures]) -> set[str]:
    """Return the cells whose settings have changed since. They stay on the page, marked, until they are run again."""
    today = {name: key_of(settings) for name, (_, settings) in paper.conditions.items()}
    return {name for name, cell in cells.items() if today[name.rpartition("/")[0]] != cell["settings"]}


def save(paper: Paper, cells: Mapping[str, CellFigures]) -> None:
    """Write the cells by one rename, so that a kill leaves the file readable."""
    # a line for each cell
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(cells[name])}" for name in sorted(cells))
    whole = f'{{"paper": {json.dumps(paper.name)}, "cells": {{\n{lines}\n}}}}\n'
    write_page(RESULTS / f"{paper.name}.json", [whole])


def run(paper: Paper, seeds: Sequence[int], only: Sequence[str], folder: Path) -> None:
    """Run every missing cell, seed by seed, so that a grid that is stopped early is still balanced."""
    for seed in seeds:
        for name in only or paper.conditions:
            cells = load(paper)
            if f"{name}/{seed}" in cells.keys() - outdated(paper, cells):
                continue
            _, settings = paper.conditions[name]
            where = folder / paper.name / f"{name}-{seed}"
            shutil.rmtree(where, ignore_errors=True)  # an interrupted cell begins again
            where.mkdir(parents=True)
            started = Seconds.now()
            figures = paper.play(settings, seed, where)
            took = Seconds.now().since(started)
            cell = {
                "settings": key_of(settings),
                **figures,
                "wall_seconds": round(took.wall, 1),
                "cpu_seconds": round(took.processor, 1),
                "date": datetime.date.today().isoformat(),
                "machine": machine(),
            }
            # read again, because another process may fill the same grid
            save(paper, load(paper) | {f"{name}/{seed}": cell})
            shutil.rmtree(where)
            print(f"{paper.name}  {name}/{seed}  {figures['final']}", flush=True)


def machine() -> str:
    """Return the name of this machine's processor."""
    here = this_run()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.partition(": ")[2] for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    return f"{model}, {here['cpus']} cores, Python {here['python']}"


# judging ----------------------------------------------------------------------------------------------


def finals(cells: Mapping[str, CellFigures], condition: str, metric: str) -> dict[int, float]:
    """Return a condition's final figure for each seed."""
    return {
        int(name.rpartition("/")[2]): cell["final"][metric]
        for name, cell in cells.items()
        if name.rpartition("/")[0] == condition and metric in cell["final"]
    }


def judged(paper: Paper, claim: Claim, cells: Mapping[str, CellFigures]) -> tuple[str, Mean | None]:
    """Return the verdict on a claim, and the difference over the seeds that both conditions have."""
    metric = claim.metric or paper.metric
    better = finals(cells, claim.better, metric)
    worse = finals(cells, claim.worse, metric) if claim.worse else dict.fromkeys(better, 0.0)
    shared = sorted(better.keys() & worse.keys())
    if not shared:
        return "not run", None
    sign = -1.0 if claim.less else 1.0
    gap = mean_of([sign * (better[s] - worse[s]) for s in shared])
    if gap.half is None:
        return "one seed", gap
    if gap.value - gap.half > -claim.margin:
        return "holds", gap
    return ("the opposite holds" if gap.value + gap.half < 0 else "not shown"), gap


# the page ---------------------------------------------------------------------------------------------


def _older(cells: set[str]) -> list[str]:
    """Return the note below the table about cells of older settings."""
    if not cells:
        return []
    return [
        f"† {counted(len(cells), 'cell')} of these rows ran with older settings. The command runs them again.\n"
    ]


def page(paper: Paper, cells: Mapping[str, CellFigures]) -> str:
    """Return the page as Markdown."""
    columns = (paper.metric, *paper.columns)
    seeds = sorted({int(name.rpartition("/")[2]) for name in cells})
    old = outdated(paper, cells)
    lines = [
        f"# {paper.title}\n",
        f"This page tests claims of {paper.source}. {paper.answer}\n",
        f"The command below runs the grid, and writes this page from `benchmarks/papers/results/{paper.name}.json`:\n",
        f"    python -m unitymas.benchmarks.papers.{paper.name} --seeds {' '.join(map(str, seeds)) or '0 1 2'}\n",
        f"## Setting\n\n{paper.setting}\n",
        f"## Expected, written before the first run\n\n{paper.expected}\n",
        "## Result\n",
        f"| condition | | seeds | {' | '.join(columns)} |",
        f"|---|---|--:|{'--:|' * len(columns)}",
    ]
    for name, (says, _) in paper.conditions.items():
        cells_found = [finals(cells, name, c) for c in columns]
        shown = [str(mean_of(list(f.values()))) if f else "–" for f in cells_found]
        mark = " †" if any(cell.startswith(f"{name}/") for cell in old) else ""
        lines.append(f"| {name}{mark} | {says} | {len(cells_found[0])} | {' | '.join(shown)} |")
    lines += [
        "\nMeans over seeds ± half of Student's 95% interval.\n",
        *_older(old),
        "| claim | difference, seed by seed, in the claimed direction | verdict |",
        "|---|--:|---|",
    ]
    for claim in paper.claims:
        verdict, gap = judged(paper, claim, cells)
        sign = "less " if claim.less else ""
        difference = "–" if gap is None else str(gap)
        compared = f"{sign}{claim.metric or paper.metric}: {claim.better}" + f" against {claim.worse}" * bool(
            claim.worse
        )
        lines.append(f"| {claim.says} ({compared}) | {difference} | **{verdict}** |")
    lines.append(
        "\n*holds*: the interval of the paired difference lies above 0. *not shown*: the interval contains 0. The intervals "
        "are not corrected for the number of claims.\n"
    )
    if (PAGES / f"{paper.name}.png").exists():
        lines.append(f"![{paper.title}]({paper.name}.png)\n")
    if not cells:
        lines.append("**No cell of this grid has been run yet.**\n")
    if paper.reading:
        lines.append(f"## What it shows, and what not\n\n{paper.reading}\n")
    if cells:
        wall = sum(cell["wall_seconds"] for cell in cells.values())
        cpu = sum(cell["cpu_seconds"] for cell in cells.values())
        dates = sorted({cell["date"] for cell in cells.values()})
        machines = "; ".join(sorted({cell["machine"] for cell in cells.values()}))
        lines.append(
            f"{len(cells)} of {len(paper.conditions) * max(1, len(seeds))} cells, seeds {', '.join(map(str, seeds))}: "
            f"{cpu / 60:.1f} CPU minutes, {wall / 60:.0f} minutes of wall-clock time on a shared machine ({machines}), "
            f"{' to '.join(dict.fromkeys((dates[0], dates[-1])))}."
        )
    return "\n".join(lines).rstrip() + "\n"


def plot(paper: Paper, cells: Mapping[str, CellFigures], path: Path) -> bool:
    """Draw the mean curve of every condition, with a band from the lowest to the highest seed.

    Return False if matplotlib is not installed.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return False
    figure, axes = plt.subplots(figsize=(7, 4), dpi=120)
    for name in paper.conditions:
        curves = [c["curve"] for n, c in cells.items() if n.rpartition("/")[0] == name and c.get("curve")]
        if not curves:
            continue
        steps = [step for step, _ in curves[0]]
        rows = [[value for _, value in curve] for curve in curves if len(curve) == len(steps)]
        columns = list(zip(*rows, strict=True))
        (line,) = axes.plot(steps, [statistics.fmean(c) for c in columns], label=name, linewidth=1.5)
        axes.fill_between(
            steps, [min(c) for c in columns], [max(c) for c in columns], alpha=0.12, color=line.get_color()
        )
    axes.set(xlabel="step", ylabel=f"held-out {paper.metric}", title=paper.title)
    axes.legend(frameon=False, fontsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
    return True


# the command ------------------------------------------------------------------------------------------


def command(paper: Paper, argv: Sequence[str] | None = None) -> int:
    """Run the command of a paper's file."""
    parser = argparse.ArgumentParser(f"unitymas.benchmarks.papers.{paper.name}", description=paper.title)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", default=[], choices=list(paper.conditions), metavar="CONDITION")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/papers"), help="where runs live while they run"
    )
    parser.add_argument("--page", action="store_true", help="only write the page from the finished cells")
    parser.add_argument("--list", action="store_true", help="the conditions, and which cells are finished")
    args = parser.parse_args(argv)
    if args.list:
        cells = load(paper)
        done = cells.keys() - outdated(paper, cells)
        for name, (says, _) in paper.conditions.items():
            seeds = sorted(int(n.rpartition("/")[2]) for n in done if n.rpartition("/")[0] == name)
            print(f"{name:28} seeds {seeds}  {says}")
        return 0
    if not args.page:
        run(paper, args.seeds, args.only, args.folder)
    cells = load(paper)
    PAGES.mkdir(parents=True, exist_ok=True)
    if cells:
        plot(paper, cells, PAGES / f"{paper.name}.png")
    (PAGES / f"{paper.name}.md").write_text(page(paper, cells))
    print(f"wrote {PAGES / paper.name}.md from {len(cells)} cells", file=sys.stderr)
    return 0
