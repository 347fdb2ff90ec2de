"""GGUF files, written by the package ``gguf``: their weights are those that it unpacks, in the bits of the file."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import torch
from packed_checkpoints import LLM_SIZES, PROMPT, forms, held, info, loaded

from minivllm import LLM, SamplingParams
from minivllm.cli import main
from minivllm.core.interfaces.quantizer import Shard
from minivllm.device.loading.gguf_file import _read, read_gguf
from minivllm.device.loading.hf_config import open_checkpoint
from minivllm.errors import ModelError, ResourceError
from minivllm.plugins.model.gemma import Gemma2, Gemma3
from minivllm.plugins.model.llama import Llama
from minivllm.plugins.model.qwen2 import Qwen2
from minivllm.plugins.model.qwen3 import Qwen3
from minivllm.plugins.quantizer.forms import GroupedBytes, PlainRows
from minivllm.plugins.quantizer.gguf import Gguf
from minivllm.plugins.quantizer.int4 import Int4Rows
from minivllm.runtime.text.tokenizer import load_tokenizer
from minivllm.testing.harness import Harness
from minivllm.testing.tiny import small_config, tiny_config, tiny_model

gguf = pytest.importorskip("gguf")

SIZES = {
    "hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "vocab_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
ARCHS = {"llama": Llama, "qwen2": Qwen2, "qwen3": Qwen3, "gemma2": Gemma2, "gemma3": Gemma3}
LAYER = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
GEMMA = {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
TYPE = gguf.GGMLQuantizationType


def packed(kind, rows, inputs):
    """Return random blocks u8 [rows, bytes] of a GGUF type, with the scales of a real model."""
    count, size = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(rows + inputs).integers(0, 256, (rows, inputs // count, size), dtype=np.uint8)
    scale = {TYPE.Q8_0: 2e-3, TYPE.Q4_0: 2e-2, TYPE.Q4_K: 5e-4, TYPE.Q5_K: 3e-4, TYPE.Q6_K: 8e-5}[kind]
    d = (np.random.default_rng(1).random((rows, inputs // count)) * scale).astype(np.float16)
    at = 208 if kind is TYPE.Q6_K else 0
    raw[..., at : at + 2] = d[..., None].view(np.uint8)
    if kind in (TYPE.Q4_K, TYPE.Q5_K):
        raw[..., 2:4] = (d * np.float16(8))[..., None].view(np.uint8)
    return raw.reshape(rows, -1)


def in_pairs(rows, heads):
    """Return rows of q or k in the order of llama.cpp's converter for "llama"."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def name_of(name, family):
    names = {**LAYER, **(GEMMA if family.startswith("gemma") else {})}
    stem, _, param = name.rpartition(".")
    outside = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    if stem in outside:
        return f"{outside[stem]}.{param}"
    _, _, number, module = stem.split(".", 3)
    return f"blk.{number}.{names[module]}.{param}"


def written(path, family, kinds, more=lambda writer: None, **values):
    """Write a tiny model as a GGUF file with matrices of ``kinds`` in turn; return (config, transformers' model)."""
    values = {**SIZES, **values}
    cfg = tiny_config(family, **values) if family != "gemma2" else gemma2_config(**values)
    hf = tiny_model(cfg)
    arch = "gemma3" if family == "gemma3" else family
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_context_length(256)
    writer.add_embedding_length(256)
    writer.add_block_count(cfg.num_hidden_layers)
    writer.add_feed_forward_length(256)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(64)
    writer.add_layer_norm_rms_eps(cfg.rms_norm_eps)
    rope = cfg.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    more(writer)
    state, at = hf.state_dict(), 0
    for name, tensor in state.items():
        if name == "lm_head.weight" and cfg.tie_word_embeddings:
            continue
        value, kind = tensor.numpy().copy(), TYPE.F32
        if tensor.dim() == 2:
            kind, at = kinds[at % len(kinds)], at + 1
            if kind in (TYPE.F32, TYPE.F16, TYPE.BF16):
                value = gguf.quantize(value, kind)
            else:
                value = packed(kind, *tensor.shape)
            tensor.copy_(torch.from_numpy(gguf.dequantize(value, kind).copy()).view(tensor.shape))
        if family == "llama" and (".q_proj." in name or ".k_proj." in name):
            value = in_pairs(value, 4 if ".q_proj." in name else 2)
        if family.startswith("gemma") and name.endswith("norm.weight"):
            value = value + 1
        writer.add_tensor(name_of(name, family), np.ascontiguousarray(value), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return cfg, hf


def gemma2_config(**values):
    from transformers import Gemma2Config

    return small_config(Gemma2Config, **values, query_pre_attn_scalar=64, sliding_window=6)


def of_gemma3(writer):
    writer.add_sliding_window(6)


def of_gemma2(writer):
    of_gemma3(writer)
    writer.add_attn_logit_softcapping(0.5)
    writer.add_final_logit_softcapping(3.0)


KEYS = {"gemma2": of_gemma2, "gemma3": of_gemma3}
CAPS = {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 3.0}
HELD_AS = {
    TYPE.Q8_0: GroupedBytes, TYPE.Q4_0: Int4Rows, TYPE.Q4_K: Int4Rows, TYPE.Q6_K: GroupedBytes, TYPE.Q5_K: PlainRows,
}  # fmt: skip
FLOATS, PACKED = (TYPE.F32, TYPE.F16, TYPE.BF16), (TYPE.Q4_K, TYPE.Q6_K, TYPE.Q8_0)


@pytest.mark.parametrize(
    ("family", "kinds", "values"),
    [
        ("llama", FLOATS, {}), ("llama", PACKED, {"attention_bias": True}), ("llama", (TYPE.Q4_K,), {}),
        ("llama", (TYPE.Q4_0, TYPE.Q5_K, TYPE.F16), {"tie_word_embeddings": True}),
        ("qwen3", (TYPE.Q8_0, *[TYPE.F16] * 99), {"tie_word_embeddings": True}),
        ("qwen2", PACKED, {"tie_word_embeddings": True}), ("qwen3", PACKED, {}), ("qwen3", (TYPE.Q6_K,), {}),
        ("gemma2", PACKED, {"tie_word_embeddings": True, **CAPS}),
        ("gemma3", PACKED, {"tie_word_embeddings": True, "query_pre_attn_scalar": 64, "sliding_window": 6}),
    ],
)  # fmt: skip
def test_logits_of_a_file_are_those_of_its_unpacked_weights_in_transformers(family, kinds, values, tmp_path):
    path = tmp_path / "model.gguf"
    _, hf = written(path, family, kinds, KEYS.get(family, lambda writer: None), **values)
    checkpoint = open_checkpoint(str(path))
    cfg = checkpoint.hf_config()
    held_packed = any(kind not in FLOATS for kind in kinds[1:] or kinds)  # the first is that of the embeddings
    assert checkpoint.quantization == ("gguf" if held_packed else "none")
    quantizer = Gguf(None, cfg.quantization_config) if held_packed else None
    harness = Harness(path, ARCHS[family](), cfg, **({"quantizer": quantizer} if quantizer else {}))
    with torch.inference_mode():
        want = hf(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(harness.step({0: PROMPT})[0], want, rtol=1e-4, atol=2e-4)


def test_weights_keep_the_bits_of_the_file_and_their_slices_are_those_of_all():
    for kind, form in HELD_AS.items():
        raw = packed(kind, 32, 512)
        want = torch.from_numpy(gguf.dequantize(raw, kind).copy()).double()
        name = kind.name.lower()
        for split, part in ((None, want), ("row", want[:, 256:]), ("column", want[16:])):
            shard = Shard(1, 2) if split else Shard()
            m = info((len(part),), part.shape[1], split=split, shard=shard, sources=sources(name, raw))
            scheme = loaded(Gguf(None, {"quant_method": "gguf"}), m, {"a": {name: torch.from_numpy(raw)}})
            torch.testing.assert_close(held(scheme), part, rtol=1e-5, atol=1e-6)
            assert forms(scheme) == [form]


def sources(name, raw):
    from minivllm.core.interfaces.quantizer import PartSource

    return {"a": PartSource("model.layers.0.mlp.up_proj", {name: (raw.shape, "U8")})}


def test_a_group_of_one_number_has_that_number():
    raw = packed(TYPE.Q4_K, 32, 256)
    raw[:, 4:8] &= 0xC0  # the scales of the first four groups are 0, their minima are not
    m = info((32,), 256, sources=sources("q4_k", raw))
    scheme = loaded(Gguf(None, {"quant_method": "gguf"}), m, {"a": {"q4_k": torch.from_numpy(raw)}})
    want = torch.from_numpy(gguf.dequantize(raw, TYPE.Q4_K).copy()).double()
    assert want[0, :32].unique().numel() == 1 and want[0, 0] != 0
    torch.testing.assert_close(held(scheme), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [TYPE.Q8_0, TYPE.Q4_0, TYPE.Q4_K, TYPE.Q5_K, TYPE.Q4_1, TYPE.Q2_K, TYPE.IQ4_XS])
def test_scales_and_minima_that_are_no_numbers_are_refused_for_every_type(kind):
    count, size = gguf.GGML_QUANT_SIZES[kind]
    whole = np.zeros((32, 512 // count, size), np.uint8)
    places = {TYPE.Q4_K: (0, 2), TYPE.Q5_K: (0, 2), TYPE.Q4_1: (0, 2), TYPE.Q2_K: (80, 82)}.get(kind, (0,))
    for at in places:
        raw = whole.copy()
        raw[3, 1] = 0x11  # scales and codes that are not 0
        raw[3, 1, at : at + 2] = np.array([np.nan], np.float16).view(np.uint8)
        blocks = raw.reshape(32, -1)
        name = kind.name.lower()
        m = info((32,), 512, sources=sources(name, blocks))
        with pytest.raises(ModelError, match=r"(scales|zero points).* that are inf or NaN.*the file is damaged"):
            loaded(Gguf(None, {"quant_method": "gguf"}), m, {"a": {name: torch.from_numpy(blocks)}})


def test_rotary_embeddings_are_those_that_the_file_was_made_of(tmp_path):
    llama3 = {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    cfg = tiny_config("llama", **SIZES, rope_parameters=llama3)
    plain = 5e5 ** -(torch.arange(0, 64, 2, dtype=torch.float32) / 64)
    factors = (plain / ROPE_INIT_FUNCTIONS["llama3"](cfg, "cpu")[0]).numpy()

    def of(change):
        path = tmp_path / "model.gguf"
        written(path, "llama", FLOATS, change, rope_parameters=llama3)
        raw = open_checkpoint(str(path)).raw
        return raw["rope_theta"], raw.get("rope_scaling")

    without_theta = {k: v for k, v in llama3.items() if k != "rope_theta"}
    assert of(lambda w: w.add_tensor("rope_freqs.weight", factors)) == (5e5, without_theta)
    with pytest.raises(ModelError, match="is none of Llama 3's"):
        of(lambda w: w.add_tensor("rope_freqs.weight", factors[::-1].copy()))

    def yarn(w):
        w.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        w.add_rope_scaling_factor(4.0)
        w.add_rope_scaling_orig_ctx_len(64)

    assert of(yarn)[1] == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    with pytest.raises(ModelError, match=r"rope.scaling.type='longrope': expected none, linear or yarn"):
        of(lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE))


def test_what_a_file_does_not_say_is_what_llama_cpp_does_and_what_is_not_read_is_refused(tmp_path):
    path = tmp_path / "model.gguf"
    written(path, "gemma2", FLOATS, of_gemma3, tie_word_embeddings=True, num_hidden_layers=1)
    raw = open_checkpoint(str(path)).raw
    assert (raw["attn_logit_softcapping"], raw["final_logit_softcapping"]) == (50.0, 30.0)
    written(path, "llama", FLOATS, lambda w: w.add_rope_scaling_factor(2.0), num_hidden_layers=1)
    assert open_checkpoint(str(path)).raw["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    keys = {
        "rope.dimension_count": (64.0, 32.0),
        "attention.value_length": (64.0, 128.0),
        "rope.scale_linear": (1.0, 4.0),
        "rope.scaling.attn_factor": (1.0, 0.8),
        "rope.scaling.yarn_beta_fast": (32.0, 16.0),
    }

    def tell(key, value):
        number = value if key.startswith("rope.scal") else int(value)
        add = gguf.GGUFWriter.add_float32 if isinstance(number, float) else gguf.GGUFWriter.add_uint32
        written(path, "llama", FLOATS, lambda w: add(w, f"llama.{key}", number), num_hidden_layers=1)
        return open_checkpoint(str(path)).raw["head_dim"]

    for key, (right, wrong) in keys.items():
        assert tell(key, right) == 64
        with pytest.raises(ModelError, match=f"llama.{key}={wrong:g}: expected {right:g}; another value is not impl"):
            tell(key, wrong)


@pytest.mark.parametrize(
    ("add", "message"),
    [
        (lambda w: w.add_causal_attention(False), "llama.attention.causal=False: expected true; attention to later"),
        (
            lambda w: w.add_float32("tokenizer.ggml.bos_token_id", 1.5),
            "tokenizer.ggml.bos_token_id=1.5: expected the number of a token",
        ),
        (
            lambda w: w.add_string("tokenizer.ggml.eot_token_id", "2"),
            "tokenizer.ggml.eot_token_id='2': expected the number of a token",
        ),
    ],
)
def test_a_key_of_another_meaning_is_refused_by_name(tmp_path, add, message):
    path = tmp_path / "model.gguf"
    written(path, "llama", FLOATS, lambda w: w.add_causal_attention(True), num_hidden_layers=1)
    assert open_checkpoint(str(path)).raw["num_hidden_layers"] == 1
    written(path, "llama", FLOATS, add, num_hidden_layers=1)
    with pytest.raises(ModelError, match=message):
        open_checkpoint(str(path))


def test_a_file_is_served_with_the_tokenizer_in_it(tmp_path):
    pocket = load_tokenizer(open_checkpoint("pocket").folder)
    output = json.loads(pocket.backend.to_str())
    vocabulary = pocket.backend.get_vocab(with_added_tokens=True)
    added = {t["content"] for t in output["added_tokens"]}

    def vocab(writer):
        words = sorted(vocabulary, key=vocabulary.get)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_list(words)
        writer.add_token_types([3 if word in added else 1 for word in words])
        writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in output["model"]["merges"]])
        writer.add_eos_token_id(2)
        writer.add_chat_template("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")

    path = tmp_path / "pocket.gguf"
    written(path, "qwen3", PACKED, vocab, vocab_size=len(vocabulary), tie_word_embeddings=True)
    with LLM(model=str(path), **{**LLM_SIZES, "skip_tokenizer_init": False}) as llm:
        text = "Once upon a time there was a fox."
        assert llm.tokenizer.encode(text) == pocket.encode(text) and llm.tokenizer.eos_ids == (2, 0)
        assert llm.tokenizer.decode(pocket.encode(text)) == text
        assert "<user>Hi" in llm.tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
        (out,) = llm.generate([text], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True), use_tqdm=False)
        assert len(out.outputs[0].token_ids) == 3
    written(path, "qwen3", PACKED)
    with pytest.raises(
        ModelError, match=r"holds no tokenizer .*; choose one with the option tokenizer, or set skip_tok"
    ):
        LLM(model=str(path), device="cpu")


def test_files_that_cannot_be_read_are_refused_in_one_line(tmp_path, capsys, monkeypatch):
    path = tmp_path / "model.gguf"

    def split(writer):
        writer.add_uint16("split.count", 3)

    written(path, "llama", PACKED)
    whole = path.read_bytes()
    written(tmp_path / "split.gguf", "llama", FLOATS, split)
    written(
        tmp_path / "odd.gguf", "llama", FLOATS, lambda w: w.add_tensor("blk.0.ffn_gate_inp.weight", np.ones(4, "f"))
    )

    def changed(key, value):
        at = whole.index(f"llama.{key}".encode()) + len(f"llama.{key}") + 4
        return whole[:at] + value.to_bytes(4, "little") + whole[at + 4 :]

    files = {
        "cut": (whole[:-5000], "not a whole GGUF file"),
        "head": (whole[:300], "not a whole GGUF file"),
        "version": (whole[:4] + b"\x01\0\0\0" + whole[8:], "GGUF of version 1: expected 2 or 3"),
        "other": (b"PK\x03\x04" + whole[4:], "not a GGUF file"),
        "foreign": (whole.replace(b"llama", b"llamb"), "architecture 'llamb': expected one of llama, qwen2"),
        "lacks": (whole.replace(b"llama.block_count", b"llama.block_cound"), "lacks llama.block_count"),
        "split": ((tmp_path / "split.gguf").read_bytes(), "is one of 3 parts; merge them"),
        "odd": ((tmp_path / "odd.gguf").read_bytes(), "tensor 'blk.0.ffn_gate_inp.weight' does not belong to llama"),
        "empty": (b"", "not a GGUF file"),
        "deep": (
            changed("block_count", 1 << 30),
            "num_hidden_layers=1073741824: expected a whole number from 1 to 2000",
        ),
        "headless": (
            changed("attention.head_count", 0),
            "llama.attention.head_count=0: expected a whole number of at le",
        ),
        "wide": (changed("feed_forward_length", 0), "feed_forward_length=0: expected a whole number of at least 1"),
    }
    for name, (content, message) in files.items():
        (tmp_path / f"{name}.gguf").write_bytes(content)
        code = main(["generate", "--model", str(tmp_path / f"{name}.gguf"), "--set", "skip_tokenizer_init=true", "x"])
        output = capsys.readouterr().err
        assert (code, output.count("\n")) == (3, 1) and message in output, (name, output)
    _read.cache_clear()
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ResourceError, match=r"install it with pip install 'minivllm\[gguf\]'"):
        read_gguf(path)
