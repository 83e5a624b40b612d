"""Mutants of programs, with one small change each, and a search for the meaning of those that still pass.

A mutant that passes its problem's assertions is either *equivalent* (it computes the same) or *unasked* (it is wrong only
for inputs that no assertion tests). `difference` looks for an input that separates solution and mutant. It calls both in
the sandbox, with the arguments of the assertions and with hundreds of variations. A difference proves "unasked". If there is
none, "equivalent" is likely but not proved, and a person has to read the mutant (docs/sandbox.md has the result).
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from typing import Any

from ...envs.tools.sandbox.runner import Limits, run_python

VARIATIONS = 400
_SWAPS: dict[type, type] = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult}
_TURNS: dict[type, type] = {
    ast.Lt: ast.GtE, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.GtE: ast.Lt, ast.Eq: ast.NotEq,
}  # fmt: skip


def mutants(source: str, most: int, chance: random.Random) -> Iterator[tuple[str, str]]:
    """Yield up to `most` mutants of a program, with changes at different places: (description, changed program)."""
    counter = _Mutation(-1)
    counter.visit(ast.parse(source))
    for target in chance.sample(range(counter.count), min(most, counter.count)):
        mutation = _Mutation(target)
        changed = mutation.visit(ast.parse(source))
        yield mutation.change, ast.unparse(ast.fix_missing_locations(changed))


class _Mutation(ast.NodeTransformer):
    """Transformer that changes the `target`-th possible place. `count` is the number of possible places."""

    def __init__(self, target: int) -> None:
        self.target, self.count, self.change = target, 0, ""

    def visit(self, node: ast.AST) -> ast.AST:
        changed = _changed(node)
        if changed is not None:
            self.count += 1
            if self.count - 1 == self.target:
                self.change = f"{ast.unparse(node)} -> {ast.unparse(changed)}"
                return ast.copy_location(changed, node)
        return self.generic_visit(node)


def _changed(node: ast.AST) -> ast.expr | None:
    if isinstance(node, ast.BinOp) and type(node.op) in _SWAPS:
        return ast.BinOp(node.left, _SWAPS[type(node.op)](), node.right)
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _TURNS:
        return ast.Compare(node.left, [_TURNS[type(node.ops[0])]()], node.comparators)
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return ast.Constant(not node.value if isinstance(node.value, bool) else node.value + 1)
    return None


# --- meaning of a surviving mutant ----------------------------------------------------------------------


def difference(solution: str, mutant: str, function: str, calls: list[tuple[object, ...]], seed: int) -> str:
    """Return an input that separates mutant and solution, or the number of inputs without a difference."""
    if not calls:
        return "not told: no assertion calls it with literal arguments"
    chance = random.Random(seed)
    tried = list(calls)
    while len(tried) < VARIATIONS:
        call = chance.choice(calls)
        for _ in range(chance.randint(1, 3)):
            call = _varied(call, chance)
        tried.append(call)
    told = run_python(
        _SIDE_BY_SIDE, repr((solution, mutant, function, tried)), limits=Limits(time_limit=60, memory_mb=2048)
    )
    return told.stdout.strip() if told.ok else f"not told: {told.ended} {told.error}"


def calls_of(assertions: str, functions: set[str]) -> list[tuple[object, ...]]:
    """Return the arguments of every call of these functions whose arguments are literals."""
    calls = []
    for node in ast.walk(ast.parse(assertions)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in functions:
            try:
                calls.append(tuple(ast.literal_eval(argument) for argument in node.args))
            except ValueError:
                continue  # computed arguments: only other calls are used
    return calls


def _varied(value: object, chance: random.Random) -> Any:
    """Return a slightly different value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return chance.choice([value - 1, value + 1, value + 2, -value, 0, 2 * value, value // 2])
    if isinstance(value, float):
        return chance.choice([value + 0.5, -value, float(round(value)), value * 1.1])
    if isinstance(value, str):
        return "".join(_shaken(list(value), chance))
    if isinstance(value, dict) and value:
        key = chance.choice(list(value))
        return {**value, key: _varied(value[key], chance)}
    if isinstance(value, tuple) and value:  # arguments and records keep their length
        at = chance.randrange(len(value))
        return (*value[:at], _varied(value[at], chance), *value[at + 1 :])
    if isinstance(value, list) and value:
        at = chance.randrange(len(value))
        one = [*value[:at], _varied(value[at], chance), *value[at + 1 :]]
        return chance.choice([one, _shaken(value, chance)])
    return value


def _shaken(items: list[object], chance: random.Random) -> list[Any]:
    if not items:
        return items
    at = chance.randrange(len(items))
    return chance.choice(
        [
            items[:at] + items[at + 1 :],
            items[: at + 1] + items[at:],
            items[::-1],
            chance.sample(items, len(items)),
            items[:at],
            sorted(items, key=repr),
        ]
    )


_SIDE_BY_SIDE = """
import ast, copy, signal, sys

class Slow(BaseException):
    pass

def slow(*_):
    raise Slow

def outcome(function, arguments):
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.3)
    try:
        value = function(*copy.deepcopy(arguments))
        return 'gives', list(value) if hasattr(value, '__next__') else value
    except (Exception, Slow) as error:
        return 'raises', type(error).__name__
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)

def main():
    solution, mutant, name, calls = ast.literal_eval(sys.stdin.read())
    first, second = {'__name__': 'one'}, {'__name__': 'two'}
    exec(solution, first)
    exec(mutant, second)
    tried = 0
    for arguments in calls:
        one = outcome(first[name], arguments)
        if one[0] == 'raises':
            continue
        two, tried = outcome(second[name], arguments), tried + 1
        if one != two and repr(one) != repr(two):
            shown = ', '.join(map(repr, arguments))
            return print(f'differs: {name}({shown[:120]}) {one[0]} {one[1]!r:.80}, then {two[0]} {two[1]!r:.80}')
    print(f'same on {tried} inputs')

signal.signal(signal.SIGVTALRM, slow)
main()
"""
