"""UnityMAS-O at laptop scale: before and after training, shared and separate models, and two rewards.

    python -m unitymas.benchmarks.papers.unitymas_o --seeds 0 1 2
    python -m unitymas.benchmarks.papers.unitymas_o --seeds 0 --only mask-shared mask-outcome

The embedded tiny model plays on the mini world, with the recipes of `benchmarks/demo.py` at twice the learning rate. The grid
is reduced: sharing is varied only for question answering, and the reward only for M-ASK.
"""

from __future__ import annotations

from pathlib import Path

from ...envs.registry import spec
from ...trainers.config.presets import TINY as COMMON
from ...trainers.config.schema import merge
from ...trainers.controller.run import train
from ..demo import recipe
from .reproduction import CellFigures, Claim, ConditionSettings, Paper, command, texts

PACKAGE = __package__.partition(".")[0]
ENVS = {"rag": "rag-nq", "mask": "mask-hotpotqa", "code": "code-deepcoder", "math": "math-deepscaler"}
SHARING = {
    "rag": ("shared", "separate"),  # two roles, with a shared or with separate models
    "mask": ("shared", "separate", "partial"),
    "code": ("shared",),
    "math": ("shared",),
}
LIGHT_FORMAT = f"{PACKAGE}.rewards.outcome:DrMasFormat"


RUN = {
    "steps": 20,
    "eval": {"every": 10},
    "policies": {"*": {"learning": {"lr": 3e-4}}},
    "env": {"data": "mini"},
    "log": {"console": "off", "traces_every": 0},
}
"""Settings that differ from the demo's."""


def condition(id: str, preset: str, **over: object) -> ConditionSettings:
    """Return the settings of a condition."""
    fields = merge(recipe(id), RUN)
    return {"env": id, "preset": preset, "fields": merge(fields, over)}


def play(settings: ConditionSettings, seed: int, folder: Path) -> CellFigures:
    """Train one run, and return its held-out scores before the first step and after the last."""
    env = settings["env"]
    run = train(env, preset=settings["preset"], directory=folder / "run", seed=seed, **settings["fields"])
    headline = spec(env).headline
    curve = [[row["step"], row.get(headline, 0.0)] for row in run.history if row["kind"] == "validation"]
    before, after = curve[0][1], curve[-1][1]
    return {"final": {"score": after, "before": before, "gain": after - before}, "curve": curve}


CONDITIONS: dict[str, tuple[str, ConditionSettings]] = {
    f"{name}-{preset}": (f"`{env}`, {what}", condition(env, preset))
    for name, env in ENVS.items()
    for preset, what in (
        ("shared", "one model for all roles"),
        ("separate", "a model per role"),
        ("partial", "roles of a kind share a model"),
    )
    if preset in SHARING[name]
}
CONDITIONS["mask-outcome"] = (
    "`mask-hotpotqa`, one model; the reward of every act is the final answer's F1 alone",
    condition(
        "mask-hotpotqa", "shared", env={"reward": [f"{PACKAGE}.rewards.outcome:AnswerF1", LIGHT_FORMAT]}
    ),
)

POLICY = COMMON["policies"]["*"]
PAPER = Paper(
    name="unitymas_o",
    **texts(
        "unitymas_o",
        algorithm=POLICY["algorithm"]["name"].upper(),
        steps=RUN["steps"],
        tasks=COMMON["tasks_per_step"],
        k=COMMON["k"],
        code_tasks=recipe(ENVS["code"])["tasks_per_step"],
        temperature=POLICY["sampling"]["temperature"],
        held_out=COMMON["eval"]["tasks"],
    ),
    conditions=CONDITIONS,
    claims=(
        *(
            Claim(says=f"training lifts {name}", better=f"{name}-shared", worse="", metric="gain")
            for name in ENVS
        ),
        *(
            Claim(
                says=f"sharing learns faster in {name}",
                better=f"{name}-shared",
                worse=f"{name}-separate",
                metric="gain",
            )
            for name in ENVS
            if "separate" in SHARING[name]
        ),
        Claim(
            says="rewards by role and turn beat the outcome alone",
            better="mask-shared",
            worse="mask-outcome",
            metric="gain",
        ),
    ),
    play=play,
    metric="score",
    columns=("before", "gain"),
)

if __name__ == "__main__":
    raise SystemExit(command(PAPER))
