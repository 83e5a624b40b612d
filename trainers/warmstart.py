"""A warm start: TRL's `SFTTrainer` on the expert's traces; and traces as `datasets` for whoever trains elsewhere.

    unitymas warmstart mask-hotpotqa --model tiny --out runs/warm --tasks 512 --epochs 1

`to_hf_dataset(traces, kind)` gives rows that TRL's trainers take as they are:

    sft                  messages: the prompt and the reply
    prompt-completion    prompt and completion, conversational: only the reply is learned
    dpo                  prompt, chosen, rejected: two replies of one agent to the same messages, the better-paid first
    steps                one row an act, with role, turn, rewards and credit
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from ..envs.drivers import rollout
from ..envs.registry import make_arena, spec
from ..envs.trace import Trace, jsonable
from ..envs.workflow import Node
from .decisions import prompt_hash

Kind = Literal["sft", "prompt-completion", "dpo", "steps"]


def rows(traces: Iterable[Trace], kind: Kind = "prompt-completion") -> list[dict[str, Any]]:
    """The rows of a data set, plain."""
    found = list(traces)
    if kind == "dpo":
        return _pairs(found)
    makers = {"sft": _sft, "prompt-completion": _completion, "steps": _step}
    if kind not in makers:
        raise ValueError(f"unknown kind {kind!r}; choose sft, prompt-completion, dpo or steps")
    return [makers[kind](trace, node) for trace in found for node in trace.acts()]


def to_hf_dataset(traces: Iterable[Trace], kind: Kind = "prompt-completion") -> Any:
    """The same as a `datasets.Dataset`."""
    from datasets import Dataset

    return Dataset.from_list(rows(traces, kind))


def _messages(node: Node) -> list[dict[str, str]]:
    return [{"role": m["role"], "content": str(m["content"])} for m in node.messages]


def _said(node: Node) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": node.text or ""}]


def _sft(trace: Trace, node: Node) -> dict[str, Any]:
    return {"messages": _messages(node) + _said(node), "role": node.role, "task_id": trace.task_id}


def _completion(trace: Trace, node: Node) -> dict[str, Any]:
    return {"prompt": _messages(node), "completion": _said(node), "role": node.role, "task_id": trace.task_id}


def _step(trace: Trace, node: Node) -> dict[str, Any]:
    rewards = trace.rewards(node.id)
    return {
        **_completion(trace, node), "env_id": trace.env_id, "sample": trace.sample, "node": node.id,
        "agent": node.agent, "turn": node.turn, "ok": node.ok, "value": json.dumps(jsonable(node.value)),
        "rewards": json.dumps(rewards), "credit": float(sum(rewards.values())), "ended": str(trace.ended),
    }  # fmt: skip


def _pairs(traces: Sequence[Trace]) -> list[dict[str, Any]]:
    """The best and the worst reply of an agent to the very same messages, where their credit differs."""
    siblings: dict[str, list[tuple[float, Trace, Node]]] = {}
    for trace in traces:
        for node in trace.acts():
            credit = float(sum(trace.rewards(node.id).values()))
            siblings.setdefault(f"{trace.task_id}/{prompt_hash(node)}", []).append((credit, trace, node))
    found = []
    for members in siblings.values():
        low, high = min(members, key=lambda m: m[0]), max(members, key=lambda m: m[0])
        if high[0] > low[0]:
            found.append(
                {
                    "prompt": _messages(high[2]), "chosen": _said(high[2]), "rejected": _said(low[2]),
                    "role": high[2].role, "task_id": high[1].task_id, "margin": high[0] - low[0],
                }
            )  # fmt: skip
    return found


def expert_traces(
    id: str, tasks: int | None = None, data: str | None = None, split: str = "train"
) -> list[Trace]:
    """What the scripted expert does on an environment's training tasks; only episodes it solved."""
    known = spec(id)
    where: dict[str, Any] = {"split": split, **({} if known.tasks is not None else {"data": data})}
    arena = make_arena(id, **where)
    success = known.success or known.headline
    return [t for t in rollout(arena, "scripted", tasks=tasks) if t.metrics.get(success, 0.0) >= 1.0]


def warmstart(
    id: str,
    model: str | Path,
    out: str | Path,
    *,
    tasks: int | None = None,
    data: str | None = None,
    **settings: Any,
) -> Path:
    """Fine-tune a model on the expert's traces; gives the directory of the new one, to be named in `groups.*.model`."""
    from transformers import AutoModelForCausalLM
    from trl import SFTConfig, SFTTrainer

    from ..agents import model_path
    from ..agents.weights import load_tokenizer

    path = model_path(model)
    tokenizer = load_tokenizer(path)
    network = AutoModelForCausalLM.from_pretrained(path, dtype="float32")
    config = SFTConfig(
        output_dir=str(Path(out) / "trainer"),
        **{
            "num_train_epochs": 1, "per_device_train_batch_size": 16, "learning_rate": 2e-4, "logging_steps": 10,
            "save_strategy": "no", "report_to": [], "use_cpu": True, "bf16": False, "completion_only_loss": True,
            **settings,
        },
    )  # fmt: skip
    trainer = SFTTrainer(
        model=network, args=config, processing_class=tokenizer,
        train_dataset=to_hf_dataset(expert_traces(id, tasks, data)),
    )  # fmt: skip
    trainer.train()
    network.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return Path(out)


def warmstart_main(argv: Sequence[str]) -> int:
    """Fine-tune a model on the scripted expert's traces with TRL."""
    parser = argparse.ArgumentParser("unitymas warmstart", description=warmstart_main.__doc__)
    parser.add_argument("id")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tasks", type=int, default=None)
    parser.add_argument("--data", default=None)
    parser.add_argument("--epochs", type=float, default=1.0)
    parser.add_argument("--lr", type=float, default=2e-4)
    args = parser.parse_args(argv)
    where = warmstart(
        args.id, args.model, args.out, tasks=args.tasks, data=args.data,
        num_train_epochs=args.epochs, learning_rate=args.lr,
    )  # fmt: skip
    print(f"warm-started model: {where}   (unitymas train {args.id} 'groups.*.model={where}')")
    return 0
