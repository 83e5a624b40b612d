"""Calls per second between the controller and groups in Ray actors: batches compared with single remote calls.

    unitymas bench star [--calls 20000] [--flight 1024] [--groups 1] [--rounds 3] [--words 250]

The groups answer at once, so the figure is that of the star alone: its messages, pickling and wake-ups. Prompts and answers
have realistic sizes (`--words`). `flight` calls are open at any time. Both sides use the same actors and alternate, and medians
are printed. Controller time is the processor time of this process for 1,000 calls.
"""

from __future__ import annotations

import argparse
import asyncio
import pickle
import statistics
from collections.abc import Awaitable, Callable

from ....agents.policies import Answer, Call
from ....cli.arguments import COUNT, module_parser
from ....trainers.config.schema import RayConfig
from ....trainers.group.actor import ActorLink, GroupActor
from ....trainers.group.cluster import CALLS_AT_ONCE, connect
from ..clock import Seconds


class Instant:
    """Group that answers at once, with the metadata that an engine gives."""

    async def generate(
        self, policy: str, call: Call, temperature: float | None = None, keep: bool = True
    ) -> Answer:
        """Answer at once."""
        meta = {"tokens_in": 400, "tokens_out": 40, "finish": "stop", "version": 3, "seconds": 0.5}
        return Answer(
            "<search>who designed the Elmar bridge</search>",
            {**meta, "sample": f"{call.episode}/{call.node}"},
        )


def example(number: int, words: int) -> Call:
    """Return a call with a prompt of this many words."""
    text = " ".join(f"word{(number + i) % 997}" for i in range(words))
    messages = ({"role": "system", "content": "You plan."}, {"role": "user", "content": text})
    return Call(
        agent="planner", role="planner", messages=messages, episode=f"e{number}", node="0", seed=number
    )


async def timed(
    ask: Callable[[int, Call], Awaitable[object]], calls: list[Call], flight: int
) -> tuple[float, float]:
    """Make all calls, with `flight` of them open. Return calls per second, and controller seconds for 1,000 calls."""
    rest = enumerate(calls)

    async def caller() -> None:
        for number, call in rest:
            await ask(number, call)

    started = Seconds.now()
    await asyncio.gather(*(caller() for _ in range(flight)))
    took = Seconds.now().since(started)
    return len(calls) / took.wall, took.processor / len(calls) * 1000


async def measure(args: argparse.Namespace) -> None:
    """Measure both sides alternately, and print the results."""
    import ray

    connect(RayConfig())
    options = {"num_cpus": 0, "max_concurrency": CALLS_AT_ONCE}
    singles = [ray.remote(Instant).options(**options).remote() for _ in range(args.groups)]
    links = [ActorLink(ray.remote(GroupActor).options(**options).remote(Instant)) for _ in range(args.groups)]

    async def single(number: int, call: Call) -> object:
        return await singles[number % args.groups].generate.remote("team", call)

    async def batched(number: int, call: Call) -> object:
        return await links[number % args.groups].ask("generate", "team", call, None, True)

    calls = [example(i, args.words) for i in range(args.calls)]
    sides = {"single remote calls": single, "batches": batched}
    figures: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for ask in sides.values():
        await timed(ask, calls[: 2 * args.groups], 1)  # now the actors have started
    for _ in range(args.rounds):
        for name, ask in sides.items():
            figures[name].append(await timed(ask, calls, args.flight))
    size = len(pickle.dumps(("generate", ("team", calls[0], None, True)), protocol=5))
    print(
        f"{args.calls:,} calls of {size:,} bytes, {args.flight} open, {args.groups} groups, medians of {args.rounds}"
    )
    rates = {}
    for name, rounds in figures.items():
        rates[name] = statistics.median(rate for rate, _ in rounds)
        own = statistics.median(seconds for _, seconds in rounds)
        print(f"{name:>20}  {rates[name]:>9,.0f} calls/s   controller {own:.3f} s per 1,000 calls")
    print(f"{'ratio':>20}  {rates['batches'] / rates['single remote calls']:>9.1f}")
    ray.shutdown()


def main() -> None:
    """Read the arguments and measure."""
    parser = module_parser(__doc__)
    parser.add_argument("--calls", type=COUNT, default=20_000)
    parser.add_argument("--flight", type=COUNT, default=1024)
    parser.add_argument("--groups", type=COUNT, default=1)
    parser.add_argument("--rounds", type=COUNT, default=3)
    parser.add_argument("--words", type=COUNT, default=250)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
