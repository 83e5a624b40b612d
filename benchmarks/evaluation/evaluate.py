"""Evaluation of a team: play the missing episodes, store every episode, compute all figures from the stored ones.

    result = unitymas.evaluate("mask-hotpotqa", team, k=4, out="evaluations/mine")
    print(result.markdown())
    result.score.value, result.score.low, result.score.high

With ``out``, each episode is written when it ends, under a key that is a hash of all that it depends on
(`identity.sample_key`). So the same command plays only the missing episodes, after a kill or with a larger ``k``. Without
``out``, nothing is written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...agents.basics.json_types import JsonObject
from ...agents.roles import Role, entry_of, nobody_plays
from ...agents.team import Player, Team, TeamLike
from ...envs.core.drivers import EnvLike, TaskChoice
from .episode_files import Store
from .playing import Evaluation, EvaluationResult, OnEpisode, arena_and_measure
from .result_types import Results
from .stats import RoleEffect
from .suites import evaluate_suite

__all__ = [
    "Evaluation",
    "EvaluationResult",
    "OnEpisode",
    "RoleEffect",
    "Store",
    "ablate",
    "evaluate",
    "exchange",
    "saved_results",
    "swap",
]


def evaluate(
    env: EnvLike,
    team: TeamLike,
    *,
    k: int = 4,
    tasks: TaskChoice = None,
    seed: int = 0,
    concurrency: int = 256,
    out: str | Path | None = None,
    rescore: bool = False,
    on_episode: OnEpisode | None = None,
    **options: Any,
) -> EvaluationResult | Any:  # a union with a suite's result would ask every caller which one it is
    """Evaluate a team on an environment. Return an `EvaluationResult`; for a suite (``"suite:…"``) a `SuiteResult`.

    The result holds avg@k with its interval, pass@k, pass^k, figures by role, and the cost. The default split is "test". All
    other keywords are arguments of `Evaluation` or of ``make``.
    """
    if isinstance(env, str) and env.startswith("suite:"):
        return evaluate_suite(
            env, team, k=k, tasks=tasks, seed=seed, concurrency=concurrency, out=out, rescore=rescore,
            on_episode=on_episode, **options,
        )  # fmt: skip
    evaluation = Evaluation(env, team, k=k, tasks=tasks, seed=seed, out=out, **options)
    return evaluation.rescore() if rescore else evaluation.run(concurrency=concurrency, on_episode=on_episode)


# effect of each role ----------------------------------------------------------------------------------


def ablate(env: EnvLike, team: TeamLike, baseline: TeamLike, **how: object) -> list[RoleEffect]:
    """Return the effects of role ablation: the baseline plays one role of the team at a time.

    A large loss means that the team depends on this role.
    """
    return _exchange(env, team, baseline, "ablate", how)


def swap(env: EnvLike, team: TeamLike, baseline: TeamLike, **how: object) -> list[RoleEffect]:
    """Return the effects of role swaps: the team plays one role of the baseline at a time.

    A large gain means that this role of the team is valuable.
    """
    return _exchange(env, baseline, team, "swap", how)


def _exchange(env: EnvLike, host: TeamLike, guest: TeamLike, name: str, how: JsonObject) -> list[RoleEffect]:
    folder = Path(how.pop("out")) if how.get("out") else None
    arena, _ = arena_and_measure(env, {n: how[n] for n in how if n not in _EVALUATION})
    whole = evaluate(env, host, out=folder and folder / f"{name}-host", **how)
    effects = []
    for role in dict.fromkeys(role.name for role in arena.roles.values()):
        mixed = exchange(host, guest, role, arena.roles)
        result = evaluate(env, mixed, out=folder and folder / f"{name}-{role}", **how)
        effects.append(RoleEffect(role, result.score, result.minus(whole)))
    return effects


def exchange(host: TeamLike, guest: TeamLike, role: str, roles: Mapping[str, Role]) -> Team:
    """Return the host's team, with one role played by the guest."""
    host, guest = Team.of(host), Team.of(guest)
    mixed = Team(
        {agent: _seat(guest if r.name == role else host, agent, r.name) for agent, r in roles.items()},
        **(guest.settings.told() | host.settings.told()),
    )
    mixed.spending = host.spending
    return mixed


def _seat(team: Team, agent: str, role: str) -> Player:
    player = entry_of(team.seats, agent, role)
    if player is None:
        raise ValueError(f"{team!r}: {nobody_plays(agent, role)}")
    return player


_EVALUATION = (
    "k", "tasks", "seed", "concurrency", "rescore", "on_episode", "price", "retry_errors", "tokens", "deterministic",
)  # fmt: skip


def saved_results(folder: str | Path) -> Results:
    """Read the ``results.json`` of an evaluation's folder."""
    path = Path(folder) / "results.json"
    try:
        plain: Results = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{path} does not exist; `unitymas eval … --out {folder}` writes it"
        ) from None
    return plain
