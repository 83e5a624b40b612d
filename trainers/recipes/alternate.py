"""Alternating freezes: one policy learns at a time, `every` steps each, against teammates that stand still.

unitymas train ID --preset separate recipe=alternate recipe_args.every=5
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...agents.basics.hints import nearest
from ..config.choices import Count
from ..controller.step import Default

if TYPE_CHECKING:
    from ..controller.stage import Stage


@dataclass(frozen=True)
class Alternate(Default):
    every: Count = 10
    """Steps before the next policy's turn. Usual 5–20."""
    order: tuple[str, ...] = ()
    """Policies in turn. Empty: all policies that learn, in the order of the config."""

    def check(self, run: Stage) -> None:
        for policy in self.order:
            if policy not in run.algorithms:
                raise ValueError(
                    f"recipe_args.order: no policy {policy!r} learns; {nearest(policy, run.algorithms)}"
                )
        if len(self.order or run.algorithms) < 2:
            raise ValueError(
                "recipe 'alternate' needs two policies that learn; --preset separate gives each role one"
            )

    def trains(self, run: Stage) -> list[str]:
        order = self.order or tuple(run.algorithms)
        return [order[run.step // self.every % len(order)]]
