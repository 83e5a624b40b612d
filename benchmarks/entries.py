"""Our own entries on the leaderboard, made afresh: the scripted expert, the fool, chance, and the tiny model.

    python -m unitymas.benchmarks.entries -o submissions
    python -m unitymas.benchmarks.entries -o submissions --also "Tiny, trained, shared=run:runs/shared"

The expert bounds a table from above, the fool and chance from below; a model's score means something
between them.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from . import submission
from .evaluate import evaluate

ENVS = ("mask-hotpotqa", "rag-hotpotqa", "code-deepcoder", "math-deepscaler")
TEAMS: Mapping[str, tuple[str, str]] = {
    "Scripted expert": (
        "scripted",
        "The workflow's own expert, which sees the reference: the most one can score.",
    ),
    "Chance": ("random", "A legal choice at random where there are choices, else a few random words."),
    "Fool": ("fool", "Malformed, empty, huge and hostile replies: what an environment must not reward."),
    "Tiny": ("tiny", "The embedded model as it ships."),
}


def make(
    out: Path, teams: Mapping[str, tuple[str, str]], envs: tuple[str, ...], *, tasks: int, k: int
) -> list[Path]:
    """Evaluate each team on each environment of the embedded world, and pack a submission of it."""
    made = []
    for env in envs:
        for name, (player, description) in teams.items():
            folder = f"{name}-{env}".lower().replace(" ", "-").replace(",", "")
            evaluate(env, player, k=k, tasks=tasks, data="mini", out=out / "evaluations" / folder)
            made.append(
                submission.pack(
                    out / "evaluations" / folder,
                    out / folder,
                    name=name,
                    authors="unitymas",
                    description=description,
                )
            )
            print(made[-1])
    return made


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m unitymas.benchmarks.entries", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("-o", "--out", type=Path, default=Path("submissions"))
    parser.add_argument(
        "--also", action="append", default=[], metavar="NAME=TEAM", help="one more team, e.g. a run"
    )
    parser.add_argument("--only", nargs="+", choices=sorted(TEAMS), default=list(TEAMS), help="which of ours")
    parser.add_argument("--envs", nargs="+", default=list(ENVS))
    parser.add_argument("--tasks", type=int, default=64)
    parser.add_argument("-k", type=int, default=4)
    given = parser.parse_args(argv)
    teams = {name: TEAMS[name] for name in given.only}
    for extra in given.also:
        name, equals, player = extra.rpartition("=")
        if not equals:
            parser.error(f"--also {extra!r}: write NAME=TEAM")
        teams[name] = (player, f"{player}, evaluated by us.")
    make(given.out, teams, tuple(given.envs), tasks=given.tasks, k=given.k)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
