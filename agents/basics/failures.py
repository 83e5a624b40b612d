"""Failures around an episode, by where it went wrong: one enum of places, one tree of exceptions.

What a role did wrong (a reply that does not parse, a tool misused) is an outcome of the episode, and is rewarded as
one. What nobody in the team caused (a server that is down) ends the episode, never trains, and may be tried again.
The two are told apart by type, never by the text of a message.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from enum import Enum
from typing import ClassVar


class Ended(str, Enum):
    """Ending of an episode: why it is over, or that it is not."""

    NO = "no"
    TERMINAL = "terminal"
    TRUNCATED = "truncated"
    ERROR = "error"

    __str__ = str.__str__


class Boundary(str, Enum):
    """Boundaries where an episode meets code or a machine that is not the core's; the reason of one that ended in an error."""

    POLICY = "model"
    TOOL = "tool"
    SERVER = "server"
    ENVIRONMENT = "workflow"
    JUDGE = "grade"
    REWARD = "reward"

    __str__ = str.__str__


class Failure(RuntimeError):
    """Something failed at a boundary."""

    boundary: ClassVar[Boundary]
    told_as: ClassVar[str] = ""
    """Name in messages, where it is not the class's own."""
    transient: ClassVar[bool] = False
    """True if nobody in the team caused it, so that the same episode may go well when it is played again."""


class WorkflowError(Failure):
    """A workflow broke one of the rules of the core; the message says which, where, and what to do."""

    boundary = Boundary.ENVIRONMENT
    where = ""  # file and line, where no frame of the traceback tells


class ToolError(Failure):
    """Raised where a tool could not do what it was asked: `run` may catch it, and a replay raises it again.

    Uncaught, it ends the episode, which is rewarded: whoever used the tool so is to learn from it.
    """

    boundary = Boundary.TOOL


class ToolFault(ToolError):
    """Raised where a tool itself was at fault: its code raised something else, or its server did not answer in time.

    Uncaught, it is an error of the episode, which never trains.
    """

    told_as = "ToolError"  # as traces have always told it


class Infrastructure(Failure):
    """A failure nobody in the team caused (a server is down). It ends the episode and never trains."""

    boundary = Boundary.SERVER
    transient = True


class ModelFailure(Failure):
    """A model did not answer a call. `hopeless`: neither would it answer any other."""

    boundary = Boundary.POLICY
    transient = True
    hopeless = False


class Outage(Failure):
    """A model answers nothing any more."""

    boundary = Boundary.POLICY


class GroupLost(Outage):
    """A model group died: its process, its node or the way to it is gone. The run can go on from its newest checkpoint."""


class ReplicaLost(GroupLost):
    """Raised when one of the engines of a model group died: its process, its node or the way to it is gone."""


class RewardError(Failure, ValueError):
    """A reward rule gave something that is no reward; the message names the rule and what it gave."""

    boundary = Boundary.REWARD


def is_transient(error: BaseException | None) -> bool:
    """Tell whether an error is of a kind that nobody in the team caused."""
    return isinstance(error, Failure) and error.transient


class Failures:
    """Counters that tell an outage from single failures: one policy fails in a row, always in the same way."""

    first = 3  # failures in a row, of a policy that never answered
    later = 32  # of a policy that has answered: a few calls may fail together

    def __init__(self) -> None:
        self._answered: set[Hashable] = set()
        self._row: dict[Hashable, tuple[str, int]] = {}  # policy -> the last failure, and how often in a row

    def answered(self, policy: Hashable) -> None:
        """Record that the policy answered a call."""
        self._answered.add(policy)
        self._row.pop(policy, None)

    def failed(self, policy: Hashable, error: Exception) -> None:
        """Record that the policy failed a call. Raise `Outage` if all its calls would end like this."""
        if isinstance(error, Outage):  # the policy knows itself
            raise error
        if not isinstance(error, ModelFailure | MemoryError):
            return  # an error in the user's own code
        kind = (
            f"{type(error).__name__} {re.sub(r'[^ ]*[0-9][^ ]*', '#', str(error))}"  # without ids and times
        )
        last, times = self._row.get(policy, ("", 0))
        times = times + 1 if kind == last else 1
        self._row[policy] = kind, times
        answered = policy in self._answered
        if getattr(error, "hopeless", False) and not answered:
            raise Outage(str(error)) from error
        if times >= (self.later if answered else self.first):
            raise Outage(f"{times} calls in a row failed alike, so no more are made: {error}") from error
