"""Simulated groups that answer with the delay of an engine with continuous batching, from a model of its speed.

In the model, all running requests advance by one token in each decode step. A step takes the time `floor`, plus `each` for
every running request. A new prompt stops the others for `prefill` seconds per token. At most `slots` requests run, and the
others wait. A group needs no clock ticks: it sleeps until its next request ends.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ....agents.answers import Answer, DecisionId
from ....agents.policies import Call
from ....trainers.group.contract import GroupReport

REPLIES = {
    "planner": "<q1>Where does the maker live?</q1><a1>unknown</a1><final_answer>unknown</final_answer>",
    "answerer": "<final_answer>unknown</final_answer>",
    "summarizer": "<evidence>Upper Bremen</evidence>",
    "updater": "<update>t1</update>",
}
"""Replies of the roles of M-ASK. The searcher continues or ends at random."""


class PacedReport(GroupReport, total=False):
    """Report of a simulated group, with the work of its engine."""

    slot_seconds: float
    calls: int
    tokens: float
    seals: int
    running: int
    waiting: int
    cpu: float


@dataclass(frozen=True)
class EngineSpeed:
    """Speed of an engine, in seconds."""

    name: str
    floor: float
    """Time of a decode step with hardly any requests: the read of the weights."""
    each: float
    """Time that each running request adds to a step: the read of its keys and values."""
    prefill: float
    """Time of one prompt token."""
    source: str
    """Origin of the figures."""


PACES = {
    "8b-h100": EngineSpeed(
        "8b-h100", 6.9e-3, 6.3e-5, 3.2e-5,
        "computed from published figures, not measured: an H100 SXM (3.35 TB/s, 989 TFLOP/s in bfloat16) with a model of the "
        "shape of Qwen3-8B, contexts of 1,000 tokens, 70% of the bandwidth and half of the arithmetic",
    ),
    "1.7b-h100": EngineSpeed(
        "1.7b-h100", 1.5e-3, 4.9e-5, 7.0e-6,
        "computed likewise for the shape of Qwen3-1.7B",
    ),
}  # fmt: skip


@dataclass
class Lengths:
    """Tokens of a call. Those of the prompt are fixed, those of the reply are drawn around a mean, with a long tail."""

    prompt: int = 600
    fresh: int = 150
    """Tokens of the prompt that are not in the prefix cache."""
    reply: int = 200

    def draw(self, seed: int) -> int:
        """Draw a reply's length."""
        return max(1, min(8 * self.reply, round(random.Random(seed).gammavariate(2.0, self.reply / 2))))


class PacedGroup:
    """Simulated group of one engine. It has the methods that a collector calls."""

    def __init__(self, pace: EngineSpeed, slots: int, lengths: Lengths) -> None:
        self.pace, self.slots, self.lengths = pace, slots, lengths
        self.waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self.running: list[tuple[float, int, asyncio.Future[None]]] = []  # by the progress at which they end
        self.progress = self.stall = 0.0  # decode steps done; prefill that is still to be done
        self.last = time.perf_counter()
        self.numbers = itertools.count()
        self.timer: asyncio.TimerHandle | None = None
        self.slot_seconds = self.tokens = 0.0
        self.calls = self.seals = 0

    # the clock of the engine -------------------------------------------------------------------------------

    def _step(self) -> float:
        return self.pace.floor + self.pace.each * len(self.running)

    def _advance(self) -> None:
        """Update the engine's progress to the current time."""
        now = time.perf_counter()
        passed, self.last = now - self.last, now
        self.slot_seconds += passed * len(self.running)
        stalled = min(passed, self.stall)
        self.stall -= stalled
        if self.running:
            self.progress += (passed - stalled) / self._step()

    def _turn(self) -> None:
        """End the finished requests, start waiting ones, and set the timer for the next end."""
        self.timer = None
        self._advance()
        while self.running and self.running[0][0] <= self.progress + 1e-9:
            done = heapq.heappop(self.running)[2]
            if not done.done():
                done.set_result(None)
        while self.waiting and len(self.running) < self.slots:
            tokens, done = self.waiting.popleft()
            if not done.done():
                self.stall += self.lengths.fresh * self.pace.prefill
                heapq.heappush(self.running, (self.progress + tokens, next(self.numbers), done))
        if self.running:
            wait = (self.running[0][0] - self.progress) * self._step() + self.stall
            self.timer = asyncio.get_running_loop().call_later(max(wait, 0.0), self._turn)

    # the face of a group -----------------------------------------------------------------------------------

    async def generate(
        self, policy: str, call: Call, temperature: float | None = None, keep: bool = True
    ) -> Answer:
        """Answer after the delay of the engine."""
        tokens = self.lengths.draw(call.seed or 0)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting.append((tokens, done))
        if self.timer is not None:
            self.timer.cancel()
        self._turn()
        await done
        self.calls += 1
        self.tokens += tokens
        meta = {
            "policy": policy, "version": 0, "tokens_in": self.lengths.prompt, "tokens_out": tokens, "finish_reason": "stop",
            "sample": DecisionId(call.episode, call.node),
        }  # fmt: skip
        goes_on = "<search>Where does the maker live?</search>" if (call.seed or 0) % 2 else "<end>"
        return Answer(REPLIES.get(call.role, goes_on), meta)

    async def seal(self, episode: str, keep: Sequence[str]) -> list[DecisionId]:
        """Count a seal."""
        self.seals += 1
        return [DecisionId(episode, node) for node in keep]

    async def drop(self, episode: str, cause: str) -> int:
        """Do nothing, because nothing is stored."""
        return 0

    async def cancel(self, episode: str, node: str | None = None) -> int:
        """Do nothing, because this benchmark cancels nothing."""
        return 0

    async def report(self) -> PacedReport:
        """Return the work of the engine so far."""
        self._advance()
        return {
            "at": time.time(), "slot_seconds": self.slot_seconds, "calls": self.calls, "tokens": self.tokens,
            "seals": self.seals, "running": len(self.running), "waiting": len(self.waiting), "cpu": time.process_time(),
        }  # fmt: skip

    def abandon(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """End nothing."""
