"""`unitymas train` and `unitymas warmstart`."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ..agents.basics.hints import counted
from ..agents.basics.json_types import JsonObject
from ..agents.names import apart, unverified
from ..agents.team import is_player
from ..trainers.config.presets import PAPERS, PRESETS, WARM, note
from ..trainers.config.reader import ConfigError
from .arguments import Parser, number

if TYPE_CHECKING:
    from ..trainers.config.schema import RunConfig
    from ..trainers.controller.run import Run


def parser() -> Parser:
    """Make the parser of `unitymas train`."""
    made = Parser(
        "unitymas train", description=train_main.__doc__, hint="settings are written a.b=c, such as steps=40"
    )
    made.add_argument("id", nargs="?", help="id of an environment (`unitymas list`)")
    made.add_argument(
        "overrides",
        nargs="*",
        metavar="a.b=c",
        help="keys of the config with values, such as steps=40 or eval.tasks=100",
    )
    made.add_argument(
        "--preset",
        action="append",
        metavar="NAME[,NAME]",
        help=f"how roles map to models ({', '.join(PRESETS)}), and a paper's settings ({', '.join(PAPERS)})",
    )
    made.add_argument(
        "--model", metavar="NAME", help="model of all groups (`unitymas models`; default: tiny)"
    )
    made.add_argument(
        "--warm",
        type=number(0, kind=float),
        metavar="EPOCHS",
        help="warm start: number of passes over the expert's replies before RL (default: "
        + ", ".join(
            f"{name} {how['draws']:g} replies" if "draws" in how else f"{name} {how['epochs']:g}"
            for name, how in WARM.items()
        )
        + ", else 0)",
    )
    made.add_argument("--config", type=Path, help="YAML file with keys of the config")
    made.add_argument("--dir", type=Path, help="directory of the run (default: runs/<env>-<n>)")
    made.add_argument("--resume", type=Path, metavar="DIR", help="continue a run from its newest checkpoint")
    made.add_argument(
        "--anew", action="store_true",
        help="with --resume: begin again if the run has no checkpoint yet",
    )  # fmt: skip
    made.add_argument(
        "--replay",
        type=Path,
        metavar="RUN",
        help="play a run with overlap again from its log, and compare every bit",
    )
    _add_modes(made)
    return made


def _add_modes(made: Parser) -> None:
    made.add_argument(
        "--watch",
        action="store_true",
        help="serve a live page of the run on this machine, and print its address",
    )
    made.add_argument(
        "--dry-run",
        action="store_true",
        help="check everything that needs no model, print the resolved config, and stop",
    )
    made.add_argument(
        "--import",
        action="append",
        dest="imports",
        metavar="FILE.py|MODULE",
        help="file or module of your own that is imported first",
    )


def train_main(
    argv: Sequence[str],
    report: Callable[[Path], object] | None = None,
    watching: Callable[[Path], AbstractContextManager[object]] = nullcontext,
) -> int:
    """Train a team. A word a.b=c sets a key of the config: docs/settings.md has all keys, and --dry-run prints them."""
    reader = parser()
    args, rest = reader.parse_known_intermixed_args(argv)
    if rest:
        reader.error(reader.unknown(rest[0]))
    if args.id is not None and "=" in args.id:
        args.overrides, args.id = [args.id, *args.overrides], None
    for word in args.overrides:
        key, _, value = word.partition("=")
        if f"--{key}" in reader.options:
            reader.error(
                f"{key} is an option, and no key of the config: --{key} {shlex.quote(value)}".rstrip()
            )
    args.preset = ",".join(args.preset) if args.preset else None
    if args.model is not None:
        args.model = args.model.strip()
        args.overrides = [f"groups.*.model={json.dumps(args.model)}", *args.overrides]
    args.warm = WARM.get(args.model or "", {}) if args.warm is None else {"epochs": args.warm}
    if args.anew and args.resume is None:
        reader.error("--anew goes with --resume DIR")
    if args.replay is not None:
        if args.id or args.overrides or args.preset or args.config or args.resume:
            reader.error("--replay takes all from the run that it replays; only --dir may stand beside it")
        return _replay(args.replay, args.dir)
    if args.resume is None:
        _begin(args, reader, report, watching)
        return 0
    if args.dir is not None and args.dir != args.resume:
        reader.error("--dir: a run that goes on stays in its directory; leave it out")
    if args.dry_run:
        _foretell(args)
        return 0
    with watching(args.resume) if args.watch else nullcontext(), pointing(args.resume, report):
        _resume(args)
    return 0


def _begin(
    args: argparse.Namespace,
    reader: Parser,
    report: Callable[[Path], object] | None,
    watching: Callable[[Path], AbstractContextManager[object]],
) -> None:
    """Begin a run. With `--dry-run`, print its config instead."""
    from ..trainers.config.resolve import asked, fresh_directory, load_imports, resolve
    from ..trainers.config.schema import dump
    from ..trainers.controller.run import Run, train

    preset = args.preset or (None if args.config else "shared")
    how = how_of(args)
    tree = asked(args.id, **how)
    if "id" not in (tree.get("env") or {}):
        reader.error("name an environment: unitymas train ID, such as mask-hotpotqa")
    load_imports(tree)
    about = "" if preset is None else note(preset, tree)
    config = resolve(args.id, preset_name=preset, **how)
    args.dir = args.dir or fresh_directory(config)
    if args.dry_run:
        Run(config, args.dir)  # the plan is made and checked; no model is loaded
        print((f"# {about}\n" if about else "") + dump(config), end="")
        for line in doubts(config):
            print(f"unitymas train: {line}", file=sys.stderr)
        return
    if about:
        print(about, flush=True)
    # the message below tells that a run exists there
    if any(args.warm.values()) and not (args.dir / "metrics.jsonl").exists():
        told = (tree.get("env") or {}).get("prompts")
        warm = warmed(config, args.warm, args.dir / "warm-start", told)
        how["overrides"] = [*how["overrides"], f"groups.*.model={json.dumps(str(warm))}"]
    with watching(args.dir) if args.watch else nullcontext(), pointing(args.dir, report):
        train(args.id, preset=preset, directory=args.dir, **how)


def doubts(config: RunConfig) -> Iterator[str]:
    """What a dry run cannot know of the models that a run names; one that cannot be there is an error."""
    named = {f"groups.{name}.model": group.model for name, group in config.groups.items()}
    named |= {f"policies.{name}.init": policy.init for name, policy in config.policies.items() if policy.init}
    named |= {
        f"map.{seat}": player
        for seat, player in config.map.items()
        if player not in config.policies and not is_player(player)
    }
    reasons: dict[str, str] = {}
    for key, model in named.items():
        if model not in reasons:
            try:
                reasons[model] = unverified(model, elsewhere=config.runtime == "ray")
            except (OSError, ValueError) as error:
                raise ConfigError(f"{key}: {error}") from error
            if reasons[model]:
                yield f"{key}: {model} is unverified: {reasons[model]}"


def warmed(config: RunConfig, amount: Mapping[str, float], folder: Path, prompts: object = None) -> Path:
    """Fine-tune the run's model on the expert's traces of the run's environment. `amount` is `epochs` or `draws` of its
    settings.
    """
    from ..trainers.warmstart import warmstart

    models = {group.model for group in config.groups.values()}
    models |= {policy.init for policy in config.policies.values() if policy.init}
    if len(models) != 1:
        raise ConfigError(
            f"--warm: fine-tunes one model, and this run has {', '.join(sorted(models))}; use unitymas warmstart for each"
        )
    env, (model,) = config.env, models
    if not isinstance(env.data, str | None):
        raise ConfigError("--warm: takes a data set by its name; use unitymas warmstart")
    adapters = [policy.adapter.rank for policy in config.policies.values() if policy.adapter]
    how: JsonObject = {**amount, "lora": max(adapters, default=0), "seed": config.seed}
    where: JsonObject = {"data": env.data, "tasks": env.size, "prompts": prompts, "args": env.args}
    return warmstart(env.id, model, folder, **where, **how)


@contextmanager
def pointing(directory: Path, report: Callable[[Path], object] | None) -> Iterator[None]:
    """Print the commands that show a run, whether it is finished, stopped, failed or interrupted."""
    book = directory / "metrics.jsonl"
    before = book.stat().st_size if book.exists() else 0
    try:
        yield
    finally:
        if book.exists() and book.stat().st_size != before:
            with suppress(OSError, ValueError):  # the original error is reported in any case
                print(pointers(directory, report), flush=True)


def pointers(directory: Path, report: Callable[[Path], object] | None) -> str:
    """Return the path of a run, and the commands that show it and play its team."""
    from ..trainers.controller.resume import read_config

    lines = [f"run directory  {directory}"]
    if report is not None:
        report(directory)
        lines.append(f"report         {directory / 'report.html'}")
    if any((directory / "traces").glob("*.jsonl*")):
        lines.append(f"episodes       unitymas view {shlex.quote(str(directory))}")
    if (directory / "policies").is_dir():
        config = read_config(directory)
        own = [word for target in config.imports for word in ("--import", target)]
        others = [f"{seat}={name}" for seat, name in apart(directory).items() if name and seat != "*"]
        team = ",".join([*others, f"*=run:{directory}"]) if others else f"run:{directory}"
        lines.append(f"play it        unitymas {shlex.join(['eval', config.env.id, *own, '--team', team])}")
    return "\n".join(lines)


def how_of(args: argparse.Namespace) -> JsonObject:
    """Return the config keys that the command line sets, over preset and defaults."""
    imports = {"imports": args.imports} if args.imports else {}
    return {"file": args.config, "overrides": args.overrides, **imports}


def _replay(original: Path, out: Path | None) -> int:
    """Replay a run. A difference is an error."""
    from ..trainers.controller.replayed_run import replay

    run = replay(original, out)
    print(
        f"replayed {counted(run.step, 'step')} of {original} into {run.dir}: all losses and weights are equal, bit for bit"
    )
    return 0


def _foretell(args: argparse.Namespace) -> None:
    """Check what would go on, as far as no model is needed, and print its config."""
    from ..trainers.config.schema import dump
    from ..trainers.controller.resume import going_on
    from ..trainers.controller.run import Run

    config, changes = going_on(args.id, args.preset, args.resume, args.anew, **how_of(args))
    Run(config, args.resume, resume=not args.anew, changes=changes)
    print("".join(f"# {change}\n" for change in changes) + dump(config), end="")


def _resume(args: argparse.Namespace) -> Run:
    """Resume a run. If it has no checkpoint, ask whether to begin it again."""
    from ..trainers.controller.resume import NothingToResume
    from ..trainers.controller.run import train

    how: JsonObject = {
        "preset": args.preset, **how_of(args), "directory": args.resume, "resume": True,
    }  # fmt: skip
    try:
        return train(args.id, **how, anew=args.anew)
    except NothingToResume as error:
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise
        print(f"unitymas: {error}", file=sys.stderr)
        if input("Begin it anew now? [y/N] ").strip().lower() not in ("y", "yes"):
            raise SystemExit(1) from None
        return train(args.id, **how, anew=True)
