"""A critic's value is used only where it was trained: small worlds whose values are known, and real little critics."""

import asyncio
import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import unitymas
from unitymas import Choice, Outcome, Role, Workflow
from unitymas.agents.model.weights import load_model
from unitymas.envs.core.ledger import Credit
from unitymas.envs.registry import unregister
from unitymas.trainers.algorithms import make_algorithm
from unitymas.trainers.config.group_settings import Learning
from unitymas.trainers.config.resolve import resolve
from unitymas.trainers.config.schema import ConfigError
from unitymas.trainers.controller.run import Run
from unitymas.trainers.controller.statistics import gae
from unitymas.trainers.controller.statistics.table import Decision, Table, ValueSummary
from unitymas.trainers.group.learning.parameters import Parameters
from unitymas.trainers.group.learning.targets import Discount, summaries
from unitymas.trainers.group.learning.update import Learner
from unitymas.trainers.group.sample_store import Sample

GOOD, BAD, CUT = range(3)
ENDINGS = {GOOD: ("terminal", 1.0), BAD: ("terminal", 0.0), CUT: ("truncated", 0.0)}


def episodes(kind: int, acts: int = 2) -> tuple[list[Sample], list[Decision]]:
    """One agent's acts in one episode; how it ends is told by the last reply alone."""
    ended, reward = ENDINGS[kind]
    found, rows = [], []
    for act in range(acts):
        last = act == acts - 1
        reply = np.array([20 + kind, 5] if last else [30, 5])
        sample = Sample(
            f"e{kind}", str(act), "p", 0, np.array([40, 41 + act]), reply, np.zeros(2, np.float32)
        )
        found.append(sample)
        rows.append(Decision(
            id=sample.id, task="t", episode=sample.episode, node=sample.node, role="r", agent="r", policy="p",
            chain=sample.episode, order=act, n_tokens=2, ended=ended if last else "no",
            credit={"outcome": reward} if last else {},
        ))  # fmt: skip
    return found, rows


@pytest.mark.parametrize("level", ["token", "turn"])
def test_running_out_of_budget_is_no_better_than_failing(tiny_llama: str, level: str) -> None:
    """Successes earn 1, failures 0, and so do those that were cut off: nothing speaks for them but the ledger."""
    ppo = make_algorithm("ppo", level=level, lam=0.95, whiten="none", value_clip=None)
    critic = Learner("c", Parameters(load_model(tiny_llama), critic=True), Learning(lr=3e-3))
    samples, rows = map(list, zip(*(episodes(kind) for kind in (GOOD, BAD, CUT)), strict=True))
    samples, rows = sum(samples, []), sum(rows, [])
    for _ in range(40):
        critic.measure_values(samples)
        found = summaries(samples, Discount(1.0, 0.95))
        for row in rows:
            row.value = found[row.id]
        table = Table(rows)
        signals = {s.id: s for s in ppo.advantages(table, table.mine("p"), {})}
        critic.update(ppo, signals, [samples])
    first = {row.id: row.value.first for row in rows}
    assert first["e0/0"] == pytest.approx(1 / 3, abs=0.1)  # a third of the episodes that begin so succeed
    of = [s.tail if level == "token" else s.advantage + first[s.id] for s in signals.values()]
    praised = dict(zip(signals, of, strict=True))
    assert praised["e2/1"] == praised["e1/1"] == 0.0 and praised["e0/1"] == 1.0


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6), gamma=st.sampled_from([0.0, 0.9, 1.0]), lam=st.sampled_from([0.0, 0.7, 1.0])
)
def test_what_a_critic_says_after_the_end_moves_no_advantage(
    ragged: Any, seed: int, gamma: float, lam: float
) -> None:
    """Whatever it expects there, and whether a chain ended by itself or was cut off: the ledger says the same."""
    chance, table = random.Random(seed), Table(ragged(seed).rows)

    def advantages() -> list[Any]:
        mine = np.arange(len(table))
        return [gae.tails(table, mine, gamma, lam), *gae.turn_level(table, mine, gamma, lam)]

    for row in table.rows:
        row.value = ValueSummary(
            chance.random(), chance.random(), row.n_tokens, 0.0, 0.0, 0.0, chance.gauss(0, 9)
        )
    before = advantages()
    for row in table.rows:
        row.value = ValueSummary(row.value.first, row.value.local_first, row.n_tokens, 0.0, 0.0, 0.0, 7.0)
        row.ended = {"truncated": "terminal", "terminal": "truncated"}.get(row.ended, row.ended)
    for old, new in zip(before, advantages(), strict=True):
        assert np.array_equal(old, new)


WORDS = ("w1", "w2", "w3")
LATER = {"w1": 0.0, "w2": 1.0, "w3": 0.4}
"""What the first word is worth later, in the second act and in the end."""


class Walk(Workflow):
    """One agent goes twice; where its first step led is seen in its second prompt."""

    roles = (Role("walker", reply=Choice(*WORDS)),)

    async def run(self, ep):
        first = await ep.act("walker", f"w9 {ep.task.question}")
        second = await ep.act("walker", f"w8 {first.text}")
        return Outcome(answer=f"{first.value} {second.value}")


class Pay:
    """Half of it at the second act, half in the end, for the first; at once the first step seems best left."""

    name = "pay"

    def on_node(self, trace, node, task):
        acts = trace.acts()
        if len(acts) == 1:
            yield Credit(node.id, "own", 0.2 * (node.value == "w1"))
        else:
            yield Credit(node.id, "pay", LATER[acts[0].value] / 2)

    def on_end(self, trace, task):
        first = trace.acts()[0]
        return [Credit(first.id, "late", LATER[first.value] / 2)]


@pytest.fixture(scope="module", autouse=True)
def environment():
    tasks = [{"id": f"t{i}", "question": f"w{20 + i}", "answers": ["x"]} for i in range(4)]
    unitymas.register("a-walk", workflow=Walk, reward=Pay, tasks=tasks)
    yield
    unregister("a-walk")


def walk(model: str, folder: Any, policy: dict[str, Any], **fields: Any) -> Run:
    config = resolve(
        "a-walk", preset_name="shared", k=1, minibatches=1, starved=False, checkpoint_every=0,
        eval={"every": 0, "tasks": 1}, log={"console": "off", "traces_every": 0},
        groups={"*": {"model": model, "slots": 16, "threads": 1}},
        policies={"*": {"sampling": {"temperature": 5.0, "max_tokens": 8}, **policy}}, **fields,
    )  # fmt: skip
    return Run(config, folder / "run")


@pytest.mark.parametrize("beta", [1.0, 0.5])
def test_siblings_are_ranked_by_values_that_were_trained(tiny_llama: str, tmp_path: Any, beta: float) -> None:
    """After a first step the critic expects what it brings later, late credits and their weights included; after the
    last one the episode is over, and it learns 0 there.
    """
    policy = {
        "algorithm": {"name": "at_grpo", "tree": 3, "tree_score": "value", "continuation": "random"},
        "learning": {"lr": 1e-8},
        "critic_learning": {"lr": 3e-3},
        "credit": {"*": [{"name": "mix", "team": ["pay", "late"], "alpha": beta}]},
    }
    run = walk(tiny_llama, tmp_path, policy, steps=30, tasks_per_step=4)
    expected: dict[str, list[float]] = {}

    async def go() -> list[float]:
        await run._start()
        for step in range(30):
            run.step = step
            harvest = await run.recipe.collect(run)
            table = await run.recipe.judge(run, Table(harvest.decisions))
            for tree in harvest.grown if step >= 25 else ():
                said = {
                    name: n.text for c in tree.candidates for n in c.trace.nodes for name in [c.names[n.id]]
                }
                for row in tree.rows:
                    assert ("value" in row.credit) == (row.turn == 0)  # nothing is expected after the end
                    if row.turn == 0:
                        expected.setdefault(said[row.node], []).append(row.credit["value"])
            signals = run.recipe.advantages(run, table, {})
            await run.recipe.update(run, table, signals)
            ends = [row.value.after for row in table.rows if row.turn == 1]
            await run.hosts.retire(harvest.episodes)
        for group in run.groups.values():
            await group.close()
        return ends

    ends = asyncio.run(go())
    for word, found in expected.items():
        assert math.fsum(found) / len(found) == pytest.approx(beta * LATER[word], abs=0.2), word
    assert len(expected) == 3 and max(map(abs, ends)) < 0.25


def test_policies_that_learn_together_are_sampled_alike(tiny_llama: str, tmp_path: Any) -> None:
    """Beside a tree, an algorithm that reads whole chains would see them cut."""
    rows = [{"id": "t", "question": "w20", "answers": ["x"]}]
    unitymas.register("two-walk", workflow=TwoWalk, reward=Pay, tasks=rows)
    try:
        config = resolve("two-walk", preset_name="separate", k=1, policies={
            "one": {"algorithm": {"name": "at_grpo", "tree": 3}}, "two": {"algorithm": {"name": "ppo"}},
        }, groups={"*": {"model": tiny_llama}})  # fmt: skip
        with pytest.raises(
            ConfigError, match="same trees or in none: .*at_grpo.* wants Tree.*ppo.* wants None"
        ):
            Run(config, tmp_path / "run")
    finally:
        unregister("two-walk")


class TwoWalk(Workflow):
    roles = (Role("one"), Role("two"))

    async def run(self, ep):
        await ep.act("one", "w9")
        return Outcome(answer=(await ep.act("two", "w8")).text)
