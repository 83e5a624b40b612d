"""Standard loop of an agent that calls tools itself.

    done = await tool_loop(ep, "researcher", f"Question: {question}", tools={"retrieve": {"k": 3}}, max_calls=4)
    return Outcome(answer=done.value)

The role's reply format is a `ToolCalls`: a reply calls tools, as `<tool>{"name": …, "arguments": {…}}</tool>`, or it
gives the final answer. The system message holds the schemas of the tools. The calls of one reply run at the same time;
each is a `use` node after the reply. Their results are the next message, with the role `"tool"`. A model whose chat
template has no tools gets it with the role `"user"`. The conversation only grows, so each prompt begins with the exact
tokens of the previous one. Mistakes are shown to the model and not raised: an unknown tool, wrong arguments, too many
calls, a tool that failed.
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

LONGEST = 4000  # characters of one result that the agent sees


class Done(NamedTuple):
    """Result of a loop: value of the final answer, flag that it is legal, number of calls, and the last reply."""

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
    """Return the system message: the role's own text, how to call a tool, and the schemas of the tools, one in a line."""
    schemas = "\n".join(json.dumps(jsonable(one), ensure_ascii=False) for one in offer.values())
    return (
        f"{system}\n\nTo call a tool, write {EXAMPLE}. Several calls in one reply run side by side. "
        f"You have {max_calls} calls.\nTools:\n{schemas}"
    ).lstrip()


def tell(result: object) -> str:
    """Return a tool's result as text."""
    return result if isinstance(result, str) else json.dumps(jsonable(result), ensure_ascii=False)


async def _call(
    ep: Episode,
    call: JsonView,
    offer: Mapping[str, About],
    fixed: Mapping[str, Mapping[str, object]],
    show: Callable[..., str],
) -> str:
    """Make one call. Return its result or its error as text."""
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
    """Return the arguments that the agent may not choose. Those of "mcp:files" also hold for "mcp:files/read_file"."""
    for known in (name, name.partition("/")[0], name.partition(":")[0]):
        if known in fixed:
            return fixed[known]
    return {}


def _results(results: Sequence[str], left: int) -> str:
    """Return the message to the agent: the results in the order of the calls, and the number of calls that are left."""
    if not results:
        results = (f"error: neither a tool call nor a final answer; to call a tool, write {EXAMPLE}",)
    pieces: list[tuple[str, str]] = []
    for result in results:
        pieces += [("", "<result>\n"), ("results", _cut(result)), ("", "\n</result>\n")]
    end = f"{left} calls left." if left else "No calls are left: give your final answer."
    return Told([*pieces, ("", end)], [("results", "last")])


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} … ({len(text) - LONGEST:,} characters more)"
