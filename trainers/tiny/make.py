"""Training of the embedded tiny model, from random weights, on one laptop core.

    python -m unitymas.trainers.tiny.make --out agents/tiny --seed 0

The recipe has four parts. Without any one of them, the model did not learn to read in the same time:

- *Induction first.* A small model that trains on questions alone never learns to copy a name from a passage. So it first
  trains on random tokens: it finds the earlier place of a token and predicts the token that followed there.
- *One head attends to the previous token.* Induction needs two attention heads in sequence, and each is useless without
  the other. From random weights, copying is not learned within 4.5M tokens. If one head of the first layer starts as one
  that attends to the previous token (`look_back`), copying is learned after 1.3M tokens. If both heads are set by hand, the
  model copies at once, but does not learn to read.
- *Muon* trains the matrices. With AdamW alone, neither copying nor reading is learned in the same time.
- *Prompts are trained too*, with a smaller weight (`--context`): passages show which words are towns, years and names. From
  replies alone, reading does not begin within a million tokens.

Some words occur only in names of the validation and test splits. Lessons exclude these words from the scores, so that
training on lessons does not lower their output weights. The model learns to copy them from random tokens, which are a part
of every batch.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, count, islice
from os.path import commonprefix
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from ...agents.basics.json_types import JsonView
from ...agents.model.attention import pack
from ...agents.model.llama import Llama
from ...agents.model.weights import from_config, load_model, save_model
from ...agents.text.tokenizing import Tokenizer
from ...envs.data.mini import words
from ...envs.data.mini.sums import sums
from ...envs.registry import list_envs, spec
from ..config.group_settings import faster_precision
from .drills import Lesson
from .school import School
from .tokenizer import as_transformers, build, grow

SHAPE = {
    "hidden_size": 192, "intermediate_size": 256, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 2048,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "tie_word_embeddings": True,
}  # fmt: skip


@dataclass
class Example:
    """Token ids and the weight of each in the loss. `of_world` is False for random tokens and sums."""

    ids: list[int]
    weight: list[float]
    of_world: bool = True


# words -------------------------------------------------------------------------------------------------


def world_words() -> list[str]:
    """Return every word and number of the mini world, with a space before it."""
    names = [
        w
        for kind in (words.PEOPLE, words.TOWNS, words.WORKS, words.COMPANIES)
        for w in (*kind.first, *kind.second)
    ]
    values = [*words.COUNTRIES, *words.RIVERS, *words.JOBS, *words.PRODUCTS, *words.WORK_KINDS, *words.TOPICS]
    numbers = [str(n) for n in (*range(100), *words.YEARS)]
    steps = [f"t{n}" for n in range(1, 10)]
    return list(dict.fromkeys(f" {word}" for word in (*names, *values, *numbers, *steps)))


def held_out_words() -> list[str]:
    """Return the words that no name of the train split contains, with a space before each."""
    kinds = (words.PEOPLE, words.TOWNS, words.WORKS, words.COMPANIES)
    return [f" {word}" for kind in kinds for word in kind.second[len(kind.second) - 2 * kind.held_out :]]


def make_tokenizer(lessons: Sequence[Lesson]) -> Tokenizer:
    """Return a tokenizer for the words of the mini world and of these lessons."""
    contents = [message["content"] for lesson in lessons for message in lesson]
    workflows = [spec(env).make_workflow(prompts="short") for env in list_envs()]
    systems = [role.system for workflow in workflows for role in workflow.told_roles()]
    return as_transformers(build(grow([], world_words(), contents + 2 * systems)))


# examples ----------------------------------------------------------------------------------------------


def encode(lesson: Lesson, tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """Return a conversation as tokens, as the chat template gives them, and which tokens the assistant wrote."""
    ids: list[int] = []
    learned: list[bool] = []
    for message in lesson:
        own = message["role"] == "assistant"
        head = [tokenizer.convert_tokens_to_ids(f"<|{message['role']}|>")]
        body = tokenizer(message["content"], add_special_tokens=False)["input_ids"]
        body += [tokenizer.eos_token_id] if own else []
        ids += head + body
        learned += [False] + [own] * len(body)
    return ids, learned


def examples(
    lessons: Sequence[Lesson], tokenizer: Tokenizer, rng: random.Random, context: float
) -> list[Example]:
    """Return the examples of lessons with a common beginning. Tokens of replies have the weight 1.

    One in four of the other tokens has the weight 4 × `context`, the rest 0. The mean is `context`, and the scores of the
    rest need not be computed. Tokens of the common beginning have a weight in the first lesson only.
    """
    result: list[Example] = []
    for lesson in lessons:
        ids, learned = encode(lesson, tokenizer)
        shared = len(commonprefix([ids, result[-1].ids])) if result else 0
        weight = [
            1.0 if own else 4 * context if i >= shared and rng.random() < 0.25 else 0.0
            for i, own in enumerate(learned)
        ]
        result.append(Example(ids, weight))
    return result


def repeats(rng: random.Random, vocabulary: int, length: int = 64) -> Example:
    """Return random tokens that repeat with a period of 8 to `length` / 2. Only repeated tokens are trained."""
    period = rng.randint(8, length // 2)
    once = rng.choices(range(vocabulary), k=period)
    return Example(
        [once[i % period] for i in range(length)],
        [float(i > period) for i in range(length)],
        of_world=False,
    )


def walk(rng: random.Random, vocabulary: int, length: int = 64) -> Example:
    """Return a walk on a ring of 8 to 16 random tokens, with random jumps.

    Because of the jumps, the next token follows from the current token, and not from the distance to its last place. A
    token is trained if it follows its predecessor on the ring, and did so before.
    """
    ring = rng.sample(range(vocabulary), rng.randint(8, 16))
    at = 0
    places: set[int] = set()  # on the ring, whose successor has been shown
    ids, weight = [ring[0]], [0.0]
    while len(ids) < length:
        jump = rng.random() < 0.25
        weight.append(float(not jump and at in places))
        places.update(() if jump else (at,))
        at = rng.randrange(len(ring)) if jump else (at + 1) % len(ring)
        ids.append(ring[at])
    return Example(ids, weight, of_world=False)


def results(rows: Iterator[JsonView], tokenizer: Tokenizer, equals: int, problems: int = 12) -> Example:
    """Return the solutions of several problems. The tokens after an equals sign (the token `equals`) are trained."""
    text = " ".join(row["solution"] for row in islice(rows, problems))
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return Example(ids, [0.0] + [float(before == equals) for before in ids[:-1]], of_world=False)


# learning ----------------------------------------------------------------------------------------------


@dataclass
class TinyLearner:
    """Learner of the tiny model. Muon trains the matrices, AdamW the embedding and the norms."""

    model: Llama
    rate: float = 1.0
    held_out: Tensor | None = None
    """Numbers [V] that are added to the scores of examples of the mini world. They exclude words of the other splits."""
    precision: torch.dtype = field(default_factory=lambda: getattr(torch, faster_precision()))
    tokens: int = 0
    began: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        matrices = [p for n, p in self.model.named_parameters() if p.dim() == 2 and "embed" not in n]
        others = [p for n, p in self.model.named_parameters() if p.dim() != 2 or "embed" in n]
        self.optimisers: list[tuple[torch.optim.Optimizer, float]] = [
            (torch.optim.Muon(matrices, lr=0.0, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"), 0.01),
            (torch.optim.AdamW(others, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0), 0.003),
        ]

    def step(self, batch: Sequence[Example], pace: float = 1.0) -> tuple[float, float]:
        """Make one optimizer step. Return the mean loss and the accuracy.

        The accuracy is the share of reply tokens (weight 1) with the highest score. If the batch holds examples of the mini
        world, only these count.
        """
        packed = pack([example.ids for example in batch])
        weight = torch.tensor([w for example in batch for w in example.weight[1:]])
        index = weight.nonzero().squeeze(1)
        places = torch.cat([rows[:-1] for rows in packed.rows])[index]
        target = torch.tensor([token for example in batch for token in example.ids[1:]])[index]
        world = torch.tensor([example.of_world for example in batch for _ in example.ids[1:]])[index]
        weight = weight[index]
        rows, back = places.unique(return_inverse=True)
        scores = self.model.logits(self.model.forward_packed(packed, dtype=self.precision, keep=rows))[back]
        if self.held_out is not None:
            scores = scores + world[:, None] * self.held_out
        loss = (F.cross_entropy(scores, target, reduction="none") * weight).sum() / weight.sum()
        if not torch.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss.item()} after {self.tokens} tokens; lower the rate")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimiser, rate in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = rate * self.rate * pace
            optimiser.step()
            optimiser.zero_grad()
        self.tokens += len(packed)
        reply = weight == 1.0
        hits = (scores.argmax(-1) == target)[reply & world if world.any() else reply]
        return loss.item(), float(hits.float().mean())


def learn_induction(learner: TinyLearner, seed: int, steps: int, batch: int = 64) -> None:
    """Train the model to copy, with batches of repeats and of walks in alternation."""
    rng = random.Random(seed)
    vocabulary = learner.model.shape.vocab
    right = 0.0
    for step in range(steps):
        kind = (walk, repeats)[step % 2]
        loss, right = learner.step([kind(rng, vocabulary) for _ in range(batch)], min(1.0, (step + 1) / 50))
        if step % 50 == 49:
            report(learner, "induction", step + 1, loss, right, kind.__name__)
    if right < 0.9:
        raise RuntimeError(f"copying works {right:.0%} of the time after {steps} steps; give more")


@dataclass
class Lessons(IterableDataset[list[Example]]):
    """Batches of about `tokens` tokens: shuffled lessons, and in every batch some repeats and sums."""

    tokenizer: Tokenizer
    seed: int
    tokens: int
    drills: float
    context: float

    def __iter__(self) -> Iterator[list[Example]]:
        rng = random.Random(self.seed)
        size = len(self.tokenizer)
        lessons = School(self.seed).lessons(self.drills)
        rows = chain.from_iterable(sums("train", 4096, seed) for seed in count())
        equals = self.tokenizer("1 = 1", add_special_tokens=False)["input_ids"][1]
        pool: list[list[Example]] = []
        while True:
            pool += [examples(group, self.tokenizer, rng, self.context) for group in islice(lessons, 256)]
            rng.shuffle(pool)
            while len(pool) > 128:
                batch = [repeats(rng, size, rng.choice((32, 64, 128))) for _ in range(2)]
                batch += [results(rows, self.tokenizer, equals) for _ in range(6)]
                room = self.tokens - sum(len(example.ids) for example in batch)
                while pool and room > 0:
                    group = pool.pop()
                    room -= len(pack([example.ids for example in group]))
                    batch += group
                yield batch


def learn_lessons(
    learner: TinyLearner, halves: Sequence[Lessons], steps: int, out: Path | None = None
) -> None:
    """Train the model on lessons, with a learning rate that falls to a twentieth. Worker processes make the lessons."""
    streams = [DataLoader(half, batch_size=None, num_workers=1, prefetch_factor=8) for half in halves]
    rights = []
    for step, batch in enumerate(chain.from_iterable(islice(s, steps // len(halves)) for s in streams)):
        pace = min((step + 1) / 25, 1.0 - 0.95 * step / steps)
        loss, right = learner.step(batch, pace)
        rights.append(right)
        if step % 25 == 24:
            report(learner, "lessons", step + 1, loss, sum(rights[-25:]) / 25, f"pace {pace:.2f}")
        if out is not None and step % 250 == 249:
            save(learner.model, halves[0].tokenizer, out)


def report(learner: TinyLearner, stage: str, step: int, loss: float, right: float, more: str) -> None:
    """Print one line of progress."""
    seconds = time.perf_counter() - learner.began
    print(
        f"{stage} {step}: {learner.tokens / 1e6:.2f}M tokens, loss {loss:.3f}, right {right:.3f}, {more}, "
        f"{learner.tokens / seconds:.0f} tokens/s, {seconds:.0f} s",
        flush=True,
    )


def save(model: Llama, tokenizer: Tokenizer, out: Path) -> None:
    """Write weights in bfloat16, configuration and tokenizer as a Hugging Face directory."""
    half = Llama(model.shape, model.hf_config)
    half.load_state_dict(model.state_dict())
    half.hf_config.dtype = "bfloat16"
    save_model(half.to(torch.bfloat16), out, tokenizer)


def new_model(tokenizer: Tokenizer, seed: int) -> Llama:
    """Return a model with random weights, except for one head (`look_back`)."""
    from transformers import LlamaConfig

    special = {
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    model = from_config(LlamaConfig(vocab_size=len(tokenizer), **SHAPE, **special), seed)
    look_back(model)
    return model


@torch.no_grad()
def look_back(model: Llama, frequencies: int = 8, strength: float = 0.73) -> None:
    """Set the first head of the first layer so that it attends to the previous token.

    Column 0 of the embedding gets the same number in every row. Queries and keys of the head read only this column, in the
    fastest rotary frequencies. The queries are rotated back by one position, so the score is highest at distance one.
    """
    half, keys = model.shape.head_width // 2, model.shape.heads * model.shape.head_width
    model.embed[:, 0] = 0.2
    qkv = dict(model.named_parameters())["layers.0.qkv.weight"]
    angle = torch.tensor(model.shape.inverse_frequencies[:frequencies])
    for start, turned in ((0, angle), (keys, torch.zeros_like(angle))):
        for rows, value in ((start, turned.cos()), (start + half, -turned.sin())):
            qkv[rows : rows + frequencies] = 0.0
            qkv[rows : rows + frequencies, 0] = strength * value


def main(argv: Sequence[str] | None = None) -> None:
    """Make the tiny model."""
    parser = argparse.ArgumentParser(description="make the embedded tiny model")
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument(
        "--start", type=Path, help="model and tokenizer to continue from, in place of random weights"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--induction", type=int, default=400, help="steps of induction (0: skip it)")
    parser.add_argument("--steps", type=int, default=2500, help="steps of lessons")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of lessons a step")
    parser.add_argument(
        "--drills",
        type=float,
        nargs="+",
        default=[0.95, 0.6],
        help="share of drills among the lessons, for each part of the steps",
    )
    parser.add_argument(
        "--rate", type=float, default=0.7, help="learning rate of the lessons, relative to induction's"
    )
    parser.add_argument(
        "--context", type=float, default=0.1, help="mean weight of the tokens outside of replies"
    )
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    if args.start is None:
        groups = islice(School(args.seed).lessons(0.5), 1500)
        tokenizer = make_tokenizer([lesson for group in groups for lesson in group])
        model = new_model(tokenizer, args.seed)
    else:
        from transformers import AutoTokenizer

        tokenizer, model = AutoTokenizer.from_pretrained(args.start), load_model(args.start)
    if args.induction:
        learn_induction(TinyLearner(model), args.seed, args.induction)
    held_out = torch.zeros(len(tokenizer))
    held_out[tokenizer.convert_tokens_to_ids([w.replace(" ", "Ġ") for w in held_out_words()])] = -1e4
    learner = TinyLearner(model, args.rate, held_out)
    halves = [
        Lessons(tokenizer, args.seed + i, args.tokens, drills, args.context)
        for i, drills in enumerate(args.drills)
    ]
    learn_lessons(learner, halves, args.steps, args.out)
    save(model, tokenizer, args.out)
    print(json.dumps({"tokens": learner.tokens, "seconds": round(time.perf_counter() - learner.began)}))


if __name__ == "__main__":
    main()
