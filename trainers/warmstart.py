"""A warm start: supervised fine-tuning on the scripted expert's traces, before reinforcement learning.

    unitymas warmstart rag-squad --model minimind2 --out runs/warm
    unitymas train rag-squad --model ./runs/warm

The replies of episodes that the expert solved are learned by maximum likelihood, through the learner that trains
policies: packed, with shared prefixes, in bfloat16 where it is faster, as a whole or through an adapter that is merged at the end.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from os.path import commonprefix
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import yaml

from ..agents.basics.frozen import thaw
from ..agents.basics.hints import counted
from ..agents.basics.json_types import JsonObject, JsonView
from ..agents.engines.stopping import closing_ids
from ..agents.fetch.packaged import PACKAGES
from ..agents.names import PROMPTS_FILE, model_path, prompts_of, unverified
from ..agents.text.chat import Chat
from ..agents.text.tokenizing import Tokenizer
from ..cli.arguments import COUNT, Parser, number
from ..envs.core.drivers import rollout
from ..envs.core.trace import Trace
from ..envs.registry import make_arena, spec
from .algorithms.algorithm import Algorithm, AlgorithmState, Metrics
from .config.presets import WARMSTART_FILE
from .config.reader import override
from .config.resolve import typed_arguments
from .controller.statistics.table import Ints, Signal, Table
from .rows import TrainingRow, rows

if TYPE_CHECKING:
    from torch import Tensor

    from ..agents.model.decoder import Decoder
    from .group.learning.batch import Batch
    from .group.sample_store import Sample


def tokenized(
    data: Iterable[TrainingRow], tokenizer: Tokenizer, kind: Literal["sft", "dpo"]
) -> list[dict[str, list[int]]]:
    """Rows with a prompt as the tokens that TRL learns from: only the template writes control tokens in them.

    TRL's own reading would take a `<|im_end|>` in a passage for the end of a turn.
    """
    chat = Chat(tokenizer)
    tokens: list[dict[str, list[int]]] = []
    for row in data:
        prompt = chat.conversation(row["prompt"], ready=True)
        names = ("completion",) if kind == "sft" else ("chosen", "rejected")
        wholes = [chat.conversation([*row["prompt"], *row[name]], ready=False) for name in names]
        begin = min(len(commonprefix([prompt, whole])) for whole in wholes)
        if kind == "sft":
            (ids,) = wholes
            mask = [0] * begin + [1] * (len(ids) - begin)
            tokens.append({"input_ids": ids, "completion_mask": mask})
        else:
            chosen, rejected = (ids[begin:] for ids in wholes)
            tokens.append({"prompt_ids": prompt[:begin], "chosen_ids": chosen, "rejected_ids": rejected})
    return tokens


def expert_traces(
    id: str,
    tasks: int | None = None,
    data: str | None = None,
    split: str = "train",
    prompts: object = None,
    **config: Any,
) -> list[Trace]:
    """Traces of the scripted expert on an environment's training tasks; only episodes it solved."""
    env_spec = spec(id)
    where: JsonObject = {"split": split, **({} if env_spec.tasks is not None else {"data": data})}
    arena = make_arena(id, prompts=prompts, **where, **config)
    success = env_spec.success or env_spec.headline
    solved = [t for t in rollout(arena, "scripted", tasks=tasks) if t.metrics.get(success, 0.0) >= 1.0]
    if not solved:
        raise ValueError(
            f"{id}: the scripted expert solved none of these tasks, so there is nothing to imitate"
        )
    return solved


@dataclass(frozen=True, kw_only=True)
class Imitation(Algorithm):
    """Maximum likelihood of the replies of any player."""

    name: ClassVar[str] = "imitation"

    def advantages(self, table: Table, mine: Ints, state: AlgorithmState) -> list[Signal]:
        """Return the same signal for every reply."""
        return self.signals(table, mine, advantage=np.ones(len(table)))

    def loss(self, batch: Batch, denominators: Mapping[str, float]) -> tuple[Tensor, Metrics]:
        """Return the negative log-likelihood of a reply token."""
        from .group.learning.losses import aggregate

        return aggregate(-batch.logp, batch, "token-mean", denominators), {}


@dataclass(frozen=True, kw_only=True)
class WarmStart:
    """Settings of a warm start."""

    epochs: float = 1.0
    """Passes over the expert's replies."""
    draws: int = 0
    """Replies that are drawn in all, in place of `epochs`; 0: by `epochs`."""
    lr: float = 0.0
    """Peak learning rate. It rises over a twentieth of the steps, and falls to a tenth. 0: by what learns."""
    batch: int = 16
    """Replies of an optimizer step."""
    lora: int = 0
    """Rank of an adapter that learns in place of the whole model, and is merged into it at the end; 0: none."""
    precision: Literal["", "float32", "bfloat16"] = ""
    """Precision of the computation, float32 or bfloat16. Empty: whichever is faster here."""
    seed: int = 0

    @property
    def rate(self) -> float:
        """Peak learning rate. Adapters take, and need, a higher one than a model's own weights."""
        return self.lr or (1e-3 if self.lora else 3e-4)


@dataclass
class WarmStartRecord:
    """Figures of a warm start, written beside the model that it made."""

    model: str
    traces: int
    replies: int
    tokens: int
    """Tokens of prompts and replies in one pass."""
    losses: list[float] = field(default_factory=list)
    """Mean negative log-likelihood of a reply token, by optimizer step."""
    seconds: float = 0.0


def fine_tune(
    model: Decoder, samples: Sequence[Sample], how: WarmStart, say: Callable[[int, int, float], None]
) -> tuple[Decoder, list[float]]:
    """Teach a model (agents.model) these replies. Return it, with an adapter merged, and the loss of each step."""
    import torch

    from ..agents.basics import machine
    from .config.group_settings import Learning, faster_precision
    from .group.learning.parameters import Parameters
    from .group.learning.update import Learner

    torch.manual_seed(how.seed)
    steps = max(1, math.ceil((how.draws or how.epochs * len(samples)) / how.batch))
    precision = how.precision or faster_precision()
    learning = Learning(
        lr=how.rate, schedule="linear", warmup=min(max(1, steps // 20), steps - 1), horizon=steps, precision=precision,
        # the replies of a step are one micro-batch: its activations would hold gigabytes. No bit changes
        checkpointing=sum(p.numel() for p in model.parameters()) >= machine.SMALL,
    )  # fmt: skip
    model.requires_grad_(False)
    if how.lora:
        model.add_adapter("warm", how.lora, 2.0 * how.lora)
    parameters = Parameters(model, "warm" if how.lora else None)
    learner = Learner("warm start", parameters, learning)
    signals = {sample.id: Signal(sample.id, 1.0) for sample in samples}
    chance, left, losses = random.Random(how.seed), list[int](), list[float]()
    for step in range(steps):
        while len(left) < how.batch:
            left += chance.sample(range(len(samples)), len(samples))
        batch, left = [samples[i] for i in dict.fromkeys(left[: how.batch])], left[how.batch :]
        losses.append(learner.update(Imitation(), signals, [batch])["loss"])
        say(step + 1, steps, losses[-1])
    learned = model.merged(parameters.adapter)
    del learner, parameters
    machine.give_back()  # the run that begins with this model is often in the same process
    return learned, losses


def samples_of(traces: Iterable[Trace], tokenizer: Tokenizer, closing: Collection[int] = ()) -> list[Sample]:
    """Return the acts of traces as samples to be learned. A reply ends with the first of the tokens that end a turn (default: the
    tokenizer's own), as sampled ones do.
    """
    from .group.sample_store import Sample

    closing = closing or closing_ids(tokenizer)

    samples = []
    data = rows(traces)
    for number_, (row, tokens) in enumerate(zip(data, tokenized(data, tokenizer, "sft"), strict=True)):
        ids, begin = tokens["input_ids"], tokens["completion_mask"].index(1)
        end = next((i + 1 for i in range(begin, len(ids)) if ids[i] in closing), len(ids))
        reply = np.array(ids[begin:end], np.int64)
        samples.append(
            Sample(
                episode=f"{row['task_id']}/{number_}", node=row["node"], policy="expert", version=0, role=row["role"],
                prompt=np.array(ids[:begin], np.int64), reply=reply, behaviour=np.zeros(len(reply), np.float32),
            )
        )  # fmt: skip
    return samples


def warmstart(
    id: str,
    model: str | Path,
    out: str | Path,
    *,
    tasks: int | None = None,
    data: str | None = None,
    prompts: object = None,
    args: JsonView | None = None,
    **settings: Any,
) -> Path:
    """Fine-tune a model on the expert's traces; gives the directory of the new one, to be named in `groups.*.model`.

    `settings` are those of `WarmStart`, `args` the workflow's own. Without `prompts` it learns the set that the model
    was made with, or "short" where it is one of the small ones that registries carry: what they learned is said by
    `prompts.yaml` in the new directory, so that teams and runs of it choose the same.
    """
    from ..agents.model.weights import load_decoder, load_tokenizer, save_model

    how = WarmStart(**settings)
    _check_folder(Path(out))
    if isinstance(model, str):
        unverified(model)  # a missing one is an error before the expert plays; nothing is fetched
    told = _prompts(id, str(model), prompts, args or {})
    traces = expert_traces(id, tasks, data, prompts=told, **(args or {}))
    path = model_path(model)  # what is wrong with the environment is known before anything is fetched
    tokenizer = load_tokenizer(path)
    decoder = load_decoder(path)
    samples = samples_of(traces, tokenizer, closing_ids(decoder.hf_config, decoder.generation, tokenizer))
    count = sum(len(s.prompt) + len(s.reply) for s in samples)
    record = WarmStartRecord(str(model), len(traces), len(samples), count)
    print(
        f"warm start of {model} on {counted(len(traces), 'solved episode')} of {id}: "
        f"{counted(len(samples), 'reply', 'replies')}, {count:,} tokens a pass, prompts {told}",
        file=sys.stderr, flush=True,
    )  # fmt: skip
    began, recent = time.monotonic(), list[float]()

    def say(step: int, steps: int, loss: float) -> None:
        recent.append(loss)
        if step in (1, steps) or step % 10 == 0:
            loss = sum(recent[-10:]) / len(recent[-10:])
            print(
                f"step {step}/{steps}  loss {loss:.3f}  {time.monotonic() - began:.0f} s",
                file=sys.stderr,
                flush=True,
            )

    learned, record.losses = fine_tune(decoder, samples, how, say)
    record.seconds = round(time.monotonic() - began, 1)
    out = save_model(learned, out, tokenizer)
    if told is not None:
        (out / PROMPTS_FILE).write_text(yaml.safe_dump({"prompts": told}))
    (out / WARMSTART_FILE).write_text(json.dumps({"env": id, **vars(record), **vars(how)}, indent=1))
    return out


def _check_folder(out: Path) -> None:
    """Raise, before the wait, what writing to this folder would raise after it. Nothing is left behind."""
    made = [folder for folder in (out, *out.parents) if not folder.exists()]
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=out):
        pass
    for folder in made:
        folder.rmdir()


def _prompts(id: str, model: str, prompts: object, args: Mapping[str, object]) -> object:
    """The set that is learned, as `make` takes it; None of a workflow without sets."""
    if prompts is None and spec(id).make_workflow(**args).prompt_set is None:
        return None
    small = model in PACKAGES  # what is learned needs no long words, and they are a third of the cost
    wanted = prompts if prompts is not None else "short" if small else prompts_of(model)
    chosen = spec(id).make_workflow(**args, prompts=wanted).prompt_set
    return None if chosen is None else thaw(chosen.choice)


def _arguments(parser: Parser, id: str, words: list[str]) -> dict[str, object]:
    """Read the arguments of a workflow: name=value."""
    for word in words:
        if "=" not in word:
            parser.error(parser.unknown(word))
    return typed_arguments(id, override({}, words))


def _check_named(parser: Parser, options: argparse.Namespace) -> None:
    """Refuse a command that does not name its environment or its folder."""
    missing = []
    if not options.id or "=" in options.id:  # none, or an argument of one
        missing.append("an environment (ID, such as mask-hotpotqa)")
    if options.out is None:
        missing.append("the folder of the new model (--out DIR)")
    if missing:
        parser.error(f"name {' and '.join(missing)}")


def warmstart_main(argv: Sequence[str]) -> int:
    """Fine-tune a model on the scripted expert's traces."""
    parser = Parser(
        "unitymas warmstart",
        description=warmstart_main.__doc__,
        hint="the environment is configured by name=value",
    )
    parser.add_argument("id", nargs="?", default="", help="an environment with a scripted expert")
    parser.add_argument(
        "args", nargs="*", metavar="name=value", help="arguments of the workflow, such as top_k=3"
    )
    parser.add_argument("--model", default="tiny", help="a model by name (default: tiny; `unitymas models`)")
    parser.add_argument("--out", type=Path, help="folder for the fine-tuned model")
    parser.add_argument("--tasks", type=COUNT, default=None, help="only the first so many tasks")
    parser.add_argument("--data", default=None, help="'mini', or a prepared data set")
    parser.add_argument(
        "--prompts", default=None, help="full, few-shot, short, or a file (default: by the model)"
    )
    more = number(0, kind=float)
    parser.add_argument("--epochs", type=more, default=1.0, help="passes over the traces (default 1)")
    parser.add_argument(
        "--replies", type=number(0), default=0, help="number of replies to learn, instead of --epochs"
    )
    parser.add_argument(
        "--lr",
        type=number(0, 1, kind=float),
        default=0.0,
        help="learning rate (default 3e-4; of an adapter 1e-3)",
    )
    parser.add_argument("--batch", type=COUNT, default=16, help="replies in an optimizer step (default 16)")
    parser.add_argument(
        "--lora",
        type=number(0),
        default=0,
        help="rank of a LoRA adapter to train (default: the whole model is trained)",
    )
    parser.add_argument(
        "--precision",
        choices=("float32", "bfloat16"),
        default="",
        help="precision of training (default: the faster one on this machine)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the order of the replies and of an adapter (default 0)"
    )
    options = parser.parse_intermixed_args(argv)
    _check_named(parser, options)
    if not options.epochs and not options.replies:
        parser.error("--epochs 0 learns nothing; give --epochs or --replies")
    config = _arguments(parser, options.id, options.args)
    names = ("epochs", "lr", "batch", "lora", "precision", "seed")
    settings = {"draws": options.replies, **{name: getattr(options, name) for name in names}}
    where = warmstart(
        options.id, options.model, options.out, tasks=options.tasks, data=options.data, prompts=options.prompts, args=config, **settings
    )  # fmt: skip
    name = str(where) if where.is_absolute() else f"./{where}"
    print(
        f"warm-started model: {where}   (unitymas train {shlex.quote(options.id)} --model {shlex.quote(name)})"
    )
    return 0
