"""The torch engine: token ids in; token ids and log-probs out.

    engine = Engine(model, tokenizer, slots=64, context=512)
    request = engine.submit(prompt_ids, SamplingParams(max_tokens=32))
    while not request.done:
        engine.step()
    request.result.ids, request.result.logprobs

Requests of any lengths run side by side; each joins as a slot becomes free and leaves by itself. One `step` lets
waiting requests in (their prompts are read together, prefixes seen before are copied) and then speaks one token of
every running one. `step` is a plain function; `agenerate` drives it from asyncio, on the loop's own thread, because
a second thread would fight the controller for Python's lock after every small product.

With `deterministic=True` every product has a fixed shape and prompts are read in fixed pieces, so that a request's
result is the same, bit for bit, whatever it is batched with. Threads and machine are part of that promise.
"""

from __future__ import annotations

import asyncio
import copy
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .cache import Cache, Prefixes, Reading, Speaking
from .llama import Llama, Route
from .sampling import Draw, SamplingParams, Trie, draw
from .stopping import Stopper, closing_tokens


@dataclass(frozen=True, slots=True)
class Generation:
    """What came of one request."""

    prompt_ids: list[int]
    ids: list[int]  # exactly what was sampled, the closing token included
    logprobs: list[float]  # under the distribution each token was drawn from
    finish_reason: str  # stop | length | overflow (the prompt did not fit) | cancelled
    text: str = ""
    support: list[tuple[int, ...] | None] | None = (
        None  # allowed tokens of each id; None where (or if) all were
    )
    version: int = 0  # of the weights the request began with
    cached: int = 0  # prompt tokens that were not computed again


class Request:
    """A request while it waits and runs; `result` is there once `done`."""

    __slots__ = (
        "adapter", "cached", "ids", "key", "logprobs", "node", "on_done", "params", "prompt", "result", "stopper",
        "support", "version",
    )  # fmt: skip

    def __init__(self, prompt: list[int], params: SamplingParams, key: Any, adapter: str | None) -> None:
        self.prompt, self.params, self.key, self.adapter = prompt, params, key, adapter
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.support: list[tuple[int, ...] | None] = []
        self.node: Trie | None = None
        self.stopper: Stopper | None = None
        self.result: Generation | BaseException | None = None
        self.on_done: Callable[[Request], None] | None = None
        self.version = self.cached = 0

    @property
    def done(self) -> bool:
        return self.result is not None

    @property
    def length(self) -> int:
        """Tokens whose keys and values stand in the cache: all but the last one sampled."""
        return len(self.prompt) + max(0, len(self.ids) - 1)


class Engine:
    """Continuous batching over one model. See the module's text."""

    block = 16  # tokens of a shared block; also the piece in which prompts are read in deterministic mode
    reading_rows = 2048  # prompt tokens read at once
    fixed_rows = 256  # the same in deterministic mode: always exactly so many

    def __init__(
        self,
        model: Llama,
        tokenizer: Any = None,
        *,
        slots: int = 64,
        context: int | None = None,
        dtype: torch.dtype | None = None,
        stop_ids: Iterable[int] | None = None,
        deterministic: bool = False,
        share_prefixes: bool = True,
    ) -> None:
        if slots < 1:
            raise ValueError(f"an engine needs at least one slot, not {slots}")
        self.tokenizer = tokenizer
        self.slots = slots
        self.context = min(context or model.shape.context, model.shape.context)
        self.deterministic = deterministic
        self.dtype = dtype or model.embed.dtype
        self.stop_ids = frozenset(stop_ids if stop_ids is not None else closing_ids(model, tokenizer))
        self.version = 0
        self.publish(model, 0)
        self.device = self.model.embed.device
        self.cache = Cache(model.shape, slots, self.context, self.dtype, self.device)
        blocks = slots * self.context // self.block if share_prefixes else 0
        self.prefixes = Prefixes(self.cache, blocks, self.block)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # request i is in slot i
        self.counts: Counter[str] = Counter()
        self._tries: dict[tuple[str, ...], Trie] = {}
        self._closers: dict[tuple[str, ...], frozenset[int]] = {}
        self._driver: asyncio.Task[None] | None = None

    # -- weights

    def publish(self, model: Llama, version: int) -> None:
        """Take over a copy of the model's weights. What already runs goes on with the new ones, as of its own version."""
        self.model = copy.deepcopy(model).to(self.dtype).requires_grad_(False).eval()
        self.version = version
        if hasattr(self, "prefixes"):
            self.prefixes.clear()

    # -- requests

    def submit(
        self, prompt: Sequence[int], params: SamplingParams, key: Any = None, adapter: str | None = None
    ) -> Request:
        """Queue a request. `key` is the caller's own name for it; `adapter` a low-rank adapter of the model."""
        request = Request(list(prompt), params, key, adapter)
        if not request.prompt:
            raise ValueError("a prompt needs at least one token")
        if not 0 <= min(request.prompt) <= max(request.prompt) < self.model.shape.vocab:
            raise ValueError(
                f"token ids must be in 0..{self.model.shape.vocab - 1}; is this another model's tokenizer?"
            )
        request.node = self._trie(params.choices) if params.choices else None
        request.stopper = self._stopper(params.stop) if params.stop else None
        request.version = self.version
        if len(request.prompt) >= self.context:
            self._finish(request, "overflow")
        else:
            self.waiting.append(request)
        return request

    def cancel(self, request: Request) -> None:
        """End a request now; what it has said so far is its result."""
        if request.done:
            return
        if request in self.running:
            self._leave(request)
        else:
            self.waiting.remove(request)
        self._finish(request, "cancelled")

    def generate(self, prompts: Iterable[Sequence[int]], params: SamplingParams) -> list[Generation]:
        """Answer several prompts, each with its own seed (params.seed, +1, +2 …), and wait for all."""
        requests = [self.submit(p, params.but(seed=params.seed + i)) for i, p in enumerate(prompts)]
        while not all(r.done for r in requests):
            self.step()
        return [_result(r) for r in requests]

    async def agenerate(
        self, prompt: Sequence[int], params: SamplingParams, key: Any = None, adapter: str | None = None
    ) -> Generation:
        """Answer one prompt among whatever else runs. Cancelling the task cancels the request."""
        request = self.submit(prompt, params, key, adapter)
        if not request.done:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            request.on_done = lambda _: None if future.done() else future.set_result(None)
            self._drive()
            try:
                await future
            finally:
                self.cancel(request)
        return _result(request)

    def _drive(self) -> None:
        """See to it that a task on this loop steps while there is work."""
        loop = asyncio.get_running_loop()
        if self._driver is None or self._driver.done() or self._driver.get_loop() is not loop:
            self._driver = loop.create_task(self._steps())

    async def _steps(self) -> None:
        await asyncio.sleep(0)  # those who were about to ask, ask first
        while self.busy:
            try:
                self.step()
            except Exception as error:
                self._fail(error)
            await asyncio.sleep(0)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    # -- one step

    @torch.inference_mode()
    def step(self) -> None:
        """Let waiting requests in, then speak one token of each running one."""
        free = self.slots - len(self.running)
        if self.waiting and free >= min(len(self.waiting), max(1, self.slots // 8)):
            self._read([self.waiting.popleft() for _ in range(min(free, len(self.waiting)))])
        if self.running:
            self._speak()

    def _read(self, joining: list[Request]) -> None:
        """Read the prompts of joining requests. Of those that begin alike, one reads and the others copy."""
        while joining:
            wave: list[tuple[Request, int]] = []  # with the number of tokens copied
            beginnings: set[tuple[object, ...]] = set()  # blocks that this wave computes
            later: list[Request] = []
            for request in joining:
                places = self.prefixes.find(request.prompt, request.adapter)
                known = len(places) * self.block
                beginning = (request.adapter, known, *request.prompt[known : known + self.block])
                if self.prefixes.blocks and known + self.block < len(request.prompt):
                    if beginning in beginnings:
                        later.append(request)
                        continue
                    beginnings.add(beginning)
                request.cached, request.version = known, self.version
                self.running.append(request)
                self.prefixes.load(places, len(self.running) - 1)
                wave.append((request, known))
            self._read_wave(wave)
            joining = later

    def _read_wave(self, wave: list[tuple[Request, int]]) -> None:
        first_slot = len(self.running) - len(wave)
        parts: list[tuple[int, int, int]] = []
        for i, (request, known) in enumerate(wave):
            piece = self.block if self.deterministic else self.reading_rows
            for start in range(known, len(request.prompt), piece):
                parts.append((first_slot + i, start, min(piece, len(request.prompt) - start)))
        ends: dict[int, Tensor] = {}  # slot -> hidden state of the prompt's last token
        for group in _fill(parts, self.fixed_rows if self.deterministic else self.reading_rows):
            ends.update(self._read_rows(group))
        for i, (request, known) in enumerate(wave):
            self.prefixes.store(request.prompt, request.adapter, first_slot + i)
            self.counts.update(prompts=1, tokens_read=len(request.prompt) - known, tokens_copied=known)
        requests = [request for request, _ in wave]
        self._say(requests, torch.stack([ends[first_slot + i] for i in range(len(wave))]))

    def _read_rows(self, parts: list[tuple[int, int, int]]) -> dict[int, Tensor]:
        """Compute some pieces of prompts; the last hidden state of each slot among them."""
        ids: list[int] = []
        position: list[int] = []
        route: list[str | None] = []
        for slot, start, n in parts:
            ids += self.running[slot].prompt[start : start + n]
            position += range(start, start + n)
            route += [self.running[slot].adapter] * n
        reading = Reading(self.cache, parts, alone=self.deterministic)
        spare = self.fixed_rows - len(ids) if self.deterministic else 0
        row, place = (torch.tensor(x + [0] * spare, device=self.device) for x in (ids, position))
        ends = torch.tensor([n for _, _, n in parts]).cumsum(0) - 1
        keep = torch.cat((ends, ends.new_zeros(self.fixed_rows - len(ends)))) if self.deterministic else ends
        hidden = self.model(
            row, place, reading, route=self._route(route, len(row)), keep=keep.to(self.device)
        )
        return {slot: state for (slot, _, _), state in zip(parts, hidden, strict=False)}

    def _speak(self) -> None:
        n = len(self.running)
        rows = self.slots if self.deterministic else n
        last, position = [0] * rows, [0] * rows
        for i, request in enumerate(self.running):
            last[i], position[i] = request.ids[-1], request.length
        width = self.context if self.deterministic else min(self.context, (max(position) // 32 + 1) * 32)
        place = torch.tensor(position, device=self.device)
        speaking = Speaking(self.cache, place, width)
        route = self._route([r.adapter for r in self.running], rows)
        hidden = self.model(torch.tensor(last, device=self.device), place, speaking, route=route)
        self.counts.update(steps=1, tokens_spoken=n)
        self._say(list(self.running), hidden[:n])

    def _say(self, requests: list[Request], hidden: Tensor) -> None:
        """Sample each request's next token and let those leave that are done."""
        rows = self.slots if self.deterministic else len(requests)
        if len(hidden) < rows:
            hidden = torch.cat((hidden, hidden.new_zeros(rows - len(hidden), hidden.shape[1])))
        scores = self.model.logits(hidden)[: len(requests)]
        drawn = draw(
            scores,
            [r.params for r in requests],
            [len(r.ids) for r in requests],
            [None if r.node is None else tuple(r.node.children) for r in requests],
        )
        if not all(logprob == logprob for logprob in drawn.logprobs):
            raise FloatingPointError("the model's scores are not numbers (NaN): its weights are broken")
        reasons = [self._take(request, drawn, i) for i, request in enumerate(requests)]
        for request, reason in zip(requests, reasons, strict=True):
            if reason:
                self._leave(request)
                self._finish(request, reason)

    def _take(self, request: Request, drawn: Draw, i: int) -> str | None:
        """Add a sampled token; the reason to finish, if there is one now."""
        token = drawn.ids[i]
        request.ids.append(token)
        request.logprobs.append(drawn.logprobs[i])
        request.support.append(drawn.support[i])
        if request.node is not None:
            request.node = request.node.children[token]
            if not request.node.children:
                return "stop"
        elif token in self.stop_ids or (request.stopper and request.stopper.stops(request.ids)):
            return "stop"
        full = len(request.prompt) + len(request.ids) >= self.context
        return "length" if full or len(request.ids) >= request.params.max_tokens else None

    def _leave(self, request: Request) -> None:
        """Free the slot; the last running request moves into it."""
        slot = self.running.index(request)
        last = self.running.pop()
        if last is not request:
            self.running[slot] = last
            self.cache.move(len(self.running), slot, last.length)

    def _finish(self, request: Request, reason: str) -> None:
        self.counts[f"finish_{reason}"] += 1
        request.result = Generation(
            prompt_ids=request.prompt,
            ids=request.ids,
            logprobs=request.logprobs,
            finish_reason=reason,
            text=self._text(request),
            support=request.support if any(s is not None for s in request.support) else None,
            version=request.version,
            cached=request.cached,
        )
        if request.on_done:
            request.on_done(request)

    def _fail(self, error: Exception) -> None:
        """A step failed: everyone who waits for the engine is told so."""
        requests, self.running = [*self.running, *self.waiting], []
        self.waiting.clear()
        for request in requests:
            request.result = error
            if request.on_done:
                request.on_done(request)

    # -- words

    def _text(self, request: Request) -> str:
        if request.node is not None and request.node.choice is not None:
            return request.node.choice
        if self.tokenizer is None:
            return ""
        ids = request.ids[:-1] if request.ids and request.ids[-1] in self.stop_ids else request.ids
        text: str = self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        return request.stopper.cut(text) if request.stopper else text

    def _trie(self, choices: tuple[str, ...]) -> Trie:
        if choices not in self._tries:
            if self.tokenizer is None or not self.stop_ids:
                raise ValueError("choices need an engine with a tokenizer that has an end token")
            self._tries[choices] = Trie.of(
                choices, lambda c: self.tokenizer.encode(c, add_special_tokens=False), min(self.stop_ids)
            )
        return self._tries[choices]

    def _stopper(self, stop: tuple[str, ...]) -> Stopper:
        if self.tokenizer is None:
            raise ValueError("stop strings need an engine with a tokenizer")
        if stop not in self._closers:
            self._closers[stop] = closing_tokens(stop, self.tokenizer, self.model.shape.vocab)
        return Stopper(stop, self.tokenizer, self._closers[stop])

    def _route(self, adapters: Sequence[str | None], rows: int) -> Route:
        """Masks over `rows` rows, of which the first are whose `adapters` are given."""
        spare = [False] * (rows - len(adapters))
        return [
            (name, torch.tensor([a == name for a in adapters] + spare, device=self.device))
            for name in sorted({a for a in adapters if a is not None})
        ]


def closing_ids(model: Llama, tokenizer: Any) -> set[int]:
    """The tokens that end a reply, by the model's configuration and the tokenizer."""
    found: set[int] = set()
    for owner in (model.hf_config, tokenizer):
        ids = getattr(owner, "eos_token_id", None)
        found.update([ids] if isinstance(ids, int) else ids or [])
    return found


def _fill(parts: list[tuple[int, int, int]], rows: int) -> list[list[tuple[int, int, int]]]:
    """Cut a list of (slot, start, n) into groups of at most `rows` tokens, in order."""
    groups: list[list[tuple[int, int, int]]] = []
    room = 0
    for part in parts:
        if part[2] > room:
            groups.append([])
            room = rows
        groups[-1].append(part)
        room -= part[2]
    return groups


def _result(request: Request) -> Generation:
    if isinstance(request.result, BaseException):
        raise request.result
    assert request.result is not None
    return request.result
