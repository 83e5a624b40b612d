"""Settings of the whole suite."""

import pytest
from hypothesis import HealthCheck, settings

# machines that run tests are busy: a slow example is no failing one
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("default")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fuzz", type=int, help="inputs that each fuzzer of tests/attacks tries (a few by default)"
    )
