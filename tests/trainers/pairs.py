"""A team of two for tests of runs: each says one of four words, and the second's is the answer."""

import unitymas
from unitymas import Choice, Outcome, Role, Workflow

WORDS = ("w1", "w2", "w3", "w4")
ROWS = [{"id": f"t{i}", "question": f"w{20 + i}", "answers": [WORDS[i % 4]]} for i in range(8)]


class Pair(Workflow):
    roles = (Role("first", reply=Choice(*WORDS)), Role("second", reply=Choice(*WORDS)))

    async def run(self, ep):
        one = await ep.act("first", f"w9 {ep.task.question}")
        two = await ep.act("second", f"w8 {ep.task.question} {one.text}")
        return Outcome(answer=two.value)


def right(trace, task):
    return float((trace.outcome or {}).get("answer") in task.reference["answers"])


def register_pair(id, rows=ROWS):
    """Register the pair; its expert always says the first word."""
    unitymas.register(id, workflow=Pair, reward=right, tasks=rows, expert=lambda call: WORDS[0])
