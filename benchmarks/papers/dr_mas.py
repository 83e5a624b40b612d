"""Dr. MAS at laptop scale: which calls should share a mean and a standard deviation?

    python -m unitymas.benchmarks.papers.dr_mas --seeds 0 1 2 3 4

The roles of the team have different scales of reward and different numbers of calls (`uneven.py`), and one policy. The
statistics are computed over the whole task, over the agents of a step, or for each agent.
"""

from __future__ import annotations

import statistics
from pathlib import Path

from .micro import held_out, learn, micro_model
from .reproduction import CellFigures, Claim, ConditionSettings, Paper, command, texts
from .uneven import registered

STEPS = 60


def condition(**algorithm: object) -> ConditionSettings:
    """Return the settings of a condition."""
    return {
        "algorithm": {"name": "dr_mas", **algorithm},
        "steps": STEPS,
        "k": 8,
        "tasks": 8,
        "clip_norm": 1.0,
    }


CONDITIONS: dict[str, tuple[str, ConditionSettings]] = {
    "global": ("one mean and deviation for all agents of a task", condition(statistics="task")),
    "step": (
        "one mean and deviation for all agents that act in the same turn",
        condition(statistics="step"),
    ),
    "agent": ("per agent, every call counts (as in the paper)", condition(statistics="agent")),
    "agent-by-trajectory": (
        "per agent, every trajectory counts once",
        condition(statistics="agent", each="trajectory"),
    ),
    "global-no-std": ("one mean for all, no deviation", condition(statistics="task", std=False)),
    "agent-no-std": ("per agent, no deviation", condition(statistics="agent", std=False)),
}


def play(settings: ConditionSettings, seed: int, folder: Path) -> CellFigures:
    """Train and test a team, and collect the gradient norms before clipping."""
    env = registered()
    model = micro_model(folder / "model", env, seed)
    where, figures = learn(
        env, model, seed, folder / "run", "score",
        preset="shared", steps=settings["steps"], tasks_per_step=settings["tasks"], k=settings["k"],
        policies={"*": {"algorithm": settings["algorithm"], "learning": {"clip_norm": settings["clip_norm"]}}},
        eval={"tasks": 24},
    )  # fmt: skip
    norms = figures["norms"]["team"]
    final = {
        **held_out(env, {"*": where / "team"}, 24),
        "norm_mean": statistics.fmean(norms),
        "norm_max": max(norms),
        "spike": max(norms) / statistics.median(norms),
    }
    return {"final": final, "curve": figures["curve"], "norms": [round(n, 4) for n in norms]}


PAPER = Paper(
    name="dr_mas",
    **texts("dr_mas"),
    conditions=CONDITIONS,
    claims=(
        Claim(says="agent-wise statistics end higher", better="agent", worse="global"),
        Claim(says="the role with the small rewards gains", better="agent", worse="global", metric="leader"),
        Claim(
            says="smaller gradients on average", better="agent", worse="global", metric="norm_mean", less=True
        ),
        Claim(says="smaller spikes", better="agent", worse="global", metric="spike", less=True),
        Claim(says="agent-wise beats step-level", better="agent", worse="step"),
        Claim(says="step-level beats global", better="step", worse="global"),
        Claim(says="counting trajectories once helps", better="agent-by-trajectory", worse="agent"),
        Claim(
            says="agent-wise statistics also help without the deviation",
            better="agent-no-std",
            worse="global-no-std",
        ),
    ),
    play=play,
    metric="score",
    columns=("leader", "worker", "norm_mean", "norm_max", "spike"),
)

if __name__ == "__main__":
    raise SystemExit(command(PAPER))
