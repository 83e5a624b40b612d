"""A preset carries settings that learn for the model it is used with, and says so."""

import pytest

from unitymas.benchmarks import demo
from unitymas.cli import main
from unitymas.trainers.config import presets
from unitymas.trainers.config.presets import PRESETS, TINY
from unitymas.trainers.config.resolve import resolve
from unitymas.trainers.config.schema import merge

ENV = "mask-hotpotqa"


def test_the_readmes_command_is_the_demo(capsys):
    """But for what the demo leaves out: checkpoints, and learning in bfloat16 where that is faster."""
    mine = resolve(ENV, preset_name="shared", overrides=["env.data=mini"])
    demos = resolve(ENV, preset_name="shared", **merge(demo.recipe(ENV), {"env": {"data": "mini"}}))
    assert mine.policies == demos.policies and mine.groups == demos.groups and mine.env == demos.env
    assert (
        (mine.steps, mine.tasks_per_step, mine.k)
        == (demos.steps, demos.tasks_per_step, demos.k)
        == (24, 12, 8)
    )
    assert mine.policies["team"].learning.lr == 1.5e-4
    assert main(["train", ENV, "--dry-run", "env.data=mini"]) == 0
    assert capsys.readouterr().out.startswith("# preset shared: settings of the demo, for the tiny model")


@pytest.mark.parametrize("name", PRESETS)
def test_every_policy_of_every_preset_gets_them(name):
    config = resolve(ENV, preset_name=name)
    assert {policy.learning.lr for policy in config.policies.values()} == {1e-3 if name == "lora" else 1.5e-4}
    assert {group.threads for group in config.groups.values()} == {1}


def test_what_is_given_counts_more():
    config = resolve(ENV, preset_name="shared", overrides=[
        "steps=3", "policies.*.learning.lr=1e-6", "policies.team.sampling.max_tokens=7", "env.args.top_k=3", "k=4",
    ])  # fmt: skip
    team = config.policies["team"]
    assert (config.steps, config.k, team.learning.lr, team.sampling.max_tokens) == (3, 4, 1e-6, 7)
    assert config.env.args == {"top_k": 3} and config.tasks_per_step == TINY["tasks_per_step"]


def test_another_algorithm_brings_its_own_settings():
    config = resolve(ENV, preset_name="shared", overrides=["policies.*.algorithm.name=grpo"])
    assert config.policies["team"].algorithm == {"name": "grpo"} and not config.policies["team"].reference
    assert config.policies["team"].learning.lr == 1.5e-4


def test_other_models_get_a_usual_beginning(capsys, monkeypatch):
    """A small rate, replies that are long enough; bfloat16 where a GPU is, or where the config names one."""
    hub = "groups.*.model=hf:models/some"
    monkeypatch.setattr(presets, "has_bfloat16", lambda: False)
    team = resolve(ENV, preset_name="shared", overrides=[hub]).policies["team"]
    assert (team.learning.lr, team.sampling.max_tokens, team.learning.precision) == (1e-6, 512, "float32")
    assert team.critic_learning is not None and team.critic_learning.lr == 1e-5
    lora = resolve(ENV, preset_name="lora", overrides=[hub])
    assert {policy.learning.lr for policy in lora.policies.values()} == {3e-5}
    there = resolve(ENV, preset_name="shared", overrides=[hub, "groups.*.device=cuda"])
    assert {there.groups["team"].precision, there.policies["team"].learning.precision} == {"bfloat16"}
    assert there.policies["team"].critic_learning.precision == "bfloat16"
    monkeypatch.setattr(presets, "has_gpu", lambda: True)
    assert resolve(ENV, preset_name="shared", overrides=[hub]).groups["team"].precision == "bfloat16"
    on_cpu = resolve(ENV, preset_name="shared", overrides=[hub, "groups.*.device=cpu"])
    assert on_cpu.groups["team"].precision == "float32"
    assert main(["train", ENV, "--dry-run", hub]) == 0
    told = capsys.readouterr().out
    assert told.startswith(
        "# preset shared: for hf:models/some, a usual beginning (learning rate 1e-06, replies of 512"
    )
    assert resolve(ENV).policies["team"].learning.lr == 1e-5  # without a preset, nothing is added
