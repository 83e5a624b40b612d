"""Bridges between interfaces: a PettingZoo AEC environment as a workflow, and one role as a Gymnasium environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
from gymnasium import spaces
from pettingzoo import AECEnv

from ...agents.roles import Choice, Custom, FormatError, Role
from ...agents.team import Team, TeamLike
from ..core.drivers import Environment, call_for, derive
from ..core.ledger import Credit, Rule
from ..core.records import Picture
from ..core.tasks import Schema, Task
from ..core.trace import Trace
from ..core.workflow import Episode, Node, Outcome, Workflow, WorkflowError
from ..tools.tool import Tool
from .aec import Info, Observation, WorkflowEnv
from .spaces import Utterance, observation_space

Describe = Callable[[AECEnv, str], str]
"""Function `(env, agent)` that returns the agent's observation as text."""

GAME = Schema("game", ("id",), ())


class AECWorkflow(Workflow):
    """Workflow that plays a third-party AEC environment with text or discrete actions.

    The game is a session tool, which is replayed when an episode is forked. Each agent becomes a role. It sees its
    observation as text, which `describe` may improve, and replies with the number of an action or with any text. The seed
    of the game is the task's field `seed`, or else comes from the task's id. The game's rewards become credits of the
    component `env` on the agent's latest act (`AECRewards`).
    """

    schema = GAME
    tools = ("game",)

    def __init__(self, factory: Callable[[], AECEnv], describe: Describe | None = None) -> None:
        self.factory, self.describe = factory, describe
        probe = factory()
        probe.reset(seed=0)
        self.names = {agent: _plain(agent) for agent in probe.possible_agents}
        if len(set(self.names.values())) < len(self.names):
            raise WorkflowError(f"agents {list(self.names)} cannot be told apart as role names")
        self.roles = tuple(Role(name) for name in self.names.values())
        probe.close()

    async def run(self, ep: Episode) -> Outcome:
        """Play one episode."""
        totals: dict[str, float] = {}
        turn = await ep.use("game", action=None)
        while not turn["over"]:
            options = turn["options"]
            if options is None:
                reply = await ep.act(turn["agent"], turn["seen"])
                action: object = reply.text
            elif len(options) == 1:
                action = options[0]
            else:
                form = (
                    Choice(*options)
                    if len(options) <= 64
                    else Custom(_OneOf(options), says="one of the actions")
                )
                reply = await ep.act(
                    turn["agent"], f"{turn['seen']}\nActions: {', '.join(options)}", reply=form
                )
                action = reply.value if reply.ok else options[ep.rng.randrange(len(options))]
            turn = await ep.use("game", action=action)
            for agent, amount in turn["rewards"].items():
                totals[agent] = totals.get(agent, 0.0) + amount
        return Outcome(**totals)

    def tool(self) -> Tool:
        """Return the session tool that the environment needs: `make(…, tools={"game": workflow.tool()})`."""
        return Tool(
            _Opener(self.factory, self.describe, self.names), name="game", kind="session", blocking=False
        )


class _OneOf:
    def __init__(self, options: tuple[str, ...]) -> None:
        self.options = frozenset(options)

    def __call__(self, text: str) -> str:
        if text.strip() not in self.options:
            raise FormatError("one of the actions")
        return text.strip()


class _Opener:
    """Function that opens the game of one episode."""

    def __init__(
        self, factory: Callable[[], AECEnv], describe: Describe | None, names: Mapping[str, str]
    ) -> None:
        self.factory, self.describe, self.names = factory, describe, names

    def __call__(self, task: Task, seed: int) -> _Game:
        env = self.factory()
        # all samples of a task begin with the same game, so they are comparable
        start = task.view.get("seed")
        env.reset(seed=int(derive("game", task.id) if start is None else start) % 2**31)
        return _Game(env, self.describe, self.names)


class _Game:
    """Running game: one call makes a step and returns the next agent's observation."""

    def __init__(self, env: AECEnv, describe: Describe | None, names: Mapping[str, str]) -> None:
        self.env, self.describe, self.names = env, describe, names

    def call(self, action: str | None) -> dict[str, object]:
        env = self.env
        rewards: dict[str, float] = {}
        if action is not None:
            env.step(self._action(action))
            self._pay(rewards)
        while env.agents and (env.terminations[env.agent_selection] or env.truncations[env.agent_selection]):
            env.step(None)
        if not env.agents:
            return {"over": True, "rewards": rewards}
        agent = env.agent_selection
        observation = env.observe(agent)
        return {
            "over": False, "agent": self.names[agent], "rewards": rewards,
            "seen": self.describe(env, agent) if self.describe else _told(observation),
            "options": self._options(agent, observation),
        }  # fmt: skip

    def _pay(self, rewards: dict[str, float]) -> None:
        for agent, amount in self.env.rewards.items():
            if amount:
                rewards[self.names[agent]] = rewards.get(self.names[agent], 0.0) + float(amount)

    def _options(self, agent: str, observation: object) -> tuple[str, ...] | None:
        space = self.env.action_space(agent)
        if not isinstance(space, spaces.Discrete):
            return None
        mask = observation.get("action_mask") if isinstance(observation, Mapping) else None
        mask = self.env.infos[agent].get("action_mask") if mask is None else mask
        return tuple(str(int(space.start) + i) for i in range(int(space.n)) if mask is None or mask[i])

    def _action(self, action: str) -> int | str:
        space = self.env.action_space(self.env.agent_selection)
        return int(action) if isinstance(space, spaces.Discrete) else action

    def close(self) -> None:
        self.env.close()


class AECRewards(Rule):
    """Rule that turns the rewards of the game into credits of the component `env`, on the agent's latest act."""

    name = "env"

    def on_node(self, trace: Trace, node: Node, task: Task) -> list[Credit]:
        """Return the credits that are known once the round of this node is answered."""
        if node.kind != "use" or node.tool != "game" or not isinstance(node.result, Mapping):
            return []
        latest = {n.agent: n.id for n in trace.acts()}
        rewards = node.result["rewards"].items()
        return [Credit(latest[agent], self.name, amount) for agent, amount in rewards if agent in latest]

    def metrics(self, trace: Trace, task: Task) -> dict[str, float]:
        """Return the figures to report."""
        return {
            f"return/{agent}": float(v)
            for agent, v in (trace.outcome or {}).items()
            if isinstance(v, int | float)
        }


def _plain(agent: object) -> str:
    name = "".join(c if c.isalnum() else "_" for c in str(agent).lower())
    return name if name[:1].isalpha() else f"agent_{name}"


def _told(observation: Any) -> str:
    """Return an observation as text."""
    if isinstance(observation, str):
        return observation
    if isinstance(observation, Mapping):
        if "messages" in observation:
            return "\n".join(m["content"] for m in observation["messages"])
        return "\n".join(f"{k}: {_told(v)}" for k, v in observation.items() if k != "action_mask")
    if hasattr(observation, "tolist"):
        return str(observation.astype(int).tolist() if observation.dtype == bool else observation.tolist())
    return str(observation)


class SingleRole(gymnasium.Env):  # type: ignore[misc]
    """Gymnasium environment of one agent. A team plays the other agents."""

    metadata = {"render_modes": ["human", "ansi"]}

    def __init__(self, env: WorkflowEnv, role: str, team: TeamLike) -> None:
        if role not in env.possible_agents:
            raise WorkflowError(f"no agent {role!r}; the environment has {', '.join(env.possible_agents)}")
        self.env, self.role = env.unwrapped, role
        others = {agent: r for agent, r in env.arena.roles.items() if agent != role}
        self.team = Team.of(team).bind(others, expert=env.arena.expert) if others else None
        self.observation_space, self.action_space = observation_space(), Utterance()
        self.render_mode = env.render_mode

    def reset(
        self, *, seed: int | None = None, options: dict[str, object] | None = None
    ) -> tuple[Observation, Info]:
        """Begin an episode, and play the other agents until the next act of this one."""
        super().reset(seed=seed)
        self.env.reset(seed=seed, options=options)
        self._paid = 0.0
        self._others()
        return self.env.observe(self.role), self._info()

    def step(self, action: str) -> tuple[Observation, float, bool, bool, Info]:
        """Reply with `action`, and play the others. The reward is what the agent earned since its previous step."""
        if self.env.agent_selection != self.role or not self._live():
            raise WorkflowError("the episode is over; call reset() first")
        self.env.step(action)
        self._others()
        total = self._total()
        reward, self._paid = total - self._paid, total
        over = not self._live()
        truncated = over and str(self.env.trace.ended) == "truncated"
        return self.env.observe(self.role), reward, over and not truncated, truncated, self._info()

    def render(self) -> Picture | str | None:
        """Render the wrapped environment."""
        shown: Picture | str | None = self.env.render()
        return shown

    def _live(self) -> bool:
        return str(self.env.trace.ended) == "no"

    def _total(self) -> float:
        mine = {n.id for n in self.env.trace.nodes if n.agent == self.role}
        return float(sum(c.amount for c in self.env.trace.credits if c.node in mine))

    def _info(self) -> Info:
        return self.env.infos[self.role].copy() if self.role in self.env.infos else {}

    def _others(self) -> None:
        while self._live() and self.env.agent_selection != self.role:
            agent = self.env.agent_selection
            play = self.env.execution
            node = play.node(self.env.infos[agent]["node"])
            assert self.team is not None
            reply = self.team.ask(call_for(play, node, "single", reference=self.team.sees(agent)))
            self.env.step(reply if isinstance(reply, str) else reply.text)


def gym_role(
    env_id: str, role: str | None = None, team: TeamLike | None = None, **make_args: Any
) -> SingleRole:
    """Make the environment of `gymnasium.make("unitymas/ID", role=…, team=…, **make_args)`.

    The default of `role` is the first agent. The default of `team` is the scripted expert, or random replies if the
    environment has no expert.
    """
    from ..registry import make

    env = make(env_id, **make_args)
    if team is None:
        team = "random" if env.arena.expert is None else "scripted"
    return SingleRole(env, role or env.possible_agents[0], team)


def single_role(env: str | Environment, role: str, team: TeamLike) -> SingleRole:
    """Return a Gymnasium environment of the agent `role`, in which `team` plays the other agents."""
    if isinstance(env, str):
        from ..registry import make

        env = make(env)
    return SingleRole(env.unwrapped, role, team)
