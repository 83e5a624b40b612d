"""The lists in pyproject.toml name every package there is: one that is missing would be absent from the wheel."""

from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
ROOMS = ("agents", "benchmarks", "envs", "rewards", "trainers")


def test_every_package_is_listed():
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {f.parent.relative_to(ROOT) for room in ROOMS for f in (ROOT / room).rglob("__init__.py")}
    there = {"unitymas." + ".".join(folder.parts): str(folder) for folder in folders}
    assert set(setup["packages"]) == {"unitymas", *there}
    assert setup["package-dir"] == {"unitymas": "src/unitymas", **there}
