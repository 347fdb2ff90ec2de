"""Read a GGUF file as if it were a Hugging Face directory: config.json, and tensors under transformers' names.

llama.cpp keeps a few things in another way, which is undone here: rows of q and k of "llama" lie in pairs that its
rotary embedding turns, and norms of Gemma have their 1 added.  Tensors in blocks of few bits stay as they are and get a
parameter of their own name ("q4_k" for "weight"), which ``plugins/quantizer/gguf.py`` reads.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minivllm.device.loading.gguf_file import GgufFile, GgufTensor, read_gguf
from minivllm.errors import shown

from . import NewFields

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
LINEAR = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip
NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
FOUR_NORMS = {
    "attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm", "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
# GGUF architecture -> (its name in config.json, its class, tensor names of a layer besides linear modules)
KNOWN: Mapping[str, tuple[str, str, Mapping[str, str]]] = {
    "llama": ("llama", "LlamaForCausalLM", NORMS),
    "qwen2": ("qwen2", "Qwen2ForCausalLM", NORMS),
    "qwen3": ("qwen3", "Qwen3ForCausalLM", {**NORMS, **HEAD_NORMS}),
    "gemma2": ("gemma2", "Gemma2ForCausalLM", FOUR_NORMS),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM", {**FOUR_NORMS, **HEAD_NORMS}),
}
# fields of config.json -> GGUF keys of their values, which are whole numbers
COUNTS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
}
OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ROPE_FACTORS = "rope_freqs.weight"
# architecture -> number of layers of its 27B model, whose queries are scaled by hidden size / heads instead of head_dim
WIDEST_GEMMA = {"gemma2": 46, "gemma3": 62}
# fields of the rotary embedding of Llama 3.1 and later; GGUF files store only the factors that result from them
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# limits of logits in Gemma 2, used for files that lack these fields
SOFT_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
# fields of rotary embeddings -> accepted values; other values are not implemented
FIXED_ROPE: Mapping[str, tuple[float, ...]] = {
    "rope.scale_linear": (0.0, 1.0), "rope.scaling.attn_factor": (1.0,), "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (-1.0, 1.0), "rope.scaling.yarn_beta_fast": (32.0,),
    "rope.scaling.yarn_beta_slow": (1.0,), "rope.freq_base_swa": (10000.0,),
}  # fmt: skip
_IN_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def config_of(path: Path) -> NewFields:
    """Return the config.json that describes the model of a GGUF file.

    Raise ModelError for a model that is not supported.
    """
    file = read_gguf(path)
    if file.architecture not in KNOWN:
        raise file.refuse(f"architecture {shown(file.architecture)}: expected one of {', '.join(KNOWN)}")
    parts = file.values.get("split.count", 0)
    if type(parts) is not int or parts not in (0, 1):
        raise file.refuse(f"is one of {shown(parts)} parts; merge them (llama-gguf-split --merge)")
    model_type, name, _ = KNOWN[file.architecture]
    heads = _count(file, "attention.head_count")
    width = _count(file, "embedding_length")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise file.refuse("lacks a matrix token_embd.weight; download it again")
    head_dim = _count(file, "attention.key_length", width // heads)
    _check_fixed(file, head_dim)
    raw: NewFields = {field: _count(file, key) for field, key in COUNTS.items()}
    raw["model_type"] = model_type
    raw["architectures"] = [name]
    raw["vocab_size"] = embedding.shape[0]
    raw["num_key_value_heads"] = _count(file, "attention.head_count_kv", heads)
    raw["head_dim"] = head_dim
    raw["rms_norm_eps"] = _digits(_number(file, "attention.layer_norm_rms_epsilon"))
    raw["tie_word_embeddings"] = "output.weight" not in file.tensors
    raw["dtype"] = _dtype(file)
    raw |= _special(file)
    raw |= _attention(file, heads, width, head_dim)
    raw |= _rope(file)
    packed = _packed_kinds(file)
    if packed:
        raw["quantization_config"] = {"quant_method": "gguf", "types": packed}
    return raw


def _packed_kinds(file: GgufFile) -> list[str]:
    """Return the sorted names of the block formats of the matrices that stay packed, such as "Q4_K"."""
    kinds = set()
    for name, found in file.tensors.items():
        if name == ROPE_FACTORS:
            continue
        module, _ = tensor_name(file, name)
        if is_packed(module, found):
            kinds.add(found.kind)
    return sorted(kinds)


def _number(file: GgufFile, key: str, default: Any = None) -> Any:
    value = file.of_model(key, default)
    if value is None:
        raise file.refuse(f"lacks {file.architecture}.{key}; expected a whole GGUF file of a model")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise file.refuse(
            f"{file.architecture}.{key}={shown(value)}: expected a number; layers that differ are not read"
        )
    return value


def _count(file: GgufFile, key: str, default: int | None = None) -> int:
    """Return the field ``key`` of the model, or ``default`` without it: a whole number of at least 1.

    ModelError for another value.
    """
    value = _number(file, key, default)
    if not isinstance(value, int) or value < 1:
        raise file.refuse(f"{file.architecture}.{key}={shown(value)}: expected a whole number of at least 1")
    return value


def _check_fixed(file: GgufFile, head_dim: int) -> None:
    """Raise ModelError for fields of a file whose values would change the result and are not implemented."""
    of_heads = dict.fromkeys(("attention.value_length", "rope.dimension_count"), (head_dim,))
    for key, allowed in {**of_heads, **FIXED_ROPE}.items():
        value = _number(file, key, allowed[-1])
        if any(math.isclose(value, one, rel_tol=1e-6) for one in allowed):
            continue
        raise file.refuse(
            f"{file.architecture}.{key}={value:g}: expected {allowed[-1]:g}; another value is not implemented"
        )
    causal = file.of_model("attention.causal", True)
    if causal is not True:
        key = f"{file.architecture}.attention.causal"
        raise file.refuse(f"{key}={shown(causal)}: expected true; attention to later tokens is not implemented")


def _digits(value: float) -> float:
    """Round a number that was stored in float32 to seven digits, such as 9.999999974752427e-07 to 1e-06."""
    return float(f"{value:.7g}")


def _dtype(file: GgufFile) -> str:
    """Return the dtype of a file's matrices, "bfloat16" if they have several formats or a packed one."""
    kinds = {t.kind for t in file.tensors.values() if len(t.shape) > 1}
    if kinds == {"F32"}:
        return "float32"
    if kinds == {"F16"}:
        return "float16"
    return "bfloat16"


def _special(file: GgufFile) -> NewFields:
    """Return ``bos_token_id`` and ``eos_token_id`` as config.json has them: the first token of a text, and end
    tokens.  ModelError for an id that is no whole number."""
    for role in ("bos", "eos", "eot", "eom"):
        key = f"tokenizer.ggml.{role}_token_id"
        found_id = file.values.get(key)
        if found_id is not None and type(found_id) is not int:
            raise file.refuse(f"{key}={shown(found_id)}: expected the number of a token")
    bos = file.values.get("tokenizer.ggml.bos_token_id")
    ends = list(file.ends)
    found: NewFields = {"bos_token_id": None, "eos_token_id": None}
    if type(bos) is int:
        found["bos_token_id"] = bos
    if len(ends) == 1:
        found["eos_token_id"] = ends[0]
    elif ends:
        found["eos_token_id"] = ends
    return found


def _attention(file: GgufFile, heads: int, width: int, head_dim: int) -> NewFields:
    if file.architecture == "llama":
        biased = [part for part in LINEAR if f"blk.0.{part}.bias" in file.tensors]
        in_attention = [part for part in biased if part.startswith("attn")]
        in_mlp = [part for part in biased if part.startswith("ffn")]
        return {"attention_bias": bool(in_attention), "mlp_bias": bool(in_mlp)}
    if not file.architecture.startswith("gemma"):
        return {}
    found: NewFields = {}
    for name, cap in SOFT_CAPS.items():
        default = cap if file.architecture == "gemma2" else None
        found[name] = file.of_model(name, default)
    if file.of_model("attention.sliding_window") is not None:
        found["sliding_window"] = _count(file, "attention.sliding_window")
    widest = _count(file, "block_count") == WIDEST_GEMMA[file.architecture]
    found["query_pre_attn_scalar"] = width // heads if widest else head_dim
    return found


def _rope(file: GgufFile) -> NewFields:
    """Return ``rope_theta`` and ``rope_scaling``, which transformers reads as ``rope_parameters``."""
    theta = _digits(_number(file, "rope.freq_base", 10000.0))
    scaling = None
    factor = None
    if file.of_model("rope.scaling.factor") is not None:
        factor = _number(file, "rope.scaling.factor")
    kind = file.of_model("rope.scaling.type", "linear" if factor else "none")
    if not isinstance(kind, str):
        raise file.refuse(f"{file.architecture}.rope.scaling.type={shown(kind)}: expected none, linear or yarn")
    if kind == "linear" and factor is not None:
        scaling = {"rope_type": "linear", "factor": _digits(factor)}
    elif kind == "yarn" and factor is not None:
        original = _count(file, "rope.scaling.original_context_length", _count(file, "context_length"))
        scaling = {"rope_type": "yarn", "factor": _digits(factor), "original_max_position_embeddings": original}
    elif kind != "none":
        raise file.refuse(f"{file.architecture}.rope.scaling.type={shown(kind)}: expected none, linear or yarn")
    if ROPE_FACTORS in file.tensors:
        scaling = _llama3(file, theta)
    if file.architecture == "gemma3":
        far = {"rope_type": "default", "rope_theta": theta} | (scaling or {})
        near = {"rope_type": "default", "rope_theta": 10000.0}
        return {"rope_parameters": {"full_attention": far, "sliding_attention": near}}
    if scaling:
        return {"rope_theta": theta, "rope_scaling": scaling}
    return {"rope_theta": theta}


def _llama3(file: GgufFile, theta: float) -> NewFields:
    """Return the fields of the rotary embedding of Llama 3 for the factors of its frequencies in a file.

    ModelError if the factors are not those of Llama 3.
    """
    found = file.tensors[ROPE_FACTORS]
    if found.kind not in FLOATS:
        raise file.refuse(f"tensor {ROPE_FACTORS} is {found.kind}: expected {', '.join(FLOATS)}")
    factors = _number_tensor(found).double().flatten()
    exponents = torch.arange(len(factors), dtype=torch.float64) / len(factors)
    angles = theta**-exponents
    turns = LLAMA3["original_max_position_embeddings"] * angles / (2 * math.pi)
    low = LLAMA3["low_freq_factor"]
    high = LLAMA3["high_freq_factor"]
    factor = float(f"{float(factors.max()):.5g}")
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    wanted = 1 / ((1 - smooth) / factor + smooth)
    if not torch.allclose(factors, wanted, rtol=1e-4):
        raise file.refuse(f"tensor {ROPE_FACTORS} is none of Llama 3's, and other factors of frequencies are not read")
    return {"rope_type": "llama3", "factor": factor, **LLAMA3}


def tensor_name(file: GgufFile, name: str) -> tuple[str, str]:
    """Return the name of a tensor's module in transformers, and the parameter "weight" or "bias"."""
    module, _, param = name.rpartition(".")
    if module in OUTSIDE and param in ("weight", "bias"):
        return OUTSIDE[module], param
    found = _IN_LAYER.fullmatch(name)
    inside = {**LINEAR, **KNOWN[file.architecture][2]}
    if found is None or found[2] not in inside:
        raise file.refuse(f"tensor {shown(name)} does not belong to {file.architecture}; expected a dense text model")
    return f"model.layers.{found[1]}.{inside[found[2]]}", found[3]


def is_packed(module: str, found: GgufTensor) -> bool:
    """Return whether a tensor stays packed in blocks.  Embeddings are unpacked, because their rows are looked up."""
    return found.kind not in FLOATS and len(found.shape) == 2 and module != OUTSIDE["token_embd"]


def gguf_tensors(path: Path) -> Iterator[tuple[str, tuple[int, ...], str, Callable[[], Tensor]]]:
    """Yield the name, shape, dtype as in safetensors, and a reader function of each tensor."""
    file = read_gguf(path)
    config_of(path)
    for name, found in file.tensors.items():
        if name == ROPE_FACTORS:
            continue
        module, param = tensor_name(file, name)
        if is_packed(module, found):
            read = _reader(file, name, _raw)
            yield f"{module}.{found.kind.lower()}", tuple(found.data.shape), "U8", read
        else:
            dtype = found.kind if found.kind in FLOATS else "F32"
            read = _reader(file, name, _number_tensor)
            yield f"{module}.{param}", found.shape, dtype, read


def _reader(file: GgufFile, name: str, read: Callable[[GgufTensor], Tensor]) -> Callable[[], Tensor]:
    def call() -> Tensor:
        try:
            tensor = read(file.tensors[name])
        except NotImplementedError:
            kind = file.tensors[name].kind
            raise file.refuse(
                f"tensor {shown(name)}: the package gguf cannot unpack {kind}; use another file"
            ) from None
        if file.architecture == "llama" and (found := re.search(r"\.attn_([qk])\.", name)):
            heads = _count(file, "attention.head_count")
            if found[1] == "k":
                heads = _count(file, "attention.head_count_kv", heads)
            pairs = tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2)
            return pairs.flatten(0, 2).contiguous()
        if file.architecture.startswith("gemma") and name.endswith("norm.weight"):
            return tensor - 1
        return tensor

    return call


def _raw(found: GgufTensor) -> Tensor:
    return torch.from_numpy(found.data.copy())


def _number_tensor(found: GgufTensor) -> Tensor:
    if found.kind == "BF16":
        return torch.from_numpy(found.data.copy()).view(torch.bfloat16).view(found.shape)
    if found.kind in FLOATS:
        return torch.from_numpy(found.data.copy()).view(found.shape)
    import gguf

    kind = gguf.GGMLQuantizationType[found.kind]
    return torch.from_numpy(gguf.dequantize(found.data, kind)).view(found.shape)
