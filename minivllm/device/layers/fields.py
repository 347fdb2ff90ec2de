"""What transformers' configuration objects say, read for ``DecoderSpec``; no torch.

A value that changes the arithmetic and is not served raises ModelError, which names the field.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from minivllm.core.interfaces.attention import AttnSpec
from minivllm.core.interfaces.decoder import Experts, Rope, Router
from minivllm.errors import ModelError, shown

ACTIVATION = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
EXPERT_KEYS = ("num_experts", "num_local_experts")
FULL, SLIDING = "full_attention", "sliding_attention"
# the numbers of each rope_type: those it must have, those it may have
LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
YARN = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")
ORIGINAL = "original_max_position_embeddings"
ROPES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ("factor",)),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "llama3": (LLAMA3, ()),
    "yarn": ((ORIGINAL,), ("factor", *YARN)),
    "longrope": (("short_factor", "long_factor", ORIGINAL), ("factor", "attention_factor")),
    "proportional": ((), ("factor",)),
}
# sections of the multimodal rotary embedding, whose positions are equal on text
MROPE = ("mrope_section", "mrope_interleaved")
HARMLESS = {"finetuned", "rope_type", "type", "rope_theta", "partial_rotary_factor", ORIGINAL, *MROPE}
LISTS, FLAGS = {"short_factor", "long_factor"}, {"truncate"}


def activation(cfg: Any, field: str = "hidden_act") -> str:
    """Of the MLP, as ``MLP.activation`` calls it."""
    name = getattr(cfg, field)
    if not isinstance(name, str) or name not in ACTIVATION:
        raise ModelError(f"{field}={shown(name)}: want one of {', '.join(sorted(ACTIVATION))}")
    return ACTIVATION[name]


def head_dim(cfg: Any) -> int:
    return getattr(cfg, "head_dim", None) or cfg.hidden_size // cfg.num_attention_heads


def kv_heads(cfg: Any) -> int:
    return getattr(cfg, "num_key_value_heads", None) or cfg.num_attention_heads


def attention(cfg: Any, window: int | None = None, **more: Any) -> AttnSpec:
    """Grouped-query attention of these heads; ``more`` are fields of ``AttnSpec``."""
    dim, n = head_dim(cfg), kv_heads(cfg)
    if n < 1 or cfg.num_attention_heads % n:
        raise ModelError(f"num_attention_heads={cfg.num_attention_heads}: want a multiple of num_key_value_heads={n}")
    if dim % 2 or dim < 1:
        raise ModelError(f"head_dim={dim}: want an even number above 0, rotary pairs its elements")
    return AttnSpec(cfg.num_attention_heads, n, dim, dim, window=window, **more)


def even_share(cfg: Any, width: str, count: str, heads: int, rotary: bool = False) -> int:
    """Return the elements of a head, where ``heads`` of them share the field ``width``.

    ModelError, naming ``width`` and ``count``, where they do not, or where ``rotary`` has no pairs to turn."""
    size = getattr(cfg, width)
    if size % heads or (rotary and size // heads % 2):
        raise ModelError(f"{width}={shown(size)}: want {'an even' if rotary else 'a'} multiple of {count}={heads}")
    return size // heads


def alibi(heads: int) -> tuple[float, ...]:
    """Return the slopes of ALiBi (arXiv:2108.12409): 2 ** (-8 i / n) for head i = 1 .. n.

    Where ``heads`` is no power of two, those of the power below come first, then every other one of the power above."""
    below = 1 << heads.bit_length() - 1
    slopes = [2.0 ** (-8 * i / below) for i in range(1, below + 1)]
    slopes += [2.0 ** (-8 * i / (2 * below)) for i in range(1, 2 * below + 1, 2)]
    return tuple(slopes[:heads])


def check_plain(cfg: Any) -> None:
    """Refuse layers that differ by ``per_layer_config`` and attention to later tokens (ModelError): no architecture
    here serves them."""
    if getattr(cfg, "is_heterogeneous", getattr(cfg, "per_layer_config", None)):
        raise ModelError("per_layer_config: layers that differ from each other are not implemented")
    check_causal(cfg)


def check_causal(cfg: Any) -> None:
    """Refuse attention to later tokens (ModelError).  "vision" means among the tokens of an image: text is causal."""
    for name, want in (("is_causal", True), ("use_bidirectional_attention", False)):
        value = getattr(cfg, name, None)
        if value is not None and value != "vision" and bool(value) is not want:
            raise ModelError(f"{name}={value}: want {want}, attention to later tokens is not implemented")


def windows(cfg: Any, types: Sequence[str] | None) -> list[int | None]:
    """Attention window of each layer (None: all that came before), by its type in ``layer_types``."""
    layers, window = cfg.num_hidden_layers, getattr(cfg, "sliding_window", None)
    types = list(types) if types is not None else [FULL] * layers
    if len(types) != layers:
        raise ModelError(f"layer_types has {len(types)} entries: want num_hidden_layers={layers}")
    wrong = sorted(set(types) - {FULL, SLIDING})
    if wrong:
        raise ModelError(f"layer_types has {shown(wrong[0])}: want {FULL!r} or {SLIDING!r}")
    if SLIDING in types and (not isinstance(window, int) or window < 1):
        raise ModelError(f"sliding_window={shown(window)} while layer_types has {SLIDING}: want a whole number >= 1")
    return [window if kind == SLIDING else None for kind in types]


def all_alike(cfg: Any) -> list[str]:
    """``layer_types`` of an architecture in which all layers have the window, if there is one."""
    kind = SLIDING if getattr(cfg, "sliding_window", None) else FULL
    types = getattr(cfg, "layer_types", None)
    if types is not None and set(types) != {kind}:
        raise ModelError(f"layer_types={shown(types)}: want {kind} for all layers, this architecture has one kind")
    return [kind] * cfg.num_hidden_layers


def expert_key(cfg: Any) -> str:
    """What config.json calls the number of experts; transformers' objects know some by both names."""
    known = getattr(type(cfg), "__dataclass_fields__", None) or vars(cfg)
    return next((key for key in EXPERT_KEYS if key in known), EXPERT_KEYS[0])


def experts(cfg: Any, inner: int, router: Router, **more: Any) -> Experts:
    """Return a mixture of ``num_experts`` (``num_local_experts``) of ``inner`` units; ``more`` are fields of
    ``Experts``.  ModelError for a number that no mixture has."""
    name = expert_key(cfg)
    count, chosen = getattr(cfg, name), cfg.num_experts_per_tok
    for key, value in ((name, count), ("num_experts_per_tok", chosen), ("the width of an expert", inner)):
        if type(value) is not int or value < 1:
            raise ModelError(f"{key}={shown(value)}: want a whole number >= 1, the model has layers of experts")
    if chosen > count:
        raise ModelError(f"num_experts_per_tok={chosen}: want between 1 and {name}={count}")
    return Experts(count, chosen, inner, **{"activation": activation(cfg), **more}, router=router)


def sparse_layers(cfg: Any) -> list[bool]:
    """Return which layers have experts, by ``decoder_sparse_step`` and ``mlp_only_layers``; none without experts."""
    step, dense = cfg.decoder_sparse_step, set(cfg.mlp_only_layers or ())
    if not cfg.num_experts:
        return [False] * cfg.num_hidden_layers
    if type(step) is not int or step < 1:
        raise ModelError(f"decoder_sparse_step={shown(step)}: want a whole number >= 1")
    layers = range(cfg.num_hidden_layers)
    return [i not in dense and (i + 1) % step == 0 for i in layers]


def rope(cfg: Any, layer_type: str | None = None, partial: bool = False) -> Rope:
    """Return the rotary embedding of a layer, from transformers' ``rope_parameters`` (one table, or one for each layer
    type), or an older config's ``rope_scaling`` and ``rope_theta``.  ``partial``: the architecture rotates the part of
    a head that ``partial_rotary_factor`` gives.  ModelError for a type that is not implemented or lacks a number."""
    found = getattr(cfg, "rope_parameters", None) or getattr(cfg, "rope_scaling", None) or {}
    nested = layer_type in found
    params = dict(found.get(layer_type) or {}) if nested else dict(found)
    if FULL in params or SLIDING in params:
        raise ModelError("rope_parameters: one for each type of layer, which this architecture has no use for")
    kind = params.get("rope_type") or params.get("type") or "default"
    if kind not in ROPES:
        raise ModelError(f"rope_type={shown(kind)}: want one of {', '.join(sorted(ROPES))}")
    theta = params.get("rope_theta") or getattr(cfg, "rope_theta", None)
    params["rope_theta"] = 10000.0 if theta is None else theta
    if ORIGINAL in ROPES[kind][0]:
        params[ORIGINAL] = _trained_length(cfg, params, nested)
    if nested:
        params.pop("truncate", None)  # transformers reads it from the outer table, where no layer type has it
    needs, takes = ROPES[kind]
    for name in ("rope_theta", *needs, *takes):
        if name in needs or name == "rope_theta" or params.get(name) is not None:
            _check_number(name, params.get(name), kind)
    if kind == "llama3" and params["high_freq_factor"] <= params["low_freq_factor"]:
        raise ModelError("rope_parameters: want high_freq_factor above low_freq_factor")
    known = HARMLESS | set(needs) | set(takes)
    extra = sorted(str(k) for k, v in params.items() if v is not None and k not in known)
    if extra:
        raise ModelError(f"rope_parameters: {', '.join(extra)} not known for rope_type={shown(kind)}; remove it")
    size = head_dim(cfg)
    share = params.get("partial_rotary_factor") or getattr(cfg, "partial_rotary_factor", None) or 1.0
    if share != 1 and not partial and kind != "proportional":
        raise ModelError(f"partial_rotary_factor={shown(share)}: want 1, this architecture rotates whole heads")
    turned = size if kind == "proportional" else int(size * share)
    if turned % 2 or not 0 < turned <= size:
        what = f"head_dim={size} (of num_attention_heads={cfg.num_attention_heads})"
        raise ModelError(f"partial_rotary_factor={shown(share)}: want an even part of {what}, got {turned}")
    return Rope(turned, float(params["rope_theta"]), kind, *_numbers(cfg, kind, params, turned, share))


def _trained_length(cfg: Any, params: Mapping[str, Any], nested: bool) -> Any:
    """Return ``original_max_position_embeddings``: as transformers does, the config's own before that of a table for
    all layers, then ``max_position_embeddings``."""
    own, table = getattr(cfg, ORIGINAL, None), params.get(ORIGINAL)
    most = getattr(cfg, "max_position_embeddings", None)
    return (table or most) if nested else (own or table or most)


def _check_number(name: str, value: Any, kind: str) -> None:
    if name in FLAGS and isinstance(value, bool):
        return
    if name in LISTS:
        numbers, want = value if isinstance(value, list) else [None], "a list of positive numbers"
    else:
        numbers, want = [value], "a positive number"
    if not all(isinstance(v, (int, float)) and not isinstance(v, bool) and 0 < v < math.inf for v in numbers):
        raise ModelError(f"rope_parameters: {name}={shown(value)} for rope_type={shown(kind)}: want {want}")


def _numbers(
    cfg: Any, kind: str, params: Mapping[str, Any], dim: int, share: float
) -> tuple[tuple[tuple[str, Any], ...], int | None]:
    """``Rope.numbers`` and ``Rope.switch``."""
    needs, takes = ROPES[kind]
    found = {name: params[name] for name in (*needs, *takes) if params.get(name) is not None}
    switch = None
    if kind == "proportional":
        found["turning"] = int(share * dim // 2)  # pairs that turn; the others stand still
    if kind == "dynamic":
        switch = found["trained"] = cfg.max_position_embeddings
    if kind == "longrope":
        for name in sorted(LISTS):
            if len(found[name]) != dim // 2:
                raise ModelError(f"rope_parameters: {name} has {len(found[name])} numbers: want {dim // 2}")
            found[name] = tuple(found[name])
        switch = int(found[ORIGINAL])
    if kind in ("longrope", "yarn"):
        found.setdefault("factor", cfg.max_position_embeddings / found[ORIGINAL])
    return tuple(found.items()), switch
