"""Entries of one board whose episodes are the same, each named to the other.

Nobody can prove whose the replies were first: a date is its maker's word. So both are marked, with who says the earlier
date, and neither is removed; else a copy with an early date would take an honest entry from the board. Players that
came with unitymas say the same for everybody, and their entries are not marked by each other. Nor does it tell anything
that two teams gave the right replies: episodes that the scripted expert has as well count only where all are the same.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ENOUGH = 8
"""Episodes that two entries share by chance, or because short replies are alike, at most."""
SHARE = 0.5
"""Part of an entry's episodes from which on it is marked; all of them are enough, however few."""
NAMED = 3
"""Other entries that one mark names."""


@dataclass(frozen=True)
class Sketch:
    """An entry, as far as it is compared: its name, its date, hashes of its episodes, and whether it is scripted."""

    name: str
    date: str
    digests: Sequence[str]
    scripted: bool


def marks(entries: Mapping[str, Sketch]) -> dict[str, str]:
    """A sentence for each entry that shares its episodes with another, by the entries' keys."""
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
