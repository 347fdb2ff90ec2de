"""What holds for all tests.

Several workers of pytest share the cores: each computes with one thread, because OpenMP's threads wait in a loop.
Hypothesis measures no times: how long an example takes says more of the machine than of the code.
"""

import os

from hypothesis import HealthCheck, settings

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
