"""What an error says of a name that nobody knows."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, known: Iterable[str], otherwise: str = "choose one of") -> str:
    """The name that was probably meant; where none is near, all that there are."""
    known = list(known)
    near = get_close_matches(name, known, 1, 0.5)
    return f"did you mean {near[0]!r}?" if near else f"{otherwise} {', '.join(known) or 'none'}"
