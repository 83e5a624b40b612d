"""Kills: their targets and moments. A recipe counts the calls of groups and kills at the chosen one.

A kill happens at a call ("the third `save`, 12 ms after its beginning") or at a random time. It sends SIGKILL to the
controller, to a rank, or to the process of a group's actor.
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
from .forked_runs import family

RECIPE = "under-fire"
MOMENTS = {
    "collection": ("generate", "seal"),
    "update": ("values", "update"),
    "sync": ("publish",),
    "save": ("save", "export"),
}
"""Moments of kills, with the calls of groups that belong to each."""


@dataclass(frozen=True)
class Blow:
    """Planned SIGKILL."""

    moment: str
    """A key of `MOMENTS`, or "any"."""
    call: str = ""
    number: int = 0
    """Number of the call at which to kill, counted from 1."""
    delay: float = 0.0
    """Seconds after the beginning of the call, or after the last kill if the moment is "any"."""


def aimed(calls: dict[str, list[float]], chance: random.Random, moment: str) -> Blow:
    """Plan a kill at a random call of a moment. `calls` holds the calls of the undisturbed run, with their seconds."""
    if moment == "any":
        return Blow("any", delay=chance.uniform(0.0, max(0.3, calls["run"][0])))
    call = chance.choice([name for name in MOMENTS[moment] if name in calls])
    among = len(calls[call])
    longest = sorted(calls[call])[int(0.9 * (among - 1))]
    return Blow(moment, call, chance.randint(1, max(1, among // 3)), chance.uniform(0.0, 1.2 * longest))


def phase_of(calls: Counter[str]) -> str:
    """Return the moment of the open calls; "between" if no such call is open."""
    for moment in ("save", "sync", "update", "collection"):
        if any(calls[call] > 0 for call in MOMENTS[moment]):
            return moment
    return "between"


class Hand:
    """Object that kills in the runs of this process. It counts calls of groups, and records each kill before it happens."""

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
        """Start the timer of the next kill if its moment is random."""
        if self.blows and self.blows[0].moment == "any" and not self._armed:
            self._armed = True
            self._later(self.blows[0].delay, self.blows[0], "")

    def _later(self, seconds: float, blow: Blow, group: str) -> None:
        clock = threading.Timer(seconds, self.strike, [blow, group])
        clock.daemon = True
        clock.start()

    def called(self, call: str, group: str) -> None:
        """Count a call, and kill if the next kill is planned for it."""
        self.counts[call] += 1
        if self.blows and not self._armed:
            blow = self.blows[0]
            if blow.call == call and self.counts[call] >= blow.number:
                self._armed = True
                self._later(blow.delay, blow, group)

    def strike(self, blow: Blow, group: str) -> None:
        """Record the kill, then kill. If there is no such process at the moment, try again soon."""
        with self._lock:
            victims = self.victims(group)
            if not victims:
                self._later(0.2, blow, group)
                return
            victim = self.chance.choice(victims)
            with open(self.notes, "a") as file:
                note = {"kind": self.kind, "victim": victim, "hit": phase_of(self.open), **asdict(blow)}
                file.write(json.dumps(note) + "\n")
                file.flush()
                os.fsync(file.fileno())
            os.kill(victim, signal.SIGKILL)
            self.blows.pop(0)
            self.counts.clear()  # the next kill counts from here
            self._armed = False
        self._arm()

    def victims(self, group: str) -> list[int]:
        """Return the processes of the kind to kill."""
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
    """Replacement of a run's watchdog, which wraps groups so that each call is counted and may be killed."""

    def __init__(self, watchdog: Watchdog, hand: Hand) -> None:
        self.watchdog, self.hand = watchdog, hand

    def over(self, group: Group, name: str) -> Group:
        """Return a model group whose calls are counted."""
        self.hand.groups[name] = group
        return cast(Group, Struck(self.watchdog.over(group, name), name, self.hand))


class Struck:
    """Model group that reports each call to the `Hand`."""

    def __init__(self, group: Group, name: str, hand: Hand) -> None:
        self._group, self._name, self._hand = group, name, hand

    def abandon(self) -> None:
        """End the group without waiting."""
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
    """Default recipe whose calls of groups are reported to the `Hand` of this process."""

    hand: Hand | None = None

    def check(self, run: Stage) -> None:
        """Wrap the groups before they start."""
        if self.hand is not None:
            run.hosts.watchdog = cast(Watchdog, StruckGroups(run.hosts.watchdog, self.hand))


register_recipe(RECIPE, UnderFire)
