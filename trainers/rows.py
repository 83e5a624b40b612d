"""Traces as rows of a data set, for other trainers (TRL, or your own).

`to_hf_dataset(traces, kind)` gives a `datasets.Dataset` that TRL's trainers take as it is:

    prompt-completion    prompt and completion, conversational: only the reply is learned
    sft                  messages: the prompt and the reply
    dpo                  prompt, chosen, rejected: two replies of one agent to the same messages, the better-paid first
    steps                one row an act, with its place in the graph, its rewards and its metrics

Every row of an act has `credit` and `weight`, and where the traces carry token ids (`rollout(…, keep_tokens="ids")`)
`prompt_ids`, `completion_ids` and `logprobs`: what the model saw and sampled, without another tokenisation.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from ..agents.basics.hints import nearest
from ..agents.basics.json_types import JsonObject
from ..envs.core.trace import Trace, jsonable
from ..envs.core.workflow import Node
from .controller.statistics.decisions import prompt_hash

if TYPE_CHECKING:
    from datasets import Dataset


RowKind = Literal["sft", "prompt-completion", "dpo", "steps"]
TrainingRow = JsonObject
TOKENS = {
    "prompt_ids": "prompt_ids",
    "completion_ids": "ids",
    "logprobs": "logprobs",
}  # column: name in the trace


def rows(
    traces: Iterable[Trace],
    kind: RowKind = "prompt-completion",
    *,
    roles: Collection[str] | str | None = None,
    component: str | None = None,
    min_credit: float | None = None,
    keep: Callable[[TrainingRow], bool] | None = None,
    weight: Literal["credit", "advantage"] | Callable[[TrainingRow], float] = "credit",
) -> list[TrainingRow]:
    """Return the rows of a data set, as plain dicts.

    `roles` names the roles to learn from. `component` is the reward that becomes `credit` (default: the sum of all).
    `min_credit` and `keep(row)` leave rows out. `weight` is the credit, the `"advantage"` (credit minus the mean of the
    agent's credits on that task) or `weight(row)`. Episodes that ended in an error are left out.
    """
    finished = _finished(traces)
    paid = dict.fromkeys(credit.component for t in finished for credit in t.credits)
    if component is not None and paid and component not in paid:
        raise ValueError(
            f"component={component!r}: no such reward was paid; {nearest(component, paid, 'paid were')}"
        )
    names = {roles} if isinstance(roles, str) else None if roles is None else set(roles)
    if names is not None and (odd := names - {n.role for t in finished for n in t.acts()}):
        raise ValueError(f"no act of role {min(odd)!r} in these traces")
    if kind == "dpo" and (min_credit is not None or keep is not None or weight != "credit"):
        raise ValueError(
            "min_credit, keep and weight choose single replies, and dpo makes pairs; filter the pairs by their `margin`"
        )
    if kind == "dpo":
        return [row for row in _pairs(finished, component) if names is None or row["role"] in names]
    makers = {"sft": _sft, "prompt-completion": _completion, "steps": _step}
    if kind not in makers:
        raise ValueError(f"unknown kind {kind!r}; choose sft, prompt-completion, dpo or steps")
    made = []
    tokens = any((n.meta.tokens or {}).get("ids") for t in finished for n in t.acts())
    for trace in finished:
        for node in trace.acts():
            if names is None or node.role in names:
                made.append({**makers[kind](trace, node), **_common(trace, node, component, tokens)})
    _weigh(made, weight)
    return [
        row
        for row in made
        if (min_credit is None or row["credit"] >= min_credit) and (keep is None or keep(row))
    ]


def _finished(traces: Iterable[Trace]) -> list[Trace]:
    """Return the traces that did not end in an error."""
    every = list(traces) if not isinstance(traces, Trace) else [traces]
    for trace in every:
        if not isinstance(trace, Trace):
            raise TypeError(
                f"rows are made of traces, got {type(trace).__name__}; unitymas.Trace.from_dict reads the plain form"
            )
    return [trace for trace in every if str(trace.ended) != "error"]


def to_hf_dataset(traces: Iterable[Trace], kind: RowKind = "prompt-completion", **which: Any) -> Dataset:
    """Return the rows as a `datasets.Dataset`. `which` are the arguments of `rows`: roles, min_credit, keep,
    weight …
    """
    from datasets import Dataset

    return Dataset.from_list(rows(traces, kind, **which))


def _common(trace: Trace, node: Node, component: str | None, tokens: bool) -> TrainingRow:
    row: TrainingRow = {
        "env_id": trace.env_id, "task_id": trace.task_id, "sample": trace.sample, "node": node.id,
        "role": node.role, "agent": node.agent, "credit": _credit(trace, node, component),
    }  # fmt: skip
    if tokens:  # if a player stores none (a scripted one), the columns are None
        kept = node.meta.tokens or {}
        row |= {column: kept.get(name) for column, name in TOKENS.items()}
    return row


def _credit(trace: Trace, node: Node, component: str | None) -> float:
    paid = trace.rewards(node.id)
    return float(sum(paid.values()) if component is None else paid.get(component, 0.0))


def _weigh(made: Sequence[TrainingRow], weight: object) -> None:
    """Write the weight of each row into it."""
    if callable(weight):
        for row in made:
            row["weight"] = float(weight(row))
        return
    if weight not in ("credit", "advantage"):
        raise ValueError(f"weight={weight!r}: use 'credit', 'advantage' or a function of the row")
    groups: dict[tuple[str, str, str], list[float]] = {}
    for row in made:
        groups.setdefault((row["env_id"], row["task_id"], row["agent"]), []).append(row["credit"])
    for row in made:
        peers = groups[row["env_id"], row["task_id"], row["agent"]]
        row["weight"] = row["credit"] - (sum(peers) / len(peers) if weight == "advantage" else 0.0)


def _messages(node: Node) -> list[dict[str, str]]:
    return [{"role": m["role"], "content": str(m["content"])} for m in node.messages]


def _said(node: Node) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": node.text or ""}]


def _sft(trace: Trace, node: Node) -> TrainingRow:
    return {"messages": _messages(node) + _said(node)}


def _completion(trace: Trace, node: Node) -> TrainingRow:
    return {"prompt": _messages(node), "completion": _said(node)}


def _step(trace: Trace, node: Node) -> TrainingRow:
    return {
        **_completion(trace, node), "turn": node.turn, "parents": list(node.parents), "ok": node.ok,
        "value": json.dumps(jsonable(node.value)), "rewards": json.dumps(trace.rewards(node.id)),
        "metrics": json.dumps(trace.metrics), "ended": str(trace.ended),
    }  # fmt: skip


def _pairs(traces: Sequence[Trace], component: str | None) -> list[TrainingRow]:
    """Return the best and the worst reply of an agent to equal messages, if their credits differ."""
    siblings: dict[str, list[tuple[float, Trace, Node]]] = {}
    for trace in traces:
        for node in trace.acts():
            credit = _credit(trace, node, component)
            siblings.setdefault(f"{trace.task_id}/{prompt_hash(node)}", []).append((credit, trace, node))
    pairs: list[TrainingRow] = []
    for members in siblings.values():
        low, high = min(members, key=lambda m: m[0]), max(members, key=lambda m: m[0])
        if high[0] > low[0]:
            best: TrainingRow = {
                "role": high[2].role,
                "task_id": high[1].task_id,
                "margin": high[0] - low[0],
            }
            pairs.append(
                {"prompt": _messages(high[2]), "chosen": _said(high[2]), "rejected": _said(low[2]), **best}
            )
    return pairs
