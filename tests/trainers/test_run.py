"""A whole run on a two-role team and a random two-layer model: config, directory, resume, stop rules."""

import json

import pytest
import torch

import unitymas
from unitymas import Outcome, Role, Tags, Workflow
from unitymas.agents.model.weights import load_model
from unitymas.cli.training import train_main
from unitymas.envs.core.trace import read_dicts
from unitymas.envs.registry import unregister
from unitymas.trainers.config.resolve import resolve
from unitymas.trainers.config.schema import ConfigError, RunConfig, build, dump, read_yaml
from unitymas.trainers.controller.run import Run, Stopped, train


class Pair(Workflow):
    """A speaker, then a listener; both are paid for saying what the task names."""

    roles = (Role("speaker"), Role("listener", reply=Tags("answer")))

    def __init__(self, padding: int = 0) -> None:
        self.padding = padding

    async def run(self, ep):
        said = await ep.act("speaker", f"{ep.task.question} " + "w1 " * self.padding)
        heard = await ep.act("listener", f"{said.text[:20]} {ep.task.question}")
        return Outcome(answer=heard.text, said=said.text)


class Letters:
    """Which share of an act's words has an even number: w2, w4 …"""

    name = "letters"

    def on_node(self, trace, node, task):
        if node.kind == "act":
            words = (node.text or "").split()
            yield node.id, "letters", sum(w[-1] in "02468" for w in words) / max(1, len(words))

    def metrics(self, trace, task):
        return {"score": sum(c.amount for c in trace.credits) / max(1, len(trace.credits))}


ROWS = [{"id": str(i), "question": "w1 w2 w3"[: 2 + 3 * (i % 3)], "answers": ["w2"]} for i in range(12)]


@pytest.fixture(autouse=True)
def pair():
    unitymas.register("pair-test", workflow=Pair, reward=Letters, tasks=ROWS, expert=lambda call: "w2")
    yield
    unregister("pair-test")


def settings(model, **more):
    common = {
        "steps": 2, "tasks_per_step": 4, "k": 2,
        "groups": {"*": {"model": model, "slots": 8, "threads": 1, "precision": "float32"}},
        "policies": {"*": {"learning": {"lr": 1e-3, "precision": "float32"}, "sampling": {"max_tokens": 4}}},
        "eval": {"every": 0, "tasks": 4}, "log": {"console": "off", "traces_every": 1}, "deterministic": True,
    }  # fmt: skip
    return {**common, **more}


def weights(run):
    return {
        f"{folder.name}/{name}": tensor
        for folder in sorted((run.dir / "policies").iterdir())
        for name, tensor in load_model(folder).state_dict().items()
    }


def same(a, b):
    one, two = weights(a), weights(b)
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


# a run ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "algorithm"), [("shared", "ppo"), ("separate", "grpo"), ("lora", "ppo"), ("shared", "mappo")]
)
def test_a_run_leaves_what_it_promises(preset, algorithm, tiny_llama, tmp_path):
    more = settings(tiny_llama)
    more["policies"]["*"]["algorithm"] = {"name": algorithm}
    run = train("pair-test", preset=preset, directory=tmp_path / "run", starved=False, **more)
    kinds = [row["kind"] for row in run.history if row["kind"] != "alarm"]
    assert kinds == ["begin", "validation", "step", "step", "validation", "end"]
    step = run.history[2]
    assert step["usable"] == 16 and step["failures"] == 0 and step["role/speaker/acts"] == 8
    assert isinstance(build(RunConfig, read_yaml(run.dir / "config.yaml")), RunConfig)
    trained = {"team"} if preset == "shared" else {"speaker", "listener"}
    assert {p.name for p in (run.dir / "policies").iterdir()} == trained
    assert len(list((run.dir / "traces").glob("*.zst"))) == 4
    kept = list(read_dicts(run.dir / "samples" / "train-000000.jsonl.zst"))
    assert len(kept) == 16
    for row in kept:
        assert len(row["reply_ids"]) == len(row["tokens"]) == len(row["logprobs"]) == len(row["advantages"])
        if algorithm == "grpo":  # one number per reply; with a critic each token has its own
            assert len(set(row["advantages"])) == 1
    (episode, *_) = read_dicts(run.dir / "traces" / "train-000000.jsonl.zst")
    said = {row["id"]: "".join(row["tokens"]) for row in kept}
    assert all(said[node["meta"]["sample"]].startswith(node["reply"]) for node in episode["nodes"])
    for name in trained:
        assert step[f"policy/{name}/tokens"] > 0
        assert step[f"policy/{name}/max_mismatch"] < 1e-4  # the engine's log-probs are the trainer's
        assert step[f"policy/{name}/steps"] == 2  # mini-batches are cut by task: equally many for every map


def test_resuming_gives_the_weights_of_the_undisturbed_run(tiny_llama, tmp_path):
    whole = train(
        "pair-test",
        directory=tmp_path / "a",
        **settings(tiny_llama, steps=4, checkpoint_every=2),
        preset="shared",
    )
    half = train(
        "pair-test",
        directory=tmp_path / "b",
        **settings(tiny_llama, steps=2, checkpoint_every=2),
        preset="shared",
    )
    assert not same(whole, half)
    rest = train(directory=half.dir, resume=True, overrides=["steps=4"])
    assert same(whole, rest)
    assert [r["step"] for r in rest.history if r["kind"] == "step"] == [1, 2, 3, 4]
    volatile = ("time", "seconds")
    last = [
        {k: v for k, v in r.history[-3].items() if not any(x in k for x in volatile)} for r in (whole, rest)
    ]
    assert last[0] == last[1]


def test_the_same_config_gives_the_same_run(tiny_llama, tmp_path):
    one, two = (
        train("pair-test", directory=tmp_path / n, preset="shared", **settings(tiny_llama)) for n in "ab"
    )
    assert same(one, two)
    other = train("pair-test", directory=tmp_path / "c", preset="shared", **settings(tiny_llama, seed=1))
    assert not same(one, other)


def test_a_fixed_player_and_a_frozen_policy_do_not_learn(tiny_llama, tmp_path):
    more = settings(tiny_llama)
    more["map"] = {"speaker": "scripted", "listener": "team"}
    more["policies"] = {"team": more["policies"]["*"]}
    more["groups"] = {"main": more["groups"]["*"]}
    run = train("pair-test", directory=tmp_path / "a", **more)
    assert run.history[2]["usable"] == 8
    frozen = settings(tiny_llama)
    frozen["policies"]["speaker"] = {"frozen": True}
    run = train("pair-test", directory=tmp_path / "b", preset="separate", **frozen)
    assert {p.name for p in (run.dir / "policies").iterdir()} == {"listener"}


def test_shuffled_rewards_are_a_control(tiny_llama, tmp_path):
    run = train(
        "pair-test", directory=tmp_path / "a", preset="shared", shuffle_rewards=True, **settings(tiny_llama)
    )
    assert run.history[-1]["ending"] == "done"


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_the_whole_loop_learns_and_a_control_does_not(algorithm, tiny_llama, tmp_path):
    """From words half of which are even to words nearly all of which are; without signal, no such thing."""

    def gain(name, **more):
        policy = {"learning": {"lr": 3e-3}, "sampling": {"max_tokens": 4}, "algorithm": {"name": algorithm}}
        common = settings(tiny_llama, steps=12, tasks_per_step=8, k=8, deterministic=False, **more)
        common |= {"policies": {"*": policy}, "log": {"console": "off", "traces_every": 0}, "starved": False}
        run = train("pair-test", preset="shared", directory=tmp_path / name, **common)
        steps = [row for row in run.history if row["kind"] == "step"]
        # as played, before any exchange: the mean of speaker and listener
        return [row["train/score"] for row in (steps[0], steps[-1])]

    first, last = gain("signal")
    assert first < 0.75 and last > 0.9
    first, last = gain("control", shuffle_rewards=True)
    assert abs(last - first) < 0.2


# stopping and failing -----------------------------------------------------------------------------------


def test_no_usable_sample_stops_the_run_with_the_cause(tiny_llama, tmp_path):
    more = settings(tiny_llama, steps=5, patience=2, env={"args": {"padding": 5000}})
    with pytest.raises(Stopped, match="2 steps in a row without one usable sample"):
        train("pair-test", directory=tmp_path / "a", preset="shared", map={"listener": "scripted"}, **more)
    assert "stopped" in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()[-1]


def test_a_run_does_not_write_over_another(tiny_llama, tmp_path):
    train("pair-test", directory=tmp_path / "a", preset="shared", **settings(tiny_llama, steps=1))
    with pytest.raises(ConfigError, match="already holds a run; resume it"):
        train("pair-test", directory=tmp_path / "a", preset="shared", **settings(tiny_llama))


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["stepz=3"], "stepz: unknown key; did you mean 'steps'"),
        (["steps=many"], "steps: expected int, got 'many'"),
        (["policies.team.lerning.lr=1"], "policies.team.lerning: unknown key; did you mean 'learning'"),
        (["algorithm.name=grpo"], r"algorithm: unknown key; did you mean policies\.\*\.algorithm\?"),
        (["split=test"], r"split: unknown key; did you mean env\.split\?"),
        (["map.speaker=teem"], "map.speaker: 'teem' is neither a policy .*did you mean 'team'"),
        (["map.speaker=zzzzqq"], "map.speaker: 'zzzzqq' is neither a policy .*; known: team, .*scripted"),
        (["policies.team.group=other"], "there is no group 'other'"),
        (
            ["policies.tem.learning.lr=1"],
            "policies.tem: no role is played by a policy of this name; did you mean 'team'",
        ),
        (["steps=-1"], "steps: must be at least 1, got -1"),
        (["k=0"], "k: must be at least 1"),
        (["runtime=cluster"], "runtime: 'cluster' is none of local, ray"),
        (["recipe=defalt"], "unknown recipe"),
        (
            ["groups.*.model=openai:m@url"],
            "groups.team.model: 'openai:m@url' plays, but is no model; give tiny",
        ),
        (["groups.team.model=tinny"], "groups.team.model: no model is called 'tinny'; did you mean 'tiny'"),
        (["policies.team.init=vllm:tiny"], "policies.team.init: 'vllm:tiny' plays, but is no model"),
        (["steps"], "overrides look like a.b=c"),
        (["deterministic=true", "episode_seconds=3"], "cannot be deterministic"),
        (["groups.team.engine_options={max_loras: 2}"], r"set groups\.team\.engine=vllm"),
        (["groups.team.engine=vllm", "deterministic=true"], "cannot promise the same bits"),
        (["groups.team.engine=vllm", "policies.team.sampling.top_p=0.9"], r"policies\.team\.sampling: vLLM"),
    ],
)
def test_config_errors_name_the_key(overrides, says):
    with pytest.raises(ConfigError, match=says):
        resolve("pair-test", preset_name="shared", overrides=overrides)


def test_a_falling_rate_falls_over_the_whole_run_unless_told_otherwise():
    falling = ["steps=30", "minibatches=2", "epochs=3", "policies.*.learning.schedule=linear"]
    config = resolve("pair-test", preset_name="separate", overrides=falling)
    assert {p.learning.horizon for p in config.policies.values()} == {180}
    told = resolve("pair-test", overrides=[*falling, "policies.*.learning.horizon=7"])
    assert {p.learning.horizon for p in told.policies.values()} == {7}
    with pytest.raises(
        ConfigError, match=r"learning.warmup: .* 200 optimizer steps, and the run has 180; set 179"
    ):
        resolve("pair-test", overrides=[*falling, "policies.*.learning.warmup=200"])


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"map": {"speaker": "team"}}, "nobody plays 'listener'"),
        ({"map": {"*": "team", "lisener": "team"}}, "did you mean 'listener'"),
        ({"policies": {"team": {}, "spare": {}}}, "policies.spare: no role is mapped to it"),
        (
            {"groups": {"main": {"model": "."}, "spare": {"slots": 4}}},
            "groups.spare: no policy is in this group",
        ),
        ({"policies": {"team": {"algorithm": {"name": "grpo"}}}, "k": 1}, "needs k >= 2"),
        ({"policies": {"team": {"algorithm": {"name": "grppo"}}}}, "grpo"),
        ({"policies": {"team": {"algorithm": {"name": "ppo", "lamb": 1}}}}, "lam"),
        ({"policies": {"team": {"algorithm": {"name": "ppo", "kl_loss": 0.1}}}}, "set reference"),
        (
            {"policies": {"team": {"algorithm": {"role_weights": {"lisener": 0.5}}}}},
            r"policies\.team\.algorithm\.role_weights\.lisener: no role .* did you mean 'listener'",
        ),
    ],
)
def test_mapping_mistakes_are_found_before_anything_is_loaded(more, says, tmp_path):
    with pytest.raises((ConfigError, ValueError), match=says):
        Run(resolve("pair-test", **more), tmp_path)


def test_a_model_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"groups\.team\.model: no model at nowhere"):
        train("pair-test", directory=tmp_path / "a", preset="shared", **settings("hf:nowhere"))
    assert not (tmp_path / "a").exists()
    with pytest.raises(FileNotFoundError, match=r"policies\.team\.init: no model at ./nowhere"):
        more = settings("tiny", policies={"*": {"init": "./nowhere"}})
        train("pair-test", directory=tmp_path / "b", preset="shared", **more)


def test_dry_run_prints_a_config_that_reads_back(capsys, tmp_path):
    assert (
        train_main(
            ["pair-test", "--dry-run", "--preset", "separate", "steps=7", "policies.*.learning.lr=1e-4"]
        )
        == 0
    )
    text = capsys.readouterr().out
    (tmp_path / "config.yaml").write_text(text)
    again = resolve(file=tmp_path / "config.yaml")
    assert again.steps == 7 and again.policies["speaker"].learning.lr == 1e-4
    assert dump(again) == text.partition("\n")[2] and text.startswith("# preset separate: ")


@pytest.mark.parametrize("name", [None, "separate"])
def test_a_star_is_laid_under_every_group_and_policy(name):
    overrides = ["groups.*.slots=7", "policies.*.learning.lr=1e-4"]
    found = resolve("pair-test", preset_name=name, overrides=overrides)
    assert {group.slots for group in found.groups.values()} == {7} and "*" not in found.groups
    assert {policy.learning.lr for policy in found.policies.values()} == {1e-4} and "*" not in found.policies
    if name is None:
        assert set(found.groups) == {"main"} and set(found.policies) == {"team"}


def test_metrics_are_one_json_line_each(tiny_llama, tmp_path):
    run = train("pair-test", directory=tmp_path / "a", preset="shared", **settings(tiny_llama, steps=1))
    for line in (run.dir / "metrics.jsonl").read_text().splitlines():
        assert {"kind", "step", "time"} <= set(json.loads(line))
