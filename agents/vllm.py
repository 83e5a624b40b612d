"""vLLM as an engine: the same interface as the torch engine, for GPUs and large models.

    engine = VLLMEngine("Qwen/Qwen3-8B", tensor_parallel_size=2)
    generation = await engine.agenerate(prompt_ids, SamplingParams(max_tokens=256))

Token ids go in; token ids and log-probs come out (`processed_logprobs`: those of the distribution that was sampled
from, temperature and truncation included). vLLM shares prefixes and batches by itself. Needs `pip install vllm`.

Low-rank adapters are directories as peft saves them, named when the engine is made; a request says whose it is:

    engine = VLLMEngine("Qwen/Qwen3-8B", adapters={"planner": "adapters/planner"})
    generation = await engine.agenerate(prompt_ids, params, adapter="planner")

Which tokens top-k and top-p left is not told by vLLM. Training needs it, so truncated sampling is refused here unless
`untracked_truncation=True` (for evaluation).
"""

from __future__ import annotations

import difflib
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from .engine import Generation
from .llama import Llama
from .sampling import SamplingParams, Trie
from .weights import load_tokenizer, save_model


class VLLMEngine:
    """An in-process vLLM `AsyncLLM`."""

    def __init__(
        self,
        model: str,
        tokenizer: Any = None,
        *,
        context: int | None = None,
        stop_ids: Iterable[int] | None = None,
        adapters: Mapping[str, str | Path] | None = None,
        untracked_truncation: bool = False,
        seed: int = 0,
        **options: Any,
    ) -> None:
        """`options` are vLLM's engine arguments (tensor_parallel_size, gpu_memory_utilization, max_loras …)."""
        ranks = [adapter_rank(name, folder) for name, folder in (adapters or {}).items()]
        if ranks:
            largest = max(8, 1 << (max(ranks) - 1).bit_length())  # vLLM takes powers of two from 8
            options = {"enable_lora": True, "max_loras": len(ranks), "max_lora_rank": largest, **options}
        try:
            from vllm import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM
        except ImportError as error:
            raise ImportError("the vLLM engine needs vLLM: pip install 'unitymas[vllm]'") from error
        options = {
            "logprobs_mode": "processed_logprobs",
            "enable_prefix_caching": True,
            "worker_extension_cls": f"{__name__}.WeightLoader",
            **options,
        }
        arguments = AsyncEngineArgs(model=model, seed=seed, max_model_len=context, **options)
        self.llm = AsyncLLM.from_engine_args(arguments)
        self.context: int = self.llm.model_config.max_model_len
        self.tokenizer = tokenizer if tokenizer is not None else load_tokenizer(model)
        self.stop_ids = frozenset(stop_ids if stop_ids is not None else _closing(self.tokenizer))
        self.untracked_truncation = untracked_truncation
        self.version = 0
        self.counts: Counter[str] = Counter()
        self._names = itertools.count()
        self._tries: dict[tuple[str, ...], Trie] = {}
        self._adapters = {name: str(folder) for name, folder in (adapters or {}).items()}

    async def agenerate(
        self, prompt: list[int], params: SamplingParams, key: Any = None, adapter: str | None = None
    ) -> Generation:
        """Answer one prompt. Cancelling the task aborts the request."""
        if len(prompt) >= self.context:
            self.counts["finish_overflow"] += 1
            return Generation(prompt, [], [], "overflow", version=self.version)
        version, name = self.version, f"unitymas-{next(self._names)}"
        wanted = {"prompt_token_ids": list(prompt)}
        lora = self._lora(adapter)
        outputs = self.llm.generate(wanted, self._params(prompt, params), name, lora_request=lora)
        try:
            final = [output async for output in outputs][-1]
        except BaseException:
            await self.llm.abort(name)
            raise
        return self._generation(prompt, final, params, version)

    def _params(self, prompt: list[int], params: SamplingParams) -> Any:
        from vllm import SamplingParams as Theirs
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        truncated = params.top_k or params.top_p < 1
        if truncated and params.temperature and not self.untracked_truncation:
            raise ValueError(
                "vLLM does not tell which tokens top_k and top_p left, so such samples cannot be trained on; "
                "sample with top_p=1 and top_k=0, or pass untracked_truncation=True for evaluation"
            )
        return Theirs(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k or -1,
            max_tokens=min(params.max_tokens, self.context - len(prompt)),
            stop=list(params.stop) or None,
            include_stop_str_in_output=True,
            stop_token_ids=sorted(self.stop_ids),
            seed=params.seed,
            logprobs=0,  # of the sampled token alone
            skip_special_tokens=False,
            spaces_between_special_tokens=False,
            structured_outputs=StructuredOutputsParams(choice=list(params.choices))
            if params.choices
            else None,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _generation(self, prompt: list[int], output: Any, params: SamplingParams, version: int) -> Generation:
        said = output.outputs[0]
        ids = list(said.token_ids)
        reason = said.finish_reason if said.finish_reason in ("stop", "length") else "cancelled"
        self.counts.update(prompts=1, tokens_spoken=len(ids), **{f"finish_{reason}": 1})
        closed = bool(ids) and ids[-1] in self.stop_ids
        text = self.tokenizer.decode(ids[:-1], clean_up_tokenization_spaces=False) if closed else said.text
        return Generation(
            prompt_ids=list(prompt),
            ids=ids,
            logprobs=[step[token].logprob for step, token in zip(said.logprobs, ids, strict=True)],
            finish_reason=reason,
            text=text,
            support=self._support(ids, params.choices) if params.choices else None,
            version=version,
            cached=output.num_cached_tokens or 0,
        )

    def _support(self, ids: list[int], choices: tuple[str, ...]) -> list[tuple[int, ...] | None]:
        """The tokens allowed at each step, walked along the same trie that the torch engine samples from.

        vLLM's grammar may cut a choice into other tokens than the tokenizer does; such a sample has no known support
        and must not be trained on.
        """
        if choices not in self._tries:
            self._tries[choices] = Trie.of(
                choices, lambda c: self.tokenizer.encode(c, add_special_tokens=False), min(self.stop_ids)
            )
        node = self._tries[choices]
        support: list[tuple[int, ...] | None] = []
        for token in ids:
            if not node.children and token in self.stop_ids:
                support.append((token,))
                continue
            if token not in node.children:
                raise ValueError(
                    f"vLLM cut a choice of {choices} into tokens unlike the tokenizer's; use other choices"
                )
            support.append(tuple(node.children))
            node = node.children[token]
        return support

    def _lora(self, adapter: str | None) -> Any:
        if adapter is None:
            return None
        if adapter not in self._adapters:
            near = difflib.get_close_matches(adapter, self._adapters, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(self._adapters) or 'none'}"
            raise KeyError(f"this engine has no adapter {adapter!r}; {hint} (VLLMEngine(…, adapters={{…}}))")
        from vllm.lora.request import LoRARequest

        number = 1 + list(self._adapters).index(adapter)  # vLLM knows adapters by number, from 1
        return LoRARequest(adapter, number, self._adapters[adapter])

    async def publish(self, model: Llama, version: int) -> None:
        """Load new weights in all workers, and forget all prefixes. They travel by a file, as a model directory."""
        with TemporaryDirectory(prefix="unitymas-weights-") as folder:
            save_model(model, folder)
            await self.llm.collective_rpc("load_from", args=(folder,))
        await self.llm.reset_prefix_cache()
        self.version = version

    def close(self) -> None:
        """Stop vLLM's processes."""
        self.llm.shutdown()


class WeightLoader:
    """What vLLM's workers learn from us: to take over the weights of a directory while they run."""

    model_runner: Any

    def load_from(self, folder: str) -> None:
        from safetensors.torch import load_file

        state = load_file(f"{folder}/model.safetensors")
        self.model_runner.model.load_weights(iter(state.items()))


def adapter_rank(name: str, folder: str | Path) -> int:
    """The rank of an adapter saved by peft; an error that says what is missing, before any model is loaded."""
    folder = Path(folder)
    found = folder / "adapter_config.json"
    if not found.is_file() or not (folder / "adapter_model.safetensors").is_file():
        raise FileNotFoundError(
            f"adapter {name!r}: {folder} is no adapter directory; vLLM needs adapter_config.json and "
            "adapter_model.safetensors there, as peft's save_pretrained writes them. An adapter trained by a "
            "run is merged into the model that the run exports (policies/NAME): serve that one instead"
        )
    return int(json.loads(found.read_text())["r"])


def _closing(tokenizer: Any) -> set[int]:
    ids = getattr(tokenizer, "eos_token_id", None)
    return {ids} if isinstance(ids, int) else set(ids or ())
