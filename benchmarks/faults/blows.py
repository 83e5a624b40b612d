"""Blows: who is killed, and when. A recipe that is the usual step, whose calls to groups are counted and struck.

A blow is aimed at a call ("the third `save`, 12 ms after its beginning") or comes at a random time. What it does is
SIGKILL, to the controller's own process, to a rank, or to the process of a group's actor.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from ...trainers.controller.reporting.watchdog import Watchdog
from ...trainers.controller.stage import Stage
from ...trainers.controller.step import Default
from ...trainers.group.contract import Group
from ...trainers.recipes import register_recipe
from .lives import family

RECIPE = "under-fire"
MOMENTS = {
    "collection": ("generate", "seal"),
    "update": ("values", "update"),
    "sync": ("publish",),
    "save": ("save", "export"),
}
"""Moments at which a blow is aimed: the calls to a group that make them up."""


@dataclass(frozen=True)
class Blow:
    """One SIGKILL to come."""

    moment: str
    """A key of `MOMENTS`, or "any"."""
    call: str = ""
    number: int = 0
    """Number of the call that is struck, counted from 1."""
    delay: float = 0.0
    """Seconds after its beginning; after the last blow where the moment is "any"."""


def aimed(calls: dict[str, list[float]], chance: random.Random, moment: str) -> Blow:
    """Choose a call of a moment. `calls` are those of the undisturbed run, with how long each took."""
    if moment == "any":
        return Blow("any", delay=chance.uniform(0.0, max(0.3, calls["run"][0])))
    call = chance.choice([name for name in MOMENTS[moment] if name in calls])
    among = len(calls[call])
    longest = sorted(calls[call])[int(0.9 * (among - 1))]
    return Blow(moment, call, chance.randint(1, max(1, among // 3)), chance.uniform(0.0, 1.2 * longest))


def phase_of(calls: Counter[str]) -> str:
    """Return the moment that the open calls belong to; "between" where no group is asked for any of them."""
    for moment in ("save", "sync", "update", "collection"):
        if any(calls[call] > 0 for call in MOMENTS[moment]):
            return moment
    return "between"


class Hand:
    """Strikes in this process's runs: it counts calls to groups, and notes each blow before it falls."""

    def __init__(self, kind: str, blows: list[Blow], notes: Path, seed: int = 0) -> None:
        self.kind, self.blows, self.notes = kind, blows, notes
        self.counts: Counter[str] = Counter()
        self.took: dict[str, list[float]] = defaultdict(list)
        self.chance = random.Random(seed)
        self.groups: dict[str, Group] = {}
        self.open: Counter[str] = Counter()
        self._lock, self._armed = threading.Lock(), False
        self._arm()

    def _arm(self) -> None:
        """Set the clock of the next blow, where it comes at a random time."""
        if self.blows and self.blows[0].moment == "any" and not self._armed:
            self._armed = True
            clock = threading.Timer(self.blows[0].delay, self.strike, [self.blows[0], ""])
            clock.daemon = True
            clock.start()

    def called(self, call: str, group: str) -> None:
        """Count a call; strike if the next blow is aimed at it."""
        self.counts[call] += 1
        if self.blows and not self._armed:
            blow = self.blows[0]
            if blow.call == call and self.counts[call] >= blow.number:
                self._armed = True
                clock = threading.Timer(blow.delay, self.strike, [blow, group])
                clock.daemon = True
                clock.start()

    def strike(self, blow: Blow, group: str) -> None:
        """Kill, and note it first. Where nobody stands to be killed, try again soon."""
        with self._lock:
            victims = self.victims(group)
            if not victims:
                clock = threading.Timer(0.2, self.strike, [blow, group])
                clock.daemon = True
                clock.start()
                return
            victim = self.chance.choice(victims)
            with open(self.notes, "a") as file:
                note = {"kind": self.kind, "victim": victim, "hit": phase_of(self.open), **asdict(blow)}
                file.write(json.dumps(note) + "\n")
                file.flush()
                os.fsync(file.fileno())
            os.kill(victim, signal.SIGKILL)
            self.blows.pop(0)
            self.counts.clear()  # the next blow counts from here
            self._armed = False
        self._arm()

    def victims(self, group: str) -> list[int]:
        """Processes of the kind that is killed."""
        if self.kind in ("controller", "ray-controller"):
            return [os.getpid()]
        if self.kind == "rank":
            return [
                pid
                for g in self.groups.values()
                if hasattr(g, "ranks")
                for pid in family(g.ranks.supervisor.pid)
            ]
        name = "EngineCore" if self.kind == "engine" else "ray::GroupActor"
        return [pid for pid, words in family(os.getpid()).items() if name in words]


class StruckGroups:
    """Stands in for a run's watchdog where groups are handed out: each call is counted, and may be struck."""

    def __init__(self, watchdog: Watchdog, hand: Hand) -> None:
        self.watchdog, self.hand = watchdog, hand

    def over(self, group: Group, name: str) -> Group:
        """A model group whose calls the hand sees."""
        self.hand.groups[name] = group
        return cast(Group, Struck(self.watchdog.over(group, name), name, self.hand))


class Struck:
    """A model group as it is; the hand is told of each call."""

    def __init__(self, group: Group, name: str, hand: Hand) -> None:
        self._group, self._name, self._hand = group, name, hand

    def abandon(self) -> None:
        """End it without waiting."""
        self._group.abandon()

    def __getattr__(self, call: str) -> Any:
        asked = getattr(self._group, call)

        async def ask(*arguments: object, **options: object) -> object:
            self._hand.called(call, self._name)
            began = time.perf_counter()
            self._hand.open[call] += 1
            try:
                return await asked(*arguments, **options)
            finally:
                self._hand.open[call] -= 1
                self._hand.took[call].append(time.perf_counter() - began)

        return ask


class UnderFire(Default):
    """The usual step. The hand of this process is told of every call to a group."""

    hand: Hand | None = None

    def check(self, run: Stage) -> None:
        """Take the groups in hand before they start."""
        if self.hand is not None:
            run.hosts.watchdog = cast(Watchdog, StruckGroups(run.hosts.watchdog, self.hand))


register_recipe(RECIPE, UnderFire)
