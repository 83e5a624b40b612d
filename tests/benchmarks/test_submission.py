"""Submissions prove their figures; whatever is tampered with is rejected by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
import zstandard

from unitymas.benchmarks.evaluation import suites
from unitymas.benchmarks.evaluation.evaluate import evaluate
from unitymas.benchmarks.evaluation.results import canonical, results_text, trace_digest
from unitymas.benchmarks.leaderboard import json_schema as schema
from unitymas.benchmarks.leaderboard import replay_episodes, submission
from unitymas.benchmarks.leaderboard.as_written import metadata_text
from unitymas.benchmarks.pages.html import asset
from unitymas.envs.core.trace import compressor, read_dicts
from unitymas.envs.registry import make_arena

Change = Callable[[list[dict[str, Any]]], None]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("submission")
    team = {"summarizer": "fool", "*": "scripted"}
    evaluate("mask-hotpotqa", team, k=2, tasks=6, data="mini", out=folder / "run")
    return submission.pack(folder / "run", folder / "packed", name="Scripted, with a fool", authors="us")


@pytest.fixture
def copy(packed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(packed, tmp_path / "copy"))


def edit_traces(folder: Path, change: Change, *, resign: bool = False) -> None:
    """Change the traces; with ``resign`` as a forger would, hashes and digests along with them."""
    traces = list(read_dicts(folder / "traces.jsonl.zst"))
    change(traces)
    pack = compressor()
    packed = b"".join(pack(json.dumps(t, separators=(",", ":")).encode() + b"\n") for t in traces)
    (folder / "traces.jsonl.zst").write_bytes(packed)
    if resign:
        digests = {(t["task_id"], t["sample"]): trace_digest(t) for t in traces}

        def claim(results: dict[str, Any]) -> None:
            for episode in results["episodes"]:
                episode["digest"] = digests[episode["task"], episode["sample"]]

        edit_results(folder, claim, resign=True)


def edit_results(folder: Path, change: Callable[[dict[str, Any]], None], *, resign: bool = False) -> None:
    results = json.loads((folder / "results.json").read_text())
    change(results)
    (folder / "results.json").write_text(results_text(results))
    if resign:
        metadata = yaml.safe_load((folder / "metadata.yaml").read_text())
        metadata["files"] = {name: submission.sha256(folder / name) for name in metadata["files"]}
        (folder / "metadata.yaml").write_text(metadata_text(metadata))


def test_an_honest_submission_passes_and_is_verified(packed: Path) -> None:
    assert submission.check(packed) == []
    assert submission.check(packed, verify=True) == []
    assert submission.submit_main(["--check", "--verify", str(packed)]) == 0
    assert "| mask-hotpotqa-v0 |" in (packed / "README.md").read_text()


def test_settings_can_be_made_again_but_own_rewards_cannot(tmp_path: Path) -> None:
    """The config holds the value of a setting, and of a reward only that it was exchanged."""
    for name, own, says in (
        ("setting", {"max_turns": 1}, []),
        ("reward", {"reward": "unitymas.rewards.outcome:AnswerF1"}, ["was modified (reward)"]),
    ):
        evaluate("mask-hotpotqa", "scripted", k=1, tasks=2, data="mini", out=tmp_path / name, **own)
        folder = submission.pack(tmp_path / name, tmp_path / f"packed-{name}", name=name)
        assert submission.check(folder) == []
        found = submission.check(folder, verify=True)
        assert len(found) == len(says) and all(part in line for part, line in zip(says, found, strict=True))


def test_a_changed_score_is_named(copy: Path) -> None:
    edit_results(copy, lambda results: results["figures"]["score"].update(value=0.99), resign=True)
    assert any(
        p.startswith("figures.score.value: results.json says 0.99, the traces give 0.")
        for p in submission.check(copy)
    )


def test_a_changed_score_of_one_episode_is_named(copy: Path) -> None:
    edit_results(copy, lambda results: results["episodes"][3].update(score=0.5), resign=True)
    (problem,) = submission.check(copy)
    assert "#1, score: results.json says 0.5" in problem


def test_a_changed_trace_is_named_by_file_and_episode(copy: Path) -> None:
    def change(traces: list[dict[str, Any]]) -> None:
        traces[4]["nodes"][0]["reply"] += " "

    victim = list(read_dicts(copy / "traces.jsonl.zst"))[4]
    edit_traces(copy, change)
    problems = submission.check(copy)
    assert problems[0].startswith("traces.jsonl.zst: its SHA-256 is")
    assert any(p.startswith(f"episode {victim['task_id']}#{victim['sample']}, digest") for p in problems)


def test_a_changed_hash_is_named(copy: Path) -> None:
    metadata = yaml.safe_load((copy / "metadata.yaml").read_text())
    metadata["files"]["results.json"] = "0" * 64
    (copy / "metadata.yaml").write_text(metadata_text(metadata))
    (problem,) = submission.check(copy)
    assert problem.startswith("results.json: its SHA-256 is") and "0000000000000000…" in problem


def test_removed_and_repeated_episodes_are_named(copy: Path) -> None:
    edit_traces(copy, lambda traces: traces.__setitem__(1, traces[0]))
    problems = submission.check(copy)
    assert any("is in results.json but has no trace" in p for p in problems)
    assert any("or is there twice" in p for p in problems)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("metrics", lambda t: t["metrics"].update(f1=1.0, em=1.0)),
        ("messages", lambda t: t["nodes"][0]["messages"][0].update(content="an easier question")),
        ("value", lambda t: t["nodes"][-1].update(value="the right answer")),
        ("rewards", lambda t: t["nodes"][0].update(rewards={"plan": 1.0}, credit=1.0)),
        ("result", lambda t: next(n for n in t["nodes"] if n["kind"] == "use").update(result=[{"id": "x", "title": "", "text": "the answer"}])),
    ],
)  # fmt: skip
def test_a_forger_who_signs_everything_again_is_caught_by_verifying(
    copy: Path, field: str, change: Callable[[dict[str, Any]], None]
) -> None:
    def forge(traces: list[dict[str, Any]]) -> None:
        change(
            next(t for t in traces if t["metrics"]["f1"] < 1 and any(n["kind"] == "use" for n in t["nodes"]))
        )

    edit_traces(copy, forge, resign=True)
    problems = submission.check(copy, verify=True)
    assert any(field in p and "recorded" in p and p.startswith("episode ") for p in problems), problems


def test_another_success_predicate_is_refused(copy: Path) -> None:
    edit_results(copy, lambda results: results["measure"].update(relation=">", threshold=0.0), resign=True)
    assert any(
        p.startswith("measure: the environment is ranked by f1 (em >= 1)") for p in submission.check(copy)
    )


def test_hostile_and_broken_folders_only_give_problems(copy: Path, tmp_path: Path, hostile: str) -> None:
    assert submission.check(tmp_path / "nowhere") and submission.check(tmp_path)
    edit_results(copy, lambda results: results.update(env_id=[hostile]))
    assert any("env_id must be string" in p for p in submission.check(copy))
    (copy / "results.json").write_text("{")
    assert "cannot be read" in submission.check(copy)[0]
    assert submission.submit_main(["--check", str(copy)]) == 1


def test_files_that_unfold_without_end_are_refused_unread(copy: Path) -> None:
    bomb = zstandard.compress(b"[" + b" " * 50_000_000 + b"]\n")
    assert len(bomb) < 10_000
    whole = (copy / "traces.jsonl.zst").read_bytes()
    (copy / "traces.jsonl.zst").write_bytes(whole + bomb)
    *signed, problem = submission.check(copy)
    assert "one episode has more than" in problem
    assert all("its SHA-256 is" in line for line in signed)
    (copy / "traces.jsonl.zst").write_bytes(whole)
    (copy / "metadata.yaml").write_text("a: &a [x, x]\nb: [*a, *a]\n")
    assert "aliases" in submission.check(copy)[0]


def test_traces_that_are_no_traces(copy: Path) -> None:
    edit_traces(copy, lambda traces: traces.__setitem__(0, {"hello": 1}))
    assert any("episode 1 is no trace (the whole lacks 'schema'" in p for p in submission.check(copy))


def test_unfinished_evaluations_are_not_packed(packed: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(packed.parent / "run", tmp_path / "run"))
    edit_results(run, lambda results: results.update(complete=False))
    with pytest.raises(ValueError, match="not finished"):
        submission.pack(run, tmp_path / "out", name="x")


def test_packing_twice_gives_the_same_bytes(packed: Path, tmp_path: Path) -> None:
    again = submission.pack(
        packed.parent / "run", tmp_path / "again", name="Scripted, with a fool", authors="us"
    )
    assert all((again / name).read_bytes() == (packed / name).read_bytes() for name in submission.FILES)


def test_reenacting_every_recorded_ending(packed: Path) -> None:
    arena = make_arena("mask-hotpotqa", split="test", data="mini")
    trace = next(iter(read_dicts(packed / "traces.jsonl.zst")))
    shorter = {**trace, "nodes": trace["nodes"][:2]}
    with pytest.raises(replay_episodes.Mismatch, match="lacks"):
        replay_episodes.reenact(arena, shorter)
    late = {**shorter, "ended": "truncated", "reason": "more than 3 s"}
    with pytest.raises(replay_episodes.Mismatch, match="lacks"):  # nobody set it a time limit
        replay_episodes.reenact(arena, late)
    hurried = make_arena("mask-hotpotqa", split="test", data="mini", budget={"seconds": 3})
    cut = replay_episodes.reenact(hurried, late)
    assert str(cut.ended) == "truncated" and cut.reason == "more than 3 s" and len(cut.nodes) == 2
    assert (
        str(
            replay_episodes.reenact(
                arena, {**shorter, "ended": "error", "error": "down", "reason": "model"}
            ).ended
        )
        == "error"
    )


def test_the_schema_checker_agrees_with_the_reference_implementation(packed: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    rules = json.loads(asset("submission.schema.json"))
    reference = jsonschema.Draft202012Validator(rules)
    results, metadata = submission.read_submission(packed)
    good = {"results": results, "metadata": metadata}
    assert not list(schema.violations(good, rules)) and not list(reference.iter_errors(good))
    for path, value in [("results.figures.score.value", "0.5"), ("results.figures.k", 2.5), ("results.complete", False),
                        ("results.measure.relation", "<"), ("metadata.files", {}), ("metadata.url", "javascript:x"),
                        ("results.episodes", [{}]), ("results.price", [True]), ("metadata", [])]:  # fmt: skip
        bad = json.loads(canonical(good))
        *parents, last = path.split(".")
        at = bad
        for name in parents:
            at = at[name]
        at[last] = value
        ours, theirs = list(schema.violations(bad, rules)), list(reference.iter_errors(bad))
        assert len(ours) == len(theirs) > 0, (path, ours, theirs)


@pytest.mark.parametrize("team", ["scripted", "fool"])
def test_every_environment_can_be_verified(tmp_path: Path, team: str) -> None:
    chosen = suites.suite("mini")
    for env in chosen.envs:
        evaluate(env, team, k=1, tasks=3, out=tmp_path / env, **suites.settings(chosen, env))
        packed = submission.pack(tmp_path / env, tmp_path / "packed" / env, name=env)
        assert submission.check(packed, verify=True) == [], env
