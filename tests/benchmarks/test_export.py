"""Exports hold what the traces hold, whatever was said in them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from unitymas.benchmarks.evaluation import export
from unitymas.envs.core.drivers import rollout
from unitymas.envs.core.trace import Trace, write

Make = Callable[..., dict[str, Any]]


@pytest.fixture
def traces() -> list[Trace]:
    return rollout("mask-hotpotqa", {"planner": "fool", "*": "scripted"}, tasks=6, k=2, data="mini")  # type: ignore[no-any-return]


def test_frame_and_dataset_have_a_row_per_act(traces: list[Trace]) -> None:
    pytest.importorskip("pandas")
    frame = export.to_frame(traces)
    assert len(frame) == sum(len(t.acts()) for t in traces)
    assert frame.credit.sum() == pytest.approx(sum(c.amount for t in traces for c in t.credits))
    assert set(frame.role) == {"planner", "searcher", "summarizer", "updater", "answerer"}
    pytest.importorskip("datasets")
    data = export.to_dataset(traces)
    assert len(data) == len(frame) and data[0]["messages"][0]["role"] in ("system", "user")


def test_files_round_trip(traces: list[Trace], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    write(traces, tmp_path / "run" / "traces" / "train-000000.jsonl.zst")
    expected = list(export.acts(("train-000000", t.to_dict()) for t in traces))
    for kind, name in (
        ("parquet", "t.parquet"),
        ("parquet", "new/folder/t.parquet"),
        ("jsonl", "t.jsonl"),
        ("perfetto", "t.json"),
        ("dataset", "d"),
    ):
        assert export.export_main([str(tmp_path / "run"), "--to", kind, "-o", str(tmp_path / name)]) == 0
    rows = parquet.read_table(tmp_path / "t.parquet").to_pylist()
    assert [{k: row[k] for k in expected[0]} for row in rows] == expected
    assert [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()] == expected
    assert f"{len(expected)} rows" in capsys.readouterr().out


def test_perfetto_draws_a_slice_per_node_within_named_lanes(episode: Make) -> None:
    one = episode(0)
    events = list(export.perfetto([("", one)]))
    slices = [e for e in events if e["ph"] == "X"]
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert len(slices) == len(one["nodes"]) and set(lanes.values()) == {
        "planner",
        "searcher",
        "retrieve",
        "summarizer",
        "answerer",
    }
    assert all(e["dur"] > 0 for e in slices) and [e["ts"] for e in slices] == sorted(e["ts"] for e in slices)
    one["nodes"][0]["meta"] |= {"began": 12.5, "seconds": 0.25}
    timed = next(e for e in export.perfetto([("", one)]) if e["ph"] == "X")
    assert (timed["ts"], timed["dur"]) == (12.5e6, 0.25e6)


def test_hostile_text_survives_as_text(episode: Make, hostile: str, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    pairs = [("", episode(0, hostile=hostile))]
    for name, (writer, suffix) in export.WRITERS.items():
        assert writer(pairs, tmp_path / f"{name}{suffix}") > 0
