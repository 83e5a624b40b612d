"""Replies that call tools: `<tool>{"name": "retrieve", "arguments": {"query": "…"}}</tool>`.

`ToolCalls(final)` is the reply format of a role that calls tools itself: one or more calls, or else a final answer in
the format `final`. A mistake in a call (no JSON, no name, no closing tag) becomes the call's `error` in the value. The
workflow can show this error to the role. `envs.tool_loop.tool_loop` plays such a role.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import NoReturn, TypedDict

from ..basics.frozen import freeze
from ..basics.json_types import JsonObject
from ..roles import Format, Reply, _Base
from .reply_readers import between, is_shallow

OPEN, CLOSE = "<tool>", "</tool>"
EXAMPLE = '<tool>{"name": "…", "arguments": {…}}</tool>'
MOST = 16  # calls that one reply may make


class ReadCall(TypedDict, total=False):
    """Call of a tool: its name and arguments, or the error in it."""

    name: str
    arguments: JsonObject
    error: str


@dataclass(frozen=True)
class ToolCalls(_Base):
    """Format of a reply with tool calls or a final answer. The value is `{"calls": (…)}` or `{"final": …}`.

    Each call is `{"name", "arguments"}` or `{"error"}`. Text before the first call is legal. Text after a call is not legal,
    because there a model invents the tool's result: the calls are still read, but the reply is not `ok`. With
    `several=False`, sampling stops at the end of the first call.
    """

    final: Format
    several: bool = True

    @property
    def stop(self) -> tuple[str, ...]:
        """Stop strings of the final format, and the end of a call if only one is allowed."""
        return self.final.stop if self.several else (*self.final.stop, CLOSE)

    def _read(self, text: str, node: str) -> Reply:
        if OPEN not in text:
            final = self.final.parse(text)
            return Reply(text, final.ok, freeze({"final": final.value}), node)
        calls, only_calls = read_calls(text)
        legal = only_calls and not any("error" in call for call in calls)
        return Reply(text, legal, freeze({"calls": calls}), node)

    def within(self, text: str) -> str | None:
        """Return the calls of a reply, or else what the final format reads in it."""
        if OPEN in text:
            return between(text, (OPEN,), (CLOSE,))
        return self.final.within(text) if isinstance(self.final, _Base) else text

    def describe(self) -> str:
        """Describe both forms of a reply, for the role."""
        return f"{EXAMPLE}, or {self.final.describe()}"


def read_calls(text: str) -> tuple[list[ReadCall], bool]:
    """Return the calls of a reply, at most `MOST`, and whether only blanks stand between and after them."""
    calls: list[ReadCall] = []
    only_calls = True
    for part in text.split(OPEN)[1 : MOST + 1]:
        inside, closing, after = part.partition(CLOSE)
        calls.append(_read_call(inside) if closing else {"error": f"the call is not closed; write {EXAMPLE}"})
        only_calls = only_calls and not after.strip()
    return calls, only_calls and text.count(OPEN) <= MOST


def _read_call(inside: str) -> ReadCall:
    try:
        call = _json(inside)
        name = call.get("name") if isinstance(call, dict) else None
        if not isinstance(call, dict) or not isinstance(name, str):
            return {"error": f"the call names no tool; write {EXAMPLE}"}
        arguments = call.get("arguments", {})
        if isinstance(arguments, str):  # JSON inside of JSON, as in the chat protocols
            arguments = _json(arguments)
    except (ValueError, RecursionError) as error:
        return {"error": f"the call is not JSON ({error}); write {EXAMPLE}"}
    if not isinstance(arguments, dict) or not is_shallow(arguments):
        return {"error": f"the arguments of {name!r} must be a (shallow) JSON object; write {EXAMPLE}"}
    return {"name": name, "arguments": arguments}


def _json(text: str) -> object:
    return json.loads(text, parse_constant=_no_number)


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON number")
