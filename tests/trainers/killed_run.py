"""A run of two groups that is killed in its second step: run as a script by test_ranks_run.py, which also imports it."""

import json
import os
import signal
import sys

import unitymas
from unitymas import Choice, Outcome, Role, Workflow
from unitymas.envs.registry import unregister
from unitymas.trainers.controller.run import train
from unitymas.trainers.controller.step import Default
from unitymas.trainers.recipes import register_recipe

WORDS = ("w1", "w2", "w3", "w4")
ID, RECIPE = "pair-over-ranks", "killed-over-ranks"


class Pair(Workflow):
    roles = (Role("first", reply=Choice(*WORDS)), Role("second", reply=Choice(*WORDS)))

    async def run(self, ep):
        one = await ep.act("first", f"w9 {ep.task.question}")
        two = await ep.act("second", f"w8 {ep.task.question} {one.text}")
        return Outcome(answer=two.value)


def right(trace, task):
    return float((trace.outcome or {}).get("answer") in task.reference["answers"])


class Killed(Default):
    """The usual step; where the script asks for it, the second one is killed in the middle."""

    kill = False

    async def step(self, run):
        if self.kill and run.step == 1:
            print(json.dumps({name: _pids(group) for name, group in run.groups.items()}), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().step(run)


def _pids(group):
    return group.ranks.supervisor.pid


def register():
    """Register what the run needs; return what forgets it."""
    rows = [{"id": f"t{i}", "question": f"w{20 + i}", "answers": [WORDS[i % 4]]} for i in range(8)]
    unitymas.register(ID, workflow=Pair, reward=right, tasks=rows, expert=lambda call: "w1")
    register_recipe(RECIPE, Killed)
    return lambda: unregister(ID)


def tree(model, ranks):
    """A config of two groups, with a policy each."""
    own = {"learning": {"lr": 1e-3, "micro_tokens": 64}, "sampling": {"temperature": 3.0, "max_tokens": 2}}
    group = {"model": model, "slots": 4, "threads": 1, "ranks": ranks}
    return {
        "steps": 2, "tasks_per_step": 3, "k": 2, "minibatches": 2, "starved": False, "deterministic": True, "recipe": RECIPE,
        "checkpoint_every": 1, "eval": {"every": 0, "tasks": 1}, "log": {"console": "off", "traces_every": 0},
        "groups": {"one": group, "two": group}, "map": {"first": "a", "second": "b"},
        "policies": {"a": {"group": "one", **own}, "b": {"group": "two", "algorithm": {"name": "grpo"}, **own}},
    }  # fmt: skip


if __name__ == "__main__":
    model, directory, ranks = sys.argv[1:]
    Killed.kill = True
    register()
    train(ID, directory=directory, **tree(model, int(ranks)))
