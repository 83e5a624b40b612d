"""Rounds: the machine that plays a workflow.

`Rounds` runs `run` to its next requests. When the last of them is answered, the branches resume in path order, and
ask the next round. Ids are paths, so nothing depends on the order of arrival. `Execution` has what drivers and replays
need.
"""

from __future__ import annotations

from asyncio import _get_running_loop, _set_running_loop
from collections.abc import Iterable, Mapping

from ...agents.answers import NOTHING_KNOWN, ReplyMeta
from ...agents.basics.failures import Ended, ToolError, ToolFault, WorkflowError
from ...agents.basics.frozen import freeze
from ...agents.basics.hints import counted
from ...agents.basics.threads import ordinary
from ...agents.roles import Format, Reply, Role, read_reply
from ...agents.text.reply_readers import MAX_REPLY, split_thinking
from ...own import defined, told
from ..tools.tool import Session
from .endings import ending_of, outcome_of
from .fast import GOES_ON, NUMBERS
from .journal import forced, recalled, same_request
from .lines import Line, OpenJoin, begun, close, place_of
from .records import ANSWERED, DEFAULT_BUDGET, PENDING, Act, Budget, Node, Use, path_key
from .tasks import Task
from .trace import Trace
from .workflow import Episode, Join, Outcome, Workflow


class Rounds:
    """The branches of one episode, and the requests that they wait for."""

    reason = ""
    outcome: Outcome | None = None
    exception: BaseException | None = None
    grade: object = None
    _joins = 0  # how many there were
    _trace: Trace | None = None
    _grading = False

    def __init__(
        self,
        workflow: Workflow,
        task: Task,
        seed: int = 0,
        *,
        budget: Budget = DEFAULT_BUDGET,
        roles: Mapping[str, Role] | None = None,
        journal: Mapping[str, Node] | None = None,
        seeds: tuple[tuple[int, int], ...] | None = None,
        forced: Mapping[str, str] | None = None,
    ) -> None:
        self.workflow, self.task, self.budget = workflow, task, budget
        self.round = self.tokens = 0
        self.ended: Ended = GOES_ON
        self.roles = workflow.agents() if roles is None else roles
        self._most = budget.requests
        self.seeds = seeds or ((0, seed),)  # pairs (from this round on, this seed)
        self._reseeds = self.seeds[1:]
        # a new seed, or a limit of tokens, must be checked between rounds
        self._watched = bool(self._reseeds) or budget.tokens is not None
        self.nodes: list[Node] = []
        self._journal = journal
        self._forced = forced
        self.pending: list[Node] = []  # unanswered requests of this round, in path order
        self._turns = dict.fromkeys(self.roles, 0)
        self._resuming: list[Line] = []  # branches of the round, while they are resumed
        self.sessions: dict[str, Session] = {}  # open simulators, kept by the toolbox
        self._episode = Episode(task.view, self.seeds[0][1], self.roles, workflow.tools)
        self._root = Line(begun(workflow.run, self._episode), "", ())
        self._next = [self._root]  # branches that wait in this round, in path order
        self._only: Line | None = None if self._watched else self._root  # see `_only_line`
        self._advance()

    @property
    def trace(self) -> Trace:
        """Return the graph trajectory so far."""
        if self._trace is None:
            self._trace = Trace(task_id=self.task.id, seed=self.seeds[-1][1])
        trace = self._trace
        trace.nodes = self.canonical()
        trace.ended, trace.reason = self.ended, self.reason
        trace.outcome, trace.grade = self.outcome, self.grade
        trace.error = None if self.exception is None else told(self.exception)
        return trace

    def canonical(self) -> list[Node]:
        """Return the answered nodes in path order."""
        nodes = [n for n in self.nodes if n.state == ANSWERED]
        return sorted(nodes, key=path_key) if self._joins else nodes

    def read(self, node: Node, text: str, meta: ReplyMeta = NOTHING_KNOWN) -> Reply:
        """Parse a text with the node's format. A text over `MAX_REPLY`, or with unclosed thinking, is malformed."""
        format: Format = node.format  # type: ignore[attr-defined]
        role = self.roles[node.agent]  # type: ignore[index]
        if len(text) <= MAX_REPLY and (meta is NOTHING_KNOWN or meta.cut is None and meta.thinking != "open"):
            return read_reply(format, text, node.id, role.lenient)
        blank = format.parse("", node.id)
        if meta.thinking == "open":  # its prompt had begun it
            return blank._replace(text="", ok=False, thinking=text)
        thinking, words, _ = split_thinking(text[:MAX_REPLY])
        return blank._replace(text=words, ok=False, thinking=thinking)

    def _settle(self, node: Node) -> None:
        """Store an answer. After the round's last answer, `run` continues."""
        node.state = ANSWERED
        pending = self.pending
        if len(pending) > 1:
            self.pending = [n for n in pending if n is not node]
        elif pending:  # after the end no request is open
            self._advance()

    def _advance(self) -> None:
        """Resume the branches of the finished round, and continue as long as the journal holds the answers."""
        loop = _get_running_loop()
        if loop is not None:  # `run` must not see it
            _set_running_loop(None)
        try:
            while True:
                if self._only is not None:
                    self._follow(self._only)
                else:
                    self._resume()
                    self._only = self._only_line()
                if self.pending or self.ended is not GOES_ON:
                    return
        finally:
            if loop is not None:
                _set_running_loop(loop)

    def _only_line(self) -> Line | None:
        """Return the branch that waits, if it is the only one, no join waits for it, and nothing is to do between rounds."""
        only = not self._watched and len(self._next) == 1 and self._next[0].join is None
        return self._next[0] if only else None

    def _resume(self) -> None:
        """Resume every branch of the finished round until its next request."""
        if self.budget.tokens is not None and self.tokens > self.budget.tokens:
            self._end(Ended.TRUNCATED, f"more than {counted(self.budget.tokens, 'token', form='d')}")
            return
        self._resuming = resuming = self._next
        self._next, self.pending = [], []
        self.round += 1
        for start, seed in self._reseeds:
            if start + 1 == self.round:  # requests of round `start` were made before the fork
                self._episode.rng.seed(seed)
        for branch in resuming:
            if branch.cancelled:
                continue
            node = branch.node
            if node.error is None:
                reply = node.reply
                self._run(branch, node.result if reply is None else reply)  # an act's, or a tool's
            else:
                fault = ToolError if node.meta.raised is None else ToolFault
                self._run(branch, None, fault(node.error))
            if self.ended is not GOES_ON:
                return

    def _follow(self, line: Line) -> None:
        """Play the only branch as long as the journal holds its answers (`fast.py` tells what this gains)."""
        nodes, journal, turns = self.nodes, self._journal, self._turns
        coroutine, node, strict = line.coroutine, line.node, self._forced is None
        while node.error is None:
            number = self.round = self.round + 1
            count, known = line.count, None
            id = line.prefix + NUMBERS[count]
            if journal:
                known = self._episode._journalled = journal.get(id)
            reply = node.reply
            try:
                asked = coroutine.send(node.result if reply is None else reply)
            except StopIteration as stop:
                self._scatter()
                self._finished(line, stop.value)
                return
            except BaseException as raised:
                self._scatter()
                self._failed(line, ordinary(raised))
                return
            kind = type(asked)
            if kind is not Act and kind is not Use or len(nodes) >= self._most:
                self._scatter()
                self._asked(line, asked)
                return
            asked.id, asked.parents, asked.round = id, line.tails, number
            line.count, line.tails = count + 1, (id,)
            if kind is Act:
                agent = asked.agent
                turn = turns[agent]
                turns[agent] = turn + 1
                if asked.turn is None:
                    asked.turn = turn
            if known is None:
                line.node = asked
                nodes.append(asked)
                self.pending = [asked]
                return
            node = known if strict and same_request(asked, known) else self._recall(asked, known)
            line.node = node
            nodes.append(node)
            if node.state == PENDING:
                self.pending = [node]
                return
            if known.meta is not NOTHING_KNOWN:
                self.tokens += known.meta.tokens_used
        self._scatter(line)

    def _scatter(self, *lines: Line) -> None:
        """Leave the fast path: from here on these branches wait."""
        self._only = None
        self._next, self.pending = list(lines), []

    def _run(self, branch: Line, value: object, error: BaseException | None = None) -> None:
        """Run one branch to its next request (or on, if the journal holds its answer), its join, or its end."""
        try:
            node = branch.coroutine.send(value) if error is None else branch.coroutine.throw(error)
        except StopIteration as stop:
            self._finished(branch, stop.value)
            return
        except BaseException as raised:
            self._failed(branch, ordinary(raised))
            return
        self._asked(branch, node)

    def _asked(self, branch: Line, node: object) -> None:
        """Handle what a branch awaits: a request, whose answer the journal may hold, or a join."""
        if type(node) is Join:
            self._open(branch, node)
            return
        if type(node) is not Act and type(node) is not Use:
            self._refuse(branch, node)
            return
        request: Node = node
        nodes = self.nodes
        if len(nodes) >= self._most:
            self._end(Ended.TRUNCATED, f"more than {counted(self.budget.requests, 'request', form='d')}")
            return
        id, agent = self._place(branch, request), request.agent
        if agent is not None and branch.join is not None and not self._alone(branch, agent):
            return
        known = self._journal.get(id) if self._journal else None
        if known is not None:
            request = self._recall(request, known)
            if request.state == ANSWERED and known.meta is not NOTHING_KNOWN:
                self.tokens += known.meta.tokens_used
        branch.node = request
        nodes.append(request)
        self._next.append(branch)
        if request.state == PENDING:
            self.pending.append(request)

    def _place(self, branch: Line, node: Node) -> str:
        """Set the id, the parents and the turn of a request."""
        count = branch.count
        branch.count = count + 1
        node.id = id = branch.prefix + str(count)
        node.parents, node.round = branch.tails, self.round
        branch.tails = (id,)
        agent = node.agent
        if agent is not None:
            turns = self._turns
            turn = turns[agent]
            turns[agent] = turn + 1
            if node.turn is None:
                node.turn = turn
        return id

    def _refuse(self, branch: Line, got: object) -> None:
        name = type(self.workflow).__name__
        error = WorkflowError(
            f"{name}.run awaited {got!r:.80}; only ep.act, ep.use and ep.all can be awaited there: "
            "put other asynchronous work into a tool and ep.use it"
        )
        error.where = place_of(branch)
        branch.coroutine.close()
        self._failed(branch, error)

    def _alone(self, branch: Line, agent: str) -> bool:
        """Check that an agent acts in at most one branch of an `ep.all`. Otherwise its acts have no order."""
        for arm in branch.outward():
            if arm.join is not None and arm.join.owners.setdefault(agent, arm.index) != arm.index:
                advice = "give its role more instances" if agent in self.roles else "use other agents"
                error = WorkflowError(f"agent {agent!r} stands in two branches of one ep.all; {advice}")
                error.where = place_of(branch)
                self._failed(branch, error)
                return False
        return True

    def _recall(self, asked: Node, known: Node) -> Node:
        """Return the journal's node for a repeated request. With forced replies, return a changed copy of it."""
        if self._forced is None:
            return recalled(asked, known)
        return forced(asked, known, self._forced.get(asked.id), self.read)

    def _open(self, branch: Line, join: Join) -> None:
        self._joins += 1
        step = f"{branch.prefix}{branch.count}."
        branch.count += 1
        opened = OpenJoin(branch, len(join.branches))
        for index, coroutine in enumerate(join.branches):
            arm = Line(coroutine, f"{step}{index}.", branch.tails)
            arm.join, arm.index = opened, index
            opened.arms.append(arm)
        if not opened.arms:
            self._run(branch, ())
            return
        for arm in opened.arms:
            if opened.left < 0:  # an earlier branch failed at once
                return
            self._run(arm, None)
            if self.ended is not GOES_ON:
                return

    def _finished(self, branch: Line, value: object) -> None:
        join = branch.join
        if join is None:
            self._returned(value)
            return
        join.results[branch.index] = value
        join.left -= 1
        if join.left == 0:
            tails = dict.fromkeys(t for arm in join.arms for t in arm.tails)
            join.parent.tails = tuple(tails)
            self._run(join.parent, tuple(join.results))

    def _failed(self, branch: Line, error: Exception) -> None:
        """Cancel the siblings of a failed branch, and raise its error where the `ep.all` was awaited."""
        join = branch.join
        if join is None:
            self.exception = error
            self._end(*ending_of(error, self._grading))
            return
        join.left = -1
        for arm in join.arms:
            self._cancel(arm)
        self._run(join.parent, None, error)

    def _cancel(self, arm: Line) -> None:
        """Close a branch and all branches below it, and remove their requests of this round."""
        for branch in [*self._next, *self._resuming]:
            if not branch.cancelled and arm in branch.outward():
                branch.cancelled = True
                if branch in self._next:
                    self._next.remove(branch)
                    self.pending = [n for n in self.pending if n is not branch.node]
                close(branch.coroutine)
        arm.cancelled = True
        close(arm.coroutine)

    def _returned(self, value: object) -> None:
        if self._grading:
            self.grade = freeze(value)
            self._end(Ended.TERMINAL, "")
            return
        try:
            self.outcome = outcome_of(value, self._episode._forgotten(len(self.nodes) + self._joins))
        except WorkflowError as broken:
            broken.where = defined(type(self.workflow).run)
            self._failed(self._root, broken)
            return
        if type(self.workflow).grade is Workflow.grade:
            self._end(Ended.TERMINAL, "")
            return
        self._grading = True
        self.ended = Ended.TERMINAL  # what `grade` sees
        trace = self.trace
        self.ended = Ended.NO
        last = self._root.tails
        try:
            graded = begun(self.workflow.grade, self._episode, trace, self.task)
        except Exception as error:
            self._failed(self._root, error)
            return
        self._root = Line(graded, "g", last)
        self._run(self._root, None)

    def _end(self, ended: Ended, reason: str) -> None:
        self.ended, self.reason = ended, reason
        self.pending, self._only = [], None
        waiting: Iterable[Line] = (self._root,)
        if self._joins:
            waiting = dict.fromkeys(line for tip in (*self._next, self._root) for line in tip.outward())
        for branch in waiting:
            close(branch.coroutine)
        self._next = []
