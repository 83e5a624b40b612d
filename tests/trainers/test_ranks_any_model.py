"""Models that transformers computes, sharded over ranks: the same losses and weights as in one process."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from unitymas.agents.llm import load_model_policy
from unitymas.trainers.algorithms import make_algorithm
from unitymas.trainers.config.group_settings import Adapter, GroupSpec, Learning, PolicySpec, Sampling
from unitymas.trainers.controller.statistics.table import Signal
from unitymas.trainers.group.model_group import ModelGroup
from unitymas.trainers.group.ranks.group import RankedGroup

from ..any_models import folder
from .test_ranks import alike, call

pytestmark = pytest.mark.filterwarnings("ignore")
LEARNING = Learning(lr=1e-3, micro_tokens=60)


def spec(model: str, **options: Any) -> GroupSpec:
    short = Sampling(max_tokens=6)
    policies = {
        "team": PolicySpec(learning=replace(LEARNING, checkpointing=True), sampling=short, reference=True),
        "critic": PolicySpec(learning=LEARNING, critic=True),
        "side": PolicySpec(learning=LEARNING, adapter=Adapter(rank=4), sampling=short),
    }
    how = {"slots": 8, "threads": 1, "deterministic": True} | options
    return GroupSpec(name="main", model=model, policies=policies, **how)


async def step(group: Any, number: int = 0) -> dict[str, float]:
    """Play, value, update in uneven mini-batches, publish; what was said and learned, as figures."""
    figures: dict[str, float] = {}
    for policy in ("team", "side"):
        episodes = [f"{policy}-{number}-{i}" for i in range(5)]
        answers = await asyncio.gather(*(group.generate(policy, call(e, i)) for i, e in enumerate(episodes)))
        ids = [id for e in episodes for id in await group.seal(e, ["0"])]
        ppo = make_algorithm("ppo", kl_loss=0.01 if policy == "team" else 0.0, whiten="none")
        await group.values(policy, ids, ppo.needs, "critic")
        signals = [Signal(id, None, tail=float(i % 3 - 1)) for i, id in enumerate(ids)]
        metrics = await group.update(policy, ppo, signals, [ids[:4], ids[4:]])
        judged = await group.update("critic", ppo, signals, [ids])
        names = ("loss", "grad_norm", "max_log_ratio", "entropy")
        figures |= {f"{policy}/{name}": metrics[name] for name in names}
        figures |= {f"{policy}/critic/loss": judged["loss"], f"{policy}/mismatch": metrics["max_mismatch"]}
        figures[f"{policy}/words"] = float(sum(map(ord, "".join(answer.text for answer in answers))))
        await group.publish()
        await group.retire(episodes)
    return figures


async def exported(group: Any, path: Path) -> dict[str, torch.Tensor]:
    """All that was learned, by name."""
    tensors: dict[str, torch.Tensor] = {}
    for policy in ("team", "side"):
        await group.export(policy, path / policy)
        parts = load_file(path / policy / "model.safetensors")
        tensors |= {f"{policy}/{name}": tensor for name, tensor in parts.items()}
    return tensors


def distance(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    assert got.keys() == want.keys()
    apart = sum(float((got[n].double() - want[n].double()).square().sum()) for n in want)
    return float((apart / sum(float(t.double().square().sum()) for t in want.values())) ** 0.5)


@pytest.mark.parametrize(("kind", "context"), [("gemma3_text", 2), ("qwen3_moe", 1), ("deepseek_v3", 1)])
def test_ranks_learn_what_one_process_learns(kind: str, context: int, tmp_path: Path) -> None:
    """A full policy, a critic and an adapter, over two ranks (with `context` 2 they share each row); a checkpoint goes on
    with one; the export speaks alike.
    """
    model = folder(kind, tmp_path / "model")
    how = {
        "deterministic": kind == "gemma3_text"
    }  # experts compute the tokens that they get, never a fixed number

    async def run() -> None:
        one, two = (
            ModelGroup(spec(model, **how)),
            RankedGroup(spec(model, ranks=2, context_ranks=context, **how)),
        )
        try:
            want, got = await step(one), await step(two)
            assert alike(got, want), (got, want)
            assert got["team/mismatch"] < 1e-4 and got["side/mismatch"] < 1e-4
            learned = await exported(two, tmp_path / "two")
            assert distance(learned, await exported(one, tmp_path / "one")) < 1e-5
            before = await two.generate("team", call("probe", 3), temperature=0.0, keep=False)
            await two.save(tmp_path / "kept")
            end = await step(two, 1)
        finally:
            await two.close()
        again = ModelGroup(spec(model, **how))
        await again.load(tmp_path / "kept")
        onward = await step(again, 1)
        assert alike(onward, end), (onward, end)
        speaker = load_model_policy(tmp_path / "two" / "team", max_tokens=6, temperature=0.0)
        reply = await speaker.act(call("probe", 3))
        assert reply.text == before.text

    asyncio.run(run())


def test_a_model_that_cannot_be_packed_is_refused(tmp_path: Path) -> None:
    """Ranks would call its layers unequally often, and wait for each other without end."""
    model = folder("jamba", tmp_path / "model")
    with pytest.raises(
        (ValueError, RuntimeError), match="groups.main.ranks: a model whose rows cannot be packed"
    ):
        RankedGroup(spec(model, ranks=2))


@pytest.mark.parametrize("context", [1, 2])
def test_adapters_by_role_learn_over_ranks(tiny_llama: str, tmp_path: Path, context: int) -> None:
    """The base learns from every role, an adapter from its own alone: over two ranks as in one process."""
    adapters = {"planner": Adapter(rank=2), "solver": Adapter(rank=4)}
    policies = {"team": PolicySpec(learning=LEARNING, adapters=adapters, sampling=Sampling(max_tokens=6))}

    async def learn(group: Any, path: Path) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        roles = ["planner", "solver", "judge", "planner", "planner"]
        calls = [replace(call(f"e{i}", i), role=role) for i, role in enumerate(roles)]
        await asyncio.gather(*(group.generate("team", own) for own in calls))
        ids = [id for own in calls for id in await group.seal(own.episode, ["0"])]
        signals = [Signal(id, float(i % 3 - 1)) for i, id in enumerate(ids)]
        figures = await group.update("team", make_algorithm("grpo"), signals, [ids, ids[:2]])
        await group.publish()
        await group.export("team", path)
        files = sorted(path.rglob("*.safetensors"))
        tensors = {f"{f.relative_to(path)}/{n}": t for f in files for n, t in load_file(f).items()}
        return {name: figures[name] for name in ("loss", "grad_norm", "entropy")}, tensors

    async def run() -> None:
        parts = replace(spec(tiny_llama), policies=policies)
        one = ModelGroup(parts)
        two = RankedGroup(replace(parts, ranks=2, context_ranks=context))
        try:
            want, learned = await learn(one, tmp_path / "one")
            got, sharded = await learn(two, tmp_path / "two")
        finally:
            await two.close()
        assert alike(got, want), (got, want)
        assert distance(sharded, learned) < 1e-5
        assert {"roles/planner/adapter", "roles/solver/adapter"} <= {str(Path(n).parents[1]) for n in learned}

    asyncio.run(run())
