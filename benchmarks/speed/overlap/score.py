"""Scores of synchronous and overlapped runs on the same budget: at equal samples, and at equal wall clock.

`unitymas train` trains the tiny model on this machine with each seed in each mode, one run after the other. A finished run in
the folder is not trained again. There are three tables. *Samples*: held-out scores after the same number of steps, and so of
samples. *This machine*: the last score of a run at a given time. *A node*: the same, with the simulated step times of a node
with GPUs (node.py). The scores are still those of the tiny model on this machine.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path

from ....agents.basics.json_types import JsonObject
from ....trainers.controller.reporting.loggers import rows_of
from ....trainers.controller.run import train
from .node import MODES, Mode, best, played, simulated

ScoreCurve = list[tuple[int, float, float]]
"""Validations of a run: steps done, seconds since the first, score."""


def score(args: argparse.Namespace) -> None:
    """Train what is missing, and print the tables."""
    curves: dict[Mode, list[ScoreCurve]] = {mode: [] for mode in MODES}
    for seed in args.seeds:
        for mode in MODES:
            where = args.out / f"seed{seed}-{mode}"
            if not finished(where):
                learn(args, where, seed, mode)
            curves[mode].append(curve_of(where, args.metric))
    print(
        f"{args.real}, {args.steps} steps, seeds {' '.join(map(str, args.seeds))}: {args.metric}, mean of the seeds\n"
    )
    for line in tables(curves, node_seconds(args)):
        print(line)


def learn(args: argparse.Namespace, where: Path, seed: int, mode: Mode) -> None:
    """Train one run."""
    settings: JsonObject = {
        "steps": args.steps, "seed": seed, "overlap": mode, "staleness": 0 if mode == "off" else args.staleness,
        "checkpoint_every": 0, "eval": {"every": 2, "tasks": 60}, "log": {"console": "off", "timeline": False},
    }  # fmt: skip
    print(f"training {where}", flush=True)
    train(args.real, preset="shared", directory=where, overrides=args.overrides, **settings)


def finished(where: Path) -> bool:
    """Tell whether a run is finished."""
    path = where / "metrics.jsonl"
    return path.exists() and rows_of(path)[-1].get("ending") == "done"


def curve_of(where: Path, metric: str) -> ScoreCurve:
    """Read the validations of a run."""
    rows = [row for row in rows_of(where / "metrics.jsonl") if row["kind"] == "validation"]
    return [(row["step"], row["time"] - rows[0]["time"], row[metric]) for row in rows]


def node_seconds(args: argparse.Namespace) -> Mapping[Mode, Callable[[int], float]]:
    """Return, by mode, the seconds of a simulated node for a number of steps. The synchronous run has all GPUs."""
    ends = {"off": simulated(played(args, "off", args.gpus, args.gpus)).ends}
    ends |= {mode: best(args, mode)[1].ends for mode in MODES if mode != "off"}
    return {mode: lambda step, own=(0.0, *ends[mode]): own[step] for mode in MODES}  # type: ignore[misc]


def reached(curve: ScoreCurve, moment: float) -> float:
    """Return the last score at a given time."""
    return [score for _, seconds, score in curve if seconds <= moment + 1e-9][-1]


def tables(curves: Mapping[Mode, list[ScoreCurve]], node: Mapping[Mode, Callable[[int], float]]) -> list[str]:
    """Return the three tables as Markdown."""
    steps = [step for step, _, _ in curves["off"][0]]
    lines = [
        "| equal samples | " + " | ".join(f"step {step}" for step in steps) + " |",
        "|---" * (len(steps) + 1) + "|",
    ]
    for mode in MODES:
        means = [statistics.mean(curve[i][2] for curve in curves[mode]) for i in range(len(steps))]
        lines.append(f"| {mode} | " + " | ".join(f"{mean:.3f}" for mean in means) + " |")
    simulated_curves = {
        mode: [[(step, node[mode](step), score) for step, _, score in curve] for curve in own]
        for mode, own in curves.items()
    }
    for name, own in (("this machine", curves), ("a simulated node", simulated_curves)):
        shortest = min(curve[-1][1] for mode in MODES for curve in own[mode])
        moments = [shortest * part / 4 for part in range(1, 5)]
        lines += [
            "",
            f"| equal wall clock, {name} | "
            + " | ".join(f"{moment:.0f} s" for moment in moments)
            + " | whole run |",
        ]
        lines.append("|---" * 6 + "|")
        for mode in MODES:
            means = [statistics.mean(reached(curve, moment) for curve in own[mode]) for moment in moments]
            whole = statistics.mean(curve[-1][1] for curve in own[mode])
            lines.append(f"| {mode} | " + " | ".join(f"{mean:.3f}" for mean in means) + f" | {whole:.0f} s |")
    return lines
