"""Command `python -m unitymas.benchmarks.speed PART …`, which runs one benchmark. Its errors are one line, as for any command."""

from __future__ import annotations

import importlib
import sys

from ...cli.commands import answered
from . import PARTS


def main() -> int:
    """Run the part that the first argument names, with the other arguments."""
    part, *words = sys.argv[1:]
    debug = "--debug" in words
    sys.argv = [f"unitymas bench {part}", *(word for word in words if word != "--debug")]

    def work() -> int | None:
        module = importlib.import_module(f"{__package__}.{PARTS.get(part, part)}")
        if hasattr(module, "__path__"):
            module = importlib.import_module(f"{module.__name__}.__main__")
        status: int | None = module.main()
        return status

    try:
        return answered(f"bench {part}", work, debug)
    except KeyboardInterrupt:
        print(f"\nunitymas bench {part}: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
