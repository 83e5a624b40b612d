"""A preset carries settings that learn for the model it is used with, and says so."""

from dataclasses import replace

import pytest
from huggingface_hub import constants

from unitymas.agents.basics.manifest import signed
from unitymas.benchmarks import demo
from unitymas.cli import main
from unitymas.trainers.config import presets
from unitymas.trainers.config.plan import make_arenas, plan
from unitymas.trainers.config.presets import PAPERS, PRESETS, TINY
from unitymas.trainers.config.resolve import resolve
from unitymas.trainers.config.schema import ConfigError, dump, merge
from unitymas.trainers.controller.resume import resumed

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


@pytest.mark.parametrize("name", ["shared", "lora"])
def test_the_automatic_critic_learns_as_its_policy(name):
    """But for its rate, which follows the policy's; what is said of the critic alone counts most."""
    overrides = [
        "groups.*.model=hf:models/some", "policies.*.learning.moments=8bit", "policies.*.learning.lr=1e-4",
        "policies.*.learning.offload=true", "policies.*.learning.schedule=cosine", "policies.*.learning.warmup=3",
    ]  # fmt: skip
    config = resolve(ENV, preset_name=name, overrides=overrides)
    for policy in config.policies.values():
        times = 3 if name == "lora" else 10
        assert policy.critics_learning() == replace(policy.learning, lr=1e-4 * times)
    own = resolve(
        ENV,
        preset_name=name,
        overrides=[*overrides, "policies.*.critic_learning={lr: 2e-5, moments: float32}"],
    )
    for planned in plan(own, make_arenas(own)[0]).specs.values():
        policies = planned.policies
        for critic in [judge for judge in policies if policies[judge].critic]:
            learning = policies[critic.removesuffix("-critic")].learning
            assert policies[critic].learning == replace(learning, lr=2e-5, moments="float32")


def test_a_critic_whose_rate_falls_alone_falls_over_the_whole_run(tmp_path):
    config = resolve(ENV, overrides=["steps=5", "policies.*.critic_learning.schedule=linear"])
    assert (
        config.policies["team"].critics_learning().horizon == 10
        and not config.policies["team"].learning.horizon
    )
    (tmp_path / "config.yaml").write_bytes(signed(dump(config)))
    longer, _ = resumed(tmp_path, overrides=["steps=7"])
    assert longer.policies["team"].critics_learning().horizon == 14


def test_an_error_names_the_critics_key():
    with pytest.raises(ConfigError, match=r"^policies.team.critic_learning.momments: unknown key.*moments"):
        resolve(ENV, overrides=["policies.team.critic_learning.momments=8bit"])


def test_another_algorithm_brings_its_own_settings():
    config = resolve(ENV, preset_name="shared", overrides=["policies.*.algorithm.name=grpo"])
    assert config.policies["team"].algorithm == {"name": "grpo"} and not config.policies["team"].reference
    assert config.policies["team"].learning.lr == 1.5e-4


LEARNING = [(name, model) for model in ("tiny", "smollm2") for name in PRESETS]


@pytest.mark.parametrize(("name", "model"), [*LEARNING, *((f"{paper},separate", "tiny") for paper in PAPERS)])
def test_an_option_alone_keeps_the_algorithm(name, model):
    """Everything else of the algorithm, its name and its reference stay; by name of a policy, for this policy alone."""
    hub = f"groups.*.model={model}"
    own = resolve(ENV, preset_name=name, overrides=[hub]).policies
    changed = resolve(ENV, preset_name=name, overrides=[hub, "policies.*.algorithm.gamma=0.5"]).policies
    for policy in own:
        assert changed[policy] == replace(own[policy], algorithm={**own[policy].algorithm, "gamma": 0.5})
    first = next(iter(own))
    one = resolve(ENV, preset_name=name, overrides=[hub, f"policies.{first}.algorithm.gamma=0.5"]).policies
    assert one == {**own, first: changed[first]}


@pytest.mark.parametrize("how", ["policies.*.algorithm=rloo", "policies.*.algorithm.name=rloo"])
def test_the_presets_own_algorithm_may_be_named(how):
    hub = "groups.*.model=smollm2"
    assert resolve(ENV, preset_name="lora", overrides=[hub, how]) == resolve(
        ENV, preset_name="lora", overrides=[hub]
    )


@pytest.mark.parametrize("how", ["policies.planner.algorithm", "policies.planner.algorithm.name"])
def test_another_algorithm_of_one_policy_leaves_the_others_theirs(how):
    own = resolve(ENV, preset_name="separate").policies
    mixed = resolve(ENV, preset_name="separate", overrides=[f"{how}=gspo"]).policies
    assert mixed == {**own, "planner": replace(own["planner"], algorithm={"name": "gspo"}, reference=False)}


def test_a_name_for_all_policies_stays_beside_an_option_of_one():
    overrides = ["policies.*.algorithm=grpo", "policies.searcher.algorithm.clip_low=0.1"]
    policies = resolve(ENV, preset_name="separate", overrides=overrides).policies
    assert policies["searcher"].algorithm == {"name": "grpo", "clip_low": 0.1}
    assert policies["planner"].algorithm == {"name": "grpo"}


def test_other_models_get_a_usual_beginning(capsys, monkeypatch):
    """A small rate, replies that are long enough; bfloat16 where a GPU is, or where the config names one."""
    hub = "groups.*.model=hf:models/some"
    monkeypatch.setattr(presets, "has_bfloat16", lambda: False)
    team = resolve(ENV, preset_name="shared", overrides=[hub]).policies["team"]
    assert (team.learning.lr, team.sampling.max_tokens, team.learning.precision) == (1e-6, 512, "float32")
    assert team.critics_learning().lr == pytest.approx(1e-5)
    lora = resolve(ENV, preset_name="lora", overrides=[hub])
    assert {policy.learning.lr for policy in lora.policies.values()} == {3e-5}
    assert all(policy.critics_learning().lr == pytest.approx(9e-5) for policy in lora.policies.values())
    there = resolve(ENV, preset_name="shared", overrides=[hub, "groups.*.device=cuda"])
    assert {there.groups["team"].precision, there.policies["team"].learning.precision} == {"bfloat16"}
    assert there.policies["team"].critics_learning().precision == "bfloat16"
    monkeypatch.setattr(presets, "has_gpu", lambda: True)
    assert resolve(ENV, preset_name="shared", overrides=[hub]).groups["team"].precision == "bfloat16"
    on_cpu = resolve(ENV, preset_name="shared", overrides=[hub, "groups.*.device=cpu"])
    assert on_cpu.groups["team"].precision == "float32"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert main(["train", ENV, "--dry-run", hub]) == 0
    told = capsys.readouterr().out
    assert told.startswith(
        "# preset shared: for hf:models/some, a usual beginning (learning rate 1e-06, replies of 512"
    )
    assert resolve(ENV).policies["team"].learning.lr == 1e-5  # without a preset, nothing is added


@pytest.mark.parametrize(("steps", "warmup"), [(1, 1), (2, 2), (10, 4)])
def test_a_first_try_of_few_steps_begins(steps, warmup):
    """The preset's warm-up gives way; the user's own would be an error."""
    short = [f"steps={steps}", "groups.*.model=smollm2"]
    config = resolve("rag-squad", preset_name="lora", overrides=short)
    assert {policy.learning.warmup for policy in config.policies.values()} == {warmup}
    with pytest.raises(ConfigError, match=r"learning\.warmup: the rate rises over 30 optimizer steps"):
        resolve("rag-squad", preset_name="lora", overrides=[*short, "policies.*.learning.warmup=30"])
