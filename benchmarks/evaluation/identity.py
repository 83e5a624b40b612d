"""Identity of an evaluation: keys of samples, identities of players, and the provenance.

A sample's key is a hash of all that its episode depends on: the task's content, the environment (version, code,
configuration, budget), the players of all roles, the seed and the index of the sample. Equal keys mean the same experiment,
so a finished episode is never generated again. Any change gives another key, so an old episode is never used for it.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import os
import platform
import subprocess
import sys
import textwrap
import tokenize
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from types import CellType, CodeType
from typing import Any

from ...agents.roles import Role
from ...agents.team import BoundTeam
from ...envs.core.arena import Arena, bare_code
from ...envs.core.tasks import Task
from .result_types import Checkout, Provenance, RunDict, SeatDict, WorldDict
from .results import canonical

LIBRARIES = (
    "unitymas",
    "numpy",
    "gymnasium",
    "pettingzoo",
    "torch",
    "transformers",
    "vllm",
    "ray",
    "bm25s",
    "math-verify",
)


def digest(value: object, length: int = 16) -> str:
    """Return a short SHA-256 of a JSON-like value."""
    return hashlib.sha256(canonical(value)).hexdigest()[:length]


def who(policy: object, label: str) -> SeatDict:
    """Return the identity of a player.

    A model has a method ``identity()`` (hash of the weights, template, sampling). Functions and scripted players are
    identified by name and source.
    """
    inner = getattr(policy, "fn", policy)
    kind = _code_of(inner)
    name = f"{kind.__module__}.{kind.__qualname__}"
    player = {"player": name if " at 0x" in label else label}
    told = getattr(policy, "identity", None)
    if told is not None:
        return {**player, **(told() if callable(told) else told)}
    state = (
        {key: _plain(value) for key, value in vars(inner).items()}
        if hasattr(inner, "__dict__") and kind is not inner
        else {}
    )
    return {**player, "name": name, "code": _source_hash(kind), **({"state": state} if state else {})}


def role_config(team: BoundTeam, arena: Arena) -> dict[str, SeatDict]:
    """Return the identity of each agent's player, with a hash of its role's prompt. It is part of keys and provenance."""
    return {
        agent: {
            "role": role.name,
            **who(team.policies[agent], team.names[agent]),
            "prompt_sha": prompt_sha(role),
        }
        for agent, role in arena.roles.items()
    }


def prompt_sha(role: Role) -> str:
    """Return a hash of a role's system message and reply format."""
    asked = {} if role.wording is None else {"prompt": role.wording.source}
    return digest({"system": role.system, "reply": role.reply.describe(), **asked})


def players_hash(players: Mapping[str, Mapping[str, object]]) -> str:
    """Return one hash of a role config. Names of players do not count, because a run may be moved and a model renamed."""
    return digest(
        {agent: {k: v for k, v in seat.items() if k != "player"} for agent, seat in players.items()}
    )


def world(arena: Arena) -> WorldDict:
    """Return the environment's part of a key."""
    return {
        "env_id": arena.env_id,
        "code_hash": arena.code_hash,
        "config": arena.config,
        "budget": asdict(arena.budget),
        "tools": {name: _source_hash(_code_of(tool.fn)) for name, tool in arena.toolbox.tools.items()},
        "index": passages_hash(arena),
    }


def passages_hash(arena: Arena) -> str | None:
    """Return a hash of the passages that a search can find, or None without passages."""
    passages = arena.data.passages
    return None if passages is None else arena.data.fingerprint


def sample_key(world_: str, players: str, task: Task, seed: int, sample: int) -> str:
    """Return the key of one sample."""
    return digest([world_, players, task.row, seed, sample], 24)


def tasks_hash(tasks: Sequence[Task]) -> str:
    """Return one hash of the tasks in order. Two results are comparable if it is equal."""
    return digest([digest(task.row, 64) for task in tasks])


def provenance(arena: Arena, players: Mapping[str, SeatDict], tasks: Sequence[Task], seed: int) -> Provenance:
    """Return all facts that are needed to run an evaluation again. They are equal in two runs of the same command."""
    return {
        "env": world(arena),
        "data": {
            "name": arena.data.name, "split": arena.data.split, "fingerprint": arena.data.fingerprint,
            "tasks_hash": tasks_hash(tasks), "tasks": len(tasks),
        },
        "roles": dict(players),
        "seed": seed,
        "libraries": {name: number for name in LIBRARIES if (number := _version(name))},
        "git": _git(),
    }  # fmt: skip


def this_run() -> RunDict:
    """Return place and time of this run, which differ between two runs of the same command."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "gpu": _gpu(),
    }


def _code_of(callable_: object) -> Any:
    return callable_ if inspect.isroutine(callable_) else type(callable_)


def _source_hash(kind: Any) -> str:
    """Return a hash of a function's or class's source, with a function's closure. It is equal in every version of Python.

    Docstrings and comments do not count, as in the hash of an environment. Lambdas are identified by bytecode too, because two
    may stand in one line.
    """
    try:
        source = _source(kind)
    except (OSError, TypeError):  # made at a prompt, or built in
        source = getattr(kind, "__qualname__", repr(type(kind)))
    with contextlib.suppress(SyntaxError, tokenize.TokenError):  # a lambda's line may be part of a statement
        source = bare_code(textwrap.dedent(source))
    code = getattr(kind, "__code__", None) if getattr(kind, "__name__", "") == "<lambda>" else None
    caught = [_cell(cell) for cell in getattr(kind, "__closure__", None) or ()]
    defaults = [_plain(value) for value in getattr(kind, "__defaults__", None) or ()]
    return digest([source, _code(code) if code is not None else None, caught, defaults])


def _source(kind: Callable[..., object]) -> str:
    try:
        return inspect.getsource(kind)
    except SystemError:  # before Python 3.11.8, a garbage collection that parses code, too, disturbs it
        return inspect.getsource(kind)


def _code(code: CodeType) -> list[object]:
    consts = [_code(const) if isinstance(const, CodeType) else repr(const) for const in code.co_consts]
    return [code.co_code.hex(), list(code.co_names), consts]


def _cell(cell: CellType) -> object:
    try:
        return _plain(cell.cell_contents)
    except ValueError:  # not filled yet
        return None


def _plain(value: object) -> object:
    """Return a value as JSON, or only its type, because a repr may contain an address."""
    return value if isinstance(value, (str, int, float, bool, type(None))) else type(value).__qualname__


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _git() -> Checkout | None:
    """Return the commit of the package's checkout, and whether files were changed; None for an installed package."""
    here = Path(__file__).resolve().parent
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no", "--", "."], cwd=here.parent,
            capture_output=True, text=True, timeout=10, check=True,
        ).stdout.strip()  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit, "dirty": bool(changed)}


def _gpu() -> str | None:
    torch = sys.modules.get("torch")  # never loaded for this
    if torch is None or not torch.cuda.is_available():
        return None
    return str(torch.cuda.get_device_name())
