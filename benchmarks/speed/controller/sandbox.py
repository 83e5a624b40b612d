"""Speed of the sandbox: cases per second, compared with plain `subprocess.run` in the same run.

    unitymas bench sandbox --cases 400 --batch 1000

Both judge the same small program, with as many cases at the same time as processors. The plain side starts
`python -S program.py` without isolation and with a timeout as its only limit. Then follows a batch in which a tenth of the
programs never ends. It must end within the sum of its time limits.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

from ....agents.basics.json_types import JsonObject
from ....cli.arguments import COUNT, module_parser, number
from ....envs.tools.code.verify import verify_code
from ....envs.tools.sandbox.launch import SandboxLevel
from ....envs.tools.sandbox.runner import LEVELS, SandboxError, close_rooms, resolve

PROGRAM = """
import sys
numbers = list(map(int, sys.stdin.read().split()))
print(sum(n for n in numbers if n % 2))
"""
LOOPS_ON_SEVEN = "n = int(input())\nwhile n % 10 == 7: pass\nprint(n)"


def tests_of(count: int) -> list[dict[str, str]]:
    """Return tests of the small program."""
    return [
        {"input": f"{n} {n + 1} {n + 2}\n", "output": f"{(2 * n + 2) if n % 2 else n + 1}\n"}
        for n in range(count)
    ]


def sandboxed(level: SandboxLevel, count: int) -> tuple[float, float]:
    """Return cases per second with warm rooms, and processor seconds per case with the start of the rooms."""
    before = _processor_time()
    verify_code(PROGRAM, tests_of(8), sandbox=level)
    started = time.perf_counter()
    report = verify_code(PROGRAM, tests_of(count), sandbox=level)
    seconds = time.perf_counter() - started
    if not report.all_passed:
        raise RuntimeError(
            f"{report.total - report.passed} of {report.total} wrong verdicts at level {level}"
        )
    close_rooms()
    return count / seconds, (_processor_time() - before) / count


def plain(count: int) -> tuple[float, float]:
    """Return cases per second and processor seconds per case of `subprocess.run`."""
    before = _processor_time()
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(PROGRAM)
        file.flush()

        def judge(test: dict[str, str]) -> bool:
            command = [sys.executable, "-S", file.name]
            run = subprocess.run(command, input=test["input"], capture_output=True, text=True, timeout=60)
            return run.stdout == test["output"]

        started = time.perf_counter()
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
            right = all(threads.map(judge, tests_of(count)))
        seconds = time.perf_counter() - started
    if not right:
        raise RuntimeError("the plain runs disagree with the tests")
    return count / seconds, (_processor_time() - before) / count


def _processor_time() -> float:
    """Return the processor seconds of this process and its ended children. Other programs hardly change this figure."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def batch_with_loops(count: int, time_limit: float) -> dict[str, object]:
    """Measure a batch in which a tenth of the programs never ends."""
    tests = [{"input": str(n), "output": str(n)} for n in range(count)]
    started = time.perf_counter()
    report = verify_code(LOOPS_ON_SEVEN, tests, time_limit=time_limit)
    seconds = time.perf_counter() - started
    expected = ["time_limit" if n % 10 == 7 else "accepted" for n in range(count)]
    wrong = sum(str(got) != want for got, want in zip(report.verdicts, expected, strict=True))
    return {"seconds": round(seconds, 1), "sum of limits": count * time_limit, "wrong verdicts": wrong}


def main() -> None:
    """Read the arguments and measure."""
    parser = module_parser(__doc__)
    parser.add_argument("--cases", type=COUNT, default=400)
    parser.add_argument("--batch", type=number(0), default=1000)
    parser.add_argument(
        "--time-limit",
        type=number(0.001, kind=float),
        default=1.0,
        help="seconds a case of the batch may take",
    )
    options = parser.parse_args()
    result: JsonObject = {"processors": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0]}
    bare, cost = plain(options.cases)
    result["plain subprocess.run"] = {"cases/s": round(bare, 1), "processor ms a case": round(cost * 1000, 1)}
    close_rooms()
    for level in LEVELS:
        try:
            resolve(level)
        except SandboxError as error:
            result[level] = str(error)
            continue
        speed, cost = sandboxed(level, options.cases)
        result[level] = {"cases/s": round(speed, 1), "times plain": round(speed / bare, 2)}
        if level == "namespaces":  # bwrap does not report the processor time of its children
            result[level]["processor ms a case"] = round(cost * 1000, 1)
    if options.batch:
        result[f"batch of {options.batch}, a tenth endless"] = batch_with_loops(
            options.batch, options.time_limit
        )
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
