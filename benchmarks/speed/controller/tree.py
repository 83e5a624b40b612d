"""Cost of tree sampling, compared with the generation of the same candidates without a tree.

    OMP_NUM_THREADS=1 unitymas bench tree [--env mask-nq] [--width 8] [--tasks 8] [--rounds 6]

The embedded tiny model plays every role of trees with `width` candidates for each act. Every call is recorded. Then the same
model gets the same calls without the tree: the same prompts, seeds and choices, so the same tokens. There are two such sides.
`flat by round` gets the calls of one round of all trees at a time, because in a tree a round waits for the previous one.
`flat` gets all calls at once, as if all prompts were known. The tree also has forks, workflows, tools and rewards, and its
trees have different depths. Each round plays the sides in another order, so that no side is always the first. The best round
is printed, because other programs only add processor time, by up to a fifth if many share the caches.

Objects in memory before a side begins (torch, tokenizers: 360,000 objects) are excluded from Python's garbage collection.
Otherwise one full collection, a quarter of a second, would fall on a random side, and nearly always on the tree.
"""

from __future__ import annotations

import asyncio
import gc
import re
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from itertools import cycle, permutations

from ....agents.llm import LLMPolicy, RunPolicy, load_policy
from ....agents.policies import Answer, Call
from ....agents.team import BoundTeam
from ....cli.arguments import COUNT, module_parser
from ....envs.core.arena import Arena
from ....envs.core.branch import Branch
from ....envs.core.tasks import Task
from ....envs.registry import make_arena
from ....trainers.algorithms.algorithm import Tree
from ....trainers.controller.tree import TreeSampler
from ..clock import Seconds, stopwatch


@dataclass
class Scribe:
    """Policy that records its calls."""

    policy: LLMPolicy | RunPolicy
    calls: list[Call] = field(default_factory=list)
    tokens: int = 0

    async def act(self, call: Call) -> Answer:
        """Record a call, and reply."""
        answer: Answer = await self.policy.act(call)
        self.calls.append(call)
        self.tokens += answer.meta.tokens_out or 0
        return answer


def fresh(slots: int) -> Scribe:
    """Return the tiny model with an empty cache, so that no side uses the cached prompts of another."""
    return Scribe(load_policy("tiny", slots=slots, max_tokens=40))


async def grow(arena: Arena, scribe: Scribe, tasks: list[Task], width: int) -> None:
    """Grow a tree for each task, all at the same time."""
    team = BoundTeam({agent: scribe for agent in arena.roles}, dict.fromkeys(arena.roles, "tiny"))
    roots = [Branch.begin(arena, team, task, i, f"e{i}") for i, task in enumerate(tasks)]
    await asyncio.gather(*(TreeSampler(r, Tree(width), {"tiny"}, i).grow() for i, r in enumerate(roots)))


async def flat(scribe: Scribe, calls: list[list[Call]]) -> None:
    """Make the calls again, list after list."""
    for together in calls:
        await asyncio.gather(*(scribe.act(call) for call in together))


def by_round(calls: list[Call]) -> list[list[Call]]:
    """Return the calls of all trees by round. The name of a node (`3~3.2`, `4.1.0~4.0`) begins with its round."""
    rounds: dict[int, list[Call]] = {}
    for call in calls:
        number = re.match(r"\d+", call.node)
        assert number is not None, call.node
        rounds.setdefault(int(number[0]), []).append(call)
    return [rounds[number] for number in sorted(rounds)]


def timed(work: Coroutine[object, None, object]) -> Seconds:
    """Return the seconds of some work, with earlier objects excluded from garbage collection."""
    gc.collect()
    gc.freeze()
    try:
        return stopwatch(lambda: asyncio.run(work))
    finally:
        gc.unfreeze()


def main() -> None:
    """Read the arguments and measure."""
    parser = module_parser(__doc__)
    parser.add_argument("--env", default="mask-nq")
    parser.add_argument("--width", type=COUNT, default=8)
    parser.add_argument("--tasks", type=COUNT, default=8)
    parser.add_argument("--rounds", type=COUNT, default=6)
    options = parser.parse_args()
    arena = make_arena(options.env, data="mini", prompts="short")
    tasks = [arena.task(id) for id in list(arena.task_ids)[: options.tasks]]
    slots = options.tasks * options.width
    timings: dict[str, list[Seconds]] = {"tree": [], "flat by round": [], "flat": []}
    treed = fresh(slots)
    asyncio.run(grow(arena, treed, tasks, options.width))  # seeds are fixed: every tree makes these calls
    sides: dict[str, Callable[[Scribe], Coroutine[object, None, None]]] = {
        "tree": lambda scribe: grow(arena, scribe, tasks, options.width),
        "flat by round": lambda scribe: flat(scribe, by_round(treed.calls)),
        "flat": lambda scribe: flat(scribe, [treed.calls]),
    }
    for _, order in zip(range(options.rounds), cycle(permutations(sides)), strict=False):
        for name in order:
            scribe = fresh(slots)
            timings[name].append(timed(sides[name](scribe)))
            assert scribe.tokens == treed.tokens, f"{name}: {scribe.tokens} tokens, not {treed.tokens}"
    print(
        f"{options.env}: {options.tasks} trees of width {options.width}, {len(treed.calls)} acts, {treed.tokens} tokens; "
        f"best of {options.rounds}"
    )
    for name, times in timings.items():
        wall, processor = map(min, zip(*times, strict=True))
        ratio = min(t.processor for t in timings["tree"]) / processor
        print(
            f"{name:14} {wall:7.2f} s wall {processor:7.2f} s processor   the tree costs {ratio:.2f} x this (processor)"
        )


if __name__ == "__main__":
    main()
