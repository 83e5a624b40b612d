"""Spaces of Gymnasium for unicode texts and for conversations.

Gymnasium's `Text` stores its charset, which takes 1.4 s and 231 MB for all of unicode. So membership here depends on type
and length alone, and samples are printable ASCII.
"""

from __future__ import annotations

from collections.abc import Mapping

from gymnasium.spaces import Dict, Space, Text

PRINTABLE = "".join(map(chr, range(32, 127)))


class Utterance(Text):  # type: ignore[misc]
    """Space of all strings up to a length. Samples have at most 64 characters."""

    def __init__(self, limit: int = 1_000_000, seed: int | None = None) -> None:
        super().__init__(64, min_length=0, charset=PRINTABLE, seed=seed)
        self.limit = limit

    def contains(self, x: object) -> bool:
        """Tell whether this is a string within the limit."""
        return isinstance(x, str) and len(x) <= self.limit

    def __repr__(self) -> str:
        return f"Utterance({self.limit})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Utterance) and other.limit == self.limit

    __hash__ = None  # type: ignore[assignment]


class Conversation(Space):  # type: ignore[misc]
    """Space of conversations: tuples of messages `{role, content}`, with the optional keys `name` and `tool_calls`."""

    keys = frozenset({"role", "content", "name", "tool_calls"})

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(None, None, seed)
        self._text = Utterance()

    def sample(self, mask: object = None, probability: object = None) -> tuple[dict[str, str], ...]:
        """Return a conversation with one user message of a few random characters."""
        length = int(self.np_random.integers(1, 32))
        picks = self.np_random.integers(0, len(PRINTABLE), size=length)
        return ({"role": "user", "content": "".join(PRINTABLE[i] for i in picks)},)

    def contains(self, x: object) -> bool:
        """Tell whether this is a tuple of messages with text as role and content, and no unknown key."""
        return isinstance(x, tuple) and all(
            isinstance(m, Mapping)
            and isinstance(m.get("role"), str)
            and isinstance(m.get("content"), str)
            and self.keys.issuperset(m)
            for m in x
        )

    @property
    def is_np_flattenable(self) -> bool:
        """Flag for Gymnasium: False, because text has no array form."""
        return False

    def __repr__(self) -> str:
        return "Conversation()"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Conversation)

    __hash__ = None  # type: ignore[assignment]


def observation_space() -> Dict:
    """Return the observation space of every agent."""
    return Dict({"messages": Conversation()})
