"""Tours of a page's episodes: the most informative ones, which improved, got worse, failed or succeeded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, TypeAlias, TypedDict

EpisodeColumns: TypeAlias = Mapping[str, Sequence[Any]]
"""Columns of the episodes of a page, by name."""


class Stop(TypedDict, total=False):
    """Stop of a tour: an episode, and the episode to compare it with."""

    name: str
    why: str
    a: int
    b: int


def tours(index: EpisodeColumns) -> list[Stop]:
    """Return the episodes to open first, each with a name, a reason and, if there is one, an episode to compare with.

    Held-out episodes come before training episodes, and the newest source (the last validation) before older ones. The page
    opens with the first stop.
    """
    scored = [
        i for i, score in enumerate(index["score"]) if score is not None or index["ended"][i] == "error"
    ]
    rows = [i for i in scored if index["part"][i] != "train"] or scored
    sources = list(dict.fromkeys(index["label"][i] for i in rows))
    if len(scored) < 2:
        return []
    newest = [i for i in rows if index["label"][i] == sources[-1]]
    tasks = {source: {(index["env"][i], index["task"][i]) for i in rows if index["label"][i] == source}
             for source in (sources[0], sources[-1])}  # fmt: skip
    if not tasks[sources[0]] & tasks[sources[-1]]:  # not before and after: sources of different tasks
        newest = rows
    stops = _changes(index, rows, sources[0], sources[-1]) if len(sources) > 1 else []
    failed = [i for i in newest if index["ended"][i] == "error" or _score(index, i) <= 0]
    if failed:
        telling = max(failed, key=lambda i: (bool(index["malformed"][i] or index["errors"][i]), -i))
        stops.append({"name": "a failure", "why": "A failure of the newest episodes.", "a": telling})
    if solved := [i for i in newest if _score(index, i) >= 1]:
        longest = max(solved, key=lambda i: (index["acts"][i], -i))
        stops.append({"name": "a success", "why": "A success of the newest episodes.", "a": longest})
    return stops


def _changes(index: EpisodeColumns, rows: Sequence[int], first: str, last: str) -> list[Stop]:
    """Return the tasks whose mean score rose and fell most between two sources."""
    sides: dict[str, dict[tuple[str, str], list[int]]] = {s: defaultdict(list) for s in (first, last)}
    for i in rows:
        if index["label"][i] in sides:
            sides[index["label"][i]][index["env"][i], index["task"][i]].append(i)
    before, after = sides[first], sides[last]
    gains = {
        task: fmean(_score(index, i) for i in after[task]) - fmean(_score(index, i) for i in before[task])
        for task in before
        if task in after
    }
    stops: list[Stop] = []
    for name, sign in (("improved most", 1), ("worsened most", -1)):
        task = max(gains, key=lambda t: sign * gains[t], default=None)
        if task is None or sign * gains[task] <= 0:
            continue
        a = max(after[task], key=lambda i: sign * _score(index, i))
        b = min(before[task], key=lambda i: sign * _score(index, i))
        why = f"{name.capitalize()} from {first} to {last}: {_score(index, b):.3g} → {_score(index, a):.3g}."
        stops.append({"name": name, "why": why, "a": a, "b": b})
    return stops


def _score(index: EpisodeColumns, i: int) -> float:
    return float(index["score"][i] or 0.0)
