"""Marks for entries of one board that have the same episodes.

There is no proof which entry had the replies first, because each entry states its own date. So both are marked, with the one
that states the earlier date, and neither is removed. Otherwise a copy with an early date would remove an honest entry.
Players that come with unitymas always give the same replies, so their entries do not mark each other. Equal right replies
prove nothing either: episodes that the scripted expert also has count only if all episodes are equal.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ENOUGH = 8
"""Number of equal episodes that two entries may have by chance, for example because replies are short."""
SHARE = 0.5
"""Share of an entry's episodes from which it is marked. If all are equal, any number is enough."""
NAMED = 3
"""Largest number of other entries in one mark."""


@dataclass(frozen=True)
class Sketch:
    """Facts about an entry that are compared: name, date, hashes of episodes, and a flag for scripted players."""

    name: str
    date: str
    digests: Sequence[str]
    scripted: bool


def marks(entries: Mapping[str, Sketch]) -> dict[str, str]:
    """Return a sentence for each entry that shares its episodes with another, by the keys of the entries."""
    order = sorted(entries, key=lambda key: (entries[key].date, key))
    holders: dict[str, list[str]] = defaultdict(list)
    shared: dict[str, Counter[str]] = defaultdict(Counter)
    telling: dict[str, Counter[str]] = defaultdict(Counter)
    scripted = {digest for entry in entries.values() if entry.scripted for digest in entry.digests}
    for key in order:
        for digest in entries[key].digests:
            for other in holders[digest]:
                shared[key][other] += 1
                telling[key][other] += digest not in scripted
            if len(holders[digest]) < NAMED:  # the first few stand for all their copies
                holders[digest].append(key)
    alike: dict[str, dict[str, int]] = defaultdict(dict)
    for key, counts in shared.items():
        for other, count in counts.items():
            fewer = min(len(entries[key].digests), len(entries[other].digests))
            both = entries[key].scripted and entries[other].scripted
            if not both and (count == fewer or telling[key][other] >= max(ENOUGH, SHARE * fewer)):
                alike[key][other] = alike[other][key] = count
    return {key: _mark(key, others, entries) for key, others in alike.items()}


def _mark(key: str, others: Mapping[str, int], entries: Mapping[str, Sketch]) -> str:
    mine = entries[key]
    first = sorted(others, key=lambda other: (-others[other], entries[other].date, other))
    parts = []
    for other in first[:NAMED]:
        theirs = entries[other]
        whole = others[other] == len(mine.digests) == len(theirs.digests)
        how_many = "same episodes" if whole else f"{others[other]} of {len(mine.digests)} the same episodes"
        when = "earlier" if theirs.date < mine.date else "later" if theirs.date > mine.date else "alike"
        parts.append(f"{how_many} as {theirs.name[:60]} ({other[:60]}, dated {when})")
    more = f", and {len(first) - NAMED} more" if len(first) > NAMED else ""
    return "; ".join(parts) + more
