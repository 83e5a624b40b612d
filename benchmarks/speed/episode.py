"""How fast the core is: `python -m unitymas.benchmarks.speed.episode`.

Requests answered per second (M-ASK, instant answers), the cost of a fork, memory of live episodes, and
AEC episodes per minute with the real retriever on the mini world. One core, one process.
"""

from __future__ import annotations

import argparse
import gc
import resource
import sys
import time
from collections.abc import Sequence

from ...envs.drivers import call_for
from ...envs.execution import Ended, Execution
from ...envs.registry import make

REPLIES = {
    "planner": "<q1>Who made The Door?</q1><a1>unknown</a1><final_answer>unknown</final_answer>",
    "answerer": "<final_answer>Ann Lee</final_answer>",
    "searcher": "<search>Who made The Door?</search>",
    "summarizer": "<evidence>Ann Lee</evidence>",
    "updater": "<update>t1</update>",
}


def main(argv: Sequence[str] = ()) -> int:
    """Measure, and print a line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=4000)
    parser.add_argument("--live", type=int, default=10_000)
    args = parser.parse_args(argv)
    env = make("mask-hotpotqa", data="mini", reward=None)
    arena = env.arena
    task = arena.task(arena.task_ids[0])
    docs = tuple(arena.toolbox.tools["retrieve"].fn("Who made The Door?", 5))
    from ...agents.frozen import freeze

    frozen = freeze(docs)

    def play(requests: int | None = None) -> Execution:
        execution = arena.start(task, 1)
        while execution.ended is Ended.NO:
            for node in execution.pending:
                if requests is not None and len(execution.nodes) > requests:
                    return execution
                if node.kind == "act":
                    execution.answer(node, REPLIES[node.agent or ""])
                else:
                    execution.give(node, frozen)
        return execution

    rates = []
    for _ in range(5):
        began = time.process_time()
        for _ in range(args.episodes // 5):
            done = play()
        rates.append(args.episodes // 5 * len(done.nodes) / (time.process_time() - began))
    print(f"requests answered   {max(rates):>12,.0f} /s   (median {sorted(rates)[2]:,.0f})")

    costs = []
    for _ in range(5):
        began = time.process_time()
        for _ in range(200):
            done.fork()
        costs.append((time.process_time() - began) / 200)
    print(f"fork of an episode  {min(costs) * 1e6:>12.1f} µs   ({len(done.nodes)} nodes)")

    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    live = [play(requests=12) for _ in range(args.live)]
    used = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f"live episodes       {len(live):>12,}      {used:.0f} MB")
    del live

    scored = make("mask-hotpotqa", data="mini")
    expert, count = scored.arena.expert, 200
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


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
