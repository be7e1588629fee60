"""Fixtures that every test may use."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@pytest.fixture
def anyio_backend() -> str:
    """The event loop that asynchronous tests run on."""
    return "asyncio"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the number of random kills be chosen."""
    parser.addoption("--kills", type=int, default=6, help="random kills of a run (tests/test_kill_storm.py)")


@pytest.fixture
def kills(request: pytest.FixtureRequest) -> int:
    """How many times processes are killed at random moments."""
    number: int = request.config.getoption("--kills")
    return number
