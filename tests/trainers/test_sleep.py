"""Engines that can sleep give their memory to the learner, and are awake when they are asked."""

import pytest

import unitymas
from unitymas.agents.engines.built_in import torch_engine
from unitymas.agents.engines.engine import ENGINES
from unitymas.trainers.group.learning.update import Learner

SEEN = []


def dozing(order):
    """A torch engine that notes when it sleeps, and that cannot answer asleep."""
    engine = torch_engine(order)
    engine.sleeps, awake = True, [True]
    speak, publish = engine.agenerate, engine.publish

    def sleep():
        SEEN.append("sleep")
        awake[0] = False

    def wake():
        SEEN.append("wake")
        awake[0] = True

    async def agenerate(*arguments, **options):
        assert awake[0]
        SEEN.append("speak")
        return await speak(*arguments, **options)

    engine.sleep, engine.wake, engine.agenerate = sleep, wake, agenerate
    engine.publish = lambda *arguments: (SEEN.append("publish"), publish(*arguments))[1]
    return engine


@pytest.fixture
def registered():
    ENGINES.register("dozing", dozing)
    SEEN.clear()
    yield
    ENGINES.unregister("dozing")


@pytest.mark.parametrize("sleeps", [True, False])
def test_engines_sleep_while_their_policies_learn(registered, sleeps, tmp_path):
    group = {"engine": "dozing", "engine_options": {"enable_sleep_mode": sleeps}}
    unitymas.train(
        "mask-hotpotqa", preset="shared", directory=tmp_path / "run", env={"data": "mini"}, steps=1, tasks_per_step=2, k=1,
        minibatches=1, groups={"*": group}, policies={"*": {"sampling": {"max_tokens": 8}}}, starved=False,
        eval={"every": 0, "tasks": 1}, checkpoint_every=0, log={"console": "off"},
    )  # fmt: skip
    order = [event for event in SEEN if event != "speak"]
    assert order[-3:] == ["sleep", "publish", "wake"] if sleeps else "sleep" not in order
    assert SEEN[-1] == "speak"  # the last validation


@pytest.mark.parametrize("deterministic", [False, True])
def test_keys_and_values_are_free_while_their_policy_learns(deterministic, tmp_path, monkeypatch):
    """New weights make them worthless in any case. A deterministic engine keeps its fixed shapes."""
    engines, held = [], []
    update = Learner.update

    def noted(learner, *arguments):
        held.append(engines[0].memory()["keys_values"])
        return update(learner, *arguments)

    monkeypatch.setattr(Learner, "update", noted)
    ENGINES.register("noted", lambda order: engines.append(torch_engine(order)) or engines[0])
    try:
        unitymas.train(
            "mask-hotpotqa", preset="shared", directory=tmp_path / "run", env={"data": "mini"}, steps=1, tasks_per_step=2, k=1,
            minibatches=1, groups={"*": {"engine": "noted", "slots": 4}}, policies={"*": {"sampling": {"max_tokens": 8}}},
            starved=False, eval={"every": 0, "tasks": 1}, checkpoint_every=0, log={"console": "off"}, deterministic=deterministic,
        )  # fmt: skip
    finally:
        ENGINES.unregister("noted")
    assert held and (min(held) > 0) == deterministic
    assert engines[0].memory()["keys_values"] > 0  # the validation at the end has taken them back
