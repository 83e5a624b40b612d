"""Replays: what the journal answers to a request that is made again."""

from __future__ import annotations

from collections.abc import Callable

from ...agents.answers import NOTHING_KNOWN, ReplyMeta
from ...agents.basics.failures import WorkflowError
from ...agents.roles import Reply
from .records import ANSWERED, Node, asked_of


class ReplayDivergence(WorkflowError):
    """Raised when a replayed workflow makes another request than the one in its journal."""


def same_request(asked: Node, known: Node) -> bool:
    """Tell whether a request is the one of the journal's node."""
    if asked.kind == "act":
        return asked.messages == known.messages and asked.agent == known.agent
    return asked.args == known.args and asked.tool == known.tool


def recalled(asked: Node, known: Node) -> Node:
    """Return the journal's node for a request, which must be the same request."""
    if not same_request(asked, known):
        raise ReplayDivergence(
            f"replay: node {asked.id} asked {asked_of(asked)}, but the journal holds {asked_of(known)}; "
            "`run` must depend on nothing but the task, ep.rng and the replies"
        )
    return known


def forced(asked: Node, known: Node, text: str | None, read: Callable[[Node, str, ReplyMeta], Reply]) -> Node:
    """Return the node for a request of a replay whose replies are forced, and whose prompts may differ.

    `text` replaces the reply of the journal. A request of another kind than the journal's stays pending.
    """
    if asked.kind != known.kind or asked.agent != known.agent or asked.tool != known.tool:
        return asked  # the control flow has changed
    same = same_request(asked, known)
    if asked.kind == "use":
        return known if same else asked
    if same and text is None:
        return known
    asked.reply = (
        read(asked, known.text or "", known.meta) if text is None else read(asked, text, NOTHING_KNOWN)
    )
    asked.meta = ReplyMeta(forced=True, changed=not same)
    asked.state = ANSWERED
    return asked
