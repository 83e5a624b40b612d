"""The run of docs/eight-gpus.md on a CPU, with two ranks and two engines: killed in its second step, and resumed."""

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from unitymas.agents.basics.failures import GroupLost
from unitymas.trainers.controller.run import Run, train
from unitymas.trainers.group.ranks.forked import RankProcesses

PAGE = (Path(__file__).parents[2] / "docs" / "eight-gpus.md").read_text()
SMALL = (
    "env.data=mini", "groups.main.model=tiny", "groups.main.device=cpu", "groups.main.ranks=2", "groups.main.gpus=0",
    "groups.main.replicas=2", "groups.main.slots=8", "groups.main.context=1024", "groups.main.threads=1",
    "policies.team.learning.micro_tokens=2048", "policies.team.learning.lr=1e-3", "policies.team.sampling.max_tokens=8",
    "runtime=local", "deterministic=true", "env.prompts=short", "env.args.max_turns=1", "steps=2", "tasks_per_step=1", "k=2", "minibatches=1",
    "starved=false", "eval.every=0", "eval.tasks=1", "checkpoint_every=1", "log.console=off",
)  # fmt: skip


@pytest.mark.timeout(600)
def test_the_run_of_the_page_is_killed_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "team.yaml"
    config.write_text(re.search(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[1])  # type: ignore[index]

    def begin(name: str) -> Run:
        return train(file=config, overrides=SMALL, directory=tmp_path / name, restarts=0)

    whole = begin("whole")
    call, updates = RankProcesses.call, list[str]()

    def fatal(ranks: RankProcesses, method: str, *arguments: Any) -> list[Any]:
        updates.extend([method] * (method == "update"))
        if len(updates) == 2:
            os.kill(call(ranks, "memory")[1]["process"], signal.SIGKILL)
        return call(ranks, method, *arguments)

    monkeypatch.setattr(RankProcesses, "call", fatal)
    with pytest.raises(GroupLost, match="rank 1 of 2 ended in (update|memory), killed by signal 9"):
        begin("killed")
    monkeypatch.undo()
    resumed = train(directory=tmp_path / "killed", resume=True)
    assert (resumed.step, whole.step) == (2, 2)
    saved = [tmp_path / name / "policies" / "team" / "model.safetensors" for name in ("whole", "killed")]
    assert saved[0].read_bytes() == saved[1].read_bytes()
