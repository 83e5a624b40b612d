"""AEC interface: a workflow as a PettingZoo environment.

`WorkflowEnv` runs its episode to the next act and shows this act as `agent_selection` and observation. `step(text)` is the
reply. The environment has no rules of its own: episode, ledger and tools come from the `Arena`. So stepping by hand gives
the same episode as a collector.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import NoReturn, TypedDict, TypeVar

from gymnasium.spaces import Dict
from pettingzoo import AECEnv

from ...agents.basics.failures import Ended
from ...agents.basics.hints import nearest
from ...agents.policies import Message
from ...agents.text.reply_readers import MAX_REPLY
from ..core.arena import Arena
from ..core.execution import Execution
from ..core.ledger import Credit, Scorer
from ..core.records import Picture
from ..core.trace import Trace
from ..core.workflow import Act, Node, WorkflowError, unknown
from .render import episode_text
from .spaces import Utterance, observation_space

T = TypeVar("T")


class Observation(TypedDict):
    """Messages that an agent sees."""

    messages: tuple[Message, ...]


class Info(TypedDict, total=False):
    """Info of an agent: its choices, its new credits as (node, component, amount), and the node that it answers."""

    choices: tuple[str, ...] | None
    credits: list[tuple[str, str, float]]
    node: str
    role: str | None
    turn: int | None


class WorkflowEnv(AECEnv):  # type: ignore[misc]
    """PettingZoo AEC environment of one `Arena`. `render_mode` is None, "ansi", "human" or "rgb_array" (games)."""

    def __init__(self, arena: Arena, render_mode: str | None = None) -> None:
        super().__init__()
        modes = ["human", "ansi", *(["rgb_array"] if hasattr(arena.workflow, "picture") else [])]
        if render_mode is not None and render_mode not in modes:
            offered = ", ".join(map(repr, modes[1:]))
            raise ValueError(f"render_mode {render_mode!r}: use {offered}, 'human' or None")
        self.arena = arena
        self.render_mode = render_mode
        self.metadata = {
            "name": arena.env_id.replace("-v", "_v"),
            "render_modes": modes,
            "is_parallelizable": False,
            "render_fps": 1,
        }
        self.possible_agents = list(arena.roles)
        self._spaces = {agent: observation_space() for agent in self.possible_agents}
        self._actions = {agent: Utterance(MAX_REPLY) for agent in self.possible_agents}
        self._chance = random.Random()
        self._play: Execution | None = None
        self._last_seen: dict[str, tuple[Message, ...]] = {}
        self.agents: list[str] = []

    # the AEC contract ----------------------------------------------------------------------------

    def observation_space(self, agent: str) -> Dict:
        """Return the space `Dict(messages=…)`, the same object at every call."""
        return self._of(agent, self._spaces)

    def action_space(self, agent: str) -> Utterance:
        """Return the space of all unicode texts, the same object at every call."""
        return self._of(agent, self._actions)

    def reset(self, seed: int | None = None, options: Mapping[str, object] | None = None) -> None:
        """Begin a new episode with a new trace. `options={"task_id": …}` selects the task; the default is a random one."""
        if seed is not None:
            self._chance = random.Random(seed)
        options = dict(options or {})
        task_id = options.pop("task_id", None)
        for name in options:  # PettingZoo allows options of other environments; misspelt ones are errors
            if name == "task" or nearest(name, ["task_id"], alike=0.6, instead=""):
                raise unknown("reset option", name, ["task_id"])
        if task_id is None:
            task_id = self._chance.choice(self.arena.task_ids)
        self._close_episode()
        task = self.arena.task(str(task_id))
        self._begin(self.arena.start(task, self._chance.getrandbits(48)), self.arena.scorer(task))
        if self._act is None and self._play is not None and self._play.ended is not Ended.ERROR:
            raise WorkflowError(
                f"{self.arena.env_id}: the episode of task {task.id!r} ended without asking anybody to act"
            )

    def observe(self, agent: str) -> Observation:
        """Return the messages of the agent's pending act, or else of its latest act. Before its first act there are none."""
        self._of(agent, self._spaces)
        if self._play is not None:
            for node in self._play.pending:
                if node.agent == agent:
                    return {"messages": shown(node)}
        return {"messages": self._last_seen.get(agent, ())}

    def step(self, action: str | None) -> None:
        """Reply with `action` as the selected agent."""
        if self._play is None or not self.agents:
            raise WorkflowError("the episode is over (or was never begun); call reset() first")
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            self._was_dead_step(action)
            return
        if not isinstance(action, str):
            raise TypeError(f"{agent} must say a string, got {type(action).__name__} {action!r:.60}")
        if len(action) > MAX_REPLY:
            raise ValueError(f"{agent} said {len(action):,} characters; a reply has at most {MAX_REPLY:,}")
        node = self._act
        assert node is not None
        self._last_seen[agent] = shown(node)
        self._cumulative_rewards[agent] = 0.0
        self.infos[agent]["credits"] = []
        self._clear_rewards()
        self._play.answer(node, action)
        self._go_on()
        self._accumulate_rewards()
        if not all(self._live(a) for a in self.agents):
            self._deads_step_first()
        if self.render_mode == "human":
            self.render()

    def state(self) -> NoReturn:
        """Raise an error, because no global observation exists. The trace shows the whole episode."""
        raise WorkflowError("a team of language models has no state array; read env.unwrapped.trace instead")

    def render(self) -> Picture | str | None:
        """Show the episode so far: return it as text (`ansi`), print it (`human`), or return a picture (`rgb_array`).

        A workflow with a world has a method `picture(trace, task)`, which returns a uint8 array (height, width, 3). It may
        also have a method `scene(trace, task)`, which returns a text.
        """
        if self.render_mode is None:
            raise WorkflowError("this environment was made without render_mode; make(…, render_mode='ansi')")
        if self.render_mode == "rgb_array":
            picture: Picture = self.arena.workflow.picture(self.trace, self.execution.task)  # type: ignore[attr-defined]
            return picture
        text = episode_text(self.trace) if self._play is not None else ""
        if self._play is not None and hasattr(self.arena.workflow, "scene"):
            text = f"{text}\n{self.arena.workflow.scene(self.trace, self.execution.task)}"
        if self.render_mode == "human":
            print(text)
            return None
        return text

    def close(self) -> None:
        """Close the episode's simulators."""
        self._close_episode()

    # beyond PettingZoo ---------------------------------------------------------------------------

    @property
    def trace(self) -> Trace:
        """Trace of the current episode: the graph of its nodes."""
        if self._play is None:
            raise WorkflowError("there is no episode yet; call reset() first")
        trace = self.arena.label(self._scorer.show(self._play.trace))
        trace.origin = self.arena, None, self._play.task  # who steps it is not known here
        return trace

    @property
    def execution(self) -> Execution:
        """Execution of the current episode."""
        if self._play is None:
            raise WorkflowError("there is no episode yet; call reset() first")
        return self._play

    def fork(self, at: str | None = None, seed: int | None = None) -> WorkflowEnv:
        """Return an independent environment in the same state, or in the state before the reply of node `at`."""
        stuck = self.arena.toolbox.forkable(self.execution)
        if stuck is not None:
            raise WorkflowError(f"this episode used the tool {stuck!r}, which is unforkable")
        twin = WorkflowEnv(self.arena, self.render_mode)
        twin._chance.setstate(self._chance.getstate())
        twin._begin(self.execution.fork(at, seed), self.arena.scorer(self.execution.task))
        if at is None:
            twin.rewards, twin._cumulative_rewards = dict(self.rewards), dict(self._cumulative_rewards)
            twin.infos = {a: {**info, "credits": list(info["credits"])} for a, info in self.infos.items()}
            twin.agents, twin.agent_selection = list(self.agents), self.agent_selection
            twin._skip_agent_selection = self._skip_agent_selection
            twin.terminations, twin.truncations = dict(self.terminations), dict(self.truncations)
            twin._last_seen = dict(self._last_seen)
        return twin

    def __deepcopy__(self, memo: object) -> WorkflowEnv:
        return self.fork() if self._play is not None else WorkflowEnv(self.arena, self.render_mode)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_act": None if self._act is None else self._act.id}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        node = state["_act"]
        if self._play is not None and isinstance(node, str):
            self._act = self._play.node(node)

    def __str__(self) -> str:
        return self.arena.env_id

    # the machinery -------------------------------------------------------------------------------

    _act: Node | None = None
    _skip_agent_selection: str | None = None

    def _of(self, agent: str, table: Mapping[str, T]) -> T:
        if agent not in table:
            raise unknown("agent", agent, table)
        return table[agent]

    def _close_episode(self) -> None:
        if self._play is not None:
            self.arena.toolbox.close(self._play)

    def _begin(self, play: Execution, scorer: Scorer) -> None:
        self._play, self._scorer = play, scorer
        self.agents = list(self.possible_agents)
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos: dict[str, Info] = {a: {"choices": None, "credits": []} for a in self.agents}
        self.agent_selection = self.agents[0]
        self._skip_agent_selection = None
        self._last_seen = {}
        self._act = None
        for node in play.canonical():
            if node.agent is not None:
                self._last_seen[node.agent] = shown(node)
        self._go_on()

    def _go_on(self) -> None:
        """Call tools until an act is pending, pay new credits, and select the agent that acts next."""
        play = self._play
        assert play is not None
        acts: list[Node] = []
        while play.ended is Ended.NO:
            uses = [n for n in play.pending if n.kind == "use"]
            for node in uses:
                self.arena.toolbox.call(play, node)
            acts = [n for n in play.pending if n.kind == "act"]
            if acts:
                break
        self._book(self._scorer.advance(play.trace, play.round))
        if play.ended is Ended.ERROR:
            error = play.exception
            raise error if error is not None else WorkflowError(play.reason)
        if play.ended is not Ended.NO:
            self._act = None
            over = self.terminations if play.ended is Ended.TERMINAL else self.truncations
            for agent in self.agents:
                over[agent] = True
                self.infos[agent]["choices"] = None
            return
        node = self._act = acts[0]
        assert isinstance(node, Act)
        agent = self.agent_selection = node.agent or ""
        info = self.infos[agent]
        info["choices"], info["node"] = node.format.choices, node.id
        info["role"], info["turn"] = node.role, node.turn

    def _book(self, credits: list[Credit]) -> None:
        """Pay each agent the new credits of its nodes."""
        if not credits:
            return
        assert self._play is not None
        owner = {n.id: n.agent for n in self._play.nodes if n.agent is not None}
        for credit in credits:
            agent = owner[credit.node]
            self.rewards[agent] += credit.amount
            self.infos[agent]["credits"].append((credit.node, credit.component, credit.amount))

    def _live(self, agent: str) -> bool:
        return not (self.terminations[agent] or self.truncations[agent])


def shown(node: Node) -> tuple[Message, ...]:
    """Return a node's messages as an observation: plain dicts, with `role` and `content` as plain strings."""
    return tuple({k: str(v) if k in ("role", "content") else v for k, v in m.items()} for m in node.messages)
