"""Suites: fixed lists of environments with fixed test tasks, each with a version.

    unitymas eval suite:mini --team tiny

A suite's version changes with every change that could affect a score. ``suites.json`` lists its environments and the
fingerprints of its data. If the data on this machine differs, the evaluation stops with an error, because its figures could
not be compared. The real data sets of ``suite:qa`` and others must be prepared first (``unitymas data prepare …``).
``suite:mini`` needs no preparation.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...agents.basics.hints import nearest
from ...agents.basics.json_types import JsonObject
from ...agents.team import Team, TeamLike
from ...envs.core.drivers import TaskChoice
from ...envs.core.tasks import DataSet
from ...envs.data.local import is_prepared
from ...envs.data.published import CATALOGUE
from ...envs.registry import list_envs, make_arena, spec
from ..pages.html import asset
from . import result_tables
from .playing import Evaluation, EvaluationResult, OnEpisode

PINS = "suites.json"


@dataclass(frozen=True, slots=True)
class Suite:
    """Environments of a suite, their data, and the number of tasks of each."""

    name: str
    version: int
    envs: tuple[str, ...]
    data: str | None
    tasks: int
    description: str

    @property
    def id(self) -> str:
        """Name of the suite with its version."""
        return f"suite:{self.name}-v{self.version}"


@dataclass(frozen=True)
class SuiteResult:
    """Results of a suite by environment, and their tables. There is no average over environments, as it has no meaning."""

    suite: Suite
    results: dict[str, EvaluationResult] = field(repr=False)

    def to_dict(self) -> dict[str, object]:
        """Return the results as plain JSON."""
        return {
            "suite": self.suite.id,
            "results": {env: result.plain for env, result in self.results.items()},
        }

    def markdown(self) -> str:
        """Return the tables as Markdown."""
        return f"{self.suite.id}: {self.suite.description}\n\n" + result_tables.markdown(
            [r.plain for r in self.results.values()]
        )

    def latex(self) -> str:
        """Return the tables as LaTeX."""
        return result_tables.latex([r.plain for r in self.results.values()])

    def __str__(self) -> str:
        return self.markdown()


def suite(name: str) -> Suite:
    """Return a suite by name ("suite:mini" or "suite:mini-v1"). The error for an unknown name lists the nearest ones."""
    by_name = {s.name: s for s in _suites()}
    asked, _, version = name.removeprefix("suite:").partition("-v")
    if asked not in by_name:
        raise KeyError(
            f"unknown suite {name!r}; {nearest(f'suite:{asked}', [f'suite:{one}' for one in by_name])}"
        )
    match = by_name[asked]
    if version and version != str(match.version):
        raise KeyError(
            f"{name!r} is not the version of this release, which is {match.id}; install the release that had it"
        )
    return match


def _suites() -> tuple[Suite, ...]:
    def of(name: str, version: int, data: str | None, tasks: int, description: str) -> Suite:
        return Suite(name, version, tuple(pins()[f"suite:{name}-v{version}"]), data, tasks, description)

    return (
        of("mini", 1, "mini", 8, "every environment on the embedded mini world"),
        of("qa", 1, None, 500, "question answering on the real test sets"),
        of("code", 1, None, 200, "programming on the real test sets, graded by hidden tests"),
        of("math", 1, None, 200, "mathematics on the real test sets"),
        of(
            "packaged",
            1,
            None,
            180,
            "real questions, word problems and programs that registry packages carry",
        ),
        of("planning", 1, None, 64, "generated puzzles and simulators, test split"),
    )


def evaluations(
    name: str, team: TeamLike, *, tasks: TaskChoice = None, out: str | Path | None = None, **how: Any
) -> dict[str, Evaluation]:
    """Return the evaluations of a suite, by environment. ``tasks`` may reduce their number of tasks."""
    chosen = suite(name)
    if not chosen.envs:
        raise ValueError(f"{chosen.id} has no environment in this installation")
    if "data" not in how:
        check_here(chosen)
    team = Team.of(team)  # one for all, so that a model is loaded once
    made: dict[str, Evaluation] = {}
    for env in chosen.envs:
        folder = Path(out) / env if out is not None else None
        made[env] = Evaluation(
            env, team, tasks=tasks or chosen.tasks, out=folder, **{**settings(chosen, env), **how}
        )
        check_pin(chosen, env, made[env].arena.data)
    return made


def evaluate_suite(
    name: str,
    team: TeamLike,
    *,
    concurrency: int = 256,
    rescore: bool = False,
    on_episode: OnEpisode | None = None,
    **how: Any,
) -> SuiteResult:
    """Evaluate a team on every environment of a suite."""
    results = {
        env: evaluation.rescore()
        if rescore
        else evaluation.run(concurrency=concurrency, on_episode=on_episode)
        for env, evaluation in evaluations(name, team, **how).items()
    }
    return SuiteResult(suite(name), results)


def check_here(chosen: Suite) -> None:
    """Raise an error if the suite's real data is not on this machine. The mini world must not replace it."""
    real = {spec(env).dataset for env in chosen.envs if chosen.data is None and spec(env).tasks is None}
    if missing := sorted(name for name in real if not is_prepared(name)):
        raise ValueError(
            f"{chosen.id} is defined on real data, and this machine lacks {', '.join(missing)}; prepare it with: "
            + " && ".join(f"unitymas data prepare {name}" for name in missing)
        )


def check_pin(chosen: Suite, env: str, data: DataSet) -> None:
    """Raise an error if the data differs from the data of the suite."""
    expected = pins().get(chosen.id, {}).get(env)
    if expected is not None and data.fingerprint != expected:
        raise ValueError(
            f"{chosen.id}: the {data.split} tasks of {env} have fingerprint {data.fingerprint}, but the suite is defined "
            f"on {expected}; prepare that data set again, or evaluate {env} by itself"
        )


def settings(chosen: Suite, env: str) -> JsonObject:
    """Return the arguments of `make` for one environment of a suite: the test split, and the suite's data if it names one."""
    own = spec(env).tasks is not None
    return {"split": "test"} if own or chosen.data is None else {"split": "test", "data": chosen.data}


def pins() -> dict[str, dict[str, str | None]]:
    """Return the contents of each suite, with fingerprints of the test data. None: real data without a fixed fingerprint."""
    contents: dict[str, dict[str, str | None]] = json.loads(asset(PINS))
    return contents


def compose() -> dict[str, dict[str, str | None]]:
    """Return the content of ``suites.json`` for the environments and the generated data of this release."""
    packaged = [env for env in list_envs() if pinned_test(env)]
    every = [env for env in list_envs() if env not in packaged]

    def fingerprints(envs: list[str], data: str | None) -> dict[str, str | None]:
        fingerprint_of: dict[str, str | None] = {}
        for env in envs:
            where = {"split": "test"} if spec(env).tasks is not None else {"split": "test", "data": data}
            real = spec(env).tasks is None and data is None
            fingerprint_of[env] = None if real else make_arena(env, **where).data.fingerprint
        return fingerprint_of

    def of(kind: str) -> list[str]:
        return [env for env in every if spec(env).dataset and spec(env).kind.partition("-")[0] == kind]

    return {
        "suite:mini-v1": fingerprints(every, "mini"),
        "suite:qa-v1": fingerprints(of("qa"), None),
        "suite:code-v1": fingerprints(of("code"), None),
        "suite:math-v1": fingerprints(of("math"), None),
        "suite:packaged-v1": {env: pinned_test(env) for env in packaged},
        "suite:planning-v1": fingerprints([env for env in every if spec(env).tasks is not None], None),
    }


def pinned_test(env: str) -> str | None:
    """Return the fixed fingerprint of an environment's test tasks, from the package that contains them."""
    entry = CATALOGUE.get(spec(env).dataset)
    return entry.package.fingerprints.get("test") if entry and entry.package else None


if __name__ == "__main__":  # python -m unitymas.benchmarks.evaluation.suites > suites.json
    print(json.dumps(compose(), indent=1))
