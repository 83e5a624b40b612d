"""The torch engine: token ids in; token ids and log-probs out.

    engine = TorchEngine(model, tokenizer, slots=64, context=512)
    request = engine.submit(prompt_ids, SamplingParams(max_tokens=32))
    while not request.done:
        engine.step()
    request.result.ids, request.result.logprobs

Requests of any lengths run side by side (continuous batching). A request joins as soon as a slot is free, and leaves
when it is done. One `step` decodes the next token of every running request. The same pass also runs the prefill of the
requests that join: cached prefixes are copied, and what several of them have in common is computed once. `step` is a
plain function; driving.py calls it from asyncio.

New weights come between two steps, from any thread. Requests that run then keep their tokens, and go through prefill again
under the new weights. So each token's log-prob is that of the version that is recorded beside it, keys and values included.

With `deterministic=True` every product has a fixed shape and prefill runs in fixed pieces. A request's result is then
the same, bit for bit, whatever it is batched with. This holds for a fixed number of threads on one machine.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from ...basics.renamed import renamed
from ...model.decoder import Decoder, Route
from ...text.tokenizing import Tokenizer
from ..engine import Ability
from ..generation import Generation as Generation
from ..generation import Request as Request
from ..generation import Versioned as Versioned
from ..sampling import Draw, SamplingParams, Tries, draw
from ..stopping import Stopper, closing_ids, closing_tokens, pieces_within
from .cuda_graphs import DecodeGraphs
from .driving import Driven, result_of
from .kv_cache import Beside, Cache, Prefixes, Reading, Speaking
from .prefill import Piece, cut, groups
from .sleeping import Napping


class TorchEngine(Driven, Napping, Versioned):
    """Continuous batching over one model. The module's docstring shows its use."""

    cannot: Mapping[Ability, str] = {}
    block = 4  # tokens of a shared block
    fixed_block = 16  # the same in deterministic mode: also the size of a piece of prefill
    reading_rows = 2048  # most prompt tokens in one pass
    fixed_rows = 256  # the same in deterministic mode: always exactly this number
    fixed_context = 0  # longest context after `fix_shapes`; 0: as before

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer | None = None,
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
        self.stop_ids = frozenset(
            stop_ids if stop_ids is not None else closing_ids(model.hf_config, model.generation, tokenizer)
        )
        super().__init__()
        self._turn = threading.RLock()  # held for a step, and while weights change
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # request i is in slot i
        self.publish(model, 0)
        self.device = self.model.embed.device
        self.share_prefixes = share_prefixes
        self._lay_out()
        self.counts: Counter[str] = Counter()
        self._trie = Tries(tokenizer, self.stop_ids)
        self._closers: dict[tuple[str, ...], frozenset[int]] = {}

    def _lay_out(self) -> None:
        """Allocate the slots, and the pool of blocks beside them. They grow with use, unless their shape is
        fixed.
        """
        size = self.fixed_block if self.deterministic else self.block
        of_a_slot = -(-self.context // size)
        self.cache = Cache(self.model.shape, self.dtype, self.device)
        if self.deterministic:
            if self.slots * of_a_slot * size > self.cache.limit():
                raise self._too_large(
                    f"{self.slots} slots of {self.context} tokens", self.slots * self.context
                )
            self.cache.lay_out(self.slots, of_a_slot * size)
        self.prefixes = Prefixes(self.cache, self.slots * of_a_slot if self.share_prefixes else 0, size)

    def _too_large(self, what: str, tokens: int) -> MemoryError:
        """Return the error text: which memory is needed and free, and which settings change it."""
        needed, most = (n * self.cache.token / 2**30 for n in (tokens, self.cache.limit()))
        wide = self.dtype.itemsize > 2
        half, dtype = ", or set groups.*.precision=bfloat16" * wide, ", --dtype bfloat16" * wide
        return MemoryError(
            f"{what} need {needed:.3g} GiB for keys and values, and {self.device} has {most:.3g} GiB for them (half of "
            f"what is free); lower groups.*.context ({self.context}), groups.*.slots ({self.slots}) or "
            f"policies.*.sampling.max_tokens{half} (in a command with a team: --context, --concurrency, --max-tokens{dtype})"
        )

    def fix_shapes(self) -> None:
        """Become deterministic from now on."""
        if self.busy:
            raise RuntimeError("an engine cannot change its shapes while requests run or wait")
        if not self.deterministic:
            self.deterministic = True
            self.context = min(self.context, self.fixed_context or self.context)
            self._lay_out()

    def close(self) -> None:
        """Do nothing, because the whole engine is in this process."""

    # -- weights

    def publish(self, model: Decoder, version: int, adapter: str | None = None) -> None:
        """Copy the model's weights, or one adapter's weights alone.

        A running request continues with the new weights, after a prefill of its prompt and of what it has sampled.
        """
        if adapter is None:
            fresh = model.copied(self.dtype).requires_grad_(False).eval()
        else:
            fresh = self.model.with_adapter_of(model, adapter)
        with self._turn:
            self.model: Decoder = fresh
            self.graphs = DecodeGraphs.of(self.model)
            self._took_over(version, adapter)
            if hasattr(self, "prefixes"):
                self.prefixes.clear()
            if interrupted := [r for r in self.running if adapter in (None, r.adapter)]:
                self._let_out(interrupted)

    @torch.inference_mode()
    def _let_out(self, requests: list[Request]) -> None:
        """Return running requests to the queue, before those that wait. They keep their tokens."""
        for request in reversed(requests):
            self._leave(request)
            self.waiting.appendleft(request)
            self.counts["interrupted"] += 1

    # -- requests

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        key: tuple[str, str] | None = None,
        adapter: str | None = None,
        begun: Generation | None = None,
    ) -> Request:
        """Queue a request. `key` is the caller's own name for it; `adapter` names an adapter of the model.

        `begun` is the beginning of its reply, which other weights sampled.
        """
        if not prompt:
            raise ValueError("a prompt needs at least one token")
        if not 0 <= min(prompt) <= max(prompt) < self.model.shape.vocab:
            raise ValueError(
                f"token ids must be in 0..{self.model.shape.vocab - 1}; is this another model's tokenizer?"
            )
        request = Request([0] * self.model.virtual(adapter) + list(prompt), params, key, adapter)
        request.node = self._trie(params.choices) if params.choices else None
        request.stopper = self._stopper(params.stop, request.prompt) if params.stop else None
        request.version = self.version_of(adapter)
        if begun is not None:
            request.go_on(begun)
        if len(request.prompt) >= self.context:
            self._finish(request, "overflow")
        else:
            self.waiting.append(request)
        return request

    @torch.inference_mode()  # as in `step`: both move the cache
    def cancel(self, request: Request) -> None:
        """End a request now. The tokens sampled so far are its result."""
        with self._turn:
            if request.done:
                return
            if request in self.running:
                self._leave(request)
            else:
                self.waiting.remove(request)
        self._finish(request, "cancelled")

    def generate(self, prompts: Iterable[Sequence[int]], params: SamplingParams) -> list[Generation]:
        """Answer several prompts, each with its own seed (params.seed, +1, +2 …), and wait for all."""
        requests = [self.submit(p, replace(params, seed=params.seed + i)) for i, p in enumerate(prompts)]
        while not all(r.done for r in requests):
            self.step()
        return [result_of(r) for r in requests]

    # -- one step

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    @torch.inference_mode()
    def step(self) -> None:
        """Admit waiting requests, and give every request a next token: prefill and decode in one pass."""
        with self._turn:
            self._step()

    def _step(self) -> None:
        spoken = len(self.running)  # slots
        free = self.slots - spoken
        if self.waiting and free >= min(len(self.waiting), max(1, self.slots // 8)):
            self._let_in(min(free, len(self.waiting)))
        if not self.running:
            return
        if not self.deterministic:
            self._make_room()
        work = groups(self._join(spoken), self.fixed_rows if self.deterministic else self.reading_rows)
        if spoken and (self.deterministic or not work):
            work.insert(0, [])
        state: dict[int, Tensor] = {}  # slot -> hidden state of its last token
        for pieces in work:
            speaks = 0 if state else spoken
            hidden = self._compute(pieces, speaks)
            state.update(zip(range(speaks), hidden, strict=False))
            ends = zip(pieces, hidden[speaks:], strict=False)
            state.update((slot, own) for piece, own in ends for slot in piece.slots)
        if self.share_prefixes:
            joined = enumerate(self.running[spoken:], spoken)
            self.prefixes.store((slot, r.prompt, r.adapter) for slot, r in joined)
        if spoken:
            self.counts.update(steps=1, tokens_spoken=spoken)
        self._say(torch.stack([state[slot] for slot in range(len(self.running))]))

    def _let_in(self, most: int) -> None:
        """Admit up to `most` waiting requests, in order. Each must have memory for its longest possible reply."""
        had, width = self.cache.size
        limit = had * width  # tokens; the memory is asked only where this is not enough
        need = max(map(self._need, self.running), default=0)
        for _ in range(most):
            need = max(need, self.cache.round(self._need(self.waiting[0])))
            needed = (len(self.running) + 1) * need
            if (
                not self.deterministic
                and needed > limit
                and needed > (limit := max(limit, self.cache.limit()))
            ):
                if self.running:
                    return  # wait until some requests have left
                refused, need = self.waiting.popleft(), 0
                what = f"a prompt of {len(refused.prompt)} tokens and a reply of up to {refused.params.max_tokens}"
                self._end(refused, self._too_large(what, needed))
                continue
            self.running.append(self.waiting.popleft())

    def _make_room(self) -> None:
        """Make room in the slots of all running requests for this step."""
        had, width = self.cache.size
        longest = 1 + max(r.length for r in self.running)
        if len(self.running) > had or longest > width:
            self.cache.hold(len(self.running), longest, max(map(self._need, self.running)), self.slots)

    def _need(self, request: Request) -> int:
        """Largest number of tokens that a request can reach."""
        return min(self.context, len(request.prompt) + request.params.max_tokens)

    def _join(self, first: int) -> list[Piece]:
        """Copy the cached prefixes of the prompts in slots from `first` on. Return the rest as pieces of
        prefill.
        """
        joining = list(enumerate(self.running[first:], first))
        prefixes = [(slot, self.prefixes.find(r.tokens, r.adapter)) for slot, r in joining]
        self.prefixes.load(prefixes)
        size = self.prefixes.size
        pieces = list(
            cut(
                {slot: r.tokens for slot, r in joining},
                known={slot: len(places) * size for slot, places in prefixes},
                family={slot: (0 if self.share_prefixes else slot, r.adapter or "") for slot, r in joining},
                block=size,
                most=self.fixed_block if self.deterministic else self.reading_rows,
            )
        )
        new: Counter[int] = Counter()  # slot -> tokens
        for piece in pieces:
            new[min(piece.slots)] += piece.n
        for slot, request in joining:
            copied = len(request.tokens) - new[slot]
            self.counts.update(tokens_read=new[slot], tokens_copied=copied)
            if not request.ids:
                request.cached, request.version = copied, self.version_of(request.adapter)
                self.counts["prompts"] += 1
        return pieces

    def _compute(self, pieces: list[Piece], spoken: int) -> Tensor:
        """Run one pass of the model. Return the states of the first `spoken` slots' last tokens, then of each
        piece's last token.
        """
        speakers = self.running[:spoken]
        if self.graphs and not pieces and not self.deterministic and not any(r.adapter for r in speakers):
            return self.graphs.decode(speakers, self.cache)
        rows = self.slots if self.deterministic and spoken else spoken
        spare = rows - spoken  # rows without a request write to the last position, which no prompt uses
        ids = [r.ids[-1] for r in speakers] + [0] * spare
        position = [r.length for r in speakers] + [self.context - 1] * spare
        adapters = [r.adapter for r in speakers] + [None] * spare
        # a few widths instead of one for every length: the longest request, rounded up to 32
        width = min(self.context, (max(position, default=0) // 32 + 1) * 32)
        # rows whose states are returned: all of decode, then the last row of each piece
        ends = list(range(rows))
        for piece in pieces:
            request = self.running[piece.slots[0]]
            ids += request.tokens[piece.start : piece.start + piece.n]
            position += range(piece.start, piece.start + piece.n)
            adapters += [request.adapter] * piece.n
            ends.append(len(ids) - 1)
        # products with a fixed number of rows keep their shape
        if self.deterministic and pieces:
            spare = self.fixed_rows - len(ids)
            ids, position, adapters = ids + [0] * spare, position + [0] * spare, adapters + [None] * spare
            ends += [0] * (self.fixed_rows - len(ends))
        # row [T], place [T]: token ids and positions of one row, decode first; keep: rows whose states are needed
        row, place, keep = (torch.tensor(x, device=self.device) for x in (ids, position, ends))
        ways: list[Speaking | Reading] = []
        if rows:
            ways.append(Speaking(self.cache, place[:rows], self.context if self.deterministic else width))
        if pieces:
            ways.append(Reading(self.cache, pieces, alone=self.deterministic))
        attention = ways[0] if len(ways) == 1 else Beside(rows, *ways)
        return self.model(row, place, attention, route=self._route(adapters), keep=keep if pieces else None)  # type: ignore[no-any-return]

    def _say(self, hidden: Tensor) -> None:
        """Sample each running request's next token, and let the requests leave that are done."""
        requests = list(self.running)
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
        """Add a sampled token. Return the reason to finish, if there is one now."""
        token = drawn.ids[i]
        request.ids.append(token)
        request.logprobs.append(drawn.logprobs[i])
        request.support.append(drawn.support[i])
        request.versions.append(self.version_of(request.adapter))
        if request.node is not None:
            request.node = request.node.children[token]
            if not request.node.children:
                return "stop"
        elif token in self.stop_ids or (request.stopper and request.stopper.stops(request.ids)):
            return "stop"
        full = len(request.prompt) + len(request.ids) >= self.context
        return "length" if full or len(request.ids) >= request.params.max_tokens else None

    def _leave(self, request: Request) -> None:
        """Free the slot. The last running request moves into it."""
        slot = self.running.index(request)
        last = self.running.pop()
        if last is not request:
            self.running[slot] = last
            self.cache.move(len(self.running), slot, last.length)

    def _finish(self, request: Request, reason: str) -> None:
        self.counts[f"finish_{reason}"] += 1
        result = Generation(
            prompt_ids=request.prompt[self.model.virtual(request.adapter) :],
            ids=request.ids,
            logprobs=request.logprobs,
            finish_reason=reason,
            text=self._text(request),
            support=request.support if any(s is not None for s in request.support) else None,
            version=request.versions[0] if request.versions else request.version,
            versions=request.versions,
            cached=request.cached,
        )
        self._end(request, result)

    def _fail(self, error: Exception) -> None:
        """Pass the error of a failed step to all requests."""
        with self._turn:
            requests, self.running = [*self.running, *self.waiting], []
            self.waiting.clear()
        for request in requests:
            self._end(request, error)

    def _end(self, request: Request, result: Generation | BaseException) -> None:
        request.result = result
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

    @cached_property
    def _pieces_within(self) -> list[str]:
        assert self.tokenizer is not None
        return pieces_within(self.tokenizer, self.model.shape.vocab)

    def _stopper(self, stop: tuple[str, ...], prompt: Sequence[int]) -> Stopper:
        if self.tokenizer is None:
            raise ValueError("stop strings need an engine with a tokenizer")
        if stop not in self._closers:
            self._closers[stop] = closing_tokens(stop, self._pieces_within)
        return Stopper(stop, self.tokenizer, self._closers[stop], prompt)

    def _route(self, adapters: Sequence[str | None]) -> Route:
        """Return masks of the rows that use each adapter."""
        return [
            (name, torch.tensor([a == name for a in adapters], device=self.device))
            for name in sorted({a for a in adapters if a is not None})
        ]


__getattr__ = renamed(__name__, {"Engine": "TorchEngine"})
