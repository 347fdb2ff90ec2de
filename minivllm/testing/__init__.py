"""The conformance kit: tests that an author runs to check that a plug-in keeps the contract of its seam.

A seam is a kind of plug-in, such as samplers.  Each seam has one suite, a plain pytest class, for a test file of the
author's package; ``python -m minivllm.testing acme/flash`` runs it without a test file::

    class TestFlash(AttentionConformance):
        plugin = "acme/flash"

A suite tests the features that the plug-in's spec claims, up to the claimed limits.  Other features must be refused
with a reason.  ``minivllm.testing.base`` lists the attributes that an author may set.  The engine's own tests use the
modules ``sim``, ``harness`` and ``tiny`` beside the suites.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .suites import SUITES

if TYPE_CHECKING:
    from .adapter import AdapterConformance
    from .attention import AttentionConformance
    from .compressor import CompressorConformance
    from .drafter import DrafterConformance
    from .encoder import EncoderConformance
    from .evictor import EvictorConformance
    from .executor import ExecutorConformance
    from .grammar import GrammarConformance
    from .hooks import HooksConformance
    from .kvformat import KVFormatConformance
    from .kvstore import KVStoreConformance
    from .model import ModelConformance
    from .parser import ParserConformance
    from .predictor import PredictorConformance
    from .processor import ProcessorConformance
    from .quantizer import QuantizerConformance
    from .router import RouterConformance
    from .sampler import SamplerConformance
    from .scheduler import SchedulerConformance
    from .session import Outcome, run
    from .strategy import StrategyConformance
    from .tokenizer import TokenizerConformance

_MODULES = {**{name: module for module, name in SUITES.values()}, "Outcome": "session", "run": "session"}

__all__ = [
    "SUITES", "AdapterConformance", "AttentionConformance", "CompressorConformance", "DrafterConformance",
    "EncoderConformance",
    "EvictorConformance", "ExecutorConformance",
    "GrammarConformance", "HooksConformance", "KVFormatConformance", "KVStoreConformance", "ModelConformance",
    "Outcome", "ParserConformance", "PredictorConformance", "ProcessorConformance", "QuantizerConformance",
    "RouterConformance", "SamplerConformance", "SchedulerConformance", "StrategyConformance", "TokenizerConformance",
    "run",
]  # fmt: skip


WANTED = 'the conformance kit needs pytest and hypothesis: pip install "minivllm[test]"'


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib
    import sys

    try:
        import pytest
    except ImportError as exc:
        raise ImportError(WANTED) from exc
    from minivllm.device.hardware import prepare_environment

    prepare_environment()
    module = f"{__name__}.{_MODULES[name]}"
    # pytest then shows the values of an assertion of the kit that fails, as it does for a test file
    if module not in sys.modules:
        pytest.register_assert_rewrite(module)
    return getattr(importlib.import_module(module), name)
