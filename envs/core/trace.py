"""Traces: the graph trajectory of an episode, with its prompts, replies, results and rewards.

`Trace.to_dict()` is plain JSON (its keys are part of the contract). `write` and `read` keep many traces in one
zstandard-compressed JSONL file. The file stays readable however its writer ended.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypedDict

from ...agents.answers import ReplyMeta
from ...agents.basics.json_types import JsonObject, JsonView
from ...agents.roles import Reply
from ...own import find
from ..untrusted import Refused, json_value, open_regular, packed_lines
from .fast import new_use
from .records import ANSWERED, EMPTY, Act, Credit, Node, rewards_by_node

SCHEMA = "unitymas.trace/1"
SUBSTITUTE = f"{__package__.rpartition('.')[0]}.substitute:reward_of"
"""Place of the function that `reward_of` uses, as text, because the module belongs to a higher layer."""
_ALWAYS_STORED = (
    "env_id", "config", "code_hash", "task_id", "seed", "data", "ended", "reason", "error", "outcome",
)  # fmt: skip


class _NodeAlways(TypedDict):
    id: str
    kind: str
    role: str | None
    agent: str | None
    turn: int | None
    round: int
    parents: list[str]
    messages: list[JsonObject]
    reply: str | None
    ok: bool | None
    value: object
    tool: str | None
    args: JsonObject | None
    result: object
    private: object
    error: str | None
    rewards: dict[str, float]
    credit: float


class NodeDict(_NodeAlways, total=False):
    """A node of a trace as plain JSON."""

    thinking: int
    """Number of characters at the beginning of the reply that are thinking."""
    anchor: str
    meta: JsonObject
    """Record of how the reply was made. It holds only values that differ between runs."""


class _TraceAlways(TypedDict):
    schema: str
    env_id: str
    config: JsonObject
    code_hash: str
    task_id: str
    seed: int
    sample: int
    data: JsonObject
    ended: str
    reason: str
    error: str | None
    outcome: JsonObject | None
    grade: object
    metrics: dict[str, float]
    nodes: list[NodeDict]


class TraceDict(_TraceAlways, total=False):
    """A trace as plain JSON."""

    tags: JsonObject
    """Timings, team and versions. They are stored only if they may differ between runs."""


@dataclass(slots=True)
class Trace:
    """Record of one episode. `nodes` are in canonical order. Credits are stored by node and component."""

    env_id: str = ""
    task_id: str = ""
    seed: int = 0
    sample: int = 0
    config: dict[str, object] = field(default_factory=dict)
    code_hash: str = ""
    data: dict[str, object] = field(default_factory=dict)
    ended: str = "no"
    reason: str = ""
    error: str | None = None
    outcome: Mapping[str, object] | None = None
    grade: object = None
    metrics: dict[str, float] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    credits: list[Credit] = field(default_factory=list)
    # timings, team, versions: two traces are compared without them
    tags: dict[str, object] = field(default_factory=dict)
    origin: Any = field(default=None, repr=False, compare=False)
    """Arena, team and task of a trace that was played in this process. They are not stored."""

    def __getstate__(self) -> dict[str, object]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "origin"}

    def __setstate__(self, state: Mapping[str, object]) -> None:
        self.origin = None
        for name, value in state.items():
            setattr(self, name, value)

    def acts(self, role: str | None = None) -> list[Node]:
        """List the acts, all or of one role, in canonical order."""
        return [n for n in self.nodes if n.kind == "act" and (role is None or n.role == role)]

    def uses(self, tool: str | None = None) -> list[Node]:
        """List the tool uses, all or of one tool, in canonical order."""
        return [n for n in self.nodes if n.kind == "use" and (tool is None or n.tool == tool)]

    def node(self, id: str) -> Node:
        """Return the node with this id."""
        for node in self.nodes:
            if node.id == id:
                return node
        raise KeyError(f"no node {id!r} in this trace; it has {', '.join(n.id for n in self.nodes)}")

    def until(self, round: int) -> Trace:
        """Return the trace as it was at the end of this round. If nothing came later, return the trace itself."""
        nodes = [n for n in self.nodes if n.round <= round]
        if len(nodes) == len(self.nodes):
            return self
        # then only `grade` came later
        returned = all(n.round <= round or n.id.startswith("g") for n in self.nodes)
        return replace(
            self, nodes=nodes, ended="no", reason="", grade=None, outcome=self.outcome if returned else None
        )

    def rewards(self, id: str) -> dict[str, float]:
        """Sum a node's credits by component."""
        return rewards_by_node(credit for credit in self.credits if credit.node == id).get(id, {})

    def reward_of(self, node: str, text: str | Sequence[str], **how: object) -> Any:
        """Compute the reward that a node gets with this text as its reply. The episode is played from there to its end.

        A list of texts gives a list of rewards. `team` plays the rest (default: the team of this trace), in `env`
        (default: the environment of this trace). `of="role"` counts all acts of the node's role, and `of="team"` all
        acts of the team. `component` counts one component alone. The random numbers are those of the episode, so that
        texts are compared fairly.
        """
        return find(SUBSTITUTE)(self, node, text, **how)

    def to_dict(self, *, volatile: bool = True) -> TraceDict:
        """Return plain JSON. Without `volatile`, it holds only the values that are equal in two runs of the same
        episode.
        """
        rewards = rewards_by_node(self.credits)
        plain: TraceDict = {
            "schema": SCHEMA,
            "env_id": self.env_id,
            "config": jsonable(self.config),
            "code_hash": self.code_hash,
            "task_id": self.task_id,
            "seed": self.seed,
            "sample": self.sample,
            "data": jsonable(self.data),
            "ended": str(self.ended),
            "reason": str(self.reason),
            "error": self.error,
            "outcome": jsonable(self.outcome),
            "grade": jsonable(self.grade),
            "metrics": dict(self.metrics),
            "nodes": [_node_dict(n, rewards.get(n.id, {}), volatile) for n in self.nodes],
        }
        if volatile:
            plain["tags"] = jsonable(self.tags)
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, object]) -> Trace:
        """Read the result of `to_dict`. An unknown schema is an error, and so is a field that is missing or has a wrong
        type.
        """
        if plain.get("schema") != SCHEMA:
            raise ValueError(
                f"this is no trace of schema {SCHEMA!r}: its schema is {plain.get('schema')!r:.60}"
            )
        try:
            return cls._of(plain)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ValueError(f"this is no trace: {type(error).__name__}: {str(error):.100}") from error

    @classmethod
    def _of(cls, plain: JsonView) -> Trace:
        trace = cls(**{name: plain[name] for name in _ALWAYS_STORED})
        trace.sample, trace.grade = plain.get("sample", 0), plain.get("grade")
        trace.metrics, trace.tags = dict(plain["metrics"]), dict(plain.get("tags", {}))
        for row in plain["nodes"]:
            if not isinstance(row["id"], str):
                raise TypeError(f"a node's id must be a string, got {row['id']!r:.40}")
            trace.nodes.append(_node_from(row))
            trace.credits.extend(
                Credit(row["id"], name, float(amount)) for name, amount in row["rewards"].items()
            )
        return trace


def _node_dict(node: Node, rewards: Mapping[str, float], volatile: bool) -> NodeDict:
    plain: NodeDict = {
        "id": node.id,
        "kind": node.kind,
        "role": node.role,
        "agent": node.agent,
        "turn": node.turn,
        "round": node.round,
        "parents": list(node.parents),
        "messages": [jsonable(m) for m in node.messages],
        "reply": node.text,
        "ok": node.ok,
        "value": jsonable(node.value),
        "tool": node.tool,
        "args": jsonable(node.args),
        "result": jsonable(node.result),
        "private": jsonable(node.private),
        "error": node.error,
        "rewards": dict(rewards),
        "credit": sum(rewards.values()),
    }
    if node.thinking:
        plain["thinking"] = len(node.thinking)
    if node.anchor is not None:
        plain["anchor"] = node.anchor
    if volatile:
        plain["meta"] = jsonable(node.meta)
    return plain


def _node_from(row: JsonView) -> Node:
    node: Node
    if row["kind"] == "act":
        node = Act()
        node.agent, node.role, node.messages = row["agent"], row["role"], tuple(row["messages"])
        node.fields = EMPTY
        node.format = node.read = node.max_tokens = node.error = None  # type: ignore[assignment]
        words, thinking = row["reply"] or "", row.get("thinking", 0)  # `thinking` is a number of characters
        node.reply = Reply(words[thinking:], row["ok"], row["value"], row["id"], words[:thinking])
        node.turn, node.anchor = row["turn"], row.get("anchor")
    else:
        node = new_use(row["tool"], row["args"])
        node.result, node.private, node.error = row["result"], row["private"], row["error"]
    node.id, node.round = row["id"], row["round"]
    node.parents, node.meta, node.state = tuple(row["parents"]), ReplyMeta.of(row.get("meta")), ANSWERED
    return node


def jsonable(value: object) -> Any:
    """Convert frozen data to plain JSON types. A value without a JSON form becomes its repr."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return value if type(value) is str else str(value)
    if isinstance(value, Mapping):
        return {str(k): jsonable(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(v) for v in value]
    if isinstance(value, set | frozenset):
        return sorted((jsonable(v) for v in value), key=repr)
    if hasattr(value, "to_dict"):
        return jsonable(value.to_dict())
    return repr(value)


def dumps(trace: Trace) -> bytes:
    """Write a trace as one line of JSON. Lone surrogates, which models can produce, are escaped."""
    return json.dumps(trace.to_dict(), ensure_ascii=True, separators=(",", ":"), allow_nan=True).encode()


def write(traces: Iterable[Trace], path: str | Path, *, append: bool = False) -> int:
    """Write traces to a `.jsonl` or `.jsonl.zst` file, each in a frame of its own. Return their number."""
    path, count = Path(path), 0
    path.parent.mkdir(parents=True, exist_ok=True)
    compress = compressor() if path.suffix == ".zst" else bytes
    with open(path, "ab" if append else "wb") as file:
        for trace in traces:
            file.write(compress(dumps(trace) + b"\n"))
            count += 1
    return count


def write_lines(rows: Iterable[Mapping[str, object]], path: Path) -> None:
    """Write plain records as compressed JSON lines, a frame each."""
    compress = compressor()
    with open(path, "wb") as file:
        for row in rows:
            file.write(compress(json.dumps(row, separators=(",", ":")).encode() + b"\n"))


def compressor() -> Callable[[bytes], bytes]:
    """Return the function that compresses one line into a frame of its own."""
    import zstandard

    compress = zstandard.ZstdCompressor(level=3, write_checksum=True).compress
    return lambda data: bytes(compress(data))


def read(path: str | Path) -> Iterator[Trace]:
    """Read the traces of a file, in order. A torn last line (its writer was killed) is left out. Other damage is an
    error.
    """
    for number, row in enumerate(read_dicts(path), 1):
        try:
            trace = Trace.from_dict(row)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"{path}, line {number}: this is no trace ({type(error).__name__}: {error})"
            ) from error
        yield trace


def read_dicts(path: str | Path) -> Iterator[JsonObject]:
    """Read the traces of a file as plain dicts. A line that is longer or deeper than `untrusted` allows is an error
    with the number of the line.
    """
    path = Path(path)
    with open_regular(path, links=True) as file:
        for number, line in enumerate(packed_lines(file, path.name, whole=False), start=1):
            where = f"{path}, line {number}"
            value = json_value(line, where, twins=True)
            if not isinstance(value, dict):
                raise Refused(f"{where}: wanted an object, got {type(value).__name__}")
            yield value
