"""Text that carries the id of the node that wrote it."""

from __future__ import annotations


class Spoken(str):
    """Earlier reply of a role, with the id of its node, so that an engine can reuse the exact tokens."""

    __slots__ = ("node",)
    node: str

    def __new__(cls, text: str, node: str) -> Spoken:
        words = super().__new__(cls, text)
        words.node = node
        return words

    def __reduce__(self) -> tuple[object, ...]:
        return (Spoken, (str(self), self.node))
