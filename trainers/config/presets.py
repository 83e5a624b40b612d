"""Ways to map roles to models, as config trees, with settings that learn: shared, separate, lora, partial.

shared      one policy plays every role
separate    every role has a policy in a model group of its own
lora        every role has a low-rank adapter on one model
partial     roles that do the same kind of work share a policy (`KIN`), the others have their own

Beside one of these a preset may name a paper (`papers/*.yaml`): its hyper-parameters as published, whatever the model.
`"unitymas-o,separate"` is both; without a mapping it is shared.

The embedded tiny model needs other settings than models a hundred times as large: where it is what learns, a preset
carries those of the demo (`tiny_settings`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

from ...agents.basics.hints import nearest
from ...agents.fetch.packaged import PACKAGES
from ...agents.names import at_home
from ...envs.registry import spec
from .group_settings import has_bfloat16
from .reader import ConfigError, ConfigTree, leaves
from .schema import merge, read_yaml

KIN: tuple[tuple[str, ...], ...] = (
    ("planner", "answerer"),  # M-ASK's published partial sharing: both reason over the whole question
    ("solver", "verifier"),
    ("refiner", "finalizer"),
    ("coder", "reflector"),
    ("decomposer", "answerer"),
    ("rewriter", "answerer"),
)
WARMSTART_FILE = "warmstart.json"
"""File in which a warm start records what it did, in the directory of its model."""
PRESETS = ("shared", "separate", "lora", "partial")
FOLDER = Path(__file__).parent / "papers"
PAPERS = ("unitymas-o", "stronger-mas", "dr-mas")


def parts(names: str) -> tuple[str, str]:
    """Split a preset such as `shared`, `dr-mas` or `unitymas-o,separate` into its mapping and its paper (or "")."""
    mapping = paper = ""
    for name in names.split(","):
        name = name.strip()
        if name not in (*PRESETS, *PAPERS):
            raise ConfigError(f"unknown preset {name!r}; {nearest(name, (*PRESETS, *PAPERS))}")
        before = mapping if name in PRESETS else paper
        if before:
            kind = "ways to map roles to models" if name in PRESETS else "papers"
            raise ConfigError(f"preset {names!r}: {before} and {name} are both {kind}; leave one out")
        mapping, paper = (name, paper) if name in PRESETS else (mapping, name)
    return mapping or "shared", paper


@cache
def _paper(name: str) -> ConfigTree:
    return read_yaml(FOLDER / f"{name}.yaml")


def paper_settings(name: str, env: str, mapping: str) -> ConfigTree:
    """Return the settings of a paper for an environment and a mapping."""
    tree = _paper(name)
    found: ConfigTree = tree["settings"]
    shared = mapping == "shared"
    bare = spec(env).id.rpartition("-v")[0] or spec(env).id
    for case in tree["environments"]:
        if bare in case["ids"] or spec(env).id in case["ids"]:
            found = merge(found, merge(case["settings"], case.get("shared", {}) if shared else {}))
    return merge(found, tree.get("lora", {})) if mapping == "lora" else found


def preset(name: str, roles: Sequence[str]) -> ConfigTree:
    """Return the `groups`, `policies` and `map` of a preset for these roles."""
    name, _ = parts(name)
    shares: list[tuple[str, ...]] = kin(roles) if name == "partial" else [(r,) for r in roles]
    if name == "shared":
        shares = [tuple(roles)]
    tree: ConfigTree = {"groups": {}, "policies": {}, "map": {}}
    for members in shares:
        own = "team" if len(members) == len(roles) else "-".join(members)
        lora = name == "lora"
        group = "base" if lora else own
        tree["groups"][group] = {}
        tree["policies"][own] = {"group": group, **({"adapter": {}} if lora else {})}
        tree["map"].update({role: own for role in members} if own != "team" else {"*": own})
    return tree


def kin(roles: Sequence[str]) -> list[tuple[str, ...]]:
    """Return groups of roles that share a policy by `KIN`, in the order of the roles."""
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


MASK: ConfigTree = {
    # one passage per search: with several, the tiny model finds the right kind of answer, but not the right name
    "args": {"top_k": 1},
    # at full weight, the format's -1 teaches an untrained searcher to stop at once
    "reward": ["unitymas.rewards.mask:MaskCredit", "unitymas.rewards.outcome:DrMasFormat"],
}
# the longest prompt and its reply have about 140 tokens
SHORT: ConfigTree = {"groups": {"*": {"context": 512}}}
TINY_BY_ENV: dict[str, ConfigTree] = {
    "mask-hotpotqa": {"env": MASK, **SHORT},
    "mask-nq": {"env": MASK, **SHORT},
    "rag-nq": {"env": {"args": {"top_k": 1}}, **SHORT},
    "rag-hotpotqa": {"env": {"args": {"top_k": 1}}, **SHORT},
    # prompts are six times as long as elsewhere (the problem, the program, the output of its tests), programs run in the
    # sandbox, and a program needs more than 40 tokens
    "code-deepcoder": {"tasks_per_step": 6, "policies": {"*": {"sampling": {"max_tokens": 64}}}},
}
"""Settings that differ from `TINY`, by environment."""

TINY: ConfigTree = {
    "steps": 24,
    "tasks_per_step": 12,
    "k": 8,
    "minibatches": 2,
    "concurrency": 256,
    "eval": {"every": 8, "tasks": 200},
    "policies": {
        "*": {
            # a KL term to the first parameters, so that only repeated rewards move the policy: without it, chance alone
            # (rewards shuffled between episodes) changes even more of the model's uncertain choices
            "algorithm": {"name": "ppo", "kl_loss": 0.05},
            "reference": True,
            # a higher rate learns somewhat more, but without a signal (the control) it damages the model. The rate falls
            # to a tenth over the run, because the last checkpoint counts and should change little
            "learning": {"lr": 1.5e-4, "schedule": "linear", "micro_tokens": 4096},
            "sampling": {"max_tokens": 40, "temperature": 0.8},
        }
    },
    # one thread: at this size a second thread costs more than it saves (20 s a step instead of 16)
    "groups": {"*": {"slots": 96, "threads": 1}},
}

TINY_ADAPTERS: ConfigTree = {"steps": 20, "policies": {"*": {"learning": {"lr": 1e-3}}}}
"""Settings that differ with `--preset lora`. Adapters need a higher rate than full parameters."""

HUB: ConfigTree = {
    "policies": {
        "*": {
            # a usual value in papers: a model of billions of parameters forgets the reply format at ten times this rate
            "learning": {"lr": 1e-6, "warmup": 10, "checkpointing": True},
            "critic_rate": 10.0,  # its head is new, and must follow a changing policy
            # a reply with prose before its tag has some hundred tokens, and a reply that is cut off earns nothing
            "sampling": {"max_tokens": 512},
        }
    },
}
"""Settings of any other model, from a hub or a directory. They are common start values, not tuned for any model."""
HUB_ADAPTERS: ConfigTree = {"policies": {"*": {"learning": {"lr": 3e-5}, "critic_rate": 3.0}}}
"""Settings that differ with `--preset lora`."""

SMALL: ConfigTree = {
    "steps": 10,
    "tasks_per_step": 6,
    "k": 8,
    "concurrency": 64,
    "eval": {"every": 10, "tasks": 42},
    "policies": {
        "*": {
            # a critic as large as the policy doubles the cost, and has hardly learned after these few steps. Division by the
            # deviation gives a rare lucky word on a hard question the largest weight of a step.
            # Without the KL term, chance alone (rewards shuffled between episodes) destroys the reply format
            "algorithm": {"name": "rloo", "kl_loss": 0.1},
            "reference": True,
            # the first steps are small, because Adam has seen too few gradients to scale them
            "learning": {"lr": 2e-5, "schedule": "linear", "warmup": 4, "micro_tokens": 1024},
            # at a lower temperature, the samples of a question are nearly equal, and nothing can be learned
            "sampling": {"max_tokens": 40, "temperature": 1.0},
        }
    },
    "groups": {"*": {"slots": 64, "context": 1024}},
}
"""Settings of a model that a registry package contains (26 to 135 million parameters), on a laptop."""
SMALL_ADAPTERS: ConfigTree = {
    "steps": 20,
    "tasks_per_step": 12,
    # at 5e-4 and with a quarter of the episodes, the team learned as much, but shuffled rewards damaged one control of five
    "policies": {"*": {"learning": {"lr": 2e-4}}},
}
"""Settings that differ with `--preset lora`: about 35 minutes of the processor, with bfloat16."""
WARM: dict[str, dict[str, float]] = {"minimind2": {"epochs": 1.0}, "smollm2": {"draws": 80}}
"""Length of the warm start in epochs or replies. Without it these models never write the reply format."""


def tiny_settings(env: str, preset: str = "shared") -> ConfigTree:
    """Return the settings with which the tiny model learns an environment: those of the demo."""
    return merge(merge(TINY, TINY_BY_ENV.get(env, {})), TINY_ADAPTERS if preset == "lora" else {})


def learns_tiny(given: ConfigTree) -> bool:
    """Tell whether all groups of a tree host the tiny model, with or without a warm start."""
    groups = given.get("groups") or {}
    return all(origin_of(str((group or {}).get("model", "tiny"))) == "tiny" for group in groups.values())


def learns_small(tree: ConfigTree) -> bool:
    """Tell whether all groups of a tree host a model of a package, with or without a warm start."""
    models = [str((group or {}).get("model", "tiny")) for group in (tree.get("groups") or {}).values()]
    return bool(models) and all(origin_of(model) in PACKAGES for model in models)


def origin_of(model: str) -> str:
    """Return the model from which a warm start began, if `model` is the directory of one. Otherwise return `model`."""
    try:
        origin = json.loads((at_home(model) / WARMSTART_FILE).read_text("utf-8"))["model"]
    except (OSError, ValueError, KeyError, TypeError):
        return model
    return str(origin)


def small_settings(preset: str = "shared") -> ConfigTree:
    """Return the settings of such a model, learning and generating at the precision that this processor multiplies faster."""
    faster = {"precision": "bfloat16"} if has_bfloat16() else {}
    own = merge(SMALL, {"policies": {"*": {"learning": faster}}, "groups": {"*": faster}})
    return merge(own, SMALL_ADAPTERS) if preset == "lora" else own


def hub_settings(given: ConfigTree, preset: str = "shared") -> ConfigTree:
    """Return the settings of a model from a hub: in bfloat16 on a GPU, and if this processor multiplies it faster."""
    devices = [str((group or {}).get("device", "auto")) for group in (given.get("groups") or {}).values()]
    on_gpu = any(device.startswith("cuda") for device in devices) or ("auto" in devices and has_gpu())
    faster = {"precision": "bfloat16"} if on_gpu or has_bfloat16() else {}
    own = merge(HUB, {"policies": {"*": {"learning": faster}}, "groups": {"*": faster}})
    return merge(own, HUB_ADAPTERS) if preset == "lora" else own


def has_gpu() -> bool:
    """Tell, without torch, whether an NVIDIA GPU is here."""
    return Path("/proc/driver/nvidia/version").exists()


def settings(name: str, given: ConfigTree) -> ConfigTree:
    """Return the settings of a preset, its algorithm among them, for the models and the environment of the user's tree."""
    name, paper = parts(name)
    env = (given.get("env") or {}).get("id", "mask-hotpotqa")
    if paper:
        return paper_settings(paper, env, name)
    if learns_tiny(given):
        return tiny_settings(env, name)
    return small_settings(name) if learns_small(given) else hub_settings(given, name)


def laid_under(own: ConfigTree, given: ConfigTree, names: Iterable[str]) -> ConfigTree:
    """Lay the user's tree over a preset's settings, for policies of these names.

    An option of the algorithm changes this option alone. Where the user names another algorithm for a policy, the policy gets
    nothing of the preset's: neither options nor reference.
    """
    everyone = dict((own.get("policies") or {}).get("*") or {})
    bound = {key: everyone.pop(key) for key in ("algorithm", "reference") if key in everyone}
    tree = merge({**own, "policies": {"*": everyone}}, given)
    policies = given.get("policies") or {}
    if not bound or not isinstance(policies, Mapping):
        return tree
    common = algorithm_named(policies.get("*") or {})
    algorithm = bound["algorithm"]["name"]
    for name in names:
        mine = merge(common, algorithm_named(policies.get(name) or {}))
        if (mine.get("algorithm") or {}).get("name", algorithm) == algorithm:
            tree["policies"] = {**tree["policies"], name: merge(bound, mine)}
    return tree


def algorithm_named(policy: ConfigTree) -> ConfigTree:
    """Return a policy's tree with the short form `algorithm: grpo` written as `algorithm: {name: grpo}`."""
    name = policy.get("algorithm") if isinstance(policy, Mapping) else None
    return {**policy, "algorithm": {"name": name}} if isinstance(name, str) else policy


def note(name: str, given: ConfigTree) -> str:
    """Return what `--dry-run` and the console print about a preset's settings."""
    mapping, paper = parts(name)
    if paper:
        tree = paper_settings(paper, (given.get("env") or {}).get("id", "mask-hotpotqa"), mapping)
        bound = [f"{key}={value}" for key, value in leaves(tree)]
        told = f"preset {mapping}; settings of {paper} (docs/presets.md), where nothing else is given:"
        return "\n# ".join([told, *(f"  {line}" for line in bound)])
    if learns_tiny(given):
        return f"preset {name}: settings of the demo, for the tiny model (trainers/config/presets.py); what is given counts more"
    models = sorted({str(g["model"]) for g in given["groups"].values() if g and "model" in g})
    if learns_small(given):
        return f"preset {name}: settings of docs/real-models.md for {', '.join(models)}; what is given counts more"
    own = hub_settings(given, mapping)
    rate = own["policies"]["*"]["learning"]["lr"]
    return (
        f"preset {name}: for {', '.join(models)}, a usual beginning (learning rate {rate:g}, replies of "
        f"{own['policies']['*']['sampling']['max_tokens']} tokens, {own['groups']['*'].get('precision', 'float32')}); not tuned for it: "
        "see docs/training.md"
    )
