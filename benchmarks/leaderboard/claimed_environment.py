"""Environment of a submission, made here without running anything that the submission names.

Only registered environments are made, on registered data, with settings that are plain data: numbers, words and tables of
these. Entry points and paths are refused, so nothing of a submission is imported, called or opened. Other environments count
as *own code: not verified*, which is neither an accusation nor a verification.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping

from ...agents.basics.json_types import JsonObject
from ...agents.policies import ExpertPolicy, FoolPolicy, Policy, RandomPolicy
from ...envs.core.arena import Arena
from ...envs.core.tasks import Task
from ...envs.core.trace import jsonable
from ...envs.data import sets
from ...envs.registry import EnvSpec, UnknownEnv, make_arena, resolve, spec
from ..evaluation import identity
from ..evaluation.result_types import DataDict, Results, SeatDict
from ..evaluation.results import canonical

_WORD = re.compile(r"[A-Za-z0-9_ -]{0,64}")
_LARGEST = 1_000_000


class NotVerified(ValueError):
    """Raised when an entry cannot be replayed here. The message names the missing code or data."""


def remake(results: Results) -> Arena:
    """Return the arena of a submission whose results are valid. `NotVerified` gives the reason why there is none."""
    env, data = results["provenance"]["env"], results["provenance"]["data"]
    arena = make_again(results)
    if arena.code_hash != env["code_hash"]:
        raise NotVerified(
            f"not verified: made by other code than is here: the environment's code is {arena.code_hash} here, "
            f"and was {env['code_hash']:.40}"
        )
    if arena.data.fingerprint != data["fingerprint"] and not _generated(spec(env["env_id"]), data["name"]):
        raise NotVerified(
            f"not verified: {data['name']} has fingerprint {arena.data.fingerprint} on this machine, "
            f"and had {data['fingerprint']:.40}"
        )
    return arena


def make_again(results: Results) -> Arena:
    """Return the arena of a submission with the code and data of this machine, even if they differ from its own."""
    env, data = results["provenance"]["env"], results["provenance"]["data"]
    try:
        known = spec(env["env_id"])
    except UnknownEnv:
        raise NotVerified(f"own code: not verified: {env['env_id']} is not registered here") from None
    modified = env["config"]["modified"]
    if own := [name for name in modified if name in ("reward", "tasks") or name.startswith("tools.")]:
        raise NotVerified(
            f"own code: not verified: the environment was modified ({', '.join(map(str, own))})"
        )
    how: JsonObject = {"budget": env["budget"]} if "budget" in modified else {}
    try:
        return make_arena(known.id, **where(known, data), **settings(known, env["config"]), **how)
    except NotVerified:
        raise
    except Exception as error:
        raise NotVerified(
            f"not verified: it cannot be made here ({type(error).__name__}: {str(error):.200})"
        ) from None


def settings(known: EnvSpec, config: Mapping[str, object]) -> JsonObject:
    """Return the workflow's arguments from a claimed configuration. Raise `NotVerified` if it holds anything else."""
    taken = inspect.signature(resolve(known.workflow)).parameters
    values: JsonObject = {}
    for name, value in config.items():
        if name in ("modified", "prompts_hash"):
            continue
        if name == "prompts":  # prompts are data; a text that is not the name of a set might be a path
            if not isinstance(value, Mapping) and value not in ("full", "few-shot", "short"):
                raise NotVerified(f"own code: not verified: {value!r:.60} is no prompt set of {known.id}")
            values[name] = value
            continue
        if name in known.config and jsonable(known.config[name]) == value:
            continue  # the registered value
        if name not in taken or taken[name].kind in (
            inspect.Parameter.VAR_KEYWORD,
            inspect.Parameter.VAR_POSITIONAL,
        ):
            raise NotVerified(f"own code: not verified: {name!r:.60} is no setting of {known.id}")
        if not plain(value):
            raise NotVerified(
                f"own code: not verified: the setting {name!r:.60} is {value!r:.60}; only numbers and words are plain data"
            )
        values[name] = value
    return values


def plain(value: object, levels: int = 3) -> bool:
    """Tell whether a setting is data: a number of limited size, a word, or a short list or table of these.

    A word has neither ``:`` nor ``.`` nor ``/``, so it is neither an entry point nor a path.
    """
    if value is None or isinstance(value, bool):
        return True
    if isinstance(value, (int, float)):
        return -_LARGEST <= value <= _LARGEST
    if isinstance(value, str):
        return _WORD.fullmatch(value) is not None
    if levels and isinstance(value, list):
        return len(value) <= 100 and all(plain(item, levels - 1) for item in value)
    if levels and isinstance(value, Mapping):
        return len(value) <= 100 and all(plain(k) and plain(v, levels - 1) for k, v in value.items())
    return False


def where(known: EnvSpec, data: DataDict) -> JsonObject:
    """Return the arguments for the tasks: of the environment itself, of the mini world, or of a prepared data set."""
    name, split = data["name"], data["split"]
    if known.tasks is not None:
        return {"split": split}
    if name != "mini" and (_WORD.fullmatch(name) is None or not sets.is_prepared(name)):
        raise NotVerified(f"not verified: the data set {name!r:.60} is not prepared on this machine")
    return {"data": name, "split": split}


def tasks_of(arena: Arena, results: Results) -> list[Task]:
    """Return the tasks of an evaluation: the first ones of the split, in order."""
    return [arena.task(id) for id in list(arena.task_ids)[: results["provenance"]["data"]["tasks"]]]


def untrue(arena: Arena, tasks: list[Task], results: Results) -> Iterator[str]:
    """Yield each part of the provenance that differs when it is computed again."""
    told = results["provenance"]
    pairs: list[tuple[str, object, object]] = [
        (f"provenance.env.{name}", told["env"].get(name), value)
        for name, value in jsonable(identity.world(arena)).items()
    ]
    data = told["data"]
    pairs += [
        ("provenance.data.name", data["name"], arena.data.name),
        ("provenance.data.split", data["split"], arena.data.split),
        ("provenance.data.fingerprint", data["fingerprint"], arena.data.fingerprint),
        ("provenance.data.tasks_hash", data["tasks_hash"], identity.tasks_hash(tasks)),
        ("provenance.roles", sorted(told["roles"]), sorted(arena.roles)),
    ]
    for agent in sorted(told["roles"].keys() & arena.roles.keys()):
        seat, role = told["roles"][agent], arena.roles[agent]
        prompt = identity.prompt_sha(role)
        pairs.append((f"provenance.roles.{agent}.role", seat["role"], role.name))
        pairs.append((f"provenance.roles.{agent}.prompt_sha", seat["prompt_sha"], prompt))
    for name, theirs, ours in pairs:
        if canonical(theirs) != canonical(ours):
            yield f"{name}: the submission says {theirs!r:.80}, the environment gives {ours!r:.80}"


def scripted_players(arena: Arena) -> dict[str, tuple[Policy, SeatDict]]:
    """Return the scripted players that come with unitymas, with their identities, by the names of their code."""
    policies: list[Policy] = [RandomPolicy(), FoolPolicy()]
    if arena.expert is not None:
        policies.append(ExpertPolicy(arena.expert))
    seats = [(policy, identity.who(policy, "")) for policy in policies]
    return {str(seat["name"]): (policy, seat) for policy, seat in seats}


def players(arena: Arena, results: Results) -> dict[str, Policy]:
    """Return the players that come with unitymas, by agent. They can be asked again, and give the same replies."""
    ours = scripted_players(arena)
    seated: dict[str, Policy] = {}
    for agent, seat in results["provenance"]["roles"].items():
        if str(seat.get("name")) not in ours:
            continue
        policy, identity_of = ours[str(seat["name"])]
        if seat.get("code") != identity_of["code"]:
            raise NotVerified(
                f"not verified: {agent} is played by {seat['name']}, whose code is {identity_of['code']} here, "
                f"and was {seat.get('code')!r:.40}"
            )
        seated[agent] = policy
    return seated


def mislabelled(arena: Arena, again: Mapping[str, Policy], results: Results) -> Iterator[str]:
    """Yield each of these players that the entry shows under another name."""
    words = {RandomPolicy: "random", FoolPolicy: "fool", ExpertPolicy: "scripted"}
    for agent in sorted(again.keys() & arena.roles.keys()):
        policy = again[agent]
        seat = results["provenance"]["roles"][agent]
        prompt = identity.prompt_sha(arena.roles[agent])
        ours = {**identity.who(policy, seat["player"]), "role": arena.roles[agent].name, "prompt_sha": prompt}
        if canonical(seat) != canonical(ours):
            yield f"provenance.roles.{agent}: the submission says {seat!r:.120}, {seat['name']} is {ours!r:.120}"
        if seat["player"] not in (word := words[type(policy)], seat["name"]):
            yield f"provenance.roles.{agent}.player: {seat['player']!r:.60}, but {seat['name']} is called {word!r}"


def _generated(known: EnvSpec, name: str) -> bool:
    return known.tasks is not None or name == "mini"
