"""Router of engine replicas, compared with round robin and least load: cached prompt tokens, and balance of the loads.

    unitymas bench routing [--env mask-hotpotqa] [--prompts full] [--replicas 4] [--tasks 32] [--k 8] [--flight 64]
                                                [--room 200000] [--seed 0]

The prompts are real: the tiny team plays the tasks, k samples each, and every act's prompt is tokenized by its chat
template. The replicas are simulated: each keeps `room` tokens of prompts in blocks of 4, the oldest leave first, and a
request takes the time of its prefill (20,000 tokens/s, held ones are free) and of its reply (25 ms a token, slower
beside others). `flight` episodes are open at any time, each with its acts one after the other.

held     share of all prompt tokens that the replica held already
load     open requests of the fullest replica over the mean, averaged over requests, and the largest sum of a replica's
         requests over the mean
seconds  simulated, until the last reply.
"""

from __future__ import annotations

import heapq
import itertools
import statistics
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ....agents import TINY
from ....agents.model.weights import load_tokenizer
from ....agents.team import Team
from ....cli.arguments import COUNT, module_parser
from ....envs.core.drivers import rollout
from ....envs.registry import make
from ....trainers.group.replicas.router import Router

PREFILL, DECODE, BESIDE = 20_000.0, 0.025, 32
"""Prompt tokens a second, seconds of a token, and open requests that double it."""
RecordedAct = tuple[list[int], int]
"""Prompt, and number of tokens of the reply."""


@dataclass
class HeldPrompts:
    """Simulated engine: its cached prompts and its open requests."""

    room: int
    block = 4
    held: OrderedDict[int, None] = field(default_factory=OrderedDict)
    open: int = 0
    requests: int = 0

    def read(self, prompt: Sequence[int]) -> int:
        """Cache a prompt. Return how many of its first tokens were already cached."""
        names, parent = [], 0
        for start in range(0, len(prompt) - self.block + 1, self.block):
            parent = hash((parent, *prompt[start : start + self.block]))
            names.append(parent)
        prefix = next((i for i, name in enumerate(names) if name not in self.held), len(names))
        for name in reversed(names):
            self.held[name] = None
            self.held.move_to_end(name)
        while len(self.held) * self.block > self.room:
            self.held.popitem(last=False)
        return prefix * self.block


@dataclass(frozen=True)
class RoutingFigures:
    """Outcome of one way to choose a replica."""

    held: float
    load: float
    share: float
    seconds: float


def simulate(
    episodes: Sequence[Sequence[RecordedAct]],
    replicas: list[HeldPrompts],
    flight: int,
    choose: Callable[[Sequence[int]], int],
    finished: Callable[[int], None],
) -> RoutingFigures:
    """Play all episodes over the replicas."""
    waiting: Iterator[Sequence[RecordedAct]] = iter(episodes)
    numbers = itertools.count()
    ends: list[
        tuple[float, int, int, Sequence[RecordedAct]]
    ] = []  # when, tie, replica, the acts that are left
    held = tokens = 0
    loads: list[float] = []
    now = 0.0

    def begin(acts: Sequence[RecordedAct]) -> None:
        nonlocal held, tokens
        (prompt, reply), rest = acts[0], acts[1:]
        index = choose(prompt)
        replica = replicas[index]
        known = replica.read(prompt)
        held, tokens = held + known, tokens + len(prompt)
        replica.open += 1
        replica.requests += 1
        loads.append(max(r.open for r in replicas) * len(replicas) / sum(r.open for r in replicas))
        seconds = (len(prompt) - known) / PREFILL + reply * DECODE * (1 + replica.open / BESIDE)
        heapq.heappush(ends, (now + seconds, next(numbers), index, rest))

    for acts in itertools.islice(waiting, flight):
        begin(acts)
    while ends:
        now, _, index, rest = heapq.heappop(ends)
        replicas[index].open -= 1
        finished(index)
        if following := rest or next(waiting, ()):
            begin(following)
    requests = [replica.requests for replica in replicas]
    return RoutingFigures(
        held / tokens, statistics.mean(loads), max(requests) / statistics.mean(requests), now
    )


def compared(
    episodes: Sequence[Sequence[RecordedAct]], count: int, flight: int, room: int
) -> dict[str, RoutingFigures]:
    """Return the figures of the router, of round robin, of the least load, and of one replica, which holds most."""

    def fresh() -> list[HeldPrompts]:
        return [HeldPrompts(room) for _ in range(count)]

    router, turn, loaded = Router(count, room), itertools.cycle(range(count)), fresh()

    def least(_: Sequence[int]) -> int:
        return min(range(count), key=lambda i: loaded[i].open)

    def nothing(_: int) -> None:
        pass

    return {
        "router": simulate(episodes, fresh(), flight, router.choose, router.finished),
        "round robin": simulate(episodes, fresh(), flight, lambda _: next(turn), nothing),
        "least load": simulate(episodes, loaded, flight, least, nothing),
        "one replica": simulate(episodes, fresh()[:1], flight, lambda _: 0, nothing),
    }


def recorded(env: str, prompts: str, tasks: int, k: int, seed: int) -> list[list[RecordedAct]]:
    """Let the tiny team play. Return the acts of each episode, with the samples of a task next to each other."""
    made = make(env, data="mini", split="train", prompts=prompts)
    traces = rollout(made, Team({"*": "tiny"}), tasks=tasks, k=k, seed=seed)
    tokenizer = load_tokenizer(TINY)
    episodes = []
    for trace in traces:
        tokens = [
            tokenizer.apply_chat_template(list(node.messages), add_generation_prompt=True, return_dict=False)
            for node in trace.acts()
        ]
        replies = [node.meta.tokens_out or 1 for node in trace.acts()]
        episodes.append(list(zip(tokens, replies, strict=True)))
    return [acts for acts in episodes if acts]


def main() -> None:
    """Read the arguments and measure."""
    parser = module_parser(__doc__)
    parser.add_argument("--env", default="mask-hotpotqa")
    parser.add_argument("--prompts", default="full", choices=["full", "short"])
    parser.add_argument("--replicas", type=COUNT, default=4)
    parser.add_argument("--tasks", type=COUNT, default=32)
    parser.add_argument("--k", type=COUNT, default=8)
    parser.add_argument("--flight", type=COUNT, default=64)
    parser.add_argument("--room", type=COUNT, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    episodes = recorded(args.env, args.prompts, args.tasks, args.k, args.seed)
    acts = [act for episode in episodes for act in episode]
    print(
        f"{args.env}: {len(episodes):,} episodes, {len(acts):,} prompts of {statistics.mean(len(p) for p, _ in acts):,.0f} "
        f"tokens on average; {args.replicas} simulated replicas, {args.room:,} tokens each, {args.flight} episodes open"
    )
    print(f"{'':>12}  {'held':>6}  {'load':>5}  {'share':>5}  {'seconds':>7}")
    for name, own in compared(episodes, args.replicas, args.flight, args.room).items():
        print(f"{name:>12}  {own.held:6.1%}  {own.load:5.2f}  {own.share:5.2f}  {own.seconds:7.1f}")


if __name__ == "__main__":
    main()
