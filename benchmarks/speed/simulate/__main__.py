"""Simulation of a star of many groups: utilisation of engines of a given speed by the controller, the workflow and Ray.

    unitymas bench simulate [--groups 1,4,16] [--flight 256,1024,4096] [--controllers 1,2] [--pace 8b-h100] [--runtime ray]

The controller (collector, M-ASK with its retrieval, prompts, parsing, rewards, table, seals), Ray's actors and the messages are
real. The engines are simulated: they answer with fixed replies, with the delay of a model of their speed (paced.py names its
source). Episodes are assigned to groups by name. `--flight` episodes are played at the same time, on engines with half as many
slots in all (or `--slots` for each group), so requests always wait.

*utilisation* is the share of busy slots, between the end of the first episodes (half of those in flight) and the beginning of
the last one. Slots that the controller does not fill in time lower it. *controller* is the processor time of this process for
1,000 calls, with workflow and retrieval. *calls/s* is the rate of the star. `limit` is the rate that the busiest controller
process would reach if each process had its own processor. With `--controllers N`, N processes (shards) play. Then *shard* is the
time of each of them for 1,000 of its calls, *controller* is the process with the table, and the bytes are those between them.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import pickle
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

from ....agents.answers import Answer
from ....agents.policies import Call
from ....cli.arguments import COUNT, counts, module_parser, number
from ....envs.core.arena import Arena
from ....envs.registry import make_arena
from ....trainers.config.group_settings import GroupSpec, PolicySpec
from ....trainers.config.schema import RayConfig, RunConfig
from ....trainers.controller.collect import Collector, Cursor, Draws, Harvest
from ....trainers.controller.reporting.idle import Idle
from ....trainers.controller.reporting.progress import Progress
from ....trainers.controller.reporting.watchdog import Watchdog
from ....trainers.controller.shards.sharded import Shards
from ....trainers.group.actor import GroupActor, RayGroup
from ....trainers.group.cluster import CALLS_AT_ONCE, connect
from ....trainers.group.contract import Group
from .dealt import DealtShard, TimedShard, dealt
from .paced import PACES, EngineSpeed, Lengths, PacedGroup


@dataclass
class Regime:
    """Result of one regime."""

    controllers: int
    groups: int
    flight: int
    slots: int
    """Slots of each group."""
    utilisation: float
    calls_per_second: float
    controller: float
    """Seconds of this process for 1,000 calls."""
    shard: float
    """Seconds of a shard for 1,000 of its calls; 0 if this process plays."""
    groups_cpu: float
    """Processors that the simulated groups used: the cost of the simulation itself."""
    own_cpu: float
    """Share of a processor that this process used."""
    bytes_per_call: float
    seal_seconds: float
    """Time from the last reply to the end of the collection."""
    episodes: int

    def line(self) -> str:
        """Return the regime as a row of the table."""
        slowest = max(self.controller, self.shard / self.controllers)
        limit = 1000 / slowest if slowest else 0.0
        return (
            f"{self.controllers:>11}{self.groups:>8}{self.flight:>8}{self.slots:>7}{self.utilisation:>13.3f}{self.calls_per_second:>9.0f}"
            f"{self.controller:>12.3f}{self.shard:>8.3f}{limit:>8.0f}{self.own_cpu:>10.2f}{self.groups_cpu:>12.2f}{self.bytes_per_call:>8.0f}"
            f"{self.seal_seconds:>8.2f}"
        )


HEAD = (
    f"{'controllers':>11}{'groups':>8}{'flight':>8}{'slots':>7}{'utilisation':>13}{'calls/s':>9}{'controller':>12}{'shard':>8}{'limit':>8}{'own cpu':>10}"
    f"{'groups cpu':>12}{'bytes':>8}{'seals':>8}"
)


class Window:
    """Part of a collection in which the engines can be full, with measurements at both ends."""

    def __init__(self, groups: Mapping[str, Group], shards: Shards | None, first: int, last: int) -> None:
        self.groups, self.marks, self.last_reply = groups, (first, last), 0.0
        self.shards = (
            [] if shards is None else [shard for shard in shards.members if isinstance(shard, TimedShard)]
        )
        self.reports: list[asyncio.Task[list[Any]]] = []
        self.own: list[float] = []

    def over(self, progress: Progress) -> None:
        """Count an episode that is over."""
        self.last_reply = time.perf_counter()
        if progress.done in self.marks:
            self.own.append(time.process_time())
            self.reports.append(asyncio.ensure_future(self._look()))

    async def _look(self) -> list[Any]:
        return [
            time.perf_counter(),
            sum(await asyncio.gather(*(shard.used() for shard in self.shards))),
            *await asyncio.gather(*(group.report() for group in self.groups.values())),
        ]


async def regime(
    arena: Arena, groups: Mapping[str, Group], shards: Shards | None, flight: int, slots: int, rounds: float
) -> Regime:
    """Collect with this many episodes in flight, and measure the engines."""
    episodes = round(flight * rounds) // 8 * 8
    window = Window(groups, shards, flight // 2, episodes - flight)
    team = dealt(groups, dict.fromkeys(arena.roles, "dealt"))
    home = {f"policy-{name}": name for name in groups}
    progress = Progress()
    progress.show = window.over
    collector = Collector(arena, team, groups, home, trained=set(home), concurrency=flight, progress=progress)
    if shards is not None:
        collector = shards.over(collector)
    tasks = Cursor(list(arena.task_ids), 0).take(episodes // 8)
    harvest = await collector.collect(tasks, Draws(8, flight, f"f{flight}", thin=True))
    sealed = time.perf_counter() - window.last_reply
    if harvest.failures:
        raise RuntimeError(f"episodes failed: {dict(harvest.failures)}")
    (begin, before, *first), (end, after, *last) = [await report for report in window.reports]
    calls = sum(b["calls"] - a["calls"] for a, b in zip(first, last, strict=True))
    held = sum(b["slot_seconds"] - a["slot_seconds"] for a, b in zip(first, last, strict=True))
    seconds = end - begin
    own = window.own[1] - window.own[0]
    theirs = sum(b["cpu"] - a["cpu"] for a, b in zip(first, last, strict=True))
    return Regime(
        len(window.shards) or 1, len(groups), flight, slots, held / (seconds * slots * len(groups)), calls / seconds,
        own / calls * 1000, (after - before) / calls * 1000, theirs / seconds, own / seconds,
        size_of_call(harvest) if shards is None else size_of_rows(harvest), sealed, len(harvest.traces),
    )  # fmt: skip


def size_of_call(harvest: Harvest) -> float:
    """Return the bytes of a call to a group and of its answer."""
    act = harvest.traces[0].acts()[-1]
    call = Call(
        agent=act.agent or "",
        role=act.role or "",
        messages=act.messages,
        episode=harvest.episodes[0],
        node=act.id,
    )
    size = len(pickle.dumps(("generate", ("policy-0", call, None, True)), protocol=5))
    return size + len(pickle.dumps((True, Answer(act.text or "", act.meta)), protocol=5))


def size_of_rows(harvest: Harvest) -> float:
    """Return the bytes of a shard's results for each call."""
    calls = sum(len(trace.acts()) for trace in harvest.traces[:8])
    rows = [row for row in harvest.decisions if row.episode in harvest.episodes[:8]]
    return len(pickle.dumps((harvest.traces[:8], rows), protocol=5)) / calls


def started(count: int, runtime: str, pace: EngineSpeed, slots: int, lengths: Lengths) -> dict[str, Group]:
    """Start this many simulated groups."""
    if runtime == "local":
        return {f"g{i}": cast(Group, PacedGroup(pace, slots, lengths)) for i in range(count)}
    import ray

    remote = ray.remote(GroupActor).options(num_cpus=0, max_concurrency=CALLS_AT_ONCE)
    specs = [
        GroupSpec(name=f"g{i}", model="none", policies={f"policy-g{i}": PolicySpec()}) for i in range(count)
    ]
    return {
        spec.name: cast(Group, RayGroup(spec, remote.remote(PacedGroup, pace, slots, lengths)))
        for spec in specs
    }


async def sharded(groups: Mapping[str, Group], count: int, flight: int) -> Shards | None:
    """Start the controllers that play. Return None if this process plays."""
    if count == 1:
        return None
    config = RunConfig(concurrency=flight, controllers=count, runtime="ray")
    alike = {
        name: RayGroup(group.spec, group.actor)
        for name, group in groups.items()
        if isinstance(group, RayGroup)
    }
    home = {f"policy-{name}": name for name in groups}
    members = [TimedShard(number, DealtShard, config, alike, home) for number in range(count)]
    await asyncio.gather(*(member.begin() for member in members))
    return Shards(members, Watchdog(0), Idle())


async def simulate(args: argparse.Namespace) -> list[Regime]:
    """Measure all regimes, and print each."""
    pace, lengths = PACES[args.pace], Lengths(reply=args.reply)
    slow = {part: getattr(pace, part) * args.slow for part in ("floor", "each", "prefill")}
    pace = replace(pace, **slow)
    print(
        f"{pace.name}: a step of {pace.floor * 1e3:g} ms + {pace.each * 1e3:g} ms a request ({pace.source})"
    )
    print(HEAD, flush=True)
    if args.runtime == "ray":
        connect(RayConfig())
    arena = make_arena("mask-hotpotqa", data="mini", prompts="full", split="train", max_turns=args.turns)
    table = []
    for count, flight, controllers in itertools.product(args.groups, args.flight, args.controllers):
        slots = args.slots or max(1, flight // (2 * count))
        groups = started(count, args.runtime, pace, slots, lengths)
        await asyncio.gather(*(group.report() for group in groups.values()))
        shards = await sharded(groups, controllers, flight)
        table.append(await regime(arena, groups, shards, flight, slots, args.rounds))
        print(table[-1].line(), flush=True)
        if shards is not None:
            shards.close()
        for group in groups.values():
            group.abandon()
    return table


def main() -> None:
    """Read the arguments and simulate."""
    parser = module_parser(__doc__)
    parser.add_argument("--groups", type=counts, default=[1, 4, 16])
    parser.add_argument(
        "--controllers",
        type=counts,
        default=[1],
        help="processes that play; more than 1 needs --runtime ray",
    )
    parser.add_argument("--flight", type=counts, default=[256, 1024, 4096], help="episodes at once")
    parser.add_argument(
        "--slots", type=number(0), default=0, help="slots of each group (0: half as many in all as episodes)"
    )
    parser.add_argument("--pace", choices=list(PACES), default="8b-h100")
    parser.add_argument(
        "--slow",
        type=number(0.001, kind=float),
        default=1.0,
        help="engines so many times slower: for a busy machine",
    )
    parser.add_argument("--reply", type=COUNT, default=200, help="mean tokens of a reply")
    parser.add_argument("--turns", type=COUNT, default=2, help="most turns of an episode")
    parser.add_argument(
        "--rounds",
        type=number(0.001, kind=float),
        default=3.0,
        help="episodes, in multiples of those in flight",
    )
    parser.add_argument("--runtime", choices=("ray", "local"), default="ray")
    parser.add_argument("--out", type=Path, help="a JSON file of the result")
    args = parser.parse_args()
    if max(args.controllers) > 1 and args.runtime != "ray":
        parser.error("--controllers: several need --runtime ray")
    table = asyncio.run(simulate(args))
    if args.out:
        told = {
            "slow": args.slow,
            "pace": asdict(PACES[args.pace]),
            "reply": args.reply,
            "runtime": args.runtime,
            "rounds": args.rounds,
        }
        args.out.write_text(json.dumps({**told, "regimes": [asdict(row) for row in table]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
