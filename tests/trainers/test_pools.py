"""Groups that share a device by turns: the same weights as without a pool, and their memory given away while they learn."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import unitymas
from unitymas.trainers.config.group_settings import GroupSpec
from unitymas.trainers.config.plan import check_gpus
from unitymas.trainers.config.reader import ConfigError
from unitymas.trainers.config.resolve import resolve
from unitymas.trainers.controller.run import train
from unitymas.trainers.group import shared_device
from unitymas.trainers.group.model_group import ModelGroup

from .pairs import register_pair

ID = "two-of-pools"


@pytest.fixture(scope="module", autouse=True)
def environment() -> Any:
    register_pair(ID)
    yield
    unitymas.envs.registry.unregister(ID)


def settings(model: str, **group: Any) -> dict[str, Any]:
    """Two groups, each with a policy that has a critic."""
    policy = {
        "algorithm": {"name": "ppo"},
        "learning": {"lr": 1e-2},
        "sampling": {"temperature": 5.0, "max_tokens": 2},
    }
    return {
        "steps": 1, "tasks_per_step": 2, "k": 2, "minibatches": 1, "starved": False, "deterministic": True,
        "checkpoint_every": 0, "eval": {"every": 0, "tasks": 1}, "log": {"console": "off", "traces_every": 0},
        "groups": {name: {"model": model, "slots": 4, "threads": 1, **group} for name in ("left", "right")},
        "policies": {"one": {**policy, "group": "left"}, "two": {**policy, "group": "right"}},
        "map": {"first": "one", "second": "two"},
    }  # fmt: skip


def weights(folder: Path) -> list[bytes]:
    files = sorted(folder.glob("policies/*/*.safetensors"))
    assert len(files) == 2
    return [file.read_bytes() for file in files]


def test_a_pool_changes_memory_and_no_weight(
    tiny_llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_work, most, lock = 0, 0, threading.Lock()
    update = ModelGroup._update

    def counted(*arguments: Any) -> Any:
        nonlocal at_work, most
        with lock:
            at_work += 1
            most = max(most, at_work)
        try:
            return update(*arguments)
        finally:
            with lock:
                at_work -= 1

    monkeypatch.setattr(ModelGroup, "_update", counted)
    shared = train(ID, directory=tmp_path / "pool", **settings(tiny_llama, pool="gpu"))
    assert most == 1  # by turns
    train(ID, directory=tmp_path / "apart", **settings(tiny_llama))
    assert weights(tmp_path / "pool") == weights(tmp_path / "apart")
    row = next(row for row in reversed(shared.history) if row["kind"] == "step")
    for group in ("left", "right"):
        assert row[f"memory/{group}/learn/keys_values"] == 0.0 < row[f"memory/{group}/collect/keys_values"]
        assert row[f"memory/{group}/learn/gradients"] == row[f"memory/{group}/collect/gradients"] == 0.0
        assert row[f"memory/{group}/collect/optimizer"] > 0.0  # on a CPU it has nowhere to go


def test_all_of_an_optimizer_moves() -> None:
    """To a device without memory, because this machine may have one device alone."""
    parameters = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2, 2))]
    optimiser = torch.optim.AdamW(parameters)
    sum(p.sum() for p in parameters).backward()
    optimiser.step()
    shared_device.move(optimiser, torch.device("meta"))
    moved = [x for state in optimiser.state.values() for x in state.values()]
    assert len(moved) == 6 and all(x.device.type == "meta" for x in moved)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["groups.left.pool=a"], "groups.left.pool: nobody else is in the pool 'a'"),
        (["groups.*.pool=a", "groups.left.device=cuda:0"], "groups.right.device: the groups of pool 'a' share one device"),
        (["groups.*.pool=a", "groups.left.ranks=2"], "groups.left.pool: ranks and replicas have devices of their own"),
        (["groups.*.pool=a", "groups.right.replicas=2"], "groups.right.pool: ranks and replicas have devices"),
        (["groups.*.pool=a", "groups.*.engine=vllm", "deterministic=false"], "enable_sleep_mode=true"),
    ],
)  # fmt: skip
def test_what_no_pool_can_be_is_refused(tiny_llama: str, overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve(ID, overrides=overrides, **settings(tiny_llama))
    assert words in str(error.value)


def test_two_groups_on_one_gpu_need_a_pool() -> None:
    def spec(name: str, **more: Any) -> GroupSpec:
        return GroupSpec(name=name, model="tiny", device="cuda:0", **more)

    with pytest.raises(
        ConfigError, match=r"groups.b.device: it would share GPU 0 with group 'a'; .* groups.\*.pool"
    ):
        check_gpus({"a": spec("a"), "b": spec("b")}, 1)
    check_gpus({"a": spec("a", pool="p"), "b": spec("b", pool="p")}, 1)
    with pytest.raises(ConfigError, match="groups.b.device"):
        check_gpus({"a": spec("a", pool="p"), "b": spec("b", pool="q")}, 1)
