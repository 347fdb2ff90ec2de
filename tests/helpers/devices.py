"""The device of tests that run on a CPU and on a GPU."""

import os

import pytest

DEVICE = os.environ.get("MINIVLLM_TEST_DEVICE", "cpu")
on_cpu = pytest.mark.skipif(DEVICE != "cpu", reason="the test is about memory or native steps of a CPU")
quantized_on_cpu = pytest.mark.skipif(DEVICE != "cpu", reason="quantized weights cannot change on a GPU")
