"""Text that remembers which node said it."""

from __future__ import annotations


class Spoken(str):
    """A role's own earlier words, tagged with their node, so that an engine can reuse the exact tokens."""

    __slots__ = ("node",)
    node: str

    def __new__(cls, text: str, node: str) -> Spoken:
        words = super().__new__(cls, text)
        words.node = node
        return words

    def __reduce__(self) -> tuple[object, ...]:
        return (Spoken, (str(self), self.node))
