"""MALT: search trees of generate, verify, refine become data for supervised and preference learning.

    unitymas train ID --preset separate recipe=malt recipe_args.width=3

In every step each task grows a full tree, `width` replies at every act. A reply is worth the mean score of the leaves
below it. What is worth more than `threshold` is imitated (SFT); where siblings lie on both sides of it, the better is
preferred to the worse (DPO). Both run in TRL's trainers, every `every` steps, on all that was gathered since.

Paper: Motwani et al., MALT: Improving Reasoning with Multi-Agent LLM Training, 2412.01928.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ...agents.basics.json_types import JsonView
from ...agents.basics.manifest import MANIFEST
from ...agents.basics.threads import in_thread
from ...envs.core.ledger import Credit
from ...envs.core.trace import Trace
from ..algorithms.algorithm import Plan, Tree
from ..config.choices import Count
from ..controller.checkpoint import Saved
from ..controller.statistics.table import Table
from ..controller.step import Default, StepMetrics, collected
from ..rows import TrainingRow

if TYPE_CHECKING:
    from ..controller.stage import Stage
    from ..controller.tree import Grown


@dataclass
class Malt(Default):
    width: int = 3
    """Replies per act. The tree has width to the power of acts leaves, at most tree.LEAVES. Usual 2–3."""
    every: Count = 1
    """Steps whose trees are collected for one round of fine-tuning."""
    threshold: float = 0.5
    """Threshold of a reply's value. Replies above it are good."""
    sft: JsonView = field(default_factory=dict)
    """Arguments of TRL's SFTConfig."""
    dpo: JsonView = field(default_factory=dict)
    """Arguments of TRL's DPOConfig."""

    def __post_init__(self) -> None:
        if self.width < 2:
            raise ValueError(f"recipe_args.width: 2 or more replies can be compared, got {self.width}")
        self._gathered: list[Trace] = []

    def check(self, run: Stage) -> None:
        from ...envs.core.branch import check_forks

        check_forks(run.arena, "recipe 'malt'")
        for name, policy in run.config.policies.items():
            if policy.adapter is not None:
                raise ValueError(
                    f"recipe 'malt' fine-tunes whole models, and policies.{name} is an adapter: leave adapter out"
                )

    def plan(self, run: Stage) -> Plan:
        return Plan(k=1, tree=Tree(self.width, "step", "all"))

    async def step(self, run: Stage) -> StepMetrics:
        harvest = await self.collect(run)
        for tree in harvest.grown:
            self._gathered += valued(tree, run.arena.headline)
        metrics = {**collected(harvest), "usable": float(len(self._gathered))}
        await run.keep(harvest.traces, Table(harvest.decisions))
        await run.hosts.retire(harvest.episodes)
        last = run.step + 1 == run.config.steps
        if self._gathered and ((run.step + 1) % self.every == 0 or last):
            for policy in self.trains(run):
                metrics |= await self.tune(run, policy)
            await run.hosts.publish()
            self._gathered = []
        return metrics

    def state_dict(self) -> dict[str, object]:
        return {"gathered": [trace.to_dict() for trace in self._gathered]}

    def load_state_dict(self, state: Saved) -> None:
        self._gathered = [Trace.from_dict(trace) for trace in state["gathered"]]

    async def tune(self, run: Stage, policy: str) -> StepMetrics:
        """Fine-tune one policy on its own replies: export, SFT, DPO, adopt."""
        mine = [t for t in self._gathered if t.nodes[0].meta.policy == policy]
        kinds: tuple[Literal["sft", "dpo"], ...] = ("sft", "dpo")
        data = {kind: rows(mine, kind, self.threshold) for kind in kinds}
        folder = run.dir / "malt" / f"step-{run.step:06d}" / policy
        if any(data.values()):
            await run.hosts.export(policy, folder)
            for kind, examples in data.items():
                if examples:
                    await in_thread(None, partial(fine_tune, kind, folder, examples, getattr(self, kind)))
            await run.hosts.adopt(policy, folder)
        return {f"policy/{policy}/{kind}_rows": float(len(examples)) for kind, examples in data.items()}


def valued(tree: Grown, headline: str) -> list[Trace]:
    """Return the tree's candidates, each credited with the mean score of the leaves below it."""
    scores: dict[str, list[float]] = {}
    for leaf in tree.leaves:
        trace = leaf.trace
        for name in leaf.names.values():
            scores.setdefault(name, []).append(trace.metrics.get(headline, 0.0))
    traces_kept = []
    for candidate in tree.candidates:
        for node in candidate.trace.nodes:
            name = candidate.names[node.id]
            trace = Trace(candidate.trace.env_id, candidate.trace.task_id, nodes=[node])
            trace.credits = [Credit(node.id, "value", math.fsum(scores[name]) / len(scores[name]))]
            traces_kept.append(trace)
    return traces_kept


def rows(traces: Sequence[Trace], kind: Literal["sft", "dpo"], threshold: float) -> list[TrainingRow]:
    """Return rows for TRL: good replies to imitate, or pairs on both sides of the threshold."""
    from ..rows import rows as rows_of

    if kind == "sft":
        best = [t for t in traces if t.credits[0].amount > threshold]
        return [
            {key: row[key] for key in ("prompt", "completion")} for row in rows_of(best, "prompt-completion")
        ]
    binary = []
    for trace in traces:
        node, _, value = trace.credits[0]
        good = Credit(node, "good", float(value > threshold))
        binary.append(Trace(trace.env_id, trace.task_id, nodes=trace.nodes, credits=[good]))
    return [{key: row[key] for key in ("prompt", "chosen", "rejected")} for row in rows_of(binary, "dpo")]


def fine_tune(
    kind: Literal["sft", "dpo"], folder: Path, data: list[TrainingRow], settings: Mapping[str, object]
) -> None:
    """Run TRL's trainer of this kind once on the model in `folder`, and replace the model."""
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from ..warmstart import tokenized

    class TokenizedDPO(trl.DPOTrainer):  # type: ignore[misc]
        """TRL's DPO trainer for rows that are already tokenized. (TRL's SFT trainer recognises such rows by itself.)"""

        def _prepare_dataset(self, dataset: object, *_: object) -> object:
            return dataset

    trainer_of, config_of = {"sft": (trl.SFTTrainer, trl.SFTConfig), "dpo": (TokenizedDPO, trl.DPOConfig)}[
        kind
    ]
    network = AutoModelForCausalLM.from_pretrained(folder, dtype="float32", local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    config = config_of(
        output_dir=str(folder / kind),
        **{
            "num_train_epochs": 1, "per_device_train_batch_size": 8, "learning_rate": 5e-6 if kind == "dpo" else 1e-5,
            "logging_steps": 10, "save_strategy": "no", "report_to": [], "use_cpu": True, "bf16": False,
            "disable_tqdm": True, **settings,
        },
    )  # fmt: skip
    trainer = trainer_of(
        model=network, args=config, processing_class=tokenizer,
        train_dataset=Dataset.from_list(tokenized(data, tokenizer, kind)),
    )  # fmt: skip
    trainer.train()
    (folder / MANIFEST).unlink(missing_ok=True)  # the folder no longer holds the exported weights
    network.save_pretrained(folder)
