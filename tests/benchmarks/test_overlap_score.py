"""Scores at equal samples and at equal wall clock, from runs that are made up."""

from unitymas.benchmarks.speed.overlap.score import reached, tables


def test_a_faster_run_is_ahead_at_the_same_moment() -> None:
    slow = [(0, 0.0, 0.2), (2, 40.0, 0.4), (4, 80.0, 0.8)]
    fast = [(0, 0.0, 0.2), (2, 20.0, 0.3), (4, 40.0, 0.6)]
    assert [reached(slow, moment) for moment in (0.0, 39.9, 40.0, 99.0)] == [0.2, 0.2, 0.4, 0.8]
    curves = {"off": [slow], "wait": [fast], "drop": [fast]}
    node = {
        "off": lambda step: step * 100.0,
        "wait": lambda step: step * 50.0,
        "drop": lambda step: step * 10.0,
    }
    lines = tables(curves, node)  # type: ignore[arg-type]
    assert lines[2] == "| off | 0.200 | 0.400 | 0.800 |" and lines[3] == "| wait | 0.200 | 0.300 | 0.600 |"
    ends = [line.split(" | ")[-2:] for line in lines]
    assert ends[8] == ["0.400", "80 s |"] and ends[9] == ["0.600", "40 s |"]  # at 40 s on this machine
    assert lines[12].startswith("| equal wall clock, a simulated node | 10 s | 20 s | 30 s | 40 s |")
    assert ends[14] == ["0.200", "400 s |"] and ends[16] == ["0.600", "40 s |"]
