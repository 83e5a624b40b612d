"""Traces for other tools: a `datasets` dataset, a pandas frame, Parquet, and Perfetto's timeline.

    unitymas export runs/mask-1 --to parquet -o traces.parquet       one row an act
    unitymas export runs/mask-1 --to perfetto -o trace.json          open in ui.perfetto.dev

`acts` yields one flat row for each act, the unit of analysis and training. `to_frame`, `to_dataset` and `write_parquet`
return or write the same rows in the form of each tool.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from ...cli.arguments import COUNT, Parser
from ...envs.core.trace import Trace
from ..pages.html import write_page
from ..pages.trace_sources import labelled_episodes
from ..pages.viewer import as_dict, score_of
from .result_types import LabelledTrace, NodeJson, TraceJson

if TYPE_CHECKING:
    from datasets import Dataset
    from pandas import DataFrame


def acts(episodes: Iterable[LabelledTrace]) -> Iterator[dict[str, object]]:
    """Yield one row for each act. Messages, value and rewards are JSON text, because their form differs by role."""
    for label, episode in episodes:
        for node in episode["nodes"]:
            if node["kind"] != "act":
                continue
            meta = node.get("meta") or {}
            yield {
                "source": label,
                "env_id": episode["env_id"],
                "task_id": episode["task_id"],
                "seed": episode["seed"],
                "sample": int(episode.get("sample", 0)),
                "ended": episode["ended"],
                "score": score_of(episode),
                "node": node["id"],
                "parents": " ".join(node["parents"]),
                "role": node["role"],
                "agent": node["agent"],
                "turn": node["turn"],
                "messages": _json(node["messages"]),
                "reply": _text(node["reply"]),
                "ok": node["ok"],
                "value": _json(node["value"]),
                "rewards": _json(node["rewards"]),
                "credit": float(node["credit"]),
                "tokens_in": meta.get("tokens_in"),
                "tokens_out": meta.get("tokens_out"),
                "policy": None if meta.get("policy") is None else str(meta["policy"]),
                "version": meta.get("version"),
            }


def to_frame(episodes: Iterable[Trace | TraceJson]) -> DataFrame:
    """Return a pandas DataFrame of acts."""
    import pandas

    return pandas.DataFrame(list(acts(("", as_dict(e)) for e in episodes)))


def to_dataset(episodes: Iterable[Trace | TraceJson]) -> Dataset:
    """Return a `datasets.Dataset` of acts, for `push_to_hub`, `map` or TRL. Its column `messages` holds chats."""
    import datasets

    rows = [
        {**row, "messages": json.loads(str(row["messages"]))}
        for row in acts(("", as_dict(e)) for e in episodes)
    ]
    for row in rows:
        row["messages"] = [{"role": m["role"], "content": _text(m["content"])} for m in row["messages"]]
    return datasets.Dataset.from_list(rows)


def write_parquet(episodes: Iterable[LabelledTrace], path: Path) -> int:
    """Write acts as a Parquet file, in blocks. Return the number of rows."""
    import pyarrow
    import pyarrow.parquet as parquet

    strings = ("source", "env_id", "task_id", "ended", "node", "parents", "role", "agent", "messages", "reply", "value",
               "rewards", "policy")  # fmt: skip
    numbers = {"seed": pyarrow.int64(), "sample": pyarrow.int64(), "turn": pyarrow.int64(), "tokens_in": pyarrow.int64(),
               "tokens_out": pyarrow.int64(), "version": pyarrow.int64(), "score": pyarrow.float64(),
               "credit": pyarrow.float64(), "ok": pyarrow.bool_()}  # fmt: skip
    schema = pyarrow.schema([(name, pyarrow.string()) for name in strings] + list(numbers.items()))
    count, part = 0, path.with_name(f"{path.name}.part")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        # a file that cannot be opened is refused by the system, which names it, and not by pyarrow
        with open(part, "wb") as file, parquet.ParquetWriter(file, schema, compression="zstd") as writer:
            rows = acts(episodes)
            while block := list(islice(rows, 10_000)):
                writer.write_table(pyarrow.Table.from_pylist(block, schema=schema))
                count += len(block)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return count


def write_jsonl(episodes: Iterable[LabelledTrace], path: Path) -> int:
    """Write acts as lines of JSON. Return their number."""
    count = 0

    def lines() -> Iterator[str]:
        nonlocal count
        for row in acts(episodes):
            count += 1
            yield json.dumps(row, ensure_ascii=True) + "\n"

    write_page(path, lines())
    return count


def perfetto(episodes: Iterable[LabelledTrace]) -> Iterator[dict[str, object]]:
    """Yield events of Chrome's trace format: a process for each episode, a thread for each role or tool, a slice for each node.

    A node's wall-clock times are drawn if it has them (``began`` and ``seconds``). Otherwise a node is one unit long and begins
    with its round, which shows the same order.
    """
    for process, (label, episode) in enumerate(episodes, start=1):
        name = " ".join(filter(None, (label, f"{episode['task_id']}#{episode.get('sample', 0)}")))
        yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": _text(name)}}
        threads: dict[str, int] = {}
        for node in episode["nodes"]:
            lane = str(node["tool"] if node["kind"] == "use" else node["agent"])
            if lane not in threads:
                threads[lane] = len(threads) + 1
                yield {
                    "ph": "M",
                    "name": "thread_name",
                    "pid": process,
                    "tid": threads[lane],
                    "args": {"name": _text(lane)},
                }
            began, seconds = _span(node)
            yield {
                "ph": "X", "cat": node["kind"], "name": _text(lane), "pid": process, "tid": threads[lane],
                "ts": round(began * 1e6, 3), "dur": round(max(seconds, 1e-6) * 1e6, 3),
                "args": {"node": node["id"], "ok": node["ok"], "credit": node["credit"], "error": _text(node["error"]),
                         "reply": _text((node["reply"] or "")[:500])},
            }  # fmt: skip


def write_perfetto(episodes: Iterable[LabelledTrace], path: Path) -> int:
    """Write the events as one file for ui.perfetto.dev or chrome://tracing. Return their number."""
    events = [json.dumps(event, ensure_ascii=True) for event in perfetto(episodes)]
    write_page(path, ['{"displayTimeUnit":"ms","traceEvents":[\n', ",\n".join(events), "\n]}\n"])
    return len(events)


def _span(node: NodeJson) -> tuple[float, float]:
    meta = node.get("meta") or {}
    if isinstance(meta.get("began"), (int, float)):
        return float(meta["began"]), float(meta.get("seconds") or 0.0)
    return float(node.get("round", 0)) * 1e-3, 0.8e-3


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=True, default=str)


def _text(value: object) -> str | None:
    """Return a text that other tools can store: lone surrogates, which UTF-8 cannot encode, are replaced."""
    return None if value is None else str(value).encode("utf-8", "replace").decode("utf-8")


def write_dataset(episodes: Iterable[LabelledTrace], path: Path) -> int:
    """Write a dataset for ``datasets.load_from_disk``. Return the number of rows."""
    made = to_dataset(episode for _, episode in episodes)
    made.save_to_disk(str(path))
    return len(made)


WRITERS = {
    "parquet": (write_parquet, ".parquet"), "jsonl": (write_jsonl, ".jsonl"), "perfetto": (write_perfetto, ".json"),
    "dataset": (write_dataset, ""),
}  # fmt: skip


def export_main(argv: list[str] | None = None) -> int:
    """Run ``unitymas export SOURCE --to …``."""
    parser = Parser(prog="unitymas export", description="Convert traces for other tools.")
    parser.add_argument("sources", nargs="+", type=Path, help="run directories, evaluations, or trace files")
    parser.add_argument("--to", choices=sorted(WRITERS), default="parquet", help="format (default: parquet)")
    parser.add_argument(
        "-o", "--out", type=Path, help="default: traces.parquet, traces.jsonl, traces.json, traces/"
    )
    parser.add_argument("--limit", type=COUNT, help="largest number of episodes of each source")
    options = parser.parse_args(argv)
    write, suffix = WRITERS[options.to]
    out = options.out or Path(f"traces{suffix or '-dataset'}")
    count = write(labelled_episodes(options.sources, limit=options.limit), out)
    print(f"{out}: {count:,} {'events' if options.to == 'perfetto' else 'rows'}")
    return 0
