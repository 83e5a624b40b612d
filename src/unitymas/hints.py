"""Words that messages of every room share: a near name for an unknown one, and a number with its noun."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, known: Iterable[str], otherwise: str = "choose one of") -> str:
    """The name that was probably meant; where none is near, all that there are."""
    known = list(known)
    near = get_close_matches(name, known, 1, 0.5)
    return f"did you mean {near[0]!r}?" if near else f"{otherwise} {', '.join(known) or 'none'}"


def counted(number: int | float, noun: str, plural: str = "", *, form: str = ",") -> str:
    """A number with its noun, in the singular where it is one: ``1 role``, ``2 roles``, ``1,200 tokens``."""
    return f"{number:{form}} {noun if number == 1 else plural or noun + 's'}"
