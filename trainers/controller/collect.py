"""Collection: from tasks to episodes, and from episodes to sealed samples and a table of decisions.

Thousands of episodes are in flight at once, on one event loop. Each continues as soon as its own requests are
answered. A failure that the team did not cause (a model server, a tool's infrastructure) is retried, then counted,
and never trains. A failure that the policies caused (malformed replies, exhausted budgets, a wrongly used tool) is an
outcome like any other, and is rewarded.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

from ...agents.answers import Answer, DecisionId
from ...agents.basics.failures import Boundary, Ended, is_transient
from ...agents.policies import Call, Policy
from ...agents.team import BoundTeam
from ...envs.core.arena import Arena
from ...envs.core.branch import Branch
from ...envs.core.drivers import aplay, derive, side_by_side
from ...envs.core.tasks import Task
from ...envs.core.trace import Trace
from ..algorithms.algorithm import Tree
from ..group.contract import Group
from .counterfactual import Counterfactual, question
from .reporting.idle import Idle
from .reporting.progress import Progress
from .reporting.watchdog import Watchdog
from .statistics.decisions import decisions_of
from .statistics.table import Decision
from .tree import Grown, Judge, TreeSampler, Worth


class Seat:
    """Policy of a model group, as a player. A temperature of its own is for validation: then no samples are kept."""

    def __init__(
        self, group: Group, policy: str, temperature: float | None = None, idle: Idle | None = None
    ) -> None:
        self.group, self.policy, self.temperature, self.idle = group, policy, temperature, idle or Idle()

    async def act(self, call: Call) -> Answer:
        """Request a reply from the group."""
        keep = self.temperature is None
        with self.idle.call():
            return await self.group.generate(self.policy, call, self.temperature, keep)

    def __repr__(self) -> str:
        return f"policy {self.policy!r}"


def seated(
    players: Mapping[str, str],
    policies: Container[str],
    seat: Callable[[str], Policy],
    guest: Callable[[str], Policy],
) -> BoundTeam:
    """Return the player of every agent. `players`: agent -> policy or fixed player. A policy that plays several agents
    is one player.
    """
    seats = {name: seat(name) for name in dict.fromkeys(players.values()) if name in policies}
    return BoundTeam({agent: seats.get(name) or guest(name) for agent, name in players.items()}, players)


@dataclass(frozen=True)
class Draws:
    """Settings of a collection that its tasks share: which samples are played, and what becomes of them."""

    k: int
    """Number of samples (or trees) of each task."""
    seed: int
    """Seed of the run."""
    label: str
    """Label of the collection. The names and the seeds of its episodes depend on it."""
    keep: bool = True
    """Flag: the episodes are sealed for training. Otherwise only their scores count."""
    first: int = 0
    """Number of the first task under the label."""
    attempts: Mapping[int, int] | None = None
    """Samples that are played, each from this attempt on. None: all `k`, from the first attempt on."""
    thin: bool = False
    """Flag: prompts and tool results of the traces are not needed, and other controllers may leave them out."""

    @cached_property
    def samples(self) -> Mapping[int, int]:
        """First attempt of each sample that is played."""
        return dict.fromkeys(range(self.k), 0) if self.attempts is None else self.attempts


Growth: TypeAlias = tuple[Tree, Judge | None, Worth | None]
"""Tree of each sample, with what values its acts."""


def sampled_tokens(trace: Trace) -> int:
    """Return the number of tokens that policies sampled in an episode."""
    return sum(node.meta.tokens_out or 0 for node in trace.acts())


@dataclass(slots=True)
class Harvest:
    """Result of a collection."""

    traces: list[Trace] = field(default_factory=list)
    episodes: list[str] = field(default_factory=list)  # names, as the groups store them
    draws: dict[str, str] = field(default_factory=dict)  # episode -> the draw of a task to which it belongs
    decisions: list[Decision] = field(default_factory=list)
    grown: list[Grown] = field(default_factory=list)  # where trees were sampled
    failures: Counter[str] = field(default_factory=Counter)  # by boundary and error
    seconds: float = 0.0
    stale: int = 0  # number of episodes discarded as too old
    # by environment: all episodes that were begun (played, failed or left out)
    drawn: Counter[str] = field(default_factory=Counter)
    # (environment, metric): sums over all played episodes
    sums: dict[tuple[str, str], float] = field(default_factory=dict)

    def means(self) -> dict[str, float]:
        """Return the mean of every metric over the episodes of its environments. An episode that failed or has no such
        figure counts 0.
        """
        figures: dict[str, float] = {}
        for metric in dict.fromkeys(metric for _, metric in self.sums):
            homes = [env for env, name in self.sums if name == metric]
            figures[metric] = math.fsum(self.sums[env, metric] for env in homes) / sum(
                self.drawn[e] for e in homes
            )
        return figures

    @property
    def tasks(self) -> int:
        """Return the number of draws. One task may have been drawn twice."""
        return len({self.draws[name] for name in self.episodes})

    def take(self, name: str, trace: Trace, draw: str = "") -> None:
        """Add an episode. `draw` names the draw of its task, which the other samples of that draw share."""
        self.draws[name] = draw or name
        self.episodes.append(name)
        self.traces.append(trace)
        for metric, value in trace.metrics.items():
            self._count(trace.env_id, metric, value)

    def _count(self, env: str, metric: str, value: float) -> None:
        self.sums[env, metric] = self.sums.get((env, metric), 0.0) + value

    def add(self, more: Harvest, tasks: Container[tuple[str, str]] | None = None) -> list[str]:
        """Add another harvest's episodes of these (env_id, task); None: all. Return the names of the others.

        Episodes that are left out still count in the means: the means describe the policies, and not the choice.
        """
        kept: set[str] = set()
        others: list[str] = []
        for name, trace in zip(more.episodes, more.traces, strict=True):
            if tasks is None or (trace.env_id, trace.task_id) in tasks:
                self.episodes.append(name)
                self.traces.append(trace)
                kept.add(name)
            else:
                others.append(name)
        self.decisions += [d for d in more.decisions if d.episode in kept]
        self.draws |= more.draws
        self.grown += more.grown
        self.failures += more.failures
        self.seconds += more.seconds
        self.drawn += more.drawn
        for (env, metric), value in more.sums.items():
            self._count(env, metric, value)
        return others

    @property
    def cause(self) -> str:
        """Return the most frequent failure, for the message that stops a run."""
        return self.failures.most_common(1)[0][0] if self.failures else "no episode was begun"


class Cursor:
    """Position of a run in its tasks. Every epoch has a new random order. The state is (seed, epoch, position)."""

    def __init__(self, ids: list[str], seed: int) -> None:
        self.ids, self.seed = ids, seed
        self.epoch = self.position = 0
        self._order = self._shuffled()

    def take(self, count: int) -> list[str]:
        """Return the next tasks. They may be the last ones of an epoch and the first ones of the next."""
        taken: list[str] = []
        while len(taken) < count:
            if self.position == len(self._order):
                self.epoch, self.position = self.epoch + 1, 0
                self._order = self._shuffled()
            more = self._order[self.position : self.position + count - len(taken)]
            taken += more
            self.position += len(more)
        return taken

    def state_dict(self) -> dict[str, int]:
        """Return the position, as plain JSON for a checkpoint."""
        return {"seed": self.seed, "epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore the state that `state_dict` returned."""
        self.seed, self.epoch, self.position = state["seed"], state["epoch"], state["position"]
        self._order = self._shuffled()

    def _shuffled(self) -> list[str]:
        order = list(self.ids)
        random.Random(derive("epoch", self.seed, self.epoch)).shuffle(order)
        return order


class Collector:
    """Player of one arena's episodes with one team. It seals the samples."""

    def __init__(
        self,
        arena: Arena,
        team: BoundTeam,
        groups: Mapping[str, Group],
        home: Mapping[str, str],
        *,
        trained: set[str],
        concurrency: int,
        retries: int = 2,
        counterfactual: Mapping[str, Counterfactual] | None = None,
        watchdog: Watchdog | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.watchdog, self.progress = watchdog or Watchdog(0), progress or Progress()
        self.arena, self.team, self.groups, self.home = arena, team, groups, home
        self.trained, self.retries = trained, retries
        self.counterfactual = counterfactual or {}
        self._gate = asyncio.Semaphore(concurrency)

    async def collect(
        self,
        tasks: list[str],
        draw: Draws,
        on_trace: Callable[[Trace], None] | None = None,
        tree: Tree | None = None,
        judge: Judge | None = None,
        worth: Worth | None = None,
    ) -> Harvest:
        """Play the episodes (or trees) of each task, and seal those that are kept."""
        harvest = Harvest()
        began = time.perf_counter()
        harvest.drawn[self.arena.env_id] = len(tasks) * draw.k
        self.progress.begin("playing" if draw.keep else "validating", len(tasks) * len(draw.samples))
        await self._play(tasks, draw, harvest, on_trace, None if tree is None else (tree, judge, worth))
        harvest.seconds = time.perf_counter() - began
        return harvest

    async def _play(
        self,
        tasks: list[str],
        draw: Draws,
        harvest: Harvest,
        on_trace: Callable[[Trace], None] | None,
        grow: Growth | None,
    ) -> None:
        """Play all episodes, and add them to the harvest in the order of tasks and samples, not of arrival."""
        jobs = [(self.arena.task(t), s, i) for i, t in enumerate(tasks, draw.first) for s in draw.samples]

        async def counted(job: tuple[Task, int, int]) -> tuple[str, Trace | None, list[Decision]]:
            name, trace, rows = await self._episode(job, draw, harvest, on_trace, grow)
            if draw.keep and trace is not None:
                # while other episodes are played, and without taking a place among them
                await self._seal(name, rows)
            self.progress.ended(0 if trace is None else sampled_tokens(trace))
            return name, trace, rows

        async with self.team:
            played = await side_by_side(counted(job) for job in jobs)
        for (_, _, index), (name, trace, rows) in zip(jobs, played, strict=True):
            if trace is None:
                continue
            harvest.take(name, trace, f"{draw.label}:{index}")
            if draw.keep:
                harvest.decisions += rows

    async def _episode(
        self,
        job: tuple[Task, int, int],
        draw: Draws,
        harvest: Harvest,
        on_trace: Callable[[Trace], None] | None,
        grow: Growth | None,
    ) -> tuple[str, Trace | None, list[Decision]]:
        task, sample, index = job
        name = ""
        async with self._gate:
            for attempt in range(draw.samples[sample], self.retries + 1):
                name = f"{draw.label}:{index}.{sample}" + (f"~{attempt}" if attempt else "")
                chance = derive(draw.seed, draw.label, index, task.id, sample)
                if grow is None:
                    execution = self.arena.start(task, chance)
                    with self.watchdog.episode(name, execution):
                        trace = await aplay(execution, self.team, self.arena, name)
                    rows = decisions_of(trace, name, self.trained)
                else:
                    root = Branch.begin(self.arena, self.team, task, chance, name)
                    tree, judge, worth = grow
                    with self.watchdog.episode(name, root.play):
                        grown = await TreeSampler(root, tree, self.trained, chance, judge, worth).grow()
                    execution, trace, rows = grown.line.play, grown.trace, grown.rows
                    harvest.grown.append(grown)
                    harvest.failures += grown.lost
                trace.sample = sample
                if self.counterfactual and grow is None and execution.ended is not Ended.ERROR:
                    played = Branch(self.arena, self.team, execution, self.arena.scorer(task), name)
                    played.close()
                    await question(played, rows, self.counterfactual, chance)
                if execution.ended is not Ended.ERROR:
                    if on_trace is not None:
                        on_trace(trace)
                    return name, trace, rows
                harvest.failures[f"{execution.reason}: {trace.error}"] += 1
                await self._drop(name, f"failed-{execution.reason}")
                own_code = execution.reason in (Boundary.ENVIRONMENT, Boundary.JUDGE)
                if own_code and not is_transient(execution.exception):
                    break  # the same would happen again
        return name, None, []

    async def _seal(self, name: str, rows: list[Decision]) -> None:
        """Close an episode in the groups that sampled it. The other groups close it when the step retires it."""
        nodes: dict[str, list[str]] = {}
        for row in rows:
            if (home := self.home.get(row.policy)) is not None:
                nodes.setdefault(home, []).extend([row.node] if row.trainable else [])
        await asyncio.gather(*(self.groups[home].seal(name, keep) for home, keep in nodes.items()))

    async def _drop(self, name: str, cause: str) -> None:
        for group in self.groups.values():
            await group.drop(name, cause)


def too_old(decisions: Iterable[Decision], versions: Mapping[str, int], most: int) -> set[str]:
    """Return the episodes with a trained act that began more than `most` versions ago."""
    return {d.episode for d in decisions if d.trainable and versions.get(d.policy, 0) - d.version > most}


def minibatches_of(rows: list[Decision], count: int) -> list[list[DecisionId]]:
    """Cut decision ids into mini-batches by task, so that every policy makes equally many optimizer steps.

    Tasks are distributed by their tokens, the largest first, so the batches have about the same size. A unit lies
    within a task and is never split.
    """
    by_task: dict[str, list[Decision]] = {}
    for row in rows:
        by_task.setdefault(f"{row.env_id}/{row.task}", []).append(row)
    weight = {task: sum(r.n_tokens for r in members) for task, members in by_task.items()}
    count = max(1, min(count, len(by_task)))
    batches: list[list[DecisionId]] = [[] for _ in range(count)]
    loads = [0] * count
    for task in sorted(by_task, key=lambda t: (-weight[t], t)):
        lightest = min(range(count), key=lambda i: (loads[i], i))
        batches[lightest] += [r.id for r in by_task[task]]
        loads[lightest] += weight[task]
    return [sorted(b) for b in batches if b]
