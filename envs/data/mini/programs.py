"""Programming tasks with solutions of one to three lines, and with separate visible and hidden tests.

A family is a kind of task with parameters. Each pair of a family and its parameters belongs to one split. The hidden tests
cover cases that the visible tests do not: negative numbers, the exact threshold, an empty input. So a program can pass the
visible tests and still be wrong.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..row_schemas import CodeRow, TestRow
from .words import split_of_combination
from .world import Dice

FamilyNumbers = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Family:
    """Family of tasks: wordings, solution, and test inputs."""

    name: str
    problems: tuple[str, ...]
    """Wordings of the problem, with the parameters as `{0}` and `{1}`."""
    plan: str
    solution: str
    bounds: tuple[tuple[int, int], ...]
    """Smallest and largest value of each parameter."""
    cases: Callable[[Dice, FamilyNumbers], Sequence[object]]
    """Function that returns test inputs, the difficult ones last: lines for stdin, or lists of arguments (`fn_name`)."""
    fn_name: str | None = None


def _numbers(dice: Dice, parameters: FamilyNumbers) -> list[str]:
    return [str(1 + dice.below(20)) for _ in range(4)] + [
        "0",
        str(-1 - dice.below(9)),
        str(20 + dice.below(60)),
    ]


def _around(dice: Dice, parameters: FamilyNumbers) -> list[str]:
    limit = parameters[0]
    far = [str(limit + 5 + dice.below(20)), str(limit - 3 - dice.below(20))]
    return [*dice.shuffled(far), str(limit + 3 + dice.below(9)), str(limit), str(limit + 1), str(limit - 1)]


def _rows(dice: Dice, parameters: FamilyNumbers) -> list[str]:
    rows = [" ".join(str(1 + dice.below(20)) for _ in range(3 + dice.below(3))) for _ in range(4)]
    return [*rows, str(1 + dice.below(9)), f"{-1 - dice.below(9)} {-1 - dice.below(9)}"]


def _rows_around(dice: Dice, parameters: FamilyNumbers) -> list[str]:
    limit = parameters[0]
    rows = [" ".join(str(limit - 6 + dice.below(13)) for _ in range(4)) for _ in range(4)]
    return [*rows, f"{limit} {limit}", str(limit)]


WORDS = ("cat", "dog", "sun", "map", "cup", "net", "pen", "box", "hat", "key")


def _words(dice: Dice, parameters: FamilyNumbers) -> list[str]:
    return [*dice.shuffled(WORDS)[:5], "a"]


def _pairs(dice: Dice, parameters: FamilyNumbers) -> list[list[int]]:
    pairs = [[1 + dice.below(20), 1 + dice.below(20)] for _ in range(4)]
    return [*pairs, [0, 0], [-1 - dice.below(9), 3], [7, 7]]


def _lists(dice: Dice, parameters: FamilyNumbers) -> list[list[list[int]]]:
    lists = [[[1 + dice.below(20) for _ in range(3 + dice.below(3))]] for _ in range(4)]
    return [*lists, [[1 + dice.below(9)]], [[-1 - dice.below(9), -1 - dice.below(9)]]]


FAMILIES = (
    Family(
        "affine", ("Read a number. Print it times {0} plus {1}.", "Multiply the given number by {0}, add {1}, and print it."),
        "read n, multiply n by {0}, add {1}, print", "n = int(input())\nprint(n * {0} + {1})", ((2, 12), (1, 20)), _numbers,
    ),
    Family(
        "minus", ("Read a number. Print {0} minus the number.", "Subtract the given number from {0} and print the result."),
        "read n, subtract n from {0}, print", "n = int(input())\nprint({0} - n)", ((5, 99),), _numbers,
    ),
    Family(
        "rest", ("Read a number. Print its rest after division by {0}.", "Print what is left when the given number is divided by {0}."),
        "read n, take n modulo {0}, print", "n = int(input())\nprint(n % {0})", ((2, 40),), _numbers,
    ),
    Family(
        "above", ("Read a number. Print yes if it is more than {0}, else no.", "Is the given number above {0}? Print yes or no."),
        "read n, compare n > {0}, print yes or no", 'n = int(input())\nprint("yes" if n > {0} else "no")', ((5, 99),), _around,
    ),
    Family(
        "at-least", ("Read a number. Print yes if it is at least {0}, else no.", "Is the given number {0} or more? Print yes or no."),
        "read n, compare n >= {0}, print yes or no", 'n = int(input())\nprint("yes" if n >= {0} else "no")', ((5, 99),), _around,
    ),
    Family(
        "sum", ("Read numbers. Print their sum plus {0}.", "Add up the given numbers, add {0}, and print the result."),
        "read numbers, sum them, add {0}, print", "a = list(map(int, input().split()))\nprint(sum(a) + {0})", ((1, 60),), _rows,
    ),
    Family(
        "largest", ("Read numbers. Print the largest times {0}.", "Print the largest of the given numbers multiplied by {0}."),
        "read numbers, take the largest, multiply by {0}, print", "a = list(map(int, input().split()))\nprint(max(a) * {0})", ((2, 40),), _rows,
    ),
    Family(
        "smallest", ("Read numbers. Print the smallest minus {0}.", "Print the smallest of the given numbers minus {0}."),
        "read numbers, take the smallest, subtract {0}, print", "a = list(map(int, input().split()))\nprint(min(a) - {0})", ((1, 40),), _rows,
    ),
    Family(
        "count", ("Read numbers. Print how many are more than {0}.", "Print the count of given numbers above {0}."),
        "read numbers, count those > {0}, print", "a = list(map(int, input().split()))\nprint(sum(x > {0} for x in a))", ((6, 60),), _rows_around,
    ),
    Family(
        "repeat", ("Read a word. Print it {0} times and then {1} stars.", "Print the given word repeated {0} times, followed by {1} stars."),
        "read a word, repeat it {0} times, add {1} stars, print", 's = input()\nprint(s * {0} + "*" * {1})', ((2, 6), (1, 9)), _words,
    ),
    Family(
        "start", ("Read a word. Print its first {0} letters, {1} times.", "Print the first {0} letters of the given word {1} times in a row."),
        "read a word, take the first {0} letters, repeat {1} times, print", "s = input()\nprint(s[:{0}] * {1})", ((1, 3), (2, 12)), _words,
    ),
    Family(
        "backwards", ("Read a word. Print it backwards and then {0} stars.", "Print the given word in reverse order, followed by {0} stars."),
        "read a word, reverse it, add {0} stars, print", 's = input()\nprint(s[::-1] + "*" * {0})', ((1, 30),), _words,
    ),
    Family(
        "mix", ("Write solve(a, b) that returns a times {0} plus b times {1}.", "Let solve(a, b) return {0} times a plus {1} times b."),
        "multiply a by {0}, multiply b by {1}, return the sum", "def solve(a, b):\n    return a * {0} + b * {1}", ((2, 12), (2, 12)), _pairs, "solve",
    ),
    Family(
        "gap", ("Write solve(a, b) that returns a minus b plus {0}.", "Let solve(a, b) return the difference of a and b plus {0}."),
        "subtract b from a, add {0}, return", "def solve(a, b):\n    return a - b + {0}", ((1, 60),), _pairs, "solve",
    ),
    Family(
        "total", ("Write solve(a) that returns the sum of the list a times {0}.", "Let solve(a) return {0} times the sum of the list a."),
        "sum the list, multiply by {0}, return", "def solve(a):\n    return sum(a) * {0}", ((2, 40),), _lists, "solve",
    ),
)  # fmt: skip


def combinations(family: Family, split: str) -> list[FamilyNumbers]:
    """Return all parameters of a family that belong to a split."""
    every: list[FamilyNumbers] = [()]
    for low, high in family.bounds:
        every = [(*head, value) for head in every for value in range(low, high + 1)]
    return [combination for combination in every if split_of_combination(family.name, combination) == split]


def tests_of(family: Family, solution: str, cases: Sequence[object]) -> list[TestRow]:
    """Return a test for each input, with the output of the reference program."""
    tests: list[TestRow] = []
    for case in cases:
        output = run_solution(solution, case, family.fn_name)
        tests.append({"input": case if family.fn_name else f"{case}\n", "output": output})
    return tests


def run_solution(solution: str, case: Any, fn_name: str | None) -> object:
    """Run one of our own programs in this process, and return its output. Never use it for a model's program."""
    printed: list[str] = []
    names: dict[str, Any] = {
        "input": lambda: case,
        "print": lambda *values: printed.append(" ".join(map(str, values))),
    }
    exec(solution, names)
    return (
        json.loads(json.dumps(names[fn_name](*case))) if fn_name else "".join(line + "\n" for line in printed)
    )


def programs(split: str, count: int, seed: int = 0) -> Iterator[CodeRow]:
    """Yield the first `count` programming tasks of a split. Parameters repeat only after all have been used."""
    pools = [
        Dice("programs", family.name, split, seed).shuffled(combinations(family, split))
        for family in FAMILIES
    ]
    for number in range(count):
        turn, which = divmod(number, len(FAMILIES))
        family, parameters = FAMILIES[which], pools[which][turn % len(pools[which])]
        dice = Dice("program", split, seed, number)
        solution = family.solution.format(*parameters)
        tests = tests_of(family, solution, family.cases(dice, parameters))
        row: CodeRow = {
            "id": f"mini-code-{split}-{number}",
            "problem": dice.pick(family.problems).format(*parameters),
            "visible_tests": tests[:2],
            "hidden_tests": tests[2:],
            "solution": solution,
            "steps": [family.plan.format(*parameters)],
        }
        yield {**row, "fn_name": family.fn_name} if family.fn_name else row
