"""The Python of the documentation runs, block after block, as a reader would type it."""

import re
from pathlib import Path

import pytest

import unitymas
from unitymas.agents.engines.engine import ENGINES
from unitymas.agents.team import PLAYERS
from unitymas.envs.making import REWARDS, TOOLS
from unitymas.envs.registry import unregister
from unitymas.trainers.controller.reporting.loggers import LOGGERS

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


@pytest.fixture
def forget():
    before = set(unitymas.list_envs())
    kinds = (ENGINES, LOGGERS, PLAYERS, REWARDS, TOOLS)
    names = {kind: set(kind) for kind in kinds}
    yield
    for kind in kinds:
        for name in set(kind) - names[kind]:
            kind.unregister(name)
    for id in set(unitymas.list_envs()) - before:
        unregister(id)


@pytest.mark.parametrize(
    "page",
    [
        "docs/first-workflow.md",
        "docs/new-parts.md",
        "README.md",
        "docs/concepts.md",
        "docs/other-trainers.md",
        "docs/metrics-and-grading.md",
    ],
)
def test_page_runs(page, forget, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    module = run(page, monkeypatch)
    if page.endswith("other-trainers.md"):  # what it defines, used: TRL's optimizer step on a role's credits
        pytest.importorskip("trl")
        log = module.train(str(tmp_path / "trl"))
        assert any("rewards/earned/mean" in row for row in log)


def run(page, monkeypatch):
    blocks = BLOCK.findall((ROOT / page).read_text())
    assert blocks
    # as a module of its own, so that its classes can be pickled
    import sys
    import types

    module = types.ModuleType("a_page")
    monkeypatch.setitem(sys.modules, "a_page", module)
    for number, block in enumerate(blocks, 1):
        exec(compile(block, f"{page}, block {number}", "exec"), module.__dict__)
    return module


def test_the_first_workflow_stays_short():
    first = BLOCK.findall((ROOT / "docs/first-workflow.md").read_text())[0]
    assert len(first.splitlines()) < 60
