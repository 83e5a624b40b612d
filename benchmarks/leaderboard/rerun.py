"""Rerun of a random part of a submission with the team that it names: the only check of the players themselves.

    unitymas leaderboard rerun submissions/theirs --team hf:their/model
    unitymas leaderboard rerun submissions/expert --share 0.1 --seed 7

The maintainer of the board draws a tenth of the tasks with a secret seed, plays all their samples with the seeds of the entry,
and compares. Greedy and scripted players must give exactly the same replies. A sampled team is compared by its scores alone,
paired by task. A forged entry that is slightly better, on few tasks, is not found in this way.
"""

from __future__ import annotations

import argparse
import random
import secrets
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...agents.team import BoundTeam, Team, TeamLike
from ...cli.arguments import parse_team
from ...envs.core.arena import Arena
from ...envs.core.drivers import aplay, derive, run_sync, side_by_side
from ...envs.core.tasks import Task
from ...envs.core.trace import read_dicts
from ..evaluation import identity, stats
from ..evaluation.result_types import SeatDict, TraceJson
from ..evaluation.results import Measure
from ..evaluation.stats import Difference
from ..pages.html import printable
from .checks import measure_of, read_submission
from .claimed_environment import NotVerified, remake, tasks_of
from .speakers import temperatures
from .submission import check

BUILT_IN = ("scripted", "random", "fool", "tiny")
"""Players that an entry may name itself. Any other name may be a path, so the maintainer has to name the team."""
SUSPICIOUS = 0.01


@dataclass(frozen=True)
class Again:
    """Result of a rerun."""

    tasks: int
    episodes: int
    exact: bool
    """Flag: replies had to be equal."""
    unlike: tuple[str, ...]
    """Episodes of a deterministic team with different replies, each with the first of these."""
    difference: Difference
    """Recorded scores minus scores of the rerun, paired by task."""
    strangers: tuple[str, ...]
    """Agents whose player differs from the entry's."""

    @property
    def agrees(self) -> bool:
        """Flag: the rerun found nothing against the entry."""
        if self.strangers or self.unlike:
            return False
        return self.exact or self.difference.p >= SUSPICIOUS or self.difference.value <= 0

    def __str__(self) -> str:
        lines = [f"{self.tasks} tasks, {self.episodes} episodes played again"]
        lines += [f"another player than the entry names: {line}" for line in self.strangers]
        if self.exact:
            same = self.episodes - len(self.unlike)
            lines.append(f"deterministic team: {same} of {self.episodes} episodes have the same replies")
            lines += [f"other replies in {line}" for line in self.unlike[:10]]
        else:
            d = self.difference
            lines.append(
                f"sampled team, so only scores are compared: recorded minus played again {d.value:+.3f} "
                f"(95% {_number(d.low)} to {_number(d.high)}, p={d.p:.3f}; below {SUSPICIOUS} speaks against the entry)"
            )
        lines.append("nothing speaks against the entry" if self.agrees else "this speaks against the entry")
        return "\n".join(lines)


def rerun(
    folder: Path, team: TeamLike | None = None, *, share: float = 0.1, seed: int | None = None
) -> Again:
    """Rerun a share of an entry's tasks, drawn with `seed`; the default is a secret seed. The entry must be verified."""
    if not 0 < share <= 1:
        raise ValueError(f"share must be above 0 and at most 1, got {share}")
    if problems := check(folder, verify=True):
        raise ValueError(f"{folder} is not verified, so there is nothing to compare with: {problems[0]}")
    results, _ = read_submission(folder)
    try:
        arena = remake(results)
    except NotVerified as error:  # pragma: no cover (checked a moment ago)
        raise ValueError(f"{folder}: {error}") from None
    seats = results["provenance"]["roles"]
    bound = Team.of(team if team is not None else _own_team(seats)).bind(arena.roles, expert=arena.expert)
    every = tasks_of(arena, results)
    count = max(1, round(share * len(every)))
    rng = random.Random(secrets.randbits(64) if seed is None else seed)
    chosen = rng.sample(every, min(len(every), count))
    recorded = {
        (t["task_id"], t["sample"]): t
        for t in read_dicts(folder / "traces.jsonl.zst")
        if t["task_id"] in {task.id for task in chosen}
    }
    played = run_sync(_play(arena, bound, chosen, results["figures"]["k"], results["provenance"]["seed"]))
    return _compared(recorded, played, measure_of(results), seats, identity.role_config(bound, arena))


async def _play(
    arena: Arena, team: BoundTeam, tasks: Sequence[Task], k: int, seed: int
) -> dict[tuple[str, int], TraceJson]:
    """Play all samples of these tasks, with the seeds of an evaluation."""
    slots = [(task, sample) for task in tasks for sample in range(k)]

    async def one(task: Task, sample: int) -> TraceJson:
        execution = arena.start(task, derive(seed, task.id, sample))
        return dict((await aplay(execution, team, arena, f"{task.id}#{sample}")).to_dict())

    async with team:
        traces = await side_by_side(one(task, sample) for task, sample in slots)
    return {(task.id, sample): trace for (task, sample), trace in zip(slots, traces, strict=True)}


def _compared(
    recorded: Mapping[tuple[str, int], TraceJson],
    played: Mapping[tuple[str, int], TraceJson],
    measure: Measure,
    seats: Mapping[str, SeatDict],
    players: Mapping[str, SeatDict],
) -> Again:
    strangers = tuple(
        f"{agent} was {_player(seats[agent])}, here {_player(players[agent])}"
        for agent in players
        if identity.players_hash({agent: seats[agent]}) != identity.players_hash({agent: players[agent]})
    )
    exact = all(_deterministic(seat) for seat in players.values())
    unlike = [
        f"{task}#{sample}: {first}"
        for (task, sample), trace in sorted(played.items())
        if (first := _first_difference(recorded[task, sample], trace)) is not None
    ]
    theirs: dict[str, list[float]] = defaultdict(list)
    ours: dict[str, list[float]] = defaultdict(list)
    for slot, trace in sorted(played.items()):
        theirs[slot[0]].append(measure.score(recorded[slot]))
        ours[slot[0]].append(measure.score(trace))
    difference = stats.paired_difference(theirs, ours)
    return Again(len(theirs), len(played), exact, tuple(unlike) if exact else (), difference, strangers)


def _first_difference(recorded: TraceJson, again: TraceJson) -> str | None:
    """Return the first act with another reply, or None. Later acts may differ because of it."""
    for theirs, ours in zip(recorded["nodes"], again["nodes"], strict=False):
        if theirs["id"] != ours["id"] or theirs["reply"] != ours["reply"]:
            return f"node {theirs['id']} says {theirs['reply']!r:.60}, played again {ours['reply']!r:.60}"
    if len(recorded["nodes"]) != len(again["nodes"]):
        return f"{len(recorded['nodes'])} nodes, played again {len(again['nodes'])}"
    return None


def _deterministic(seat: Mapping[str, object]) -> bool:
    """Tell whether a player is deterministic: a scripted player that comes with unitymas, or a greedy model."""
    if str(seat.get("player")) in ("scripted", "random", "fool"):
        return True
    told = list(temperatures(seat))
    return bool(told) and max(told) == 0


def _own_team(seats: Mapping[str, SeatDict]) -> dict[str, str]:
    """Return the team of an entry whose players all come with unitymas."""
    named = {agent: str(seat["player"]) for agent, seat in seats.items()}
    for agent, player in named.items():
        if player not in BUILT_IN:
            raise ValueError(
                f"{agent} is played by {player!r:.80}; paths and models that an entry names are not opened, "
                "so say who plays: --team hf:ORG/NAME, run:DIR, … (or role=player,*=player)"
            )
    return named


def _player(seat: Mapping[str, object]) -> str:
    weights = seat.get("weights") or seat.get("code") or ""
    return f"{seat['player']!r:.60}" + (f" ({str(weights):.16}…)" if weights else "")


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:+.3f}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("entry", type=Path, help="a submission")
    parser.add_argument(
        "--team",
        help="team that plays, as for `unitymas eval` (default: the entry's, if it comes with unitymas)",
    )
    parser.add_argument(
        "--share",
        type=float,
        default=0.1,
        help="share of the tasks that is played again (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        help="seed that draws the tasks (default: a secret one, so that nobody can prepare for it)",
    )


def rerun_command(options: argparse.Namespace) -> int:
    """Run ``unitymas leaderboard rerun ENTRY``. Return 0 if nothing was found against the entry, else 1."""
    team = parse_team(options.team) if options.team else None
    outcome = rerun(options.entry, team, share=options.share, seed=options.seed)
    print(printable(str(outcome)))
    return 0 if outcome.agrees else 1
