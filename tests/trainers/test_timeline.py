"""The timeline: intervals, shares and counters, in a file that stands wherever the run is killed."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unitymas.trainers.controller.reporting.timeline import Timeline, concurrency, covered, mean, thinned

INTERVALS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 20)).map(lambda pair: (pair[0], pair[0] + pair[1])),
    min_size=1,
)


def events(path: Path) -> list[dict[str, Any]]:
    """What Perfetto reads: the list's closing bracket is left out."""
    return list(json.loads(path.read_text().rstrip().rstrip(",") + "]"))


@given(INTERVALS, st.integers(0, 10), st.integers(11, 60))
def test_counts_and_coverage_agree_with_counting_by_hand(
    intervals: list[tuple[int, int]], began: int, ended: int
) -> None:
    per_second = [sum(a <= t < b for a, b in intervals) for t in range(61)]
    assert covered([(float(a), float(b)) for a, b in intervals], began, ended) == sum(
        count > 0 for count in per_second[began:ended]
    )
    points = concurrency(np.array(intervals, float))
    assert points[-1][1] == 0
    assert max(count for _, count in points) == max(per_second)
    assert mean(points, 0, 61) == pytest.approx(sum(per_second) / 61)


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 9)), min_size=1, max_size=900))
def test_a_counter_is_thinned_and_keeps_its_end(points: list[tuple[float, int]]) -> None:
    kept = thinned(points, 200)
    assert len(kept) <= 200 and kept[-1] == points[-1]


def test_a_step_is_written_and_its_shares_are_told(tmp_path: Path) -> None:
    line = Timeline(tmp_path / "timeline.json")
    now = time.perf_counter()
    line.phase("playing")
    for i in range(1000):
        line.call("main", "generate", "team", now - 10 + i * 0.001, now - 8 + i * 0.001)
    line.call("main", "update", "team", now - 4, now - 1)
    line.call("main", "seal", "", now - 4, now - 1)
    figures = line.stepped(1, now - 10)
    assert figures["time/open_calls_max/main"] == 1000
    assert figures["time/busy/main"] == pytest.approx(0.6, abs=0.01)
    assert figures["time/open_calls/main"] == pytest.approx(200, abs=1)
    names = [event["name"] for event in events(tmp_path / "timeline.json")]
    assert {"update team", "step 1", "open calls of main"} <= set(names)
    assert names.count("open calls of main") <= 200 and "seal" not in names


def test_a_torn_line_is_cut_when_the_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    Timeline(path).stepped(1, time.perf_counter())
    whole = path.read_text()
    path.write_text(whole + '{"name": "ste')
    Timeline(path).stepped(2, time.perf_counter())
    assert path.read_text().startswith(whole)
    assert [e["name"] for e in events(path) if e["ph"] == "X"] == ["step 1", "step 2"]


def test_bars_of_one_track_do_not_overlap_in_part(tmp_path: Path) -> None:
    line = Timeline(tmp_path / "timeline.json")
    now = time.perf_counter()
    line.call("main", "values", "team", now - 4, now - 2)
    line.call("main", "prepare", "team", now - 3, now - 1)  # beside it: a track of its own
    line.stepped(1, now - 5)
    tracks = {e["name"]: e["tid"] for e in events(tmp_path / "timeline.json") if e["ph"] == "X"}
    assert tracks["values team"] != tracks["prepare team"]
