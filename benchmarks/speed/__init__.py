"""Speed: requests, retrieval, sandboxed cases, tokens, each beside a reference in the same run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from ...agents.basics.hints import nearest

PARTS = (
    "episode",
    "retrieval",
    "sandbox",
    "engine",
    "collect",
    "update",
    "advantages",
    "tree",
    "star",
    "simulate",
    "overlap",
    "routing",
    "gpu",
    "memory",
)


def bench_main(argv: Sequence[str]) -> int:
    """`unitymas bench PART …`: one of the speed benchmarks, in a process of its own; arguments go on to it."""
    if not argv or argv[0] in ("-h", "--help"):
        print(f"usage: unitymas bench {{{','.join(PARTS)}}} [arguments of the part]")
        return 0
    if argv[0] not in PARTS:
        raise ValueError(f"there is no benchmark {argv[0]!r}; {nearest(argv[0], PARTS)}")
    return subprocess.run([sys.executable, "-m", __name__, *argv]).returncode
