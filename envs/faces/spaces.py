"""Spaces for text: any unicode, and conversations of it.

Gymnasium's `Text` enumerates its charset (1.4 s and 231 MB for all of unicode), so membership here is
type and length; samples are printable ASCII.
"""

from __future__ import annotations

from collections.abc import Mapping

from gymnasium.spaces import Dict, Space, Text

PRINTABLE = "".join(map(chr, range(32, 127)))


class Utterance(Text):  # type: ignore[misc]
    """Any string up to a length; samples are short."""

    def __init__(self, limit: int = 1_000_000, seed: int | None = None) -> None:
        super().__init__(64, min_length=0, charset=PRINTABLE, seed=seed)
        self.limit = limit

    def contains(self, x: object) -> bool:
        """A string within the limit."""
        return isinstance(x, str) and len(x) <= self.limit

    def __repr__(self) -> str:
        return f"Utterance({self.limit})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Utterance) and other.limit == self.limit

    __hash__ = None  # type: ignore[assignment]


class Conversation(Space):  # type: ignore[misc]
    """A tuple of `{role, content}` messages, with `name` and `tool_calls` where they apply."""

    keys = frozenset({"role", "content", "name", "tool_calls"})

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(None, None, seed)
        self._text = Utterance()

    def sample(self, mask: object = None, probability: object = None) -> tuple[dict[str, str], ...]:
        """One user message of a few random characters."""
        length = int(self.np_random.integers(1, 32))
        picks = self.np_random.integers(0, len(PRINTABLE), size=length)
        return ({"role": "user", "content": "".join(PRINTABLE[i] for i in picks)},)

    def contains(self, x: object) -> bool:
        """A tuple of messages with string role and content, and no key that is none of theirs."""
        return isinstance(x, tuple) and all(
            isinstance(m, Mapping)
            and isinstance(m.get("role"), str)
            and isinstance(m.get("content"), str)
            and self.keys.issuperset(m)
            for m in x
        )

    @property
    def is_np_flattenable(self) -> bool:
        """Text has no array form."""
        return False

    def __repr__(self) -> str:
        return "Conversation()"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Conversation)

    __hash__ = None  # type: ignore[assignment]


def observation_space() -> Dict:
    """Space of what every agent observes."""
    return Dict({"messages": Conversation()})
