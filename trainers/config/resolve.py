"""From what is asked for to a config that can run: what is given laid over preset and defaults, then checked.

    config = resolve("mask-hotpotqa", preset_name="shared", overrides=["steps=20"])

All of this comes before anything is loaded; each error names the key and the way out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...agents import model_path
from ...agents.team import NAMED
from ...envs.registry import spec
from ..algorithms import make_algorithm
from ..controller.statistics.credit import Shaping, credit_from_config
from ..recipes import make_recipe
from .group_settings import Learning
from .presets import preset, settings
from .schema import ConfigError, RunConfig, build, merge, override, read_yaml


def resolve(
    id: str | None = None,
    *,
    preset_name: str | None = None,
    file: str | Path | None = None,
    overrides: Sequence[str] = (),
    **fields: Any,
) -> RunConfig:
    """The config tree: defaults <- preset <- YAML file <- overrides (`a.b=c`) and keyword fields."""
    tree = asked(id, file, overrides, **fields)
    if preset_name is not None:
        tree = over_preset(preset_name, tree)
    return settled(tree)


def asked(id: str | None, file: str | Path | None, overrides: Sequence[str], **fields: Any) -> dict[str, Any]:
    """What is given alone, as a tree."""
    tree = override(merge(read_yaml(file) if file else {}, fields), list(overrides))
    return tree if id is None else merge(tree, {"env": {"id": id}})


def settled(tree: dict[str, Any]) -> RunConfig:
    """A whole tree as a config that can run."""
    for section, alone in (("groups", "main"), ("policies", "team")):
        tree = spread(tree, section, alone)
    config = with_horizons(build(RunConfig, tree))
    check(config)
    return config


def optimiser_steps(steps: int, epochs: int, minibatches: int) -> int:
    """How many a policy takes in a whole run."""
    return steps * epochs * minibatches


def with_horizons(config: RunConfig) -> RunConfig:
    """A falling learning rate whose end is not said falls over the whole run."""
    updates = optimiser_steps(config.steps, config.epochs, config.minibatches)

    def told(learning: Learning, name: str) -> Learning:
        if learning.schedule == "constant" or learning.horizon:
            return learning
        try:
            return replace(learning, horizon=updates)
        except ValueError as error:
            raise ConfigError(f"policies.{name}: {error}") from error

    return replace(
        config,
        policies={
            name: replace(
                policy,
                learning=told(policy.learning, name),
                critic_learning=policy.critic_learning and told(policy.critic_learning, name),
            )
            for name, policy in config.policies.items()
        },
    )


def over_preset(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """The preset for the roles of the environment that is given, and what it learns with, under what is given."""
    given = merge(settings(name, given), given)
    env = given.get("env") or {}
    workflow = spec(env.get("id", "mask-hotpotqa")).make_workflow(**(env.get("args") or {}))
    return merge(preset(name, [role.name for role in workflow.roles]), given)


def spread(tree: dict[str, Any], section: str, alone: str) -> dict[str, Any]:
    """The tree with a section's "*" laid under every one there; by itself, it is that of the default one."""
    if "*" not in tree.get(section, {}):
        return tree
    common = tree[section]["*"]
    named = {name: merge(common, own) for name, own in tree[section].items() if name != "*"}
    return {**tree, section: named or {alone: common}}


def check(config: RunConfig) -> None:
    """What does not fit together."""
    check_references(config)
    check_engines(config)
    try:
        make_recipe(config.recipe, config.recipe_args)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"recipe: {error}") from error
    for name, policy in config.policies.items():
        if not policy.frozen:
            check_algorithm(name, config)
    if config.deterministic and config.episode_seconds is not None:
        raise ConfigError(
            "episode_seconds: a wall-clock deadline cannot be deterministic; leave one of the two out"
        )


def check_references(config: RunConfig) -> None:
    """Models are named as models are, and what a policy and the map name is there."""
    for name, group in config.groups.items():
        check_model(f"groups.{name}.model", group.model)
    for name, policy in config.policies.items():
        check_model(f"policies.{name}.init", policy.init)
        if policy.group not in config.groups:
            raise ConfigError(
                f"policies.{name}.group: there is no group {policy.group!r}; groups: {', '.join(config.groups)}"
            )
        if policy.critic not in ("auto", "") and policy.critic not in config.policies:
            raise ConfigError(f"policies.{name}.critic: there is no policy {policy.critic!r}")
    for seat, player in config.map.items():
        fixed = player in NAMED or player in ("scripted", "tiny") or ":" in player
        if player not in config.policies and not fixed:
            raise ConfigError(
                f"map.{seat}: {player!r} is neither a policy ({', '.join(config.policies)}) nor a fixed player "
                "(scripted, random, openai:MODEL@URL, …)"
            )


def check_engines(config: RunConfig) -> None:
    """What vLLM cannot do for training is said here, and not by the first request."""
    for name, group in config.groups.items():
        if group.engine_options and group.engine != "vllm":
            raise ConfigError(
                f"groups.{name}.engine_options: these are vLLM's; set groups.{name}.engine=vllm"
            )
        if group.engine == "vllm" and config.deterministic:
            raise ConfigError(
                f"groups.{name}.engine: vLLM cannot promise the same bits twice; leave deterministic out, or take torch"
            )
    for name, policy in config.policies.items():
        if config.groups[policy.group].engine != "vllm":
            continue
        if policy.sampling.top_k or policy.sampling.top_p < 1:
            raise ConfigError(
                f"policies.{name}.sampling: vLLM does not tell which tokens top_k and top_p left, and training must "
                f"know; leave them out, or set groups.{policy.group}.engine=torch"
            )


def check_model(key: str, model: str) -> None:
    """Not whether it is there: that is seen where it is loaded, which may be another machine."""
    try:
        model_path(model)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from error


def check_algorithm(name: str, config: RunConfig) -> None:
    """A policy's algorithm is known, with these keys, and the config meets its needs."""
    policy = config.policies[name]
    try:
        algorithm = make_algorithm(**{"name": "ppo", **policy.algorithm})
    except (ValueError, TypeError) as error:
        raise ConfigError(f"policies.{name}.algorithm: {error}") from error
    if policy.sampling.temperature == 0:
        raise ConfigError(
            f"policies.{name}.sampling.temperature: at 0 a policy always says the same and learns nothing from comparing; "
            "set it above 0 (eval.temperature is validation's), or frozen: true"
        )
    wrong = algorithm.needs.unmet(
        f"policies.{name}.algorithm ({algorithm.name})",
        k=config.k, critic=policy.critic != "", reference=policy.reference,
    )  # fmt: skip
    if wrong:
        raise ConfigError(wrong[0])
    try:
        credit = credit_from_config(policy.credit)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"policies.{name}.{error}") from error
    if algorithm.needs.tree and any(isinstance(t, Shaping) for given in credit.values() for t in given):
        raise ConfigError(
            f"policies.{name}.credit: shaping pays for the state of the next act, and {algorithm.name} compares siblings "
            "before there is one; leave one of the two out"
        )
    for key in ("shuffle_rewards", "counterfactual"):
        if algorithm.needs.tree and getattr(config, key):
            raise ConfigError(
                f"{key}: it changes the credits of whole episodes, and policies.{name}.algorithm ({algorithm.name}) "
                "compares siblings within one; leave one of the two out"
            )


def fresh_directory(config: RunConfig) -> Path:
    """`runs/<env>-<n>`: the next free number."""
    n, name = 1, config.env.id.rpartition(":")[2]  # of one's own: `my_team.py:capitals`
    while (found := Path("runs") / f"{name}-{n}").exists():
        n += 1
    return found
