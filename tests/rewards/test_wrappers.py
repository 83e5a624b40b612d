"""One wrapper for all rules; the former wrappers, one for each rule, still work; so do the old names of types."""

import importlib
import pickle

import pytest

import unitymas
from unitymas.rewards import wrappers
from unitymas.rewards.rules import FormatReward, TrajectoryReward
from unitymas.rewards.wrappers import RewardWrapper


def long(trace, task):
    return float(len(trace.nodes))


def plain():
    return unitymas.make("rag-nq", data="mini", size=4, reward=None)


def test_one_wrapper_pays_any_rules_and_wrappers_nest():
    env = RewardWrapper(plain(), TrajectoryReward(long), FormatReward(legal=0.5))
    env = RewardWrapper(env, lambda trace, task: 2.0)
    trace = unitymas.rollout(env, "scripted", tasks=1)[0]
    amounts = trace.rewards("0")
    assert amounts["trajectory"] == len(trace.nodes) and amounts["format"] == 0.5
    assert sorted(amounts.values())[1:] == sorted([2.0, amounts["trajectory"]]) and len(env.arena.rules) == 3
    with pytest.raises(ValueError, match="trajectory"):
        RewardWrapper(env, TrajectoryReward(long))


def test_former_wrappers_still_pay_and_pickle():
    with pytest.warns(DeprecationWarning, match=r"TrajectoryReward\(env, …\) is now RewardWrapper"):
        former = wrappers.TrajectoryReward
    with pytest.warns(
        DeprecationWarning, match=r"RewardWrapper\(env, TurnDelta\(…\)\), with TurnDelta of .*shaping"
    ):
        _ = wrappers.TurnDelta
    env = former(plain(), long, name="length")
    assert isinstance(env, RewardWrapper)
    with pytest.warns(DeprecationWarning):
        twin = pickle.loads(pickle.dumps(env))
    for each in (env, twin):
        trace = unitymas.rollout(each, "scripted", tasks=1)[0]
        assert trace.rewards("0") == {"length": len(trace.nodes)}
    with pytest.raises(AttributeError, match="Trajectory"):
        _ = wrappers.Trajectory


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("agents.engines.torch.torch_engine", "Engine", "TorchEngine"),
        ("envs.tools.tool", "Kind", "ToolKind"),
        ("trainers.algorithms.algorithm", "State", "AlgorithmState"),
        ("trainers.controller.statistics.comparison", "Score", "ScoreKind"),
        ("trainers.controller.step", "Metrics", "StepMetrics"),
    ],
)
def test_old_names_of_types_are_the_new_types(module, old, new):
    home = importlib.import_module(f"unitymas.{module}")
    with pytest.warns(DeprecationWarning, match=f"{module}.{old} is now {new}"):
        former = getattr(home, old)
    assert former is getattr(home, new)
    with pytest.raises(AttributeError, match="nothing"):
        _ = home.nothing
