"""Endings: what the return of `run`, or its error, makes of an episode."""

from __future__ import annotations

from collections.abc import Mapping

from ...agents.basics.failures import Boundary, Ended, ToolError, ToolFault, WorkflowError
from ...agents.roles import Reply
from .records import Node
from .workflow import Join, Outcome


def ending_of(error: Exception, grading: bool) -> tuple[Ended, Boundary]:
    """Tell by its type whether an uncaught error is an outcome that the team caused, or a failure of something else."""
    if grading:
        return Ended.ERROR, Boundary.JUDGE
    if not isinstance(error, ToolError):
        return Ended.ERROR, Boundary.ENVIRONMENT
    return Ended.ERROR if isinstance(error, ToolFault) else Ended.TERMINAL, Boundary.TOOL


def outcome_of(value: object, forgotten: Node | Join | None) -> Outcome:
    """Return the outcome that `run` has returned. `forgotten` is a request that it made and never awaited."""
    if forgotten is not None:
        what = (
            "an ep.all(…)"
            if isinstance(forgotten, Join)
            else f"a request to {forgotten.agent or forgotten.tool!r}"
        )
        raise WorkflowError(f"{what} was made but never awaited; write `await ep.…`")
    if isinstance(value, Reply | Node | Join):
        what = "a reply" if isinstance(value, Reply) else "a request"
        raise WorkflowError(f"run returned {what}; return what is in it, such as Outcome(answer=reply.value)")
    if value is None:
        return Outcome()
    if isinstance(value, Outcome):
        return value
    return Outcome(**value) if isinstance(value, Mapping) else Outcome(answer=value)
