"""The embedded tiny model: how it is made, from nothing, on one laptop core.

    python -m unitymas.trainers.tiny --out agents/tiny --seed 0

Two lessons were paid for. A small model trained on questions alone never learns to copy a name out of a passage,
so it first needs *induction*: to find where a token stood before, and to say what followed it. And to learn that
from random tokens takes longer than all the rest (here more than 2M tokens), because its two halves are of no use
alone. So the circuit is laid by hand (`lay_induction`), a hundred steps on repeated random tokens make it fit, and
then come the lessons of `tiny_drills`: reading drills and apprentices of every environment.

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
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..agents.attention import pack
from ..agents.llama import Llama
from ..agents.weights import from_config, load_model, save_model
from ..envs.data.mini import words
from ..envs.registry import list_envs, spec
from .tiny_drills import Lesson, School
from .tiny_tokenizer import as_transformers, build, grow

SHAPE = {
    "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 2048,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "tie_word_embeddings": True,
}  # fmt: skip


@dataclass
class Example:
    """Token ids; which of them are learned; and whether it is of the mini world (or random tokens)."""

    ids: list[int]
    learned: list[bool]
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


def make_tokenizer(lessons: Sequence[Lesson]) -> Any:
    """A tokenizer for the world and for what is said in these lessons."""
    said = [message["content"] for lesson in lessons for message in lesson]
    asked = [role.system for env in list_envs() for role in spec(env).roles]
    return as_transformers(build(grow([], world_words(), said + 2 * asked)))


# examples ----------------------------------------------------------------------------------------------


def encode(lesson: Lesson, tokenizer: Any) -> Example:
    """A conversation as tokens, cut as the chat template cuts it; the assistant's words and `<|end|>` are learned."""
    ids: list[int] = []
    learned: list[bool] = []
    for message in lesson:
        own = message["role"] == "assistant"
        head = [tokenizer.convert_tokens_to_ids(f"<|{message['role']}|>")]
        body = tokenizer(message["content"], add_special_tokens=False)["input_ids"]
        body += [tokenizer.eos_token_id] if own else []
        ids += head + body
        learned += [False] + [own] * len(body)
    return Example(ids, learned)


def repeats(rng: random.Random, vocabulary: int, length: int) -> Example:
    """Random tokens that repeat after 8 to half as many; learned from the second time on."""
    period = rng.randint(8, length // 2)
    once = rng.choices(range(vocabulary), k=period)
    return Example(
        [once[i % period] for i in range(length)], [i > period for i in range(length)], of_world=False
    )


# learning ----------------------------------------------------------------------------------------------


@dataclass
class Learner:
    """The model, its optimiser and its clock."""

    model: Llama
    rate: float = 1e-3
    held_out: Tensor | None = None
    tokens: int = 0
    began: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.optimiser = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)

    def step(self, batch: Sequence[Example], pace: float = 1.0) -> tuple[float, float]:
        """One update; the mean loss, and the share of learned tokens (of the world, if any) that were the likeliest."""
        packed = pack([example.ids for example in batch])
        hidden = self.model.forward_packed(packed, dtype=torch.bfloat16)
        places, targets, of_world = [], [], []
        for example, rows in zip(batch, packed.rows, strict=True):
            learned = torch.tensor(example.learned[1:])
            places.append(rows[:-1][learned])
            targets.append(torch.tensor(example.ids[1:])[learned])
            of_world += [example.of_world] * int(learned.sum())
        target = torch.cat(targets)
        scores = self.model.logits(hidden[torch.cat(places)])
        if self.held_out is not None:
            rows = torch.tensor(of_world).nonzero()
            scores = scores.index_put((rows, self.held_out[None]), torch.tensor(-1e4))
        loss = F.cross_entropy(scores, target)
        if not torch.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss.item()} after {self.tokens} tokens; lower the rate")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self.optimiser.param_groups:
            group["lr"] = self.rate * pace
        self.optimiser.step()
        self.optimiser.zero_grad()
        self.tokens += sum(len(example.ids) for example in batch)
        right = (scores.argmax(-1) == target).float()
        world = torch.tensor(of_world)
        return loss.item(), float(right[world].mean() if world.any() else right.mean())


def learn_induction(learner: Learner, seed: int, steps: int) -> None:
    """Let the laid circuit fit; copying must work in the end."""
    rng = random.Random(seed)
    vocabulary = learner.model.shape.vocab
    right = 0.0
    for step in range(steps):
        batch = [repeats(rng, vocabulary, rng.choice((64, 128, 256))) for _ in range(24)]
        loss, right = learner.step(batch, min(1.0, (step + 1) / 10))
        if step % 10 == 9:
            report(learner, "induction", step + 1, loss, right, "random tokens")
    if right < 0.95:
        raise RuntimeError(f"copying works {right:.0%} of the time after {steps} steps; give more")


def batches(
    school: School, tokenizer: Any, rng: random.Random, tokens: int, drills: float
) -> Iterator[list[Example]]:
    """Batches of about `tokens` tokens: lessons that were shuffled in a pool, and some random repeats."""
    lessons = school.lessons(drills)
    pool: list[Example] = []
    while True:
        pool += [encode(lesson, tokenizer) for lesson in islice(lessons, 512)]
        rng.shuffle(pool)
        while len(pool) > 256:
            batch: list[Example] = [
                repeats(rng, len(tokenizer), rng.choice((64, 128, 256))) for _ in range(2)
            ]
            while pool and sum(len(example.ids) for example in batch) < tokens:
                batch.append(pool.pop())
            yield batch


def learn_lessons(
    learner: Learner,
    tokenizer: Any,
    seed: int,
    steps: int,
    tokens: int,
    drills: float,
    out: Path | None = None,
) -> None:
    """Reading drills and apprentices; the pace falls over the last third."""
    stream = batches(School(seed), tokenizer, random.Random(seed), tokens, drills)
    rights = []
    for step, batch in enumerate(islice(stream, steps)):
        pace = min(1.0, (step + 1) / 50, 0.05 + 0.95 * 3 * (steps - step) / steps)
        loss, right = learner.step(batch, pace)
        rights.append(right)
        if step % 25 == 24:
            report(learner, "lessons", step + 1, loss, sum(rights[-25:]) / 25, f"pace {pace:.2f}")
        if out is not None and step % 250 == 249:
            save(learner.model, tokenizer, out)


def report(learner: Learner, stage: str, step: int, loss: float, right: float, more: str) -> None:
    """One line of progress."""
    seconds = time.perf_counter() - learner.began
    print(
        f"{stage} {step}: {learner.tokens / 1e6:.2f}M tokens, loss {loss:.3f}, right {right:.3f}, {more}, "
        f"{learner.tokens / seconds:.0f} tokens/s, {seconds:.0f} s",
        flush=True,
    )


def save(model: Llama, tokenizer: Any, out: Path) -> None:
    """Weights in bfloat16, configuration and tokenizer, as transformers loads them."""
    half = Llama(model.shape, model.hf_config)
    half.load_state_dict(model.state_dict())
    half.hf_config.dtype = "bfloat16"
    save_model(half.to(torch.bfloat16), out, tokenizer)


def new_model(tokenizer: Any, seed: int) -> Llama:
    """The model before it has learned anything."""
    from transformers import LlamaConfig

    special = {
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    model = from_config(LlamaConfig(vocab_size=len(tokenizer), **SHAPE, **special), seed)
    lay_induction(model, seed)
    return model


@torch.no_grad()
def lay_induction(model: Llama, seed: int) -> None:
    """Lay the induction circuit: layer 0 tells each token which came before it, layer 1 finds where and copies.

    The stream of 192 numbers is divided: 0–127 say which token this is, 128–159 hold a code of the token before,
    191 is the same for all. Only head 0 of the first two layers is laid; everything else is left to learning.
    Alone, the circuit copies two of three repeated tokens.
    """
    shape = model.shape
    width, half, keys = shape.head_width, shape.head_width // 2, shape.heads * shape.head_width
    values = keys + shape.kv_heads * width
    generator = torch.Generator().manual_seed(seed)
    model.embed.normal_(0.0, 0.3, generator=generator)
    model.embed[:, 128:] = 0.0
    model.embed[:, 191] = 0.6
    first, second = model.layers[0], model.layers[1]
    for layer in (first, second):
        for start in (0, keys, values):
            layer.qkv.weight[start : start + width] = 0.0
        layer.out.weight[:, :width] = 0.0
    # layer 0: queries turned back by one position, so that the score peaks at the token before
    fast, strength = 10, 3.0
    angle = torch.tensor(shape.inverse_frequencies[:fast])
    first.qkv.weight[keys : keys + fast, 191] = strength
    first.qkv.weight[:fast, 191] = strength * angle.cos()
    first.qkv.weight[half : half + fast, 191] = -strength * angle.sin()
    for i in range(32):
        first.qkv.weight[values + i, i] = 1.0
        first.out.weight[128 + i, i] = 1.0
    # layer 1: this token against the code of those before, where rotation is slow; the match is copied
    slow = [*range(half - 16, half), *range(width - 16, width)]
    for code, place in enumerate(slow):
        second.qkv.weight[place, code] = 4.0
        second.qkv.weight[keys + place, 128 + code] = 4.0
    for i in range(width):
        second.qkv.weight[values + i, 32 + i] = 1.0
        second.out.weight[32 + i, i] = 10.0
    model.norm.weight.mul_(0.35)


def main(argv: Sequence[str] | None = None) -> None:
    """Make the tiny model."""
    parser = argparse.ArgumentParser(description="make the embedded tiny model")
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument(
        "--start", type=Path, help="a model and tokenizer to go on from, instead of from nothing"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--induction", type=int, default=100, help="steps of induction (0: skip it)")
    parser.add_argument("--steps", type=int, default=1500, help="steps of lessons")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of lessons a step")
    parser.add_argument("--drills", type=float, default=0.3, help="share of drills among the lessons")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate of the lessons")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    if args.start is None:
        tokenizer = make_tokenizer(list(islice(School(args.seed).lessons(args.drills), 4000)))
        model = new_model(tokenizer, args.seed)
    else:
        from transformers import AutoTokenizer

        tokenizer, model = AutoTokenizer.from_pretrained(args.start), load_model(args.start)
    if args.induction:
        learn_induction(Learner(model), args.seed, args.induction)
    held_out = torch.tensor(tokenizer.convert_tokens_to_ids([w.replace(" ", "Ġ") for w in held_out_words()]))
    learner = Learner(model, args.rate, held_out)
    learn_lessons(learner, tokenizer, args.seed, args.steps, args.tokens, args.drills, args.out)
    save(model, tokenizer, args.out)
    print(json.dumps({"tokens": learner.tokens, "seconds": round(time.perf_counter() - learner.began)}))


if __name__ == "__main__":
    main()
