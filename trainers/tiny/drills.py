"""Drills of the tiny model: reading passages, deciding from known steps, comparing years, doing sums.

A drill makes a few lessons that begin alike. Every lesson is a conversation; the assistant's turns in it are what is
learned. Whole episodes are in tiny_school.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from ...agents.basics.json_types import JsonView
from ...envs.data.mini import words
from ...envs.data.mini.passages import block_passages
from ...envs.data.mini.questions import block_questions, comparison, entity_questions
from ...envs.data.mini.sums import sums
from ...envs.data.mini.world import COMPANIES_PER_BLOCK, ENTITIES_PER_BLOCK, Dice, Entity, World
from ...envs.registry import spec
from ...envs.workflows.mask import NOTHING, Step, told
from ...envs.workflows.parts import UNKNOWN

Lesson = tuple[dict[str, str], ...]

ANY_WORD = tuple(
    str(word)
    for words_of in (words.COUNTRIES, words.RIVERS, words.JOBS, words.PRODUCTS, words.TOPICS, words.WORK_KINDS,
                     words.YEARS, range(100), words.PEOPLE.first, words.WORKS.first, words.COMPANIES.first)
    for word in words_of
)  # fmt: skip


READERS = (
    ("mask-hotpotqa", "summarizer", "Query: {query}", "<evidence>{answer}</evidence>", NOTHING),
    ("rag-evidence-hotpotqa", "evidence", "Question: {query}\nQuery: {query}",
     "<sub_evidence>{answer}</sub_evidence>", f"<sub_evidence>{UNKNOWN}</sub_evidence>"),
)  # fmt: skip


def reading(dice: Dice, blocks: int) -> list[Lesson]:
    """Simple questions about the same few passages, a lesson each; some cannot be answered."""
    world = World("train", dice.below(4))
    near = dice.random() < 0.4
    place = dice.below(ENTITIES_PER_BLOCK)
    told_of = neighbours(world, dice.below(blocks)) if near else alike(world, dice, blocks, place)
    several = 1 + int(6 * dice.random() ** 2)  # one passage often: there reading is learned first
    here = dice.shuffled(told_of)[:several]
    titles = {passage["title"] for _, passage in here}
    asked = [hop for entity, _ in here for hop in entity_questions(entity, dice)]
    missing = [entity for entity, passage in told_of if passage["title"] not in titles]
    asked = dice.shuffled(asked)[:10]
    for entity in dice.shuffled(missing)[:3]:
        asked.append(dice.pick(entity_questions(entity, dice)))
    reader = dice.below(len(READERS))
    return [reader_lesson([passage for _, passage in here], hop, reader) for hop in asked]


def reader_lesson(passages: Sequence[Mapping[str, str]], hop: Mapping[str, str], reader: int) -> Lesson:
    """One question put to one of the `READERS`, with its answer if the passages hold it."""
    env, role, asking, answer_text, not_found = READERS[reader]
    told = "\n".join(f"{p['title']}: {p['text']}" for p in passages)
    there = any(p["title"] == hop["title"] for p in passages)
    return (
        {"role": "system", "content": system_text(env, role)},
        {"role": "user", "content": f"Passages:\n{told}\n{asking.format(query=hop['question'])}"},
        {"role": "assistant", "content": answer_text.format(**hop) if there else not_found},
    )


def neighbours(world: World, number: int) -> list[tuple[Entity, dict[str, str]]]:
    """The entities of one block with their passages: they speak of each other."""
    return list(zip(world.block(number).entities, block_passages(world, number), strict=True))


def alike(world: World, dice: Dice, blocks: int, place: int) -> list[tuple[Entity, dict[str, str]]]:
    """Entities of one kind from several blocks: only the name tells which passage answers."""
    pairs = (neighbours(world, dice.below(blocks))[place] for _ in range(8))
    return list({entity.name: (entity, passage) for entity, passage in pairs}.values())


def deciding(dice: Dice, blocks: int) -> list[Lesson]:
    """Questions with steps that are known in part: the answer, or unknown.

    In some, the answer is a word that does not fit the question: it can only be copied.
    """
    world, number = World("train", dice.below(4)), dice.below(blocks)
    return [decision(dice, row) for row in block_questions(world, number, dice.pick(("qa", "qa-single")))]


def comparing(dice: Dice, blocks: int) -> list[Lesson]:
    """Questions which of two came first or last, when the steps tell both years."""
    world, place = World("train", dice.below(4)), dice.below(ENTITIES_PER_BLOCK - COMPANIES_PER_BLOCK)
    told_of = [entity for entity, _ in alike(world, dice, blocks, place)]
    return [decision(dice, comparison(*dice.two(told_of), dice)) for _ in range(8) if len(told_of) > 1]


def decision(dice: Dice, row: JsonView) -> Lesson:
    """One question with its steps."""
    question, reply = row["question"], row["answers"][0]
    steps = [(hop["question"], hop["answer"]) for hop in row["hops"]]
    if reply == steps[-1][1] and " or " not in question and dice.random() < 0.4:
        reply = dice.pick(ANY_WORD)
        steps[-1] = (steps[-1][0], reply)
    known = [dice.random() < 0.85 for _ in steps]
    steps = [(q, a if k else UNKNOWN) for (q, a), k in zip(steps, known, strict=True)]
    if dice.random() < 0.3:
        steps.insert(dice.below(len(steps) + 1), (question, dice.pick((UNKNOWN, NOTHING))))
    if dice.random() < 0.3:
        steps = dice.shuffled(steps)
    answer = reply if all(known) else UNKNOWN
    return (
        {"role": "system", "content": system_text("mask-hotpotqa", "answerer")},
        {"role": "user", "content": f"Steps:\n{told([Step(*step) for step in steps])}\nQuestion: {question}"},
        {"role": "assistant", "content": f"<final_answer>{answer}</final_answer>"},
    )


def solving(dice: Dice, blocks: int, split: str = "train", count: int = 16) -> list[Lesson]:
    """Problems, each with its working."""
    system = {"role": "system", "content": system_text("math-deepscaler", "solver")}
    problems = sums(split, count, dice.below(1 << 30))
    return [
        (
            system,
            {"role": "user", "content": f"Problem: {row['problem']}"},
            {
                "role": "assistant",
                "content": f"<solution>{row['solution']}</solution><answer>{row['answer']}</answer>",
            },
        )
        for row in problems
    ]


DRILLS = (reading,) * 3 + (deciding, comparing, solving)
"""Drills to draw from; one that is listed three times is drawn three times as often."""


@lru_cache(maxsize=64)
def system_text(env: str, role: str) -> str:
    """The system text of a role of an environment."""
    workflow = spec(env).make_workflow(prompts="short")
    return next(r.system for r in workflow.told_roles() if r.name == role)
