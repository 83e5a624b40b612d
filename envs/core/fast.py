"""Tricks of speed: code of the core that is written for the machine, with what each gains.

Each was taken out and put back in turn, in processes of its own, and the best of three runs of
`python -m unitymas.benchmarks.speed.episode` compared (requests answered a second). A trick whose gain is not seen there
has no place here.

    nodes are filled from outside, without a constructor     2–5%
    `GOES_ON` is looked up once                              2–5%
    prompts are filled by compiled code (agents/text/role_prompt.py)   6%, and 6% of a fork; where they choose, 5–7 × a fill
    the only line of control is followed in one loop (`Rounds._follow`)    13% of a fork
    a replay takes a prompt whose fields are the journal's from there (`Episode.act`)    8% of a fork
    messages are one tuple, not a sum of two (`Episode.act`)           2%
    the heap rests while episodes are played                 4% of a rollout's time, beside 400,000 objects

"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from ...agents.answers import NOTHING_KNOWN
from ...agents.basics.failures import Ended
from ...agents.basics.frozen import FrozenDict
from ...agents.roles import Format
from .records import EMPTY, MADE, Act, Use

GOES_ON = Ended.NO
"""Ending of an episode that is not over. Every request compares with it, and looking up a member of an enum is slow."""

# calling a class runs `type.__call__` and `__init__`: two more frames for each request


def new_act(
    agent: str,
    role: str,
    messages: tuple[Mapping[str, object], ...],
    format: Format,
    turn: int | None = None,
    max_tokens: int | None = None,
    anchor: str | None = None,
    fields: Mapping[str, object] = EMPTY,
) -> Act:
    """Make an act that is not awaited yet."""
    node = Act()
    node.state = MADE
    node.agent, node.role, node.messages, node.format = agent, role, messages, format
    node.turn, node.max_tokens, node.anchor, node.fields = turn, max_tokens, anchor, fields
    node.reply = node.error = None
    node.meta = NOTHING_KNOWN
    return node


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
    was frozen before is left unchanged."""
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
