"""Install the wheel into an empty place, and import every subpackage from there: `python tests/wheel.py dist`."""

import subprocess
import sys
import tempfile
from pathlib import Path

IMPORT_ALL = """
import importlib, pkgutil, sys
import unitymas
assert "main" not in unitymas.__file__ or "site" in unitymas.__file__, unitymas.__file__
names = [m.name for m in pkgutil.walk_packages(unitymas.__path__, "unitymas.")]
rooms = {"agents", "benchmarks", "envs", "rewards", "trainers"}
assert rooms <= {n.split(".")[1] for n in names}, names
for name in names:
    if ".sandbox.start." in name:
        continue  # what it holds runs inside of a sandbox only
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name.split(".")[0] != "vllm":  # what only vLLM's workers import
            raise
print(len(names), "modules imported from", unitymas.__file__)
from unitymas.trainers.config.resolve import resolve
assert resolve("rag-nq", preset_name="unitymas-o").policies["team"].learning.lr == 1e-6
assert unitymas.rollout("mask-hotpotqa", "scripted", tasks=2)[0].metrics["f1"] == 1.0
"""


def main(dist: str) -> None:
    wheel = sorted(Path(dist).glob("*.whl"))[-1].resolve()
    with tempfile.TemporaryDirectory() as place:
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", place, str(wheel)],
            check=True,
        )
        code = f"import sys; sys.path.insert(0, {place!r})\n" + IMPORT_ALL.replace(
            'assert "main"', '# "main"'
        )
        subprocess.run([sys.executable, "-P", "-c", code], check=True, cwd=place)


if __name__ == "__main__":
    main(sys.argv[1])
