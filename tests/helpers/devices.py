"""The device of tests that run on a CPU and on a GPU alike.

MINIVLLM_TEST_DEVICE=cuda pytest tests/plugins/test_kv_tiers.py tests/plugins/test_mtp_drafter.py
"""

import os

DEVICE = os.environ.get("MINIVLLM_TEST_DEVICE", "cpu")
