"""Compute the memory of a model's weights, and the kernels that multiply by them, without loading a weight.

The model is built on torch's ``meta`` device with the chosen quantizer, as on the real device.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from minivllm.core.interfaces.model import ModelArch
from minivllm.core.interfaces.quantizer import Quantizer, WeightScheme
from minivllm.device.layers.embedding import Embedding, TiedLMHead
from minivllm.device.layers.expert_linear import DenseExperts
from minivllm.device.layers.linear import CAPTURED, Dense, stored_by
from minivllm.device.layers.module import Module
from minivllm.device.layers.module_parts import Found

from .shapes import Blueprint, blueprint, names_of
from .weights import find_targets, of_one_form

LAYER = re.compile(r"layers\.\d+\.")


class _Outline(Blueprint):
    """Building blocks of a model with quantized weights that have shapes and no memory."""

    def __init__(self, dtype: str, quantizer: Quantizer, max_len: int) -> None:
        backend = SimpleNamespace(ctx=SimpleNamespace(max_len=max_len))
        super().__init__(SimpleNamespace(dtype=getattr(torch, dtype), backend=backend))  # type: ignore[arg-type]
        self.quantizer = quantizer


@dataclass
class Component:
    """The modules of the same kind in all layers of a model, such as all "mlp.down", with their sizes and formats."""

    count: int = 0
    held: int = 0  # bytes of the modules as they are stored
    plain: int = 0  # bytes of the modules without quantization
    # description of a module's stored dtypes -> number of modules with it
    forms: Counter[str] = field(default_factory=Counter)
    quantized: bool = False
    # description of stored dtypes -> range of numbers of rows -> name of the kernel that multiplies
    served: dict[str, Mapping[str, str]] = field(default_factory=dict)


def outline(
    arch: ModelArch, cfg: Any, quantizer: Quantizer, dtype: str, max_len: int, device: str, sm: int
) -> list[tuple[str, str]]:
    """Return (name, sentence) pairs that describe the model: the memory of each component and of all weights, and the
    kernel for each range of rows.

    ``sm`` is the compute capability of the device.  Raise PluginError and ModelError as when the model is loaded.
    """
    parts = _Outline(dtype, quantizer, max_len)
    plan = blueprint(arch, cfg, parts)
    if plan is not None:
        rules = of_one_form(arch.weights(cfg), ())
        targets = find_targets(rules, plan)
        parts.found = Found(None, names_of(arch, cfg, plan, targets))
    with torch.inference_mode():
        arch.build(cfg, parts)
    quantizer.finish()
    found = components(parts.modules, dtype, device, sm)
    if not all(map(_read_natively, parts.modules.values())):
        for one in found.values():
            one.served = {form: _without(CAPTURED, served) for form, served in one.served.items()}
    return list(_sentences(found))


def _read_natively(module: Module) -> bool:
    """Return whether native CPU code can read a module's weights."""
    scheme = getattr(module, "scheme", None)
    return scheme is None or (not isinstance(module, Embedding) and stored_by(scheme) is not None)


def _without(key: str, served: Mapping[str, str]) -> Mapping[str, str]:
    return {rows: how for rows, how in served.items() if rows != key}


def components(modules: Mapping[str, Module], dtype: str, device: str, sm: int) -> dict[str, Component]:
    """Return the components of a model (modules of the same kind in all layers) by name, in the order of its modules.

    The name of a component is the part of a module's name after "layers.0.".  All norms are one component.
    """
    found: dict[str, Component] = {}
    each = getattr(torch, dtype).itemsize
    for name, module in modules.items():
        scheme = getattr(module, "scheme", None)
        kind = "norms" if "norm" in LAYER.sub("", name) else LAYER.sub("", name)
        held = sum(t.nbytes for t in module.tensors.values())
        if not held and not isinstance(module, TiedLMHead):
            continue  # the module stores no weight of its own
        one = found.setdefault(kind, Component())
        one.count += 1
        one.held += held
        if isinstance(scheme, WeightScheme) and not isinstance(scheme, (Dense, DenseExperts)):
            info = module.info  # type: ignore[attr-defined]
            bias = info.out_features * info.bias
            one.plain += (info.out_features * info.in_features + bias) * each
            # name of the rule by which the quantizer chose this scheme; only some quantizers have one
            rule = getattr(scheme, "rule", "")
            one.quantized = True
            form = _form(module.tensors) + (f", as {rule}" if rule else "")
            one.served[form] = scheme.served(device, sm)
            one.forms[f"{form}, beside the embedding's own" if isinstance(module, TiedLMHead) else form] += 1
        else:
            one.plain += held
            shared = isinstance(module, TiedLMHead)
            one.forms["the embedding's weight" if shared else f"unquantized, {_form(module.tensors)}"] += 1
    return found


def _form(tensors: Mapping[str, Tensor]) -> str:
    """Return the distinct dtypes of tensors as a text such as "uint8 and float32"."""
    return " and ".join(dict.fromkeys(str(t.dtype).removeprefix("torch.") for t in tensors.values())) or "nothing"


def _sentences(found: Mapping[str, Component]) -> Iterator[tuple[str, str]]:
    for name, one in found.items():
        many = f"{one.count} modules, " if one.count > 1 else ""
        of = f" of {_mib(one.plain)}" if one.quantized else ""
        forms = [f"{form} ({n})" if len(one.forms) > 1 else form for form, n in one.forms.items()]
        yield name, f"{many}{_mib(one.held)}{of}: {'; '.join(forms)}"
    held = sum(one.held for one in found.values())
    plain = sum(one.plain for one in found.values())
    yield "weights", f"{_mib(held)} of {_mib(plain)}"
    by_rows: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for name, one in found.items():
        for form, served in one.served.items():
            if not served:
                continue
            label = f"{name} of {form}" if len(one.served) > 1 else name
            by_rows.setdefault(tuple(served.items()), []).append(label)
    for pairs, names in by_rows.items():
        label = f" ({', '.join(names)})" if len(by_rows) > 1 else ""
        for rows, sentence in pairs:
            yield f"rows {rows}", sentence + label


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
