"""Tool QA: one agent that calls the search tool itself, and answers when it knows enough (as in Search-R1).

    researcher -> one or several calls of `retrieve` -> results -> … -> final answer

The episode is one growing conversation of one agent, which `tool_loop` plays. Each prompt begins with the exact tokens of the
previous one, in the engine and in training.
"""

from __future__ import annotations

import json

from ...agents.policies import Call
from ...agents.roles import Role
from ...agents.text.calls import ToolCalls
from ..core.workflow import Episode, Outcome, Workflow
from ..tool_loop import tool_loop
from .parts import ANSWER, PROMPTS, passages_text


class ToolQa(Workflow):
    """Team of one researcher, with at most `max_calls` searches of `top_k` passages each."""

    roles = (
        Role(
            "researcher",
            reply=ToolCalls(ANSWER),
            sees=("question",),
        ),
    )
    tools = ("retrieve",)
    prompts = PROMPTS / "tool_qa.yaml"

    def __init__(self, max_calls: int = 6, top_k: int = 3) -> None:
        if max_calls < 1 or top_k < 1:
            raise ValueError(f"max_calls and top_k must be at least 1, got {max_calls} and {top_k}")
        self.max_calls, self.top_k = max_calls, top_k

    async def run(self, ep: Episode) -> Outcome:
        """Play one episode."""
        done = await tool_loop(
            ep,
            "researcher",
            ep.told("researcher", {"question": ep.task.question}),
            tools={"retrieve": {"k": self.top_k}},
            max_calls=self.max_calls,
            show=passages_text,
        )
        return Outcome(answer=done.value, calls=done.calls)


def expert(call: Call) -> str:
    """Search each hop as soon as it can be asked. Answer when every hop's answer was seen, or no call is left."""
    reference = call.task.reference
    gold = reference["answers"][0]
    hops = reference.get("hops") or ({"question": call.task.view["question"], "answer": gold},)
    heard = "\n".join(m["content"] for m in call.messages if m["role"] == "tool")
    asked = "\n".join(m["content"] for m in call.messages if m["role"] == "assistant")
    left = next((hop for hop in hops if hop["answer"] not in heard), None)
    if left is None or "No calls are left" in heard:
        return f"<final_answer>{gold}</final_answer>"
    again = f" {left['title']}" if left["question"] in asked and left.get("title") else ""
    query = json.dumps(
        {"name": "retrieve", "arguments": {"query": left["question"] + again}}, ensure_ascii=False
    )
    return f"<tool>{query}</tool>"
