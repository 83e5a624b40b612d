"""Settings of a model group, importable without torch: the part of the config tree for each group and policy."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from ...agents.basics.json_types import JsonObject
from ...agents.engines.vllm.gpu_places import gpus_of
from .choices import Amount, Count, Positive, Range, Settings, Share, Whole, check_ranges

if TYPE_CHECKING:
    import torch

Beta = Annotated[float, Range(0.0, 1.0, below=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning(Settings):
    """Settings of how one policy learns."""

    lr: Amount = 1e-5
    """Peak learning rate. Usual 1e-6 for billions of parameters, 1e-5 to 3e-4 for millions or adapters."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the rate after the warm-up. linear and cosine fall to `final` of the peak at `horizon` optimizer steps."""
    warmup: Whole = 0
    """Optimizer steps over which the rate rises from 0."""
    horizon: Whole = 0
    """Optimizer steps until the schedule ends. 0: the number of the whole run (steps × epochs × minibatches)."""
    final: Share = 0.1
    """Rate at the end of the schedule, as a share of the peak."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Betas of AdamW."""
    eps: Positive = 1e-8
    """Epsilon of AdamW."""
    weight_decay: Amount = 0.0
    """Weight decay of AdamW."""
    clip_norm: Amount = 1.0
    """Largest gradient norm. 0: no clipping. Usual 0.5–1."""
    micro_tokens: Count = 8192
    """Largest number of tokens in one forward pass. It changes memory and speed, never the result."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Precision of the forward and backward pass. bfloat16 is faster on hardware that supports it."""
    parameters: Literal["float32", "bfloat16"] = "float32"
    """Precision in which parameters and gradients are stored. bfloat16 takes half the memory. It rounds each step
    stochastically, with mean error 0, and needs precision: bfloat16."""
    moments: Literal["float32", "8bit"] = "float32"
    """Precision of the optimizer's moments. 8bit takes a quarter of the memory, with a scale for every 256 numbers."""
    thinking: bool = True
    """Flag: train the thinking part of a reply (`<think>…</think>`), too. false: it is context, and only the rest is trained."""
    checkpointing: bool = False
    """Flag: activation checkpointing. Only each layer's input is kept for the backward pass: less memory, a third more time."""
    snapshot: bool = False
    """Flag: copy parameters and optimizer before an update of several mini-batches, so that a failed update changes nothing. Without the
    copy a failed update ends after its last whole optimizer step, and the memory is half as large."""
    offload: bool = False
    """Flag: keep parameters and optimizer in the CPU's memory between uses (FSDP), for a GPU with too little memory."""

    def __post_init__(self) -> None:
        check_ranges(self, "learning.")
        if self.schedule not in ("constant", "linear", "cosine"):
            raise ValueError(f"learning.schedule is {self.schedule!r}: choose constant, linear or cosine")
        if self.schedule != "constant" and self.horizon and self.horizon <= self.warmup:
            raise ValueError(
                f"learning.schedule={self.schedule} needs learning.horizon > warmup ({self.horizon} <= {self.warmup})"
            )
        if self.precision not in ("float32", "bfloat16"):
            raise ValueError(f"learning.precision is {self.precision!r}: choose float32 or bfloat16")
        if self.parameters == "bfloat16" != self.precision:
            raise ValueError(
                "learning.parameters=bfloat16 needs learning.precision=bfloat16: a finer computation gains nothing"
            )

    def rate(self, step: int) -> float:
        """Return the learning rate of optimizer step 0, 1, 2 …"""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        if self.schedule == "constant":
            return self.lr
        if not self.horizon:
            raise ValueError(
                f"learning.schedule={self.schedule} needs learning.horizon; only a run can tell it by itself"
            )
        gone = min(1.0, (step - self.warmup) / (self.horizon - self.warmup))
        left = 1.0 - gone if self.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * gone))
        return self.lr * (self.final + (1.0 - self.final) * left)

    @property
    def dtype(self) -> torch.dtype:
        import torch

        found: torch.dtype = getattr(torch, self.precision)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter(Settings):
    """Policy as a small change of its group's base model: low-rank (LoRA), or with `tokens` a learned prefix."""

    rank: Count = 8
    """Rank of LoRA."""
    alpha: Positive = 16.0
    """Alpha of LoRA: the change is scaled by alpha / rank."""
    targets: tuple[str, ...] = ()
    """Matrices that the adapter changes, by peft's names (q_proj, v_proj …). Empty: all matrices of every layer."""
    tokens: Whole = 0
    """Number of tokens of a learned prefix in every layer (prefix tuning), instead of LoRA. 0: LoRA."""

    def __post_init__(self) -> None:
        check_ranges(self, "adapter.")
        if self.targets and self.tokens:
            raise ValueError("adapter: a prefix (tokens) changes no matrices (targets): give one of the two")
        if self.tokens and (self.rank, self.alpha) != (8, 16.0):
            raise ValueError(
                "adapter: a prefix (tokens) has no rank or alpha, which belong to LoRA: give one of the two"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling(Settings):
    """Sampling of a policy while it collects. It is recorded with every sample and enters training."""

    temperature: Amount = 1.0
    """Temperature. It must be above 0 for a policy that learns."""
    top_p: Annotated[float, Range(0.0, 1.0, above=True)] = 1.0
    """Limit of nucleus sampling: the most likely tokens with this share of the probability may be sampled. 1: all
    tokens."""
    top_k: Whole = 0
    """Number of most likely tokens that may be sampled. 0: all tokens."""
    max_tokens: Count = 256
    """Longest reply in tokens. The default of a policy is 64."""

    def __post_init__(self) -> None:
        check_ranges(self, "sampling.")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySpec:
    """Specification of one policy of a group."""

    learning: Learning | None = None
    """Settings of learning. None: the policy is frozen."""
    adapter: Adapter | None = None
    """Adapter on the base model. None: the policy has a full copy of the base."""
    adapters: dict[str, Adapter] = field(default_factory=dict)
    """Adapters by role, on the policy's own parameters, which all roles train."""
    critic: bool = False
    """Flag: the policy has a value head instead of the vocabulary head."""
    reference: bool = False
    """Flag: keep the first parameters, frozen, for a KL penalty."""
    init: str = ""
    """Name of a model to begin from instead of the group's base (full parameters only)."""
    sampling: Sampling = Sampling()

    def __post_init__(self) -> None:
        if self.init and self.adapter:
            raise ValueError("a policy has either an adapter on its group's base, or an init of its own")
        if (self.adapter or self.adapters) and self.learning and self.learning.parameters == "bfloat16":
            raise ValueError(
                "learning.parameters=bfloat16 is for policies without adapters: those are small, so leave them in float32"
            )
        if self.adapters and (self.adapter or self.critic):
            raise ValueError(
                "adapters by role stand on a policy's own parameters: give adapter or adapters, and no critic"
            )
        if self.critic and self.reference:
            raise ValueError("a critic has no use for a reference: set it on the policy that it judges")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """Specification of a model group: one base model, the policies on it, and how they generate."""

    name: str
    model: str
    """Name of a causal language model (agents/names.py): "tiny", "smollm2", "hf:ORG/NAME@REVISION", a path …"""
    policies: dict[str, PolicySpec] = field(default_factory=dict)
    slots: int = 64
    """Number of requests that are generated at the same time."""
    context: int | None = None
    """Largest number of tokens of a prompt and its reply together. None: the model's own limit."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Precision of generation."""
    export: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of exported policies. auto: bfloat16 if the model came in half precision and generates in bfloat16, else float32."""
    engine: str = "torch"
    """Name of the engine that generates."""
    engine_options: JsonObject = field(default_factory=dict)
    """Arguments of the engine (vLLM's)."""
    device: str = "cpu"
    """Device on which the group's models learn: cpu, cuda, cuda:1 … The torch engine generates on the same one."""
    cpus: float = 0
    """CPUs that Ray reserves for the group's actor."""
    gpus: float = 0
    """GPUs that Ray reserves for this group."""
    gpus_if_any: float = 0
    """GPUs that Ray reserves for this group's engine if the cluster has GPUs at all, whatever the device of its learners."""
    deterministic: bool = False
    """Flag: a reply does not depend, bit for bit, on the other requests."""
    threads: int = 0
    """Threads of the group's matrix products. 0: torch's default. Equal bits need a fixed number."""
    seed: int = 0
    """Seed of everything that starts at random (adapters)."""
    ranks: int = 1
    """Number of processes over which parameters, gradients and optimizers are sharded."""
    context_ranks: int = 1
    """Number of ranks that share the tokens of each micro-batch (context parallelism)."""
    replicas: int = 1
    """Number of engines with the same weights for each set of policies."""
    pool: str = ""
    """Name of the pool of groups that share a device in turn. Empty: no pool."""
    rank_actors: bool = False
    """Flag: ranks and further replicas are Ray actors, on any node. Otherwise ranks are processes, and replicas are in
    this process."""
    folder: str = ""
    """Folder for batches of failed updates. Empty: they are not kept."""

    def __post_init__(self) -> None:
        if self.ranks % self.context_ranks:
            raise ValueError(
                f"groups.{self.name}.context_ranks: {self.context_ranks} does not divide groups.{self.name}.ranks={self.ranks}; "
                "choose a divisor"
            )


def has_bfloat16(processor: Path = Path("/proc/cpuinfo")) -> bool:
    """Tell, without torch, whether this processor reports that it multiplies bfloat16."""
    try:
        return not {"avx512_bf16", "amx_bf16"}.isdisjoint(processor.read_text().split())
    except OSError:
        return False


def sharded(spec: GroupSpec) -> bool:
    """Tell whether learners are in rank processes of their own."""
    learning = [policy.learning for policy in spec.policies.values() if policy.learning is not None]
    return bool(learning) and (spec.ranks > 1 or any(own.offload for own in learning))


def engine_gpus(engine: str, options: Mapping[str, object]) -> int:
    """Return the number of GPUs that one engine takes."""
    return gpus_of(options) if engine == "vllm" else 1


def own_gpus(device: str, engine: str, options: Mapping[str, object], reserved: float | None = None) -> int:
    """Return the number of GPUs that a group's own process needs for its learners and its first engine. `reserved`: GPUs
    that a user gives it; vLLM takes them beside learners on the CPU, too.
    """
    if not device.startswith("cuda"):
        return gpus_of(options) if engine == "vllm" and reserved else 0
    last = int(device.partition(":")[2] or 0)  # vLLM takes the first ones that the process sees
    return max(gpus_of(options), last + 1) if engine == "vllm" else 1


def replica_gpus(spec: GroupSpec) -> int:
    """Return the number of GPUs that each further replica of a group reserves. vLLM takes them without regard to the
    device on which the policies learn.
    """
    on_gpus = spec.device.startswith("cuda") or (spec.engine == "vllm" and spec.gpus > 0)
    return engine_gpus(spec.engine, spec.engine_options) if on_gpus else 0


def faster_precision(size: int = 512) -> Literal["float32", "bfloat16"]:
    """Return bfloat16 if this processor multiplies it faster, else float32. The measurement takes 20 ms."""
    import torch

    seconds: dict[Literal["float32", "bfloat16"], float] = {}
    for name in ("float32", "bfloat16"):
        matrix = torch.ones(size, size, dtype=getattr(torch, name))
        matrix @ matrix
        began = time.perf_counter()
        for _ in range(5):
            matrix @ matrix
        seconds[name] = time.perf_counter() - began
    return min(seconds, key=seconds.__getitem__)
