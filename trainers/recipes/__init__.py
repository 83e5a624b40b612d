"""Recipes by name: what one step of a run does, and in which order. One file each; imported when first used.

    unitymas train ID recipe=alternate recipe_args.every=5
    register_recipe("mine", "my_package.mine:Mine")          # or an entry point in the group unitymas.recipes

A recipe derives from `step.Default` and overrides one of its parts: `trains` (who learns in this step), `team`
(who plays), `plan` (how samples are drawn), or the whole `step`. Its fields are its config.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ...agents.basics.hints import nearest
from ...agents.basics.named_parts import Registry
from ..config.reader import build
from ..controller.step import Default

RECIPES: Registry[type[Default]] = Registry(
    "recipe",
    "unitymas.recipes",
    __name__,
    {
        "default": "..controller.step:Default",
        "alternate": ".alternate:Alternate",
        "cory": ".cory:Cory",
        "cross": ".cross:Cross",
        "malt": ".malt:Malt",
        "mlpo": ".mlpo:Mlpo",
        "several": ".several:Several",
    },
)


def register_recipe(name: str, where: str | type[Default]) -> None:
    """Add a recipe by name: a class, or "package.module:Class"."""
    RECIPES.register(name, where)


def list_recipes() -> list[str]:
    return RECIPES.names()


def make_recipe(name: str, args: Mapping[str, object]) -> Default:
    """Make the recipe called `name`, or "module:Class". The error for an unknown name or key names the nearest one."""
    where = RECIPES.find(name)
    fields: tuple[dataclasses.Field[object], ...] = (
        dataclasses.fields(where) if dataclasses.is_dataclass(where) else ()
    )
    names = [field.name for field in fields]
    for key in args:
        if key not in names:
            hint = nearest(key, names) if names else "it has none"
            raise ValueError(f"recipe {name!r} has no key {key!r}; {hint}")
    for field in fields:
        if field.name not in args and field.default is field.default_factory is dataclasses.MISSING:
            raise ValueError(f"recipe {name!r} needs recipe_args.{field.name}")
    made: Default = build(where, args, "recipe_args") if fields else where()
    return made
