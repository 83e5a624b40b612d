"""Math word problems of one or two steps, with exact integer answers between 0 and 99.

Each pair of a template and its numbers belongs to one split. Single facts (7 + 8 = 15) occur in all splits. The reference
contains the solution, with one line for each step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from ..row_schemas import MathRow
from . import words
from .words import split_of_combination
from .world import Dice

ITEMS = ("apples", "books", "coins", "cards", "pens", "eggs", "cups", "stamps", "shells", "plums")
LARGEST = 99


@dataclass(frozen=True, slots=True)
class Template:
    """Template of a story. `steps` are the operators between the value so far and the next number."""

    name: str
    stories: tuple[str, ...]
    """Wordings of the story. {p} and {q} are people, {item} is a thing, {0} {1} {2} are the numbers."""
    steps: str
    bounds: tuple[tuple[int, int], ...]


SMALL, UP_TO_TWENTY = (2, 9), (2, 20)
TEMPLATES = (
    Template("gain", ("{p} has {0} {item}. {q} gives {p} {1} more. How many {item} does {p} have now?",
                      "There are {0} {item} in a box. {p} puts {1} more in. How many {item} are in the box?"), "+", (UP_TO_TWENTY, UP_TO_TWENTY)),
    Template("loss", ("{p} has {0} {item} and gives {1} to {q}. How many {item} are left?",
                      "{p} had {0} {item}. {1} of them were lost. How many {item} does {p} have now?"), "-", ((5, 40), UP_TO_TWENTY)),
    Template("packs", ("{p} buys {0} packs of {1} {item}. How many {item} are that?",
                       "Each of {0} boxes holds {1} {item}. How many {item} are there?"), "*", (SMALL, SMALL)),
    Template("gain-loss", ("{p} has {0} {item}, finds {1} more and gives {2} to {q}. How many {item} are left?",
                           "A box holds {0} {item}. {p} adds {1} and {q} takes {2}. How many {item} are in the box?"), "+-", (UP_TO_TWENTY, UP_TO_TWENTY, SMALL)),
    Template("loss-gain", ("{p} has {0} {item}, gives {1} to {q} and then buys {2}. How many {item} does {p} have now?",
                           "From {0} {item} {p} takes {1}, then {q} adds {2}. How many {item} are there?"), "-+", ((10, 40), SMALL, UP_TO_TWENTY)),
    Template("packs-gain", ("{p} buys {0} packs of {1} {item} and has {2} more at home. How many {item} does {p} have?",
                            "There are {0} boxes of {1} {item} and {2} single ones. How many {item} are there?"), "*+", (SMALL, SMALL, UP_TO_TWENTY)),
    Template("packs-loss", ("{p} buys {0} packs of {1} {item} and gives {2} to {q}. How many {item} are left?",
                            "Of {0} boxes of {1} {item}, {2} {item} are broken. How many {item} are good?"), "*-", (SMALL, SMALL, SMALL)),
    Template("gain-packs", ("{p} puts {0} and then {1} {item} in each box. How many {item} are in {2} boxes?",
                            "Every day {p} sells {0} {item} and {q} sells {1}. How many {item} do they sell in {2} days?"), "+*", (SMALL, SMALL, SMALL)),
)  # fmt: skip


def working(steps: str, numbers: tuple[int, ...]) -> list[tuple[str, int]]:
    """Return each step as text ("7 + 5 = 12") with its value."""
    value, lines = numbers[0], []
    for operator, number in zip(steps, numbers[1:], strict=True):
        after = {"+": value + number, "-": value - number, "*": value * number}[operator]
        lines.append((f"{value} {operator} {number} = {after}", after))
        value = after
    return lines


@lru_cache(maxsize=64)
def combinations(template: Template, split: str) -> list[tuple[int, ...]]:
    """Return all numbers of a template that belong to a split, with every step between 0 and 99."""
    every: list[tuple[int, ...]] = [()]
    for low, high in template.bounds:
        every = [(*head, value) for head in every for value in range(low, high + 1)]
    return [
        numbers
        for numbers in every
        if all(0 <= value <= LARGEST for _, value in working(template.steps, numbers))
        and split_of_combination(template.name, numbers) == split
    ]


def sums(split: str, count: int, seed: int = 0) -> Iterator[MathRow]:
    """Yield the first `count` math problems of a split. Numbers repeat only after all have been used."""
    pools = [Dice("sums", t.name, split, seed).shuffled(combinations(t, split)) for t in TEMPLATES]
    for number in range(count):
        turn, which = divmod(number, len(TEMPLATES))
        template, numbers = TEMPLATES[which], pools[which][turn % len(pools[which])]
        dice = Dice("sum", split, seed, number)
        p, q = dice.two(words.PEOPLE.first)
        lines = working(template.steps, numbers)
        yield {
            "id": f"mini-math-{split}-{number}",
            "problem": dice.pick(template.stories).format(*numbers, p=p, q=q, item=dice.pick(ITEMS)),
            "answer": str(lines[-1][1]),
            "solution": ". ".join(line for line, _ in lines) + ".",
            "steps": [line for line, _ in lines],
        }
