"""Overlap where a group has more than one engine, or shares its device."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from unitymas.envs.registry import unregister
from unitymas.trainers.controller.replayed_run import replay
from unitymas.trainers.controller.run import train
from unitymas.trainers.group.model_group import ModelGroup

from .pairs import register_pair

ID = "two-of-overlap-places"


@pytest.fixture(scope="module", autouse=True)
def environment() -> Any:
    register_pair(ID)
    yield
    unregister(ID)


def tree(model: str, **group: Any) -> dict[str, Any]:
    policy = {
        "algorithm": {"name": "grpo"},
        "learning": {"lr": 1e-2},
        "sampling": {"temperature": 5.0, "max_tokens": 2},
    }
    return {
        "steps": 3, "tasks_per_step": 2, "k": 2, "minibatches": 1, "starved": False, "deterministic": True, "overlap": "wait",
        "staleness": 1, "checkpoint_every": 0, "eval": {"every": 0, "tasks": 1}, "policies": {"team": policy},
        "log": {"console": "off", "traces_every": 0, "timeline": False},
        "groups": {"main": {"model": model, "slots": 4, "threads": 1, **group}},
    }  # fmt: skip


def test_replicas_replay_to_the_same_bits(tiny_llama: str, tmp_path: Path) -> None:
    """The replay compares episodes, figures and weights by itself. Of ranks that was tried by hand: their processes start slowly."""
    run = train(ID, directory=tmp_path / "run", **tree(tiny_llama, replicas=2))
    assert run.history[-1]["ending"] == "done" and (tmp_path / "run" / "policies" / "team").is_dir()
    assert replay(tmp_path / "run", tmp_path / "again").step == 3


def test_pools_replay_to_the_same_bits(
    tiny_llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that are on their way when the engines are to sleep end first; the others wait until they wake."""
    phase, flying = ModelGroup.phase, list[int]()

    async def met(group: ModelGroup, name: str) -> dict[str, int]:
        for _ in range(200 * (name == "learn" and group.spec.name == "a")):
            if group._running:
                break
            await asyncio.sleep(0.001)
        flying.append(len(group._running) if name == "learn" else 0)
        held = await phase(group, name)
        assert name == "collect" or not (group._running or held["keys_values"])
        return held

    monkeypatch.setattr(ModelGroup, "phase", met)
    more = tree(tiny_llama, pool="gpu")
    more["groups"] = dict.fromkeys("ab", more["groups"]["main"])
    team = more["policies"]["team"]
    more["policies"] = {"one": {**team, "group": "a"}, "two": {**team, "group": "b"}}
    run = train(ID, directory=tmp_path / "run", map={"first": "one", "second": "two"}, **more)
    assert run.history[-1]["ending"] == "done" and any(flying)
    monkeypatch.undo()
    assert replay(tmp_path / "run", tmp_path / "again").step == 3
