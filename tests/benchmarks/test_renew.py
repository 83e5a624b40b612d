"""An entry brought to today's code: its replies stay, and only where everybody is asked the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from unitymas.benchmarks import renew
from unitymas.benchmarks.evaluation.evaluate import evaluate
from unitymas.benchmarks.leaderboard import submission
from unitymas.envs.core.trace import read_dicts


def older(folder: Path, change: Callable[[Any], Any]) -> Path:
    """An entry that was made by other code, which told another story in this way."""
    evaluate("chain-deepscaler", "scripted", k=2, tasks=3, data="mini", out=folder / "run")
    packed = submission.pack(folder / "run", folder / "entry", name="x")
    traces = list(read_dicts(packed / "traces.jsonl.zst"))
    for trace in traces:
        trace["code_hash"] = "f" * 16
        change(trace)
    lines = [zstandard.compress(json.dumps(t).encode() + b"\n") for t in traces]
    (packed / "traces.jsonl.zst").write_bytes(b"".join(lines))
    results = json.loads((packed / "results.json").read_text())
    results["provenance"]["env"]["code_hash"] = "f" * 16
    (packed / "results.json").write_text(json.dumps(results))
    return packed


def test_other_rewards_are_today_s(tmp_path: Path) -> None:
    packed = older(tmp_path, lambda trace: trace["metrics"].update(accuracy=0.5))
    assert submission.check(packed, verify=True)
    renew.renew(packed)
    assert submission.check(packed, verify=True) == []


def test_another_prompt_must_be_played_again(tmp_path: Path) -> None:
    packed = older(tmp_path, lambda trace: trace["nodes"][0]["messages"][-1].update(content="another"))
    with pytest.raises(ValueError, match="messages: asked .* play it again"):
        renew.renew(packed)


def test_a_request_more_must_be_played_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packed = older(tmp_path, lambda trace: trace["nodes"].pop())
    with pytest.raises(ValueError, match="play it again"):
        renew.renew(packed)
    assert renew.main([str(packed)]) == 1 and "its SHA-256 is" in capsys.readouterr().err
