"""Learned orchestration: a router learns to make fewer calls than M-ASK's fixed order, with the same score.

    python -m unitymas.benchmarks.papers.routing --seeds 0 1 2

Only the router is trained. The scripted expert plays the other roles, so only the order of the calls matters. The router is a
micro model. It first imitates the fixed order, and is then trained on F1 less the cost of the calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ...agents import TINY
from ...agents.basics.json_types import JsonObject
from ...agents.policies import Call
from ...agents.team import Player
from ...envs.core.drivers import rollout
from ...envs.registry import make
from ...rewards.routing import CallCost, RoutedF1
from .micro import Pupil, held_out, learn, micro_model, school, sound
from .reproduction import CellFigures, Claim, ConditionSettings, Paper, command, texts

ENV, SEARCH = "mask-router-hotpotqa", "search-router-hotpotqa"
WORLD: JsonObject = {"data": "mini", "prompts": "short"}
SHOWN = ("f1", "calls", "router_calls")


class Free(CallCost):
    """Cost rule in which calls are counted and cost nothing."""

    def __init__(self) -> None:
        super().__init__(each=0.0, own=0.0)


class Dear(CallCost):
    """Cost rule in which calls cost five times as much."""

    def __init__(self) -> None:
        super().__init__(each=0.1, own=0.025)


class VerifierF1(RoutedF1):
    """Outcome reward of the search router, paid to the last act of its verifier."""

    def __init__(self) -> None:
        super().__init__("verifier")


class VerifierCost(CallCost):
    """Cost of the verifier, which pays for the calls that follow."""

    def __init__(self) -> None:
        super().__init__("verifier")


def in_order(call: Call) -> str:
    """Reply with the next move of M-ASK's fixed order.

    The order is plan, answer, then search, retrieve, summarise, file and answer, until the searcher replies that nothing is
    missing.
    """
    seen = call.messages[-1]["content"]  # the short prompt's words
    last = next(line for line in seen.splitlines() if line.startswith("Last: ")).removeprefix("Last: ")
    after = {"none": "planner", "planner": "answerer", "answerer": "searcher", "searcher": "retrieve"}
    after |= {"retrieve": "summarizer", "summarizer": "updater", "updater": "answerer"}
    move = "stop" if "Query: nothing is missing" in seen else after[last]
    return move if call.choices is None or move in call.choices else "answerer"


class InOrder:
    """Player that follows the fixed order."""

    def act(self, call: Call) -> str:
        """Reply with the next move of the fixed order."""
        return in_order(call)


def always_search(agent: str, messages: object) -> str:
    """Reply "no" as the search router's verifier, so every search is made: the fixed order."""
    return "<verify>no</verify>"


def condition(kind: str, **more: object) -> ConditionSettings:
    """Return the settings of a condition."""
    return {
        "kind": kind,
        "tests": 128,
        "school": 80,
        "slips": 0.2,
        "steps": 60,
        "cost": "rewards.routing:CallCost",
        **more,
    }


def search(kind: str) -> ConditionSettings:
    """Return the settings of Dr. MAS's search router. Its verifier writes tags, so the embedded tiny model plays it."""
    return {"kind": f"search-{kind}", "tests": 128, "top_k": 2}


def search_learned(algorithm: str) -> ConditionSettings:
    """Return the settings of the search router with a trained verifier."""
    how = {"algorithm": {"name": algorithm, "kl_loss": 0.1}, "reference": True, "learning": {"lr": 1e-4}}
    return {**search("learned"), "steps": 30, "policy": {**how, "sampling": {"max_tokens": 16}}}


CONDITIONS: dict[str, tuple[str, ConditionSettings]] = {
    "fixed": ("M-ASK's own order", condition("fixed")),
    "imitated": ("a router that imitates the fixed order, before training", condition("imitated")),
    "learned": ("trained on F1 − 0.02 per call − 0.005 per move", condition("learned")),
    "learned-free": (
        "trained on F1 alone: calls cost nothing",
        condition("learned", cost="benchmarks.papers.routing:Free"),
    ),
    "learned-dear": (
        "trained on F1 − 0.1 per call − 0.025 per move",
        condition("learned", cost="benchmarks.papers.routing:Dear"),
    ),
    "search-fixed": ("`search-router-hotpotqa` with all its searches", search("fixed")),
    "search-tiny": ("its verifier is the embedded tiny model, before training", search("untrained")),
    "search-learned": (
        "the same, trained on F1 − 0.02 per call − 0.005 per verdict",
        search_learned("dr_grpo"),
    ),
    "search-grpo": (
        "the same by GRPO, which divides by each group's deviation",
        search_learned("grpo"),
    ),
    "expert": ("the fewest moves that find the answer (it knows the hops)", condition("expert")),
}


def play(settings: ConditionSettings, seed: int, folder: Path) -> CellFigures:
    """Imitate the fixed order, train, and count the calls on questions about unseen names."""
    if settings["kind"].startswith("search-"):
        return searched(settings, seed, folder)
    if settings["kind"] in ("fixed", "expert"):
        router: Player = InOrder() if settings["kind"] == "fixed" else "scripted"
        return {"final": tested(settings, {"router": router, "*": "scripted"}), "curve": []}
    model = micro_model(folder / "model", ENV, seed, roles=("router",), **WORLD)
    pupil = Pupil(in_order, settings["slips"])
    sound(rollout(make(ENV, **WORLD), {"router": pupil, "*": "scripted"}, tasks=200, seed=seed))
    school(model, pupil.lessons, seed, settings["school"])
    if settings["kind"] == "imitated":
        return {"final": tested(settings, {"router": Path(model), "*": "scripted"}), "curve": []}
    package = __package__.partition(".")[0]
    rewards = ["rewards.routing:RoutedF1", settings["cost"], "rewards.rules:FormatReward"]
    where, figures = learn(
        ENV, model, seed, folder / "run", "calls",
        groups={"main": {}}, policies={"router": {"algorithm": {"name": "grpo"}, "learning": {"lr": 1e-3}}},
        map={"router": "router", "*": "scripted"}, steps=settings["steps"], tasks_per_step=8, k=8, minibatches=2,
        env={**WORLD, "size": 512, "reward": [f"{package}.{name}" for name in rewards]}, eval={"every": 10},
    )  # fmt: skip
    final = tested(settings, {"router": where / "router", "*": "scripted"})
    return {"final": final, "curve": figures["curve"]}


def searched(settings: ConditionSettings, seed: int, folder: Path) -> CellFigures:
    """Train and test the verifier of the search router."""
    rewards = [f"{__package__}.routing:{name}" for name in ("VerifierF1", "VerifierCost")]
    how = {**WORLD, "reward": rewards, "top_k": settings["top_k"]}
    seats: dict[str, Player | Path] = {"verifier": always_search, "*": "scripted"}
    curve: list[list[float]] = []
    if settings["kind"] == "search-untrained":
        seats["verifier"] = TINY
    elif settings["kind"] == "search-learned":  # with any algorithm
        where, figures = learn(
            SEARCH, "tiny", seed, folder / "run", "calls",
            groups={"main": {}}, map={"verifier": "verifier", "*": "scripted"},
            policies={"verifier": settings["policy"]}, steps=settings["steps"], tasks_per_step=8, k=8, minibatches=2,
            env={**WORLD, "size": 512, "reward": rewards, "args": {"top_k": settings["top_k"]}},
        )  # fmt: skip
        seats["verifier"], curve = where / "verifier", figures["curve"]
    scores = held_out(SEARCH, seats, settings["tests"], **how)
    return {"final": {name: scores[name] for name in SHOWN}, "curve": curve}


def tested(settings: ConditionSettings, seats: Mapping[str, Player | Path]) -> dict[str, float]:
    """Play the test tasks, and return the metrics."""
    scores = held_out(ENV, seats, settings["tests"], **WORLD)
    return {name: scores[name] for name in SHOWN}


PAPER = Paper(
    name="routing",
    **texts("routing"),
    conditions=CONDITIONS,
    claims=(
        Claim(
            says="the learned router spends fewer calls than the fixed order",
            better="learned",
            worse="fixed",
            less=True,
        ),
        Claim(says="at no less F1 (within 0.02)", better="learned", worse="fixed", metric="f1", margin=0.02),
        Claim(says="the price causes the saving", better="learned", worse="learned-free", less=True),
        Claim(
            says="the trained verifier spends fewer calls than the fixed order",
            better="search-learned",
            worse="search-fixed",
            less=True,
        ),
        Claim(
            says="at no less F1 (within 0.02)",
            better="search-learned",
            worse="search-fixed",
            metric="f1",
            margin=0.02,
        ),
        Claim(
            says="dividing by a group's deviation costs F1 (search router)",
            better="search-learned",
            worse="search-grpo",
            metric="f1",
        ),
        Claim(says="a price that is too high costs F1", better="learned", worse="learned-dear", metric="f1"),
    ),
    play=play,
    metric="calls",
    columns=("f1", "router_calls"),
)

if __name__ == "__main__":
    raise SystemExit(command(PAPER))
