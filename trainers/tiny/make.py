"""The embedded tiny model: how it is made, from nothing, on one laptop core.

    python -m unitymas.trainers.tiny.make --out agents/tiny --seed 0

What it took, each found by seeing the simpler way fail:

- *Induction first.* A small model taught questions alone never learns to copy a name out of a passage. So it first
  learns, on random tokens, to find where a token stood before and to say what followed it.
- *One head looks back.* Induction has two halves, and neither is of use alone, so it comes late: from nothing it had
  not come after 4.5M tokens. One head of the first layer therefore begins as one that looks at the token before
  (`look_back`), and copying is there after 1.3M. (The whole circuit laid by hand copies at once, but it is so loud
  that reading never formed on top of it.)
- *Muon* for the matrices; with AdamW alone, neither copying nor reading came in the same time.
- *The context teaches too*, at a fifth of the weight: passages tell which words are towns, years and names. From the
  replies alone, reading did not begin within a million tokens.

Words that only validation and test names use are left out of the scores while lessons are learned, so their
output weights are neither raised nor lowered; they learn to be copied in the share of random tokens that goes on.
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
    """Token ids; what each counts in the loss; and whether it is of the mini world (or random tokens)."""

    ids: list[int]
    weight: list[float]
    of_world: bool = True


# words -------------------------------------------------------------------------------------------------


def world_words() -> list[str]:
    """Every word of the mini world, and the numbers, as pieces of text."""
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
    """The words that no training name contains."""
    kinds = (words.PEOPLE, words.TOWNS, words.WORKS, words.COMPANIES)
    return [f" {word}" for kind in kinds for word in kind.second[len(kind.second) - 2 * kind.held_out :]]


def make_tokenizer(lessons: Sequence[Lesson]) -> Tokenizer:
    """A tokenizer for the world and for what is said in these lessons."""
    contents = [message["content"] for lesson in lessons for message in lesson]
    workflows = [spec(env).make_workflow(prompts="short") for env in list_envs()]
    asked = [role.system for workflow in workflows for role in workflow.told_roles()]
    return as_transformers(build(grow([], world_words(), contents + 2 * asked)))


# examples ----------------------------------------------------------------------------------------------


def encode(lesson: Lesson, tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """A conversation as tokens, cut as the chat template cuts it, and which of them the model says itself."""
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
    """Lessons that begin alike. Of what others say a quarter is learned, at four times the weight of `context`:
    the same on average, and the scores of the rest need not be computed. A shared beginning counts once.
    """
    made: list[Example] = []
    for lesson in lessons:
        ids, learned = encode(lesson, tokenizer)
        shared = len(commonprefix([ids, made[-1].ids])) if made else 0
        weight = [
            1.0 if own else 4 * context if i >= shared and rng.random() < 0.25 else 0.0
            for i, own in enumerate(learned)
        ]
        made.append(Example(ids, weight))
    return made


def repeats(rng: random.Random, vocabulary: int, length: int = 64) -> Example:
    """Random tokens that repeat after 8 to half as many; learned from the second time on."""
    period = rng.randint(8, length // 2)
    once = rng.choices(range(vocabulary), k=period)
    return Example(
        [once[i % period] for i in range(length)],
        [float(i > period) for i in range(length)],
        of_world=False,
    )


def walk(rng: random.Random, vocabulary: int, length: int = 64) -> Example:
    """A walk round a ring of 8 to 16 random tokens, with a jump now and then.

    What follows cannot be told from the distance to the last time, only from the token. Learned: the successors of
    tokens whose successor was seen.
    """
    ring = rng.sample(range(vocabulary), rng.randint(8, 16))
    at = 0
    told: set[int] = set()
    ids, learned = [ring[0]], [0.0]
    while len(ids) < length:
        jump = rng.random() < 0.25
        learned.append(float(not jump and at in told))
        told.update(() if jump else (at,))
        at = rng.randrange(len(ring)) if jump else (at + 1) % len(ring)
        ids.append(ring[at])
    return Example(ids, learned, of_world=False)


def results(rows: Iterator[JsonView], tokenizer: Tokenizer, equals: int, problems: int = 12) -> Example:
    """The working of so many problems; learned: what follows an equals sign (the token `equals`)."""
    text = " ".join(row["solution"] for row in islice(rows, problems))
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return Example(ids, [0.0] + [float(before == equals) for before in ids[:-1]], of_world=False)


# learning ----------------------------------------------------------------------------------------------


@dataclass
class TinyLearner:
    """The model, its optimizers and its clock. Matrices learn by Muon, embeddings and norms by AdamW."""

    model: Llama
    rate: float = 1.0
    held_out: Tensor | None = None
    """Numbers added to the scores of a text of the mini world [V]: its words of other splits are out of reach."""
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
        """One update; the mean loss, and the share of learned tokens (of the world, if any) that were the likeliest."""
        packed = pack([example.ids for example in batch])
        weight = torch.tensor([w for example in batch for w in example.weight[1:]])
        kept = weight.nonzero().squeeze(1)
        places = torch.cat([rows[:-1] for rows in packed.rows])[kept]
        target = torch.tensor([token for example in batch for token in example.ids[1:]])[kept]
        world = torch.tensor([example.of_world for example in batch for _ in example.ids[1:]])[kept]
        weight = weight[kept]
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
        own = weight == 1.0
        right = (scores.argmax(-1) == target)[own & world if world.any() else own]
        return loss.item(), float(right.float().mean())


def learn_induction(learner: TinyLearner, seed: int, steps: int, batch: int = 64) -> None:
    """Copying, by repeats and walks in turn."""
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
    """Batches of about `tokens` tokens: lessons that were shuffled in a pool, with some random repeats and sums."""

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
    """Drills and apprentices; the pace falls from the first step to the last. Lessons are made beside it."""
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
    """One line of progress."""
    seconds = time.perf_counter() - learner.began
    print(
        f"{stage} {step}: {learner.tokens / 1e6:.2f}M tokens, loss {loss:.3f}, right {right:.3f}, {more}, "
        f"{learner.tokens / seconds:.0f} tokens/s, {seconds:.0f} s",
        flush=True,
    )


def save(model: Llama, tokenizer: Tokenizer, out: Path) -> None:
    """Weights in bfloat16, configuration and tokenizer, as transformers loads them."""
    half = Llama(model.shape, model.hf_config)
    half.load_state_dict(model.state_dict())
    half.hf_config.dtype = "bfloat16"
    save_model(half.to(torch.bfloat16), out, tokenizer)


def new_model(tokenizer: Tokenizer, seed: int) -> Llama:
    """The model before it has learned anything."""
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
    """Let the first head of the first layer begin as one that looks at the token before.

    All embeddings get the same number in place 0. Queries and keys of that head read only this, in the fastest
    rotary frequencies, and the queries are turned back by one position: the score peaks at distance one.
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
        "--start", type=Path, help="a model and tokenizer to go on from, instead of from nothing"
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
        help="share of drills among the lessons, half by half",
    )
    parser.add_argument(
        "--rate", type=float, default=0.7, help="learning rate of the lessons, relative to induction's"
    )
    parser.add_argument("--context", type=float, default=0.1, help="weight of tokens that others say")
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
