"""Speed of the parts of unitymas, each compared with a reference in the same run: `unitymas bench PART`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from ..._moved import MOVED
from ...agents.basics.hints import nearest

PARTS = {
    "episode": "controller.episode",
    "retrieval": "controller.retrieval",
    "sandbox": "controller.sandbox",
    "engine": "models.engine",
    "collect": "controller.collect",
    "update": "models.update",
    "advantages": "controller.advantages",
    "tree": "controller.tree",
    "star": "controller.star",
    "simulate": "simulate",
    "overlap": "overlap",
    "routing": "controller.routing",
    "gpu": "gpu",
    "memory": "models.memory",
}
"""Parts of `unitymas bench`, with the module of each."""

OTHERS = {name: f"models.{name}" for name in ("products", "rounding", "weight_sync")}
"""Benchmarks that run as modules only."""

_HERE = "benchmarks.speed"
MOVED.update(
    {f"{_HERE}.{name}": f"{_HERE}.{home}" for name, home in {**PARTS, **OTHERS}.items() if name != home}
)


def bench_main(argv: Sequence[str]) -> int:
    """Run `unitymas bench PART …`: one part, in a process of its own, with the arguments after its name."""
    if not argv or argv[0] in ("-h", "--help"):
        print(f"usage: unitymas bench {{{','.join(PARTS)}}} [arguments of the part]")
        return 0
    if argv[0] not in PARTS:
        raise ValueError(f"there is no benchmark {argv[0]!r}; {nearest(argv[0], PARTS)}")
    return subprocess.run([sys.executable, "-m", __name__, *argv]).returncode
