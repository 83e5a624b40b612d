"""Overlapped collection compared with the synchronous run, on the same budget.

    unitymas bench overlap [--steps 12] [--gpus 8] [--staleness 1]
    unitymas bench overlap --score [--steps 12] [--seeds 0 1 2] [--out runs/overlap] [env.args.max_turns=1 …]

Without `--score`, admission, collector and workflow are real, and the groups are models of a node (node.py). Every split of its
GPUs is tried, and the best is shown. With `--score`, the tiny model learns on this machine in each mode and seed, and held-out
scores are compared at equal samples and at equal wall-clock time (score.py).
"""

from __future__ import annotations

from pathlib import Path

from ....cli.arguments import COUNT, module_parser, number
from .node import simulate
from .score import score


def main() -> None:
    """Read the arguments and measure."""
    parser = module_parser(__doc__)
    parser.add_argument("--steps", type=COUNT, default=12)
    parser.add_argument("--tasks", type=COUNT, default=32, help="tasks of a step of the simulated node")
    parser.add_argument("--k", type=COUNT, default=8)
    parser.add_argument("--gpus", type=COUNT, default=8)
    parser.add_argument("--staleness", type=number(0), default=1)
    parser.add_argument("--seed", type=int, default=0, help="chance of the simulated lengths")
    parser.add_argument("--score", action="store_true", help="train the tiny model, and compare scores")
    parser.add_argument("--real", metavar="ENV", default="mask-hotpotqa", help="environment of these runs")
    parser.add_argument("--metric", default="f1", help="their score")
    parser.add_argument("--out", type=Path, default=Path("runs/overlap"), help="folder of these runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="settings of these runs")
    args = parser.parse_intermixed_args()
    if args.score:
        score(args)
    else:
        simulate(args)


if __name__ == "__main__":
    main()
