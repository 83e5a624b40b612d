"""Rewards of planning games: those of PettingLLMs, without the parts that could be exploited.

A turn consists of the acts since the previous move of the world. Each of its acts earns `alpha` times the reward of
the team, and pays for the steps that its own proposal would have wasted:

    step       for each move, refused moves included; a turn without a move counts as one step
    invalid    for a refused move
    shaping    Φ(after) − Φ(before), where Φ = −(work left) × weight
    goal       for a solved game
    shortest   for a game solved in the smallest number of steps
    fail       for a game that ran out of steps
    own        for each step that the act's own proposal loses against a shortest solution

No loop pays. `shaping` sums to zero along any cycle, so a box that is pushed off its goal gives back what it earned.
`step` is negative, and `own` is never positive.

The published reward can be exploited in two ways. Its shaping is γΦ' − Φ with γ = 0.99 and Φ < 0, which pays
(1 − γ)|Φ| for each step in place. And it pays a proposal for the progress that it *would* have made: one role
proposes well, and its partner walks back.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

from ..envs.core.ledger import Credit, Rule
from ..envs.core.records import EMPTY
from ..envs.core.tasks import Task
from ..envs.core.trace import Trace
from ..envs.core.workflow import Node
from ..envs.workflows.games import GAMES
from ..envs.workflows.games.game import AnyGame
from ..envs.workflows.games.simulator import walk


@dataclass(frozen=True, slots=True)
class Scale:
    """Amounts of one game, by component."""

    step: float = -0.01
    invalid: float = -0.1
    shaping: float = 0.1
    goal: float = 2.0
    shortest: float = 0.5
    fail: float = -1.0
    own: float = -0.1
    """Amount for each wasted step."""
    most: int = 5
    """Largest number of wasted steps that count."""


SCALES = {
    "planpath": Scale(goal=1.0, shaping=1.0),
    "sokoban": Scale(goal=10.0, fail=-5.0, invalid=-0.05),
    "sudoku": Scale(invalid=-0.5),
    "blocksworld": Scale(),
    "eight-queens": Scale(invalid=-0.5, fail=-0.5),
}


class GameCredit(Rule):
    """Rule with the rewards of the module's docstring, and the metrics `solved`, `steps` and `optimal_ratio`."""

    name = "game"

    def __init__(self, alpha: float = 1.0, **amounts: float) -> None:
        self.alpha, self.amounts = alpha, amounts
        replace(Scale(), **amounts)  # type: ignore[arg-type]  # an unknown name is an error at once

    def scale(self, game: str) -> Scale:
        """Return the amounts of a game, with those that this rule sets itself."""
        return replace(SCALES[game], **self.amounts)  # type: ignore[arg-type]

    def on_node(self, trace: Trace, node: Node, task: Task) -> Iterable[Credit]:
        """Return the credits that are known once the round of this node is answered."""
        if node.kind != "use" or node.tool != "world" or node.error is not None:
            return
        args = node.args or EMPTY
        went = node.result
        game, scale = GAMES[args["game"]], self.scale(args["game"])
        before = game.state(args["state"])
        team = dense(scale, game, before, game.state(went["state"]), went["steps"], bool(went["refused"]))
        if went["solved"]:
            team["goal"] = scale.goal
            taken = sum(use.result["steps"] for use in trace.uses("world") if use.round <= node.round)
            team["shortest"] = scale.shortest if taken <= optimum(task) else 0.0
        for act in turn_of(trace, node):
            for component, amount in team.items():
                if amount:
                    yield Credit(act.id, component, self.alpha * amount)
            if act.role in args["proposals"]:
                lost = waste(game, before, args["proposals"][act.role], scale.most)
                yield Credit(act.id, "own", scale.own * lost)

    def on_end(self, trace: Trace, task: Task) -> Iterable[Credit]:
        """Return the credits that are known when the episode is over."""
        made = trace.uses("world")
        if str(trace.ended) == "terminal" and made and not made[-1].result["solved"]:
            fail = self.scale(task.view["game"]).fail
            return [Credit(act.id, "fail", self.alpha * fail) for act in turn_of(trace, made[-1])]
        return ()

    def metrics(self, trace: Trace, task: Task) -> dict[str, float]:
        """Return the figures to report."""
        made = [use for use in trace.uses("world") if use.error is None]
        solved = bool(made) and bool(made[-1].result["solved"])
        steps = sum(use.result["steps"] for use in made)
        return {
            "solved": float(solved),
            "steps": float(steps),
            "optimal_ratio": optimum(task) / steps if solved else 0.0,
        }


def dense(
    scale: Scale, game: AnyGame, before: Hashable, after: Hashable, steps: int, refused: bool
) -> dict[str, float]:
    """Return the amounts that every turn earns the team, also the turns that do not end the game."""
    return {
        "step": scale.step * steps,
        "invalid": scale.invalid * refused,
        "shaping": scale.shaping * (game.left(before) - game.left(after)),
    }


def waste(game: AnyGame, state: Hashable, moves: Sequence[str], most: int) -> int:
    """Return how many steps these moves lose against a shortest solution, at most `most`.

    Moves after which the game cannot be solved lose `most` steps.
    """
    best = game.best(state)
    if best is None:
        return 0  # the game could not be solved before these moves
    after, steps, _ = walk(game, state, moves)
    rest = game.best(after)
    return most if rest is None else min(most, steps + len(rest) - len(best))


def turn_of(trace: Trace, world: Node) -> list[Node]:
    """Return the acts between the previous move of the world and this one (`world`)."""
    before = max((use.round for use in trace.uses("world") if use.round < world.round), default=-1)
    return [act for act in trace.acts() if before < act.round < world.round]


def optimum(task: Task) -> int:
    """Return the length of a shortest solution: from the task's reference, or else computed."""
    known = task.reference
    if known.get("solution"):
        return len(known["solution"])
    game = GAMES[task.view["game"]]
    return len(game.best(game.state(task.view["start"])) or ())
