"""Skills of the embedded tiny model (or another) on the mini world, in two tables: whole teams, and single skills.

    python -m unitymas.benchmarks.tiny_model [MODEL] [--tasks 128]

All tests are on the validation world, whose names are in no training text. A team plays every role of an environment,
greedily and by sampling. A skill is one kind of drill, in which the whole reply must be right.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from transformers import AutoTokenizer

from ..agents import model_path
from ..agents.basics.json_types import JsonObject
from ..agents.engines.sampling import SamplingParams
from ..agents.engines.torch.torch_engine import TorchEngine
from ..agents.llm import LLMPolicy
from ..agents.model.weights import load_model
from ..agents.text.tokenizing import Tokenizer
from ..envs.core.drivers import rollout
from ..envs.data.mini.questions import comparison, entity_questions
from ..envs.data.mini.world import COMPANIES_PER_BLOCK, ENTITIES_PER_BLOCK, Dice, World
from ..envs.registry import make, spec
from ..envs.workflows.parts import UNKNOWN
from ..trainers.tiny.drills import Lesson, alike, decision, neighbours, reader_lesson, solving

TEAMS: dict[str, JsonObject] = {
    "mask-nq": {"top_k": 1},
    "mask-hotpotqa": {"top_k": 1},
    "rag-nq": {"top_k": 1},
    "rag-hotpotqa": {"top_k": 1},
    "rag-evidence-hotpotqa": {"top_k": 1},
    "code-deepcoder": {},
    "math-deepscaler": {},
}
WORLD, BLOCKS = World("validation"), 64


def reading(passages: int, dice: Dice, *, crowd: bool = False, gone: bool = False) -> Iterator[Lesson]:
    """Yield lessons with a question about one of several passages: of one block, or with `crowd` of one kind of entity.

    With `gone`, no passage answers the question.
    """
    while True:
        block, place = dice.below(BLOCKS), dice.below(ENTITIES_PER_BLOCK)
        told_of = dice.shuffled(alike(WORLD, dice, BLOCKS, place) if crowd else neighbours(WORLD, block))
        if len(told_of) <= passages:  # some kinds have few different entities
            continue
        entity, _ = told_of[passages if gone else dice.below(passages)]
        hop = dice.pick(entity_questions(entity, dice))
        yield reader_lesson([passage for _, passage in told_of[:passages]], hop, reader=0)


def comparing(dice: Dice) -> Iterator[Lesson]:
    """Yield lessons that tell which of two entities came first or last, from both years."""
    while True:
        told_of = [
            e for e, _ in alike(WORLD, dice, BLOCKS, dice.below(ENTITIES_PER_BLOCK - COMPANIES_PER_BLOCK))
        ]
        lesson = decision(dice, comparison(*dice.two(told_of), dice))
        if UNKNOWN not in lesson[-1]["content"]:
            yield lesson


def skills(dice: Dice) -> dict[str, Iterator[Lesson]]:
    """Return each drill with its name."""
    return {
        **{f"reads {n} of one block": reading(n, dice) for n in (1, 2, 4)},
        **{f"reads {n} of one kind": reading(n, dice, crowd=True) for n in (2, 4, 6)},
        "says that the answer is not there": reading(1, dice, gone=True),
        "tells which of two years is earlier": comparing(dice),
        "does sums": iter(solving(dice, BLOCKS, "validation", 1024)),
    }


def right(engine: TorchEngine, tokenizer: Tokenizer, lessons: Sequence[Lesson]) -> float:
    """Return the share of lessons whose last turn the model replies exactly."""
    prompts = [
        tokenizer.apply_chat_template(list(lesson[:-1]), add_generation_prompt=True)["input_ids"]
        for lesson in lessons
    ]
    replies = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=48))
    texts = [tokenizer.decode(reply.ids, skip_special_tokens=True).strip() for reply in replies]
    hits: int = sum(
        text == lesson[-1]["content"].strip() for text, lesson in zip(texts, lessons, strict=True)
    )
    return hits / len(lessons)


def main(argv: Sequence[str] | None = None) -> int:
    """Read the arguments, and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="tiny", help="tiny, or a model directory")
    parser.add_argument("--tasks", type=int, default=128)
    args = parser.parse_args(argv)
    where = Path(model_path(args.model))
    tokenizer = AutoTokenizer.from_pretrained(where)
    engine = TorchEngine(load_model(where), tokenizer, slots=96)
    print(f"{'environment':24} {'':10} {'greedy':>7} {'legal':>7} {'at 0.8':>7}")
    for env, how in TEAMS.items():
        figures = []
        for temperature in (0.0, 0.8):
            sampling = SamplingParams(temperature=temperature, max_tokens=96)
            team = {"*": LLMPolicy(engine, tokenizer, sampling=sampling)}
            traces = rollout(make(env, split="validation", data="mini", size=args.tasks, **how), team, k=1)
            for name in (spec(env).headline, "format_ok"):
                figures.append(sum(trace.metrics.get(name, 0.0) for trace in traces) / len(traces))
        print(
            f"{env:24} {spec(env).headline:10} {figures[0]:7.3f} {figures[1]:7.1%} {figures[2]:7.3f}",
            flush=True,
        )
    for name, lessons in skills(Dice("probe", 1)).items():
        print(f"{name:42} {right(engine, tokenizer, list(islice(lessons, args.tasks))):7.1%}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
