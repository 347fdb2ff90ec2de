"""The back end under the kit: with xFormers where it is installed, and with its kernel by definition on a CPU."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from kernel import efficient_attention_forward

from minivllm.testing import AttentionConformance

NAME = "minivllm-xformers/xformers"
STAND_IN = Path(__file__).parent / "stand_in"


@pytest.fixture(scope="class")
def kernel():
    """Give torch the kernel on the CPU, and the masks of the stand-in where xFormers is not installed."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_efficient_attention_forward", efficient_attention_forward, "CPU")
    missing = importlib.util.find_spec("xformers") is None
    if missing:
        sys.path.insert(0, str(STAND_IN))
    yield
    library._destroy()
    if missing:
        sys.path.remove(str(STAND_IN))
        for name in [name for name in sys.modules if name.split(".")[0] in ("xformers", "minivllm_xformers")]:
            del sys.modules[name]


@pytest.mark.usefixtures("kernel")
class TestOnCpu(AttentionConformance):
    plugin = NAME
    device = "cpu"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
class TestOnGpu(AttentionConformance):
    plugin = NAME
    device = "cuda"
