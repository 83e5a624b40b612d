"""Dr. MAS at laptop scale: which calls should share a mean and a standard deviation?

    python -m unitymas.benchmarks.papers.dr_mas --seeds 0 1 2 3 4

The roles of the team have different scales of reward and different numbers of calls (`uneven.py`), and one policy. The
statistics are computed over the whole task, over the agents of a step, or for each agent.
"""

from __future__ import annotations

import statistics
from pathlib import Path

from .micro import held_out, learn, micro_model
from .reproduction import CellFigures, Claim, ConditionSettings, Paper, command
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
    title="Dr. MAS: statistics of each agent's own",
    source="Feng et al., Dr. MAS, arXiv 2602.08847",
    setting=(
        "Two roles share one policy (a random Llama of two layers, 32 units). The leader acts once, and its reward is 0 or 1. "
        "The worker acts one to four times, and its reward is −10 or 10. Each role must learn a table of eight words. A run has "
        "60 steps of 8 tasks × 8 trajectories, learning rate 3e-3, and gradient norms clipped at 1 (the table has the norms "
        "before clipping). `score` is the share of correct first calls after the last step, decoded greedily on all 24 tasks. "
        "`leader` and `worker` are the shares of the two roles. `spike` is the largest norm of a run divided by its median."
    ),
    answer=(
        "**Statistics per agent let the role with the small rewards learn.** Smaller and steadier gradients, which the paper also "
        "claims, do not show here. The models are tiny random ones, so nothing here is about large models."
    ),
    expected=(
        "As published: with one baseline for all agents the second moment of the gradient is inflated, so its norms are "
        "larger and spike, and training ends lower; per-agent statistics give smaller norms, fewer spikes and the better "
        "score. Here the leader should suffer: next to pay of ±10 its 0 or 1 hardly moves its advantage, which is ruled by "
        "what the *worker* happened to earn.\n\n"
        "The step-level statistics mix the leader's only call with the worker's first one, so they should lie near the global "
        "ones. Counting trajectories in place of calls should change little. Without the deviation the worker's gradients are "
        "ten times the leader's, so `agent-no-std` should have the larger norms, and still learn."
    ),
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
    reading=(
        "The main claim reproduces, and for the stated reason. With shared statistics, the role with the small rewards learns "
        "nothing: its first calls are right about as often as by chance, one in eight. With statistics of its own, it "
        "learns nearly all of its table. Statistics over the step do not help, because the leader's only call is in the same "
        "step as the worker's first call. Without the deviation, training is much worse even per agent, because one optimizer "
        "then gets gradients on two scales. A mean per agent still helps in that case, by a quarter as much.\n\n"
        "The claims about gradient norms do not reproduce here: per-agent statistics do not give smaller norms or fewer "
        "spikes. In such a small team the norm is high *because* both roles learn. A norm that is low because one role's "
        "advantages are noise is not better. The paper's spikes occur with long replies and large models, which this "
        "experiment does not have. It also does not show how often the rewards of real teams differ by a factor of ten: here "
        "this factor is part of the setting."
    ),
    play=play,
    metric="score",
    columns=("leader", "worker", "norm_mean", "norm_max", "spike"),
)

if __name__ == "__main__":
    raise SystemExit(command(PAPER))
