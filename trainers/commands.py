"""`unitymas train` and `unitymas warmstart`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from .presets import PRESETS


def train_main(argv: Sequence[str], report: Callable[[Path], object] | None = None) -> int:
    """Train a team. Whatever looks like a.b=c overrides the config."""
    parser = argparse.ArgumentParser("unitymas train", description=train_main.__doc__)
    parser.add_argument("id", nargs="?", help="an environment")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c")
    parser.add_argument("--preset", choices=PRESETS, default=None, help="how roles map to models")
    parser.add_argument("--config", type=Path, help="a YAML file")
    parser.add_argument("--dir", type=Path, help="the run's directory (default: runs/<env>-<n>)")
    parser.add_argument(
        "--resume", type=Path, metavar="DIR", help="go on with a run from its newest checkpoint"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the resolved config and stop")
    args = parser.parse_intermixed_args(argv)
    if args.id is not None and "=" in args.id:
        args.overrides, args.id = [args.id, *args.overrides], None
    from .config import dump
    from .resolve import resolve
    from .run import train

    if args.resume is not None:
        run = train(directory=args.resume, resume=True, overrides=args.overrides)
    else:
        preset = args.preset or (None if args.config else "shared")
        if args.dry_run:
            print(
                dump(resolve(args.id, preset_name=preset, file=args.config, overrides=args.overrides)), end=""
            )
            return 0
        run = train(args.id, preset=preset, file=args.config, overrides=args.overrides, directory=args.dir)
    if report is not None:
        report(run.dir)
    print(f"run directory: {run.dir}   (report.html; unitymas view {run.dir}; --team run:{run.dir})")
    return 0
