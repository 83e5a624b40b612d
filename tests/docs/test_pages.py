"""The Python of the documentation runs, block after block, as a reader would type it."""

import re
import shlex
from pathlib import Path

import pytest

import unitymas
from unitymas.agents.engines.engine import ENGINES
from unitymas.agents.team import PLAYERS
from unitymas.cli import main
from unitymas.envs.making import REWARDS, TOOLS
from unitymas.envs.registry import unregister
from unitymas.trainers.config.plan import make_arenas, plan
from unitymas.trainers.config.resolve import resolve
from unitymas.trainers.controller.reporting.loggers import LOGGERS
from unitymas.trainers.group.cluster import beside

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
        "docs/evaluation.md",
        "docs/retrieval.md",
        "docs/games.md",
        "docs/mini-world.md",
        "docs/own-code.md",
        "docs/prompts.md",
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


def test_the_config_and_the_recipe_for_eight_gpus(tmp_path, capsys, monkeypatch):
    page = (ROOT / "docs/eight-gpus.md").read_text()
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "team.yaml"
    file.write_text(
        re.search(r"```yaml\n(.*?)```", page, re.DOTALL)[1].replace("data: hotpotqa", "data: mini")
    )
    config = resolve(file=file)
    planned = plan(config, make_arenas(config)[0])
    [spec] = planned.specs.values()
    assert int(spec.gpus) + sum(beside(spec)) == 8  # as Ray is asked for them

    command = re.search(r"unitymas (launch slurm --nodes 2 .*?)\n```", page, re.DOTALL)[1]
    assert main(shlex.split(command.replace("\\\n", " "))) == 0
    script = capsys.readouterr().out
    assert "#SBATCH --gpus-per-node=4\n" in script
    assert "unitymas train --config team.yaml --dir runs/first runtime=ray" in script


RUN = re.compile(
    r"not (run|measured)|(was|were) (run|measured|checked)|runs (the python of )?this page"
    r"|held-out .* before and .* after|cells, seeds",  # an environment's curve, a paper's grid
    re.IGNORECASE,
)


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.stem)
def test_a_page_says_what_was_run(page):
    assert RUN.search(page.read_text()), "say what of this page was run, and what was not"


def test_the_first_workflow_stays_short():
    first = BLOCK.findall((ROOT / "docs/first-workflow.md").read_text())[0]
    assert len(first.splitlines()) < 60
