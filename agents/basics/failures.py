"""Failures around an episode, by their place: one enum of places, one tree of exceptions.

A mistake of a role (a reply that does not parse, a wrongly used tool) is an outcome of the episode, and is rewarded. A
failure that nobody in the team caused (a server that is down) ends the episode, never trains, and may be tried again.
The two differ in their type, never in the text of a message.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Hashable
from enum import Enum
from typing import ClassVar


class Ended(str, Enum):
    """Ending of an episode, or the state that it is not over."""

    NO = "no"
    TERMINAL = "terminal"
    TRUNCATED = "truncated"
    ERROR = "error"

    __str__ = str.__str__


class Boundary(str, Enum):
    """Boundaries between the core and other code or machines. An episode that ends in an error names its boundary."""

    POLICY = "model"
    TOOL = "tool"
    SERVER = "server"
    ENVIRONMENT = "workflow"
    JUDGE = "grade"
    REWARD = "reward"

    __str__ = str.__str__


class Failure(RuntimeError):
    """Raised when something fails at a boundary."""

    boundary: ClassVar[Boundary]
    told_as: ClassVar[str] = ""
    """Name in messages, if it differs from the class's own name."""
    transient: ClassVar[bool] = False
    """Flag: nobody in the team caused the failure, so the same episode may succeed when it is played again."""


class WorkflowError(Failure):
    """Raised when a workflow breaks a rule of the core. The message says which rule, where, and what to do."""

    boundary = Boundary.ENVIRONMENT
    where = ""  # file and line, if the traceback has no such frame


class ToolError(Failure):
    """Raised when a tool cannot do what was requested. `run` may catch it, and a replay raises it again.

    If it is not caught, it ends the episode, which is rewarded: the role that used the tool must learn from it.
    """

    boundary = Boundary.TOOL


class ToolFault(ToolError):
    """Raised when a tool itself fails: its code raised another error, or its server did not answer in time.

    If it is not caught, the episode ends in an error, which never trains.
    """

    told_as = "ToolError"  # traces have always had this name


class Infrastructure(Failure):
    """Raised for a failure that nobody in the team caused (a server is down). It ends the episode and never trains."""

    boundary = Boundary.SERVER
    transient = True


class ModelFailure(Failure):
    """Raised when a model does not answer a call. `hopeless`: it would not answer any other call."""

    boundary = Boundary.POLICY
    transient = True
    hopeless = False


class Outage(Failure):
    """Raised when a model answers no calls any more."""

    boundary = Boundary.POLICY


class GroupEnded(RuntimeError):
    """Raised when a model group cannot continue. This says nothing about the files that it was reading."""


class GroupLost(Outage, GroupEnded):
    """Raised when a model group has died: its process, its node or the connection. The run can continue from its newest
    checkpoint.
    """


class ReplicaLost(GroupLost):
    """Raised when one of the engines of a model group has died: its process, its node or the connection."""


class RewardError(Failure, ValueError):
    """Raised when a reward rule returns something that is not a reward. The message names the rule and the value."""

    boundary = Boundary.REWARD


def out_of_memory(error: BaseException) -> bool:
    """Tell whether an error says that memory ended: Python's, the system's, or torch's on any device."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    words = str(error).lower()
    return isinstance(error, MemoryError) or any(mark in words for mark in _NO_ROOM)


_NO_ROOM = ("out of memory", "allocate memory", "not enough memory")
"""Words of torch, which raises a plain RuntimeError on a CPU."""


def is_transient(error: BaseException | None) -> bool:
    """Tell whether an error is of a type that nobody in the team caused."""
    return isinstance(error, Failure) and error.transient


class Failures:
    """Counters that tell an outage from single failures: one policy fails in a row, always in the same way."""

    first = 3  # failures in a row, of a policy that has never answered
    later = 32  # of a policy that has answered before: a few calls may fail together

    def __init__(self) -> None:
        self._answered: set[Hashable] = set()
        self._row: dict[Hashable, tuple[str, int]] = {}  # policy -> the last failure, and its count in a row

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
