"""Set up all tests.

Several workers of pytest share the cores.  Each computes with one thread, because OpenMP's threads wait in a loop.
Hypothesis measures no times, because the time of an example depends on the machine more than on the code.
"""

import logging
import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from slow import listed

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

# Newer versions of Hypothesis draw constants of the project's modules that are imported.  The examples of a test would
# then depend on the other tests of its process, and a search that is long enough in one run would be too short in
# another.
if hasattr(providers, "_get_local_constants"):
    NONE = providers.Constants()
    providers._get_local_constants = lambda: NONE


@pytest.hookimpl(tryfirst=True)  # before -m takes tests out
def pytest_collection_modifyitems(items):
    slow = listed()
    for item in items:
        if item.nodeid in slow:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def logs_as_they_were():
    """``minivllm serve`` sets up the logs of its process for good, on a standard error that pytest closes."""
    loggers = [logging.getLogger(name) for name in ("minivllm", "minivllm.server", "uvicorn.error", "asyncio")]
    kept = [(logger, list(logger.handlers), logger.propagate, logger.level) for logger in loggers]
    yield
    for logger, handlers, propagate, level in kept:
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)
