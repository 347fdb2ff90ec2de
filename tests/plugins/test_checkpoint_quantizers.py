"""Tests of all quantizers that read checkpoints: the fast tests of the conformance kit.

The whole kit is a slow test (tests/testing/test_conformance.py).
"""

from __future__ import annotations

from minivllm.testing.quantizer_written import WRITTEN
from minivllm.testing.session import run

KIT = {  # tests of the conformance kit that cost little
    "test_what_does_not_fit_is_refused", "test_params_are_what_comes_from_the_checkpoint",
    "test_loading_leaves_the_checkpoint_as_it_is", "test_weights_that_the_format_has_come_back_exactly",
    "test_a_model_computes_what_transformers_computes_with_the_held_weights", "test_modules_share_nothing",
}  # fmt: skip
PLUGINS = {"fp8": "fp8-checkpoint"}  # where the method is called otherwise


def test_each_reads_what_the_conformance_kit_writes():
    plugins = [("quantizer", f"minivllm/{PLUGINS.get(method, method)}") for method in WRITTEN]
    outcomes = run(plugins, only=KIT)
    passed = {(o.plugin, o.test) for o in outcomes if o.status == "passed"}
    assert passed == {(plugin, test) for _, plugin in plugins for test in KIT}, outcomes
