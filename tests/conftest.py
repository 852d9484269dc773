"""Settings shared by every test folder."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

from tests.support.distributed import POOL
from tests.support.runs import Control
from tests.support.worker import ask_no_name_server

_SLOW_EXAMPLES = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}
# The same examples on every machine by default; `--hypothesis-profile=thorough` goes looking.
settings.register_profile("default_run", max_examples=25, derandomize=True, **_SLOW_EXAMPLES)
settings.register_profile("thorough", max_examples=400, **_SLOW_EXAMPLES)
settings.load_profile("default_run")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Nothing outlives the session, however it ends."""
    POOL.close()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--control",
        action="store_true",
        help="run the parity cases with DDP in place of the stages, which proves the cases",
    )


def pytest_configure(config: pytest.Config) -> None:
    ask_no_name_server()
    Control.is_on = bool(config.getoption("--control"))
