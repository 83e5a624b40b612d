"""Evaluation of one environment: play the missing episodes, store them, and compute all figures from the stored ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

from ...agents.basics.json_types import JsonView
from ...agents.spending import BudgetSpent
from ...agents.team import BoundTeam, Team, TeamLike
from ...envs.core.arena import Arena
from ...envs.core.drivers import (
    EnvLike,
    EpisodeFailures,
    TaskChoice,
    aplay,
    arena_of,
    check_count,
    derive,
    run_sync,
    select_tasks,
    side_by_side,
    told_to,
)
from ...envs.core.tasks import Task
from ...envs.core.trace import Trace
from ...envs.registry import UnknownEnv, make_arena, spec
from ..pages.html import write_page
from . import identity, result_tables, stats
from .episode_files import Store
from .result_types import FiguresDict, Results, TraceJson
from .results import (
    SCHEMA,
    EpisodeRow,
    Measure,
    episode_list,
    episode_row,
    figures,
    per_task,
    ranked,
    results_text,
)
from .stats import Difference, Estimate

OnEpisode = Callable[[EpisodeRow, TraceJson], None]


class EvaluationPlan(TypedDict):
    """Plan of an evaluation: episodes that exist, episodes that are missing, and the cost of these."""

    env: str
    data: str
    tasks: int
    k: int
    episodes: int
    finished: int
    owed: int
    tokens: float | None
    cost: float | None


@dataclass(frozen=True)
class EvaluationResult:
    """Result of an evaluation. `plain` is the content of ``results.json``; all other members read it."""

    plain: Results
    rows: list[EpisodeRow] = field(repr=False)

    @property
    def figures(self) -> FiguresDict:
        """All figures, as plain JSON."""
        return self.plain["figures"].copy()

    @property
    def score(self) -> Estimate:
        """Headline figure: avg@k of the headline metric. Failures count as 0."""
        return Estimate(**self.plain["figures"]["score"])

    @property
    def roles(self) -> dict[str, dict[str, float]]:
        """Figures by role."""
        return dict(self.plain["figures"]["roles"])

    def pass_at(self, k: int) -> Estimate:
        """Return pass@k."""
        return Estimate(**self.plain["figures"]["pass_at"][str(k)])

    def pass_hat(self, k: int) -> Estimate:
        """Return pass^k."""
        return Estimate(**self.plain["figures"]["pass_hat"][str(k)])

    def minus(self, other: EvaluationResult) -> Difference:
        """Return the paired difference on the tasks that both results have."""
        ours, theirs = self.plain["provenance"]["data"], other.plain["provenance"]["data"]
        if (ours["name"], ours["split"]) != (theirs["name"], theirs["split"]):
            raise ValueError(f"results on different data cannot be compared: {ours} and {theirs}")
        return stats.paired_difference(per_task(self.rows), per_task(other.rows))

    def to_dict(self) -> Results:
        """Return the content of ``results.json``."""
        return self.plain

    def markdown(self) -> str:
        """Return the tables as Markdown."""
        return result_tables.markdown([self.plain])

    def latex(self) -> str:
        """Return the tables as LaTeX, for the package booktabs."""
        return result_tables.latex([self.plain])

    def __str__(self) -> str:
        return self.markdown()


class Evaluation:
    """Evaluation of a team on one environment, with k samples of each task."""

    def __init__(
        self,
        env: EnvLike,
        team: TeamLike,
        *,
        k: int = 4,
        tasks: TaskChoice = None,
        seed: int = 0,
        out: str | Path | None = None,
        price: tuple[float, float] = (0.0, 0.0),
        retry_errors: bool = False,
        tokens: bool = False,
        deterministic: bool = False,
        **make: object,
    ) -> None:
        """Set up an evaluation.

        `tokens` stores each reply's tokens and log-probs, if the player knows them. With `deterministic`, local models give
        the same bits for any other load; this is slower.
        """
        check_count("k", k)
        if not isinstance(price, Sequence) or len(price) != 2:
            raise ValueError(
                f"price must be two numbers, dollars for a million tokens in and out, got {price!r:.60}"
            )
        if isinstance(env, str):
            make, tasks = (
                ({**make, "tasks": tasks}, None) if _own_rows(tasks) else ({"split": "test", **make}, tasks)
            )
        self.arena, self.measure = arena_and_measure(env, make)
        team = Team.of(team)
        self.arena = told_to(self.arena, team)
        self.spending, self.stopped = team.spending, ""
        self.team: BoundTeam = team.bind(self.arena.roles, expert=self.arena.expert)
        for player in self.team.policies.values():
            if tokens and hasattr(player, "keep_tokens"):
                player.keep_tokens()
            if deterministic and hasattr(player, "fix_shapes"):
                player.fix_shapes()
        self.arena, self.tasks = select_tasks(self.arena, tasks)
        self.k, self.seed, self.price, self.retry_errors = k, seed, price, retry_errors
        self.players = identity.role_config(self.team, self.arena)
        self.store = Store(Path(out)) if out is not None else None
        world, players = identity.digest(identity.world(self.arena)), identity.players_hash(self.players)
        self.players_hash = players
        self.wanted: dict[str, tuple[Task, int]] = {
            identity.sample_key(world, players, task, seed, sample): (task, sample)
            for task in self.tasks
            for sample in range(k)
        }
        self.rows: dict[str, EpisodeRow] = {}
        for trace in self.store.episodes() if self.store else ():
            key = (trace.get("tags") or {}).get("key", "")
            if key in self.wanted:
                self.rows[key] = episode_row(trace, self.measure, price)
        if self.store:
            self.spending.add_from(self.store.folder / self.spending.file_name)

    @property
    def owed(self) -> dict[str, tuple[Task, int]]:
        """Return the samples that still have to be played, with those that an outage ended."""
        return {
            key: slot for key, slot in self.wanted.items()
            if key not in self.rows or self.rows[key].unanswered or (self.retry_errors and self.rows[key].failed)
        }  # fmt: skip

    def plan(self) -> EvaluationPlan:
        """Return the plan of a run. Its cost is extrapolated from finished episodes, and unknown if there are none."""
        done = list(self.rows.values())
        owed = len(self.owed)
        cost = sum(row.cost for row in done) / len(done) * owed if done else None
        tokens = (
            sum(r.tokens_in + r.tokens_out for row in done for r in row.roles.values()) / len(done) * owed
            if done
            else None
        )
        return {
            "env": self.arena.env_id, "data": f"{self.arena.data.name} {self.arena.data.split}", "tasks": len(self.tasks),
            "k": self.k, "episodes": len(self.wanted), "finished": len(self.wanted) - owed, "owed": owed,
            "tokens": tokens, "cost": cost,
        }  # fmt: skip

    def run(self, *, concurrency: int = 256, on_episode: OnEpisode | None = None) -> EvaluationResult:
        """Play the missing samples, and return the result over all samples.

        If the budget is used up, playing stops early. Then `stopped` gives the reason, and the result covers only the played
        samples.
        """
        spending = self.spending
        kept = spending.kept_in(self.store.folder / spending.file_name) if self.store else nullcontext()
        try:
            with kept:
                run_sync(self._play(concurrency, on_episode))
        except BudgetSpent as error:
            if not self.rows:
                raise
            self.stopped = str(error)
        finally:
            if self.store:
                self.store.close()
        return self.result()

    async def _play(self, concurrency: int, on_episode: OnEpisode | None) -> None:
        gate = asyncio.Semaphore(concurrency)

        async def one(key: str, task: Task, sample: int) -> None:
            async with gate:
                execution = self.arena.start(task, derive(self.seed, task.id, sample))
                trace = await aplay(execution, self.team, self.arena, f"{task.id}#{sample}")
                trace.sample = sample
                self._keep(key, trace, on_episode)
                failures.see(trace)

        failures = EpisodeFailures()
        owed = self.owed
        if owed:
            async with self.team:
                await side_by_side(one(key, task, sample) for key, (task, sample) in owed.items())
        failures.say()

    def _keep(self, key: str, trace: Trace, on_episode: OnEpisode | None = None) -> None:
        trace.tags["players"] = self.players_hash
        plain = self.store.write(trace, key) if self.store else dict(trace.to_dict())
        self.rows[key] = row = episode_row(plain, self.measure, self.price)
        if on_episode is not None:
            on_episode(row, plain)

    def rescore(self) -> EvaluationResult:
        """Apply the current reward rules to the stored episodes of these players, without generation."""
        if self.store is None:
            raise ValueError("rescore needs the folder of saved episodes (out=…)")
        slots = {(task.id, derive(self.seed, task.id, s)): (key, s) for key, (task, s) in self.wanted.items()}
        newest: dict[str, Trace] = {}
        for plain in self.store.episodes():
            slot = slots.get((plain["task_id"], plain["seed"]))
            if slot is not None and (plain.get("tags") or {}).get("players") == self.players_hash:
                newest[slot[0]] = Trace.from_dict(plain)
        if not newest:
            raise ValueError(
                f"{self.store.path} holds no episode of this team on these tasks; nothing to rescore"
            )
        for key, trace in newest.items():
            if str(trace.ended) != "error":
                self.arena.rescore(trace)
            trace.code_hash = self.arena.code_hash
            self._keep(key, trace)
        self.store.close()
        return self.result()

    def result(self) -> EvaluationResult:
        """Return all figures over the stored episodes, and write them to ``results.json``."""
        rows, measure = ranked([self.rows[key] for key in self.wanted if key in self.rows], self.measure)
        plain: Results = {
            "schema": SCHEMA,
            "env_id": self.arena.env_id,
            "figures": figures(rows, measure, self.k),
            "measure": {
                "headline": measure.headline, "success_metric": measure.success_metric,
                "relation": measure.success.relation, "threshold": measure.success.threshold,
            },
            "complete": len(rows) == len(self.wanted),
            "price": list(self.price),
            "provenance": identity.provenance(self.arena, self.players, self.tasks, self.seed),
            "run": identity.this_run(),
            "episodes": episode_list(rows),
        }  # fmt: skip
        if self.store:
            write_page(self.store.folder / "results.json", [results_text(plain)])
        return EvaluationResult(plain, rows)


def arena_and_measure(env: EnvLike, make: JsonView) -> tuple[Arena, Measure]:
    """Return the arena and the measure of an environment. An existing arena or environment is used unchanged."""
    if isinstance(env, str):
        return _measured(make_arena(env, **make))
    if make:
        raise TypeError(
            f"{', '.join(make)}: these are arguments of make, and the environment is already made"
        )
    return _measured(arena_of(env))


def _measured(arena: Arena) -> tuple[Arena, Measure]:
    if not arena.rules:
        raise ValueError(
            f"no episode has the headline metric {arena.score!r}: {arena.env_id} was made without a reward, so nothing "
            "measures it; give one with make(…, reward=…) or register(…, reward=…)"
        )
    try:
        known = spec(arena.env_id)
    except UnknownEnv:  # an environment that is not registered
        return arena, Measure(arena.headline)
    return arena, Measure.of_spec(known)


def _own_rows(tasks: TaskChoice) -> bool:
    """Tell whether tasks are the user's own rows, and not a number or ids."""
    return (
        isinstance(tasks, Sequence)
        and not isinstance(tasks, str)
        and bool(tasks)
        and isinstance(tasks[0], Mapping)
    )
