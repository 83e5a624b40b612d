"""The benchmarks of speed run under their old module names too."""

import runpy
import sys
from importlib.util import find_spec

import pytest

from unitymas.benchmarks.speed import OTHERS, PARTS


def test_every_part_has_a_module():
    for home in {**PARTS, **OTHERS}.values():
        assert find_spec(f"unitymas.benchmarks.speed.{home}") is not None, home


def test_a_command_with_a_former_name_runs_the_moved_module(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["advantages", "--help"])
    with (
        pytest.warns(
            DeprecationWarning, match="has moved to unitymas.benchmarks.speed.controller.advantages"
        ),
        pytest.raises(SystemExit) as end,
    ):
        runpy.run_module("unitymas.benchmarks.speed.advantages", run_name="__main__")
    assert end.value.code == 0
    assert "--decisions" in capsys.readouterr().out


def test_a_former_name_can_be_imported():
    with pytest.warns(DeprecationWarning):
        import unitymas.benchmarks.speed.products as former
    from unitymas.benchmarks.speed.models import products

    assert former.main is products.main
