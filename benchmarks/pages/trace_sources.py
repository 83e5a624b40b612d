"""Sources of episodes: a run directory, an evaluation, or a single trace file, each with a label.

runs/7/traces/step-20.jsonl.zst   ->  label "7 step-20"
evaluations/x/traces.jsonl.zst    ->  label "x"

A training run stores tokens beside its traces, in samples/ with the same file name. They are joined here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from ...envs.core.trace import read_dicts
from ...envs.untrusted import Refused, json_value, read_text
from ..evaluation.result_types import TraceJson
from ..leaderboard.json_schema import schema_of, violations

MAX_DOCUMENT = 500_000_000  # bytes of one .json file
TRACE_SUFFIXES = (".jsonl", ".jsonl.zst", ".json")


def trace_files(source: str | Path) -> list[Path]:
    """Return the trace files of a source, in the order of the numbers in their names."""
    path = Path(source)
    if path.is_file():
        return [path]
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; give a run directory or a file of traces")
    inner = path / "traces"
    files = [
        f for f in (inner if inner.is_dir() else path).glob("**/*") if f.name.endswith(TRACE_SUFFIXES[:2])
    ]
    files = [f for f in files if not inner.is_dir() or inner in f.parents]
    if not inner.is_dir():  # a directory of an evaluation also holds other files
        files = [f for f in files if f.name.startswith("traces")] or [
            f for f in files if f.name != "metrics.jsonl"
        ]
    if not files:
        raise FileNotFoundError(
            f"{path} holds no traces (looked for traces/*.jsonl.zst and traces.jsonl.zst)"
        )
    return sorted(files, key=lambda f: [int(p) if p.isdigit() else p for p in re.split(r"(\d+)", f.name)])


def labelled_episodes(sources: Iterable[Path], limit: int | None = None) -> Iterator[tuple[str, TraceJson]]:
    """Read the episodes of several sources, each with a short label for its source."""
    sources = list(sources)
    for source in sources:
        name = source.name if len(sources) > 1 else ""
        pairs = (
            (" ".join(filter(None, (name, "" if file == source else file.name.split(".")[0]))), episode)
            for file in trace_files(source)
            for episode in _of_file(file)
        )
        yield from islice(pairs, limit)


def _of_file(file: Path) -> Iterator[TraceJson]:
    if file.suffix != ".json":
        beside = file.parent.parent / "samples" / file.name
        tokens = _tokens(beside) if beside.is_file() else {}
        for number, episode in enumerate(read_dicts(file), 1):
            _check(episode, f"{file}, line {number}")
            for node in episode.get("nodes", ()) if tokens else ():
                meta = node.get("meta") or {}
                if meta.get("sample") in tokens:
                    meta["tokens"] = tokens[meta["sample"]]
            yield episode
        return
    document = json_value(read_text(file, MAX_DOCUMENT), str(file), twins=True)
    for number, episode in enumerate(document if isinstance(document, list) else [document], 1):
        _check(episode, f"{file}, episode {number}")
        yield episode


def _check(episode: object, where: str) -> None:
    """Raise an error with the first fault of an episode that does not follow the schema of traces."""
    if broken := next(violations(episode, schema_of("trace")), None):
        raise Refused(f"{where}: this is no trace ({broken})")


def _tokens(samples: Path) -> dict[str, dict[str, list[object]]]:
    """Return the tokens of each decision by id, in the form of a node's `meta["tokens"]`."""
    tokens = {}
    for row in read_dicts(samples):
        if "tokens" not in row:  # ids alone, as early runs kept them
            continue
        told = {"text": row["tokens"], "logprob": row["logprobs"], "advantage": row["advantages"]}
        tokens[row["id"]] = {
            name: values if name == "text" else [round(value, 4) for value in values]
            for name, values in told.items()
            if values is not None
        }
    return tokens
