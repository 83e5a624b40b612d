"""Stronger-MAS at laptop scale: does training a team together, by agent and turn, beat training one agent?

    python -m unitymas.benchmarks.papers.stronger_mas --seeds 0 1 2

The task is plan-path on small maps, played by one planner (solo) or by a proposer and a critic (duo). Each begins as a random
two-layer model of 32 units. Both teams get about the same number of samples in each step, as far as trees allow.
"""

from __future__ import annotations

from pathlib import Path

from ...agents.basics.json_types import JsonObject
from ...rewards.games import GameCredit
from .micro import held_out, learn, micro_model
from .reproduction import CellFigures, Claim, ConditionSettings, Paper, command, texts

GAME: JsonObject = {"difficulty": {"side": 4, "walls": 0.15}, "max_steps": 8}
STEPS, TEST = 80, 128
TEAM_PARTS = ["step", "invalid", "shaping", "goal", "shortest", "fail"]
TREE = {"name": "at_grpo", "tree": 4}
FLAT = {"name": "grpo"}


class Sparse(GameCredit):
    """Reward of the game that is paid only at the end: solved or not."""

    def __init__(self) -> None:
        super().__init__(step=0.0, invalid=0.0, shaping=0.0, shortest=0.0, own=0.0)


def condition(kind: str, algorithm: object = None, **more: object) -> ConditionSettings:
    """Return the settings of a condition, as plain data."""
    return {"kind": kind, "algorithm": algorithm, "game": GAME, "steps": STEPS, "tests": TEST, **more}


CONDITIONS: dict[str, tuple[str, ConditionSettings]] = {
    "prompted-team": ("the team before any training", condition("untrained")),
    "solo-grpo": ("one agent, GRPO on whole trajectories", condition("solo", FLAT)),
    "solo-at-grpo": ("one agent, AT-GRPO: the effect of the tree without a team", condition("solo", TREE)),
    "duo-grpo": ("the team, one policy, GRPO on whole trajectories", condition("duo", FLAT)),
    "duo-at-grpo": ("the team, one policy, AT-GRPO", condition("duo", TREE)),
    "duo-at-grpo-per-role": ("the team, a policy per role, AT-GRPO", condition("per-role", TREE)),
    "combined": (
        "the solo GRPO planner as proposer, and a critic trained beside an untrained proposer",
        condition("combined", TREE, solo=FLAT),
    ),
    "alpha-0": ("duo-at-grpo with only the own reward", condition("duo", TREE, alpha=0.0)),
    "alpha-0.5": ("duo-at-grpo, team reward halved", condition("duo", TREE, alpha=0.5)),
    "sparse": (
        "duo-at-grpo, reward only at the end (the rest of the episode scores a candidate)",
        condition("duo", {**TREE, "tree_score": "rollout"}, reward=f"{__package__}.stronger_mas:Sparse"),
    ),
}


def play(settings: ConditionSettings, seed: int, folder: Path) -> CellFigures:
    """Train a condition, then test it on maps of the test split."""
    env = "planpath-solo" if settings["kind"] == "solo" else "planpath-duo"
    game = settings["game"]
    # one vocabulary for both teams, so that a planner can play as a proposer
    model = Path(micro_model(folder / "model", "planpath-duo", seed, by="phrases", **game))
    kind = settings["kind"]
    if kind == "untrained":
        return {"final": tested(settings, env, {"*": model}), "curve": []}
    if kind == "combined":
        solo, first = trained(
            {**settings, "algorithm": settings["solo"]}, "planpath-solo", model, seed, folder / "solo"
        )
        alone, second = trained(settings, "planpath-duo", model, seed, folder / "critic", alone="critic")
        scores = tested(settings, env, {"proposer": solo / "team", "critic": alone / "critic"})
        return {"final": {**scores, "samples": first["samples"] + second["samples"]}, "curve": []}
    where, figures = trained(
        settings, env, model, seed, folder / "run", preset="separate" if kind == "per-role" else "shared"
    )
    seats = {"*": where / "team"} if kind != "per-role" else {r: where / r for r in ("proposer", "critic")}
    final = {**tested(settings, env, seats), "samples": figures["samples"]}
    if kind == "per-role":
        swapped = {"proposer": where / "critic", "critic": where / "proposer"}
        final["swapped"] = tested(settings, env, swapped)["solved"]
        final["lost_by_swap"] = final["solved"] - final["swapped"]
    return {"final": final, "curve": figures["curve"]}


def trained(
    settings: ConditionSettings,
    env: str,
    model: Path,
    seed: int,
    folder: Path,
    preset: str = "shared",
    alone: str = "",
) -> tuple[Path, CellFigures]:
    """Train one run. With `alone`, only this role learns, and the other policies are frozen."""
    algorithm = settings["algorithm"]
    tree = algorithm["name"] == "at_grpo"
    policy: dict[str, object] = {"algorithm": algorithm}
    if "alpha" in settings:
        policy["credit"] = {"*": [{"name": "mix", "team": TEAM_PARTS, "alpha": settings["alpha"]}]}
    policies: dict[str, object] = {"*": policy}
    if alone:
        preset = "separate"
        policies |= {role: {"frozen": True} for role in ("proposer", "critic") if role != alone}
    reward = (
        {"reward": [settings["reward"], f"{__package__.split('.')[0]}.rewards.rules:FormatReward"]}
        if "reward" in settings
        else {}
    )
    return learn(
        env, str(model), seed, folder, "solved",
        preset=preset, policies=policies, steps=settings["steps"], env={"args": dict(settings["game"]), "size": 256, **reward},
        tasks_per_step=16, k=1 if tree else 4, minibatches=4, eval={"every": 10},
    )  # fmt: skip


def tested(settings: ConditionSettings, env: str, seats: dict[str, Path]) -> dict[str, float]:
    """Play the test tasks, and return the metrics."""
    scores = held_out(env, seats, settings["tests"], **settings["game"])
    return {name: scores[name] for name in ("solved", "optimal_ratio")}


PAPER = Paper(
    name="stronger_mas",
    **texts("stronger_mas"),
    conditions=CONDITIONS,
    claims=(
        Claim(says="joint AT-GRPO beats the single agent's GRPO", better="duo-at-grpo", worse="solo-grpo"),
        Claim(says="joint AT-GRPO beats the prompted team", better="duo-at-grpo", worse="prompted-team"),
        Claim(
            says="joint AT-GRPO with a policy per role beats the single agent's GRPO",
            better="duo-at-grpo-per-role",
            worse="solo-grpo",
        ),
        Claim(says="AT-GRPO beats GRPO in the same team", better="duo-at-grpo", worse="duo-grpo"),
        Claim(
            says="the team beats one agent under the same AT-GRPO", better="duo-at-grpo", worse="solo-at-grpo"
        ),
        Claim(
            says="a team trained together beats roles trained apart",
            better="duo-at-grpo-per-role",
            worse="combined",
        ),
        Claim(
            says="exchanging the roles' policies costs",
            better="duo-at-grpo-per-role",
            worse="",
            metric="lost_by_swap",
        ),
        Claim(says="dense rewards beat sparse ones", better="duo-at-grpo", worse="sparse"),
        Claim(says="the team's reward helps (α = 1 against 0)", better="duo-at-grpo", worse="alpha-0"),
    ),
    play=play,
    metric="solved",
    columns=("optimal_ratio", "swapped", "samples"),
)

if __name__ == "__main__":
    raise SystemExit(command(PAPER))
