"""A model of transformers without memory for its weights, and the checks that refuse a model."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as hf_logging

from minivllm.device.layers.fields import check_causal
from minivllm.errors import ModelError, shown
from minivllm.registration.spec import Spec

from .. import spec
from . import experts
from .attend import NAME, register

INSTEAD = "use a model that attends to all tokens of a sequence with softmax, or a family of minivllm's"
FACT = "architecture"
LENGTH_ROPES = ("dynamic", "longrope")
# a function of transformers that reads token ids on the host in each step
WARNS = "warn_if_padding_and_no_attention_mask"
LAYER_TYPES = {"full_attention", "sliding_attention", "attention"}


def config_of(cfg: Any) -> Any:
    """Return the configuration object of transformers, also for a configuration that was read without transformers."""
    return cfg.made() if hasattr(type(cfg), "made") else cfg


def class_of(cfg: Any) -> type:
    """Return transformers' class of the model for a configuration.

    Raise ModelError if transformers has no such class, or if the class cannot run here.
    """
    named = getattr(cfg, "architectures", None) or []
    kind = str(getattr(cfg, "model_type", "") or "")
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
    classes = [known] if isinstance(known, str) else list(known or ())
    name = named[0] if named else (classes or [None])[0]
    if name is None or name not in classes:
        raise ModelError(_unknown(name, kind, classes, bool(getattr(cfg, "auto_map", None))))
    import transformers

    cls = getattr(transformers, name, None)
    if cls is None:
        raise ModelError(_unknown(name, kind, [], False))
    _check_class(cls)
    return cls


def _unknown(name: Any, kind: str, classes: list[str], has_code: bool) -> str:
    import transformers

    reason = f"no plug-in serves the architecture {shown(name)}, and transformers {transformers.__version__} has no "
    reason += "causal language model of that name"
    if has_code:
        reason += ": its code is in its own directory (auto_map), which is never run"
    elif classes:
        reason += f": expected {' or '.join(classes)} for model_type={shown(kind)}"
    named = sorted(one for found in vars(spec).values() if isinstance(found, Spec) for one in found.listed(FACT))
    return f"{reason}. Available: {', '.join(named)}, and transformers' own"


def _check_class(cls: Any) -> None:
    reason = f"transformers' {cls.__name__} cannot run with the engine's attention and cache: "
    if getattr(cls, "_is_stateful", False):
        raise ModelError(f"{reason}it has a state besides keys and values (a state space, linear attention); {INSTEAD}")


def own_attention(cls: Any) -> str:
    """Return the reason for refusing a class that could not be traced and whose attention cannot be exchanged, else "".

    A class may lack the declaration that its attention can be exchanged, and still be traced, such as those of StableLM
    and BioGPT.
    """
    compatible = getattr(cls, "is_backend_compatible", None)
    if compatible is not None and compatible():
        return ""
    reason = f"transformers' {cls.__name__} cannot run with the engine's attention and cache: "
    return f"{reason}its attention is its own, not one that can be exchanged; {INSTEAD}"


def check_config(cfg: Any) -> None:
    """Raise ModelError, which names the field, for attention that the engine does not implement."""
    if getattr(cfg, "is_encoder_decoder", False):
        raise ModelError(f"is_encoder_decoder=true: the engine runs no encoders; {INSTEAD}")
    if getattr(cfg, "add_cross_attention", False):
        raise ModelError(f"add_cross_attention=true: attention to another sequence is not implemented; {INSTEAD}")
    check_causal(cfg)
    strange = sorted({str(kind) for kind in getattr(cfg, "layer_types", None) or ()} - LAYER_TYPES)
    if strange:
        raise ModelError(
            f"layer_types has {shown(strange[0])}: expected full_attention or sliding_attention; {INSTEAD}"
        )
    for params in _ropes(getattr(cfg, "rope_parameters", None) or getattr(cfg, "rope_scaling", None) or {}):
        kind = params.get("rope_type") or params.get("type")
        if kind in LENGTH_ROPES:
            raise ModelError(
                f"rope_type={shown(kind)}: transformers chooses its frequencies by the longest sequence of a batch, so "
                "that a request would depend on the others; use another rope_type, or a family of minivllm's"
            )


def _ropes(params: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield params
    for inner in params.values():
        if isinstance(inner, Mapping):
            yield from _ropes(inner)


def blank_model(cls: Any, cfg: Any, dtype: torch.dtype) -> nn.Module:
    """Return the model on the meta device, with the engine's attention and ``experts.multiply``.

    ModelError if it cannot be built from this config, or has a convolution or RNN, whose state the engine does not
    keep.
    """
    cfg = copy.deepcopy(cfg)
    for name in ("use_cache", "output_attentions", "output_hidden_states", "output_router_logits"):
        if getattr(cfg, name, None):
            setattr(cfg, name, False)
    register()
    experts.register()
    try:
        with quiet(), torch.device("meta"):
            model = cls._from_config(cfg, dtype=dtype, attn_implementation=NAME, experts_implementation=NAME)
    except Exception as exc:  # transformers checks fields with errors of many types
        raise ModelError(f"transformers' {cls.__name__} cannot be built: {one_line(exc)}") from exc
    model.eval().requires_grad_(False)
    for name, module in model.named_modules():
        if hasattr(module, WARNS):
            setattr(module, WARNS, _no_warning)
        if isinstance(module, (nn.modules.conv._ConvNd, nn.RNNBase)):
            raise ModelError(
                f"transformers' {cls.__name__}: {name} is a {type(module).__name__}, whose state between steps the "
                f"engine does not keep; {INSTEAD}"
            )
    return model


def _no_warning(*args: Any, **kwargs: Any) -> None:
    pass


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress warnings of transformers about a model that is built and not loaded, inside this context."""
    level = hf_logging.get_verbosity()
    hf_logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)


def one_line(exc: BaseException) -> str:
    text = " ".join(str(exc).split()) or type(exc).__name__
    return text if len(text) <= 200 else text[:197] + "..."
