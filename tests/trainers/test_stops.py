"""What stops a run early: nothing to learn from, settings that name what is not there; and where its models are put."""

import asyncio
from typing import Any

import pytest
import torch

import unitymas
from unitymas import Choice, Outcome, Role, Workflow
from unitymas.envs.registry import make_arena, unregister
from unitymas.trainers.config.plan import placed, plan
from unitymas.trainers.config.resolve import resolve
from unitymas.trainers.config.schema import ConfigError
from unitymas.trainers.controller.run import Run
from unitymas.trainers.controller.stop_rules import Stopped, StopRules

ID = "stop-test"


class Say(Workflow):
    """Says a word; `broken` fails always, and the state is named only where a second word is asked for."""

    roles = (Role("speaker", reply=Choice("w1", "w2")),)

    def __init__(self, broken: bool = False, again: bool = False) -> None:
        self.broken, self.again = broken, again

    async def run(self, ep):
        first = await ep.act("speaker", "w9")
        if self.broken:
            raise RuntimeError("the tyre is flat")
        if self.again:
            await ep.act("speaker", "w10", anchor=first.value)
        return Outcome(answer=first.value)

    @staticmethod
    def expert(call):
        return "w1"


def fine(trace, task):
    return float(trace.acts()[0].value == "w1")


@pytest.fixture(scope="module", autouse=True)
def environment():
    rows = [{"id": f"t{i}", "question": "w20", "answers": ["w1"]} for i in range(3)]
    unitymas.register(ID, workflow=Say, reward=fine, tasks=rows)
    yield
    unregister(ID)


def config(model: str, policy: dict[str, Any], **fields: Any) -> Any:
    given = {
        "steps": 2, "tasks_per_step": 2, "k": 2, "minibatches": 1, "starved": False, "retries": 0,
        "eval": {"tasks": 1}, "log": {"console": "off", "traces_every": 0},
    }  # fmt: skip
    groups = {"*": {"model": model, "slots": 8, "threads": 1}}
    return resolve(ID, preset_name="shared", groups=groups, policies={"*": policy}, **(given | fields))


def trained(model: str, folder: Any, policy: dict[str, Any], **fields: Any) -> Run:
    run = Run(config(model, policy, **fields), folder / "run")
    return asyncio.run(run.train())


def test_a_run_shorter_than_its_patience_must_teach_something_too(tiny_llama, tmp_path):
    with pytest.raises(
        Stopped, match=r"1 step in a row without one usable .* the tyre is flat \(test_stops.py"
    ):
        trained(tiny_llama, tmp_path, {}, steps=1, env={"args": {"broken": True}})
    last = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1]
    assert "stopped: 1 step" in last


def test_a_component_that_nobody_earns_stops_the_run(tiny_llama, tmp_path):
    credit = {"*": [{"name": "mix", "team": ["fime"]}]}
    names = r"policies.team.credit: \*.mix names 'fime', which no decision has earned; did you mean 'fine'\?"
    with pytest.raises(Stopped, match=names):
        trained(tiny_llama, tmp_path, {"algorithm": {"name": "grpo"}, "credit": credit}, steps=1)


def test_a_component_that_was_earned_once_may_be_rare(tiny_llama):
    stops = StopRules(config(tiny_llama, {}, steps=9))
    stops.missing("credit", "is not there")
    stops.missing("credit", None)
    for _ in range(9):
        stops.missing("credit", "is not there")


def test_a_role_that_an_algorithm_names_is_asked_for_at_the_start(tiny_llama, tmp_path):
    matpo = {"algorithm": {"name": "matpo", "main": "speakr"}}
    with pytest.raises(
        ConfigError, match=r"team.algorithm.main: no role is called 'speakr'; did you mean 'speaker'"
    ):
        Run(config(tiny_llama, matpo), tmp_path / "run")
    with pytest.raises(ConfigError, match="algorithm.main: no role is called 'planner'; .*speaker"):
        Run(config(tiny_llama, {"algorithm": {"name": "matpo"}}), tmp_path / "run")


def test_states_named_on_later_paths_are_enough(tiny_llama, tmp_path):
    gigpo = {"algorithm": {"name": "gigpo"}}
    trained(tiny_llama, tmp_path, gigpo, steps=1, env={"args": {"again": True}})
    with pytest.raises(Stopped, match=r"policies.team.algorithm \(gigpo\): .* no act named a state"):
        trained(tiny_llama, tmp_path / "never", gigpo, steps=1)


@pytest.mark.parametrize(
    ("gpus", "runtime", "places"),
    [
        (0, "local", {"a": ("cpu", 0.0), "b": ("cpu", 0.0), "c": ("cpu", 0.0)}),
        (1, "local", {"a": ("cuda:0", 1.0), "b": ("cuda:0", 1.0), "c": ("cpu", 0.0)}),
        (2, "local", {"a": ("cuda:0", 1.0), "b": ("cuda:1", 1.0), "c": ("cpu", 0.0)}),
        (1, "ray", {"a": ("cuda", 0.5), "b": ("cuda", 0.5), "c": ("cpu", 0.0)}),
        (8, "ray", {"a": ("cuda", 1.0), "b": ("cuda", 1.0), "c": ("cpu", 0.0)}),
    ],
)
def test_groups_take_the_gpus_that_are_there(gpus, runtime, places, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    groups = {"a": {}, "b": {}, "c": {"device": "cpu"}}
    policies = {name: {"group": name} for name in groups}
    made = resolve(
        "math-deepscaler", groups=groups, policies=policies, runtime=runtime,
        map={"solver": "a", "verifier": "b", "*": "c"},
    )  # fmt: skip
    planned = plan(made, make_arena("math-deepscaler", data="mini"))
    specs = placed(planned, tmp_path)
    assert {name: (spec.device, spec.gpus) for name, spec in specs.items()} == places
