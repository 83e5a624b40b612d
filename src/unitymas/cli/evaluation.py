"""`unitymas eval ID|SUITE --team …`: evaluate a team from the shell."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path

from ..agents.basics.hints import counted
from ..agents.basics.json_types import JsonObject
from ..agents.model_settings import add_arguments, settings_of
from ..agents.names import not_here, unverified
from ..agents.spending import BudgetSpent
from ..agents.team import Team
from ..benchmarks.evaluation import identity, result_tables
from ..benchmarks.evaluation.evaluate import Evaluation, EvaluationResult, ablate, evaluate, swap
from ..benchmarks.evaluation.suites import SuiteResult, evaluations, suite
from ..benchmarks.evaluation.terminal import Board
from ..trainers.config.reader import override
from ..trainers.config.resolve import typed_arguments
from .arguments import COUNT, Parser, number, parse_team


def prices(text: str) -> dict[str, tuple[float, float]]:
    """Read prices: `0.15,0.6` for all models, or by model: `gpt-4o=2.5,10,gpt-4o-mini=0.15,0.6`."""
    words = text.split(",") if text else []
    table: dict[str, tuple[float, float]] = {}
    try:
        for first, second in zip(words[::2], words[1::2], strict=True):
            model, _, dear = first.rpartition("=")
            amount = number(0, sys.float_info.max, kind=float)
            table[model.strip() or "*"] = (amount(dear), amount(second))
    except (argparse.ArgumentTypeError, ValueError):
        parser().error(f"--price takes two numbers from 0 on, IN,OUT; got {text!r}")
    return table


def _team(text: str, given: argparse.Namespace, strict: bool = True) -> Team:
    """Make a team with the settings of the command line. Without `strict`, settings that its models do not have are
    left out.
    """
    seats = parse_team(text)
    names = [seats] if isinstance(seats, str) else list(seats.values())
    settings = settings_of(given)  # a price for all models also holds for local ones
    settings = replace(settings, price=settings.price or None)
    # the number of slots fixes an engine's shapes, so it must be the same in every run
    if given.deterministic:
        settings = replace(settings, concurrency=None)
    taken = {key for name in names for key in settings.of(name)}
    asked = {
        key for key in settings.told() if strict and key not in ("concurrency", "price")
    }  # these two settings also belong to the episodes
    return Team(seats, **{key: value for key, value in settings.told().items() if key in taken | asked})


def parser() -> Parser:
    made = Parser(
        prog="unitymas eval",
        hint="the environment is configured by name=value",
        description="Play k episodes of every test task, and print scores with intervals.",
        epilog="Further arguments name=value configure the environment (max_turns=3).",
    )
    made.add_argument("env", help="environment id, or suite:mini | qa | code | math | packaged | planning")
    made.add_argument(
        "--team",
        "--model",
        default="tiny",
        help="players: a model by name (`unitymas models`; default: tiny), scripted, random, or role=player,*=player",
    )
    made.add_argument("-k", type=COUNT, default=4, help="samples of each task (default 4)")
    made.add_argument("--tasks", type=COUNT, help="number of tasks, the first ones (default: all)")
    made.add_argument("--split", help="part of the data set (default: test)")
    made.add_argument(
        "--data", help="'mini', a prepared data set, or a file (default: the prepared one, else mini)"
    )
    made.add_argument("--seed", type=int, default=0, help="seed of the samples (default 0)")
    made.add_argument(
        "--concurrency",
        type=COUNT,
        help="largest number of open episodes (default 256), and of open requests to each model (default 32)",
    )
    add_arguments(made)
    made.add_argument(
        "--out", type=Path, help="folder that keeps the episodes (default: evaluations/ENV-TEAM)"
    )
    made.add_argument(
        "--rescore",
        action="store_true",
        help="apply the current reward rules to saved episodes, and generate nothing",
    )
    made.add_argument(
        "--retry-errors", action="store_true", help="play episodes that ended in an error again"
    )
    made.add_argument(
        "--dry-run",
        action="store_true",
        help="print what would be played and what it would cost, and play nothing",
    )
    made.add_argument(
        "--tokens", action="store_true", help="keep the log-prob of each token, for `unitymas view`"
    )
    made.add_argument(
        "--deterministic",
        action="store_true",
        help="fix all shapes, so that the same command gives the same bits (slower)",
    )
    _add_comparison(made)
    _add_tables(made)
    return made


def _add_tables(made: Parser) -> None:
    made.add_argument(
        "--price", default="", metavar="[MODEL=]IN,OUT[,…]",
        help="dollars for a million tokens in and out, for all models or for one endpoint's model",
    )  # fmt: skip
    made.add_argument(
        "--format",
        choices=("markdown", "latex", "json"),
        default="markdown",
        help="format of the tables (default: markdown)",
    )
    made.add_argument("-q", "--quiet", action="store_true", help="print no progress")


def _add_comparison(made: Parser) -> None:
    made.add_argument("--baseline", help="a team to compare with, on the same tasks")
    made.add_argument("--ablate", action="store_true", help="exchange one role at a time for the baseline's")
    made.add_argument(
        "--swap", action="store_true", help="exchange one role of the baseline at a time for the team's"
    )


def eval_main(argv: list[str] | None = None) -> int:
    """Run `unitymas eval`. Return the exit status."""
    given, rest = parser().parse_known_args(argv)
    for word in rest:
        if "=" not in word or word.startswith("-"):
            parser().error(parser().unknown(word))
    make = typed_arguments(given.env, override({}, rest))
    if (given.ablate or given.swap) and not given.baseline:
        parser().error("--ablate and --swap exchange roles with a baseline: name one, e.g. --baseline random")
    if given.baseline and given.env.startswith("suite:"):
        parser().error("--baseline compares on one environment; name one instead of a suite")
    given.price = prices(given.price)
    team = _team(given.team, given)
    rival = _team(given.baseline, given, strict=False) if given.baseline else None
    if rival is not None:
        rival.spending = team.spending  # one budget for all environments of the command
    out = given.out or Path("evaluations") / f"{given.env.replace(':', '-')}-{_slug(given.team)}"
    price = given.price.get("*", (0.0, 0.0))
    how: JsonObject = {"k": given.k, "tasks": given.tasks, "seed": given.seed, "price": price, **make}
    how |= {name: value for name in ("split", "data") if (value := getattr(given, name)) is not None}
    how |= {"retry_errors": given.retry_errors, "tokens": given.tokens, "deterministic": given.deterministic}
    if given.dry_run:
        return _foretell(given, team, rival, out, how)
    played = _evaluations(given, team, out, how)
    try:
        result = _run(given, played)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"{out} keeps what was played; the same command plays the rest") from None
    _print(result, given.format)
    stopped = next((evaluation.stopped for evaluation in played.values() if evaluation.stopped), "")
    if rival is not None and isinstance(result, EvaluationResult) and not stopped:
        _compare(given, result, team, rival, out, how | {"concurrency": given.concurrency or 256})
    print(f"episodes and figures: {out}   (look: unitymas view {shlex.quote(str(out))})", file=sys.stderr)
    if team.spending.roles:
        print(f"endpoints: {team.spending}", file=sys.stderr)
    if stopped:
        raise RuntimeError(f"{stopped}; {shlex.quote(str(out))} keeps what was played")
    results = result.results.values() if isinstance(result, SuiteResult) else [result]
    if all(row.failed for one in results for row in one.rows):
        raise RuntimeError(
            "every episode failed, so the figures say nothing of the team; the causes are above"
        )
    return 0


def _evaluations(
    given: argparse.Namespace, team: Team, out: Path | None, how: JsonObject
) -> dict[str, Evaluation]:
    if given.env.startswith("suite:"):
        return evaluations(given.env, team, out=out, **how)
    return {given.env: Evaluation(given.env, team, out=out, **how)}


def _run(given: argparse.Namespace, played: dict[str, Evaluation]) -> EvaluationResult | SuiteResult:
    plans = [evaluation.plan() for evaluation in played.values()]
    total, done = sum(p["episodes"] for p in plans), sum(p["finished"] for p in plans)
    results: dict[str, EvaluationResult] = {}
    with Board(given.env, total, done, quiet=given.quiet or given.rescore) as board:
        for env, evaluation in played.items():
            results[env] = (
                evaluation.rescore() if given.rescore
                else evaluation.run(concurrency=given.concurrency or 256, on_episode=board.episode)
            )  # fmt: skip
            if evaluation.stopped and len(played) > 1:
                raise BudgetSpent(evaluation.stopped)
    return SuiteResult(suite(given.env), results) if given.env.startswith("suite:") else results[given.env]


def _foretell(given: argparse.Namespace, team: Team, rival: Team | None, out: Path, how: JsonObject) -> int:
    """Print what would be played. No model is downloaded: random players stand in for a team with one that is not
    here, and none of its episodes are finished.
    """
    kept: Path | None = out
    for whole in [team] if rival is None else [team, rival]:
        absent = [name for name in whole.seats.values() if isinstance(name, str) and not_here(name)]
        for name in dict.fromkeys(absent):
            doubt = unverified(name)  # asks the hub; a model that it does not have is an error
            told = f"{name} is not on this machine, and playing downloads it first"
            print(f"unitymas eval: {told}{f' ({doubt})' if doubt else ''}", file=sys.stderr)
        if absent and whole is team:
            team, kept = Team(dict.fromkeys(team.seats, "random")), None
    for plan in (evaluation.plan() for evaluation in _evaluations(given, team, kept, how).values()):
        cost = (
            "cost unknown until an episode has been played"
            if plan["cost"] is None
            else f"about ${plan['cost']:.2f}"
        )
        tokens = "" if plan["tokens"] is None else f", about {counted(plan['tokens'], 'token', form=',.0f')}"
        print(
            f"{plan['env']} on {plan['data']}: {counted(plan['tasks'], 'task')} × {plan['k']} = {counted(plan['episodes'], 'episode')}, "
            f"{plan['finished']} finished, {plan['owed']} to play{tokens}, {cost}"
        )
    print(f"episodes are kept in {out}")
    return 0


def _compare(
    given: argparse.Namespace, result: EvaluationResult, team: Team, rival: Team, out: Path, how: JsonObject
) -> None:
    base = evaluate(given.env, rival, out=out / "baseline", **how)
    print(result_tables.difference_markdown(f"{given.team} minus {given.baseline}", result.minus(base)))
    if given.ablate:
        print(
            result_tables.effects_markdown(
                f"{given.team}, role by {given.baseline}", ablate(given.env, team, rival, out=out, **how)
            )
        )
    if given.swap:
        print(
            result_tables.effects_markdown(
                f"{given.baseline}, role by {given.team}", swap(given.env, team, rival, out=out, **how)
            )
        )


def _print(result: EvaluationResult | SuiteResult, form: str) -> None:
    print(
        json.dumps(result.to_dict(), indent=1, sort_keys=True) if form == "json" else getattr(result, form)()
    )


def _slug(team: str) -> str:
    """Return a folder name for a team. It is readable, and two teams never get the same name."""
    plain = re.sub(r"[^A-Za-z0-9]+", "-", team).strip("-")
    return plain if plain == team else f"{plain[:40]}-{identity.digest(team, 6)}"
