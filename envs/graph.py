"""Builder for workflows as graphs: nodes are agents and tools, edges may have conditions, and roles may be routers.

    graph = (
        GraphWorkflow()
        .add_agent("planner", "Plan for: {question}", reply=Tags("plan"))
        .add_tool("retrieve", query="{planner}", k=3)
        .add_agent("answerer", "Question: {question}\\nFound:\\n{retrieve}", reply=Tags("answer"))
        .add_edge(START, "planner").add_edge("planner", "retrieve").add_edge("retrieve", "answerer")
        .build(output="answerer")
    )

A field in a prompt is a field of the task, or a node, whose latest value it shows. `build` raises an error for unknown
nodes, unreachable nodes and unknown fields, so mistakes show before an episode runs.

If several edges leave a node, the first edge whose condition holds is taken. An edge without a condition always holds.
`add_router(node, role, …)` leaves this choice to a role. Its options are the nodes of these edges, or END. Then the next
agent, the next tool and the end of the episode are actions of the role, which it learns like any other action.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..agents.basics.frozen import FrozenDict
from ..agents.basics.hints import nearest
from ..agents.roles import Choice, Format, Raw, Role
from .core.tasks import QA, Schema
from .core.trace import jsonable
from .core.workflow import Episode, Outcome, Workflow, WorkflowError

START, END = "START", "END"
State = Mapping[str, Any]
_FIELD = re.compile(r"\{(\w+)\}")


class GraphError(ValueError):
    """Raised when a graph cannot run. The message names the node or the edge."""


@dataclass(frozen=True, slots=True)
class _Agent:
    prompt: str
    role: str


@dataclass(frozen=True, slots=True)
class _Tool:
    tool: str
    args: FrozenDict


@dataclass(frozen=True, slots=True)
class _Edge:
    to: str
    when: Callable[[State], bool] | None


@dataclass(slots=True)
class _Draft:
    nodes: dict[str, _Agent | _Tool] = field(default_factory=dict)
    roles: dict[str, Role] = field(default_factory=dict)
    edges: dict[str, list[_Edge]] = field(default_factory=dict)
    routers: dict[str, tuple[str, str]] = field(default_factory=dict)  # node -> (role, prompt)


class GraphWorkflow(Workflow):
    """Builder of a workflow: add nodes and edges, then call `build`, which returns the workflow.

    An episode ends after `max_steps` nodes at the latest.
    """

    def __init__(self, schema: Schema = QA, max_steps: int = 32) -> None:
        if max_steps < 1:
            raise GraphError(f"max_steps must be at least 1, got {max_steps}")
        self.schema, self.max_steps = schema, max_steps
        self.output = ""
        self._draft = _Draft()

    # declaring ---------------------------------------------------------------------------------------

    def add_agent(
        self, name: str, prompt: str, *, reply: Format | None = None, system: str = "", role: str = ""
    ) -> GraphWorkflow:
        """Add a node where a role acts. Several nodes may have the same role: `role=`."""
        self._new(name)
        made = Role(role or name, reply=reply or Raw(), system=system)
        known = self._draft.roles.setdefault(made.name, made)
        if (reply is not None or system) and known != made:
            raise GraphError(
                f"node {name!r}: role {made.name!r} was declared before with another reply or system"
            )
        self._draft.nodes[name] = _Agent(prompt, made.name)
        return self

    def add_tool(self, name: str, *, tool: str = "", **args: object) -> GraphWorkflow:
        """Add a node where a tool is called. Text arguments may have fields, like prompts."""
        self._new(name)
        self._draft.nodes[name] = _Tool(tool or name, FrozenDict(args))
        return self

    def add_edge(self, a: str, b: str, when: Callable[[State], bool] | None = None) -> GraphWorkflow:
        """Add an edge from `a` to `b`, with the condition `when(state)`.

        `state` holds the fields of the task and the latest value of each node.
        """
        self._draft.edges.setdefault(a, []).append(_Edge(b, when))
        return self

    def add_router(self, node: str, role: str, prompt: str, system: str = "") -> GraphWorkflow:
        """Let `role` choose among the edges that leave `node`. An unreadable choice takes the first edge."""
        if node in self._draft.routers:
            raise GraphError(f"node {node!r} has a router already")
        self._draft.roles.setdefault(role, Role(role, system=system))
        self._draft.routers[node] = (role, prompt)
        return self

    def _new(self, name: str) -> None:
        if name in self._draft.nodes or name in (START, END):
            raise GraphError(f"there is a node {name!r} already")

    # checking ----------------------------------------------------------------------------------------

    def build(self, output: str) -> GraphWorkflow:
        """Check the graph, and return it as a workflow. The value of the node `output` is the outcome's `answer`."""
        draft = self._draft
        self._known(output, "output")
        for a, edges in draft.edges.items():
            if a != START:
                self._known(a, "an edge from")
            for edge in edges:
                if edge.to != END:
                    self._known(edge.to, f"the edge from {a!r} to")
        if START not in draft.edges:
            raise GraphError("no edge leaves START; add_edge(START, first_node)")
        lost = set(draft.nodes) - self._reachable()
        if lost:
            raise GraphError(f"node {sorted(lost)[0]!r} cannot be reached from START")
        for node, (_, prompt) in draft.routers.items():
            if node != START:
                self._known(node, "a router after")
            if len(draft.edges.get(node, ())) < 2:
                raise GraphError(
                    f"the router after {node!r} has nothing to choose; give {node!r} two or more edges"
                )
            self._check_template(f"the router after {node!r}", prompt)
        for name, node_ in draft.nodes.items():
            texts = (
                [node_.prompt]
                if isinstance(node_, _Agent)
                else [v for v in node_.args.values() if isinstance(v, str)]
            )
            for text in texts:
                self._check_template(f"node {name!r}", text)
        self.output = output
        self.roles = tuple(draft.roles.values())
        self.tools = tuple(dict.fromkeys(n.tool for n in draft.nodes.values() if isinstance(n, _Tool)))
        return self

    def _known(self, name: str, what: str) -> None:
        if name not in self._draft.nodes:
            raise GraphError(f"{what} {name!r}: no such node; {nearest(name, self._draft.nodes, 'nodes:')}")

    def _reachable(self) -> set[str]:
        seen: set[str] = set()
        front = [START]
        while front:
            for edge in self._draft.edges.get(front.pop(), ()):
                if edge.to not in seen and edge.to != END:
                    seen.add(edge.to)
                    front.append(edge.to)
        return seen

    def _check_template(self, where: str, text: str) -> None:
        fields = {f for f in self.schema.required if f not in self.schema.reference} | set(self._draft.nodes)
        for name in _FIELD.findall(text):
            if name not in fields:
                raise GraphError(
                    f"{where} uses {{{name}}}, which nobody produces; there are {', '.join(sorted(fields))}"
                )

    # running -----------------------------------------------------------------------------------------

    async def run(self, ep: Episode) -> Outcome:
        """Play one episode."""
        if not self.output:
            raise WorkflowError("a GraphWorkflow runs after build(output=…)")
        state: dict[str, object] = dict(ep.task)
        here, steps = START, 0
        while (here := await self._next(ep, here, state)) != END and steps < self.max_steps:
            node = self._draft.nodes[here]
            if isinstance(node, _Agent):
                reply = await ep.act(node.role, fill(node.prompt, state))
                state[here] = reply.value if reply.value is not None else reply.text
            else:
                args = {k: fill(v, state) if isinstance(v, str) else v for k, v in node.args.items()}
                state[here] = await ep.use(node.tool, **args)
            steps += 1
        return Outcome(answer=state.get(self.output, ""), steps=steps)

    async def _next(self, ep: Episode, here: str, state: Mapping[str, object]) -> str:
        edges = self._draft.edges.get(here, [])
        open_ = [e.to for e in edges if e.when is None or e.when(state)]
        if not open_:
            return END
        router = self._draft.routers.get(here)
        if router is None or len(open_) == 1:
            return open_[0]
        role, prompt = router
        choice = Choice(*open_, otherwise=open_[0])
        chosen: str = (await ep.act(role, fill(prompt, state), reply=choice)).value
        return chosen


def fill(template: str, state: Mapping[str, object]) -> str:
    """Fill the fields of a template from the state. A node without a value yet (in a cycle) gives an empty text."""
    return _FIELD.sub(lambda m: told(state.get(m[1], "")), template)


def told(value: object) -> str:
    """Return a value as text for a prompt: each passage and each item of a list in a line, others as they print."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        if "text" in value:
            return f"{value['title']}: {value['text']}" if value.get("title") else str(value["text"])
        return str(jsonable(value))
    if isinstance(value, tuple | list):
        return "\n".join(map(told, value))
    return str(value)
