"""Episodes as text for a terminal. Control characters in a reply are escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...agents.basics.hints import counted
from ..core.trace import Trace, jsonable
from ..core.workflow import Node

WIDE = 600  # characters of a reply or result that are shown


def harmless(text: str) -> str:
    """Escape control characters, lone surrogates and direction overrides. Line breaks stay."""
    return "".join(
        c if c == "\n" or c.isprintable() else f"\\x{ord(c):02x}" if ord(c) < 256 else f"\\u{ord(c):04x}"
        for c in text
    )


def clip(text: str, width: int = WIDE) -> str:
    """Escape a text as `harmless` does. A longer text is cut to `width` and ends with its number of characters."""
    text = harmless(text[: width * 2] if len(text) > width * 4 else text)
    return text if len(text) <= width else f"{text[: width - 20]} … {len(text):,} characters"


def episode_text(trace: Trace) -> str:
    """Return the whole episode as text: replies, tool results, rewards, outcome and metrics."""
    lines = [f"{trace.env_id}  task {trace.task_id}  seed {trace.seed}"]
    lines += [node_text(node, trace.rewards(node.id)) for node in trace.nodes]
    if str(trace.ended) != "no":
        outcome = ", ".join(f"{k}={clip(str(v), 120)}" for k, v in (trace.outcome or {}).items())
        why = f" ({trace.reason})" if trace.reason else ""
        lines.append(f"-- {trace.ended}{why}  {outcome}")
        if trace.metrics:
            lines.append("   " + "  ".join(f"{k} {v:.3g}" for k, v in sorted(trace.metrics.items())))
    return "\n".join(lines)


def use_in_words(node: Node, width: int = 200) -> tuple[str, str]:
    """Return the arguments and the result of a tool call, each in one line."""
    args: Mapping[str, object] = node.args or {}
    if isinstance(args.get("query"), str):
        question = f"“{args['query']}”"
    elif args.get("moves"):
        question = in_words(args["moves"], width)
    else:
        question = "; ".join(
            f"{name} {in_words(value, 60)}" for name, value in args.items() if value is not None
        )
    answer = f"failed: {node.error}" if node.error else in_words(node.result, width)
    return one_line(question, width), one_line(answer, width)


def in_words(value: object, width: int = 200) -> str:
    """Describe a tool's result in one line: passages by their titles, tests by their number, a board by its rows."""
    if isinstance(value, Mapping):
        if {"passed", "total"} <= set(value):
            return f"{value['passed']} of {counted(value['total'], 'test')} passed"
        items = {k: v for k, v in value.items() if v not in ("", None, ())}
        return one_line("; ".join(f"{k} {in_words(v, width)}" for k, v in items.items()), width)
    if isinstance(value, Sequence) and not isinstance(value, str) and value:
        if all(isinstance(item, Mapping) and "title" in item for item in value):
            titles = "; ".join(str(item["title"]) for item in value)
            return one_line(f"{counted(len(value), 'passage')}: {titles}", width)
        return one_line(", ".join(in_words(item, width) for item in value), width)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return one_line(str(jsonable(value)), width)


def one_line(text: str, width: int) -> str:
    """Return an escaped text in one line, with slashes for line breaks. A longer text ends in an ellipsis."""
    flat = " ".join(
        " / ".join(part.strip() for part in harmless(text[: width * 8]).strip().split("\n")).split()
    )
    return flat if len(flat) <= width else flat[: width - 1].rstrip() + "…"


def node_text(node: Node, rewards: dict[str, float] | None = None) -> str:
    """Return one node as text: a tool call in one line, a reply with its rewards."""
    if node.kind == "use":
        question, answer = use_in_words(node)
        return f"{node.id:>6}  ({node.tool}) {question} -> {answer}"
    mark = "" if node.ok else "  [malformed]"
    amounts = "  ".join(f"{k} {v:+.3g}" for k, v in (rewards or {}).items())
    tail = f"   {amounts}" if amounts else ""
    return f"{node.id:>6}  {node.agent}: {clip(node.text or '')}{mark}{tail}"
