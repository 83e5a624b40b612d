"""Players that distribute episodes over all groups, in this process and in shards."""

from __future__ import annotations

import time
import zlib
from collections.abc import Mapping

from ....agents.answers import Answer
from ....agents.policies import Call, Policy
from ....agents.team import BoundTeam
from ....envs.core.arena import Arena
from ....trainers.controller.shards.shard import Seating, Shard
from ....trainers.controller.shards.sharded import DistantShard
from ....trainers.group.contract import Group


class Dealt:
    """Player that distributes episodes over policies, one in each group."""

    def __init__(self, groups: Mapping[str, Group]) -> None:
        self.groups = list(groups.items())

    async def act(self, call: Call) -> Answer:
        """Ask the group of the episode."""
        name, group = self.groups[zlib.crc32(call.episode.encode()) % len(self.groups)]
        return await group.generate(f"policy-{name}", call, None, True)


def dealt(groups: Mapping[str, Group], names: Mapping[str, str]) -> BoundTeam:
    """Return a team in which every agent distributes its episodes over the groups."""
    seat: Policy = Dealt(groups)
    return BoundTeam(dict.fromkeys(names, seat), names)


class DealtShard(Shard):
    """Shard that distributes its episodes over the groups, and reports its processor time."""

    def team(self, seating: Seating, arena: Arena) -> BoundTeam:
        """Return the team of this shard."""
        return dealt(self.groups, seating.players)

    async def used(self) -> float:
        """Seconds of a processor so far."""
        return time.process_time()


class TimedShard(DistantShard):
    """Shard in an actor that reports its processor time."""

    async def used(self) -> float:
        """Seconds of a processor so far."""
        seconds: float = await self._ask("used")
        return seconds
