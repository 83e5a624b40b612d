"""The interface for authors of workflows: `Workflow`, and the `Episode` its `run` is given.

A workflow is a sans-IO program. It never calls a model, a retriever or a clock. It makes requests, and a driver
answers them. Every `ep.act`, `ep.use` and `ep.all` only makes a request. Awaiting the request passes it to the
driver (`execution.Execution`), which resumes `run` with the answer.

    class Debate(Workflow):
        roles = (Role("solver", instances=2, reply=Tags("answer")),
                 Role("judge", reply=Choice("1", "2", otherwise="1")))

        async def run(self, ep):
            first, second = await ep.all(*(ep.act(s, ask(ep.task)) for s in ep.cast("solver")))
            pick = await ep.act("judge", compare(ep.task, first, second))
            return Outcome(answer=(first, second)[int(pick.value) - 1].value)
"""

from __future__ import annotations

import copy
import hashlib
import random
from collections.abc import Awaitable, Coroutine, Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...agents.answers import NOTHING_KNOWN
from ...agents.basics.failures import ToolError as ToolError
from ...agents.basics.failures import WorkflowError as WorkflowError
from ...agents.basics.frozen import FROZEN, FrozenDict, View, freeze
from ...agents.basics.hints import nearest
from ...agents.policies import Message
from ...agents.roles import Format, Reply, Role, entry_of
from .fast import new_use
from .prompts import PromptSet, PromptSource, choose
from .records import EMPTY, MADE, PENDING, RunCoroutine
from .records import Act as Act
from .records import Node as Node
from .records import Use as Use
from .tasks import QA, Schema, Task
from .trace import Trace

# every workflow with tools has this tool, too: it takes `names`, and returns their descriptions for a model
TOOLS = "tools"


class Outcome(FrozenDict):
    """Result of an episode, with named values: `Outcome(answer="Paris")`."""

    def __init__(self, **values: object) -> None:
        dict.__init__(self, values if FROZEN.issuperset(map(type, values.values())) else freeze(values))

    def __reduce__(self) -> tuple[object, ...]:
        return (_outcome, (dict(self),))

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(
                f"the outcome has no {name!r}; it has {', '.join(self) or 'nothing'}"
            ) from None


def _outcome(values: Mapping[str, object]) -> Outcome:
    return Outcome(**values)


class Join:
    """Several branches that run at the same time. Awaiting it gives their results in order."""

    __slots__ = ("branches", "state")

    def __init__(self, branches: tuple[RunCoroutine, ...]) -> None:
        self.branches = branches
        self.state = MADE

    def __await__(self) -> Generator[Join, Any, Any]:
        if self.state:
            raise WorkflowError("the same ep.all(…) was awaited twice; make a new one")
        self.state = PENDING
        return (yield self)


async def _just(request: Awaitable[object]) -> object:
    return await request


class Episode:
    """Argument of `run`: the task without its reference, a random generator, and the three kinds of requests."""

    __slots__ = ("_journalled", "_made", "_rng", "_roles", "_seed", "_tools", "task")

    def __init__(self, task: View, seed: int, roles: Mapping[str, Role], tools: Sequence[str]) -> None:
        self.task = task
        self._seed = seed
        self._roles = roles  # by agent
        self._tools = tools
        self._made: list[Node | Join] = []
        self._rng: random.Random | None = None
        self._journalled: Node | None = None  # the journal's node that a replay reaches next

    @property
    def rng(self) -> random.Random:
        """Random generator of this episode, the only one that `run` may use."""
        if self._rng is None:
            self._rng = random.Random(self._seed)
        return self._rng

    def role(self, agent: str) -> Role:
        """Return the role of an agent."""
        if agent not in self._roles:
            raise unknown("agent", agent, self._roles)
        return self._roles[agent]

    def cast(self, role: str) -> tuple[str, ...]:
        """Return the agents of a role, in order."""
        agents = tuple(agent for agent, known in self._roles.items() if known.name == role)
        if not agents:
            raise unknown("role", role, {known.name for known in self._roles.values()})
        return agents

    def act(
        self,
        agent: str,
        prompt: str | Mapping[str, object] | Sequence[Message],
        *,
        reply: Format | None = None,
        turn: int | None = None,
        max_tokens: int | None = None,
        anchor: str | None = None,
    ) -> Act:
        """Ask an agent for a reply. `await` it to get the `Reply`. `reply` replaces the role's reply format.

        `prompt` is a text, messages, or the fields that fill the role's prompt (`Workflow.prompts`). The role's system
        message stands before it, unless the prompt brings one of its own. `anchor` is the state of the world as text. GiGPO
        compares acts with the same anchor, whatever their prompts say.
        """
        try:
            role = self._roles[agent]
        except KeyError:
            raise unknown("agent", agent, self._roles) from None
        fields: Mapping[str, object]
        messages: tuple[Message, ...]
        if type(prompt) is dict:
            fields, known = prompt, self._journalled
            if known is not None and known.fields == prompt and known.agent == agent:
                messages = known.messages  # a replay does not fill the same prompt again
            else:
                wording, opening = role.wording, role.opening
                if wording is None:
                    raise _unworded(agent, prompt)
                try:
                    ask = wording.ask
                    asked = {"role": "user", "content": ask(prompt)}
                except KeyError as error:
                    raise _unfilled(agent, prompt, error) from None
                messages = (opening[0], asked) if opening else (asked,)
        elif type(prompt) is str:
            fields = EMPTY
            messages = (*role.opening, {"role": "user", "content": prompt})
        else:
            fields, messages = EMPTY, _checked_messages(agent, prompt)
            if messages[0]["role"] != "system":
                messages = role.opening + messages
        if anchor is not None:
            anchor = hashlib.blake2b(anchor.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
        node = Act()  # filled here line by line (see `fast.py`)
        node.state = MADE
        node.agent = agent
        node.role = role.name
        node.messages = messages
        node.format = reply or role.reply
        node.read = role.read if reply is None else None
        node.turn = turn
        node.max_tokens = max_tokens
        node.anchor = anchor
        node.fields = fields
        node.reply = node.error = None
        node.meta = NOTHING_KNOWN
        self._made.append(node)
        return node

    def told(self, agent: str, fields: Mapping[str, object]) -> str:
        """Return the prompt of an agent's role, filled with these fields, as `act` fills it."""
        words = self.role(agent).wording
        if words is None:
            raise _unworded(agent, fields)
        try:
            return words.told(fields)
        except KeyError as error:
            raise _unfilled(agent, fields, error) from None

    def use(self, tool: str, /, **args: object) -> Use:
        """Use a tool. `await` it to get its public result. If the tool failed, its `ToolError` is raised."""
        if tool not in self._tools and tool.partition(":")[0] not in self._tools and tool != TOOLS:
            raise unknown("tool", tool, self._tools)
        node = new_use(tool, freeze(args))
        self._made.append(node)
        return node

    def all(self, *branches: Awaitable[object]) -> Join:
        """Run requests, or coroutines of requests, at the same time. `await` it to get their results in order."""
        coroutines = []
        for branch in branches:
            if isinstance(branch, Coroutine):
                coroutines.append(branch)
            elif isinstance(branch, Node | Join):
                coroutines.append(_just(branch))
            else:
                raise WorkflowError(
                    f"ep.all takes ep.act(…), ep.use(…) or coroutines of them, not {branch!r}"
                )
        join = Join(tuple(coroutines))
        self._made.append(join)
        return join

    def memory(self, agent: str, system: str = "") -> Memory:
        """Return a conversation of this agent, which each of its acts continues. `system` replaces the role's system
        message.
        """
        return Memory(self, agent, system)

    def _forgotten(self, asked: int) -> Node | Join | None:
        """Return a request that was made but never awaited, if there is one. `asked` is the number of awaited
        requests.
        """
        if len(self._made) == asked:
            return None
        return next((request for request in self._made if request.state == MADE), None)


class Memory:
    """Conversation of one agent: each act sees all earlier messages, its own replies included."""

    __slots__ = ("agent", "ep", "messages")

    def __init__(self, ep: Episode, agent: str, system: str = "") -> None:
        self.ep, self.agent = ep, agent
        self.messages: tuple[Message, ...] = ()
        if system:
            self.messages = ({"role": "system", "content": system},)

    def hear(self, text: str, by: str = "user") -> None:
        """Add a message to the conversation without requesting a reply. `by` is `"user"` or `"tool"`."""
        self.messages += ({"role": by, "content": text},)

    async def act(
        self,
        prompt: str | None = None,
        *,
        reply: Format | None = None,
        turn: int | None = None,
        max_tokens: int | None = None,
        anchor: str | None = None,
    ) -> Reply:
        """Send `prompt` (if any) to the agent, and add its reply to the conversation."""
        if prompt is not None:
            self.hear(prompt)
        answer = await self.ep.act(
            self.agent, self.messages, reply=reply, turn=turn, max_tokens=max_tokens, anchor=anchor
        )
        self.messages += (answer.message(),)
        return answer


class Workflow:
    """A team's program: declare `roles` (and `tools`, `schema`), and write `run`.

    `__init__` takes the configuration. When an environment is made of a workflow, the workflow is frozen.
    """

    roles: tuple[Role, ...] = ()
    tools: tuple[str, ...] = ()
    schema: Schema = QA
    prompts: PromptSource | None = None
    """Texts for the roles, as sets by name, or the YAML file (or files) that hold them (`prompts.py`)."""
    prompt_set: PromptSet | None = None
    """Prompt set in use: the chosen one, or the default."""
    lenient: Mapping[str, bool] = EMPTY
    """Value of `Role.lenient` by role (or "*"), if `make` got one."""

    async def run(self, ep: Episode) -> Outcome | None:
        """Run one episode. Only requests of `ep` may be awaited."""
        raise WorkflowError(f"{type(self).__name__} needs an `async def run(self, ep)`")

    def told_roles(self) -> tuple[Role, ...]:
        """Return the roles with the texts of the prompt set."""
        return tuple({role.name: role for role in self.agents().values()}.values())

    def terms(self) -> Mapping[str, object]:
        """Return values of this configuration that the roles' texts may use, by name."""
        return {}

    def with_prompts(self, prompts: object) -> Workflow:
        """Return this workflow with another prompt set."""
        twin = copy.copy(self)
        twin.__dict__.pop("_sealed", None)
        twin.prompt_set = choose(twin, prompts)
        return twin

    async def grade(self, ep: Episode, trace: Trace, task: Task) -> Mapping[str, object] | None:
        """Grade an episode after `run`. It may use the reference, tools and judges. Its result is `trace.grade`."""
        return None

    def seal(self) -> Workflow:
        """Freeze the object, because all episodes share it."""
        name = type(self).__name__
        if not isinstance(self.tools, tuple | list):
            raise WorkflowError(
                f"{name}.tools must be a tuple of names, got {self.tools!r:.60}: write ('name',)"
            )
        self.__dict__["_sealed"] = True
        return self

    def __setattr__(self, name: str, value: object) -> None:
        if self.__dict__.get("_sealed"):
            raise WorkflowError(
                f"{type(self).__name__}.{name} was set inside an episode; a workflow is shared by all of them: "
                "keep what belongs to one episode in local variables of `run`"
            )
        object.__setattr__(self, name, value)

    def agents(self) -> dict[str, Role]:
        """Return the role of every agent of the workflow, in order."""
        if not self.roles:
            raise WorkflowError(f"{type(self).__name__} declares no roles")
        if not isinstance(self.roles, tuple | list) or not all(isinstance(r, Role) for r in self.roles):
            raise WorkflowError(
                f"{type(self).__name__}.roles must be a tuple of Role, got {self.roles!r:.60}: write (Role('name'),)"
            )
        table: dict[str, Role] = {}
        words = self.prompt_set or choose(self)
        for role in self.roles:
            lenient = entry_of(self.lenient, role.name)
            if lenient is not None:
                role = replace(role, lenient=lenient)
            role = role if words is None else words.told(role)
            for agent in role.agents:
                if agent in table:
                    raise WorkflowError(f"{type(self).__name__}: two agents are called {agent!r}")
                table[agent] = role
        return table


def unknown(what: str, name: object, known: Iterable[object]) -> WorkflowError:
    """Return the message for an unknown name. It names the nearest known ones."""
    names = sorted(map(str, known))
    some = ", ".join(names[:12]) + (f", … ({len(names)} in all)" if len(names) > 12 else "")
    hint = nearest(str(name).casefold(), names, instead=f"known: {some or 'none'}")
    return WorkflowError(f"unknown {what} {name!r}; {hint}")


def _unworded(agent: str, fields: Mapping[str, object]) -> WorkflowError:
    return WorkflowError(
        f"{agent!r} is asked by fields ({', '.join(fields)}), but has no prompt: give its workflow `prompts`, or ask "
        "with a text"
    )


def _unfilled(agent: str, fields: Mapping[str, object], error: KeyError) -> WorkflowError:
    return WorkflowError(
        f"the prompt of {agent!r} has the field {error.args[0]!r}, which `run` did not fill; it filled {', '.join(fields)}"
    )


def _checked_messages(agent: str, prompt: object) -> tuple[Message, ...]:
    if isinstance(prompt, str):  # a str subclass
        return ({"role": "user", "content": prompt},)
    messages = tuple(prompt) if isinstance(prompt, Sequence) else ()
    if not messages or any(
        not isinstance(m, Mapping)
        or not isinstance(m.get("role"), str)
        or not isinstance(m.get("content"), str)
        for m in messages
    ):
        raise WorkflowError(
            f"the prompt to {agent!r} must be a string, or a list of {{'role': …, 'content': …}}; got {prompt!r:.200}"
        )
    return messages
