"""All model groups as one object. A call for a policy goes to the group that hosts it, and to its critic's group."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Coroutine, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ...agents.answers import DecisionId
from ...agents.basics.threads import together
from ...envs.core.trace import Trace
from ..config.group_settings import GroupSpec
from ..config.plan import RunPlan
from ..config.schema import ConfigError
from ..group.contract import Group
from .collect import Seat
from .reporting.idle import Idle
from .reporting.progress import Progress
from .reporting.watchdog import Watchdog
from .shards.sharded import Shards, start_shards
from .statistics.table import Signal, ValueSummary

if TYPE_CHECKING:
    from ..group.sample_store import SampleRow


T = TypeVar("T")


class HostedGroups:
    """Model groups of a run, by policy. First all groups update, and *then* all publish."""

    def __init__(self, plan: RunPlan, watchdog: Watchdog, progress: Progress) -> None:
        self.plan, self.watchdog, self.progress = plan, watchdog, progress
        self.members: dict[str, Group] = {}  # by name
        self.played: Mapping[str, Trace] = {}  # episodes of this step, for critics that read the whole trace
        self.versions: dict[str, int] = {}  # version of each policy, as last published
        self.sizes: dict[str, int] = {}  # parameters of each policy
        self.idle = Idle()
        self.turns: Mapping[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # of each pool
        self.shards: Shards | None = None  # other controllers that play; None: only this one plays
        self.figures: dict[str, float] = {}  # metrics of pools (MiB in each phase) and of replicas

    def of(self, policy: str) -> Group:
        """Return the group that hosts a policy."""
        return self.members[self.plan.home[policy]]

    def seat(self, policy: str, temperature: float | None = None) -> Seat:
        """Return a policy as a player."""
        return Seat(self.of(policy), policy, temperature, self.idle)

    # from start to end -------------------------------------------------------------------------------

    async def start(self, specs: Mapping[str, GroupSpec]) -> None:
        """Load the models. If one group cannot start, all groups end."""
        from ..group.runtime import start_groups  # torch comes in here

        groups = await start_groups(specs, self.plan.config.runtime, self.plan.config.ray)
        self.members = {name: self.watchdog.over(group, name) for name, group in groups.items()}
        try:
            await self._check()
            if self.plan.config.controllers > 1:
                alike = groups if self.plan.config.runtime == "ray" else self.members
                self.shards = await start_shards(self.plan, alike, self.watchdog, self.idle)
        except BaseException:
            await together(*(group.close() for group in self.members.values()))
            raise

    async def _check(self) -> None:
        """Request a report from every group. A critic in another group must have the same token ids as its policy."""
        words: dict[str, str] = {}
        for name, group in self.members.items():
            report = await group.report()
            words[name] = report["vocabulary"]
            self.versions |= report["versions"]
            self.sizes |= report["parameters"]
        home = self.plan.home
        for policy, critic in self.plan.critics.items():
            if words[home[policy]] != words[home[critic]]:
                theirs = self.plan.config.groups[home[critic]].model
                raise ConfigError(
                    f"policies.{policy}.critic: {critic!r} lives in group {home[critic]!r}, whose model ({theirs}) "
                    f"has another tokenizer than that of group {home[policy]!r}, and would misread every token; "
                    "put it into a group with the same tokenizer, or use critic: auto"
                )

    async def close(self) -> None:
        """End all controllers and groups, one after the other."""
        if self.shards is not None:
            self.shards.close()
        for group in self.members.values():
            await group.close()

    def abandon(self) -> None:
        """End all groups without waiting."""
        if self.shards is not None:
            self.shards.close()
        for group in self.members.values():
            group.abandon()

    async def save(self, folder: Path) -> None:
        """Save every group's policies, for a checkpoint."""
        for name, group in self.members.items():
            await group.save(folder / name)

    async def load(self, folder: Path) -> None:
        """Restore the policies that `save` wrote."""
        await self._publish(*(group.load(folder / name) for name, group in self.members.items()))

    # one step ----------------------------------------------------------------------------------------

    async def values(self, policy: str, ids: list[DecisionId]) -> dict[DecisionId, ValueSummary]:
        """Return the value summaries of a policy's critic, in any group."""
        critic, home = self.plan.critics.get(policy), self.of(policy)
        needs = self.plan.algorithms[policy].needs
        contexts = seen_by_critic(ids, self.played) if needs.values == "trace" else None
        if critic is None or self.plan.home[critic] == self.plan.home[policy]:
            return await home.values(policy, ids, needs, critic, contexts)
        elsewhere = self.of(critic)
        await home.send(ids, elsewhere.peer)
        await elsewhere.values(critic, ids, replace(needs, kl_reward=0.0), critic, contexts)
        await elsewhere.send(ids, home.peer, True)
        summaries = await home.values(policy, ids, needs)
        if needs.kl_reward:  # part of the rewards that the critic learns to predict
            await home.send(ids, elsewhere.peer, True)
        return summaries

    async def foresee(self, wanted: Mapping[str, list[DecisionId]]) -> dict[DecisionId, float]:
        """Return what critics expect after these decisions (by policy). Trees choose candidates by it, and learn from
        it.
        """
        judged = await together(*(self.values(policy, ids) for policy, ids in wanted.items()))
        return {id: value.after for values in judged for id, value in values.items()}

    async def prepare(self, policy: str, ids: list[DecisionId]) -> None:
        """Compute what else a policy's update needs, while its critic computes values."""
        await self.of(policy).prepare(policy, ids)

    async def update(
        self, policy: str, signals: list[Signal], batches: list[list[DecisionId]]
    ) -> dict[str, float]:
        """Update one policy, and its critic at the same time."""
        learners = [name for name in (policy, self.plan.critics.get(policy)) if name is not None]
        self.progress.begin(f"updating {' and '.join(learners)}")
        algorithm = self.plan.algorithms[policy]
        own, *critics = await together(
            *(
                self._in_turn(self.plan.home[name], self.of(name).update(name, algorithm, signals, batches))
                for name in learners
            )
        )
        return dict(own) | {f"critic/{name}": value for figures in critics for name, value in figures.items()}

    async def phase(self, name: str) -> None:
        """Tell the groups whose engines may sleep to begin a phase: "learn" (sleep) or "collect" (wake)."""
        groups = self.plan.config.groups
        sleepers = [
            g for g in self.members if groups[g].pool or groups[g].engine_options.get("enable_sleep_mode")
        ]
        held = await together(*(self.members[group].phase(name) for group in sleepers))
        for group, sizes in zip(sleepers, held, strict=True):
            self.figures |= {f"memory/{group}/{name}/{kind}": size / 2**20 for kind, size in sizes.items()}

    async def _in_turn(self, group: str, work: Coroutine[object, None, T]) -> T:
        """Let the groups of a pool work one after the other, and all others at the same time."""
        pool = self.plan.config.groups[group].pool
        if not pool:
            return await work
        async with self.turns[pool]:
            return await work

    async def publish(self) -> None:
        """Publish new weights to the engines, once per group and step, after all updates."""
        await self._publish(*(self._in_turn(name, group.publish()) for name, group in self.members.items()))
        for name in (name for name, group in self.plan.config.groups.items() if group.replicas > 1):
            for policy, counts in (await self.members[name].report())["engines"].items():
                kinds = ("replicas", "replicas_lost", "requests_moved", "routed_tokens", "routed_tokens_held")
                self.figures |= {f"engine/{policy}/{kind}": float(counts[kind]) for kind in kinds}

    async def _publish(self, *published: Coroutine[object, None, dict[str, int]]) -> None:
        for versions in await together(*published):
            self.versions |= versions

    async def retire(self, episodes: list[str]) -> None:
        """Close these episodes, because the step is over."""
        await together(*(group.retire(episodes) for group in self.members.values()))

    async def drop(self, episode: str, cause: str) -> None:
        """Discard an episode's samples in all groups."""
        await together(*(group.drop(episode, cause) for group in self.members.values()))

    async def records(self, policy: str, ids: list[DecisionId], signals: list[Signal]) -> list[SampleRow]:
        """Return the sampled tokens of these decisions."""
        return await self.of(policy).records(ids, policy, self.plan.algorithms[policy], signals)

    async def export(self, policy: str, folder: Path) -> None:
        """Write a policy as a Hugging Face directory."""
        await self.of(policy).export(policy, folder)

    async def adopt(self, policy: str, folder: Path) -> None:
        """Load a policy's weights from a Hugging Face directory."""
        await self.of(policy).adopt(policy, folder)


def seen_by_critic(ids: list[DecisionId], played: Mapping[str, Trace]) -> dict[DecisionId, str]:
    """Return the text that a critic of the whole trace reads at a decision: all earlier replies, and the prompt."""
    contexts: dict[DecisionId, str] = {}
    for id in ids:
        trace = played.get(id.episode)
        if trace is None:  # a sibling in a tree: its critic gets the prompt
            continue
        node = trace.node(id.node)
        earlier = [f"{n.agent}: {n.text}" for n in trace.acts() if n.round < node.round]
        contexts[id] = "\n".join([*earlier, f"{node.agent}: {node.messages[-1]['content']}\n"])
    return contexts
