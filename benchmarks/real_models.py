"""Comparison of evaluations of one environment before and after training, by question and seed.

    python -m unitymas.benchmarks.real_models evaluations/ --out benchmarks/results/rag-squad-smollm2.json

The folders of `unitymas eval … --out FOLDER` are named STATE[SEED]-t0 (greedy) or STATE[SEED]-t1 (temperature 1), where STATE
is `raw`, `warm` (after the warm start), `rl` (after reinforcement learning) or `control` (with shuffled rewards). Each `rl`
and `control` is compared with the `warm` of its seed, and `rl` with `control`. The 95% intervals resample both tasks and seeds.

    python -m unitymas.benchmarks.real_models evaluations/ --figures --out benchmarks/results/prompts-smollm2.json

With `--figures`, folders may have any names. The headline figure, its interval and each role's legal replies are listed.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from ..envs.core import trace as traces

NAME = re.compile(r"(raw|warm|rl|control)(\d*)-t([01])")
DRAWS = 20_000


class Played(TypedDict):
    """Figures of one evaluated folder."""

    scores: dict[str, float]
    """Mean score of each question over its samples, by task id."""
    legal: dict[str, float]
    """Share of legal replies, by role."""
    sound: list[str]
    """Questions whose replies were all legal, in each sample."""


def played(folder: Path, metric: str = "f1") -> Played:
    """Read the figures of an evaluation's folder."""
    scores: dict[str, list[float]] = defaultdict(list)
    replies: dict[str, list[bool]] = defaultdict(list)
    malformed = set()
    for trace in traces.read(folder / "traces.jsonl.zst"):
        scores[trace.task_id].append(float(trace.metrics.get(metric, 0.0)))
        for node in trace.acts():
            replies[str(node.role)].append(bool(node.ok))
            if not node.ok:
                malformed.add(trace.task_id)
    return Played(
        scores={task: float(np.mean(own)) for task, own in scores.items()},
        legal={role: float(np.mean(ok)) for role, ok in replies.items()},
        sound=sorted(set(scores) - malformed),
    )


def interval(gaps: Sequence[NDArray[np.float64]], draws: int = DRAWS) -> tuple[float, float, float]:
    """Return the mean gap with its 95% interval. `gaps` holds the differences by question for each seed, NaN for none."""
    table, chance = np.stack(gaps), np.random.default_rng(0)
    seeds, tasks = table.shape
    means = np.empty(draws)
    for draw in range(draws):
        of_seeds, of_tasks = chance.integers(0, seeds, seeds), chance.integers(0, tasks, tasks)
        means[draw] = mean_of(table[of_seeds][:, of_tasks])
    low, high = np.nanquantile(means, [0.025, 0.975])
    return mean_of(table), float(low), float(high)


def mean_of(table: NDArray[np.float64]) -> float:
    """Return the mean of all numbers that are not NaN, or NaN if there are none."""
    known = table[~np.isnan(table)]
    return float(known.mean()) if known.size else math.nan


def compared(
    after: Mapping[int, Played], before: Mapping[int, Played], both_sound: bool = False
) -> tuple[float, float, float]:
    """Compare two states by seed and question. With `both_sound`, compare only questions whose replies were all legal in both."""
    gaps = []
    tasks = sorted(next(iter(before.values()))["scores"])
    for seed in sorted(after):
        old, new = before[seed], after[seed]
        kept = set(old["sound"]) & set(new["sound"]) if both_sound else set(tasks)
        gaps.append(np.array([new["scores"][t] - old["scores"][t] if t in kept else np.nan for t in tasks]))
    return interval(gaps)


def gather(folder: Path) -> dict[str, dict[str, dict[int, Played]]]:
    """Read all evaluations. Return them by temperature, state and seed."""
    evaluations: dict[str, dict[str, dict[int, Played]]] = defaultdict(lambda: defaultdict(dict))
    for path in sorted(folder.iterdir()):
        match = NAME.fullmatch(path.name)
        if match and (path / "results.json").is_file():
            evaluations[match[3]][match[1]][int(match[2] or 0)] = played(path)
    if not evaluations:
        raise SystemExit(f"{folder}: holds no folder such as raw-t0 or warm0-t0")
    return evaluations


def figures_of(folder: Path) -> dict[str, object]:
    """Return the headline figure of an evaluation with its interval, and legal replies and tokens by role."""
    results = json.loads((folder / "results.json").read_text())
    figures = results["figures"]
    name = figures["headline"]
    return {
        "environment": results["env_id"],
        name: [round(figures["score"][key], 4) for key in ("value", "low", "high")],
        "tasks": figures["tasks"],
        "other metrics": {m: round(told["value"], 4) for m, told in figures["metrics"].items() if m != name},
        "roles": {
            role: {
                "legal": round(told["format_validity"], 4),
                "calls": told["calls"],
                "tokens in": round(told["tokens_in"], 1),
                "tokens out": round(told["tokens_out"], 1),
            }
            for role, told in figures["roles"].items()
        },
        "settings": results["run"],
    }


def list_figures(folder: Path, record: dict[str, object]) -> dict[str, object]:
    """Print the figures of each evaluation in a folder, and add them to a record."""
    for path in sorted(folder.iterdir()):
        if (path / "results.json").is_file():
            record[path.name] = figures_of(path)
            print(path.name, json.dumps(record[path.name]))
    return record


def main(argv: Sequence[str] | None = None) -> int:
    """Print the comparison, and write it with the score of every question."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, help="JSON file")
    parser.add_argument("--about", default="{}", help="JSON that is put first: command, date, machine")
    parser.add_argument("--figures", action="store_true", help="the figures of folders of any names")
    args = parser.parse_args(argv)
    record: dict[str, object] = json.loads(args.about)
    if args.figures:
        list_figures(args.folder, record)
    for temperature, states in {} if args.figures else gather(args.folder).items():
        own: dict[str, object] = {}
        for state, seeds in states.items():
            means = {seed: float(np.mean(list(run["scores"].values()))) for seed, run in seeds.items()}
            print(f"t{temperature} {state:8}", {seed: round(mean, 3) for seed, mean in means.items()},
                  {seed: {r: round(x, 3) for r, x in run["legal"].items()} for seed, run in seeds.items()})  # fmt: skip
            own[state] = {
                str(seed): {"f1": round(means[seed], 4), "legal": run["legal"], "questions": run["scores"]}
                for seed, run in seeds.items()
            }
        for state, start in (("rl", "warm"), ("control", "warm"), ("rl", "control")):
            after, before = states[state], states[start]
            if after and set(after) <= set(before):
                gains = {"all": compared(after, before)}
                if all(set(run["sound"]) & set(before[seed]["sound"]) for seed, run in after.items()):
                    gains["legal before and after"] = compared(after, before, both_sound=True)
                for name, (mean, low, high) in gains.items():
                    print(f"t{temperature} {state} - {start}, {name}: {mean:+.3f} [{low:+.3f}, {high:+.3f}]")
                own[f"{state} - {start}"] = {
                    name: [round(x, 4) for x in gain] for name, gain in gains.items()
                }
        record[f"temperature {temperature}"] = own
    if args.out:
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
