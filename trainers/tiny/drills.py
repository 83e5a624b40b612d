"""Drills of the tiny model: read passages, answer from known steps, compare years, solve sums.

A drill makes a few lessons with a common beginning. Every lesson is a conversation, whose assistant turns the model
learns. Lessons from whole episodes are made in school.py.
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
    """Return lessons with simple questions about the same few passages. The passages do not answer all of them."""
    world = World("train", dice.below(4))
    near = dice.random() < 0.4
    place = dice.below(ENTITIES_PER_BLOCK)
    pairs = neighbours(world, dice.below(blocks)) if near else alike(world, dice, blocks, place)
    several = 1 + int(6 * dice.random() ** 2)  # often one passage, because reading is learned there first
    sample = dice.shuffled(pairs)[:several]
    titles = {passage["title"] for _, passage in sample}
    questions = [hop for entity, _ in sample for hop in entity_questions(entity, dice)]
    missing = [entity for entity, passage in pairs if passage["title"] not in titles]
    questions = dice.shuffled(questions)[:10]
    for entity in dice.shuffled(missing)[:3]:
        questions.append(dice.pick(entity_questions(entity, dice)))
    reader = dice.below(len(READERS))
    return [reader_lesson([passage for _, passage in sample], hop, reader) for hop in questions]


def reader_lesson(passages: Sequence[Mapping[str, str]], hop: Mapping[str, str], reader: int) -> Lesson:
    """Return a lesson in which one of the `READERS` answers a question, if the passages hold the answer."""
    env, role, asking, answer_text, not_found = READERS[reader]
    lines = "\n".join(f"{p['title']}: {p['text']}" for p in passages)
    answerable = any(p["title"] == hop["title"] for p in passages)
    return (
        {"role": "system", "content": system_text(env, role)},
        {"role": "user", "content": f"Passages:\n{lines}\n{asking.format(query=hop['question'])}"},
        {"role": "assistant", "content": answer_text.format(**hop) if answerable else not_found},
    )


def neighbours(world: World, number: int) -> list[tuple[Entity, dict[str, str]]]:
    """Return the entities of one block with their passages, which mention each other."""
    return list(zip(world.block(number).entities, block_passages(world, number), strict=True))


def alike(world: World, dice: Dice, blocks: int, place: int) -> list[tuple[Entity, dict[str, str]]]:
    """Return entities of one kind from several blocks, with their passages. Only the names tell the passages apart."""
    pairs = (neighbours(world, dice.below(blocks))[place] for _ in range(8))
    return list({entity.name: (entity, passage) for entity, passage in pairs}.values())


def deciding(dice: Dice, blocks: int) -> list[Lesson]:
    """Return lessons that answer a question from steps, or reply "unknown" if a needed step has no answer.

    In some lessons the answer is a random word that does not fit the question, so it can only be copied.
    """
    world, number = World("train", dice.below(4)), dice.below(blocks)
    return [decision(dice, row) for row in block_questions(world, number, dice.pick(("qa", "qa-single")))]


def comparing(dice: Dice, blocks: int) -> list[Lesson]:
    """Return lessons that tell which of two entities came first or last, from steps with both years."""
    world, place = World("train", dice.below(4)), dice.below(ENTITIES_PER_BLOCK - COMPANIES_PER_BLOCK)
    entities = [entity for entity, _ in alike(world, dice, blocks, place)]
    return [decision(dice, comparison(*dice.two(entities), dice)) for _ in range(8) if len(entities) > 1]


def decision(dice: Dice, row: JsonView) -> Lesson:
    """Return the lesson of one question, with its steps in the prompt."""
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
    """Return lessons that solve arithmetic problems step by step."""
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
"""Drills, each as often as its weight: `reading` has the weight 3, the others 1."""


@lru_cache(maxsize=64)
def system_text(env: str, role: str) -> str:
    """Return the system text of an environment's role, from the prompt set "short"."""
    workflow = spec(env).make_workflow(prompts="short")
    return next(r.system for r in workflow.told_roles() if r.name == role)
