"""From traces to the thin table: one `Decision` for each act of an episode."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable

from ..envs.trace import Trace, jsonable
from ..envs.workflow import Node
from .table import Decision


def decisions_of(
    trace: Trace, episode: str, trained: Collection[str], sibling_sets: bool = False
) -> list[Decision]:
    """A finished episode's decisions. `trained` names the policies that learn; other acts only count in statistics.

    A chain is one agent in one episode: what it says later continues what it said before.
    """
    ended = "truncated" if str(trace.ended) == "truncated" else "terminal"
    credit = credits_by_node(trace)
    rows: list[Decision] = []
    last: dict[str, Decision] = {}
    counts: dict[str, int] = {}
    for node in sorted(trace.acts(), key=lambda n: (n.round, n.id)):  # in the order they were asked
        agent = node.agent or ""
        order = counts.get(agent, 0)
        counts[agent] = order + 1
        policy = str(node.meta.get("policy", ""))
        row = Decision(
            id=f"{episode}/{node.id}", task=trace.task_id, episode=episode, node=node.id,
            role=node.role or "", agent=agent, chain=f"{episode}/{agent}", policy=policy,
            n_tokens=int(node.meta.get("tokens_out", 0)) or 1, parents=node.parents,
            turn=order, order=order, prompt_hash=prompt_hash(node), anchor=node.meta.get("anchor"),
            version=int(node.meta.get("version", 0)),
            trainable=policy in trained and not node.meta.get("forced") and "tokens_out" in node.meta,
            credit=credit.get(node.id, {}), env_id=trace.env_id,
        )  # fmt: skip
        rows.append(row)
        last[agent] = row
    for row in last.values():
        row.ended = ended  # type: ignore[assignment]
    return rows


def credits_by_node(trace: Trace) -> dict[str, dict[str, float]]:
    """Each node's credits, summed by component."""
    table: dict[str, dict[str, float]] = {}
    for node, component, amount in trace.credits:
        row = table.setdefault(node, {})
        row[component] = row.get(component, 0.0) + amount
    return table


def prompt_hash(node: Node) -> str:
    """The same for the same messages to the same agent."""
    text = json.dumps([node.agent, jsonable(node.messages)], ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def shuffled_credits(traces: Iterable[Trace], seed: int) -> None:
    """Exchange credits between episodes, act for act of the same agent and turn: a control without signal."""
    import random

    rng = random.Random(seed)
    cells: dict[tuple[str, int], list[tuple[Trace, str]]] = {}
    tables = {}
    for trace in traces:
        tables[id(trace)] = credits_by_node(trace)
        seen: dict[str, int] = {}
        for node in trace.acts():
            turn = seen.get(node.agent or "", 0)
            seen[node.agent or ""] = turn + 1
            cells.setdefault((node.agent or "", turn), []).append((trace, node.id))
        trace.credits = []
    from ..envs.ledger import Credit

    for _, members in sorted(cells.items(), key=lambda item: item[0]):
        donors = list(members)
        rng.shuffle(donors)
        for (trace, node), (donor, given) in zip(members, donors, strict=True):
            for component, amount in tables[id(donor)].get(given, {}).items():
                trace.credits.append(Credit(node, component, amount))
