"""The modules that a folder of PEFT adapts: those that PEFT finds for the same fields, and tensors of others are
refused."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace

import pytest
from adapters import PROMPT, engine, lora, write_adapter, write_ia3

from minivllm import SamplingParams
from minivllm.errors import RequestError
from minivllm.plugins.adapter.peft_targets import Targets, read_targets
from minivllm.testing.tiny import tiny_dir

utils = pytest.importorskip("peft.tuners.tuners_utils")

ENDS = ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj", "mlp.q_proj")
MODULES = [f"model.layers.{n}.{end}" for n in (0, 1, 11) for end in ENDS]
MODULES += ["lm_head", "model.h.1.q_proj", "h.1.q_proj", "model.layers.1.mlp.experts.0.up_proj"]
NAMES = [
    None, ["q_proj"], ["k_proj", "up_proj"], ["self_attn.q_proj"], ["proj"], ["model.layers.1.mlp.up_proj"],
    ["lm_head"],
    r".*\.(q_proj|up_proj)", r".*self_attn.*", r"model\.layers\.1\..*", "q_proj", r".*\.1\.*.*q_proj",
]  # fmt: skip


def test_modules_are_those_that_peft_finds_for_the_same_fields():
    rng = random.Random(0)
    chosen = 0
    for _ in range(2000):
        fields = {
            "target_modules": rng.choice(NAMES[1:]),
            "exclude_modules": rng.choice([None, None, *NAMES[1:]]),
            "layers_to_transform": rng.choice([None, None, 1, 0, [0], [1, 11], []]),
            "layers_pattern": rng.choice([None, None, "layers", ["h", "layers"], ["x"], []]),
        }
        targets = read_targets("x", fields)
        for module in MODULES:
            found = utils.check_target_module_exists(SimpleNamespace(**fields, modules_to_save=None), module)
            if isinstance(fields["target_modules"], str) and targets.targets is None:
                continue  # the regular expression is not compared
            if isinstance(fields["exclude_modules"], str) and targets.excluded is None:
                continue
            wanted = bool(found) and not isinstance(found, utils._ExcludedModule)
            assert (targets.refusal(module) == "") is wanted, (fields, module, found)
            chosen += wanted
    assert chosen > 1000, "the test has no power"


@pytest.mark.parametrize(
    ("field", "value", "what"),
    [
        ("target_modules", 5, "expected a list of names of modules, or a regular expression"),
        ("target_modules", ["a", 5], "expected a list of names of modules, or a regular expression"),
        ("exclude_modules", {"a": 1}, "expected a list of names of modules, or a regular expression"),
        ("layers_to_transform", "1", "expected a number of a layer, or a list of numbers"),
        ("layers_to_transform", [True], "expected a number of a layer, or a list of numbers"),
        ("layers_pattern", 5, "expected a name, or a list of names"),
    ],
)
def test_a_field_of_another_type_is_refused_by_name(field, value, what):
    with pytest.raises(RequestError, match=rf"{field}=.*{what}"):
        read_targets("x", {field: value})


@pytest.mark.parametrize("pattern", ["(a+)+b", "(.*)*x", ".*.*.*.*b", "((.|a)*)*", "[", "a{1,99}", "a" * 300])
def test_a_regular_expression_whose_matching_is_not_bounded_is_not_compared(pattern):
    targets = read_targets("x", {"target_modules": pattern, "exclude_modules": pattern})
    assert targets == Targets() and targets.refusal("a" * 60) == ""


@pytest.mark.parametrize("write", [write_adapter, write_ia3])
def test_tensors_of_modules_that_the_fields_leave_out_are_refused(tmp_path, write):
    folder, _, model = tiny_dir(tmp_path / "model", "llama")
    changes = {
        "target_modules": (["q_proj"], "target_modules does not have it"),
        "exclude_modules": (["up_proj"], "up_proj has weights, but exclude_modules excludes it"),
    }
    if write is write_adapter:
        changes["layers_to_transform"] = ([0], "layers_to_transform does not have its layer")
    adapters = {} if write is write_adapter else {"adapters": ["ia3"], "enable_lora": False}
    with engine(folder, **adapters) as llm:
        for number, (field, (value, why)) in enumerate({"r": (None, ""), **changes}.items(), 1):
            path = write(model, tmp_path / field, **({"target_modules": ["q_proj", "up_proj"]} if not adapters else {}))
            config = json.loads((path / "adapter_config.json").read_text())
            if value is not None:
                (path / "adapter_config.json").write_text(json.dumps({**config, field: value}))
            made = llm.generate(
                {"prompt_token_ids": PROMPT}, SamplingParams(max_tokens=1), False, lora_request=lora(path, number)
            )[0]
            assert why in str(made.error) if why else made.error is None


@pytest.mark.parametrize("layer", ["9" * 5000, "99999999999", "٣"])
@pytest.mark.parametrize("pattern", [None, "layers"])
def test_a_module_with_a_number_that_no_layer_has_is_in_no_layer(layer, pattern):
    fields = {"target_modules": ["q_proj"], "layers_to_transform": [3], "layers_pattern": pattern}
    why = read_targets("x", fields).refusal(f"model.layers.{layer}.self_attn.q_proj")
    assert why == "layers_to_transform does not have its layer"
