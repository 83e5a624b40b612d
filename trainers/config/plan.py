"""From a config to what a run will do: its environments, who learns how, who judges whom, what each group holds.

arena, validation = make_arenas(config)
planned = plan(config, arena)              # pure; raises what does not fit, before any model is loaded
specs = placed(planned)                    # on this machine's devices
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ...agents.answers import DecisionId
from ...agents.basics.hints import nearest
from ...agents.basics.json_types import JsonObject
from ...agents.engines.vllm.gpu_places import gpus_of
from ...agents.roles import entry_of, nobody_plays
from ...agents.team import Team, TeamError
from ...envs.core.arena import Arena
from ...envs.core.branch import check_anchors, check_forks
from ...envs.core.drivers import EnvLike, arena_of
from ...envs.core.execution import Budget
from ...envs.registry import make_arena, make_rule, spec
from ..algorithms import Algorithm, make_algorithm
from ..controller.statistics.credit import Transform, apply_credit, credit_from_config
from ..controller.statistics.table import Decision, Table
from .group_settings import GroupSpec, PolicySpec, own_gpus
from .schema import ConfigError, RunConfig


@dataclass(frozen=True)
class RunPlan:
    """Plan of a run: what it will do, by its config and its environment."""

    config: RunConfig
    arena: Arena
    algorithms: Mapping[str, Algorithm]
    """Algorithm of each policy that learns."""
    critics: Mapping[str, str]
    """Critic of each policy."""
    credits: Mapping[str, Mapping[str, tuple[Transform, ...]]]
    """Credit transforms by policy and role."""
    specs: Mapping[str, GroupSpec]
    """Specification of each model group."""
    guests: Team
    """Fixed players of the map, each under its own name."""

    @property
    def home(self) -> dict[str, str]:
        """Return the group that hosts each policy."""
        return {policy: name for name, group in self.specs.items() for policy in group.policies}

    def player(self, agent: str, arena: Arena | None = None) -> str:
        """Return the player of an agent, according to the map."""
        return player(self.config, agent, arena or self.arena)

    def credit(self, table: Table, policy: str) -> Table:
        """Return the table with the rewards that this policy's credit settings give."""
        return apply_credit(table, self.credits[policy]) if policy in self.credits else table

    def reads_prompts(self, step: int) -> bool:
        """Tell whether the prompts of a step's episodes are needed: for files of the run, or for a critic of whole
        traces.
        """
        every = self.config.log.traces_every
        written = every > 0 and step % every == 0
        return written or any(algorithm.needs.values == "trace" for algorithm in self.algorithms.values())

    def worth(self, rows: Sequence[Decision]) -> dict[DecisionId, float]:
        """Return the rewards of decisions by id, after the credit settings of their policies. Trees choose by them."""
        table = Table(rows)
        rewards = dict(zip(table.ids, table.reward.tolist(), strict=True))
        for policy in self.credits:
            reward = self.credit(table, policy).reward
            rewards |= {table.ids[i]: float(reward[i]) for i in table.mine(policy)}
        return rewards


def plan(config: RunConfig, arena: Arena) -> RunPlan:
    """Return the plan: the algorithm and critic of each policy, and the specification of each group."""
    used = seated(config, arena)
    algorithms = {
        name: make_algorithm(**{"name": "ppo", **policy.algorithm})
        for name, policy in config.policies.items()
        if name in used and not policy.frozen
    }
    critics = {
        name: critic_of(config, name, used)
        for name, algorithm in algorithms.items()
        if algorithm.needs.values
    }
    check_environment(config, arena, algorithms)
    credits = {
        name: credit_from_config(config.policies[name].credit)
        for name in algorithms
        if config.policies[name].credit
    }
    specs = group_specs(config, policy_specs(config, used, critics))
    return RunPlan(config, arena, algorithms, critics, credits, specs, guests(config))


def guests(config: RunConfig) -> Team:
    """Return the map's fixed players: players that are not policies of the run."""
    names = dict.fromkeys(name for name in config.map.values() if name not in config.policies)
    try:
        team = Team({name: name for name in names} or {"*": "random"}, **config.players.told())
        for name in names:
            if name.startswith("openai:"):
                team.player(name)
    except ValueError as error:
        raise ConfigError(f"players: {error}") from error
    return team


def player(config: RunConfig, agent: str, arena: Arena) -> str:
    """Return the map's entry for an agent: its own, that of its role, or that of "*"."""
    role = arena.roles[agent].name
    name = entry_of(config.map, agent, role)
    if name is None:
        raise TeamError(f"map: {nobody_plays(agent, role)}")
    return name


def seated(config: RunConfig, arena: Arena) -> set[str]:
    """Return the policies that play a role. A policy that neither plays nor is a critic is an error."""
    agents = Team(dict.fromkeys(config.map, "random")).bind(arena.roles).policies
    used = {player(config, agent, arena) for agent in agents} & set(config.policies)
    idle = set(config.policies) - used - {policy.critic for policy in config.policies.values()}
    if idle:
        raise ConfigError(f"policies.{sorted(idle)[0]}: no role is mapped to it; map it, or leave it out")
    homes = {policy.group for policy in config.policies.values()}
    for name in config.groups:
        if name not in homes:
            raise ConfigError(
                f"groups.{name}: no policy is in this group, so what is set for it has no effect; the policies are in "
                f"{', '.join(sorted(homes))}"
            )
    return used


def critic_of(config: RunConfig, name: str, used: set[str]) -> str:
    """Return the critic of a policy."""
    critic = config.policies[name].critic
    if critic in used:
        raise ConfigError(
            f"policies.{name}.critic: {critic!r} plays a role, and a critic only judges; name a policy that "
            "no role is mapped to, or use critic: auto"
        )
    return f"{name}-critic" if critic == "auto" else critic


def policy_specs(
    config: RunConfig, used: set[str], critics: Mapping[str, str]
) -> dict[str, dict[str, PolicySpec]]:
    """Return the policies that each group hosts. An automatic critic is in the group of its policy."""
    specs: dict[str, dict[str, PolicySpec]] = {name: {} for name in config.groups}
    for name, policy in config.policies.items():
        is_critic = name not in used
        specs[policy.group][name] = PolicySpec(
            learning=None if policy.frozen and not is_critic else policy.learning,
            adapter=policy.adapter, adapters=policy.adapters, critic=is_critic, init=policy.init, reference=policy.reference,
            sampling=policy.sampling,
        )  # fmt: skip
        if name in critics and policy.critic == "auto":
            specs[policy.group][critics[name]] = PolicySpec(
                learning=policy.critics_learning(f"policies.{name}.critic_learning"), critic=True,
                adapter=policy.adapter, init=policy.init,
            )  # fmt: skip
    return specs


def group_specs(config: RunConfig, policies: Mapping[str, dict[str, PolicySpec]]) -> dict[str, GroupSpec]:
    """Return the specification of each group. Its device is still as configured (`placed`)."""
    return {
        name: GroupSpec(
            name=name,
            model=group.model,
            policies=policies[name],
            slots=group.slots,
            context=group.context,
            precision=group.precision,
            export=group.export,
            device=group.device,
            gpus=group.gpus or 0.0,
            cpus=group.cpus,
            ranks=group.ranks,
            context_ranks=group.context_ranks,
            replicas=group.replicas,
            pool=group.pool,
            engine=group.engine,
            engine_options=group.engine_options,
            deterministic=config.deterministic,
            seed=config.seed,
            threads=group.threads or (1 if config.deterministic else 0),
        )
        for name, group in config.groups.items()
    }


def check_environment(config: RunConfig, arena: Arena, algorithms: Mapping[str, Algorithm]) -> None:
    """Check that the environment can do what algorithms need, and that settings by role name existing roles."""
    if config.counterfactual:
        check_forks(arena, "counterfactual")
    roles = [role.name for role in arena.workflow.roles]
    check_roles("counterfactual", config.counterfactual, ["*", *roles])
    for name, algorithm in algorithms.items():
        where = f"policies.{name}.algorithm"
        if algorithm.needs.tree:
            check_forks(arena, f"{where} ({algorithm.name})")
        if algorithm.needs.anchors:
            check_anchors(arena, f"{where} ({algorithm.name})")
        check_roles(f"{where}.role_weights", algorithm.role_weights, roles)
        for key, role in algorithm.needs.roles.items():
            check_role(f"{where}.{key}", role, roles)
        check_roles(f"policies.{name}.adapters", config.policies[name].adapters, roles)
        check_roles(f"policies.{name}.credit", config.policies[name].credit, ["*", *roles])


# environments --------------------------------------------------------------------------------------------


def make_arenas(config: RunConfig) -> tuple[Arena, Arena]:
    """Make the environments of training and of validation."""
    return _arena(config, config.env.split), _arena(config, config.eval.split)


def _arena(config: RunConfig, split: str) -> Arena:
    env = config.env
    where: JsonObject = {"split": split} if env.tasks is None else {"tasks": env.tasks}
    if env.data is not None:
        where["data"] = env.data
    if env.size is not None and split == env.split:
        where["size"] = env.size
    options: JsonObject = {
        "reward": env.reward,
        "tools": env.tools,
        "budget": env.budget,
        "prompts": env.prompts,
    }
    arena = make_arena(env.id, **options, **where, **env.args)
    for rule in env.rules:
        arena.add_rule(make_rule(rule))
    if config.episode_seconds is not None:
        arena.budget = replace(arena.budget, seconds=config.episode_seconds)
    return arena


def env_of(env: EnvLike) -> dict[str, object]:
    """Return the `env` section for an environment that is already made, with the rules of its reward wrappers."""
    arena = arena_of(env)
    made = dict(arena.made)
    if not made:
        raise ConfigError(
            f"{arena.env_id}: this environment was not made by unitymas.make, and training makes more like it; register "
            "its workflow (unitymas.register) and make it by its id"
        )
    if made["tasks"] is not None:
        made["tasks"] = arena.data
    else:
        made["split"] = made["split"] or spec(made["id"]).split
    if isinstance(made["budget"], Budget):
        made["budget"] = asdict(made["budget"])
    made["rules"] = tuple(arena.rules[made["rules"] :])
    return {key: value for key, value in made.items() if value is not None or key == "reward"}


# on this machine -----------------------------------------------------------------------------------------


def placed(planned: RunPlan, folder: Path) -> dict[str, GroupSpec]:
    """Set the devices of the groups; auto uses the GPUs of this machine in turn. `folder` is for failed updates."""
    import torch

    groups, local = planned.config.groups, planned.config.runtime == "local"
    free = [name for name, group in groups.items() if group.device == "auto" and group.engine == "torch"]
    there = torch.cuda.device_count() if free else 0
    specs: dict[str, GroupSpec] = {}
    following = 0  # GPU of this machine
    members = Counter(group.pool for group in groups.values() if group.pool)
    pools: dict[str, str] = {}  # pool -> its device
    for name, group in groups.items():
        if group.device != "auto":
            device, gpus = group.device, float(own_gpus(group.device, group.engine, group.engine_options))
        elif name not in free or not there:
            device, gpus = "cpu", 0.0
        elif planned.config.runtime == "ray":  # an actor sees only its own GPUs
            device, gpus = "cuda", min(1.0, there / len(free))
        elif group.pool in pools:
            device, gpus = pools[group.pool], 1.0
        else:
            device, gpus = f"cuda:{following % there}", 1.0
            following += max(group.ranks, group.replicas)
        if group.pool:
            pools[group.pool], gpus = device, min(gpus, 1.0 / members[group.pool])
        later = 0.0
        # only Ray knows how many GPUs its cluster has
        if group.gpus is None and (group.device, group.engine) == ("auto", "vllm"):
            later = gpus_of(group.engine_options) / (members[group.pool] if group.pool else 1)
        gpus = group.gpus if group.gpus is not None else gpus
        specs[name] = replace(
            planned.specs[name], device=device, gpus=gpus, gpus_if_any=later, folder=str(folder)
        )
    if local:
        turns = {name for name, group in groups.items() if group.device == "auto"}
        check_gpus(specs, torch.cuda.device_count(), turns)
    return specs


def check_gpus(specs: Mapping[str, GroupSpec], there: int, turns: Collection[str] = ()) -> None:
    """Check that every rank and every replica has a GPU of its own. Groups of one process may share a GPU if their
    device is auto.
    """
    taken: dict[int, str] = {}
    for name, group in specs.items():
        if not group.device.startswith("cuda"):
            continue
        key = "ranks" if group.ranks >= group.replicas else "replicas"
        first, width = int(group.device.partition(":")[2] or 0), max(group.ranks, group.replicas)
        if width > 1 and first + width > there:
            raise ConfigError(
                f"groups.{name}.{key}: {width} {key} from {group.device} on need GPUs {first} to "
                f"{first + width - 1}, and torch sees {there}; lower it, or set groups.{name}.device"
            )
        for gpu in range(first, first + width):
            other = specs[taken[gpu]] if gpu in taken else group
            wide = max(other.ranks, other.replicas, width) > 1
            shared = not wide and (
                {name, other.name} <= set(turns) or len(group.pool) > 0 and group.pool == other.pool
            )
            if other is not group and not shared:
                raise ConfigError(
                    f"groups.{name}.device: it would share GPU {gpu} with group {other.name!r}; set groups.{name}.device, "
                    + (
                        "or fewer groups.*.ranks and replicas"
                        if wide
                        else "or the same groups.*.pool for both"
                    )
                )
            taken[gpu] = name


def described(
    planned: RunPlan, directory: Path, sizes: Mapping[str, int], specs: Mapping[str, GroupSpec]
) -> str:
    """Return a description of a run that begins: its directory, tasks, models, and numbers of parameters."""
    config, arena, home = planned.config, planned.arena, planned.home
    step = f"{config.tasks_per_step} tasks × {config.k} samples"
    lines = [
        f"run directory  {directory}",
        f"{arena.env_id}  {len(arena.task_ids):,} tasks of {arena.data.name}"
        + (f"; prompts {config.env.prompts} (env.prompts)" if config.env.prompts else ""),
        f"steps  {config.steps} of {step}; recipe {config.recipe}; {config.runtime}",
    ]
    for name, group in config.groups.items():
        own = [f"{p} {sizes[p] / 1e6:,.1f}M" for p, where in home.items() if where == name]
        chosen = f" ({group.device})" if group.device == "auto" else ""
        lines.append(f"group {name}  {group.model} on {specs[name].device}{chosen}: {', '.join(own)}")
    return "\n".join(lines)


def check_roles(where: str, given: Iterable[str], known: Sequence[str]) -> None:
    """Check that settings by role name existing roles."""
    for role in given:
        check_role(f"{where}.{role}", role, known)


def check_role(where: str, role: str, known: Sequence[str]) -> None:
    """Check that a role in a setting exists."""
    if role not in known:
        raise ConfigError(f"{where}: no role is called {role!r}; {nearest(role, known)}")
