"""The standard loop of an agent that calls tools by itself.

    done = await tool_loop(ep, "researcher", f"Question: {question}", tools={"retrieve": {"k": 3}}, max_calls=4)
    return Outcome(answer=done.value)

The role's reply format is a `ToolCalls`: a reply either calls tools, as `<tool>{"name": …, "arguments": {…}}</tool>`,
or gives the final answer. The tools' schemas stand in the system message; the calls of one reply run side by side,
each a `use` node that follows the reply; what they gave is the next message, told by role `"tool"` (a model whose
chat template knows no tools hears it from the user). The conversation only grows, so each act continues the very
tokens of the last. Mistakes of the model (an unknown tool, wrong arguments, a call too many, a tool that failed)
are told to it, never raised.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ..agents.basics.hints import nearest
from ..agents.basics.json_types import JsonView
from ..agents.roles import Reply
from ..agents.text.calls import EXAMPLE, ToolCalls
from ..agents.text.role_prompt import Told
from .core.trace import jsonable
from .core.workflow import TOOLS, Episode, ToolError, WorkflowError
from .tools.signatures import misfit, without
from .tools.tool import About

LONGEST = 4000  # characters of one result that the agent gets to see


class Done(NamedTuple):
    """Result of a loop: the value of the final answer, a flag that it is legal, and the number of calls."""

    value: Any
    ok: bool
    calls: int
    reply: Reply


async def tool_loop(
    ep: Episode,
    agent: str,
    prompt: str,
    tools: Sequence[str] | Mapping[str, Mapping[str, object]],
    *,
    max_calls: int = 4,
    show: Callable[..., str] | None = None,
) -> Done:
    """Let an agent call `tools` until it answers, at most `max_calls` times.

    `tools` are names, or a mapping from names to arguments that the agent may not choose (`{"retrieve": {"k": 3}}`).
    `show` converts a result to text. By default strings are shown unchanged, and other results as JSON. A reply that is
    neither a call nor an answer counts as a call. When no call is left, the next reply is final.
    """
    role = ep.role(agent)
    if not isinstance(role.reply, ToolCalls):
        raise WorkflowError(
            f"{agent!r} is to call tools; give its role reply=ToolCalls(…), not {role.reply!r}"
        )
    fixed = dict(tools) if isinstance(tools, Mapping) else {name: {} for name in tools}
    told = await ep.use(TOOLS, names=tuple(fixed))
    offer = {one["name"]: without(one, _fixed(fixed, one["name"])) for one in told}
    memory = ep.memory(agent, system=system_text(role.system, offer, max_calls))
    memory.hear(prompt)
    left, made = max_calls, 0
    while True:
        reply = await memory.act()
        calls = (reply.value or {}).get("calls", ())
        if left <= 0 or (reply.ok and not calls):
            return Done((reply.value or {}).get("final"), reply.ok and not calls, made, reply)
        results = await ep.all(
            *(
                _call(ep, call, offer, fixed, show or tell) if i < left else _refused(max_calls)
                for i, call in enumerate(calls)
            )
        )
        made += min(len(calls), left)
        left -= max(1, len(calls))
        memory.hear(_results(results, max(left, 0)), by="tool")


def system_text(system: str, offer: Mapping[str, About], max_calls: int) -> str:
    """The role's system message, how to call, and the tools' schemas, one a line."""
    schemas = "\n".join(json.dumps(jsonable(one), ensure_ascii=False) for one in offer.values())
    return (
        f"{system}\n\nTo call a tool, write {EXAMPLE}. Several calls in one reply run side by side. "
        f"You have {max_calls} calls.\nTools:\n{schemas}"
    ).lstrip()


def tell(result: object) -> str:
    """A result as text."""
    return result if isinstance(result, str) else json.dumps(jsonable(result), ensure_ascii=False)


async def _call(
    ep: Episode,
    call: JsonView,
    offer: Mapping[str, About],
    fixed: Mapping[str, Mapping[str, object]],
    show: Callable[..., str],
) -> str:
    """Make one call; whatever comes of it is told as text."""
    if "error" in call:
        return f"error: {call['error']}"
    name, arguments = call["name"], call["arguments"]
    if name not in offer:
        return f"error: there is no tool {name[:60]!r}; {nearest(name[:60], offer, 'there are')}"
    wrong = misfit(offer[name]["parameters"], arguments)
    if wrong:
        return f"error: {name}: {wrong}"
    try:
        return show(await ep.use(name, **{**arguments, **_fixed(fixed, name)}))
    except ToolError as error:
        return f"error: {error}"


async def _refused(max_calls: int) -> str:
    return f"error: only {max_calls} calls are allowed"


def _fixed(fixed: Mapping[str, Mapping[str, object]], name: str) -> Mapping[str, object]:
    """The arguments that the agent may not choose; those of "mcp:files" hold for "mcp:files/read_file" too."""
    for known in (name, name.partition("/")[0], name.partition(":")[0]):
        if known in fixed:
            return fixed[known]
    return {}


def _results(results: Sequence[str], left: int) -> str:
    """Message to the agent: the results in the order of its calls, and how many calls are left."""
    if not results:
        results = (f"error: neither a tool call nor a final answer; to call a tool, write {EXAMPLE}",)
    pieces: list[tuple[str, str]] = []
    for result in results:
        pieces += [("", "<result>\n"), ("results", _cut(result)), ("", "\n</result>\n")]
    end = f"{left} calls left." if left else "No calls are left: give your final answer."
    return Told([*pieces, ("", end)], [("results", "last")])


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} … ({len(text) - LONGEST:,} characters more)"
