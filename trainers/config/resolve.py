"""From what is asked for to a config that can run: what is given laid over preset and defaults, then checked.

    config = resolve("mask-hotpotqa", preset_name="shared", overrides=["steps=20"])

All of this comes before anything is loaded; each error names the key and the way out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ...agents.basics.hints import nearest
from ...agents.engines.engine import ENGINES
from ...agents.engines.vllm.gpu_places import check_sender, gpus_of
from ...agents.engines.vllm.vllm_setup import base_options, check_group_options, check_version, installed
from ...agents.names import common_prompts, model_name, prompts_of, read_name
from ...agents.team import PLAYERS, is_player
from ...envs.core.ledger import as_rule
from ...envs.registry import argument_hints, make_rule, spec
from ...envs.registry import resolve as target
from ...own import OwnCodeError, load
from ..algorithms import find_algorithm, make_algorithm
from ..controller.reporting.loggers import LOGGERS
from ..controller.statistics.credit import Shaping, credit_from_config
from ..recipes import make_recipe
from .choices import hints_of
from .group_settings import Learning, own_gpus
from .presets import algorithm_named, laid_under, parts, preset, settings
from .reader import GIVEN, ConfigTree, as_meant, leaves, read
from .schema import (
    ConfigError,
    EnvConfig,
    GroupConfig,
    PolicyConfig,
    RunConfig,
    build,
    merge,
    override,
    read_yaml,
    to_dict,
)


def resolve(
    id: str | None = None,
    *,
    preset_name: str | None = None,
    file: str | Path | None = None,
    overrides: Sequence[str] = (),
    **fields: object,
) -> RunConfig:
    """Resolve the config tree: defaults <- preset <- YAML file <- overrides (`a.b=c`) and keyword fields."""
    tree = asked(id, file, overrides, **fields)
    load_imports(tree)
    if preset_name is not None:
        tree = over_preset(preset_name, tree)
    return settled(tree)


def asked(id: str | None, file: str | Path | None, overrides: Sequence[str], **fields: object) -> ConfigTree:
    """Return only the user's settings, as a tree."""
    tree = override(merge(read_yaml(file) if file else {}, fields), list(overrides))
    # a command line may replace a file's environment, but two on the command line are an error
    for text in overrides:
        if id is not None and text.partition("=")[0].strip() == "env.id" and tree["env"]["id"] != id:
            raise ConfigError(f"env.id: {tree['env']['id']!r} is given beside {id!r}: name one environment")
    tree = tree if id is None else merge(tree, {"env": {"id": id}})
    return {**tree, "imports": named_imports(tree["imports"])} if "imports" in tree else tree


def named_imports(targets: object) -> tuple[str, ...]:
    """Return the `imports` with full paths of files, so that a run can continue from any directory."""
    names = read(tuple[str, ...], (targets,) if isinstance(targets, str) else targets, "imports")
    assert isinstance(names, tuple)
    return tuple(str(Path(name).resolve()) if name.endswith(".py") else name for name in names)


def load_imports(tree: ConfigTree) -> None:
    """Import the user's code before anything is looked up in it."""
    for name in tree.get("imports") or ():
        try:
            load(name)
        except OwnCodeError as error:
            raise ConfigError(
                f"imports: {error}; name where it is now: --import FILE.py or MODULE"
            ) from error


def settled(tree: ConfigTree) -> RunConfig:
    """Check a whole tree, and return it as a config that can run."""
    if isinstance(
        policies := tree.get("policies"), Mapping
    ):  # before "*" is merged: a name alone would replace options
        tree = {**tree, "policies": {name: algorithm_named(policy) for name, policy in policies.items()}}
    for section, alone in (("groups", "main"), ("policies", "team")):
        tree = spread(tree, section, alone)
    config = with_prompts(with_horizons(meant(build(RunConfig, tree))))
    check(config)
    return config


def meant(config: RunConfig) -> RunConfig:
    """Return the parts that are configured by name (algorithms, the workflow), with settings of their fields' types."""
    policies = {
        name: policy
        if policy.frozen
        else replace(policy, algorithm=algorithm_settings(name, policy.algorithm))
        for name, policy in config.policies.items()
    }
    return replace(config, policies=policies, env=replace(config.env, args=workflow_arguments(config.env)))


def algorithm_settings(policy: str, given: Mapping[str, object]) -> ConfigTree:
    """Return an algorithm's name and settings, with the types of its fields."""
    settings = {"name": "ppo", **given}
    try:
        hints = hints_of(find_algorithm(str(settings["name"])))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"policies.{policy}.algorithm: {error}") from error
    return {key: as_meant(value, hints.get(key, object)) for key, value in settings.items()}


def workflow_arguments(env: EnvConfig) -> ConfigTree:
    """Return the workflow's own arguments with their annotated types. The workflow is made once to check them."""
    args = typed_arguments(env.id, env.args)
    try:
        spec(env.id).make_workflow(**args)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"env.args: {error}") from error
    return args


def typed_arguments(id: str, args: Mapping[str, object]) -> ConfigTree:
    """Return arguments of `make` as they are meant: the workflow's own with their annotated types, so `1e-5` is a number."""
    hints = argument_hints(target(spec(id).workflow)) if args and not id.startswith("suite:") else {}
    return {key: as_meant(value, hints.get(key, object)) for key, value in args.items()}


def with_prompts(config: RunConfig) -> RunConfig:
    """Set the prompt set that the models were made with, unless the user sets one."""
    env = config.env
    if env.prompts is not None or spec(env.id).make_workflow(**env.args).prompt_set is None:
        return config
    models = {
        policy.init or config.groups[policy.group].model
        for policy in config.policies.values()
        if policy.group in config.groups
    }
    models |= {
        player for player in config.map.values() if player not in config.policies and read_name(player)
    }
    told = common_prompts({name: prompts_of(name) for name in sorted(models)})
    return replace(config, env=replace(env, prompts=told))


def optimizer_steps(steps: int, epochs: int, minibatches: int) -> int:
    """Return the number of optimizer steps that a policy makes in a whole run."""
    return steps * epochs * minibatches


def with_horizons(config: RunConfig) -> RunConfig:
    """Set the end of a falling learning rate to the end of the run, unless the user sets it."""
    updates = optimizer_steps(config.steps, config.epochs, config.minibatches)

    def told(learning: Learning, name: str) -> Learning:
        if learning.schedule == "constant" or learning.horizon:
            return learning
        if learning.warmup >= updates:
            raise ConfigError(
                f"policies.{name}.learning.warmup: the rate rises over {learning.warmup} optimizer steps, and the run has {updates}; "
                f"set {max(0, updates - 1)} or less, more steps, or learning.schedule=constant"
            )
        return replace(learning, horizon=updates)

    policies = {}
    for name, policy in config.policies.items():
        policy = replace(policy, learning=told(policy.learning, name))
        critic = policy.critics_learning(f"policies.{name}.critic_learning")
        if (horizon := told(critic, name).horizon) != critic.horizon:  # only the critic's rate falls
            policy = replace(policy, critic_learning={**(policy.critic_learning or {}), "horizon": horizon})
        policies[name] = policy
    return replace(config, policies=policies)


def with_short_warmup(tree: ConfigTree, user: ConfigTree) -> ConfigTree:
    """Shorten a preset's warm-up to half of a run that is no longer, so that a first try with `steps=2` begins.

    A constant rate needs no end, so its warm-up stays: a run that is continued must not depend on its first length.
    """
    learning = ((tree.get("policies") or {}).get("*") or {}).get("learning") or {}
    keys = ("steps", "epochs", "minibatches")
    counts = [user.get(key, tree.get(key, getattr(RunConfig, key))) for key in keys]
    if not all(isinstance(count, int) and count > 0 for count in counts):
        return tree  # refused later, by its key
    updates = optimizer_steps(*counts)
    if "schedule" not in learning or learning.get("warmup", 0) < updates:
        return tree
    return merge(tree, {"policies": {"*": {"learning": {"warmup": updates // 2}}}})


def over_preset(name: str, given: ConfigTree) -> ConfigTree:
    """Return the preset for the roles of the environment, with its training settings, under the user's settings."""
    own = settings(name, given)
    if not parts(name)[1]:  # a paper's settings stay as published
        own = with_short_warmup(own, given)
    env = build(EnvConfig, merge(own.get("env") or {}, given.get("env") or {}), "env")
    workflow = spec(env.id).make_workflow(**workflow_arguments(env))
    mapped = preset(name, [role.name for role in workflow.roles])
    named = merge(mapped["policies"], given.get("policies") or {})
    return merge(mapped, laid_under(own, given, [policy for policy in named if policy != "*"]))


def spread(tree: ConfigTree, section: str, alone: str) -> ConfigTree:
    """Return the tree with a section's "*" merged into every entry. Without entries, it becomes the default entry."""
    entries = tree.get(section)
    if not isinstance(entries, Mapping) or "*" not in entries:
        return tree
    common = entries["*"] or {}
    named = {name: merge(common, own or {}) for name, own in entries.items() if name != "*"}
    return {**tree, section: named or {alone: common}}


def check(config: RunConfig) -> None:
    """Check that the settings fit together."""
    check_given(config)
    check_references(config)
    check_engines(config)
    check_pools(config)
    for name in config.log.also:
        try:
            LOGGERS.find(name)
        except ValueError as error:
            raise ConfigError(f"log.also: {error}") from error
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


def check_given(config: RunConfig) -> None:
    """Check that objects from Python are given again, and that rules are where their entry points say."""
    for key, value in leaves(to_dict(config)):
        for part in value if isinstance(value, list | tuple) else (value,):
            if isinstance(part, str) and part.startswith(GIVEN):
                how = "reward=[…]" if key == "env.reward" else f"{key.partition('.')[0]}={{…}}"
                raise ConfigError(
                    f"{key}: {part.removeprefix(GIVEN)} was given from Python, and config.yaml cannot hold it; give it "
                    f"again: unitymas.train(…, {how}), or the wrapped environment in place of its id; or name it by "
                    "an entry point, module:name"
                )
    for key in ("reward", "rules"):
        rules = getattr(config.env, key)
        for rule in rules if isinstance(rules, list | tuple) else (rules,):
            if rule is None or rule == "default":
                continue
            try:
                as_rule(make_rule(rule))
            except (ValueError, TypeError) as error:
                raise ConfigError(f"env.{key}: {error}") from error


def check_references(config: RunConfig) -> None:
    """Check that names of models are valid, and that policies and map name existing entries."""
    for name, group in config.groups.items():
        check_model(f"groups.{name}.model", group.model)
    for name, policy in config.policies.items():
        check_model(f"policies.{name}.init", policy.init)
        if policy.group not in config.groups:
            playing = sorted({*config.map.values()} & {*config.policies})
            why = f"policies.{name}.group: there is no group {policy.group!r}; groups: {', '.join(config.groups)}"
            if policy.group == PolicyConfig().group and name not in playing:
                why = f"policies.{name}: no role is played by a policy of this name; {nearest(name, playing, 'the policies are')}"
            raise ConfigError(why)
        if policy.critic not in ("auto", "") and policy.critic not in config.policies:
            raise ConfigError(f"policies.{name}.critic: there is no policy {policy.critic!r}")
    for seat, player in config.map.items():
        fixed = is_player(player) or read_name(player) is not None
        if player not in config.policies and not fixed:
            hint = nearest(player, [*config.policies, *PLAYERS, "tiny"], "known:")
            raise ConfigError(
                f"map.{seat}: {player!r} is neither a policy ({', '.join(config.policies)}) nor a fixed player "
                f"(an endpoint is openai:MODEL@URL); {hint}"
            )


def check_engines(config: RunConfig) -> None:
    """Check what vLLM cannot do in training, before the first request."""
    for name, group in config.groups.items():
        if group.engine not in ENGINES and ":" not in group.engine:
            raise ConfigError(f"groups.{name}.engine: {ENGINES.unknown(group.engine)}")
        if group.engine_options and group.engine == "torch":
            raise ConfigError(
                f"groups.{name}.engine_options: these are vLLM's; set groups.{name}.engine=vllm"
            )
        if group.engine == "vllm":
            check_vllm(name, group)
            needed = own_gpus(group.device, group.engine, group.engine_options, group.gpus)
            if config.runtime == "ray" and group.gpus is not None and needed > max(1.0, group.gpus):
                raise ConfigError(
                    f"groups.{name}.gpus: Ray would give the group's process {group.gpus:g}, and vLLM and the policies take "
                    f"{needed}; set it to {needed}, or leave it out"
                )
            if group.engine_options.get("transfer") == "nccl" and group.replicas > 1:
                raise ConfigError(
                    f"groups.{name}.engine_options.transfer: a further replica has no GPU beside vLLM's to send from; take "
                    "shared, or replicas: 1"
                )
        if group.engine == "vllm" and group.replicas > 1 and config.runtime == "local":
            raise ConfigError(
                f"groups.{name}.replicas: in one process all {group.replicas} vLLM engines would take the same GPU; set "
                "runtime=ray (an actor with a GPU for each), or replicas: 1"
            )
        if group.engine == "vllm" and config.deterministic:
            raise ConfigError(
                f"groups.{name}.engine: vLLM cannot promise the same bits twice; leave deterministic out, or take torch"
            )
    for name, policy in config.policies.items():
        group = config.groups[policy.group]
        if group.engine != "vllm":
            continue
        if policy.adapter is not None and policy.adapter.tokens:
            raise ConfigError(
                f"policies.{name}.adapter.tokens: vLLM serves LoRA and no learned prefixes; take a rank, or "
                f"groups.{policy.group}.engine=torch"
            )
        if group.engine_options.get("return_sampling_mask"):
            if not policy.sampling.top_k:
                raise ConfigError(
                    f"policies.{name}.sampling.top_k: groups.{policy.group}.engine_options.return_sampling_mask needs one, "
                    "because it bounds the tokens that vLLM reports; set it, such as top_k: 1000"
                )
            continue
        if policy.sampling.top_k or policy.sampling.top_p < 1:
            raise ConfigError(
                f"policies.{name}.sampling: vLLM does not tell which tokens top_k and top_p left, and training must "
                f"know; leave them out, set groups.{policy.group}.engine_options.return_sampling_mask=true (on a GPU), or "
                f"groups.{policy.group}.engine=torch"
            )


def check_pools(config: RunConfig) -> None:
    """Check that the groups of a pool are several, have the same device, and can free their memory."""
    pools: dict[str, list[str]] = {}
    for name, group in config.groups.items():
        if group.pool:
            pools.setdefault(group.pool, []).append(name)
    for pool, names in pools.items():
        if len(names) == 1:
            raise ConfigError(
                f"groups.{names[0]}.pool: nobody else is in the pool {pool!r}; name the same pool in another group, or leave it out"
            )
        devices = {name: config.groups[name].device for name in names}
        if len(set(devices.values())) > 1:
            raise ConfigError(
                f"groups.{names[1]}.device: the groups of pool {pool!r} share one device, and ask for {devices}; set the same"
            )
        for name in names:
            group = config.groups[name]
            if group.ranks > 1 or group.replicas > 1:
                raise ConfigError(
                    f"groups.{name}.pool: ranks and replicas have devices of their own; leave out the pool, or set ranks and "
                    "replicas to 1 (policies.*.learning.offload keeps what ranks hold in the CPU's memory)"
                )
            if group.engine == "vllm" and not group.engine_options.get("enable_sleep_mode"):
                raise ConfigError(
                    f"groups.{name}.pool: vLLM gives its memory away only with sleep mode; set "
                    f"groups.{name}.engine_options.enable_sleep_mode=true"
                )


def check_vllm(name: str, group: GroupConfig) -> None:
    """Check the vLLM of this machine, if there is one, and the options that the engine knows by itself."""
    options = group.engine_options
    transfer = options.get("transfer", "shared")
    try:
        if installed():
            check_version()
        check_group_options(options)
        base_options(transfer, options)
        if group.device.startswith("cuda") and group.ranks == 1:
            check_sender(str(transfer), int(group.device.partition(":")[2] or 0), gpus_of(options))
    except (ImportError, ValueError) as error:
        raise ConfigError(f"groups.{name}.engine: {error}") from error
    if transfer in ("ipc", "nccl") and not group.device.startswith("cuda"):
        raise ConfigError(
            f"groups.{name}.engine_options.transfer={transfer} sends from a GPU, and the policies learn on {group.device!r}: "
            f"set groups.{name}.device=cuda{f':{gpus_of(options)}' * (transfer == 'nccl')}, or transfer=shared"
        )


def check_model(key: str, model: str) -> None:
    """Check a model's name. Whether the model exists is checked where it is loaded, perhaps on another machine."""
    if not model:
        return  # an init that is left out
    try:
        model_name(model)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from error


def check_algorithm(name: str, config: RunConfig) -> None:
    """Check that a policy's algorithm exists and has these keys, and that the config meets its needs."""
    policy = config.policies[name]
    try:
        algorithm = make_algorithm(**policy.algorithm)
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
    """Return the next free directory `runs/<env>-<n>`."""
    n, name = 1, config.env.id.rpartition(":")[2]  # a name of the user's own: `my_team.py:capitals`
    while (found := Path("runs") / f"{name}-{n}").exists():
        n += 1
    return found
