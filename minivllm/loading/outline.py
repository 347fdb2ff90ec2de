"""What the weights of a model would take, and what would multiply by them, told without loading any.

The model is built on torch's ``meta`` device with the quantizer that was chosen, as it would be on the real one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from minivllm.core.interfaces.model import ModelArch
from minivllm.core.interfaces.quantizer import Quantizer, WeightScheme
from minivllm.layers.embedding import TiedLMHead
from minivllm.layers.experts import DenseExperts
from minivllm.layers.linear import Dense
from minivllm.layers.module import Module

from .shapes import Blueprint

LAYER = re.compile(r"layers\.\d+\.")


class _Outline(Blueprint):
    """Building blocks of a quantizer's schemes that have shapes and no memory."""

    def __init__(self, dtype: str, quantizer: Quantizer, max_len: int) -> None:
        backend = SimpleNamespace(ctx=SimpleNamespace(max_len=max_len))
        super().__init__(SimpleNamespace(dtype=getattr(torch, dtype), backend=backend))  # type: ignore[arg-type]
        self.quantizer = quantizer


@dataclass
class Component:
    """The modules of one name in all layers."""

    count: int = 0
    held: int = 0  # bytes
    plain: int = 0  # that they would take unquantized
    form: str = ""  # in which they lie; of unquantized ones the dtype
    quantized: bool = False
    served: Mapping[str, str] = field(default_factory=dict)


def outline(
    arch: ModelArch, cfg: Any, quantizer: Quantizer, dtype: str, max_len: int, device: str, sm: int
) -> list[tuple[str, str]]:
    """(what, sentence) of each component of the model, of the total, and of the rows that each kernel serves on the
    device, whose compute capability ``sm`` is.  PluginError and ModelError as when the model is loaded."""
    parts = _Outline(dtype, quantizer, max_len)
    with torch.inference_mode():
        arch.build(cfg, parts)
    quantizer.finish()
    return list(_sentences(components(parts.modules, dtype, device, sm)))


def components(modules: Mapping[str, Module], dtype: str, device: str, sm: int) -> dict[str, Component]:
    """By what follows "layers.0." in the names of modules, in their order; all norms are one."""
    found: dict[str, Component] = {}
    each = getattr(torch, dtype).itemsize
    for name, module in modules.items():
        scheme = getattr(module, "scheme", None)
        quantized = isinstance(scheme, WeightScheme) and not isinstance(scheme, (Dense, DenseExperts))
        kind = "norms" if "norm" in LAYER.sub("", name) else LAYER.sub("", name)
        held = sum(t.nbytes for t in module.tensors.values())
        if not held and not isinstance(module, TiedLMHead):
            continue  # it has no weight
        one = found.setdefault(kind, Component())
        one.count += 1
        one.held += held
        if quantized:
            info = module.info  # type: ignore[attr-defined]
            bias = info.out_features * info.bias
            one.plain += (info.out_features * info.in_features + bias) * each
            one.quantized, one.form, one.served = (
                True,
                _form(module.tensors),
                scheme.served(device, sm),
            )
            if isinstance(module, TiedLMHead):
                one.form += ", beside the embedding's own"
        else:
            one.plain += held
            shared = isinstance(module, TiedLMHead)
            one.form = one.form or ("the embedding's weight" if shared else f"unquantized, {_form(module.tensors)}")
    return found


def _form(tensors: Mapping[str, Tensor]) -> str:
    """The dtypes of its tensors, each once: "uint8 and float32"."""
    return " and ".join(dict.fromkeys(str(t.dtype).removeprefix("torch.") for t in tensors.values())) or "nothing"


def _sentences(found: Mapping[str, Component]) -> Iterator[tuple[str, str]]:
    for name, one in found.items():
        many = f"{one.count} modules, " if one.count > 1 else ""
        of = f" of {_mib(one.plain)}" if one.quantized else ""
        yield name, f"{many}{_mib(one.held)}{of}: {one.form}"
    held, plain = (sum(getattr(one, key) for one in found.values()) for key in ("held", "plain"))
    yield "weights", f"{_mib(held)} of {_mib(plain)}"
    told: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for name, one in found.items():
        if one.served:
            told.setdefault(tuple(one.served.items()), []).append(name)
    for served, names in told.items():
        for rows, sentence in served:
            yield f"rows {rows}", f"{sentence} ({', '.join(names)})" if len(told) > 1 else sentence


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
