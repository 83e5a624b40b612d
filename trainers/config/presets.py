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
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from ...agents.basics.hints import nearest
from ...agents.fetch.packaged import PACKAGES
from ...envs.registry import spec
from .group_settings import has_bfloat16
from .reader import ConfigError, Tree, leaves
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
"""File in which a warm start says what it did, in the directory of the model that it made."""
PRESETS = ("shared", "separate", "lora", "partial")
FOLDER = Path(__file__).parent / "papers"
PAPERS = ("unitymas-o", "stronger-mas", "dr-mas")


def parts(names: str) -> tuple[str, str]:
    """The mapping and the paper (or "") of a preset such as `shared`, `dr-mas` or `unitymas-o,separate`."""
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
def _paper(name: str) -> Tree:
    return read_yaml(FOLDER / f"{name}.yaml")


def paper_settings(name: str, env: str, mapping: str) -> Tree:
    """What a paper sets, for an environment and a mapping."""
    tree = _paper(name)
    found: Tree = tree["settings"]
    bare = spec(env).id.rpartition("-v")[0] or spec(env).id
    for case in tree["environments"]:
        if bare in case["ids"] or spec(env).id in case["ids"]:
            found = merge(found, case["settings"])
    return merge(found, tree.get("lora", {})) if mapping == "lora" else found


def preset(name: str, roles: Sequence[str]) -> Tree:
    """The `groups`, `policies` and `map` of a preset, for these roles."""
    name, _ = parts(name)
    shares: list[tuple[str, ...]] = kin(roles) if name == "partial" else [(r,) for r in roles]
    if name == "shared":
        shares = [tuple(roles)]
    tree: Tree = {"groups": {}, "policies": {}, "map": {}}
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


MASK: Tree = {
    # one passage a search: among several the tiny model finds the right kind of answer, not the right name
    "args": {"top_k": 1},
    # at full weight the format's -1 teaches a clumsy searcher to end at once
    "reward": ["unitymas.rewards.mask:MaskCredit", "unitymas.rewards.outcome:DrMasFormat"],
}
SHORT: Tree = {"groups": {"*": {"context": 512}}}  # the longest prompt with its reply: some 140 tokens
TINY_BY_ENV: dict[str, Tree] = {
    "mask-hotpotqa": {"env": MASK, **SHORT},
    "mask-nq": {"env": MASK, **SHORT},
    "rag-nq": {"env": {"args": {"top_k": 1}}, **SHORT},
    "rag-hotpotqa": {"env": {"args": {"top_k": 1}}, **SHORT},
    # prompts are six times as long as the others' (the problem, the program, what its tests said), programs run in the
    # sandbox, and a program needs more than 40 tokens
    "code-deepcoder": {"tasks_per_step": 6, "policies": {"*": {"sampling": {"max_tokens": 64}}}},
}
"""What differs from `TINY`, by environment."""

TINY: Tree = {
    "steps": 24,
    "tasks_per_step": 12,
    "k": 8,
    "minibatches": 2,
    "concurrency": 256,
    "eval": {"every": 8, "tasks": 200},
    "policies": {
        "*": {
            # held near where it began, so that what is rewarded again and again moves it first: without this, chance
            # alone (rewards shuffled between episodes) flips even more of what a small model stood undecided about
            "algorithm": {"name": "ppo", "kl_loss": 0.05},
            "reference": True,
            # a higher rate learns somewhat more, but without signal (the control) it wears down what the model can;
            # falling to a tenth over the run: the last checkpoint counts, so it should stand still
            "learning": {"lr": 1.5e-4, "schedule": "linear", "micro_tokens": 4096},
            "sampling": {"max_tokens": 40, "temperature": 0.8},
        }
    },
    # one thread: at this size a second one costs more than it brings (20 s a step instead of 16)
    "groups": {"*": {"slots": 96, "threads": 1}},
}

TINY_ADAPTERS: Tree = {"steps": 20, "policies": {"*": {"learning": {"lr": 1e-3}}}}
"""What differs with `--preset lora`. Adapters take, and need, a higher rate than a model's own weights."""

HUB: Tree = {
    "policies": {
        "*": {
            # what papers and trainers of this size begin with: a model of billions loses its form at ten times this rate
            "learning": {"lr": 1e-6, "warmup": 10, "checkpointing": True},
            "critic_rate": 10.0,  # its head is new, and what it learns moves with the policy
            # a reply that thinks in prose before its tag has some hundred tokens; one that is cut off earns nothing
            "sampling": {"max_tokens": 512},
        }
    },
}
"""Settings of any other model, from a hub or a directory. They are a usual beginning, and were tuned for none."""
HUB_ADAPTERS: Tree = {"policies": {"*": {"learning": {"lr": 3e-5}, "critic_rate": 3.0}}}
"""What differs with `--preset lora`."""

SMALL: Tree = {
    "steps": 10,
    "tasks_per_step": 6,
    "k": 8,
    "concurrency": 64,
    "eval": {"every": 10, "tasks": 42},
    "policies": {
        "*": {
            # a critic as large as the policy doubles the cost, and has hardly learned when these few steps are over; a
            # deviation in the denominator makes the rare lucky word of a hard question the strongest lesson of a step.
            # Without the KL term chance alone (rewards shuffled between episodes) wears the form of the replies down
            "algorithm": {"name": "rloo", "kl_loss": 0.1},
            "reference": True,
            # the first steps are small: Adam has seen too few gradients to scale them
            "learning": {"lr": 2e-5, "schedule": "linear", "warmup": 4, "micro_tokens": 1024},
            # cooler, the samples of a question are nearly all the same, and teach nothing
            "sampling": {"max_tokens": 40, "temperature": 1.0},
        }
    },
    "groups": {"*": {"slots": 64, "context": 1024}},
}
"""Settings of a model that a registry package carries (26 to 135 million parameters) on a laptop."""
SMALL_ADAPTERS: Tree = {"policies": {"*": {"learning": {"lr": 5e-4}}}}
"""What differs with `--preset lora`."""
WARM: dict[str, dict[str, float]] = {"minimind2": {"epochs": 1.0}, "smollm2": {"draws": 80}}
"""Passes, or replies, of the warm start without which these models never reply in the form that is asked."""


def tiny_settings(env: str, preset: str = "shared") -> Tree:
    """What the tiny model learns an environment with: the demo's settings."""
    return merge(merge(TINY, TINY_BY_ENV.get(env, {})), TINY_ADAPTERS if preset == "lora" else {})


def learns_tiny(given: Tree) -> bool:
    """Tell whether all groups of a tree host the tiny model, as it is or after a warm start."""
    groups = given.get("groups") or {}
    return all(origin_of(str((group or {}).get("model", "tiny"))) == "tiny" for group in groups.values())


def learns_small(tree: Tree) -> bool:
    """Tell whether all groups of a tree host a model that a package carries, as it is or after a warm start."""
    models = [str((group or {}).get("model", "tiny")) for group in (tree.get("groups") or {}).values()]
    return bool(models) and all(origin_of(model) in PACKAGES for model in models)


def origin_of(model: str) -> str:
    """The model that a warm start began from, where `model` is a directory that one wrote; else `model` itself."""
    try:
        origin = json.loads((Path(model).expanduser() / WARMSTART_FILE).read_text("utf-8"))["model"]
    except (OSError, ValueError, KeyError, TypeError):
        return model
    return str(origin)


def small_settings(preset: str = "shared") -> Tree:
    """Return the settings of such a model, learning and generating at the precision that this processor multiplies faster."""
    faster = {"precision": "bfloat16"} if has_bfloat16() else {}
    own = merge(SMALL, {"policies": {"*": {"learning": faster}}, "groups": {"*": faster}})
    return merge(own, SMALL_ADAPTERS) if preset == "lora" else own


def hub_settings(given: Tree, preset: str = "shared") -> Tree:
    """Return the settings of a model from a hub: in bfloat16 on a GPU, and where this processor multiplies it faster."""
    devices = [str((group or {}).get("device", "auto")) for group in (given.get("groups") or {}).values()]
    on_gpu = any(device.startswith("cuda") for device in devices) or ("auto" in devices and has_gpu())
    faster = {"precision": "bfloat16"} if on_gpu or has_bfloat16() else {}
    own = merge(HUB, {"policies": {"*": {"learning": faster}}, "groups": {"*": faster}})
    return merge(own, HUB_ADAPTERS) if preset == "lora" else own


def has_gpu() -> bool:
    """Tell, without torch, whether an NVIDIA GPU is here."""
    return Path("/proc/driver/nvidia/version").exists()


def settings(name: str, given: Tree) -> Tree:
    """What a preset learns with, under what is given; another algorithm brings its own settings."""
    env = (given.get("env") or {}).get("id", "mask-hotpotqa")
    name, paper = parts(name)
    policies = [policy or {} for policy in (given.get("policies") or {}).values()]
    if paper:
        own = paper_settings(paper, env, name)
        mine = own["policies"]["*"]["algorithm"]["name"]
        return without_algorithm(own) if any(_another(p.get("algorithm"), mine) for p in policies) else own
    if not learns_tiny(given) and not learns_small(given):
        return hub_settings(given, name)
    own = tiny_settings(env, name) if learns_tiny(given) else small_settings(name)
    return without_algorithm(own) if any("algorithm" in p for p in policies) else own


def without_algorithm(own: Tree) -> Tree:
    """Settings less those of their algorithm."""
    everyone = {k: v for k, v in own["policies"]["*"].items() if k not in ("algorithm", "reference")}
    return {**own, "policies": {"*": everyone}}


def _another(algorithm: object, mine: str) -> bool:
    """Whether what is given for `algorithm` names another one."""
    return (algorithm.get("name", mine) if isinstance(algorithm, Mapping) else algorithm or mine) != mine


def note(name: str, given: Tree) -> str:
    """What `--dry-run` and the console say about a preset's settings."""
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
