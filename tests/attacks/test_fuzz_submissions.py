"""Fuzzers of submissions and of trace files: `pytest tests/attacks --fuzz 100000` is the long mode.

A submission is changed at random, in its bytes or in its values, and then signed again or not. Checking it must end
with a sentence, never with an exception; and what is still verified must have the honest scores.
"""

from __future__ import annotations

import copy
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
import zstandard

from unitymas.benchmarks.leaderboard import checks as checking
from unitymas.benchmarks.pages import viewer
from unitymas.benchmarks.pages.trace_sources import labelled_episodes
from unitymas.envs.core.trace import Trace, read, read_dicts

from .forging import Entry, honest

VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 0.5, 10**18, -(10**30), 1e308, float("nan"), float("inf"), "", "x", "0", "../..",
    "evil:main", "/dev/zero", "mini", "\ud800", "\x00", "a" * 300, [], [[]], {}, {"a": 1}, ["x"], [None],
    {"requests": 1, "tokens": None, "seconds": None},
]  # fmt: skip
SCORES = ("tasks", "episodes", "k", "headline", "success", "score", "pass_at", "pass_hat", "metrics")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return honest(tmp_path_factory.mktemp("small"), tasks=2, k=2)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in a JSON value."""
    found = []
    level = [value]
    while level:
        at = level.pop()
        keys = list(at) if isinstance(at, dict) else range(len(at)) if isinstance(at, list) else ()
        for key in keys:
            found.append((at, key))
            level.append(at[key])
    return found


def mutate(value: Any, rng: random.Random) -> None:
    """One to three changes at random places: another value, a copy of one from elsewhere, or nothing there."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        spots = places(value)
        if not spots:
            return
        at, key = rng.choice(spots)
        how = rng.random()
        if how < 0.15:
            del at[key]
        elif how < 0.25 and isinstance(at, list):
            at.append(copy.deepcopy(at[key]))
        elif how < 0.4:
            other, place = rng.choice(spots)
            at[key] = json.loads(json.dumps(other[place]))
        elif isinstance(at[key], (int, float)) and how < 0.7:
            at[key] = at[key] + rng.choice((-1, 1, 0.25, 1e-6))
        else:
            at[key] = copy.deepcopy(rng.choice(VALUES))


def garbled(content: bytes, rng: random.Random) -> bytes:
    """Bytes cut, flipped, repeated or replaced."""
    at = rng.randrange(len(content) + 1)
    return rng.choice((
        content[:at], content[:at] + content[at + 1 :], content[:at] + rng.randbytes(4) + content[at:],
        content + content[at:], content[:at] + bytes([rng.randrange(256)]) + content[at + 1 :], b"[" * 5000,
    ))  # fmt: skip


def test_a_changed_submission_is_named_or_has_the_honest_scores(
    source: Path, tmp_path: Path, fuzz: int
) -> None:
    honest_results = json.loads((source / "results.json").read_text())["figures"]
    named = neutral = 0
    for seed in range(fuzz):
        rng = random.Random(seed)
        entry = Entry(source, tmp_path / "entry")
        if rng.random() < 0.2:
            file = entry.folder / rng.choice(("results.json", "metadata.yaml", "traces.jsonl.zst"))
            file.write_bytes(garbled(file.read_bytes(), rng))
        else:
            part = rng.choice((entry.results, entry.metadata, entry.traces, entry.traces))
            mutate(part, rng)
            try:
                if rng.random() < 0.7:
                    entry.sign()
            except Exception:  # too strange to sign; it is sent as it is
                pass
            try:
                entry.write()
            except (ValueError, TypeError, AttributeError, yaml.YAMLError):  # too strange to be written
                shutil.rmtree(entry.folder)
                continue
        verdict = checking.inspect(entry.folder, verify=True)
        if verdict.problems or verdict.unverified:
            named += 1
        else:
            neutral += 1
            figures = verdict.results["figures"]
            assert {name: figures[name] for name in SCORES} == {n: honest_results[n] for n in SCORES}, seed
        shutil.rmtree(entry.folder)
    assert named > neutral, (named, neutral)
    print(f"{fuzz} tried, {named} named, {neutral} changed nothing that counts")


def test_a_changed_trace_file_is_read_shown_or_refused(source: Path, tmp_path: Path, fuzz: int) -> None:
    """`Trace.from_dict` and the viewer take it, or say what is wrong with it."""
    rows = list(read_dicts(source / "traces.jsonl.zst"))
    path, page = tmp_path / "t.jsonl.zst", tmp_path / "t.html"
    for seed in range(fuzz):
        rng = random.Random(seed)
        row = json.loads(json.dumps(rng.choice(rows)))
        mutate(row, rng)
        line = json.dumps(row).encode() + b"\n"
        if rng.random() < 0.2:
            line = garbled(line, rng) + b"\n"
        packed = zstandard.compress(line)
        path.write_bytes(garbled(packed, rng) if rng.random() < 0.1 else packed)
        try:
            for trace in read(path):
                assert isinstance(trace, Trace)
                trace.to_dict()
        except ValueError:
            pass
        try:
            viewer.build_labelled(labelled_episodes([path]), page, title="t")
        except ValueError as error:
            assert path.name in str(error), seed
