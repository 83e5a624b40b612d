"""How a policy of a group speaks: messages to the very tokens it sees, and its tokens back to text."""

from __future__ import annotations

from typing import Any

from ..agents.chat import Chat
from ..agents.engine import Engine, Generation
from ..agents.policies import Answer, Call
from ..agents.sampling import SamplingParams
from .settings import Sampling


class Speaker:
    """One policy's voice on an engine (which may speak for others too)."""

    def __init__(self, engine: Engine, tokenizer: Any, adapter: str | None = None) -> None:
        self.engine, self.tokenizer, self.adapter = engine, tokenizer, adapter
        self.chat = Chat(tokenizer, stop_ids=engine.stop_ids)

    async def say(self, call: Call, sampling: Sampling) -> tuple[Answer, Generation]:
        """Answer a call; beside the answer, the tokens and log-probs that training needs."""
        prompt = self.chat.prompt(call)
        said = await self.engine.agenerate(prompt.ids, _params(call, sampling), adapter=self.adapter)
        self.chat.remember(call, prompt, said.ids, said.text)
        meta = {
            "tokens_in": len(said.prompt_ids),
            "tokens_out": len(said.ids),
            "finish_reason": said.finish_reason,
        }
        return Answer(said.text, meta), said


def _params(call: Call, sampling: Sampling) -> SamplingParams:
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=min(sampling.max_tokens, call.max_tokens or sampling.max_tokens),
        stop=tuple(call.stop),
        seed=call.seed,
        choices=call.choices,
    )
