"""Team whose roles have different scales of reward and different numbers of calls, small enough to learn in seconds.

    leader   acts once: it replies with the word that belongs to the task's word. Its reward is 0 or 1.
    worker   acts up to `tries` times, until it is right: another word belongs to the task's word. Its reward is 10 for
             each call of an episode in which it succeeds, and −10 if it never does.

Each role has to learn a table of `words` entries. Some tasks are harder, with fewer tries for the worker. A reply is a choice
among `words` words. The right word is fixed by the order of the words, rotated differently for the two roles. `score` is the
share of the two roles that were right in their first call.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...agents.policies import Call
from ...agents.roles import Choice, Role
from ...envs.core.ledger import Credit, Rule
from ...envs.core.tasks import Schema, Task
from ...envs.core.trace import Trace
from ...envs.core.workflow import Episode, Outcome, Workflow
from ...envs.registry import register

WORDS = ("ash", "bay", "cup", "dew", "elm", "fog", "gum", "hay")
PAY = {"leader": 1.0, "worker": 10.0}


def rows(split: str = "train", size: int | None = None) -> list[dict[str, str]]:
    """Return a task for every word with every number of tries. All splits are equal: this measures learning alone."""
    return [
        {"id": f"{word}-{tries}", "word": word, "tries": str(tries)} for word in WORDS for tries in (1, 2, 4)
    ][:size]


def right(role: str, word: str) -> str:
    """Return the right reply of a role to a word."""
    shift = 1 if role == "leader" else 3
    return WORDS[(WORDS.index(word) + shift) % len(WORDS)]


class Uneven(Workflow):
    """Workflow with one call of the leader, then the calls of the worker."""

    schema = Schema("uneven", ("id", "word", "tries"), ())
    roles = (
        Role("leader", reply=Choice(*WORDS), system="You lead."),
        Role("worker", reply=Choice(*WORDS), system="You work."),
    )

    async def run(self, ep: Episode) -> Outcome:
        """Play one episode."""
        word, tries = ep.task.word, int(ep.task.tries)
        await ep.act("leader", f"{word} {tries}", turn=0)
        for turn in range(tries):
            reply = await ep.act("worker", f"{word} {turn}", turn=turn)
            if reply.value == right("worker", word):
                break
        return Outcome()


class UnevenCredit(Rule):
    """Rewards of each role, and the metrics."""

    name = "pay"

    def on_end(self, trace: Trace, task: Task) -> Iterable[Credit]:
        """Return the credits that are known when the episode is over."""
        for role, pay in PAY.items():
            acts = trace.acts(role)
            got = any(act.value == right(role, task.view["word"]) for act in acts)
            amount = pay * got if role == "leader" else pay * (1 if got else -1)
            yield from (Credit(act.id, "pay", amount) for act in acts)

    def metrics(self, trace: Trace, task: Task) -> dict[str, float]:
        """Return the figures to report."""
        first = {
            role: float(bool(acts := trace.acts(role)) and acts[0].value == right(role, task.view["word"]))
            for role in PAY
        }
        return {"score": sum(first.values()) / len(first), **first}


def expert(call: Call) -> str:
    """Return the right reply."""
    return right(call.role, call.task.view["word"])


def registered() -> str:
    """Register the environment, and return its id."""
    register("uneven-words", workflow=Uneven, reward=UnevenCredit, tasks=rows, expert=expert)
    return "uneven-words"
