"""Compare the shapes of a configuration with those of the checkpoint, before memory is allocated.

A model is built once on torch's ``meta`` device, where tensors have shapes and no memory.  Its tensors are compared
with the headers of the safetensors files, and with the free memory.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minivllm.core.interfaces.decoder import Rope
from minivllm.core.interfaces.model import ModelArch, Rule
from minivllm.core.interfaces.quantizer import ModuleInfo, PartSource
from minivllm.device.layers.embedding import Embedding
from minivllm.device.layers.fields import expert_key
from minivllm.device.layers.module import Module
from minivllm.device.layers.module_parts import Found
from minivllm.device.layers.norm import LayerNorm, RMSNorm
from minivllm.device.layers.parts import ModelParts
from minivllm.errors import ModelError, ResourceError, shown

from .conversion import by_rules, conversion_of, text_names
from .tensor_files import Header, checkpoint_headers
from .weights import (
    PLAIN,
    Target,
    find_targets,
    of_one_form,
    own_names,
    roots_of,
    rule_pattern,
    whole_name,
)

KEYS = (
    ("vocab_size",), ("hidden_size",), ("intermediate_size",), ("num_attention_heads", "head_dim"),
    ("num_key_value_heads", "head_dim"), ("head_dim",), ("num_attention_heads",), ("num_key_value_heads",),
)  # fmt: skip
LEAST_BYTES = 1 / 8  # least bytes per quantized weight, because every format takes at least a bit


class _Plain:
    """Leaves every weight as the checkpoint has it."""

    def scheme(self, info: ModuleInfo) -> None:
        return None


class Blueprint(ModelParts):
    """Building blocks of a model on the meta device: they have shapes but no memory, so their bytes can be counted."""

    def __init__(self, parts: ModelParts) -> None:
        super().__init__("meta", parts.dtype, _Plain(), parts.backend)  # type: ignore[arg-type]
        self.tables = 0  # bytes of the rotary tables of all layers

    def rotary(self, rope: Rope, twice: bool = False) -> tuple[Tensor, Tensor]:
        key = (rope, twice)
        if key not in self._tables:
            rows = self.backend.ctx.max_len + 1
            if twice:
                rows *= 2
            table = torch.empty(rows, rope.dim, device="meta")
            self.tables += 2 * table.numel() * table.element_size()
            self._tables[key] = table, table
        return self._tables[key]

    def bytes(self, quantized: bool) -> int:
        """Return the least number of bytes of the weights and tables.

        With ``quantized`` each number of a module, except norms, takes LEAST_BYTES.
        """
        total = self.tables
        for module in self.modules.values():
            matrix = quantized and not isinstance(module, (LayerNorm, RMSNorm))
            for tensor in module.tensors.values():
                each = LEAST_BYTES if matrix else tensor.element_size()
                total += int(tensor.numel() * each)
        return total


def blueprint(arch: ModelArch, cfg: Any, parts: ModelParts) -> Blueprint | None:
    """Build the model without memory, and return its blueprint.

    None means that the architecture computes with values while it is built, so its tensors are checked only when they
    are loaded.  ModelError for a config value that is not implemented.
    """
    made = Blueprint(parts)
    try:
        arch.build(cfg, made)
    except ModelError:
        raise
    except Exception:  # tensors on the meta device have no values; the real build reports other errors
        return None
    return made


def check(
    folder: str, arch: ModelArch, cfg: Any, parts: ModelParts, load_format: str, quantized: bool, free: int
) -> Found:
    """Check a checkpoint's tensors against config.json, and return the tensors of each module by its parts.

    ``quantized`` means that weights become smaller while they are loaded, by an unknown factor.  ``free`` is in bytes.
    The result has no sources for random weights, and for an architecture that computes with values while it is built.
    Raise ModelError, which names the key of config.json that the tensors contradict, and ResourceError for weights that
    take more than ``free`` bytes.
    """
    read = load_format != "dummy"
    headers: Mapping[str, Header] = {}
    if read:
        headers = checkpoint_headers(Path(folder), load_format == "pt")
    every = arch.weights(cfg)
    plan = blueprint(arch, cfg, parts)
    conversion, names = conversion_of(arch, cfg, headers)
    rules = of_one_form(every, text_names(headers, names))
    targets: dict[str, Target] = {}
    if plan is not None:
        packed = any(rule.param not in ("", *PLAIN) for rule in rules)
        # the modules of the plan have unpacked weights, which rules for packed weights do not match
        plain = of_one_form(every, ()) if packed else rules
        targets = find_targets(plain, plan)
    roots = roots_of(targets)
    renamed = by_rules(headers, conversion)
    headers = {whole_name(name, targets, roots): header for name, header in renamed.items()}
    _check_layers(folder, cfg, rules, headers)
    _check_experts(folder, cfg, rules, headers)
    if plan is None:
        return Found()
    _check_shapes(folder, cfg, targets, headers)
    devices = 1 if parts.device == "cpu" else parts.shard.size  # the processes of a machine share its memory
    need = plan.bytes(quantized) // devices
    _check_memory(folder, plan, need, free)
    sources = sources_of(arch, cfg, plan, targets, headers) if read else None
    return Found(sources, names_of(arch, cfg, plan, targets))


def names_of(
    arch: ModelArch, cfg: Any, plan: Blueprint, targets: Mapping[str, Target]
) -> Mapping[str, Mapping[str, str]]:
    """Return the name of each part's weight in a checkpoint, or of the weight of all experts, by module and part."""
    found: dict[str, dict[str, str]] = {}
    for name, target in targets.items():
        if target.param != "weight":
            continue
        of_module = found.setdefault(target.module.name, {})
        stem = name.removesuffix(".weight")
        for e in range(target.experts or 1):
            for part in target.parts:
                of_module[part.replace("{e}", str(e))] = stem
    for head, own in own_names(arch, cfg, plan).items():
        found.setdefault(head.name, {})[head.part] = own
    return found


def sources_of(
    arch: ModelArch, cfg: Any, plan: Blueprint, targets: Mapping[str, Target], headers: Mapping[str, Header]
) -> Mapping[str, Mapping[str, PartSource]]:
    """Return module -> part -> tensors of the part in the headers.

    A tied head has the tensors of its own weight if the checkpoint has them.
    """
    stems: dict[str, list[tuple[str, str]]] = {}  # name of a tensor without its parameter -> modules and parts
    groups: dict[str, int] = {}
    for name, target in targets.items():
        stem = name.removesuffix(".weight")
        groups[stem] = target.groups
        if target.param == "weight" and not target.experts:
            stems[stem] = [(target.module.name, part) for part in target.parts]
    for head, own in own_names(arch, cfg, plan).items():
        stems[own] = [(head.name, head.part)]
    found: dict[str, dict[str, tuple[tuple[int, ...], str]]] = {}
    for name, header in headers.items():
        stem = name
        while stem and stem not in stems:
            stem = stem.rpartition(".")[0]
        if stem and stem != name:
            param = name[len(stem) + 1 :]
            found.setdefault(stem, {})[param] = (header.shape, header.dtype)
    made: dict[str, dict[str, PartSource]] = {}
    for stem, tensors in found.items():
        source = PartSource(stem, tensors, groups.get(stem, 1))
        for module, part in stems[stem]:
            made.setdefault(module, {})[part] = source
    return made


def _check_shapes(folder: str, cfg: Any, targets: Mapping[str, Target], headers: Mapping[str, Header]) -> None:
    # a quantized checkpoint may pack its matrices in any layout
    packed = bool(getattr(cfg, "quantization_config", None))
    for name, target in targets.items():
        if packed and not isinstance(target.module, (Embedding, LayerNorm, RMSNorm)):
            continue
        header = headers.get(name)
        if header is None or target.shape is None:
            continue  # a missing tensor may belong to another module, so the loader reports it
        if header.shape != target.shape:
            raise ModelError(_contradiction(folder, cfg, name, target.shape, header.shape))


def _contradiction(folder: str, cfg: Any, name: str, wanted: tuple[int, ...], has: tuple[int, ...]) -> str:
    """Return the message for a tensor whose shape in the checkpoint differs from the shape of its parameter."""
    fields: list[str] = []
    for want, have in zip(wanted, has, strict=False):
        if want != have:
            fields += _fields_of(cfg, want)
    keys = " or ".join(dict.fromkeys(fields))
    about = f"{keys}: " if keys else ""
    return (
        f"{folder}/config.json: {about}tensor {shown(name)} has shape {list(has)}, "
        f"expected {list(wanted)}; config.json and the weights do not belong together"
    )


def _fields_of(cfg: Any, size: int) -> list[str]:
    """Return the keys of config.json, with their values, whose value or product of values equals ``size``."""
    found = []
    for keys in (*KEYS, (expert_key(cfg),), ("moe_intermediate_size",), ("shared_expert_intermediate_size",)):
        values = {key: getattr(cfg, key, None) for key in keys}
        numbers = [value for value in values.values() if type(value) is int]
        if len(numbers) == len(keys) and math.prod(numbers) == size:
            factors = [f"{key}={value}" for key, value in values.items()]
            found.append(" x ".join(factors))
    return found


def _check_layers(folder: str, cfg: Any, rules: Sequence[Rule], headers: Mapping[str, Header]) -> None:
    """Raise ModelError if config.json has another number of layers than the checkpoint."""
    configured = getattr(cfg, "num_hidden_layers", None)
    # if layers differ, each layer has separate rules
    sources = {re.sub(r"\.\d+\.", ".{i}.", r.source) for r in rules if r.module}
    patterns = [re.compile(rule_pattern(s).pattern + r"\..+") for s in sorted(sources) if "{i}" in s]
    spare = [re.compile(rule_pattern(r.source).pattern + r"\..+") for r in rules if not r.module]
    layers: dict[int, str] = {}
    for name in headers:
        matches = (p.fullmatch(name) for p in patterns)
        match = next(filter(None, matches), None)
        if match is None or len(match["i"]) >= 10:
            continue
        if not any(p.fullmatch(name) for p in spare):
            layers.setdefault(int(match["i"]), name)
    if not layers or type(configured) is not int:
        return
    there = max(layers) + 1
    if configured > there:
        what = f"the checkpoint lacks layer {there} and what follows"
    elif configured < there:
        what = f"tensor {shown(layers[max(layers)])} has no place in this architecture"
    else:
        return
    raise ModelError(
        f"{folder}/config.json: num_hidden_layers={configured}: {what}; expected {there}, as the checkpoint has"
    )


def _check_experts(folder: str, cfg: Any, rules: Sequence[Rule], headers: Mapping[str, Header]) -> None:
    """Raise ModelError if config.json has another number of experts than the checkpoint has tensors for."""
    sources = {re.sub(r"\.\d+\.", ".{i}.", rule.source) for rule in rules if "{e}" in rule.source}
    if not sources:  # reading a missing attribute would convert a configuration to transformers' object
        return
    key = expert_key(cfg)
    configured = getattr(cfg, key, None)
    patterns = [re.compile(rule_pattern(source).pattern + r"\..+") for source in sorted(sources)]
    met = (pattern.fullmatch(name) for name in headers for pattern in patterns)
    experts = {int(match["e"]): match[0] for match in met if match and len(match["e"]) < 10}
    if not experts or type(configured) is not int:
        return
    last = max(experts)
    there = last + 1
    if configured != there:
        raise ModelError(
            f"{folder}/config.json: {key}={configured}: the checkpoint has experts 0 to {last}; expected {there} "
            f"(the last is of {shown(experts[last])})"
        )


def _check_memory(folder: str, plan: Blueprint, need: int, free: int) -> None:
    if need <= free:
        return

    def numbers(module: Module) -> int:
        return sum(tensor.numel() for tensor in module.tensors.values())

    largest = max(plan.modules.values(), key=numbers)
    shapes = ", ".join(str(list(tensor.shape)) for tensor in largest.tensors.values())
    needed = f"{need / 2**30:.1f} GiB"
    raise ResourceError(
        f"no memory for the model's weights: {folder}/config.json makes them {needed} (the largest, "
        f"{largest.name}, has shape {shapes}) and {free / 2**30:.1f} GiB are free; use a smaller model"
    )
