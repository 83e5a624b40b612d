"""A warm start: TRL's `SFTTrainer` on the expert's traces.

unitymas warmstart mask-hotpotqa --model tiny --out runs/warm --tasks 512 --epochs 1
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from os.path import commonprefix
from pathlib import Path
from typing import Any, Literal

from ..agents.text.chat import Chat
from ..cli.arguments import COUNT, Parser
from ..envs.core.drivers import rollout
from ..envs.core.trace import Trace
from ..envs.registry import make_arena, spec
from .rows import rows


def tokenized(
    data: Iterable[Mapping[str, Any]], tokenizer: Any, kind: Literal["sft", "dpo"]
) -> list[dict[str, Any]]:
    """Rows with a prompt as the tokens that TRL learns from: only the template writes control tokens in them.

    TRL's own reading would take a `<|im_end|>` in a passage for the end of a turn.
    """
    chat = Chat(tokenizer)
    tokens = []
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
    id: str, tasks: int | None = None, data: str | None = None, split: str = "train", prompts: Any = None
) -> list[Trace]:
    """Traces of the scripted expert on an environment's training tasks; only episodes it solved."""
    env_spec = spec(id)
    where: dict[str, Any] = {"split": split, **({} if env_spec.tasks is not None else {"data": data})}
    arena = make_arena(id, prompts=prompts, **where)
    success = env_spec.success or env_spec.headline
    return [t for t in rollout(arena, "scripted", tasks=tasks) if t.metrics.get(success, 0.0) >= 1.0]


def warmstart(
    id: str,
    model: str | Path,
    out: str | Path,
    *,
    tasks: int | None = None,
    data: str | None = None,
    prompts: Any = None,
    **settings: Any,
) -> Path:
    """Fine-tune a model on the expert's traces; gives the directory of the new one, to be named in `groups.*.model`.

    Without `prompts` it learns the set that the model was made with: "short" of the tiny one, "full" of all others.
    """
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import SFTConfig, SFTTrainer

    from ..agents import model_path
    from ..agents.model.weights import load_tokenizer

    traces = expert_traces(
        id, tasks, data
    )  # first: what is wrong with the environment is known before a model is loaded
    path = model_path(model)
    tokenizer = load_tokenizer(path)
    gguf = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
    network = AutoModelForCausalLM.from_pretrained(path.parent if gguf else path, dtype="float32", **gguf)
    config = SFTConfig(
        output_dir=str(Path(out) / "trainer"),
        **{
            "num_train_epochs": 1, "per_device_train_batch_size": 16, "learning_rate": 2e-4, "logging_steps": 10,
            "save_strategy": "no", "report_to": [], "use_cpu": True, "bf16": False, "completion_only_loss": True,
            **settings,
        },
    )  # fmt: skip
    told = prompts if prompts is not None or str(model) != "tiny" else "short"
    traces = expert_traces(id, tasks, data, prompts=told)
    trainer = SFTTrainer(
        model=network, args=config, processing_class=tokenizer,
        train_dataset=Dataset.from_list(tokenized(rows(traces), tokenizer, "sft")),
    )  # fmt: skip
    trainer.train()
    network.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return Path(out)


def warmstart_main(argv: Sequence[str]) -> int:
    """Fine-tune a model on the scripted expert's traces with TRL."""
    parser = Parser("unitymas warmstart", description=warmstart_main.__doc__)
    parser.add_argument("id", help="an environment with a scripted expert")
    parser.add_argument("--model", default="tiny", help="a model by name (default: tiny; `unitymas models`)")
    parser.add_argument("--out", type=Path, required=True, help="folder for the fine-tuned model")
    parser.add_argument("--tasks", type=COUNT, default=None, help="only the first so many tasks")
    parser.add_argument("--data", default=None, help="'mini', or a prepared data set")
    parser.add_argument(
        "--prompts", default=None, help="full, few-shot, short, or a file (default: by the model)"
    )
    parser.add_argument("--epochs", type=float, default=1.0, help="passes over the traces (default 1)")
    parser.add_argument("--lr", type=float, default=2e-4, help="learning rate (default 2e-4)")
    args = parser.parse_args(argv)
    where = warmstart(
        args.id, args.model, args.out, tasks=args.tasks, data=args.data, prompts=args.prompts,
        num_train_epochs=args.epochs, learning_rate=args.lr,
    )  # fmt: skip
    told = shlex.quote(f"groups.*.model={where}")
    print(f"warm-started model: {where}   (unitymas train {shlex.quote(args.id)} {told})")
    return 0
