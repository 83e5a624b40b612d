"""Algorithms by name: what is unknown is answered with the nearest, what is needed is said before anything starts."""

import importlib.metadata
import importlib.util
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from unitymas.trainers import algorithms
from unitymas.trainers.algorithms import (
    Algorithm,
    Plan,
    PolicyGradient,
    Tree,
    config_of,
    list_algorithms,
    make_algorithm,
    register_algorithm,
)
from unitymas.trainers.controller.statistics.table import Table

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "my_algorithm.py"


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registrations of a test end with it."""
    monkeypatch.setattr(algorithms.ALGORITHMS, "_named", dict(algorithms.ALGORITHMS._named))


def test_every_algorithm_can_be_made_pickled_and_printed() -> None:
    for name in list_algorithms():
        algorithm = make_algorithm(name)
        assert algorithm.name == name
        assert pickle.loads(pickle.dumps(algorithm)) == algorithm
        assert make_algorithm(name, **config_of(algorithm)) == algorithm
        assert algorithm.__doc__


def test_every_field_is_documented_in_its_file() -> None:
    """A string stands under each field that a file introduces, or repeats with a meaning of its own."""
    for name in list_algorithms():
        cls = type(make_algorithm(name))
        for base in cls.__mro__:
            if not issubclass(base, Algorithm):
                continue
            source = (
                Path(str(sys.modules[base.__module__].__file__))
                .read_text()
                .split(f"\nclass {base.__name__}", 1)[-1]
            )
            new = [f for f in base.__dict__.get("__annotations__", {}) if f != "name"]
            inherited = {
                f.name for parent in base.__bases__ if issubclass(parent, Algorithm) for f in fields(parent)
            }
            for field in set(new) - inherited:
                after = source.split(f"\n    {field}: ", 1)[1].split("\n", 1)[1]
                assert after.lstrip().startswith('"""'), f"{name}.{field} is undocumented"


def test_unknown_names_and_keys_are_answered_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"unknown algorithm 'grppo': did you mean 'grpo'\?"):
        make_algorithm("grppo")
    with pytest.raises(ValueError, match=r"'grpo' has no key 'clip_hihg': did you mean 'clip_high'\?"):
        make_algorithm("grpo", clip_hihg=0.3)


@pytest.mark.parametrize(
    ("name", "config", "sentence"),
    [
        ("grpo", {"clip_high": "1e-3"}, r"grpo.clip_high is '1e-3': expected float"),
        ("grpo", {"std": 1}, r"grpo.std is 1: expected bool"),
        ("grpo", {"aggregation": "mean"}, r"expected one of 'token-mean', 'sequence-mean'"),
        ("grpo", {"dual_clip": 0.5}, r"dual_clip is 0.5: it must be greater than 1"),
        ("grpo", {"clip_low": -0.1}, r"clip_low is -0.1: it must not be negative"),
        ("ppo", {"role_weights": {"planner": -1}}, r"role_weights.planner is -1: expected a number from 0"),
        ("grpo", {"role_weights": {"planner": "much"}}, r"role_weights.planner is 'much'"),
        ("rloo", {"std": True}, r"leave-one-out does not divide"),
        ("at_grpo", {"tree": 1}, r"tree is 1: set it to 2 or more"),
        ("dapo", {"max_tokens": 64}, r"overlong_buffer is 0: with max_tokens=64"),
    ],
)
def test_bad_values_are_refused(name: str, config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make_algorithm(name, **config)


def test_what_is_missing_is_said_before_anything_starts() -> None:
    have: dict[str, Any] = {"k": 1, "critic": False, "reference": False, "forks": False}
    assert make_algorithm("grpo").needs.unmet("grpo", **have) == [
        "grpo compares trajectories of one task: it needs k >= 2, and k is 1"
    ]
    assert "needs a critic" in make_algorithm("ppo").needs.unmet("ppo", **have)[0]
    assert "the policy has none" in make_algorithm("reinforce_pp", kl_reward=0.1).needs.unmet("r", **have)[0]
    assert "cannot fork" in make_algorithm("at_grpo").needs.unmet("at_grpo", **have)[0]
    assert make_algorithm("grpo", group="prompt").needs.unmet("grpo", **{**have, "k": 2}) == []
    assert make_algorithm("mappo").needs.values == "trace"
    assert make_algorithm("gigpo").needs.anchors
    assert make_algorithm("grpo", entropy=0.01, kl_loss=0.1).needs.reference
    assert not make_algorithm("reinforce_pp").needs.summaries
    assert make_algorithm("reinforce_pp", kl_reward=0.1).needs.summaries


def test_plans() -> None:
    assert make_algorithm("grpo").collect(Plan(k=8)) == Plan(k=8)
    assert make_algorithm("at_grpo", tree=8, continuation="softmax").collect(Plan()).tree == Tree(
        8, "step", "softmax"
    )
    assert make_algorithm("at_grpo", tree=0).collect(Plan(k=4)) == Plan(k=4)
    assert make_algorithm("dapo", resample=5).collect(Plan(k=8)).resample == 5


# -- from outside of the package ----------------------------------------------------------------------------------


def load_example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("my_algorithm", EXAMPLE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["my_algorithm"] = module
    spec.loader.exec_module(module)
    return module


def test_the_example_of_the_docs(registry: None, ragged: Callable[..., Any]) -> None:
    """docs/new-algorithm.md promises: one file, under 80 lines, registered from outside."""
    assert len(EXAMPLE.read_text().splitlines()) < 80
    load_example()
    assert "rank" in list_algorithms()
    algorithm = make_algorithm("rank", temperature=2.0)
    with pytest.raises(ValueError, match="did you mean 'temperature'"):
        make_algorithm("rank", temprature=2.0)
    table = Table(ragged(3).rows)
    signals = algorithm.advantages(table, table.mine("mine"), {})
    for signal in signals:
        assert signal.advantage is not None and -1 <= signal.advantage <= 1
    best = max(range(len(signals)), key=lambda i: signals[i].advantage or 0)
    assert signals[best].advantage != 0
    assert algorithm.advantages(Table([]), np.zeros(0, np.int64), {}) == []


def test_what_an_algorithm_lacks_is_named_when_it_is_made(registry: None) -> None:
    class Half(PolicyGradient):
        name = "half"

    register_algorithm("half", Half)
    with pytest.raises(TypeError, match="advantages"):
        make_algorithm("half")


def test_by_import_path_and_never_twice(registry: None) -> None:
    load_example()
    register_algorithm("lazy", "my_algorithm:Rank")
    assert make_algorithm("lazy").name == "rank"
    with pytest.raises(ValueError, match="'grpo' is already registered"):
        register_algorithm("grpo", "my_algorithm:Rank")
    register_algorithm("wrong", dict)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be a class derived from Algorithm"):
        make_algorithm("wrong")


def test_entry_points_are_found_but_loaded_only_when_asked(
    registry: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_example()
    group = "unitymas.algorithms"
    points = [
        importlib.metadata.EntryPoint("plugged", "my_algorithm:Rank", group),
        importlib.metadata.EntryPoint("broken", "no_such_package:Nothing", group),
    ]
    monkeypatch.setattr("unitymas.own.entry_points", lambda group: points)
    assert {"plugged", "broken", "grpo"} <= set(list_algorithms())
    assert make_algorithm("plugged").name == "rank"
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        make_algorithm("broken")


def test_advantages_need_no_torch() -> None:
    code = (
        "import sys; from unitymas.trainers.algorithms import *; from unitymas.trainers import table, credit, gae\n"
        "[make_algorithm(name) for name in list_algorithms()]\n"
        "assert not {'torch', 'ray'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
