"""Simulation of a node with H100 GPUs that plays and trains a 7B model, in simulated time.

Admission, collector and workflow are real. Nothing on the GPUs is measured: their figures come from data sheets (3.35 TB/s of
memory, 989 TFLOP/s in bfloat16) with assumed efficiencies: 70% of the bandwidth in decode, 50% of the FLOP/s in prefill, 40% in
training. Reply lengths are lognormal, with a long tail. Synchronous runs use all GPUs for the rollout, and then all of them for
the update, without a cost for the change, which favours them. Overlapped runs split the GPUs.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import selectors
import statistics
import tempfile
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, TypeVar, cast

from ....agents.answers import DecisionId
from ....agents.policies import Answer, Call
from ....agents.roles import Raw, Role
from ....agents.team import BoundTeam
from ....envs.core.arena import Arena
from ....envs.core.tasks import DataSet, fingerprint
from ....envs.core.workflow import Episode, Outcome, Workflow
from ....trainers.config.schema import RunConfig
from ....trainers.controller.collect import Collector, Cursor, Draws, Seat
from ....trainers.controller.overlap.stream import Stream
from ....trainers.controller.reporting.idle import Idle
from ....trainers.controller.stage import Stage
from ....trainers.group.contract import Group

T = TypeVar("T")
Mode = Literal["off", "wait", "drop"]
MODES: tuple[Mode, ...] = ("off", "wait", "drop")
PARAMETERS, BANDWIDTH, FLOPS = 7e9, 3.35e12, 989e12
PROMPT = 1000
"""Number of tokens of a prompt."""


class Turns(Workflow):
    """Workflow in which one role acts two to four times."""

    roles = (Role("solver", reply=Raw()),)

    async def run(self, ep: Episode) -> Outcome:
        """Play one episode."""
        for turn in range(ep.rng.randint(2, 4)):
            await ep.act("solver", f"turn {turn}")
        return Outcome(answer="")


@dataclass(eq=False)
class Replica:
    """Model of one GPU that generates: a decode step reads the weights once, and the keys and values of each request."""

    running: dict[asyncio.Future[None], int] = field(default_factory=dict)  # -> tokens left
    lengths: Counter[asyncio.Future[None]] = field(default_factory=Counter)  # -> tokens so far
    debt: float = 0.0
    """Seconds of prefill in the next step."""
    busy: float = 0.0
    task: asyncio.Task[None] | None = None

    async def generate(self, tokens: int) -> None:
        """Generate this many tokens."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.running[done] = tokens
        self.debt += prefill(PROMPT)
        if self.task is None or self.task.done():
            self.task = asyncio.ensure_future(self._steps())
        await done

    def renew(self) -> None:
        """Take new weights. Running requests need prefill again."""
        self.debt += sum(prefill(PROMPT + self.lengths[request]) for request in self.running)

    async def _steps(self) -> None:
        while self.running:
            steps = min(32, *self.running.values())
            seconds = steps * decode(len(self.running)) + self.debt
            self.debt = 0.0
            await asyncio.sleep(seconds)
            self.busy += seconds
            for done in list(self.running):
                self.running[done] -= steps
                self.lengths[done] += steps
                if self.running[done] <= 0:
                    del self.running[done], self.lengths[done]
                    done.set_result(None)


def decode(requests: int) -> float:
    """Return the seconds of a decode step: bfloat16 weights, and keys and values of 57 KB for 2,000 tokens of each request."""
    return (2 * PARAMETERS + requests * 2000 * 57e3) / (0.7 * BANDWIDTH)


def prefill(tokens: int) -> float:
    """Return the seconds of a prefill."""
    return 2 * PARAMETERS * tokens / (0.5 * FLOPS)


def learning(tokens: float, gpus: int) -> float:
    """Return the seconds of an update: forward, backward, and the recomputation of checkpointed layers."""
    return 8 * PARAMETERS * tokens / (0.4 * FLOPS * gpus)


PUBLISH = 2 * PARAMETERS / 50e9
"""Seconds of a weight transfer, at 50 GB/s."""


class HollowGroup:
    """Model group without a model: a reply has a length and takes the time of its replica."""

    def __init__(self, gpus: int, seed: int) -> None:
        self.replicas, self.seed, self.version = [Replica() for _ in range(gpus)], seed, 0

    async def generate(
        self, policy: str, call: Call, temperature: float | None = None, keep: bool = True
    ) -> Answer:
        """Answer when a replica would have."""
        chance, version = random.Random(f"{self.seed}/{call.seed}"), self.version
        tokens = min(8192, max(16, round(chance.lognormvariate(math.log(600), 1.0))))
        await min(self.replicas, key=lambda replica: len(replica.running)).generate(tokens)
        sample = DecisionId(call.episode, call.node)
        return Answer("said", {"policy": policy, "version": version, "tokens_out": tokens, "sample": sample})

    async def seal(self, episode: str, keep: Sequence[str]) -> list[DecisionId]:
        """Close an episode."""
        return [DecisionId(episode, node) for node in keep]

    async def drop(self, episode: str, cause: str) -> int:
        """Discard an episode."""
        return 0

    def publish(self) -> None:
        """Give all replicas new weights."""
        self.version += 1
        for replica in self.replicas:
            replica.renew()


class Jumping(selectors.DefaultSelector):
    """Selector that does not wait, but moves the clock of its loop."""

    clock = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Move the clock to the next timer."""
        self.clock += timeout or 0.0
        return super().select(0)


class JumpingLoop(asyncio.SelectorEventLoop):
    """Event loop whose clock jumps from timer to timer."""

    def __init__(self) -> None:
        self.jumping = Jumping()
        super().__init__(self.jumping)

    def time(self) -> float:
        """Return the simulated time in seconds."""
        return self.jumping.clock


def simulated(work: Coroutine[object, object, T]) -> T:
    """Run work in simulated time."""
    loop = JumpingLoop()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()


@dataclass(frozen=True)
class Measured:
    """Figures of one simulated run."""

    seconds: float
    waited: float
    """Seconds in which the trainer waited for episodes."""
    busy: float
    """Seconds in which a replica worked, on average."""
    tokens: float
    age: float
    """Mean age of an episode, in versions, when it is trained on."""
    stale: int
    ends: tuple[float, ...]
    """Seconds from the beginning to the end of each step."""

    def line(self, name: str, reference: float, steps: int) -> str:
        """Describe the run in one line of the table."""
        rate = self.tokens / self.seconds
        return (
            f"{name:<26}{self.seconds / steps:>8.1f} s/step{rate:>9,.0f} tok/s{rate / reference:>7.2f} ×   idle: trainer "
            f"{self.waited / self.seconds:>4.0%}, rollout {1 - self.busy / self.seconds:>4.0%}   age {self.age:.2f}   "
            f"discarded {self.stale}"
        )


async def played(args: argparse.Namespace, overlap: Mode, rollout: int, train: int) -> Measured:
    """Play a run of `steps` steps: `rollout` GPUs generate, `train` GPUs learn."""
    config = RunConfig(
        steps=args.steps, tasks_per_step=args.tasks, k=args.k, concurrency=10**6,
        overlap=overlap, staleness=args.staleness,
    )  # fmt: skip
    rows = [{"id": str(i), "question": "?", "answers": ["!"]} for i in range(args.tasks * args.steps)]
    arena = Arena(Turns(), DataSet("simulated", "train", rows, fingerprint(rows)))
    group, loop = HollowGroup(rollout, args.seed), asyncio.get_running_loop()
    member = cast(Group, group)
    team = BoundTeam({"solver": Seat(member, "team")}, {"solver": "team"})
    collector = Collector(
        arena, team, {"main": member}, {"team": "main"}, trained={"team"}, concurrency=config.concurrency
    )
    hosts = SimpleNamespace(versions={"team": 0}, idle=Idle(), drop=group.drop)
    run = SimpleNamespace(
        config=config, dir=Path(tempfile.mkdtemp()), step=0, cursor=Cursor(list(arena.task_ids), 0),
        collector=collector, hosts=hosts, on_trace=None,
    )  # fmt: skip
    stream = Stream(cast(Stage, run)) if overlap != "off" else None
    if stream is not None:
        stream.begin(team, {"team"})
    waited = tokens = 0.0
    ages: list[int] = []
    ends: list[float] = []
    stale = 0
    for step in range(args.steps):
        began = loop.time()
        if stream is not None:
            harvest = await stream.batch()
        else:
            harvest = await collector.collect(
                run.cursor.take(args.tasks), Draws(args.k, config.seed, str(step))
            )
        waited += loop.time() - began
        stale += harvest.stale
        ages += [step - row.version for row in harvest.decisions]
        new = sum(row.n_tokens for row in harvest.decisions)
        tokens += new
        await asyncio.sleep(learning(new + PROMPT * len(harvest.decisions), train) + PUBLISH)
        group.publish()
        run.step += 1
        ends.append(loop.time())
        hosts.versions = {"team": run.step}
        if stream is not None:
            stream.stepped({})
    seconds = loop.time()
    if stream is not None:
        await stream.close(done=False)
    busy = statistics.mean(replica.busy for replica in group.replicas)
    return Measured(seconds, waited, busy, tokens, statistics.mean(ages), stale, tuple(ends))


def best(args: argparse.Namespace, overlap: Mode) -> tuple[int, Measured]:
    """Try every split of the GPUs. Return how many of them generate in the fastest, and its figures."""
    splits = {n: simulated(played(args, overlap, n, args.gpus - n)) for n in range(1, args.gpus)}
    rollout = max(splits, key=lambda n: splits[n].tokens / splits[n].seconds)
    return rollout, splits[rollout]


def simulate(args: argparse.Namespace) -> None:
    """Print the table of simulated runs."""
    episodes = args.tasks * args.k
    print(
        f"simulated: {args.gpus} GPUs (models of an H100, 7B), {args.steps} steps of {episodes} episodes, staleness {args.staleness}"
    )
    base = simulated(played(args, "off", args.gpus, args.gpus))
    reference = base.tokens / base.seconds
    print(base.line("synchronous, all GPUs", reference, args.steps))
    for overlap in MODES:
        rollout, figures = best(args, overlap)
        name = "synchronous" if overlap == "off" else overlap
        print(figures.line(f"{name}, {rollout} + {args.gpus - rollout} GPUs", reference, args.steps))
