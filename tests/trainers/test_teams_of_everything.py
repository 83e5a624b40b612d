"""One run trains a team of everything: families, tokenizers, adapters of several ranks, a prefix, and players that stay."""

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import unitymas
from unitymas import Outcome, Role, Workflow
from unitymas.agents.basics.threads import ThreadError
from unitymas.agents.llm import load_model_policy
from unitymas.agents.policies import Call
from unitymas.envs.registry import unregister
from unitymas.trainers.controller.run import train
from unitymas.trainers.group.learning.update import Learner

from ..any_models import folder

pytestmark = pytest.mark.filterwarnings("ignore")
ID = "everybody-test"
SEATS = ("gemma", "phi", "small", "large", "prefix", "frozen", "scripted", "remote")
TRAINED = ("gemma", "phi", "small", "large", "prefix")


class Everybody(Workflow):
    """Each role speaks once, and is paid for what it says."""

    roles = tuple(Role(name) for name in SEATS)

    async def run(self, ep: Any) -> Outcome:
        for name in SEATS:
            await ep.act(name, ep.task.question)
        return Outcome(answer="")


class Even:
    """The share of an act's words whose number is even."""

    name = "even"

    def on_node(self, trace: Any, node: Any, task: Any) -> Iterator[Any]:
        words = (node.text or "").split()
        yield node.id, "even", sum(w[-1:] in "02468" for w in words) / max(1, len(words))


class Spoken(BaseHTTPRequestHandler):
    """A server that another team runs: it says w2, whatever it is asked."""

    asked = 0

    def do_POST(self) -> None:
        type(self).asked += 1
        json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        message = {"message": {"role": "assistant", "content": "w2"}, "finish_reason": "stop"}
        body = {"choices": [message], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: Any) -> None:
        """Stay silent."""


@pytest.fixture
def url() -> Iterator[str]:
    http = ThreadingHTTPServer(("127.0.0.1", 0), Spoken)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{http.server_port}/v1"
    http.shutdown()
    http.server_close()


@pytest.fixture(autouse=True)
def everybody() -> Iterator[None]:
    rows = [{"id": str(i), "question": "w1 w2 w3 w4"[: 2 + 3 * (i % 4)], "answers": ["w2"]} for i in range(8)]
    unitymas.register(ID, workflow=Everybody, reward=Even, tasks=rows, expert=lambda call: "w4")
    yield
    unregister(ID)


def settings(models: Path, url: str) -> dict[str, Any]:
    """The whole team, as a map."""
    base = {"slots": 8, "threads": 1}
    common = {
        "learning": {"lr": 1e-2}, "sampling": {"max_tokens": 4}, "algorithm": {"name": "grpo"}
    }  # fmt: skip
    adapters = {
        "small": {"rank": 2},
        "large": {"rank": 6, "targets": ["q_proj", "o_proj"]},
        "prefix": {"tokens": 3},
    }
    return {
        "groups": {
            "one": {"model": str(models / "gemma"), **base},
            "two": {"model": str(models / "phi"), **base},
            "three": {"model": str(models / "olmo"), **base},
        },
        "policies": {
            "gemma": {"group": "one", **common},
            "phi": {"group": "two", **common},
            **{name: {"group": "three", "adapter": adapter, **common} for name, adapter in adapters.items()},
            "frozen": {"group": "two", "frozen": True, "sampling": {"max_tokens": 4}},
        },
        "map": {**{name: name for name in (*TRAINED, "frozen")}, "scripted": "scripted", "remote": f"openai:m@{url}"},
        "steps": 2, "tasks_per_step": 2, "k": 2, "deterministic": True, "starved": False, "checkpoint_every": 1,
        "eval": {"every": 0, "tasks": 2}, "log": {"console": "off"},
    }  # fmt: skip


@pytest.fixture
def models(tmp_path: Path) -> Path:
    folder("gemma3_text", tmp_path / "models" / "gemma", "w", 60)
    folder("phi3", tmp_path / "models" / "phi", "v", 40, seed=1)
    folder("olmo2", tmp_path / "models" / "olmo", "w", 50, seed=2)
    return tmp_path / "models"


class Killed(BaseException):
    """The process is gone."""


def states(run: Path) -> dict[str, torch.Tensor]:
    """All parameters of the last checkpoint, by group and policy."""
    last = max((run / "checkpoints").iterdir())
    return {
        f"{file.parent.name}/{policy}/{name}": tensor
        for file in sorted(last.rglob("policies.pt"))
        for policy, state in torch.load(file, weights_only=True).items()
        for name, tensor in state["parameters"].items()
    }


def test_one_run_trains_a_team_of_everything(
    models: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everyone who learns learns, nobody else changes; killed and resumed it is the same run; replies stay on export."""
    config = settings(models, url)
    whole = train(ID, directory=tmp_path / "whole", **config)
    steps = [row for row in whole.history if row["kind"] == "step"]
    assert len(steps) == 2 and Spoken.asked > 0
    for name in TRAINED:
        assert all(step[f"policy/{name}/max_mismatch"] < 1e-4 for step in steps)
        assert any(step[f"policy/{name}/grad_norm"] > 0 for step in steps)

    update, count = Learner.update, iter(range(100))

    def update_until_killed(self: Learner, *args: Any) -> Any:
        if next(count) == 7:  # in the second step, after some policies have learned
            raise Killed
        return update(self, *args)

    with monkeypatch.context() as patch, pytest.raises((Killed, ThreadError)):
        patch.setattr(Learner, "update", update_until_killed)
        train(ID, directory=tmp_path / "killed", **config)
    train(directory=tmp_path / "killed", resume=True)
    undisturbed, resumed = states(tmp_path / "whole"), states(tmp_path / "killed")
    assert undisturbed.keys() == resumed.keys()
    assert all(torch.equal(undisturbed[name], resumed[name]) for name in undisturbed)

    before = load_file(models / "phi" / "model.safetensors")
    frozen = {name.rpartition("/net.")[2]: t for name, t in resumed.items() if "/frozen/" in name}
    assert frozen and all(torch.equal(frozen[name], before[name]) for name in frozen)
    for name in ("small", "large", "prefix"):  # of the base, nothing is learned or saved
        own = [key for key in resumed if f"/{name}/" in key]
        assert own and all("lora_" in key or "prefixes" in key for key in own)

    for name in TRAINED:
        call = Call(
            agent=name, role=name, messages=({"role": "user", "content": "w1 v2"},), episode="e", node="0"
        )
        replies = []
        for run in ("whole", "killed"):
            policy = load_model_policy(tmp_path / run / "policies" / name, max_tokens=4, temperature=0.0)
            replies.append(asyncio.run(policy.act(call)).text)
        assert replies[0] == replies[1]
