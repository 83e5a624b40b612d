"""Honest programs run as `python program.py` does: a part of the corpus of `benchmarks/judge/honest.py`, and places."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from unitymas.benchmarks.judge.honest import bare, differences
from unitymas.benchmarks.judge.idioms import ENDING, PRINTING, READING, WHOLE, idioms
from unitymas.envs.tools.sandbox import launch
from unitymas.envs.tools.sandbox import runner as sandbox
from unitymas.envs.tools.sandbox.launch import SandboxLevel
from unitymas.envs.tools.sandbox.runner import Limits, Program, SandboxError, resolve

try:
    resolve("auto")
except SandboxError as error:
    pytest.skip(str(error), allow_module_level=True)

OFTEN_WRONG = (
    "open 1 kept",
    "kept beside a function",
    "kept by a function",
    "kept in a circle",
    "kept beside a generator",
    "del after atexit",
    "del in a circle",
    "del in a made module",
    "fdopen kept",
    "dev stdout",
    "emptied",
    "wrapper latin",
    "own class",
    "del",
    "exit",
    "own hook exit",
    "in atexit",
    "own import",
    "stack unlimited",
    "exact depth",
    "fork unwaited",
    "hook is default",
    "thread hook",
    "kind of modules",
    "frames",
    "getpass",
    "uuid1",
    "zoneinfo",
)


def test_programs_that_were_called_wrong() -> None:
    every = {**READING, **WHOLE, **ENDING, **PRINTING}
    programs = [(name, f"a = 'text'\n{every[name]}\n") for name in OFTEN_WRONG]
    assert differences(programs, resolve()) == []


def test_a_draw_of_the_corpus() -> None:
    corpus = list(idioms())
    assert len(corpus) > 1000
    assert differences(random.Random(0).sample(corpus, 12)) == []


@pytest.mark.parametrize("level", ["bubblewrap", "namespaces"])
def test_packages_and_interpreters_under_tmp(
    level: SandboxLevel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each program's own /tmp covers the host's: what was let through from there is seen all the same."""
    try:
        resolve(level)
    except SandboxError as error:
        pytest.skip(str(error))
    (tmp_path / "pack").mkdir()
    for name in ("__init__", "part"):
        (tmp_path / "pack" / f"{name}.py").write_text(f"word = {name!r}")
    (tmp_path / "stdlib").mkdir()
    (tmp_path / "stdlib" / "late.py").write_text("word = 'late'")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(launch, "PACKAGES", ("pack",))
    view = launch._view.__wrapped__()
    view = replace(view, binds=[*view.binds, str(tmp_path / "stdlib")])
    monkeypatch.setattr(launch, "_view", lambda: view)
    rooms = sandbox._Rooms(level)
    program = f"import sys, pack.part; sys.path.append({str(tmp_path / 'stdlib')!r}); import late; print(pack.part.word, late.word)"
    try:
        result = rooms.submit(Program(program), Limits()).result()
        assert result.stdout == "part late\n", result
    finally:
        rooms.close()


def test_a_hook_may_end_the_program() -> None:
    for left, ended in (("9", "runtime_error"), ("", "finished")):
        program = f"import sys\ndef hook(*e): sys.exit({left})\nsys.excepthook = hook\n1 / 0"
        result = sandbox.run_python(program)
        assert (result.exit_code, result.ended) == (int(left or 0), ended) == (bare(program)[0], ended)
