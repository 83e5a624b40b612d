"""The config of a run: one typed tree, importable without torch.

    defaults  <-  preset  <-  YAML file  <-  `a.b=c` overrides

Every key is a field of a dataclass below: its type says what fits, its range too, and what stands under it is its
documentation. How text becomes settings: reader.py. What fits together: resolve.py and plan.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated, Literal

from ...agents.model_settings import ModelSettings
from ...envs.core.tasks import DataSet
from ..controller.counterfactual import Counterfactual
from .choices import Amount, Count, Positive, Range, Settings, Whole
from .group_settings import Adapter, Learning, Sampling
from .reader import ConfigError as ConfigError
from .reader import ConfigTree
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
    """Id of the environment (`unitymas list`), or module:id."""
    data: DataSet | str | None = None
    """Data set: "mini", the name of a prepared one, or a file. null: the environment's real data set if it is prepared on this
    machine, else mini."""
    split: str = "train"
    """Part of the data set that is trained on."""
    size: Count | None = None
    """Number of tasks to generate in the mini world. null: its default (2,048 for training)."""
    reward: object = "default"
    """Reward: "default", one rule or a list of rules, by registered name or as module:name. null: no reward."""
    rules: tuple[object, ...] = ()
    """Further rules, attached by reward wrappers."""
    tasks: object = None
    """Tasks given from Python as rows. Then `data` and `split` do not count, and validation plays these tasks too."""
    tools: dict[str, object] = field(default_factory=dict)
    """Tools given from Python, by name. They replace the environment's."""
    budget: dict[str, object] | None = None
    """Limits of an episode: requests, tokens, seconds. null: the environment's own."""
    prompts: object = None
    """Prompt set (docs/prompts.md): full, few-shot, short, a mapping from role to text, or a file. null: short if all models are
    tiny, else full."""
    args: ConfigTree = field(default_factory=dict)
    """Arguments of the workflow itself, such as max_turns."""


@dataclass(frozen=True, kw_only=True)
class GroupConfig(Settings):
    """A model group: one base model, and the policies on it."""

    model: str = "tiny"
    """Name of a causal language model (docs/running.md): "tiny", "smollm2", "hf:ORG/NAME@REVISION", a path …"""
    slots: Count = 128
    """Largest number of requests that an engine generates at the same time. Memory for keys and values grows with use."""
    context: Count | None = None
    """Largest number of tokens of a prompt and its reply together. null: the model's own limit."""
    threads: Whole = 0
    """CPU threads of the group's matrix products. 0: torch's default."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Precision of generation. That of training is `learning.precision`."""
    export: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the exported policies. auto: bfloat16 if the model's configuration names a half precision and the group generates in
    bfloat16, else that of the parameters. In bfloat16 an export is half as large, and holds the weights that played."""
    device: str = "auto"
    """Device on which the group's models learn: cpu, cuda, cuda:1 … The torch engine generates on the same one. auto: a GPU if there is
    one, else cpu; several groups take the GPUs in turn. With engine vllm, auto is cpu for the learners, because vLLM fills the GPU."""
    gpus: Amount | None = None
    """GPUs that Ray reserves for this group's own process; it sees no others. Each rank reserves one besides, each further replica as many
    as its engine takes. null: 1 if the device is cuda (with vLLM as many as it and the device take), else 0. On auto, groups
    share GPUs if there are more groups than GPUs, and vLLM has as many GPUs as it takes if the cluster has any."""
    cpus: Amount = 0.0
    """CPUs that Ray reserves for this group. 0: the group shares the CPUs of its node."""
    ranks: Count = 1
    """Processes over which the parameters, gradients and optimizers of the group's policies are sharded (docs/scale.md), one for each
    GPU. On device cuda:K they take GPUs K, K + 1 …"""
    context_ranks: Count = 1
    """Ranks over which the tokens of each micro-batch are split, for contexts that are too long for one GPU. It must divide `ranks`."""
    pool: str = ""
    """Name of a pool. The groups of a pool share one device and learn in turn, while their engines sleep (docs/scale.md). Empty:
    no pool."""
    engine: str = "torch"
    """Engine that generates (docs/engine.md): torch, vllm, or a registered one."""
    replicas: Count = 1
    """Number of engines with the same weights. A router sends requests with a common prefix to the same engine (docs/scale.md). Each
    engine takes `slots` requests, and on GPUs a GPU of its own. On device cuda:K they take GPUs K, K + 1 …"""
    engine_options: ConfigTree = field(default_factory=dict)
    """Arguments of vLLM's engine: gpu_memory_utilization, tensor_parallel_size, enforce_eager …"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not re.fullmatch(
            r"auto|cpu|mps|meta|cuda(:\d+)?", self.device
        ):  # whether it is there, the run says
            raise ValueError(f"device: {self.device!r} is no device; give auto, cpu, cuda, cuda:1 or mps")


@dataclass(frozen=True, kw_only=True)
class PolicyConfig(Settings):
    """A policy: parameters in a group, and how they learn."""

    group: str = "main"
    """Name of the model group that hosts this policy."""
    frozen: bool = False
    """Flag: the policy plays and does not learn."""
    algorithm: ConfigTree = field(default_factory=lambda: {"name": "ppo"})
    """Algorithm: its `name` and its own settings (docs/algorithms.md). The name alone is enough: algorithm: grpo."""
    learning: Learning = Learning()
    """Optimizer and precision of training."""
    critic: str = "auto"
    """Name of the policy with a value head that judges this one. auto: a critic is made in the same group, if the algorithm needs
    one."""
    critic_rate: Positive = 1.0
    """Learning rate of the automatic critic, as a multiple of the policy's. It does not count if `critic_learning` gives an `lr`."""
    critic_learning: ConfigTree | None = None
    """Settings in which the automatic critic learns otherwise than `learning` says, such as lr. It takes the others from there."""
    reference: bool = False
    """Flag: keep a frozen copy of the first parameters, for a KL penalty."""
    adapter: Adapter | None = None
    """Adapter (LoRA) on the group's base model, trained instead of a full copy. null: a full copy is trained."""
    adapters: dict[str, Adapter] = field(default_factory=dict)
    """Adapters by role, on a copy of the base that learns from all roles of the policy (docs/models.md)."""
    init: str = ""
    """Name of a model to begin from. Empty: the group's model."""
    sampling: Sampling = Sampling(max_tokens=64)
    """Sampling while episodes are collected. Its `max_tokens` is 64 here."""
    credit: ConfigTree = field(default_factory=dict)
    """Credit transforms by role (docs/algorithms.md): mixing of team and local rewards, shaping, tree credit."""

    def critics_learning(self, where: str = "critic_learning") -> Learning:
        """Return the critic's learning settings: those of the policy, except what is set for the critic."""
        own = {"lr": self.learning.lr * self.critic_rate, **(self.critic_learning or {})}
        return build(Learning, merge(to_dict(self.learning), own), where)


@dataclass(frozen=True, kw_only=True)
class EvalConfig(Settings):
    """Validation, greedy by default, on tasks of another split."""

    every: Whole = 10
    """Steps between validations. 0: only at the beginning and the end."""
    tasks: Count = 64
    """Number of held-out tasks."""
    split: str = "validation"
    """Part of the data set that is validated on."""
    k: Count = 1
    """Samples per task."""
    temperature: Amount = 0.0
    """Temperature of validation. 0: greedy."""


@dataclass(frozen=True, kw_only=True)
class LogConfig(Settings):
    """Places where figures go, besides `metrics.jsonl`."""

    console: Literal["auto", "live", "plain", "off"] = "auto"
    """Output on the terminal. auto: live on a terminal, else plain."""
    tensorboard: bool = False
    """Flag: write TensorBoard files."""
    wandb: str = ""
    """Project of Weights & Biases. Empty or off: not used."""
    trackio: str = ""
    """Project of trackio. Empty or off: not used."""
    prometheus: Annotated[int, Range(0, 65535)] = 0
    """Port on this machine where Prometheus reads the newest figures. 0: not served."""
    otlp: str = ""
    """Address of an OpenTelemetry collector (http://HOST:4318/v1/metrics). Empty or off: not used."""
    also: tuple[str, ...] = ()
    """Further loggers, by name or as module:name (docs/new-parts.md)."""
    traces_every: Whole = 10
    """Distance in steps between training steps whose traces are kept. 0: only validation's traces are kept."""
    timeline: bool = True
    """Flag: write `timeline.json`, which shows the work of groups and controller over time (https://ui.perfetto.dev opens it)."""


@dataclass(frozen=True, kw_only=True)
class PlayersConfig(ModelSettings, Settings):
    """Settings of the models that the map names as fixed players: endpoints and their budget, frozen models (docs/remote.md)."""


@dataclass(frozen=True, kw_only=True)
class RayConfig(Settings):
    """Cluster on which the groups of a run with runtime=ray live (docs/running.md)."""

    address: str = ""
    """Address of a cluster: HOST:6379, ray://HOST:10001 … Empty: the address in RAY_ADDRESS, else a Ray that runs on this machine,
    else a new one. local: a new one."""
    options: ConfigTree = field(default_factory=dict)
    """Further arguments of `ray.init`: namespace, runtime_env, num_cpus …"""
    strategy: Literal["", "pack", "spread", "strict_pack", "strict_spread"] = ""
    """Placement of the groups on the nodes, by a placement group of Ray. Ranks and further replicas are outside of it. Empty: wherever
    Ray has room for what groups ask for."""
    wait: Positive = 60.0
    """Longest wait in seconds for room on the nodes. Then the run ends, and prints what was asked for and what the nodes have."""


@dataclass(frozen=True, kw_only=True)
class RunConfig(Settings):
    """A training run."""

    imports: tuple[str, ...] = ()
    """Files and modules of your own that are imported first (`--import`)."""
    env: EnvConfig = EnvConfig()
    """Environment: the source of episodes."""
    groups: dict[str, GroupConfig] = field(default_factory=lambda: {"main": GroupConfig()})
    """Model groups by name. Each hosts one base model."""
    policies: dict[str, PolicyConfig] = field(default_factory=lambda: {"team": PolicyConfig()})
    """Policies by name. Each is a set of parameters in a group."""
    map: dict[str, str] = field(default_factory=lambda: {"*": "team"})
    """Player of each agent, else of its role, else of "*": a policy, or a fixed player ("scripted", "openai:…")."""
    players: PlayersConfig = PlayersConfig()
    """Settings of those fixed players in `map` that are models: sampling, limits, prices, a budget."""
    counterfactual: dict[str, Counterfactual] = field(default_factory=dict)
    """Counterfactual credit by role, or for "*" (docs/trees-and-recipes.md)."""
    recipe: str = "default"
    """Recipe: the order of the parts of a step. default, or another registered recipe."""
    recipe_args: ConfigTree = field(default_factory=dict)
    """Fields of the recipe."""
    steps: Count = 60
    """Number of training steps: collect, update, publish."""
    tasks_per_step: Count = 32
    """Tasks that are played in a step."""
    k: Count = 8
    """Trajectories (or trees) per task."""
    minibatches: Count = 2
    """Optimizer steps per update. The samples are cut by task. More steps learn faster and are further off-policy."""
    epochs: Count = 1
    """Passes over the samples of a step."""
    concurrency: Count = 512
    """Largest number of episodes that are played at the same time."""
    controllers: Count = 1
    """Number of controllers that play the episodes of a step, each a range of its tasks (docs/scale.md). With runtime=ray each is a process
    of its own. There is one table and one update, so results are the same."""
    episode_seconds: Positive | None = None
    """Longest time of an episode in seconds; then it is truncated. null: no limit. Not allowed in deterministic runs."""
    retries: Whole = 2
    """Number of new attempts for an episode that failed because of infrastructure."""
    overlap: Literal["off", "wait", "drop"] = "off"
    """Collection of episodes during updates (docs/overlap.md). off: collect, then update. wait: an episode begins only if it cannot become
    older than `staleness`; all episodes are trained on, in order. drop: the first episodes that end are trained on, and those that are too
    old are discarded; long episodes are discarded more often than short ones."""
    staleness: Whole = 0
    """Largest age of a sample when it is trained on, in versions of the policy. Older samples are discarded and counted. With
    overlap=wait, the number of steps that collection may run ahead; usual 1."""
    seed: int = 0
    """Seed of tasks, sampling, and everything that starts at random."""
    runtime: Literal["local", "ray"] = "local"
    """Place of the groups. local: in this process. ray: each group is a Ray actor (docs/running.md)."""
    ray: RayConfig = RayConfig()
    """Cluster of a run with runtime=ray."""
    restarts: Whole = 3
    """Number of times in a row that a run continues by itself from its newest checkpoint after a group died. A finished
    step resets the count to 0."""
    restart_pause: Amount = 2.0
    """Seconds before the first restart. Each further restart waits twice as long, up to a minute."""
    deterministic: bool = False
    """Flag: fixed decode shapes, fixed threads and no wall-clock deadlines, so that two runs give the same bits."""
    shuffle_rewards: bool = False
    """Flag for a control run: rewards are exchanged between episodes before advantages are computed, and brought to mean 0 for each agent
    and turn. Then there is nothing to learn."""
    watchdog: Amount = 300.0
    """Seconds without any finished work, after which the run prints what waits for what. It changes nothing. 0: never."""
    patience: Count = 3
    """Number of steps in a row without a usable sample, after which the run stops and prints the cause."""
    starved: bool = True
    """Flag: stop when more than 90% of a trained role's advantages are 0 for `patience` steps."""
    eval: EvalConfig = EvalConfig()
    """Validation."""
    log: LogConfig = LogConfig()
    """Loggers."""
    checkpoint_every: Whole = 20
    """Steps between checkpoints. 0: only at the end."""
    checkpoints: Count = 2
    """Number of newest checkpoints that are kept."""
    checkpoints_best: Whole = 0
    """Number of further checkpoints that are kept: those of the steps with the best validation. The run never chooses among them. It goes
    on from the newest, exports its last policies, and reports every validation."""
