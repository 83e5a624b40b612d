"""Several environments in one run: each is played, none is compared with another, and a kill forgets nothing."""

import pytest

import unitymas
from unitymas import Choice, Outcome, Role, Workflow
from unitymas.envs.core.ledger import Credit
from unitymas.envs.registry import unregister
from unitymas.trainers.config.resolve import resolve
from unitymas.trainers.config.schema import ConfigError
from unitymas.trainers.controller.collect import Harvest
from unitymas.trainers.controller.run import Run, train
from unitymas.trainers.controller.step import Default

WORDS = ("w1", "w2", "w3", "w4")
NEAR, FAR = "guess-near", "guess-far"


class Guess(Workflow):
    """One role guesses the task's word."""

    roles = (Role("guesser", reply=Choice(*WORDS)),)

    async def run(self, ep):
        return Outcome(answer=(await ep.act("guesser", ep.task.question)).value)


class Far(Guess):
    """The same with another role, which nobody but "*" plays."""

    roles = (Role("stranger", reply=Choice(*WORDS)),)

    async def run(self, ep):
        return Outcome(answer=(await ep.act("stranger", ep.task.question)).value)


def pays(scale):
    class Pay:
        name = "pay"

        def on_node(self, trace, node, task):
            yield Credit(node.id, "pay", scale * (node.value in task.reference["answers"]))

        def on_end(self, trace, task):
            return ()

        def metrics(self, trace, task):
            return {"score": float((trace.outcome or {}).get("answer") in task.reference["answers"])}

    return Pay


@pytest.fixture(autouse=True)
def environments():
    # the same task ids in both: what belongs together is told by environment and task
    rows = [{"id": f"t{i}", "question": f"w{20 + i}", "answers": [WORDS[i % 4]]} for i in range(4)]
    unitymas.register(NEAR, workflow=Guess, reward=pays(1.0), tasks=rows)
    unitymas.register(FAR, workflow=Far, reward=pays(100.0), tasks=rows)
    yield
    unregister(NEAR)
    unregister(FAR)


def settings(model, **more):
    policy = {
        "algorithm": {"name": "grpo", "task_wise": True}, "learning": {"lr": 1e-2},
        "sampling": {"temperature": 5.0, "max_tokens": 4},
    }  # fmt: skip
    return {
        "steps": 2, "tasks_per_step": 2, "k": 8, "minibatches": 1, "starved": False, "deterministic": True,
        "eval": {"every": 0, "tasks": 1}, "log": {"console": "off", "traces_every": 0}, "checkpoint_every": 1,
        "recipe": "several", "recipe_args": {"beside": [{"id": FAR}]},
        "policies": {"*": policy}, "groups": {"*": {"model": model, "slots": 8, "threads": 1}}, **more,
    }  # fmt: skip


@pytest.fixture
def signals(monkeypatch):
    """What every step sends to the learners, beside the table that it comes from."""
    seen = []
    usual = Default.advantages

    def spied(self, run, table, metrics):
        found = usual(self, run, table, metrics)
        seen.append((table, found))
        return found

    monkeypatch.setattr(Default, "advantages", spied)
    return seen


def test_each_environment_is_played_and_none_sets_the_scale(tiny_llama, tmp_path, signals):
    run = train(NEAR, preset="shared", directory=tmp_path / "a", **settings(tiny_llama))
    step = next(row for row in run.history if row["kind"] == "step")
    assert step["role/guesser/acts"] == step["role/stranger/acts"] == 16
    assert step["policy/team/groups/span_tasks"] == 0
    for table, found in signals:
        largest = {}
        for signal in found["team"]:
            row = table.rows[table.index[signal.id]]
            whitened = abs((signal.advantage - signal.shift) * signal.scale)
            largest[row.env_id] = max(largest.get(row.env_id, 0.0), whitened)
        assert set(largest) == {f"{NEAR}-v0", f"{FAR}-v0"}
        assert all(0 < x < 6 for x in largest.values())  # pay of 100 weighs no more than pay of 1


def test_a_resumed_run_is_the_undisturbed_one(tiny_llama, tmp_path):
    whole = train(NEAR, preset="shared", directory=tmp_path / "a", **settings(tiny_llama, steps=3))
    half = train(NEAR, preset="shared", directory=tmp_path / "b", **settings(tiny_llama, steps=1))
    rest = train(directory=half.dir, resume=True, overrides=["steps=3"])
    one, two = ([r["role/stranger/credit"] for r in x.history if r["kind"] == "step"] for x in (whole, rest))
    assert one == two
    assert whole.recipe.state_dict() == rest.recipe.state_dict() != {}


def test_useful_tasks_are_told_by_environment_too(tiny_llama, tmp_path):
    """DAPO keeps a task of one environment though the other's task of the same id teaches nothing."""
    fields = settings(tiny_llama)
    fields["policies"]["*"]["algorithm"] = {"name": "dapo"}
    run = Run(resolve(NEAR, preset_name="shared", **fields), tmp_path)
    from unitymas.trainers.controller.statistics.table import Decision

    def row(env, i, pay):
        return Decision(
            id=f"{env}{i}/0", env_id=env, task="t0", episode=f"{env}{i}", node="0", role="r", agent="r",
            chain=f"{env}{i}/r", policy="team", n_tokens=1, credit={"pay": pay}, ended="terminal",
        )  # fmt: skip

    harvest = Harvest(
        decisions=[row("near", i, i % 2) for i in range(4)] + [row("far", i, 1.0) for i in range(4)]
    )
    assert Default().useful(run, harvest) == {("near", "t0")}


@pytest.mark.parametrize(
    ("beside", "says"),
    [
        ([], "name at least one"),
        ([{"data": "mini"}], "has no id"),
        ([{"id": NEAR}], "the run's own"),
        ([{"id": "guess-fra"}], "did you mean guess-far"),
    ],
)
def test_what_does_not_fit_is_said_at_the_start(beside, says, tiny_llama, tmp_path):
    with pytest.raises((ConfigError, KeyError), match=says):
        fields = settings(tiny_llama, recipe_args={"beside": beside})
        Run(resolve(NEAR, preset_name="shared", **fields), tmp_path)


def test_a_role_that_nobody_plays_is_named(tiny_llama, tmp_path):
    fields = settings(tiny_llama, map={"guesser": "team"})
    fields["policies"] = {"team": fields["policies"]["*"]}
    fields["groups"] = {"main": fields["groups"]["*"]}
    with pytest.raises(ValueError, match="nobody plays 'stranger'"):
        Run(resolve(NEAR, **fields), tmp_path)
