"""Decisions from traces: one row of the thin table for each act of an episode."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable
from math import fsum

from ....agents.answers import DecisionId
from ....envs.core.records import rewards_by_node
from ....envs.core.trace import Trace, jsonable
from ....envs.core.workflow import Node
from .table import Decision


def decisions_of(trace: Trace, episode: str, trained: Collection[str]) -> list[Decision]:
    """Return a finished episode's decisions. `trained` names the policies that learn; other acts only count in statistics.

    A chain is one agent in one episode: a later act of the agent continues its earlier ones.
    """
    ended = "truncated" if str(trace.ended) == "truncated" else "terminal"
    credit = credits_by_node(trace)
    rows: list[Decision] = []
    last: dict[str, Decision] = {}
    counts: dict[str, int] = {}
    for node in sorted(trace.acts(), key=lambda n: (n.round, n.id)):  # in the order they were asked
        row = row_of(node, trace.task_id, episode, node.id, trained)
        row.chain, row.env_id = f"{episode}/{row.agent}", trace.env_id
        row.turn = row.order = counts.get(row.agent, 0)
        row.credit = credit.get(node.id, {})
        counts[row.agent] = row.order + 1
        rows.append(row)
        last[row.agent] = row
    for row in last.values():
        row.ended = ended  # type: ignore[assignment]
    return rows


def row_of(
    node: Node, task: str, episode: str, name: str, trained: Collection[str], asked: str = ""
) -> Decision:
    """Return the row of an act. The caller fills in its place in a chain and its credit.

    `name` is the node's among the episode's samples: its id, unless several were drawn for it. `asked` is the hash of
    its prompt, where it is known.
    """
    policy = node.meta.policy or ""
    return Decision(
        id=DecisionId(episode, name), task=task, episode=episode, node=name,
        role=node.role or "", agent=node.agent or "", chain="", policy=policy,
        n_tokens=node.meta.tokens_out or 1, parents=node.parents,
        prompt_hash=asked or prompt_hash(node), anchor=node.anchor, version=node.meta.version or 0,
        trainable=policy in trained and not node.meta.forced and "sample" in node.meta,
    )  # fmt: skip


def credits_by_node(trace: Trace) -> dict[str, dict[str, float]]:
    """Sum each node's credits by component."""
    return rewards_by_node(trace.credits)


def prompt_hash(node: Node) -> str:
    """Hash of a prompt: equal for the same messages to the same agent."""
    parts = [node.agent or ""]
    for message in node.messages:
        role, content = message["role"], message.get("content")
        # a message of a role and a text, as nearly all are, needs no JSON; others begin with what no role is
        parts += (
            (role, content)
            if len(message) == 2 and type(content) is str
            else ("", json.dumps(jsonable(message)))
        )
    lengths = ",".join([str(len(part)) for part in parts])  # where each part ends
    text = f"{lengths}:{''.join(parts)}"
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def shuffled_credits(traces: Iterable[Trace], seed: int) -> None:
    """Exchange credits between episodes, among acts of the same agent and turn: a control without signal.

    Each (agent, turn, component) is brought to mean 0 too. The exchange alone would still pay an agent more for acting more
    often. So where credits are positive on average, longer episodes would be taught.
    """
    import random

    rng = random.Random(seed)
    cells: dict[tuple[str, int], list[tuple[Trace, str]]] = {}
    tables = {}
    for trace in traces:
        tables[id(trace)] = credits_by_node(trace)
        seen: dict[str, int] = {}
        for act in trace.acts():
            turn = seen.get(act.agent or "", 0)
            seen[act.agent or ""] = turn + 1
            cells.setdefault((act.agent or "", turn), []).append((trace, act.id))
        trace.credits = []
    from ....envs.core.ledger import Credit

    for _, members in sorted(cells.items(), key=lambda item: item[0]):
        shares = [tables[id(trace)].get(node, {}) for trace, node in members]
        means = {
            c: fsum(g.get(c, 0.0) for g in shares) / len(shares)
            for c in dict.fromkeys(c for g in shares for c in g)
        }
        rng.shuffle(shares)
        for (trace, node), amounts in zip(members, shares, strict=True):
            for component, mean in means.items():
                trace.credits.append(Credit(node, component, amounts.get(component, 0.0) - mean))
