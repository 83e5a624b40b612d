"""Ways to map roles to models, as config trees: shared, separate, partial.

shared      one policy plays every role
separate    every role has a policy in a model group of its own
lora        every role has a low-rank adapter on one model
partial     roles that do the same kind of work share a policy (`KIN`), the others have their own
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..hints import nearest

KIN: tuple[tuple[str, ...], ...] = (
    ("planner", "answerer"),  # M-ASK's published partial sharing: both reason over the whole question
    ("solver", "verifier"),
    ("refiner", "finalizer"),
    ("coder", "reflector"),
    ("decomposer", "answerer"),
    ("rewriter", "answerer"),
)
PRESETS = ("shared", "separate", "lora", "partial")


def preset(name: str, roles: Sequence[str]) -> dict[str, Any]:
    """The `groups`, `policies` and `map` of a preset, for these roles."""
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}; {nearest(name, PRESETS)}")
    shares: list[tuple[str, ...]] = kin(roles) if name == "partial" else [(r,) for r in roles]
    if name == "shared":
        shares = [tuple(roles)]
    tree: dict[str, Any] = {"groups": {}, "policies": {}, "map": {}}
    for members in shares:
        own = "team" if len(members) == len(roles) else "-".join(members)
        lora = name == "lora"
        group = "base" if lora else own
        tree["groups"][group] = {}
        tree["policies"][own] = {"group": group, **({"adapter": {}} if lora else {})}
        tree["map"].update({role: own for role in members} if own != "team" else {"*": own})
    return tree


def kin(roles: Sequence[str]) -> list[tuple[str, ...]]:
    """Roles put together by `KIN`, in the order of the roles."""
    shares: list[tuple[str, ...]] = []
    placed: set[str] = set()
    for role in roles:
        if role in placed:
            continue
        family = next(
            (f for f in KIN if role in f and all(r in roles and r not in placed for r in f)), (role,)
        )
        placed.update(family)
        shares.append(family)
    return shares
