"""One step of training: collect -> table -> values -> advantages -> update -> publish.

A *recipe* defines the parts of a step. `Default` reads top to bottom. Others override `step`, or one of its parts
(`trains`, `team`, `plan`), and are registered by name (recipes/).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from ...agents.answers import DecisionId
from ...agents.basics.hints import say_once
from ...agents.basics.renamed import renamed
from ...agents.basics.threads import together
from ...envs.core.branch import STATELESS
from ...rewards.monitors import measure
from ..algorithms.algorithm import Plan
from . import checkpoint
from .collect import Collector, Cursor, Draws, Harvest, minibatches_of, sampled_tokens, too_old
from .statistics.comparison import starved
from .statistics.credit import late_rewards, unearned
from .statistics.decisions import shuffled_credits
from .statistics.table import Signal, Table
from .stop_rules import Stopped as Stopped

if TYPE_CHECKING:
    from ...agents.team import BoundTeam
    from .stage import Stage

StepMetrics = dict[str, float]
__getattr__ = renamed(__name__, {"Metrics": "StepMetrics"})


class Default:
    """Recipe in which every policy with a learner plays its roles, and learns in each step."""

    overlaps: ClassVar[bool] = True
    """Flag: the playing and the learning policies are the same in every step, so episodes may be played during an
    update (overlap=…). The flag is not inherited: each recipe declares it."""

    seats_by_name: ClassVar[bool] = True
    """Flag: all players are policies or fixed players, so other controllers can make them by name (controllers=N)."""

    def check(self, run: Stage) -> None:
        """Raise an error if the run's environment and map do not fit the recipe, before anything is loaded."""

    def state_dict(self) -> dict[str, object]:
        """Return the state of the recipe, as plain JSON for a checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore the state that `state_dict` returned. `check` has been called before."""

    def trains(self, run: Stage) -> list[str]:
        """Return the policies that learn in this step."""
        return list(run.algorithms)

    def team(self, run: Stage) -> BoundTeam:
        """Return the team that plays in this step."""
        return run.team()

    def plan(self, run: Stage) -> Plan:
        """Return the plan of how this step's samples are drawn."""
        plan = Plan(k=run.config.k)
        trees = {policy: run.algorithms[policy].collect(plan).tree for policy in self.trains(run)}
        if len(set(trees.values())) > 1:
            raise ValueError(
                "policies that learn together are sampled together, in the same trees or in none: "
                + "; ".join(
                    f"policies.{p}.algorithm ({run.algorithms[p].name}) wants {t}" for p, t in trees.items()
                )
            )
        for policy in self.trains(run):
            plan = run.algorithms[policy].collect(plan)
        return plan

    async def step(self, run: Stage) -> StepMetrics:
        """Make one step, and return its metrics."""
        harvest = await self.collect(run)
        stale = harvest.stale + await self.drop_stale(run, harvest)
        run.hosts.played = dict(zip(harvest.episodes, harvest.traces, strict=True))
        table = Table(harvest.decisions)
        metrics = {**collected(harvest), **roles(table), "stale": float(stale)}
        signals: dict[str, list[Signal]] = {}
        if len(table) and any(len(table.mine(p)) for p in run.algorithms):
            table = await self.judge(run, table)
            if run.step == 0:
                self.warn(run, table, harvest)
            signals = self.advantages(run, table, metrics)
            metrics |= await self.update(run, table, signals)
        else:
            metrics["usable"] = 0.0
            run.stops.cause = harvest.cause if harvest.failures else ""
        await run.keep(harvest.traces, table, signals)
        await run.hosts.retire(harvest.episodes)
        return metrics

    async def collect(self, run: Stage) -> Harvest:
        """Play the step's tasks, or wait for those that are already being played."""
        if run.stream is not None:
            return self.prepared(run, await run.stream.batch())
        run.collector.team, run.collector.trained = self.team(run), set(self.trains(run))
        return await self.gather(run, run.collector, run.cursor, run.config.tasks_per_step)

    async def gather(
        self, run: Stage, collector: Collector, cursor: Cursor, tasks: int, place: str = ""
    ) -> Harvest:
        """Play so many tasks. With dynamic sampling, replace those from which nothing can be learned."""
        plan, harvest, missing = self.plan(run), Harvest(), tasks
        for attempt in range(plan.resample + 1):
            label = f"{run.step}{place}" if attempt == 0 else f"{run.step}{place}r{attempt}"
            with run.hosts.idle.waiting():
                draw = Draws(plan.k, run.config.seed, label, thin=not run.plan.reads_prompts(run.step))
                more = await collector.collect(
                    cursor.take(missing), draw, run.on_trace,
                    tree=plan.tree, judge=run.hosts.foresee, worth=run.plan.worth if run.plan.credits else None,
                )  # fmt: skip
            self.prepared(run, more)
            for name in harvest.add(more, self.useful(run, more) if plan.resample else None):
                await run.hosts.drop(name, "useless")
            missing = tasks - harvest.tasks
            if missing <= 0:
                break
        return harvest

    def prepared(self, run: Stage, harvest: Harvest) -> Harvest:
        """Return the harvest for training. In a control run, credits are exchanged between episodes."""
        if run.config.shuffle_rewards:
            shuffled_credits(harvest.traces, run.config.seed + run.step)
            rebook(harvest)
        return harvest

    async def drop_stale(self, run: Stage, harvest: Harvest) -> int:
        """Discard episodes with a trained act that is more than `staleness` versions old. Return their number."""
        old = too_old(harvest.decisions, run.hosts.versions, run.config.staleness)
        for name in sorted(old):
            await run.hosts.drop(name, "stale")
        harvest.decisions = [d for d in harvest.decisions if d.episode not in old]
        return len(old)

    def useful(self, run: Stage, harvest: Harvest) -> set[tuple[str, str]]:
        """Return (env_id, task) of the tasks from which an algorithm can learn, with the rewards that it will get."""
        table = Table(harvest.decisions)
        tasks: set[tuple[str, str]] = set()
        for policy, algorithm in run.algorithms.items():
            tasks |= algorithm.useful(run.plan.credit(table, policy), table.mine(policy))
        return tasks

    async def judge(self, run: Stage, table: Table) -> Table:
        """Return the value summaries of the decisions whose algorithm needs them."""
        wanted = {
            p: [table.ids[i] for i in table.mine(p)] for p, a in run.algorithms.items() if a.needs.summaries
        }
        early = [p for p in wanted if run.algorithms[p].needs.reference and p in self.trains(run)]
        judging = [run.hosts.values(p, ids) for p, ids in wanted.items() if ids]
        summaries = await together(*judging, *(run.hosts.prepare(p, wanted[p]) for p in early))
        by_id = {id: value for values in summaries if values for id, value in values.items()}
        for row in table.rows:
            row.value = by_id.get(row.id)
        return table

    def warn(self, run: Stage, table: Table, harvest: Harvest) -> None:
        """Warn about rewards that come too late for a tree that compares acts by their immediate rewards."""
        trees = {policy: run.algorithms[policy].collect(Plan()).tree for policy in self.trains(run)}
        blind = [policy for policy, tree in trees.items() if tree is not None and tree.score == "step"]
        if not blind:
            return
        for role, late in late_rewards(table, harvest.traces).items():
            say_once(
                f"{role} earns {', '.join(late)} only after later acts, and tree_score=step compares what an act earns at "
                f"once: {role} is not trained for it. Set policies.{blind[0]}.algorithm.tree_score=rollout"
            )

    def advantages(self, run: Stage, table: Table, metrics: StepMetrics) -> dict[str, list[Signal]]:
        """Return the signals of each policy. A trained role that cannot learn stops the run, and the message tells
        why.
        """
        signals: dict[str, list[Signal]] = {}
        for policy in self.trains(run):
            algorithm, mine = run.algorithms[policy], table.mine(policy)
            if not len(mine):
                continue
            # rows of a tree do not have the later rewards of the continued branch
            if not algorithm.needs.tree:
                run.stops.missing(
                    f"policies.{policy}.credit", unearned(table, run.plan.credits.get(policy, {}))
                )
            named = not algorithm.needs.anchors or any(table.rows[i].anchor for i in mine)
            run.stops.missing(f"policies.{policy}.algorithm ({algorithm.name})", None if named else STATELESS)
            rows = run.plan.credit(table, policy)
            try:
                signals[policy] = algorithm.advantages(rows, mine, run.state[policy])
            except FloatingPointError as error:
                raise Stopped(f"policy {policy!r}: {error}") from error
            check_state(policy, algorithm.name, run.state[policy])
            figures = algorithm.metrics(rows, mine, signals[policy])
            metrics |= {f"policy/{policy}/{k}": v for k, v in figures.items()}
            run.stops.starving(policy, starved(rows, signals[policy]))
        return signals

    async def update(self, run: Stage, table: Table, signals: dict[str, list[Signal]]) -> StepMetrics:
        """Update all groups at the same time, and then publish once per policy and step."""
        batches = minibatches_of([r for r in table.rows if r.trainable], run.config.minibatches)
        jobs: dict[str, list[list[DecisionId]]] = {}
        for policy, own in signals.items():
            ids = {s.id for s in own}
            cut = [[id for id in batch if id in ids] for batch in batches]
            jobs[policy] = [b for _ in range(run.config.epochs) for b in cut if b]
        await run.hosts.phase("learn")
        try:
            done = await together(*(run.hosts.update(p, signals[p], jobs[p]) for p in signals if jobs[p]))
            await run.hosts.publish()
        finally:
            await run.hosts.phase("collect")
        metrics = {"usable": float(sum(map(len, signals.values())))}
        for policy, figures in zip([p for p in signals if jobs[p]], done, strict=True):
            metrics |= {f"policy/{policy}/{k}": v for k, v in figures.items()}
        return metrics


def check_state(policy: str, algorithm: str, state: Mapping[str, object]) -> None:
    """Refuse state that a checkpoint cannot hold, before the first checkpoint is due."""
    try:
        checkpoint.check_storable(dict(state))
    except Exception as error:
        raise TypeError(
            f"policy {policy!r}: what {algorithm} keeps in `state` cannot be kept in a checkpoint; let it be numbers, text, "
            f"containers or tensors ({str(error).splitlines()[0]:.200})"
        ) from error


def rebook(harvest: Harvest) -> None:
    """Set the rewards of decisions to the present credits of their traces."""
    from .statistics.decisions import credits_by_node

    credit = {
        (name, node): rewards
        for name, trace in zip(harvest.episodes, harvest.traces, strict=True)
        for node, rewards in credits_by_node(trace).items()
    }
    for row in harvest.decisions:
        row.credit = credit.get((row.episode, row.node), {})


def collected(harvest: Harvest) -> StepMetrics:
    """Return metrics of a collection: scores, endings, failures, speed."""
    traces = harvest.traces
    figures: StepMetrics = {
        "episodes": float(len(traces)),
        "failures": float(sum(harvest.failures.values())),
        "time/collect": harvest.seconds,
    }
    sums: dict[str, list[float]] = defaultdict(list)
    for trace in traces:
        sums["truncated"].append(float(str(trace.ended) == "truncated"))
        sums["tool_misused"].append(float(trace.ended == "terminal" and trace.error is not None))
    figures |= {name: math.fsum(values) / len(values) for name, values in sums.items()}
    figures |= {f"train/{name}": value for name, value in harvest.means().items()}
    figures |= measure(traces)  # acts, and other figures that the monitors watch
    tokens = sum(map(sampled_tokens, traces))
    figures["tokens_out"] = float(tokens)
    figures["time/rollout_tokens_per_second"] = tokens / harvest.seconds if harvest.seconds else 0.0
    return figures


def roles(table: Table) -> StepMetrics:
    """Return metrics by role: acts, mean credit by component, share of malformed replies through `format`."""
    cells: dict[str, list[float]] = defaultdict(list)
    for row in table.rows:
        cells[f"role/{row.role}/credit"].append(sum(row.credit.values()))
        cells[f"role/{row.role}/tokens"].append(float(row.n_tokens))
        for component, amount in row.credit.items():
            cells[f"role/{row.role}/{component}"].append(amount)
    counts = {f"role/{r}/acts": 0.0 for r in {row.role for row in table.rows}}
    for row in table.rows:
        counts[f"role/{row.role}/acts"] += 1
    return {**{name: math.fsum(v) / len(v) for name, v in cells.items()}, **counts}
