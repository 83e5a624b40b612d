"""The config of a run: one typed tree, importable without torch.

    defaults  <-  preset  <-  YAML file  <-  `a.b=c` overrides

Every key is a field of a dataclass below: its type says what fits, its range too, and what stands under it is its
documentation. How text becomes settings: reader.py. What fits together: resolve.py and plan.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from ...agents.model_settings import ModelSettings
from ...envs.core.tasks import DataSet
from ..controller.counterfactual import Counterfactual
from .choices import Amount, Count, Positive, Range, Settings, Whole
from .group_settings import Adapter, Learning, Sampling
from .reader import ConfigError as ConfigError
from .reader import build as build
from .reader import dump as dump
from .reader import merge as merge
from .reader import override as override
from .reader import read_yaml as read_yaml
from .reader import to_dict as to_dict


@dataclass(frozen=True, kw_only=True)
class EnvConfig(Settings):
    """Source of episodes: the arguments of `unitymas.make`."""

    id: str = "mask-hotpotqa"
    data: DataSet | str | None = None
    """"mini", the name of a prepared data set, or a file. null: the real one if prepared, else mini."""
    split: str = "train"
    size: Count | None = None
    """Number of tasks of the mini world to generate. null: its default."""
    reward: Any = "default"
    """Rules, functions, or entry points to them (module:name). null: none."""
    rules: tuple[Any, ...] = ()
    """Rules besides: what reward wrappers attach."""
    tasks: Any = None
    """Rows of one's own, from Python; then neither `data` nor `split` counts, and validation plays them too."""
    tools: dict[str, Any] = field(default_factory=dict)
    """Tools in place of the environment's, by name, from Python."""
    budget: dict[str, Any] | None = None
    """Limits of an episode: requests, tokens, seconds. null: the environment's."""
    prompts: Any = None
    """What the roles are told: full, few-shot, short, one's own by role, or a file (docs/prompts.md). null: short where
    all models are tiny, else full."""
    args: dict[str, Any] = field(default_factory=dict)
    """The workflow's own arguments (max_turns …)."""


@dataclass(frozen=True, kw_only=True)
class GroupConfig(Settings):
    """A model group: one base model, and the policies on it."""

    model: str = "tiny"
    """A causal language model (docs/models.md), by its name (agents/names.py): "tiny", "smollm2", "hf:ORG/NAME@REVISION", a path …"""
    slots: Count = 128
    """Requests that are generated side by side, at most; keys and values take the memory that they need."""
    context: Count | None = None
    """Longest prompt and reply together. null: the model's own."""
    threads: Whole = 0
    """Threads of its matrix products; 0: torch's default."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Precision of generation."""
    device: str = "auto"
    """Device on which the group's models learn, and generate where the engine is torch: cpu, cuda, cuda:1 … auto: a GPU where there is one
    (groups take them in turn), else cpu; with vLLM, which fills a GPU by itself, cpu."""
    gpus: Amount | None = None
    """GPUs that Ray reserves for this group; it sees no others. null: one where the device is cuda (a share
    where groups on auto outnumber them), else none."""
    cpus: Amount = 0.0
    """CPUs that Ray reserves for this group. 0: it shares those of its node."""
    ranks: Count = 1
    """Processes over which the parameters, gradients and optimisers of its policies are sharded (docs/scale.md): one a GPU.
    On device cuda:K they take K, K + 1 …"""
    context_ranks: Count = 1
    """Ranks among which the tokens of each micro-batch are split, for contexts that are too long for one. It divides `ranks`."""
    pool: str = ""
    """Name of a pool: its groups share one device and learn by turns, while their engines sleep (docs/scale.md). Empty: none."""
    engine: str = "torch"
    """Engine that generates (docs/engine.md)."""
    replicas: Count = 1
    """Engines with the same weights, and a router that keeps common prefixes together (docs/scale.md). Each takes `slots` requests, and
    on GPUs a device of its own. On device cuda:K they take K, K + 1 …"""
    engine_options: dict[str, Any] = field(default_factory=dict)
    """Arguments of vLLM's engine (gpu_memory_utilization, tensor_parallel_size, enforce_eager …)."""


@dataclass(frozen=True, kw_only=True)
class PolicyConfig(Settings):
    """A policy: parameters in a group, and how they learn."""

    group: str = "main"
    frozen: bool = False
    algorithm: dict[str, Any] = field(default_factory=lambda: {"name": "ppo"})
    """`name`, and the algorithm's own fields (docs/algorithms.md). A name alone will do: algorithm: grpo."""
    learning: Learning = Learning()
    critic: str = "auto"
    """The policy with a value head that judges this one. auto: one of its own, in the same group, where the
    algorithm needs one."""
    critic_learning: Learning | None = None
    """Learning settings of the automatic critic. null: as `learning`."""
    reference: bool = False
    """Keep a frozen copy of the first parameters, for a KL penalty."""
    adapter: Adapter | None = None
    """Train a low-rank adapter on the group's base instead of a full copy."""
    adapters: dict[str, Adapter] = field(default_factory=dict)
    """Role -> an adapter of its own, on a copy of the base that learns from all roles of the policy."""
    init: str = ""
    """A model to begin from instead of the group's, named as there."""
    sampling: Sampling = Sampling(max_tokens=64)
    credit: dict[str, Any] = field(default_factory=dict)
    """Credit transforms by role (docs/algorithms.md): team and local mixing, shaping, tree credit."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig(Settings):
    """Validation, greedy by default, on tasks of another split."""

    every: Whole = 10
    """Steps between validations; 0: only at the beginning and the end."""
    tasks: Count = 64
    split: str = "validation"
    k: Count = 1
    temperature: Amount = 0.0


@dataclass(frozen=True, kw_only=True)
class LogConfig(Settings):
    """Places where figures go, besides `metrics.jsonl`."""

    console: Literal["auto", "live", "plain", "off"] = "auto"
    tensorboard: bool = False
    wandb: str = ""
    """Project of Weights & Biases. Empty or off: none."""
    trackio: str = ""
    """Project of trackio. Empty or off: none."""
    prometheus: Annotated[int, Range(0, 65535)] = 0
    """Port on this machine where Prometheus reads the newest figures. 0: none."""
    otlp: str = ""
    """Address of an OpenTelemetry collector (http://HOST:4318/v1/metrics). Empty or off: none."""
    also: tuple[str, ...] = ()
    """Loggers besides, by name or as module:name (docs/new-parts.md)."""
    traces_every: Whole = 10
    """Steps between those whose traces are kept; 0: none but validation's."""
    timeline: bool = True
    """Flag: `timeline.json` shows what groups and controller did when (https://ui.perfetto.dev opens it)."""


@dataclass(frozen=True, kw_only=True)
class PlayersConfig(ModelSettings, Settings):
    """Settings of the models that the map names as fixed players: endpoints and their budget, frozen models (docs/remote.md)."""


@dataclass(frozen=True, kw_only=True)
class RayConfig(Settings):
    """Cluster on which the groups of a run with runtime=ray live (docs/running.md)."""

    address: str = ""
    """Address of a cluster: HOST:6379, ray://HOST:10001 … Empty: that of RAY_ADDRESS, a Ray that runs on this machine, or one
    that is started here."""
    options: dict[str, Any] = field(default_factory=dict)
    """More arguments of `ray.init` (namespace, runtime_env, num_cpus …)."""
    strategy: Literal["", "pack", "spread", "strict_pack", "strict_spread"] = ""
    """Placement of the groups on the nodes, in a placement group of Ray's. Empty: wherever Ray finds room."""
    wait: Positive = 60.0
    """Longest time in seconds for a placement. Then the run ends, and says what the nodes have."""


@dataclass(frozen=True, kw_only=True)
class RunConfig(Settings):
    """A training run."""

    imports: tuple[str, ...] = ()
    """Files and modules of one's own that are imported first (`--import`)."""
    env: EnvConfig = EnvConfig()
    groups: dict[str, GroupConfig] = field(default_factory=lambda: {"main": GroupConfig()})
    policies: dict[str, PolicyConfig] = field(default_factory=lambda: {"team": PolicyConfig()})
    map: dict[str, str] = field(default_factory=lambda: {"*": "team"})
    """Agent, else role, else "*" -> a policy of `policies`, or a fixed player ("scripted", "openai:…")."""
    players: PlayersConfig = PlayersConfig()
    """Settings of the map's fixed players that are models: sampling, limits, prices, a budget."""
    counterfactual: dict[str, Counterfactual] = field(default_factory=dict)
    """Role (or "*") -> how its acts are questioned by forks (docs/trees-and-recipes.md)."""
    recipe: str = "default"
    """The order of a step: default, or another registered one."""
    recipe_args: dict[str, Any] = field(default_factory=dict)
    steps: Count = 60
    tasks_per_step: Count = 32
    k: Count = 8
    """Trajectories per task."""
    minibatches: Count = 2
    """Optimizer steps per update, cut by task. More: faster and further off-policy."""
    epochs: Count = 1
    """Passes over a step's samples."""
    concurrency: Count = 512
    """Episodes in flight."""
    episode_seconds: Positive | None = None
    """An episode that takes longer is truncated. Not in deterministic runs."""
    retries: Whole = 2
    """Number of times that an episode that failed for infrastructure's sake is begun anew."""
    overlap: Literal["off", "wait", "drop"] = "off"
    """Play episodes while groups update (docs/overlap.md). wait: no episode begins that could become older than `staleness`, and
    all are trained on, in order. drop: whoever arrives first is trained on, and what is too old is discarded, long episodes more
    often than short ones. off: play, then update."""
    staleness: Whole = 0
    """Largest number of versions that a sample may be old when it is trained on; older ones are discarded and counted.
    With overlap=wait, steps that collection may run ahead; usual 1."""
    seed: int = 0
    runtime: Literal["local", "ray"] = "local"
    ray: RayConfig = RayConfig()
    restarts: Whole = 3
    """Number of times in a row, without a finished step between, that a run whose group died goes on by itself from its newest
    checkpoint."""
    restart_pause: Amount = 2.0
    """Seconds before the first of them; each further one waits twice as long, up to a minute."""
    deterministic: bool = False
    """Fixed decode shapes, pinned threads, no wall-clock deadlines: runs agree bit for bit."""
    shuffle_rewards: bool = False
    """A control: credits are exchanged between episodes, and brought to mean 0 for each agent and turn, before advantages
    are made. There is nothing to learn."""
    watchdog: Amount = 300.0
    """Seconds in which nothing ends, after which the run says who waits for whom; 0: never. It only tells."""
    patience: Count = 3
    """Stop with the cause after so many steps in a row without one usable sample."""
    starved: bool = True
    """Stop when over 90% of a trained role's advantages are 0 for `patience` steps."""
    eval: EvalConfig = EvalConfig()
    log: LogConfig = LogConfig()
    checkpoint_every: Whole = 20
    """Steps between checkpoints; 0: only at the end."""
    checkpoints: Count = 2
    """Number of checkpoints that are kept, the newest."""
    checkpoints_best: Whole = 0
    """Number of checkpoints that are kept besides: those of the steps with the best validation. The run itself never chooses among
    them: it goes on from the newest, exports its last policies, and reports every validation."""
