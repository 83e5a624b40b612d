"""The command line: `unitymas list | info | play | validate | train | eval | leaderboard | view | data | serve | …`.

This file imports next to nothing, so that Ctrl-C is answered in one line from the first moment on, also while Python
still imports the rest.
"""

from __future__ import annotations

import sys

from .verbs import COMMANDS as COMMANDS


def main(argv: list[str] | None = None) -> int:
    """Run one command, and return its exit status."""
    try:
        from .commands import run

        return run(argv)
    except KeyboardInterrupt as stop:
        print(f"\nunitymas: interrupted{f': {stop}' if str(stop) else ''}", file=sys.stderr)
        return 130
