"""Every tensor of a checkpoint is used once, every parameter is filled, and whatever is wrong is named in one line."""

from __future__ import annotations

import json
import os
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from minivllm import LLM, SamplingParams
from minivllm.core.interfaces.model import Rule
from minivllm.core.interfaces.quantizer import Shard
from minivllm.device.loading.hf_config import open_checkpoint
from minivllm.device.loading.tensor_names import check_names
from minivllm.device.loading.weights import find_targets, load_weights, weight_bytes
from minivllm.errors import ModelError
from minivllm.plugins.quantizer.int8 import Int8
from minivllm.plugins.quantizer.options import Int8Options
from minivllm.testing.harness import Harness
from minivllm.testing.tiny import ARCHS, quiet, save, small_config, tiny_dir, tiny_model

LLAMA = ARCHS["llama"]()


@pytest.fixture
def tiny(tmp_path):
    return tiny_dir(tmp_path / "model")


def refuses(path, cfg, says, **more):
    with pytest.raises(ModelError, match=says) as caught:
        Harness(path, LLAMA, cfg, **more)
    assert "\n" not in str(caught.value)


def edit(path, change):
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


def edit_all(path, change):
    """Return ``edit`` for a checkpoint of one or of several files."""
    if (path / "model.safetensors").exists():
        return edit(path, change)
    index = path / "model.safetensors.index.json"
    shards = {file.name: load_file(file) for file in sorted(path.glob("model-*.safetensors"))}
    tensors = {name: tensor for held in shards.values() for name, tensor in held.items()}
    change(tensors)
    for shard, held in shards.items():
        save_file({n: tensors[n] for n in held if n in tensors}, path / shard, {"format": "pt"})
    where = {n: shard for shard, held in shards.items() for n in held if n in tensors}
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}))


def change_config(path, **values):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **values}))


def test_several_shards_load_as_one_file(tmp_path, tiny):
    path, cfg, _ = tiny_dir(tmp_path / "shards", shard="20KB")
    assert len(list(path.glob("model-*-of-*.safetensors"))) > 2
    one, many = Harness(tiny[0], LLAMA, tiny[1]), Harness(path, LLAMA, cfg)
    for name, module in one.parts.modules.items():
        for key, tensor in module.tensors.items():
            assert torch.equal(tensor, many.parts.modules[name].tensors[key])


def test_every_parameter_comes_from_its_own_tensor(tiny):
    path, cfg, hf = tiny
    modules, state = Harness(path, LLAMA, cfg).parts.modules, hf.state_dict()
    qkv = [state[f"model.layers.1.self_attn.{x}_proj.weight"] for x in "qkv"]
    assert torch.equal(modules["layers.1.attn.qkv"].tensors["weight"], torch.cat(qkv))
    assert torch.equal(modules["norm"].weight, state["model.norm.weight"])
    assert torch.equal(modules["embed"].weight, state["model.embed_tokens.weight"])


@pytest.mark.parametrize("tied", [False, True])
def test_weight_bytes_counts_what_is_there_once(tmp_path, tied):
    path, cfg, hf = tiny_dir(tmp_path, tie_word_embeddings=tied)
    assert weight_bytes(Harness(path, LLAMA, cfg).parts) == 4 * sum(p.numel() for p in hf.parameters())


def test_known_buffers_are_passed_over(tmp_path):
    path, cfg, hf = tiny_dir(tmp_path)
    edit(path, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    assert torch.equal(Harness(path, LLAMA, cfg).parts.modules["norm"].weight, hf.model.norm.weight)


EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
HEADS = {  # what a checkpoint with tie_word_embeddings=true may hold -> how its tensors become that
    "both, which differ": lambda t: None,
    "both, which are equal": lambda t: t.update({HEAD: t[EMBED].clone()}),
    "both, equal in another dtype": lambda t: t.update({EMBED: t[EMBED].half().float(), HEAD: t[EMBED].half()}),
    "both, which differ in one element": lambda t: t.update({HEAD: t[EMBED].index_fill(0, torch.tensor([60]), 0.5)}),
    "the embedding alone": lambda t: t.pop(HEAD),
    "the head alone": lambda t: t.pop(EMBED),
}


def reference(path, tokens, dtype=torch.float32):
    """Return the logits of transformers' model of a directory."""
    with quiet(), torch.inference_mode():
        hf = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager").eval()
        return hf(torch.tensor([tokens])).logits[0].float()


@pytest.mark.parametrize("what", HEADS)
@pytest.mark.parametrize("shard", [None, "8KB"], ids=["one file", "shards"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_tied_head_is_what_transformers_makes_of_it(tmp_path, family, shard, what):
    """tie_word_embeddings=true in config.json, whatever the checkpoint holds."""
    path, _, _ = tiny_dir(tmp_path, family, shard=shard)
    edit_all(path, HEADS[what])
    change_config(path, tie_word_embeddings=True)
    harness = Harness(path, ARCHS[family](), open_checkpoint(str(path)).hf_config())
    want = reference(path, [5, 6, 7])
    assert (harness.step({0: [5, 6, 7]})[0] - want).abs().max() < 1e-4
    shared = sum(t.numel() for t in AutoModelForCausalLM.from_pretrained(path).parameters())  # shared ones once
    assert weight_bytes(harness.parts) == 4 * shared


@pytest.mark.parametrize("options", [{}, {"lm_head": True}, {"lm_head": True, "skip": ["lm_head"]}], ids=str)
@pytest.mark.parametrize("what", HEADS)
def test_a_quantized_head_is_made_of_the_weight_that_transformers_takes(tmp_path, what, options):
    path, _, _ = tiny_dir(tmp_path)
    edit_all(path, HEADS[what])
    change_config(path, tie_word_embeddings=True)
    harness = Harness(path, LLAMA, open_checkpoint(str(path)).hf_config(), quantizer=Int8(Int8Options(**options)))
    with quiet():
        hf = AutoModelForCausalLM.from_pretrained(path)
    hidden = torch.randn(3, 32)
    want = hidden @ hf.lm_head.weight.T.float()
    got = harness.parts.modules["lm_head"](hidden)
    assert (got - want).abs().max() < (0.05 if options == {"lm_head": True} else 1e-4) * want.abs().max()
    assert torch.equal(harness.parts.modules["embed"].weight, hf.model.embed_tokens.weight)


def test_a_head_that_differs_from_the_embedding_it_is_tied_to_is_told(tmp_path, caplog):
    path, _, _ = tiny_dir(tmp_path / "m", "qwen3", vocab_size=64)
    change_config(path, tie_word_embeddings=True)
    sizes = {"max_num_seqs": 2, "max_num_batched_tokens": 32, "max_model_len": 64, "num_kvcache_blocks": 16}
    with LLM(model=str(path), device="cpu", skip_tokenizer_init=True, **sizes) as llm:
        out = llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), use_tqdm=False)
        explained = llm.explain()
    tokens = [5, 6, 7]
    for _ in range(4):
        tokens.append(int(reference(path, tokens)[-1].argmax()))
    assert out[0].outputs[0].token_ids == tokens[3:]
    for text in (explained, caplog.text):
        assert "lm_head.weight is used and differs from model.embed_tokens.weight" in text


@pytest.mark.parametrize(
    ("tied", "change", "says"),
    [
        (False, lambda t: t.pop(HEAD), "lacks lm_head.weight"),
        (False, lambda t: t.pop(EMBED), "lacks model.embed_tokens.weight"),
        (True, lambda t: (t.pop(EMBED), t.pop(HEAD)), "lacks model.embed_tokens.weight"),
        (True, lambda t: t.update({"output.weight": t.pop(HEAD)}), "'output.weight' has no place"),
        (True, lambda t: t.update({"model.lm_head.weight": t.pop(HEAD)}), "'model.lm_head.weight' has no place"),
        (True, lambda t: t.update({HEAD: t[HEAD][:50].clone()}), r"lm_head.weight' has shape \[50, 32\], expected"),
        (True, lambda t: t.update({HEAD: t[HEAD].to(torch.int32)}), "lm_head.weight': dtype int32"),
    ],
)
def test_a_head_that_transformers_would_invent_or_refuse_is_refused(tmp_path, tied, change, says):
    path, _, _ = tiny_dir(tmp_path)
    edit_all(path, change)
    change_config(path, tie_word_embeddings=tied)
    refuses(path, open_checkpoint(str(path)).hf_config(), says)


def test_an_unknown_tensor_is_refused_with_the_nearest_name(tiny):
    path, cfg, _ = tiny
    edit(path, lambda t: t.update({"model.layers.0.mlp.gate_projj.weight": torch.ones(1)}))
    refuses(
        path,
        cfg,
        r"'model.layers.0.mlp.gate_projj.weight' has no place.*Did you mean 'model.layers.0.mlp.gate_proj.weight'",
    )


@pytest.mark.parametrize(("layer", "hint"), [(1, True), (7, False)])
def test_no_name_of_a_layer_that_the_model_lacks_is_suggested(tiny, layer, hint):
    path, cfg, _ = tiny
    name = f"model.layers.{layer}.mlp.gate_projj.weight"
    with pytest.raises(ModelError, match=re.escape(f"{name}' has no place")) as refused:
        check_names(path, [name], ARCHS["llama"](), cfg)
    assert ("Did you mean 'model.layers.1.mlp.gate_proj.weight'" in str(refused.value)) == hint
    assert ("Did you mean" in str(refused.value)) == hint


def test_a_layer_more_than_the_config_says_is_refused(tiny):
    path, cfg, _ = tiny
    cfg.num_hidden_layers = 1
    refuses(path, cfg, r"tensor 'model.layers.1\..*' has no place")


@pytest.mark.parametrize("layer", ["9" * 5000, "99999999999", "٣", "²"])
def test_a_layer_number_that_no_model_has_is_refused_by_the_name_of_its_tensor(tiny, layer):
    path, cfg, _ = tiny
    edit(path, lambda t: t.update({f"model.layers.{layer}.mlp.gate_proj.weight": torch.ones(1)}))
    refuses(path, cfg, r"tensor 'model.layers..* has no place")


def test_a_missing_tensor_is_named(tiny):
    path, cfg, _ = tiny
    edit(path, lambda t: t.pop("model.layers.1.self_attn.k_proj.weight"))
    refuses(path, cfg, "lacks model.layers.1.self_attn.k_proj.weight")


def test_a_bias_that_the_config_denies_is_refused(tmp_path):
    path, cfg, _ = tiny_dir(tmp_path, attention_bias=True)
    cfg.attention_bias = False
    refuses(path, cfg, "bias' has no place")


def test_a_wrong_shape_says_what_was_wanted(tiny):
    path, cfg, _ = tiny
    edit(path, lambda t: t.update({"model.layers.0.self_attn.k_proj.weight": torch.ones(8, 32)}))
    refuses(path, cfg, r"k_proj.weight' has shape \[8, 32\], expected \[16, 32\]")


def test_a_wrong_dtype_is_refused(tiny):
    path, cfg, _ = tiny
    edit(path, lambda t: t.update({"model.norm.weight": torch.ones(32, dtype=torch.int32)}))
    refuses(path, cfg, "'model.norm.weight': dtype int32, expected a floating-point weight")


@pytest.mark.parametrize("keep", [0, 4, 200, 0.5, 0.999])
def test_a_truncated_file_is_named(tiny, keep):
    path, cfg, _ = tiny
    file = path / "model.safetensors"
    os.truncate(file, int(keep * file.stat().st_size) if isinstance(keep, float) else keep)
    refuses(path, cfg, "model.safetensors: not a whole safetensors file")


def test_a_missing_shard_is_named(tmp_path):
    path, cfg, _ = tiny_dir(tmp_path, shard="20KB")
    victim = sorted(path.glob("model-*.safetensors"))[1]
    victim.unlink()
    refuses(path, cfg, f"shard {victim.name} is missing")


def test_a_shard_without_the_tensor_that_the_index_promises_is_named(tmp_path):
    path, cfg, _ = tiny_dir(tmp_path, shard="20KB")
    shard = sorted(path.glob("model-*.safetensors"))[0]
    tensors = load_file(shard)
    gone = tensors.popitem()[0]
    save_file(tensors, shard)
    refuses(path, cfg, f"{shard.name}: lacks tensor '{gone}'")


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    path, cfg, _ = tiny_dir(tmp_path, shard="20KB")
    first, second = sorted(path.glob("model-*.safetensors"))[:2]
    name, tensor = next(iter(load_file(first).items()))
    save_file({**load_file(second), name: tensor}, second)
    refuses(path, cfg, f"'{name}' occurs twice")


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', '{"weight_map": []}', '{"a": 1}'])
def test_a_broken_index_is_refused(tmp_path, text):
    path, cfg, _ = tiny_dir(tmp_path, shard="20KB")
    (path / "model.safetensors.index.json").write_text(text)
    refuses(path, cfg, "index.json:1:2: broken JSON" if text == "{" else "not an index of shards")


@pytest.mark.parametrize("shard", [3, None, ["a"], {}])
def test_an_index_whose_shard_is_no_text_is_refused(tmp_path, shard):
    path, cfg, _ = tiny_dir(tmp_path, shard="20KB")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": shard}}))
    refuses(path, cfg, "the shard of 'lm_head.weight' is .*: expected the name of a file")


def test_messages_about_a_file_of_weights_are_short_and_printable(tmp_path):
    path, cfg, _ = tiny_dir(tmp_path)
    index = path / "model.safetensors.index.json"
    (path / "model.safetensors").rename(path / "a.safetensors")
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "\x1b[2J.safetensors"}}))
    refuses(path, cfg, r"shard \\x1b\[2J.safetensors is missing")
    index.unlink()
    header = json.dumps({"a": {"dtype": "x" * 100_000, "shape": [], "data_offsets": [0, 0]}}).encode()
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ModelError, match="not a whole safetensors file") as caught:
        Harness(path, LLAMA, cfg)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("shard", ["../evil.safetensors", "/etc/passwd", "model.bin"])
def test_an_index_cannot_point_out_of_the_folder_or_at_a_pickle(tmp_path, shard):
    path, cfg, _ = tiny_dir(tmp_path, shard="20KB")
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": shard}}))
    refuses(path, cfg, "expected the name of a .safetensors file in the same folder")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickles_are_not_opened_unless_they_are_asked_for(tiny, name):
    path, cfg, _ = tiny
    (path / "model.safetensors").unlink()
    pickle = path / name
    pickle.write_bytes(b"not even a pickle")
    pickle.chmod(0)
    refuses(path, cfg, f"only weights of torch.save .{name}., which load_format='pt' reads")


def test_a_folder_without_weights_is_refused(tiny, tmp_path):
    path, cfg, _ = tiny
    refuses(tmp_path / "nowhere", cfg, "no such model directory")
    (path / "model.safetensors").rename(path / "model-00001-of-00002.safetensors")
    refuses(path, cfg, "found model-00001-of-00002.safetensors without model.safetensors.index.json; download it too")
    (path / "model-00001-of-00002.safetensors").unlink()
    refuses(path, cfg, "no model.safetensors and no")


def test_an_unknown_load_format_is_refused(tiny):
    refuses(tiny[0], tiny[1], "load_format='gguf': expected one of auto, safetensors, pt, dummy", load_format="gguf")


def test_dummy_weights_need_no_file_and_depend_on_the_seed_alone(tiny):
    make = lambda seed: Harness("nowhere", LLAMA, tiny[1], load_format="dummy", seed=seed).parts.modules  # noqa: E731
    a, b, c = make(0), make(0), make(1)
    for name, module in a.items():
        for key, tensor in module.tensors.items():
            assert torch.equal(tensor, b[name].tensors[key]) and tensor.isfinite().all()
    weight = a["layers.0.mlp.gate_up"].tensors["weight"]
    assert 0.015 < weight.std() < 0.025
    assert not torch.equal(weight, c["layers.0.mlp.gate_up"].tensors["weight"])
    assert not torch.equal(weight, a["layers.1.mlp.gate_up"].tensors["weight"])


def test_dummy_shares_are_slices_of_the_whole(tiny):
    whole = Harness("nowhere", LLAMA, tiny[1], load_format="dummy").parts.modules["layers.0.mlp.down"]
    share = Harness("nowhere", LLAMA, tiny[1], load_format="dummy", shard=Shard(1, 2)).parts.modules[
        "layers.0.mlp.down"
    ]
    assert torch.equal(share.tensors["weight"], whole.tensors["weight"][:, 24:])


def test_rules_that_leave_or_repeat_a_parameter_are_the_architectures_fault(tiny):
    parts = Harness(tiny[0], LLAMA, tiny[1]).parts
    rules = list(LLAMA.weights(tiny[1]))
    assert len(find_targets(rules, parts)) == 2 * 9 + 3
    with pytest.raises(ModelError, match=r"no rule .* fills embed.weight"):
        find_targets(rules[1:], parts)
    with pytest.raises(ModelError, match=r"fill norm.weight '' twice"):
        find_targets([*rules, Rule("other", "norm")], parts)


def test_loading_twice_gives_the_same_model(tiny):
    path, cfg, _ = tiny
    harness = Harness(path, LLAMA, cfg)
    before = harness.step({0: [5, 6]})[0]
    load_weights(path, LLAMA, cfg, harness.parts)
    assert torch.equal(harness.step({1: [5, 6]})[1], before)


@pytest.mark.parametrize("family", ["LlamaConfig", "GPT2Config"])
def test_a_checkpoint_of_the_model_without_its_head_is_read_as_transformers_reads_it(tmp_path, family):
    import transformers

    with quiet():
        hf = tiny_model(small_config(getattr(transformers, family), tie_word_embeddings=True))
        save(hf, tmp_path / "whole")
        save(hf, tmp_path / "base")
        prefix = hf.base_model_prefix + "."
        edit(tmp_path / "base", lambda tensors: bare(tensors, prefix))
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert all(torch.equal(p, dict(again.named_parameters())[n]) for n, p in hf.named_parameters())
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    answers = []
    for name in ("whole", "base"):
        with LLM(model=str(tmp_path / name), skip_tokenizer_init=True, num_kvcache_blocks=20) as llm:
            answers.append(llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].tokens)
    assert answers[0] == answers[1]


def bare(tensors, prefix):
    for name in list(tensors):
        tensors[name.removeprefix(prefix)] = tensors.pop(name)
        assert name.startswith(prefix), name


def test_a_tensor_that_is_there_with_and_without_the_root_is_refused(tiny):
    path, cfg, _ = tiny
    edit(path, lambda tensors: tensors.update({"norm.weight": tensors["model.norm.weight"].clone()}))
    refuses(path, cfg, "occurs twice")
