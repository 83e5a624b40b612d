"""The house: imports go down the list of rooms, never up."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ["agents", "envs", "rewards", "trainers", "benchmarks"]
FILES = [f for room in ROOMS for f in sorted((ROOT / room).rglob("*.py"))]


def imported_rooms(file):
    """The rooms that a file imports from, at any level of it."""
    inside = file.relative_to(ROOT).parts[:-1]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = inside[: len(inside) - node.level + 1]
            path = [*base, *(node.module or "").split(".")]
            yield path[0] if path[0] else node.names[0].name
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names = [node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
            assert not any((n or "").split(".")[0] == "unitymas" for n in names), f"{file}: import relatively"


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_imports_go_down(file):
    mine = ROOMS.index(file.relative_to(ROOT).parts[0])
    for room in imported_rooms(file):
        if room in ROOMS:
            assert ROOMS.index(room) <= mine, f"{file.relative_to(ROOT)} imports {room}"


def test_files_stay_readable():
    long = {str(f.relative_to(ROOT)): n for f in FILES if (n := len(f.read_text().splitlines())) > 520}
    assert not long, f"two rooms in one? {long}"
