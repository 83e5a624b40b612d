"""Speed of the core: `unitymas bench episode`.

The benchmark measures requests per second (M-ASK, instant answers), the time of a fork, the memory of live episodes, and AEC
episodes per minute with the real retriever on the mini world.

A request is one act or one tool call, from the request to the entry in the journal. Its prompt is built and its reply parsed in
that time. Times are processor times of one process on one core. Other processes on the machine still slow it, because they
share caches. So the best and the median of many short slices are printed.
"""

from __future__ import annotations

import gc
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ....agents.basics.frozen import freeze
from ....cli.arguments import COUNT, Parser
from ....envs.core.drivers import call_for
from ....envs.core.execution import Execution
from ....envs.registry import make

REPLIES = {
    "planner": "<q1>Who made The Door?</q1><a1>unknown</a1><final_answer>unknown</final_answer>",
    "answerer": "<final_answer>Ann Lee</final_answer>",
    "searcher": "<search>Who made The Door?</search>",
    "summarizer": "<evidence>Ann Lee</evidence>",
    "updater": "<update>t1</update>",
}


def main(argv: Sequence[str] = ()) -> int:
    """Measure, and print one line for each figure."""
    parser = Parser(description=__doc__)
    parser.add_argument("--episodes", type=COUNT, default=20_000)
    parser.add_argument("--live", type=COUNT, default=10_000)
    args = parser.parse_args(argv)
    env = make("mask-hotpotqa", data="mini", prompts="short", reward=None)
    arena = env.arena
    task = arena.task(arena.task_ids[0])
    docs = tuple(arena.toolbox.tools["retrieve"].fn("Who made The Door?", 5))
    frozen = freeze(docs)

    def play(requests: int | None = None) -> Execution:
        execution = arena.start(task, 1)
        while execution.pending:
            for node in execution.pending:
                if requests is not None and len(execution.nodes) > requests:
                    return execution
                if node.kind == "act":
                    execution.answer(node, REPLIES[node.agent or ""])
                else:
                    execution.give(node, frozen)
        return execution

    done = play()
    best, middle = per_call(play, args.episodes)
    count = len(done.nodes)
    print(f"requests answered   {count / best:>12,.0f} /s   (median {count / middle:,.0f})")
    best, middle = per_call(done.fork, args.episodes)
    print(f"fork of an episode  {best * 1e6:>12.1f} µs   (median {middle * 1e6:.1f}; {count} nodes)")

    gc.collect()
    before = resident()
    live = [play(requests=12) for _ in range(args.live)]
    used = (resident() - before) / 2**20
    print(f"live episodes       {len(live):>12,}      {used:.0f} MB")
    del live

    scored = make("mask-hotpotqa", data="mini", prompts="short")
    expert, count = scored.arena.expert, 200
    assert expert is not None
    began = time.process_time()
    for seed in range(count):
        scored.reset(seed=seed)
        for agent in scored.agent_iter():
            if scored.terminations[agent]:
                scored.step(None)
            else:
                scored.last()
                node = scored.execution.node(scored.infos[agent]["node"])
                scored.step(expert(call_for(scored.execution, node, "", reference=True)))
    rate = count / (time.process_time() - began) * 60
    print(f"AEC episodes        {rate:>12,.0f} /min (real BM25, rewards on)")
    return 0


def per_call(work: Callable[[], object], calls: int, slice_: int = 20) -> tuple[float, float]:
    """Return the processor seconds of a call, in the best and in the median slice of `slice_` calls."""
    times = []
    for _ in range(max(1, calls // slice_)):
        began = time.process_time_ns()
        for _ in range(slice_):
            work()
        times.append((time.process_time_ns() - began) / slice_ / 1e9)
    return min(times), statistics.median(times)


def resident() -> int:
    """Return the bytes of memory of this process, or without /proc its peak."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return pages * resource.getpagesize()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
