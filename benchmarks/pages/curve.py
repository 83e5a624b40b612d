"""Learning curves of finished runs of `unitymas train`: held-out score over steps, as a table and a picture.

    python -m unitymas.benchmarks.pages.curve runs/mask-hotpotqa-1 --out docs/images/readme-train.png

Of each run: its score on held-out tasks before and after, with the 95% interval of the difference over tasks.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from ...envs.registry import spec
from ...trainers.config.reader import Tree
from ...trainers.config.schema import read_yaml
from ..demo import figures, plot, summary


def row(run: Path) -> tuple[str, Tree]:
    """The environment of a run, and its figures as the demo prints them."""
    config = read_yaml(run / "config.yaml")
    env = config["env"]["id"]
    history = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    seconds = sum(h.get("time/step", 0.0) for h in history if h.get("kind") == "step")
    headline = history[0].get("headline", spec(env).headline)
    numbers = figures(run, headline, [h for h in history if "kind" in h])
    return env, numbers | {"seed": config.get("seed", 0), "minutes": seconds / 60}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, help="a PNG")
    args = parser.parse_args(argv)
    results = [row(run) for run in args.runs]
    if len({env for env, _ in results}) > 1:
        parser.error("one picture shows runs of one environment")
    env, rows = results[0][0], [figures for _, figures in results]
    print(summary(env, rows))
    for r in rows:
        print(f"seed {r['seed']}: " + ", ".join(f"step {step} {score:.3f}" for step, score in r["curve"]))
    if args.out is not None:
        plot(env, rows, args.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
