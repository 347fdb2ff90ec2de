"""``captured_drafts`` is on if captures are possible.  It is refused if the user set it and nothing can be captured."""

from __future__ import annotations

import pytest

from minivllm.config.steps import captures_drafts
from minivllm.config.values import EngineConfig
from minivllm.errors import ConfigError


def captures(device="cuda", drafts=4, **options):
    return captures_drafts(EngineConfig(model="pocket", **options), drafts, device, {})


@pytest.mark.parametrize(
    ("options", "drafts", "message"),
    [
        ({}, 0, "without a drafter: no step has drafts"),
        ({"graph": "off"}, 4, "with graph=off, which captures no steps"),
        ({"enforce_eager": True}, 4, "with enforce_eager=true, which captures no steps"),
        ({"tensor_parallel_size": 2}, 4, "with tensor_parallel_size=2: drafts are captured on one device only"),
    ],
)
def test_drafts_are_captured_only_where_steps_are(options, drafts, message):
    assert captures() and not captures(drafts=drafts, **options)
    with pytest.raises(ConfigError, match=f"captured_drafts=true {message}"):
        captures(drafts=drafts, captured_drafts=True, **options)


def test_drafts_are_not_captured_on_a_cpu_or_without_the_option():
    assert not captures("cpu") and captures("cpu", captured_drafts=True)
    assert not captures(captured_drafts=False) and captures(captured_drafts=True)
