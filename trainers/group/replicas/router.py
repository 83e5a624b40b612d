"""Router of requests over the replicas of an engine: common prefixes stay together, and loads stay even.

    router = Router(4)
    replica = router.choose(prompt, adapter)       # one more request is open there
    router.finished(replica)

A request goes to the replica that holds the longest prefix of its prompt, among those whose load is at most 1.25 times
the mean; load is the number of open requests. The router does not ask the replicas. It remembers which prompts it
sent where, in blocks: the name of a block is the hash of its tokens and of the block before it. Two prompts with the
same hash would only share a replica, so a collision costs time and no result.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence


class Router:
    """Chooser of a replica for each request. The module's docstring shows its use."""

    slack = 1.25
    """Largest load, as a multiple of the mean, at which a replica gets a request because of a prefix."""
    size = 16
    """Number of tokens in a block."""

    def __init__(self, replicas: int, room: int = 1 << 20) -> None:
        """Make a router. `room` is the number of prompt tokens that one replica stores. The router forgets older
        prompts, as the replica does.
        """
        self.blocks = max(1, room // self.size)
        self.open = dict.fromkeys(range(replicas), 0)
        """Number of open requests of each living replica."""
        self.held: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(replicas)]
        self.counts: Counter[str] = Counter()

    def choose(self, prompt: Sequence[int], salt: object = None) -> int:
        """Return the replica for a prompt. Prompts with another `salt` (an adapter) share no prefixes with it."""
        if not self.open:
            raise LookupError("no replica is left")
        blocks = self._blocks(prompt, salt)
        most = self.slack * sum(self.open.values()) / len(self.open)
        prefixes = {
            replica: self._prefix(replica, blocks) for replica, load in self.open.items() if load <= most
        }
        chosen = max(prefixes, key=lambda replica: (prefixes[replica], -self.open[replica], -replica))
        self._hold(chosen, blocks)
        self.open[chosen] += 1
        self.counts.update(routed_tokens=len(prompt), routed_tokens_held=prefixes[chosen] * self.size)
        return chosen

    def finished(self, replica: int) -> None:
        """Record that a request of a replica has ended."""
        if replica in self.open:
            self.open[replica] -= 1

    def lost(self, replica: int) -> None:
        """Remove a dead replica."""
        self.open.pop(replica, None)
        self.held[replica].clear()

    def clear(self) -> None:
        """Remove all prefixes, because the weights have changed."""
        for blocks in self.held:
            blocks.clear()

    def _blocks(self, prompt: Sequence[int], salt: object) -> list[int]:
        names, parent = [], hash(salt)
        for start in range(0, len(prompt) - self.size + 1, self.size):
            parent = hash((parent, *prompt[start : start + self.size]))
            names.append(parent)
        return names

    def _prefix(self, replica: int, blocks: Sequence[int]) -> int:
        """Return how many of the first blocks of a prompt a replica holds."""
        held = self.held[replica]
        return next((i for i, block in enumerate(blocks) if block not in held), len(blocks))

    def _hold(self, replica: int, blocks: Sequence[int]) -> None:
        held = self.held[replica]
        # the beginning of a prompt is marked as newest: it is shared most, and removed last
        for block in reversed(blocks):
            held[block] = None
            held.move_to_end(block)
        while len(held) > self.blocks:
            held.popitem(last=False)
