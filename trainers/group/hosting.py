"""The policies of a model group, built from its spec: who owns which parameters, and which engine generates for whom.

    base                     loaded once, never trained itself
    policy with an adapter   a low-rank change on the base; all such policies share one engine
    policy without           a full copy of the base (or of its `init`), and an engine of its own
    critic                   parameters with a value head, and no engine
    frozen policy            parameters without a learner

An engine holds a copy of the weights as last published, so an update never changes the policy that generates.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from ...agents import model_path
from ...agents.basics.machine import device_of
from ...agents.basics.manifest import Damaged
from ...agents.engines.engine import Engine, EngineOrder
from ...agents.engines.generation import Generation
from ...agents.engines.sampling import SamplingParams
from ...agents.engines.torch.memory import available
from ...agents.engines.torch.sleeping import Napping
from ...agents.llm import LLMPolicy
from ...agents.model.decoder import Decoder
from ...agents.model.llama import Llama
from ...agents.model.shape import UnsupportedArchitecture
from ...agents.model.weights import (
    count_parameters,
    is_ours,
    load_decoder,
    load_tokenizer,
    precisions,
    save_adapter,
    save_model,
)
from ...agents.policies import Call
from ...agents.text.tokenizing import Tokenizer
from ..config.group_settings import Adapter, GroupSpec, Learning, PolicySpec, sharded
from ..controller import checkpoint
from .contract import PolicyLearner
from .learning.parameters import Parameters
from .learning.update import Learner
from .replicas.replicated import replicated
from .sample_store import Sample


@dataclass(slots=True)
class Hosted:
    """One policy of a group."""

    name: str
    spec: PolicySpec
    parameters: Parameters
    learner: PolicyLearner | None
    speaker: LLMPolicy | None
    version: int = 0
    """Number of published updates."""
    dirty: bool = False
    """Flag: the policy was updated after its last publish."""

    @property
    def engine(self) -> Engine | None:
        return None if self.speaker is None else self.speaker.engine

    def learning(self) -> PolicyLearner:
        """Return the policy's learner. For a frozen policy this is an error."""
        if self.learner is None:
            raise ValueError(f"policy {self.name!r} is frozen: it has no `learning`, so it cannot be updated")
        return self.learner

    def speaking(self) -> LLMPolicy:
        if self.speaker is None:
            raise ValueError(f"policy {self.name!r} is a critic: it has no engine and generates no text")
        return self.speaker

    def free_cache(self) -> None:
        """Let an engine of this process free keys and values for an update: its weights change afterwards in any case."""
        if isinstance(self.engine, Napping):
            self.engine.free_cache()

    def publish(self) -> None:
        """Publish the present parameters to the engine."""
        if self.learner is not None:
            self.learner.rest()  # gradients need not be copied
        if self.engine is not None:
            model = self.parameters.model if self.learner is None else self.learner.published()
            self.engine.publish(model, self.version, self.parameters.adapter)
        self.dirty = False

    def close(self) -> None:
        """Stop an engine that runs in processes of its own."""
        if self.engine is not None:
            self.engine.close()


def host(spec: GroupSpec, learn: bool = True) -> tuple[dict[str, Hosted], Tokenizer]:
    """Load the base and build every policy of a group. Return the policies by name, and the tokenizer that they share.
    Without `learn` their learners are in other processes.
    """
    if not spec.policies:
        raise ValueError(f"group {spec.name!r} has no policies: map a role to one, or leave the group out")
    models = _Models(spec)
    with _named(f"groups.{spec.name}.model"):
        tokenizer = load_tokenizer(model_path(spec.model))
    hosted: dict[str, Hosted] = {}
    for name, policy_spec in spec.policies.items():
        hosted[name] = Hosted(name, policy_spec, models.parameters(name, policy_spec), None, None)
    engines: dict[int, Engine] = {}
    for policy in hosted.values():  # after all adapters exist, because engines copy the model
        if learn and policy.spec.learning is not None:
            inspection = Path(spec.folder) / "failed-updates" if spec.folder else None
            reference = models.reference(policy.name, policy.spec) if policy.spec.reference else None
            policy.learner = Learner(
                policy.name,
                policy.parameters,
                policy.spec.learning,
                reference=reference,
                inspection=inspection,
                seed=spec.seed,
            )
        if not policy.spec.critic:
            model = policy.parameters.model
            if id(model) not in engines:
                engines[id(model)] = _engine(spec, policy, tokenizer)
            policy.speaker = _speaker(policy, engines[id(model)], tokenizer)
    # checkpoints hold this generator's state, so an actor must begin with the same state as the controller's process
    torch.manual_seed(spec.seed)
    return hosted, tokenizer


def write_policy(
    policy: Parameters, model: Decoder, path: Path, tokenizer: Tokenizer, dtype: torch.dtype | None
) -> Path:
    """Write the folder of a policy from the tensors of `model`."""
    with checkpoint.writing(path) as folder:
        if policy.adapter is not None:
            save_adapter(model, policy.adapter, folder / "adapter")
        save_model(model, folder, tokenizer, policy.adapter, dtype)
        for role in policy.roles:
            save_adapter(model, role, folder / "roles" / role / "adapter")
            save_model(model, folder / "roles" / role, tokenizer, role, dtype)
    return path


def export_dtype(spec: GroupSpec, model: Decoder) -> torch.dtype | None:
    """Return the precision of a group's exports. None: that of the parameters, which is float32 as a rule.

    By itself this is bfloat16 if the model came in half precision and plays in bfloat16, because these are the very
    weights that played.
    """
    if spec.export != "auto":
        return torch.float32 if spec.export == "float32" else torch.bfloat16
    came_halved = getattr(model.hf_config, "dtype", None) in (torch.bfloat16, torch.float16)
    return torch.bfloat16 if came_halved and spec.precision == "bfloat16" else None


def learning_parameters(spec: GroupSpec, names: Sequence[str]) -> list[Parameters]:
    """Load on the CPU what some policies learn. After each comes its reference, if it has one."""
    models = _Models(replace(spec, device="cpu"), engines=False)
    one = spec.policies[names[0]]
    models.for_one = len(names) == 1 and not (one.init or one.adapter or one.reference)
    chosen: list[Parameters] = []
    for name in names:
        chosen.append(models.parameters(name, spec.policies[name]))
        if spec.policies[name].reference:
            chosen.append(models.reference(name, spec.policies[name]))
    for own in chosen:
        # ranks would call its layers a different number of times, and wait for each other
        if own.model.unpackable:
            raise ValueError(
                f"groups.{spec.name}.ranks: a model whose rows cannot be packed cannot be sharded "
                f"({own.model.unpackable}); set ranks: 1, and no policies.*.learning.offload"
            )
    return chosen


@lru_cache(maxsize=8)
def vocabulary(tokenizer: Tokenizer) -> str:
    """Return a hash of the tokenizer's vocabulary."""
    words = json.dumps(tokenizer.get_vocab(), sort_keys=True)
    return hashlib.sha256(words.encode("utf-8", "surrogatepass")).hexdigest()[:16]


class _Models:
    """The base model, and copies of it for the policies that need one."""

    def __init__(self, spec: GroupSpec, engines: bool = True) -> None:
        self.spec = spec
        self.device = _device(spec)
        # our own decoder has low-rank changes of all its matrices; other adapters are peft's, on transformers' layers
        policies = spec.policies.values()
        adapters = [a for p in policies for a in (p.adapter, *p.adapters.values()) if a is not None]
        self.auto = any(adapter.targets or adapter.tokens for adapter in adapters)
        _check_memory(spec, self.device, engines)
        speaks = engines and not all(policy.critic for policy in policies)
        half = _halved(spec)
        dtype = torch.bfloat16 if half else torch.float32
        base = _load(f"groups.{spec.name}.model", spec.model, self.auto, speaks, dtype)
        base.fixed = half
        self.base = base.requires_grad_(False).to(self.device)
        self.frozen: dict[str, Decoder] = {}
        self.for_one = False
        """Flag: one policy alone is made of the base, and no other code reads the base. So the policy needs no copy."""

    def parameters(self, name: str, policy: PolicySpec) -> Parameters:
        if policy.adapter is None:
            model = self._fresh(name, policy.init)
            if policy.learning is not None and policy.learning.parameters == "bfloat16":
                for parameter in model.parameters():  # buffers keep their precision
                    parameter.data = parameter.data.bfloat16()
            for role, adapter in policy.adapters.items():
                self._add(model, f"policies.{name}.adapters.{role}", role, adapter)
            return Parameters(model, critic=policy.critic, roles=policy.adapters)
        self._add(self.base, f"policies.{name}.adapter", name, policy.adapter)
        return Parameters(self.base, name, policy.critic)

    def _add(self, model: Decoder, key: str, name: str, a: Adapter) -> None:
        """Add an adapter, as a key of the config describes it."""
        with torch.random.fork_rng(devices=[]):
            # an adapter's initial weights depend only on the seed and its name
            torch.manual_seed(self.spec.seed ^ zlib.crc32(name.encode()))
            try:
                added = model.add_adapter(name, a.rank, a.alpha, a.targets, a.tokens)
            except ValueError as error:  # peft's, too
                raise ValueError(f"{key}: {error}") from error
        for parameter in added:
            parameter.requires_grad_(False)

    def reference(self, name: str, policy: PolicySpec) -> Parameters:
        """Return the policy as it was before learning. For an adapter this is the base, which is loaded in any case."""
        if policy.adapter is not None:
            return Parameters(self.base)
        if policy.init not in self.frozen:
            self.frozen[policy.init] = self._fresh(name, policy.init)
        return Parameters(self.frozen[policy.init])

    def _fresh(self, name: str, init: str) -> Decoder:
        if self.for_one:
            return self.base
        model = _load(f"policies.{name}.init", init, self.auto) if init else self.base.merged()
        return model.requires_grad_(False).to(self.device)


def _device(spec: GroupSpec) -> torch.device:
    """Return the device that a group computes on. An error names the key of the config."""
    try:
        return device_of(spec.device)
    except ValueError as error:
        raise ValueError(f"groups.{spec.name}.device: {error}") from error


def _check_memory(spec: GroupSpec, device: torch.device, engines: bool) -> None:
    """Refuse a group whose weights, gradients and optimizers cannot fit, before anything large is read. For ranks, only
    the loaded models count, because the ranks count the rest.
    """
    with _named(f"groups.{spec.name}.model"):
        path = model_path(spec.model)
    try:
        count, half = count_parameters(path), _halved(spec)
    except Exception:  # a damaged file is reported when it is loaded
        return
    full = [policy for policy in spec.policies.values() if policy.adapter is None]
    ranks = sharded(spec)
    replicas = engines * (1 if spec.rank_actors else spec.replicas)  # in this process
    shared = 0.0  # the engine's copy of a base that only adapters learn on
    if engines and not full and not half and spec.engine == "torch":
        shared = replicas / (2 if spec.precision == "bfloat16" else 1)
    # transformers' layers are read in float32, in the memory of the processor
    base = 0.5 if half and (device.type != "cpu" or is_ours(path)) else 1
    copies = (
        base
        + shared
        + sum(
            (1 if ranks else _bytes(p.learning) / 4) + replicas * (not p.critic) + p.reference for p in full
        )
    )
    needed, free = 4 * count * copies / 2**30, available(device) / 2**30
    if needed > free:
        raise MemoryError(
            f"groups.{spec.name}: {count / 1e9:.2g}B parameters need {needed:.3g} GiB on {device} ({copies:.3g} times their size: the "
            f"base; of each policy the weights, gradients and two optimizer states, and the engine's copy), and {free:.3g} GiB "
            "are free. Train adapters (policies.*.adapter), set policies.*.learning.moments=8bit, or give a smaller model."
        )


def _halved(spec: GroupSpec) -> bool:
    """Tell whether a base is held once, in bfloat16, by learners and engine alike.

    This changes no bit: its files hold bfloat16, it computes in nothing else, and only adapters learn on it. With the layers of
    transformers, new adapters begin with rounded weights, and what a layer adds up in the type of its weights is rounded.
    """
    policies = spec.policies.values()
    return (
        all(policy.adapter is not None for policy in policies)
        and all(policy.learning is None or policy.learning.precision == "bfloat16" for policy in policies)
        and (spec.engine, spec.precision, spec.replicas, spec.pool) == ("torch", "bfloat16", 1, "")
        and not sharded(spec)
        and _is_in_bfloat16(model_path(spec.model))
    )


def _is_in_bfloat16(path: Path) -> bool:
    try:
        return path.is_dir() and precisions(path) == {"BF16"}
    except Exception:  # what is wrong with the files is told where they are loaded
        return False


def _bytes(learning: Learning | None) -> int:
    """Return bytes of a number of a policy: itself, its gradient and its moments."""
    if learning is None:
        return 4
    return 2 * (2 if learning.parameters == "bfloat16" else 4) + (2 if learning.moments == "8bit" else 8)


def _load(
    key: str, model: str, auto: bool = False, speaks: bool = False, dtype: torch.dtype = torch.float32
) -> Decoder:
    """Load the model that a key of the config names. An error names the key."""
    with _named(key):
        return load_decoder(model_path(model), auto, speaks, dtype)


@contextmanager
def _named(key: str) -> Iterator[None]:
    """Put the key of the config that names a model before an error about the model."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{key}: {error}") from error
    except UnsupportedArchitecture as error:
        raise UnsupportedArchitecture(f"{key}: {error}") from error
    except Damaged as error:
        raise Damaged(f"{key}: {error}") from error


def _engine(spec: GroupSpec, first: Hosted, tokenizer: Tokenizer) -> Engine:
    """Build the engine for `first`, and for all adapters if `first` is an adapter."""
    adapters = {}
    if first.parameters.adapter is not None:
        adapters = {n: p.adapter.rank for n, p in spec.policies.items() if p.adapter and not p.critic}
    if first.parameters.roles and spec.engine != "torch":
        raise ValueError(
            f"policies.{first.name}.adapters: adapters by role need groups.{spec.name}.engine=torch"
        )
    order = EngineOrder(
        model=first.parameters.model, tokenizer=tokenizer, slots=spec.slots, context=spec.context,
        precision=spec.precision, deterministic=spec.deterministic, seed=spec.seed, adapters=adapters,
        options=spec.engine_options, sleeps=bool(spec.pool),
    )  # fmt: skip
    engine = replicated(spec, order)
    for ability, needed in (("adapters", bool(adapters)), ("determinism", spec.deterministic)):
        if needed and (why := engine.cannot.get(ability)):  # type: ignore[call-overload]
            engine.close()
            raise ValueError(f"groups.{spec.name}.engine: {spec.engine} {why}")
    return engine


def _speaker(policy: Hosted, engine: Engine, tokenizer: Tokenizer) -> LLMPolicy:
    """Build the policy that generates text. A tokenizer that cannot render a chat is refused."""
    s = policy.spec.sampling
    sampling = SamplingParams(
        temperature=s.temperature, top_p=s.top_p, top_k=s.top_k, max_tokens=s.max_tokens
    )
    adapter, roles = policy.parameters.adapter, policy.parameters.roles
    return LLMPolicy(engine, tokenizer, name=policy.name, adapter=adapter, roles=roles, sampling=sampling)


def sample_of(policy: str, call: Call, generation: Generation, temperature: float) -> Sample:
    """Make the sample of a reply, as it was sampled."""
    return Sample(
        episode=call.episode,
        node=call.node,
        policy=policy,
        version=generation.version,
        versions=np.array(generation.versions, np.int64) if generation.switches else None,
        prompt=np.array(generation.prompt_ids, np.int64),
        reply=np.array(generation.ids, np.int64),
        behaviour=np.array(generation.logprobs, np.float32),
        temperature=temperature,
        support=None if generation.support is None else tuple(generation.support),
        finish_reason=generation.finish_reason,
        role=call.role,
    )


def same_shape(hosted: Hosted, path: Path) -> Decoder:
    """Load a model whose weights a policy takes. A model of another shape is refused."""
    mine = hosted.parameters.model
    model = load_decoder(path, auto=not isinstance(mine, Llama))
    if model.shape != mine.shape:
        raise ValueError(f"{path} is a model of another shape than policy {hosted.name!r}")
    return model
