"""Tree sampling: for each act of a trained role, several candidates are sampled from the same state.

    state --+-- candidate 0      scored at once, by a fork to the end, or by a critic (`Tree.score`)
            +-- candidate 1  <-- chosen (`Tree.continuation`): the next role sees *its* reply
            +-- candidate 2      not continued, but also training data

A candidate belongs to one round. If several agents act in the same round, each of the K candidates holds one reply of
each agent. Siblings answer the same prompt in the same state, with the same later random numbers. So their credits can
be compared, and AT-GRPO compares nothing else. Every sibling, the chosen one included, gets the credit that was known
*when it was scored*. After the credit transforms, this number decides the choice and gives the advantage. Later rewards
of the chosen candidate are in the episode's trace. The table holds them only as targets of a critic (`Decision.later`,
`score="value"`).

Forks are replays, and the effect of a candidate depends only on its text. So candidates with equal text share one fork,
each with its own sample, unless each is played to its end or scored by itself (`TreeSampler._shares`).

Names: all samples of a tree belong to one episode, each with a node name of its own: `3~2` is candidate 2 of
node 3. The continued branch is one chain per agent. A candidate that is not continued ends a chain of its own.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ...agents.answers import DecisionId
from ...agents.basics.failures import Boundary, Ended
from ...envs.core.branch import Branch, DrawnRound
from ...envs.core.drivers import derive
from ...envs.core.execution import path_key
from ...envs.core.ledger import Credit
from ...envs.core.records import ANSWERED
from ...envs.core.trace import Trace
from ...envs.core.workflow import Node
from ..algorithms.algorithm import Tree
from .statistics.decisions import prompt_hash, row_of
from .statistics.table import Decision

EXPECTED = "value"
"""Component under which traces show a candidate's expected later reward."""

LEAVES = 32
"""Largest number of leaves of one tree with `continuation="all"`. Beyond it the tree continues greedily."""

Judge = Callable[[dict[str, list[DecisionId]]], Awaitable[dict[DecisionId, float]]]
"""Function that returns, for decision ids of a policy, what its critic expects after them (`score="value"`)."""

Worth = Callable[[Sequence[Decision]], Mapping[DecisionId, float]]
"""Function from decisions to their rewards by id, after the credit transforms."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Round of one candidate as a trace of its own, with the names of the samples on its path."""

    trace: Trace
    names: dict[str, str]


@dataclass(slots=True)
class Grown:
    """Finished tree."""

    line: Branch
    """Continued branch (with `all`: the branch that always continues with the best candidate)."""
    rows: list[Decision] = field(default_factory=list)
    candidates: list[Candidate] = field(default_factory=list)
    """Round of every candidate, with its credits: data for preference learning."""
    leaves: list[Branch] = field(default_factory=list)
    """Ends of the branches."""
    lost: Counter[str] = field(default_factory=Counter)
    """Number of candidates that failed because of infrastructure, by cause."""

    @property
    def trace(self) -> Trace:
        """Return the graph trajectory of the continued branch."""
        return self.line.trace


@dataclass(slots=True)
class _Candidate:
    branch: Branch  # may be shared by candidates with equal text
    nodes: dict[str, Node]  # of its round, by id: its own
    names: dict[str, str]  # of their samples
    label: str
    line: str | None = None  # label of the branch it was sampled on; None: it has no siblings
    credit: dict[str, dict[str, float]] = field(default_factory=dict)  # node id -> component -> amount
    rows: list[Decision] = field(default_factory=list)
    score: float = 0.0


class TreeSampler:
    """Sampler that builds the tree of one episode."""

    def __init__(
        self, root: Branch, tree: Tree, trained: Collection[str], seed: int, judge: Judge | None = None,
        worth: Worth | None = None,
    ) -> None:  # fmt: skip
        if tree.width < 2:
            raise ValueError(f"a tree of width {tree.width}: 2 or more candidates can be compared")
        if tree.score == "value" and judge is None:
            raise ValueError('tree score "value" needs a critic to ask')
        self.root, self.tree, self.seed, self.judge, self.worth = root, tree, seed, judge, worth
        self.trained = trained
        self.grown = Grown(root)
        self._beside: list[asyncio.Task[Branch]] = []
        self._leaves = 1
        limit = root.arena.budget.seconds
        self._deadline = None if limit is None else time.monotonic() + limit

    async def grow(self) -> Grown:
        """Play the episode to its end, with K candidates at each act."""
        try:
            self.grown.line = await self._extend(self.root)
        except BaseException:  # nobody waits for the other lines any more
            for line in self._beside:
                line.cancel()
            await asyncio.gather(*self._beside, return_exceptions=True)
            raise
        return self.grown

    async def _extend(self, line: Branch, first: _Candidate | None = None) -> Branch:
        """Continue a branch to its leaf, and also the branches that part from it."""
        label = line.label
        chains = _Chains(self.root.episode, label)
        mine: list[Decision] = []
        if first is not None:  # the candidate with which this branch began
            mine += map(chains.add, first.rows)
        beside: list[asyncio.Task[Branch]] = []
        await line.tools()
        while not line.over:
            if self._deadline is not None and time.monotonic() > self._deadline:
                line.play.truncate(f"more than {line.arena.budget.seconds} s")
                break
            if not self._branches(line):
                asked = [node.id for node in line.asked]
                await line.round()
                alone = _Candidate(line, line.answered(asked), line.names, label)
                alone.credit = {n: line.credits(n) for n in asked}
                mine += map(chains.add, self._rows(alone))
                continue
            state = label, line.play.round
            candidates = await self._candidates(line)
            if not candidates:  # all candidates failed in the same way, so the episode failed
                break
            await self._score(candidates, mine)
            ranked = self._ranked(candidates, *state)
            kept = self._kept(len(ranked))
            mine += map(chains.add, ranked[0].rows)
            beside += [asyncio.create_task(self._extend(other.branch, other)) for other in ranked[1:kept]]
            self._beside += beside[len(beside) - kept + 1 :]
            line = ranked[0].branch
            line.exchange(ranked[0].nodes, ranked[0].names)
            line.label = label
            for lost in ranked[kept:]:
                own = _Chains(self.root.episode, lost.label)
                self.grown.rows += own.end([own.add(row) for row in lost.rows], lost.branch)
                if lost.branch.over:
                    self._look_back(lost.rows, lost.branch)
                if lost.branch is not line:
                    lost.branch.close()
        line.close()
        self.grown.rows += chains.end(mine, line)
        self._look_back(mine, line)
        self.grown.leaves.append(line)
        await asyncio.gather(*beside)
        return line

    def _branches(self, line: Branch) -> bool:
        """Tell whether a trained policy acts next. Replies of fixed players are not compared."""
        return any(line.team.names.get(node.agent or "") in self.trained for node in line.asked)

    async def _candidates(self, line: Branch) -> list[_Candidate]:
        """Return K branches that are one round further: forks, and the branch itself, whose earlier state is not needed
        again.
        """
        asked, own = [node.id for node in line.asked], line.label
        at = f"{own}-" if own else ""
        labels = [f"{at}{line.play.round}.{i}" for i in range(self.tree.width)]
        draws = await line.draws(labels)
        if all(draw.error is not None for draw in draws):
            await line.give(draws[0])
        alike: dict[object, list[DrawnRound]] = {}
        for draw in draws:
            if draw.error is None:
                alike.setdefault(draw.content() if self._shares else draw.label, []).append(draw)
            else:
                self.grown.lost[f"{Boundary.POLICY}: {draw.error}"] += 1
        sets = list(alike.values())
        branches = [*(line.fork(same[0].label) for same in sets[:-1]), line]  # before the line moves
        await asyncio.gather(*(b.give(same[0]) for b, same in zip(branches, sets, strict=False)))
        sound: list[_Candidate] = []
        for branch, same in zip(branches, sets, strict=False):
            play = branch.play
            if play.ended is Ended.ERROR:
                self.grown.lost[f"{play.reason}: {play.exception}"] += len(same)
                continue
            for draw in same:
                nodes = branch.answered(asked) if draw is same[0] else branch.twins(asked, draw)
                sound.append(_Candidate(branch, nodes, draw.names, draw.label, own))
        if not sound and not line.over:
            failed = branches[0].play
            line.play.abort(failed.exception or RuntimeError("every candidate failed"), failed.reason)
        order = {label: i for i, label in enumerate(labels)}
        return sorted(sound, key=lambda c: order[c.label])

    @property
    def _shares(self) -> bool:
        """Tell whether candidates with equal text may share one fork.

        They may not if each is played to its end, or scored by the values of its own tokens.
        """
        return self.tree.score == "step" and self.tree.continuation != "all"

    # which one ---------------------------------------------------------------------------------------------

    async def _score(self, candidates: list[_Candidate], before: list[Decision]) -> None:
        """Return the score of each candidate, for its credit and the choice. `before` is the branch so far."""
        if self.tree.score == "rollout":
            await asyncio.gather(*(self._play_on(c) for c in candidates))
        else:
            for c in candidates:
                c.credit = {node: c.branch.credits(node) for node in c.nodes}
        asked: dict[
            str, _Place
        ] = {}  # siblings answer the same prompt at the same place, so it is stored once
        for c in candidates:
            c.rows = self._rows(c, asked)
            self.grown.candidates.append(Candidate(_round_of(c), {**c.branch.names, **c.names}))
        drawn = [row for c in candidates for row in c.rows]
        worth = self._worths(drawn, before)
        if self.tree.score == "value":
            await self._foresee(candidates)
        for row in drawn:
            row.worth = worth[row.id] + row.credit.get(EXPECTED, 0.0)
        for c in candidates:
            c.score = math.fsum(row.worth or 0.0 for row in c.rows)

    def _worths(
        self, rows: Sequence[Decision], before: Sequence[Decision] = ()
    ) -> Mapping[DecisionId, float]:
        """Return the rewards of decisions. Credit transforms may need earlier decisions (`before`)."""
        if self.worth is None:
            return {row.id: math.fsum(row.credit.values()) for row in rows}
        alone = [
            replace(row, chain=row.id, order=0, ended="terminal", worth=None) for row in (*before, *rows)
        ]
        return self.worth(alone)

    def _look_back(self, rows: list[Decision], line: Branch) -> None:
        """Set the later reward of each decision's chain: the target of a critic."""
        if self.tree.score != "value":
            return
        ids, trace = {name: id for id, name in line.names.items()}, line.trace
        whole = self._worths([replace(row, credit=trace.rewards(ids[row.node]), worth=None) for row in rows])
        later: dict[str, float] = {}
        for row in reversed(rows):  # of one chain the last first
            counted = 0.0 if row.worth is None else row.worth - row.credit.get(EXPECTED, 0.0)
            row.later = later.get(row.chain, 0.0) + whole[row.id] - counted
            later[row.chain] = row.later + counted

    async def _play_on(self, candidate: _Candidate) -> None:
        """Play a fork of the candidate to its end. Its acts are counted, and never trained on."""
        label = f"r{candidate.label}"
        probe = await candidate.branch.fork(label).finish()
        candidate.credit = {node: probe.credits(node) for node in candidate.nodes}
        rest = [n for n in probe.play.canonical() if n.kind == "act" and n.id not in candidate.branch.names]
        rest_of_line = _Candidate(probe, {n.id: n for n in rest}, probe.names, label)
        rest_of_line.credit = {n.id: probe.credits(n.id) for n in rest}
        own = _Chains(self.root.episode, label)
        for row in own.end([own.add(row) for row in self._rows(rest_of_line)], probe):
            row.trainable = False
            self.grown.rows.append(row)

    async def _foresee(self, candidates: list[_Candidate]) -> None:
        """Add the critic's expectation after each candidate. After the end of an episode it is 0."""
        assert self.judge is not None
        asked: dict[str, list[DecisionId]] = {}
        rows = {row.id: row for c in candidates if not c.branch.over for row in c.rows if row.trainable}
        for row in rows.values():
            asked.setdefault(row.policy, []).append(row.id)
        for id, expected in (await self.judge(asked)).items():
            rows[id].credit = {**rows[id].credit, EXPECTED: expected}

    def _ranked(self, candidates: list[_Candidate], label: str, round: int) -> list[_Candidate]:
        """Return the candidates with the one to continue first. `label` and `round` name their common state."""
        chance = random.Random(derive("tree", self.seed, label, round))
        how = self.tree.continuation
        if how in ("softmax", "random"):
            best = max(c.score for c in candidates)
            weights = [math.exp(c.score - best) if how == "softmax" else 1.0 for c in candidates]
            chosen = chance.choices(candidates, weights)[0]
        else:
            chosen = max(candidates, key=lambda c: c.score)  # of equals the first
        return [chosen, *(c for c in candidates if c is not chosen)]

    def _kept(self, count: int) -> int:
        """Return how many of `count` candidates are continued."""
        if self.tree.continuation != "all" or self._leaves + count - 1 > LEAVES:
            return 1
        self._leaves += count - 1
        return count

    # rows --------------------------------------------------------------------------------------------------

    def _rows(self, c: _Candidate, asked: dict[str, _Place] | None = None) -> list[Decision]:
        """Return the decisions of a candidate's round, without their chains.

        `asked` holds the place of each node. The first candidate of a set fills it.
        """
        asked = {} if asked is None else asked
        branch, rows = c.branch, []
        for id, node in c.nodes.items():
            if node.reply is None:  # the episode ended before the node was answered
                continue
            place = asked.get(id) or asked.setdefault(id, _place_of(node, branch))
            task, name = branch.play.task.id, c.names[id]
            row = row_of(node, task, self.root.episode, name, self.trained, place.prompt_hash)
            row.turn, row.parents = place.turn, place.parents
            row.credit, row.env_id = c.credit.get(id, {}), branch.arena.env_id
            if c.line is not None:
                row.sibling_set = f"{self.root.episode}/{id}~{c.line}"
            rows.append(row)
        return rows


class _Chains:
    """Chains of one branch, one for each agent."""

    def __init__(self, episode: str, label: str) -> None:
        self.prefix = f"{episode}~{label}" if label else episode
        self.length: Counter[str] = Counter()
        self.last: dict[str, Decision] = {}

    def add(self, row: Decision) -> Decision:
        row.chain, row.order = f"{self.prefix}/{row.agent}", self.length[row.agent]
        self.length[row.agent] += 1
        self.last[row.agent] = row
        return row

    def end(self, rows: list[Decision], branch: Branch) -> list[Decision]:
        """End the chains of a branch: the episode is over, or the branch is not continued."""
        for row in self.last.values():
            row.ended = "terminal" if branch.play.ended is Ended.TERMINAL else "truncated"
        return rows


class _Place(NamedTuple):
    """Facts that all siblings of a node share."""

    prompt_hash: str
    turn: int
    parents: tuple[str, ...]


def _place_of(node: Node, branch: Branch) -> _Place:
    earlier = [n for n in branch.play.nodes if n.kind == "act" and n.round < node.round]
    turn = sum(n.agent == node.agent for n in earlier)
    return _Place(prompt_hash(node), turn, tuple(branch.names.get(parent, parent) for parent in node.parents))


def _round_of(c: _Candidate) -> Trace:
    """Return a candidate's round as a trace of its own."""
    play, nodes = c.branch.play, c.nodes.values()
    part = c.branch.arena.label(Trace(task_id=play.task.id, seed=play.seeds[-1][1], ended="truncated"))
    part.nodes = sorted((n for n in nodes if n.state == ANSWERED), key=path_key)
    part.credits = [
        Credit(node, name, x) for node, amounts in c.credit.items() for name, x in amounts.items()
    ]
    return part
