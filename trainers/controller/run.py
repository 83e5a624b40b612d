"""A training run, from config to report.

    run = unitymas.train("rag-nq", preset="shared")        # what `unitymas train` calls

A run lives in a directory: `config.yaml` (resolved), `metrics.jsonl`, `traces/`, `checkpoints/`, `report.html`. Each is written so that a
kill at any moment leaves it readable; `resume=True` continues from the newest complete checkpoint. The controller is one asyncio loop.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import cast

from ...agents.basics.failures import GroupLost
from ...agents.basics.hints import counted
from ...agents.basics.manifest import signed
from ...agents.spending import BudgetSpent
from ...agents.team import BoundTeam
from ...envs.core.arena import Arena
from ...envs.core.drivers import EnvLike, run_sync
from ...envs.core.trace import Trace, write, write_lines
from ...rewards.monitors import Watch
from ..algorithms.algorithm import Algorithm, AlgorithmState
from ..config.group_settings import GroupSpec
from ..config.plan import described, env_of, make_arenas, placed, plan
from ..config.resolve import fresh_directory, resolve
from ..config.schema import ConfigError, RunConfig, dump, merge
from ..group.contract import Group
from ..recipes import make_recipe
from . import checkpoint
from .all_groups import HostedGroups
from .collect import Collector, Cursor, Draws, seated
from .interrupt import Interrupts
from .overlap.fitting import check_overlap
from .overlap.replay import Recording, Replay
from .overlap.stream import Stream
from .reporting.loggers import BookMark, BookRow, Logbook, rows_of
from .reporting.progress import Progress
from .reporting.timeline import Timeline
from .reporting.watchdog import Watchdog
from .resume import NothingToResume, check_continues, going_on, newest, way_on
from .shards.crossing import check_controllers
from .statistics.table import Signal, Table
from .step import Default
from .stop_rules import Stopped, StopRules

__all__ = ["Run", "Stopped", "train"]


class Run:
    """The controller of one training run."""

    def __init__(
        self,
        config: RunConfig,
        directory: str | Path,
        *,
        resume: bool = False,
        changes: Sequence[str] = (),
        losses: Sequence[BookRow] = (),
        recording: Recording | None = None,
    ) -> None:
        self.config, self.dir, self.changes, self.losses = config, Path(directory), changes, losses
        self.recording, self.stream = recording, cast(Stream | None, None)
        self.arena, self.validation = make_arenas(config)
        self.plan = plan(config, self.arena)
        self.step = 0
        # state of the algorithms, which is part of checkpoints
        self.state: dict[str, AlgorithmState] = defaultdict(dict)
        self.cursor = Cursor(list(self.arena.task_ids), config.seed)
        self.on_trace: Callable[[Trace], None] | None = None
        self.watch, self.watchdog, self.progress = Watch(), Watchdog(config.watchdog), Progress()
        self.timeline = Timeline(None)
        self.stops, self.interrupts = StopRules(config), Interrupts()
        self.hosts = HostedGroups(self.plan, self.watchdog, self.progress)
        self.recipe: Default = make_recipe(config.recipe, config.recipe_args)
        self._resume, self._saved = resume, -1
        self._saving, self._rested = 0.0, time.perf_counter()  # seconds of the last save, and when it ended
        if resume:
            hosted = {name: group.policies for name, group in self.plan.specs.items()}
            check_continues(directory, config.overlap, hosted, changes)
        self.spending = self.plan.guests.spending
        try:
            self.recipe.check(self)
            check_overlap(config, self.recipe, self.recipe.plan(self))
            check_controllers(
                config, self.recipe.seats_by_name, self.recipe.plan(self), [self.arena, self.validation]
            )
        except ValueError as error:
            raise ConfigError(str(error)) from error

    @property
    def algorithms(self) -> Mapping[str, Algorithm]:
        """Return the algorithm of each policy that learns."""
        return self.plan.algorithms

    @property
    def groups(self) -> dict[str, Group]:
        """Return the model groups by name. They must have started."""
        return self.hosts.members

    # who plays ---------------------------------------------------------------------------------------

    def player(self, agent: str, arena: Arena | None = None) -> str:
        """Return the player of an agent, according to the map."""
        return self.plan.player(agent, arena)

    def collector_of(self, arena: Arena, temperature: float | None = None) -> Collector:
        """Make a collector for an environment. A `temperature` is for validation; then no samples are kept."""
        questions = self.config.counterfactual if temperature is None and arena is self.arena else {}
        collector = Collector(
            arena, self.team({}, temperature, arena), self.groups, self.plan.home,
            trained=set(self.algorithms), concurrency=self.config.concurrency, retries=self.config.retries,
            counterfactual=questions, watchdog=self.watchdog, progress=self.progress,
        )  # fmt: skip
        return collector if self.hosts.shards is None else self.hosts.shards.over(collector)

    def team(
        self, players: Mapping[str, str] = {}, temperature: float | None = None, arena: Arena | None = None
    ) -> BoundTeam:
        """Return the players of all agents, according to the map. `players` (agent -> policy) replaces some of them."""
        arena = arena or self.arena
        names = {agent: players.get(agent) or self.player(agent, arena) for agent in arena.roles}
        return seated(
            names, self.config.policies, lambda policy: self.hosts.seat(policy, temperature),
            lambda player: self.plan.guests.player(player, arena.expert),
        )  # fmt: skip

    # the loop ----------------------------------------------------------------------------------------

    async def train(self) -> Run:
        """Run all steps, or until an interrupt. The run directory records how the run ended."""
        self.interrupts.cancels()
        specs = await self._start()
        self.watchdog.start()
        self.book = book = Logbook(self.dir, self.config, self.arena)
        self.progress.show = book.progressed
        self.timeline = Timeline(self.dir / "timeline.json" if self.config.log.timeline else None)
        self.progress.entered, self.watchdog.answered = self.timeline.phase, self.timeline.call
        book.say(described(self.plan, self.dir, self.hosts.sizes, specs))
        try:
            # a resume counts everything spent, even if it continues from an earlier checkpoint
            bills = self.spending.kept_in(self.dir / self.spending.file_name)
            with self.interrupts.heeded(self._abandon), bills:
                await self._begin()
                while self.step < self.config.steps and not self.interrupts:
                    await self._advance()
                if self.step >= self.config.steps:
                    await self.export()
            book.finish("done" if self.step >= self.config.steps else f"interrupted after step {self.step}")
        except BudgetSpent as spent:
            if self.step:
                await self.export()
            book.finish(f"stopped: {spent}")
            raise Stopped(f"{spent} (players.* of the config; --resume goes on)") from spent
        except Stopped as stop:
            book.finish(f"stopped: {stop}")
            raise
        except asyncio.CancelledError:
            book.finish("interrupted")
            raise
        except Exception as error:
            book.finish(f"failed: {type(error).__name__}: {error}")
            raise
        finally:
            if self.stream is not None:
                await self.stream.close(done=self.step >= self.config.steps)
            await self.hosts.close()
            self.watchdog.stop()
        return self

    async def _start(self) -> Mapping[str, GroupSpec]:
        specs = placed(self.plan, self.dir / "inspection")
        if self.recording is not None:
            specs = self.recording.specs(specs, self.config.staleness)
        self.dir.mkdir(parents=True, exist_ok=True)
        try:
            await self.hosts.start(specs)
        except BaseException:
            with suppress(OSError):
                self.dir.rmdir()  # nothing has begun; a directory with files is kept
            raise
        self.collector = self.collector_of(self.arena)
        self.evaluator = self.collector_of(self.validation, self.config.eval.temperature)
        if self.recording is not None:
            self.stream = Replay(self, self.recording)
        elif self.config.overlap != "off":
            self.stream = Stream(self)
        return specs

    def _abandon(self) -> None:
        """End the groups without waiting."""
        self.book.finish("stopped at once")
        print(f"unitymas: {way_on(self.dir, verified=False)}", file=sys.stderr, flush=True)
        self.hosts.abandon()

    async def _begin(self) -> None:
        """Begin from the newest checkpoint, or with the first validation."""
        mark = await self._load(newest(self.dir)) if self._resume else None
        if mark is not None:  # a kill may have come between the last checkpoint and the removal of older ones
            self._prune()
        config = signed(dump(self.config))
        if mark is None:  # before the book: a directory with a book is a run, and every run has a config
            checkpoint.write_whole(self.dir / "config.yaml", config)
        self.book.begin(self.step, mark)
        self.book.lost(self.step, self.losses)
        if mark is not None:
            checkpoint.write_whole(self.dir / "config.yaml", config)
        if self.stream is not None:
            self.stream.begin(self.recipe.team(self), self.recipe.trains(self))
        if mark is None:
            self.book.validated(self.step, await self.validate())
            if self.interrupts:
                await self.save()

    async def _advance(self) -> None:
        """Make one step, and write its records."""
        # an endpoint that fails or ends the budget within the step must not lose finished steps
        if (self.spending.may_end() or self._at_risk()) and self._saved != self.step:
            await self.save()
        started = time.perf_counter()
        self.hosts.idle.begin()
        metrics = await self.recipe.step(self)
        self.step += 1
        metrics |= {"time/step": time.perf_counter() - started, **self.hosts.idle.figures()}
        if self.stream is not None:
            metrics["time/rollout_tokens_per_second"] = self.stream.speed.taken()
            self.stream.stepped(metrics)
        metrics |= self.spending.figures() | self.hosts.figures
        metrics |= self.timeline.stepped(self.step, started)
        self.book.stepped(self.step, metrics)
        self.stops.stepped(metrics)
        every, held_out = self.config.eval.every, None
        last = self.step == self.config.steps
        if last or (every and self.step % every == 0):
            figures = await self.validate()
            held_out = figures.get(self.arena.headline, 0.0)
            self.book.validated(self.step, figures)
        seen = {**metrics, "step": self.step, "train": metrics.get(f"train/{self.arena.headline}", 0.0)}
        for alarm in self.watch.see(seen if held_out is None else {**seen, "held_out": held_out}):
            self.book.alarmed(alarm)
        every = self.config.checkpoint_every
        if last or self.interrupts or (every and self.step % every == 0):
            await self.save()

    def _at_risk(self) -> bool:
        """Tell whether a failing endpoint would lose steps that took ten times as long as saving them takes."""
        remote = any(name.startswith("openai:") for name in self.config.map.values())
        worth = time.perf_counter() - self._rested >= 10 * self._saving
        return remote and worth and self.step > 0 and self.config.checkpoint_every > 0

    async def validate(self) -> dict[str, float]:
        """Play held-out tasks greedily. Each task has the same weight, and a failure counts 0. The seeds are the same
        at every validation.
        """
        settings = self.config.eval
        ids = list(self.validation.task_ids)[: settings.tasks]
        harvest = await self.evaluator.collect(ids, Draws(settings.k, self.config.seed, "eval", keep=False))
        figures = harvest.means() | {"failed": 1.0 - len(harvest.traces) / harvest.drawn.total()}
        write(harvest.traces, self.dir / "traces" / f"validation-{self.step:06d}.jsonl.zst")
        return figures

    # what is written --------------------------------------------------------------------------------

    async def keep(
        self, traces: Sequence[Trace], table: Table, signals: Mapping[str, list[Signal]] = {}
    ) -> None:
        """Write the traces of the step, and the sampled tokens, if this step's traces are kept."""
        every = self.config.log.traces_every
        if not every or self.step % every:
            return
        write(traces, self.dir / "traces" / f"train-{self.step:06d}.jsonl.zst")
        path = self.dir / "samples" / f"train-{self.step:06d}.jsonl.zst"
        path.parent.mkdir(exist_ok=True)
        rows = [row for row in table.rows if row.trainable]
        own = {policy: [row.id for row in rows if row.policy == policy] for policy in self.algorithms}
        kept = [await self.hosts.records(policy, ids, signals.get(policy, [])) for policy, ids in own.items()]
        write_lines((record for records in kept for record in records), path)

    async def export(self) -> None:
        """Export every trained policy as a Hugging Face directory. `run:DIR` plays them."""
        for name in self.algorithms:
            await self.hosts.export(name, self.dir / "policies" / name)

    # checkpoints -------------------------------------------------------------------------------------

    async def save(self) -> Path:
        """Write a checkpoint: every group's policies, and the controller's state."""
        target = self.dir / "checkpoints" / checkpoint.named(self.step)
        self.progress.begin(f"writing {target.name}")
        began = time.perf_counter()
        async with nullcontext() if self.stream is None else self.stream.at_rest():
            await self._write(target)
        self._prune()
        self._saved, self._rested = self.step, time.perf_counter()
        self._saving = self._rested - began
        return target

    async def _write(self, target: Path) -> None:
        with checkpoint.writing(target) as folder:
            await self.hosts.save(folder)
            checkpoint.write_json(folder / "controller.json", self._state())
            checkpoint.write_tensors(folder / "state.pt", dict(self.state))
            checkpoint.write_json(folder / "recipe.json", self.recipe.state_dict())
            if self.stream is not None:
                checkpoint.write_json(folder / "overlap.json", self.stream.state_dict())

    def _prune(self) -> None:
        """Keep the newest checkpoints, and those of the steps with the best validation (`checkpoints_best`)."""
        root, kept = self.dir / "checkpoints", self.config.checkpoints_best
        scores = {
            checkpoint.named(row["step"]): row.get(self.arena.headline, 0.0)
            for row in (self.history if kept else ())
            if row["kind"] == "validation"
        }
        standing = [folder.name for folder in checkpoint.finished(root) if folder.name in scores]
        best = sorted(standing, key=lambda name: (-scores[name], name))[:kept]
        checkpoint.prune(root, self.config.checkpoints, best)

    def _state(self) -> dict[str, object]:
        """Return the controller's own state as plain data."""
        return {
            "step": self.step, "cursor": self.cursor.state_dict(),
            "watch": self.watch.state_dict(), **self.stops.state_dict(),
            "data": self.arena.data.fingerprint, "book": self.book.mark(),
        }  # fmt: skip

    async def _load(self, folder: Path) -> BookMark:
        """Continue from a checkpoint. Return the position of the metrics file at that time."""
        with checkpoint.reading(folder / "controller.json") as state:
            self.step = self._saved = state["step"]
            self.stops.load_state_dict(state)
            self.cursor.load_state_dict(state["cursor"])
            self.watch.load_state_dict(state["watch"])
            mark: BookMark = state["book"]
            data, begun_with = self.arena.data, state["data"]
        if data.fingerprint != begun_with:
            raise ConfigError(
                f"env.data: the run's tasks were others (fingerprint {begun_with}) than {data.name!r} gives here "
                f"({data.fingerprint}); give it the data that it began with"
            )
        self.state = defaultdict(dict, checkpoint.read_tensors(folder / "state.pt"))
        with checkpoint.reading(folder / "recipe.json") as state:
            self.recipe.load_state_dict(state)
        if self.stream is not None:
            with checkpoint.reading(folder / "overlap.json") as state:
                self.stream.load_state_dict(state)
        await self.hosts.load(folder)
        changed = f"; changed: {', '.join(self.changes)}" if self.changes else ""
        print(f"unitymas: resumed from {folder}{changed}", file=sys.stderr, flush=True)
        return mark

    @property
    def history(self) -> list[BookRow]:
        """Return the rows of metrics.jsonl. A last line that a kill tore is left out."""
        path = self.dir / "metrics.jsonl"
        return rows_of(path) if path.exists() else []


def supervised(run: Run) -> Run:
    """Train, and continue from the newest checkpoint when a group dies. Return the run that finished."""
    config, reached, attempts = run.config, -1, 0
    while True:
        try:
            run_sync(run.train(), interrupted=run.interrupts)
            return run
        except (KeyboardInterrupt, asyncio.CancelledError) as end:
            if not (run.interrupts or isinstance(end, KeyboardInterrupt)):
                raise
            raise KeyboardInterrupt(way_on(run.dir)) from None
        except GroupLost as loss:
            attempts = 1 if run.step > reached else attempts + 1
            reached = max(reached, run.step)
            if attempts > config.restarts:
                raise
            try:
                last = newest(run.dir)
                saved = checkpoint.step_of(last)
            except NothingToResume:
                last, saved = None, 0
            lost = run.step - saved
            row = {
                "cause": str(loss),
                "steps_lost": lost,
                "attempt": attempts,
                "lost_at": round(time.time(), 6),
            }
            pause = min(config.restart_pause * 2.0 ** (attempts - 1), 60.0)
            print(
                f"unitymas: {loss}; going on from step {saved} in {pause:g} s ({counted(lost, 'step')} lost, attempt "
                f"{attempts} of {config.restarts})", file=sys.stderr, flush=True,
            )  # fmt: skip
            time.sleep(pause)
            run = Run(config, run.dir, resume=last is not None, losses=[*run.losses, row])


def train(
    id: EnvLike | None = None,
    *,
    preset: str | None = None,
    file: str | Path | None = None,
    overrides: Sequence[str] = (),
    directory: str | Path | None = None,
    resume: bool = False,
    anew: bool = False,
    **fields: object,
) -> Run:
    """Train a team. Return the finished `Run`. Keywords are keys of the config (`steps=20`, …; docs/settings.md).

    `id` is the id of an environment, or an environment that `unitymas.make` made, with or without reward wrappers. `reward=` is
    short for `env={"reward": …}`, and may hold rules as Python objects.

    `resume` continues the run in `directory`. `anew` begins that run again if it ended before its first checkpoint.

    Ctrl-C finishes the step, writes a checkpoint and raises `KeyboardInterrupt`. A second Ctrl-C stops at once.
    """
    if "reward" in fields:
        fields = merge(
            {"env": {"reward": fields["reward"]}}, {k: v for k, v in fields.items() if k != "reward"}
        )
    if id is not None and not isinstance(id, str):
        fields, id = merge({"env": env_of(id)}, fields), None
    if resume:
        config, changes = going_on(id, preset, directory, anew, file=file, overrides=overrides, **fields)
    else:
        config, changes = resolve(id, preset_name=preset, file=file, overrides=overrides, **fields), []
    where = Path(directory) if directory is not None else fresh_directory(config)
    if not resume and (where / "metrics.jsonl").exists():
        raise ConfigError(f"{where} already holds a run; resume it (--resume), or name another directory")
    run = supervised(Run(config, where, resume=resume and not anew, changes=changes))
    if run.step < config.steps:
        raise KeyboardInterrupt(way_on(where))
    return run
