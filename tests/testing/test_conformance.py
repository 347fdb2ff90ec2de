"""Every built-in plug-in under the conformance kit: the fast profile here, the long one in ``bash .ci/full``."""

from __future__ import annotations

import pytest

from minivllm.testing import AttentionConformance
from minivllm.testing.session import builtins, run

# Many of these are alike.  Each has tests of its own purpose, and the kit's run of all is a slow test.
ALIKE = {
    "scheduler": "minivllm/fcfs", "evictor": "minivllm/lru", "processor": "minivllm/penalties",
    "sampler": "minivllm/default", "model": "minivllm/llama", "kvformat": "minivllm/bf16",
}  # fmt: skip
# the first three start processes in each test, the next one an exporter; the others are like int8, fp8-weight and int4
LONG = {
    ("executor", "minivllm/process"), ("executor", "minivllm/multiprocess"), ("executor", "minivllm/ray"),
    ("hooks", "minivllm/opentelemetry"),
    ("quantizer", "minivllm/fp8"),
    ("quantizer", "minivllm/int8-w8a8"), ("quantizer", "minivllm/llm-int8"), ("quantizer", "minivllm/gptq"),
    ("quantizer", "minivllm/awq"),
    ("quantizer", "minivllm/compressed-tensors"), ("quantizer", "minivllm/fp8-checkpoint"),
    ("quantizer", "minivllm/bitsandbytes"), ("quantizer", "minivllm/gguf"),
}  # fmt: skip


def cases():
    for seam, plugin in builtins():
        slow = ALIKE.get(seam, plugin) != plugin or (seam, plugin) in LONG
        marks = [pytest.mark.slow] if slow else []
        yield pytest.param(seam, plugin, id=f"{seam}-{plugin}".replace("minivllm/", ""), marks=marks)


@pytest.mark.parametrize(("seam", "plugin"), list(cases()))
def test_built_in_plugin_conforms(seam, plugin):
    outcomes = run([(seam, plugin)])
    failed = [f"{o.test}: {o.text}" for o in outcomes if o.status == "failed"]
    assert outcomes and not failed, "\n".join(failed)


@pytest.mark.parametrize("device, held", [("cpu", True), ("cuda", False)])
def test_a_feature_that_a_spec_refuses_on_a_device_is_not_tested_there(device, held):
    class Here(AttentionConformance):
        plugin = "sdpa"

    Here.device = device
    assert Here().claims("batch_invariant") is held
    assert Here().claims("window") and not Here().claims("v_in_k")
