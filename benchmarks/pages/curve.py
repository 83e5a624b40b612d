"""Learning curves of finished runs of `unitymas train`: held-out score over steps, as a table, a picture, and a page.

    python -m unitymas.benchmarks.pages.curve runs/mask-hotpotqa-1 --out docs/images/readme-train.png
    python -m unitymas.benchmarks.pages.curve runs/rag-nq-1 --record 'unitymas train rag-nq --preset shared'

Of each run: its score on held-out tasks before and after, with the 95% interval of the difference over tasks. `--record`
keeps the figures in `benchmarks/results/curves.json`, beside the command of the run. From this file `make docs` writes the
page `docs/curves.md` and what each environment's page says about training. `--draw FILE` draws all recorded curves.
"""

from __future__ import annotations

import argparse
import json
import math
import textwrap
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NotRequired, TypedDict

from ...agents.basics.hints import counted
from ...envs.registry import spec
from ...trainers.config.reader import ConfigTree
from ...trainers.config.schema import read_yaml
from ..demo import figures, plot, summary
from .html import escape

RECORDS = Path(__file__).parent.parent / "results" / "curves.json"


class Curve(TypedDict):
    """Held-out score of one training run, beside the command that was typed."""

    command: str
    env: str
    headline: str
    seed: int
    date: str
    questions: int
    curve: list[tuple[int, float]]
    gain: NotRequired[tuple[float, float, float]]
    """Difference between last and first score, and its 95% interval over tasks."""
    minutes: float
    stopped: NotRequired[tuple[int, str]]
    """Step after which the run stopped by itself, and why."""
    note: NotRequired[str]


class Untried(TypedDict):
    """A command of the documentation that was not run."""

    command: str
    why: str


class Records(TypedDict):
    """Contents of `curves.json`."""

    curves: list[Curve]
    not_run: list[Untried]


INTRODUCTION = """\
# Training commands and their curves

Every `unitymas train` command of the README and of this documentation, with what it gave. Written by `make docs` from
`benchmarks/results/curves.json`. A test compares the pages with this list (`tests/docs/test_curves.py`).

Each command was run as it stands here, once, with seed 0 if it names no other. *Start* and *end* are the score on held-out tasks before the first
step and after the last, greedily; *between* are the validations between them. The gain has a 95% interval over tasks. It does
not hold the chance of another seed: seeds and controls are on the page of [the demo](demo.md). If no other model is named, the
[embedded tiny model](tiny-model.md) is trained, on generated data of the [mini world](mini-world.md). Minutes are those of the
steps by the clock, without validations, on two cores beside other work (an AMD EPYC on 23 November 2026), so they are no measure
of speed. `--watch` and `--dir` change nothing of a run and are left out. So are commands with `--dry-run`, which train nothing, and commands with a placeholder, such
as `ID` or `PATH`, which show how something is written. What was not run on GPUs and clusters stands on the pages about them.

![Held-out score over the steps of each command](images/curves.png)
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, draw the picture, and store the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--out", type=Path, help="a PNG")
    parser.add_argument("--record", metavar="COMMAND", help="keep the run's figures beside this command")
    parser.add_argument("--note", default="", help="a sentence for the table, with --record")
    parser.add_argument("--draw", type=Path, metavar="PNG", help="draw all recorded curves")
    args = parser.parse_args(argv)
    if not args.runs and args.draw is None:
        parser.error("name a run's directory, such as runs/rag-nq-1, or --draw FILE.png")
    results = [row(run) for run in args.runs]
    if len({env for env, _ in results}) > 1:
        parser.error("one picture shows runs of one environment")
    if results:
        env, rows = results[0][0], [figures for _, figures in results]
        print(summary(env, rows))
        for r in rows:
            print(f"seed {r['seed']}: " + ", ".join(f"step {step} {score:.3f}" for step, score in r["curve"]))
        if args.out is not None:
            plot(env, rows, args.out)
    if args.record is not None:
        if len(args.runs) != 1:
            parser.error("--record: name one run")
        if results[0][1]["ending"] == "":
            parser.error(f"--record: {args.runs[0]} has not ended")
        record(args.record, args.runs[0], results[0], args.note)
    if args.draw is not None:
        draw(args.draw)
    return 0


def row(run: Path) -> tuple[str, ConfigTree]:
    """Return the environment of a run, and its figures in the form of the demo."""
    config = read_yaml(run / "config.yaml")
    env = config["env"]["id"]
    history = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    seconds = sum(h.get("time/step", 0.0) for h in history if h.get("kind") == "step")
    headline = history[0].get("headline") or spec(env).headline
    numbers = figures(run, headline, [h for h in history if "kind" in h])
    ending = str(history[-1].get("ending", ""))
    numbers["ending"] = ending
    if ending.startswith("stopped: "):
        last = max(h["step"] for h in history if h.get("kind") == "step")
        numbers["stopped"] = (last, ending.removeprefix("stopped: "))
    return env, numbers | {"seed": config.get("seed", 0), "minutes": seconds / 60}


@cache
def records() -> Records:
    """Return all recorded curves, and the commands that were not run."""
    kept: Records = json.loads(RECORDS.read_text(encoding="utf-8"))
    return kept


def record(command: str, run: Path, result: tuple[str, ConfigTree], note: str) -> None:
    """Write the figures of a run into `curves.json`, in the place of an earlier run of the same command."""
    env, numbers = result
    entry: Curve = {
        "command": command, "env": env, "headline": numbers["headline"], "seed": numbers["seed"],
        "date": time.strftime("%Y-%m-%d", time.gmtime((run / "metrics.jsonl").stat().st_mtime)),
        "questions": numbers["questions"],
        "curve": [(step, round(score, 4)) for step, score in numbers["curve"]],
        "minutes": round(numbers["minutes"], 1),
    }  # fmt: skip
    if "stopped" in numbers:
        entry["stopped"] = numbers["stopped"]
    else:
        value, low, high = numbers["gain"]
        entry["gain"] = (round(value, 4), round(low, 4), round(high, 4))
    if note:
        entry["note"] = note
    kept = json.loads(RECORDS.read_text(encoding="utf-8"))
    others = [known for known in kept["curves"] if known["command"] != command]
    lines = ",\n".join(f"  {json.dumps(each)}" for each in [*others, entry])
    untried = ",\n".join(f"  {json.dumps(each)}" for each in kept["not_run"])
    RECORDS.write_text(
        f'{{\n "curves": [\n{lines}\n ],\n "not_run": [\n{untried}\n ]\n}}\n', encoding="utf-8"
    )
    records.cache_clear()


def training(id: str) -> str:
    """Return the sentences of an environment's page about its training."""
    known = [curve for curve in records()["curves"] if curve["command"].startswith(f"unitymas train {id} ")]
    if not known:
        return (
            "Its training was not measured here. [Training](../training.md) shows how to start a run, "
            "[curves](../curves.md) which environments were trained."
        )
    curve = min(known, key=lambda curve: ("stopped" in curve, len(curve["command"])))
    before, (steps, after) = curve["curve"][0][1], curve["curve"][-1]
    if "stopped" in curve:
        return (
            f"`{curve['command']}` does not train it: the run stops by itself after {counted(curve['stopped'][0], 'step')}, "
            f"held-out {curve['headline']} {before:.3f}. [Why, and all curves](../curves.md)."
        )
    return (
        f"`{curve['command']}` trains it: held-out {curve['headline']} {before:.3f} before and {after:.3f} after "
        f"{counted(steps, 'step')}{_clause(curve)}. [All curves](../curves.md)."
    )


def _clause(curve: Curve) -> str:
    """Return, with a comma before it, whether the gain of a curve differs from 0."""
    if "gain" not in curve:
        return ""
    value, low, high = curve["gain"]
    shown = "it learns" if low > 0 else "it gets worse" if high < 0 else "no gain is seen"
    return f" ({value:+.3f} [{low:+.3f}, {high:+.3f}]: {shown})"


def curves_page() -> str:
    """Return the text of `docs/curves.md`."""
    lines = [INTRODUCTION, "## What was run", ""]
    lines += ["| command | score | start | between | end | gain, 95% interval | tasks | minutes | day | |"]
    lines += ["|---|---|--:|---|--:|--:|--:|--:|---|---|"]
    lines += [_line(curve) for curve in sorted(records()["curves"], key=lambda curve: curve["command"])]
    lines += ["", "## What was not run", "", "| command | why |", "|---|---|"]
    lines += [f"| `{untried['command']}` | {untried['why']} |" for untried in records()["not_run"]]
    return "\n".join(lines) + "\n"


def _line(curve: Curve) -> str:
    """Return a row of the table."""
    scores = [score for _, score in curve["curve"]]
    gain = "{:+.3f} [{:+.3f}, {:+.3f}]".format(*curve["gain"]) if "gain" in curve else ""
    end = f"{scores[-1]:.3f}"
    notes = [curve["note"]] if "note" in curve else []
    if "stopped" in curve:
        step, why = curve["stopped"]
        end, notes = "–", [f"Stopped by itself after {counted(step, 'step')}: {escape(why)}.", *notes]
    cells = (
        f"`{curve['command'].removeprefix('unitymas train ')}`", curve["headline"], f"{scores[0]:.3f}",
        ", ".join(f"{score:.3f}" for score in scores[1:-1]), end, gain, str(curve["questions"]),
        f"{curve['minutes']:.1f}", curve["date"], " ".join(notes),
    )  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def draw(path: Path) -> None:
    """Draw all recorded curves, one small picture for each command."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    curves = sorted(records()["curves"], key=lambda curve: curve["command"])
    wide = 4
    high = math.ceil(len(curves) / wide)
    figure, places = plt.subplots(high, wide, figsize=(3 * wide, 2 * high), dpi=110, squeeze=False)
    for axes, curve in zip(places.flat, curves, strict=False):
        steps, scores = zip(*curve["curve"], strict=True)
        axes.plot(steps, scores, marker="o", markersize=3)
        words = curve["command"].removeprefix("unitymas train ")
        axes.set_title(textwrap.fill(words, 42, max_lines=3, break_long_words=False), fontsize=7)
        axes.set(xticks=steps, ylim=(min(-0.03, min(scores) - 0.05), 1.03))
        axes.set_ylabel(curve["headline"], fontsize=7)
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in list(places.flat)[len(curves) :]:
        axes.set_visible(False)
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    raise SystemExit(main())
