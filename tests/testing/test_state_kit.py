"""The rules of recurrent states: each planted fault fails the rule that is meant for it and no other of these rules."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

import pytest
from wrong import models_states

from minivllm.testing.session import run

RULES = sorted({rule for rules in models_states.FAULTS.values() for rule in rules})


@pytest.mark.parametrize("name", [*models_states.FAULTS, *models_states.RIGHT])
def test_a_fault_of_a_recurrent_layer_fails_its_rule_alone(name):
    target = f"{models_states.__name__}:{name}"
    found = run([("model", target)], device="", overrides=None, select=" or ".join(RULES), shrink=False)
    assert {outcome.test for outcome in found} == set(RULES)
    failed = {outcome.test for outcome in found if outcome.status == "failed"}
    assert failed == set(models_states.FAULTS.get(name, ()))
