"""Figures of an evaluation. All of its numbers are computed here, from traces alone.

`episode_row` reads one trace and returns the values that the tables need. `figures` turns these rows into the content of
``results.json``. The check of a submission runs both again. An episode that ends in an error, or without the headline
metric, is a failure: it scores 0, and failures are also counted separately.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ...envs.env_spec import EnvSpec
from . import stats
from .result_types import EpisodeEntry, EstimateDict, FiguresDict, TraceJson
from .stats import Success

SCHEMA = "unitymas.results/1"
_COMPARED_META = (
    "tokens_in",
    "tokens_out",
    "tokens_cached",
    "finish_reason",
    "policy",
    "version",
    "cut",
    "cost",
)
"""Measurements of a node that are equal in two runs of the same command. Timings are not among them."""


@dataclass(frozen=True, slots=True)
class Measure:
    """Measure that an evaluation ranks by: the headline metric, and the rule for a solved episode."""

    headline: str = "score"
    success_metric: str = ""
    success: Success = field(default_factory=Success)

    @classmethod
    def of_spec(cls, spec: EnvSpec) -> Measure:
        """Return the measure of an environment's spec."""
        return cls(spec.headline, spec.success or spec.headline)

    def score(self, trace: TraceJson) -> float:
        """Return the score of an episode: its headline metric."""
        return _number(trace, self.headline) if trace.get("ended") != "error" else 0.0

    def solved(self, trace: TraceJson) -> bool:
        """Tell whether an episode is solved."""
        return trace.get("ended") != "error" and self.success(
            _number(trace, self.success_metric or self.headline)
        )

    def __str__(self) -> str:
        return str(self.success).replace("score", self.success_metric or self.headline)


@dataclass(slots=True)
class RoleSum:
    """Sums over the acts of one role, in one or many episodes."""

    calls: int = 0
    legal: int = 0
    credit: float = 0.0
    tokens_in: int = 0
    tokens_out: int = 0
    cost: float = 0.0

    def add(self, other: RoleSum) -> None:
        """Add the sums of another episode."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(slots=True)
class EpisodeRow:
    """Row of one episode, with the values that the tables need."""

    task: str
    sample: int
    key: str
    digest: str
    score: float
    solved: bool
    ended: str
    reason: str
    acts: int
    seconds: float
    cost: float
    metrics: dict[str, float]
    roles: dict[str, RoleSum]
    tools: dict[str, tuple[int, int]]  # uses, successes

    @property
    def failed(self) -> bool:
        """Flag: the episode is a failure."""
        return self.ended == "error"

    @property
    def unanswered(self) -> bool:
        """Tell whether the episode failed because a model or a tool's server could not be reached."""
        return self.failed and self.reason.partition(":")[0] in ("model", "tool")


def episode_row(trace: TraceJson, measure: Measure, price: tuple[float, float] = (0.0, 0.0)) -> EpisodeRow:
    """Return the row of one trace. ``price`` is used if a policy reports no cost: dollars per million tokens in and out."""
    roles: dict[str, RoleSum] = {}
    tools: dict[str, tuple[int, int]] = {}
    cost = 0.0
    for node in trace["nodes"]:
        if node["kind"] == "use":
            uses, good = tools.get(node["tool"], (0, 0))
            tools[node["tool"]] = (uses + 1, good + (node["error"] is None))
            continue
        meta = node.get("meta") or {}
        tokens_in, tokens_out = int(meta.get("tokens_in") or 0), int(meta.get("tokens_out") or 0)
        dollars = (
            float(meta["cost"]) if "cost" in meta else (tokens_in * price[0] + tokens_out * price[1]) / 1e6
        )
        roles.setdefault(node["role"], RoleSum()).add(
            RoleSum(1, int(bool(node["ok"])), float(node["credit"]), tokens_in, tokens_out, dollars)
        )
        cost += dollars
    tags = trace.get("tags") or {}
    return EpisodeRow(
        task=trace["task_id"], sample=int(trace.get("sample", 0)), key=str(tags.get("key", "")),
        digest=trace_digest(trace), score=measure.score(trace), solved=measure.solved(trace), ended=trace["ended"],
        reason=_cause(trace), acts=sum(role.calls for role in roles.values()), seconds=float(tags.get("seconds") or 0.0),
        cost=cost, metrics={k: float(v) for k, v in trace["metrics"].items()}, roles=roles, tools=tools,
    )  # fmt: skip


def trace_digest(trace: TraceJson) -> str:
    """Return a SHA-256 of the parts that are equal in two runs of an episode: all except timings and tags."""
    plain = {name: value for name, value in trace.items() if name != "tags"}
    plain["nodes"] = [
        {**node, "meta": {k: v for k, v in (node.get("meta") or {}).items() if k in _COMPARED_META}}
        for node in trace["nodes"]
    ]
    return hashlib.sha256(canonical(plain)).hexdigest()


def canonical(value: object) -> bytes:
    """Return JSON that is equal for equal content: sorted keys, ASCII, no blanks."""
    return json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"), default=str).encode(
        "ascii"
    )


def results_text(plain: Mapping[str, object]) -> str:
    """Return the text of ``results.json``. Every writer uses this form."""
    return json.dumps(plain, indent=1, sort_keys=True) + "\n"


def figures(rows: Sequence[EpisodeRow], measure: Measure, k: int) -> FiguresDict:
    """Return all figures of an evaluation as plain JSON. They are deterministic, except for the part ``timing``."""
    if not rows:
        raise ValueError("an evaluation without a single episode has no figures")
    rows = sorted(rows, key=lambda row: (row.task, row.sample))
    by_task: dict[str, list[EpisodeRow]] = defaultdict(list)
    for row in rows:
        by_task[row.task].append(row)
    scores = [[r.score for r in group] for group in by_task.values()]
    solved = [[float(r.solved) for r in group] for group in by_task.values()]
    errorless = [kept for group in by_task.values() if (kept := [r.score for r in group if not r.failed])]
    fewest = min(len(group) for group in by_task.values())
    chances = [j for j in _powers(k) if j <= fewest]
    return {
        "tasks": len(by_task),
        "episodes": len(rows),
        "k": k,
        "headline": measure.headline,
        "success": str(measure),
        "score": stats.average(scores).plain(),
        "score_without_errors": stats.average(errorless).plain() if errorless else None,
        "pass_at": {str(j): stats.pass_at(solved, j).plain() for j in chances},
        "pass_hat": {str(j): stats.pass_hat(solved, j).plain() for j in chances},
        "metrics": _metrics(by_task, measure),
        "endings": dict(sorted(Counter(row.ended for row in rows).items())),
        "failures": dict(Counter(row.reason for row in rows if row.reason).most_common()),
        "per_episode": _per_episode(rows),
        "roles": _roles(rows),
        "tools": _tools(rows),
        "timing": {"seconds_per_episode": float(np.mean([row.seconds for row in rows]))},
    }


def per_task(rows: Iterable[EpisodeRow]) -> dict[str, list[float]]:
    """Return the scores by task, for paired differences."""
    table: dict[str, list[float]] = defaultdict(list)
    for row in sorted(rows, key=lambda r: (r.task, r.sample)):
        table[row.task].append(row.score)
    return dict(table)


def episode_list(rows: Iterable[EpisodeRow]) -> list[EpisodeEntry]:
    """Return the entries of the episodes in ``results.json``, with which a check names an episode that was changed."""
    return [
        {
            "task": r.task,
            "sample": r.sample,
            "key": r.key,
            "score": r.score,
            "solved": r.solved,
            "digest": r.digest,
        }
        for r in sorted(rows, key=lambda r: (r.task, r.sample))
    ]


def _number(trace: TraceJson, metric: str) -> float:
    value = trace["metrics"].get(metric, 0.0)
    return float(value) if np.isfinite(value) else 0.0


def _cause(trace: Mapping[str, object]) -> str:
    """Return the cause of a failed episode, in words that are equal for similar causes. Empty: it did not fail."""
    ended = str(trace["ended"])
    if ended == "terminal" and not trace.get("error"):
        return ""
    if ended in ("error", "terminal"):  # an error, or a tool used wrongly
        kind = str(trace.get("error") or "").split(":", 1)[0]
        return f"{trace.get('reason') or 'error'}: {kind}" if kind else str(trace.get("reason") or "error")
    return f"{ended}: {trace.get('reason')}" if trace.get("reason") else ended


def ranked(rows: Sequence[EpisodeRow], measure: Measure) -> tuple[list[EpisodeRow], Measure]:
    """Return the rows and their measure. The measure is `score` if the reward rules compute no headline metric."""
    finished = [row for row in rows if not row.failed]
    if not finished or any(measure.headline in row.metrics for row in finished):
        return list(rows), measure
    own = Measure(success=measure.success)
    made = []
    for row in rows:
        score = 0.0 if row.failed else row.metrics.get("score", 0.0)
        made.append(replace(row, score=score, solved=not row.failed and own.success(score)))
    return made, own


def _powers(k: int) -> list[int]:
    """Return 1, 2, 4, … and k itself."""
    return sorted({1, k, *(2**i for i in range(k.bit_length()) if 2**i <= k)})


def _metrics(by_task: Mapping[str, list[EpisodeRow]], measure: Measure) -> dict[str, EstimateDict]:
    names = sorted({name for group in by_task.values() for row in group for name in row.metrics})
    if measure.headline != "score":  # the same figure under its own name
        names = [name for name in names if name != "score"]
    table = {
        name: [[row.metrics.get(name, 0.0) for row in group] for group in by_task.values()] for name in names
    }
    shares = (measure.headline, measure.success_metric)
    return {n: stats.average(values, share=n in shares).plain() for n, values in table.items()}


def _per_episode(rows: Sequence[EpisodeRow]) -> dict[str, float]:
    def mean(values: Iterable[float]) -> float:
        return float(np.mean(list(values)))

    return {
        "acts": mean(r.acts for r in rows),
        "tool_uses": mean(sum(uses for uses, _ in r.tools.values()) for r in rows),
        "tokens_in": mean(sum(role.tokens_in for role in r.roles.values()) for r in rows),
        "tokens_out": mean(sum(role.tokens_out for role in r.roles.values()) for r in rows),
        "credit": mean(sum(role.credit for role in r.roles.values()) for r in rows),
        "cost": mean(r.cost for r in rows),
    }


def _roles(rows: Sequence[EpisodeRow]) -> dict[str, dict[str, float]]:
    total: dict[str, RoleSum] = defaultdict(RoleSum)
    for row in rows:
        for role, did in row.roles.items():
            total[role].add(did)
    return {
        role: {
            "calls": did.calls,
            "calls_per_episode": did.calls / len(rows),
            "format_validity": did.legal / did.calls,
            "mean_credit": did.credit / did.calls,
            "tokens_in": did.tokens_in / did.calls,
            "tokens_out": did.tokens_out / did.calls,
            **({"cost": did.cost / len(rows)} if did.cost else {}),
        }
        for role, did in total.items()
    }


def _tools(rows: Sequence[EpisodeRow]) -> dict[str, dict[str, float]]:
    total: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for row in rows:
        for tool, (uses, good) in row.tools.items():
            total[tool][0] += uses
            total[tool][1] += good
    return {tool: {"uses": uses, "success": good / uses} for tool, (uses, good) in sorted(total.items())}
