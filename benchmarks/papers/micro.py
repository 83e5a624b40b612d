"""Micro models: random Llamas with the words of one environment, small enough to learn in a minute without pretraining.

The vocabulary consists of the words that the environment uses in random play. An untrained model cannot use a system prompt,
so the system prompt of each role is one token. With `by="phrases"` a line or a short sentence ("P: row 2 column 1") is also
one token. Replies must be choices, because such a model writes no tags.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ...agents.llm import load_policy
from ...agents.policies import Call, Policy
from ...agents.team import Player
from ...agents.text.chat import Chat
from ...envs.core.drivers import rollout
from ...envs.core.trace import Trace
from ...envs.registry import make, spec
from ...trainers.algorithms import make_algorithm
from ...trainers.config.group_settings import Learning
from ...trainers.config.reader import ConfigTree
from ...trainers.config.schema import merge
from ...trainers.controller.run import train
from ...trainers.controller.statistics.table import Signal
from .reproduction import CellFigures, ConditionSettings

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer

TEMPLATE = (
    "{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"
)
SIGNS = ["<pad>", "<s>", "</s>", "<unk>"]


class Ear:
    """Policy that plays at random and collects every word of its prompts and choices."""

    def __init__(self, by: str) -> None:
        self.words: set[str] = set()
        self.systems: set[str] = set()
        self.cutter = cutter(by)

    def act(self, call: Call) -> str:
        """Reply at random, and collect the words of the call."""
        if call.choices is None:
            raise ValueError(f"role {call.role!r} replies freely; a micro model can only play choices")
        for message in call.messages:
            if message["role"] == "system":
                self.systems.add(str(message["content"]))
            else:
                self.listen(str(message["content"]))
        for choice in call.choices:
            self.listen(choice)
        return random.Random(call.seed).choice(call.choices)

    def listen(self, text: str) -> None:
        """Collect the words of a text."""
        self.words.update(word for word, _ in self.cutter.pre_tokenize_str(text))


def cutter(by: str) -> PreTokenizer:
    """Return the pre-tokenizer that cuts text into words and signs, or into lines and short sentences."""
    from tokenizers import Regex, pre_tokenizers

    if by == "words":
        return pre_tokenizers.Whitespace()
    return pre_tokenizers.Split(Regex(r"\n+|(?<=\w)\. ?"), "removed")


def heard(env: str, roles: tuple[str, ...] | None, by: str, how: ConditionSettings, tasks: int = 200) -> Ear:
    """Play at random in `roles` (None: all), with the expert in the others, and return the policy with its words."""
    ear = Ear(by)
    team: dict[str, Player] = {"*": ear} if roles is None else {**dict.fromkeys(roles, ear), "*": "scripted"}
    sound(rollout(make(env, **{**short(env), **how}), team, tasks=tasks, seed=0))
    return ear


def short(env: str) -> dict[str, str]:
    """Return the argument that selects the prompt set "short", if the environment has prompt sets."""
    return {"prompts": "short"} if spec(env).make_workflow().prompts else {}


def sound(played: list[Trace]) -> list[Trace]:
    """Return the episodes. Raise an error if one failed, because it must not count as a score of 0."""
    for trace in played:
        if trace.error:
            raise RuntimeError(f"{trace.env_id}, task {trace.task_id}: {trace.error}")
    return played


def micro_model(
    folder: Path,
    env: str,
    seed: int,
    *,
    roles: tuple[str, ...] | None = None,
    by: Literal["words", "phrases"] = "words",
    width: int = 32,
    layers: int = 2,
    **how: object,
) -> str:
    """Write a random model for the roles of an environment. `how` holds arguments of `make`."""
    from tokenizers import Tokenizer, models
    from transformers import AddedToken, LlamaConfig, PreTrainedTokenizerFast

    from ...agents.model.weights import from_config, save_model

    ear = heard(env, roles, by, how)
    vocabulary = [*SIGNS, *sorted(ear.words)]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<unk>"))
    inner.pre_tokenizer = cutter(by)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in sorted(ear.systems)])
    tokenizer.chat_template = TEMPLATE
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.1,
    )
    return str(save_model(from_config(config, seed=seed), folder, tokenizer))


# schooling --------------------------------------------------------------------------------------------


class Pupil:
    """Policy that acts like its teacher, and sometimes at random. Its replies become lessons.

    The random replies are part of the lessons, so that the model still explores after them.
    """

    sees_reference = True

    def __init__(self, teacher: Callable[[Call], str], slips: float) -> None:
        self.teacher, self.slips = teacher, slips
        self.lessons: list[tuple[Call, str]] = []

    def act(self, call: Call) -> str:
        """Reply as the teacher or at random, and record the lesson."""
        chance, reply = random.Random(call.seed), self.teacher(call)
        if call.choices and chance.random() < self.slips:
            reply = chance.choice(call.choices)
        self.lessons.append((call, reply))
        return reply


def school(
    model: str,
    lessons: Sequence[tuple[Call, str]],
    seed: int,
    updates: int,
    rate: float = 3e-3,
    batch: int = 128,
) -> None:
    """Train a micro model in place to imitate the replies of these lessons: the policy gradient with advantage 1."""
    from ...agents.model.weights import load_model, load_tokenizer, save_model
    from ...trainers.group.learning.parameters import Parameters
    from ...trainers.group.learning.update import Learner
    from ...trainers.group.sample_store import Sample

    network, tokenizer = load_model(model), load_tokenizer(model)
    chat = Chat(tokenizer)
    samples = []
    for number, (call, text) in enumerate(lessons):
        reply = np.array(tokenizer.encode(text, add_special_tokens=False))
        prompt = np.array(chat.prompt(call).ids)
        samples.append(
            Sample("school", str(number), "pupil", 0, prompt, reply, np.zeros(len(reply), np.float32))
        )
    learner = Learner("pupil", Parameters(network), Learning(lr=rate))
    algorithm = make_algorithm("grpo", importance="off")
    chance = random.Random(seed)
    for _ in range(updates):
        drawn = chance.sample(samples, min(batch, len(samples)))
        learner.update(algorithm, {sample.id: Signal(sample.id, 1.0) for sample in drawn}, [drawn])
    save_model(network, model, tokenizer)


# training and testing small teams ---------------------------------------------------------------------

COMMON: ConfigTree = {
    "minibatches": 1,
    "eval": {"every": 5, "tasks": 64},
    "log": {"console": "off", "traces_every": 0},
    "checkpoint_every": 0,
    "starved": False,  # a condition that learns nothing is a result here
    "concurrency": 256,
}
LEARNING: ConfigTree = {"learning": {"lr": 3e-3}, "sampling": {"max_tokens": 4}}


def learn(
    id: str, model: str, seed: int, folder: Path, metric: str, **fields: Any
) -> tuple[Path, CellFigures]:
    """Train micro policies on an environment. Return their folder, and the curve and costs of the run.

    `fields` are those of the config tree. `policies` holds the settings in which policies differ from `LEARNING`.
    """
    preset = fields.pop("preset", None)
    policies = {name: merge(LEARNING, options) for name, options in fields.pop("policies", {"*": {}}).items()}
    groups = fields.pop("groups", {"*": {}})
    groups = {
        name: {"model": model, "slots": 64, "threads": 1, **options} for name, options in groups.items()
    }
    settings = merge(merge(COMMON, {"env": short(id)}), fields)
    done = train(
        id, preset=preset, directory=folder, seed=seed, policies=policies, groups=groups, **settings
    )  # fmt: skip
    steps = [row for row in done.history if row["kind"] == "step"]
    curve = [[row["step"], row.get(metric, 0.0)] for row in done.history if row["kind"] == "validation"]
    figures = {
        "curve": curve,
        "area": sum(value for _, value in curve) / len(curve),
        "samples": sum(row["usable"] for row in steps),
        "norms": {
            name: [row[f"policy/{name}/grad_norm"] for row in steps if f"policy/{name}/grad_norm" in row]
            for name in done.algorithms
        },
    }
    return done.dir / "policies", figures


def held_out(env: str, players: Mapping[str, Player | Path], tasks: int, **how: Any) -> dict[str, float]:
    """Return the environment's metrics on test tasks, each played once, greedily.

    `players` gives each agent a model directory or the name of a fixed player.
    """
    seats: dict[str, Player] = {}
    loaded: dict[str, Policy] = {}
    for seat, player in players.items():
        if isinstance(player, Path):
            if str(player) not in loaded:
                loaded[str(player)] = load_policy(f"hf:{player}", temperature=0.0)
            seats[seat] = loaded[str(player)]
        else:
            seats[seat] = player
    table = make(env, split="test", **{**short(env), **how})
    played = sound(rollout(table, seats, tasks=tasks, seed=0))
    names = sorted({name for trace in played for name in trace.metrics})
    return {name: sum(trace.metrics.get(name, 0.0) for trace in played) / len(played) for name in names}
