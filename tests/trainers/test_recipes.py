"""Recipes on real (tiny) groups: who plays, who learns, who stands still; and trees from end to end."""

import asyncio
import math
import pickle
from typing import Any

import pytest
import torch

import unitymas
from unitymas import Choice, Outcome, Role, Workflow
from unitymas.agents.policies import Answer, Call, ExpertPolicy, FoolPolicy, RandomPolicy
from unitymas.agents.team import Team
from unitymas.envs.core.branch import Branch
from unitymas.envs.core.drivers import arena_of
from unitymas.envs.core.ledger import Credit
from unitymas.envs.registry import unregister
from unitymas.trainers.config.resolve import resolve
from unitymas.trainers.config.schema import ConfigError
from unitymas.trainers.controller.collect import Draws
from unitymas.trainers.controller.counterfactual import Counterfactual, question
from unitymas.trainers.controller.run import Run
from unitymas.trainers.controller.statistics.decisions import decisions_of
from unitymas.trainers.controller.step import Default
from unitymas.trainers.recipes import list_recipes, make_recipe, register_recipe
from unitymas.trainers.recipes.cross import MixedSeat
from unitymas.trainers.recipes.malt import rows, valued

WORDS = ("w1", "w2", "w3", "w4")
ID = "pair-of-guessers"


class Pair(Workflow):
    """A pioneer guesses; an observer sees the guess and guesses again."""

    roles = (Role("pioneer", reply=Choice(*WORDS)), Role("observer", reply=Choice(*WORDS)))

    async def run(self, ep):
        first = await ep.act("pioneer", f"w9 {ep.task.question}")
        second = await ep.act("observer", f"w8 {ep.task.question} {first.text}")
        return Outcome(answer=second.value)


class Guess:
    name = "guess"

    def on_node(self, trace, node, task):
        yield Credit(node.id, "guess", float(node.value in task.reference["answers"]))

    def on_end(self, trace, task):
        return ()

    def metrics(self, trace, task):
        return {"score": float((trace.outcome or {}).get("answer") in task.reference["answers"])}


@pytest.fixture(scope="module", autouse=True)
def environment():
    rows = [{"id": f"t{i}", "question": f"w{20 + i}", "answers": [WORDS[i % 4]]} for i in range(8)]
    unitymas.register(ID, workflow=Pair, reward=Guess, tasks=rows)
    yield
    unregister(ID)


def made(model: str, tmp_path: Any, **fields: Any) -> Run:
    """A run of two tasks a step that says little."""
    given: dict[str, Any] = {
        "steps": 1, "tasks_per_step": 2, "k": 2, "minibatches": 1, "starved": False, "checkpoint_every": 0,
        "eval": {"every": 0, "tasks": 1}, "log": {"console": "off", "traces_every": 0},
    }  # fmt: skip
    given |= fields
    preset = given.pop("preset", "separate")
    policy = {
        "algorithm": given.pop("algorithm", {"name": "grpo"}),
        "learning": {"lr": 1e-2},
        "sampling": {"temperature": 5.0, "max_tokens": 8},  # a random model has favourites
    }
    config = resolve(
        ID, preset_name=preset, **given,
        policies={"*": policy | given.pop("policy", {})}, groups={"*": {"model": model, "slots": 8, "threads": 1}},
    )  # fmt: skip
    return Run(config, tmp_path / "run")


def weights(run: Run) -> dict[str, torch.Tensor]:
    """A fingerprint of every policy's parameters."""
    return {
        name: torch.cat([p.detach().flatten() for p in hosted.parameters.named().values()]).clone()
        for group in run.groups.values()
        for name, hosted in group.hosted.items()
    }


def stepped(run: Run, steps: int = 1) -> list[set[str]]:
    """Take steps by hand; which policies moved in each."""

    async def go() -> list[set[str]]:
        await run._start()
        moved = []
        for _ in range(steps):
            before = weights(run)
            figures = await run.recipe.step(run)
            assert all(math.isfinite(x) for x in figures.values())
            run.step += 1
            after = weights(run)
            moved.append({name for name in before if not torch.equal(before[name], after[name])})
        return moved

    return asyncio.run(go())


def test_at_grpo_trains_on_trees(tiny_llama, tmp_path):
    """The default of at_grpo, end to end: K candidates per act, sealed, compared, trained, none left over."""
    run = made(
        tiny_llama, tmp_path, preset="shared", algorithm={"name": "at_grpo", "tree": 4}, k=1, tasks_per_step=4
    )
    assert stepped(run) == [{"team"}]
    report = asyncio.run(run.groups["team"].report())["samples"]
    assert report["put"] == 4 * 2 * 4 == report["trained"]


@pytest.mark.parametrize("score", ["rollout", "value"])
def test_trees_are_scored_by_rollouts_and_critics(tiny_llama, tmp_path, score):
    algorithm = {"name": "at_grpo", "tree": 3, "tree_score": score}
    run = made(tiny_llama, tmp_path, preset="shared", algorithm=algorithm, k=1, tasks_per_step=4)
    moved = stepped(run)[0]
    assert moved == ({"team", "team-critic"} if score == "value" else {"team"})


@pytest.mark.parametrize("score", ["step", "rollout"])
def test_a_tree_that_cannot_see_what_comes_late_says_so(tiny_llama, tmp_path, capsys, monkeypatch, score):
    monkeypatch.setattr(Guess, "on_end", lambda self, trace, task: [Credit(trace.acts()[0].id, "team", 1.0)])
    algorithm = {"name": "at_grpo", "tree": 2, "tree_score": score}
    stepped(made(tiny_llama, tmp_path, preset="shared", algorithm=algorithm, k=1))
    told = "pioneer earns team only after later acts" in capsys.readouterr().err
    assert told == (score == "step")


def test_a_leader_learns_and_its_peers_do_not(tiny_llama, tmp_path):
    run = made(tiny_llama, tmp_path, recipe="mlpo", recipe_args={"leader": "observer"}, k=4, tasks_per_step=4)
    assert stepped(run) == [{"observer"}]


def test_policies_learn_in_turn(tiny_llama, tmp_path):
    run = made(tiny_llama, tmp_path, recipe="alternate", recipe_args={"every": 1}, k=4, tasks_per_step=4)
    assert stepped(run, 2) == [{"pioneer"}, {"observer"}]


def test_pioneer_and_observer_exchange_roles(tiny_llama, tmp_path):
    run = made(tiny_llama, tmp_path, recipe="cory", recipe_args={"every": 1})
    played = []

    async def go():
        await run._start()
        for _ in range(3):
            harvest = await run.recipe.collect(run)
            played.append({d.role: d.policy for d in harvest.decisions})
            run.step += 1

    asyncio.run(go())
    straight = {"pioneer": "pioneer", "observer": "observer"}
    assert played == [straight, {"pioneer": "observer", "observer": "pioneer"}, straight]


def test_other_policies_step_in_and_learn_from_it(tiny_llama, tmp_path):
    run = made(tiny_llama, tmp_path, recipe="cross", recipe_args={"probability": 0.5}, k=4, tasks_per_step=4)
    assert stepped(run) == [{"pioneer", "observer"}]
    assert isinstance(run.collector.team.policies["pioneer"], MixedSeat)


def test_who_steps_in_follows_from_the_seed():
    class Says:
        def __init__(self, text):
            self.text = text

        def act(self, call):
            return Answer(self.text)

    seat = MixedSeat(Says("own"), [Says("other")], 0.25)
    calls = [Call("a", "a", (), seed=s) for s in range(400)]
    said = [asyncio.run(seat.act(c)).text for c in calls[:200]]
    assert 25 < said.count("other") < 75
    assert said == [asyncio.run(seat.act(c)).text for c in calls[:200]]


def test_a_scripted_seat_may_cross_too(tiny_llama, tmp_path):
    """The expert needs the reference, whoever's seat it takes; nobody else is shown it; what opens is opened, once."""
    seen = []

    class Opens:
        opened = closed = 0
        colour = "red"

        async def open(self):
            self.opened += 1

        async def close(self):
            self.closed += 1

        def act(self, call):
            seen.append(call.task)
            return "w3"

    def expert(call):
        return call.task.reference["answers"][0]

    rows = [{"id": f"t{i}", "question": f"w{20 + i}", "answers": [WORDS[i % 4]]} for i in range(8)]
    unitymas.register("pair-with-expert", workflow=Pair, reward=Guess, tasks=rows, expert=expert)
    config = resolve(
        "pair-with-expert", recipe="cross", recipe_args={"probability": 0.5}, steps=1, tasks_per_step=4, k=4,
        groups={"main": {"model": tiny_llama, "slots": 8, "threads": 1}}, policies={"own": {"algorithm": {"name": "grpo"}}},
        map={"pioneer": "scripted", "observer": "own"}, eval={"every": 0, "tasks": 1}, log={"console": "off"},
    )  # fmt: skip
    run = Run(config, tmp_path / "run")
    opens = Opens()

    async def go():
        await run._start()
        harvest = await run.recipe.collect(run)
        mixed = run.collector.team.policies["pioneer"]
        run.collector.team = type(run.collector.team)(
            {"pioneer": MixedSeat(opens, [mixed], 0.5), "observer": MixedSeat(mixed, [opens], 0.5)},
            run.collector.team.names,
        )
        again = await run.collector.collect(["t0", "t1"], Draws(4, 0, "again"))
        return harvest, again

    try:
        harvest, again = asyncio.run(go())
    finally:
        unregister("pair-with-expert")
    assert not harvest.failures and len(harvest.traces) == 16
    players = {(d.role, d.policy) for d in harvest.decisions}
    assert ("pioneer", "own") in players and ("observer", "own") in players
    assert not again.failures and len(again.traces) == 8
    assert (opens.opened, opens.closed) == (1, 1) and seen and set(seen) == {None}
    outer = MixedSeat(MixedSeat(opens, [ExpertPolicy(expert)], 0.5), [], 0.5)
    (
        asyncio.run(outer.open()),
        asyncio.run(outer.close()),
    )  # a wrapper that is opened by itself opens what it holds
    assert (opens.opened, opens.closed) == (2, 2)
    assert outer.sees_reference and outer.colour == "red" and not hasattr(outer, "blue")
    assert pickle.loads(pickle.dumps(MixedSeat(FoolPolicy(), [RandomPolicy()], 0.5))).huge == FoolPolicy.huge


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"recipe": "alternat"}, "did you mean 'alternate'"),
        ({"recipe": "alternate", "recipe_args": {"evry": 2}}, "did you mean 'every'"),
        ({"recipe": "alternate", "preset": "shared"}, "two policies that learn"),
        ({"recipe": "mlpo"}, "needs recipe_args.leader"),
        ({"recipe": "mlpo", "recipe_args": {"leader": "obsever"}}, "did you mean 'observer'"),
        ({"recipe": "mlpo", "recipe_args": {"leader": "observer"}, "preset": "shared"}, "would learn too"),
        ({"recipe": "cory", "preset": "shared"}, "exchanges two policies"),
        ({"recipe": "cross", "recipe_args": {"pool": ["nobody"]}}, "plays no role"),
        ({"recipe": "cross", "recipe_args": {"probability": 2.0}}, "must lie in 0 … 1"),
        ({"algorithm": {"name": "grop"}}, "did you mean 'grpo'"),
        ({"algorithm": {"name": "grpo", "clip_hihg": 0.3}}, "did you mean 'clip_high'"),
        ({"algorithm": {"name": "grpo"}, "k": 1}, "it needs k >= 2, and k is 1"),
        ({"algorithm": {"name": "at_grpo", "tree": 1}}, "set it to 2 or more"),
        ({"algorithm": {"name": "at_grpo"}, "shuffle_rewards": True}, "compares siblings"),
        ({"counterfactual": {"pioner": {}}}, "did you mean 'pioneer'"),
        ({"counterfactual": {"*": {"samples": 0}}}, "at least 1"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_loaded(tmp_path, fields, message):
    with pytest.raises(ConfigError, match=message):
        made("/no/such/model", tmp_path, **fields)


def test_malts_trees_become_imitation_and_preferences(tiny_llama, tmp_path):
    """A reply is worth the mean of the leaves below it; pairs lie on both sides of the threshold."""
    run = made(tiny_llama, tmp_path, recipe="malt", recipe_args={"width": 3}, tasks_per_step=4)

    async def go():
        await run._start()
        return await run.recipe.collect(run)

    harvest = asyncio.run(go())
    for tree in harvest.grown:
        assert len(tree.leaves) == 9
        found = valued(tree, "score")
        assert len(found) == 3 + 9
        by_role = {
            r: [t.credits[0].amount for t in found if t.nodes[0].role == r] for r in ("pioneer", "observer")
        }
        assert sum(by_role["pioneer"]) / 3 == pytest.approx(sum(by_role["observer"]) / 9)
        assert set(by_role["observer"]) <= {0.0, 1.0}
        good = {t.nodes[0].text for t in found if t.nodes[0].role == "observer" and t.credits[0].amount}
        pairs = [r for r in rows(found, "dpo", 0.5) if r["prompt"][0]["content"].startswith("w8")]
        assert all(
            p["chosen"][0]["content"] in good and p["rejected"][0]["content"] not in good for p in pairs
        )
        assert len(rows(found, "sft", 0.5)) == sum(t.credits[0].amount > 0.5 for t in found)


def test_counterfactual_credit_is_what_the_act_changed(tiny_llama, tmp_path):
    """The pioneer's guess is worth what the team's score would have lost without it; forks train nothing."""
    settings = {"pioneer": {"samples": 3, "limit": 1}}
    run = made(tiny_llama, tmp_path, counterfactual=settings, k=4, tasks_per_step=4)

    async def go():
        await run._start()
        harvest = await run.recipe.collect(run)
        held = [await g.report() for g in run.groups.values()]
        return harvest, sum(report["samples"]["held/sealed"] for report in held)

    harvest, sealed = asyncio.run(go())
    assert sealed == len(harvest.decisions) == 2 * 16
    credit = {
        role: [d.credit for d in harvest.decisions if d.role == role] for role in ("pioneer", "observer")
    }
    assert all(set(c) == {"counterfactual"} for c in credit["pioneer"])
    assert all(set(c) == {"guess"} for c in credit["observer"])
    thirds = {round(3 * c["counterfactual"], 9) for c in credit["pioneer"]}
    assert thirds <= {-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0} and len(thirds) > 1


def test_a_neutral_reply_stands_for_the_act():
    """With a reply that changes nothing, an act made no difference; one that decides all makes all of it."""
    arena = arena_of(unitymas.make(ID))
    says = {"pioneer": "w1", "observer": "w1"}
    team = Team({role: (lambda agent, messages, w=word: w) for role, word in says.items()}).bind(arena.roles)
    task = arena.task("t0")  # w1 is right

    async def go(role, reply):
        played = await Branch.begin(arena, team, task, 0, "e").finish()
        found = decisions_of(played.trace, "e", {"p"})
        for row in found:
            row.trainable = True
        return await question(played, found, {role: Counterfactual(reply=reply)}, 0)

    assert asyncio.run(go("pioneer", "w2")) == {"e/0": 0.0}
    assert asyncio.run(go("observer", "w2")) == {"e/1": 1.0}


def test_malt_trains_through_trl(tiny_llama, tmp_path):
    args = {"width": 3, "sft": {"learning_rate": 1e-2}, "dpo": {"learning_rate": 1e-2}}
    run = made(tiny_llama, tmp_path, recipe="malt", recipe_args=args, tasks_per_step=8)
    assert "observer" in stepped(run)[0]


def test_recipes_by_name():
    class Mine(Default):
        pass

    register_recipe("mine-of-this-test", Mine)
    assert isinstance(make_recipe("mine-of-this-test", {}), Mine)
    with pytest.raises(ValueError, match="already registered"):
        register_recipe("mine-of-this-test", Default)
    for name in set(list_recipes()) - {"mlpo", "several", "mine-of-this-test"}:  # those two need arguments
        assert isinstance(make_recipe(name, {}), Default)
