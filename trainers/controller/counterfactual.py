"""Counterfactual credit: the score of an episode, compared with its score after another act.

    unitymas train ID counterfactual.planner.samples=2 counterfactual.planner.limit=3

For up to `limit` acts of the role in an episode, the episode is forked before the act. In the fork the act is sampled
again (or replaced by a neutral reply), and the rest is played to its end. The act's reward becomes
scale * (score of the episode - mean score of the forks). Replies in forks are never trained on, and an act without
forks keeps its reward. The cost is bounded: at most limit * samples extra endings of an episode.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...agents.answers import DecisionId
from ...agents.basics.failures import Ended
from ...agents.roles import entry_of
from ...envs.core.branch import Branch
from ...envs.core.drivers import derive
from ...envs.core.trace import Trace
from ..config.choices import Count, Settings
from .statistics.table import Decision


@dataclass(frozen=True, slots=True, kw_only=True)
class Counterfactual(Settings):
    """Settings of counterfactual credit for one role."""

    samples: Count = 1
    """Forks of an act. More forks mean less noise."""
    limit: Count = 4
    """Largest number of the role's acts in an episode that are forked, drawn at random."""
    reply: str | None = None
    """Neutral reply that replaces the act. null: the role is sampled again."""
    scale: float = 1.0
    """Factor of the difference."""
    score: str = ""
    """Metric that is compared. Empty: the environment's headline metric, or the sum of all rewards if there is none."""


async def question(
    played: Branch, rows: Sequence[Decision], settings: Mapping[str, Counterfactual], seed: int
) -> dict[DecisionId, float]:
    """Reward what the settings ask for by its difference to what would have been. -> decision id: the difference."""
    jobs = []
    for role in sorted({row.role for row in rows}):
        how = entry_of(settings, role)
        own = [row for row in rows if row.role == role and row.trainable]
        if how is not None:
            chosen = random.Random(derive("counterfactual", seed, role)).sample(own, min(how.limit, len(own)))
            jobs += [(row, how) for row in chosen]
    results = await asyncio.gather(*(_difference(played, row, how, seed) for row, how in jobs))
    differences = {}
    for (row, _), difference in zip(jobs, results, strict=True):
        if difference is not None:
            row.credit = {"counterfactual": difference}
            differences[row.id] = difference
    return differences


async def _difference(played: Branch, row: Decision, how: Counterfactual, seed: int) -> float | None:
    """scale * (as played - otherwise); None where every fork failed for infrastructure's sake."""
    forks = await asyncio.gather(*(_otherwise(played, row.node, how, seed, i) for i in range(how.samples)))
    scores = [_score(trace, how, played) for trace in forks if str(trace.ended) != "error"]
    if not scores:
        return None
    return how.scale * (_score(played.trace, how, played) - math.fsum(scores) / len(scores))


async def _otherwise(played: Branch, node: str, how: Counterfactual, seed: int, number: int) -> Trace:
    """The episode with another act at `node`; the chance in the world stays the same."""
    fork = played.fork(f"c{node}.{number}", at=node)
    if how.reply is not None and fork.play.ended is Ended.NO:
        fork.play.answer(fork.play.node(node), how.reply)
    return (await fork.finish()).trace


def _score(trace: Trace, how: Counterfactual, played: Branch) -> float:
    name = how.score or played.arena.headline
    if name in trace.metrics:
        return trace.metrics[name]
    if how.score:
        names = ", ".join(trace.metrics) or "none"
        raise ValueError(f"counterfactual: {played.arena.env_id} has no metric {how.score!r}; it has {names}")
    return math.fsum(credit.amount for credit in trace.credits)
