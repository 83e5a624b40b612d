"""Records that the core shares: requests, which become nodes of a trace when they are answered, and credits."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias

from ...agents.answers import ReplyMeta
from ...agents.basics.failures import WorkflowError
from ...agents.basics.frozen import FrozenDict
from ...agents.policies import Message
from ...agents.roles import Format, Reply

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

MADE, PENDING, ANSWERED = 0, 1, 2
EMPTY = FrozenDict()

Picture: TypeAlias = "npt.NDArray[np.uint8]"
"""Picture of a workflow's state: pixels (height, width, 3)."""

RunCoroutine: TypeAlias = Coroutine[Any, object, object]
"""Coroutine of `run`, of `grade`, or of a branch of an `ep.all`."""


class Credit(NamedTuple):
    """Amount that a node has earned for a component."""

    node: str
    component: str
    amount: float


def rewards_by_node(credits: Iterable[Credit]) -> dict[str, dict[str, float]]:
    """Sum each node's credits by component."""
    table: dict[str, dict[str, float]] = {}
    for node, component, amount in credits:
        row = table.setdefault(node, {})
        row[component] = row.get(component, 0.0) + amount
    return table


def totals_by_node(credits: Iterable[Credit]) -> dict[str, float]:
    """Sum each node's credits, in the order in which they were booked."""
    totals: dict[str, float] = {}
    for node, _, amount in credits:
        totals[node] = totals.get(node, 0.0) + amount
    return totals


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of an episode. An episode that reaches one is truncated."""

    requests: int = 1000
    tokens: int | None = None
    seconds: float | None = None  # the asynchronous driver checks this limit


DEFAULT_BUDGET = Budget()


class Node:
    """Request, which becomes a node of the graph trajectory when it is answered."""

    __slots__ = ("error", "id", "meta", "parents", "reply", "round", "state", "turn")
    kind: ClassVar[str]
    id: str
    round: int
    parents: tuple[str, ...]
    error: str | None
    meta: ReplyMeta
    state: int
    # an act's
    reply: Reply | None
    turn: int | None
    agent: str | None
    role: str | None
    messages: tuple[Message, ...]
    anchor: str | None
    fields: Mapping[str, object]
    # a use's
    tool: str | None
    args: FrozenDict | None
    result: Any
    private: Any

    def __await__(self) -> Generator[Node, Any, Any]:
        if self.state:
            raise WorkflowError(
                f"the request to {self.agent or self.tool!r} was awaited twice; make a new one"
            )
        self.state = PENDING
        return (yield self)

    @property
    def ok(self) -> bool | None:
        """Flag: the reply is legal (acts), or the tool succeeded (uses)."""
        if self.kind == "use":
            return self.error is None
        return None if self.reply is None else self.reply.ok

    @property
    def value(self) -> Any:
        """Value that the reply's format has parsed."""
        if self.reply is None:
            self._check_asked()
            return None
        return self.reply.value

    @property
    def text(self) -> str | None:
        """Text of the reply as it was sampled, thinking included."""
        if self.reply is None:
            self._check_asked()
            return None
        return self.reply.said

    @property
    def thinking(self) -> str:
        """Thinking in the reply. It stands first in `text`, and no other role sees it."""
        return "" if self.reply is None else self.reply.thinking

    def _check_asked(self) -> None:
        if self.state == MADE and self.kind == "act":
            raise WorkflowError(f"{self.agent} was not asked yet; write `await ep.act({self.agent!r}, …)`")

    def __repr__(self) -> str:
        return f"<{self.kind} {getattr(self, 'id', '?')} {self.agent or self.tool}>"


class Act(Node):
    """Request for a reply of a role."""

    __slots__ = ("agent", "anchor", "fields", "format", "max_tokens", "messages", "read", "role")
    kind = "act"
    tool = args = result = private = None

    if TYPE_CHECKING:

        def __await__(self) -> Generator[Node, Reply, Reply]: ...

    format: Format
    max_tokens: int | None
    read: Callable[[str, str], Reply] | None
    """Reader of texts without thinking, where nothing but the role's own format decides (`Role.read`)."""
    fields: Mapping[str, object]
    """Values that fill the prompt, if prompts come in sets. Experts read these instead of the prompt."""


class Use(Node):
    """Request for a tool's result."""

    __slots__ = ("args", "private", "result", "tool")
    kind = "use"
    agent = role = anchor = None
    messages = ()
    fields = EMPTY


def path_key(node: Node) -> tuple[int, ...]:
    """Return the key that sorts node ids canonically. Requests of `grade` come last."""
    graded = node.id.startswith("g")
    return (int(graded), *map(int, node.id.lstrip("g").split(".")))


def asked_of(node: Node) -> str:
    """Request of a node in a few words, for an error."""
    if node.kind == "use":
        return f"tool {node.tool}({node.args!r:.200})"
    return f"{node.agent}: {node.messages[-1]['content']!r:.200}"
