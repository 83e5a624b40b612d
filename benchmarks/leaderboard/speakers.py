"""Check whether the replies of a submission can come from the players that it names.

No check can prove which model wrote a reply. But a reply has a number of tokens, a player has a name and a limit of tokens,
and a sampled team does not repeat itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ...agents.basics.json_types import JsonView
from ...agents.roles import MAX_REPLY, entry_of
from ..evaluation import identity
from ..evaluation.result_types import NodeJson, TraceJson
from .json_schema import schema_of, violations

_LONGEST_TOKEN = 512
"""Largest number of bytes of a token in any vocabulary."""
_LONGEST_WORD = 128
"""Largest number of bytes of a token that is not a repetition. Longer tokens are rows of blanks, dashes and similar."""
_REPEATED = re.compile(rb"(.{1,4}?)\1{3,}", re.S)
_CLOSING = 32
"""Tokens that a reply may have beyond its bytes: the end of the turn, and a stop word that was cut off."""
_ENOUGH = 6
"""Number of copies among all samples of a team from which chance is excluded."""


@dataclass(frozen=True)
class SeatModel:
    """Model that plays an agent, as its identity describes it."""

    names: frozenset[str]
    max_tokens: int | None
    local: bool
    """Flag: the model ran in this package, which then knows all its tokens."""

    @property
    def reply(self) -> str:
        """Return the name of the schema for the metadata of its replies."""
        return "local model's reply" if self.local else "endpoint's reply"


class SeatedTeam:
    """Players of a submission, with checks of their replies."""

    def __init__(self, seats: Mapping[str, Mapping[str, object]]) -> None:
        self.seats = seats
        self.voices = {agent: voice for agent, seat in seats.items() if (voice := _voice(agent, seat))}
        self.versions: dict[str, int] = {}
        self.uncounted: set[str] = set()
        told = {agent: list(temperatures(seat)) for agent, seat in seats.items()}
        self.sampled = {agent for agent, numbers in told.items() if max(numbers, default=0) > 0}
        self.silent = {
            agent for agent, numbers in told.items() if not numbers and agent not in _scripts(seats)
        }
        self.heard: dict[str, list[str]] = {}
        self.digests: set[str] = set()

    def claims(self) -> Iterator[str]:
        """Yield the facts that our players always record and that are missing, and facts that no player records."""
        for agent in sorted(self.voices):
            seat = self.seats[agent]
            shape = "run" if "policies" in seat else "local model" if self.voices[agent].local else "endpoint"
            broken = violations(seat, schema_of("submission")["$defs"][shape], schema_of("submission"))
            yield from (
                f"provenance.roles.{agent:.60}, as a {shape}: {problem}" for problem in islice(broken, 3)
            )
        for agent in sorted(agent for agent in self.silent & self.voices.keys() if self.voices[agent].local):
            yield f"provenance.roles.{agent:.60}: a model of ours always tells its temperature, a number"

    def strangers(self, known: Iterable[str]) -> Iterator[str]:
        """Yield the agents that keep a team unverified: neither our players, nor models with an identity."""
        for agent in sorted(self.seats.keys() - self.voices.keys() - set(known)):
            seat = self.seats[agent]
            if seat.get("model") is None:
                yield f"own code: not verified: {agent:.60} is played by {seat.get('name') or seat['player']!s:.60}, which is no model"
            else:
                yield (
                    f"not verified: {agent:.60} is played by {seat['model']!s:.60}, which tells neither template_sha and "
                    "sampling, as a local model does, nor endpoint and options"
                )
        for agent in sorted(self.uncounted):
            yield f"not verified: {agent:.60} does not say the number of tokens of every prompt and reply"

    def labels(self, team: object) -> Iterator[str]:
        """Check that the players of an episode are those of the provenance."""
        told = team if isinstance(team, Mapping) else {}
        for agent, seat in self.seats.items():
            label = told.get(agent)
            unnamed = isinstance(label, str) and " at 0x" in label and seat["player"] == seat.get("name")
            if label != seat["player"] and not unnamed:
                yield f"tags.team.{agent:.60}: the provenance says {seat['player']!r:.60}, its trace {label!r:.60}"
        if odd := sorted(told.keys() - self.seats.keys()):
            yield f"tags.team names {odd[0]:.60}, whom the provenance lacks"

    def reply(self, node: NodeJson) -> Iterator[str]:
        """Check whether a model can have written this reply with this number of tokens."""
        if node["kind"] != "act":
            return
        agent, text, meta = node["agent"], node["reply"], node.get("meta") or {}
        name = f"node {node['id']}"
        if not isinstance(text, str):
            yield f"{name}: an act without a reply"
            return
        if voice := self.voices.get(agent):
            yield from (f"{name}, {problem}" for problem in self._record(voice, meta, text))
        if "cut" in meta and len(text) != MAX_REPLY:
            yield f"{name}: a reply of {len(text)} characters is said to be cut"
        yield from (f"{name}: {problem}" for problem in _impossible(node, meta, text))
        if voice is None:
            return
        if meta.get("policy") not in voice.names:
            yield f"{name}, meta.policy: {meta.get('policy')!r:.60}, but {agent} is {', '.join(sorted(voice.names))}"
        tokens, size = meta.get("tokens_out"), _size(text)
        if not isinstance(tokens, int) or not isinstance(meta.get("tokens_in"), int):
            if voice.local:
                yield f"{name}: a model's reply without the number of its tokens"
            self.uncounted.add(agent)
            return
        if "cut" in meta:
            return  # the reply was too long to be stored, and counts as malformed
        if voice.max_tokens is not None and tokens > voice.max_tokens:
            yield f"{name}: {tokens} tokens, more than the {voice.max_tokens} that {agent} may say"
        if voice.local and tokens > size + _CLOSING:  # an endpoint may have hidden thinking tokens
            yield f"{name}: {tokens} tokens are more than a reply of {size} bytes can hold"

    def _record(self, voice: SeatModel, meta: JsonView, text: str) -> Iterator[str]:
        """Check the metadata of a model's reply: its fields are those that our policies write, and they are consistent."""
        if broken := list(
            islice(violations(meta, schema_of("trace")["$defs"][voice.reply], schema_of("trace")), 3)
        ):
            yield f"meta: {'; '.join(broken)}"
            return
        version = meta.get("version")
        if version is not None and version != (first := self.versions.setdefault(meta["policy"], version)):
            yield f"meta.version: {version}, but {meta['policy']!r:.60} was at {first} before: no evaluation changes it"
        if meta["finish_reason"] == "overflow" and (text or meta["tokens_out"]):
            yield "meta.finish_reason: a prompt that does not fit has no reply"
        if meta.get("thinking") and "</think>" in text:
            yield "meta.thinking: the thinking is said to be open, and ends in the reply"
        if voice.local and meta.get("cut", 0) > _LONGEST_TOKEN * meta["tokens_out"]:
            yield f"meta.cut: {meta['cut']} characters are more than {meta['tokens_out']} tokens hold"
        if tokens := meta.get("tokens"):
            sizes = {len(tokens["text"]), len(tokens["logprob"])}
            if any(type(p) is not float or repr(round(p, 4)) != repr(p) for p in tokens["logprob"]):
                yield "meta.tokens: log-probs are written with a point, and four digits behind it"
            if len(sizes) > 1 or (voice.local and sizes != {meta["tokens_out"]}):
                yield f"meta.tokens: {sorted(sizes)} texts and log-probs, for {meta.get('tokens_out')} tokens"

    def remember(self, trace: TraceJson) -> None:
        """Store the replies, for the search for copies.

        Blanks and upper case do not make a reply different. Between entries, punctuation does not either.
        """
        acts = [n for n in trace["nodes"] if n["kind"] == "act"]
        plain = {n["id"]: " ".join(str(n["reply"]).split()).casefold() for n in acts}
        letters = [[id, "".join(filter(str.isalnum, text)) or text] for id, text in sorted(plain.items())]
        self.digests.add(identity.digest([trace["task_id"], trace["sample"], letters]))
        sampled = self.sampled | self.silent
        if replies := [[n["id"], plain[n["id"]]] for n in acts if n["agent"] in sampled]:
            self.heard.setdefault(trace["task_id"], []).append(identity.digest(replies))

    def copies(self, notes: list[str]) -> Iterator[str]:
        """Check whether samples are copies of each other. If there may be an honest reason, add a note for readers."""
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


def _scripts(seats: Mapping[str, Mapping[str, object]]) -> set[str]:
    """Return the agents whose players are our programs, which may repeat themselves."""
    return {agent for agent, seat in seats.items() if str(seat.get("name")).startswith("unitymas.")}


def _voice(agent: str, seat: Mapping[str, object]) -> SeatModel | None:
    """Return the model of an agent. A local model has a template and sampling, an endpoint has an address and options."""
    several = seat.get("policies")
    voices = _seated(agent, seat, several) if isinstance(several, Mapping) else [seat]
    if not voices or not all(isinstance(v, Mapping) and isinstance(v.get("model"), str) for v in voices):
        return None
    local = all("template_sha" in v for v in voices)
    if not local and not all(
        isinstance(v.get("endpoint"), str) and isinstance(v.get("options"), Mapping) for v in voices
    ):
        return None
    settings = [v.get("sampling") if local else v["options"] for v in voices]
    limits = [s.get("max_tokens") for s in settings if isinstance(s, Mapping)]
    known = [limit for limit in limits if isinstance(limit, int) and not isinstance(limit, bool)]
    most = max(known, default=None) if len(known) == len(voices) else None
    names = {str(v["model"]) for v in voices}
    return SeatModel(frozenset(names if local else {f"openai:{name}" for name in names}), most, local)


def _seated(agent: str, seat: Mapping[str, object], policies: Mapping[str, Any]) -> list[Any]:
    """Return the policies of a run for this agent. Its roles may have their own adapters."""
    among = seat.get("map")
    name = entry_of(among, agent, str(seat["role"])) if isinstance(among, Mapping) else None
    return [policies.get(f"{name}/{seat['role']}", policies.get(str(name)))]


def _impossible(node: NodeJson, meta: JsonView, text: str) -> Iterator[str]:
    """Yield the numbers of tokens that no tokenizer can give for these texts."""
    asked = [m["content"] for m in node.get("messages") or () if isinstance(m.get("content"), str)]
    cut = meta.get("prompt_cut")
    gone = 4 * sum(n for n in cut.values() if isinstance(n, int) and n > 0) if isinstance(cut, Mapping) else 0
    tokens_in, tokens_out = meta.get("tokens_in"), meta.get("tokens_out")
    if isinstance(tokens_out, int) and tokens_out < fewest_tokens([text]):
        yield f"a reply of {_size(text)} bytes is too long for {tokens_out} tokens"
    if isinstance(tokens_in, int) and tokens_in < fewest_tokens(asked, gone):
        yield f"messages of {sum(map(_size, asked))} bytes are too long for {tokens_in} tokens"


def fewest_tokens(texts: Iterable[str], without: int = 0) -> int:
    """Return the smallest number of tokens of these texts for any tokenizer, when `without` bytes are left out."""
    whole = plain = 0
    for text in texts:
        raw = text.encode("utf-8", "surrogatepass")
        whole += len(raw)
        plain += len(_REPEATED.sub(rb"\1", raw))
    tokens = max(-(-(whole - without) // _LONGEST_TOKEN), -(-(plain - without) // _LONGEST_WORD))
    return max(0, tokens)


def _size(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def temperatures(value: object, levels: int = 4) -> Iterator[float]:
    """Yield every temperature in a player's identity."""
    if isinstance(value, Mapping) and levels:
        for name, item in value.items():
            if name == "temperature" and isinstance(item, (int, float)) and not isinstance(item, bool):
                yield float(item)
            else:
                yield from temperatures(item, levels - 1)
