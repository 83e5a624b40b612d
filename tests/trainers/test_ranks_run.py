"""A run of two groups over ranks, killed and resumed on another number of them: what an undisturbed run learns."""

import importlib.util
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from unitymas.trainers.config.group_settings import GroupSpec
from unitymas.trainers.config.plan import check_gpus
from unitymas.trainers.config.schema import ConfigError
from unitymas.trainers.controller.reporting.loggers import rows_of
from unitymas.trainers.controller.run import train

_spec = importlib.util.spec_from_file_location("killed_run", Path(__file__).with_name("killed_run.py"))
assert _spec is not None and _spec.loader is not None
killed_run = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(killed_run)


@pytest.fixture(autouse=True)
def environment():
    forget = killed_run.register()
    yield
    forget()


def losses(directory: Path) -> dict[tuple[int, str], float]:
    rows = [row for row in rows_of(directory / "metrics.jsonl") if row["kind"] == "step"]
    return {
        (row["step"], name): row[name]
        for row in rows
        for name in row
        if name.endswith(("/loss", "/grad_norm"))
    }


def weights(directory: Path) -> torch.Tensor:
    files = sorted(directory.rglob("policies/*/model.safetensors")) or sorted(
        directory.rglob("model.safetensors")
    )
    assert len(files) >= 2
    return torch.cat([t.flatten() for file in files for _, t in sorted(load_file(file).items())]).double()


@pytest.mark.timeout(900)
def test_a_run_killed_over_ranks_goes_on_with_one(tiny_llama: str, tmp_path: Path) -> None:
    command = [sys.executable, killed_run.__file__, tiny_llama, str(tmp_path / "killed"), "2"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert ended.returncode == -9, ended.stderr
    supervisors = json.loads(ended.stdout.splitlines()[-1])
    assert supervisors.keys() == {"one", "two"}
    until = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in supervisors.values()) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in supervisors.values())  # they end with their ranks
    train(directory=tmp_path / "killed", resume=True, overrides=["groups.one.ranks=1", "groups.two.ranks=1"])
    train(killed_run.ID, directory=tmp_path / "whole", **killed_run.tree(tiny_llama, 1))
    got, want = losses(tmp_path / "killed"), losses(tmp_path / "whole")
    assert want and got.keys() == want.keys()
    assert all(abs(got[key] - want[key]) <= 1e-5 * max(1.0, abs(want[key])) for key in want)
    mine, theirs = weights(tmp_path / "killed"), weights(tmp_path / "whole")
    assert float((mine - theirs).norm() / theirs.norm()) < 1e-5


def test_ranks_need_gpus_of_their_own() -> None:
    one = GroupSpec(name="one", model="tiny", device="cuda:0", ranks=2)
    two = replace(one, name="two", device="cuda:2")
    check_gpus({"one": one, "two": two, "cpu": replace(one, device="cpu", ranks=9)}, 4)
    check_gpus(
        {"one": replace(one, ranks=1), "two": replace(one, name="two", ranks=1)}, 1, {"one", "two"}
    )  # groups of one rank may share where they take turns
    with pytest.raises(ConfigError, match=r"groups.two.device: it would share GPU 0 with group 'one'"):
        check_gpus({"one": replace(one, ranks=1), "two": replace(one, name="two", ranks=1)}, 1, {"one"})
    with pytest.raises(
        ConfigError, match=r"groups.two.ranks: 2 ranks from cuda:2 on need GPUs 2 to 3, and torch sees 3"
    ):
        check_gpus({"one": one, "two": two}, 3)
    with pytest.raises(
        ConfigError, match=r"groups.two.device: it would share GPU 1 with group 'one'; .* fewer groups"
    ):
        check_gpus({"one": one, "two": replace(two, device="cuda:1")}, 4)
