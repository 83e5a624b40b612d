"""Speed of a whole team's rollouts: the M-ASK collector, compared with its engine alone and with `model.generate`.

    unitymas bench collect [--episodes 256] [--slots 64] [--threads 1] [--rounds 2]

The embedded tiny model, or `--model NAME`, plays all five roles, in float32 at temperature 1. The collector plays `--episodes`
episodes at the same time, with workflow, retrieval, prompts, chat template, parsing and sealing. Each episode makes one
request after the other. Then the same requests, in the same order, go to

    the engine    all at once, so no request waits for another
    `generate`    sorted by length in batches of `--slots`; a batch runs until its longest reply ends, and tokens beyond a
                  row's own length do not count

*steady* is the time with more open requests than the engine has slots. *tail* is the time of the last episodes or requests,
when fewer are left. The sides alternate, and the best round of each counts. Processor time is in brackets.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ....agents.engines.sampling import SamplingParams
from ....agents.engines.torch.torch_engine import TorchEngine
from ....agents.names import model_path
from ....agents.policies import Answer, Call
from ....agents.team import BoundTeam
from ....cli.arguments import COUNT, module_parser
from ....envs.core.arena import Arena
from ....envs.core.trace import Trace
from ....envs.registry import make_arena
from ....trainers.config.group_settings import GroupSpec, Learning, PolicySpec, Sampling
from ....trainers.controller.collect import Collector, Cursor, Draws, Seat
from ....trainers.group.contract import Group
from ....trainers.group.model_group import ModelGroup
from ....trainers.group.sample_store import SampleStore
from ..models.engine import generate

EngineRequests = list[tuple[list[int], SamplingParams]]


class Moment(NamedTuple):
    """Moment of a round: new tokens so far, jobs left, and the times."""

    clock: float
    processor: float
    tokens: int
    left: int

    @classmethod
    def now(cls, tokens: int, left: int) -> Moment:
        """Return the current moment."""
        return cls(time.perf_counter(), time.process_time(), tokens, left)


class Rates(NamedTuple):
    """New tokens per second of wall-clock time and of processor time."""

    clock: float
    processor: float

    @classmethod
    def between(cls, first: Moment, last: Moment) -> Rates:
        """Return the rates between two moments."""
        tokens = last.tokens - first.tokens
        seconds, busy = last.clock - first.clock, last.processor - first.processor
        return cls(tokens / seconds if seconds else 0.0, tokens / busy if busy else 0.0)

    def __str__(self) -> str:
        return f"{self.clock:7.0f} ({self.processor:6.0f})"


def rates(moments: Sequence[Moment], slots: int) -> tuple[Rates, Rates, Rates]:
    """Return the rates of the whole round, of the steady part, and of the tail, where fewer jobs are left than slots."""
    turn = next(m for m in moments if m.left <= slots)
    first, last = moments[0], moments[-1]
    return Rates.between(first, last), Rates.between(first, turn), Rates.between(turn, last)


class Timed(Seat):
    """Seat that records the number of tokens over time."""

    def __init__(self, group: Group, policy: str, episodes: int) -> None:
        super().__init__(group, policy)
        self.left, self.tokens = episodes, 0
        self.moments = [Moment.now(0, episodes)]

    async def act(self, call: Call) -> Answer:
        """Reply to a call, and count its tokens."""
        answer = await super().act(call)
        self.tokens += answer.meta.tokens_out or 0
        return answer

    def over(self, trace: Trace) -> None:
        """Count an episode that is over."""
        self.left -= 1
        self.moments.append(Moment.now(self.tokens, self.left))


async def play(
    arena: Arena, group: ModelGroup, tasks: list[str], k: int
) -> tuple[list[Moment], EngineRequests]:
    """Play all episodes with the collector. Return the moments, and the requests to the engine."""
    engine = group.hosted["team"].engine
    assert isinstance(engine, TorchEngine)
    engine.prefixes.clear()
    group.store = SampleStore()  # the same episodes again, under the same names
    asked: EngineRequests = []
    submit = engine.submit

    def noted(prompt: Sequence[int], params: SamplingParams, *more: Any, **named: Any) -> Any:
        asked.append((list(prompt), params))
        return submit(prompt, params, *more, **named)

    engine.submit = noted  # type: ignore[method-assign]
    seat = Timed(group, "team", len(tasks) * k)
    team = BoundTeam(dict.fromkeys(arena.roles, seat), dict.fromkeys(arena.roles, "team"))
    collector = Collector(
        arena, team, {"main": group}, {"team": "main"}, trained={"team"}, concurrency=1 << 20
    )
    try:
        harvest = await collector.collect(tasks, Draws(k, 0, "bench"), seat.over)
    finally:
        engine.submit = submit  # type: ignore[method-assign]
    if harvest.failures:
        raise RuntimeError(f"episodes failed: {dict(harvest.failures)}")
    seat.moments.append(Moment.now(seat.tokens, 0))
    return seat.moments, asked


def serve(engine: TorchEngine, asked: EngineRequests) -> list[Moment]:
    """Submit the same requests to the engine, all at once."""
    engine.prefixes.clear()
    tokens, left = 0, len(asked)
    moments = [Moment.now(0, left)]
    waiting = [engine.submit(prompt, params) for prompt, params in asked]
    while waiting:
        engine.step()
        done = [request for request in waiting if request.done]
        if done:
            waiting = [request for request in waiting if not request.done]
            tokens, left = tokens + sum(len(request.ids) for request in done), len(waiting)
            moments.append(Moment.now(tokens, left))
    return moments


def padded(model: object, jobs: list[tuple[list[int], int]], batch: int) -> list[Moment]:
    """Generate for the same requests with transformers, in batches of similar lengths."""
    began = Moment.now(0, len(jobs))
    generate(model, jobs, batch)
    return [began, Moment.now(sum(new for _, new in jobs), 0)]


def main() -> None:
    """Read the arguments and measure."""
    parser = module_parser(__doc__)
    parser.add_argument("--episodes", type=COUNT, default=256, help="8 of each task")
    parser.add_argument("--slots", type=COUNT, default=64, help="the engine's slots, and generate's batch")
    parser.add_argument("--threads", type=COUNT, default=1)
    parser.add_argument("--rounds", type=COUNT, default=2)
    parser.add_argument("--model", default="tiny", help="a model by its name (default: tiny)")
    args = parser.parse_args()
    from transformers import AutoModelForCausalLM

    arena = make_arena("mask-hotpotqa", data="mini", prompts="short", split="train", top_k=1)
    tasks = Cursor(list(arena.task_ids), 0).take(max(1, args.episodes // 8))
    policy = PolicySpec(learning=Learning(), sampling=Sampling(max_tokens=40))
    group = ModelGroup(
        GroupSpec(
            name="main", model=args.model, policies={"team": policy}, slots=args.slots, threads=args.threads
        )
    )
    path = model_path(args.model)
    engine, theirs = group.hosted["team"].engine, AutoModelForCausalLM.from_pretrained(path).float().eval()
    assert isinstance(engine, TorchEngine)
    # warm-up, which also records the requests for the others
    _, asked = asyncio.run(play(arena, group, tasks, 8))
    waiting = [engine.submit(prompt, params) for prompt, params in asked]
    while engine.busy:
        engine.step()
    jobs = [(request.prompt, len(request.ids)) for request in waiting]
    sides: dict[str, Callable[[], list[Moment]]] = {
        "collector": lambda: asyncio.run(play(arena, group, tasks, 8))[0],
        "engine": lambda: serve(engine, asked),
        "generate": lambda: padded(theirs, jobs, args.slots),
    }
    best: dict[str, tuple[Rates, Rates, Rates]] = {}
    for _ in range(args.rounds):
        for name, side in sides.items():
            told = rates(side(), args.slots)
            if name not in best or told[1].processor > best[name][1].processor:
                best[name] = told
    prompts = sum(len(prompt) for prompt, _ in asked)
    print(
        f"{len(tasks) * 8} episodes, {len(asked)} requests, {prompts} prompt tokens, {sum(new for _, new in jobs)} new ones; "
        f"{args.slots} slots, {args.threads} threads; new tokens/s by the clock (by processor time)"
    )
    print(f"{'':10} {'in all':>17} {'steady':>17} {'tail':>17}")
    for name, (whole, steady, tail) in best.items():
        rest = f"{steady} {tail}" if name != "generate" else f"{'–':>16} {'–':>16}"
        print(f"{name:10} {whole} {rest}")
    mine, fed, other = best["collector"], best["engine"], best["generate"]
    part = 1 if mine[1].clock else 0  # no more episodes than slots: nothing was steady
    print(
        f"collector / engine, {'in all' if part == 0 else 'steady'}: {mine[part].clock / fed[part].clock:.2f}"
        f" ({mine[part].processor / fed[part].processor:.2f});"
        f"   collector / generate, in all: {mine[0].clock / other[0].clock:.2f} ({mine[0].processor / other[0].processor:.2f})"
    )


if __name__ == "__main__":
    main()
