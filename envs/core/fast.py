"""Tricks of speed: code of the core that is written for the machine, with what each gains.

Each was taken out and put back in turn. Five processes of either form took turns on one core, other work beside them, and the
means of their shortest slices are compared: an episode of M-ASK (`unitymas bench episode`: 17 requests),
and a fork of it. A trick whose gain is not seen there has no place here.

                                                                                        an episode   a fork
    the only line of control is followed in one loop (`Rounds._follow`)                        11%      34%
    prompts are filled by compiled code (agents/text/role_prompt.py)                           21%
    a replay takes a prompt whose fields are the journal's from there (`Episode.act`)                   13%
    a node is filled where it is made, slot by slot (`Episode.act`)                             1%       2%
    numbers that ids are made of are kept as text (`NUMBERS`)                                            3%
    a reader of one tag is bound once (`tag_reader`)                                            1%
    an act carries its role's reader (`Act.read`)                                             0.5%
    messages are one tuple, not a sum of two (`Episode.act`)                                  0.5%

`GOES_ON` is a name of its own: its gain is below what this measure shows. The heap rests while episodes are played: 4% of a
rollout's time, beside 400,000 objects.

What is often read is set in `__init__`, not left to a default of the class: Python 3.11 reads an attribute that the class has
too by its slow path. A function in a field is bound to a local name before it is called, for the same reason.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from ...agents.answers import NOTHING_KNOWN
from ...agents.basics.failures import Ended
from ...agents.basics.frozen import FrozenDict
from .records import MADE, Use

GOES_ON = Ended.NO
"""Ending of an episode that is not over. Every request compares with it, and looking up a member of an enum is slow."""


class _Numbers(dict[int, str]):
    """Numbers as text. Those that are not kept are written anew."""

    def __missing__(self, number: int) -> str:
        return str(number)


NUMBERS = _Numbers((number, str(number)) for number in range(1000))
"""Numbers of an episode's requests as text: ids are made of them."""


def new_use(tool: str, args: FrozenDict) -> Use:
    """Make a tool use that is not awaited yet."""
    node = Use()
    node.state = MADE
    node.tool, node.args = tool, args
    node.result = node.private = node.error = node.reply = node.turn = None
    node.meta = NOTHING_KNOWN
    return node


_resting = 0


@contextmanager
def heap_at_rest() -> Iterator[None]:
    """Exclude the objects that exist already (models, indices, data) from garbage collection while episodes are played.

    Thousands of new objects start collections of the whole heap, which take 4% of the time of a rollout. A heap that
    was frozen before is left unchanged.
    """
    global _resting
    if not _resting:
        if gc.get_freeze_count():
            yield
            return
        gc.freeze()
    _resting += 1
    try:
        yield
    finally:
        _resting -= 1
        if not _resting:
            gc.unfreeze()
