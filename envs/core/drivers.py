"""The two drivers: one episode at a time, and thousands at once.

Both answer the pending requests of an `Execution` until it has ended. `rollout` is the public function of the
asynchronous driver.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, Protocol, TypeVar

from ...agents.answers import NOTHING_KNOWN, Answer
from ...agents.basics.failures import Boundary, Ended
from ...agents.basics.hints import counted, say_once
from ...agents.basics.threads import contained, ordinary
from ...agents.policies import Call, Message
from ...agents.roles import Reply
from ...agents.team import BoundTeam, Team, TeamLike
from .arena import Arena
from .execution import Execution
from .fast import heap_at_rest
from .ledger import Scorer
from .records import Act, Node
from .tasks import DataSet, Task, fingerprint
from .trace import Trace

T = TypeVar("T")

TaskChoice = int | Iterable[str | Task | Mapping[str, Any]] | None
"""Tasks: the first so many, ids of tasks, tasks, or your own rows. None: all."""

LONG_REPLY = 100_000  # characters; a longer reply is parsed in a thread beside the event loop


class Environment(Protocol):
    """An environment of unitymas, bare or in reward wrappers."""

    @property
    def unwrapped(self) -> Any:
        """Return the environment below all wrappers."""


EnvLike = str | Arena | Environment
"""Environment: an id, an arena, or an environment that is already made."""


def call_for(execution: Execution, node: Node, episode: str, *, reference: bool = False) -> Call:
    """Make the call to a policy for a node."""
    assert isinstance(node, Act)
    return Call(
        agent=node.agent or "", role=node.role or "", messages=_messages(execution, node),
        choices=node.format.choices, stop=node.format.stop, max_tokens=node.max_tokens,
        seed=execution.call_seed(node), episode=episode, node=node.id,
        task=execution.task if reference else None, fields=node.fields if reference else {},
    )  # fmt: skip


def _messages(execution: Execution, node: Act) -> tuple[Message, ...]:
    """Return the prompt of an act. If fields of it may be cut, the prompt holds how."""
    role = execution.roles.get(node.agent or "")
    if not node.fields or role is None or role.wording is None or not role.wording.cut:
        return node.messages
    *before, last = node.messages
    told = role.wording.told(node.fields)
    return (*before, {**last, "content": told}) if told == last["content"] else node.messages


def take(execution: Execution, node: Node, answer: str | Answer, reply: Reply | None = None) -> None:
    """Give a policy's reply to the execution, with its parsed form if it is known."""
    text, meta = (answer.text, answer.meta) if isinstance(answer, Answer) else (answer, NOTHING_KNOWN)
    if not isinstance(text, str):
        raise TypeError(f"{node.agent}: a reply must be a string, got {type(text).__name__} {text!r:.60}")
    execution.answer(node, text, meta, reply)


# one at a time ----------------------------------------------------------------------------------------


def play(execution: Execution, team: BoundTeam, arena: Arena, episode: str = "") -> Trace:
    """Play one episode to its end, and block. An error in `run` is recorded in the trace. An error of a policy is
    raised.
    """
    scorer = arena.scorer(execution.task)
    while execution.pending:  # after the end no request is open
        for node in execution.pending:
            if node.kind == "use":
                arena.toolbox.call(execution, node)
            else:
                take(
                    execution,
                    node,
                    team.ask(call_for(execution, node, episode, reference=team.sees(node.agent))),
                )
        if scorer.rules:
            scorer.advance(execution.trace, execution.round)
    arena.toolbox.close(execution)
    scorer.advance(execution.trace)
    return arena.label(execution.trace)


# thousands at once ------------------------------------------------------------------------------------


async def side_by_side(episodes: Iterable[Coroutine[object, object, T]]) -> list[T]:
    """Play many episodes at the same time. Return their results in order."""
    with heap_at_rest():
        played = [asyncio.ensure_future(_alone(episode)) for episode in episodes]
        try:
            return await asyncio.gather(*played)
        except BaseException:  # an error ends all other episodes too
            for episode in played:
                episode.cancel()
            await asyncio.gather(*played, return_exceptions=True)
            raise


async def _alone(episode: Coroutine[object, object, T]) -> T:
    """Play an episode. What its rules, its sink and so on raise is an error of it, and stops no event loop."""
    try:
        return await episode
    except BaseException as error:
        if (held := ordinary(error)) is not error:
            raise held from error
        raise


async def aplay(
    execution: Execution,
    team: BoundTeam,
    arena: Arena,
    episode: str = "",
    order: Callable[[list[Node]], list[Node]] | None = None,
) -> Trace:
    """Play one episode to its end. An error is recorded in the trace as `ended="error"`."""
    scorer = arena.scorer(execution.task)
    deadline = arena.budget.seconds
    began = time.perf_counter()
    try:
        await asyncio.wait_for(_answer_all(execution, team, arena, episode, scorer, order), deadline)
    except asyncio.TimeoutError:
        execution.truncate(f"more than {deadline} s")
    finally:
        arena.toolbox.close(execution)
    trace = execution.trace
    scorer.advance(trace)
    trace.tags["seconds"] = time.perf_counter() - began
    trace.tags["team"] = team.names
    return arena.label(trace)


async def _answer_all(
    execution: Execution,
    team: BoundTeam,
    arena: Arena,
    episode: str,
    scorer: Scorer,
    order: Callable[[list[Node]], list[Node]] | None,
) -> None:
    while pending := execution.pending:
        if len(pending) == 1:
            await _answer(execution, pending[0], team, arena, episode)
        else:
            pending = order(pending) if order is not None else pending
            await asyncio.gather(*(_answer(execution, n, team, arena, episode) for n in pending))
        if scorer.rules:
            scorer.advance(execution.trace, execution.round)


async def _answer(execution: Execution, node: Node, team: BoundTeam, arena: Arena, episode: str) -> None:
    if node.kind == "use":
        await arena.toolbox.acall(execution, node)
        return
    await ask(execution, node, team, call_for(execution, node, episode, reference=team.sees(node.agent)))


async def ask(execution: Execution, node: Node, team: BoundTeam, call: Call) -> None:
    """Send a call to the team, and give its reply to the execution. A policy that fails ends the episode.

    A failure that all other calls would have, too, raises `Outage`.
    """
    try:
        answer = await answer_of(team, call)
    except BaseException as raised:  # the policy failed, not the workflow
        error = ordinary(raised)
        execution.abort(error, Boundary.POLICY)
        team.failures.failed(team.names.get(call.agent), error)
        return
    team.failures.answered(team.names.get(call.agent))
    await accept(execution, node, answer)


async def answer_of(team: BoundTeam, call: Call) -> str | Answer:
    """Return the team's reply to a call."""
    answer = team.ask_any(call)
    if inspect.isawaitable(answer):
        answer = await answer
    if not isinstance(answer, str | Answer):
        wrong = TypeError(
            f"{call.agent}: a reply must be a string, got {type(answer).__name__} {answer!r:.60}"
        )
        wrong.where = team.place(call.agent)
        raise wrong
    return answer


async def accept(execution: Execution, node: Node, answer: str | Answer) -> None:
    """Give a reply to the execution, unless the episode has ended meanwhile."""
    text = answer if isinstance(answer, str) else answer.text
    reply = None
    # parsing takes up to 0.25 s, so other episodes continue meanwhile
    if isinstance(text, str) and len(text) > LONG_REPLY:
        reply = await asyncio.to_thread(
            contained(execution.read),
            node,
            text,
            answer.meta if isinstance(answer, Answer) else NOTHING_KNOWN,
        )
    if execution.ended is Ended.NO:
        take(execution, node, answer, reply)


class EpisodeFailures:
    """Failures of many episodes: each cause with its count and place, printed once."""

    shown = 5

    def __init__(self) -> None:
        self.causes: Counter[str] = Counter()
        self.episodes = 0

    def see(self, trace: Trace) -> None:
        """Count an episode's failures."""
        self.episodes += 1
        if trace.error is not None:  # a wrongly used tool is an outcome, and is reported, too
            self.causes[f"{trace.reason}: {trace.error}"] += 1
        for node in trace.nodes:
            if node.kind == "use" and node.meta.raised is not None:
                self.causes[f"tool {node.tool!r} raised {node.meta.raised}"] += 1

    def say(self) -> None:
        """Print the failures, once each."""
        for cause, count in self.causes.most_common(self.shown):
            print(f"unitymas: {cause}: {count:,} × in {counted(self.episodes, 'episode')}", file=sys.stderr)
        if len(self.causes) > self.shown:
            print(f"unitymas: and {len(self.causes) - self.shown} other failures", file=sys.stderr)


def derive(*parts: object) -> int:
    """Derive a seed from parts. It is the same in every process."""
    text = "/".join(map(str, parts))
    return int.from_bytes(
        hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=6).digest(), "big"
    )


def select_tasks(arena: Arena, tasks: TaskChoice) -> tuple[Arena, list[Task]]:
    """Select tasks by number (the first n), by id, or as your own rows. None selects all."""
    if tasks is None:
        return arena, [arena.task(i) for i in arena.task_ids]
    if isinstance(tasks, int):
        if tasks < 1:
            raise ValueError(f"tasks must be at least 1 (or None: all), got {tasks}")
        return arena, [arena.task(i) for i in arena.task_ids[:tasks]]
    chosen = list(tasks)
    rows = [task for task in chosen if isinstance(task, Mapping)]
    if rows:
        data = DataSet("own", "own", rows, fingerprint(rows))
        return arena, [Task.of(row, arena.workflow.schema) for row in data.rows]
    return arena, [t if isinstance(t, Task) else arena.task(str(t)) for t in chosen]


async def arollout(
    env: EnvLike,
    team: TeamLike,
    *,
    tasks: TaskChoice = None,
    k: int = 1,
    concurrency: int = 256,
    seed: int = 0,
    on_trace: Callable[[Trace], object] | None = None,
    keep_tokens: str | None = None,
    **make: Any,
) -> list[Trace]:
    """Play `k` episodes of each task with a team. The traces are in the order of tasks and samples.

    `env` is an id or an environment. An episode's seed depends only on (`seed`, task, sample), so other episodes that
    run at the same time change nothing. `on_trace` is called with each trace when its episode ends.

    `keep_tokens="ids"` keeps the tokens of local models in `node.meta["tokens"]`: `prompt_ids`, `ids` (the closing
    token included) and their `logprobs`. `keep_tokens="text"` keeps the tokens as text, for the viewer.
    """
    if keep_tokens not in (None, "ids", "text"):
        raise ValueError(f"keep_tokens={keep_tokens!r}: use 'ids', 'text' or None")
    check_count("k", k)
    check_count("concurrency", concurrency)
    whole = Team.of(team)
    arena = told_to(arena_of(env, **make), whole)
    bound = whole.bind(arena.roles, expert=arena.expert)
    bound.keep_tokens = keep_tokens or ""
    arena, chosen = select_tasks(arena, tasks)
    gate = asyncio.Semaphore(concurrency)
    traces: list[Trace | None] = [None] * (len(chosen) * k)
    failures = EpisodeFailures()

    async def one(slot: int, task: Task, sample: int) -> None:
        async with gate:
            execution = arena.start(task, derive(seed, task.id, sample))
            trace = await aplay(execution, bound, arena, f"{task.id}#{sample}")
            trace.sample, trace.origin = sample, (arena, whole, task)
            traces[slot] = trace
            failures.see(trace)
            if on_trace is not None:
                done = on_trace(trace)
                if inspect.isawaitable(done):
                    await done

    async with bound:
        await side_by_side(one(i * k + s, t, s) for i, t in enumerate(chosen) for s in range(k))
    failures.say()
    return [t for t in traces if t is not None]


def check_count(name: str, count: object) -> None:
    """Refuse what is no whole number from 1 on."""
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ValueError(f"{name} must be a whole number, at least 1, got {count!r:.60}")


def rollout(
    env: EnvLike,
    team: TeamLike,
    *,
    tasks: TaskChoice = None,
    k: int = 1,
    concurrency: int = 256,
    seed: int = 0,
    on_trace: Callable[[Trace], object] | None = None,
    keep_tokens: str | None = None,
    **make: Any,
) -> list[Trace]:
    """Play `k` episodes of each task with a team, as `arollout` does, from synchronous code (also in a notebook)."""
    return run_sync(
        arollout(
            env, team, tasks=tasks, k=k, concurrency=concurrency, seed=seed, on_trace=on_trace, keep_tokens=keep_tokens, **make
        )
    )  # fmt: skip


def run_sync(work: Coroutine[object, object, T], interrupted: Callable[[], None] | None = None) -> T:
    """Run a coroutine to its end: in this thread, or in another thread if an event loop is already running here.

    A Ctrl-C while that thread runs calls `interrupted`, which must make the work end.
    """
    if asyncio._get_running_loop() is None:
        return asyncio.run(work)
    results: list[T] = []
    errors: list[BaseException] = []
    done = threading.Event()  # an interrupted `join` takes the thread for ended (CPython before 3.13)

    def inside() -> None:
        try:
            results.append(asyncio.run(work))
        except BaseException as error:
            errors.append(error)
        finally:
            done.set()

    thread, started = threading.Thread(target=inside), False
    while not done.is_set():
        try:
            if not started:  # the Ctrl-C may come while the thread starts
                started = True
                thread.start()
            done.wait()
        except KeyboardInterrupt:
            if interrupted is None:
                raise
            interrupted()
    for error in errors:
        raise error
    return results[0]


def told_to(arena: Arena, team: Team) -> Arena:
    """Return the arena with the prompt set that the team's models were made with, unless the user has chosen one."""
    told, wanted = arena.workflow.prompt_set, team.prompts
    if told is None or arena.prompts_said or wanted is None or wanted == told.choice:
        return arena
    twin = arena.with_prompts(wanted)
    now = twin.workflow.prompt_set
    name = "" if now is None else now.name
    say_once(
        f"{arena.env_id}: prompts={name!r}, which this team's models were made with (prompts=… says otherwise)"
    )
    return twin


def arena_of(env: EnvLike, **make_args: Any) -> Arena:
    """Return the arena of an id, an arena or an environment. A wrapper from elsewhere is refused by name."""
    if isinstance(env, Arena):
        return env
    if isinstance(env, str):
        from ..registry import make

        return make(env, **make_args).arena
    if make_args:
        raise TypeError(f"{', '.join(make_args)}: these are arguments of make, and env is already made")
    if inspect.isclass(env) or not hasattr(env, "unwrapped"):
        raise TypeError(
            f"{env!r:.80} is no environment: give an id, or what unitymas.make returned. A workflow of your own gets an id by "
            "unitymas.register(ID, workflow=…, tasks=…, reward=…)"
        )
    layer: Any = env
    while not hasattr(layer, "arena") or layer is not layer.unwrapped:
        if not getattr(type(layer), "keeps_ledger", False):
            raise TypeError(
                f"{type(layer).__name__} wraps the environment and might change what agents see or earn; only reward "
                "wrappers of unitymas.rewards pass: hand over env.unwrapped, or attach the reward as a rule"
            )
        layer = layer.env
    return layer.arena  # type: ignore[no-any-return]
