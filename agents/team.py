"""A team: who plays which role.

    Team({"planner": my_function, "*": "scripted"})

Keys are an agent, else its role, else `"*"`. Values are a policy, a plain function `(agent, messages) ->
str`, or a name: `"scripted"` (the workflow's expert), `"random"`, `"fool"`, `"human"`, `"tiny"` (the
embedded model), `"hf:PATH"`, `"vllm:PATH"`, `"openai:MODEL@URL"`, `"run:PATH"` (a training run's newest policies).
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from ..own import defined
from .hints import nearest
from .model_settings import ModelSettings
from .outage import Failures
from .policies import (
    Answer,
    Call,
    ExpertPolicy,
    FoolPolicy,
    HumanPolicy,
    Policy,
    RandomPolicy,
    as_policy,
    innermost,
)
from .roles import Role

NAMED: dict[str, Callable[[], Policy]] = {"random": RandomPolicy, "fool": FoolPolicy, "human": HumanPolicy}
SCHEMES = ("hf", "openai", "run", "vllm")
LOADED = ("tiny", "hf", "run", "vllm")
"""Models in this process: a team loads each once, at whatever tables it sits."""


class TeamError(ValueError):
    """A team does not fit its environment; the message names the role."""


class Team:
    """A map from agents, roles or `"*"` to who plays them."""

    def __init__(self, seats: Mapping[str, Any] | Any, **settings: Any) -> None:
        """`settings`: of all its models that are given by name (`temperature`, `device` …: `ModelSettings`)."""
        self.seats: dict[str, Any] = dict(seats) if isinstance(seats, Mapping) else {"*": seats}
        if not self.seats:
            raise TeamError('an empty team; give at least {"*": …}')
        self._loaded: dict[str, Policy] = {}
        for seat, given in self.seats.items():
            _check_seat(seat, given)
        self.settings = ModelSettings(**settings)
        names = [given for given in self.seats.values() if isinstance(given, str)]
        for key in self.settings.told():
            if not any(key in self.settings.of(name) for name in names):
                raise TeamError(
                    f"{key} was given, but nobody in {self!r} takes it: it is a setting of models by name"
                )

    @classmethod
    def of(cls, given: Any) -> Team:
        """A team as it is, a mapping as a team, anything else as the one policy of all."""
        return given if isinstance(given, Team) else cls(given)

    def bind(self, roles: Mapping[str, Role], expert: Any = None) -> BoundTeam:
        """Seat every agent; a seat nobody has, and an agent without a seat, are errors."""
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
        for agent, role in roles.items():
            key = next((k for k in (agent, role.name, "*") if k in self.seats), None)
            if key is None:
                raise TeamError(f"nobody plays {agent!r}; add {agent!r}, {role.name!r} or '*' to the team")
            given = self.seats[key]
            if isinstance(given, str):
                if given.partition(":")[0] in LOADED:
                    shared[given] = self._load(given)
                elif given not in shared:
                    shared[given] = _named(given, expert, self.settings)
                seated[agent], labels[agent] = shared[given], given
            else:
                seated[agent], labels[agent] = as_policy(given), repr(given)
        return BoundTeam(seated, labels)

    def _load(self, name: str) -> Policy:
        if name not in self._loaded:
            self._loaded[name] = _named(name, None, self.settings)
        return self._loaded[name]

    def __repr__(self) -> str:
        return f"Team({self.seats!r})"


class BoundTeam:
    """A team at its table: every agent has a policy."""

    def __init__(self, policies: Mapping[str, Policy], names: Mapping[str, str]) -> None:
        self.policies, self.names = dict(policies), dict(names)
        self.keep_tokens = ""  # what every call asks to be kept: "ids", "text", or nothing
        self.failures = Failures()
        self._sees = {agent for agent, p in self.policies.items() if getattr(p, "sees_reference", False)}

    def sees(self, agent: str | None) -> bool:
        """Whether this agent's policy is shown the reference (experts only)."""
        return agent in self._sees

    def place(self, agent: str | None) -> str:
        """File and line of the function or the method that plays an agent."""
        policy = self.policies[agent or ""]
        return defined(getattr(policy, "fn", policy.act))

    def ask_any(self, call: Call) -> str | Answer | Awaitable[str | Answer]:
        """Ask; the answer may have to be awaited."""
        if self.keep_tokens:
            call.keep_tokens = self.keep_tokens
        return self.policies[call.agent].act(call)

    def ask(self, call: Call) -> str | Answer:
        """Ask, blocking."""
        said = self.ask_any(call)
        if inspect.isawaitable(said):
            return asyncio.run(_wait(said))
        return said

    async def __aenter__(self) -> BoundTeam:
        for policy in innermost(self.policies.values()):
            if hasattr(policy, "open"):
                await policy.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        for policy in innermost(self.policies.values()):
            if hasattr(policy, "close"):
                await policy.close()


async def _wait(said: Awaitable[str | Answer]) -> str | Answer:
    return await said


def _check_seat(seat: str, given: Any) -> None:
    if not isinstance(given, str):
        as_policy(given)
        return
    known = [*NAMED, "scripted", "tiny"]
    if given in known or given.partition(":")[0] in SCHEMES and ":" in given:
        return
    hint = nearest(given, [*known, "hf:PATH", "vllm:PATH", "openai:MODEL@URL", "run:PATH"], "known:")
    raise TeamError(f"seat {seat!r}: unknown policy {given!r}; {hint}")


def _named(name: str, expert: Any, settings: ModelSettings) -> Policy:
    if name == "scripted":
        if expert is None:
            raise TeamError("this environment has no scripted expert; give each role a policy")
        return ExpertPolicy(expert)
    if name in NAMED:
        return NAMED[name]()
    if name.startswith("openai:"):
        from .remote import OpenAIPolicy

        return OpenAIPolicy.of(name, **settings.of(name))
    from .llm import load_policy  # torch comes in here, and only here

    return load_policy(name, **settings.of(name))
