"""Keys and values take the memory that requests need, whatever a model's context and an engine's slots allow."""

import asyncio

import pytest
import torch
from transformers import LlamaConfig, Qwen2Config

from unitymas.agents.engines.sampling import SamplingParams
from unitymas.agents.engines.torch import kv_cache as cache
from unitymas.agents.engines.torch import memory
from unitymas.agents.engines.torch.memory import available
from unitymas.agents.engines.torch.torch_engine import TorchEngine
from unitymas.agents.model.weights import from_config

torch.set_num_threads(1)
MIB = 1 << 20

# keys and values as of the real models; the other matrices small, for they are not what is measured
SMALL = {
    "hidden_size": 126,
    "intermediate_size": 32,
    "vocab_size": 64,
    "initializer_range": 0.3,
    "tie_word_embeddings": True,
}
QWEN = Qwen2Config(
    num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2, head_dim=64, max_position_embeddings=32768,
    eos_token_id=None, **SMALL,
)  # fmt: skip
SMOLLM2 = LlamaConfig(
    num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, head_dim=64, max_position_embeddings=8192,
    eos_token_id=None, **SMALL,
)  # fmt: skip
NARROW = LlamaConfig(
    num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=16, max_position_embeddings=1024,
    eos_token_id=None, **SMALL,
)  # fmt: skip


def held(engine):
    return engine.cache.both.nbytes + engine.prefixes.pool.nbytes


def prompt(n, seed=0):
    return torch.randint(0, 64, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def run(engine, requests):
    while not all(r.done for r in requests):
        engine.step()


@pytest.mark.parametrize(("config", "gib"), [(QWEN, 96), (SMOLLM2, 45)], ids=["qwen2.5-0.5b", "smollm2-135m"])
def test_the_default_engine_of_a_real_model_takes_what_its_requests_need(config, gib):
    engine = TorchEngine(from_config(config), slots=128)
    all_at_once = 128 * engine.context * engine.cache.token
    assert all_at_once > 0.45 * gib * 2**30 and held(engine) == 0
    requests = [engine.submit(prompt(40 + i, i), SamplingParams(max_tokens=20, seed=i)) for i in range(8)]
    run(engine, requests)
    used = sum(len(r.prompt) + len(r.ids) for r in requests) * engine.cache.token
    assert held(engine) < max(4 * used, 100 * MIB)


def test_growing_changes_no_token():
    """Against an engine whose slots were there from the start."""
    model = from_config(NARROW)

    def replies(laid_out):
        engine = TorchEngine(model, slots=8)
        if laid_out:
            engine.cache.lay_out(8, 1024)
        found, widths = [], set()
        for wave in range(3):
            requests = [
                engine.submit(prompt(20 + 90 * i, i), SamplingParams(max_tokens=30 * (i + 1), seed=i + wave, temperature=t))
                for i, t in enumerate((0, 1, 0.7, 0, 1))
            ]  # fmt: skip
            while not all(r.done for r in requests):
                engine.step()
                widths.add(engine.cache.size)
            found += [(r.result.ids, r.result.logprobs, r.result.cached) for r in requests]
        return found, widths

    fixed, grown = replies(True), replies(False)
    assert len(fixed[1]) == 1 and len(grown[1]) > 1
    assert fixed[0] == grown[0]


def test_where_memory_is_short_requests_wait_and_all_are_answered(monkeypatch):
    engine = TorchEngine(from_config(NARROW), slots=16)
    room = 640 * engine.cache.token  # tokens, of all slots
    monkeypatch.setattr(cache, "available", lambda _: 2 * room - engine.cache.both.nbytes)
    requests = [engine.submit(prompt(20 + i, i), SamplingParams(max_tokens=100, seed=i)) for i in range(12)]
    requests.insert(
        5, engine.submit(prompt(400), SamplingParams(max_tokens=200))
    )  # it needs nearly all of it
    side_by_side = set()
    while not all(r.done for r in requests):
        engine.step()
        side_by_side.add(len(engine.running))
        assert engine.cache.both.nbytes <= room
    assert max(side_by_side) == 5 and 1 in side_by_side
    assert [len(r.result.ids) for r in requests] == [100] * 5 + [200] + [100] * 7


def test_what_can_never_fit_is_an_error_with_the_figures_and_the_keys(monkeypatch):
    engine = TorchEngine(from_config(NARROW), slots=16)
    monkeypatch.setattr(cache, "available", lambda _: 2 * 300 * engine.cache.token - engine.cache.both.nbytes)

    async def ask():
        asked = [(prompt(20), 50), (prompt(500), 50), (prompt(30), 50)]
        return await asyncio.gather(
            *(engine.agenerate(p, SamplingParams(max_tokens=n)) for p, n in asked), return_exceptions=True
        )

    first, second, third = asyncio.run(ask())
    assert len(first.ids) == len(third.ids) == 50
    assert isinstance(second, MemoryError)
    for part in (
        "500 tokens",
        "up to 50",
        "GiB",
        "groups.*.context (1024)",
        "groups.*.slots (16)",
        "max_tokens",
        "cpu has",
        "precision=bfloat16",
        "--dtype bfloat16",
    ):
        assert part in str(second), part
    halved = TorchEngine(from_config(NARROW), slots=16, dtype=torch.bfloat16)._too_large("it", 500)
    assert "bfloat16" not in str(halved) and "--max-tokens)" in str(halved)
    with pytest.raises(MemoryError, match=r"16 slots of 1024 tokens need .* GiB.*groups\.\*\.slots"):
        TorchEngine(from_config(NARROW), slots=16, deterministic=True)


def test_a_pool_of_prefixes_that_cannot_grow_makes_room_for_the_newest(monkeypatch):
    engine = TorchEngine(from_config(NARROW), slots=2)
    monkeypatch.setattr(
        cache, "available", lambda _: 4 * 64 * engine.cache.token - engine.prefixes.pool.nbytes
    )
    monkeypatch.setattr(engine.cache, "limit", lambda: 10_000)
    for seed in range(4):
        run(engine, [engine.submit(prompt(40, seed), SamplingParams(max_tokens=1))])
        assert engine.prefixes.pool.nbytes <= 64 * engine.cache.token
    again = engine.submit(prompt(40, 3), SamplingParams(max_tokens=1))
    run(engine, [again])
    assert again.result.cached >= 36


@pytest.mark.parametrize("version", [1, 2])
def test_free_memory_is_no_more_than_any_control_group_leaves(version, tmp_path, monkeypatch):
    """Of the groups around this process the one with the least left counts; caches of files are free in it."""
    names = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        2: ("memory.max", "memory.current", "inactive_file"),
    }
    most, used, file = names[version]
    (tmp_path / "own").write_text("0::/jobs/mine\n" if version == 2 else "9:cpu:/\n4:memory:/jobs/mine\n")
    root = tmp_path if version == 2 else tmp_path / "memory"
    limits = {"": "max", "jobs": f"{80 * MIB}", "jobs/mine": f"{90 * MIB}"}
    for group, limit in limits.items():
        (root / group).mkdir(exist_ok=True)
        (root / group / most).write_text(f"{limit}\n")
        (root / group / used).write_text(f"{30 * MIB}\n")
        (root / group / "memory.stat").write_text(f"anon 5\n{file} {10 * MIB}\n")
    monkeypatch.setattr(memory, "CGROUPS", tmp_path)
    monkeypatch.setattr(memory, "OWN", tmp_path / "own")
    assert available(torch.device("cpu")) == (80 - 30 + 10) * MIB
    (root / "jobs" / most).write_text("max\n")
    assert available(torch.device("cpu")) == (90 - 30 + 10) * MIB
    (root / "jobs/mine" / used).write_text(f"{200 * MIB}\n")
    assert available(torch.device("cpu")) == 0


def test_free_memory_is_what_machine_and_containers_leave():
    free = available(torch.device("cpu"))
    kept = torch.ones(64 * MIB, dtype=torch.uint8)
    assert 0 < free < 1 << 50 and len(kept)
