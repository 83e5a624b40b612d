"""Numbers that make no sense are refused before anything starts, in every setting, by the name of the key."""

import math
from dataclasses import fields
from types import UnionType
from typing import Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unitymas.agents.engines.sampling import SamplingParams
from unitymas.trainers.algorithms import list_algorithms, make_algorithm
from unitymas.trainers.config import group_settings as settings
from unitymas.trainers.config import schema as config
from unitymas.trainers.config.choices import ANY, OutOfRange, Range, ranges_of
from unitymas.trainers.config.resolve import resolve
from unitymas.trainers.config.schema import ConfigError, build
from unitymas.trainers.controller.statistics.credit import CREDIT, credit_from_config


def numeric(cls: type) -> dict[str, bool]:
    """Its fields that hold numbers, and whether only whole ones."""
    hints = {field.name: get_type_hints(cls)[field.name] for field in fields(cls)}
    kinds = {n: {h, *get_args(h)} for n, h in hints.items() if get_origin(h) in (None, Union, UnionType)}
    return {name: float not in kind for name, kind in kinds.items() if kind & {int, float}}


@pytest.mark.parametrize("name", list_algorithms())
def test_no_algorithm_takes_a_number_that_is_none(name: str) -> None:
    """NaN, infinity and anything below the range, for every field there is: a new one cannot be forgotten."""
    for field, whole in numeric(type(make_algorithm(name))).items():
        assert field in ranges_of(type(make_algorithm(name))), f"{name}.{field} declares no range"
        for value in (-1,) if whole else (math.nan, math.inf, -math.inf, -1.0):
            with pytest.raises(ValueError, match=field):
                make_algorithm(name, **{field: value})


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("ppo", {"lam": 2.0}), ("ppo", {"gamma": 1.5}), ("ppo", {"gamma": -1.0}), ("gigpo", {"gamma": 1.01}),
        ("ppo", {"clip_low": 1.2}), ("ppo", {"whiten_floor": 0.0}), ("grpo", {"importance_cap": 0.0}),
        ("ppo", {"value_clip": 0.0}), ("dr_grpo", {"length": 0.0}), ("grpo", {"group": "agnet"}),
        ("ppo", {"role_weights": {"a": math.nan}}), ("ppo", {"geometric": [1.01, 0.99]}), ("grpo", {"geometric": [0.9]}),
        ("ppo", {"veto": 1.5}), ("grpo", {"importance_floor": 0.9, "importance_cap": 0.8}),
    ],
)  # fmt: skip
def test_beyond_the_range(name: str, given: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(given)).replace("group", "unknown group")):
        make_algorithm(name, **given)


@pytest.mark.parametrize(
    "override",
    [
        "epochs=0", "k=0", "k=-3", "minibatches=0", "steps=0", "concurrency=0", "retries=-1", "staleness=-1",
        "checkpoints=0", "checkpoint_every=-1", "episode_seconds=0", "episode_seconds=.nan", "eval.k=0",
        "eval.tasks=0", "eval.every=-1", "eval.temperature=-1", "eval.temperature=.inf", "log.traces_every=-1",
        "groups.team.slots=0", "groups.team.context=0", "groups.team.threads=-1", "groups.team.gpus=-1",
        "env.size=0", "policies.team.learning.lr=-1", "policies.team.learning.lr=.nan",
        "policies.team.learning.final=2", "policies.team.learning.betas=[0.9, 1.0]",
        "policies.team.learning.eps=0", "policies.team.learning.weight_decay=-1",
        "policies.team.learning.clip_norm=-1", "policies.team.learning.warmup=-1",
        "policies.team.learning.micro_tokens=0", "policies.team.adapter.rank=0",
        "policies.team.adapter.alpha=0", "policies.team.sampling.temperature=0",
        "policies.team.sampling.temperature=-1", "policies.team.sampling.temperature=.inf",
        "policies.team.sampling.top_p=0", "policies.team.sampling.top_p=1.1", "policies.team.sampling.top_k=-1",
        "policies.team.sampling.max_tokens=0", "counterfactual.planner.samples=0",
        "counterfactual.planner.scale=.nan", "policies.team.algorithm.lam=2", "policies.team.algorithm.gamma=-1",
        "policies.team.critic_learning.lr=-1",
    ],
)  # fmt: skip
def test_the_key_is_named(override: str) -> None:
    key = override.partition("=")[0]
    name = key.rpartition(".")[2]
    with pytest.raises(ConfigError, match=rf"{key.rpartition('.')[0] or name}.*{name}|^{name}"):
        resolve("mask-hotpotqa", preset_name="shared", overrides=[override])


def test_a_prefix_has_no_rank() -> None:
    """One of the two would be ignored in silence."""
    with pytest.raises(ConfigError, match=r"policies\.team\.adapter: .*prefix \(tokens\) has no rank"):
        resolve(
            "mask-hotpotqa", preset_name="shared", overrides=["policies.team.adapter={rank: 4, tokens: 5}"]
        )


@pytest.mark.parametrize(
    "entry",
    [
        {"name": "mix", "team": ["em"], "alpha": -1}, {"name": "mix", "team": ["em"], "alpha": math.nan},
        {"name": "mix", "team": ["em"], "beta": "much"}, {"name": "mix", "team": "em"},
        {"name": "spread", "component": "em", "share": "all"}, {"name": "shaping", "gamma": 2},
        {"name": "shaping", "scale": -1}, {"name": "influence", "component": "c", "kind": "size"},
        {"name": "influence", "component": "c", "alpha": math.inf}, {"name": "tree", "lam": 1.5},
        {"name": "tree", "scale": math.nan},
    ],
)  # fmt: skip
def test_credit_settings_are_checked_at_the_start(entry: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"credit\.planner"):
        credit_from_config({"planner": [entry]})
    with pytest.raises(ConfigError, match=r"policies\.team\.credit\.planner"):
        resolve("mask-hotpotqa", preset_name="shared", policies={"team": {"credit": {"planner": [entry]}}})


def test_every_number_of_the_tree_has_a_range() -> None:
    """… but the seed, and what only has to be finite."""
    sections = (config.RunConfig, config.EnvConfig, config.GroupConfig, config.EvalConfig, config.LogConfig)
    for cls in (*sections, settings.Learning, settings.Sampling, settings.Adapter):
        assert set(numeric(cls)) - {"seed"} <= set(ranges_of(cls)), cls
    assert "betas" in ranges_of(settings.Learning) and ANY not in ranges_of(config.RunConfig).values()
    for cls in CREDIT.values():
        for name in numeric(cls):
            with pytest.raises(OutOfRange, match=name):
                cls(
                    **{f.name: ("x",) for f in fields(cls) if f.name in ("team", "component")}, **{name: -1.0}
                )


@given(st.floats(allow_nan=True), st.floats(-5, 5), st.floats(0, 5), st.booleans(), st.booleans())
def test_a_range_holds_what_it_says(x: float, low: float, width: float, above: bool, below: bool) -> None:
    high = low + width
    inside = math.isfinite(x) and low <= x <= high and not (above and x == low) and not (below and x == high)
    assert (Range(low, high, above, below).refusal(x) == "") == inside


def test_an_engine_refuses_an_infinite_temperature() -> None:
    for temperature in (math.inf, math.nan, -1.0):
        with pytest.raises(ValueError, match="temperature"):
            SamplingParams(temperature=temperature)
    assert build(settings.Sampling, {"temperature": 0.0}).temperature == 0.0  # a frozen player may be greedy


def test_an_endpoint_without_a_name_is_told_as_one() -> None:
    """YAML would read a mapping."""
    with pytest.raises(ConfigError, match=r"openai:MODEL@URL"):
        resolve("mask-hotpotqa", preset_name="shared", overrides=["map.planner=openai:"])
