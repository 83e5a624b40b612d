"""Our own entries of the leaderboard: the scripted expert, the fool, chance, and the tiny model.

    python -m unitymas.benchmarks.leaderboard.entries -o submissions
    python -m unitymas.benchmarks.leaderboard.entries -o submissions --runs runs/shared runs/separate

The expert is the upper bound of a table, and the fool and chance are the lower bounds. A trained policy plays the environment
of its run, with the same configuration but on test tasks. The expert, the fool, chance and the untrained tiny model play the
same tasks, so one table shows before and after. A second call plays only the missing episodes.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from ...agents.basics.hints import counted
from ...agents.basics.json_types import JsonObject, JsonView
from ...agents.basics.manifest import read_signed
from ..evaluation.evaluate import evaluate
from . import submission

ENVS = ("mask-hotpotqa", "rag-hotpotqa", "code-deepcoder", "math-deepscaler")
TEAMS: Mapping[str, tuple[str, str]] = {
    "Scripted expert": (
        "scripted",
        "The workflow's own expert, which sees the reference: the most one can score.",
    ),
    "Chance": ("random", "A legal choice at random where there are choices, else a few random words."),
    "Fool": ("fool", "Malformed, empty, huge and hostile replies: what an environment must not reward."),
    "Tiny": ("tiny", "The embedded model as it ships, before any training on this environment."),
}


@dataclass
class Comparison:
    """Teams that are compared on one environment, with the same configuration."""

    env: str
    args: JsonObject = field(default_factory=dict)
    teams: dict[str, tuple[str, str]] = field(default_factory=dict)
    prompts: object = "short"
    """Prompt set of all teams: that of the tiny model or of the runs."""


def tables(envs: list[str], teams: dict[str, tuple[str, str]], runs: list[Path]) -> list[Comparison]:
    """Return one comparison for each environment, and for each configuration of it in the runs."""
    made = [Comparison(env, {}, dict(teams)) for env in envs]
    for run in runs:
        if not (run / "config.yaml").is_file():
            raise SystemExit(f"{run} is no run directory: it holds no config.yaml")
        config = yaml.safe_load(read_signed(run / "config.yaml"))
        env, args = config["env"]["id"], config["env"]["args"]
        prompts = config["env"].get("prompts", "short")  # runs from before there were sets had this one
        match = next((t for t in made if (t.env, t.args, t.prompts) == (env, args, prompts)), None)
        if match is None:
            match = Comparison(env, args, dict(teams), prompts)
            made.append(match)
        match.teams[f"Tiny, trained: {run.name}"] = (f"run:{run}", _told(config))
    return made


def _told(config: JsonView) -> str:
    policies = config["policies"]
    learners = {policy["algorithm"]["name"] for policy in policies.values() if not policy["frozen"]}
    return (
        f"Trained for {counted(config['steps'], 'step')} of {counted(config['tasks_per_step'], 'task')}, {counted(config['k'], 'sample')} each, with "
        f"{', '.join(sorted(learners))}; policies: {', '.join(policies)}; seed {config['seed']}."
    )


def make(out: Path, made: list[Comparison], *, tasks: int, k: int) -> list[Path]:
    """Evaluate each team of each table on test tasks of the mini world, and pack its submission."""
    packed = []
    for table in made:
        for name, (player, description) in table.teams.items():
            configured = "-".join(f"{key}-{value}" for key, value in sorted(table.args.items()))
            folder = re.sub(r"[^a-z0-9]+", "-", f"{name} {table.env} {configured}".lower()).strip("-")
            kept = out / "evaluations" / folder
            size = "2.06M" if name.startswith("Tiny") else ""
            how = {"data": "mini", "prompts": table.prompts, **table.args}
            evaluate(table.env, player, k=k, tasks=tasks, out=kept, **how)
            packed.append(
                submission.pack(
                    kept,
                    out / folder,
                    name=name,
                    authors="unitymas",
                    description=description,
                    parameters=size,
                )
            )
            print(packed[-1], flush=True)
    return packed


def main(argv: list[str] | None = None) -> int:
    """Read the arguments, and make the entries."""
    parser = argparse.ArgumentParser(
        prog="python -m unitymas.benchmarks.leaderboard.entries", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("-o", "--out", type=Path, default=Path("submissions"))
    parser.add_argument(
        "--runs", nargs="+", type=Path, default=[], metavar="DIR", help="training runs to enter"
    )
    parser.add_argument(
        "--also", action="append", default=[], metavar="NAME=TEAM", help="one more team on every environment"
    )
    parser.add_argument("--only", nargs="+", choices=sorted(TEAMS), default=list(TEAMS), help="which of ours")
    parser.add_argument("--envs", nargs="*", default=list(ENVS), help="default: %(default)s")
    parser.add_argument("--tasks", type=int, default=64)
    parser.add_argument("-k", type=int, default=4)
    options = parser.parse_args(argv)
    teams = {name: TEAMS[name] for name in options.only}
    for extra in options.also:
        name, equals, player = extra.rpartition("=")
        if not equals:
            parser.error(f"--also {extra!r}: write NAME=TEAM")
        teams[name] = (player, f"{player}, evaluated by us.")
    make(options.out, tables(options.envs, teams, options.runs), tasks=options.tasks, k=options.k)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
