"""Our own entries: which teams stand beside which on the board."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import pytest
import yaml

from unitymas.benchmarks.evaluation import identity
from unitymas.benchmarks.leaderboard import entries, submission
from unitymas.benchmarks.leaderboard.checks import read_submission
from unitymas.benchmarks.leaderboard.claimed_environment import make_again, players


def run_of(path: Path, args: dict[str, object]) -> Path:
    policy = {"algorithm": {"name": "grpo"}, "frozen": False}
    path.mkdir()
    config = {
        "env": {"id": "mask-hotpotqa", "args": args}, "policies": {"team": policy, "old": policy | {"frozen": True}},
        "steps": 40, "tasks_per_step": 16, "k": 8, "seed": 3,
    }  # fmt: skip
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    return path


def test_a_run_stands_beside_teams_that_played_its_environment_alike(tmp_path: Path) -> None:
    runs = [
        run_of(tmp_path / name, {"max_turns": 1} if name == "short" else {}) for name in ("a", "b", "short")
    ]
    plain, short = entries.tables(["mask-hotpotqa"], {"Fool": ("fool", "")}, runs)
    assert list(plain.teams) == ["Fool", "Tiny, trained: a", "Tiny, trained: b"]
    assert list(short.teams) == ["Fool", "Tiny, trained: short"] and short.args == {"max_turns": 1}
    player, told = short.teams["Tiny, trained: short"]
    assert player == f"run:{runs[2]}" and "40 steps of 16 tasks, 8 samples each, with grpo" in told


def test_a_folder_that_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="is no run directory"):
        entries.tables([], {}, [tmp_path])


SHIPPED = sorted((Path(entries.__file__).resolve().parents[1] / "submissions").glob("*/results.json"))


def test_our_entries_are_there() -> None:
    names = {path.parent.name.removesuffix("-top-k-1") for path in SHIPPED}
    for env in ("mask-hotpotqa", "rag-nq"):
        assert {f"{who}-{env}" for who in ("scripted-expert", "chance", "fool", "tiny")} <= names
        assert f"tiny-trained-{env}-shared-{env}" in names
    assert "tiny-trained-rag-nq-separate-rag-nq" in names


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.parent.name)
def test_the_figures_of_our_entries_follow_from_their_episodes(path: Path) -> None:
    assert submission.check(path.parent) == []


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.parent.name)
def test_our_entries_were_made_by_todays_code(path: Path) -> None:
    """Else the board would not rank them: `python -m unitymas.benchmarks.renew benchmarks/submissions/*`."""
    results, _ = read_submission(path.parent)
    arena = make_again(results)
    assert identity.world(arena) == results["provenance"]["env"]
    players(arena, results)  # raises where a scripted player's code is another


def test_words_about_code_are_no_part_of_its_identity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A better docstring must not turn an entry into one that nobody can verify."""
    bodies = {
        "plain": "    def play():\n        return 1\n",
        "told": '    def play():\n        """Return one."""\n        # always\n        return 1\n',
        "other": "    def play():\n        return 2\n",
    }
    hashes = {}
    for name, body in bodies.items():
        (tmp_path / f"words_{name}.py").write_text(f"def make():\n{body}    return play\n")
        monkeypatch.syspath_prepend(tmp_path)
        hashes[name] = identity.who(importlib.import_module(f"words_{name}").make(), "x")["code"]
    assert hashes["plain"] == hashes["told"] != hashes["other"]


def test_a_false_error_of_the_interpreter_changes_no_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python before 3.11.8 raises SystemError if a garbage collection parses code while other code is parsed."""
    whole, errors = inspect.getsource, [SystemError("AST constructor recursion depth mismatch")]
    expected = identity._source_hash(Path)

    def disturbed(kind: object) -> str:
        if errors:
            raise errors.pop()
        return whole(kind)  # type: ignore[arg-type]

    monkeypatch.setattr(inspect, "getsource", disturbed)
    assert identity._source_hash(Path) == expected and not errors
