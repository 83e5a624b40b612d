"""A team: which policy plays which role.

    Team({"planner": my_function, "*": "scripted"})

A key is an agent, else its role, else `"*"`. A value is a policy, a plain function `(agent, messages) -> str`, or a
name: `"scripted"` (the workflow's expert), `"random"`, `"fool"`, `"human"`, or a model by its name (`names.py`):
`"tiny"` (the embedded one), `"smollm2"`, `"hf:ORG/NAME"`, `"PATH"`, `"run:DIR"`, `"openai:MODEL@URL"` …
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from ..own import defined
from .basics.failures import Failures
from .basics.hints import nearest
from .basics.named_parts import Registry, is_place
from .basics.threads import ordinary, tell
from .fetch.packaged import PACKAGES
from .model_settings import ModelSettings
from .names import FORMS, apart, common_prompts, endpoint_of, prompts_of, read_name
from .policies import (
    Answer,
    Call,
    ExpertPolicy,
    FoolPolicy,
    HumanPolicy,
    PlainPolicy,
    Policy,
    RandomPolicy,
    as_policy,
    innermost,
)
from .roles import Role, entry_of, nobody_plays
from .spending import Spending

Player = str | Policy | PlainPolicy
"""Player: a name, a policy, or a plain function `(agent, messages) -> str`."""
Expert = Callable[[Call], str]
PLAYERS: Registry[type[Policy] | Policy | PlainPolicy] = Registry(
    "player",
    "unitymas.players",
    own={"random": RandomPolicy, "fool": FoolPolicy, "human": HumanPolicy, "scripted": ExpertPolicy},
)
"""Players that are not models: classes of policies, policies, or functions `(agent, messages) -> str`."""


def is_player(name: str) -> bool:
    """Tell whether a name is that of a player that is not a model: one of `PLAYERS`, package.module:name or
    file.py:name.
    """
    placed = is_place(name) and "." in name.rpartition(":")[0]
    return name in PLAYERS or placed and (".py:" in name or read_name(name) is None)


class TeamError(ValueError):
    """Raised when a team does not fit its environment. The message names the role."""


class Team:
    """A map from agents, roles or `"*"` to their policies."""

    def __init__(self, seats: Mapping[str, Player] | Player, **settings: Any) -> None:
        """Make a team. `settings` (`temperature`, `device` …: `ModelSettings`) apply to all models that are given by
        name.
        """
        self.seats: dict[str, Player] = dict(seats) if isinstance(seats, Mapping) else {"*": seats}
        if not self.seats:
            raise TeamError('an empty team; give at least {"*": …}')
        self._loaded: dict[str, Policy] = {}
        for seat, policy in self.seats.items():
            _check_seat(seat, policy)
        for key in settings:
            if key not in ModelSettings.__slots__:
                raise TypeError(f"Team takes no setting {key!r}; {nearest(key, ModelSettings.__slots__)}")
        self.settings = ModelSettings(**settings)
        self.spending = Spending(self.settings.budget_dollars, self.settings.budget_tokens)
        names = [policy for policy in self.seats.values() if isinstance(policy, str)]
        for key in self.settings.told():
            if not any(key in self.settings.of(name) for name in names):
                raise TeamError(
                    f"{key} was given, but nobody in {self!r} takes it: it is a setting of models by name"
                )

        models = [endpoint_of(one)[0] for one in names if one.startswith("openai:")]
        for model in self.settings.price or {}:
            if model != "*" and model not in models:
                hint = nearest(model, models, "it has")
                raise TeamError(f"price of {model!r}: no endpoint of the team has this model; {hint}")

    @classmethod
    def of(cls, team: TeamLike) -> Team:
        """Make a team of a team, of a mapping, or of one policy for all."""
        return team if isinstance(team, Team) else cls(team)

    @property
    def prompts(self) -> object:
        """Return the prompt set that fits the team's models (`common_prompts`). None if no player needs a set."""
        wanted = {
            str(player): one for player in self.seats.values() if (one := _prompts_of(player)) is not None
        }
        return common_prompts(wanted) if wanted else None

    def bind(self, roles: Mapping[str, Role], expert: Expert | None = None) -> BoundTeam:
        """Give every agent its policy. An unknown key is an error, and so is an agent without a policy."""
        names = set(roles) | {role.name for role in roles.values()} | {"*"}
        for seat in self.seats:
            if seat not in names:
                hint = nearest(seat, sorted(names), "it has")
                raise TeamError(
                    f"the team names {seat!r}, but this environment has no such agent or role; {hint}"
                )
        shared: dict[str, Policy] = {}
        seated: dict[str, Policy] = {}
        labels: dict[str, str] = {}
        runs = {name for name in self.seats.values() if isinstance(name, str) and name.startswith("run:")}
        absent = {name: apart(name.removeprefix("run:")) for name in runs}
        for agent, role in roles.items():
            policy = entry_of(self.seats, agent, role.name)
            if policy is None:
                raise TeamError(f"{nobody_plays(agent, role.name)} to the team")
            if isinstance(policy, str):
                if name := entry_of(absent.get(policy, {}), agent, role.name):
                    raise TeamError(
                        f"{policy} has no model for {agent!r}: in the run, {name!r} played it; name it, too: "
                        f"{role.name}={name},*={policy}"
                    )
                if policy not in shared:
                    shared[policy] = self.player(policy, expert)
                seated[agent], labels[agent] = shared[policy], policy
            else:
                seated[agent], labels[agent] = as_policy(policy), repr(policy)
        return BoundTeam(seated, labels)

    def player(self, name: str, expert: Expert | None = None) -> Policy:
        """Return the player of a name. A model is loaded once. An endpoint keeps its state between calls."""
        if is_player(name):
            return _named(name, expert, self)
        if name not in self._loaded:
            self._loaded[name] = _named(name, None, self)
        return self._loaded[name]

    def __repr__(self) -> str:
        return f"Team({self.seats!r})"


TeamLike = Team | Mapping[str, Player] | Player
"""Team, or what a team is made of: one player for all agents, or players by agent, role or `"*"`."""


class BoundTeam:
    """A team in one environment: every agent has a policy."""

    def __init__(self, policies: Mapping[str, Policy], names: Mapping[str, str]) -> None:
        self.policies, self.names = dict(policies), dict(names)
        self.keep_tokens = ""  # what every call keeps of the tokens: "ids", "text", or nothing
        self.failures = Failures()
        self._sees = {agent for agent, p in self.policies.items() if getattr(p, "sees_reference", False)}

    def sees(self, agent: str | None) -> bool:
        """Tell whether the policy of this agent gets the task's reference (experts only)."""
        return agent in self._sees

    def place(self, agent: str | None) -> str:
        """File and line of the function or the method that plays an agent."""
        policy = self.policies[agent or ""]
        return defined(getattr(policy, "fn", policy.act))

    def ask_any(self, call: Call) -> str | Answer | Awaitable[str | Answer]:
        """Ask a policy for an answer. The result may be awaitable."""
        if self.keep_tokens:
            call.keep_tokens = self.keep_tokens
        return self.policies[call.agent].act(call)

    def ask(self, call: Call) -> str | Answer:
        """Ask a policy, and block until it has answered."""
        answer = self.ask_any(call)
        if inspect.isawaitable(answer):
            return asyncio.run(_wait(answer))
        return answer

    async def __aenter__(self) -> BoundTeam:
        opened: list[Policy] = []
        try:
            for policy in innermost(self.policies.values()):
                opened.append(policy)
                if hasattr(policy, "open"):
                    await policy.open()
        except BaseException as error:
            await _close(opened)
            if (held := ordinary(error)) is not error:
                raise held from error
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        errors = await _close(innermost(self.policies.values()))
        for error in errors[1:]:
            tell(error)
        if errors:
            raise errors[0]


async def _close(policies: list[Policy]) -> list[Exception]:
    """Close all policies, also if one of them raises. Return the errors."""
    errors = []
    for policy in policies:
        try:
            if hasattr(policy, "close"):
                await policy.close()
        except BaseException as error:
            errors.append(ordinary(error))
    return errors


async def _wait(answer: Awaitable[str | Answer]) -> str | Answer:
    return await answer


def _check_seat(seat: str, policy: Player) -> None:
    if not isinstance(policy, str):
        as_policy(policy)
        return
    if is_player(policy):
        PLAYERS.find(policy)  # a missing model is reported at once
        return
    if read_name(policy) is not None:
        return
    hint = nearest(policy, [*PLAYERS, "tiny", *PACKAGES, *FORMS], "known:")
    raise TeamError(f"seat {seat!r}: unknown policy {policy!r}; {hint}")


def _prompts_of(player: Player) -> object:
    """Return the prompt set of one player. Random players, experts and functions have none."""
    if not isinstance(player, str):
        return getattr(player, "prompts", None)
    if is_player(player):
        return None
    return prompts_of(player)


def _named(name: str, expert: Expert | None, team: Team) -> Policy:
    if name == "scripted":
        if expert is None:
            raise TeamError("this environment has no scripted expert; give each role a policy")
        return ExpertPolicy(expert)
    if is_player(name):
        player = PLAYERS.find(name)
        return as_policy(player() if isinstance(player, type) else player)
    if name.startswith("openai:"):
        from .remote import OpenAIPolicy

        return OpenAIPolicy.of(name, spending=team.spending, **team.settings.endpoint(name))
    from .llm import load_policy  # torch is imported here and nowhere else in this module

    return load_policy(name, **team.settings.of(name))
