"""Published claims at laptop scale: one file per paper, each one command, resumable, with what was expected in it.

    python -m unitymas.benchmarks.papers.stronger_mas --seeds 0 1 2     joint training of a team on a planning game
    python -m unitymas.benchmarks.papers.dr_mas --seeds 0 1 2           whose statistics: global, per step, per agent
    python -m unitymas.benchmarks.papers.faults --seeds 0 1 2           what each published grouping fault costs
    python -m unitymas.benchmarks.papers.routing --seeds 0 1 2          a router learns to spend fewer calls
    python -m unitymas.benchmarks.papers.unitymas_o --seeds 0 1 2       before and after; shared, separate; which reward

`grid.py` runs a grid of conditions and seeds and writes the page (docs/papers/), `micro.py` makes the small models.
"""
