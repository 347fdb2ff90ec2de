"""Functions that read the fields of a transformers configuration object for a ``DecoderSpec``; they need no torch.

``cfg`` is that object everywhere.  A value that would change the arithmetic and is not implemented raises ModelError,
which names the field.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
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
FULL = "full_attention"
SLIDING = "sliding_attention"
# rope_type -> (required numbers of rope_parameters, optional numbers)
LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
YARN = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")
ORIGINAL = "original_max_position_embeddings"
BETA = "llama_4_scaling_beta"  # see ``query_growth``
ROPES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ("factor",)),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "llama3": (LLAMA3, ()),
    "yarn": ((ORIGINAL,), ("factor", *YARN)),
    "longrope": (("short_factor", "long_factor", ORIGINAL), ("factor", "attention_factor")),
    "proportional": ((), ("factor",)),
}
# fields of the multimodal rotary embedding; they have no effect on text, whose position is equal in all sections
MROPE = ("mrope_section", "mrope_interleaved")
HARMLESS = {"finetuned", "rope_type", "type", "rope_theta", "partial_rotary_factor", ORIGINAL, *MROPE}
LISTS = {"short_factor", "long_factor"}
FLAGS = {"truncate"}


def activation(cfg: Any, field: str = "hidden_act") -> str:
    """Return the MLP's activation by its name in ``decoder.ACTIVATIONS``.  ModelError for an unknown activation."""
    name = getattr(cfg, field)
    if not isinstance(name, str) or name not in ACTIVATION:
        raise ModelError(f"{field}={shown(name)}: expected one of {', '.join(sorted(ACTIVATION))}")
    return ACTIVATION[name]


def head_dim(cfg: Any) -> int:
    return getattr(cfg, "head_dim", None) or cfg.hidden_size // cfg.num_attention_heads


def kv_heads(cfg: Any) -> int:
    return getattr(cfg, "num_key_value_heads", None) or cfg.num_attention_heads


def attention(cfg: Any, window: int | None = None, **more: Any) -> AttnSpec:
    """Return the grouped-query attention of ``cfg``; ``more`` are further fields of ``AttnSpec``.

    ``window`` is in tokens; None means no window.  ModelError for heads that the KV heads do not divide, or of an odd
    size."""
    dim = head_dim(cfg)
    n = kv_heads(cfg)
    if n < 1 or cfg.num_attention_heads % n:
        raise ModelError(
            f"num_attention_heads={cfg.num_attention_heads}: expected a multiple of num_key_value_heads={n}"
        )
    if dim % 2 or dim < 1:
        raise ModelError(f"head_dim={dim}: expected an even number above 0, rotary pairs its elements")
    return AttnSpec(cfg.num_attention_heads, n, dim, dim, window=window, **more)


def even_share(cfg: Any, width: str, count: str, heads: int, rotary: bool = False) -> int:
    """Return the size of a head: the field ``width`` divided by ``heads``, the value of the field ``count``.

    ModelError, which names both fields, if the division is not even, or if ``rotary`` is set and a head is odd."""
    size = getattr(cfg, width)
    if size % heads or (rotary and size // heads % 2):
        raise ModelError(f"{width}={shown(size)}: expected {'an even' if rotary else 'a'} multiple of {count}={heads}")
    return size // heads


def alibi(heads: int) -> tuple[float, ...]:
    """Return the slopes of ALiBi (arXiv:2108.12409): 2 ** (-8 i / n) for head i = 1 .. n.

    If ``heads`` is no power of two, the slopes for the next lower power of two come first, then every second slope for
    the next higher power."""
    power = heads.bit_length() - 1
    below = 1 << power
    slopes = [2.0 ** (-8 * i / below) for i in range(1, below + 1)]
    above = 2 * below
    slopes += [2.0 ** (-8 * i / above) for i in range(1, above + 1, 2)]
    return tuple(slopes[:heads])


def check_plain(cfg: Any) -> None:
    """Raise ModelError for ``per_layer_config`` and for attention to later tokens, which no architecture implements."""
    if getattr(cfg, "is_heterogeneous", getattr(cfg, "per_layer_config", None)):
        raise ModelError("per_layer_config: layers that differ from each other are not implemented")
    check_causal(cfg)


def check_causal(cfg: Any) -> None:
    """Raise ModelError for attention to later tokens.  "vision" allows it within an image only, so it is accepted."""
    for name, want in (("is_causal", True), ("use_bidirectional_attention", False)):
        value = getattr(cfg, name, None)
        if value is not None and value != "vision" and bool(value) is not want:
            raise ModelError(f"{name}={value}: expected {want}, attention to later tokens is not implemented")


def windows(cfg: Any, types: Sequence[str] | None) -> list[int | None]:
    """Return the attention window of each layer in tokens; None means all earlier tokens.

    ``types`` is the config's ``layer_types``; None means full attention in all layers.  ModelError for a wrong
    number of entries, an unknown type, or sliding attention without a valid ``sliding_window``."""
    layers = cfg.num_hidden_layers
    window = getattr(cfg, "sliding_window", None)
    types = _names_of_types(types) if types is not None else [FULL] * layers
    if len(types) != layers:
        raise ModelError(f"layer_types has {len(types)} entries: expected num_hidden_layers={layers}")
    wrong = sorted(set(types) - {FULL, SLIDING})
    if wrong:
        raise ModelError(f"layer_types has {shown(wrong[0])}: expected {FULL!r} or {SLIDING!r}")
    if SLIDING in types and (not isinstance(window, int) or window < 1):
        raise ModelError(
            f"sliding_window={shown(window)} while layer_types has {SLIDING}: expected a whole number >= 1"
        )
    return [window if kind == SLIDING else None for kind in types]


def layer_types(cfg: Any, recurrent: str) -> list[str]:
    """Return ``layer_types`` of a model whose layers have full attention, or the type ``recurrent``.

    ModelError for a wrong number of entries, an unknown type, and a model without attention."""
    types = _names_of_types(cfg.layer_types)
    layers = cfg.num_hidden_layers
    if len(types) != layers:
        raise ModelError(f"layer_types has {len(types)} entries: expected num_hidden_layers={layers}")
    wrong = sorted(set(types) - {FULL, recurrent})
    if wrong:
        raise ModelError(f"layer_types has {shown(wrong[0])}: expected {FULL!r} or {recurrent!r}")
    if FULL not in types:
        raise ModelError(f"layer_types has no {FULL!r}: expected at least one layer with attention")
    return types


def _names_of_types(found: Any) -> list[str]:
    """Return the value of ``layer_types`` as a list.  ModelError if it is no list of names."""
    if not isinstance(found, list | tuple) or not all(isinstance(kind, str) for kind in found):
        raise ModelError(f"layer_types={shown(found)}: expected a list with the name of each layer's type")
    return list(found)


def all_alike(cfg: Any) -> list[str]:
    """Return ``layer_types`` for an architecture whose layers all slide if the config has a window, or are all full.

    ModelError if the config's own ``layer_types`` differ from that."""
    kind = SLIDING if getattr(cfg, "sliding_window", None) else FULL
    types = getattr(cfg, "layer_types", None)
    if types is not None and set(types) != {kind}:
        raise ModelError(f"layer_types={shown(types)}: expected {kind} for all layers, this architecture has one kind")
    return [kind] * cfg.num_hidden_layers


def expert_key(cfg: Any) -> str:
    """Return the field that has the number of experts: the first of ``EXPERT_KEYS`` that the config's class defines."""
    known = getattr(type(cfg), "__dataclass_fields__", None) or vars(cfg)
    return next((key for key in EXPERT_KEYS if key in known), EXPERT_KEYS[0])


def experts(cfg: Any, inner: int, router: Router, **more: Any) -> Experts:
    """Return the mixture of experts of ``cfg``; each expert is ``inner`` units wide.

    ``more`` are further fields of ``Experts``.  ModelError for a number of experts, of chosen experts or of units that
    is not a whole number above 0, and for more chosen experts than experts."""
    name = expert_key(cfg)
    count = getattr(cfg, name)
    chosen = cfg.num_experts_per_tok
    for key, value in ((name, count), ("num_experts_per_tok", chosen), ("the width of an expert", inner)):
        if type(value) is not int or value < 1:
            raise ModelError(f"{key}={shown(value)}: expected a whole number >= 1, the model has layers of experts")
    if chosen > count:
        raise ModelError(f"num_experts_per_tok={chosen}: expected between 1 and {name}={count}")
    if "activation" not in more:
        more["activation"] = activation(cfg)
    return Experts(count, chosen, inner, **more, router=router)


def sparse_layers(cfg: Any) -> list[bool]:
    """Return for each layer whether it has experts: every ``decoder_sparse_step``-th but for ``mlp_only_layers``.

    All are False if ``num_experts`` is 0.  ModelError for a step that is not a whole number above 0."""
    step = cfg.decoder_sparse_step
    dense = set(cfg.mlp_only_layers or ())
    if not cfg.num_experts:
        return [False] * cfg.num_hidden_layers
    if type(step) is not int or step < 1:
        raise ModelError(f"decoder_sparse_step={shown(step)}: expected a whole number >= 1")
    layers = range(cfg.num_hidden_layers)
    return [i not in dense and (i + 1) % step == 0 for i in layers]


def rope(cfg: Any, layer_type: str | None = None, partial: bool = False, ignored: Collection[str] = ()) -> Rope:
    """Return the rotary embedding of the layers of ``layer_type``.

    It is read from ``rope_parameters``, which is one table or one table for each layer type, or from ``rope_scaling``
    and ``rope_theta`` of an older config.  ``partial`` means that the architecture may rotate only the part of a head
    that ``partial_rotary_factor`` sets.  ``ignored`` are entries that the architecture reads itself, or that have no
    effect.  ModelError for a type that is not implemented, a missing number, or an unknown
    entry.
    """
    found = getattr(cfg, "rope_parameters", None) or getattr(cfg, "rope_scaling", None) or {}
    nested = layer_type in found
    params = dict(found.get(layer_type) or {}) if nested else dict(found)
    if tables := [kind for kind in (FULL, SLIDING) if kind in params]:
        wanted = "one table for all layers" if layer_type is None else "rope_parameters with one for each layer type"
        raise ModelError(f"rope_scaling or rope_parameters has tables for {', '.join(tables)}; expected {wanted}")
    kind = params.get("rope_type") or params.get("type") or "default"
    if kind not in ROPES:
        raise ModelError(f"rope_type={shown(kind)}: expected one of {', '.join(sorted(ROPES))}")
    theta = params.get("rope_theta") or getattr(cfg, "rope_theta", None)
    params["rope_theta"] = 10000.0 if theta is None else theta
    if ORIGINAL in ROPES[kind][0]:
        params[ORIGINAL] = _trained_length(cfg, params, nested)
    if nested:
        # transformers reads ``truncate`` from the outer table only, and ignores a nested one
        params.pop("truncate", None)
    needs, takes = ROPES[kind]
    needed = ("rope_theta", *needs)
    for name in (*needed, *takes):
        value = params.get(name)
        if name in needed or value is not None:
            _check_number(name, value, kind)
    if kind == "llama3" and params["high_freq_factor"] <= params["low_freq_factor"]:
        raise ModelError("rope_parameters: expected high_freq_factor above low_freq_factor")
    known = HARMLESS | set(needs) | set(takes) | set(ignored)
    extra = sorted(str(k) for k, v in params.items() if v is not None and k not in known)
    if extra:
        raise ModelError(f"rope_parameters: {', '.join(extra)} not known for rope_type={shown(kind)}; remove it")
    size = head_dim(cfg)
    own = getattr(cfg, "partial_rotary_factor", None)
    share = params.get("partial_rotary_factor") or own or 1.0
    if share != 1 and not partial and kind != "proportional":
        raise ModelError(f"partial_rotary_factor={shown(share)}: expected 1, this architecture rotates whole heads")
    turned = size if kind == "proportional" else int(size * share)
    if turned % 2 or not 0 < turned <= size:
        what = f"head_dim={size} (of num_attention_heads={cfg.num_attention_heads})"
        raise ModelError(f"partial_rotary_factor={shown(share)}: expected an even part of {what}, got {turned}")
    theta = float(params["rope_theta"])
    numbers, switch = _numbers(cfg, kind, params, turned, share)
    return Rope(turned, theta, kind, numbers, switch)


def query_growth(cfg: Any) -> tuple[float, int] | None:
    """Return ``Rope.query_growth`` of an architecture whose ``rope_parameters`` have ``llama_4_scaling_beta``.

    None means that the factor is always 1.  ModelError for a missing or invalid number."""
    found = getattr(cfg, "rope_parameters", None) or {}
    beta = found.get(BETA)
    trained = found.get(ORIGINAL)
    if not isinstance(beta, int | float) or isinstance(beta, bool) or not 0 <= beta < math.inf:
        raise ModelError(f"rope_parameters: {BETA}={shown(beta)}: expected a number >= 0")
    if not isinstance(trained, int) or isinstance(trained, bool) or trained < 1:
        raise ModelError(f"rope_parameters: {ORIGINAL}={shown(trained)}: expected a whole number >= 1")
    return (float(beta), trained) if beta else None


def _trained_length(cfg: Any, params: Mapping[str, Any], nested: bool) -> Any:
    """Return the value of ``original_max_position_embeddings`` with the precedence of transformers.

    A table for one layer type (``nested``) is read first.  A table for all layers is read after the field of the
    config.  ``max_position_embeddings`` is the last choice.
    """
    own = getattr(cfg, ORIGINAL, None)
    table = params.get(ORIGINAL)
    most = getattr(cfg, "max_position_embeddings", None)
    return (table or most) if nested else (own or table or most)


def _check_number(name: str, value: Any, kind: str) -> None:
    if name in FLAGS and isinstance(value, bool):
        return
    if name in LISTS:
        numbers = value if isinstance(value, list) else [None]
        want = "a list of positive numbers"
    else:
        numbers = [value]
        want = "a positive number"
    if not all(isinstance(v, (int, float)) and not isinstance(v, bool) and 0 < v < math.inf for v in numbers):
        raise ModelError(f"rope_parameters: {name}={shown(value)} for rope_type={shown(kind)}: expected {want}")


def _numbers(
    cfg: Any, kind: str, params: Mapping[str, Any], dim: int, share: float
) -> tuple[tuple[tuple[str, Any], ...], int | None]:
    """Return the fields ``numbers`` and ``switch`` of a ``Rope``: its scaling numbers, and the length in tokens
    above which other tables apply (None means that the tables never change)."""
    needs, takes = ROPES[kind]
    found = {name: params[name] for name in (*needs, *takes) if params.get(name) is not None}
    switch = None
    if kind == "proportional":
        found["turning"] = int(share * dim // 2)  # number of element pairs of a head that are rotated
    if kind == "dynamic":
        switch = found["trained"] = cfg.max_position_embeddings
    if kind == "longrope":
        for name in sorted(LISTS):
            if len(found[name]) != dim // 2:
                raise ModelError(f"rope_parameters: {name} has {len(found[name])} numbers: expected {dim // 2}")
            found[name] = tuple(found[name])
        switch = int(found[ORIGINAL])
    if kind in ("longrope", "yarn"):
        found.setdefault("factor", cfg.max_position_embeddings / found[ORIGINAL])
    return tuple(found.items()), switch
