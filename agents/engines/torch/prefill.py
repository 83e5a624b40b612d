"""Prefill plan: prompts cut into pieces, each computed once for all requests that share it.

The plan works on lists of token ids by slot. It needs only the number of tokens that each slot has already.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from os.path import commonprefix

Prompts = Mapping[int, list[int]]
"""Map from slot to prompt."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens `start : start + n` of the prompts in `slots`. These prompts are equal up to the end of the
    piece.
    """

    slots: list[int]
    start: int
    n: int


def cut(
    prompts: Prompts, known: Mapping[int, int], family: Mapping[int, tuple[int, str]], block: int, most: int
) -> Iterator[Piece]:
    """Cut prompts after their `known` tokens into pieces of at most `most` tokens. A piece that others continue comes
    before them.

    Only slots of one `family` share pieces. Their prompts part at whole blocks of `block` tokens.
    """

    def beginning(slot: int) -> tuple[tuple[int, str], int, list[int]]:
        return family[slot], known[slot], prompts[slot][: known[slot]]

    order = sorted(prompts, key=lambda slot: (beginning(slot), prompts[slot]))
    for (_, start, _), alike in groupby(order, key=beginning):
        for piece in _forks(prompts, list(alike), start, block):
            for at in range(piece.start, piece.start + piece.n, most):
                yield Piece(piece.slots, at, min(most, piece.start + piece.n - at))


def _forks(prompts: Prompts, slots: list[int], start: int, block: int) -> Iterator[Piece]:
    """Return the pieces of prompts that are equal up to `start`, in order."""
    first, last = prompts[slots[0]], prompts[slots[-1]]
    end = len(commonprefix([first, last]))
    if first != last:
        end -= end % block
    if end > start:
        yield Piece(slots, start, end - start)
    if first != last:
        for _, branch in groupby(slots, key=lambda slot: prompts[slot][end : end + block]):
            yield from _forks(prompts, list(branch), end, block)


def groups(pieces: list[Piece], rows: int) -> list[list[Piece]]:
    """Put pieces into groups of at most `rows` tokens, in order."""
    parts: list[list[Piece]] = []
    room = 0
    for piece in pieces:
        if piece.n > room:
            parts.append([])
            room = rows
        parts[-1].append(piece)
        room -= piece.n
    return parts
