"""Several workers of pytest share the cores: each computes with one thread, because OpenMP's threads wait in a loop."""

import os

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
