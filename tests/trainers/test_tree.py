"""Trees: every sampled act once in the table, siblings from one state, and the winner is a replay of its journal."""

import asyncio
import random
import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unitymas import Outcome, Role, Tags, Workflow
from unitymas.agents.answers import Answer, DecisionId
from unitymas.agents.team import BoundTeam
from unitymas.envs.core.arena import Arena
from unitymas.envs.core.branch import Branch, check_forks
from unitymas.envs.core.drivers import aplay
from unitymas.envs.core.execution import Execution
from unitymas.envs.core.ledger import Credit
from unitymas.envs.core.tasks import DataSet
from unitymas.envs.core.workflow import WorkflowError
from unitymas.envs.tools.tool import Tool
from unitymas.trainers.algorithms import Tree, make_algorithm
from unitymas.trainers.controller.collect import Collector, Draws
from unitymas.trainers.controller.statistics.comparison import partition
from unitymas.trainers.controller.statistics.credit import apply_credit, credit_from_config
from unitymas.trainers.controller.statistics.table import Table
from unitymas.trainers.controller.tree import TreeSampler


class Team(Workflow):
    """A planner, then two workers side by side with a tool between, some turns long; chance decides how many."""

    roles = (Role("planner", reply=Tags("plan")), Role("worker", instances=2), Role("judge"))
    tools = ("look",)

    async def run(self, ep):
        memory, seen = ep.memory("planner"), ""
        for _ in range(ep.rng.randint(1, 2)):
            plan = await memory.act(f"{ep.task.question} {seen}")

            async def work(worker, order=plan.text):
                first = await ep.act(worker, f"do {order}")
                found = await ep.use("look", word=first.text)
                if len(first.text) % 2:
                    return found
                return (await ep.act(worker, f"again {found}")).text

            both = await ep.all(*(work(w) for w in ep.cast("worker")))
            seen = " ".join(both)
        last = await ep.act("judge", seen)
        return Outcome(answer=last.text)


class Pay:
    """Each act is worth something at once, and something more in the end."""

    name = "pay"

    def on_node(self, trace, node, task):
        if node.kind == "act":
            yield Credit(node.id, "own", float(len(node.text) % 3))
        elif node.parents:
            yield Credit(node.parents[0], "found", float(len(node.result) % 2))

    def on_end(self, trace, task):
        right = 0.0 if trace.outcome is None else float(len(trace.outcome["answer"]))
        return [Credit(n.id, "outcome", right) for n in trace.acts()]


class Speaker:
    """Says random letters, decided by the call's seed alone, and keeps what it was asked."""

    def __init__(self, policy="team", fail=0.0):
        self.policy, self.fail, self.calls = policy, fail, []

    def act(self, call):
        self.calls.append(call)
        chance = random.Random(call.seed)
        if chance.random() < self.fail:
            raise ConnectionError("server gone")
        text = "".join(chance.choice("abc") for _ in range(chance.randint(1, 5)))
        meta = {"policy": self.policy, "version": 0, "tokens_out": len(text), "sample": "x"}
        return Answer(text, meta)


def arena(kind="pure", workflow=Team):
    rows = [{"id": f"t{i}", "question": f"q{i}", "answers": ["a"]} for i in range(4)]
    tool = Tool(lambda word: word + "!", "look", kind=kind, blocking=False)
    return Arena(workflow(), DataSet("d", "train", rows, "f"), tools={"look": tool}, rules=[Pay()])


def team(where, speaker, fixed=()):
    other = Speaker("frozen")
    seats = {a: other if a in fixed else speaker for a in where.roles}
    return BoundTeam(seats, {a: "frozen" if a in fixed else "team" for a in where.roles})


async def judge(asked):
    return {id: float(len(id) % 5) for ids in asked.values() for id in ids}


def grow(tree, seed=0, fail=0.0, fixed=()):
    where, speaker = arena(), Speaker(fail=fail)
    root = Branch.begin(where, team(where, speaker, fixed), where.task("t0"), seed, "e")
    return asyncio.run(TreeSampler(root, tree, {"team"}, seed, judge).grow()), speaker, where


trees = st.builds(
    Tree,
    width=st.integers(2, 3),
    score=st.sampled_from(["step", "rollout", "value"]),
    continuation=st.sampled_from(["greedy", "softmax", "random", "all"]),
)


@settings(max_examples=12)
@given(trees, st.integers(0, 1000))
def test_every_sampled_act_stands_in_the_table_once_beside_its_siblings(tree, seed):
    grown, speaker, where = grow(tree, seed)
    table = Table(grown.rows)  # refuses doubles
    assert Counter(c.node for c in speaker.calls) == Counter(row.node for row in table.rows)
    assert len({(c.seed) for c in speaker.calls}) == len(speaker.calls)
    sets = {}
    for row in table.rows:
        sets.setdefault(row.sibling_set, []).append(row)
    for name, rows in sets.items():
        if name:
            assert len(rows) == tree.width and len({r.prompt_hash for r in rows}) == 1
            assert len({(r.agent, r.turn) for r in rows}) == 1
    known = {row.node for row in table.rows} | {n.id for n in grown.line.play.nodes if n.kind == "use"}
    assert all(parent in known or "." in parent for row in table.rows for parent in row.parents)
    _ = table.following  # refuses broken chains: each ends once, at its last decision
    groups = partition(table, "siblings")
    assert set(groups.samples.tolist()) <= {1.0, float(tree.width)}


@settings(max_examples=12)
@given(trees, st.integers(0, 1000))
def test_the_winners_state_is_the_replay_of_its_journal(tree, seed):
    grown, _, where = grow(tree, seed)
    play = grown.line.play
    journal = {n.id: n for n in play.canonical()}
    again = Execution(where.workflow, where.task("t0"), seed, roles=where.roles, journal=journal)
    assert again.ended == play.ended and again.outcome == play.outcome
    assert [n.id for n in again.canonical()] == list(journal)
    trace = where.label(again.trace)
    where.scorer(where.task("t0")).advance(trace)
    assert trace.to_dict() == grown.trace.to_dict()


@pytest.mark.parametrize("continuation", ["greedy", "all"])
def test_every_simulator_of_a_tree_is_closed(continuation):
    """The line that is left behind is one of the candidates: nothing of it stays open."""
    opened = []

    class Echo:
        def __init__(self, task, seed):
            opened.append(self)

        def call(self, word):
            return word + "!"

        def close(self):
            opened.remove(self)

    rows = [{"id": "t0", "question": "q", "answers": ["a"]}]
    look = {"look": Tool(Echo, "look", kind="session")}
    where = Arena(Team(), DataSet("d", "train", rows, "f"), tools=look, rules=[Pay()])
    root = Branch.begin(where, team(where, Speaker()), where.task("t0"), 1, "e")
    grown = asyncio.run(TreeSampler(root, Tree(3, continuation=continuation), {"team"}, 1).grow())
    assert any(n.kind == "use" for n in grown.line.play.nodes) and opened == []


def test_greedy_goes_on_with_the_best_and_siblings_are_compared_alike():
    """The chosen candidate's credit is what was known when it was scored, as its siblings' is."""
    grown, _, _ = grow(Tree(4), seed=3)
    rows = {row.node: row for row in grown.rows}
    first = [rows[f"0~1.{i}"] for i in range(4)]
    assert all(set(row.credit) <= {"own", "found"} for row in first)
    best = max(sum(row.credit.values()) for row in first)
    winner = grown.line.names["0"]
    assert sum(rows[winner].credit.values()) == best
    assert rows[winner].chain == "e/planner" and rows[winner].order == 0
    lost = next(row for row in first if row.node != winner)
    assert lost.chain == f"e~{lost.node.partition('~')[2]}/planner" and lost.ended == "truncated"
    late = [c for c in grown.trace.credits if c.component == "outcome"]
    assert late  # the trace has it all


@settings(max_examples=12)
@given(st.sampled_from(["step", "rollout"]), st.floats(-1, 1), st.integers(0, 1000))
def test_the_chosen_candidate_is_the_best_by_what_advantages_are_made_of(score, weight, seed):
    """Credit transforms come first: a candidate is not chosen by one number and praised by another."""
    where = arena()
    root = Branch.begin(where, team(where, Speaker()), where.task("t0"), seed, "e")

    def worth(rows):
        return {r.id: weight * r.credit.get("own", 0.0) + r.credit.get("found", 0.0) for r in rows}

    grown = asyncio.run(TreeSampler(root, Tree(4, score), {"team"}, seed, worth=worth).grow())
    table, drawn = Table(grown.rows), {}
    mixed = apply_credit(table, credit_from_config({"*": [{"name": "mix", "team": ["own"], "alpha": 0.0}]}))
    for row, reward, again in zip(table.rows, table.reward.tolist(), mixed.reward.tolist(), strict=True):
        if row.sibling_set:
            assert reward == again == row.worth == worth([row])[row.id]  # and not transformed twice
            drawn.setdefault(row.sibling_set, {})[row.node] = reward
    rounds = {}
    for name, candidates in drawn.items():
        chosen = next(node for node in candidates if grown.line.names.get(node.partition("~")[0]) == node)
        number = chosen.partition("~")[2].partition(".")[0]
        totals = rounds.setdefault(number, [chosen.rpartition(".")[2], {}])
        for node, reward in candidates.items():
            lot = node.rpartition(".")[2]
            totals[1][lot] = totals[1].get(lot, 0.0) + reward
        assert name
    for chosen, totals in rounds.values():
        assert totals[chosen] >= max(totals.values()) - 1e-9


class Terse(Speaker):
    """Says one of few things, so that siblings often say the same; each sample has its own name."""

    def act(self, call):
        answer = super().act(call)
        meta = {**answer.meta, "tokens_out": 1, "sample": DecisionId(call.episode, call.node)}
        return Answer("abb"[: 1 + len(answer.text) % 2], meta)


@pytest.mark.parametrize("continuation", ["greedy", "softmax", "random"])
@pytest.mark.parametrize("fail", [0.0, 0.2])
def test_candidates_that_say_the_same_are_one_fork(continuation, fail, monkeypatch):
    """What comes of it (rows, chains, traces, samples) is what a fork for each gives."""
    again, forks = Execution._again, []

    def counted(self, *args, **how):
        forks.append(self)
        return again(self, *args, **how)

    monkeypatch.setattr(Execution, "_again", counted)

    def grown(seed):
        where = arena()
        root = Branch.begin(where, team(where, Terse(fail=fail)), where.task("t0"), seed, "e")
        tree = asyncio.run(TreeSampler(root, Tree(6, "step", continuation), {"team"}, seed).grow())
        candidates = sorted(
            ((c.trace.to_dict(), [n.meta.sample for n in c.trace.nodes], c.names) for c in tree.candidates),
            key=lambda candidate: str(candidate[2]),
        )
        line = tree.trace
        samples = [n.meta.sample for n in line.acts()]
        assert samples == [DecisionId("e", tree.line.names[n.id]) for n in line.acts()]
        return sorted(tree.rows, key=lambda row: row.id), candidates, line.to_dict(), tree.lost

    seeds = range(4)
    shared, few = [grown(seed) for seed in seeds], len(forks)
    forks.clear()
    monkeypatch.setattr(TreeSampler, "_shares", False)
    assert [grown(seed) for seed in seeds] == shared
    assert few < len(forks) / 2


def test_rollouts_credit_what_comes_late():
    grown, _, _ = grow(Tree(3, "rollout"), seed=3)
    drawn = [row for row in grown.rows if row.sibling_set]
    assert drawn and all("outcome" in row.credit for row in drawn)
    assert all(not row.trainable for row in grown.rows if not row.sibling_set)


def test_a_conversation_goes_on_from_the_winners_sample():
    """A role's own earlier words bear the name under which their sample is kept, so the engine's tokens go on."""
    for seed in range(20):
        grown, speaker, _ = grow(Tree(3), seed=seed)
        for call in speaker.calls:
            for message in call.messages:
                if message["role"] == "assistant":
                    assert (
                        message["content"].node == grown.line.names[message["content"].node.partition("~")[0]]
                    )
                    assert "~" in message["content"].node
                    return
    raise AssertionError("no planner spoke twice")


def test_fixed_players_are_not_branched():
    grown, _, _ = grow(Tree(4), seed=1, fixed=("planner", "judge"))
    assert {row.role for row in grown.rows if row.sibling_set} == {"worker"}
    assert all(not row.trainable for row in grown.rows if row.role != "worker")
    Table(grown.rows).following  # noqa: B018


def test_a_failed_candidate_is_left_out_and_counted():
    lost = 0
    for seed in range(10):
        grown, _, _ = grow(Tree(4), seed, fail=0.1)
        lost += sum(grown.lost.values())
        assert not any(n.meta.get("policy") is None for n in grown.line.play.canonical() if n.kind == "act")
    assert lost


class Sealer:
    """The part of a model group that a collector talks to."""

    def __init__(self):
        self.sealed = {}

    async def seal(self, episode, keep):
        assert episode not in self.sealed
        self.sealed[episode] = sorted(keep)

    async def drop(self, episode, cause):
        pass


def test_the_collector_seals_trees():
    where, group = arena(), Sealer()
    collector = Collector(
        where, team(where, Speaker()), {"main": group}, {"team": "main"}, trained={"team"}, concurrency=4
    )
    harvest = asyncio.run(collector.collect(["t0", "t1"], Draws(2, 0, "s"), tree=Tree(3)))
    assert len(harvest.traces) == 4 == len(group.sealed)
    assert sum(map(len, group.sealed.values())) == len(harvest.decisions)
    table = Table(harvest.decisions)
    algorithm = make_algorithm("at_grpo", tree=3)
    signals = algorithm.advantages(table, table.mine("team"), {})
    assert any(s.advantage for s in signals)
    assert algorithm.metrics(table, table.mine("team"), signals)["groups/span_tasks"] == 0
    assert {len(c.trace.nodes) for tree in harvest.grown for c in tree.candidates} <= {1, 2}


def test_what_cannot_be_a_tree_is_refused_at_once():
    with pytest.raises(WorkflowError, match="tool 'look', which cannot be forked"):
        check_forks(arena("unforkable"), "at_grpo")
    check_forks(arena("session"), "at_grpo")
    with pytest.raises(ValueError, match="width 1"):
        grow(Tree(1))
    with pytest.raises(ValueError, match="tree is 1"):
        make_algorithm("at_grpo", tree=1)


def test_forks_are_nearly_free():
    """Tree sampling with K=8 asks for the same acts as K flat calls per act, and adds little time of its own."""

    async def flat(where, acts):
        speaker, done = Speaker(), 0
        for seed in range(10_000):
            trace = await aplay(where.start(where.task("t0"), seed), team(where, speaker), where, "e")
            done += len(trace.acts())
            if done >= acts:
                return done
        return done

    async def treed(where):
        acts = 0
        for seed in range(20):
            root = Branch.begin(where, team(where, Speaker()), where.task("t0"), seed, "e")
            acts += len((await TreeSampler(root, Tree(8), {"team"}, seed).grow()).rows)
        return acts

    where = arena()
    asyncio.run(treed(where))
    began = time.process_time()
    acts = asyncio.run(treed(where))
    tree_time = (time.process_time() - began) / acts
    began = time.process_time()
    done = asyncio.run(flat(where, acts))
    flat_time = (time.process_time() - began) / done
    assert tree_time - flat_time < 2e-3  # seconds an act: a thousandth part of what a model takes for one
    print(f"\nan act costs {1e6 * flat_time:.0f} µs flat, {1e6 * tree_time:.0f} µs in a tree")


def test_a_tree_that_fails_leaves_no_line_playing():
    class Slow(Speaker):
        async def act(self, call):
            self.calls.append(call)
            await asyncio.sleep(0 if len(self.calls) <= 6 else 60)  # all but the first line wait long
            return Answer(
                f"a{len(self.calls)}", {"policy": "team", "version": 0, "tokens_out": 1, "sample": "x"}
            )

    seen = []

    def worth(rows):
        seen.append(rows)
        if len(seen) == 2:
            raise ValueError("no such component")
        return {row.id: 0.0 for row in rows}

    async def go():
        where = arena()
        root = Branch.begin(where, team(where, Slow()), where.task("t0"), 0, "e")
        with pytest.raises(ValueError, match="no such component"):
            await TreeSampler(root, Tree(2, "step", "all"), {"team"}, 0, None, worth).grow()
        return asyncio.all_tasks() - {asyncio.current_task()}

    assert not asyncio.run(go())
