"""Published claims at laptop scale. Each paper is one file with the expected results, and one resumable command.

    python -m unitymas.benchmarks.papers.stronger_mas --seeds 0 1 2     joint training of a team on a planning game
    python -m unitymas.benchmarks.papers.dr_mas --seeds 0 1 2           statistics over the task, per step, or per agent
    python -m unitymas.benchmarks.papers.faults --seeds 0 1 2           the cost of each published grouping fault
    python -m unitymas.benchmarks.papers.routing --seeds 0 1 2          a router learns to spend fewer calls
    python -m unitymas.benchmarks.papers.unitymas_o --seeds 0 1 2       before and after; shared or separate; two rewards

`reproduction.py` runs a grid of conditions and seeds and writes the page (docs/papers/), `micro.py` makes the small models.
"""
