"""Trace viewer: any number of episodes as one HTML page that needs only a browser.

    unitymas view RUN            a run directory, an evaluation, or one trace file
    build(traces, "page.html")   the same from Python, from traces or their dicts

The page contains a small index of all episodes, which is drawn first, and the episodes in compressed blocks. A block is
unpacked when one of its episodes is opened, so ten thousand episodes open as fast as ten. docs/viewer.md explains the drawing,
``assets/viewer.js`` draws.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ...envs.core.trace import Trace
from ..evaluation.result_types import NodeJson, TraceJson
from .html import asset, data_block, page, write_page
from .tours import tours

TEXT_LIMIT = 100_000  # characters of one text on the page; the trace file has the whole text
BLOCK_EPISODES = 64
BLOCK_CHARACTERS = 1_000_000
SCRIPTS = tuple(f"viewer{part}.js" for part in ("-state", "-list", "-graph", "-node", "-episode", ""))
_SNIPPET = 160
_COLUMNS = ("task", "env", "part", "label", "sample", "title", "ended", "score", "credit", "acts", "tools", "tokens", "roles", "malformed",
            "errors", "block")  # fmt: skip


def build(
    episodes: Iterable[Trace | TraceJson],
    out: str | Path,
    *,
    title: str = "Episodes",
    headline: str | None = None,
) -> Path:
    """Write the page for ``episodes`` (traces or their dicts) to ``out`` and return its path.

    ``headline`` names the metric that is shown as the score. The default is a trace's own headline, or else its first metric.
    """
    return build_labelled((("", as_dict(e)) for e in episodes), out, title=title, headline=headline)


def build_labelled(
    episodes: Iterable[tuple[str, TraceJson]],
    out: str | Path,
    *,
    title: str,
    headline: str | None = None,
) -> Path:
    """Build a page with a label for each episode ("step 20", "before training"), for filters and comparisons."""
    return write_page(Path(out), parts(episodes, title=title, headline=headline))


def parts(
    episodes: Iterable[tuple[str, TraceJson]],
    *,
    title: str,
    headline: str | None = None,
    live: bool = False,
) -> Iterator[str]:
    """Yield the parts of the page: head, index and script first, then the blocks of episodes."""
    index: dict[str, list[Any]] = {column: [] for column in _COLUMNS}
    names: set[str] = set()
    with tempfile.TemporaryFile("w+", encoding="utf-8") as blocks:
        for number, block in enumerate(_blocks(episodes)):
            for label, episode in block:
                names.add(headline_of(episode, headline))
                for column, value in _row(episode, label, headline, number).items():
                    index[column].append(value)
            blocks.write(data_block([_clipped(episode) for _, episode in block], f"block{number}"))
        blocks.seek(0)
        known = {
            "title": title,
            "headline": names.pop() if len(names) == 1 else "score",
            "tours": tours(index),
            "columns": _coded(index),
        }
        scripts = (*SCRIPTS, "live.js") if live else SCRIPTS
        yield page(title, asset("viewer.html"), style="viewer.css", scripts=scripts, before_script=data_block(known, "index"), live=live)  # fmt: skip
        yield from iter(lambda: blocks.read(1 << 20), "")
        yield "</body>\n</html>\n"


def as_dict(episode: Trace | TraceJson) -> TraceJson:
    """Return the dict of a trace, which may already be a dict."""
    if isinstance(episode, Mapping):
        return dict(episode)
    plain: TraceJson = episode.to_dict()
    return plain


def headline_of(episode: TraceJson, headline: str | None = None) -> str:
    """Return the name of an episode's main metric: `headline`, or else its own headline, or else its first metric."""
    return str(headline or episode.get("headline") or next(iter(episode.get("metrics") or {}), ""))


def label_words(label: str) -> str:
    """Return a label for readers. Files of a training run are named by their step, as in the curves (0: before training)."""
    return re.sub(
        r"\b(train|validation)-(\d{6})\b", lambda m: f"{m[1]} {int(m[2]) + (m[1] == 'train')}", label
    )


def score_of(episode: TraceJson, headline: str | None = None) -> float | None:
    """Return the score of an episode, or None if it has none."""
    value = (episode.get("metrics") or {}).get(headline_of(episode, headline))
    return float(value) if isinstance(value, (int, float)) else None


def title_of(episode: TraceJson) -> str:
    """Return the title of an episode: the question in its first prompt, or else its task id."""
    for node in episode.get("nodes", ()):
        prompts = [m for m in node.get("messages") or () if m.get("role") == "user"]
        if prompts:
            words = str(prompts[0].get("content", "")).strip()
            for mark in ("Question:", "Problem:", "question:", "problem:"):
                if mark in words:
                    words = words.split(mark, 1)[1].strip()
                    break
            first = words.split("\n", 1)[0][:_SNIPPET]
            if sum(map(str.isalpha, first)) >= 3:  # the first row of a board is no title
                return first
            break
    return str(episode.get("task_id"))


def _row(episode: TraceJson, label: str, headline: str | None, block: int) -> dict[str, object]:
    nodes = episode.get("nodes", [])
    acts = [node for node in nodes if node.get("kind") == "act"]
    malformed = sorted({str(node["role"]) for node in acts if node.get("ok") is False})
    return {
        "task": str(episode.get("task_id")),
        "env": str(episode.get("env_id")),
        "part": str((episode.get("data") or {}).get("split") or ""),
        "label": label_words(label),
        "sample": episode.get("sample"),
        "title": title_of(episode),
        "ended": str(episode.get("ended")),
        "score": score_of(episode, headline),
        "credit": round(sum(float(node.get("credit") or 0) for node in nodes), 6),
        "acts": len(acts),
        "tools": len(nodes) - len(acts),
        "tokens": sum(int((node.get("meta") or {}).get("tokens_out") or 0) for node in acts),
        "roles": " ".join(sorted({str(node["role"]) for node in acts})),
        "malformed": " ".join(malformed),
        "errors": sum(1 for node in nodes if node.get("error")),
        "block": block,
    }


def _coded(index: dict[str, list[Any]]) -> dict[str, object]:
    """Encode columns of repeated words as a list of words and a list of positions in it."""
    coded: dict[str, object] = {}
    for name, values in index.items():
        if name in ("env", "part", "label", "ended", "roles", "malformed", "task"):
            words = {word: i for i, word in enumerate(dict.fromkeys(values))}
            coded[name] = {"words": list(words), "codes": [words[value] for value in values]}
        else:
            coded[name] = values
    return coded


def _blocks(episodes: Iterable[tuple[str, TraceJson]]) -> Iterator[list[tuple[str, TraceJson]]]:
    block: list[tuple[str, TraceJson]] = []
    size = 0
    for label, episode in episodes:
        block.append((label, episode))
        size += sum(_characters(node) for node in episode.get("nodes", ()))
        if len(block) >= BLOCK_EPISODES or size >= BLOCK_CHARACTERS:
            yield block
            block, size = [], 0
    if block:
        yield block


def _characters(node: NodeJson) -> int:
    """Return the approximate amount of text of a node, for cutting blocks."""
    return len(node.get("reply") or "") + sum(
        len(str(m.get("content", ""))) for m in node.get("messages") or ()
    )


def _clipped(value: object) -> object:
    """Return the JSON with texts cut to `TEXT_LIMIT`, each with a note of the amount that is left out."""
    if isinstance(value, str):
        over = len(value) - TEXT_LIMIT
        return (
            value if over <= 0 else f"{value[:TEXT_LIMIT]}\n… {over:,} more characters are in the trace file"
        )
    if isinstance(value, Mapping):
        return {key: _clipped(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clipped(item) for item in value]
    return value
