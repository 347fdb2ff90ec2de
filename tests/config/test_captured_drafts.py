"""``captured_drafts``: off by default, and refused beside options that leave nothing to capture."""

from __future__ import annotations

import pytest

from minivllm.config.steps import check_captured_drafts
from minivllm.config.values import EngineConfig
from minivllm.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "drafts", "message"),
    [
        ({}, 0, "without a drafter: no step has drafts"),
        ({"graph": "off"}, 4, "with graph=off, which captures no steps"),
        ({"enforce_eager": True}, 4, "with enforce_eager=true, which captures no steps"),
        ({"tensor_parallel_size": 2}, 4, "with tensor_parallel_size=2: drafts are captured on one device only"),
    ],
)
def test_captured_drafts_are_refused_where_nothing_can_be_captured(options, drafts, message):
    check_captured_drafts(EngineConfig(model="pocket", **options), drafts, {})
    with pytest.raises(ConfigError, match=f"captured_drafts=true {message}"):
        check_captured_drafts(EngineConfig(model="pocket", captured_drafts=True, **options), drafts, {})
    check_captured_drafts(EngineConfig(model="pocket", captured_drafts=True), 4, {})
