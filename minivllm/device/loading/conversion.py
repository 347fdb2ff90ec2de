"""Rename, convert and leave out tensors of a checkpoint, so that they fit the loading rules of an architecture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from minivllm.core.interfaces.model import Conversion, ModelArch

from .tensor_files import Header
from .tensor_names import TensorNames

DOWN = "down_proj"


class TextConversion(Conversion):
    """Conversion of the tensors of a text model inside a larger checkpoint, such as one with an image encoder.

    It leaves out the tensors of other models, transposes experts that are stored as [in, out], and then applies the
    conversion of the architecture.
    """

    def __init__(self, names: TensorNames, cfg: Any, inner: Conversion | None) -> None:
        self.names = names
        self.hidden = cfg.hidden_size
        self.inner = inner

    def name(self, source: str) -> str | None:
        new = self.names.of(source)
        return new if new is None or self.inner is None else self.inner.name(new)

    def header(self, source: str, header: Header) -> Header:
        """Return the header of a tensor with the shape after the conversion: experts [in, out] become [out, in]."""
        if not self._turns(source, header.shape):
            return header
        experts, inputs, outputs = header.shape
        return replace(header, shape=(experts, outputs, inputs))

    def tensors(self, found: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        mine = self._mine(found)
        return mine if self.inner is None else self.inner.tensors(mine)

    def _mine(self, found: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for source, tensor in found:
            name = self.names.of(source)
            if name is None:
                continue
            if self._turns(source, tuple(tensor.shape)):
                tensor = tensor.transpose(1, 2)
            yield name, tensor

    def _turns(self, source: str, shape: tuple[int, ...]) -> bool:
        """Return whether a tensor of all experts is stored as [in, out], which is the case if its shape is not [out,
        in]."""
        if len(shape) != 3 or not source.endswith(self.names.turned or ("\0",)):
            return False
        return shape[1 if source.endswith(DOWN) else 2] != self.hidden


def conversion_of(arch: ModelArch, cfg: Any, headers: Mapping[str, Header]) -> tuple[Conversion | None, TensorNames]:
    """Return the conversion of a checkpoint with the tensors ``headers``, and the mapping of their names.

    The conversion is None if the files already have the names and forms that the architecture's rules expect.
    """
    names = TensorNames(headers, arch.weights(cfg), cfg)
    inner = arch.conversion(cfg)
    if names.changes:
        return TextConversion(names, cfg, inner), names
    return inner, names


def by_rules(headers: Mapping[str, Header], conversion: Conversion | None) -> Mapping[str, Header]:
    """Return the headers under the names that the rules of the architecture use.

    Headers of tensors that are left out or converted to others are missing.
    """
    if conversion is None:
        return headers
    found: dict[str, Header] = {}
    for source, header in headers.items():
        name = conversion.name(source)
        if name is None:
            continue
        if isinstance(conversion, TextConversion):
            header = conversion.header(source, header)
        found[name] = header
    return found


def text_names(headers: Mapping[str, Header], names: TensorNames) -> list[str]:
    """Return the names that tensors have in the text model, before the architecture's own conversion."""
    return [new for name in headers if (new := names.of(name)) is not None]
