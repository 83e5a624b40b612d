"""Search over forks: more episodes never score worse, branching goes where it pays, oracles are named."""

import random

import pytest

from unitymas import Choice, Outcome, Role, Workflow
from unitymas.agents.policies import RandomPolicy
from unitymas.envs.core.arena import Arena
from unitymas.envs.core.tasks import DataSet
from unitymas.envs.core.workflow import WorkflowError
from unitymas.envs.search import ab_mcts, best_of_n
from unitymas.envs.tools.tool import Tool

DEPTH = 8


class Lock(Workflow):
    """A combination lock: each right digit counts."""

    roles = (Role("turner", reply=Choice(*"012")),)
    tools = ("click",)

    async def run(self, ep):
        said = ""
        for _ in range(DEPTH):
            said += (await ep.act("turner", f"so far {said}")).text
        await ep.use("click")
        return Outcome(answer=said)


class Right:
    name = "right"

    def on_node(self, trace, node, task):
        return ()

    def on_end(self, trace, task):
        return ()

    def metrics(self, trace, task):
        said = (trace.outcome or {}).get("answer", "")
        return {
            "right": sum(a == b for a, b in zip(said, task.reference["answers"][0], strict=False)) / DEPTH
        }


def lock(kind="pure"):
    chance = random.Random(1)
    rows = [
        {"id": f"t{i}", "question": "?", "answers": ["".join(chance.choices("012", k=DEPTH))]}
        for i in range(8)
    ]
    click = Tool(lambda: None, "click", kind=kind, blocking=False)
    return Arena(Lock(), DataSet("d", "train", rows, "f"), tools={"click": click}, rules=[Right()])


def mean(traces):
    return sum(t.metrics["right"] for t in traces) / len(traces)


def test_more_episodes_are_never_worse():
    scores = [mean(best_of_n(lock(), RandomPolicy(), n, "right")) for n in (1, 4, 16)]
    assert scores[0] <= scores[1] <= scores[2] and scores[0] < scores[2]
    assert best_of_n(lock(), RandomPolicy(), 4, "right")[0].tags["episodes"] == 4


def test_adaptive_branching_beats_best_of_n_where_steps_count():
    """With the same number of episodes: a good beginning is worth going on from."""
    tree, flat = (
        sum(mean(search(lock(), RandomPolicy(), 48, "right", seed=seed)) for seed in range(2))
        for search in (ab_mcts, best_of_n)
    )
    assert tree > flat


def test_search_is_reproducible_and_takes_verifiers():
    def verifier(trace):
        return float(trace.outcome["answer"].startswith("21"))

    once, again = (ab_mcts(lock(), RandomPolicy(), 40, verifier, tasks=2) for _ in range(2))
    assert [t.to_dict(volatile=False) for t in once] == [t.to_dict(volatile=False) for t in again]
    assert all(t.outcome["answer"].startswith("21") for t in once)


def test_what_cannot_be_searched_says_so():
    with pytest.raises(WorkflowError, match="'click', which cannot be forked"):
        best_of_n(lock("unforkable"), RandomPolicy(), 2, "right")
    with pytest.raises(ValueError, match="has no metric 'rihgt'; it has right"):
        best_of_n(lock(), RandomPolicy(), 2, "rihgt")
    with pytest.raises(ValueError, match="is not in 0 … 1"):
        best_of_n(lock(), RandomPolicy(), 2, lambda trace: 7.0)
    with pytest.raises(ValueError, match="at least 1"):
        ab_mcts(lock(), RandomPolicy(), 0, "right")
