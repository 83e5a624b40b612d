"""Run as a program by test_evaluate: a slow evaluation that notes every episode it begins to generate."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from unitymas.agents.policies import Call
from unitymas.agents.roles import Role
from unitymas.benchmarks.evaluation.evaluate import evaluate
from unitymas.envs.core.tasks import Task
from unitymas.envs.core.trace import Trace
from unitymas.envs.core.workflow import Episode, Outcome, Workflow
from unitymas.envs.registry import register


class Guess(Workflow):
    """One guess."""

    roles = (Role("guesser"),)

    async def run(self, ep: Episode) -> Outcome:
        return Outcome(answer=(await ep.act("guesser", str(ep.task["question"]))).value)


class Exact:
    name = "exact"

    def metrics(self, trace: Trace, task: Task) -> dict[str, float]:
        return {
            "score": float(trace.outcome is not None and trace.outcome["answer"] in task.reference["answers"])
        }

    def on_end(self, trace: Trace, task: Task) -> list[object]:
        return []


class Slow:
    def __init__(self, log: Path) -> None:
        self.log = log

    def identity(self) -> dict[str, str]:
        return {"model": "slow"}

    async def act(self, call: Call) -> str:
        with open(self.log, "a", encoding="utf-8") as file:
            file.write(call.episode + "\n")
        await asyncio.sleep(0.01)
        return str(call.seed % 3)


if __name__ == "__main__":
    out = Path(sys.argv[1])
    rows = [{"id": f"t{i}", "question": f"{i}?", "answers": [str(i % 3)]} for i in range(40)]
    register("guess", Guess, reward=(Exact,), tasks=rows)
    evaluate("guess", Slow(out.with_suffix(".calls")), k=3, concurrency=4, out=out)
