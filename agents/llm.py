"""A language model as a policy: messages to tokens, an engine, and text back.

policy = load_policy("hf:models/SmolLM2-135M-Instruct")     # or "tiny", or "run:runs/mask-1"
policy = LLMPolicy(engine, tokenizer, temperature=0.7)
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .answers import Answer, ReplyMeta
from .basics.hints import say_once
from .basics.json_types import JsonObject
from .basics.manifest import Damaged, prompts_of_run, read_signed
from .engines.engine import Engine
from .engines.sampling import SamplingParams
from .engines.token_text import opens_thinking, pieces
from .names import at_home, is_run, model_path, prompts_of, read_name
from .policies import Call
from .roles import entry_of
from .text.chat import Chat, Prompt, require_template
from .text.role_prompt import Told, shortened
from .text.tokenizing import Tokenizer

if TYPE_CHECKING:
    import torch

    from .engines.generation import Generation


FIXED_CONTEXT = 4096
"""Context of a deterministic engine if none is given: its slots take memory for the whole context at once."""


class LLMPolicy:
    """Policy that answers calls with an engine. Sampling settings belong to the policy. Stop strings, choices, seed and
    limits belong to the call.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        *,
        name: str = "llm",
        system: Mapping[str, str] | None = None,
        adapter: str | None = None,
        roles: Collection[str] = (),
        sampling: SamplingParams | None = None,
        source: Path | None = None,
    ) -> None:
        self.engine, self.name, self.adapter, self.source = engine, name, adapter, source
        self.roles = frozenset(roles)
        """Roles that have an adapter with their own name."""
        self.chat = Chat(tokenizer, system, engine.stop_ids)
        self.sampling = sampling or SamplingParams()
        self._tokens = False

    @property
    def prompts(self) -> object:
        """Return the prompt set that the model was made with."""
        return prompts_of("tiny" if self.name == "tiny" else str(self.source or ""))

    def keep_tokens(self) -> None:
        """Store each reply's tokens and log-probs in `meta["tokens"]` from now on, for the viewer."""
        self._tokens = True

    def fix_shapes(self) -> None:
        """Give the same bits from now on, independently of other requests (the engine's `deterministic`)."""
        if why := self.engine.cannot.get("determinism"):
            raise ValueError(f"{self.name}: {type(self.engine).__name__} {why}")
        self.engine.fix_shapes()

    async def act(self, call: Call) -> Answer:
        """Answer one call. If the prompt does not fit, the reply is empty and the finish reason is `overflow`."""
        answer, generation = await self.say(call)
        keep = call.keep_tokens or ("text" if self._tokens else "")
        if keep == "ids":
            tokens: dict[str, Sequence[object]] = {
                "prompt_ids": list(generation.prompt_ids), "ids": list(generation.ids), "logprobs": list(generation.logprobs),
            }  # fmt: skip
            answer.meta = replace(answer.meta, tokens=tokens)
        elif keep:
            text = pieces(self.chat.tokenizer, generation.ids)
            logprobs = [round(p, 4) for p in generation.logprobs]
            answer.meta = replace(answer.meta, tokens={"text": text, "logprob": logprobs})
        return answer

    async def say(self, call: Call, sampling: SamplingParams | None = None) -> tuple[Answer, Generation]:
        """Return the answer, and the tokens and log-probs behind it."""
        params = params_for(call, sampling or self.sampling)
        prompt, gone = self.fitted(call, params.max_tokens)
        generation = await self.engine.agenerate(
            prompt.ids,
            params,
            key=(call.episode, call.node),
            adapter=call.role if call.role in self.roles else self.adapter,
        )
        self.chat.remember(call, prompt, generation.ids, generation.text)
        if gone:
            say_once(
                f"{self.name}: prompts of the role {call.role!r} are longer than the model's context of {self.engine.context} tokens "
                "leaves room for, and are cut (prompt_cut in the node says where)"
            )
        if generation.finish_reason == "overflow":
            say_once(
                f"{self.name}: a prompt of the role {call.role!r} does not fit in the model's context, and no more of it may "
                "be cut: the reply is empty (finish_reason overflow)"
            )
        endless = "</think>" not in generation.text and opens_thinking(self.chat.tokenizer, prompt.ids)
        meta = ReplyMeta(
            policy=self.name, version=generation.version, switches=generation.switches or None, finish_reason=generation.finish_reason,
            tokens_in=len(generation.prompt_ids), tokens_out=len(generation.ids), prompt_cut=gone or None,
            thinking="open" if endless else None,  # the whole reply is thinking, so no format may read it
        )  # fmt: skip
        return Answer(generation.text, meta), generation

    def fitted(self, call: Call, max_tokens: int) -> tuple[Prompt, dict[str, int]]:
        """Return the prompt of a call, and the number of characters that were cut from each field.

        A prompt that leaves no room for the reply is cut where its role allows it. The reply needs at most half of the
        context.
        """
        prompt, gone = self.chat.prompt(call), dict[str, int]()
        context = getattr(self.engine, "context", None)
        if context is None:
            return prompt, gone
        room, drop = max(context - max_tokens, context // 2), 0
        while len(prompt.ids) > room and any(isinstance(m["content"], Told) for m in call.messages):
            characters = sum(len(m["content"]) for m in call.messages)
            drop += 8 + (len(prompt.ids) - room) * max(1, characters // len(prompt.ids))
            messages, now = shortened(call.messages, drop)
            if now == gone:  # no field is left that may be cut
                break
            prompt, gone = self.chat.prompt(replace(call, messages=messages)), now
        return prompt, gone

    def identity(self) -> dict[str, object]:
        """Describe the policy for the record of an evaluation: weights and template by their hashes, and the sampling
        settings.
        """
        template = str(self.chat.tokenizer.chat_template)
        return {
            "model": self.name,
            "weights": None if self.source is None else files_hash(self.source),
            "template_sha": hashlib.sha256(template.encode()).hexdigest()[:16],
            "adapter": self.adapter,
            "sampling": asdict(self.sampling),
            **({"dtype": "bfloat16"} if "bfloat16" in str(getattr(self.engine, "dtype", "")) else {}),
            **({"deterministic": True} if getattr(self.engine, "deterministic", False) else {}),
            **self._shorter_context(),
        }

    def _shorter_context(self) -> dict[str, int]:
        """Return the engine's context if it is shorter than the model's own, because prompts are then cut earlier."""
        engine = self.engine
        own = getattr(getattr(getattr(engine, "model", None), "shape", None), "context", 0)
        context = getattr(engine, "context", None) or own
        return {"context": context} if context < own else {}

    def __repr__(self) -> str:
        return f"LLMPolicy({self.name!r})"


def params_for(call: Call, sampling: SamplingParams) -> SamplingParams:
    """Combine the policy's sampling settings with the limits of the call."""
    return replace(
        sampling,
        max_tokens=min(sampling.max_tokens, call.max_tokens or sampling.max_tokens),
        stop=tuple(call.stop) or sampling.stop,
        seed=call.seed,
        choices=call.choices,
    )


def load_policy(name: str, **how: Any) -> LLMPolicy | RunPolicy:
    """Load a policy by the name of a model (`names.py`). `vllm:NAME` loads it in vLLM, and `run:DIR` loads a run's
    whole team.
    """
    known = read_name(name)
    if known is not None and known.kind == "vllm":
        return load_vllm_policy(known.rest, name=name, **how)
    if known is not None and known.kind == "run" and is_run(run := at_home(known.rest)):
        return RunPolicy(run, **how)
    return load_model_policy(model_path(name), name=name, **how)


def load_model_policy(
    path: Path,
    *,
    name: str = "",
    slots: int = 32,
    concurrency: int | None = None,
    context: int | None = None,
    dtype: str = "float32",
    device: str = "",
    threads: int | None = None,
    **sampling: Any,
) -> LLMPolicy:
    """Load a model directory with an engine of its own, on a GPU if there is one. `sampling` holds fields of
    `SamplingParams`. The default of `context` is the model's own limit.
    """
    import torch

    from .basics.machine import device_of, use_threads
    from .engines.built_in import engine_kind
    from .model.decoder import OwnFiles
    from .model.weights import learned_prefix, load_decoder, load_tokenizer

    place = device_of(device)
    prefix = learned_prefix(path)
    kind: torch.dtype = getattr(torch, dtype)
    _check_memory(path, kind, place)
    model, tokenizer = load_decoder(path, prefix is not None, speaks=True, dtype=kind), load_tokenizer(path)
    model.fixed = True  # nothing learns here, so the engine needs no copy of its own
    adapter = None
    if prefix is not None:
        assert isinstance(model, OwnFiles)
        adapter = model.load_prefix(prefix)
    use_threads(threads, sum(p.numel() for p in model.parameters()))
    engine = engine_kind(model)(
        model.to(place), tokenizer, slots=concurrency or slots, context=context, dtype=kind
    )
    engine.fixed_context = 0 if context else FIXED_CONTEXT
    return LLMPolicy(
        engine,
        tokenizer,
        name=name or str(path),
        adapter=adapter,
        sampling=SamplingParams(**sampling),
        source=path,
    )


def _check_memory(path: Path, dtype: torch.dtype, device: torch.device) -> None:
    """Raise `MemoryError`, before anything large is read, if a model's weights cannot fit."""
    from .engines.torch.memory import available
    from .model.weights import count_parameters

    try:
        needed = count_parameters(path) * dtype.itemsize
    except Exception:  # a damaged file is reported when it is loaded
        return
    if needed > (free := available(device)):
        half = " --dtype bfloat16 needs half of that;" if dtype.itemsize > 2 else ""
        raise MemoryError(
            f"{path}: the weights need {needed / 2**30:.3g} GiB in {str(dtype).removeprefix('torch.')} on {device}, and "
            f"{free / 2**30:.3g} GiB are free;{half} else take a smaller model, or serve this one elsewhere (openai:MODEL@URL)"
        )


def load_vllm_policy(
    model: str, *, name: str = "", dtype: str | None = None, context: int | None = None, **sampling: Any
) -> LLMPolicy:
    """Start a model in vLLM, in this process. Its samples are for evaluation."""
    from .engines.vllm.vllm_engine import VLLMEngine
    from .model.weights import load_tokenizer

    path = model_path(model)
    options: JsonObject = {"dtype": dtype} if dtype else {}
    tokenizer = load_tokenizer(path)
    require_template(tokenizer)
    engine = VLLMEngine(str(path), tokenizer, context=context, untracked_truncation=True, **options)
    return LLMPolicy(
        engine,
        engine.tokenizer,
        name=name or f"vllm:{model}",
        sampling=SamplingParams(**sampling),
        source=path if path.exists() else None,
    )


def files_hash(path: Path) -> str:
    """Compute a SHA-256 over the names and bytes of a model's files."""
    files = [path] if path.is_file() else sorted(f for f in path.iterdir() if f.is_file())
    return _files_hash(tuple((str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files))


@lru_cache(maxsize=64)
def _files_hash(files: tuple[tuple[str, int, int], ...]) -> str:
    digest = hashlib.sha256()
    for name, size, _ in files:
        digest.update(f"{Path(name).name}:{size}\n".encode())
        with open(name, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


class RunPolicy:
    """A training run's team: each role is played by the policy that the run's map gave it.

    The run directory holds `config.yaml` (its `map`) and `policies/NAME`, a model directory for each policy.
    """

    def __init__(self, run: Path, **how: Any) -> None:
        import yaml

        self.run, config = run, run / "config.yaml"
        if not config.is_file():
            why = "it holds no config.yaml" if run.is_dir() else "there is no such folder"
            raise FileNotFoundError(f"{run} is no run directory: {why}")
        try:
            tree = yaml.safe_load(read_signed(config))
        except (yaml.YAMLError, RecursionError) as error:
            raise Damaged(f"{config} is damaged: {error}") from error
        if not isinstance(tree, dict) or not isinstance(tree.get("map"), dict):
            raise Damaged(f"{config} is no run's config: it has no map of who plays whom")
        self.map: dict[str, str] = tree["map"]
        exported = {name: run / "policies" / name for name in sorted(set(self.map.values()))}
        context = how.pop("context", None)
        contexts = {name: context or _context_of(tree, name) for name in exported}
        if any(path.is_dir() for path in exported.values()):  # else the run is not finished
            exported |= {name: path for name in exported if (path := _unchanged(tree, name))}
        for name, path in list(exported.items()):  # roles that have an adapter of their own
            for role in sorted(path.glob("roles/*")):
                exported[f"{name}/{role.name}"], contexts[f"{name}/{role.name}"] = role, contexts[name]
        self.policies = {
            name: load_model_policy(path, name=f"run:{run.name}/{name}", context=contexts[name], **how)
            for name, path in exported.items()
            if path.exists()
        }
        if not self.policies:
            raise FileNotFoundError(f"the run {run} has no policies/ yet: it writes them when it ends")

    @property
    def prompts(self) -> object:
        """Return the prompt set that the run was trained with."""
        return prompts_of_run(self.run)

    def keep_tokens(self) -> None:
        """Put tokens and log-probs into the replies of all policies."""
        for policy in self.policies.values():
            policy.keep_tokens()

    def fix_shapes(self) -> None:
        """Give the same bits from now on, for all policies."""
        for policy in self.policies.values():
            policy.fix_shapes()

    def act(self, call: Call) -> Awaitable[Answer]:
        """Answer a call with the policy of its agent."""
        name = entry_of(self.map, call.agent, call.role) or ""
        if name not in self.policies:
            raise ValueError(
                f"{call.agent!r} was played by {name!r}, which is no policy of the run {self.run}"
            )
        return self.policies.get(f"{name}/{call.role}", self.policies[name]).act(call)

    def identity(self) -> dict[str, object]:
        """Describe the team, for the record of an evaluation: the run's map, and its policies by weights."""
        return {"map": self.map, "policies": {name: p.identity() for name, p in self.policies.items()}}

    def __repr__(self) -> str:
        return f"RunPolicy({str(self.run)!r})"


def _unchanged(config: JsonObject, player: str) -> Path | None:
    """Return the path of a model that played in a run and did not learn: a frozen policy, or a fixed player by its name."""
    policies = config.get("policies") or {}
    if player in policies:
        policy = policies[player]
        if not policy.get("frozen"):
            return None
        return model_path(policy.get("init") or config["groups"][policy.get("group", "main")]["model"])
    known = read_name(player)
    return (
        model_path(player) if known is not None and known.kind in ("tiny", "package", "hub", "path") else None
    )


def _context_of(config: JsonObject, policy: str) -> int | None:
    """Return the context with which a run's policy learned; None if it was the model's own."""
    try:
        group = config["policies"][policy].get("group", "main")
        context = config["groups"][group]["context"]
    except (KeyError, TypeError, AttributeError):  # a config that was written by hand
        return None
    return context if isinstance(context, int) else None
