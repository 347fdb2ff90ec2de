"""Adapters of several methods in one engine: IA3 compared with PEFT, steering with hooks of transformers."""

from __future__ import annotations

import json
import shutil

import pytest

pytest.importorskip("peft")

import torch
from adapters import (
    PROMPT,
    all_scores,
    difference,
    engine,
    expected,
    lora,
    write_adapter,
    write_ia3,
    write_steering,
)

from minivllm import ConfigError, RequestError, SamplingParams, Tap
from minivllm.testing.tiny import tiny_dir

FAMILIES = ["llama", "qwen2", "qwen3", "gemma3", "phi3", "gpt2", "cohere2", "mpt", "falcon", "lfm2"]
METHODS = {"enable_lora": False, "adapters": ["ia3", "lora", "steering"]}


def compare(model, prompts, paths, outputs):
    """Compare tokens and log-probabilities of a batch with PEFT's."""
    for prompt, path, out in zip(prompts, paths, outputs, strict=True):
        assert out.error is None
        tokens = prompt + out.outputs[0].token_ids
        reference = expected(model, path, tokens)
        assert reference[len(prompt) - 1 : -1].argmax(-1).tolist() == out.outputs[0].token_ids
        assert difference(out, reference, tokens) < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_factors_of_a_batch_have_the_logits_and_tokens_of_peft(tmp_path, family):
    folder, _, model = tiny_dir(tmp_path / "model", family)
    paths = [write_ia3(model, tmp_path / name, seed=n + 1) for n, name in enumerate("ab")]
    paths.append(write_adapter(model, tmp_path / "c", seed=3))
    order = [None, *paths, paths[0]]
    requested = [None if path is None else lora(path, paths.index(path) + 1) for path in order]
    prompts = [PROMPT, PROMPT, PROMPT, PROMPT, PROMPT[3:9]]
    with engine(folder, **METHODS) as llm:
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], all_scores(), False, lora_request=requested)
    compare(model, prompts, order, outputs)
    answers = [expected(model, path, PROMPT) for path in (None, *paths)]
    pairs = [(a - b).abs().max() for n, a in enumerate(answers) for b in answers[:n]]
    assert min(pairs) > 0.05, "adapters change logits"


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_two_processes_share_the_factors_of_a_layer(tmp_path, family):
    folder, _, model = tiny_dir(tmp_path / "model", family)
    paths = [write_ia3(model, tmp_path / "a", seed=1), None]
    requested = [lora(paths[0]), None]
    with engine(folder, tensor_parallel_size=2, **METHODS) as llm:
        items = [{"prompt_token_ids": PROMPT}] * 2
        outputs = llm.generate(items, all_scores(6), False, lora_request=requested)
    compare(model, [PROMPT] * 2, paths, outputs)


@pytest.fixture(scope="module")
def steered(tmp_path_factory):
    """Create (folder and model, folders of two steering adapters and a LoRA, vectors of the first two)."""
    place = tmp_path_factory.mktemp("steered")
    folder, _, model = tiny_dir(place / "model", "llama")
    generator = torch.Generator().manual_seed(1)
    width = model.config.hidden_size
    vectors = [
        {point: torch.randn(width, generator=generator) for point in points}
        for points in (["layers.0.residual"], ["layers.1.residual", "embedding"])
    ]
    paths = [write_steering(place / f"s{n}", one, scale=n + 0.5) for n, one in enumerate(vectors)]
    paths.append(write_adapter(model, place / "lora", seed=3))
    return folder, model, paths, vectors


@torch.no_grad()
def hooked(model, vectors, scale, tokens):
    """Return the log-probabilities [T, V] of a model of transformers to whose layers vectors are added."""
    layers = {"embedding": model.model.embed_tokens}
    layers |= {f"layers.{n}.residual": layer for n, layer in enumerate(model.model.layers)}
    handles = []
    for point, vector in vectors.items():

        def add(module, args, output, vector=vector):
            return (output[0] + scale * vector, *output[1:]) if isinstance(output, tuple) else output + scale * vector

        handles.append(layers[point].register_forward_hook(add))
    try:
        return model(torch.tensor([tokens])).logits[0].double().log_softmax(-1)
    finally:
        for handle in handles:
            handle.remove()


def test_steering_has_the_logits_of_hooks_beside_rows_with_other_adapters(steered):
    folder, model, paths, vectors = steered
    order = [0, 1, 2, None, 1]
    requested = [None if n is None else lora(paths[n], n + 1) for n in order]
    with engine(folder, **METHODS) as llm:
        items = [{"prompt_token_ids": PROMPT}] * 5
        outputs = llm.generate(items, all_scores(), False, lora_request=requested)
        assert llm.stats()["prefix_hits"] == 0, "a prefix is shared by requests with other adapters"
    for n, out in zip(order, outputs, strict=True):
        tokens = PROMPT + out.outputs[0].token_ids
        if n in (0, 1):
            reference = hooked(model, vectors[n], n + 0.5, tokens)
        else:
            reference = expected(model, None if n is None else paths[n], tokens)
        assert difference(out, reference, tokens) < 1e-4
    assert outputs[1].outputs[0].token_ids == outputs[4].outputs[0].token_ids


def test_taps_of_a_request_read_and_change_the_steered_values(steered):
    folder, _, paths, vectors = steered
    point, prompt = "layers.0.residual", [{"prompt_token_ids": PROMPT}] * 2
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    taps = [[Tap(point, read=True)], [Tap(point, read=True, add=0.5 * vectors[0][point].numpy())]]
    with engine(folder, **METHODS) as llm:
        found = llm.generate(prompt, params, False, taps=taps, lora_request=[lora(paths[0]), None])
        twice = llm.generate(prompt[:1], params, False, taps=taps[1:], lora_request=[lora(paths[0])])
    values = [out.outputs[0].taps[point] for out in (*found, *twice)]
    torch.testing.assert_close(torch.tensor(values[0]), torch.tensor(values[1]), atol=1e-5, rtol=1e-5)
    added = torch.tensor(values[2][: len(PROMPT)] - values[0][: len(PROMPT)])
    torch.testing.assert_close(added, (0.5 * vectors[0][point]).expand_as(added), atol=1e-5, rtol=1e-5)


def test_a_place_that_changes_its_method_has_the_new_adapter_alone(steered, tmp_path):
    folder, model, paths, vectors = steered
    ia3 = write_ia3(model, tmp_path / "ia3", seed=4)
    all_paths = [*paths, ia3]
    item = [{"prompt_token_ids": PROMPT}]
    with engine(folder, max_loras=1, **METHODS) as llm:
        for n in (3, 0, 2, 1, 3, 2, 0):
            out = llm.generate(item, all_scores(), False, lora_request=[lora(all_paths[n], n + 1)])[0]
            tokens = PROMPT + out.outputs[0].token_ids
            plain = n in (0, 1)
            reference = hooked(model, vectors[n], n + 0.5, tokens) if plain else expected(model, all_paths[n], tokens)
            assert difference(out, reference, tokens) < 1e-4
        assert llm.stats()["adapters"]["replaced_on_device"] == 6


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "VERA"}, "peft_type='VERA': expected 'IA3' or 'LORA' or 'STEERING'"),
        ({"peft_type": None}, "peft_type=None: expected"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\] is not implemented"),
        ({"new_field": 3}, "new_field=3 is not implemented"),
    ],
    ids=str,
)
def test_fields_of_other_methods_are_refused_before_the_weights_are_read(steered, tmp_path, config, message):
    folder, model, *_ = steered
    path = write_ia3(model, tmp_path / "ia3")
    settings = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps({**settings, **config}))
    (path / "adapter_model.safetensors").write_bytes(b"never read")
    with engine(folder, **METHODS) as llm, pytest.raises(RequestError, match=message):
        llm.generate([{"prompt_token_ids": PROMPT}], all_scores(), False, lora_request=[lora(path)])


def test_a_largest_rank_is_refused_without_a_method_that_uses_it(steered):
    folder = steered[0]
    for methods in (["ia3"], ["steering"], ["ia3", "steering"]):
        options = {"enable_lora": False, "adapters": methods}
        with pytest.raises(ConfigError, match="max_lora_rank without a method with ranks, such as lora, has no effect"):
            engine(folder, max_lora_rank=32, **options)
        with engine(folder, max_loras=2, max_lora_rank=16, **options) as llm:
            assert llm.config.max_lora_rank == 16
    with engine(folder, max_lora_rank=32, **METHODS) as llm:
        assert llm.config.max_lora_rank == 32


@pytest.mark.parametrize(
    ("vectors", "config", "message"),
    [
        ({"layers.9.residual": 64}, {}, "'layers.9.residual' is no tap point that this engine steers.*layers.1"),
        ({"layers.0.mlp": 64}, {}, "left out by the option points of the method steering"),
        ({"layers.0.residual": 7}, {}, r"has shape \[7\], expected \[64\]"),
        ({"layers.0.residual": 64}, {"scale": "x"}, "scale='x': expected a finite number"),
        ({"layers.0.residual": 64}, {"r": 4}, "r=4 is not implemented: a steering folder has"),
        (
            {"layers.0.residual": 64},
            {"target_modules": ["layers.0"]},
            "target_modules=.* is not implemented",
        ),
        ({}, {}, "has no tensors"),
    ],
    ids=str,
)
def test_vectors_that_do_not_fit_the_model_are_refused(steered, tmp_path, vectors, config, message):
    folder, model, *_ = steered
    width = model.config.hidden_size
    sizes = {point: width if size == 64 else size for point, size in vectors.items()}
    path = write_steering(tmp_path / "s", {point: torch.ones(size) for point, size in sizes.items()}, **config)
    message = message.replace("64", str(width))
    with engine(folder, **METHODS) as llm:
        try:
            outputs = llm.generate([{"prompt_token_ids": PROMPT}], all_scores(), False, lora_request=[lora(path)])
            error = outputs[0].error
        except RequestError as e:
            error = str(e)
    assert error is not None
    import re

    assert re.search(message, error), error


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int8, torch.bool])
def test_tensors_without_a_float_dtype_are_refused(steered, tmp_path, dtype):
    folder, model, *_ = steered
    path = write_steering(tmp_path / "s", {"layers.0.residual": torch.ones(model.config.hidden_size, dtype=dtype)})
    with engine(folder, **METHODS) as llm:
        (output,) = llm.generate([{"prompt_token_ids": PROMPT}], all_scores(), False, lora_request=[lora(path)])
    assert f"has the dtype {str(dtype).removeprefix('torch.')}; expected a float dtype" in (output.error or "")


def test_factors_of_another_model_and_of_one_part_of_a_merged_layer_are_refused(steered, tmp_path):
    folder, model, *_ = steered
    inputs = write_ia3(model, tmp_path / "inputs", target_modules=["q_proj"], feedforward_modules=["q_proj"])
    other = shutil.copytree(write_ia3(model, tmp_path / "ia3"), tmp_path / "other")
    from safetensors.torch import load_file, save_file

    tensors = load_file(other / "adapter_model.safetensors")
    save_file({name: values[:-1] for name, values in tensors.items()}, other / "adapter_model.safetensors")
    with engine(folder, **METHODS) as llm:
        for n, (path, message) in enumerate([(inputs, "one part of a merged layer"), (other, "has shape")]):
            out = llm.generate([{"prompt_token_ids": PROMPT}], all_scores(), False, lora_request=[lora(path, n + 1)])
            assert out[0].error is not None
            assert message in out[0].error


@pytest.mark.parametrize("kind", ["ia3", "lora"])
def test_folders_that_name_a_weight_twice_are_refused(steered, tmp_path, kind):
    from safetensors.torch import load_file, save_file

    folder, model, *_ = steered
    path = (write_ia3 if kind == "ia3" else write_adapter)(model, tmp_path / kind)
    tensors = load_file(path / "adapter_model.safetensors")
    name = next(iter(tensors))
    twice = {**tensors, name.removeprefix("base_model.model."): tensors[name].clone()}
    save_file(twice, path / "adapter_model.safetensors")
    with engine(folder, **METHODS) as llm:
        (output,) = llm.generate([{"prompt_token_ids": PROMPT}], all_scores(), False, lora_request=[lora(path)])
    assert output.error is not None
    assert "expected each" in output.error and name in output.error


def test_rows_with_factors_and_vectors_have_the_same_bits_in_every_batch(steered, tmp_path):
    folder, model, paths, _ = steered
    ia3 = write_ia3(model, tmp_path / "ia3", seed=4)
    requested = [lora(ia3, 9), lora(paths[1], 2), None, lora(paths[2], 3)]
    with engine(folder, batch_invariant=True, enable_prefix_caching=False, **METHODS) as llm:
        item = {"prompt_token_ids": PROMPT}
        together = llm.generate([item] * 4, all_scores(), False, lora_request=requested)
        alone = [llm.generate([item], all_scores(), False, lora_request=[one])[0] for one in requested]
    for a, b in zip(together, alone, strict=True):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
        for mine, other in zip(a.outputs[0].logprobs, b.outputs[0].logprobs, strict=True):
            assert {i: one.logprob for i, one in mine.items()} == {i: one.logprob for i, one in other.items()}
