"""Settings of the whole suite."""

import os
import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from unitymas.agents.basics.hints import say_once
from unitymas.envs import registry

# machines that run tests are busy: a slow example is no failing one
CALM = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("default", derandomize=True, **CALM)  # the same examples everywhere
settings.register_profile("random", **CALM)  # others each time: UNITYMAS_HYPOTHESIS=random
settings.load_profile(os.environ.get("UNITYMAS_HYPOTHESIS", "default"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fuzz", type=int, help="inputs that each fuzzer of tests/attacks tries (a few by default)"
    )


@pytest.fixture(autouse=True, scope="module")
def registered() -> Iterator[None]:
    """What a module registers is forgotten after it."""
    before = set(registry.list_envs())
    yield
    for id in set(registry.list_envs()) - before:
        registry.unregister(id)


@pytest.fixture(autouse=True, scope="module")
def threads() -> Iterator[None]:
    """A large model, once loaded, lets a process keep more threads; sums of the next module have another order then."""
    yield
    if "torch" in sys.modules and (machine := sys.modules.get("unitymas.agents.basics.machine")):
        machine._chosen = 0
        sys.modules["torch"].set_num_threads(machine._ALL)


@pytest.fixture(autouse=True)
def unsaid() -> None:
    """Sentences that are said once are said once in each test."""
    say_once.cache_clear()
