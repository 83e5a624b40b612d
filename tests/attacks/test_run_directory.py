"""A run directory that was damaged, mixed up or forged: refused by name, or gone back to the checkpoint before; never
resumed otherwise than it was written, and never run.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import random
import shutil
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import unitymas
from unitymas import Choice, Outcome, Role, Workflow
from unitymas.agents import TINY
from unitymas.agents.basics.manifest import MANIFEST, Damaged, manifest
from unitymas.agents.llm import load_policy
from unitymas.agents.model.weights import from_config, load_model, load_tokenizer, save_model
from unitymas.envs.core import trace as traces
from unitymas.envs.registry import unregister
from unitymas.trainers.config.schema import ConfigError
from unitymas.trainers.controller import checkpoint
from unitymas.trainers.controller.reporting.loggers import Logbook
from unitymas.trainers.controller.resume import newest, resumed
from unitymas.trainers.controller.run import Run, train

ID = "one-of-run-directories"


class One(Workflow):
    roles = (Role("only", reply=Choice("yes", "no")),)

    async def run(self, ep: Any) -> Outcome:
        said = await ep.act("only", ep.task.question)
        return Outcome(answer=said.value)


def right(trace: Any, task: Any) -> float:
    return float((trace.outcome or {}).get("answer") in task.reference["answers"])


class Victim:
    """A finished run of two steps, and what it holds at each of its checkpoints."""

    def __init__(self, where: Path) -> None:
        from transformers import LlamaConfig

        tokenizer = load_tokenizer(TINY)
        shape = LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, num_hidden_layers=1,
            num_attention_heads=2, max_position_embeddings=128, tie_word_embeddings=True,
        )  # fmt: skip
        model = save_model(from_config(shape), where / "model", tokenizer)
        policy = {"algorithm": {"name": "grpo"}, "learning": {"lr": 1e-2}, "sampling": {"max_tokens": 4}}
        self.dir = where / "run"
        train(
            ID, directory=self.dir, steps=2, tasks_per_step=2, k=2, minibatches=1, starved=False, deterministic=True,
            checkpoint_every=1, eval={"every": 0, "tasks": 1}, log={"console": "off", "traces_every": 1},
            policies={"team": policy}, groups={"main": {"model": str(model), "slots": 4, "threads": 1}},
        )  # fmt: skip
        self.config, _ = resumed(self.dir)
        self.run = Run(self.config, self.dir, resume=True)
        asyncio.run(self.run._start())
        self.files = sorted(
            f for f in self.dir.rglob("*") if f.is_file() and f.parent.name not in ("inspection",)
        )
        self.at: dict[int, Any] = {}
        for step in (1, 2):
            self.load(self.dir / "checkpoints" / f"step-{step:06d}")
            self.at[step] = self.state()
        self.episodes = {f: list(traces.read_dicts(f)) for f in self.files if f.name.endswith(".zst")}
        self.exported = load_model(self.dir / "policies" / "team").state_dict()

    def load(self, folder: Path) -> Any:
        return asyncio.run(self.run._load(folder))

    def state(self) -> dict[str, Any]:
        hosted = self.run.groups["main"].hosted["team"]
        return {
            "weights": {n: t.clone() for n, t in hosted.parameters.state_dict().items()},
            "optimiser": {
                f"{i}.{n}": t.clone()
                for i, own in hosted.learner.optimiser.state_dict()["state"].items()
                for n, t in own.items()
            },
            "chance": {"torch": torch.get_rng_state()},
            "rest": (
                self.run.step,
                self.run.cursor.state_dict(),
                self.run.watch.state_dict(),
                hosted.version,
            ),
        }


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    rows = [{"id": f"t{i}", "question": f"question {i}", "answers": ["yes"]} for i in range(4)]
    unitymas.register(ID, workflow=One, reward=right, tasks=rows)
    yield Victim(tmp_path_factory.mktemp("victim"))
    unregister(ID)


# what is done to it ------------------------------------------------------------------------------------------------


def flip(chance: random.Random, file: Path, others: list[Path]) -> None:
    data = bytearray(file.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    file.write_bytes(data)


def cut(chance: random.Random, file: Path, others: list[Path]) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: chance.randrange(len(data))])


def blank(chance: random.Random, file: Path, others: list[Path]) -> None:
    """A block that never reached the disk."""
    data = bytearray(file.read_bytes())
    start = chance.randrange(len(data))
    data[start : start + 512] = bytes(len(data[start : start + 512]))
    file.write_bytes(data)


def grow(chance: random.Random, file: Path, others: list[Path]) -> None:
    file.write_bytes(file.read_bytes() + chance.randbytes(1 + chance.randrange(40)))


def swap(chance: random.Random, file: Path, others: list[Path]) -> None:
    other = chance.choice(others)
    mine, theirs = file.read_bytes(), other.read_bytes()
    file.write_bytes(theirs)
    other.write_bytes(mine)


def lose(chance: random.Random, file: Path, others: list[Path]) -> None:
    file.unlink()


DAMAGE: list[Callable[[random.Random, Path, list[Path]], None]] = [
    flip,
    flip,
    flip,
    cut,
    blank,
    grow,
    swap,
    lose,
]


def tried(victim: Victim, where: Path, touched: set[Path], said: Callable[[], str]) -> str:
    """Resume it and read it all. -> what came of it; anything but the truth or a refusal by name fails the test."""
    names = {path.name for path in touched} | {path.parent.name for path in touched}

    def by_name(error: BaseException) -> str:
        assert any(name in str(error) for name in names), f"{error!r} names none of {names}"
        return "refused"

    outcome = "held"
    try:
        config, changes = resumed(where)
        assert config == victim.config and not changes
        mark = victim.load(newest(where))
        assert equal(victim.state(), victim.at[victim.run.step])
        if victim.run.step < 2:
            outcome = "gone back"
            assert "step-000002" in said() and "Going back to" in said()
        book = Logbook(where, replace(victim.config), victim.run.arena)
        book.begin(victim.run.step, mark)
        rows = [json.loads(line) for line in book.path.read_text().splitlines()]
        kept = [row["step"] for row in rows if row["kind"] == "step"]
        assert kept in (
            [],
            list(range(1, victim.run.step + 1)),
        )  # [] where the book itself was lost, which is said
    except (Damaged, ConfigError) as error:
        outcome = by_name(error)
    try:
        assert equal(load_model(where / "policies" / "team").state_dict(), victim.exported)
    except (Damaged, OSError) as error:
        outcome = by_name(error)
    for file, episodes in victim.episodes.items():
        copy = where / file.relative_to(victim.dir)
        try:
            found = list(traces.read_dicts(copy))
            assert found == episodes[: len(found)] or len(touched) == 2  # two whole files changed places
        except (ValueError, OSError) as error:
            outcome = by_name(error)
    return outcome


def test_damage_is_refused_or_gone_back_from(
    victim: Victim, tmp_path: Path, fuzz: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Flipped bits, cuts, lost blocks, growth, swapped and lost files, over every file of a run's directory."""
    chance, outcomes = random.Random(0), dict.fromkeys(("held", "gone back", "refused"), 0)
    for number in range(max(60, fuzz // 5)):
        where = Path(shutil.copytree(victim.dir, tmp_path / str(number)))
        files = [where / file.relative_to(victim.dir) for file in victim.files]
        file = chance.choice(files)
        before = {path: path.read_bytes() for path in files}
        chance.choice(DAMAGE)(chance, file, files)
        touched = {path for path in files if not path.exists() or path.read_bytes() != before[path]}
        capsys.readouterr()
        heard: list[str] = []

        def said(heard: list[str] = heard) -> str:
            heard.append(capsys.readouterr().err)
            return "".join(heard)

        outcome = tried(victim, where, touched, said) if touched else "held"
        outcomes[outcome] += 1
        inside = {path.parts[len(where.parts)] for path in touched}
        if inside == {"checkpoints"}:  # every byte of a checkpoint counts
            newer = any("step-000002" in str(path) for path in touched)
            assert outcome == ("gone back" if newer else "held") or outcome == "refused", touched
        shutil.rmtree(where)
    assert outcomes["gone back"] > 5 and outcomes["refused"] > 5, outcomes


def test_every_file_of_a_checkpoint_is_covered(victim: Victim, tmp_path: Path) -> None:
    """One bit in each file, manifests included, and the checkpoint is not whole any more."""
    newest_one = victim.dir / "checkpoints" / "step-000002"
    chance = random.Random(1)
    for number, file in enumerate(sorted(f for f in newest_one.rglob("*") if f.is_file())):
        copy = Path(shutil.copytree(newest_one, tmp_path / str(number)))
        for _ in range(4):
            target = copy / file.relative_to(newest_one)
            data = target.read_bytes()
            flip(chance, target, [])
            with pytest.raises(checkpoint.CheckpointError, match="damaged"):
                checkpoint.verify(copy)
            target.write_bytes(data)
        checkpoint.verify(copy)


# what is forged ----------------------------------------------------------------------------------------------------


class Evil:
    """A pickle that runs a command when it is read."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


class EvilCall:
    def __init__(self, code: str) -> None:
        self.code = code

    def __reduce__(self) -> Any:
        return eval, (self.code,)


def seal(folder: Path) -> None:
    """What a forger does after he has changed a file: the checksums again."""
    for inner in [f.parent for f in folder.rglob(MANIFEST) if f.parent != folder] + [folder]:
        (inner / MANIFEST).write_bytes(manifest(inner))


@pytest.mark.parametrize("name", ["chance.pt", "samples.pt", "policies.pt"])
@pytest.mark.parametrize("kind", ["torch", "legacy", "bare pickle", "inside the tensors", "eval"])
def test_a_forged_checkpoint_runs_nothing(victim: Victim, tmp_path: Path, name: str, kind: str) -> None:
    """Its checksums are right, for whoever can write a file can write those; reading it still runs no code."""
    where = Path(shutil.copytree(victim.dir, tmp_path / "run"))
    shutil.rmtree(where / "checkpoints" / "step-000001")
    folder = where / "checkpoints" / "step-000002"
    file, mark = folder / "main" / name, tmp_path / "ran"
    evil: Any = EvilCall(f"open({str(mark)!r}, 'w')") if kind == "eval" else Evil(f"touch {mark}")
    if kind == "bare pickle":
        file.write_bytes(pickle.dumps(evil))
    elif kind == "inside the tensors":
        torch.save({"weights": torch.ones(3), "more": [evil]}, file)
        with zipfile.ZipFile(file) as archive:
            assert any(entry.endswith("data.pkl") for entry in archive.namelist())
    else:
        torch.save(evil, file, _use_new_zipfile_serialization=kind != "legacy")
    seal(folder)
    checkpoint.verify(folder)  # the forger's checksums hold
    with pytest.raises(Damaged, match=name):
        victim.load(newest(where))
    assert not mark.exists()


@pytest.mark.parametrize(
    "listed",
    [
        {"../../../etc/passwd": [1, "0"]}, {"/etc/passwd": [1, "0"]}, {"/dev/zero": [0, "0"]}, {"x": 3}, {"x": ["a", "b"]}, [], 7,
        {"x": [True, "0"]},
    ],
    ids=str,
)  # fmt: skip
def test_a_forged_manifest_reads_nothing_else(tmp_path: Path, listed: Any) -> None:
    (tmp_path / MANIFEST).write_text(json.dumps(listed, indent=1, sort_keys=True))
    with pytest.raises(checkpoint.CheckpointError):
        checkpoint.verify(tmp_path)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "{" * 100_000, '{"a": ' * 50_000, "NaN", "\x00", "null", "[]"]
)
def test_hostile_json_is_an_error_with_a_name(victim: Victim, tmp_path: Path, text: str) -> None:
    where = Path(shutil.copytree(victim.dir, tmp_path / "run"))
    folder = where / "checkpoints" / "step-000002"
    (folder / "controller.json").write_text(text)
    seal(folder)
    with pytest.raises(Damaged, match=r"controller\.json"):
        victim.load(folder)
    (folder / MANIFEST).write_text(text)
    with pytest.raises(Damaged, match=MANIFEST):
        checkpoint.verify(folder)
    (where / "config.yaml").write_text(text)
    with pytest.raises(Damaged, match=r"config\.yaml"):
        resumed(where)


def test_a_damaged_run_does_not_play(victim: Victim, tmp_path: Path) -> None:
    """`run:DIR` as a team: one bit anywhere in what it plays from is refused."""
    chance = random.Random(2)
    files = [
        Path("config.yaml"),
        *(f.relative_to(victim.dir) for f in (victim.dir / "policies" / "team").iterdir()),
    ]
    for number, name in enumerate(files):
        where = Path(shutil.copytree(victim.dir, tmp_path / str(number)))
        flip(chance, where / name, [])
        with pytest.raises(Damaged, match=name.name):
            load_policy(f"run:{where}")


def test_a_config_of_zeros_is_damage_by_name(tmp_path: Path) -> None:
    """What a failing disk leaves of a file: its length."""
    (tmp_path / "config.yaml").write_bytes(bytes(300))
    with pytest.raises(Damaged, match="config.yaml"):
        load_policy(f"run:{tmp_path}")


def test_a_config_names_no_objects(victim: Victim, tmp_path: Path) -> None:
    """YAML can name any Python object; a run's config cannot."""
    where = Path(shutil.copytree(victim.dir, tmp_path / "run"))
    mark = tmp_path / "ran"
    (where / "config.yaml").write_text(f"env: !!python/object/apply:os.system ['touch {mark}']\n")
    with pytest.raises(Damaged, match=r"config\.yaml"):
        resumed(where)
    assert not mark.exists()
