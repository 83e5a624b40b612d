"""Overlap: episodes are played while groups update. One draw of a task, from its admission to the update:

    admit   while there is capacity, the next task of the cursor begins; its k episodes are played at the same time
    arrive  all of them have ended and are sealed: they wait for their step
    batch   a step takes its draws, and trains on them like any other step
    publish the step is done, versions increase, and there is capacity for more draws

The capacity is that of AReaL (2505.24298): (staleness + finished steps + 1) · batch − admitted draws. The unit is a draw, all k episodes
of a task, because algorithms compare these. Names, seeds and tasks of draws are those of a synchronous run.

`wait`: step s trains on draws s · batch … (s + 1) · batch − 1, in any order of arrival. A draw is admitted only when no more than
`staleness` steps lie between its first token and its update. Nothing is discarded, so long episodes count as often as short ones.

`drop`: a step takes the first draws that have arrived, and discards those with an act that is older than `staleness` versions. The
trainer never waits for a slow draw. Long episodes are discarded more often than short ones: the batch is biased against them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING

from ....agents.answers import DecisionId
from ....agents.team import BoundTeam
from ....envs.core.trace import Trace
from ...config.reader import leaves, to_dict, written
from ..checkpoint import Saved
from ..collect import Draws, Harvest, sampled_tokens, too_old
from ..reporting.progress import Progress, Speed
from ..statistics.table import Decision
from .draw_record import record_of
from .log import NAME, Log, LogMark

if TYPE_CHECKING:
    from ..stage import Stage


class Stream:
    """Draws in flight, and draws that have arrived."""

    def __init__(self, run: Stage) -> None:
        self.run, self.size = run, run.config.tasks_per_step
        self.log = Log(run.dir / NAME)
        self.admitted = 0  # draws so far
        self.discarded = 0
        self.stale = 0  # number of episodes discarded since the last batch
        self.flying: dict[int, asyncio.Task[None]] = {}
        self.arrived: dict[int, Harvest] = {}  # in the order of arrival
        self.paused = False
        self.speed = Speed()
        self._mark: LogMark | None = None
        self.progress, run.collector.progress = run.collector.progress, Progress()

    @property
    def room(self) -> int:
        """Number of draws that may be admitted now."""
        config = self.run.config
        # steps after the last one need no draws
        steps = min(self.run.step + 1 + config.staleness, config.steps)
        return steps * self.size - (self.admitted - self.discarded)

    def begin(self, team: BoundTeam, trained: Collection[str]) -> None:
        """Open the log, and admit the first draws. If there is a checkpoint, its state has been loaded before."""
        run = self.run
        run.collector.team, run.collector.trained = team, set(trained)
        settings = dict(leaves(written(to_dict(run.config))))
        self.log.begin(self._mark, step=run.step, versions=run.hosts.versions, settings=settings)
        self.admit()

    def admit(self) -> None:
        """Begin draws while there is capacity."""
        while not self.paused and self.room > 0:
            number, (task,) = self.admitted, self.run.cursor.take(1)
            self.log.write("admit", draw=number, task=task, step=self.run.step)
            self.flying[number] = asyncio.ensure_future(self._play(number, task))
            self.admitted += 1

    async def _play(self, number: int, task: str) -> None:
        harvest = await self.play(number, task)
        self.log.write("arrive", draw=number, **record_of(harvest, number, self.size))
        self.arrived[number] = harvest
        for trace in harvest.traces:
            self.progress.ended(sampled_tokens(trace))
        del self.flying[number]

    async def play(self, number: int, task: str, attempts: Mapping[int, int] | None = None) -> Harvest:
        """Play a draw, and seal it. `attempts` is explained at `Draws`."""
        config, (label, index) = self.run.config, divmod(number, self.size)
        draw = Draws(config.k, config.seed, str(label), first=index, attempts=attempts)
        with self.speed.running():
            harvest = await self.run.collector.collect([task], draw, self.run.on_trace)
        self.speed.tokens += sum(map(sampled_tokens, harvest.traces))
        return harvest

    async def batch(self) -> Harvest:
        """Return the episodes of the next step, as soon as they have arrived."""
        self.progress.begin("waiting for episodes", self.size * self.run.config.k)
        with self.run.hosts.idle.waiting():
            while len(chosen := await self._chosen()) < self.size:
                self.admit()
                await self._arrival()
        self.log.write("batch", step=self.run.step, draws=chosen)
        harvest = Harvest()
        for number in chosen:
            harvest.add(self.arrived.pop(number))
        harvest.stale, self.stale = self.stale, 0
        return harvest

    async def _chosen(self) -> list[int]:
        """Return the arrived draws of the next step."""
        if self.run.config.overlap == "wait":
            first = self.run.step * self.size
            return [n for n in range(first, first + self.size) if n in self.arrived]
        for number, harvest in list(self.arrived.items()):
            if too_old(harvest.decisions, self.run.hosts.versions, self.run.config.staleness):
                await self._discard(number)
        return sorted(list(self.arrived)[: self.size])

    async def _discard(self, number: int) -> None:
        """Discard a whole draw, because its episodes are compared with each other."""
        harvest = self.arrived.pop(number)
        self.log.write("discard", draw=number, step=self.run.step)
        self.discarded += 1
        self.stale += len(harvest.episodes)
        for name in harvest.episodes:
            await self.run.hosts.drop(name, "stale")

    async def _arrival(self) -> None:
        """Wait until a draw has arrived. An error of a draw is raised here."""
        done, _ = await asyncio.wait(list(self.flying.values()), return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    def stepped(self, metrics: Mapping[str, float]) -> None:
        """Record a finished step: its versions are published, and there is capacity for more draws."""
        run = self.run
        self.log.write("publish", step=run.step, versions=run.hosts.versions, figures=exact(metrics))
        self.admit()

    @asynccontextmanager
    async def at_rest(self) -> AsyncIterator[None]:
        """Stop admitting, and wait until all draws in flight have arrived. Only then is a checkpoint consistent."""
        self.paused = True
        try:
            while self.flying:
                await self._arrival()
            yield
        finally:
            self.paused = False
        self.admit()

    async def close(self, done: bool) -> None:
        """Cancel the draws in flight."""
        for task in (flying := list(self.flying.values())):
            task.cancel()
        with suppress(Exception):  # the end of the run reports these errors
            await asyncio.gather(*flying, return_exceptions=True)
        if done:
            self.log.write("end", step=self.run.step)

    # checkpoints -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, object]:
        """Return the draws that wait for their step, and the position of the log's end. No draw is in flight."""
        arrived = [[number, plain(harvest)] for number, harvest in self.arrived.items()]
        return {
            "admitted": self.admitted, "discarded": self.discarded, "stale": self.stale, "arrived": arrived,
            "log": self.log.mark(),
        }  # fmt: skip

    def load_state_dict(self, state: Saved) -> None:
        """Restore the state that `state_dict` returned."""
        self.admitted, self.discarded, self.stale = state["admitted"], state["discarded"], state["stale"]
        self.arrived = {number: harvest_of(own) for number, own in state["arrived"]}
        self._mark = state["log"]


def exact(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of updates that a replay must reproduce exactly."""
    return {k: v for k, v in metrics.items() if k.startswith("policy/") and "time/" not in k}


def plain(harvest: Harvest) -> dict[str, object]:
    """Return a harvest as plain JSON."""
    return {
        "episodes": harvest.episodes, "draws": harvest.draws, "seconds": harvest.seconds,
        "traces": [trace.to_dict() for trace in harvest.traces],
        "decisions": [asdict(row) for row in harvest.decisions],
        "failures": harvest.failures, "drawn": harvest.drawn,
        "sums": [[env, metric, value] for (env, metric), value in harvest.sums.items()],
    }  # fmt: skip


def harvest_of(own: Saved) -> Harvest:
    """Read the result of `plain`."""
    harvest = Harvest(
        traces=[Trace.from_dict(trace) for trace in own["traces"]],
        episodes=list(own["episodes"]), draws=dict(own["draws"]), seconds=own["seconds"],
        decisions=[
            Decision(**{**row, "id": DecisionId.of(row["id"]), "parents": tuple(row["parents"])})
            for row in own["decisions"]
        ],
        sums={(env, metric): value for env, metric, value in own["sums"]},
    )  # fmt: skip
    harvest.failures.update(own["failures"])
    harvest.drawn.update(own["drawn"])
    return harvest
