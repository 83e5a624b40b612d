"""An honest submission, and a forger who changes it and then signs everything again, as well as can be."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import yaml

from unitymas.agents.policies import Answer, Call
from unitymas.benchmarks.evaluation import identity
from unitymas.benchmarks.evaluation.evaluate import evaluate
from unitymas.benchmarks.evaluation.results import episode_list, episode_row, figures, results_text
from unitymas.benchmarks.leaderboard import checks as checking
from unitymas.benchmarks.leaderboard import submission
from unitymas.benchmarks.leaderboard.as_written import metadata_text
from unitymas.envs.core.trace import compressor, read_dicts
from unitymas.envs.registry import make_arena

ENV, TASKS, K = "rag-nq", 6, 4


class Sampler:
    """What a local model looks like from outside: it samples, counts tokens, and says who it is."""

    def act(self, call: Call) -> Answer:
        words = str(call.messages[-1]["content"]).split()
        said = f"<final_answer>{random.Random(call.seed).choice(words)}</final_answer>"
        meta = {"policy": "hf:someone/model", "version": 0, "tokens_in": len(words), "tokens_out": 5,
                "finish_reason": "stop"}  # fmt: skip
        return Answer(said, meta)

    def identity(self) -> dict[str, Any]:
        return {"model": "hf:someone/model", "weights": "0" * 64, "template_sha": "1" * 16, "adapter": None,
                "sampling": {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": 256, "stop": [], "seed": 0,
                             "choices": None}}  # fmt: skip

    def __repr__(self) -> str:
        return "hf:someone/model"


def honest(folder: Path, tasks: int = TASKS, k: int = K) -> Path:
    """A submission as the harness makes it: the expert asks, a sampled model answers."""
    team = {"answerer": Sampler(), "*": "scripted"}
    evaluate(ENV, team, k=k, tasks=tasks, data="mini", out=folder / "run")
    return submission.pack(folder / "run", folder / "honest", name="An honest team", authors="us")


class Entry:
    """A copy of a submission, to be forged."""

    def __init__(self, source: Path, folder: Path) -> None:
        self.folder = Path(shutil.copytree(source, folder))
        self.results: Any = json.loads((folder / "results.json").read_text())
        self.metadata: Any = yaml.safe_load((folder / "metadata.yaml").read_text())
        self.traces: list[Any] = list(read_dicts(folder / "traces.jsonl.zst"))

    @property
    def env(self) -> Any:
        return self.results["provenance"]["env"]

    @property
    def data(self) -> Any:
        return self.results["provenance"]["data"]

    @property
    def roles(self) -> Any:
        return self.results["provenance"]["roles"]

    def node(self, role: str = "answerer", episode: int = 0) -> Any:
        return next(n for n in self.traces[episode]["nodes"] if n["role"] == role)

    def use(self, episode: int = 0) -> Any:
        return next(n for n in self.traces[episode]["nodes"] if n["kind"] == "use")

    def of_task(self, number: int = 0) -> list[Any]:
        """All samples of one task."""
        task = list(dict.fromkeys(t["task_id"] for t in self.traces))[number]
        return [t for t in self.traces if t["task_id"] == task]

    def sign(self) -> None:
        """Make keys, players, digests, figures and hashes follow from what was forged."""
        self.keys()
        measure, price = checking.measure_of(self.results), tuple(self.results["price"])
        rows = [episode_row(t, measure, price) for t in self.traces]
        self.results["episodes"] = episode_list(rows)
        self.results["figures"] = figures(rows, measure, self.results["figures"]["k"])

    def keys(self) -> None:
        """Each trace's key, from what it should hash."""
        arena = make_arena(ENV, split="test", data="mini")
        world, players = identity.digest(self.env), identity.players_hash(self.roles)
        for trace in self.traces:
            task = arena.task(trace["task_id"])
            seed, sample = self.results["provenance"]["seed"], trace["sample"]
            trace["tags"]["players"] = players
            trace["tags"]["key"] = identity.sample_key(world, players, task, seed, sample)

    def write(self) -> Path:
        """Write the files, and their hashes."""
        pack = compressor()
        lines = [pack(json.dumps(t, separators=(",", ":")).encode() + b"\n") for t in self.traces]
        (self.folder / "traces.jsonl.zst").write_bytes(b"".join(lines))
        (self.folder / "results.json").write_text(results_text(self.results))
        return self.seal()

    def seal(self) -> Path:
        """Write the hashes of the files that lie there."""
        files = {name: submission.sha256(self.folder / name) for name in ("results.json", "traces.jsonl.zst")}
        self.metadata["files"] = files
        (self.folder / "metadata.yaml").write_text(metadata_text(self.metadata))
        return self.folder
