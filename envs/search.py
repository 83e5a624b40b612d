"""Search at inference: a team plays several episodes per task, and the best one counts. A baseline for training.

    best = best_of_n(env, team, n=8, score="em")             # n whole episodes
    traces = ab_mcts(env, team, budget=16, score=judge)      # a tree of episodes with adaptive branching

Both use forks: a node of the search tree is a state of the episode, and playing on from it costs no generation.
`score` rates a finished episode. It is the name of a metric (an oracle, because it knows the answer), or a function of the
trace that returns a number from 0 to 1 (a verifier, a vote). `env` is an id, an environment or an arena. The result is one
trace for each task.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from ..agents.team import Team, TeamLike
from .core.arena import Arena
from .core.branch import Branch, check_forks
from .core.drivers import EnvLike, TaskChoice, arena_of, derive, run_sync, select_tasks, told_to
from .core.tasks import Task
from .core.trace import Trace

TraceScore = str | Callable[[Trace], float]


def best_of_n(
    env: EnvLike,
    team: TeamLike,
    n: int,
    score: TraceScore,
    *,
    tasks: TaskChoice = None,
    seed: int = 0,
    **make: object,
) -> list[Trace]:
    """Play `n` episodes of each task, and return the best one. Of episodes with equal scores, the first is best."""
    if n < 1:
        raise ValueError(f"best_of_n: n must be at least 1, got {n}")

    async def one(root: Branch, worth: Callable[[Trace], float], chance: random.Random) -> Trace:
        branches = await asyncio.gather(*(root.fork(str(i)).finish() for i in range(n)))
        best = max(branches, key=lambda branch: worth(branch.trace))
        return _tagged(best.trace, worth, n)

    return _each_task(one, "best_of_n", env, team, score, tasks, seed, make)


def ab_mcts(
    env: EnvLike,
    team: TeamLike,
    budget: int,
    score: TraceScore,
    *,
    tasks: TaskChoice = None,
    seed: int = 0,
    **make: object,
) -> list[Trace]:
    """Play `budget` episodes of each task as a tree, and return the best one (AB-MCTS-A, arXiv 2503.04412).

    From the first act on, Thompson sampling decides at every state whether to sample a new reply (wider) or to continue
    below an earlier reply (deeper). After a new reply the episode is played to its end. Its score counts for all states of
    its path.
    """
    if budget < 1:
        raise ValueError(f"ab_mcts: budget must be at least 1, got {budget}")

    async def one(root: Branch, worth: Callable[[Trace], float], chance: random.Random) -> Trace:
        await root.tools()
        top = SearchState(root)
        best: tuple[float, Trace] | None = None
        for number in range(budget):
            leaf = await _grow(top, f"{number}", worth, chance)
            if best is None or leaf[0] > best[0]:
                best = leaf
        assert best is not None
        return _tagged(best[1], worth, budget)

    return _each_task(one, "ab_mcts", env, team, score, tasks, seed, make)


@dataclass(slots=True)
class Arm:
    """Option of Thompson sampling with its scores: a normal distribution with unknown mean and variance.

    The prior is normal-inverse-chi-squared, as in the paper's Gaussian variant. It weighs as much as one score of 0.
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of squared distances from the mean."""

    def draw(self, chance: random.Random) -> float:
        """Draw a mean from the posterior distribution."""
        weight = 1 + self.count
        centre = self.count * self.mean / weight
        spread = 0.1 + self.squares + self.count / weight * self.mean**2
        variance = spread / chance.gammavariate(weight / 2, 2.0)
        return chance.gauss(centre, math.sqrt(variance / weight))

    def learn(self, score: float) -> None:
        """Add a score."""
        self.count += 1
        off = score - self.mean
        self.mean += off / self.count
        self.squares += off * (score - self.mean)


@dataclass(slots=True)
class SearchState:
    """State of the episode in the search tree, and the replies that were tried there."""

    branch: Branch
    arm: Arm = field(default_factory=Arm)
    wider: Arm = field(default_factory=Arm)
    """Scores of the new replies that were tried here."""
    below: list[SearchState] = field(default_factory=list)
    """States after each of these replies."""


async def _grow(
    top: SearchState, label: str, worth: Callable[[Trace], float], chance: random.Random
) -> tuple[float, Trace]:
    """Add one reply to the tree, play the episode to its end, and add its score to all states of its path."""
    state, path = top, [top.arm]
    while state.below:
        draws = [(s.arm.draw(chance), s) for s in state.below if not s.branch.over]
        promise, deeper = max(draws, key=lambda d: d[0], default=(-math.inf, None))
        if deeper is None or state.wider.draw(chance) >= promise:
            break
        state = deeper
        path.append(state.arm)
    twin = SearchState(state.branch.fork(label))
    await twin.branch.round()
    ended = twin.branch if twin.branch.over else await twin.branch.fork(f"{label}+").finish()
    score = worth(ended.trace)
    state.below.append(twin)
    for arm in (*path, state.wider, twin.arm):
        arm.learn(score)
    return score, ended.trace


def _each_task(
    search: Callable[[Branch, Callable[[Trace], float], random.Random], Awaitable[Trace]],
    what: str,
    env: EnvLike,
    team: TeamLike,
    score: TraceScore,
    tasks: TaskChoice,
    seed: int,
    make: Mapping[str, object],
) -> list[Trace]:
    team = Team.of(team)
    arena = told_to(arena_of(env, **make), team)
    check_forks(arena, what)
    bound = team.bind(arena.roles, expert=arena.expert)
    arena, chosen = select_tasks(arena, tasks)

    def one(task: Task) -> Awaitable[Trace]:
        root = Branch.begin(arena, bound, task, derive(seed, task.id), f"{what}:{task.id}")
        return search(root, _worth(arena, score), random.Random(derive(what, seed, task.id)))

    async def run() -> list[Trace]:
        async with bound:
            return await asyncio.gather(*map(one, chosen))

    return run_sync(run())


def _worth(arena: Arena, score: TraceScore) -> Callable[[Trace], float]:
    """Return the function that scores a trace from 0 to 1. An episode that failed has the score 0."""

    def worth(trace: Trace) -> float:
        if str(trace.ended) == "error":
            return 0.0
        if callable(score):
            value = float(score(trace))
        elif score in trace.metrics:
            value = trace.metrics[score]
        else:
            raise ValueError(
                f"score: {arena.env_id} has no metric {score!r}; it has {', '.join(trace.metrics)}"
            )
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"score: {value} is not in 0 … 1; scale it")
        return value

    return worth


def _tagged(trace: Trace, worth: Callable[[Trace], float], episodes: int) -> Trace:
    trace.tags |= {"search_score": worth(trace), "episodes": episodes}
    return trace
