"""Cost of each published grouping fault: the same run, once as in the paper and once as in its code.

    python -m unitymas.benchmarks.papers.faults --seeds 0 1 2 3 4

The faults are implemented in this file and not in the library. All run on the team of `uneven.py`, whose roles have different
scales of reward and different numbers of calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...trainers.algorithms import register_algorithm
from ...trainers.algorithms.grpo import GRPO
from ...trainers.controller.statistics.comparison import Groups
from ...trainers.controller.statistics.table import Floats, Ints, Table
from .micro import held_out, learn, micro_model
from .reproduction import CellFigures, Claim, ConditionSettings, Paper, command, texts
from .uneven import registered


def groups_of(code: Ints) -> Groups:
    """Return groups of calls with equal codes, in which every call counts once."""
    code = np.unique(code, return_inverse=True)[1]
    rows = np.arange(len(code))
    return Groups(code, rows, np.ones(len(code)), np.bincount(code).astype(np.float64))


@dataclass(frozen=True, kw_only=True)
class MixedPrompts(GRPO):
    """Fault of PettingLLMs: the group key divides an index that already belongs to a problem.

    So `mixed` problems share a group.
    """

    name = "fault_mixed_prompts"
    mixed: int = 8

    def groups(self, table: Table) -> Groups:
        """Group calls of several problems together."""
        bundle = table.codes("task") // self.mixed
        return groups_of(bundle * 10_000 + table.codes("agent", "turn"))


@dataclass(frozen=True, kw_only=True)
class Reshaped(GRPO):
    """Fault of MARTI: every `n` consecutive calls of a batch form a group, also calls of different agents."""

    name = "fault_reshaped"
    n: int = 8

    def groups(self, table: Table) -> Groups:
        """Group consecutive calls."""
        return groups_of(np.arange(len(table)) // self.n)


@dataclass(frozen=True, kw_only=True)
class RawSingletons(GRPO):
    """Fault of Dr. MAS: in a group of one, the raw score is the advantage."""

    name = "fault_raw_singletons"

    def compare(self, within: Groups, x: Floats) -> Floats:
        """Return the advantages; a single call keeps its raw score."""
        alone = within.samples[within.code] == 1
        return np.where(alone, x, super().compare(within, x))


def condition(name: str, **algorithm: object) -> ConditionSettings:
    """Return the settings of a condition."""
    return {
        "algorithm": {"name": name, "aggregation": "token-mean", **algorithm},
        "steps": 40,
        "k": 8,
        "tasks": 8,
    }


TURN: dict[str, str] = {"group": "agent-turn", "score": "act"}
CONDITIONS: dict[str, tuple[str, ConditionSettings]] = {
    "agent": ("right: per task and agent, a trajectory counts once", condition("grpo", score="mean")),
    "one-baseline": (
        "fault: all agents of a task share mean and deviation",
        condition("grpo", score="mean", group="task", each="call"),
    ),
    "per-call": (
        "fault: a trajectory counts as often as its agent spoke",
        condition("grpo", score="mean", each="call"),
    ),
    "reshaped": ("fault: every 8 calls in a row are a group", condition("fault_reshaped", score="mean")),
    "agent-turn": ("right: per task, agent and turn", condition("grpo", **TURN)),
    "mixed-prompts": (
        "fault: up to 8 problems share a group of (agent, turn)",
        condition("fault_mixed_prompts", **TURN),
    ),
    "raw-singletons": (
        "fault: a group of one learns from its raw score",
        condition("fault_raw_singletons", **TURN),
    ),
}


def play(settings: ConditionSettings, seed: int, folder: Path) -> CellFigures:
    """Run the training of `dr_mas` with the groups of this condition."""
    for double in (MixedPrompts, Reshaped, RawSingletons):
        register_algorithm(double.name, double)
    env = registered()
    model = micro_model(folder / "model", env, seed)
    where, figures = learn(
        env, model, seed, folder / "run", "score",
        preset="shared", steps=settings["steps"], tasks_per_step=settings["tasks"], k=settings["k"],
        policies={"*": {"algorithm": settings["algorithm"]}}, eval={"tasks": 24},
    )  # fmt: skip
    final = {**held_out(env, {"*": where / "team"}, 24), "area": figures["area"]}
    return {"final": final, "curve": figures["curve"]}


PAPER = Paper(
    name="faults",
    **texts("faults"),
    conditions=CONDITIONS,
    claims=tuple(
        Claim(says=f"{fault} costs {what}", better=right, worse=fault, metric=metric)
        for right, fault in (
            ("agent", "one-baseline"),
            ("agent", "per-call"),
            ("agent", "reshaped"),
            ("agent-turn", "mixed-prompts"),
            ("agent-turn", "raw-singletons"),
        )
        for metric, what in (("score", "score"), ("area", "speed"))
    ),
    play=play,
    metric="score",
    columns=("area", "leader", "worker"),
)

if __name__ == "__main__":
    raise SystemExit(command(PAPER))
