"""One switch for all fuzzers: `pytest tests/attacks --fuzz 100000` tries that many inputs instead of a few."""

from __future__ import annotations

import pytest

FEW = 300


@pytest.fixture
def fuzz(request: pytest.FixtureRequest) -> int:
    """How many inputs a fuzzer tries."""
    return int(request.config.getoption("--fuzz", default=None) or FEW)
