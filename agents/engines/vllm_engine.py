"""vLLM as an engine: the same interface as the torch engine, for GPUs and large models.

    engine = VLLMEngine("Qwen/Qwen3-8B", tensor_parallel_size=2)
    generation = await engine.agenerate(prompt_ids, SamplingParams(max_tokens=256))
    engine.publish(model, version=1)

Token ids go in; token ids and log-probs come out. The log-probs (`processed_logprobs`) are those of the distribution
that was sampled from, temperature and truncation included. vLLM shares prefixes and batches by itself. It needs
`pip install vllm`.

Low-rank adapters are named when the engine is made. Each is a directory as peft saves it, or the rank of an adapter
that will be published. A request names its adapter:

    engine = VLLMEngine("Qwen/Qwen3-8B", adapters={"planner": "adapters/planner", "solver": 16})
    engine.publish(model, version=1, adapter="solver")
    generation = await engine.agenerate(prompt_ids, params, adapter="planner")

vLLM does not tell which tokens top-k and top-p kept. Training needs them, so truncated sampling is refused here unless
`untracked_truncation=True` (for evaluation).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import threading
from collections import Counter
from collections.abc import Coroutine, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any, TypeVar

from ..hints import nearest
from ..model.decoder import Decoder
from ..model.weights import load_tokenizer, save_adapter, save_model
from ..threads import contained_async
from .engine import Ability
from .generation import Generation, Versioned
from .sampling import SamplingParams, Tries, uniform
from .stopping import closing_ids

T = TypeVar("T")


class VLLMEngine(Versioned):
    """An in-process vLLM `AsyncLLM`, in an event loop of its own, so that callers may be in any loop, or in
    several.
    """

    cannot: Mapping[Ability, str] = {
        "determinism": "cannot promise the same bits twice",
        "tracked truncation": "does not tell which tokens top_k and top_p left",
    }

    def __init__(
        self,
        model: str,
        tokenizer: Any = None,
        *,
        context: int | None = None,
        stop_ids: Iterable[int] | None = None,
        adapters: Mapping[str, str | Path | int] | None = None,
        untracked_truncation: bool = False,
        seed: int = 0,
        **options: Any,
    ) -> None:
        """Start vLLM. `options` are its engine arguments (tensor_parallel_size, gpu_memory_utilization,
        max_loras …).
        """
        adapters = adapters or {}
        if adapters:
            options = {**lora_options(adapters), **options}
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
        # an AsyncLLM belongs to the loop it is made in, else to the first that calls it; any other loop would wait for ever
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True).start()

        async def begin() -> AsyncLLM:
            return AsyncLLM.from_engine_args(arguments)

        self.llm: Any = self._there(begin()).result()
        # how many speak with which adapter (vLLM's number, 0 without), whether weights wait for all of them to end, and
        # whose turn it is: all of that loop
        self._speaking: Counter[int] = Counter()
        self._arriving, self._turn = False, asyncio.Condition()
        self.context: int = self.llm.model_config.max_model_len
        self.tokenizer = tokenizer if tokenizer is not None else load_tokenizer(model)
        own = closing_ids(self.llm.model_config.hf_config, self.tokenizer)
        self.stop_ids = frozenset(own if stop_ids is None else stop_ids)
        self.untracked_truncation = untracked_truncation
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._names = itertools.count()
        self._leaving: set[asyncio.Task[None]] = set()
        self._trie = Tries(self.tokenizer, self.stop_ids)
        self._numbers = itertools.count(1)
        self._adapters: dict[str, Any] = dict.fromkeys(adapters)
        self._folder = TemporaryDirectory(prefix="unitymas-adapters-")  # adapters that were published
        for name, source in adapters.items():
            if not isinstance(source, int):
                self._there(self._exchange(name, Path(source))).result()

    async def agenerate(
        self, prompt: list[int], params: SamplingParams, key: Any = None, adapter: str | None = None
    ) -> Generation:
        """Answer one prompt. Cancelling the task aborts the request."""
        if len(prompt) >= self.context:
            self.counts["finish_overflow"] += 1
            return Generation(prompt, [], [], "overflow", version=self.version_of(adapter))
        generation = await asyncio.wrap_future(self._there(self._answer(prompt, params, adapter)))
        self.counts.update(prompts=1, tokens_spoken=len(generation.ids))
        self.counts[f"finish_{generation.finish_reason}"] += 1
        return generation

    def _there(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run work in vLLM's loop."""
        return asyncio.run_coroutine_threadsafe(contained_async(work), self._loop)

    async def _answer(self, prompt: list[int], params: SamplingParams, adapter: str | None) -> Generation:
        """Answer one request under one version of the weights, from its first token to its last."""
        async with self._turn:
            await self._turn.wait_for(lambda: not self._arriving)
            lora, version = self._request(adapter), self.version_of(adapter)
            number = lora.lora_int_id if lora else 0
            self._speaking[number] += 1
        try:
            generation = await (self._choose if params.choices else self._say)(prompt, params, lora)
            return replace(generation, version=version)
        finally:
            self._speaking[number] -= 1
            if not self._speaking[number]:
                async with self._turn:
                    self._turn.notify_all()

    async def _say(self, prompt: list[int], params: SamplingParams, lora: Any) -> Generation:
        output = await self._ask(prompt, self._params(prompt, params), lora)
        completion = output.outputs[0]
        ids = list(completion.token_ids)
        closed = bool(ids) and ids[-1] in self.stop_ids
        text = (
            self.tokenizer.decode(ids[:-1], clean_up_tokenization_spaces=False) if closed else completion.text
        )
        return Generation(
            prompt_ids=list(prompt),
            ids=ids,
            logprobs=[step[token].logprob for step, token in zip(completion.logprobs, ids, strict=True)],
            finish_reason=completion.finish_reason
            if completion.finish_reason in ("stop", "length")
            else "cancelled",
            text=text,
            cached=output.num_cached_tokens or 0,
        )

    async def _choose(self, prompt: list[int], params: SamplingParams, lora: Any) -> Generation:
        """Walk the trie of the choices, as the torch engine does: request one token wherever there are several.

        vLLM's grammar is not used: it lets a model spell a choice in any tokens at all. For some tokenizers these are not
        the tokens that the model would use. The prefix cache holds what was asked before.
        """
        node, cached, reason = self._trie(params.choices or ()), 0, "stop"
        ids: list[int] = []
        logprobs: list[float] = []
        support: list[tuple[int, ...] | None] = []
        while node.children:
            if len(ids) == params.max_tokens or len(prompt) + len(ids) >= self.context:
                reason = "length"
                break
            allowed = tuple(node.children)
            token, logprob = allowed[0], 0.0
            if len(allowed) > 1:
                seed = int(uniform([params.seed], [len(ids)])[0] * 2**23)
                one = self._params([*prompt, *ids], params.but(seed=seed, max_tokens=1, stop=()))
                one.allowed_token_ids = list(allowed)
                output = await self._ask([*prompt, *ids], one, lora)
                cached = cached or output.num_cached_tokens or 0
                (token,) = output.outputs[0].token_ids
                logprob = output.outputs[0].logprobs[0][token].logprob
            ids.append(token)
            logprobs.append(logprob)
            support.append(allowed)
            node = node.children[token]
        text = node.choice or self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        return Generation(list(prompt), ids, logprobs, reason, text, support, cached=cached)

    async def _ask(self, prompt: list[int], params: Any, lora: Any) -> Any:
        """Run one request of vLLM to its end."""
        name = f"unitymas-{next(self._names)}"
        outputs = self.llm.generate({"prompt_token_ids": list(prompt)}, params, name, lora_request=lora)
        try:
            return [output async for output in outputs][-1]
        except BaseException:
            await self.llm.abort(name)
            raise

    def _params(self, prompt: list[int], params: SamplingParams) -> Any:
        from vllm import SamplingParams as Theirs
        from vllm.sampling_params import RequestOutputKind

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
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _request(self, adapter: str | None) -> Any:
        """Name of an adapter's present version for vLLM."""
        if adapter is None:
            return None
        self._check(adapter)
        if self._adapters[adapter] is None:
            raise RuntimeError(f"adapter {adapter!r} is not there yet: publish it first")
        return self._adapters[adapter]

    def _check(self, adapter: str) -> None:
        if adapter not in self._adapters:
            hint = nearest(adapter, self._adapters, "it has")
            raise KeyError(f"this engine has no adapter {adapter!r}; {hint} (VLLMEngine(…, adapters={{…}}))")

    def publish(self, model: Decoder, version: int, adapter: str | None = None) -> None:
        """Load new weights in all workers. They travel as files: a model directory, or an adapter as peft saves it.

        Before a whole model is loaded, running requests finish and new requests wait; the calling thread waits too. A new
        adapter makes no request wait: running requests continue with the old one, which is dropped after the last of them.
        """
        if adapter is not None:
            self._check(adapter)
            saved = save_adapter(model, adapter, mkdtemp(dir=self._folder.name))
            self._there(self._exchange(adapter, saved, version)).result()
            return
        with TemporaryDirectory(prefix="unitymas-weights-") as folder:
            save_model(model, folder)
            self._there(self._take_over(folder, version)).result()

    async def _take_over(self, folder: str, version: int) -> None:
        async with self._turn:
            self._arriving = True
            try:
                await self._turn.wait_for(lambda: not self._speaking.total())
                await self.llm.collective_rpc("load_from", args=(folder,))
                if not await self.llm.reset_prefix_cache():
                    raise RuntimeError("vLLM kept prefixes of the old weights: its cache could not be reset")
                self._took_over(version)
            finally:
                self._arriving = False
                self._turn.notify_all()

    async def _exchange(self, adapter: str, folder: Path, version: int | None = None) -> None:
        """Give all new requests the adapter in `folder`."""
        from vllm.lora.request import LoRARequest

        number = next(self._numbers)  # vLLM knows adapters and their prefixes by number, name and path
        new = LoRARequest(f"{adapter}-{number}", number, str(folder))
        await self.llm.add_lora(new)
        old, self._adapters[adapter] = self._adapters.get(adapter), new
        if version is not None:
            self._took_over(version, adapter)
        if old is not None:
            self._leaving.add(leaving := asyncio.create_task(self._leave(old)))
            leaving.add_done_callback(self._leaving.discard)

    async def _leave(self, old: Any) -> None:
        """Drop an adapter when no request uses it any more."""
        async with self._turn:
            await self._turn.wait_for(lambda: not self._speaking[old.lora_int_id])
        await self.llm.remove_lora(old.lora_int_id)
        if Path(old.lora_path).is_relative_to(self._folder.name):
            shutil.rmtree(old.lora_path)
        del self._speaking[old.lora_int_id]

    def fix_shapes(self) -> None:
        """Refuse: batches of vLLM have whatever shape comes."""
        raise ValueError(f"vLLM {self.cannot['determinism']}")

    def close(self) -> None:
        """Stop vLLM's processes, and with them the loop."""
        if self.llm is None:
            return

        async def end() -> None:
            self.llm.shutdown()
            rest = asyncio.all_tasks() - {asyncio.current_task()}
            for task in rest:
                task.cancel()
            await asyncio.gather(*rest, return_exceptions=True)

        self._there(end()).result()
        self._folder.cleanup()
        self.llm = None  # now, and not when Python has taken half of vLLM down
        self._loop.call_soon_threadsafe(self._loop.stop)


class WeightLoader:
    """An extension of vLLM's workers: they load the weights of a directory while they run."""

    model_runner: Any

    def load_from(self, folder: str) -> None:
        from vllm.platforms import current_platform

        self.model_runner.reload_weights(weights_path=folder)
        if (
            current_platform.is_cpu()
        ):  # a head tied to the embeddings keeps a packed copy of the old weights there
            head = self.model_runner.get_model().lm_head
            head = getattr(head, "base_layer", head)
            head.quant_method.process_weights_after_loading(head)


def lora_options(adapters: Mapping[str, str | Path | int]) -> dict[str, Any]:
    """Return what vLLM must know of the adapters before it starts."""
    rank = max(adapter_rank(name, source) for name, source in adapters.items())
    return {
        "enable_lora": True,
        "max_loras": len(adapters),
        "max_cpu_loras": 2 * len(adapters),  # an old version may still be in use
        "max_lora_rank": max(8, 1 << (rank - 1).bit_length()),  # vLLM takes powers of two from 8
    }


def adapter_rank(name: str, source: str | Path | int) -> int:
    """Return the rank of an adapter saved by peft. An error says what is missing, before any model is loaded."""
    if isinstance(source, int):
        return source
    folder = Path(source)
    file = folder / "adapter_config.json"
    if not file.is_file() or not (folder / "adapter_model.safetensors").is_file():
        raise FileNotFoundError(
            f"adapter {name!r}: {folder} is no adapter directory; vLLM needs adapter_config.json and "
            "adapter_model.safetensors there, as peft's save_pretrained writes them. A run's are in policies/NAME/adapter"
        )
    return int(json.loads(file.read_text())["r"])
