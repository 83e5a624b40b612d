"""Questions about the mini world: with one hop, with two hops over a bridge, and comparisons.

A *relation* is a question about one kind of entity. A phrase such as "the founder of …" can name its answer. A bridge
question asks a relation about such a phrase. `hops`, a reference field for experts, lists the simple questions that lead
to the answer, each with its answer and the title of its passage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ..row_schemas import QaRow, Question
from .world import Block, Company, Dice, Entity, Person, Town, Work, World

QUESTIONS_PER_BLOCK = 8
MIXES = {"qa": "SBCBSBCB", "qa-single": "SSSSSSSS", "qa-multi": "BCBCBBCB"}
"""Kinds of the eight questions of a block, by data set: S for single, B for bridge, C for comparison."""


@dataclass(frozen=True, slots=True)
class Relation:
    """Relation: a question about one kind of entity."""

    of: type
    asks: tuple[str, ...]
    """Wordings of the question. `{x}` is the entity, or a phrase for it."""
    answer: Callable[[Any], Any]
    """Function that returns the answer: an entity or a plain value."""
    phrase: str | None = None
    """Phrase for the answer that does not contain its name. None: there is no such phrase."""


RELATIONS = (
    Relation(Person, ("Where was {x} born?", "What is the birthplace of {x}?"), lambda p: p.birthplace, "the birthplace of {x}"),
    Relation(Person, ("Where does {x} live?", "In which town does {x} live?"), lambda p: p.home, "the home town of {x}"),
    Relation(Person, ("When was {x} born?", "In which year was {x} born?"), lambda p: p.born),
    Relation(Person, ("What is the job of {x}?", "What does {x} do for a living?"), lambda p: p.job),
    Relation(Town, ("In which country is {x}?", "Which country does {x} belong to?"), lambda t: t.country),
    Relation(Town, ("Which river flows through {x}?", "On which river does {x} lie?"), lambda t: t.river),
    Relation(Town, ("When was {x} founded?", "In which year was {x} founded?"), lambda t: t.founded),
    Relation(Work, ("Who made {x}?", "Who is the creator of {x}?"), lambda w: w.creator, "the creator of {x}"),
    Relation(Work, ("To whom is {x} dedicated?", "Who is honoured with {x}?"), lambda w: w.sponsor, "the person honoured with {x}"),
    Relation(Work, ("When was {x} made?", "In which year was {x} made?"), lambda w: w.year),
    Relation(Work, ("What is {x} about?", "What does {x} tell of?"), lambda w: w.topic),
    Relation(Company, ("Who founded {x}?", "Who is the founder of {x}?"), lambda c: c.founder, "the founder of {x}"),
    Relation(Company, ("Who leads {x}?", "Who is the head of {x}?"), lambda c: c.head, "the head of {x}"),
    Relation(Company, ("Where is {x} based?", "In which town is {x} based?"), lambda c: c.seat, "the town where {x} is based"),
    Relation(Company, ("What does {x} make?", "What does {x} sell?"), lambda c: c.product),
    Relation(Company, ("When was {x} founded?", "In which year was {x} founded?"), lambda c: c.founded),
)  # fmt: skip

COMPARISONS: dict[type, tuple[tuple[str, str, str], ...]] = {
    Person: (
        ("Who was born earlier, {a} or {b}?", "When was {x} born?", "first"),
        ("Who was born later, {a} or {b}?", "When was {x} born?", "last"),
        ("Who is older, {a} or {b}?", "In which year was {x} born?", "first"),
        ("Who is younger, {a} or {b}?", "In which year was {x} born?", "last"),
    ),
    Work: (
        ("Which was made earlier, {a} or {b}?", "When was {x} made?", "first"),
        ("Which was made later, {a} or {b}?", "When was {x} made?", "last"),
    ),
    Town: (
        ("Which town is older, {a} or {b}?", "When was {x} founded?", "first"),
        ("Which town is younger, {a} or {b}?", "When was {x} founded?", "last"),
    ),
}
"""Comparisons for each kind of entity: the question, the question about each of the two, and which year wins."""


def _text(value: object) -> str:
    return str(value.name if hasattr(value, "name") else value)


def _hop(question: str, answer: object, title: str) -> dict[str, str]:
    return {"question": question, "answer": _text(answer), "title": title}


def _row(question: str, answer: str, hops: list[dict[str, str]]) -> Question:
    return {
        "question": question,
        "answers": [answer],
        "supporting": [hop["title"] for hop in hops],
        "hops": hops,
    }


def entity_questions(entity: Entity, dice: Dice) -> list[dict[str, str]]:
    """Return every simple question about one entity, each in one of its wordings."""
    return [
        _hop(dice.pick(relation.asks).format(x=entity.name), relation.answer(entity), entity.name)
        for relation in RELATIONS
        if isinstance(entity, relation.of)
    ]


def _single(block: Block, dice: Dice) -> Iterator[Question]:
    pairs = [(r, e) for r in RELATIONS for e in block.entities if isinstance(e, r.of)]
    for relation, entity in dice.shuffled(pairs):
        question = dice.pick(relation.asks).format(x=entity.name)
        answer = _text(relation.answer(entity))
        yield _row(question, answer, [_hop(question, answer, entity.name)])


def _bridges(block: Block, dice: Dice) -> Iterator[Question]:
    chains = [
        (inner, entity, outer)
        for inner in RELATIONS
        if inner.phrase
        for entity in block.entities
        if isinstance(entity, inner.of)
        for outer in RELATIONS
        if isinstance(inner.answer(entity), outer.of)
    ]
    for inner, entity, outer in dice.shuffled(chains):
        bridge: Entity = inner.answer(entity)
        assert inner.phrase is not None
        ask = dice.pick(outer.asks)
        answer = _text(outer.answer(bridge))
        hops = [
            _hop(dice.pick(inner.asks).format(x=entity.name), bridge, entity.name),
            _hop(ask.format(x=bridge.name), answer, bridge.name),
        ]
        yield _row(ask.format(x=inner.phrase.format(x=entity.name)), answer, hops)


def _year(entity: Entity) -> int:
    if isinstance(entity, Person):
        return entity.born
    return entity.year if isinstance(entity, Work) else entity.founded


def comparison(a: Entity, b: Entity, dice: Dice) -> Question:
    """Return a question which of two entities of a kind came first or last. Their years must differ."""
    question, each, wins = dice.pick(COMPARISONS[type(a)])
    first, last = sorted((a, b), key=_year)
    hops = [_hop(each.format(x=e.name), _year(e), e.name) for e in (a, b)]
    return _row(question.format(a=a.name, b=b.name), (first if wins == "first" else last).name, hops)


def _comparisons(block: Block, dice: Dice) -> Iterator[Question]:
    pairs = [
        (a, b)
        for kind in COMPARISONS
        for a in block.entities
        for b in block.entities
        if isinstance(a, kind) and isinstance(b, kind) and _year(a) != _year(b)
    ]
    asked = set()
    for a, b in dice.shuffled(pairs):
        if (b.name, a.name) in asked:
            continue
        asked.add((a.name, b.name))
        yield comparison(a, b, dice)


def block_questions(world: World, number: int, kind: str = "qa") -> list[QaRow]:
    """Return the eight questions of one block."""
    dice = Dice("questions", kind, world.split, world.seed, number)
    block = world.block(number)
    makers = {"S": _single(block, dice), "B": _bridges(block, dice), "C": _comparisons(block, dice)}
    return [
        {"id": f"mini-{kind}-{world.split}-{number * QUESTIONS_PER_BLOCK + i}", **next(makers[letter])}
        for i, letter in enumerate(MIXES[kind])
    ]


def questions(kind: str, split: str, count: int, seed: int = 0) -> Iterator[QaRow]:
    """Yield the first `count` questions about a split's world."""
    world = World(split, seed)
    for number in range(-(-count // QUESTIONS_PER_BLOCK)):
        left = count - number * QUESTIONS_PER_BLOCK
        yield from block_questions(world, number, kind)[:left]
