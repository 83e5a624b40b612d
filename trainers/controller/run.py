"""A training run, from config to report.

    run = unitymas.train("mask-hotpotqa", preset="shared", steps=60)        # what `unitymas train` calls

A run lives in a directory: `config.yaml` (resolved), `metrics.jsonl`, `traces/`, `checkpoints/`,
`report.html`. Each is written so that a kill at any moment leaves it readable; `resume=True` goes on from
the newest whole checkpoint. The controller here is one asyncio loop; model groups are local or Ray actors.
"""

from __future__ import annotations

import asyncio
import shlex
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...agents.manifest import signed
from ...agents.team import BoundTeam, Team, TeamError
from ...agents.threads import together
from ...envs.core.arena import Arena
from ...envs.core.branch import check_anchors, check_forks
from ...envs.core.drivers import run_sync
from ...envs.core.trace import Trace, write, write_lines
from ...envs.registry import make_arena
from ...rewards.monitors import Watch
from ..algorithms import Algorithm, make_algorithm
from ..config.group_settings import PolicySpec
from ..config.plan import check_role, check_roles, described, group_specs
from ..config.resolve import fresh_directory, resolve
from ..config.schema import ConfigError, RunConfig, dump, merge
from ..recipes import make_recipe
from . import checkpoint
from .collect import Collector, Cursor, Seat
from .interrupt import Interrupts
from .loggers import Logbook, rows_of
from .progress import Progress
from .resume import check_unfinished, newest, resumed
from .statistics.credit import Transform, apply_credit, credit_from_config
from .statistics.table import Decision, Signal, Table, ValueSummary
from .step import Default
from .stop_rules import Stopped, StopRules
from .watchdog import Watchdog

__all__ = ["Run", "Stopped", "train"]


class Run:
    """The controller of one training run."""

    def __init__(
        self, config: RunConfig, directory: str | Path, *, resume: bool = False, changes: Sequence[str] = ()
    ) -> None:
        self.config, self.dir, self.changes = config, Path(directory), changes
        self.step = 0
        self.state: dict[str, dict[str, Any]] = defaultdict(dict)  # the algorithms', kept in checkpoints
        self.algorithms: dict[str, Algorithm] = {}
        self.credits: dict[str, dict[str, tuple[Transform, ...]]] = {}  # policy -> role -> credit transforms
        self.critics: dict[str, str] = {}  # policy -> its critic
        self.home: dict[str, str] = {}  # policy -> group
        self.groups: dict[str, Any] = {}
        self.recipe: Default = make_recipe(config.recipe, config.recipe_args)
        self.on_trace: Callable[[Trace], None] | None = None
        self.played: dict[str, Trace] = {}  # this step's episodes
        self.versions: dict[str, int] = {}  # of each policy, as last published
        self.watch, self.watchdog, self.progress = Watch(), Watchdog(config.watchdog), Progress()
        self.sizes: dict[str, int] = {}  # policy -> parameters
        self.interrupts = Interrupts()
        self.stops = StopRules(config)
        self._resume = resume
        self.arena = self._arena(config.env.split)
        self.validation = self._arena(config.eval.split)
        self.cursor = Cursor(list(self.arena.task_ids), config.seed)
        self._plan_policies()

    # setting up --------------------------------------------------------------------------------------

    def _arena(self, split: str) -> Arena:
        env = self.config.env
        where: dict[str, Any] = {"split": split, "reward": env.reward, **env.args}
        if env.data is not None:
            where["data"] = env.data
        if env.size is not None and split == env.split:
            where["size"] = env.size
        arena = make_arena(env.id, **where)
        if self.config.episode_seconds is not None:
            arena.budget = replace(arena.budget, seconds=self.config.episode_seconds)
        return arena

    def _plan_policies(self) -> None:
        """Which policy learns how, who judges whom, and what each group holds."""
        config = self.config
        seated = set(Team(dict.fromkeys(config.map, "random")).bind(self.arena.roles).policies)
        used = {self.player(agent) for agent in seated} & set(config.policies)
        idle = set(config.policies) - used - {p.critic for p in config.policies.values()}
        if idle:
            raise ConfigError(f"policies.{sorted(idle)[0]}: no role is mapped to it; map it, or leave it out")
        specs: dict[str, dict[str, PolicySpec]] = {name: {} for name in config.groups}
        for name, policy in config.policies.items():
            self.home[name] = policy.group
            learning = None if policy.frozen or name not in used else policy.learning
            is_critic = name not in used
            specs[policy.group][name] = PolicySpec(
                learning=policy.learning if is_critic else learning,
                adapter=policy.adapter, critic=is_critic, init=policy.init, reference=policy.reference,
                sampling=policy.sampling,
            )  # fmt: skip
            if learning is None:
                continue
            algorithm = make_algorithm(**{"name": "ppo", **policy.algorithm})
            self.algorithms[name] = algorithm
            if algorithm.needs.values:
                critic = policy.critic if policy.critic != "auto" else f"{name}-critic"
                if critic in used:
                    raise ConfigError(
                        f"policies.{name}.critic: {critic!r} plays a role, and a critic only judges; name a policy that "
                        "no role is mapped to, or use critic: auto"
                    )
                self.critics[name] = critic
                if policy.critic == "auto":
                    self.home[critic] = policy.group
                    specs[policy.group][critic] = PolicySpec(
                        learning=policy.critic_learning or policy.learning, critic=True,
                        adapter=policy.adapter, init=policy.init,
                    )  # fmt: skip
            if algorithm.needs.tree:
                check_forks(self.arena, f"policies.{name}.algorithm ({algorithm.name})")
            if algorithm.needs.anchors:
                check_anchors(self.arena, f"policies.{name}.algorithm ({algorithm.name})")
        if config.counterfactual:
            check_forks(self.arena, "counterfactual")
        known = [role.name for role in self.arena.workflow.roles]
        check_roles("counterfactual", config.counterfactual, ["*", *known])
        for name, algorithm in self.algorithms.items():
            check_roles(f"policies.{name}.algorithm.role_weights", algorithm.role_weights, known)
            for key, role in algorithm.needs.roles.items():
                check_role(f"policies.{name}.algorithm.{key}", role, known)
            if credit := config.policies[name].credit:
                check_roles(f"policies.{name}.credit", credit, ["*", *known])
                self.credits[name] = credit_from_config(credit)
        try:
            self.recipe.check(self)
            self.recipe.plan(self)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        self.hosted = specs

    def player(self, agent: str, arena: Arena | None = None) -> str:
        """The map's entry of an agent: its own, its role's, or "*"."""
        role = (arena or self.arena).roles[agent].name
        for key in (agent, role, "*"):
            if key in self.config.map:
                return self.config.map[key]
        raise TeamError(
            f"map: nobody plays {agent!r}; add {' or '.join(map(repr, dict.fromkeys([agent, role, '*'])))}"
        )

    async def _start(self) -> None:
        from ..group.runtime import start_groups  # torch comes in here

        self.specs = group_specs(self.config, self.hosted, self.dir / "inspection")
        self.dir.mkdir(parents=True, exist_ok=True)
        try:
            groups = await start_groups(self.specs, self.config.runtime)
        except BaseException:
            with suppress(OSError):
                self.dir.rmdir()  # nothing has begun; a directory that holds something stays
            raise
        self.groups = {name: self.watchdog.over(group, name) for name, group in groups.items()}
        try:
            await self._check_groups()
        except BaseException:
            await together(*(group.close() for group in self.groups.values()))
            raise
        self.collector = self._collector(self.arena, None)
        self.evaluator = self._collector(self.validation, self.config.eval.temperature)

    def _collector(self, arena: Arena, temperature: float | None) -> Collector:
        questions = self.config.counterfactual if temperature is None else {}
        return Collector(
            arena, self.team({}, temperature, arena), self.groups, self.home,
            trained=set(self.algorithms), concurrency=self.config.concurrency, retries=self.config.retries,
            counterfactual=questions, watchdog=self.watchdog, progress=self.progress,
        )  # fmt: skip

    def team(
        self, players: Mapping[str, str] = {}, temperature: float | None = None, arena: Arena | None = None
    ) -> BoundTeam:
        """Everybody at the table, by the map; `players` (agent -> policy) seats some otherwise."""
        arena = arena or self.arena
        seats: dict[str, Any] = {}
        made: dict[str, Any] = {}
        names = {agent: players.get(agent) or self.player(agent, arena) for agent in arena.roles}
        for agent, player in names.items():
            if player in self.config.policies:
                if player not in made:
                    made[player] = Seat(self.groups[self.home[player]], player, temperature)
                seats[agent] = made[player]
            else:
                seats[agent] = (
                    Team({"*": player}).bind({agent: arena.roles[agent]}, arena.expert).policies[agent]
                )
        return BoundTeam(seats, names)

    # the loop ----------------------------------------------------------------------------------------

    async def train(self) -> Run:
        """Run all steps, or until interrupted; the directory says how it went."""
        await self._start()
        self.watchdog.start()
        self.book = book = Logbook(self.dir, self.config, self.arena)
        self.progress.show = book.progressed
        book.say(described(self.config, self.dir, self.arena, self.home, self.sizes, self.specs))
        try:
            with self.interrupts.heeded(self):
                await self._begin()
                while self.step < self.config.steps and not self.interrupts:
                    await self._advance()
            if self.step < self.config.steps:
                book.finish(f"interrupted after step {self.step}")
            else:
                await self.export()
                book.finish("done")
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
            for group in self.groups.values():
                await group.close()
            self.watchdog.stop()
        return self

    async def _begin(self) -> None:
        """From the newest checkpoint, or from the first validation."""
        mark = await self._load(newest(self.dir)) if self._resume else None
        self.book.begin(self.step, mark)
        checkpoint.write_whole(self.dir / "config.yaml", signed(dump(self.config)))
        if mark is None:
            self.book.validated(self.step, await self.validate())
            if self.interrupts:
                await self.save()

    async def _advance(self) -> None:
        """One step, with all that is written of it."""
        started = time.perf_counter()
        metrics = await self.recipe.step(self)
        self.step += 1
        metrics["time/step"] = time.perf_counter() - started
        self.book.stepped(self.step, metrics)
        self.stops.stepped(metrics)
        every, held_out = self.config.eval.every, None
        last = self.step == self.config.steps
        if last or (every and self.step % every == 0):
            found = await self.validate()
            held_out = found.get(self.arena.headline, 0.0)
            self.book.validated(self.step, found)
        seen = {**metrics, "step": self.step, "train": metrics.get(f"train/{self.arena.headline}", 0.0)}
        for alarm in self.watch.see(seen if held_out is None else {**seen, "held_out": held_out}):
            self.book.alarmed(alarm)
        every = self.config.checkpoint_every
        if last or self.interrupts or (every and self.step % every == 0):
            await self.save()

    async def _check_groups(self) -> None:
        """What they say of themselves; a critic in another group must read the ids of the policy that it judges."""
        words: dict[str, str] = {}
        for name, group in self.groups.items():
            report = await group.report()
            words[name] = report["vocabulary"]
            self.versions |= report["versions"]
            self.sizes |= report["parameters"]
        for policy, critic in self.critics.items():
            if words[self.home[policy]] != words[self.home[critic]]:
                theirs = self.config.groups[self.home[critic]].model
                raise ConfigError(
                    f"policies.{policy}.critic: {critic!r} lives in group {self.home[critic]!r}, whose model ({theirs}) "
                    f"has another tokenizer than that of group {self.home[policy]!r}, and would misread every token; "
                    "put it into a group with the same tokenizer, or use critic: auto"
                )

    async def validate(self) -> dict[str, float]:
        """Held-out tasks, greedy, each task weighing the same; failures count 0. The same chance at every step."""
        settings = self.config.eval
        ids = list(self.validation.task_ids)[: settings.tasks]
        harvest = await self.evaluator.collect(ids, settings.k, self.config.seed, "eval", keep=False)
        figures = harvest.means() | {"failed": 1.0 - len(harvest.traces) / harvest.drawn.total()}
        write(harvest.traces, self.dir / "traces" / f"validation-{self.step:06d}.jsonl.zst")
        return figures

    # what recipes call -------------------------------------------------------------------------------

    async def values(self, policy: str, ids: list[str]) -> dict[str, ValueSummary]:
        """Value summaries by the policy's critic."""
        critic, home = self.critics.get(policy), self.groups[self.home[policy]]
        needs = self.algorithms[policy].needs
        contexts = self.contexts(ids) if needs.values == "trace" else None
        if critic is None or self.home[critic] == self.home[policy]:
            found: dict[str, ValueSummary] = await home.values(policy, ids, needs, critic, contexts)
            return found
        elsewhere = self.groups[self.home[critic]]
        await elsewhere.admit(await home.samples(ids))
        await elsewhere.values(critic, ids, replace(needs, kl_reward=0.0), critic, contexts)
        await home.admit(await elsewhere.samples(ids))
        found = await home.values(policy, ids, needs)
        if needs.kl_reward:  # part of the rewards that the critic is to foresee
            await elsewhere.admit(await home.samples(ids))
        return found

    async def prepare(self, policy: str, ids: list[str]) -> None:
        """What its update will need besides, measured while its critic is at work."""
        await self.groups[self.home[policy]].prepare(policy, ids)

    def contexts(self, ids: list[str]) -> dict[str, str]:
        """What a critic of the whole trace sees at a decision: all that was said before, and its prompt."""
        found: dict[str, str] = {}
        for id in ids:
            episode, _, name = id.rpartition("/")
            trace = self.played.get(episode)
            if trace is None:  # a tree's sibling: its critic sees the prompt
                continue
            node = trace.node(name)
            said = [f"{n.agent}: {n.text}" for n in trace.acts() if n.round < node.round]
            found[id] = "\n".join([*said, f"{node.agent}: {node.messages[-1]['content']}\n"])
        return found

    async def foresee(self, wanted: Mapping[str, list[str]]) -> dict[str, float]:
        """What critics expect once these decisions (by policy) are said: for trees that choose by it, and train it."""
        found = await together(*(self.values(p, ids) for p, ids in wanted.items()))
        return {id: value.after for values in found for id, value in values.items()}

    async def update(self, policy: str, signals: list[Signal], batches: list[list[str]]) -> dict[str, float]:
        """One policy's update, and its critic's beside it."""
        learners = [name for name in (policy, self.critics.get(policy)) if name is not None]
        self.progress.begin(f"updating {' and '.join(learners)}")
        algorithm = self.algorithms[policy]
        found: list[dict[str, float]] = await together(
            *(self.groups[self.home[name]].update(name, algorithm, signals, batches) for name in learners)
        )
        return found[0] | {f"critic/{name}": value for own in found[1:] for name, value in own.items()}

    async def publish(self) -> None:
        """New weights to the engines: once per group and step, when all have updated."""
        for found in await together(*(group.publish() for group in self.groups.values())):
            self.versions |= found

    async def retire(self, episodes: list[str]) -> None:
        """The step is over for these episodes."""
        await together(*(group.retire(episodes) for group in self.groups.values()))

    async def drop(self, episode: str, cause: str) -> None:
        """Discard an episode's samples everywhere."""
        await together(*(group.drop(episode, cause) for group in self.groups.values()))

    def credit(self, table: Table, policy: str) -> Table:
        """The table as this policy's credit settings see it."""
        return apply_credit(table, self.credits[policy]) if policy in self.credits else table

    def worth(self, rows: Sequence[Decision]) -> dict[str, float]:
        """Decisions' rewards by id, each as its policy's credit settings see it: for trees that choose by them."""
        table = Table(rows)
        found = dict(zip(table.ids, table.reward.tolist(), strict=True))
        for policy in self.credits:
            reward = self.credit(table, policy).reward
            found |= {table.ids[i]: float(reward[i]) for i in table.mine(policy)}
        return found

    async def keep(
        self, traces: Sequence[Trace], table: Table, signals: Mapping[str, list[Signal]] = {}
    ) -> None:
        """Every so many steps: the traces, and beside them what was sampled, token by token."""
        every = self.config.log.traces_every
        if not every or self.step % every:
            return
        write(traces, self.dir / "traces" / f"train-{self.step:06d}.jsonl.zst")
        path = self.dir / "samples" / f"train-{self.step:06d}.jsonl.zst"
        path.parent.mkdir(exist_ok=True)
        records: list[dict[str, Any]] = []
        for policy, algorithm in self.algorithms.items():
            ids = [row.id for row in table.rows if row.trainable and row.policy == policy]
            given = signals.get(policy, [])
            records += await self.groups[self.home[policy]].records(ids, policy, algorithm, given)
        write_lines(records, path)

    async def export(self) -> None:
        """Every trained policy as a Hugging Face directory: `run:DIR` plays them."""
        for name in self.algorithms:
            await self.groups[self.home[name]].export(name, self.dir / "policies" / name)

    # checkpoints -------------------------------------------------------------------------------------

    async def save(self) -> Path:
        """A whole checkpoint: every group's policies, and the controller's state."""
        target = self.dir / "checkpoints" / f"step-{self.step:06d}"
        self.progress.begin(f"writing {target.name}")
        with checkpoint.writing(target) as folder:
            for name, group in self.groups.items():
                await group.save(folder / name)
            checkpoint.write_json(folder / "controller.json", self._state())
            checkpoint.write_tensors(folder / "state.pt", dict(self.state))
            checkpoint.write_json(folder / "recipe.json", self.recipe.state_dict())
        checkpoint.prune(self.dir / "checkpoints", self.config.checkpoints)
        return target

    def _state(self) -> dict[str, Any]:
        """The controller's own, as plain data."""
        return {
            "step": self.step, "cursor": self.cursor.state_dict(),
            "watch": self.watch.state_dict(), **self.stops.state_dict(), "data": self.arena.data.fingerprint, "book": self.book.mark(),
        }  # fmt: skip

    async def _load(self, folder: Path) -> Mapping[str, Any]:
        """Go on from a checkpoint. -> the mark of the book as it was then."""
        with checkpoint.reading(folder / "controller.json") as state:
            self.step = state["step"]
            self.cursor.load_state_dict(state["cursor"])
            self.watch.load_state_dict(state["watch"])
            self.stops.load_state_dict(state)
            mark: Mapping[str, Any] = state["book"]
            data, begun_with = self.arena.data, state["data"]
        if data.fingerprint != begun_with:
            raise ConfigError(
                f"env.data: the run's tasks were others (fingerprint {begun_with}) than {data.name!r} gives here "
                f"({data.fingerprint}); give it the data that it began with"
            )
        self.state = defaultdict(dict, checkpoint.read_tensors(folder / "state.pt"))
        with checkpoint.reading(folder / "recipe.json") as state:
            self.recipe.load_state_dict(state)
        loads = (group.load(folder / name) for name, group in self.groups.items())
        for found in await together(*loads):
            self.versions |= found
        changed = f"; changed: {', '.join(self.changes)}" if self.changes else ""
        print(f"unitymas: resumed from {folder}{changed}", file=sys.stderr, flush=True)
        return mark

    @property
    def history(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl; a last line that a kill tore is left out."""
        path = self.dir / "metrics.jsonl"
        return rows_of(path) if path.exists() else []


def train(
    id: str | None = None,
    *,
    preset: str | None = None,
    file: str | Path | None = None,
    overrides: Sequence[str] = (),
    directory: str | Path | None = None,
    resume: bool = False,
    anew: bool = False,
    **fields: Any,
) -> Run:
    """Train a team; gives the finished `Run`. Keywords are fields of the config tree (`steps=20`, …).

    `resume` goes on with the run in `directory`; `anew` begins it again where it ended before its first checkpoint.
    A Ctrl-C finishes the step, writes a checkpoint and raises `KeyboardInterrupt`; a second one stops at once.
    """
    if resume:
        if directory is None:
            raise ConfigError("resume: say which run, directory=…")
        if preset is not None:
            raise ConfigError(f"preset {preset!r}: a run that goes on has its policies already; leave it out")
        if id is not None:
            fields = merge(fields, {"env": {"id": id}})
        config, changes = resumed(directory, file=file, overrides=overrides, **fields)
        if not anew:
            check_unfinished(directory, newest(directory), config.steps)
    else:
        config, changes = resolve(id, preset_name=preset, file=file, overrides=overrides, **fields), []
    where = Path(directory) if directory is not None else fresh_directory(config)
    if not resume and (where / "metrics.jsonl").exists():
        raise ConfigError(f"{where} already holds a run; resume it (--resume), or name another directory")
    run = Run(config, where, resume=resume and not anew, changes=changes)
    run_sync(run.train(), interrupted=run.interrupts)
    if run.step < config.steps:
        raise KeyboardInterrupt(
            f"{where} stands at step {run.step}; go on with: unitymas train --resume {shlex.quote(str(where))}"
        )
    return run
