"""A config.json means to the engine what it means to transformers, however its keys are spelled."""

from __future__ import annotations

import json
import re
from collections import Counter
from pydoc import locate

import pytest
from config_cases import FAMILIES, PLAIN, judge, make_file, model_of
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from minivllm.device.loading.plain_config import FIELDS, plain_config
from minivllm.errors import ModelError
from minivllm.testing.model_config import field_names
from minivllm.testing.tiny import quiet

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
BOTH = [  # a table in each spelling, and a theta in any place
    {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}, "rope_scaling": {**YARN, "rope_theta": 5000.0}},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}, "rope_scaling": YARN},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 90.0}, "rope_scaling": YARN, "rope_theta": 5000.0},
    {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "linear", "factor": 4.0}},
    {"rope_parameters": YARN, "rope_scaling": {}}, {"rope_parameters": {}, "rope_scaling": YARN},
    {"rope_parameters": {**YARN, "original_max_position_embeddings": 64}, "original_max_position_embeddings": 16},
]  # fmt: skip
# families with a table for each type of layer, with LongRoPE alone, or with required entries of their own
SPECIAL = ("gemma3_text", "olmo3", "phi3", "ministral3")
ROTARY = sorted(f for f in FAMILIES if f not in SPECIAL and hasattr(CONFIG_MAPPING[f](), "rope_parameters"))


def transformers_config(raw):
    """Return transformers' configuration of a file, None where it refuses the file."""
    with quiet():
        try:
            return CONFIG_MAPPING[raw["model_type"]].from_dict(json.loads(json.dumps(raw)))
        except Exception:
            return None


def described(arch, cfg):
    """Return the layers that an architecture makes of a configuration, or its refusal."""
    try:
        return arch.describe(cfg), arch.switch(cfg)
    except ModelError as exc:
        return str(exc)


@pytest.mark.parametrize("family", FIELDS)
def test_a_file_read_without_transformers_has_the_fields_and_layers_of_transformers(family, tmp_path):
    seen, arch = 0, locate(FAMILIES[family][1].replace(":", "."))()
    for seed in range(250):
        raw = make_file(family, seed, plain=True)
        mine = plain_config(raw, dict)
        if mine is None or (whole := transformers_config(raw)) is None:
            continue
        seen += 1
        assert {n: getattr(mine, n) for n in FIELDS[family]} == {n: getattr(whole, n) for n in FIELDS[family]}, seed
        assert described(arch, mine) == described(arch, whole), seed
    assert seen >= 50, f"the test has no power: {seen} files were read here"


def check(family, raw, folder):
    status, why = judge(raw, folder)
    assert status != "wrong", (why, json.dumps(raw))
    if status == "refused":
        assert any(re.search(rf"\b{name}\b", why) for name in field_names(raw)), f"names no key of the file: {why}"
    return status


@pytest.mark.parametrize("family", ROTARY)
def test_two_spellings_of_the_rotary_embedding_in_one_file_mean_what_transformers_makes_of_them(family, tmp_path):
    """Model cards tell to add ``rope_scaling`` to a file that has ``rope_parameters``."""
    both = BOTH if family in PLAIN else BOTH[:3:2]
    found = [check(family, {**model_of(family), **values}, tmp_path / str(i)) for i, values in enumerate(both)]
    assert set(found) == {"equal"}, found


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_generated_file_gives_the_logits_of_transformers_or_is_refused_by_key(family, tmp_path):
    """In the default suite a few files of each family; ``test_many_generated_files`` takes more."""
    for seed in range(3):
        check(family, make_file(family, seed), tmp_path / str(seed))


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_many_generated_files_give_the_logits_of_transformers_or_are_refused_by_key(family, tmp_path):
    seen = Counter(check(family, make_file(family, seed), tmp_path / str(seed)) for seed in range(1000, 1100))
    assert seen["equal"] >= 25, f"the test has no power: {dict(seen)}"
