"""The lists in pyproject.toml name every package there is: one that is missing would be absent from the wheel."""

import importlib
import sys
import types
from pathlib import Path

import pytest

from unitymas._moved import MOVED

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
ROOMS = ("agents", "benchmarks", "envs", "rewards", "trainers")


def test_every_package_is_listed():
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = [f.parent.relative_to(ROOT) for room in ROOMS for f in (ROOT / room).rglob("__init__.py")]
    packages = {".".join(("unitymas", *folder.parts)): str(folder) for folder in folders}
    face = [f.parent.relative_to(ROOT / "src") for f in (ROOT / "src/unitymas").glob("*/__init__.py")]
    face = [folder for folder in face if folder.name not in ROOMS]  # those are links to the folders above
    packages |= {".".join(folder.parts): f"src/{folder}" for folder in face}
    assert set(setup["packages"]) == {"unitymas", *packages}
    assert setup["package-dir"] == {"unitymas": "src/unitymas", **packages}


@pytest.mark.parametrize("old, new", sorted(MOVED.items()))
def test_old_names_of_modules_go_on_working(old, new, monkeypatch):
    if new.endswith(("room", "program", "sitecustomize", "worker")):
        pytest.skip("runs inside of a sandbox only")
    monkeypatch.delitem(sys.modules, f"unitymas.{old}", raising=False)  # imported and told of before
    with pytest.warns(DeprecationWarning, match=new):
        module = importlib.import_module(f"unitymas.{old}")
    assert module is importlib.import_module(f"unitymas.{new}")
    assert module.__spec__.name == f"unitymas.{new}"


def test_an_old_name_hides_nothing_of_its_package():
    """An import of an old name sets it on its package, so a function of this name could not be called any more."""
    for old in MOVED:
        package, _, name = f"unitymas.{old}".rpartition(".")
        try:
            there = getattr(importlib.import_module(package), name, None)
        except ModuleNotFoundError:
            continue  # the package has an old name, too
        assert there is None or isinstance(there, types.ModuleType), old
