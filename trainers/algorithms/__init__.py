"""Algorithms by name.

    algorithm = make_algorithm("grpo", clip_high=0.28)       # an unknown key is an error that names the nearest
    list_algorithms()                                         # ["at_grpo", "dapo", …]
    register_algorithm("mine", "my_package.mine:Mine")        # or an entry point in the group unitymas.algorithms
    make_algorithm("my_package.mine:Mine")                    # or by its place, without registering

Each algorithm is one file. Its class is imported when it is first made. How to add one: docs/new-algorithm.md.
"""

from __future__ import annotations

from dataclasses import fields
from typing import get_type_hints

from ...agents.basics.hints import described, fits, nearest
from ...agents.basics.json_types import JsonObject
from ...agents.basics.named_parts import Registry
from .algorithm import Algorithm, GroupRelative, Needs, Plan, PolicyGradient, Tree

__all__ = [
    "Algorithm",
    "GroupRelative",
    "Needs",
    "Plan",
    "PolicyGradient",
    "Tree",
    "config_of",
    "list_algorithms",
    "make_algorithm",
    "register_algorithm",
]

ALGORITHMS: Registry[type[Algorithm]] = Registry(
    "algorithm",
    "unitymas.algorithms",
    __name__,
    {
        "at_grpo": ".at_grpo:ATGRPO",
        "dapo": ".dapo:DAPO",
        "dr_grpo": ".dr_grpo:DrGRPO",
        "dr_mas": ".dr_mas:DrMAS",
        "gigpo": ".gigpo:GiGPO",
        "grpo": ".grpo:GRPO",
        "gspo": ".gspo:GSPO",
        "m_grpo": ".m_grpo:MGRPO",
        "mappo": ".mappo:MAPPO",
        "matpo": ".matpo:MATPO",
        "ppo": ".ppo:PPO",
        "reinforce_pp": ".reinforce_pp:ReinforcePP",
        "rloo": ".rloo:RLOO",
    },
)


def register_algorithm(name: str, where: str | type[Algorithm]) -> None:
    """Add an algorithm by name: a class, or "package.module:Class", which is imported when first used."""
    ALGORITHMS.register(name, where)


def list_algorithms() -> list[str]:
    return ALGORITHMS.names()


def make_algorithm(name: str, **config: object) -> Algorithm:
    """Make the algorithm called `name`. Fields that `config` does not give have the defaults of the class."""
    cls = find_algorithm(name)
    return cls(**_checked(name, cls, config))


def config_of(algorithm: Algorithm) -> dict[str, object]:
    """Return the fields of an algorithm and their values, in order, as a dry run prints them."""
    return {field.name: getattr(algorithm, field.name) for field in fields(algorithm)}


def find_algorithm(name: str) -> type[Algorithm]:
    """Return the class of a name, of "module:Class", or of "file.py:Class"."""
    cls: object = ALGORITHMS.find(name)
    if not (isinstance(cls, type) and issubclass(cls, Algorithm)):
        raise TypeError(f"algorithm {name!r} is {cls!r}: it must be a class derived from Algorithm")
    return cls


def _checked(name: str, cls: type[Algorithm], config: JsonObject) -> JsonObject:
    """Refuse unknown keys, and values of the wrong kind (YAML reads `1e-3` as a string, for one)."""
    hints = get_type_hints(cls)
    names = [field.name for field in fields(cls)]
    config = {key: tuple(value) if isinstance(value, list) else value for key, value in config.items()}
    for key, value in config.items():
        if key not in names:
            raise ValueError(f"algorithm {name!r} has no key {key!r}: {nearest(key, names)}")
        if not fits(value, hints[key]):
            raise ValueError(f"{name}.{key} is {value!r}: expected {described(hints[key])}")
    return config
