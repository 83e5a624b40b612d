"""Speed of advantages: 100,000 decisions in 10,000 ragged groups, on one core.

    OMP_NUM_THREADS=1 unitymas bench advantages

The time covers all work between known credits and signals that can be sent: the columns of the table from decision objects,
the groups, the statistics, and 100,000 signal objects. The data has 2,500 tasks, 4 agents, and random numbers of trajectories
and calls. Three rewards in four are ties, as with real 0/1 scores.
"""

from __future__ import annotations

import gc
import random
import time

from ....agents.answers import DecisionId
from ....cli.arguments import COUNT, module_parser
from ....trainers.algorithms import list_algorithms, make_algorithm
from ....trainers.controller.statistics.table import Decision, Table, ValueSummary

CONFIG: dict[str, dict[str, object]] = {"matpo": {"main": "role0"}, "at_grpo": {"tree": 0}}


def decisions(count: int, tasks: int, seed: int = 0) -> list[Decision]:
    """Return `count` decisions of random episodes, with `tasks` tasks and four agents."""
    chance = random.Random(seed)
    rows: list[Decision] = []
    episode = 0
    while len(rows) < count:
        task, name = f"task{episode % tasks}", f"episode{episode}"
        episode += 1
        for agent in range(4):
            calls = chance.randint(1, 4)
            for turn in range(calls):
                n = chance.randint(1, 60)
                rows.append(
                    Decision(
                        id=DecisionId(name, f"{agent}.{turn}"),
                        task=task,
                        episode=name,
                        node=f"{agent}.{turn}",
                        role=f"role{agent}",
                        agent=f"role{agent}",
                        chain=f"{name}/role{agent}",
                        turn=turn,
                        order=turn,
                        policy="shared",
                        n_tokens=n,
                        anchor=f"{task}/{chance.randint(0, 5)}",
                        credit={"outcome": float(chance.random() < 0.25), "format": 0.0},
                        ended="terminal" if turn == calls - 1 else "no",
                        value=ValueSummary(chance.random(), chance.gauss(0, 1), n, 1.0, 2.0, 0.5),
                    )
                )
    return rows[:count] if rows[count - 1].ended != "no" else decisions(count, tasks, seed + 1)


def seconds(name: str, rows: list[Decision]) -> float:
    """Return the seconds of one algorithm for all decisions."""
    algorithm = make_algorithm(name, **CONFIG.get(name, {}))
    gc.collect()
    start = time.process_time()
    table = Table(rows)
    signals = algorithm.advantages(table, table.mine("shared"), {})
    took = time.process_time() - start
    assert len(signals) == len(rows)
    return took


def main() -> None:
    """Read the arguments and measure."""
    parser = module_parser(__doc__)
    parser.add_argument("--decisions", type=COUNT, default=100_000)
    parser.add_argument("--tasks", type=COUNT, default=2_500)
    options = parser.parse_args()
    rows = decisions(options.decisions, options.tasks)
    random.Random(1).shuffle(rows)
    groups = len({(row.task, row.agent) for row in rows})
    print(f"{len(rows):,} decisions, {groups:,} groups of (task, agent); best of 3, CPU seconds")
    for name in list_algorithms():
        print(f"{name:14} {min(seconds(name, rows) for _ in range(3)):.3f}")


if __name__ == "__main__":
    main()
