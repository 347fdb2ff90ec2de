"""Quantizers of floating-point weights, with the choice of modules and of the form of each part.

options   skip ─► unquantized;  bits ─► another quantizer of these;  neither ─► this quantizer
parts     consecutive parts of one matrix (q, k, v) with the same quantizer are one product
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from minivllm.core.interfaces.quantizer import ModuleInfo, Quantizer, WeightScheme
from minivllm.device.layers.linear import CAPTURED, Dense, no_adapter
from minivllm.errors import OptionError

from .none import refuse_quantized
from .options import WeightOnlyOptions
from .rules import NamePatterns, names_of

UNQUANTIZED = "none"
NAMED = {4: "int4", 8: "int8", 16: UNQUANTIZED}  # number of bits -> name of the quantizer
MADE_BY = {
    "fp8": "eight:Fp8", "fp8-weight": "eight:Fp8WeightOnly", "int4": "int4:Int4", "int8": "int8:Int8",
    "int8-w8a8": "eight:Int8W8A8", "llm-int8": "eight:LlmInt8", "nf4": "nf4:Nf4",
}  # fmt: skip
FLOAT8 = ("fp8", "fp8-weight")
FLOAT8_LEAST = (8, 9)  # compute capability


class OnlineQuantizer(Quantizer):
    """A quantizer that quantizes weights while they are loaded.

    It quantizes linear layers and experts, and optionally the head and the embedding.  Modules that ``skip`` names stay
    unquantized.  Patterns of ``bits`` give modules another number of bits.  Routers stay unquantized, because their few
    numbers have a large effect.
    """

    name = ""
    options: WeightOnlyOptions
    options_type: type[WeightOnlyOptions] = WeightOnlyOptions

    def __init__(self, options: WeightOnlyOptions | None = None, checkpoint: Mapping[str, Any] | None = None) -> None:
        own_options = options or self.options_type()
        super().__init__(own_options, checkpoint)
        refuse_quantized(checkpoint, self.name)
        self._skip = NamePatterns("skip", own_options.skip)
        self._bits = NamePatterns("bits", own_options.bits)
        self._others: dict[str, OnlineQuantizer] = {}
        self._met_embedding = False

    @abstractmethod
    def made(self, m: ModuleInfo) -> WeightScheme:
        """Return the quantized weight of a module.  Raise OptionError if its sizes do not suit the options."""

    def scheme(self, m: ModuleInfo) -> WeightScheme | None:
        self._met_embedding |= m.kind == "embedding"
        wanted = {part: self._wanted(m, part) for part, _ in m.parts}
        kinds = sorted(set(wanted.values()))
        if len(kinds) == 1:
            kind = kinds[0]
            return None if kind == UNQUANTIZED else self._of(kind, m, kind)
        if m.kind == "experts":
            raise OptionError(
                f"{self.name}: {m.name} is {' and '.join(kinds)} by part: experts of a layer have one weight; expected "
                f"patterns of skip and bits that name all of it, such as {m.name!r}"
            )
        runs: list[tuple[ModuleInfo, WeightScheme]] = []
        for kind, some in groupby(m.parts, key=lambda part: wanted[part[0]]):
            info = replace(m, parts=tuple(some))
            scheme = Dense(info) if kind == UNQUANTIZED else self._of(kind, info)
            runs.append((info, scheme))
        split = SplitWeight(m, runs)
        rules = []
        for kind in kinds:
            parts = [part for part in wanted if wanted[part] == kind]
            rules.append(f"{kind} ({', '.join(parts)})")
        split.rule = " and ".join(rules)
        return split

    def _wanted(self, m: ModuleInfo, part: str) -> str:
        """Return the name of the quantizer for a part of a module; "none" leaves it unquantized."""
        names = names_of(m, part)
        left_out = self._skip.naming(*names)
        if not self._takes(m):
            return UNQUANTIZED
        found = self._bits.naming(*names)
        if left_out:
            return UNQUANTIZED
        options: int | str = self.options.bits[found[0]] if found else self.name
        return NAMED[options] if isinstance(options, int) else options

    def _takes(self, m: ModuleInfo) -> bool:
        """Return whether the quantizer may quantize a module of this kind."""
        if m.kind == "lm_head":
            return self.options.lm_head
        if m.kind == "embedding":
            return self.options.embedding
        return m.kind in ("linear", "experts")

    def _of(self, kind: str, m: ModuleInfo, rule: str = "") -> WeightScheme:
        """Return the quantized weight of a module, made by the quantizer ``kind``.

        ``rule`` describes the choice if the module has another quantizer than this one.
        """
        if kind == self.name:
            return self.made(m)
        if kind in FLOAT8 and m.device.startswith("cuda"):
            capability = torch.cuda.get_device_capability(m.device)
            if capability < FLOAT8_LEAST:
                have = ".".join(map(str, capability))
                raise OptionError(
                    f"{self.name}: bits: {m.name} has {kind}, but this GPU has no float8 (compute capability {have}, "
                    "expected 8.9 or more); use 'int8'"
                )
        if kind not in self._others:
            module, _, name = MADE_BY[kind].partition(":")
            quantizer = getattr(import_module(f".{module}", __package__), name)
            self._others[kind] = quantizer()
        scheme = self._others[kind].made(m)
        scheme.rule = rule  # type: ignore[attr-defined]
        return scheme

    def finish(self) -> None:
        self._skip.refuse_unused(self.name)
        expected = "module that is quantized"
        unset = [f"{name}=true" for name in ("lm_head", "embedding") if not getattr(self.options, name)]
        if unset:
            expected += f" (more are with {' and '.join(unset)})"
        self._bits.refuse_unused(self.name, expected)
        if self.options.embedding and not self._met_embedding:
            raise OptionError(
                f"{self.name}: embedding=true: transformers looks up the tokens of this model; set embedding=false"
            )


class SplitWeight(WeightScheme):
    """A matrix whose parts (such as q, k and v) are quantized differently.

    Neighbouring parts that are quantized alike form a run, which is one product.

    The names of ``tensors`` begin with the first part of a run, such as "q.weight".
    """

    rule = ""  # the quantizer of each part, as text for the user

    def __init__(self, info: ModuleInfo, runs: Sequence[tuple[ModuleInfo, WeightScheme]]) -> None:
        self.info = info
        self.runs = runs
        self.schemes = [scheme for _, scheme in runs]
        self._of = {part: scheme for one, scheme in runs for part, _ in one.parts}
        self._name()

    def _name(self) -> None:
        """Fill ``tensors`` with the tensors of all schemes in ``runs``, named by the first part of each run."""
        self.tensors = {}
        for info, scheme in self.runs:
            first = info.parts[0][0]
            for name, tensor in scheme.tensors.items():
                self.tensors[f"{first}.{name}"] = tensor

    def params(self) -> dict[str, tuple[int, ...]]:
        return {"weight": (self.info.out_features, self.info.in_features)}

    def load(self, param: str, tensor: Tensor, part: str) -> None:
        self._of[part].load(param, tensor, part)

    def finish(self) -> None:
        for one in self.schemes:
            one.finish()
        self._name()

    def apply(self, x: Tensor, out: Tensor | None = None, adapter: Any = None) -> Tensor:
        no_adapter(self, adapter)
        y = x.new_empty(len(x), self.info.out_features) if out is None else out
        start = 0
        for info, scheme in self.runs:
            stop = start + info.out_features
            y[:, start:stop] = scheme.apply(x)
            start = stop
        return y

    def served(self, device: str, sm: int) -> Mapping[str, str]:
        kernels = {}
        for info, scheme in self.runs:
            first = info.parts[0][0]
            for rows, kernel in scheme.served(device, sm).items():
                if rows != CAPTURED:
                    kernels[f"{rows} of {first}"] = kernel
        return kernels
