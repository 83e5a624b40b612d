"""Conformance suite for environments: `unitymas.check_env(id_or_env)`.

Each check is a function of a `Bench`, which makes the environment and a player with right, malformed and hostile replies.
The first check that fails raises `ConformanceError` with the check's name and the difference that it found.
"""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import random
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ..agents.basics.failures import Ended
from ..agents.basics.frozen import FrozenDict
from ..agents.policies import Call, ExpertPolicy, FoolPolicy, RandomPolicy
from ..agents.team import BoundTeam, Expert
from ..agents.text.reply_readers import MAX_REPLY
from .core.arena import Arena
from .core.drivers import EnvLike, aplay, arena_of, call_for, derive, run_sync, take
from .core.records import Node
from .core.tasks import Task
from .core.trace import Trace
from .faces.aec import WorkflowEnv


class ConformanceError(AssertionError):
    """Raised when an environment fails a check. The message names the check."""


class TrialPlayer:
    """Policy whose reply depends on the call alone. Replies are right, random or hostile."""

    sees_reference = True

    def __init__(self, expert: Expert | None = None) -> None:
        self.expert: ExpertPolicy | RandomPolicy = (
            ExpertPolicy(expert) if expert is not None else RandomPolicy()
        )
        self.fool, self.chance = FoolPolicy(), RandomPolicy()

    def act(self, call: Call) -> str:
        """Reply to a call: with the expert's reply, a random one, or hostile text."""
        dice = derive(call.agent, *(m["content"] for m in call.messages)) % 10
        policy: ExpertPolicy | RandomPolicy | FoolPolicy = (
            self.expert if dice < 6 else self.chance if dice < 8 else self.fool
        )
        return policy.act(replace(call, seed=dice + len(call.messages[-1]["content"])))


class Bench:
    """Bench for one environment: it makes the environment and its player, and plays."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.player = TrialPlayer(arena.expert)

    def env(self, render_mode: str | None = None) -> WorkflowEnv:
        """Make a new environment."""
        return WorkflowEnv(self.arena, render_mode)

    def team(self) -> BoundTeam:
        """Return a team in which the player has every role."""
        return BoundTeam(
            dict.fromkeys(self.arena.roles, self.player), dict.fromkeys(self.arena.roles, "check")
        )

    def say(self, env: WorkflowEnv) -> str:
        """Return the player's reply to the pending act of an environment."""
        play = env.execution
        node = play.node(env.infos[env.agent_selection]["node"])
        return self.player.act(call_for(play, node, "", reference=True))

    def step(self, env: WorkflowEnv) -> None:
        """Make one step. A dead agent gets None."""
        agent = env.agent_selection
        env.step(None if env.terminations[agent] or env.truncations[agent] else self.say(env))

    def finish(self, env: WorkflowEnv, limit: int = 100_000) -> dict[str, float]:
        """Play an environment to its end. Return the sum of each agent's AEC rewards."""
        earned: dict[str, float] = {}
        for agent in env.agent_iter(limit):
            _, reward, *_ = env.last()
            earned[agent] = earned.get(agent, 0.0) + reward
            self.step(env)
        return earned


def check_env(env: EnvLike, **make: Any) -> list[str]:
    """Run every check on an environment, or on the environment of an id. Return the names of the passed checks."""
    if isinstance(env, str) and not make:
        make = {"data": "mini", "size": 16} if _uses_mini(env) else {}
    bench = Bench(arena_of(env, **make))
    for check in CHECKS:
        try:
            with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
                warnings.simplefilter("ignore")  # PettingZoo warns about every space that is not a Box
                check(bench)
        except Exception as error:
            name = check.__name__
            raise ConformanceError(
                f"{bench.arena.env_id}: {name}: {type(error).__name__}: {error}"
            ) from error
    return [check.__name__ for check in CHECKS]


def _uses_mini(id: str) -> bool:
    from .registry import spec

    return spec(id).tasks is None


# the checks --------------------------------------------------------------------------------------------


def pettingzoo_api(bench: Bench) -> None:
    """Run PettingZoo's api, seed, render and parallel tests."""
    from pettingzoo.test import api_test, parallel_api_test, render_test, seed_test
    from pettingzoo.utils.conversions import turn_based_aec_to_parallel

    api_test(bench.env(), num_cycles=30)
    seed_test(bench.env, num_cycles=30)
    render_test(lambda render_mode=None: bench.env(render_mode))
    parallel_api_test(turn_based_aec_to_parallel(bench.env()), num_cycles=30)


def whole_episodes_repeat(bench: Bench) -> None:
    """Check that the same seed and replies give the same trace, in every node."""
    for seed in range(3):
        first, second = bench.env(), bench.env()
        for env in (first, second):
            env.reset(seed=seed)
            bench.finish(env)
        _same(first.trace, second.trace, "two plays of one seed differ")


def forks_equal_replays(bench: Bench) -> None:
    """Check that a fork has the state of the original, continues in the same way, and does not change the original."""
    env = bench.env()
    env.reset(seed=1)
    while env.execution.ended is Ended.NO:
        if bench.arena.toolbox.forkable(env.execution) is not None:
            return  # the environment refuses forks; check_unforkable of the toolbox tests that
        before = env.trace.to_dict(volatile=False)
        twin = env.fork()
        _equal(twin.trace.to_dict(volatile=False), before, "a fork is in another state")
        _equal(
            twin.observe(twin.agent_selection), env.observe(env.agent_selection), "a fork observes otherwise"
        )
        bench.step(twin)
        _equal(env.trace.to_dict(volatile=False), before, "playing a fork changed the original")
        bench.step(env)
        _same(env.trace, twin.trace, "a fork went on otherwise")
    acts = env.trace.acts()
    again = env.fork(at=acts[len(acts) // 2].id)
    bench.finish(again)
    _same(env.trace, again.trace, f"a fork at node {acts[len(acts) // 2].id} came to another end")


def one_at_a_time_equals_shuffled(bench: Bench) -> None:
    """Check that the AEC interface and a collector with shuffled answers give identical traces."""
    for seed in range(3):
        env = bench.env()
        env.reset(seed=seed)
        task, episode_seed = env.execution.task, env.execution.seeds[0][1]
        bench.finish(env)
        rng = random.Random(seed)
        play = bench.arena.start(task, episode_seed)

        def shuffled(nodes: list[Node], rng: random.Random = rng) -> list[Node]:
            return rng.sample(nodes, len(nodes))

        trace = run_sync(aplay(play, bench.team(), bench.arena, order=shuffled))
        _same(env.trace, trace, "the AEC face and the collector differ")


def rewards_add_up(bench: Bench) -> None:
    """Check that the AEC rewards of an agent sum to the credits of its nodes."""
    for seed in range(5):
        env = bench.env()
        env.reset(seed=seed)
        earned = bench.finish(env)
        owed = dict.fromkeys(env.possible_agents, 0.0)
        owner = {n.id: n.agent for n in env.trace.nodes}
        for credit in env.trace.credits:
            owed[owner[credit.node] or ""] += credit.amount
        for agent, amount in owed.items():
            if abs(earned.get(agent, 0.0) - amount) > 1e-9 * max(1.0, abs(amount)):
                raise AssertionError(f"{agent} earned {earned.get(agent)}, but its credits sum to {amount}")


def references_stay_hidden(bench: Bench) -> None:
    """Check that no prompt shows any part of the reference, whose texts are replaced by a canary text."""
    arena, canary = bench.arena, "canary7Zq"
    blind = TrialPlayer(None)
    for task_id in list(arena.task_ids)[:4]:
        real = arena.task(task_id)
        planted = _planted(real.reference, canary)
        assert isinstance(planted, FrozenDict)
        task = Task(real.id, real.view, planted)
        play = arena.start(task, 0)
        while play.ended is Ended.NO:
            for node in play.pending:
                if node.kind == "use":
                    arena.toolbox.call(play, node)
                elif canary in str(node.messages):
                    raise AssertionError(f"the prompt of {node.agent} shows the task's reference")
                else:
                    take(play, node, blind.act(call_for(play, node, "")))
        arena.toolbox.close(play)


def survives_pickling(bench: Bench) -> None:
    """Check that pickled and copied environments have the same trace in mid-episode, and the same end."""
    env = bench.env()
    env.reset(seed=2)
    for _ in range(2):
        if env.execution.ended is Ended.NO:
            bench.step(env)
    if bench.arena.toolbox.forkable(env.execution) is not None:
        return
    for twin in (pickle.loads(pickle.dumps(env)), copy.deepcopy(env)):
        _same(twin.trace, env.trace, "the copy has another trace")
        rest = copy.deepcopy(env)
        bench.finish(rest)
        bench.finish(twin)
        _same(twin.trace, rest.trace, "the copy came to another end")


def bad_input_is_refused(bench: Bench) -> None:
    """Check that wrong actions, unknown tasks and steps after the end are errors, and malformed replies are not."""
    env = bench.env()
    env.reset(seed=0)
    _raises(lambda: env.step(b"bytes"), TypeError)  # type: ignore[arg-type]
    _raises(lambda: env.step("x" * (MAX_REPLY + 1)), ValueError)
    _raises(lambda: env.reset(options={"task_id": "no-such-task"}), KeyError)
    env.reset(seed=0)
    fool = FoolPolicy()
    for i in range(200):
        if not env.agents:
            break
        agent = env.agent_selection
        dead = env.terminations[agent] or env.truncations[agent]
        env.step(None if dead else fool.act(Call(agent, "", (), seed=i)))
    bench.finish(env)
    _raises(lambda: env.step("after the end"), Exception)


CHECKS: tuple[Callable[[Bench], None], ...] = (
    pettingzoo_api,
    whole_episodes_repeat,
    forks_equal_replays,
    one_at_a_time_equals_shuffled,
    rewards_add_up,
    references_stay_hidden,
    survives_pickling,
    bad_input_is_refused,
)


# helpers -----------------------------------------------------------------------------------------------


def _same(a: Trace, b: Trace, what: str) -> None:
    _equal(a.to_dict(volatile=False), b.to_dict(volatile=False), what)


def _equal(a: object, b: object, what: str, path: str = "") -> None:
    if a == b:
        return
    if isinstance(a, Mapping) and isinstance(b, Mapping) and a.keys() == b.keys():
        for key in a:
            _equal(a[key], b[key], what, f"{path}.{key}")
    elif isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            _equal(x, y, what, f"{path}[{i}]")
    if a != a and b != b:  # both NaN
        return
    raise AssertionError(f"{what}: {path or 'value'}: {a!r:.200} against {b!r:.200}")


def _planted(value: object, canary: str) -> object:
    """Return the same structure, with the canary in place of every string."""
    if isinstance(value, str):
        return canary
    if isinstance(value, Mapping):
        return FrozenDict({k: _planted(v, canary) for k, v in value.items()})
    if isinstance(value, tuple):
        return tuple(_planted(v, canary) for v in value)
    return value


def _raises(act: Callable[[], object], kind: type[Exception]) -> None:
    try:
        act()
    except kind:
        return
    raise AssertionError(f"no {kind.__name__} was raised")
