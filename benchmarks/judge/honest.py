"""Comparison of the sandbox with `python program.py`, over a corpus of honest programs.

    python -m unitymas.benchmarks.judge.honest

Each program runs in the sandbox and with a bare interpreter in an empty folder, with the same input. Exit status and standard
output must be equal. The corpus is `idioms.py` and the doctests of the standard library. `verdicts.py` compares the two on
HumanEval and MBPP.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ...cli.arguments import module_parser
from ...envs.tools.sandbox.runner import Limits, run_python
from .idioms import INPUT, idioms, library_examples

SECONDS = 60
LIMITS = Limits(time_limit=20.0, wall_limit=120.0, memory_mb=1024, processes=32)


def bare(source: str) -> tuple[int, str]:
    """Return exit status and output of `python program.py < input`."""
    interpreter = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    environment = {"LANG": "C.UTF-8", "PATH": "", "HOME": "/tmp", "PYTHONHASHSEED": "0"}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "program.py").write_bytes(source.encode())
        Path(folder, "input").write_text(INPUT)
        with open(f"{folder}/input", "rb") as stdin:
            os.unlink(f"{folder}/input")
            run = subprocess.run(
                [interpreter, "-s", "-B", "program.py"],
                stdin=stdin, capture_output=True, cwd=folder, env=environment, timeout=SECONDS,
            )  # fmt: skip
    return run.returncode & 0xFF, run.stdout.decode(errors="replace")


def sandboxed(source: str, sandbox: str) -> tuple[int, str]:
    """Return exit status and output in the sandbox."""
    result = run_python(source, INPUT, limits=LIMITS, sandbox=sandbox)
    return result.exit_code & 0xFF, result.stdout


def differences(programs: list[tuple[str, str]], sandbox: str = "auto") -> list[dict[str, object]]:
    """Return the programs with different results. A difference must occur three times, because some depend on time."""

    def compare(program: tuple[str, str]) -> dict[str, object] | None:
        name, source = program
        for _ in range(3):
            try:
                want, got = bare(source), sandboxed(source, sandbox)
            except subprocess.TimeoutExpired:
                return {"name": name, "bare": f"takes longer than {SECONDS} s: not compared"}
            if want == got:
                return None
        return {"name": name, "bare": [want[0], want[1][-300:]], "sandbox": [got[0], got[1][-300:]]}

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        return [difference for difference in threads.map(compare, programs) if difference]


def main() -> None:
    """Compare all programs, and print the differences."""
    parser = module_parser(__doc__)
    parser.add_argument("--sandbox", default="auto")
    parser.add_argument("--limit", type=int, help="only so many programs, drawn by the seed")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    programs = [*idioms(), *library_examples()]
    if options.limit:
        programs = random.Random(options.seed).sample(programs, min(options.limit, len(programs)))
    wrong = differences(programs, options.sandbox)
    print(json.dumps({"programs": len(programs), "differences": len(wrong), "which": wrong}, indent=2))


if __name__ == "__main__":
    main()
