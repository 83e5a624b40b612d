"""Training from Python: an environment in our reward wrappers, and rules that are objects of one's own."""

from dataclasses import dataclass

import pytest
import yaml
from pettingzoo.utils import BaseWrapper

import unitymas
import unitymas.envs.core.trace
from unitymas import Choice, Credit, Outcome, Role, Workflow
from unitymas.cli.training import train_main
from unitymas.envs.registry import unregister
from unitymas.rewards.rules import TrajectoryReward
from unitymas.rewards.wrappers import RewardWrapper
from unitymas.trainers.config.schema import ConfigError

ROWS = [{"id": f"t{i}", "question": f"w{10 + i}", "answers": ["w2"]} for i in range(6)]


class Solo(Workflow):
    roles = (Role("speaker", reply=Choice("w1", "w2", "w3")),)

    def __init__(self, polite: bool = False) -> None:
        self.polite = polite

    async def run(self, ep):
        return Outcome(answer=(await ep.act("speaker", ep.task.question)).value)


def right(trace, task):
    return float((trace.outcome or {}).get("answer") in task.reference["answers"])


@dataclass
class Bonus:
    """A rule with settings of its own."""

    size: float
    name: str = "bonus"

    def on_end(self, trace, task):
        return [Credit(node.id, self.name, self.size) for node in trace.acts()]


@pytest.fixture(autouse=True)
def environment():
    unitymas.register("solo-from-python", workflow=Solo, reward=right, tasks=ROWS, expert=lambda call: "w2")
    yield
    unregister("solo-from-python")


def settings(model):
    return {
        "steps": 1, "tasks_per_step": 2, "k": 2, "starved": False, "deterministic": True,
        "groups": {"main": {"model": model, "slots": 4, "threads": 1}},
        "policies": {"team": {"algorithm": "grpo", "sampling": {"max_tokens": 2}}},
        "eval": {"every": 0, "tasks": 2}, "log": {"console": "off", "traces_every": 1},
    }  # fmt: skip


def components(run):
    """What validation's and the step's ledgers hold, by name."""
    found = set()
    for path in sorted((run.dir / "traces").iterdir()):
        for trace in unitymas.envs.core.trace.read_dicts(path):
            found |= {name for node in trace["nodes"] for name in node.get("rewards", {})}
    return found


def test_a_wrapped_environment_is_trained_with_what_its_wrappers_pay(tiny_llama, tmp_path):
    env = RewardWrapper(unitymas.make("solo-from-python", polite=True), Bonus(0.25))
    run = unitymas.train(env, directory=tmp_path / "run", **settings(tiny_llama))
    assert (
        components(run) == {"right", "bonus"} and run.arena.workflow.polite and run.validation.workflow.polite
    )
    assert run.arena.headline == unitymas.make("solo-from-python").unwrapped.arena.headline
    written = yaml.safe_load((run.dir / "config.yaml").read_text())["env"]
    assert written["rules"] == ["given from Python: Bonus bonus"] and written["reward"] == "default"
    assert written["args"] == {"polite": True} and written["id"] == "solo-from-python"

    with pytest.raises(ConfigError, match=r"env\.rules: Bonus bonus was given from Python.*give it\s+again"):
        unitymas.train(directory=run.dir, resume=True, steps=2)
    again = unitymas.train(env, directory=run.dir, resume=True, steps=2)
    assert again.step == 2 and again.changes == ["steps 1 → 2"]


def test_rules_are_objects_of_ones_own(tiny_llama, tmp_path, capsys):
    run = unitymas.train(
        "solo-from-python", directory=tmp_path / "run", reward=[right, Bonus(0.5)], **settings(tiny_llama)
    )
    assert components(run) == {"right", "bonus"}
    assert run.arena.rules[1].size == 0.5  # the object itself, not a copy of its fields
    assert "given from Python: right" in (run.dir / "config.yaml").read_text()
    with pytest.raises(ConfigError, match=r"env\.reward: right was given from Python"):
        train_main(["--resume", str(run.dir), "steps=2"])
    again = unitymas.train(directory=run.dir, resume=True, steps=2, reward=[right, Bonus(0.5)])
    assert again.step == 2
    last = unitymas.train(
        directory=run.dir, resume=True, steps=3, reward=[right, Bonus(0.5), Bonus(1.0, "more")]
    )
    assert any(change.startswith("env.reward ") for change in last.changes)


def test_own_tasks_and_tools_are_taken_over(tiny_llama, tmp_path):
    env = unitymas.make("solo-from-python", tasks=ROWS[:3], budget={"requests": 5}, reward=None)
    run = unitymas.train(
        RewardWrapper(env, TrajectoryReward(right)), directory=tmp_path / "run", **settings(tiny_llama)
    )
    assert list(run.arena.task_ids) == ["t0", "t1", "t2"] == list(run.validation.task_ids)
    assert run.arena.budget.requests == 5 and len(run.arena.rules) == 1


def test_a_foreign_wrapper_is_refused_by_name(tmp_path):
    class Loud(BaseWrapper):
        pass

    with pytest.raises(TypeError, match="Loud wraps the environment"):
        unitymas.train(Loud(unitymas.make("solo-from-python")), directory=tmp_path / "run")


@pytest.mark.parametrize("reward", [3, "solo:nothing", [object()]])
def test_what_is_no_rule_is_refused_before_anything_is_loaded(reward, tmp_path):
    with pytest.raises(ConfigError, match=r"env\.reward: "):
        unitymas.train("solo-from-python", directory=tmp_path / "run", reward=reward)
    assert not (tmp_path / "run").exists()
