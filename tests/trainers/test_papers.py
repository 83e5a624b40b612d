"""Presets named after papers bind what the papers publish, in any environment and with any mapping."""

from dataclasses import replace

import pytest

import unitymas
from unitymas.cli import main
from unitymas.trainers.algorithms import make_algorithm
from unitymas.trainers.config.presets import FOLDER, PAPERS, PRESETS, parts
from unitymas.trainers.config.reader import leaves
from unitymas.trainers.config.resolve import resolve
from unitymas.trainers.config.schema import ConfigError, read_yaml


def test_each_paper_is_a_file():
    assert sorted(path.stem for path in FOLDER.glob("*.yaml")) == sorted(PAPERS)
    for name in PAPERS:
        for case in read_yaml(FOLDER / f"{name}.yaml")["environments"]:
            assert set(case["ids"]) <= set(unitymas.list_envs())


@pytest.mark.parametrize("paper", PAPERS)
@pytest.mark.parametrize("mapping", PRESETS)
@pytest.mark.parametrize("env", ["mask-hotpotqa", "search-router-hotpotqa"])
def test_a_paper_goes_with_every_mapping(paper, mapping, env):
    config = resolve(env, preset_name=f"{paper},{mapping}")
    assert resolve(env, preset_name=f"{mapping}, {paper}") == config
    assert config.map == resolve(env, preset_name=mapping).map
    lora = 1e-5 if (paper, mapping) == ("dr-mas", "lora") else 1e-6
    assert {policy.learning.lr for policy in config.policies.values()} == {lora}


@pytest.mark.parametrize("env", unitymas.list_envs()[::3])
def test_papers_in_every_environment(env):
    for paper in PAPERS:
        config = resolve(env, preset_name=paper)
        for policy in config.policies.values():
            algorithm = dict(policy.algorithm)
            assert make_algorithm(**algorithm).name in ("ppo", "at_grpo", "dr_mas")


def test_what_unitymas_o_publishes():
    mask = resolve("mask-hotpotqa", preset_name="unitymas-o,partial")
    for policy in mask.policies.values():
        a = make_algorithm(**policy.algorithm)
        assert (a.name, a.gamma, a.lam, a.horizon, a.whiten) == ("ppo", 1.0, 1.0, "act", "policy")
        assert (a.clip_low, a.clip_high, a.dual_clip, a.value_clip, a.entropy) == (0.2, 0.2, 3.0, 0.5, 0.0)
        assert (a.kl_loss, a.kl_reward, a.importance, a.aggregation) == (0.0, 0.0, "off", "token-mean")
        assert (policy.learning.lr, policy.critics_learning().lr, policy.learning.clip_norm) == (
            1e-6,
            1e-5,
            1.0,
        )
        assert policy.critics_learning() == replace(policy.learning, lr=1e-5)
        assert (policy.sampling.temperature, policy.sampling.top_p, policy.sampling.max_tokens) == (
            1.0,
            1.0,
            128,
        )
        assert not policy.reference
    assert (mask.tasks_per_step, mask.k, mask.epochs, mask.eval.every, mask.checkpoint_every) == (
        128,
        1,
        1,
        50,
        300,
    )
    assert mask.env.args == {"max_turns": 3, "top_k": 5}
    lengths = {
        env: ({g.context for g in c.groups.values()}, {p.sampling.max_tokens for p in c.policies.values()})
        for env in (
            "rag-nq",
            "rag-summary-nq",
            "rag-rewrite-nq",
            "mask-nq",
            "code-deepcoder",
            "math-deepscaler",
        )
        for c in [resolve(env, preset_name="unitymas-o,separate")]
    }
    assert lengths == {
        "rag-nq": ({4096 + 128}, {128}), "rag-summary-nq": ({3072 + 128}, {128}), "rag-rewrite-nq": ({4096 + 512}, {512}),
        "mask-nq": ({7168 + 128}, {128}), "code-deepcoder": ({11264 + 4096}, {4096}), "math-deepscaler": ({7680 + 4096}, {4096}),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("env", "calls", "size"),
    [("rag-nq", 2, 64), ("rag-evidence-nq", 5, 64), ("rag-summary-nq", 3, 64), ("rag-rewrite-nq", 3, 64),
     ("mask-nq", 14, 48), ("code-deepcoder", 8, 64), ("math-deepscaler", 4, 64)],
)  # fmt: skip
def test_one_model_for_all_roles_has_mini_batches_of_the_published_size(env, calls, size):
    """It gets the samples of all calls of a query. With a model for each role, the number is that of one role."""
    one = resolve(env, preset_name="unitymas-o")
    assert 0.9 <= one.tasks_per_step * calls / one.minibatches / size <= 1.1
    assert resolve(env, preset_name="unitymas-o,separate").minibatches <= 4


def test_what_stronger_mas_and_dr_mas_publish():
    tree = resolve("planpath-duo", preset_name="stronger-mas").policies["team"]
    a = make_algorithm(**tree.algorithm)
    assert (a.name, a.tree, a.tree_score, a.continuation, a.std, a.eps) == (
        "at_grpo",
        8,
        "step",
        "greedy",
        True,
        1e-6,
    )
    assert (tree.sampling.temperature, tree.sampling.top_p, tree.sampling.top_k) == (1.5, 0.9, 20)
    assert (
        resolve("coder-tester-deepcoder", preset_name="stronger-mas").policies["team"].sampling.temperature
        == 1.0
    )
    math, search = (
        resolve(env, preset_name="dr-mas") for env in ("solver-verifier-deepscaler", "search-router-hotpotqa")
    )
    b = make_algorithm(**math.policies["team"].algorithm)
    assert (b.name, b.statistics, b.each, b.score, b.std) == ("dr_mas", "agent", "call", "act", True)
    assert (math.tasks_per_step, math.k, math.minibatches) == (32, 8, 1)
    assert (search.tasks_per_step, search.k, search.minibatches) == (128, 5, 5)
    assert search.policies["team"].sampling.max_tokens == 800 and search.groups["team"].context == 4896
    adapter = resolve("search-router-hotpotqa", preset_name="dr-mas,lora").policies["answerer"]
    assert (adapter.adapter.rank, adapter.adapter.alpha, adapter.learning.lr) == (64, 64.0, 1e-5)


def test_what_is_given_counts_more_and_another_algorithm_brings_its_own_settings():
    config = resolve("rag-nq", preset_name="unitymas-o", overrides=["policies.*.algorithm.lam=0.95", "k=4"])
    a = make_algorithm(**config.policies["team"].algorithm)
    assert (a.lam, a.horizon, config.k) == (0.95, "act", 4)
    config = resolve("rag-nq", preset_name="unitymas-o", overrides=["policies.*.algorithm.name=grpo", "k=4"])
    assert config.policies["team"].algorithm == {"name": "grpo"}


def test_what_does_not_go_together_is_refused():
    assert parts("separate,unitymas-o") == parts("unitymas-o, separate") == ("separate", "unitymas-o")
    with pytest.raises(ConfigError, match="did you mean 'dr-mas'"):
        resolve("rag-nq", preset_name="drmas")
    with pytest.raises(ConfigError, match="both papers"):
        resolve("rag-nq", preset_name="dr-mas,unitymas-o")
    with pytest.raises(ConfigError, match="both ways to map"):
        resolve("rag-nq", preset_name="lora,shared")


def test_a_dry_run_tells_what_the_paper_binds(capsys):
    assert (
        main(
            [
                "train",
                "rag-nq",
                "--dry-run",
                "--preset",
                "separate",
                "--preset",
                "unitymas-o",
                "env.data=mini",
            ]
        )
        == 0
    )
    text = capsys.readouterr().out
    bound = [line for line in text.splitlines() if line.startswith("#")]
    assert bound[0].startswith("# preset separate; settings of unitymas-o")
    assert "#   policies.*.critic_learning.lr=1e-05" in bound and "#   groups.*.context=4224" in bound
    assert len(bound) == 1 + len(list(leaves(bound_by("rag-nq"))))
    assert main(["train", "rag-nq", "--dry-run", "--preset", "separat"]) == 1
    assert "did you mean 'separate'" in capsys.readouterr().err


def bound_by(env):
    from unitymas.trainers.config.presets import paper_settings

    return paper_settings("unitymas-o", env, "separate")
