"""Demo (`make demo`): a five-role M-ASK team learns on this machine's CPU, and is tested before and after.

    python -m unitymas.benchmarks.demo [steps=24] [--env mask-hotpotqa] [--preset lora] [--seeds 0 1 2]

Overrides (`a.b=c`) come first, because `--seeds` takes all arguments after it.

The embedded tiny model plays all five roles (with `--preset lora`, each role has a low-rank adapter). PPO trains it on
questions of the mini world. Before and after, it answers held-out questions about unseen entities, greedily. The last
checkpoint counts, not the best one. The demo prints the F1 before and after, and the share of the gap to the scripted expert
that training closed, with 95% intervals over questions.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..agents.basics.hints import counted
from ..envs.core import trace as traces
from ..envs.registry import spec
from ..trainers.config.group_settings import faster_precision
from ..trainers.config.presets import tiny_settings
from ..trainers.config.reader import ConfigTree
from ..trainers.config.resolve import resolve
from ..trainers.config.schema import merge
from ..trainers.controller.run import train
from .evaluation.stats import paired_difference
from .pages import report

COMMON: ConfigTree = {"checkpoint_every": 0}


def recipe(env: str, preset: str = "shared") -> ConfigTree:
    """Return the settings for an environment: those of `unitymas train` with the tiny model."""
    return merge(tiny_settings(env, preset), COMMON)


def main(argv: Sequence[str] | None = None) -> int:
    """Train once for each seed, then print the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env", default="mask-hotpotqa")
    parser.add_argument(
        "--preset", default="shared", help="how roles map to models: shared (default), lora …"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--out", type=Path, default=Path("runs/demo"))
    parser.add_argument(
        "--control", action="store_true", help="rewards shuffled between episodes: nothing to learn"
    )
    parser.add_argument("overrides", nargs="*", metavar="a.b=c")
    args = parser.parse_intermixed_args(argv)
    try:  # before the wait
        resolve(args.env, preset_name=args.preset, overrides=args.overrides, **settings(args, 0))
    except (ValueError, KeyError) as error:
        parser.error(str(error.args[0]))
    rows = [one(args, seed) for seed in args.seeds]
    print()
    print(summary(args.env, rows))
    picture = plot(args.env, rows, args.out / f"{name_of(args)}.png")
    print(f"\ncurves and episodes: {rows[0]['dir']}/report.html" + (f", {picture}" if picture else ""))
    (args.out / f"{name_of(args)}.json").write_text(json.dumps(rows, indent=1))
    return 0


def name_of(args: argparse.Namespace) -> str:
    """Return the name of the demo's runs, figures and picture."""
    return f"{args.env}-{args.preset}{'-control' if args.control else ''}"


def settings(args: argparse.Namespace, seed: int) -> ConfigTree:
    """Return the settings of a run, without the overrides."""
    fields = merge(
        recipe(args.env, args.preset),
        {
            "seed": seed,
            "shuffle_rewards": args.control,
            "policies": {"*": {"learning": {"precision": faster_precision()}}},
        },
    )
    data = {"data": "mini"} if spec(args.env).tasks is None else {}
    return {**fields, "env": {**data, **fields.get("env", {})}}


def one(args: argparse.Namespace, seed: int) -> ConfigTree:
    """Train one run. Return its held-out scores before and after."""
    base = args.out / f"{name_of(args)}-seed{seed}"
    where, number = base, 1
    while where.exists():
        number += 1
        where = base.with_name(f"{base.name}-{number}")
    print(f"\n== {args.env}, {args.preset}, seed {seed} -> {where}")
    began = time.perf_counter()
    run = train(
        args.env, preset=args.preset, overrides=args.overrides, directory=where, **settings(args, seed)
    )
    seconds = time.perf_counter() - began
    report.build([where], where / "report.html")
    return figures(where, spec(args.env).headline, run.history) | {"seed": seed, "minutes": seconds / 60}


def figures(where: Path, headline: str, history: Sequence[Mapping[str, object]]) -> ConfigTree:
    """Return the figures of a run's first and last validation."""
    files = sorted((where / "traces").glob("validation-*.jsonl.zst"))
    before, after = (
        {t.task_id: t.metrics.get(headline, 0.0) for t in traces.read(f)} for f in (files[0], files[-1])
    )
    curve = [(r["step"], r.get(headline, 0.0)) for r in history if r["kind"] == "validation"]
    tasks = sorted(before | after)  # a question that failed because of the infrastructure counts 0
    difference = paired_difference(*({t: [side.get(t, 0.0)] for t in tasks} for side in (after, before)))
    return {
        "dir": str(where), "headline": headline, "curve": curve, "questions": len(tasks),
        "before": statistics.fmean(before.values()), "after": statistics.fmean(after.values()),
        "gain": [difference.value, difference.low, difference.high], "p": difference.p,
    }  # fmt: skip


def summary(env: str, rows: list[ConfigTree]) -> str:
    """Return the table of results. The scripted expert scores 1.0 (`unitymas validate`)."""
    head = rows[0]["headline"]
    lines = [
        f"{env}: held-out {head}, {counted(rows[0]['questions'], 'question')} about unseen entities, greedy; expert 1.000"
    ]
    lines.append("seed   before   after    gain [95% interval]      gap closed   minutes")
    for r in rows:
        gain, low, high = r["gain"]
        closed = gain / (1 - r["before"]) if r["before"] < 1 else 0.0
        lines.append(
            f"{r['seed']:>4}   {r['before']:.3f}    {r['after']:.3f}    "
            f"{gain:+.3f} [{low:+.3f}, {high:+.3f}]   {closed:>9.0%}   {r['minutes']:>7.1f}"
        )
    return "\n".join(lines)


def plot(env: str, rows: list[ConfigTree], path: Path) -> Path | None:
    """Plot the held-out score over steps, with one line for each seed. Return None if matplotlib is not installed."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return None
    figure, axes = plt.subplots(figsize=(6, 3.6), dpi=140)
    for row in rows:
        steps, scores = zip(*row["curve"], strict=True)
        axes.plot(steps, scores, marker="o", markersize=3, label=f"seed {row['seed']}")
    axes.axhline(1.0, color="grey", linewidth=0.8, linestyle="--", label="expert")
    axes.set(xlabel="step", ylabel=f"held-out {rows[0]['headline']}", title=env, ylim=(0, 1.05))
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


if __name__ == "__main__":
    raise SystemExit(main())
