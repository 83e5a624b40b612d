"""A branch: an execution that can be forked, with its ledger and its team.

Trees (trainers/controller/tree.py), search (search.py) and counterfactuals are made of branches. A fork generates
nothing: it replays the journal in microseconds. Forks have the episode's random numbers, so that they can be compared
fairly. Only the seeds of their calls differ. These depend on the branch's label.

    root = Branch.begin(arena, team, task, seed=0, episode="e")
    twins = [root.fork(str(i)) for i in range(4)]
    await asyncio.gather(*(twin.round() for twin in twins))       # four replies to the same question
    await twins[2].finish()                                       # play one of them to its end
"""

from __future__ import annotations

import asyncio
import inspect
import re
import sys
from collections.abc import Hashable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace

from ...agents.answers import Answer, ReplyMeta
from ...agents.basics.failures import Boundary, Ended, WorkflowError
from ...agents.basics.threads import ordinary
from ...agents.policies import Call, Message
from ...agents.team import BoundTeam, Team
from ...agents.text.attributed_text import Spoken
from .arena import Arena
from .drivers import accept, answer_of, ask, call_for, derive, play
from .execution import Execution
from .ledger import Scorer
from .records import Node
from .tasks import Task
from .trace import Trace
from .workflow import Workflow


@dataclass(slots=True)
class DrawnRound:
    """Replies to the open requests of a branch, sampled and not yet given to the branch."""

    label: str
    names: dict[str, str]
    """Name of the sample behind each node, by node id."""
    answers: dict[str, str | Answer] = field(default_factory=dict)
    error: Exception | None = None
    """Failure of a policy. A round with an error cannot be given to the branch."""

    def content(self) -> Hashable:
        """Return everything in the replies that workflows and rules can depend on. Equal content has equal
        consequences.
        """
        return tuple(_content(self.answers[node]) for node in self.names)


def _content(answer: str | Answer) -> Hashable:
    if isinstance(answer, str):
        return answer
    meta = ReplyMeta.of(answer.meta)
    if meta.tokens or meta.more or meta.prompt_cut or meta.cost is not None:
        return id(answer)  # like no other
    return (
        answer.text, meta.policy, meta.version, meta.switches, meta.tokens_in, meta.tokens_out, meta.finish_reason,
        meta.thinking, meta.sample is None,
    )  # fmt: skip


class Branch:
    """Execution with its ledger, team and forks. `label` distinguishes the samples of one branch from those of its
    siblings.
    """

    def __init__(
        self, arena: Arena, team: BoundTeam, play: Execution, scorer: Scorer, episode: str = "",
        label: str = "", names: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.arena, self.team, self.play, self.scorer = arena, team, play, scorer
        self.episode, self.label = episode, label
        self.names: dict[str, str] = dict(names or {})  # node id -> name of its sample
        self._booked: tuple[int, Ended] | None = None  # credits are booked up to this round and ending

    @classmethod
    def begin(cls, arena: Arena, team: BoundTeam, task: Task, seed: int, episode: str = "") -> Branch:
        """Begin a new episode, and play it to its first requests."""
        return cls(arena, team, arena.start(task, seed), arena.scorer(task), episode)

    def fork(self, label: str = "", at: str | None = None, seed: int | None = None) -> Branch:
        """Fork the branch in its present state, or in the state before node `at`. The calls of the fork have the label
        `label`.
        """
        play = self.play.fork(at, seed)
        scorer = self.scorer.fork() if at is None else self.arena.scorer(self.play.task)
        if at is not None:
            scorer.advance(play.trace, play.round)
        return Branch(self.arena, self.team, play, scorer, self.episode, label, self.names)

    @property
    def asked(self) -> list[Node]:
        """Return the open acts."""
        return [node for node in self.play.pending if node.kind == "act"]

    @property
    def over(self) -> bool:
        """Flag: the episode has ended."""
        return self.play.ended is not Ended.NO

    @property
    def trace(self) -> Trace:
        """Return the graph trajectory so far, with its rewards."""
        return self.arena.label(self.scorer.show(self.play.trace))

    def credits(self, node: str) -> dict[str, float]:
        """Return the amounts that a node has earned so far, by component."""
        amounts: dict[str, float] = {}
        for credit in self.scorer.booked:
            if credit.node == node:
                amounts[credit.component] = amounts.get(credit.component, 0.0) + credit.amount
        return amounts

    async def tools(self) -> None:
        """Use the requested tools until an act is open or the episode is over."""
        while uses := [node for node in self.play.pending if node.kind == "use"]:
            await asyncio.gather(*(self.arena.toolbox.acall(self.play, node) for node in uses))
            self._book()
        if self.over:
            self.close()

    async def round(self) -> None:
        """Answer all open acts once, and then use tools until an act is open again."""
        await self.tools()
        asked = self.asked
        if len(asked) == 1:
            await self._say(asked[0])
        else:
            await asyncio.gather(*(self._say(node) for node in asked))
        self._book()
        await self.tools()

    async def draws(self, labels: Sequence[str]) -> list[DrawnRound]:
        """Sample one reply to each open act for each label, as a fork with that label samples it. The branch does not
        change.
        """
        calls = {node.id: self._call(node) for node in self.asked}  # told once for all of them
        return await asyncio.gather(*(self._drawn(label, calls) for label in labels))

    async def _drawn(self, label: str, calls: Mapping[str, Call]) -> DrawnRound:
        drawn = DrawnRound(label, {node: _name(node, label) for node in calls})

        async def say(node: str, call: Call) -> None:
            policy = self.team.names.get(call.agent)
            try:
                drawn.answers[node] = await answer_of(self.team, _labelled(call, label))
            except BaseException as raised:
                error = ordinary(raised)
                drawn.error = drawn.error or error
                self.team.failures.failed(policy, error)
            else:
                self.team.failures.answered(policy)

        if len(calls) == 1:
            await say(*next(iter(calls.items())))
        else:
            await asyncio.gather(*(say(node, call) for node, call in calls.items()))
        return drawn

    async def give(self, draw: DrawnRound) -> None:
        """Continue with sampled replies until the next acts are open."""
        self.label = draw.label
        self.names.update(draw.names)
        if draw.error is not None:
            self.play.abort(draw.error, Boundary.POLICY)
        for node in self.asked if draw.error is None else ():
            await accept(self.play, node, draw.answers[node.id])
        self._book()
        await self.tools()

    def answered(self, nodes: Sequence[str]) -> dict[str, Node]:
        """Return the nodes with these ids, by id."""
        return {id: self.play.node(id) for id in nodes}

    def twins(self, nodes: Sequence[str], draw: DrawnRound) -> dict[str, Node]:
        """Return the nodes with these ids, with the replies of another draw that has the same content."""
        twins = {id: copy(self.play.node(id)) for id in nodes}
        for id, twin in twins.items():
            answer = draw.answers[id]
            if twin.reply is not None and isinstance(answer, Answer):
                twin.meta = replace(twin.meta, sample=ReplyMeta.of(answer.meta).sample)
        return twins

    def exchange(self, twins: Mapping[str, Node], names: Mapping[str, str]) -> None:
        """Replace the given draw by another one with the same content, so that its samples belong to the nodes."""
        for twin in twins.values():
            self.play.exchange(twin)
        self.names.update(names)

    async def finish(self) -> Branch:
        """Play the episode to its end."""
        while not self.over:
            await self.round()
        self.close()
        return self

    def close(self) -> None:
        """Close the simulators of this branch, and book the known credits."""
        self.arena.toolbox.close(self.play)
        self._book()

    def _book(self) -> None:
        """Book new credits. There are none unless a round was completed, or the episode ended, since the last call."""
        now = self.play.round, self.play.ended
        if now != self._booked and (self.scorer.rules or self.over):
            self.scorer.advance(self.play.trace, self.play.round)
        self._booked = now

    async def _say(self, node: Node) -> None:
        self.names[node.id] = _name(node.id, self.label)
        await ask(self.play, node, self.team, _labelled(self._call(node), self.label))

    def _call(self, node: Node) -> Call:
        call = call_for(self.play, node, self.episode, reference=self.team.sees(node.agent))
        call.messages = self._as_sampled(call)
        return call

    def _as_sampled(self, call: Call) -> Sequence[Message]:
        """Return a call in which the agent's earlier replies have the names of their samples, so that their tokens are
        used again.
        """
        return tuple(
            {**m, "content": Spoken(words, self.names[words.node])}
            if isinstance(words := m["content"], Spoken)
            and self.names.get(words.node, words.node) != words.node
            else m
            for m in call.messages
        )


def _name(node: str, label: str) -> str:
    """Return the name of the sample that a branch with this label gets for a node."""
    return f"{node}~{label}" if label else node


def _labelled(call: Call, label: str) -> Call:
    """Return the call with the seed and the name that a branch with this label uses."""
    own = copy(call)
    if label:
        own.seed = derive(call.seed, label)
    own.node = _name(call.node, label)
    return own


def check_forks(arena: Arena, what: str) -> None:
    """Refuse an environment with a tool that forbids forks, before anything is played."""
    for name in arena.workflow.tools:
        entry = arena.toolbox.tools.get(name)
        if entry is not None and entry.kind == "unforkable":
            raise WorkflowError(
                f"{what} forks episodes, and {arena.env_id} uses the tool {name!r}, which cannot be forked; "
                "give it a tool of kind 'pure' (its result depends on its arguments alone) or 'session'"
            )


STATELESS = (
    "it compares acts from the same state of the world, and no act named a state; name it, ep.act(…, anchor=STATE), or "
    "choose an algorithm that does without"
)


def check_anchors(arena: Arena, what: str) -> None:
    """Refuse an environment whose code names no states. One episode is played without a model to check it.

    If the code uses `anchor=`, other paths may name states. Then the check is left to training.
    """
    team = Team({"*": "scripted" if arena.expert else "random"}).bind(arena.roles, arena.expert)
    try:
        trace = play(arena.start(arena.task(arena.task_ids[0]), 0), team, arena)
    except Exception:
        return  # the episode failed before it showed anything; training reports the error
    if (
        trace.acts()
        and not any(node.anchor for node in trace.acts())
        and not _may_name_states(arena.workflow)
    ):
        raise WorkflowError(
            f"{what} compares acts from the same state of the world, and {arena.env_id} names no state; name it, "
            "ep.act(…, anchor=STATE), or choose an algorithm that does without"
        )


def _may_name_states(workflow: Workflow) -> bool:
    """Tell whether a module of the workflow's classes contains `anchor=`, or cannot be read."""
    own = [cls for cls in type(workflow).__mro__ if cls not in Workflow.__mro__]
    try:
        return any(re.search(r"\banchor\s*=", inspect.getsource(sys.modules[cls.__module__])) for cls in own)
    except (OSError, TypeError, KeyError):
        return True
