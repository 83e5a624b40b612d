"""Execution: an episode in play, without any input or output of its own.

`Execution` runs a workflow's coroutine to its next requests and waits. A driver answers them (`answer`, `give`,
`fail`), in any order. When the last request of a *round* is answered, the branches resume in path order and the next
round begins. So an episode is a function of its replies alone: the one-at-a-time AEC interface and a collector with
shuffled arrivals give the same trace.

The journal is the list of answered nodes. The state is config + task + seeds + journal. `fork` and `replay` give the
journal to a new coroutine, and pickling does the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace

from ...agents.answers import NOTHING_KNOWN, ReplyMeta
from ...agents.basics.failures import Boundary, Ended, WorkflowError
from ...agents.basics.frozen import freeze
from ...agents.roles import Reply
from ...agents.text.reply_readers import MAX_REPLY
from .journal import ReplayDivergence
from .records import ANSWERED, PENDING, Act, Budget, Node, path_key
from .rounds import Rounds
from .tasks import Task
from .workflow import Workflow

__all__ = ["Budget", "Ended", "Execution", "ReplayDivergence", "path_key"]


class Execution(Rounds):
    """One episode in play. `pending` lists its open requests. When all are answered, the episode continues."""

    # what drivers do -----------------------------------------------------------------------------

    def answer(
        self,
        node: Node,
        text: str,
        meta: ReplyMeta | Mapping[str, object] | None = None,
        reply: Reply | None = None,
    ) -> Reply:
        """Answer an act with `text`, which the act's format parses. After the round's last answer, `run` continues.

        `reply` is the result of `read` for this text, if a driver has already called it.
        """
        if node.state != PENDING or type(node) is not Act:
            raise WorkflowError(f"node {node.id} waits for no reply")
        if meta is None or meta is NOTHING_KNOWN:
            read = node.read
        else:
            known = node.meta = ReplyMeta.of(meta)
            self.tokens += known.tokens_used
            read = node.read if known.thinking is None and known.cut is None else None
        if read and reply is None and len(text) <= MAX_REPLY and "think>" not in text.lower():
            reply = read(text, node.id)
        else:
            reply = self._examined(node, text, reply)
        node.reply = reply
        if self._only is None:
            self._settle(node)
        else:
            node.state = ANSWERED
            self._advance()
        return reply

    def _examined(self, node: Node, text: str, reply: Reply | None) -> Reply:
        """Read a reply with the slow path: the format of its role does not decide alone."""
        if len(text) > MAX_REPLY:
            node.meta = replace(node.meta, cut=len(text))
        return self.read(node, text, node.meta) if reply is None else reply

    def give(self, node: Node, result: object, private: object = None) -> None:
        """Answer a tool use with its result. `private` is for rewards and the trace, and is never shown to `run`."""
        if node.state != PENDING:
            raise WorkflowError(f"node {node.id} was answered already")
        node.result = freeze(result)
        if private is not None:
            node.private = freeze(private)
        if self._only is None:
            self._settle(node)
        else:
            node.state = ANSWERED
            self._advance()

    def fail(self, node: Node, message: str) -> None:
        """Answer a tool use with a failure. `run` gets a `ToolError` with this message."""
        if node.state != PENDING:
            raise WorkflowError(f"node {node.id} was answered already")
        node.error = message
        self._settle(node)

    def truncate(self, reason: str) -> None:
        """Truncate the episode here (a budget is spent, a deadline is past). `run` is closed without an exception that
        it can catch.
        """
        if self.ended is Ended.NO:
            self._end(Ended.TRUNCATED, reason)

    def abort(self, error: BaseException, reason: Boundary | str) -> None:
        """End the episode with an error from outside `run` (of a model, or of a tool's infrastructure)."""
        if self.ended is Ended.NO:
            self.exception = error
            self._end(Ended.ERROR, reason)

    def call_seed(self, node: Node) -> int:
        """Return the sampling seed of an act. It depends on the seed of its round and on its path."""
        seed = [s for start, s in self.seeds if node.round >= start][-1]
        return int.from_bytes(hashlib.blake2b(f"{seed}/{node.id}".encode(), digest_size=7).digest(), "big")

    # forks ---------------------------------------------------------------------------------------

    def fork(self, at: str | None = None, seed: int | None = None) -> Execution:
        """Fork the episode in its present state, or in the state before node `at`.

        The fork has the same random numbers, unless `seed` changes those of the rest.
        """
        if at is None:
            journal = {n.id: n for n in self.nodes if n.state == ANSWERED}
            start = self.round
        else:
            node = self.node(at)
            start = node.round
            journal = {
                n.id: n for n in self.nodes if n.state == ANSWERED and n.round <= start and n is not node
            }
        seeds = tuple((r, s) for r, s in self.seeds if r <= start)
        if seed is not None:
            seeds += ((start, seed),)
        return self._again(journal, seeds)

    def replay(self, substitute: Mapping[str, str]) -> Execution:
        """Replay the episode with some replies replaced and all later ones forced.

        A node whose prompt changes by this gets `meta["changed"]`. If the control flow changes, requests that the
        journal does not hold stay pending.
        """
        for name in substitute:
            if self.node(name).kind != "act":
                raise WorkflowError(f"replay: node {name} is a tool's; only replies can be substituted")
        journal = {n.id: n for n in self.nodes if n.state == ANSWERED}
        return self._again(journal, self.seeds, forced=substitute)

    def node(self, id: str) -> Node:
        """Return the node with this id. The error for an unknown id lists those that exist."""
        for node in self.nodes:
            if node.id == id:
                return node
        raise WorkflowError(f"no node {id!r} in this episode; it has {', '.join(n.id for n in self.nodes)}")

    def exchange(self, twin: Node) -> None:
        """Replace the node of the same id by one with equal content that comes from another sample."""
        self.nodes[self.nodes.index(self.node(twin.id))] = twin

    def _again(
        self,
        journal: Mapping[str, Node],
        seeds: tuple[tuple[int, int], ...],
        forced: Mapping[str, str] | None = None,
    ) -> Execution:
        return Execution(
            self.workflow, self.task, budget=self.budget, roles=self.roles,
            journal=journal, seeds=seeds, forced=forced,
        )  # fmt: skip

    def __reduce__(self) -> tuple[object, ...]:
        journal = [n for n in self.nodes if n.state == ANSWERED]
        ending = (self.ended, self.reason, None if self.exception is None else str(self.exception))
        return (_restore, (self.workflow, self.task, self.budget, self.seeds, journal, ending))


def _restore(
    workflow: Workflow,
    task: Task,
    budget: Budget,
    seeds: tuple[tuple[int, int], ...],
    journal: list[Node],
    ending: tuple[Ended, str, str | None],
) -> Execution:
    play = Execution(workflow, task, budget=budget, seeds=seeds, journal={n.id: n for n in journal})
    ended, reason, error = ending
    if ended is Ended.TRUNCATED:
        play.truncate(reason)
    elif ended is Ended.ERROR and play.ended is not Ended.ERROR:
        play.abort(RuntimeError(error), reason)
    return play
