"""Checks whether the replies of a submission can be those of the players that it names.

No check can prove which model spoke. But a reply has tokens, a player has a limit of them and a name, and a team that
is sampled does not say the same again and again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ...agents.roles import MAX_REPLY
from ..evaluation import identity

_LONGEST_TOKEN = 512
"""Bytes: no vocabulary in use holds a longer one."""
_CLOSING = 32
"""Tokens that a reply may have beyond its bytes: what ended it, and a stop word that was cut off."""
_ENOUGH = 6
"""Copies among the samples of a team, all of its tasks together, from which on it cannot be chance."""


@dataclass(frozen=True)
class SeatModel:
    """A model that plays a seat, as far as its identity tells."""

    names: frozenset[str]
    max_tokens: int | None


class SeatedTeam:
    """The players of a submission: what they may say, and what they have said."""

    def __init__(self, seats: Mapping[str, Mapping[str, Any]]) -> None:
        self.seats = seats
        self.voices = {agent: voice for agent, seat in seats.items() if (voice := _voice(seat))}
        told = {agent: list(temperatures(seat)) for agent, seat in seats.items()}
        self.sampled = {agent for agent, found in told.items() if max(found, default=0) > 0}
        self.silent = {agent for agent, found in told.items() if not found and agent not in _scripts(seats)}
        self.heard: dict[str, list[str]] = {}

    def claims(self) -> Iterator[str]:
        """Facts that players of ours always tell, and that are missing here."""
        for agent in sorted(self.silent & self.voices.keys()):
            yield f"provenance.roles.{agent:.60}: a model of ours always tells its temperature, a number"

    def labels(self, team: Any) -> Iterator[str]:
        """Check whether an episode was played by the players that the provenance names."""
        told = team if isinstance(team, Mapping) else {}
        for agent, seat in self.seats.items():
            label = told.get(agent)
            unnamed = isinstance(label, str) and " at 0x" in label and seat["player"] == seat.get("name")
            if label != seat["player"] and not unnamed:
                yield f"tags.team.{agent:.60}: the provenance says {seat['player']!r:.60}, its trace {label!r:.60}"
        if odd := sorted(told.keys() - self.seats.keys()):
            yield f"tags.team names {odd[0]:.60}, whom the provenance lacks"

    def reply(self, node: Mapping[str, Any]) -> Iterator[str]:
        """Check whether a model of ours can have given this reply with these tokens."""
        if node["kind"] != "act":
            return
        agent, text, meta = node["agent"], node["reply"], node.get("meta") or {}
        name = f"node {node['id']}"
        if not isinstance(text, str):
            yield f"{name}: an act without a reply"
            return
        tokens, size = meta.get("tokens_out"), len(text.encode("utf-8", "surrogatepass"))
        if "cut" in meta and len(text) != MAX_REPLY:
            yield f"{name}: a reply of {len(text)} characters is said to be cut"
        if isinstance(tokens, int) and size > tokens * _LONGEST_TOKEN:
            yield f"{name}: a reply of {size} bytes is too long for {tokens} tokens"
        voice = self.voices.get(agent)
        if voice is None:
            return
        if meta.get("policy") not in voice.names:
            yield f"{name}, meta.policy: {meta.get('policy')!r:.60}, but {agent} is {', '.join(sorted(voice.names))}"
        if not isinstance(tokens, int) or not isinstance(meta.get("tokens_in"), int):
            yield f"{name}: a model's reply without the number of its tokens"
            return
        if "cut" in meta:
            return  # it was too long to be kept, and counts as malformed
        if voice.max_tokens is not None and tokens > voice.max_tokens:
            yield f"{name}: {tokens} tokens, more than the {voice.max_tokens} that {agent} may say"
        if tokens > size + _CLOSING:
            yield f"{name}: {tokens} tokens are more than a reply of {size} bytes can hold"

    def remember(self, trace: Mapping[str, Any]) -> None:
        """Keep what players said whose samples differ, to look for copies; blanks and cases do not make another reply."""
        replies = [
            [n["id"], " ".join(str(n["reply"]).split()).casefold()]
            for n in trace["nodes"]
            if n["kind"] == "act" and n["agent"] in self.sampled | self.silent
        ]
        if replies:
            self.heard.setdefault(trace["task_id"], []).append(identity.digest(replies))

    def copies(self, notes: list[str]) -> Iterator[str]:
        """Check whether samples are copies of each other; where that may be honest, readers are told."""
        several = [replies for replies in self.heard.values() if len(replies) > 1]
        alike = [replies for replies in several if len(set(replies)) == 1]
        if not alike:
            return
        if (
            self.sampled
            and len(alike) == len(several)
            and sum(len(replies) - 1 for replies in alike) >= _ENOUGH
        ):
            yield (
                f"samples: in each of {len(alike)} tasks all samples have the same replies, though the team is sampled "
                "(temperature above 0): they are copies, or its temperature is 0 and must be said"
            )
        else:
            unknown = "" if self.sampled else "; the team tells no temperature"
            notes.append(
                f"in {len(alike)} of {len(several)} tasks all samples have the same replies{unknown}"
            )


def _scripts(seats: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """Agents played by a program of ours, which may well say the same again."""
    return {agent for agent, seat in seats.items() if str(seat.get("name")).startswith("unitymas.")}


def _voice(seat: Mapping[str, Any]) -> SeatModel | None:
    """The models behind a seat; only ours say their template, and with it always their tokens."""
    several = seat.get("policies")
    voices = list(several.values()) if isinstance(several, Mapping) else [seat]
    if not voices or not all(isinstance(v, Mapping) and "template_sha" in v for v in voices):
        return None
    limits = [v["sampling"].get("max_tokens") for v in voices if isinstance(v.get("sampling"), Mapping)]
    known = [limit for limit in limits if isinstance(limit, int) and not isinstance(limit, bool)]
    return SeatModel(frozenset(str(v.get("model")) for v in voices), max(known, default=None))


def temperatures(value: Any, levels: int = 4) -> Iterator[float]:
    """Every temperature that a player's identity names."""
    if isinstance(value, Mapping) and levels:
        for name, item in value.items():
            if name == "temperature" and isinstance(item, (int, float)) and not isinstance(item, bool):
                yield float(item)
            else:
                yield from temperatures(item, levels - 1)
