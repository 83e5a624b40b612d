"""The house: imports go down the rooms and never in circles; names are found once; rooms stay small."""

import ast
import itertools
import re
import textwrap
from collections import defaultdict
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ["agents", "envs", "rewards", "trainers", "benchmarks"]
FILES = [f for room in ROOMS for f in sorted((ROOT / room).rglob("*.py"))]
FACE = sorted((ROOT / "src/unitymas").rglob("*.py"))  # the rooms lie there as links, which are not followed
FOLDERS = sorted({f.parent for f in [*FILES, *FACE]})


def dotted(file):
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {dotted(f): f for f in FILES}


@cache
def tree(file):
    return ast.parse(file.read_text())


def imports(file):
    """The modules of the house that a file imports, at any level of it, for types only included."""
    package = file.relative_to(ROOT).parts[:-1]
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [node.module])])
            for alias in node.names:
                inner = f"{base}.{alias.name}" if base else alias.name
                yield inner if inner in MODULES else base
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names = [node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
            assert not any((n or "").split(".")[0] == "unitymas" for n in names), f"{file}: import relatively"


@pytest.mark.parametrize("file", FILES, ids=dotted)
def test_imports_go_down(file):
    mine = ROOMS.index(file.relative_to(ROOT).parts[0])
    for module in imports(file):
        room = module.split(".")[0]
        if room in ROOMS:
            assert ROOMS.index(room) <= mine, f"{dotted(file)} imports {module}"


def test_imports_have_no_circles():
    arrows = {name: {m for m in imports(f) if m in MODULES and m != name} for name, f in MODULES.items()}
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_files_and_functions_stay_readable():
    files = [*FILES, *FACE]
    long = {dotted(f): n for f in files if (n := len(f.read_text().splitlines())) > 450}
    for f in files:
        for node in ast.walk(tree(f)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if (n := (node.end_lineno or 0) - node.lineno + 1) > 60:
                long[f"{dotted(f)}.{node.name}"] = n
    assert not long, f"two rooms in one? {long}"


UNTYPED = 160
"""Number of `Any` in the library. It may only fall: lower it here with each that goes."""


PLAIN = 154
"""Number of `JsonObject` and `JsonView`, which hide an `Any`: for what a parser gives, read where it arrives."""


def uses(*names):
    nodes = (node for f in [*FILES, *FACE] for node in ast.walk(tree(f)) if isinstance(node, ast.Name))
    return sum(node.id in names for node in nodes)


def test_any_becomes_rarer():
    count = uses("Any")
    assert count <= UNTYPED, (
        f"{count} `Any`, and {UNTYPED} before: say what it is (`object`, a record, a Protocol)"
    )


def test_plain_json_becomes_rarer():
    count = uses("JsonObject", "JsonView")
    assert count <= PLAIN, f"{count} uses of plain JSON, and {PLAIN} before: write a TypedDict of its fields"


def test_rooms_hold_few_files():
    crowded = {
        str(d.relative_to(ROOT)): n
        for d in FOLDERS
        if (n := len([f for f in d.glob("*.py") if f.stem != "__init__"])) > 15
    }
    assert not crowded, crowded


def close(a, b):
    """Do two names differ by a letter or less: one replaced, added or left out?"""
    if a == b:
        return True
    if len(a) > len(b):
        a, b = b, a
    if len(b) - len(a) > 1:
        return False
    i = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))
    return a[i:] == b[i + 1 :] or a[i + 1 :] == b[i + 1 :]


TWINS = {
    "mask": "the workflow, and its published rewards",
    "game": "the base of all games; rewards/games.py has their published rewards",
    "team": "the map of roles; envs/workflows/games/teams.py has the teams of the games",
    "program": "the sandbox's program; envs/data/mini/programs.py has the programming tasks of the mini world",
    "dr_mas": "the algorithm, and the reproduction of its paper",
    "routing": "the rewards of a router role, and the reproduction of their papers",
}
"""Names that two files have on purpose."""


def test_no_two_files_are_a_letter_apart():
    files = [f for f in [*FILES, *FACE] if f.stem not in ("__init__", "__main__")]
    # A benchmark of speed has the name of what it measures: `unitymas bench engine` measures engines.
    files = [f for f in files if "benchmarks/speed/" not in f.as_posix()]
    near = [
        f"{a.relative_to(ROOT)} and {b.relative_to(ROOT)}"
        for a, b in itertools.combinations(files, 2)
        if alike(a.stem, b.stem) or (a.parent == b.parent != ALGORITHMS and close(a.stem, b.stem))
    ]
    assert not near, near


ALGORITHMS = ROOT / "trainers/algorithms"  # named as their papers name them: GRPO, GSPO


def alike(a, b):
    """Are two names equal, or one the plural of the other?"""
    return a.removesuffix("s") == b.removesuffix("s") and min(a, b) not in TWINS


def statements(body):
    """The statements of a module, also those within its conditions, but not those within its functions and classes."""
    for node in body:
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for part in ("body", "orelse", "handlers", "finalbody"):
                yield from statements(getattr(node, part, ()))


ALIAS = re.compile(r"_*[A-Z]\w*[a-z]\w*")  # no constant, and no type variable of one letter


def types(module):
    """Names of the types that a module defines: its classes at any level, and its aliases; private ones too."""
    names = {node.name for node in ast.walk(module) if isinstance(node, ast.ClassDef)}
    for node in statements(module.body):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names |= {t.id for t in targets if isinstance(t, ast.Name) and ALIAS.fullmatch(t.id)}
        for alias in getattr(node, "names", ()):
            if alias.asname not in (None, alias.name) and ALIAS.fullmatch(alias.asname):
                names.add(alias.asname)  # `import x as Name` gives a name, too
    return names


def test_no_type_name_stands_twice():
    homes = defaultdict(list)
    for f in [*FILES, *FACE]:
        for name in types(tree(f)):
            homes[name].append(dotted(f))
    twice = {name: where for name, where in sorted(homes.items()) if len(where) > 1}
    assert not twice, twice


def test_types_are_found_wherever_they_stand():
    source = """
        if TYPE_CHECKING:
            Row = dict[str, object]
        else:
            import numpy as Row2
        _Kept: TypeAlias = int
        LIMIT, T = 3, TypeVar("T")
        try:
            from a import b as Other, C as C
        except ImportError:
            Other = None
        def f():
            class Inner: ...
            Local = 3
    """
    assert types(ast.parse(textwrap.dedent(source))) == {"Row", "Row2", "_Kept", "Other", "Inner"}
