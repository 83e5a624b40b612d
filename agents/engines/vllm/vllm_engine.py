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

Which tokens top-k and top-p kept, training must know. vLLM reports it with the option `return_sampling_mask=True` (its newer
model runner, on GPUs). Then every request needs a top-k, and a greedy reply is the draw with `top_k=1`: its log-probs are 0.
Without that option truncated sampling is refused here unless `untracked_truncation=True` (for evaluation).
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import threading
from collections import Counter
from collections.abc import Awaitable, Coroutine, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import TYPE_CHECKING, TypeVar

from ...basics.failures import GroupLost, Outage
from ...basics.hints import nearest, say_once
from ...basics.threads import contained_async
from ...model.decoder import Decoder
from ...model.llama import Llama
from ...model.weights import load_tokenizer, save_adapter, save_model
from ...text.tokenizing import Tokenizer
from ..engine import Ability
from ..generation import Generation, Versioned
from ..sampling import SamplingParams, Tries, uniform
from ..stopping import Stopper, closing_ids
from .vllm_sampling import reported_tokens, to_vllm
from .vllm_setup import Transfer, check_version, engine_arguments, lora_options, own_sockets, started

if TYPE_CHECKING:
    from vllm import RequestOutput
    from vllm import SamplingParams as VLLMSampling
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

    from .weight_transfer import Sender

T = TypeVar("T")


class VLLMEngine(Versioned):
    """An in-process vLLM `AsyncLLM`, in an event loop of its own: callers may be in any loop, or in several."""

    cannot: Mapping[Ability, str] = {
        "determinism": "cannot promise the same bits twice",
        "tracked truncation": "does not tell which tokens top_k and top_p left, without return_sampling_mask",
        "new weights within a reply": "lets begun replies end before it takes new weights",
    }

    def __init__(
        self,
        model: str,
        tokenizer: Tokenizer | None = None,
        *,
        context: int | None = None,
        stop_ids: Iterable[int] | None = None,
        adapters: Mapping[str, str | Path | int] | None = None,
        untracked_truncation: bool = False,
        transfer: Transfer = "shared",
        seed: int = 0,
        **options: object,
    ) -> None:
        """Start vLLM. `options` are its engine arguments (tensor_parallel_size, gpu_memory_utilization,
        max_loras …). `transfer`: the way of published weights (weight_transfer.py), or `files` for a model directory.
        """
        adapters = adapters or {}
        if adapters:
            options = {**lora_options(adapters), **options}
        check_version()
        self._sockets = own_sockets(self)
        arguments = engine_arguments(
            transfer, {"model": model, "seed": seed, "max_model_len": context, **options}
        )
        # an AsyncLLM belongs to the loop in which it is made or first called; any other loop would wait for ever
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True).start()

        async def begin() -> AsyncLLM:
            return started(arguments, transfer)

        self.llm: AsyncLLM = self._there(begin()).result()
        # number of running requests by adapter (vLLM's number, 0 without), whether weights wait for their end, and
        # whose turn it is: all belong to that loop
        self._speaking: Counter[int] = Counter()
        self._arriving, self._turn = False, asyncio.Condition()
        self.context: int = self.llm.model_config.max_model_len
        self.tokenizer = tokenizer if tokenizer is not None else load_tokenizer(model)
        settings = self.llm.model_config
        own = closing_ids(settings.hf_config, settings.try_get_generation_config(), self.tokenizer)
        self.stop_ids = frozenset(own if stop_ids is None else stop_ids)
        self.untracked_truncation, self.transfer = untracked_truncation, transfer
        self.masks = bool(options.get("return_sampling_mask"))
        if self.masks:
            self.cannot = {key: why for key, why in self.cannot.items() if key != "tracked truncation"}
        self._sender: Sender | None = None  # the trainer's side of the transfer
        self._mixed = ""  # why some weights may be old ones and some new; empty: all are of one version
        self.sleeps, self._asleep = bool(options.get("enable_sleep_mode")), False
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._names = itertools.count()
        self._leaving: set[asyncio.Task[None]] = set()
        self._trie = Tries(self.tokenizer, self.stop_ids)
        self._numbers = itertools.count(1)
        self._adapters: dict[str, LoRARequest | None] = dict.fromkeys(adapters)
        self._folder = TemporaryDirectory(prefix="unitymas-adapters-")  # adapters that were published
        for name, source in adapters.items():
            if not isinstance(source, int):
                self._wait(self._exchange(name, Path(source)))

    async def agenerate(
        self,
        prompt: list[int],
        params: SamplingParams,
        key: tuple[str, str] | None = None,
        adapter: str | None = None,
    ) -> Generation:
        """Answer one prompt. Cancelling the task aborts the request."""
        if len(prompt) >= self.context:
            self.counts["finish_overflow"] += 1
            return Generation(prompt, [], [], "overflow", version=self.version_of(adapter))
        generation = await asyncio.wrap_future(self._there(self._answer(prompt, params, adapter)))
        self.counts.update(prompts=1, tokens_spoken=len(generation.ids))
        self.counts[f"finish_{generation.finish_reason}"] += 1
        return generation

    def _there(self, work: Coroutine[object, None, T]) -> Future[T]:
        """Run work in vLLM's loop."""
        return asyncio.run_coroutine_threadsafe(contained_async(_alive(work)), self._loop)

    async def _answer(self, prompt: list[int], params: SamplingParams, adapter: str | None) -> Generation:
        """Answer one request with one version of the weights for all its tokens."""
        async with self._turn:
            await self._turn.wait_for(lambda: not self._arriving)
            if self._mixed:
                raise Outage(self._mixed)
            lora, version = self._request(adapter), self.version_of(adapter)
            number = lora.lora_int_id if lora else 0
            self._speaking[number] += 1
        try:
            generation = await (self._choose if params.choices else self._say)(prompt, params, lora)
            return replace(generation, version=version, versions=[version] * len(generation.ids))
        finally:
            self._speaking[number] -= 1
            if not self._speaking[number]:
                async with self._turn:
                    self._turn.notify_all()

    async def _say(self, prompt: list[int], params: SamplingParams, lora: LoRARequest | None) -> Generation:
        """Let vLLM answer. If a stop string inside of thinking ends its answer, request the rest."""
        whole = await self._part(prompt, params, lora)
        if not params.stop:
            return whole
        stopper = Stopper(params.stop, self.tokenizer, prompt=prompt)
        while (
            whole.finish_reason == "stop" and whole.ids[-1] not in self.stop_ids and stopper.open(whole.text)
        ):
            spoken = len(whole.ids)
            if spoken == params.max_tokens or len(prompt) + spoken >= self.context:
                return replace(whole, finish_reason="length")
            seed = int(uniform([params.seed], [spoken])[0] * 2**23)  # else the same numbers would be drawn
            more = replace(params, seed=seed, max_tokens=params.max_tokens - spoken)
            part = await self._part([*prompt, *whole.ids], more, lora)
            ids = [*whole.ids, *part.ids]
            closed = bool(ids) and ids[-1] in self.stop_ids
            text = str(self.tokenizer.decode(ids[:-1] if closed else ids, clean_up_tokenization_spaces=False))
            whole = replace(
                whole, ids=ids, logprobs=[*whole.logprobs, *part.logprobs], finish_reason=part.finish_reason,
                text=stopper.cut(text), support=None if whole.support is None else [*whole.support, *(part.support or ())],
            )  # fmt: skip
        return whole

    async def _part(self, prompt: list[int], params: SamplingParams, lora: LoRARequest | None) -> Generation:
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
            support=reported_tokens(completion) if self.masks else None,
            cached=output.num_cached_tokens or 0,
        )

    async def _choose(
        self, prompt: list[int], params: SamplingParams, lora: LoRARequest | None
    ) -> Generation:
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
            kept: tuple[int, ...] | None = allowed
            if len(allowed) > 1:
                seed = int(uniform([params.seed], [len(ids)])[0] * 2**23)
                few = params.top_k or len(allowed) * self.masks
                one = self._params(
                    [*prompt, *ids], replace(params, seed=seed, max_tokens=1, stop=(), top_k=few)
                )
                one.allowed_token_ids = list(allowed)
                output = await self._ask([*prompt, *ids], one, lora)
                cached = cached or output.num_cached_tokens or 0
                (token,) = output.outputs[0].token_ids
                logprob = output.outputs[0].logprobs[0][token].logprob
                (kept,) = reported_tokens(output.outputs[0]) if self.masks else (allowed,)
            ids.append(token)
            logprobs.append(logprob)
            support.append(kept)
            node = node.children[token]
        text = node.choice or self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        return Generation(list(prompt), ids, logprobs, reason, text, support, cached=cached)

    async def _ask(self, prompt: list[int], params: VLLMSampling, lora: LoRARequest | None) -> RequestOutput:
        """Run one request of vLLM to its end."""
        name = f"unitymas-{next(self._names)}"
        outputs = self.llm.generate({"prompt_token_ids": list(prompt)}, params, name, lora_request=lora)
        try:
            return [output async for output in outputs][-1]
        except BaseException:
            await self.llm.abort(name)
            raise

    def _params(self, prompt: list[int], params: SamplingParams) -> VLLMSampling:
        room = self.context - len(prompt)
        return to_vllm(params, room, self.stop_ids, masks=self.masks, untracked=self.untracked_truncation)

    def _request(self, adapter: str | None) -> LoRARequest | None:
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
        """Load new weights in all workers. An adapter travels alone, as a directory that peft would save.

        Before a whole model is loaded, running requests finish and new requests wait; the calling thread waits too. A new
        adapter makes no request wait: running requests continue with the old one, which is dropped after the last of them.

        If an error comes after workers have begun to load, some weights may be new and some old. Then every request raises
        `Outage`, until a whole model has been published.
        """
        if adapter is not None:
            self._check(adapter)
            self.wake()  # an adapter goes into memory that sleep has given away
            saved = save_adapter(model, adapter, mkdtemp(dir=self._folder.name))
            self._wait(self._exchange(adapter, saved, version))
            return
        self._wait(self._hush())
        try:
            if self._asleep:  # memory for weights, and not yet for keys and values
                self._wait(self.llm.wake_up(["weights"]))
            if self._mixed:
                self._wait(self.llm.collective_rpc("forget_update"))
            self._send(model, version)
            self._wait(self._renew(version))
            self._mixed = ""
        except BaseException as error:
            self._sender = None  # the next transfer begins with a new handshake
            self._mixed = self._mixed and mixture(version, error)
            raise
        finally:
            self._wait(self._speak_again())

    def _wait(self, work: Coroutine[object, None, T]) -> T:
        """Wait for work in vLLM's loop. If a process of vLLM dies meanwhile, vLLM's own calls never end."""

        async def watched() -> T:
            task = asyncio.ensure_future(work)
            while not (await asyncio.wait({task}, timeout=1.0))[0]:
                if self.llm.errored:
                    task.cancel()
                    raise self.llm.dead_error
            return await task

        return self._there(watched()).result()

    def _send(self, model: Decoder, version: int) -> None:
        """Send a model's weights to the workers."""
        if self.transfer == "files" or not isinstance(model, Llama):
            if self.transfer in ("ipc", "nccl"):
                say_once(f"transfer={self.transfer} is for our own decoder; this model is published as files")
            with TemporaryDirectory(prefix="unitymas-weights-") as folder:
                save_model(model, folder, dtype=self.llm.model_config.dtype)
                self._mixed = mixture(version)
                exact = isinstance(model, Llama)
                self._wait(self.llm.collective_rpc("load_from", args=(folder, exact)))
            return
        if self._sender is None:
            from .weight_transfer import Client, Sender

            config = self.llm.vllm_config
            workers = config.parallel_config.world_size_across_dp
            client = Client(self.llm, self._wait)
            self._sender = Sender(self.transfer, model, client, config.model_config.dtype, workers)
        self._mixed = mixture(version)
        self._sender.send(model, version)

    async def _hush(self) -> None:
        """Let running requests finish, and new ones wait."""
        async with self._turn:
            await self._turn.wait_for(lambda: self._asleep or not self._arriving)
            self._arriving = True
            await self._turn.wait_for(lambda: not self._speaking.total())

    async def _renew(self, version: int) -> None:
        """Reset the keys and values of the old weights."""
        if self._asleep:
            await self.llm.wake_up()
            self._asleep = False
        if not await self.llm.reset_prefix_cache(reset_connector=True):  # offloaded prefixes, too
            raise RuntimeError("vLLM kept prefixes of the old weights: its cache could not be reset")
        self._took_over(version)

    async def _speak_again(self) -> None:
        async with self._turn:
            self._arriving = self._asleep and not self._mixed  # a refusal needs no memory
            self._turn.notify_all()

    def sleep(self, level: int = 1) -> None:
        """Give memory to the learner until `wake` or `publish`: that of keys and values, and that of the weights.

        Running requests finish first, and new ones wait. vLLM must have `enable_sleep_mode`. Level 1 keeps the weights in the
        machine's memory; level 2 drops them, so only `publish` may follow.
        """
        if self._asleep:
            return
        self._wait(self._hush())
        try:
            self._wait(self.llm.sleep(level))
            self._asleep = True
        finally:
            self._wait(self._speak_again())

    def wake(self) -> None:
        """Take the memory back, and answer the waiting requests."""
        if self._asleep:
            self._wait(self.llm.wake_up())
            self._asleep = False
            self._wait(self._speak_again())

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

    async def _leave(self, old: LoRARequest) -> None:
        """Drop an adapter when no request uses it any more."""
        async with self._turn:
            await self._turn.wait_for(lambda: not self._speaking[old.lora_int_id])
        await self.llm.remove_lora(old.lora_int_id)
        if Path(old.lora_path).is_relative_to(self._folder.name):
            shutil.rmtree(old.lora_path)
        del self._speaking[old.lora_int_id]

    def fix_shapes(self) -> None:
        """Refuse: vLLM's batches have any shape."""
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
        self._sockets()
        self.llm = None  # now, and not when Python has taken half of vLLM down
        self._loop.call_soon_threadsafe(self._loop.stop)


def mixture(version: int, error: BaseException | None = None) -> str:
    """Return the message of an engine whose weights may be of two versions."""
    reason = f" ({type(error).__name__}: {' '.join(str(error).split())})" if error is not None else ""
    return (
        f"vLLM answers no requests: the transfer of weights of version {version} failed half way{reason}, so old and new "
        "weights may be mixed. Publish a whole model (engine.publish), or make a new engine; in a training run, remove the "
        "cause and resume from the newest checkpoint"
    )


async def _alive(work: Awaitable[T]) -> T:
    """Wait for vLLM. If its processes have died, raise a lost group."""
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        return await work
    except EngineDeadError as error:
        raise GroupLost(f"vLLM's engine process is gone: {error}") from error
