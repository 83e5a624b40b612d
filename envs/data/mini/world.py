"""Entities of the mini world: people, towns, works and companies, with their facts.

The world is a sequence of *blocks*. A block has eight entities that refer only to each other. It depends on (seed, split,
number of the block) alone, so a world of a million passages can be a stream. The worlds of the splits share no name. The
only random numbers are those of `random.random()` with a text as seed, which are the same in every process and every
version of Python.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

from . import words
from .words import NameWords

T = TypeVar("T")

PEOPLE_PER_BLOCK, TOWNS_PER_BLOCK, WORKS_PER_BLOCK, COMPANIES_PER_BLOCK = 3, 2, 2, 1
ENTITIES_PER_BLOCK = PEOPLE_PER_BLOCK + TOWNS_PER_BLOCK + WORKS_PER_BLOCK + COMPANIES_PER_BLOCK


@dataclass(frozen=True, slots=True)
class Town:
    """Town of the mini world."""

    name: str
    country: str
    river: str
    founded: int


@dataclass(frozen=True, slots=True)
class Person:
    """Person of the mini world."""

    name: str
    birthplace: Town
    home: Town
    """Town where the person lives. It is never the birthplace, so a reader can confuse the two."""
    born: int
    job: str


@dataclass(frozen=True, slots=True)
class Work:
    """Work of the mini world, with its creator."""

    name: str
    kind: str
    creator: Person
    sponsor: Person
    """Person to whom the work is dedicated: another person in the same passage, whom a reader can confuse with the creator."""
    year: int
    topic: str


@dataclass(frozen=True, slots=True)
class Company:
    """Company of the mini world."""

    name: str
    founder: Person
    head: Person
    seat: Town
    founded: int
    product: str


Entity = Town | Person | Work | Company


@dataclass(frozen=True, slots=True)
class Block:
    """Block of eight entities, which refer only to each other."""

    number: int
    towns: tuple[Town, ...]
    people: tuple[Person, ...]
    works: tuple[Work, ...]
    companies: tuple[Company, ...]

    @property
    def entities(self) -> tuple[Entity, ...]:
        """All eight entities of the block."""
        return (*self.towns, *self.people, *self.works, *self.companies)


class Dice(random.Random):
    """Random generator, seeded by a text. It draws with `random()` only, which is equal in all versions of Python."""

    def __init__(self, *name: object) -> None:
        super().__init__("/".join(map(str, ("mini", *name))))

    def below(self, bound: int) -> int:
        """Return a whole number from 0 to below `bound`."""
        return int(self.random() * bound)

    def pick(self, items: Sequence[T]) -> T:
        """Return one of the options."""
        return items[self.below(len(items))]

    def two(self, items: Sequence[T]) -> tuple[T, T]:
        """Return two different items."""
        first = self.below(len(items))
        second = (first + 1 + self.below(len(items) - 1)) % len(items)
        return items[first], items[second]

    def shuffled(self, items: Sequence[T]) -> list[T]:
        """Return the items in another order."""
        pool = list(items)
        for last in range(len(pool) - 1, 0, -1):
            other = self.below(last + 1)
            pool[last], pool[other] = pool[other], pool[last]
        return pool


@lru_cache(maxsize=64)
def _names(kind: str, split: str, seed: int) -> list[tuple[int, int]]:
    """Return the names of a kind that belong to a split, in the order of this seed."""
    lists: NameWords = getattr(words, kind)
    own = [
        (first, second)
        for first in range(len(lists.first))
        for second in range(len(lists.second))
        if lists.split_of(first, second) == split
    ]
    return Dice("names", kind, split, seed).shuffled(own)


def name_of(kind: str, split: str, seed: int, number: int) -> str:
    """Return a name of a kind by its number. After all names of two words, names have a third word, then a fourth …"""
    lists: NameWords = getattr(words, kind)
    pairs = _names(kind, split, seed)
    first, second = pairs[number % len(pairs)]
    name = [lists.first[first], lists.second[second]]
    more = number // len(pairs)
    while more:  # bijective numeration, so no two numbers give the same words
        more, digit = divmod(more - 1, len(lists.second))
        name.append(lists.second[digit])
    return " ".join(name)


@dataclass(frozen=True, slots=True)
class World:
    """World of one split under one seed. `block(i)` makes any part of it."""

    split: str
    seed: int = 0

    def __post_init__(self) -> None:
        if self.split not in words.SPLITS:
            raise ValueError(
                f"the mini world has no split {self.split!r}; its splits are {', '.join(words.SPLITS)}"
            )

    def _name(self, kind: str, number: int) -> str:
        return name_of(kind, self.split, self.seed, number)

    def block(self, number: int) -> Block:
        """Return block `number` of this world."""
        dice = Dice("block", self.split, self.seed, number)
        towns = self._towns(number, dice)
        people = self._people(number, towns, dice)
        works = self._works(number, people, dice)
        return Block(number, towns, people, works, self._companies(number, people, towns, dice))

    def _towns(self, number: int, dice: Dice) -> tuple[Town, ...]:
        countries, rivers = dice.two(words.COUNTRIES), dice.two(words.RIVERS)
        return tuple(
            Town(
                self._name("TOWNS", number * TOWNS_PER_BLOCK + i),
                countries[i],
                rivers[i],
                1850 + dice.below(50),
            )
            for i in range(TOWNS_PER_BLOCK)
        )

    def _people(self, number: int, towns: tuple[Town, ...], dice: Dice) -> tuple[Person, ...]:
        born = dice.shuffled(range(1890, 1950))[:PEOPLE_PER_BLOCK]
        people = []
        for i in range(PEOPLE_PER_BLOCK):
            birthplace, home = dice.two(towns)
            name = self._name("PEOPLE", number * PEOPLE_PER_BLOCK + i)
            people.append(Person(name, birthplace, home, born[i], dice.pick(words.JOBS)))
        return tuple(people)

    def _works(self, number: int, people: tuple[Person, ...], dice: Dice) -> tuple[Work, ...]:
        works: list[Work] = []
        for i in range(WORKS_PER_BLOCK):
            creator, sponsor = dice.two(people)
            year = creator.born + 20 + dice.below(30)
            year += bool(works and works[-1].year == year)  # two works of a block never have the same year
            name = "The " + self._name("WORKS", number * WORKS_PER_BLOCK + i)
            works.append(
                Work(name, dice.pick(words.WORK_KINDS), creator, sponsor, year, dice.pick(words.TOPICS))
            )
        return tuple(works)

    def _companies(
        self, number: int, people: tuple[Person, ...], towns: tuple[Town, ...], dice: Dice
    ) -> tuple[Company, ...]:
        made = []
        for i in range(COMPANIES_PER_BLOCK):
            founder, head = dice.two(people)
            name = self._name("COMPANIES", number * COMPANIES_PER_BLOCK + i)
            founded = founder.born + 20 + dice.below(20)
            made.append(Company(name, founder, head, dice.pick(towns), founded, dice.pick(words.PRODUCTS)))
        return tuple(made)
