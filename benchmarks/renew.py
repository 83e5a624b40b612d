"""Renewal of an entry for the current code, without generation. Its replies stay, if all prompts are unchanged.

    python -m unitymas.benchmarks.renew benchmarks/submissions/*

An entry is verified against the code that made it. After a change of a workflow or a reward rule, every prompt may still be
the same. A model would then give the same replies, so the entry's replies are kept, and parsed values, tool results, metrics,
credits, hashes and keys are computed with the new code. Scripted players are asked again: their replies must be the recorded
ones. If any prompt or such a reply has changed, the entry must be played again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from ..envs.core.arena import Arena
from ..envs.core.trace import Trace, read_dicts
from .evaluation import identity
from .evaluation.result_types import TraceJson
from .leaderboard.checks import read_submission
from .leaderboard.claimed_environment import NotVerified, make_again, scripted_players
from .leaderboard.replay_episodes import Mismatch, reenact
from .leaderboard.submission import check, write_entry


def renew(folder: Path) -> None:
    """Write an entry again, computed by the current code from its replies. Raise `ValueError` if a prompt has changed."""
    results, metadata = read_submission(folder)
    # an entry without this field used the set "short"
    results["provenance"]["env"]["config"].setdefault("prompts", "short")
    arena = make_again(results)
    told = results["provenance"]
    scripted = scripted_players(arena)
    for agent, role in arena.roles.items():
        seat = told["roles"][agent]
        seat["prompt_sha"] = identity.prompt_sha(role)
        if seat.get("name") in scripted:  # asked again by the check that follows
            seat["code"] = scripted[seat["name"]][1]["code"]
    told["env"] = identity.world(arena)
    world, team = identity.digest(told["env"]), identity.players_hash(told["roles"])
    traces = []
    for recorded in read_dicts(folder / "traces.jsonl.zst"):
        again = _played(arena, recorded)
        task = arena.task(again.task_id)
        key = identity.sample_key(world, team, task, told["seed"], again.sample)
        again.tags = {**recorded["tags"], "players": team, "key": key}
        traces.append(again)
    write_entry(folder, traces, results, metadata)


def _played(arena: Arena, recorded: TraceJson) -> Trace:
    """Replay a recorded episode with the current code, which must make the same prompts."""
    name = f"episode {recorded['task_id']}#{recorded['sample']}"
    try:
        again = reenact(arena, recorded, tools_again=True)
    except Mismatch as error:
        raise ValueError(f"{name}: {error}; play it again") from None
    ours: dict[str, Mapping[str, object]] = {node["id"]: node for node in again.to_dict()["nodes"]}
    for theirs in recorded["nodes"]:
        for part in ("kind", "agent", "messages", "tool", "args"):
            now = ours.get(theirs["id"], {}).get(part)
            if now != theirs[part]:
                raise ValueError(
                    f"{name}, node {theirs['id']}, {part}: asked {theirs[part]!r:.80} then, {now!r:.80} now; play it again"
                )
    return again


def main(argv: list[str] | None = None) -> int:
    """Renew the entries of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m unitymas.benchmarks.renew", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("folders", nargs="+", type=Path, help="submissions")
    failed = 0
    for folder in parser.parse_args(argv).folders:
        try:
            if problems := check(folder):
                raise ValueError(problems[0])
            renew(folder)
            problems = check(folder, verify=True)
            print(f"{folder}: {problems[0] if problems else 'renewed and verified'}")
            failed += bool(problems)
        except (ValueError, NotVerified) as error:
            print(f"{folder}: {error}", file=sys.stderr)
            failed += 1
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
