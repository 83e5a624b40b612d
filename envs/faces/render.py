"""Episodes as text for a terminal. Control characters of a reply are shown, never sent."""

from __future__ import annotations

from ..core.trace import Trace, jsonable
from ..core.workflow import Node

WIDE = 600  # characters of a reply or result that are shown


def harmless(text: str) -> str:
    """Text without terminal escapes, other control characters, lone surrogates or direction overrides."""
    return "".join(
        c if c == "\n" or c.isprintable() else f"\\x{ord(c):02x}" if ord(c) < 256 else f"\\u{ord(c):04x}"
        for c in text
    )


def clip(text: str, width: int = WIDE) -> str:
    """Harmless text, cut in the middle where it is long."""
    text = harmless(text[: width * 2] if len(text) > width * 4 else text)
    return text if len(text) <= width else f"{text[: width - 20]} … {len(text):,} characters"


def episode_text(trace: Trace) -> str:
    """The whole episode: who said what, what tools gave, what it earned."""
    lines = [f"{trace.env_id}  task {trace.task_id}  seed {trace.seed}"]
    lines += [node_text(node, trace.rewards(node.id)) for node in trace.nodes]
    if str(trace.ended) != "no":
        outcome = ", ".join(f"{k}={clip(str(v), 120)}" for k, v in (trace.outcome or {}).items())
        why = f" ({trace.reason})" if trace.reason else ""
        lines.append(f"-- {trace.ended}{why}  {outcome}")
        if trace.metrics:
            lines.append("   " + "  ".join(f"{k} {v:.3g}" for k, v in sorted(trace.metrics.items())))
    return "\n".join(lines)


def node_text(node: Node, rewards: dict[str, float] | None = None) -> str:
    """One line (or a few) for one node."""
    if node.kind == "use":
        args = ", ".join(f"{k}={clip(str(jsonable(v)), 80)}" for k, v in (node.args or {}).items())
        result = f"failed: {clip(node.error, 200)}" if node.error else clip(str(jsonable(node.result)), 200)
        return f"{node.id:>6}  ({node.tool}) {args} -> {result}"
    mark = "" if node.ok else "  [malformed]"
    earned = "  ".join(f"{k} {v:+.3g}" for k, v in (rewards or {}).items())
    tail = f"   {earned}" if earned else ""
    return f"{node.id:>6}  {node.agent}: {clip(node.text or '')}{mark}{tail}"
